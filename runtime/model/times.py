"""When events happened: a learned vector of the time since the newest one, by logarithmic buckets.

Shape legend: T events of all samples, B samples, D model width, W summed width of the sequence's tables.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.embedding import embedding_sequence


class TimedInput(nn.Module):
    """`Linear(W, D)` plus E[bucket of the time since the newest event], E `(num_buckets, D)`: `(T, W), (T,), (B + 1,) -> (T, D)`. Logarithmic time as
    Kunlun has it (arXiv 2602.10016), added where it rotates."""

    def __init__(self, width: int, dim: int, num_buckets: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, dim)
        self.times = nn.Parameter(torch.empty(num_buckets, dim))
        nn.init.normal_(self.times, std=0.02)

    def forward(self, events_TW: Tensor, times_T: Tensor, offsets: Tensor) -> Tensor:
        x_TD = self.linear(events_TW)
        return x_TD + embedding_sequence(self.times.to(x_TD.dtype), time_buckets(times_T, offsets, self.times.shape[0]))


def time_buckets(times_T: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    """`min(floor(log2(1 + newest - time)), num_buckets - 1)` of int64 seconds, int64; an event later than the newest one counts as it."""
    if not len(times_T):
        return times_T
    newest = torch.repeat_interleave(times_T[(offsets[1:] - 1).clamp(min=0)], offsets.diff(), output_size=len(times_T))
    exponent = torch.frexp((newest - times_T).clamp(min=0).double() + 1.0).exponent  # 2 ** (exponent - 1) <= 1 + dt, exactly
    return (exponent - 1).clamp(max=num_buckets - 1).long()
