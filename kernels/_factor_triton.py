"""Triton kernels behind `kernels.factor`.

Rows: whole rows in registers, as in `kernels._norm_triton`; where columns' maxima or sums are asked for, a persistent grid holds them in registers
too, writes one partial row a program, and a small kernel finishes them in a fixed order. Columns: tiles of 128 x 64, turned on the way through
shared memory, so that both the read and the write are whole lines.
"""
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import cdiv, launch, next_power_of_2
from kernels._norm_triton import (
    ELEMENTS_PER_THREAD,
    _even,
    _fp32_scale,
    _load,
    _magnitude_bits,
    _num_sms,
    _shape,
    _store,
    _to_e4m3,
    norm_quantize,
)
from kernels.factor import padded

# Of the persistent grid, by columns: elements a thread, warps a program, warps a multiprocessor, and whether the next tile is loaded ahead. Tiles of
# several warps put some of them beside one another on a row, whose maximum then crosses warps by barriers at every tile; one warp leaves more partial
# rows. [Measured H200, 16,384 rows, sums] four warps, not ahead and ahead: 1024 28.2 and 28.0 us, 2048 36.9 and 32.7, 4096 64.8 and 58.1 (eight:
# 55.9); rows alone 14 us at 1024. With maxima loading ahead costs registers: 38.1 and 43.6 us at 1024.
SUMS = {1024: (64, 1, 8, True), 2048: (32, 4, 16, True), 4096: (32, 8, 16, True)}
MAXIMA = (32, 4, 12, False)
FINISH_ROWS, FINISH_COLUMNS, FINISH_WARPS = 512, 8, 8
TURNED_ROWS, TURNED_COLUMNS = 128, 64
# A matrix of so many rows is quantised along its columns in one kernel that holds whole columns: (rows at most, columns, warps).
WHOLE_COLUMNS = ((1024, 8, 4), (2048, 8, 8), (4096, 8, 8))


@triton.jit(do_not_specialize=["num_rows", "programs"])
def _rows_kernel(
    x_ptr, values_ptr, scales_ptr, amax_ptr, sums_ptr, num_rows, programs,
    dim: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SCALING: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows of tiles pid, pid + programs, ... by row scales, by the tensor's given one or not quantised at all; maxima (as bits) and sums of their
    columns as one partial row each."""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    largest = tl.zeros([ROWS, BLOCK_D], tl.int32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    tiles = tl.cdiv(num_rows, ROWS)
    if AHEAD:
        following = _load(x_ptr, tl.cast(pid, tl.int64) * ROWS + tl.arange(0, ROWS), cols, num_rows, dim, EVEN)
    for tile in range(pid, tiles, programs):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        if AHEAD:
            x = following.to(tl.float32)
            ahead = tl.cast(tl.minimum(tile + programs, tiles - 1), tl.int64) * ROWS + tl.arange(0, ROWS)
            following = _load(x_ptr, ahead, cols, num_rows, dim, EVEN)
        else:
            x = _load(x_ptr, rows, cols, num_rows, dim, EVEN).to(tl.float32)
        bits = _magnitude_bits(x)
        if SCALING == "rowwise":
            scale, inverse = _fp32_scale(tl.max(bits, axis=1))
            tl.store(scales_ptr + rows, scale, mask=rows < num_rows)
            _store(values_ptr, _to_e4m3(x * inverse[:, None], rows, cols, 0, False), rows, cols, num_rows, dim, EVEN)
        if SCALING == "tensor_delayed":
            _store(values_ptr, _to_e4m3(x * tl.div_rn(1.0, tl.load(scales_ptr)), rows, cols, 0, False), rows, cols, num_rows, dim, EVEN)
        if COLUMNS:
            largest = tl.maximum(largest, bits)
        if SUMS:
            total += x
    target = tl.cast(pid, tl.int64) * dim + cols
    if COLUMNS:
        tl.store(amax_ptr + target, tl.max(largest, axis=0), mask=cols < dim)
    if SUMS:
        tl.store(sums_ptr + target, tl.sum(total, axis=0), mask=cols < dim)


@triton.jit(do_not_specialize=["programs"])
def _finish_kernel(partial_amax_ptr, partial_sums_ptr, amax_ptr, sums_ptr, programs, dim, ROWS: tl.constexpr, COLS: tl.constexpr,
                   COLUMNS: tl.constexpr, SUMS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    largest = tl.zeros([ROWS, COLS], tl.int32)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for base in range(0, programs, ROWS):
        rows = base + tl.arange(0, ROWS)
        place, mask = rows[:, None] * dim + cols[None, :], (rows < programs)[:, None] & (cols < dim)[None, :]
        if COLUMNS:
            largest = tl.maximum(largest, tl.load(partial_amax_ptr + place, mask=mask, other=0))
        if SUMS:
            total += tl.load(partial_sums_ptr + place, mask=mask, other=0.0)
    if COLUMNS:
        tl.store(amax_ptr + cols, tl.cast(tl.max(largest, axis=0), tl.float32, bitcast=True), mask=cols < dim)
    if SUMS:
        tl.store(sums_ptr + cols, tl.sum(total, axis=0), mask=cols < dim)


@triton.jit
def _tensor_scale_kernel(amax_ptr, scale_ptr, dim, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.int32)
    for base in range(0, dim, BLOCK):
        cols = base + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _magnitude_bits(tl.load(amax_ptr + cols, mask=cols < dim, other=0.0)))
    scale, _ = _fp32_scale(tl.max(largest, axis=0))
    tl.store(scale_ptr, scale)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _columns_kernel(x_ptr, rest_ptr, values_ptr, scales_ptr, num_rows, length, tiles, dim: tl.constexpr, SCALING: tl.constexpr,
                    ROWS: tl.constexpr, COLS: tl.constexpr):
    """Tile (ROWS, COLS) of x -> tile (COLS, ROWS) of values `(dim, length)`. block128: scales `(length / 128, dim)`, ROWS is 128."""
    rows = tl.cast(tl.program_id(0) % tiles, tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.cast(tl.program_id(0) // tiles, tl.int64) * COLS + tl.arange(0, COLS)
    inside = cols < dim
    x = tl.load(x_ptr + rows[:, None] * dim + cols[None, :], mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if SCALING == "tensor_delayed":
        scaled = x * tl.div_rn(1.0, tl.load(rest_ptr))
    elif SCALING == "rowwise":
        scale, inverse = _fp32_scale(_magnitude_bits(tl.load(rest_ptr + cols, mask=inside, other=0.0)))
        if tl.program_id(0) % tiles == 0:
            tl.store(scales_ptr + cols, scale, mask=inside)
        scaled = x * inverse[None, :]
    else:
        scale, inverse = _fp32_scale(tl.max(_magnitude_bits(x), axis=0))
        tl.store(scales_ptr + tl.cast(tl.program_id(0) % tiles, tl.int64) * dim + cols, scale, mask=inside)
        scaled = x * inverse[None, :]
    values = tl.trans(_to_e4m3(scaled, rows, cols, 0, False))
    tl.store(values_ptr + cols[:, None] * length + rows[None, :], values, mask=inside[:, None] & (rows < length)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _whole_columns_kernel(x_ptr, values_ptr, scales_ptr, num_rows, length, dim: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """COLS whole columns of x -> as many rows of values, with their scales."""
    rows = tl.arange(0, ROWS)
    cols = tl.cast(tl.program_id(0), tl.int64) * COLS + tl.arange(0, COLS)
    inside = cols < dim
    x = tl.load(x_ptr + rows[:, None] * dim + cols[None, :], mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
    scale, inverse = _fp32_scale(tl.max(_magnitude_bits(x.to(tl.float32)), axis=0))
    tl.store(scales_ptr + cols, scale, mask=inside)
    values = tl.trans(_to_e4m3(x.to(tl.float32) * inverse[None, :], rows, cols, 0, False))
    tl.store(values_ptr + cols[:, None] * length + rows[None, :], values, mask=inside[:, None] & (rows < length)[None, :])


# --- launches ------------------------------------------------------------------------------------------------------------------------


def factor_rows(x: Tensor, scaling: str, columns: bool, sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    if scaling == "block128":
        nothing = torch.empty(0, dtype=torch.float32, device=x.device)
        values, scales = norm_quantize(x, None, None, "none", 0.0, scaling, None, True, None, None)[:2]
        return values, scales, nothing, _rows(x, None, None, "none", False, True)[1] if sums else nothing
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if scaling == "rowwise":
        scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        return values, scales, *_rows(x, values, scales, scaling, columns, sums)
    scale, total = _tensor_scale(x, sums)
    _rows(x, values, scale, scaling, False, False)
    return values, scale, scale.clone(), total


def _tensor_scale(x: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    """(scale of the tensor, sums of its columns where asked for)."""
    amax, total = _rows(x, None, None, "none", True, sums)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    launch(_tensor_scale_kernel, 1, (amax, scale, x.shape[1]), (min(4096, next_power_of_2(x.shape[1])),), num_warps=8, key=x.shape[1])
    return scale, total


@functools.lru_cache(maxsize=1024)
def _persistent(dim: int, columns: bool) -> tuple[int, int, int, int, bool]:
    """Rows and columns of a tile, warps, programs a multiprocessor, whether to load ahead."""
    per_thread, warps, per_sm, ahead = MAXIMA if columns else SUMS[min(4096, max(1024, next_power_of_2(dim)))]
    _, block_d, least = _shape(dim, per_thread)
    warps = max(warps, least)
    return max(1, warps * 32 * per_thread // block_d), block_d, warps, max(1, per_sm // warps), ahead


def _rows(x: Tensor, values: Tensor | None, scales: Tensor | None, scaling: str, columns: bool, sums: bool) -> tuple[Tensor, Tensor]:
    """Fills values, and scales by rows, unless scaling is `none`; (maxima, sums) of the columns where asked for."""
    num_rows, dim = x.shape
    held, ahead = columns or sums, False
    if not held:
        rows, block_d, warps = _shape(dim, ELEMENTS_PER_THREAD)
        programs = cdiv(num_rows, rows)
    else:
        rows, block_d, warps, each, ahead = _persistent(dim, columns)
        programs, ahead = min(each * _num_sms(x.device), max(1, cdiv(num_rows, rows))), ahead and num_rows > 0
    fp32 = dict(dtype=torch.float32, device=x.device)
    amax = torch.empty(dim if columns else 0, **fp32)
    total = torch.empty(dim if sums else 0, **fp32) if held else amax
    partial_amax = torch.empty((programs, dim), dtype=torch.int32, device=x.device) if columns else amax
    partial_sums = torch.empty((programs, dim), **fp32) if sums else total
    if programs:
        launch(_rows_kernel, programs, (x, values, scales, partial_amax, partial_sums, num_rows, programs),
               (dim, rows, block_d, scaling, columns, sums, _even(x, rows, block_d), ahead), num_warps=warps, key=x.dtype)
    if held:
        launch(_finish_kernel, cdiv(dim, FINISH_COLUMNS), (partial_amax, partial_sums, amax, total, programs, dim),
               (FINISH_ROWS, FINISH_COLUMNS, columns, sums), num_warps=FINISH_WARPS, key=dim)
    return amax, total


def factor_columns(x: Tensor, scaling: str, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    num_rows, dim = x.shape
    length = padded(num_rows, scaling)
    values = torch.empty((dim, length), dtype=torch.float8_e4m3fn, device=x.device)
    if scaling == "rowwise" and rest is None and length <= WHOLE_COLUMNS[-1][0]:
        scales = torch.empty((dim, 1), dtype=torch.float32, device=x.device)
        most, cols, warps = next(shape for shape in WHOLE_COLUMNS if length <= shape[0])
        launch(_whole_columns_kernel, cdiv(dim, cols), (x, values, scales, num_rows, length), (dim, most, cols), num_warps=warps, key=x.dtype)
        return values, scales
    if rest is None and scaling != "block128":
        rest = _tensor_scale(x, False)[0] if scaling == "tensor_delayed" else _rows(x, None, None, "none", True, False)[0]
    shape = {"rowwise": (dim, 1), "tensor_delayed": (0,), "block128": (length // 128, dim)}[scaling]
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles = cdiv(length, TURNED_ROWS)
    launch(_columns_kernel, tiles * cdiv(dim, TURNED_COLUMNS), (x, rest, values, scales, num_rows, length, tiles),
           (dim, scaling, TURNED_ROWS, TURNED_COLUMNS), num_warps=4, key=(x.dtype, rest is None))
    if scaling == "tensor_delayed":
        assert rest is not None
        return values, rest.clone()
    return values, scales.t() if scaling == "block128" else scales
