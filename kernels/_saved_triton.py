"""Triton kernels behind `kernels.saved`: every element is read once and written once."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._norm_triton import ELEMENTS_PER_THREAD, _even, _magnitude_bits, _shape, _store
from kernels.saved import MX4_BLOCK, MX4_EXPONENT

_BLOCK = tl.constexpr(MX4_BLOCK)
_EXPONENT = tl.constexpr(MX4_EXPONENT)
GROUPS = 128  # blocks of 32 a program: 32 elements a thread of 4 warps


@triton.jit(do_not_specialize=["num_rows"])
def _restore_rows_kernel(values_ptr, scales_ptr, out_ptr, num_rows, dim: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    place = rows[:, None] * dim + cols[None, :]
    if EVEN:
        values = tl.load(values_ptr + place)
    else:
        values = tl.load(values_ptr + place, mask=(rows < num_rows)[:, None] & (cols < dim)[None, :], other=0.0)
    scales = tl.load(scales_ptr + rows, mask=rows < num_rows, other=0.0)
    _store(out_ptr, (values.to(tl.float32) * scales[:, None]).to(out_ptr.dtype.element_ty), rows, cols, num_rows, dim, EVEN)


@triton.jit
def _to_mx4_kernel(x_ptr, codes_ptr, scales_ptr, numel, blocks, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(x_ptr + place, mask=place < numel, other=0.0).to(tl.float32)
    bits = _magnitude_bits(x)
    amax = tl.max(bits, axis=1)
    code = tl.where(amax >= 0x7F800000, 255, tl.maximum((amax >> 23) - _EXPONENT, 1))
    tl.store(scales_ptr + group, code.to(tl.uint8), mask=group < blocks)
    inverse = tl.cast(tl.where(code == 255, 0x7FC00000, (254 - code) << 23), tl.float32, bitcast=True)  # of a power of two: exact
    sizes = tl.cast(bits, tl.float32, bitcast=True) * inverse[:, None]
    places = tl.minimum(tl.minimum(sizes * 2, sizes + 2), sizes * 0.5 + 4)
    found = tl.where(sizes == sizes, tl.minimum(tl.ceil(places - 0.5), 7.0), 0.0).to(tl.int32) | tl.where(x < 0, 8, 0)
    low, high = tl.split(tl.reshape(found, [GROUPS, _BLOCK // 2, 2]))
    target = group[:, None] * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2)[None, :]
    tl.store(codes_ptr + target, (low | (high << 4)).to(tl.uint8), mask=(group < blocks)[:, None])


@triton.jit
def _level(code):
    size = code & 7
    value = tl.where(size < 5, size.to(tl.float32) * 0.5, tl.where(size == 5, 3.0, tl.where(size == 6, 4.0, 6.0)))
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def _from_mx4_kernel(codes_ptr, scales_ptr, out_ptr, numel, blocks, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    source = group[:, None] * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2)[None, :]
    codes = tl.load(codes_ptr + source, mask=(group < blocks)[:, None], other=0).to(tl.int32)
    code = tl.load(scales_ptr + group, mask=group < blocks, other=0).to(tl.int32)
    scale = tl.cast(tl.where(code == 255, 0x7FC00000, tl.where(code == 0, 0x00400000, code << 23)), tl.float32, bitcast=True)
    values = tl.reshape(tl.join(_level(codes & 15), _level(codes >> 4)), [GROUPS, _BLOCK]) * scale[:, None]
    place = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=place < numel)


def restore_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    num_rows, dim = values.shape
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    rows, block_d, warps = _shape(dim, ELEMENTS_PER_THREAD)
    if num_rows:
        _restore_rows_kernel[(triton.cdiv(num_rows, rows),)](values.contiguous(), scales, out, num_rows, dim=dim, ROWS=rows, BLOCK_D=block_d,
                                                             EVEN=_even(values, rows, block_d), num_warps=warps)
    return out


def to_mx4(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    blocks = triton.cdiv(x.numel(), MX4_BLOCK)
    codes = torch.empty(blocks * MX4_BLOCK // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(blocks, dtype=torch.uint8, device=x.device)
    if blocks:
        _to_mx4_kernel[(triton.cdiv(blocks, GROUPS),)](x, codes, scales, x.numel(), blocks, GROUPS=GROUPS, num_warps=4)
    return codes, scales


def from_mx4(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=codes.device)
    if numel:
        blocks = scales.shape[0]
        _from_mx4_kernel[(triton.cdiv(blocks, GROUPS),)](codes, scales, out, numel, blocks, GROUPS=GROUPS, num_warps=4)
    return out
