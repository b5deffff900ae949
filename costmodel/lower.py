"""From a plan to the StepGraph of its slowest rank: what runs on which stream, after what.

Per micro-batch, as the runtime issues it (runtime/trainer.py, runtime/parallelize.py, runtime/embedding.py):

    input -> sparse forward -> per block: gather, compute -> loss -> per block backwards: gather, recompute, compute, reduce -> sparse backward
    with `input_overlap` the next micro-batch's ids are made unique behind this one's lookup, counts cross during its forward, ids from there on
    then AdamW; what several replicas of a sparse group move is `costmodel.replicas`'

The FSDP unit is a block. Dependencies of collectives:

    CPU (gloo)   the main thread issues a collective and waits for it: everything is one chain
    GPU (NCCL)   all-gather of unit u waits for the compute before unit u - 1's (its buffer), and so runs beside unit u - 1's compute;
                 reduce-scatter of u waits for u's backward, and the packing of the next unit's gradients for it, as only one is in flight;
                 an all-reduce over ddp follows its
                 reduce-scatter on the same stream. Samples and their experts' outputs travel over ep right before the block's compute, which waits
                 for both (the way there and the way back are one task). Where the host reads split sizes of an all-to-all, it waits for the device
                 and loses its lead.

What tasks take is `costmodel.pricer`'s.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from costmodel.blocks import BatchShape, Block, JaggedShape, activation_dtype
from costmodel.calibration import MINIMUM_WIDTH, Calibration
from costmodel.comms import CollectiveCost, GroupShape, Network, layout_groups, network
from costmodel.model import Model
from costmodel.ops import BACKWARD, FORWARD, STEP, Op, dtype_bytes, elementwise, op
from costmodel.plan import Plan
from costmodel.pooled import PooledTasks
from costmodel.pricer import MAX_BATCHES, NO_COST, Cost, Pricer, pricer, summed
from costmodel.quantity import Source, worst
from costmodel.regions import Region, regions
from costmodel.replicas import ReplicaTasks
from costmodel.sparse import GroupWork, TableLoads, group_work, table_loads
from costmodel.stepgraph import COMPUTE, H2D, HOST, StepGraph, Task, tier_stream
from costmodel.wire import LOW_WIRES, gather_width, wire_bytes, wires


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Factors:
    """The slowest rank's work over the average, by sequence: events and pairs."""

    tokens: float = 1.0
    pairs: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A step graph with what an estimate needs beside it.

    parts: (phase, curve, source, seconds, spread) by phase, curve and source: seconds in all and the 90 % error of that sum [s]; load: seconds of the
    loader's thread on a GPU; early: host seconds that checkpoint policies add in forward; accumulated: (device, host) seconds of adding
    gradients to those of earlier micro-batches, which no task has; model_flops: of one rank and step, by convention at true
    average lengths; compute_bound: seconds of ops whose roof is compute, not bandwidth; waiting: what of the compute tasks' seconds ranks wait for
    slower ones, over the rest of them.
    """

    graph: StepGraph
    parts: tuple[tuple[str, str, Source, float, float], ...]
    model_flops: float
    compute_bound: float
    batch: BatchShape
    loads: TableLoads
    waiting: float
    notes: tuple[str, ...]
    load: float = 0.0
    early: float = 0.0
    accumulated: tuple[float, float] = (0.0, 0.0)


_batches: dict[tuple[object, ...], tuple[object, object, BatchShape]] = {}


def batch_shape(plan: Plan, factors: Mapping[str, Factors] | None = None) -> BatchShape:
    """The expected micro-batch of the slowest rank, one object per content. Raises ValueError when the workload has no lengths for a sequence."""
    padded = plan.batching == "padded"
    key = (id(plan.model), id(plan.workload), plan.local_batch, padded, tuple(sorted((factors or {}).items())))
    if key not in _batches:
        if len(_batches) >= MAX_BATCHES:
            _batches.clear()
        _batches[key] = (plan.model, plan.workload, _batch_shape(plan, factors or {}, padded))
    return _batches[key][2]


def _batch_shape(plan: Plan, factors: Mapping[str, Factors], padded: bool) -> BatchShape:
    missing = [s.name for s in plan.model.sequences if s.name not in plan.workload.lengths]
    if missing:
        raise ValueError(f"workload {plan.workload.name}: lengths.{missing[0]}: missing; the model has that sequence")
    shapes: dict[str, JaggedShape] = {}
    for sequence in plan.model.sequences:
        shape = JaggedShape.expected(plan.workload.lengths[sequence.name], plan.local_batch)
        if padded:
            shape = shape.padded()
        factor = factors.get(sequence.name, Factors())
        shapes[sequence.name] = shape.scaled(factor.tokens, factor.pairs)
    return BatchShape(samples=float(plan.local_batch), sequences=shapes)


def model_flops(plan: Plan) -> float:
    """FLOPs of one rank and step by convention: 3 x forward at true lengths, causal half, no recompute, no padding."""
    batch = batch_shape(dataclasses.replace(plan, batching="jagged"))
    key = (id(plan.model), id(batch))
    if key not in _forward_flops:
        if len(_forward_flops) >= MAX_BATCHES:
            _forward_flops.clear()
        forward = sum(r.count * (r.block.flops(batch) - r.block.causal_excess(batch)) for r in regions(plan.model))
        _forward_flops[key] = (plan.model, batch, forward)
    return 3.0 * _forward_flops[key][2] * plan.accumulation


_forward_flops: dict[tuple[int, int], tuple[Model, BatchShape, float]] = {}


def needs_fsdp(plan: Plan) -> bool:
    """Whether the runtime wraps blocks with FSDP2: not on one rank."""
    return plan.layout.world_size > 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    """One block of the model under its option."""

    region: Region
    precision: str
    checkpoint: str


class _Builder(PooledTasks, ReplicaTasks):
    """Appends tasks; `last` is the compute chain's end, on a CPU the whole chain's."""

    def __init__(self, plan: Plan, pricer: Pricer, net: Network, batch: BatchShape, loads: TableLoads) -> None:
        self.plan, self.pricer, self.net, self.batch, self.loads = plan, pricer, net, batch, loads
        self.gpu = plan.cluster.device.kind == "gpu"
        self.groups = layout_groups(plan.layout)
        self.tasks: list[Task] = []
        self.parts: list[tuple[str, str, Source, float, float]] = []
        self.compute_bound = 0.0
        self.load = self.early = 0.0
        self.last: int | None = None
        self.counted: int | None = None
        self.sent: int | None = None
        self.arrived: int | None = None
        self.returned: int | None = None
        self.wrapped = needs_fsdp(plan)
        self.units = [_Unit(region, option.precision, option.checkpoint) for region, options in _options(plan)
                      for option in options for _ in range(option.count)]

    # --- adding tasks ---

    def add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def compute(self, name: str, cost: Cost, phase: str, region: str = "", deps: Sequence[int | None] = ()) -> int:
        """A run of ops on the compute stream, after the chain and `deps`."""
        index = self.add(Task(name=name, stream=COMPUTE, seconds=cost.seconds, host_seconds=cost.host_seconds, phase=phase,
                              deps=_deps(self.last, *deps), region=region, bytes=cost.bytes, flops=cost.flops, compute_bound=cost.compute_bound,
                              source=cost.source))
        self.parts += [(phase, *part) for part in cost.parts]
        self.compute_bound += cost.compute_bound
        self.last = index
        return index

    def collective(self, name: str, kind: str, num_bytes: float, group: GroupShape, *, deps: Sequence[int | None], region: str = "",
                   waits: bool = False, apart: bool = False, max_over_mean: float = 1.0, share: float = 1.0) -> int | None:
        """A collective on its tier's stream; `waits`: the compute chain goes on after it, `apart`: it does not, on a CPU either. share: fraction of
        steps that run it."""
        cost = self.net.cost(kind, num_bytes, group, max_over_mean=max_over_mean)
        return self._joined(name, [(kind, num_bytes, cost)], deps=deps, region=region, waits=waits, apart=apart, share=share)

    def collectives(self, name: str, asked: Sequence[tuple[str, float, str]], *, deps: Sequence[int | None], region: str, waits: bool = False
                    ) -> int | None:
        """Collectives (kind, bytes, axis) one right after the other, as one task on the first one's tier: groups that share a region's
        parameters cross the same tier, or one rank."""
        return self._joined(name, [(kind, num_bytes, self.net.cost(kind, num_bytes, self.groups[axis])) for kind, num_bytes, axis in asked],
                            deps=deps, region=region, waits=waits)

    def _joined(self, name: str, costs: Sequence[tuple[str, float, CollectiveCost]], *, deps: Sequence[int | None], region: str, waits: bool,
                apart: bool = False, share: float = 1.0) -> int | None:
        costs = [found for found in costs if found[2].tier]
        if not costs:
            return None
        chained, seconds = not apart and (waits or not self.gpu), sum(cost.seconds for *_, cost in costs)
        taken = sum(cost.seconds * cost.share for *_, cost in costs) / seconds if self.gpu and seconds > 0 else 0.0
        waiting = max(cost.waiting for *_, cost in costs) if self.gpu else 0.0
        index = self.add(Task(name=name, stream=tier_stream(costs[0][2].tier), seconds=seconds * share, waiting_fraction=waiting,
                              deps=_deps(*deps, self.last if chained else None), phase="exposed_communication", region=region, kind="collective",
                              bytes=sum(num_bytes for _, num_bytes, _ in costs) * share, source=worst(cost.source for *_, cost in costs),
                              sm_fraction=taken))
        self.parts += [("exposed_communication", f"{kind}:{cost.tier}", cost.source, cost.seconds * share, MINIMUM_WIDTH[cost.source] + 0.08)
                       for kind, _, cost in costs]
        if chained:
            self.last = index
        return index

    def host_sync(self, name: str) -> None:
        """The host waits for the device and then goes on; on a CPU they are one."""
        if self.gpu:
            self.add(Task(name=name, stream=HOST, seconds=0.0, deps=_deps(self.last), phase="sparse", kind="host"))

    # --- the step ---

    def step(self) -> None:
        self.left_running()
        for micro in range(self.plan.accumulation):
            last = micro == self.plan.accumulation - 1
            self.input()
            self.sparse_forward()
            self.forward()
            self.send_ids()
            self.before_backward()
            reductions = self.backward(reduce=last)
            self.sparse_backward(last)
        self.optimizer(reductions)
        self.end_step()

    def input(self) -> None:
        # on a GPU the loader's work is counted in ids of all tables (runtime.microbench.gpu)
        events = sum(w.ids for w in self.work) if self.gpu else sum(shape.tokens for shape in self.batch.sequences.values())
        policy = "jagged" if self.plan.batching == "padded" else self.plan.batching  # the loader's work; the model pads
        cost = self.pricer.ops([op("input", variant=policy, samples=self.batch.samples, events=events)], STEP)
        if not self.gpu:
            self.compute("input", cost, "input")
            return
        # a thread prefetches on the host; the step itself waits for the copy of the batch
        self.load += cost.seconds if cost.source not in ("roofline", "assumed") else 0.0
        timed = sum(self.batch.sequences[s.name].tokens for s in self.plan.model.sequences if s.timed)
        num_bytes = 8.0 * (sum(w.ids for w in self.work) + timed)
        measured = self.pricer.calibration.constants.get("host_copy_bandwidth") if self.pricer.calibration is not None else None
        bandwidth = measured or self.plan.cluster.device.host_link_bandwidth or 25e9
        copy = self.add(Task(name="input", stream=H2D, seconds=num_bytes / bandwidth, phase="input", kind="copy", bytes=num_bytes, source="roofline"))
        self.parts.append(("input", "h2d", "roofline", num_bytes / bandwidth, MINIMUM_WIDTH["roofline"]))
        self.compute("input wait", NO_COST, "input", deps=(copy,))

    @functools.cached_property
    def rank(self) -> int:
        """The busiest place of the sparse group: who sends most, or, of owners that pool, who has most rows to read and to update."""
        if self.plan.exchange == "pooled":
            return self.most_rows
        return int(self.loads.served.argmax()) if len(self.loads.served) else 0

    @functools.cached_property
    def work(self) -> tuple[GroupWork, ...]:
        tokens = {name: shape.tokens for name, shape in self.batch.sequences.items()}
        return group_work(self.plan, self.loads, self.rank, tokens)

    @property
    def skewed(self) -> float:
        """Heaviest rank's served elements over the mean."""
        served = self.loads.served
        return float(max(1.0, served.max() / served.mean())) if len(served) and served.mean() > 0 else 1.0

    def sparse_forward(self) -> None:
        self.gather_replicas("tables gather forward")
        if self.plan.layout.sparse_group == 1 and self.loads.fetched is None:
            ops = [op("embedding_lookup", variant=_variant(w), ids=w.ids, unique=w.unique, dim=w.table.dim, rows=w.storage_rows, tables=w.table.count,
                      dtype=w.table.dtype) for w in self.work]
            self.compute("lookup", self.pricer.ops(ops, FORWARD), "sparse")
            return
        group = self.groups["sparse_group"]
        if self.plan.exchange == "pooled":
            self.pooled_forward(group)
            return
        if self.overlaps:
            # the ids of a step's first micro-batch crossed in the step before
            self.compute("ids wait", NO_COST, "sparse", deps=(self.sent,))
        else:
            self.unique_ids(apart=False)
            self.host_sync("splits")
            self.collective("ids", "all_to_all", self.id_bytes, group, deps=(), waits=True, max_over_mean=self.skewed)
        self.fetch("host rows", 0)
        host = self.exchange_host(FORWARD)
        served = [op("embedding_lookup", variant="sequence", ids=w.served_rows, unique=w.distinct_served, dim=w.served_width, rows=w.storage_rows,
                     tables=1, dtype=w.table.dtype) for w in self.work if w.served_rows]
        self.compute("lookup", _hosted(self.pricer.ops(served, FORWARD), host), "sparse")
        self.collective("embeddings", "all_to_all", self.wire_bytes[0], group, deps=(), waits=True, max_over_mean=self.skewed)
        spread = self.pricer.ops([*self._spread(), *self.conversions(0)], FORWARD)
        self.compute("spread", _hosted(spread, None if host is None else 0.0), "sparse")
        if self.overlaps:
            self.counted = self.unique_ids(apart=True)

    @property
    def overlaps(self) -> bool:
        return self.plan.input_overlap and self.plan.layout.sparse_group > 1 and self.plan.exchange == "rows"

    def exchange_host(self, phase: str) -> float | None:
        """Half of what the main thread spends on an exchange in one direction: before its splits are known and after, before its rows cross and after
        [Assumed]. None where it was not measured."""
        shards = max(self.loads.shards, float(len(self.plan.tables)))
        found = self.pricer.host.exchange(phase, len(self.plan.model.tables), shards) if self.plan.layout.sparse_group > 1 else None
        return None if found is None else found / 2

    @property
    def id_bytes(self) -> float:
        return 8.0 * sum(w.asked for w in self.work)

    def unique_ids(self, *, apart: bool) -> int | None:
        """Ids made unique, and one count a shard exchanged: a few bytes, all latency."""
        made = self.pricer.ops([op("unique", ids=w.ids) for w in self.work], FORWARD)
        unique = self.compute("unique ids", _hosted(made, self.exchange_host(FORWARD)), "sparse")
        if not self.loads.served.any():
            return unique
        counts = self.collective("counts", "all_to_all", 8.0 * len(self.plan.tables) * 2, self.groups["sparse_group"], waits=True, apart=apart,
                                 deps=(unique,) if apart else ())
        return unique if counts is None else counts

    def send_ids(self) -> None:
        """Behind forward the host reads the counts of the next micro-batch, and its ids cross beside what follows."""
        if not self.overlaps:
            return
        if self.gpu:
            self.add(Task(name="splits", stream=HOST, seconds=0.0, deps=_deps(self.counted), phase="sparse", kind="host"))
        else:
            self.compute("counts wait", NO_COST, "sparse", deps=(self.counted,))
        self.sent = self.collective("ids", "all_to_all", self.id_bytes, self.groups["sparse_group"], apart=True, max_over_mean=self.skewed,
                                    deps=(self.counted,) if self.gpu else (self.counted, self.last))

    def fetch(self, name: str, kind: int) -> None:
        """Rows from host memory to the device, or back: on a GPU the host reads which and gathers them, then they cross the link; a CPU copies."""
        if self.loads.fetched is None or not self.loads.fetched[kind, self.rank]:
            return
        num_bytes = float(self.loads.fetched[kind, self.rank])
        if not self.gpu:
            width = sum(w.served_width * w.distinct_served for w in self.work) / max(sum(w.distinct_served for w in self.work), 1e-300)
            rows = num_bytes / (4.0 * width)
            copy = op("embedding_lookup", variant="sequence", ids=rows, unique=rows, dim=width, rows=rows, tables=1, dtype="fp32")
            self.compute(name, self.pricer.ops([copy], FORWARD), "sparse")
            return
        self.host_sync(f"{name} wanted")
        bandwidth = self.plan.cluster.device.host_link_bandwidth or 25e9
        copy = self.add(Task(name=name, stream=H2D, seconds=num_bytes / bandwidth, phase="sparse", kind="copy", bytes=num_bytes, source="roofline",
                             deps=_deps(self.last)))
        self.parts.append(("sparse", "h2d", "roofline", num_bytes / bandwidth, MINIMUM_WIDTH["roofline"]))
        self.compute(f"{name} wait", NO_COST, "sparse", deps=(copy,))

    @functools.cached_property
    def wire_bytes(self) -> tuple[float, float]:
        """What an average rank sends of rows and gets of gradients."""
        return wire_bytes(self.plan, self.loads)

    def conversions(self, direction: int) -> list[Op]:
        """Rows (0) or gradients (1) quantised by the sender and restored by the receiver, where the wire has fewer than 16 bits."""
        if wires(self.plan.model.tables, self.plan.wire, self.plan.wire_gradients)[direction] not in LOW_WIRES:
            return []
        return [op("quantize", m=w.served_rows, n=w.served_width, count=2) for w in self.work if w.served_rows]

    def _spread(self) -> list[Op]:
        return [op("embedding_lookup", variant=_variant(w), ids=w.ids, unique=w.unique, dim=w.table.dim, rows=w.unique, tables=w.table.count,
                   dtype=w.table.dtype) for w in self.work]

    def forward(self) -> None:
        phase, before = "forward", self.last
        for unit in self.units:
            block, name = unit.region.block, unit.region.name
            start = self.last
            gather = self.unshard(unit, self.gather(unit, before), phase)
            before = start
            self.exchange(unit, FORWARD)
            cost = self.pricer.block(block, self.batch, unit.precision, FORWARD)
            self.compute(name, cost, phase, name, deps=(gather, None if self.before_tables(name) else self.arrived))
            self.early += self.pricer.early(block, self.batch, unit.precision, unit.checkpoint)
        rows = self.batch.samples * len(self.plan.model.heads)
        self.compute("loss", self.pricer.ops([op("bce", m=rows)], FORWARD), phase)

    def gather(self, unit: _Unit, before: int | None) -> int | None:
        """All-gather of a unit's parameters; None where nothing is gathered."""
        if not self.wrapped:
            return None
        width = gather_width(unit.region.block, dtype_bytes(activation_dtype(unit.precision)), self.plan.gather_dtype)
        asked = [("all_gather", width * ranks * elements, axis) for axis, ranks, elements in unit.region.block.shards(self.plan.layout.fsdp)]
        return self.collectives(f"gather {unit.region.name}", asked, deps=(before,), region=unit.region.name)

    def exchange(self, unit: _Unit, phase: str) -> int | None:
        """What a block with spread experts sends inside its expert group in one direction; the compute chain waits for it."""
        asked = [(kind, num_bytes, "ep") for kind, num_bytes in unit.region.block.exchanges(self.batch, unit.precision, phase, unit.checkpoint)]
        return self.collectives(f"exchange {phase} {unit.region.name}", asked, deps=(), region=unit.region.name, waits=True)

    def unshard(self, unit: _Unit, gather: int | None, phase: str) -> int | None:
        """The copies that make gathered parameters usable."""
        if not self.wrapped:
            return None
        cost = self.pricer.unit("fsdp_gather", unit.region.block, whole=self.plan.layout.fsdp == 1)
        if self.plan.gather_dtype is not None and unit.precision != "fp32" and self.plan.layout.fsdp > 1:
            cost = summed([cost, self.pricer.ops(self.gather_conversions(unit.region.block), FORWARD)])
        return self.compute(f"unshard {unit.region.name}", cost, phase, unit.region.name, deps=(gather,))

    def gather_conversions(self, block: Block) -> list[Op]:
        """A rank's shard of a block quantised before it is gathered, and all shards restored behind it: the same bytes the other way round."""
        shapes = [(math.prod(shape[:-1]), shape[-1]) for _, shape in block.parameters if len(shape) > 1]
        return [op("quantize", m=rows / n, n=width) for rows, width in shapes for n in (self.plan.layout.fsdp, 1)]

    def backward(self, *, reduce: bool) -> list[int | None]:
        """Returns the reductions that the optimizer waits for."""
        phase, before, layout = "backward", self.last, self.plan.layout
        # FSDP2 copies what it holds whole, too; other systems keep what they have
        regather = layout.reshard_after_forward and (self.plan.system is None or layout.fsdp > 1)
        self.compute("loss", self.pricer.ops([op("bce", m=self.batch.samples * len(self.plan.model.heads))], BACKWARD), phase)
        reductions: list[int | None] = []
        scattered: int | None = None
        reduced: int | None = None
        units = self.units[::-1]
        gathered = self.gather(units[0], before) if regather else None
        for i, (unit, following) in enumerate(zip(units, [*units[1:], None])):
            block, name = unit.region.block, unit.region.name
            start = self.last
            gather = self.unshard(unit, gathered, phase) if regather else None
            # FSDP2 asks for the next unit before this one's backward, so ahead of its reduce-scatter
            gathered = self.gather(following, start) if regather and following is not None else None
            self.gather_ahead(len(units) - i, len(units), last=reduce)
            self.exchange(unit, BACKWARD)
            again = self.pricer.recompute(block, self.batch, unit.precision, unit.checkpoint)
            if again.parts:
                self.compute(f"recompute {name}", again, phase, name, deps=(gather,))
            self.compute(name, self.pricer.block(block, self.batch, unit.precision, BACKWARD), phase, name, deps=(gather,))
            if following is not None and self.before_tables(following.region.name) and not self.before_tables(name):
                self.return_gradients()
            if reduce and self.wrapped and not self.reduces_together:
                scattered, reduced = self.reduce(unit, scattered, reduced)
                reductions.append(reduced)
        if reduce and self.reduces_together:
            reductions.append(self.reduce_together())
        return reductions

    def reduce(self, unit: _Unit, scattered: int | None, reduced: int | None) -> tuple[int | None, int | None]:
        """Reduce-scatter over fsdp, then all-reduce of the shard over ddp, in the plan's reduce_dtype. Takes and returns the ends of the last
        (scatter, both)."""
        block, name, layout = unit.region.block, unit.region.name, self.plan.layout
        cost = self.pricer.unit("fsdp_reduce", block, whole=layout.fsdp == 1)
        done: int | None = self.compute(f"pack gradients {name}", cost, "backward", name, deps=(scattered,))
        shards, width = block.shards(layout.fsdp), float(dtype_bytes(self.plan.reduce_dtype))
        scatter = self.collectives(f"reduce {name}", [("reduce_scatter", width * elements * ranks, axis) for axis, ranks, elements in shards],
                                   deps=(done, reduced), region=name)
        summed = self.collectives(f"all-reduce {name}", [("all_reduce", width * elements, "ddp") for *_, elements in shards],
                                  deps=(done, scatter), region=name)
        return scatter, summed if summed is not None else scatter

    def sparse_backward(self, last_microbatch: bool) -> None:
        layout = self.plan.layout
        if layout.sparse_group > 1 or self.loads.fetched is not None:
            if self.plan.exchange == "rows":
                cost = self.pricer.ops(self._spread(), BACKWARD)
                if conversions := self.conversions(1):
                    cost = summed([cost, self.pricer.ops(conversions, FORWARD)])
                self.compute("gather gradients", _hosted(cost, self.exchange_host(BACKWARD)), "sparse")
            if self.returned is None:
                self.exchanged("gradients", BACKWARD, waits=True)
        if not last_microbatch:
            return
        self.gather_replicas("tables gather backward")
        if self.loads.replicated and not self.reduces_together:
            self.collective("tables all-reduce", "all_reduce", 4.0 * self.loads.replicated, self.groups["sparse_group"], deps=(), waits=True)
        self.fetch("host rows update", 1)
        if layout.sparse_group > 1 and self.plan.exchange == "pooled":
            update = self.pooled_update()
        else:
            rows = [(w, w.served_rows if layout.sparse_group > 1 else w.ids) for w in self.work]
            update = self.pricer.ops([op("embedding_update", variant=w.table.optimizer, ids=n * self.plan.accumulation, unique=w.distinct_served,
                                         dim=w.served_width if layout.sparse_group > 1 else w.table.dim, rows=w.storage_rows, tables=1,
                                         dtype=w.table.dtype) for w, n in rows if n], STEP)
        self.compute("update", _hosted(update, self.exchange_host(BACKWARD)), "sparse", deps=(self.returned,))
        self.fetch("host rows back", 1)
        if layout.sparse_replicas > 1:
            self.average_replicas()

    @property
    def accumulated(self) -> tuple[float, float]:
        """(device, host) seconds of adding gradients up, where no FSDP unit does."""
        times = self.plan.accumulation - 1
        if not self.gpu or self.wrapped or not times:
            return 0.0, 0.0
        blocks = [u.region.block for u in self.units]
        added = self.pricer.ops([elementwise("add", sum(b.num_parameters for b in blocks) / 1024, 1024)], FORWARD)
        return times * added.seconds, times * sum(b.num_tensors for b in blocks) * (self.pricer.host.get("accumulate") or 0.0)

    def optimizer(self, reductions: Sequence[int | None]) -> None:
        parameters = sum(u.region.block.sharded_elements(self.plan.layout.fsdp) for u in self.units)
        tensors = sum(u.region.block.num_tensors for u in self.units)
        cost = self.pricer.optimizer(parameters, tensors, sharded=self.wrapped)
        self.compute("adamw", cost, "optimizer", deps=reductions)
        seconds, source = self.pricer.step_overhead
        rest = dataclasses.replace(NO_COST, seconds=seconds, parts=(("step_overhead", source, seconds, MINIMUM_WIDTH[source]),))
        self.compute("step overhead", rest, "other")


def _hosted(cost: Cost, host_seconds: float | None) -> Cost:
    """The cost with another host time, where that is known."""
    return cost if host_seconds is None else dataclasses.replace(cost, host_seconds=host_seconds)


def _deps(*indices: int | None) -> tuple[int, ...]:
    return tuple(sorted({i for i in indices if i is not None}))


def _variant(work: GroupWork) -> str:
    return "sequence" if work.table.pooling == "sequence" else "pooled"


def _options(plan: Plan):
    """(region, its options) in forward order; ValueError where plan and model differ."""
    options = {r.region: r.options for r in plan.regions}
    known = regions(plan.model, plan.layout)
    if set(options) != {r.name for r in known} or len(options) != len(plan.regions):
        raise ValueError(f"plan regions {sorted(r.region for r in plan.regions)} are not the model's {sorted(r.name for r in known)}")
    for region in known:
        covered = sum(o.count for o in options[region.name])
        if covered != region.count:
            raise ValueError(f"region {region.name}: options cover {covered} of {region.count} blocks")
    return [(region, options[region.name]) for region in known]


def lower(plan: Plan, calibration: Calibration | None, *, factors: Mapping[str, Factors] | None = None, loads: TableLoads | None = None) -> Lowered:
    """The step of the slowest rank. `factors`: its events and pairs over the average, by sequence (`costmodel.imbalance`). `loads`: what ranks hold
    and serve, where it is known already or not that of `plan.tables` (a search prices placements that it has not made).

    Raises ValueError where the plan does not fit its model, workload or cluster.
    """
    if plan.layout.world_size > plan.cluster.num_ranks:
        raise ValueError(f"layout {plan.layout.short} needs {plan.layout.world_size} ranks, cluster {plan.cluster.name} has {plan.cluster.num_ranks}")
    batch = batch_shape(plan, factors)
    if loads is None:
        loads = table_loads(plan, {name: shape.tokens for name, shape in batch.sequences.items()})
    shared = pricer(plan, calibration)
    shared.keep(batch)
    builder = _Builder(plan, shared, network(plan.cluster, calibration, plan.transport), batch, loads)
    builder.step()
    return Lowered(graph=StepGraph(tasks=tuple(builder.tasks)), parts=_merged(builder.parts), model_flops=model_flops(plan),
                   compute_bound=builder.compute_bound, batch=batch, loads=loads, load=builder.load,
                   waiting=shared.waiting, notes=_notes(plan, builder), early=builder.early,
                   accumulated=builder.accumulated)


def _merged(parts: list[tuple[str, str, Source, float, float]]) -> tuple[tuple[str, str, Source, float, float], ...]:
    """Parts of one (phase, curve, source) added up: seconds, and seconds x width, back to one width."""
    total: dict[tuple[str, str, Source], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for phase, curve, source, seconds, width in parts:
        entry = total[(phase, curve, source)]
        entry[0] += seconds
        entry[1] += width if curve.startswith("composition:") else seconds * width
    return tuple((phase, curve, source, seconds, spread) for (phase, curve, source), (seconds, spread) in total.items())


def _notes(plan: Plan, builder: _Builder) -> tuple[str, ...]:
    notes = []
    missing = sorted({curve.removeprefix("roofline:") for _, curve, *_ in builder.parts if curve.startswith("roofline:")})
    if builder.pricer.calibration is not None and missing:
        notes.append(f"no measured curve for {', '.join(missing)}: roofline")
    if builder.pricer.calibration is None:
        notes.append(f"device {plan.cluster.device.name} is not calibrated: every op is roofline with assumed efficiencies")
    elif not builder.pricer.calibration.matches(plan.cluster.device):
        measured_on = builder.pricer.calibration.environment.device_name
        notes.append(f"utilisation carried over from {measured_on} to {plan.cluster.device.name}: extrapolated")
    return tuple(notes)
