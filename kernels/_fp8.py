"""fp8 e4m3 and E8M0 in PyTorch: scales by exponent bits, one rounding from fp32, the same results as the Triton kernels bit for bit.

    fp32 scales      a = max(amax, 448 * 2^-126); scale = a * (1 / 448), values are multiplied by 448 / a; both stay in the normal range
    E8M0, floor      code = exponent(amax) - 8: the power of two of the OCP MX rule; values up to 1.14 x 448 saturate
    E8M0, rceil      one more where amax is above 448 * 2^k: the smallest power of two that saturates nothing
    values           e4m3(clamp(y * inverse, +-448)), round to nearest even, or stochastically

`exponent` is fp32's biased exponent field, so codes need no logarithm and 2^(code - 127) no exponential: both are inexact on real
devices. An amax of Inf or NaN gives a NaN scale: a block that is not finite says so when it is read. A zero block has code 0.
"""

import functools
import math

import torch
from torch import Tensor

from kernels._rounding import random_bits

E4M3_MAX = 448.0
MIN_AMAX = E4M3_MAX * 2.0**-126
HADAMARD_BLOCK = 32
E8M0_NAN = 255
_EXPONENT_BIAS_OF_MAX = 8  # 448 = 1.75 * 2^8
_MANTISSA_OF_MAX = 0x600000  # 1.75


def fp32_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Scale that maps `amax` (fp32) to 448: the multiplier that restores the values, and the one that is applied to them."""
    amax = torch.where(amax == math.inf, math.nan, amax).clamp(min=MIN_AMAX)
    return amax * (1.0 / E4M3_MAX), torch.full_like(amax, E4M3_MAX) / amax  # a Python number over a tensor rounds twice


def e8m0_code(amax: Tensor, *, rceil: bool) -> Tensor:
    """E8M0 code (uint8) for blocks whose largest magnitude is `amax` (fp32)."""
    bits = amax.abs().contiguous().view(torch.int32)
    code = (bits >> 23) - _EXPONENT_BIAS_OF_MAX
    if rceil:
        code = code + ((bits & 0x7FFFFF) > _MANTISSA_OF_MAX).int()
    return torch.where(amax.isfinite(), code.clamp(min=0), E8M0_NAN).to(torch.uint8)


def e8m0_scale(code: Tensor) -> Tensor:
    """2^(code - 127) as fp32; code 0 is fp32's subnormal 2^-127 and 255 is NaN."""
    code = code.to(torch.int32)
    bits = torch.where(code == 0, 0x00400000, code << 23)
    return torch.where(code == E8M0_NAN, math.nan, bits.view(torch.float32))


def e8m0_inverse(code: Tensor) -> Tensor:
    """2^(127 - code) as fp32, for codes that `e8m0_code` gives."""
    code = code.to(torch.int32)
    return torch.where(code == E8M0_NAN, math.nan, ((254 - code) << 23).view(torch.float32))


def to_e4m3(scaled: Tensor, *, seed: int | None = None) -> Tensor:
    """Round an fp32 matrix to e4m3, saturating at 448; NaN stays NaN. With a seed, stochastically by row and column."""
    clamped = scaled.clamp(-E4M3_MAX, E4M3_MAX)
    if seed is None:
        return clamped.to(torch.float8_e4m3fn)
    noise = (random_bits(torch.arange(clamped.shape[0], device=clamped.device), clamped.shape[1], seed) & 0xFFFFF).to(torch.int32)
    magnitude = clamped.abs().view(torch.int32)
    normal = ((magnitude + noise) & ~0xFFFFF).view(torch.float32)
    steps = (clamped.abs().clamp(max=2.0**-6) * 2.0**29).nan_to_num().to(torch.int32)  # 2^-9 in fixed point with 20 fraction bits
    subnormal = ((steps + noise) >> 20).float() * 2.0**-9
    rounded = torch.where(clamped.abs() < 2.0**-6, subnormal, normal).copysign(clamped)
    return torch.where(clamped.isfinite(), rounded, clamped).to(torch.float8_e4m3fn)


def from_e4m3(values: Tensor) -> Tensor:
    """fp32 of e4m3 values. On CPUs out of a table of its 256 values: PyTorch's own conversion takes four times as long there."""
    if values.is_cuda:
        return values.float()
    return _e4m3_values().index_select(0, values.contiguous().view(torch.uint8).flatten().int()).view(values.shape)


@functools.cache
def _e4m3_values() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def hadamard_transform(x: Tensor, *, seed: int = 0) -> Tensor:
    """Randomised Hadamard transform of each block of 32 columns: `(x * signs) H / sqrt(32)`, fp32, orthogonal.

    The signs follow from the column and `seed`. Applied to both factors of `x @ w.T` along the shared dimension it leaves the product
    unchanged while it spreads outliers, which is what makes it useful before a quantisation. Raises ValueError unless 32 divides D.
    """
    dim = x.shape[-1]
    if dim % HADAMARD_BLOCK:
        raise ValueError(f"hadamard: {dim} columns are not a multiple of {HADAMARD_BLOCK}")
    y = x.float() * hadamard_signs(dim, seed, x.device)
    y = y.reshape(*x.shape[:-1], dim // HADAMARD_BLOCK, HADAMARD_BLOCK)
    for _ in range(HADAMARD_BLOCK.bit_length() - 1):  # butterfly on the lowest index bit, which then becomes the highest
        even, odd = y[..., 0::2], y[..., 1::2]
        y = torch.cat([even + odd, even - odd], dim=-1)
    return (y * HADAMARD_BLOCK**-0.5).reshape(x.shape)


def hadamard_signs(dim: int, seed: int, device: torch.device) -> Tensor:
    """+1 or -1 for each column, fp32."""
    bits = random_bits(torch.zeros(1, dtype=torch.int64, device=device), dim, seed)[0]
    return 1.0 - 2.0 * (bits & 1).float()
