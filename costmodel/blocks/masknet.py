"""MaskNet over the events of a history (docs/model.md, section 1)."""
from __future__ import annotations

from costmodel.blocks.base import CHEAP, DROPPED, INPUT, MATRIX, BatchShape, Saved, SequenceBlock, activation_dtype, linear_parameters
from costmodel.ops import Op, activation, elementwise, linear


class MaskNet(SequenceBlock):
    """`Linear(x * Linear(ReLU(Linear(x))))`, event by event, `mlp_dim` wide inside: MLP_lce(S . MLP_mask(S)), which cleans the concatenated histories
    before InterFormer's layers (arXiv 2411.09852). The paper gives no sizes of the two MLPs: one hidden layer and none are ours.
    """

    kind = "mask_net"
    uses = ("mlp_dim",)
    needs = ("mlp_dim",)

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        dim, inner = self.dim, self.group.mlp_dim
        return (*linear_parameters("up", dim, inner), *linear_parameters("mask", inner, dim), *linear_parameters("out", dim, dim))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        tokens, dim, inner, low = self.shape(batch).tokens, self.dim, self.group.mlp_dim, activation_dtype(precision)
        return (linear(tokens, dim, inner, precision), activation("relu", tokens, inner, low), linear(tokens, inner, dim, precision),
                elementwise("mul", tokens, dim, low), linear(tokens, dim, dim, precision))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, dim, inner = self.shape(batch).tokens, self.dim, self.group.mlp_dim
        return (
            Saved("input", rows * dim, INPUT, rows=rows),
            Saved("up", rows * inner, DROPPED, rows=rows),
            Saved("relu", rows * inner, CHEAP, rows=rows),
            Saved("mask", rows * dim, MATRIX, rows=rows),
            Saved("out.input", rows * dim, CHEAP, rows=rows),
        )
