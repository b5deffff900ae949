"""Counter-based random bits and stochastic rounding, the same on the CPU and in Triton.

Element `i` (a 64-bit index) under seed `s` gets the 32 bits

    bits(i, s) = mix(lo(i) ^ mix(hi(i) ^ mix(s)))       mix: a 32-bit finaliser (xor-shift, multiply, xor-shift, multiply, xor-shift)

They depend on nothing else: not on the launch grid, the tile size or the device, so a rounded result is reproducible and the CPU
path checks the GPU path bit by bit. This is not a cryptographic generator, and consecutive seeds are as good as random ones.

Stochastic rounding of fp32 to bf16 adds the 16 low random bits to the fp32 pattern and cuts the low half: the result is one of the
two neighbours, the upper one with probability equal to the distance cut off, so the mean is exact.
"""

import torch
from torch import Tensor

MIX_1 = 0x7FEB352D  # a 32-bit finaliser pair with low avalanche bias
MIX_2 = 0x846CA68B
_U32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser to an int64 tensor that holds unsigned 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * MIX_1) & _U32
    x = x ^ (x >> 15)
    x = (x * MIX_2) & _U32  # < 2**64 wraps in int64, the low 32 bits stay exact
    return x ^ (x >> 16)


def random_bits(index: Tensor, seed: int) -> Tensor:
    """32 random bits for every entry of `index` (int64), as an int64 tensor of values in [0, 2**32)."""
    key = _mix(torch.tensor(seed & _U32, dtype=torch.int64, device=index.device))
    return _mix((index & _U32) ^ _mix(((index >> 32) & _U32) ^ key))


def stochastic_round_bf16(x: Tensor, index: Tensor, seed: int) -> Tensor:
    """Round fp32 `x` to bf16 without bias, with the random bits of `index` (same shape, int64). Inf and NaN pass through."""
    noise = (random_bits(index, seed) & 0xFFFF).to(torch.int32)
    cut = ((x.view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)
