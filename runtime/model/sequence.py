"""A user history: event embeddings -> input projection -> layer groups -> summary.

Shape legend: T events of all samples, B samples, D model width, W summed width of the sequence's tables.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from costmodel.model import LayerGroup
from kernels.jagged import jagged_mean, jagged_to_padded, padded_to_jagged
from runtime.model.registry import build_block


class Summary(nn.Module):
    """LayerNorm, then a projection of (mean over events, last event): `(T, D) -> (B, D)`. An empty history gives zeros before the projection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.project = nn.Linear(2 * dim, dim)

    def forward(self, x_TD: Tensor, offsets: Tensor) -> Tensor:
        x_TD = self.norm(x_TD)
        return self.project(torch.cat([jagged_mean(x_TD, offsets), last_event(x_TD, offsets)], dim=1))


def last_event(x_TD: Tensor, offsets: Tensor) -> Tensor:
    """The last event of every history, `(B, D)`; zeros for an empty one."""
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros((offsets.shape[0] - 1, x_TD.shape[1]))
    last = x_TD[(offsets[1:] - 1).clamp(min=0)]
    return last * (offsets.diff() > 0).to(last.dtype).unsqueeze(1)


class SequenceEncoder(nn.Module):
    """`(T, W) -> (T, D), (B, D)`: Linear(W, D), `count` blocks of every layer group in order; the events, and their summary."""

    def __init__(self, width: int, dim: int, layers: tuple[LayerGroup, ...]) -> None:
        super().__init__()
        self.input = nn.Linear(width, dim)
        self.groups = nn.ModuleList(nn.ModuleList(build_block(dim, layer) for _ in range(layer.count)) for layer in layers)
        self.summary = Summary(dim)
        self.layers, self.padded = layers, False

    def pad(self) -> None:
        """From now on compute the layers on histories padded to the batch's longest: the same values at the price of the padding.

        Raises ValueError for a layer that lets an event see later ones, for it would see the padding.
        """
        for layer in self.layers:
            if not layer.causal:
                raise ValueError(f"batching 'padded': layer {layer.kind} is not causal, its events would see the padding")
        self.padded = True

    def forward(self, events_TW: Tensor, offsets: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
        x_TD = self.input(events_TW)
        num_events, inner = x_TD.shape[0], offsets
        if self.padded:
            x_TD = jagged_to_padded(x_TD, offsets, max_len=max_length).flatten(0, 1)
            inner = torch.arange(offsets.shape[0], device=offsets.device) * max_length
        for group in self.groups:
            for block in group:
                x_TD = block(x_TD, inner, max_length)
        if self.padded:
            x_TD = padded_to_jagged(x_TD.unflatten(0, (-1, max_length)), offsets, total=num_events)
        return x_TD, self.summary(x_TD, offsets)
