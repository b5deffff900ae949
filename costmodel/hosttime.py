"""Main-thread time of a step on a GPU, as short runs of the trainer have shown it (`runtime.microbench.hosted`).

What the interpreter spends on a block hardly depends on how much the block computes: it launches the same kernels. A calibration keeps, as constants
`host/<what>` in seconds:

    forward:<kind>@<dtype>[:policy][+mlp]   one layer; backward with what runs again
    backward:<kind>@<dtype>[:policy][+mlp]
    forward:region@<dtype>, backward:...    one of the other regions (inputs, summaries, MLPs, heads)
    forward:graph, backward:graph           what is captured of a micro-batch (`costmodel.execution`) and all that is beside its other regions
    forward:loss, backward:loss             a micro-batch beside its regions
    forward:product, backward:product       a matrix product whose number of rows differs from step to step, as where histories differ in length:
                                            the library chooses its kernel anew, once for each shape of a micro-batch
    accumulate                              a parameter tensor whose gradient is added to the last micro-batch's
    lookup, update                          one table group: every micro-batch, every step
    optimizer, tensor                       a step, and each parameter tensor; of tensors sharded over ranks `optimizer@sharded`, `tensor@sharded`
    input, other                            a micro-batch taken, a step's rest
    fsdp_gather, fsdp_reduce                an FSDP unit's gather, its reduction; and each parameter tensor of it (`:tensor`); where every rank holds
                                            the unit whole, `fsdp_gather@1`, `fsdp_reduce@1`
    exchange:forward, exchange:backward     a micro-batch of a sparse group; each table group (`:group`), each shard of the group (`:shard`)

All of them are times `in_step/host`, where that was measured: steps that the host makes, of whole batches, over what these parts make of them.

    slow                                    how many times longer than at full speed the host is expected to take
    slow:p10, slow:p50, slow:p90            quantiles, over time, of what it was

Where `slow` is known the figures of one GPU's steps are those of a host at full speed, and what is expected is `slow` times as long
(`runtime.microbench.speed`); 1 instead of it is a host that nothing disturbs. Calibrations without it have slowness inside of their figures.

Layers whose time was not seen here have that of the launches of their ops (`costmodel.pricer`).
"""
from __future__ import annotations

from collections.abc import Mapping

from costmodel.blocks.base import BatchShape, Block
from costmodel.gpu import block_key
from costmodel.ops import BACKWARD, FORWARD, Op

PREFIX, WHOLE, SLOW = "host/", "in_step/host", "slow"
# How much longer a host takes at its slowest than at full speed, where a calibration has no quantiles: pieces of Python took up to 1.9 times as long
# on a core, 2.03 times in a whole run [Measured: an H200's host, 2026-12-01], as they would on a core whose other hardware thread is busy.
SLOWEST = 2.0
# Steps take (how many times longer a fixed piece of Python takes)^SLOW_SHARE (`runtime.microbench.speed`).
SLOW_SHARE = 0.75
# Ratios, and what several ranks measure, with the slowness of their hosts inside (`benchmarks.multi_gpu_ranks`).
RATIOS = ("slow", "spread")
NOT_AT_FULL_SPEED = ("exchange:", "fsdp_", "optimizer@sharded", "tensor@sharded")
# Regions that share one figure, for they are a few launches each.
PLAIN = frozenset({"sequence_input", "summary", "mlp", "heads"})
PASSES = (FORWARD, BACKWARD)


def products(block: Block, batch: BatchShape, precision: str, phase: str) -> float:
    """A block's share of the matrix products of a direction whose shape is new: of those whose number of rows is another in every micro-batch, as
    where histories differ in length, one of each shape. The blocks of a group share them, and what runs again meets the shapes of forward."""
    sequence = getattr(block, "sequence", None)
    if sequence is None or sequence not in batch.sequences or not batch.sequences[sequence].varied:
        return 0.0
    counts = block.__dict__.setdefault("_linear", {})  # the same for every batch
    if precision not in counts:
        shapes = {(one.feature("k"), one.feature("n")) for one in block.forward(batch, precision) if one.kind == "linear"}
        counts[precision] = len(shapes) / max(1, getattr(getattr(block, "group", None), "count", 1))
    return counts[precision] * (1 if phase == FORWARD else 2)


def layer_name(block: Block, dtype: str, policy: str = "none") -> str:
    """`<kind>@<dtype>[:policy][+mlp]`, or `region@<dtype>` of a region that shares one figure."""
    if block.kind in PLAIN:
        return f"region@{dtype}"
    group = getattr(block, "group", None)
    return block_key(block.kind, dtype, policy) + ("+mlp" if getattr(group, "mlp_dim", 0) else "")


class HostTimes:
    """The figures above, out of a calibration's constants."""

    def __init__(self, constants: Mapping[str, float]) -> None:
        whole = constants.get(WHOLE, 1.0)
        self.slow, self.at_full_speed = constants.get(f"{PREFIX}{SLOW}", 1.0), f"{PREFIX}{SLOW}" in constants
        figures = {name.removeprefix(PREFIX): value for name, value in constants.items() if name.startswith(PREFIX)}
        self._figures = {name: value * (1.0 if name.startswith(RATIOS) else whole if name.startswith(NOT_AT_FULL_SPEED) else whole * self.slow)
                         for name, value in figures.items()}

    def __bool__(self) -> bool:
        return bool(self._figures)

    def get(self, name: str) -> float | None:
        """Seconds, None where it was not measured."""
        return self._figures.get(name)

    def may_make(self, launch: float, device: float) -> bool | None:
        """Whether the host, which is expected to need `launch` seconds of a step, makes steps for which the device needs `device`; None where that
        hangs on its speed: at its fastest the device would make them, at its slowest the host, where one in ten moments is faster than the one and
        one in ten slower than the other. What hangs on no speed that is known is as expected."""
        if not self.at_full_speed or self.slow <= 1.0:
            return launch > device
        fastest, slowest = (self._figures.get(f"{SLOW}:{share}", other) for share, other in (("p10", 1.0), ("p90", SLOWEST)))
        full = launch / self.slow
        return True if min(fastest, self.slow) * full > device else None if max(slowest, self.slow) * full > device else False

    def block(self, block: Block, batch: BatchShape, dtype: str, phase: str, policy: str = "none") -> float | None:
        """Of one block in one direction; None where its kind was not measured. A dtype that was not is taken for bf16."""
        for precision in dict.fromkeys((dtype, "bf16")):
            found = self.get(f"{phase}:{layer_name(block, precision, policy)}")
            if found is not None:
                each = self.get(f"{phase}:product")
                return found + each * products(block, batch, precision, phase) if each else found
        return None

    def policy(self, block: Block, batch: BatchShape, dtype: str, policy: str) -> tuple[float, float] | None:
        """What a policy adds in (forward, backward), either of which may be negative; None where it was not measured."""
        if policy == "none" or block.kind in PLAIN:
            return (0.0, 0.0)
        under, plain = ([self.block(block, batch, dtype, phase, p) for phase in PASSES] for p in (policy, "none"))
        if None in under or None in plain:
            return None
        forward, backward = (a - b for a, b in zip(under, plain))
        return forward, backward

    def exchange(self, phase: str, groups: int, shards: float) -> float | None:
        """Of a sparse group's exchange in one direction, lookups or updates included; None where it was not measured."""
        fixed, group, shard = (self.get(f"exchange:{phase}{what}") for what in ("", ":group", ":shard"))
        return None if fixed is None or group is None or shard is None else fixed + group * groups + shard * shards

    def unit(self, kind: str, tensors: float) -> float | None:
        """Of an FSDP unit of so many parameter tensors; None where it was not measured."""
        fixed, each = self.get(kind), self.get(f"{kind}:tensor")
        return None if fixed is None or each is None else fixed + each * tensors

    def sharded_optimizer(self, tensors: float) -> float | None:
        """A step of the optimizer on so many parameter tensors, each of them sharded over ranks; None where it was not measured."""
        fixed, each = self.get("optimizer@sharded"), self.get("tensor@sharded")
        return None if fixed is None or each is None else fixed + each * tensors

    def op(self, one: Op, phase: str) -> float | None:
        """Of all repetitions of an op outside the regions; None where it was not measured."""
        if one.kind == "bce":
            return self.get(f"{phase}:loss")
        if one.kind == "adamw":
            fixed, each = self.get("optimizer"), self.get("tensor")
            return None if fixed is None or each is None else fixed + each * one.feature("tensors")
        if one.kind in ("fsdp_gather", "fsdp_reduce"):
            found = self.unit(one.kind, one.feature("tensors"))
            return None if found is None else one.count * found
        each = self.get({"embedding_lookup": "lookup", "embedding_update": "update"}.get(one.kind, ""))
        return None if each is None else each * one.count
