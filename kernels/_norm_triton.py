"""Triton kernels behind `kernels.norm_quant`: whole rows in registers, each input element read once and each output written once.

A program holds ROWS rows of BLOCK_D columns (the power of two that covers D). Only the 32 x 32 scaling needs 32 rows at a time: it
walks over column blocks twice or three times, and its re-reads come from L1 and L2. The backward is a persistent grid: each program
adds its rows' share of the weight gradient up in registers and writes it once; the shares are then summed in a fixed order.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._fp8 import E4M3_MAX, HADAMARD_BLOCK, MIN_AMAX
from kernels._launch import cdiv, launch, next_power_of_2
from kernels._rounding_triton import random_bits
from kernels.norm_quant import TENSOR_WISE, scales_shape

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_SCALE_OF_ONE = tl.constexpr(1.0 / E4M3_MAX)
_MIN_AMAX = tl.constexpr(MIN_AMAX)
_HADAMARD = tl.constexpr(HADAMARD_BLOCK)
_HADAMARD_NORM = tl.constexpr(HADAMARD_BLOCK**-0.5)
_HADAMARD_STAGES = tl.constexpr(HADAMARD_BLOCK.bit_length() - 1)
MAX_DIM = 65536
# Few threads a row: the reductions' instructions and barriers, not the bytes, are what costs time. Row-wise fp8 on an H200, TB/s at 16, 32, 64:
# D=512 2.5, 4.1, 4.1; D=1024 3.1, 3.8, 4.1; D=2048 3.2, 3.2, 3.7; D=4096 2.9, 2.9, 3.2; D=8192 2.6, 2.9, 3.1.
ELEMENTS_PER_THREAD = 64
# Quantising kernels, by kind of scaling and columns (the next power of two): LOOP and STAGES of the kernel, elements a thread, warps a
# multiprocessor where it loops, and whether a thread's elements lie by 8 instead of 16. A maximum over the tensor always loops: one atomic a
# program, all on one address, is what it can afford.
# Measured on an H200 [TB/s], by tiles, looping, and with two tiles ahead in shared memory: row-wise at 512 columns 4.10, 4.03, 3.97; 2,048 3.80,
# 3.98, 4.05; 4,096 3.30, 3.71, 3.82; 8,192 3.24, 3.65, 3.88; tensor-wise 2,048 3.99, 4.01; 4,096 3.67, 3.75; 8,192 3.60, 3.71 (without tiles).
_TILES, _LOOP, _AHEAD = (0, 0, 64, 0, False), (1, 0, 64, 12, False), (1, 3, 64, 8, True)
SETTINGS = {
    "row": {512: _TILES, 1024: (0, 0, 32, 0, True), 2048: (1, 3, 16, 24, True), 4096: _AHEAD, 8192: _AHEAD},
    "tensor": {512: _LOOP, 1024: _LOOP, 2048: (1, 3, 16, 24, True), 4096: _AHEAD, 8192: _AHEAD},
}
BACKWARD_ELEMENTS_PER_THREAD = 16
BACKWARD_WARPS_PER_SM = 16


# --- pieces --------------------------------------------------------------------------------------------------------------------------


@triton.jit
def _magnitude_bits(x):
    """Bits of |x|: as integers they order like magnitudes, with Inf above all numbers and NaN above Inf."""
    return tl.cast(x, tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _fp32_scale(amax_bits):
    amax = tl.cast(amax_bits, tl.float32, bitcast=True)
    amax = tl.where(amax_bits >= 0x7F800000, float("nan"), amax)
    amax = tl.where(amax < _MIN_AMAX, _MIN_AMAX, amax)
    return amax * _SCALE_OF_ONE, tl.div_rn(tl.full(amax.shape, _E4M3_MAX, tl.float32), amax)


@triton.jit
def _e8m0_code(amax_bits, RCEIL: tl.constexpr):
    code = (amax_bits >> 23) - 8
    if RCEIL:
        code += ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(amax_bits >= 0x7F800000, 255, tl.maximum(code, 0))


@triton.jit
def _e8m0_inverse(code):
    return tl.cast(tl.where(code == 255, 0x7FC00000, (254 - code) << 23), tl.float32, bitcast=True)


@triton.jit
def _to_e4m3(scaled, rows, cols, seed, STOCHASTIC: tl.constexpr):
    """Round to e4m3; the hardware's conversion saturates at 448 and keeps NaN."""
    clamped = scaled
    if STOCHASTIC:
        clamped = tl.where(scaled > _E4M3_MAX, _E4M3_MAX, tl.where(scaled < -_E4M3_MAX, -_E4M3_MAX, scaled))  # keeps NaN
        noise = (random_bits(rows, cols, seed) & 0xFFFFF).to(tl.int32)
        bits = tl.cast(clamped, tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        size = tl.cast(magnitude, tl.float32, bitcast=True)
        normal = (magnitude + noise) & -0x100000
        steps = (tl.where(size < 0.015625, size, 0.0) * 536870912.0).to(tl.int32)  # 2^-9 in fixed point with 20 fraction bits
        subnormal = tl.cast(((steps + noise) >> 20).to(tl.float32) * 0.001953125, tl.int32, bitcast=True)
        rounded = tl.where(size < 0.015625, subnormal, normal) | (bits & -0x80000000)
        clamped = tl.cast(tl.where(magnitude > 0x7F800000, bits, rounded), tl.float32, bitcast=True)
    return clamped.to(tl.float8e4nv)


@triton.jit
def _hadamard(y, cols, seed, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """`kernels._fp8.hadamard_transform` of a (ROWS, BLOCK_D) tile."""
    sign = (random_bits(tl.zeros([1], tl.int64), cols, seed) & 1).to(tl.int32)
    y = tl.where(sign == 1, -y, y)
    y = tl.reshape(y, [ROWS, BLOCK_D // _HADAMARD, _HADAMARD])
    for _ in tl.static_range(_HADAMARD_STAGES):  # butterfly on the lowest index bit, which then becomes the highest
        even, odd = tl.split(tl.reshape(y, [ROWS, BLOCK_D // _HADAMARD, _HADAMARD // 2, 2]))
        y = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 1, 3, 2]), [ROWS, BLOCK_D // _HADAMARD, _HADAMARD])
    return tl.reshape(y, [ROWS, BLOCK_D]) * _HADAMARD_NORM


@triton.jit
def _load(ptr, rows, cols, num_rows, dim, EVEN: tl.constexpr):
    """Tile (rows, cols) of a matrix; EVEN says that no row or column is outside: masks cost instructions, which are short here."""
    place = rows[:, None] * dim + cols[None, :]
    if EVEN:
        return tl.load(ptr + place)
    return tl.load(ptr + place, mask=(rows < num_rows)[:, None] & (cols < dim)[None, :], other=0.0)


@triton.jit
def _store(ptr, data, rows, cols, num_rows, dim, EVEN: tl.constexpr):
    place = rows[:, None] * dim + cols[None, :]
    if EVEN:
        tl.store(ptr + place, data)
    else:
        tl.store(ptr + place, data, mask=(rows < num_rows)[:, None] & (cols < dim)[None, :])


@triton.jit
def _columns(ptr, rows, cols, dim, EVEN: tl.constexpr, ACC: tl.constexpr):
    """One number a column, as a tile of whole rows: so the tile comes in the layout that x has. As a vector it would come in one of its own
    and be moved through shared memory, at 34 barriers a program of 4,096 columns."""
    place = (rows * 0)[:, None] + cols[None, :]
    if EVEN:
        return tl.load(ptr + place).to(ACC)
    return tl.load(ptr + place, mask=(cols < dim)[None, :], other=0.0).to(ACC)


@triton.jit
def _amax_bits(y, factor, AXIS: tl.constexpr):
    """Bits of the largest |y * factor| along an axis; `factor` (> 0) belongs to what is left."""
    bits = tl.max(_magnitude_bits(y), axis=AXIS)
    return tl.cast(tl.cast(bits, tl.float32, bitcast=True) * factor, tl.int32, bitcast=True)


# --- forward -------------------------------------------------------------------------------------------------------------------------


@triton.jit
def _normalise(
    x, weight, bias, mean_ptr, rstd_ptr, rows, cols, num_rows, dim, eps,
    KIND: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr, LOADED: tl.constexpr,
):  # fmt: skip
    """Store the statistics of whole rows `x (R, D)` and return `y (R, D)` and `factor (R,)`, the norm being y * factor.

    Weight and bias: tiles if LOADED, else pointers.

    The factor (1 / sigma) stays outside because it can be multiplied into the scale: one multiplication less per element.
    """
    factor = tl.full(rows.shape, 1.0, ACC)
    if KIND != "none":
        if KIND == "layernorm":
            mean = tl.sum(x, axis=1) / dim
            tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
            x -= mean[:, None]
            if not EVEN:
                x = tl.where((cols < dim)[None, :], x, 0.0)
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / dim + eps)
        tl.store(rstd_ptr + rows, factor, mask=rows < num_rows)
        if not LOADED:
            weight = _columns(weight, rows, cols, dim, EVEN, ACC)
        x *= weight
        if BIAS:
            if not LOADED:
                bias = _columns(bias, rows, cols, dim, EVEN, ACC)
            x = x * factor[:, None] + bias
            factor = tl.full(rows.shape, 1.0, ACC)
    return x, factor


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, num_rows, eps,
    dim: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    x = _load(x_ptr, rows, cols, num_rows, dim, EVEN).to(ACC)
    y, factor = _normalise(x, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, rows, cols, num_rows, dim, eps, KIND, BIAS, EVEN, ACC, False)
    _store(out_ptr, (y * factor[:, None]).to(out_ptr.dtype.element_ty), rows, cols, num_rows, dim, EVEN)


@triton.jit
def _quantize_tile(
    x, weight, bias, values_ptr, scales_ptr, mean_ptr, rstd_ptr, inverse, rows, cols, num_rows, eps, hadamard_seed, seed,
    dim: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SCALING: tl.constexpr,
    BLOCK: tl.constexpr, RCEIL: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr, EIGHTS: tl.constexpr,
    LOADED: tl.constexpr,
):  # fmt: skip
    """Normalise, quantise and store whole rows `x (R, D)`; `inverse (R,)` of a scale known beforehand. Returns bits of each row's maximum
    (tensor_delayed, tensor_amax), else zeros; tensor_amax stores no values."""
    y, factor = _normalise(
        x.to(tl.float32), weight, bias, mean_ptr, rstd_ptr, rows, cols, num_rows, dim, eps, KIND, BIAS, EVEN, tl.float32, LOADED
    )
    if HADAMARD:
        y = _hadamard(y, cols, hadamard_seed, ROWS, BLOCK_D)
    bits = tl.zeros([ROWS], tl.int32)
    if SCALING == "tensor_delayed" or SCALING == "tensor_amax":
        bits = tl.where(rows < num_rows, _amax_bits(y, factor, 1), 0)
    if SCALING == "tensor_delayed" or SCALING == "tensor_dynamic":
        scaled = y * (factor * inverse)[:, None]
    elif SCALING == "rowwise":
        scale, inverse = _fp32_scale(_amax_bits(y, factor, 1))
        tl.store(scales_ptr + rows, scale, mask=rows < num_rows)
        scaled = y * (factor * inverse)[:, None]
    elif SCALING != "tensor_amax":
        blocks = tl.reshape(y, [ROWS, BLOCK_D // BLOCK, BLOCK])
        amax = _amax_bits(blocks, factor[:, None], 2)
        block = tl.arange(0, BLOCK_D // BLOCK)
        target = rows[:, None] * (dim // BLOCK) + block[None, :]
        mask = (rows < num_rows)[:, None] & (block < dim // BLOCK)[None, :]
        if SCALING == "block128":
            scale, inverse = _fp32_scale(amax)
            tl.store(scales_ptr + target, scale, mask=mask)
        else:
            code = _e8m0_code(amax, RCEIL)
            tl.store(scales_ptr + target, code.to(tl.uint8), mask=mask)
            inverse = _e8m0_inverse(code)
        scaled = tl.reshape(blocks * (factor[:, None] * inverse)[:, :, None], [ROWS, BLOCK_D])
    if SCALING != "tensor_amax":
        target = cols
        if EIGHTS:  # the same columns, but seen as contiguous by 8 only: a thread gets 8 numbers and not the 16 of a 16-byte store, so
            target = cols // 8 * 8 + cols % 8  # that the 16-byte loads of x lie side by side
        _store(values_ptr, _to_e4m3(scaled, rows, cols, seed, STOCHASTIC), rows, target, num_rows, dim, EVEN)
    return bits


@triton.jit(do_not_specialize=["num_rows", "programs", "hadamard_seed", "seed"])
def _norm_quantize_kernel(
    x_ptr, weight_ptr, bias_ptr, values_ptr, scales_ptr, scale_ptr, amax_ptr, mean_ptr, rstd_ptr,
    num_rows, programs, eps, hadamard_seed, seed, LOOP: tl.constexpr, STAGES: tl.constexpr,
    dim: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SCALING: tl.constexpr,
    BLOCK: tl.constexpr, RCEIL: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS rows a program; with LOOP tiles pid, pid + programs, ..., the next one on its way while one is worked on: in registers, or
    STAGES - 1 of them in shared memory. The weight stays in registers (LOOP 1) or is read again for every tile (LOOP 2)."""
    pid = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    inverse = tl.full([ROWS], 1.0, tl.float32)
    if SCALING == "tensor_delayed":
        inverse = tl.div_rn(inverse, tl.load(scale_ptr))
    elif SCALING == "tensor_dynamic":
        scale, inverse = _fp32_scale(tl.zeros([ROWS], tl.int32) + tl.load(amax_ptr))
        tl.store(scales_ptr + lane * 0, scale, mask=lane + pid == 0)
    rows = pid.to(tl.int64) * ROWS + lane
    largest = tl.zeros([ROWS], tl.int32)
    weight = weight_ptr
    bias = bias_ptr
    if LOOP == 1 and KIND != "none":
        weight = _columns(weight_ptr, rows, cols, dim, EVEN, tl.float32)
    if LOOP == 1 and BIAS:
        bias = _columns(bias_ptr, rows, cols, dim, EVEN, tl.float32)
    if STAGES > 0:
        for tile in tl.range(pid, tl.cdiv(num_rows, ROWS), programs, num_stages=STAGES):
            rows = tl.cast(tile, tl.int64) * ROWS + lane
            x = _load(x_ptr, rows, cols, num_rows, dim, EVEN)
            bits = _quantize_tile(
                x, weight, bias, values_ptr, scales_ptr, mean_ptr, rstd_ptr, inverse, rows, cols, num_rows, eps, hadamard_seed, seed,
                dim, ROWS, BLOCK_D, KIND, BIAS, SCALING, BLOCK, RCEIL, HADAMARD, STOCHASTIC, EVEN, EIGHTS, LOOP == 1,
            )  # fmt: skip
            largest = tl.maximum(largest, bits)
    elif LOOP > 0:
        x = _load(x_ptr, rows, cols, num_rows, dim, EVEN)
        for tile in range(pid, tl.cdiv(num_rows, ROWS), programs):
            rows = tl.cast(tile, tl.int64) * ROWS + lane
            following = _load(x_ptr, rows + tl.cast(programs, tl.int64) * ROWS, cols, num_rows, dim, False)
            bits = _quantize_tile(
                x, weight, bias, values_ptr, scales_ptr, mean_ptr, rstd_ptr, inverse, rows, cols, num_rows, eps, hadamard_seed, seed,
                dim, ROWS, BLOCK_D, KIND, BIAS, SCALING, BLOCK, RCEIL, HADAMARD, STOCHASTIC, EVEN, EIGHTS, LOOP == 1,
            )  # fmt: skip
            largest = tl.maximum(largest, bits)
            x = following
    else:
        x = _load(x_ptr, rows, cols, num_rows, dim, EVEN)
        largest = _quantize_tile(
            x, weight_ptr, bias_ptr, values_ptr, scales_ptr, mean_ptr, rstd_ptr, inverse, rows, cols, num_rows, eps, hadamard_seed, seed,
            dim, ROWS, BLOCK_D, KIND, BIAS, SCALING, BLOCK, RCEIL, HADAMARD, STOCHASTIC, EVEN, EIGHTS, False,
        )  # fmt: skip
    if SCALING == "tensor_delayed" or SCALING == "tensor_amax":
        tl.atomic_max(amax_ptr, tl.max(largest, axis=0), sem="relaxed")  # a maximum of integers: the same in any order


@triton.jit(do_not_specialize=["num_rows", "hadamard_seed", "seed"])
def _norm_quantize_square_kernel(
    x_ptr, weight_ptr, bias_ptr, values_ptr, scales_ptr, mean_ptr, rstd_ptr, num_rows, eps, hadamard_seed, seed,
    dim: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    RCEIL: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """32 rows, BLOCK_D columns at a time; one scale per 32 x 32."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * 32 + tl.arange(0, 32)
    mean = tl.zeros([32], tl.float32)
    rstd = tl.full([32], 1.0, tl.float32)
    if KIND == "layernorm":
        total = tl.zeros([32, BLOCK_D], tl.float32)
        for d0 in range(0, dim, BLOCK_D):
            total += _load(x_ptr, rows, d0 + tl.arange(0, BLOCK_D), num_rows, dim, EVEN).to(tl.float32)
        mean = tl.sum(total, axis=1) / dim
        tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
    if KIND != "none":
        squares = tl.zeros([32, BLOCK_D], tl.float32)
        for d0 in range(0, dim, BLOCK_D):
            cols = d0 + tl.arange(0, BLOCK_D)
            x = _load(x_ptr, rows, cols, num_rows, dim, EVEN).to(tl.float32) - mean[:, None]
            if not EVEN:
                x = tl.where((cols < dim)[None, :], x, 0.0)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / dim + eps)
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    for d0 in range(0, dim, BLOCK_D):
        cols = d0 + tl.arange(0, BLOCK_D)
        y = _load(x_ptr, rows, cols, num_rows, dim, EVEN).to(tl.float32)
        if KIND != "none":
            y = (y - mean[:, None]) * rstd[:, None] * _columns(weight_ptr, rows, cols, dim, EVEN, tl.float32)
            if BIAS:
                y += _columns(bias_ptr, rows, cols, dim, EVEN, tl.float32)
        if HADAMARD:
            y = _hadamard(y, cols, hadamard_seed, 32, BLOCK_D)
        if not EVEN:
            y = tl.where((rows < num_rows)[:, None], y, 0.0)
        blocks = tl.reshape(y, [32, BLOCK_D // 32, 32])
        code = _e8m0_code(tl.max(tl.max(_magnitude_bits(blocks), axis=2), axis=0), RCEIL)
        block = d0 // 32 + tl.arange(0, BLOCK_D // 32)
        tl.store(scales_ptr + tile * (dim // 32) + block, code.to(tl.uint8), mask=block < dim // 32)
        scaled = tl.reshape(blocks * _e8m0_inverse(code)[None, :, None], [32, BLOCK_D])
        _store(values_ptr, _to_e4m3(scaled, rows, cols, seed, STOCHASTIC), rows, cols, num_rows, dim, EVEN)


# --- backward ------------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows", "programs"])
def _norm_backward_kernel(
    grad_ptr, x_ptr, scales_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows, programs,
    dim: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, LAYERNORM: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Rows of tiles pid, pid + programs, ...; partial sums of the weight's and the bias' gradient at the end. SCALED: x is e4m3 with row scales."""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + cols, mask=cols < dim, other=0.0).to(ACC)
    d_weight = tl.zeros([ROWS, BLOCK_D], ACC)
    d_bias = tl.zeros([ROWS, BLOCK_D], ACC)
    for tile in range(pid, tl.cdiv(num_rows, ROWS), programs):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        x = _load(x_ptr, rows, cols, num_rows, dim, EVEN).to(ACC)
        grad = _load(grad_ptr, rows, cols, num_rows, dim, EVEN).to(ACC)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        if SCALED:
            x *= tl.load(scales_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        if LAYERNORM:
            x -= tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
            if not EVEN:
                x = tl.where((cols < dim)[None, :], x, 0.0)
            d_bias += grad
        x_hat = x * rstd[:, None]
        d_weight += grad * x_hat
        scaled = grad * weight[None, :]
        dx = scaled - x_hat * (tl.sum(scaled * x_hat, axis=1) / dim)[:, None]
        if LAYERNORM:
            dx -= (tl.sum(scaled, axis=1) / dim)[:, None]
        _store(dx_ptr, (dx * rstd[:, None]).to(dx_ptr.dtype.element_ty), rows, cols, num_rows, dim, EVEN)
    target = partial_ptr + tl.cast(pid, tl.int64) * dim + cols
    tl.store(target, tl.sum(d_weight, axis=0), mask=cols < dim)
    if LAYERNORM:
        tl.store(target + tl.cast(programs, tl.int64) * dim, tl.sum(d_bias, axis=0), mask=cols < dim)


@triton.jit(do_not_specialize=["programs"])
def _sum_partials_kernel(
    partial_ptr, d_weight_ptr, d_bias_ptr, programs, dim, ROWS: tl.constexpr, COLS: tl.constexpr, LAYERNORM: tl.constexpr, ACC: tl.constexpr
):
    """Column sums of the programs' shares, in a fixed order."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    d_weight = tl.zeros([ROWS, COLS], ACC)
    d_bias = tl.zeros([ROWS, COLS], ACC)
    for base in range(0, programs, ROWS):
        rows = tl.cast(base + tl.arange(0, ROWS), tl.int64)
        d_weight += _load(partial_ptr, rows, cols, programs, dim, False).to(ACC)
        if LAYERNORM:
            d_bias += _load(partial_ptr + tl.cast(programs, tl.int64) * dim, rows, cols, programs, dim, False).to(ACC)
    tl.store(d_weight_ptr + cols, tl.sum(d_weight, axis=0).to(d_weight_ptr.dtype.element_ty), mask=cols < dim)
    if LAYERNORM:
        tl.store(d_bias_ptr + cols, tl.sum(d_bias, axis=0).to(d_bias_ptr.dtype.element_ty), mask=cols < dim)


# --- launches ------------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _shape(dim: int, per_thread: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps, so that a thread holds about `per_thread` elements and a warp at least one row."""
    if dim > MAX_DIM:
        raise ValueError(f"x: {dim} columns, CUDA takes up to {MAX_DIM}")
    block_d = max(32, next_power_of_2(dim))
    warps = min(32, max(1, block_d // (32 * per_thread)))
    return max(1, warps * 32 * per_thread // block_d), block_d, warps


def _settings(scaling: str, dim: int, plain: bool = True) -> tuple[int, int, int, int, bool]:
    """The entry of SETTINGS for a scaling (or pass) and a number of columns; without a transform or noise (`plain`), whose registers it needs."""
    if scaling in ("rowwise", "tensor_dynamic"):
        table = SETTINGS["row"]
    elif scaling in ("tensor_delayed", "tensor_amax"):
        table = SETTINGS["tensor"]
    else:
        return 0, 0, ELEMENTS_PER_THREAD, 0, False
    if not plain:
        return _LOOP if table is SETTINGS["tensor"] else _TILES
    return table[min(max(table), max(min(table), next_power_of_2(dim)))]


def _32(seed: int | None) -> int:
    """The low 32 bits of a seed, all that counts of it, as a signed number: a kernel's argument never needs 64."""
    return 0 if seed is None else (seed + 2**31) % 2**32 - 2**31


def _even(x: Tensor, rows: int, block_d: int) -> bool:
    """Whether tiles of (rows, block_d) cover x without a remainder."""
    return x.shape[0] % rows == 0 and x.shape[1] % block_d == 0


def _statistics(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean = torch.empty(x.shape[0] if kind == "layernorm" else 0, dtype=dtype, device=x.device)
    return mean, torch.empty(x.shape[0] if kind != "none" else 0, dtype=dtype, device=x.device)


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, layernorm: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    num_rows, dim = x.shape
    kind = "layernorm" if layernorm else "rmsnorm"
    mean, rstd = _statistics(x, kind)
    out = torch.empty_like(x)
    rows, block_d, warps = _shape(dim, ELEMENTS_PER_THREAD)
    if num_rows:
        launch(
            _norm_kernel, cdiv(num_rows, rows),
            (x, weight.contiguous(), bias.contiguous() if bias is not None else None, out, mean, rstd, num_rows, eps),
            (dim, rows, block_d, kind, bias is not None, _even(x, rows, block_d), tl.float64 if x.dtype == torch.float64 else tl.float32),
            num_warps=warps, key=(x.dtype, weight.dtype, None if bias is None else bias.dtype),
        )  # fmt: skip
    return out, mean, rstd


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, layernorm: bool, scales: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """scales: of the rows of x, which is e4m3 then."""
    grad, x = grad.contiguous(), x.contiguous()
    num_rows, dim = x.shape
    rows, block_d, warps = _shape(dim, BACKWARD_ELEMENTS_PER_THREAD)
    dx = torch.empty_like(x) if scales is None else torch.empty_like(grad)
    programs = min(max(1, BACKWARD_WARPS_PER_SM // warps) * _num_sms(x.device), max(1, cdiv(num_rows, rows)))
    partial = torch.empty((2 if layernorm else 1, programs, dim), dtype=rstd.dtype, device=x.device)
    accumulate = tl.float64 if x.dtype == torch.float64 else tl.float32
    kinds = (grad.dtype, x.dtype, weight.dtype)
    launch(
        _norm_backward_kernel, programs, (grad, x, scales, weight.contiguous(), mean, rstd, dx, partial, num_rows, programs),
        (dim, rows, block_d, layernorm, scales is not None, _even(x, rows, block_d), accumulate), num_warps=warps, key=(*kinds, mean is None),
    )  # fmt: skip
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    d_bias = torch.empty_like(d_weight) if layernorm else weight.new_empty(0)
    launch(
        _sum_partials_kernel, cdiv(dim, 32), (partial, d_weight, d_bias, programs, dim), (128, 32, layernorm, accumulate),
        num_warps=4, key=(*kinds, dim),
    )  # fmt: skip
    return dx, d_weight, d_bias


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def norm_quantize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, scaling: str, scale: Tensor | None,
    rceil: bool, hadamard_seed: int | None, seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x = x.contiguous()
    weight = weight.contiguous() if weight is not None else None
    bias = bias.contiguous() if bias is not None else None
    num_rows, dim = x.shape
    mean, rstd = _statistics(x, kind)
    shape, dtype = scales_shape(num_rows, dim, scaling)
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(shape, dtype=dtype, device=x.device)
    amax = torch.zeros(() if scaling in TENSOR_WISE else (0,), dtype=torch.int32, device=x.device)
    options = dict(KIND=kind, BIAS=bias is not None, RCEIL=rceil, HADAMARD=hadamard_seed is not None, STOCHASTIC=seed is not None)
    if num_rows and scaling == "mxfp8_32x32":
        block_d = min(128, next_power_of_2(dim))
        _norm_quantize_square_kernel[(cdiv(num_rows, 32),)](
            x, weight, bias, values, scales, mean, rstd, num_rows, eps, _32(hadamard_seed), _32(seed),
            dim=dim, BLOCK_D=block_d, EVEN=_even(x, 32, block_d), num_warps=4, **options,
        )  # fmt: skip
    elif num_rows:
        block = {"block128": 128, "mxfp8_1x32": 32}.get(scaling, 1)
        kinds = tuple(None if t is None else t.dtype for t in (x, weight, bias))
        for one in ("tensor_amax", scaling) if scaling == "tensor_dynamic" else (scaling,):
            loop, stages, per_thread, warps_per_sm, eights = _settings(one, dim, hadamard_seed is None and seed is None)
            rows, block_d, warps = _shape(dim, per_thread)
            tiles = cdiv(num_rows, rows)
            programs = min(tiles, max(1, warps_per_sm // warps) * _num_sms(x.device)) if loop else tiles
            launch(
                _norm_quantize_kernel, programs,
                (x, weight, bias, values, scales, scale, amax, mean, rstd, num_rows, programs, eps, _32(hadamard_seed), _32(seed)),
                (loop, stages, dim, rows, block_d, kind, bias is not None, one, block, rceil, hadamard_seed is not None, seed is not None,
                 _even(x, rows, block_d), eights),
                num_warps=warps, key=kinds,
            )  # fmt: skip
    if scaling == "tensor_dynamic" and not num_rows:
        scales.fill_(MIN_AMAX / E4M3_MAX)
    return values, scales, amax.view(torch.float32), mean, rstd
