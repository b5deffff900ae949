"""Times of ops and blocks on a plan's device: what the tasks of `costmodel.lower` take.

A block's time is the sum of its ops' times under the calibration's correction of that block kind; a missing curve falls to the roofline and says so.
Blocks that are not launched eagerly (`costmodel.execution`) are priced as those that are: compiled ones at the shares of the device's and of the
host's time that were measured for their kind (`compiled/<phase>:<kind>`, `compiled_host/...`), captured ones are launched with the loss.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from costmodel import compute
from costmodel.blocks import BatchShape, Block
from costmodel.blocks.base import MATRIX_OPS, QUANTIZED
from costmodel.blocks.measured import block_features
from costmodel.calibration import MINIMUM_WIDTH, Calibration, Composition, OpTime
from costmodel.cluster import Cluster
from costmodel.execution import compiled_share
from costmodel.gpu import block_key, timed_ops
from costmodel.hosttime import HostTimes
from costmodel.ops import BACKWARD, FORWARD, STEP, Op, op
from costmodel.plan import Plan
from costmodel.precision import LOW_PRECISIONS, expanded
from costmodel.quantity import Source, worst
from costmodel.regions import Region, over_samples, regions
from costmodel.systems import System
from costmodel.work import TIMED, timed_work, work

# Main-thread time of a step outside everything else (loop, metrics) [Assumed where not measured].
STEP_OVERHEAD_SECONDS = 2e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of a run of ops: seconds and host seconds, FLOPs and bytes, seconds of ops whose roof is compute, and what they lean on: (curve, source,
    seconds, width) each."""

    seconds: float
    host_seconds: float
    flops: float
    bytes: float
    compute_bound: float
    parts: tuple[tuple[str, Source, float, float], ...]

    @property
    def source(self) -> Source:
        return worst(source for _, source, _, _ in self.parts)


def summed(costs: Sequence[Cost]) -> Cost:
    """The cost of runs of ops one after the other."""
    return Cost(seconds=sum([c.seconds for c in costs]), host_seconds=sum([c.host_seconds for c in costs]), flops=sum([c.flops for c in costs]),
                bytes=sum([c.bytes for c in costs]), compute_bound=sum([c.compute_bound for c in costs]),
                parts=tuple([part for c in costs for part in c.parts]))


NO_COST = Cost(seconds=0.0, host_seconds=0.0, flops=0.0, bytes=0.0, compute_bound=0.0, parts=())


class Pricer:
    """Times of ops and blocks on one plan's device under one calibration."""

    def __init__(self, plan: Plan, calibration: Calibration | None) -> None:
        self.device, self.calibration = plan.cluster.device, calibration
        self.low_weight_gradients = "low_weight_gradients" in plan.recipe
        self.active_ranks = plan.cluster.devices_per_host if self.device.kind == "cpu" else 1
        if plan.layout.world_size < self.active_ranks:
            self.active_ranks = plan.layout.world_size
        # seconds of compute on a shared machine: the share of a core that a rank gets, then what it waits for ranks that got less (costmodel.samples)
        self.waiting = calibration.host_constant("peer_wait", self.active_ranks, 0.0) if calibration is not None else 0.0
        share = calibration.host_constant("processor_share", self.active_ranks, 1.0) if calibration is not None else 1.0
        self._stretch = (1.0 + self.waiting) / share
        self.host = HostTimes(calibration.constants if calibration is not None and self.device.kind == "gpu" else {})
        self._costs: dict[tuple[Op, str], Cost] = {}
        self._blocks: dict[tuple[int, int, str, str], Cost] = {}
        self._forwards: dict[tuple[int, int, str], Sequence[Op]] = {}
        self._kept: list[BatchShape] = []
        self._known: dict[int, Block] = {}

    def _key(self, block: Block, batch: BatchShape, *rest: str) -> tuple:
        """What a block's costs are kept by; its identity stays taken as long as they are, for blocks come and go in a process that plans for long."""
        self._known[id(block)] = block
        return (id(block), id(batch), *rest)

    def keep(self, batch: BatchShape) -> None:
        """Block costs are kept by the batch's identity, which must then stay taken."""
        if any(batch is kept for kept in self._kept):
            return
        if len(self._kept) >= MAX_BATCHES:
            self._kept.clear()
            self._blocks.clear()
            self._forwards.clear()
            self._known.clear()
        self._kept.append(batch)

    @property
    def step_overhead(self) -> tuple[float, Source]:
        """Seconds of a step that no op has, behind its optimizer, and where they are from."""
        measured = None
        if self.calibration is not None:
            measured = self.calibration.constants.get(f"step_overhead/{self.active_ranks}", self.calibration.constants.get("step_overhead"))
        return (measured, "interpolated") if measured is not None else (STEP_OVERHEAD_SECONDS, "assumed")

    def time(self, one: Op, phase: str) -> OpTime:
        """Seconds of one op (all repetitions)."""
        if self.calibration is not None:
            time = self.calibration.predict(one, phase, active_ranks=self.active_ranks, device=self.device)
            return time if self._stretch == 1.0 else dataclasses.replace(time, seconds=time.seconds * self._stretch)
        host = one.count * compute.EAGER_LAUNCH_SECONDS if self.device.kind == "gpu" else 0.0
        return OpTime(seconds=compute.roofline_seconds(one, phase, self.device), host_seconds=host, source="roofline",
                      width=MINIMUM_WIDTH["roofline"], curve=f"roofline:{one.kind}")

    def ops(self, ops: Sequence[Op], phase: str) -> Cost:
        """The sum over ops in one phase."""
        costs = [self._costs.get((one, phase)) or self._cost(one, phase) for one in ops]
        return costs[0] if len(costs) == 1 else summed(costs)

    def _cost(self, one: Op, phase: str) -> Cost:
        made = [self._timed(part, way) for part, way in self.expanded((one,), phase)]
        cost = self._costs[one, phase] = made[0] if len(made) == 1 else summed(made)
        return cost

    def expanded(self, ops: Iterable[Op], phase: str) -> list[tuple[Op, str]]:
        """(op, phase that it is timed in): linear layers below 16 bits as their quantisations and products (costmodel.precision)."""
        return expanded(((one, phase) for one in ops), self.device, low_weight_gradients=self.low_weight_gradients)

    def _timed(self, one: Op, phase: str) -> Cost:
        time, (at_peak, at_bandwidth) = self.time(one, phase), compute.limits(one, phase, self.device)
        seen = self.host.op(one, phase)
        cost = self._costs[one, phase] = Cost(
            seconds=time.seconds, host_seconds=time.host_seconds if seen is None else seen, flops=one.flops(phase),
            bytes=one.bytes(phase), compute_bound=time.seconds if at_peak >= at_bandwidth else 0.0,
            parts=((time.curve, time.source, time.seconds, time.width),))
        return cost

    def captured(self, block: Block) -> bool:
        """Whether the block is part of CUDA graphs."""
        return False

    def _forward(self, block: Block, batch: BatchShape, precision: str) -> Sequence[Op]:
        """The ops of a block's forward."""
        key = self._key(block, batch, precision)
        if key not in self._forwards:
            self._forwards[key] = block.forward(batch, precision)
        return self._forwards[key]

    def block(self, block: Block, batch: BatchShape, precision: str, phase: str) -> Cost:
        """One block's forward or backward, corrected by its kind's composition."""
        key = self._key(block, batch, precision, phase)
        if key not in self._blocks:
            cost = self._corrected(block, batch, self.ops(self._forward(block, batch, precision), phase), phase, precision)
            seen = self.host.block(block, batch, precision, phase)
            host = cost.host_seconds if seen is None else seen
            self._blocks[key] = cost if host == cost.host_seconds else dataclasses.replace(cost, host_seconds=host)
        return self._blocks[key]

    def recompute(self, block: Block, batch: BatchShape, precision: str, policy: str) -> Cost:
        """What runs again before a block's backward."""
        key = self._key(block, batch, precision, policy)
        if key not in self._blocks:
            again = block.recomputed(batch, precision, policy)
            cost = self._under_policy(block, batch, precision, policy, again)
            if cost is None:
                cost = self.ops(again, FORWARD) if again else NO_COST
                if again and policy not in QUANTIZED:  # whose passes are no part of the forward that was timed
                    cost = self._corrected(block, batch, cost, FORWARD, precision, ops=again)
            seen = self.host.policy(block, batch, precision, policy)
            self._blocks[key] = cost if seen is None or not again else dataclasses.replace(cost, host_seconds=max(sum(seen), 0.0))
        return self._blocks[key]

    def early(self, block: Block, batch: BatchShape, precision: str, policy: str) -> float:
        """Host seconds of `recompute` that are spent in forward already."""
        forward, backward = self.host.policy(block, batch, precision, policy) or (0.0, 0.0)
        return min(max(forward, 0.0), max(forward + backward, 0.0))

    def _under_policy(self, block: Block, batch: BatchShape, precision: str, policy: str, again: Sequence[Op]) -> Cost | None:
        """What a policy adds to a block's backward, and to the host's time in both directions, where blocks were timed under it; else None."""
        if not again or self._composition(block, BACKWARD, precision, policy) is None:
            return None
        forward, plain = self.ops(self._forward(block, batch, precision), FORWARD), self.block(block, batch, precision, BACKWARD)
        run = self.ops(again, FORWARD)
        both = self.ops(self._forward(block, batch, precision), BACKWARD)
        both = dataclasses.replace(both, seconds=both.seconds + run.seconds, host_seconds=both.host_seconds + run.host_seconds,
                                   flops=both.flops + run.flops, bytes=both.bytes + run.bytes, parts=(*both.parts, *run.parts))
        whole = self._corrected(block, batch, both, BACKWARD, precision, policy)
        host = whole.host_seconds - plain.host_seconds
        if self._composition(block, FORWARD, precision, policy) is not None:
            host += (self._corrected(block, batch, forward, FORWARD, precision, policy).host_seconds
                     - self._corrected(block, batch, forward, FORWARD, precision).host_seconds)
        seconds = max(whole.seconds - plain.seconds, 0.0)
        share = seconds / whole.seconds if whole.seconds > 0 else 0.0
        return Cost(seconds=seconds, host_seconds=max(host, 0.0), flops=run.flops, bytes=run.bytes, compute_bound=run.compute_bound,
                    parts=tuple((curve, source, value * share, width if curve.startswith("roofline") else width * share if curve.startswith(
                        "composition:") else width) for curve, source, value, width in whole.parts))

    def _composition(self, block: Block, phase: str, precision: str, policy: str = "none") -> Composition | None:
        if self.calibration is None:
            return None
        name = block.kind if self.device.kind == "cpu" else block_key(block.kind, precision, policy)
        found = self.calibration.composition(name, phase, self.active_ranks)
        if found is None and precision in LOW_PRECISIONS:  # what a block does beside its linear layers is 16 bits' business
            return self._composition(block, phase, "bf16", policy)
        return found

    def _in_step(self, phase: str, cost: Cost, seconds: float, precision: str) -> float:
        """Seconds within a step over those of blocks timed alone, by the share of the peak that they reach there."""
        constants = self.calibration.constants if self.calibration is not None else {}
        factor, slope = constants.get(f"in_step/{phase}", 1.0), constants.get("in_step/slope", 0.0)
        if not slope or seconds <= 0:
            return factor
        used = min(cost.flops / (seconds * compute.peak_flops(self.device, precision)), 1.0)
        return factor * math.exp(slope * (used - constants.get("in_step/utilisation", used)))

    def optimizer(self, parameters: float, tensors: float, *, sharded: bool) -> Cost:
        """AdamW on `parameters` of this rank in so many tensors, `sharded` over ranks or its own."""
        cost = self.ops([op("adamw", parameters=parameters, tensors=tensors)], STEP)
        seen = self.host.sharded_optimizer(tensors) if sharded else None
        return cost if seen is None else dataclasses.replace(cost, host_seconds=seen)

    def unit(self, kind: str, block: Block, *, whole: bool = False) -> Cost:
        """Copies and bookkeeping of one FSDP unit: `fsdp_gather` or `fsdp_reduce`; `whole`: of one that every rank holds whole."""
        # all that it depends on, not the block's identity, which another block may have after it
        key = (block.num_parameters, block.num_tensors, kind, "whole" if whole else "sharded")
        if key not in self._blocks:
            cost, host = self.ops([op(kind, parameters=block.num_parameters, tensors=block.num_tensors)], STEP), None
            if whole:
                host = self.host.unit(f"{kind}@1", block.num_tensors)
            self._blocks[key] = cost if host is None else dataclasses.replace(cost, host_seconds=host)
        return self._blocks[key]

    def _corrected(self, block: Block, batch: BatchShape, cost: Cost, phase: str, precision: str, policy: str = "none",
                   ops: Sequence[Op] | None = None) -> Cost:
        """Inside the measured blocks the ops' own errors are part of the correction, outside they add to it. ops: what `cost` is of, where that is
        not all of the block's."""
        found = self._composition(block, phase, precision, policy)
        features = block_features(block, batch) if found is not None else None
        if found is None or features is None:
            return cost
        ratio, width, outside = found.ratio(features)
        if found.shares and cost.seconds > 0:
            timed = expanded(timed_ops(self._forward(block, batch, precision) if ops is None else ops, phase, policy, MATRIX_OPS), self.device,
                             low_weight_gradients=self.low_weight_gradients)
            if len(found.shares) == len(TIMED):
                reference = timed_work((one.kind, self.ops((one,), at).seconds) for one, at in timed)
            else:
                reference = work(timed, features, self.device)
            ratio *= float(reference @ np.array(found.shares)) / cost.seconds
        ratio *= self._in_step(phase, cost, cost.seconds * ratio, precision)
        known = 0.0 if outside < 0.1 else 1.0
        parts = tuple((f"block:{block.kind}/{phase}" if curve.startswith("roofline:") else curve, "interpolated" if source == "roofline" else source,
                       seconds * ratio, known * error) for curve, source, seconds, error in cost.parts)
        return dataclasses.replace(cost, seconds=cost.seconds * ratio, host_seconds=cost.host_seconds * found.host_ratio,
                                   compute_bound=cost.compute_bound * ratio,
                                   parts=(*parts, (f"composition:{block.kind}/{phase}", "measured", 0.0, width * cost.seconds * ratio)))


class CompiledPricer(Pricer):
    """Every block compiled by itself."""

    def __init__(self, plan: Plan, calibration: Calibration | None) -> None:
        super().__init__(plan, calibration)
        self._eager = pricer(dataclasses.replace(plan, execution="eager"), calibration)

    def keep(self, batch: BatchShape) -> None:
        super().keep(batch)
        self._eager.keep(batch)

    def block(self, block: Block, batch: BatchShape, precision: str, phase: str) -> Cost:
        key = self._key(block, batch, precision, phase)
        if key not in self._blocks:
            cost = self._eager.block(block, batch, precision, phase)
            device, host = compiled_share(self.calibration, block.kind, phase) or (1.0, compute.COMPILED_LAUNCH_SHARE)
            self._blocks[key] = dataclasses.replace(
                cost, seconds=cost.seconds * device, compute_bound=cost.compute_bound * device, host_seconds=cost.host_seconds * host,
                parts=tuple((curve, source, seconds * device, width) for curve, source, seconds, width in cost.parts))
        return self._blocks[key]

    def recompute(self, block: Block, batch: BatchShape, precision: str, policy: str) -> Cost:
        return self._eager.recompute(block, batch, precision, policy)


class GraphPricer(Pricer):
    """What works on samples alone is one graph a direction."""

    def __init__(self, plan: Plan, calibration: Calibration | None) -> None:
        super().__init__(plan, calibration)
        self._eager = pricer(dataclasses.replace(plan, execution="eager"), calibration)
        self._model = plan.model
        self._regions: tuple[Region, ...] = ()
        self._captured: frozenset[int] = frozenset()

    def keep(self, batch: BatchShape) -> None:
        super().keep(batch)
        self._eager.keep(batch)

    def captured(self, block: Block) -> bool:
        known = regions(self._model)
        if self._regions is not known:  # made anew since
            names = over_samples(self._model)
            self._regions, self._captured = known, frozenset(id(r.block) for r in known if r.name in names)
        return id(block) in self._captured

    def block(self, block: Block, batch: BatchShape, precision: str, phase: str) -> Cost:
        cost = self._eager.block(block, batch, precision, phase)
        if not self.captured(block):
            return cost
        share = compute.GRAPH_LAUNCH_SECONDS / compute.EAGER_LAUNCH_SECONDS if self.host.get(f"{phase}:graph") is None else 0.0
        return dataclasses.replace(cost, host_seconds=share * cost.host_seconds)

    def recompute(self, block: Block, batch: BatchShape, precision: str, policy: str) -> Cost:
        return self._eager.recompute(block, batch, precision, policy)

    def _timed(self, one: Op, phase: str) -> Cost:
        cost, seen = super()._timed(one, phase), self.host.get(f"{phase}:graph")
        return cost if one.kind != "bce" or seen is None else dataclasses.replace(cost, host_seconds=seen)


_PRICERS = {"eager": Pricer, "compile": CompiledPricer, "cuda_graph": GraphPricer}
_MAX_PRICERS = 16
MAX_BATCHES = 256  # batches whose block costs are kept
_pricers: dict[tuple[int, int, str, int, int, tuple[str, ...], System | None], tuple[Plan, Calibration | None, Pricer]] = {}


_clusters: list[Cluster] = []


def _cluster(own: Cluster) -> int:
    """A number of a cluster, the same for equal ones, as plans read from files have; it holds as long as pricers are kept."""
    for number, known in enumerate(_clusters):
        if known is own or known == own:
            return number
    if len(_clusters) >= _MAX_PRICERS:
        _clusters.clear()
        _pricers.clear()
    _clusters.append(own)
    return len(_clusters) - 1


def pricer(plan: Plan, calibration: Calibration | None) -> Pricer:
    """The Pricer of the plan's cluster, calibration, execution and ranks on a host, made once: candidates of a search share block costs. What is
    captured is a model's own."""
    model = id(plan.model) if plan.execution == "cuda_graph" else 0
    key = (_cluster(plan.cluster), id(calibration), plan.execution, model, min(plan.layout.world_size, plan.cluster.devices_per_host), plan.recipe,
           plan.system)
    if key not in _pricers:
        if len(_pricers) >= _MAX_PRICERS:
            _pricers.clear()
        made = _made(plan, calibration)  # which may make an eager one, and may clear the others
        _pricers[key] = (plan, calibration, made)
    return _pricers[key][2]


def _made(plan: Plan, calibration: Calibration | None) -> Pricer:
    if plan.system is None:
        return _PRICERS[plan.execution](plan, calibration)
    from costmodel.foreign import ForeignPricer  # which is one of these

    return ForeignPricer(plan, calibration)
