"""Mixture of experts over the interaction's output: every expert sees the whole batch, a softmax gate mixes them.

Shape legend: B samples, W features, E experts.
"""
from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from costmodel.model import LayerGroup


class Expert(nn.Module):
    """`(B, W) -> (B, W)` through `mlp_dim`."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x_BW: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BW)))


class Experts(nn.Module):
    """`x + sum_e softmax(Linear(LN(x)))_e Expert_e(LN(x))`, dense: nothing is routed, no expert is left without samples."""

    keeps_16_bits = ("gate",)

    def __init__(self, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(dim), nn.Linear(dim, layer.num_experts)
        self.experts = nn.ModuleList(Expert(dim, layer.mlp_dim) for _ in range(layer.num_experts))

    def forward(self, x_BW: Tensor) -> Tensor:
        normed = self.norm(x_BW)
        gates = self.gate(normed).softmax(1).unsqueeze(2).unbind(1)
        for gate, expert in zip(gates, self.experts):
            x_BW = x_BW + gate * expert(normed)
        return x_BW
