"""Times of a plan under a `costmodel.systems.System`: the ops that such a system launches, one after the other.

What a calibration says of the runtime's own modules (blocks timed whole, a step's shares, FSDP2's copies where nothing is sharded) is left out.

    products    no faster than a large one that was timed for a tenth of a second (`peak_flops/bf16` over the peak of the calibration's device):
                those of a curve were timed for milliseconds, and in a step full of products a device runs into its power limit
    rows        distinct ones come no faster than a copy (`memory_bandwidth`); those of a curve came from the cache in part
    fp8_tensor  scales of the tensor itself need its greatest value first: e bytes an element more than one pass of quantisation
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from costmodel import compute
from costmodel.blocks import BatchShape, Block
from costmodel.calibration import Calibration, OpTime
from costmodel.cluster import Device
from costmodel.ops import FORWARD, Op, dtype_bytes, op
from costmodel.plan import Plan
from costmodel.pricer import NO_COST, Cost, Pricer, summed
from costmodel.systems import OPTIMIZER_BYTES, System, executed


@dataclasses.dataclass(frozen=True, slots=True)
class Sustained:
    """What a device keeps up of its peak and of its bandwidth, as shares; 1 where nobody timed it."""

    compute: float = 1.0
    memory: float = 1.0

    @classmethod
    def of(cls, calibration: Calibration | None) -> Sustained:
        if calibration is None:
            return cls()
        peak, bandwidth = compute.peak_flops(calibration.device, "bf16"), calibration.device.memory_bandwidth
        return cls(min(1.0, calibration.constants.get("peak_flops/bf16", peak) / peak),
                   min(1.0, calibration.constants.get("memory_bandwidth", bandwidth) / bandwidth))

    def seconds(self, seconds: float, one: Op, phase: str, device: Device) -> float:
        """Seconds of all repetitions of an op, at least those that such a device takes."""
        if one.kind in ("linear", "bmm"):
            return max(seconds, compute.limits(one, phase, device)[0] / self.compute)
        if one.kind == "embedding_lookup":
            distinct = one.count * min(one.feature("unique"), one.feature("ids")) * one.feature("dim") * dtype_bytes(one.dtype)
            return max(seconds, distinct / (self.memory * device.memory_bandwidth))
        return seconds


class ForeignPricer(Pricer):
    """Times of ops and blocks as `plan.system` executes them."""

    def __init__(self, plan: Plan, calibration: Calibration | None) -> None:
        super().__init__(plan, calibration)
        assert plan.system is not None
        self.system: System = plan.system
        self._sustained = Sustained.of(calibration)
        # pooled rows come in what they cross in
        self._narrow = plan.exchange == "pooled" and plan.wire in ("bf16", "fp16")

    def time(self, one: Op, phase: str) -> OpTime:
        found = super().time(one, phase)
        seconds = self._sustained.seconds(found.seconds, one, phase, self.device)
        return found if seconds == found.seconds else dataclasses.replace(found, seconds=seconds)

    def expanded(self, ops: Iterable[Op], phase: str) -> list[tuple[Op, str]]:
        found: list[tuple[Op, str]] = []
        for one in ops:
            parts = super().expanded((one,), phase)
            if one.dtype == "fp8_tensor":
                parts = [(_in_two_passes(part), at) if part.kind == "quantize" else (part, at) for part, at in parts]
            found += parts
        return found

    def block(self, block: Block, batch: BatchShape, precision: str, phase: str) -> Cost:
        key = self._key(block, batch, precision, phase)
        if key not in self._blocks:
            self._blocks[key] = self._run(self._forward(block, batch, precision), phase, block.kind)
        return self._blocks[key]

    def recompute(self, block: Block, batch: BatchShape, precision: str, policy: str) -> Cost:
        key = self._key(block, batch, precision, policy)
        if key not in self._blocks:
            self._blocks[key] = self._run(block.recomputed(batch, precision, policy), FORWARD, block.kind)
        return self._blocks[key]

    def _run(self, ops: Sequence[Op], phase: str, kind: str) -> Cost:
        if self._narrow:
            ops = tuple(dataclasses.replace(one, dtype="bf16") if one.kind == "elementwise" and one.variant == "cat" else one for one in ops)
        costs = [self.ops([one], at) for one, at in executed(ops, phase, self.system, kind)]
        return summed(costs) if costs else NO_COST

    def optimizer(self, parameters: float, tensors: float, *, sharded: bool) -> Cost:
        return super().optimizer(parameters * OPTIMIZER_BYTES[self.system.optimizer] / OPTIMIZER_BYTES["adamw"], tensors, sharded=sharded)

    def unit(self, kind: str, block: Block, *, whole: bool = False) -> Cost:
        """Where every rank holds all parameters nothing is gathered: a copy of 16 bits is made of them, and gradients are reduced where they are."""
        if not whole:
            return super().unit(kind, block)
        if kind == "fsdp_reduce":
            return NO_COST
        return self.ops([op("cast", m=block.num_parameters / 1024, n=1024, dtype="bf16")], FORWARD)


def _in_two_passes(one: Op) -> Op:
    """A quantisation of more rows, whose bytes are those of one behind a search for the greatest value."""
    each = dtype_bytes(one.dtype)
    return op("quantize", m=one.feature("m") * (2 * each + 1) / (each + 1), n=one.feature("n"), dtype=one.dtype, count=one.count)
