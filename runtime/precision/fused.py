"""Quantisation in the pass before a linear layer in 8 bits: a norm or a GELU writes the e4m3 rows of what it returns, and the layer behind it takes
them instead of reading that again: 1 byte an element instead of 3.

Row-wise fp8 on a GPU, where weights' gradients stay in 16 bits (in 8 the layer must read its input anyhow, for the scales of the columns) and nobody
watches operators. Values and scales are those that the layer would have made of the same output.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from kernels.norm_quant import Quantized, norm_backward
from kernels.saved import gelu_rows, norm_rows
from runtime.model.hstu import HSTU
from runtime.model.interformer import InterFormer
from runtime.model.norm import LayerNorm
from runtime.model.self_attention import TransformerBlock
from runtime.precision.linear import LowPrecisionLinear, direct

# Blocks' norms and the linear layers that alone read what they return.
NORMS = {TransformerBlock: (("attention_norm", "qkv"), ("mlp_norm", "up")), HSTU: (("norm", "uvqk"),),
         InterFormer: (("personal_norm", "personal_query"), ("attention_norm", "qkv"), ("summary_norm", "summary_kv"))}


class _Norm(torch.autograd.Function):
    """LayerNorm of `x (T, D)`, with the rows of its output."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, values, scales, mean, rstd = norm_rows(x, weight, bias, eps=eps, keep="output")
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mark_non_differentiable(values, scales)
        ctx.set_materialize_grads(False)
        return out, values, scales

    @staticmethod
    def backward(ctx, grad: Tensor, _values: None, _scales: None):
        x, weight, mean, rstd = ctx.saved_tensors
        return *norm_backward(grad, x, weight, rstd=rstd, mean=mean, kind="layernorm"), None


class _Gelu(torch.autograd.Function):
    """GELU of `x (T, D)`, with the rows of its output."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, values, scales = gelu_rows(x, of_output=True)
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(values, scales)
        ctx.set_materialize_grads(False)
        return out, values, scales

    @staticmethod
    def backward(ctx, grad: Tensor, _values: None, _scales: None) -> Tensor:
        return torch.ops.aten.gelu_backward(grad, *ctx.saved_tensors)


def fuse_quantisation(block: nn.Module) -> None:
    """From now on norms and GELUs in front of row-wise fp8 layers of `block` quantise for them, where they can. In place."""
    for part in block.modules():
        for kind, pairs in NORMS.items():
            for norm, layer in pairs if isinstance(part, kind) else ():
                if hasattr(part, norm) and _takes_rows(getattr(part, layer)):
                    getattr(part, norm).forward = functools.partial(_norm, getattr(part, norm), getattr(part, layer))
        if isinstance(part, TransformerBlock) and part.has_mlp and _takes_rows(part.down):
            part.gelu.forward = functools.partial(_gelu, part.down)


def _takes_rows(layer: nn.Module) -> bool:
    return isinstance(layer, LowPrecisionLinear) and layer.recipe.precision == "fp8_row" and layer.recipe.fused and (
        "low_weight_gradients" not in layer.recipe)


def _norm(norm: LayerNorm, layer: LowPrecisionLinear, x: Tensor) -> Tensor:
    layer.given.clear()  # of a forward that ended between the two
    if not direct(x):
        return type(norm).forward(norm, x)
    out, values, scales = _Norm.apply(x, norm.weight, norm.bias, norm.eps)
    layer.given.append(Quantized(values=values, scales=scales, scaling="rowwise"))
    return out


def _gelu(layer: LowPrecisionLinear, x: Tensor) -> Tensor:
    layer.given.clear()
    if not direct(x):
        return torch.nn.functional.gelu(x)
    out, values, scales = _Gelu.apply(x)
    layer.given.append(Quantized(values=values, scales=scales, scaling="rowwise"))
    return out
