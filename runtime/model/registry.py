"""Block kinds of sequence layers: kind -> module class, constructed as `cls(dim, layer)`, called as `block(x_TD, offsets, max_length)`."""
from __future__ import annotations

from torch import nn

from costmodel.model import LayerGroup
from runtime.model.hstu import HSTU
from runtime.model.self_attention import GDPA, BlockAttention, SelfAttention

BLOCKS: dict[str, type[nn.Module]] = {"self_attention": SelfAttention, "gdpa": GDPA, "block_attention": BlockAttention,
                                      "hstu": HSTU}


def build_block(dim: int, layer: LayerGroup) -> nn.Module:
    """One block of a layer group. Raises ValueError for a kind that the runtime cannot execute."""
    if layer.kind not in BLOCKS:
        raise ValueError(f"layer kind {layer.kind!r} is not executable; the runtime has {', '.join(sorted(BLOCKS))}")
    return BLOCKS[layer.kind](dim, layer)
