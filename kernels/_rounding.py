"""Counter-based random bits and stochastic rounding, the same on the CPU and in Triton.

The element at (row, column) of a matrix gets, under seed `s`, the 32 bits

    bits = mix(column ^ mix(lo(row) ^ mix(hi(row) ^ mix(s))))     mix: a 32-bit finaliser of xor-shifts and multiplications

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


def random_bits(rows: Tensor, dim: int, seed: int) -> Tensor:
    """32 random bits for the first `dim` columns of each of `rows (N,)` (int64): `(N, dim)`, int64 values in [0, 2**32)."""
    key = _mix(torch.tensor(seed & _U32, dtype=torch.int64, device=rows.device))
    key = _mix((rows & _U32) ^ _mix(((rows >> 32) & _U32) ^ key))
    return _mix(torch.arange(dim, device=rows.device) ^ key.unsqueeze(1))


def stochastic_round_bf16(x: Tensor, rows: Tensor, seed: int) -> Tensor:
    """Round fp32 `x (N, D)`, rows `rows (N,)` of a matrix, to bf16 without bias. Inf and NaN pass through."""
    noise = (random_bits(rows, x.shape[1], seed) & 0xFFFF).to(torch.int32)
    cut = ((x.view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)
