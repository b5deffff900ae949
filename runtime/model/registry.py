"""Block kinds: kind -> module class.

Sequence layers are built as `cls(dim, layer)` and called as `block(x_TD, offsets, max_length)`, `times_2T` behind these where the layer is timed;
interaction layers as `cls(num_tokens, feature_dim, dim, layer)`, with `num_outputs` tokens; expert layers as `cls(width, layer)`.
"""
from __future__ import annotations

from torch import nn

from costmodel.model import LayerGroup
from runtime.model.dcn import DcnCross
from runtime.model.experts import Experts
from runtime.model.hstu import HSTU
from runtime.model.interformer import InterFormer
from runtime.model.llama import Llama
from runtime.model.masknet import MaskNet
from runtime.model.pyramid import Pyramid
from runtime.model.self_attention import GDPA, BlockAttention, SelfAttention
from runtime.model.wukong import Wukong

BLOCKS: dict[str, type[nn.Module]] = {"self_attention": SelfAttention, "gdpa": GDPA, "block_attention": BlockAttention,
                                      "hstu": HSTU, "llama": Llama, "mask_net": MaskNet, "pyramid": Pyramid}
INTERACTION_BLOCKS: dict[str, type[nn.Module]] = {"wukong": Wukong, "interformer": InterFormer, "dcn_cross": DcnCross}
EXPERT_BLOCKS: dict[str, type[nn.Module]] = {"moe": Experts}


def build_block(dim: int, layer: LayerGroup) -> nn.Module:
    """One block of a layer group. Raises ValueError for a kind that the runtime cannot execute."""
    if layer.kind not in BLOCKS:
        raise ValueError(f"layer kind {layer.kind!r} is not executable; the runtime has {', '.join(sorted(BLOCKS))}")
    return BLOCKS[layer.kind](dim, layer)
