"""What every attention kernel of this package means by causal, window, and relative bias.

With `row` and `col` counted inside one sequence and lengths `Lq` and `Lk`, rows are aligned to the end of the keys:

    delta = row + (Lk - Lq) - col            (0 on the bottom-right diagonal)
    causal            keeps  delta >= 0
    causal + window   keeps  0 <= delta < window
    window alone      keeps  |delta| < window

so a row sees the `window` nearest columns, itself included. A row that keeps no column has output 0 and gradient 0.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BUCKET_WIDTH = 0.301  # of the natural logarithm, as HSTU's published code divides it
TIME_BUCKETS = 146  # buckets of a 63-bit difference: a larger time table has rows that nothing reads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBias:
    """Additive bias on the scaled scores from two learned tables, both optional, both receiving gradients.

    What HSTU adds: `position_table[delta + P - 1] + time_table[bucket(q_times[i] - k_times[j])]`, `bucket(d) = min(T - 1, floor(ln(max(1, |d|)) /
    0.301))`. Source: meta-recsys/generative-recommenders, `RelativeBucketedTimeAndPositionBasedBias` (arXiv 2402.17152), whose tables have one column
    and whose q_times[i] is the time of the event AFTER i (of the last one: its own).

    position_table: `(2P - 1, H or 1)`; row `clamp(delta, 1 - P, P - 1) + P - 1` with `delta` as defined in `kernels._masks`.
    time_table: `(T, H or 1)`, T = num_buckets + 1 in that source. Buckets are exact below 2**24 units; above, |d| counts as rounded to float32.
    q_times, k_times: `(total_q,)` and `(total_k,)` integers (any unit; a history spans less than 2**48). Needed with `time_table`.

    A table of one column is shared by all heads. Neither bias nor its gradient is ever a matrix of the sequence's length on the GPU.
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
    """Row of a time table of `rows` rows: `min(rows - 1, floor(ln(max(1, |difference|)) / BUCKET_WIDTH))`, |difference| as a float32."""
    return (torch.bucketize(difference.abs().float(), edges_on(difference.device), right=True) - 1).clamp_(0, rows - 1)


@functools.cache
def edges_on(device: torch.device) -> Tensor:
    """float32 `(TIME_BUCKETS + 14,)`: the smallest number of every time bucket, `exp(BUCKET_WIDTH b)` rounded up."""
    exact = [math.exp(BUCKET_WIDTH * b) for b in range(TIME_BUCKETS + 14)]
    nearest = np.array(exact, dtype=np.float32)
    up = np.where(nearest.astype(np.float64) < exact, np.nextafter(nearest, np.float32(np.inf)), nearest)
    return torch.from_numpy(up).to(device)
