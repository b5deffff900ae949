"""Device twins of `kernels._rounding`: the same bits, the same rounding."""

import triton
import triton.language as tl

from kernels._rounding import MIX_1, MIX_2

_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def mix(x):
    """32-bit finaliser on uint32."""
    x = x ^ (x >> 16)
    x = x * tl.cast(_MIX_1, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.cast(_MIX_2, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def random_bits(rows, cols, seed):
    """32 random bits, uint32 (N, D), of rows `rows (N,)` (int64) and columns `cols (D,)` under `seed` (its low 32 bits)."""
    key = mix(tl.cast(rows >> 32, tl.uint32) ^ mix(tl.cast(seed, tl.uint32)))
    key = mix(tl.cast(rows, tl.uint32) ^ key)
    return mix(tl.cast(cols, tl.uint32)[None, :] ^ key[:, None])


@triton.jit
def stochastic_round_bf16(x, rows, cols, seed):
    """fp32 (N, D) -> bf16 without bias; Inf and NaN pass through."""
    bits = tl.cast(x, tl.uint32, bitcast=True)
    noise = random_bits(rows, cols, seed) & 0xFFFF
    cut = (bits + noise) & 0xFFFF0000
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.cast(tl.where(finite, cut, bits), tl.float32, bitcast=True).to(tl.bfloat16)
