"""A history's summary by attention of learned queries (docs/model.md, section 1)."""
from __future__ import annotations

from costmodel.blocks.base import (
    CHEAP,
    DROPPED,
    FP32_BYTES,
    INPUT,
    MATRIX,
    BatchShape,
    JaggedShape,
    LayerBlock,
    Saved,
    activation_dtype,
    kept_in_8_bits,
    linear_parameters,
    norm_parameters,
    norm_saved,
    parameter,
)  # fmt: skip
from costmodel.model import Layer, LayerGroup
from costmodel.ops import Op, attention, elementwise, layer_norm, linear


class Pma(LayerBlock):
    """`Linear(concat(attention(Q, LN(S), LN(S)), last event))`: `num_queries` learned queries Q read the whole history, by heads.

    Pooling by multi-head attention, PMA(Q, S) = MHA(Q, S, S) as InterFormer has it (arXiv 2411.09852); Q stands for its own projection, and the last
    event, which is the candidate, stays beside the pooled ones as InterFormer's recent tokens do.
    """

    kind = "pma"
    uses = ("heads", "head_dim", "num_queries")
    needs = ("heads", "head_dim", "num_queries")

    def __init__(self, layer: Layer, dim: int, sequence: str, limit: int | None = None) -> None:
        self.group = LayerGroup.of_layer(layer)
        self.validate(self.group)
        self.dim, self.sequence, self.limit = dim, sequence, limit

    @property
    def num_read(self) -> int:
        """Queries that read the history."""
        return self.group.num_queries

    @property
    def read_width(self) -> int:
        """Width of what the queries read, beside one another."""
        return self.num_read * self.width

    def shape(self, batch: BatchShape) -> JaggedShape:
        return batch.sequences[self.sequence].newest(self.limit)

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (*norm_parameters("norm", self.dim), *linear_parameters("kv", self.dim, 2 * self.width),
                *parameter("queries", self.num_read, self.width), *linear_parameters("project", self.read_width + self.dim, self.dim))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        shape, rows, low, group = self.shape(batch), batch.samples, activation_dtype(precision), self.group
        pooled = attention("softmax_queries", tokens=(shape.tokens + rows * self.num_read) / 2, pairs=shape.tokens * self.num_read, heads=group.heads,
                           head_dim=group.head_dim, longest=shape.longest, dtype=low)
        width = self.read_width + self.dim
        return (layer_norm(shape.tokens, self.dim, low), linear(shape.tokens, self.dim, 2 * self.width, precision),
                elementwise("cat", rows, self.read_width, low), pooled, elementwise("cat", rows, width, low),
                linear(rows, width, self.dim, precision))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        tokens, rows = self.shape(batch).tokens, batch.samples
        tensors = (
            *norm_saved("norm", tokens, self.dim, INPUT),
            Saved("kv.input", tokens * self.dim, CHEAP, rows=tokens),
            Saved("kv", tokens * 2 * self.width, MATRIX, rows=tokens),
            Saved("queries", rows * self.read_width, CHEAP, rows=rows),
            Saved("read", rows * self.read_width, MATRIX, rows=rows),
            Saved("read.lse", rows * self.num_read * self.group.heads, MATRIX, FP32_BYTES),
            Saved("project.input", rows * (self.read_width + self.dim), CHEAP, rows=rows),
            Saved("project", rows * self.dim, DROPPED, rows=rows),
        )
        return kept_in_8_bits(tensors, stored=("norm.input",), again=("kv.input",))
