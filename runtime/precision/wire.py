"""Rows of tables as they cross the wire: `costmodel.wire` has the formats and their bytes.

Formats of 8 and 4 bits travel as bytes (gloo knows no fp8): a row's values, then its fp32 scale. A row that is not finite gets a NaN scale and is NaN
when it arrives.
"""
from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from costmodel.plan import Wire
from costmodel.wire import LOW_WIRES, SCALE_BYTES, row_bytes
from kernels.norm_quant import quantize

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = {"int8": 127.0, "int4": 7.0}


@dataclasses.dataclass(frozen=True, slots=True)
class WireFormat:
    """Packs rows `(n, width)` into one flat tensor of `dtype`, `units(width)` of it a row, and back."""

    name: Wire

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES.get(self.name, torch.uint8)

    def units(self, width: int) -> int:
        """Elements of `dtype` that a row takes."""
        return row_bytes(self.name, width) // self.dtype.itemsize

    def pack(self, rows: Tensor) -> Tensor:
        if self.name not in LOW_WIRES:
            return rows.to(self.dtype).flatten()
        if rows.shape[0] == 0:
            return rows.new_empty(0, dtype=torch.uint8)
        if self.name == "fp8":
            made = quantize(rows.float(), scaling="rowwise")
            values, scales = made.values.view(torch.uint8), made.scales
        else:
            values, scales = _to_integers(rows.float(), self.name)
        return torch.cat([values, scales.contiguous().view(torch.uint8)], dim=1).flatten()

    def unpack(self, flat: Tensor, width: int) -> Tensor:
        """`(n, width)` in fp32, or the wide format's own dtype."""
        if self.name not in LOW_WIRES:
            return flat.view(-1, width)
        packed = flat.view(-1, self.units(width))
        scales = packed[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # a copy, for alignment
        values = packed[:, :-SCALE_BYTES].contiguous()
        if self.name == "fp8":
            return values.view(torch.float8_e4m3fn).float() * scales
        if self.name == "int8":
            return values.view(torch.int8).float() * scales
        nibbles = torch.stack([values & 15, values >> 4], dim=2).flatten(1)[:, :width]
        return (nibbles.float() - 8.0) * scales


def _to_integers(rows: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(bytes, scales `(n, 1)`), symmetric, rounded to nearest even; int4 two to a byte, offset by 8."""
    largest = _LARGEST[name]
    amax = rows.abs().amax(1, keepdim=True)
    scales = torch.where(amax.isfinite(), (amax / largest).clamp(min=torch.finfo(torch.float32).tiny), torch.nan)
    whole = (rows / scales).nan_to_num(0.0).round().clamp(-largest, largest).to(torch.int8)
    if name == "int8":
        return whole.view(torch.uint8), scales
    offset = torch.nn.functional.pad(whole + 8, (0, whole.shape[1] % 2), value=8).view(torch.uint8)
    return offset[:, ::2] | offset[:, 1::2] << 4, scales
