"""Blocks as the microbenchmark times them whole: from the features of a `block:<kind>` sample back to the block's ops.

Features of a sequence block: its LayerGroup numbers (`heads`, `head_dim`, `mlp_dim`, `window`, `block`, `divisor`; absent: the default; `causal` 1 or
0; `activation` an index of GDPA_ACTIVATIONS), `dim`, and the batch: `samples`, `tokens`, `pairs`, `longest`. Of a fixed part: `sequence_input` width,
num_tables, dim; `summary` dim; `wukong` num_tokens, feature_dim, dim, mlp_dim, first (1 or 0), its options; `interformer` both; `mlp` concat and
`width0, width1, ...`; `heads` width, num_heads and `hidden0, ...` of each; with `samples` and, over events, `tokens`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from costmodel.blocks.attention import GDPA_ACTIVATIONS, BlockAttention, Gdpa, Hstu, SelfAttention
from costmodel.blocks.base import BatchShape, Block, JaggedShape
from costmodel.blocks.experts import Experts
from costmodel.blocks.fixed import Heads, Mlp, SequenceInput, Summary
from costmodel.blocks.interaction import InteractionBlock, InterFormer, Wukong
from costmodel.blocks.llama import Llama, NextEvent
from costmodel.blocks.masknet import MaskNet
from costmodel.blocks.pma import Pma
from costmodel.blocks.pyramid import Pyramid
from costmodel.model import Head, LayerGroup
from costmodel.ops import Op

SEQUENCE_KINDS = {cls.kind: cls for cls in (SelfAttention, Gdpa, BlockAttention, Hstu)}
_SEQUENCE = "sequence"
_DENSE, _OTHERS = ("wukong", "mlp", "heads"), ("sequence_input", "summary", "interformer")
_INTEGERS = ("heads", "head_dim", "mlp_dim", "window", "block", "num_queries", "num_experts")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _TotalsShape(JaggedShape):
    """A batch of which only the totals are known."""

    total_pairs: float

    def pairs(self, *, causal: bool, window: int | None = None, block: int | None = None) -> float:
        return self.total_pairs


def measured_block(kind: str, features: Mapping[str, float]) -> Block:
    """The block that a sample's features describe. Raises ValueError for an unknown kind or a missing feature, by name."""
    try:
        if kind in SEQUENCE_KINDS:
            values = {name: int(features[name]) for name in _INTEGERS if features.get(name)}
            group = LayerGroup(kind=kind, causal=bool(features.get("causal", 1)), divisor=features.get("divisor"),
                               activation=GDPA_ACTIVATIONS[int(features["activation"])] if kind == "gdpa" else None, **values)
            return SEQUENCE_KINDS[kind](group, int(features["dim"]), _SEQUENCE)
        if kind == "sequence_input":
            return SequenceInput(_SEQUENCE, int(features["width"]), int(features["num_tables"]), int(features["dim"]))
        if kind == "summary":
            return Summary(_SEQUENCE, int(features["dim"]))
        if kind == "wukong":
            group = LayerGroup(kind=kind, mlp_dim=int(features["mlp_dim"]), options={name: int(features[name]) for name in Wukong.options})
            return Wukong(group, num_tokens=int(features["num_tokens"]), feature_dim=int(features["feature_dim"]), dim=int(features["dim"]),
                          first=bool(features["first"]))
        if kind == "interformer":
            values = {name: int(features[name]) for name in _INTEGERS if features.get(name)}
            group = LayerGroup(kind=kind, causal=bool(features["causal"]), divisor=features["divisor"], sequence=_SEQUENCE,
                               activation=GDPA_ACTIVATIONS[int(features["activation"])],
                               options={name: int(features[name]) for name in InterFormer.options}, **values)
            return InterFormer(group, num_tokens=int(features["num_tokens"]), feature_dim=int(features["feature_dim"]), dim=int(features["dim"]),
                               first=bool(features["first"]))
        if kind == "mlp":
            widths = _numbered(features, "width")
            return Mlp("mlp", widths[0], widths[1:], concat=bool(features["concat"]))
        if kind == "heads":
            hidden = _numbered(features, "hidden")
            return Heads(int(features["width"]), tuple(Head(name=f"head{i}", hidden=hidden) for i in range(int(features["num_heads"]))))
    except KeyError as error:
        raise ValueError(f"op block:{kind}: feature {error.args[0]} is missing") from error
    raise ValueError(f"op block:{kind}: unknown block kind; known: {', '.join((*SEQUENCE_KINDS, *_OTHERS, *_DENSE))}")


def _numbered(features: Mapping[str, float], name: str) -> tuple[int, ...]:
    """name0, name1, ... as long as they go on."""
    found = []
    while f"{name}{len(found)}" in features:
        found.append(int(features[f"{name}{len(found)}"]))
    return tuple(found)


def measured_block_ops(kind: str, features: Mapping[str, float], precision: str) -> tuple[Op, ...]:
    """Forward ops of the block that was timed, at its measured batch."""
    for name in ("samples",) + (("tokens",) if kind not in _DENSE else ()):
        if name not in features:
            raise ValueError(f"op block:{kind}: feature {name} is missing")
    samples, tokens = features["samples"], features.get("tokens", 0.0)
    shape = _TotalsShape(lengths=np.array([tokens / max(samples, 1.0)]), weights=np.array([samples]), longest=features.get("longest", 0.0),
                         total_pairs=features.get("pairs", 0.0))
    return measured_block(kind, features).forward(BatchShape(samples=samples, sequences={_SEQUENCE: shape}), precision)


def block_features(block: Block, batch: BatchShape) -> dict[str, float] | None:
    """The features to record with a sample of `block` timed at `batch`; `measured_block_ops` reads them back. None where they cannot describe the
    block: heads of different hidden widths, expert layers, interaction layers but Wukong's and InterFormer's, histories with times, biased scores
    (they are priced as the sum of their ops)."""
    values: dict[str, float] = {"samples": float(batch.samples)}
    if isinstance(block, Llama | MaskNet | NextEvent | Pma | Pyramid):
        return None
    if isinstance(block, Mlp):
        return {**values, "concat": float(block.concat), **{f"width{i}": float(w) for i, w in enumerate(block.widths)}}
    if isinstance(block, Heads):
        if len({head.hidden for head in block.heads}) > 1:
            return None
        hidden = block.heads[0].hidden
        return {**values, "width": float(block.width), "num_heads": float(len(block.heads)), **{f"hidden{i}": float(w) for i, w in enumerate(hidden)}}
    if isinstance(block, Wukong | InterFormer):
        values.update({name: float(getattr(block, name)) for name in ("num_tokens", "feature_dim", "dim", "first")},
                      **{name: float(block.option(name)) for name in block.options})
        if isinstance(block, Wukong):
            return {**values, "mlp_dim": float(block.group.mlp_dim)}
    elif isinstance(block, InteractionBlock | Experts):
        return None
    shape = batch.sequences[block.sequence].newest(block.limit)
    values.update(tokens=shape.tokens, dim=float(block.dim))
    if isinstance(block, SequenceInput):
        if block.time_buckets is not None:
            return None
        return {**values, "width": float(block.width), "num_tables": float(block.num_tables)}
    if isinstance(block, Summary):
        return values
    group = block.group
    if group.biased:
        return None
    numbers = {name: float(getattr(group, name)) for name in (*_INTEGERS, "divisor") if getattr(group, name)}
    if group.activation is not None:
        numbers["activation"] = float(GDPA_ACTIVATIONS.index(group.activation))
    return {**values, **numbers, "causal": float(group.causal), "longest": shape.longest,
            "pairs": shape.pairs(causal=group.causal, window=group.window, block=group.block)}
