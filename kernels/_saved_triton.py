"""Triton kernels behind `kernels.saved`: every element is read once and written once."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import cdiv, launch
from kernels._norm_triton import (
    ELEMENTS_PER_THREAD,
    _columns,
    _even,
    _fp32_scale,
    _load,
    _magnitude_bits,
    _shape,
    _store,
    _to_e4m3,
    norm_backward,
)
from kernels.saved import MX4_BLOCK, MX4_EXPONENT

_BLOCK = tl.constexpr(MX4_BLOCK)
_EXPONENT = tl.constexpr(MX4_EXPONENT)
GELU_ELEMENTS_PER_THREAD = 32
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
def _keep(x, values_ptr, scales_ptr, rows, cols, num_rows, dim, EVEN: tl.constexpr):
    """e4m3 rows of `x` and their scales."""
    scale, inverse = _fp32_scale(tl.max(_magnitude_bits(x), axis=1))
    tl.store(scales_ptr + rows, scale, mask=rows < num_rows)
    _store(values_ptr, _to_e4m3(x * inverse[:, None], rows, cols, 0, False), rows, cols, num_rows, dim, EVEN)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rows_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, values_ptr, scales_ptr, mean_ptr, rstd_ptr, num_rows, eps, dim: tl.constexpr,
                      ROWS: tl.constexpr, BLOCK_D: tl.constexpr, KEEP: tl.constexpr, EVEN: tl.constexpr):
    """LayerNorm of rows. KEEP: `input` or `output`, as it is rounded, is quantised on the way, or `nothing`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    x = _load(x_ptr, rows, cols, num_rows, dim, EVEN).to(tl.float32)
    if KEEP == "input":
        _keep(x, values_ptr, scales_ptr, rows, cols, num_rows, dim, EVEN)
    mean = tl.sum(x, axis=1) / dim
    x -= mean[:, None]
    if not EVEN:
        x = tl.where((cols < dim)[None, :], x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / dim + eps)
    tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    y = x * _columns(weight_ptr, rows, cols, dim, EVEN, tl.float32) * rstd[:, None] + _columns(bias_ptr, rows, cols, dim, EVEN, tl.float32)
    out = y.to(out_ptr.dtype.element_ty)
    _store(out_ptr, out, rows, cols, num_rows, dim, EVEN)
    if KEEP == "output":
        _keep(out.to(tl.float32), values_ptr, scales_ptr, rows, cols, num_rows, dim, EVEN)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_restore_kernel(values_ptr, scales_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, out_ptr, num_rows, dim: tl.constexpr,
                         ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols, inside = tl.arange(0, BLOCK_D), rows < num_rows
    x = _load(values_ptr, rows, cols, num_rows, dim, EVEN).to(tl.float32) * tl.load(scales_ptr + rows, mask=inside, other=0.0)[:, None]
    x_hat = (x - tl.load(mean_ptr + rows, mask=inside, other=0.0)[:, None]) * tl.load(rstd_ptr + rows, mask=inside, other=0.0)[:, None]
    y = x_hat * _columns(weight_ptr, rows, cols, dim, EVEN, tl.float32) + _columns(bias_ptr, rows, cols, dim, EVEN, tl.float32)
    _store(out_ptr, y.to(out_ptr.dtype.element_ty), rows, cols, num_rows, dim, EVEN)


@triton.jit
def _below(x):
    """The normal distribution's share below x, and exp(-x^2 / 2). By formula 7.1.26 of Abramowitz and Stegun, off by 1.5e-7 at most: one exponential
    for both, where erf alone takes as many instructions as the rest of a pass has time for."""
    density = tl.exp2(x * x * -0.7213475204444817)
    t = 1.0 / (1.0 + 0.2316418958 * tl.abs(x))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * density
    return tl.where(x < 0, tail, 1.0 - tail), density


@triton.jit(do_not_specialize=["num_rows"])
def _gelu_rows_kernel(x_ptr, out_ptr, values_ptr, scales_ptr, num_rows, dim: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
                      OF_OUTPUT: tl.constexpr, EVEN: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    x = _load(x_ptr, rows, cols, num_rows, dim, EVEN).to(tl.float32)
    below, _ = _below(x)
    out = (x * below).to(out_ptr.dtype.element_ty)
    _store(out_ptr, out, rows, cols, num_rows, dim, EVEN)
    _keep(out.to(tl.float32) if OF_OUTPUT else x, values_ptr, scales_ptr, rows, cols, num_rows, dim, EVEN)


@triton.jit(do_not_specialize=["num_rows"])
def _gelu_restored_kernel(values_ptr, scales_ptr, grad_ptr, out_ptr, dx_ptr, num_rows, dim: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
                          EVEN: tl.constexpr, OUT: tl.constexpr, GRADIENT: tl.constexpr):
    """GELU of the restored rows, grad times its derivative there, or both; dx may be grad."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    x = _load(values_ptr, rows, cols, num_rows, dim, EVEN).to(tl.float32) * tl.load(scales_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    below, density = _below(x)
    if GRADIENT:
        grad = _load(grad_ptr, rows, cols, num_rows, dim, EVEN).to(tl.float32) * (below + x * density * 0.3989422804014327)
        _store(dx_ptr, grad.to(dx_ptr.dtype.element_ty), rows, cols, num_rows, dim, EVEN)
    if OUT:
        _store(out_ptr, (x * below).to(out_ptr.dtype.element_ty), rows, cols, num_rows, dim, EVEN)


@triton.jit(do_not_specialize=["numel", "blocks"])
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


@triton.jit(do_not_specialize=["numel", "blocks"])
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
        launch(_restore_rows_kernel, cdiv(num_rows, rows), (values.contiguous(), scales, out, num_rows),
               (dim, rows, block_d, _even(values, rows, block_d)), num_warps=warps, key=dtype)
    return out


def gelu_rows(x: Tensor, of_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    num_rows, dim = x.shape
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    out, scales = torch.empty_like(x), torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    rows, block_d, warps = _shape(dim, GELU_ELEMENTS_PER_THREAD)
    if num_rows:
        launch(_gelu_rows_kernel, cdiv(num_rows, rows), (x, out, values, scales, num_rows),
               (dim, rows, block_d, of_output, _even(x, rows, block_d)),
               num_warps=warps, key=x.dtype)
    return out, values, scales


def gelu_restore(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    _gelu_restored(values, scales, None, out, None)
    return out


def gelu_gradient(values: Tensor, scales: Tensor, grad: Tensor) -> Tensor:
    dx = torch.empty(values.shape, dtype=grad.dtype, device=values.device)
    _gelu_restored(values, scales, grad.contiguous(), None, dx)
    return dx


def gelu_again(values: Tensor, scales: Tensor, grad: Tensor) -> Tensor:
    out = torch.empty(values.shape, dtype=grad.dtype, device=values.device)
    _gelu_restored(values, scales, grad, out, grad)
    return out


def _gelu_restored(values: Tensor, scales: Tensor, grad: Tensor | None, out: Tensor | None, dx: Tensor | None) -> None:
    num_rows, dim = values.shape
    rows, block_d, warps = _shape(dim, GELU_ELEMENTS_PER_THREAD)
    if num_rows:
        launch(_gelu_restored_kernel, cdiv(num_rows, rows), (values, scales, grad, out, dx, num_rows),
               (dim, rows, block_d, _even(values, rows, block_d), out is not None, grad is not None), num_warps=warps,
               key=(dx if out is None else out).dtype)  # type: ignore[union-attr]


def norm_rows(x: Tensor, weight: Tensor, bias: Tensor, eps: float, keep: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    num_rows, dim = x.shape
    fp32 = dict(dtype=torch.float32, device=x.device)
    out, kept = torch.empty_like(x), (0 if keep == "nothing" else num_rows, dim)
    values, scales = torch.empty(kept, dtype=torch.float8_e4m3fn, device=x.device), torch.empty((kept[0], 1), **fp32)
    mean, rstd = torch.empty(num_rows, **fp32), torch.empty(num_rows, **fp32)
    rows, block_d, warps = _shape(dim, ELEMENTS_PER_THREAD)
    if num_rows:
        launch(_norm_rows_kernel, cdiv(num_rows, rows),
               (x, weight.contiguous(), bias.contiguous(), out, values, scales, mean, rstd, num_rows, eps),
               (dim, rows, block_d, keep, _even(x, rows, block_d)), num_warps=warps, key=(x.dtype, weight.dtype))
    return out, values, scales, mean, rstd


def norm_restore(values: Tensor, scales: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, dtype: torch.dtype) -> Tensor:
    num_rows, dim = values.shape
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    rows, block_d, warps = _shape(dim, ELEMENTS_PER_THREAD)
    if num_rows:
        launch(_norm_restore_kernel, cdiv(num_rows, rows),
               (values, scales, weight.contiguous(), bias.contiguous(), mean, rstd, out, num_rows),
               (dim, rows, block_d, _even(values, rows, block_d)), num_warps=warps, key=(dtype, weight.dtype))
    return out


def norm_gradient(values: Tensor, scales: Tensor, grad: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return norm_backward(grad, values, weight, mean, rstd, True, scales)


def to_mx4(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    blocks = cdiv(x.numel(), MX4_BLOCK)
    codes = torch.empty(blocks * MX4_BLOCK // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(blocks, dtype=torch.uint8, device=x.device)
    if blocks:
        launch(_to_mx4_kernel, cdiv(blocks, GROUPS), (x, codes, scales, x.numel(), blocks), (GROUPS,), num_warps=4,
               key=(x.dtype, x.numel() >= 2**31))
    return codes, scales


def from_mx4(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=codes.device)
    if numel:
        blocks = scales.shape[0]
        launch(_from_mx4_kernel, cdiv(blocks, GROUPS), (codes, scales, out, numel, blocks), (GROUPS,), num_warps=4,
               key=(dtype, numel >= 2**31))
    return out
