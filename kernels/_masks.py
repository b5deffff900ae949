"""What every attention kernel of this package means by causal, window, and relative bias.

With `row` and `col` counted inside one sequence and lengths `Lq` and `Lk`, rows are aligned to the end of the keys:

    delta = row + (Lk - Lq) - col            (0 on the bottom-right diagonal)
    causal            keeps  delta >= 0
    causal + window   keeps  0 <= delta < window
    window alone      keeps  |delta| < window

so a row sees the `window` nearest columns, itself included. A row that keeps no column has output 0 and gradient 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TIME_BUCKETS = 64  # bit lengths of a 63-bit difference: a larger time table has rows that nothing reads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBias:
    """Additive bias on the scaled scores from two learned tables, both optional, both receiving gradients.

    position_table: `(2P - 1, H)`; row `clamp(delta, 1 - P, P - 1) + P - 1` with `delta` as defined in `kernels._masks`.
    time_table: `(T, H)`; row `min(T - 1, bit_length(|q_times[i] - k_times[j]|))`, so bucket b > 0 holds differences in
        `[2**(b-1), 2**b)`: logarithmic buckets with exact integer edges.
    q_times, k_times: `(total_q,)` and `(total_k,)` integers (any unit; the caller's clock). Needed with `time_table`.
    """

    position_table: Tensor | None = None
    time_table: Tensor | None = None
    q_times: Tensor | None = None
    k_times: Tensor | None = None


def mask_keeps(delta: Tensor, *, causal: bool, window: int) -> Tensor:
    """Boolean mask of the kept (row, col) pairs from `delta`; `window <= 0` means no window."""
    keep = delta >= 0 if causal else torch.ones_like(delta, dtype=torch.bool)
    if window > 0:
        keep = keep & (delta < window)
        if not causal:
            keep = keep & (delta > -window)
    return keep


def position_bucket(delta: Tensor, rows: int) -> Tensor:
    """Row of a position table of `rows = 2P - 1` rows for every `delta`."""
    reach = (rows - 1) // 2
    return delta.clamp(-reach, reach) + reach


def time_bucket(difference: Tensor, rows: int) -> Tensor:
    """Row of a time table of `rows` rows: the bit length of |difference|, exact for every int64."""
    magnitude = difference.abs()
    # keep only the highest bit of each run of ones: the conversion to float can then never round up to the next power of two
    magnitude = magnitude & ~(magnitude >> 1)
    return torch.frexp(magnitude.double()).exponent.long().clamp_(max=rows - 1)
