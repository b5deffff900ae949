"""Mixture of experts over the interaction's output `(B, W)` (docs/model.md, section 1)."""
from __future__ import annotations

from costmodel.blocks.base import (
    CHEAP,
    DROPPED,
    INPUT,
    MATRIX,
    BatchShape,
    LayerBlock,
    Saved,
    activation_dtype,
    linear_parameters,
    norm_parameters,
    norm_saved,
)  # fmt: skip
from costmodel.model import LayerGroup
from costmodel.ops import Op, activation, elementwise, layer_norm, linear


class Experts(LayerBlock):
    """`num_experts` experts W -> `mlp_dim` -> W, each applied to the whole batch, mixed by a softmax gate (engineering.fb.com 2026-08-03)."""

    kind = "moe"
    uses = ("mlp_dim", "num_experts")
    needs = ("mlp_dim", "num_experts")
    keeps_16_bits = ("gate",)

    def __init__(self, group: LayerGroup, dim: int) -> None:
        self.validate(group)
        self.group, self.dim = group, dim

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        dim, inner, count = self.dim, self.group.mlp_dim, self.group.num_experts
        return (*norm_parameters("norm", dim), *linear_parameters("gate", dim, count),
                *(p for e in range(count) for name, sizes in (("up", (dim, inner)), ("down", (inner, dim)))
                  for p in linear_parameters(f"experts.{e}.{name}", *sizes)))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        rows, low, dim, inner, count = batch.samples, activation_dtype(precision), self.dim, self.group.mlp_dim, self.group.num_experts
        expert = (linear(rows, dim, inner, precision), activation("gelu", rows, inner, low), linear(rows, inner, dim, precision),
                  elementwise("mul", rows, dim, low), elementwise("add", rows, dim, low))
        return (layer_norm(rows, dim, low), linear(rows, dim, count, low), activation("sigmoid", rows, count, low), *expert * count)

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, dim, inner, count = batch.samples, self.dim, self.group.mlp_dim, self.group.num_experts
        return (
            *norm_saved("norm", rows, dim, INPUT),
            Saved("normed", rows * dim, CHEAP, rows=rows),
            Saved("gate", rows * count, CHEAP, rows=rows),
            Saved("gate.linear", rows * count, DROPPED, rows=rows),
            *(saved for e in range(count) for saved in (
                Saved(f"experts.{e}.up", rows * inner, MATRIX, rows=rows), Saved(f"experts.{e}.gelu", rows * inner, CHEAP, rows=rows),
                Saved(f"experts.{e}.down", rows * dim, MATRIX, rows=rows))),
        )
