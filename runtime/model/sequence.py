"""A user history: event embeddings -> input projection -> layer groups -> summary.

Shape legend: T events of all samples, B samples, D model width, W summed width of the sequence's tables.
"""
from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from costmodel.model import Layer, LayerGroup
from kernels import jagged_attention
from kernels.jagged import jagged_mean, jagged_to_padded, padded_to_jagged
from runtime.model.interformer import even_offsets
from runtime.model.norm import LayerNorm
from runtime.model.pyramid import newest_events
from runtime.model.registry import build_block
from runtime.model.times import TimedInput, aligned, event_times


class Summary(nn.Module):
    """LayerNorm, then a projection of (mean over events, last event): `(T, D) -> (B, D)`. An empty history gives zeros before the projection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = LayerNorm(dim)
        self.project = nn.Linear(2 * dim, dim)

    def forward(self, x_TD: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        x_TD = self.norm(x_TD)
        return self.project(torch.cat([jagged_mean(x_TD, offsets), last_event(x_TD, offsets)], dim=1))


class Pma(nn.Module):
    """`Linear(concat(attention(Q, LN(S), LN(S)), last event))`: learned queries Q read the whole history, `(T, D) -> (B, D)` (arXiv 2411.09852).
    An empty history gives zeros before the projection."""

    def __init__(self, dim: int, layer: Layer) -> None:
        super().__init__()
        self.heads, width = (layer.heads, layer.head_dim), layer.heads * layer.head_dim
        self.norm, self.kv = LayerNorm(dim), nn.Linear(dim, 2 * width)
        self.queries = nn.Parameter(torch.empty(layer.num_queries, width))
        nn.init.normal_(self.queries)
        self.project = nn.Linear(layer.num_queries * width + dim, dim)

    def forward(self, x_TD: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        normed, num_samples, count = self.norm(x_TD), offsets.shape[0] - 1, self.queries.shape[0]
        k_THd, v_THd = self.kv(normed).view(-1, 2, *self.heads).unbind(1)
        q_NHd = self.queries.to(k_THd.dtype).expand(num_samples, -1, -1).reshape(-1, *self.heads)
        read = jagged_attention(q_NHd, k_THd, v_THd, even_offsets(offsets, count), offsets, max_q=count, max_k=max_length)
        return self.project(torch.cat([read.view(num_samples, -1), last_event(normed, offsets)], dim=1))


SUMMARIES: dict[str, type[nn.Module]] = {"pma": Pma}


def last_event(x_TD: Tensor, offsets: Tensor) -> Tensor:
    """The last event of every history, `(B, D)`; zeros for an empty one."""
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros((offsets.shape[0] - 1, x_TD.shape[1]))
    last = x_TD.index_select(0, (offsets[1:] - 1).clamp(min=0))  # whose backward adds rows; that of x[i] sorts i first
    return last * (offsets.diff() > 0).to(last.dtype).unsqueeze(1)


class History(NamedTuple):
    """Jagged events `(T, D)` of a batch: boundaries `(B + 1,)` and the longest history, on the host."""

    events: Tensor
    offsets: Tensor
    max_length: int


class SequenceEncoder(nn.Module):
    """`(T, W) -> (T', D), (B, D)`: Linear(W, D), `count` blocks of every layer group in order; the events that its pyramid levels left, and their
    summary."""

    def __init__(self, width: int, dim: int, layers: tuple[LayerGroup, ...], summary: Layer | None = None,
                 time_buckets: int | None = None) -> None:
        super().__init__()
        self.input = nn.Linear(width, dim) if time_buckets is None else TimedInput(width, dim, time_buckets)
        self.groups = nn.ModuleList(nn.ModuleList(build_block(dim, layer) for _ in range(layer.count)) for layer in layers)
        self.summary = Summary(dim) if summary is None else SUMMARIES[summary.kind](dim, summary)
        self.layers, self.padded, self.timed_input = layers, False, time_buckets is not None

    def pad(self) -> None:
        """From now on compute the layers on histories padded to the batch's longest: the same values at the price of the padding.

        Raises ValueError for a layer that lets an event see later ones, for it would see the padding.
        """
        for layer in self.layers:
            for part in layer.branches or (layer,):
                if not part.causal:
                    raise ValueError(f"batching 'padded': layer {part.kind} is not causal, its events would see the padding")
        self.padded = True

    def forward(self, events_TW: Tensor, offsets: Tensor, max_length: int, lengths: np.ndarray,
                times_T: Tensor | None = None) -> tuple[History, Tensor]:
        """`lengths`: `(B,)` events of each history, on the host. `times_T`: int64 seconds, where the sequence is timed."""
        x_TD = self.input(events_TW, times_T, offsets) if self.timed_input else self.input(events_TW)
        history = History(x_TD, offsets, max_length)
        times_2T = event_times(times_T, offsets) if any(layer.timed for layer in self.layers) else None
        starts = sorted({0, *(i for i, layer in enumerate(self.layers) if layer.newest is not None)})
        for start, end in itertools.pairwise((*starts, len(self.layers))):
            newest = self.layers[start].newest if self.layers else None
            if newest is not None:
                x_TD, offsets = newest_events(history.events, history.offsets, lengths, newest)
                if times_2T is not None:
                    times_2T = aligned(newest_events(times_2T.t(), history.offsets, lengths, newest)[0].t())
                history, lengths = History(x_TD, offsets, min(history.max_length, newest)), np.minimum(lengths, newest)
            history = self._level(history, range(start, end), times_2T)
        return history, self.summary(*history)

    def _level(self, history: History, groups: range, times_2T: Tensor | None) -> History:
        """The blocks of `groups`, between which no event is dropped."""
        x_TD, offsets, max_length = history
        if self.padded:
            x_TD = jagged_to_padded(x_TD, offsets, max_len=max_length).flatten(0, 1)
            if times_2T is not None:
                times_2T = aligned(jagged_to_padded(times_2T.t(), offsets, max_len=max_length).flatten(0, 1).t())
            offsets = torch.arange(offsets.shape[0], device=offsets.device) * max_length
        for i in groups:
            for block in self.groups[i]:
                x_TD = block(x_TD, offsets, max_length, times_2T) if self.layers[i].timed else block(x_TD, offsets, max_length)
        if self.padded:
            x_TD = padded_to_jagged(x_TD.unflatten(0, (-1, max_length)), history.offsets, total=history.events.shape[0])
        return history._replace(events=x_TD)
