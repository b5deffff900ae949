"""The bound of a step over arrays of candidates: what `estimate(plan, mode="bound")` gives for each, at millions of candidates in a few seconds.

A candidate is a layout, a local batch, an accumulation, a batching policy, a transport and an execution mode; model, workload, cluster, options per
region and calibration are those of a template plan. The bound of a graph (`costmodel.simulate.bound`) is a longest path plus what
collectives take from
compute phase by phase. Both come apart at the ends of phases, where one chain has waited for everything before it. There the state of a step is

    d   when the device's chain is free      h   when the host is free      L   least end of the phase, contention counted

and a phase maps it by sums and maxima alone: with D its device time, H its launch time and V its end when only launches hold it back,

    d' = max(d + D, h + V)     h' = h + H     L' = max(d', L + compute + sum of share x seconds of its collectives)

A phase's numbers depend on few columns, so they are made once for each combination that occurs, and spread by index:

    blocks   (local batch, policy, ranks)                         forward, backward, recomputation of every distinct block
    moves    (fsdp, ddp, transport)                               gathers, reductions, optimizer
    dense    blocks x moves x (reshard, execution)                the recurrences of `costmodel.lower` over all blocks, as arrays
    sparse   (blocks) x (sparse layout, accumulation, transport)  the chains of exchange, lookup and update

The last micro-batch also reduces gradients: its reductions run beside the sparse phase, hold back exchanges on their tier, and end before AdamW.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from costmodel.calibration import Calibration
from costmodel.comms import GroupShape, Network, network
from costmodel.contention import RATE_FLOOR
from costmodel.imbalance import slowest_rank
from costmodel.lower import Factors, Pricer, _Builder, _Unit, batch_shape, needs_fsdp, pricer
from costmodel.ops import BACKWARD, FORWARD, op
from costmodel.plan import Layout, Plan
from costmodel.sparse import TableLoads, table_loads
from costmodel.stepgraph import COMPUTE, HOST, Task, tier_stream

LAYOUT_COLUMNS = ("ddp", "fsdp", "ep", "sparse_group", "sparse_replicas", "fully_sharded_2d", "sync_every", "reshard_after_forward")
COLUMNS = (*LAYOUT_COLUMNS, "local_batch", "accumulation", "batching", "transport", "execution")
_NEVER = -1e30
# Streams whose collectives may run at once: each is charged its even part of what the rate floor leaves (see `simulate.bound`); 1, 2, 3 or 4 of them.
_CAPS = np.array([(1.0 - RATE_FLOOR) / n for n in (1, 2, 3, 4)])
_CHUNK = 1 << 14
_NOTHING = Task(name="", stream=COMPUTE, seconds=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Arrays `(n,)` of one phase: D, V, H as above, `compute` seconds, and `taken` `(n, 4)` by how many streams share the rate floor."""

    D: np.ndarray
    V: np.ndarray
    H: np.ndarray
    compute: np.ndarray
    taken: np.ndarray

    def at(self, index: np.ndarray, cap: np.ndarray) -> _At:
        return _At(D=self.D[index], V=self.V[index], H=self.H[index], W=self.compute[index] + self.taken[index, cap])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _At:
    """A phase spread over candidates; W = compute + taken."""

    D: np.ndarray
    V: np.ndarray
    H: np.ndarray
    W: np.ndarray

    def after(self, d: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.maximum(d + self.D, h + self.V), h + self.H

    def sliced(self, part: slice) -> _At:
        return _At(D=self.D[part], V=self.V[part], H=self.H[part], W=self.W[part])


class BatchBound:
    """Bounds of candidates around a template plan.

    batchings, transports, executions: what the codes in those columns mean. loads: what ranks hold and serve, from a plan and events by sequence
    (default: the template's own placements, which must then fit every sparse group, as `row_wise` over all ranks does).
    """

    def __init__(self, template: Plan, calibration: Calibration | None, *, batchings: Sequence[str], transports: Sequence[str],
                 executions: Sequence[str], loads: Callable[[Plan, dict[str, float]], TableLoads] = table_loads) -> None:
        if template.exchange != "rows":
            raise ValueError(f"candidates: exchange {template.exchange!r} is not searched, only rows")
        self.template, self.calibration, self.loads = template, calibration, loads
        self.codes = {"batching": tuple(batchings), "transport": tuple(transports), "execution": tuple(executions)}
        self.gpu = template.cluster.device.kind == "gpu"
        self.records: dict[tuple[Any, ...], _Recorder] = {}
        self.factors: dict[tuple[str, int, int], tuple[dict[str, Factors], float]] = {}

    def seconds(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """`(n,)` bounds [s]. Raises ValueError for a missing or unequal column, or a candidate that does not fit the cluster."""
        columns = _checked(columns)
        return _Evaluation(self, columns).seconds()

    def plan(self, columns: Mapping[str, np.ndarray], i: int) -> Plan:
        """Candidate i as a plan: what `estimate` takes."""
        layout = {name: columns[name][i].item() for name in LAYOUT_COLUMNS}
        layout["fully_sharded_2d"], layout["reshard_after_forward"] = bool(layout["fully_sharded_2d"]), bool(layout["reshard_after_forward"])
        coded: dict[str, Any] = {name: meaning[int(columns[name][i])] for name, meaning in self.codes.items()}
        return dataclasses.replace(self.template, layout=Layout(**layout), local_batch=int(columns["local_batch"][i]),
                                   accumulation=int(columns["accumulation"][i]), **coded)


def _checked(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise ValueError(f"candidates: columns {', '.join(missing)} are missing")
    found = {name: np.asarray(columns[name]).astype(np.int64, copy=False) for name in COLUMNS}
    sizes = {name: len(values) for name, values in found.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"candidates: columns differ in length: {sizes}")
    if sizes["ddp"] == 0:
        raise ValueError("candidates: none given")
    return found


class _Keys:
    """Distinct combinations of columns: `of` `(n,)` which one each candidate has, `first` a candidate of each."""

    def __init__(self, *parts: np.ndarray) -> None:
        code, size = np.zeros(len(parts[0]), dtype=np.int64), 1
        for part in parts:
            ranks, count = _ranks(part)
            if size * count > 1 << 24:
                code, size = _ranks(code)
            code, size = code * count + ranks, size * count
        self.of, self.count = _ranks(code)
        self.first = np.empty(self.count, dtype=np.int64)
        self.first[self.of[::-1]] = np.arange(len(self.of) - 1, -1, -1)


def _ranks(values: np.ndarray) -> tuple[np.ndarray, int]:
    """(rank of each value among the distinct ones, how many these are); a table look-up where the values are small."""
    low, high = int(values.min()), int(values.max())
    if high - low < 1 << 24:
        seen = np.zeros(high - low + 1, dtype=bool)
        seen[values - low] = True
        rank = np.cumsum(seen) - 1
        return rank[values - low], int(rank[-1]) + 1
    distinct, which = np.unique(values, return_inverse=True)
    return which, len(distinct)


# --- chains of tasks as phases ---

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One task of a chain for every sparse key `(keys,)`: seconds, eager launch seconds, share taken of compute, tier (0: the compute stream)."""

    seconds: np.ndarray
    launch: np.ndarray
    share: np.ndarray
    tier: np.ndarray

    @property
    def compute(self) -> np.ndarray:
        return np.where(self.tier == 0, self.seconds, 0.0)

    @property
    def taken(self) -> np.ndarray:
        """`(keys, 4)`."""
        return np.minimum(self.share[:, None], _CAPS) * self.seconds[:, None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Chains:
    """Chains of tasks that wait for one another in order, `(n,)`; V and H `(n, modes)` by execution mode, whose launches are `modes` times
    eager ones."""

    D: np.ndarray
    V: np.ndarray
    H: np.ndarray
    compute: np.ndarray
    taken: np.ndarray

    @classmethod
    def of(cls, slots: Sequence[_Slot], modes: np.ndarray) -> _Chains:
        n = len(slots[0].seconds)
        host, end = np.zeros((n, len(modes))), np.full((n, len(modes)), _NEVER)
        for slot in slots:
            # an empty slot is no task: nothing of it waits for a launch
            there = (slot.seconds > 0) | (slot.launch > 0)
            host = host + slot.launch[:, None] * modes
            end = np.where(there[:, None], np.maximum(end, host) + slot.seconds[:, None], end)
        return cls(D=np.sum([s.seconds for s in slots], axis=0), V=end, H=host, compute=np.sum([s.compute for s in slots], axis=0),
                   taken=np.sum([s.taken for s in slots], axis=0))

    def at(self, index: np.ndarray, mode: np.ndarray, cap: np.ndarray) -> _At:
        return _At(D=self.D[index], V=self.V[index, mode], H=self.H[index, mode], W=self.compute[index] + self.taken[index, cap])


class _Evaluation:
    """One call: keys, tables, then candidates in chunks."""

    def __init__(self, owner: BatchBound, columns: dict[str, np.ndarray]) -> None:
        self.owner, self.columns = owner, columns
        c = columns
        self.ranks = c["ddp"] * c["fsdp"]
        widest = int(self.ranks.max())
        if widest > owner.template.cluster.num_ranks:
            cluster = owner.template.cluster
            raise ValueError(f"candidates: a layout needs {widest} ranks, cluster {cluster.name} has {cluster.num_ranks}")
        uneven = np.flatnonzero(c["sparse_group"] * c["sparse_replicas"] != self.ranks)
        if len(uneven):
            raise ValueError(f"candidates: candidate {int(uneven[0])}: sparse_group x sparse_replicas is not ddp x fsdp")
        self.blocks = _Keys(c["local_batch"], c["batching"], self.ranks)
        self.moves = _Keys(c["fsdp"], c["ddp"], c["transport"])
        self.dense = _Keys(self.blocks.of, self.moves.of, c["reshard_after_forward"], c["execution"])
        self.sparse = _Keys(self.blocks.of, c["accumulation"], c["sparse_group"], c["sparse_replicas"], c["fully_sharded_2d"], c["sync_every"],
                            c["transport"])
        self.tiers: dict[str, int] = {"": 0}
        # launches of each execution mode over eager ones
        self.modes = np.array([pricer(dataclasses.replace(owner.template, execution=name), owner.calibration)._launch(1.0)
                               for name in owner.codes["execution"]])

    def seconds(self) -> np.ndarray:
        blocks, slow = _block_table(self)
        dense = _dense_table(self, blocks, _move_table(self))
        sparse = _sparse_table(self)
        out = np.empty(len(self.ranks))
        # candidates with equal accumulation side by side, so that a chunk runs as many micro-batches as it needs
        order = np.argsort(self.columns["accumulation"], kind="stable")
        for begin in range(0, len(order), _CHUNK):
            part = order[begin:begin + _CHUNK]
            out[part] = _combine(self, part, dense, sparse) * slow[self.blocks.of[part]]
        return out

    def plan(self, i: int) -> Plan:
        return self.owner.plan(self.columns, int(i))

    def builder(self, plan: Plan) -> _Builder:
        """The lowering's own builder: tasks are made there, and only there."""
        batch = batch_shape(plan, self.factors(plan))
        shared = self.pricer(plan)
        shared.keep(batch)
        empty = TableLoads(weights=np.zeros(1), state=np.zeros(1), host_weights=np.zeros(1), served=np.zeros(1), held={})
        return _Builder(plan, shared, self.network(plan.transport), batch, empty)

    def pricer(self, plan: Plan) -> Pricer:
        return pricer(plan, self.owner.calibration)

    def network(self, transport: str) -> Network:
        return network(self.owner.template.cluster, self.owner.calibration, transport)

    def factors(self, plan: Plan) -> dict[str, Factors]:
        return self.slowest(plan)[0]

    def slowest(self, plan: Plan) -> tuple[dict[str, Factors], float]:
        """(the slowest rank's factors by sequence, the slowest node's factor)."""
        key, kept = (plan.batching, plan.local_batch, plan.layout.world_size), self.owner.factors
        if key not in kept:
            found = slowest_rank(plan)
            kept[key] = ({name: Factors(tokens=f.tokens, pairs=f.pairs) for name, f in found.sequences.items()}, found.slow_node)
        return kept[key]

    def tier(self, name: str) -> int:
        return self.tiers.setdefault(name, len(self.tiers))


# --- tables ---

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Distinct units and which of them each block of the model is; `(keys, units)` seconds and eager launch seconds; loss `(keys, 4)`: forward,
    backward, and the launches of each."""

    units: tuple[_Unit, ...]
    place: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    again: np.ndarray
    launch: np.ndarray
    loss: np.ndarray
    wrapped: np.ndarray


def _block_table(run: _Evaluation) -> tuple[_Blocks, np.ndarray]:
    """The blocks of every block key, and the slow node's factor of each."""
    rows, losses, wrapped, slow = [], [], [], []
    units: tuple[_Unit, ...] = ()
    place = np.zeros(0, dtype=np.int64)
    for i in run.blocks.first:
        plan = dataclasses.replace(run.plan(i), execution="eager")
        made = run.builder(plan)
        distinct = {(u.region.name, u.precision, u.checkpoint): u for u in made.units}
        units, names = tuple(distinct.values()), list(distinct)
        place = np.array([names.index((u.region.name, u.precision, u.checkpoint)) for u in made.units])
        row = []
        for unit in units:
            block = unit.region.block
            costs = [made.pricer.block(block, made.batch, unit.precision, FORWARD), made.pricer.block(block, made.batch, unit.precision, BACKWARD),
                     made.pricer.recompute(block, made.batch, unit.precision, unit.checkpoint)]
            row.append([c.seconds for c in costs] + [c.host_seconds for c in costs])
        rows.append(row)
        bce = [made.pricer.ops([op("bce", m=made.batch.samples * len(plan.model.heads))], phase) for phase in (FORWARD, BACKWARD)]
        losses.append([c.seconds for c in bce] + [c.host_seconds for c in bce])
        wrapped.append(needs_fsdp(plan))
        slow.append(run.slowest(plan)[1])
    table = np.array(rows)
    return _Blocks(units=units, place=place, forward=table[:, :, 0], backward=table[:, :, 1], again=table[:, :, 2], launch=table[:, :, 3:],
                   loss=np.array(losses), wrapped=np.array(wrapped)), np.array(slow)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """By move key and distinct unit `(keys, units)`: seconds and shares of gather, scatter, all-reduce; seconds and launches of unshard and pack;
    tiers `(keys, 2)` of fsdp and ddp; optimizer `(keys, 3)`: AdamW's seconds, its launch, seconds after it."""

    gather: np.ndarray
    scatter: np.ndarray
    summed: np.ndarray
    shares: np.ndarray
    copies: np.ndarray
    tiers: np.ndarray
    optimizer: np.ndarray


def _move_table(run: _Evaluation) -> _Moves:
    rows, tiers, optimizers = [], [], []
    for i in run.moves.first:
        made = run.builder(dataclasses.replace(run.plan(i), execution="eager"))
        distinct = {(u.region.name, u.precision, u.checkpoint): u for u in made.units}
        row, names = [], ["", ""]
        for unit in distinct.values():
            found: dict[str, Task] = {}
            if made.wrapped:
                made.last, begin = None, len(made.tasks)
                made.unshard(unit, made.gather(unit, None), "forward")
                made.reduce(unit, None, None)
                found = {t.name.removesuffix(unit.region.name).strip(): t for t in made.tasks[begin:]}
            moves = [found.get(name, _NOTHING) for name in ("gather", "reduce", "all-reduce", "unshard", "pack gradients")]
            row.append([t.seconds for t in moves] + [t.sm_fraction for t in moves[:3]] + [t.host_seconds for t in moves[3:]])
            names[0] = moves[0].stream if moves[0].stream != COMPUTE else names[0]
            names[1] = moves[2].stream if moves[2].stream != COMPUTE else names[1]
        made.last, begin = None, len(made.tasks)
        made.optimizer([])
        adamw, rest = made.tasks[begin:]
        rows.append(row)
        tiers.append([run.tier(n) for n in names])
        optimizers.append([adamw.seconds, adamw.host_seconds, rest.seconds])
    table = np.array(rows)
    return _Moves(gather=table[:, :, 0], scatter=table[:, :, 1], summed=table[:, :, 2], copies=table[:, :, [3, 4, 8, 9]], shares=table[:, :, 5:8],
                  tiers=np.array(tiers), optimizer=np.array(optimizers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Dense:
    """By dense key: phases forward and backward without and with reductions; ends of the last scatter and all-reduce `(keys, 2)` after device (0)
    and launches (1) alone; left `(keys, 3, 4)`: what reductions that outlive backward take, the first block's scatter, its all-reduce, other
    all-reduces; tiers of fsdp and ddp `(keys, 2)`, whether their collectives take from compute; optimizer as in `_Moves`."""

    forward: Phase
    backward: Phase
    last: Phase
    scattered: np.ndarray
    summed: np.ndarray
    left: np.ndarray
    tiers: np.ndarray
    lossy: np.ndarray
    optimizer: np.ndarray


def _dense_table(run: _Evaluation, blocks: _Blocks, moves: _Moves) -> _Dense:
    first = run.dense.first
    b, m = run.blocks.of[first], run.moves.of[first]
    parts = _DenseParts(blocks=blocks, moves=moves, b=b, m=m, again=run.columns["reshard_after_forward"][first].astype(bool),
                        launch=run.modes[run.columns["execution"][first]], scatters=run.columns["fsdp"][first] > 1,
                        sums=run.columns["ddp"][first] > 1, gpu=run.owner.gpu)
    return parts.table()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DenseParts:
    """The recurrences over blocks, for all dense keys at once. State arrays are `(2, keys)`: device alone and launches alone."""

    blocks: _Blocks
    moves: _Moves
    b: np.ndarray
    m: np.ndarray
    again: np.ndarray
    launch: np.ndarray
    scatters: np.ndarray
    sums: np.ndarray
    gpu: bool

    def table(self) -> _Dense:
        forward = self._forward()
        backward, *_ = self._backward(reduce=False)
        last, scattered, summed, left = self._backward(reduce=True)
        tiers = self.moves.tiers[self.m]
        shares = self.moves.shares[self.m]
        lossy = np.stack([self.scatters & ((shares[:, :, :2] > 0).any(axis=(1, 2))), self.sums & (shares[:, :, 2] > 0).any(axis=1)], axis=1)
        optimizer = self.moves.optimizer[self.m].copy()
        optimizer[:, 1] *= self.launch
        return _Dense(forward=forward, backward=backward, last=last, scattered=scattered, summed=summed, left=left,
                      tiers=tiers, lossy=lossy, optimizer=optimizer)

    def _unit(self, u: int) -> dict[str, np.ndarray]:
        """Everything of distinct unit u, `(keys,)` each."""
        blocks, moves, b, m = self.blocks, self.moves, self.b, self.m
        launch, copies = blocks.launch[b, u] * self.launch[:, None], moves.copies[m, u]
        return {"forward": blocks.forward[b, u], "backward": blocks.backward[b, u], "again": blocks.again[b, u], "forward host": launch[:, 0],
                "backward host": launch[:, 1], "again host": launch[:, 2], "gather": moves.gather[m, u], "scatter": moves.scatter[m, u],
                "summed": moves.summed[m, u], "unshard": copies[:, 0], "pack": copies[:, 1], "unshard host": copies[:, 2] * self.launch,
                "pack host": copies[:, 3] * self.launch, "share gather": moves.shares[m, u, 0], "share scatter": moves.shares[m, u, 1],
                "share summed": moves.shares[m, u, 2], "count": np.float64((blocks.place == u).sum())}

    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        """(d, h) of the two passes: device free at 0 and launches never in the way, and the other way round."""
        n = len(self.b)
        return np.stack([np.zeros(n), np.full(n, _NEVER)]), np.stack([np.full(n, _NEVER), np.zeros(n)])

    @functools.cached_property
    def _distinct(self) -> dict[int, dict[str, np.ndarray]]:
        return {int(u): self._unit(int(u)) for u in np.unique(self.blocks.place)}

    def _units(self) -> list[dict[str, np.ndarray]]:
        return [self._distinct[int(u)] for u in self.blocks.place]

    def _chained(self, times: np.ndarray) -> Phase:
        """A phase of a CPU, whose one thread issues each collective and waits for it: a sum."""
        zero = np.zeros(len(times))
        return Phase(D=times, V=zero + _NEVER, H=zero, compute=zero, taken=np.zeros((len(times), len(_CAPS))))

    def _forward(self) -> Phase:
        loss = self.blocks.loss[self.b]
        wrapped = self.blocks.wrapped[self.b]
        if not self.gpu:
            each = (u["forward"] + wrapped * (u["unshard"] + u["gather"] * self.scatters) for u in self._units())
            return self._chained(sum(each, loss[:, 0]))
        d, h = self._start()
        begun, tier = d, d
        compute, taken, device = np.zeros(len(self.b)), self._taken("gather", self.scatters), d
        for unit in self._units():
            device = d
            # gather: behind the block before the last one, on its tier; without fsdp nothing is gathered
            tier = np.where(self.scatters, np.maximum(np.maximum(tier, begun), h) + unit["gather"], _NEVER)
            h = h + unit["unshard host"]
            d = np.where(wrapped, np.maximum(np.maximum(d, h), tier) + unit["unshard"], d)
            h = h + unit["forward host"]
            d = np.maximum(d, h) + unit["forward"]
            begun = device
            compute = compute + unit["unshard"] + unit["forward"]
        h = h + loss[:, 2] * self.launch
        d = np.maximum(d, h) + loss[:, 0]
        return Phase(D=d[0], V=d[1], H=h[1], compute=compute + loss[:, 0], taken=taken)

    def _backward(self, *, reduce: bool) -> tuple[Phase, np.ndarray, np.ndarray, np.ndarray]:
        d, h = self._start()
        n = len(self.b)
        compute, left = np.zeros(n), np.zeros((n, 3, len(_CAPS)))
        wrapped = self.blocks.wrapped[self.b]
        regathers, scatters, sums = self.again & self.scatters & wrapped, self.scatters & wrapped & reduce, self.sums & wrapped & reduce
        copies = self.again & wrapped
        one_tier = (self.moves.tiers[self.m, 0] == self.moves.tiers[self.m, 1]) & self.scatters & self.sums
        units = self._units()[::-1]
        if not self.gpu:
            each = (u["again"] + u["backward"] + copies * u["unshard"] + regathers * u["gather"] + scatters * u["scatter"] + sums * u["summed"]
                    + (wrapped & reduce) * u["pack"] for u in units)
            never = np.full((n, 2), _NEVER)
            return self._chained(sum(each, self.blocks.loss[self.b][:, 1])), never, never, left
        taken = self._taken("gather", regathers)
        if reduce:
            # a reduction is felt within backward when a later pack waits for it: a scatter by the next one, an all-reduce by the one after that. The
            # rest outlives backward: of the first block both, of the second the all-reduce, without scatters every all-reduce.
            first, second = units[-1], units[-2:-1]
            left[:, 0], left[:, 1] = self._taken_by(first, "scatter", scatters), self._taken_by(first, "summed", sums)
            near = sum((self._taken_by(u, "summed", sums) for u in second), np.zeros((n, len(_CAPS))))
            total = self._taken("summed", sums)
            left[:, 2] = np.where(scatters[:, None], near, total - left[:, 1])
            taken = taken + self._taken("scatter", scatters) - left[:, 0] + total - left[:, 1] - left[:, 2]
        tier = d  # of fsdp; that of ddp while it is another
        other = d
        scattered, reduced, summed = (np.full((2, n), _NEVER) for _ in range(3))
        loss = self.blocks.loss[self.b]
        h = h + loss[:, 3] * self.launch
        tier = np.where(regathers, np.maximum(tier, h) + units[0]["gather"], tier)
        gathered = np.where(regathers, tier, _NEVER)
        d = np.maximum(d, h) + loss[:, 1]
        compute = compute + loss[:, 1]
        for at, unit in enumerate(units):
            start = d
            h = h + np.where(copies, unit["unshard host"], 0.0)
            d = np.where(copies, np.maximum(np.maximum(d, h), gathered) + unit["unshard"], d)
            if at + 1 < len(units):
                following = units[at + 1]
                tier = np.where(regathers, np.maximum(np.maximum(tier, start), h) + following["gather"], tier)
                gathered = np.where(regathers, tier, _NEVER)
            h = h + unit["again host"]
            d = np.where(unit["again"] > 0, np.maximum(d, h) + unit["again"], d)
            h = h + unit["backward host"]
            d = np.maximum(d, h) + unit["backward"]
            compute = compute + np.where(copies, unit["unshard"], 0.0) + unit["again"] + unit["backward"]
            if not reduce:
                continue
            h = h + np.where(wrapped, unit["pack host"], 0.0)
            d = np.where(wrapped, np.maximum(np.maximum(d, h), scattered) + unit["pack"], d)
            compute = compute + np.where(wrapped, unit["pack"], 0.0)
            end = np.maximum(np.maximum(np.maximum(d, reduced), tier), h) + unit["scatter"]
            scattered = np.where(scatters, end, scattered)
            tier = np.where(scatters, end, tier)
            free = np.where(one_tier, tier, other)
            end = np.maximum(np.maximum(np.maximum(d, np.where(scatters, scattered, _NEVER)), free), h) + unit["summed"]
            summed = np.where(sums, end, summed)
            other = np.where(sums, end, other)
            tier = np.where(one_tier & sums, end, tier)
            reduced = np.where(sums, summed, scattered)
        return Phase(D=d[0], V=d[1], H=h[1], compute=compute, taken=taken), scattered.T, summed.T, left

    def _taken_by(self, unit: dict[str, np.ndarray], name: str, present: np.ndarray) -> np.ndarray:
        """`(keys, 4)` seconds that one block's collective takes of compute, where it is `present`."""
        return np.where(present[:, None], np.minimum(unit[f"share {name}"][:, None], _CAPS) * unit[name][:, None], 0.0)

    def _taken(self, name: str, present: np.ndarray) -> np.ndarray:
        """The same of all blocks."""
        return sum((u["count"] * self._taken_by(u, name, present) for u in self._distinct.values()), np.zeros((len(self.b), len(_CAPS))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sparse:
    """By sparse key: copy of the input [s]; the chains before the splits are read and after (`synced`: whether they are); behind backward,
    by `_TAIL`:
    seconds, eager launch seconds `(keys, 5)` and what is taken of compute `(keys, 5, 4)`; tiers `(keys, 2)` of exchange and replicas, and whether
    their collectives take from compute."""

    copy: np.ndarray
    before: _Chains
    after: _Chains
    synced: np.ndarray
    tail: np.ndarray
    launch: np.ndarray
    taken: np.ndarray
    tiers: np.ndarray
    lossy: np.ndarray


_TAIL = ("gather gradients", "gradients", "tables gather backward", "update", "average")
_GATHER, _EXCHANGE, _TABLES, _UPDATE, _AVERAGE = range(5)
_BEFORE = ("input", "tables gather forward", "unique ids", "counts")
_AFTER = ("ids", "lookup", "embeddings", "spread")
_ONE_NAME = {"tables average": "average", "tables scatter": "average"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A collective as the lowering asks for it, before a transport and a group size price it."""

    kind: str
    num_bytes: float
    replicas: bool
    max_over_mean: float


class _Recorder(_Builder):
    """The lowering's builder, which writes down collectives instead of pricing them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: dict[str, _Asked] = {}
        self.found: dict[str, Task] = {}
        self.synced = False

    def add(self, task: Task) -> int:
        self.found[_ONE_NAME.get(task.name, task.name)] = task
        self.synced = self.synced or task.stream == HOST
        return super().add(task)

    def collective(self, name: str, kind: str, num_bytes: float, group: GroupShape, *, max_over_mean: float = 1.0, **_: object) -> int | None:
        self.asked[_ONE_NAME.get(name, name)] = _Asked(kind=kind, num_bytes=num_bytes, replicas=group is self.groups["sparse_replicas"],
                                                       max_over_mean=max_over_mean)
        return self.last


def _sparse_table(run: _Evaluation) -> _Sparse:
    c, first = run.columns, run.sparse.first
    works = _Keys(run.blocks.of[first], c["accumulation"][first], c["sparse_group"][first])
    records = [_record(run, run.plan(first[i])) for i in works.first]
    row = works.of
    slots = {name: _slot(run, name, records, row) for name in (*_BEFORE, *_AFTER, *_TAIL)}
    if run.owner.gpu:
        copy = np.array([r.found["input"].seconds for r in records])[row]
        slots["input"] = dataclasses.replace(slots["input"], seconds=np.zeros(len(row)))
    else:
        copy = np.zeros(len(row))
    synced = np.array([r.synced for r in records])[row]
    # without an exchange the lookup is all there is
    alone = np.array(["embeddings" not in r.asked for r in records])[row]
    if alone.any():
        empty = _Slot(seconds=np.where(alone, 0.0, slots["lookup"].seconds), launch=np.where(alone, 0.0, slots["lookup"].launch),
                      share=slots["lookup"].share, tier=slots["lookup"].tier)
        slots["unique ids"] = _Slot(seconds=np.where(alone, slots["lookup"].seconds, slots["unique ids"].seconds),
                                    launch=np.where(alone, slots["lookup"].launch, slots["unique ids"].launch),
                                    share=empty.share, tier=empty.tier)
        slots["lookup"] = empty
    tail = [slots[name] for name in _TAIL]
    exchange, replicas = ([slots[n] for n in names] for names in (("counts", "ids", "embeddings", "gradients"),
                                                                 ("tables gather forward", "tables gather backward", "average")))
    return _Sparse(before=_Chains.of([slots[n] for n in _BEFORE], run.modes), after=_Chains.of([slots[n] for n in _AFTER], run.modes),
                   copy=copy, synced=synced, tail=np.stack([s.seconds for s in tail], axis=1), launch=np.stack([s.launch for s in tail], axis=1),
                   taken=np.stack([s.taken for s in tail], axis=1),
                   tiers=np.stack([np.max([s.tier for s in group], axis=0) for group in (exchange, replicas)], axis=1),
                   lossy=np.stack([np.any([(s.share > 0) & (s.seconds > 0) for s in group], axis=0) for group in (exchange, replicas)], axis=1))


def _record(run: _Evaluation, plan: Plan) -> _Recorder:
    """The sparse phases of a plan, with what replicas cost under both ways of keeping tables: `full:` before the name for fully sharded 2D."""
    key = (plan.local_batch, plan.batching, plan.layout.world_size, plan.accumulation, plan.layout.sparse_group)
    if key in run.owner.records:
        return run.owner.records[key]
    plan = dataclasses.replace(plan, execution="eager", layout=dataclasses.replace(plan.layout, fully_sharded_2d=False, sync_every=1))
    shape = batch_shape(plan, run.factors(plan))
    loads = run.owner.loads(plan, {name: s.tokens for name, s in shape.sequences.items()})
    made = _Recorder(plan, run.pricer(plan), run.network(plan.transport), shape, loads)
    made.input()
    made.sparse_forward()
    made.sparse_backward(True)
    if plan.layout.sparse_replicas > 1:
        plain, made.asked = made.asked, {}
        made.plan = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, fully_sharded_2d=True))
        for name in ("tables gather forward", "tables gather backward"):
            made.gather_replicas(name)
        made.average_replicas()
        made.asked = {**plain, **{f"full:{name}": asked for name, asked in made.asked.items()}}
    known = {*_BEFORE, *_AFTER, *_TAIL, "input wait", "splits"}
    unknown = {name.removeprefix("full:") for name in (*made.found, *made.asked)} - known
    assert not unknown, f"tasks of the sparse phase that the batch does not know: {sorted(unknown)}"
    run.owner.records[key] = made
    return made


def _slot(run: _Evaluation, name: str, records: Sequence[_Recorder], row: np.ndarray) -> _Slot:
    """Task `name` for every sparse key, whose record is `row`."""
    zero = np.zeros(len(row))
    if not any(name in r.asked or f"full:{name}" in r.asked for r in records):
        tasks = [r.found.get(name, _NOTHING) for r in records]
        return _Slot(seconds=np.array([t.seconds for t in tasks])[row], launch=np.array([t.host_seconds for t in tasks])[row], share=zero,
                     tier=zero.astype(np.int64))
    c, first = run.columns, run.sparse.first
    keys = _Keys(row, c["sparse_group"][first], c["sparse_replicas"][first], c["transport"][first], c["fully_sharded_2d"][first])
    costs = []
    for i in keys.first:
        at = first[i]
        group, replicas = int(c["sparse_group"][at]), int(c["sparse_replicas"][at])
        full = c["fully_sharded_2d"][at] and replicas > 1 and name in ("tables gather forward", "tables gather backward", "average")
        asked = records[row[i]].asked.get(f"full:{name}" if full else name)
        if asked is None:
            costs.append((0.0, 0.0, 0))
            continue
        shape = GroupShape(size=replicas, stride=group) if asked.replicas else GroupShape(size=group)
        net = run.network(run.owner.codes["transport"][c["transport"][at]])
        cost = net.cost(asked.kind, asked.num_bytes, shape, max_over_mean=asked.max_over_mean)
        costs.append((cost.seconds, cost.share if run.owner.gpu else 0.0, run.tier(tier_stream(cost.tier)) if cost.tier else 0))
    table = np.array(costs)[keys.of]
    # plain 2D averages every so many steps
    share = 1.0 / np.where(c["fully_sharded_2d"][first] == 0, c["sync_every"][first], 1) if name == "average" else 1.0
    return _Slot(seconds=table[:, 0] * share, launch=zero, share=table[:, 1], tier=table[:, 2].astype(np.int64))


# --- candidates ---

def _combine(run: _Evaluation, part: np.ndarray, dense: _Dense, sparse: _Sparse) -> np.ndarray:
    """Bounds of candidates `part`, sorted by accumulation, before slow nodes."""
    j, k, mode, micros = run.dense.of[part], run.sparse.of[part], run.columns["execution"][part], run.columns["accumulation"][part]
    cap = _streams(dense, sparse, j, k) - 1
    before, after = sparse.before.at(k, mode, cap), sparse.after.at(k, mode, cap)
    forward, backward = dense.forward.at(j, cap), dense.backward.at(j, cap)
    copy, synced, tail = sparse.copy[k], sparse.synced[k], sparse.tail[k]
    launch, taken = sparse.launch[k] * run.modes[mode][:, None], np.take_along_axis(sparse.taken[k], cap[:, None, None], axis=2)[..., 0]
    last = _Last.of(dense, sparse, j, k, cap, launch, taken)
    out = np.empty(len(part))
    copied, d, h, L = (np.zeros(len(part)) for _ in range(4))
    exchanged = np.zeros(len(part))  # what the exchange of gradients of the micro-batch before takes of compute
    finished = 0
    for micro in range(int(micros[-1])):
        # input: the copy, and the wait for it
        copied = np.maximum(copied, h) + copy
        d = np.maximum(np.maximum(d, h), copied)
        L = np.maximum(d, L + exchanged)
        d, h = before.after(d, h)
        h = np.where(synced, np.maximum(h, d), h)
        d, h = after.after(d, h)
        L = np.maximum(d, L + before.W + after.W)
        d, h = forward.after(d, h)
        L = np.maximum(d, L + forward.W)
        done = int(np.searchsorted(micros[finished:], micro + 1, side="right"))
        if done:
            ready, rest = slice(0, done), slice(done, None)
            out[finished:finished + done] = last.sliced(ready).seconds(d[ready], h[ready], L[ready])
            finished += done
            before, after, forward, backward, last = (x.sliced(rest) for x in (before, after, forward, backward, last))
            copied, d, h, L, copy, synced, tail, launch, taken = (x[rest] for x in (copied, d, h, L, copy, synced, tail, launch, taken))
        d, h = backward.after(d, h)
        L = np.maximum(d, L + backward.W)
        h = h + launch[:, _GATHER]
        d = np.maximum(d, h) + tail[:, _GATHER]
        L = np.maximum(d, L + tail[:, _GATHER])
        d = np.maximum(d, h) + tail[:, _EXCHANGE]
        exchanged = taken[:, _EXCHANGE]
    return out


def _streams(dense: _Dense, sparse: _Sparse, j: np.ndarray, k: np.ndarray) -> np.ndarray:
    """How many tiers carry collectives that take from compute, at least 1."""
    tiers = np.concatenate([dense.tiers[j], sparse.tiers[k]], axis=1)
    lossy = np.concatenate([dense.lossy[j], sparse.lossy[k]], axis=1)
    count = np.zeros(len(j), dtype=np.int64)
    for at in range(4):
        seen = np.zeros(len(j), dtype=bool)
        for earlier in range(at):
            seen |= lossy[:, earlier] & (tiers[:, earlier] == tiers[:, at])
        count += lossy[:, at] & ~seen
    return np.maximum(count, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """The last micro-batch from backward on. scattered, summed `(n, 2)`: ends of the last reductions by device and by launches; felt:
    whether the sparse
    phase waits for them; left `(n, 4)`: what is taken by the first block's scatter and all-reduce and by all that outlive backward, of each kind."""

    backward: _At
    scattered: np.ndarray
    summed: np.ndarray
    waits: np.ndarray
    own: np.ndarray
    own_felt: np.ndarray
    outliving: np.ndarray
    outliving_felt: np.ndarray
    tail: np.ndarray
    launch: np.ndarray
    taken: np.ndarray
    optimizer: np.ndarray

    @classmethod
    def of(cls, dense: _Dense, sparse: _Sparse, j: np.ndarray, k: np.ndarray, cap: np.ndarray, launch: np.ndarray, taken: np.ndarray) -> _Last:
        tail = sparse.tail[k]
        tiers, used = dense.tiers[j], sparse.tiers[k]
        # exchanges queue behind reductions of their own tier: (exchange, replicas) x (scatter, all-reduce)
        waits = np.stack([(used[:, a] == tiers[:, b]) & (used[:, a] > 0) for a in (0, 1) for b in (0, 1)], axis=1)
        exchange, gathers = tail[:, _EXCHANGE] > 0, tail[:, _TABLES] > 0
        summed = (waits[:, 1] & exchange) | (waits[:, 3] & gathers)
        has_sum, has_scatter = dense.summed[j, 0] > 0, dense.scattered[j, 0] > 0
        scattered = (waits[:, 0] & exchange) | (waits[:, 2] & gathers) | (summed & has_sum)
        own_scatter, own_sum, sums = (dense.left[j, kind, cap] for kind in range(3))
        sums_felt = np.where(has_scatter, scattered, summed)
        own = own_scatter + own_sum
        own_felt = own_scatter * scattered + own_sum * summed
        return cls(backward=dense.last.at(j, cap), scattered=dense.scattered[j], summed=dense.summed[j], waits=waits, own=own, own_felt=own_felt,
                   outliving=own + sums, outliving_felt=own_felt + sums * sums_felt, tail=tail, launch=launch, taken=taken,
                   optimizer=dense.optimizer[j])

    def sliced(self, part: slice) -> _Last:
        arrays = {f.name: getattr(self, f.name)[part] for f in dataclasses.fields(self) if f.name != "backward"}
        return _Last(backward=self.backward.sliced(part), **arrays)

    def seconds(self, d: np.ndarray, h: np.ndarray, L: np.ndarray) -> np.ndarray:
        """End of the step from the state at the end of forward."""
        tail, taken = self.tail, self.taken
        scattered, summed = (np.maximum(d + e[:, 0], h + e[:, 1]) for e in (self.scattered, self.summed))
        opened, inside = L, self.backward.W
        d, h = self.backward.after(d, h)
        L = closed = np.maximum(d, opened + inside)

        def queue(tier: int) -> np.ndarray:
            behind = np.where(self.waits[:, 2 * tier], scattered, _NEVER)
            return np.maximum(behind, np.where(self.waits[:, 2 * tier + 1], summed, _NEVER))

        h = h + self.launch[:, _GATHER]
        d = np.maximum(d, h) + tail[:, _GATHER]
        for what, tier in ((_EXCHANGE, 0), (_TABLES, 1)):
            d = np.where(tail[:, what] > 0, np.maximum(np.maximum(d, h), queue(tier)) + tail[:, what], d)
        h = h + self.launch[:, _UPDATE]
        d = np.maximum(d, h) + tail[:, _UPDATE]
        sparse = tail[:, _GATHER] + taken[:, _EXCHANGE] + taken[:, _TABLES] + tail[:, _UPDATE]
        L = np.maximum(np.maximum(d, L + sparse), np.maximum(closed + sparse + self.own_felt, opened + inside + sparse + self.outliving_felt))
        d = np.where(tail[:, _AVERAGE] > 0, np.maximum(np.maximum(d, h), queue(1)) + tail[:, _AVERAGE], d)
        h = h + self.optimizer[:, 1]
        d = np.maximum(np.maximum(d, h), np.maximum(scattered, summed)) + self.optimizer[:, 0]
        rest = taken[:, _AVERAGE] + self.optimizer[:, 0]
        L = np.maximum(np.maximum(d, L + rest), np.maximum(closed + sparse + rest + self.own, opened + inside + sparse + rest + self.outliving))
        d = np.maximum(d, h) + self.optimizer[:, 2]
        return np.maximum(d, L + self.optimizer[:, 2])
