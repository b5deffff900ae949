"""What rows of tables take on the wire, forwards and their gradients backwards, by number format.

    fp32, bf16, fp16    4, 2, 2 bytes an element
    fp8, int8           1 byte an element and an fp32 scale a row
    int4                half a byte an element, a row's rounded up, and an fp32 scale a row

A row is that of a shard: a column shard's rows are as wide as the shard. The runtime packs a row and its scale together (runtime.precision.wire)
and counts the same bytes.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from costmodel.model import TableGroup
from costmodel.plan import Plan, Wire
from costmodel.sparse import TableLoads

if TYPE_CHECKING:
    from costmodel.blocks import Block

SCALE_BYTES = 4
LOW_WIRES = ("fp8", "int8", "int4")
_ELEMENT_BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


def row_bytes(wire: str, width: int) -> int:
    """Bytes of one row of `width` elements, its scale included."""
    return math.ceil(_ELEMENT_BYTES[wire] * width) + (SCALE_BYTES if wire in LOW_WIRES else 0)


def gather_width(block: Block, width: float, gather_dtype: str | None) -> float:
    """Mean bytes of a parameter of `block` on the wire of FSDP's all-gather, where its region computes in `width` bytes. In fp8 parameters of two
    or more dimensions have a scale a row of the last one, the others keep 16 bits (runtime.precision.gather)."""
    if gather_dtype is None or width > 2:
        return width
    sizes = [(math.prod(shape), shape[-1] if len(shape) > 1 else 0) for _, shape in block.parameters]
    return sum(n + SCALE_BYTES * n / last if last else 2.0 * n for n, last in sizes) / max(1, sum(n for n, _ in sizes))


def wires(tables: Iterable[TableGroup], forward: Wire | None, gradients: Wire | None) -> tuple[Wire, Wire]:
    """(format of rows, of their gradients). Rows default to bf16 where every table is, else fp32; gradients to the rows' format, bf16 where that is
    below 16 bits."""
    dtypes = [t.dtype for t in tables]
    rows = forward or ("bf16" if dtypes and all(d == "bf16" for d in dtypes) else "fp32")
    return rows, gradients or ("bf16" if rows in LOW_WIRES else rows)


def wire_bytes(plan: Plan, loads: TableLoads) -> tuple[float, float]:
    """Bytes that an average rank sends of rows, and gets of gradients, in a micro-batch."""
    elements = float(loads.served.mean()) if len(loads.served) else 0.0
    held = [by_rank.sum(axis=1) for by_rank in loads.held.values()]
    wide = sum(float(h[1]) for h in held)
    rows = elements * sum(float(h[0]) for h in held) / wide if wide else 0.0
    forward, backward = (_ELEMENT_BYTES[wire] * elements + SCALE_BYTES * rows * (wire in LOW_WIRES)
                         for wire in wires(plan.model.tables, plan.wire, plan.wire_gradients))
    return forward, backward
