"""A unit's parameters as FSDP gathers them in 8 bits: each rank quantises its shard, bytes cross the wire, every rank restores all shards.

Parameters of two or more dimensions are sent as e4m3 with an fp32 scale a row of their last dimension, others (norms, biases) in 16 bits: small,
and a mantissa of three bits would round their updates away. The masters stay fp32. `costmodel.wire.gather_width` counts the same bytes.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from costmodel.wire import SCALE_BYTES
from kernels import _fp8
from kernels.norm_quant import quantize


@dataclasses.dataclass(frozen=True, slots=True)
class ShardFormat:
    """Packs a rank's flat 16-bit shard of several parameters. `pieces`: (rows, width) of each one's padded shard, width 0 where it stays in 16 bits
    and rows are its elements."""

    pieces: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], ranks: int) -> ShardFormat:
        """Of parameters of these shapes, split on their first dimension over `ranks`."""
        pieces = []
        for shape in shapes:
            elements = -(-shape[0] // ranks) * shape[1:].numel() if len(shape) else 1
            width = shape[-1] if len(shape) > 1 else 0
            pieces.append((elements // width, width) if width else (elements, 0))
        return cls(tuple(pieces))

    @property
    def num_bytes(self) -> int:
        return sum(rows * (width + SCALE_BYTES) if width else 2 * rows for rows, width in self.pieces)

    def pack(self, flat: Tensor) -> Tensor:
        """`(num_bytes,)` uint8 of the shard."""
        parts = []
        for (rows, width), piece in zip(self.pieces, flat.split([rows * max(1, width) for rows, width in self.pieces])):
            if not width:
                parts.append(piece.view(torch.uint8))
            elif rows:
                made = quantize(piece.view(rows, width), scaling="rowwise")
                parts += [made.values.view(torch.uint8).flatten(), made.scales.contiguous().view(torch.uint8).flatten()]
        return torch.cat(parts)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Writes the shards of all ranks, `packed` of them one after the other, into `out` likewise, in its dtype."""
        rows_of_bytes, targets = packed.view(-1, self.num_bytes), out.view(-1, sum(rows * max(1, width) for rows, width in self.pieces))
        ranks, at, to = len(rows_of_bytes), 0, 0
        for rows, width in self.pieces:
            if not width:
                targets[:, to:to + rows] = _bytes(rows_of_bytes, at, 2 * rows).view(out.dtype)
                at, to = at + 2 * rows, to + rows
                continue
            values = _bytes(rows_of_bytes, at, rows * width).view(torch.float8_e4m3fn)
            at += rows * width
            scales = _bytes(rows_of_bytes, at, SCALE_BYTES * rows).view(torch.float32)
            at += SCALE_BYTES * rows
            whole = _fp8.from_e4m3(values).view(ranks, rows, width) * scales.unsqueeze(2)
            targets[:, to:to + rows * width] = whole.view(ranks, -1)
            to += rows * width


def _bytes(packed: Tensor, begin: int, count: int) -> Tensor:
    """Columns of `packed`, copied, so that wider numbers lie aligned."""
    return packed[:, begin:begin + count].clone(memory_format=torch.contiguous_format)
