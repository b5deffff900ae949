"""Formats in which activations wait for backward or for a product in 8 bits: e4m3 rows back to 16 bits, and MX4 both ways, each in one pass.

    rows    values e4m3 `(T, D)` times scales fp32 `(T, 1)`, rounded once to the dtype asked for
    MX4     e2m1, two to a byte, with an E8M0 scale per 32 consecutive elements: `(ceil(n / 32) * 16,)` and `(ceil(n / 32),)` uint8

GELU (of erf) and LayerNorm can keep their input as rows in the pass that computes them; their gradients and their outputs are then those of the
restored input, a norm's with the statistics of the exact one. Or they quantise what they return, for a linear layer behind them.
"""
from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kernels import _fp8
from kernels.norm_quant import norm_backward, quantize

MX4_BLOCK = 32
MX4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX4_EXPONENT = 2  # 6 = 1.5 x 2^2


def restore_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`values (T, D)` e4m3 times `scales (T, 1)` in `dtype`."""
    return torch.ops.planner_kernels.restore_rows(values, scales, dtype)


def gelu_rows(x: Tensor, *, of_output: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(GELU of `x (T, D)` in its dtype, e4m3 rows of x, or of the output, their scales `(T, 1)`), in one pass."""
    return torch.ops.planner_kernels.gelu_rows(x.detach(), of_output)


def gelu_restore(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """GELU of the restored rows in `dtype`."""
    return torch.ops.planner_kernels.gelu_restore(values, scales, dtype)


def gelu_gradient(values: Tensor, scales: Tensor, grad: Tensor) -> Tensor:
    """`grad` times the derivative of GELU at the restored rows, in grad's dtype."""
    return torch.ops.planner_kernels.gelu_gradient(values, scales, grad)


def gelu_again(values: Tensor, scales: Tensor, grad: Tensor) -> Tensor:
    """GELU of the restored rows in the dtype of `grad (T, D)`, contiguous, which becomes `gelu_gradient` in place."""
    return torch.ops.planner_kernels.gelu_again(values, scales, grad)


def norm_rows(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, keep: Literal["input", "output", "nothing"] = "input"
              ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(LayerNorm of `x (T, D)` in its dtype, e4m3 rows of x or of the output, their scales `(T, 1)`, mean and 1 / sigma of its rows `(T,)` fp32), in
    one pass. Of `nothing` rows and scales are empty."""
    return torch.ops.planner_kernels.norm_rows(x.detach(), weight.detach(), bias.detach(), eps, keep)


def norm_restore(values: Tensor, scales: Tensor, weight: Tensor, bias: Tensor, *, mean: Tensor, rstd: Tensor, dtype: torch.dtype) -> Tensor:
    """LayerNorm of the restored rows with the given statistics, in `dtype`."""
    return torch.ops.planner_kernels.norm_restore(values, scales, weight.detach(), bias.detach(), mean, rstd, dtype)


def norm_gradient(values: Tensor, scales: Tensor, grad: Tensor, weight: Tensor, *, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `norm_rows` for x, weight and bias, in the dtypes of `grad` and `weight`."""
    return torch.ops.planner_kernels.norm_gradient(values, scales, grad, weight.detach(), mean, rstd)


def to_mx4(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of the elements of `x` in order, completed by zeros to blocks of 32. The scale is the OCP rule's,
    2^(floor(log2 amax) - 2); magnitudes above 6 saturate, midpoints go to the smaller magnitude. Exact for `x` of 16 bits."""
    return torch.ops.planner_kernels.to_mx4(x.detach())


def from_mx4(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The first `numel` elements, rounded once to `dtype`."""
    return torch.ops.planner_kernels.from_mx4(codes, scales, numel, dtype)


def _restore_rows_cpu(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (_fp8.from_e4m3(values) * scales).to(dtype)


def _gelu_rows_cpu(x: Tensor, of_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.nn.functional.gelu(x.float()).to(x.dtype)
    made = quantize(out if of_output else x, scaling="rowwise")
    return out, made.values, made.scales


def _gelu_restore_cpu(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.gelu(_fp8.from_e4m3(values) * scales).to(dtype)


def _gelu_gradient_cpu(values: Tensor, scales: Tensor, grad: Tensor) -> Tensor:
    x = _fp8.from_e4m3(values) * scales
    below = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
    return (grad.float() * (below + x * torch.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi)))).to(grad.dtype)


def _gelu_again_cpu(values: Tensor, scales: Tensor, grad: Tensor) -> Tensor:
    grad.copy_(_gelu_gradient_cpu(values, scales, grad))
    return _gelu_restore_cpu(values, scales, grad.dtype)


def _norm_rows_cpu(x: Tensor, weight: Tensor, bias: Tensor, eps: float, keep: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, mean, rstd = torch.native_layer_norm(x, x.shape[1:], weight, bias, eps)
    made = quantize({"input": x, "output": out, "nothing": x[:0]}[keep], scaling="rowwise")
    return out, made.values, made.scales, mean.flatten().float(), rstd.flatten().float()


def _norm_restore_cpu(values: Tensor, scales: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, dtype: torch.dtype) -> Tensor:
    x_hat = (_fp8.from_e4m3(values) * scales - mean.unsqueeze(1)) * rstd.unsqueeze(1)
    return (x_hat * weight.float() + bias.float()).to(dtype)


def _norm_gradient_cpu(values: Tensor, scales: Tensor, grad: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, d_weight, d_bias = norm_backward(grad.float(), _fp8.from_e4m3(values) * scales, weight, rstd=rstd, mean=mean, kind="layernorm")
    assert d_bias is not None
    return dx.to(grad.dtype), d_weight, d_bias


def _norm_rows_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float, keep: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, fp32 = 0 if keep == "nothing" else x.shape[0], dict(dtype=torch.float32)
    return (torch.empty_like(x), x.new_empty((rows, x.shape[1]), dtype=torch.float8_e4m3fn), x.new_empty((rows, 1), **fp32),
            x.new_empty(x.shape[0], **fp32), x.new_empty(x.shape[0], **fp32))


def _gelu_rows_fake(x: Tensor, _of_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _to_mx4_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.float().flatten()
    if missing := -flat.numel() % MX4_BLOCK:
        flat = torch.nn.functional.pad(flat, (0, missing))
    flat = flat.view(-1, MX4_BLOCK)
    sizes = flat.abs()
    amax = sizes.amax(1)
    exponent = (amax.contiguous().view(torch.int32) >> 23) - MX4_EXPONENT
    scales = torch.where(amax.isfinite(), exponent.clamp(min=1), _fp8.E8M0_NAN).to(torch.uint8)
    sizes = sizes.div_(_fp8.e8m0_scale(scales).unsqueeze(1))
    # a magnitude's code is piecewise linear and concave: 2 a up to 2, a + 2 up to 4, a / 2 + 4 beyond
    places = torch.minimum(torch.minimum(sizes * 2, sizes + 2), sizes * 0.5 + 4)
    codes = places.sub_(0.5).ceil_().clamp_(max=7.0).nan_to_num_().to(torch.uint8) | (flat < 0).to(torch.uint8) << 3
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4, scales


def _from_mx4_cpu(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    values = _mx4_pairs().index_select(0, codes.int()).view(-1, MX4_BLOCK)
    return values.mul_(_fp8.e8m0_scale(scales).unsqueeze(1)).flatten()[:numel].to(dtype)


@functools.cache
def _mx4_pairs() -> Tensor:
    """Both values of every byte of codes, `(256, 2)` fp32."""
    levels, byte = torch.tensor([*MX4_LEVELS, *(-v for v in MX4_LEVELS)]), torch.arange(256)
    return torch.stack([levels[byte & 15], levels[byte >> 4]], dim=1)


def _to_mx4_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = -(-x.numel() // MX4_BLOCK)
    return x.new_empty(blocks * MX4_BLOCK // 2, dtype=torch.uint8), x.new_empty(blocks, dtype=torch.uint8)


@functools.cache
def _on_cuda(name: str) -> Callable:
    return getattr(importlib.import_module("kernels._saved_triton"), name)


# As in `kernels.factor`: called once or twice for every saved tensor, so without the wrappers of `torch.library.custom_op`.
_LIBRARY = torch.library.Library("planner_kernels", "FRAGMENT")
_LIBRARY.define("restore_rows(Tensor values, Tensor scales, ScalarType dtype) -> Tensor")
_LIBRARY.define("gelu_rows(Tensor x, bool of_output) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("gelu_restore(Tensor values, Tensor scales, ScalarType dtype) -> Tensor")
_LIBRARY.define("gelu_gradient(Tensor values, Tensor scales, Tensor grad) -> Tensor")
_LIBRARY.define("gelu_again(Tensor values, Tensor scales, Tensor(a!) grad) -> Tensor")
_LIBRARY.define("norm_rows(Tensor x, Tensor weight, Tensor bias, float eps, str keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define("norm_restore(Tensor values, Tensor scales, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, ScalarType dtype) -> Tensor")
_LIBRARY.define("norm_gradient(Tensor values, Tensor scales, Tensor grad, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("to_mx4(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.define("from_mx4(Tensor codes, Tensor scales, int numel, ScalarType dtype) -> Tensor")
for _name, _cpu, _fake in (
        ("restore_rows", _restore_rows_cpu, lambda values, scales, dtype: values.new_empty(values.shape, dtype=dtype)),
        ("gelu_rows", _gelu_rows_cpu, _gelu_rows_fake),
        ("gelu_restore", _gelu_restore_cpu, lambda values, scales, dtype: values.new_empty(values.shape, dtype=dtype)),
        ("gelu_gradient", _gelu_gradient_cpu, lambda values, scales, grad: torch.empty_like(grad)),
        ("gelu_again", _gelu_again_cpu, lambda values, scales, grad: torch.empty_like(grad)),
        ("norm_rows", _norm_rows_cpu, _norm_rows_fake),
        ("norm_restore", _norm_restore_cpu, lambda values, scales, weight, bias, mean, rstd, dtype: values.new_empty(values.shape, dtype=dtype)),
        ("norm_gradient", _norm_gradient_cpu, lambda values, scales, grad, weight, mean, rstd: (
            torch.empty_like(grad), torch.empty_like(weight), torch.empty_like(weight))),
        ("to_mx4", _to_mx4_cpu, _to_mx4_fake), ("from_mx4", _from_mx4_cpu, lambda codes, scales, numel, dtype: codes.new_empty(numel, dtype=dtype))):
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, functools.partial(lambda name, *args: _on_cuda(name)(*args), _name), "CUDA")
    torch.library.register_fake(f"planner_kernels::{_name}", _fake, lib=_LIBRARY)
