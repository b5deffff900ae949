"""Block kinds of the model language. `BLOCKS` maps a LayerGroup's kind to its class; a new kind is one class here and one module in the runtime."""
from __future__ import annotations

from costmodel.blocks.attention import BlockAttention, Gdpa, Hstu, SelfAttention
from costmodel.blocks.base import BatchShape, Block, JaggedShape, Saved, SequenceBlock, activation_dtype
from costmodel.blocks.fixed import Heads, Mlp, SequenceInput, Summary
from costmodel.codec import suggest
from costmodel.model import LayerGroup

BLOCKS: dict[str, type[SequenceBlock]] = {cls.kind: cls for cls in (SelfAttention, Gdpa, BlockAttention, Hstu)}


def block_class(group: LayerGroup) -> type[SequenceBlock]:
    """The class of a layer group's kind; ValueError with the known kinds otherwise."""
    if group.kind not in BLOCKS:
        raise ValueError(f"unknown layer kind {group.kind!r}{suggest(group.kind, BLOCKS)}; known: {', '.join(BLOCKS)}")
    return BLOCKS[group.kind]


__all__ = ["BLOCKS", "BatchShape", "Block", "Heads", "JaggedShape", "Mlp", "Saved", "SequenceBlock", "SequenceInput", "Summary",
           "activation_dtype", "block_class"]
