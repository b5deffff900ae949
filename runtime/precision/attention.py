"""Attention in 8 bits: a region's blocks multiply queries, keys and values in e4m3 forward (`kernels.fp8_attention`), backward in 16 bits."""
from __future__ import annotations

import torch
from torch import nn

from kernels.fp8_attention import HEAD_DIMS
from runtime.model.hstu import HSTU
from runtime.model.interformer import InterFormer
from runtime.model.llama import Llama
from runtime.model.self_attention import GDPA, BlockAttention, SelfAttention
from runtime.model.sequence import Pma

IN_8_BITS = (SelfAttention, GDPA)
OTHERS = (BlockAttention, HSTU, InterFormer, Llama, Pma)


def use_fp8_attention(block: nn.Module, *, device: torch.device, region: str = "") -> None:
    """Every attention of `block` multiplies in 8 bits from now on. In place; a block without attention stays as it is.

    Raises ValueError with the region and the reason where an attention, or the device, cannot.
    """
    for part in block.modules():
        if isinstance(part, OTHERS):
            raise ValueError(f"region {region}: recipe fp8_attention: {type(part).__name__} has no attention in 8 bits; keep the region at bf16")
        if not isinstance(part, IN_8_BITS):
            continue
        if part.layer.window is not None:
            raise ValueError(f"region {region}: recipe fp8_attention knows no window, the region's is {part.layer.window}; keep the region at bf16")
        if part.layer.biased:
            raise ValueError(f"region {region}: recipe fp8_attention knows no bias, the region's layers have one; keep the region at bf16")
        if device.type == "cuda" and (part.layer.head_dim not in HEAD_DIMS or torch.cuda.get_device_capability(device) < (8, 9)):
            raise ValueError(f"region {region}: recipe fp8_attention needs heads of width {' or '.join(map(str, HEAD_DIMS))} and compute capability "
                             f"8.9, the region's are {part.layer.head_dim} wide; keep the region at bf16")
        part.in_8_bits = True
