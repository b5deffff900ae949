"""A dense language model as a sequence: its decoder block, and the head that predicts the next event (docs/model.md, section 1).

RMSNorm is priced as `layer_norm`: it reads and writes the same bytes.
"""
from __future__ import annotations

from costmodel.blocks.base import (
    CHEAP,
    DROPPED,
    FP32_BYTES,
    INPUT,
    MATRIX,
    BatchShape,
    Block,
    Saved,
    SequenceBlock,
    activation_dtype,
    parameter,
)  # fmt: skip
from costmodel.model import LayerGroup
from costmodel.ops import Op, activation, attention, dtype_bytes, elementwise, layer_norm, linear, op


class Llama(SequenceBlock):
    """Decoder block of Llama 3 (arXiv 2407.21783, section 3.2): RMSNorm, causal attention with rotary positions and grouped keys and values, SwiGLU;
    no bias anywhere. options: `kv_heads`, heads of keys and values, which divide `heads`.
    """

    kind = "llama"
    uses = ("heads", "head_dim", "mlp_dim", "causal", "window", "options")
    needs = ("heads", "head_dim", "mlp_dim")
    options = ("kv_heads",)

    @classmethod
    def validate(cls, group: LayerGroup) -> None:
        SequenceBlock.validate.__func__(cls, group)
        if group.heads % int(group.options["kv_heads"]):
            raise ValueError(f"layer {group.kind}: options.kv_heads {group.options['kv_heads']:g} must divide heads {group.heads}")
        if group.head_dim % 2:
            raise ValueError(f"layer {group.kind}: head_dim {group.head_dim} must be even, positions rotate pairs")

    @property
    def kv_width(self) -> int:
        return self.option("kv_heads") * self.group.head_dim

    @property
    def repeats(self) -> bool:
        """Whether keys and values are repeated to the number of query heads."""
        return self.kv_width != self.width

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        dim, width, kv, mlp = self.dim, self.width, self.kv_width, self.group.mlp_dim
        shapes = {"attention_norm": (dim,), "query": (width, dim), "key": (kv, dim), "value": (kv, dim), "out": (dim, width), "mlp_norm": (dim,),
                  "gate": (mlp, dim), "up": (mlp, dim), "down": (dim, mlp)}
        return tuple(p for name, shape in shapes.items() for p in parameter(f"{name}.weight", *shape))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        group, low, shape = self.group, activation_dtype(precision), self.shape(batch)
        dim, width, kv, mlp, tokens = self.dim, self.width, self.kv_width, self.group.mlp_dim, shape.tokens
        # x cos + rotated(x) sin on queries and keys
        rotate = tuple(elementwise(what, tokens, width + kv, low) for what in ("cat", "mul", "mul", "add"))
        repeat = (elementwise("cat", tokens, 2 * width, low),) if self.repeats else ()
        core = attention("softmax" if group.window is None else "softmax_window", tokens=tokens, longest=shape.longest, heads=group.heads,
                         head_dim=group.head_dim, dtype=low, pairs=shape.pairs(causal=group.causal, window=group.window))
        return (layer_norm(tokens, dim, low), linear(tokens, dim, width, precision), linear(tokens, dim, kv, precision),
                linear(tokens, dim, kv, precision), *rotate, *repeat, core, linear(tokens, width, dim, precision),
                elementwise("add", tokens, dim, low),
                layer_norm(tokens, dim, low), linear(tokens, dim, mlp, precision), linear(tokens, dim, mlp, precision),
                activation("silu", tokens, mlp, low), elementwise("mul", tokens, mlp, low), linear(tokens, mlp, dim, precision),
                elementwise("add", tokens, dim, low))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, dim, width, kv, mlp = self.shape(batch).tokens, self.dim, self.width, self.kv_width, self.group.mlp_dim
        return (
            Saved("attention_norm.input", rows * dim, INPUT, rows=rows),
            Saved("attention_norm.statistics", rows, CHEAP, FP32_BYTES),
            Saved("projection.input", rows * dim, CHEAP, rows=rows),
            Saved("query", rows * width, DROPPED, rows=rows),
            Saved("key", rows * kv, DROPPED, rows=rows),
            Saved("value", rows * kv, DROPPED if self.repeats else MATRIX, rows=rows),
            Saved("rotation", rows * self.group.head_dim, CHEAP, FP32_BYTES),
            Saved("rotated.query", rows * width, CHEAP, rows=rows),
            Saved("rotated.key", rows * width, CHEAP, rows=rows),
            *((Saved("repeated.value", rows * width, CHEAP, rows=rows),) if self.repeats else ()),
            Saved("attention", rows * width, MATRIX, rows=rows),
            Saved("attention.lse", rows * self.group.heads, MATRIX, FP32_BYTES),
            Saved("out", rows * dim, DROPPED, rows=rows),
            Saved("mlp_norm.input", rows * dim, CHEAP, rows=rows),
            Saved("mlp_norm.statistics", rows, CHEAP, FP32_BYTES),
            Saved("mlp.input", rows * dim, CHEAP, rows=rows),
            Saved("gate", rows * mlp, MATRIX, rows=rows),
            Saved("up", rows * mlp, MATRIX, rows=rows),
            Saved("silu", rows * mlp, CHEAP, rows=rows),
            Saved("down.input", rows * mlp, CHEAP, rows=rows),
            Saved("down", rows * dim, DROPPED, rows=rows),
        )


class NextEvent(Block):
    """RMSNorm, logits over all `classes` rows of a table, cross entropy with the id of the event that follows (the last event has none)."""

    kind = "next_event"

    def __init__(self, sequence: str, dim: int, classes: int) -> None:
        self.sequence, self.dim, self.classes = sequence, dim, classes

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (*parameter("norm.weight", self.dim), *parameter("logits.weight", self.classes, self.dim))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        tokens, low = batch.sequences[self.sequence].tokens, activation_dtype(precision)
        return (layer_norm(tokens, self.dim, low), linear(tokens, self.dim, self.classes, precision),
                op("cross_entropy", m=tokens, n=self.classes, dtype=low))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows = batch.sequences[self.sequence].tokens
        return (Saved("norm.input", rows * self.dim, INPUT, rows=rows), Saved("norm.statistics", rows, CHEAP, FP32_BYTES),
                Saved("logits.input", rows * self.dim, CHEAP, rows=rows), Saved("logits", rows * self.classes, DROPPED, rows=rows),
                Saved("log_probabilities", rows * self.classes, CHEAP, FP32_BYTES))

    def workspace_bytes(self, batch: BatchShape, precision: str) -> float:
        """Backward of cross entropy beside the log-probabilities: their gradient and the logits', both in fp32."""
        return max(super().workspace_bytes(batch, precision), 2 * FP32_BYTES * batch.sequences[self.sequence].tokens * self.classes)

    def compiled_loss_bytes(self, batch: BatchShape, precision: str) -> tuple[float, float]:
        """(bytes that backward has less, workspace) where one kernel makes the logits' gradient of the logits, neither of them in fp32."""
        logits = dtype_bytes(activation_dtype(precision)) * batch.sequences[self.sequence].tokens * self.classes
        return FP32_BYTES * batch.sequences[self.sequence].tokens * self.classes - logits, logits
