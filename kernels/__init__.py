"""Jagged kernels for GEM-like models, on CPU and Hopper; each is a torch.library operator with autograd."""

from kernels._masks import AttentionBias
from kernels.attention import jagged_attention
from kernels.block_attention import block_attention
from kernels.fp8_attention import fp8_attention
from kernels.gdpa import gdpa

__all__ = ["AttentionBias", "block_attention", "fp8_attention", "gdpa", "jagged_attention"]
