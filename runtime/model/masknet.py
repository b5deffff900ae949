"""MaskNet over jagged events (arXiv 2411.09852).

Shape legend: T events of all samples, D model width.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from costmodel.model import LayerGroup


class MaskNet(nn.Module):
    """`Linear(x * Linear(ReLU(Linear(x))))`: every event weighs its own features, then mixes them linearly; no residual, as in the paper."""

    def __init__(self, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.up, self.mask, self.out = nn.Linear(dim, layer.mlp_dim), nn.Linear(layer.mlp_dim, dim), nn.Linear(dim, dim)

    def forward(self, x_TD: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        return self.out(x_TD * self.mask(torch.relu(self.up(x_TD))))
