"""Linear + ReLU stacks: the bottom tower, the interaction's dense part and the heads.

Shape legend: B samples, W features.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear + ReLU for each of `widths`: `(B, W) -> (B, widths[-1])`; without widths the identity."""

    def __init__(self, width: int, widths: Sequence[int]) -> None:
        super().__init__()
        ins = [width, *widths[:-1]]
        self.linears = nn.ModuleList(nn.Linear(i, o) for i, o in zip(ins, widths))

    def forward(self, x_BW: Tensor) -> Tensor:
        for linear in self.linears:
            x_BW = torch.relu(linear(x_BW))
        return x_BW


class Heads(nn.Module):
    """One tower per task, each Linear + ReLU for each of its hidden widths and one logit: `(B, W) -> (B, num_heads)` fp32."""

    def __init__(self, width: int, hidden: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(MLP(width, widths) for widths in hidden)
        self.logits = nn.ModuleList(nn.Linear(widths[-1] if widths else width, 1) for widths in hidden)

    def forward(self, x_BW: Tensor) -> Tensor:
        return torch.cat([logit(tower(x_BW)) for tower, logit in zip(self.towers, self.logits)], dim=1)
