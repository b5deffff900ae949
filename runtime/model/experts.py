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


class ExpertPool(nn.Module):
    """`sum_e gates_e Expert_e(x)`: `(B, W), (B, E) -> (B, W)`. Children are called by their number, so that a part of them keeps its names."""

    def __init__(self, dim: int, inner: int, num_experts: int) -> None:
        super().__init__()
        for e in range(num_experts):
            self.add_module(str(e), Expert(dim, inner))

    def forward(self, x_BW: Tensor, gates_BE: Tensor) -> Tensor:
        first, *others = (gate * expert(x_BW) for gate, expert in zip(gates_BE.unsqueeze(2).unbind(1), self.children(), strict=True))
        return sum(others, first)


class Experts(nn.Module):
    """`x + sum_e softmax(Linear(LN(x)))_e Expert_e(LN(x))`, dense as its source has it (engineering.fb.com 2026-08-03: an expert computes the full
    batch): nothing is routed, no expert is left without samples."""

    keeps_16_bits = ("gate",)

    def __init__(self, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(dim), nn.Linear(dim, layer.num_experts)
        self.experts = ExpertPool(dim, layer.mlp_dim, layer.num_experts)

    def forward(self, x_BW: Tensor) -> Tensor:
        normed = self.norm(x_BW)
        return x_BW + self.experts(normed, self.gate(normed).softmax(1))
