"""When events happened: a learned vector of the time since the newest one, and a bias on attention's scores, both by logarithmic buckets.

Shape legend: T events of all samples, B samples, D model width, W summed width of the sequence's tables.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from costmodel.model import Layer
from kernels import AttentionBias
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


class RelativeBias(nn.Module):
    """HSTU's bias of query i and key j, shared by all heads: `position[i - j] + time[min(n, floor(ln(max(1, |t'_i - t_j|)) / 0.301))]`, where t'_i is
    when event i is asked about: the time of the event after it, of the newest one its own.

    As meta-recsys/generative-recommenders has it (`RelativeBucketedTimeAndPositionBasedBias`; arXiv 2402.17152), but for padding: there the newest
    event is asked about at the time that a padded row holds behind it. Tables `(2 P - 1, 1)` and `(n + 1, 1)` of a layer's `relative_positions` P and
    `time_buckets` n; positions P - 1 and more apart are alike, so that P need not be the longest history.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        positions, buckets = layer.relative_positions, layer.time_buckets
        self.position = None if positions is None else nn.Parameter(torch.empty(2 * positions - 1, 1))
        self.time = None if buckets is None else nn.Parameter(torch.empty(buckets + 1, 1))
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)

    def forward(self, times_2T: Tensor | None) -> AttentionBias:
        """`times_2T` as `event_times` gives it, needed where there are time buckets. Raises ValueError without."""
        if self.time is None:
            return AttentionBias(position_table=self.position)
        if times_2T is None:
            raise ValueError("layer with time_buckets: needs the times of its events")
        return AttentionBias(position_table=self.position, time_table=self.time, q_times=times_2T[1], k_times=times_2T[0])


def event_times(times_T: Tensor, offsets: Tensor) -> Tensor:
    """`(2, T)` int64: when each event happened, and when it is asked about: at the next event of its history, the last one at its own time."""
    ends = torch.zeros(len(times_T) + 1, dtype=torch.bool, device=times_T.device).index_fill_(0, offsets[1:].long(), True)
    return aligned(torch.stack([times_T, torch.where(ends[1:], times_T, torch.cat([times_T[1:], times_T[-1:]]))]))


def aligned(times_2T: Tensor) -> Tensor:
    """The same with both rows at multiples of 16 bytes: kernels are compiled for such, and again for others."""
    total = times_2T.shape[1]
    return times_2T.new_empty((2, total + total % 2))[:, :total].copy_(times_2T)


def time_buckets(times_T: Tensor, offsets: Tensor, num_buckets: int) -> Tensor:
    """`min(floor(log2(1 + newest - time)), num_buckets - 1)` of int64 seconds, int64; an event later than the newest one counts as it."""
    if not len(times_T):
        return times_T
    newest = torch.repeat_interleave(times_T[(offsets[1:] - 1).clamp(min=0)], offsets.diff(), output_size=len(times_T))
    exponent = torch.frexp((newest - times_T).clamp(min=0).double() + 1.0).exponent  # 2 ** (exponent - 1) <= 1 + dt, exactly
    return (exponent - 1).clamp(max=num_buckets - 1).long()
