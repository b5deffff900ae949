"""Blocks over feature tokens `(B, n, d)`: Wukong and the InterFormer cross block (docs/model.md, section 1)."""
from __future__ import annotations

import abc

from costmodel.blocks.attention import GDPA_ACTIVATIONS  # fmt: skip
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
from costmodel.model import LayerGroup
from costmodel.ops import Op, activation, attention, bmm, dtype_bytes, elementwise, layer_norm, linear


class InteractionBlock(LayerBlock):
    """`(B, num_tokens, d)` to `(B, num_outputs, d)`. `first`: its input is a fresh concatenation of the model's features; `limit`: the most events
    of a history that its layers leave to it."""

    def __init__(self, group: LayerGroup, *, num_tokens: int, feature_dim: int, dim: int, first: bool, limit: int | None = None) -> None:
        self.validate(group)
        self.group, self.num_tokens, self.feature_dim, self.dim, self.first, self.limit = group, num_tokens, feature_dim, dim, first, limit

    @property
    @abc.abstractmethod
    def num_outputs(self) -> int:
        """Tokens that leave the block."""

    def concat(self, rows: float) -> tuple[Op, ...]:
        return (elementwise("cat", rows, self.num_tokens * self.feature_dim),) if self.first else ()


class Wukong(InteractionBlock):
    """Wukong layer (arXiv 2403.02545): factorisation-machine block of rank `rank` with an attentive Y, linear compression, residual, LayerNorm.

    options: `num_fm` (n_F), `num_linear` (n_L), `rank` (k), `mlp_layers` hidden layers of `mlp_dim`, `compressed` tokens that Y is made of.
    """

    kind = "wukong"
    uses = ("mlp_dim", "options")
    needs = ("mlp_dim",)
    options = ("num_fm", "num_linear", "rank", "mlp_layers", "compressed")

    @property
    def num_outputs(self) -> int:
        return self.option("num_fm") + self.option("num_linear")

    @property
    def compressions(self) -> int:
        """Rows of the one matrix that makes linear tokens, tokens for Y and, where the count changes, the residual."""
        return self.option("num_linear") + self.option("compressed") + (self.num_outputs if self.num_outputs != self.num_tokens else 0)

    @property
    def attentive(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the two Linears that make Y."""
        c, k = self.option("compressed"), self.option("rank")
        return (c * self.feature_dim, c * k), (c * k, self.num_tokens * k)

    @property
    def mlp(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the Linears over the flattened factorisation machine."""
        h, first = self.group.mlp_dim, self.num_tokens * self.option("rank")
        return ((first, h), *[(h, h)] * (self.option("mlp_layers") - 1), (h, self.option("num_fm") * self.feature_dim))

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (*parameter("compress", self.compressions, self.num_tokens),
                *(p for i, (a, b) in enumerate(self.attentive) for p in linear_parameters(f"attentive.{i}", a, b)),
                *norm_parameters("fm_norm", self.num_tokens * self.option("rank")),
                *(p for i, (a, b) in enumerate(self.mlp) for p in linear_parameters(f"mlp.{i}", a, b)),
                *norm_parameters("norm", self.feature_dim))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        rows, low, n, d, k = batch.samples, activation_dtype(precision), self.num_tokens, self.feature_dim, self.option("rank")
        (a0, a1), (b0, b1) = self.attentive
        ops = [*self.concat(rows), bmm(rows, self.compressions, n, d, low), linear(rows, a0, a1, precision), activation("relu", rows, a1, low),
               linear(rows, b0, b1, precision), bmm(rows, d, n, k, low), bmm(rows, n, d, k, low), layer_norm(rows, n * k, low)]
        for i, (a, b) in enumerate(self.mlp):
            ops.append(linear(rows, a, b, precision))
            if i < len(self.mlp) - 1:
                ops.append(activation("relu", rows, b, low))
        out = self.num_outputs * d
        return (*ops, elementwise("cat", rows, out, low), elementwise("add", rows, out, low), layer_norm(rows * self.num_outputs, d, low))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, n, d, k = batch.samples, self.num_tokens, self.feature_dim, self.option("rank")
        (_, hidden), _ = self.attentive
        out = self.num_outputs
        return (
            Saved("input", rows * n * d, INPUT, rows=rows),
            Saved("compressed", rows * self.compressions * d, MATRIX, rows=rows),
            Saved("attentive.relu", rows * hidden, CHEAP, rows=rows),
            Saved("attentive.linear", rows * hidden, DROPPED, rows=rows),
            Saved("y", rows * n * k, MATRIX, rows=rows),
            Saved("x^T y", rows * d * k, MATRIX, rows=rows),
            Saved("fm", rows * n * k, MATRIX, rows=rows),
            Saved("fm.statistics", 2 * rows, CHEAP, FP32_BYTES),
            Saved("mlp.input", rows * n * k, CHEAP, rows=rows),
            *(Saved(f"mlp.relu.{i}", rows * b, CHEAP, rows=rows) for i, (_, b) in enumerate(self.mlp[:-1])),
            *(Saved(f"mlp.{i}", rows * b, DROPPED, rows=rows) for i, (_, b) in enumerate(self.mlp)),
            *norm_saved("norm", rows * out, d, CHEAP),
        )


class InterFormer(InteractionBlock):
    """InterFormer cross block (arXiv 2411.09852) between the feature tokens and one history, with GDPA as its personalised feed-forward part
    (arXiv 2602.10016): both streams learn from each other's summary.

    `num_queries`: learned PMA queries; options: `summary_tokens` (of the features), `recent` (last events). `causal`, `window` of its self-attention;
    `activation`, `divisor` of its GDPA.
    """

    kind = "interformer"
    uses = ("heads", "head_dim", "causal", "window", "divisor", "activation", "num_queries", "options", "sequence")
    needs = ("heads", "head_dim", "divisor", "activation", "num_queries", "sequence")
    options = ("summary_tokens", "recent")

    @classmethod
    def validate(cls, group: LayerGroup) -> None:
        LayerBlock.validate.__func__(cls, group)
        if group.activation not in GDPA_ACTIVATIONS:
            raise ValueError(f"layer {group.kind}: activation {group.activation!r} is none of {', '.join(GDPA_ACTIVATIONS)}")

    @property
    def sequence(self) -> str:
        assert self.group.sequence is not None
        return self.group.sequence

    @property
    def num_read(self) -> int:
        """Queries that read the history: one per summary token (CLS) and the learned ones (PMA)."""
        return self.option("summary_tokens") + self.group.num_queries

    @property
    def num_outputs(self) -> int:
        return self.num_tokens + self.num_read + self.option("recent")

    def shape(self, batch: BatchShape) -> JaggedShape:
        return batch.sequences[self.sequence].newest(self.limit)

    def causal_excess(self, batch: BatchShape) -> float:
        return 2.0 * self.shape(batch).tokens * self.width if self.group.causal else 0.0

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        d, dim, width = self.feature_dim, self.dim, self.width
        return (*parameter("lce", self.option("summary_tokens"), self.num_tokens), *linear_parameters("feature_gate", d, d),
                *norm_parameters("personal_norm", dim), *linear_parameters("personal_query", dim, width),
                *linear_parameters("personal_context", d, 2 * width), *linear_parameters("personal_out", width, dim),
                *norm_parameters("attention_norm", dim), *linear_parameters("qkv", dim, 3 * width), *linear_parameters("out", width, dim),
                *norm_parameters("summary_norm", dim), *linear_parameters("summary_kv", dim, 2 * width), *linear_parameters("cls", d, width),
                *parameter("queries", self.group.num_queries, width), *linear_parameters("tokens", width, d), *linear_parameters("recent", dim, d),
                *linear_parameters("sequence_gate", d, d))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        shape, group, low, rows = self.shape(batch), self.group, activation_dtype(precision), batch.samples
        tokens, d, dim, width = shape.tokens, self.feature_dim, self.dim, self.width
        summary, read, recent = self.option("summary_tokens"), self.num_read, self.option("recent")
        heads = {"heads": group.heads, "head_dim": group.head_dim, "longest": shape.longest, "dtype": low}
        own = attention("softmax" if group.window is None else "softmax_window", tokens=tokens,
                        pairs=shape.pairs(causal=group.causal, window=group.window), **heads)
        personal = attention(f"gdpa_{group.activation}_context", tokens=(tokens + rows * summary) / 2, pairs=tokens * summary, **heads)
        pooled = attention("softmax_queries", tokens=(tokens + rows * read) / 2, pairs=tokens * read, **heads)
        return (
            *self.concat(rows), bmm(rows, summary, self.num_tokens, d, low), *self._gate(rows * summary, precision),
            layer_norm(tokens, dim, low), linear(tokens, dim, width, precision), linear(rows * summary, d, 2 * width, precision), personal,
            linear(tokens, width, dim, precision), elementwise("add", tokens, dim, low),
            layer_norm(tokens, dim, low), linear(tokens, dim, 3 * width, precision), own, linear(tokens, width, dim, precision),
            elementwise("add", tokens, dim, low),
            layer_norm(tokens, dim, low), linear(tokens, dim, 2 * width, precision), linear(rows * summary, d, width, precision),
            elementwise("cat", rows, read * width, low), pooled, linear(rows * read, width, d, precision),
            linear(rows * recent, dim, d, precision), elementwise("cat", rows, (read + recent) * d, low),
            *self._gate(rows * (read + recent), precision), elementwise("cat", rows, self.num_outputs * d, low),
        )

    def workspace_bytes(self, batch: BatchShape, precision: str) -> float:
        """Gradients of the summary's keys and values, apart and side by side: backward begins there, when nothing of the block is freed yet."""
        return 2 * dtype_bytes(activation_dtype(precision)) * self.shape(batch).tokens * 2 * self.width

    def _gate(self, rows: float, precision: str) -> tuple[Op, ...]:
        d, low = self.feature_dim, activation_dtype(precision)
        return linear(rows, d, d, precision), elementwise("mul", rows, d, low), activation("sigmoid", rows, d, low)

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, tokens, d, dim, width = batch.samples, self.shape(batch).tokens, self.feature_dim, self.dim, self.width
        summary, read, recent, heads = self.option("summary_tokens"), self.num_read, self.option("recent"), self.group.heads

        def gate(name: str, count: float, level: str) -> tuple[Saved, ...]:
            """z, its Linear, and the sigmoid's output."""
            return (Saved(f"{name}.input", rows * count * d, level, rows=rows * count),
                    Saved(f"{name}.linear", rows * count * d, MATRIX, rows=rows * count),
                    Saved(f"{name}.sigmoid", rows * count * d, CHEAP, rows=rows * count))

        tensors = (
            Saved("input", rows * self.num_tokens * d, INPUT, rows=rows),
            *gate("feature_gate", summary, MATRIX),
            *norm_saved("personal_norm", tokens, dim, INPUT),
            Saved("personal_query.input", tokens * dim, CHEAP, rows=tokens),
            Saved("personal_query", tokens * width, MATRIX, rows=tokens),
            Saved("personal_context", rows * summary * 2 * width, MATRIX, rows=rows),
            Saved("personal", tokens * width, MATRIX, rows=tokens),
            Saved("personal_out", tokens * dim, DROPPED, rows=tokens),
            *norm_saved("attention_norm", tokens, dim, CHEAP),
            Saved("qkv.input", tokens * dim, CHEAP, rows=tokens),
            Saved("qkv", tokens * 3 * width, MATRIX, rows=tokens),
            Saved("attention", tokens * width, MATRIX, rows=tokens),
            Saved("attention.lse", tokens * heads, MATRIX, FP32_BYTES),
            Saved("out", tokens * dim, DROPPED, rows=tokens),
            Saved("summary_norm.statistics", 2 * tokens, CHEAP, FP32_BYTES),
            Saved("summary_kv.input", tokens * dim, CHEAP, rows=tokens),
            Saved("summary_kv", tokens * 2 * width, MATRIX, rows=tokens),
            Saved("cls", rows * summary * width, DROPPED, rows=rows),
            Saved("read.queries", rows * read * width, CHEAP, rows=rows),
            Saved("read", rows * read * width, MATRIX, rows=rows),
            Saved("read.lse", rows * read * heads, MATRIX, FP32_BYTES),
            Saved("tokens", rows * read * d, DROPPED, rows=rows),
            Saved("recent.input", rows * recent * dim, CHEAP, rows=rows),
            Saved("recent", rows * recent * d, DROPPED, rows=rows),
            *gate("sequence_gate", read + recent, CHEAP),
        )
        return kept_in_8_bits(tensors, stored=("personal_norm.input", "attention_norm.input"), again=("personal_query.input", "qkv.input"),
                              made=("summary_kv.input",))
