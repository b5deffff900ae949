"""Block kinds of the model language: kind of a LayerGroup -> class, for sequence layers (`BLOCKS`), summaries, interaction layers and expert
layers.

A new kind is one class here and one module in the runtime.
"""
from __future__ import annotations

from costmodel.blocks.attention import BlockAttention, Gdpa, Hstu, SelfAttention
from costmodel.blocks.base import BatchShape, Block, JaggedShape, Saved, SequenceBlock, activation_dtype
from costmodel.blocks.cross import DcnCross
from costmodel.blocks.experts import Experts
from costmodel.blocks.fixed import Heads, Mlp, SequenceInput, Summary
from costmodel.blocks.interaction import InteractionBlock, InterFormer, Wukong
from costmodel.blocks.llama import Llama, NextEvent
from costmodel.blocks.masknet import MaskNet
from costmodel.blocks.pma import Pma
from costmodel.blocks.pyramid import Pyramid
from costmodel.codec import suggest
from costmodel.model import Layer, LayerGroup

BLOCKS: dict[str, type[SequenceBlock]] = {cls.kind: cls for cls in (SelfAttention, Gdpa, BlockAttention, Hstu, Llama, MaskNet, Pyramid)}
INTERACTION_BLOCKS: dict[str, type[InteractionBlock]] = {cls.kind: cls for cls in (Wukong, InterFormer, DcnCross)}
EXPERT_BLOCKS: dict[str, type[Experts]] = {cls.kind: cls for cls in (Experts,)}
SUMMARIES: dict[str, type[Pma]] = {cls.kind: cls for cls in (Pma,)}


def known(registry: dict[str, type], group: Layer, place: str) -> type:
    """The class of a layer group's kind in one of the registries; ValueError with the known kinds otherwise."""
    if group.kind not in registry:
        raise ValueError(f"unknown {place} kind {group.kind!r}{suggest(group.kind, registry)}; known: {', '.join(registry)}")
    return registry[group.kind]


def block_class(group: LayerGroup) -> type[SequenceBlock]:
    """The class of a sequence layer's kind; ValueError with the known kinds otherwise."""
    return known(BLOCKS, group, "layer")


__all__ = ["BLOCKS", "EXPERT_BLOCKS", "INTERACTION_BLOCKS", "SUMMARIES", "BatchShape", "Block", "Experts", "Heads", "JaggedShape", "Mlp", "NextEvent",
           "Saved", "SequenceBlock", "SequenceInput", "Summary", "activation_dtype", "block_class", "known"]
