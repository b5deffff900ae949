"""Sequence blocks around jagged self-attention: pre-norm transformer blocks (softmax, GDPA, blocks of events) and HSTU (docs/model.md, section 1)."""
from __future__ import annotations

from costmodel.blocks.base import (
    CHEAP,
    DROPPED,
    FP32_BYTES,
    INPUT,
    MATRIX,
    BatchShape,
    Saved,
    SequenceBlock,
    activation_dtype,
    kept_in_8_bits,
    linear_parameters,
    norm_parameters,
    norm_saved,
    parameter,
)  # fmt: skip
from costmodel.model import LayerGroup
from costmodel.ops import Op, activation, attention, elementwise, layer_norm, linear

BIAS = ("time_buckets", "relative_positions")
BIASED = "_bias"  # ends the variant of an attention with a bias on its scores
# Scratch of the pass that sums the gradient of bias tables: at most so many fp32 numbers (`kernels._attention_tables.SCRATCH`).
BIAS_SCRATCH = 4.0 * 2**24
GDPA_ACTIVATIONS = ("gelu", "gelu_fast", "silu", "relu", "identity")
ATTENTION_BLOCKS = (32, 64, 128)
# What the attention op's variant can be: whose scores become weights how, over what, with what added to them.
ATTENTION_VARIANTS = ("block", "softmax_queries", *(f"gdpa_{name}_context" for name in GDPA_ACTIVATIONS),
                      *(f"{kernel}{window}{bias}" for kernel in ("softmax", "hstu", *(f"gdpa_{name}" for name in GDPA_ACTIVATIONS))
                        for window in ("", "_window") for bias in ("", BIASED)))


def bias_parameters(group: LayerGroup) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """HSTU's tables, of one column that all heads share (arXiv 2402.17152; meta-recsys/generative-recommenders)."""
    positions = parameter("bias.position", 2 * group.relative_positions - 1, 1) if group.relative_positions is not None else ()
    times = parameter("bias.time", group.time_buckets + 1, 1) if group.time_buckets is not None else ()
    return (*positions, *times)


class BiasedBlock(SequenceBlock):
    """A block whose scores may have HSTU's bias, which costs time in the attention's kernels but no FLOPs of the convention."""

    @property
    def ending(self) -> str:
        """What ends the attention op's variant."""
        return ("" if self.group.window is None else "_window") + (BIASED if self.group.biased else "")

    def saved_times(self, rows: float) -> tuple[Saved, ...]:
        """When events happened and when each is asked for, int64."""
        return (Saved("times", 2 * rows, INPUT, 8.0),) if self.group.timed else ()

    def workspace_bytes(self, batch: BatchShape, precision: str) -> float:
        return max(super().workspace_bytes(batch, precision), BIAS_SCRATCH if self.group.biased and precision != "fp32" else 0.0)


class SelfAttention(BiasedBlock):
    """Pre-norm transformer block: softmax attention, then a GELU feed-forward part where `mlp_dim` > 0."""

    kind = "self_attention"
    uses = ("heads", "head_dim", "mlp_dim", "causal", "window", *BIAS)
    needs = ("heads", "head_dim")
    keeps_lse = True

    @property
    def variant(self) -> str:
        """The attention op's variant."""
        return "softmax" + self.ending

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        dim, width, mlp = self.dim, self.width, self.group.mlp_dim
        own = norm_parameters("norm", dim) + linear_parameters("qkv", dim, 3 * width) + linear_parameters("out", width, dim)
        own += bias_parameters(self.group)
        if not mlp:
            return own
        return own + norm_parameters("mlp_norm", dim) + linear_parameters("up", dim, mlp) + linear_parameters("down", mlp, dim)

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        group, low = self.group, activation_dtype(precision)
        shape, dim, width = self.shape(batch), self.dim, self.width
        tokens = shape.tokens
        core = attention(self.variant, tokens=tokens, longest=shape.longest, heads=group.heads, head_dim=group.head_dim, dtype=low,
                         pairs=shape.pairs(causal=group.causal, window=group.window, block=group.block))
        ops = (layer_norm(tokens, dim, low), linear(tokens, dim, 3 * width, precision), core, linear(tokens, width, dim, precision),
               elementwise("add", tokens, dim, low))
        if not group.mlp_dim:
            return ops
        return (*ops, layer_norm(tokens, dim, low), linear(tokens, dim, group.mlp_dim, precision),
                activation("gelu", tokens, group.mlp_dim, low), linear(tokens, group.mlp_dim, dim, precision),
                elementwise("add", tokens, dim, low))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, dim, width, mlp = self.shape(batch).tokens, self.dim, self.width, self.group.mlp_dim
        own = (
            *norm_saved("norm", rows, dim, INPUT),
            Saved("qkv.input", rows * dim, CHEAP, rows=rows),
            Saved("qkv", rows * 3 * width, MATRIX, rows=3 * rows),
            Saved("attention", rows * width, MATRIX, rows=rows),
            *((Saved("attention.lse", rows * self.group.heads, MATRIX, FP32_BYTES),) if self.keeps_lse else ()),
            Saved("out", rows * dim, DROPPED, rows=rows),
            *self.saved_times(rows),
        )
        if not mlp:
            return kept_in_8_bits(own, stored=("norm.input",), again=("qkv.input",))
        tensors = (
            *own,
            *norm_saved("mlp_norm", rows, dim, CHEAP),
            Saved("up.input", rows * dim, CHEAP, rows=rows),
            Saved("up", rows * mlp, MATRIX, rows=rows),
            Saved("down.input", rows * mlp, CHEAP, rows=rows),
            Saved("down", rows * dim, DROPPED, rows=rows),
        )
        return kept_in_8_bits(tensors, stored=("norm.input", "mlp_norm.input", "up"), again=("qkv.input", "up.input", "down.input"))


class Gdpa(SelfAttention):
    """The same block with an activation in place of the softmax and a fixed divisor (GDPA: engineering.fb.com 2026-08-03; arXiv 2602.10016)."""

    kind = "gdpa"
    uses = ("heads", "head_dim", "mlp_dim", "causal", "window", "divisor", "activation", *BIAS)
    needs = ("heads", "head_dim", "divisor", "activation")
    keeps_lse = False

    @classmethod
    def validate(cls, group) -> None:
        SequenceBlock.validate.__func__(cls, group)
        if group.activation not in GDPA_ACTIVATIONS:
            raise ValueError(f"layer {group.kind}: activation {group.activation!r} is none of {', '.join(GDPA_ACTIVATIONS)}")

    @property
    def variant(self) -> str:
        return f"gdpa_{self.group.activation}" + self.ending


class BlockAttention(SelfAttention):
    """The same block with softmax attention inside aligned runs of `block` events: O(L), no log-sum-exp kept (engineering.fb.com 2026-08-03)."""

    kind = "block_attention"
    uses = ("heads", "head_dim", "mlp_dim", "causal", "block")
    needs = ("heads", "head_dim", "block")
    keeps_lse = False

    @classmethod
    def validate(cls, group) -> None:
        SequenceBlock.validate.__func__(cls, group)
        if group.block not in ATTENTION_BLOCKS:
            raise ValueError(f"layer {group.kind}: block {group.block} is none of {', '.join(map(str, ATTENTION_BLOCKS))}")

    @property
    def variant(self) -> str:
        return "block"


class Hstu(BiasedBlock):
    """HSTU layer as its published code has it (arXiv 2402.17152): SiLU on u only, output product of width 3 H d, a fixed divisor; with
    `time_buckets` and `relative_positions` its bias by time and position."""

    kind = "hstu"
    uses = ("heads", "head_dim", "causal", "window", "divisor", *BIAS)
    needs = ("heads", "head_dim", "divisor")

    @classmethod
    def validate(cls, group) -> None:
        SequenceBlock.validate.__func__(cls, group)
        if not group.causal:
            raise ValueError("layer hstu: causal must be true")

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        dim, width = self.dim, self.width
        return (*norm_parameters("norm", dim), *linear_parameters("uvqk", dim, 4 * width), *norm_parameters("out_norm", width),
                *linear_parameters("out", 3 * width, dim), *bias_parameters(self.group))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        shape, group, low = self.shape(batch), self.group, activation_dtype(precision)
        tokens, dim, width = shape.tokens, self.dim, self.width
        core = attention("hstu" + self.ending, tokens=tokens, longest=shape.longest,
                         pairs=shape.pairs(causal=True, window=group.window), heads=group.heads, head_dim=group.head_dim, dtype=low)
        return (layer_norm(tokens, dim, low), linear(tokens, dim, 4 * width, precision), activation("silu", tokens, width, low), core,
                layer_norm(tokens, width, low), elementwise("mul", tokens, width, low), elementwise("cat", tokens, 3 * width, low),
                linear(tokens, 3 * width, dim, precision), elementwise("add", tokens, dim, low))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, dim, width = self.shape(batch).tokens, self.dim, self.width
        tensors = (
            *norm_saved("norm", rows, dim, INPUT),
            Saved("uvqk.input", rows * dim, CHEAP, rows=rows),
            Saved("uvqk", rows * 4 * width, MATRIX, rows=4 * rows),
            *norm_saved("out_norm", rows, width, MATRIX),  # SiLU(u) and the normed rows are made again from these (`kernels.gate`)
            Saved("out.input", rows * 3 * width, CHEAP, rows=rows),
            Saved("out", rows * dim, DROPPED, rows=rows),
            *self.saved_times(rows),
        )
        return kept_in_8_bits(tensors, stored=("norm.input",), again=("uvqk.input",), made=("out.input",))
