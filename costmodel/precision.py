"""Number formats below 16 bits: what a linear layer needs of its shape, where it is native, and what it is made of.

One linear layer `(m, k) @ (k, n)` of a region under an 8-bit precision, as `runtime.precision.linear` executes it:

    forward    quantise x (m, k) and w (n, k); product in 8 bits
    backward   quantise dy (m, n) and w^T (k, n); dx in 8 bits; dw in 16 bits, or, with `low_weight_gradients`, quantise dy^T and x^T and
               multiply in 8 bits

    precision    scales                                                        k and n are multiples of
    fp8_tensor   one a tensor, of the tensor itself                            16
    fp8_row      one a row of either factor along the contraction              16
    fp8_block    one per 1 x 128 of either factor                              128
    mxfp8        E8M0, 1 x 32 of activations and gradients, 32 x 32 of weights 32

On a device without the format the runtime quantises, restores and multiplies in a wider format: the numbers are those of the format, the
speed is not.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from costmodel.cluster import Device
from costmodel.ops import BACKWARD, FORWARD, Op, linear, op

if TYPE_CHECKING:
    from costmodel.blocks import Block
    from costmodel.plan import Plan

LOW_PRECISIONS = ("fp8_tensor", "fp8_row", "fp8_block", "mxfp8")
MULTIPLES = {"fp8_tensor": 16, "fp8_row": 16, "fp8_block": 128, "mxfp8": 32}


def native(device: Device, precision: str) -> bool:
    """Whether the device computes in this number format by itself. One that states no formats is taken to have those that it gives a peak for."""
    if device.native_formats:
        return precision in device.native_formats
    return precision in device.peak_flops or (precision.startswith("fp8_") and "fp8" in device.peak_flops)


def unfit(precision: str, k: float, n: float) -> str | None:
    """Why a linear layer of k inputs and n outputs cannot run under an 8-bit precision; None where it can, and for wider ones."""
    multiple = MULTIPLES.get(precision)
    if multiple is None or not (k % multiple or n % multiple):
        return None
    return f"a linear layer of {k:g} inputs and {n:g} outputs, {precision} needs multiples of {multiple}"


def unfit_block(block: Block, precision: str) -> str | None:
    """The first reason why a linear layer of the block cannot run under `precision`. Two-dimensional parameters named `.weight` are linear layers."""
    if precision not in LOW_PRECISIONS:
        return None
    found = (unfit(precision, shape[1], shape[0]) for name, shape in block.parameters
             if name.endswith(".weight") and len(shape) == 2 and name.removesuffix(".weight") not in block.keeps_16_bits)
    return next((reason for reason in found if reason), None)


def emulated(plan: Plan) -> tuple[str, ...]:
    """Formats of the plan that its device has not: their numbers are exact there, their predicted speed is that of the emulation."""
    used = sorted({o.precision for r in plan.regions for o in r.options if o.precision in LOW_PRECISIONS})
    return tuple(f"{p}: {plan.cluster.device.name} has no native {p}; it is quantised, restored and multiplied in a wider format, so its speed says "
                 "nothing of the format" for p in used if not native(plan.cluster.device, p))


def parts(one: Op, phase: str, device: Device, *, low_weight_gradients: bool = False) -> tuple[Op, ...]:
    """The ops, each timed as a forward, that a linear op of an 8-bit precision is made of in one phase."""
    f, precision, times = dict(one.features), one.dtype, one.count
    m, k, n = f["m"], f["k"], f["n"]
    wide = "fp32" if device.kind == "cpu" else "bf16"
    product = precision if native(device, precision) else wide

    def quantize(rows: float, width: float) -> list[Op]:
        """Emulation also reads the values back."""
        made = [op("quantize", m=rows, n=width, dtype=wide, count=times)]
        return made if product == precision else [*made, op("cast", m=rows, n=width, dtype=wide, count=times)]

    if phase == FORWARD:
        return (*quantize(m, k), *quantize(n, k), linear(m, k, n, product, times))
    assert phase == BACKWARD
    weights = () if precision == "mxfp8" and product == precision else quantize(k, n)  # a square of scales serves both directions
    dx = (*quantize(m, n), *weights, linear(m, n, k, product, times))
    if low_weight_gradients:
        rows = np.ceil(m / MULTIPLES[precision]) * MULTIPLES[precision]  # of zeros where samples end
        return (*dx, *quantize(n, rows), *quantize(k, rows), linear(n, rows, k, product, times))
    return (*dx, linear(n, m, k, "bf16" if device.kind == "gpu" else "fp32", times))


def expanded(ops: Iterable[tuple[Op, str]], device: Device, *, low_weight_gradients: bool = False) -> list[tuple[Op, str]]:
    """(op, phase that it is timed in) of (op, phase): linear layers below 16 bits as their quantisations and products."""
    found: list[tuple[Op, str]] = []
    for one, phase in ops:
        if one.kind == "linear" and one.dtype in LOW_PRECISIONS:
            found += [(part, FORWARD) for part in parts(one, phase, device, low_weight_gradients=low_weight_gradients)]
        else:
            found.append((one, phase))
    return found
