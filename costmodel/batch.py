"""The bound of a step over arrays of candidates: what `simulate.bound` gives for each one's graph, at millions of candidates in a few seconds.

On GPUs it bounds a step that starts from an idle host, as a search simulates it; an estimate knows the host's lead (`costmodel.gpu`) and may be
lower.

A candidate is a layout, a local batch, an accumulation, a batching policy, a transport and an execution mode; model, workload, cluster, options per
region and calibration are those of a template plan. The bound of a graph (`costmodel.simulate.bound`) is a longest path plus what
collectives take from
compute phase by phase. Both come apart at the ends of phases, where one chain has waited for everything before it. There the state of a step is

    d   when the device's chain is free      h   when the host is free      L   least end of the phase, contention counted

and a phase maps it by sums and maxima alone: with D its device time, H its launch time and V its end when only launches hold it back,

    d' = max(d + D, h + V)     h' = h + H     L' = max(d', L + compute + sum of share x seconds of its collectives)

A phase's numbers depend on few columns, so they are made once for each combination that occurs, and spread by index:

    batches    (local batch, policy, ranks)                          the slowest rank's histories
    blocks     batches x (ep, how experts exchange, execution)       forward, backward, recomputation of every distinct block, and launches
    moves      (fsdp, ddp, ep, transport)                            gathers, reductions, optimizer
    exchanges  (local batch, ep, how experts exchange, transport)    what blocks with spread experts wait for
    dense      blocks x moves x exchanges x reshard                  the recurrences of `costmodel.lower` over all blocks, as arrays
    sparse     batches x (sparse layout, accumulation, transport)    the chains of exchange, lookup and update

The last micro-batch also reduces gradients: its reductions run beside the sparse phase, hold back exchanges on their tier, and end before AdamW.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from costmodel.batch_dense import Dense, block_table, dense_table, exchange_table, move_table
from costmodel.batch_phases import NEVER, At, Keys
from costmodel.batch_sparse import AVERAGE, EXCHANGE, GATHER, TABLES, UPDATE, Recorder, Sparse, sparse_table
from costmodel.calibration import Calibration
from costmodel.comms import Network, network
from costmodel.imbalance import slowest_rank
from costmodel.lower import Factors, _Builder, batch_shape
from costmodel.plan import Layout, Plan
from costmodel.pricer import Pricer, pricer
from costmodel.sparse import TableLoads, table_loads

LAYOUT_COLUMNS = ("ddp", "fsdp", "ep", "expert_all_to_all", "sparse_group", "sparse_replicas", "fully_sharded_2d", "sync_every",
                  "reshard_after_forward")
_FLAGS = ("expert_all_to_all", "fully_sharded_2d", "reshard_after_forward")
COLUMNS = (*LAYOUT_COLUMNS, "local_batch", "accumulation", "batching", "transport", "execution")
_CHUNK = 1 << 14


class BatchBound:
    """Bounds of candidates around a template plan.

    batchings, transports, executions: what the codes in those columns mean. loads: what ranks hold and serve, from a plan and events by sequence
    (default: the template's own placements, which must then fit every sparse group, as `row_wise` over all ranks does).
    """

    def __init__(self, template: Plan, calibration: Calibration | None, *, batchings: Sequence[str], transports: Sequence[str],
                 executions: Sequence[str], loads: Callable[[Plan, dict[str, float]], TableLoads] = table_loads) -> None:
        if template.exchange != "rows":
            raise ValueError(f"candidates: exchange {template.exchange!r} is not searched, only rows")
        if template.tables_ahead:
            raise ValueError(f"candidates: tables_ahead {template.tables_ahead} is not bounded here, only 0")
        self.template, self.calibration, self.loads = template, calibration, loads
        self.codes = {"batching": tuple(batchings), "transport": tuple(transports), "execution": tuple(executions)}
        self.gpu = template.cluster.device.kind == "gpu"
        self.records: dict[tuple[Any, ...], Recorder] = {}
        self.factors: dict[tuple[str, int, int], tuple[dict[str, Factors], float]] = {}

    def seconds(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """`(n,)` bounds [s]. Raises ValueError for a missing or unequal column, or a candidate that does not fit the cluster."""
        columns = _checked(columns)
        return Evaluation(self, columns).seconds()

    def plan(self, columns: Mapping[str, np.ndarray], i: int) -> Plan:
        """Candidate i as a plan: what `estimate` takes."""
        layout = {name: bool(columns[name][i]) if name in _FLAGS else columns[name][i].item() for name in LAYOUT_COLUMNS}
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


class Evaluation:
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
        experts = c["ep"], c["expert_all_to_all"]
        self.batches = Keys(c["local_batch"], c["batching"], self.ranks)
        self.blocks = Keys(self.batches.of, *experts, c["execution"])
        self.moves = Keys(c["fsdp"], c["ddp"], c["ep"], c["transport"])
        self.exchanges = Keys(c["local_batch"], *experts, c["transport"])
        self.dense = Keys(self.blocks.of, self.moves.of, self.exchanges.of, c["reshard_after_forward"])
        self.sparse = Keys(self.batches.of, c["accumulation"], c["sparse_group"], c["sparse_replicas"], c["fully_sharded_2d"], c["sync_every"],
                            c["transport"])
        self.tiers: dict[str, int] = {"": 0}

    def seconds(self) -> np.ndarray:
        blocks, slow = block_table(self)
        dense = dense_table(self, blocks, move_table(self), exchange_table(self))
        sparse = sparse_table(self)
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


def _combine(run: Evaluation, part: np.ndarray, dense: Dense, sparse: Sparse) -> np.ndarray:
    """Bounds of candidates `part`, sorted by accumulation, before slow nodes."""
    j, k, micros = run.dense.of[part], run.sparse.of[part], run.columns["accumulation"][part]
    cap = _streams(dense, sparse, j, k) - 1
    before, after = sparse.before.at(k, cap), sparse.after.at(k, cap)
    forward, backward = dense.forward.at(j, cap), dense.backward.at(j, cap)
    copy, synced, tail = sparse.copy[k], sparse.synced[k], sparse.tail[k]
    launch, taken = sparse.launch[k], np.take_along_axis(sparse.taken[k], cap[:, None, None], axis=2)[..., 0]
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
        h = h + launch[:, GATHER]
        d = np.maximum(d, h) + tail[:, GATHER]
        L = np.maximum(d, L + tail[:, GATHER])
        d = np.maximum(d, h) + tail[:, EXCHANGE]
        exchanged = taken[:, EXCHANGE]
    return out


def _streams(dense: Dense, sparse: Sparse, j: np.ndarray, k: np.ndarray) -> np.ndarray:
    """How many tiers carry collectives that take from compute, at least 1."""
    tiers = np.concatenate([dense.tiers[j], sparse.tiers[k]], axis=1)
    lossy = np.concatenate([dense.lossy[j], sparse.lossy[k]], axis=1)
    count = np.zeros(len(j), dtype=np.int64)
    for at in range(tiers.shape[1]):
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

    backward: At
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
    def of(cls, dense: Dense, sparse: Sparse, j: np.ndarray, k: np.ndarray, cap: np.ndarray, launch: np.ndarray, taken: np.ndarray) -> _Last:
        tail = sparse.tail[k]
        tiers, used = dense.tiers[j], sparse.tiers[k]
        # exchanges queue behind reductions of their own tier: (exchange, replicas) x (scatter, all-reduce)
        waits = np.stack([(used[:, a] == tiers[:, b]) & (used[:, a] > 0) for a in (0, 1) for b in (0, 1)], axis=1)
        exchange, gathers = tail[:, EXCHANGE] > 0, tail[:, TABLES] > 0
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
            behind = np.where(self.waits[:, 2 * tier], scattered, NEVER)
            return np.maximum(behind, np.where(self.waits[:, 2 * tier + 1], summed, NEVER))

        h = h + self.launch[:, GATHER]
        d = np.maximum(d, h) + tail[:, GATHER]
        for what, tier in ((EXCHANGE, 0), (TABLES, 1)):
            d = np.where(tail[:, what] > 0, np.maximum(np.maximum(d, h), queue(tier)) + tail[:, what], d)
        h = h + self.launch[:, UPDATE]
        d = np.maximum(d, h) + tail[:, UPDATE]
        sparse = tail[:, GATHER] + taken[:, EXCHANGE] + taken[:, TABLES] + tail[:, UPDATE]
        L = np.maximum(np.maximum(d, L + sparse), np.maximum(closed + sparse + self.own_felt, opened + inside + sparse + self.outliving_felt))
        d = np.where(tail[:, AVERAGE] > 0, np.maximum(np.maximum(d, h), queue(1)) + tail[:, AVERAGE], d)
        h = h + self.optimizer[:, 1]
        d = np.maximum(np.maximum(d, h), np.maximum(scattered, summed)) + self.optimizer[:, 0]
        rest = taken[:, AVERAGE] + self.optimizer[:, 0]
        L = np.maximum(np.maximum(d, L + rest), np.maximum(closed + sparse + rest + self.own, opened + inside + sparse + rest + self.outliving))
        d = np.maximum(d, h) + self.optimizer[:, 2]
        return np.maximum(d, L + self.optimizer[:, 2])
