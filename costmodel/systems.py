"""How a system that is not the runtime executes a plan: whose attention it calls, what it fuses, how it updates, what it runs beside what.

A plan without a `System` is the runtime's own. With one, blocks are priced by the ops that such a system launches, without what the runtime's own
blocks take beyond their ops (`costmodel.foreign`):

    attention   softmax attention without a window becomes `sdpa`, torch's own, whatever its backend; `own` leaves it
    fusion      none       every elementwise op is a kernel; norms over root mean squares (`RMS_BLOCKS`) are made of such, in fp32:
                           2 e + 36 bytes an element forward, 2 e + 100 backward, e of the activation (torch.nn.RMSNorm before pytorch#153666, 2025)
                norms      every elementwise op and every norm is a kernel
                compiler   a run of norms, activations and elementwise ops between matrix products is one kernel: what one of them hands on to
                           the next is neither written nor read, a sum (residual streams, which are read again later) is written
                epilogues  as compiler; biases, their gradients and an activation right behind a product are part of products: backward of a linear
                           layer is two products and nothing else
    loss        `compiled`: cross entropy is one kernel forward, which reads the logits, and one backward, which writes their gradient where they were
                read, in the dtype that they have; `eager`: as the runtime's, in fp32
    optimizer   bytes a dense parameter: adamw 28, adamw_foreach 80, adagrad 20 (`OPTIMIZER_BYTES`)

What a fused run takes is what an elementwise product that moves as many bytes takes.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from costmodel.ops import BACKWARD, FORWARD, Op, dtype_bytes, elementwise, linear
from costmodel.precision import LOW_PRECISIONS

ATTENTIONS = ("torch", "cudnn", "own")
FUSIONS = ("none", "norms", "compiler", "epilogues")
LOSSES = ("eager", "compiled")
OVERLAPS = ("none", "embeddings")
TABLE_UPDATES = ("fused", "separate")
# Of AdamW as one kernel, as torch's foreach kernels one after the other (decay 8, first moment 12, second 8 + 12, root 8, correction 8, epsilon 8,
# update 16), and of Adagrad with gradients of 16 bits (gradient 2, parameter 8, sum of squares 8, copy of 16 bits 2).
OPTIMIZER_BYTES = {"adamw": 28.0, "adamw_foreach": 80.0, "adagrad": 20.0}
RMS_BLOCKS = frozenset({"llama", "next_event"})
# Bytes of fp32 an element: square 8, mean 4, two products 8 each, casts 4 each; backward of the same, with the sums of two gradients.
RMS_BYTES = {FORWARD: 36.0, BACKWARD: 100.0}
_BACKENDS = {"torch": "flash", "cudnn": "cudnn"}
_FUSABLE = frozenset({"layer_norm", "activation", "elementwise"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """See the module. overlap `embeddings`: ids cross a step ahead, pooled rows and their gradients beside the bottom MLP (`costmodel.pooled`).
    by_host: bags are summed inside a host before they cross to others (`costmodel.pooled`). table_update `separate`: the gradients of distinct rows
    are written down before they are applied."""

    attention: Literal["torch", "cudnn", "own"] = "torch"
    fusion: Literal["none", "norms", "compiler", "epilogues"] = "none"
    loss: Literal["eager", "compiled"] = "eager"
    optimizer: Literal["adamw", "adamw_foreach", "adagrad"] = "adamw"
    overlap: Literal["none", "embeddings"] = "none"
    by_host: bool = False
    table_update: Literal["fused", "separate"] = "fused"


def executed(ops: Sequence[Op], phase: str, system: System, kind: str) -> list[tuple[Op, str]]:
    """(op, phase that it is timed in) of what `system` launches in `phase` for the ops of a block of `kind`, in the order of forward."""
    found: list[tuple[Op, str]] = []
    run: list[Op] = []
    for one in ops:
        if one.kind not in _FUSABLE:
            found += _launched(run, phase, system, kind)
            if system.fusion == "epilogues" and one.kind == "linear":
                found += _products(one, phase)
            elif system.loss == "compiled" and one.kind == "cross_entropy":
                found.append((moving((1 if phase == FORWARD else 2) * _elements(one) * dtype_bytes(one.dtype), one), FORWARD))
            else:
                found.append((_library(one, system), phase))
            run = []
        elif run or one.kind != "activation" or system.fusion != "epilogues" or not found or found[-1][0].kind != "linear":
            run.append(one)
    return found + _launched(run, phase, system, kind)


def _products(one: Op, phase: str) -> list[tuple[Op, str]]:
    """A linear layer in one direction as products alone; of 8 bits as it is, which is made of them anyway (`costmodel.precision`)."""
    if phase != BACKWARD or one.dtype in LOW_PRECISIONS:
        return [(one, phase)]
    m, k, n = (one.feature(name) for name in "mkn")
    return [(linear(m, n, k, one.dtype, one.count), FORWARD), (linear(n, m, k, one.dtype, one.count), FORWARD)]


def _library(one: Op, system: System) -> Op:
    """Torch's attention in place of the runtime's."""
    if one.kind != "attention" or one.variant != "softmax" or system.attention == "own":
        return one
    return dataclasses.replace(one, kind="sdpa", variant=_BACKENDS[system.attention])


def _launched(run: Sequence[Op], phase: str, system: System, kind: str) -> list[tuple[Op, str]]:
    """The kernels of norms, activations and elementwise ops in a row."""
    if not run:
        return []
    if system.fusion in ("compiler", "epilogues"):
        return [(moving(fused_bytes(run, phase), run[0]), FORWARD)]
    made_of_parts = system.fusion == "none" and kind in RMS_BLOCKS
    return [(moving(_elements(one) * (2 * dtype_bytes(one.dtype) + RMS_BYTES[phase]), one), FORWARD)
            if made_of_parts and one.kind == "layer_norm" else (one, phase) for one in run]


def fused_bytes(run: Sequence[Op], phase: str) -> float:
    """Bytes of a run of elementwise ops as one kernel: those of all of them less what one hands on to the next, which is not written, but for a sum,
    and not read."""
    total = sum(_bytes(one, phase) for one in run)
    for one in run[:-1]:
        total -= (1 if one.variant == "add" else 2) * _elements(one) * dtype_bytes(one.dtype)
    return max(total, 2 * min(_elements(one) * dtype_bytes(one.dtype) for one in run))


def _elements(one: Op) -> float:
    return one.count * one.feature("m") * one.feature("n")


def _bytes(one: Op, phase: str) -> float:
    """An op's; backward of a sum adds the gradients of whatever reads it."""
    return one.bytes(FORWARD if one.variant == "add" else phase)


def moving(num_bytes: float, like: Op) -> Op:
    """An elementwise product, to be timed in forward, that moves so many bytes in rows as wide as those of another op."""
    return elementwise("mul", num_bytes / (3 * dtype_bytes(like.dtype) * like.feature("n")), like.feature("n"), like.dtype)
