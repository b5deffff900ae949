"""The parts that every model has around its layer groups: sequence input, summary, MLPs (bottom and interaction), heads."""
from __future__ import annotations

import itertools

import numpy as np

from costmodel.blocks.base import (
    CHEAP,
    DROPPED,
    FP32_BYTES,
    INPUT,
    MATRIX,
    BatchShape,
    Block,
    JaggedShape,
    Saved,
    activation_dtype,
    kept_in_8_bits,
    linear_parameters,
    norm_parameters,
    norm_saved,
    parameter,
)  # fmt: skip
from costmodel.model import Head
from costmodel.ops import Op, activation, elementwise, layer_norm, linear, op


class SequenceInput(Block):
    """Concat of the sequence's `num_tables` embeddings `(T, w)`, Linear(w, D). One table needs no concat.

    `time_buckets` n: event t gets E[b], b = min(floor(log2(1 + t_newest - t)), n - 1) of seconds, E `(n, D)` learned. Logarithmic time as Kunlun
    has it (arXiv 2602.10016, log(1 + dt / scale)), added in buckets where it rotates; which form GEM uses is not public.
    """

    kind = "sequence_input"

    def __init__(self, sequence: str, width: int, num_tables: int, dim: int, time_buckets: int | None = None) -> None:
        self.sequence, self.width, self.num_tables, self.dim, self.time_buckets = sequence, width, num_tables, dim, time_buckets

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        times = parameter("times", self.time_buckets, self.dim) if self.time_buckets is not None else ()
        return (*linear_parameters("linear", self.width, self.dim), *times)

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        tokens, low, n = batch.sequences[self.sequence].tokens, activation_dtype(precision), self.time_buckets
        concat = (elementwise("cat", tokens, self.width),) if self.num_tables > 1 else ()
        times = () if n is None else (
            op("embedding_lookup", variant="sequence", ids=tokens, unique=np.minimum(tokens, n), dim=self.dim, rows=n, tables=1, dtype=low),
            elementwise("add", tokens, self.dim, low))
        return (*concat, linear(tokens, self.width, self.dim, precision), *times)

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows = batch.sequences[self.sequence].tokens
        # one table's output is the input itself, and the tables count it
        width = self.width if self.num_tables > 1 else 0
        timed = () if self.time_buckets is None else (Saved("buckets", rows, CHEAP, 8.0), Saved("linear", rows * self.dim, DROPPED, rows=rows))
        return (Saved("input", rows * width, INPUT, rows=rows), *timed)


class Summary(Block):
    """LayerNorm(D); concat of the mean over events and the last event `(B, 2D)`; Linear(2D, D)."""

    kind = "summary"

    def __init__(self, sequence: str, dim: int, limit: int | None = None) -> None:
        self.sequence, self.dim, self.limit = sequence, dim, limit

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (*norm_parameters("norm", self.dim), *linear_parameters("linear", 2 * self.dim, self.dim))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        tokens, low = self.shape(batch).tokens, activation_dtype(precision)
        return (layer_norm(tokens, self.dim, low), op("segment_mean", m=tokens, n=self.dim, segments=batch.samples, dtype=low),
                elementwise("cat", batch.samples, 2 * self.dim, low), linear(batch.samples, 2 * self.dim, self.dim, precision))

    def shape(self, batch: BatchShape) -> JaggedShape:
        return batch.sequences[self.sequence].newest(self.limit)

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows = self.shape(batch).tokens
        tensors = (*norm_saved("norm", rows, self.dim, INPUT), Saved("linear.input", batch.samples * 2 * self.dim, CHEAP, rows=batch.samples),
                   Saved("linear", batch.samples * self.dim, DROPPED, rows=batch.samples))
        return kept_in_8_bits(tensors, stored=("norm.input",), again=())


class Mlp(Block):
    """Linear + ReLU for each of `hidden` over `(B, width)`; with `concat`, its input is a fresh concatenation of the features.

    counts_output: whether its last output is counted here (default: without `concat`) or by its consumer.
    """

    kind = "mlp"

    def __init__(self, name: str, width: int, hidden: tuple[int, ...], *, concat: bool,
                 counts_output: bool | None = None) -> None:
        if not hidden:
            raise ValueError(f"{name}: at least one hidden width is needed")
        self.name, self.widths, self.concat = name, (width, *hidden), concat
        self.counts_output = not concat if counts_output is None else counts_output

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        pairs = zip(self.widths, self.widths[1:])
        return tuple(p for i, (a, b) in enumerate(pairs) for p in linear_parameters(f"linears.{i}", a, b))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        rows, low = batch.samples, activation_dtype(precision)
        ops: list[Op] = [elementwise("cat", rows, self.widths[0])] if self.concat else []
        for a, b in zip(self.widths, self.widths[1:]):
            ops += [linear(rows, a, b, precision), activation("relu", rows, b, low)]
        return tuple(ops)

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows = batch.samples
        # ReLU keeps its output, which is the next Linear's input; the interaction's last output is counted by its consumer
        outputs = self.widths[1:] if self.counts_output else self.widths[1:-1]
        return (Saved("input", rows * self.widths[0], INPUT, rows=rows),
                *(Saved(f"relu.{i}", rows * w, CHEAP, rows=rows) for i, w in enumerate(outputs)),
                *(Saved(f"linear.{i}", rows * w, DROPPED, rows=rows) for i, w in enumerate(self.widths[1:])))


class Heads(Block):
    """Per task: Linear + ReLU for each hidden width, then Linear(., 1). The loss is not part of it."""

    kind = "heads"

    def __init__(self, width: int, heads: tuple[Head, ...]) -> None:
        self.width, self.heads = width, heads

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(p for head in self.heads for i, (a, b) in enumerate(self._pairs(head))
                     for p in linear_parameters(f"{head.name}.{i}", a, b))

    def _pairs(self, head: Head) -> tuple[tuple[int, int], ...]:
        widths = (self.width, *head.hidden, 1)
        return tuple(itertools.pairwise(widths))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        rows, low = batch.samples, activation_dtype(precision)
        ops: list[Op] = []
        for head in self.heads:
            for i, (a, b) in enumerate(self._pairs(head)):
                ops.append(linear(rows, a, b, precision))
                if i < len(head.hidden):
                    ops.append(activation("relu", rows, b, low))
        return tuple(ops)

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows = batch.samples
        hidden = sum(sum(head.hidden) for head in self.heads)
        return (Saved("input", rows * self.width, INPUT, rows=rows), Saved("relu", rows * hidden, CHEAP, rows=rows),
                Saved("linear", rows * (hidden + len(self.heads)), DROPPED, rows=rows),
                Saved("logits", rows * len(self.heads), MATRIX, FP32_BYTES))
