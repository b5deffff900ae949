"""RMSNorm and LayerNorm, plain and fused with quantisation to fp8 (e4m3), in one pass over the input where it can be one.

    rmsnorm     y = x / sqrt(mean(x^2) + eps) * weight
    layernorm   y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    quantised   values = e4m3(y / scale), rounded once, from fp32; scale by `scaling`:

    scaling          scale covers            scales
    rowwise          a row                   (T, 1) fp32
    block128         1 x 128                 (T, D / 128) fp32
    tensor_delayed   the tensor              () fp32, given by the caller (from earlier steps' `amax`, which is returned)
    tensor_dynamic   the tensor              () fp32, from this tensor's own maximum: two passes, the first for the maximum alone
    mxfp8_1x32       1 x 32                  (T, D / 32) E8M0
    mxfp8_32x32      32 x 32                 (ceil(T / 32), D / 32) E8M0: usable along either dimension

How scales are chosen and values rounded: `kernels._fp8`. All arithmetic is fp32; sums over rows (weight and bias gradients) have a fixed
order. On CUDA one Triton launch a pass; on the CPU vectorised PyTorch. Inputs are (T, D), bf16, fp16 or fp32; weight and bias (D,).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels import _fp8
from kernels._autograd import differentiable, direct, register_cuda
from kernels._checks import check_same_device
from kernels._fp8 import HADAMARD_BLOCK, hadamard_transform

__all__ = ["NormQuantized", "Quantized", "hadamard_transform", "layer_norm", "norm_backward", "norm_quantize", "quantize", "rms_norm"]

Kind = Literal["rmsnorm", "layernorm"]
Scaling = Literal["rowwise", "block128", "tensor_delayed", "tensor_dynamic", "mxfp8_1x32", "mxfp8_32x32"]
E8m0Rounding = Literal["rceil", "floor"]

TENSOR_WISE = ("tensor_delayed", "tensor_dynamic")
_BLOCK = {"rowwise": None, "block128": 128, "tensor_delayed": None, "tensor_dynamic": None, "mxfp8_1x32": 32, "mxfp8_32x32": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """An fp8 matrix: `values (T, D)` e4m3, `scales` as the module's table says, and `amax ()` of the tensor (tensor-wise scalings only)."""

    values: Tensor
    scales: Tensor
    scaling: Scaling
    amax: Tensor | None = None

    def dequantize(self) -> Tensor:
        """`(T, D)` fp32. A Hadamard transform, if one was asked for, is not undone."""
        values = _fp8.from_e4m3(self.values)
        num_rows, dim = values.shape
        if self.scaling in ("rowwise", *TENSOR_WISE):
            return values * self.scales
        scales = self.scales
        if self.scaling != "block128":
            scales = _fp8.e8m0_scale(scales.view(torch.uint8))
        if self.scaling == "mxfp8_32x32":
            scales = scales.repeat_interleave(32, dim=0)[:num_rows]
        block = _BLOCK[self.scaling] or dim
        return (values.view(num_rows, dim // block, block) * scales.unsqueeze(-1)).view(num_rows, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormQuantized:
    """Result of `norm_quantize`: the quantised output, and what `norm_backward` needs beside `x` and `weight`."""

    quantized: Quantized
    rstd: Tensor
    mean: Tensor | None


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> None:
    if kind not in ("rmsnorm", "layernorm"):
        raise ValueError(f"kind: {kind!r} is not 'rmsnorm' or 'layernorm'")
    if bias is not None and kind == "rmsnorm":
        raise ValueError("bias: rmsnorm has none")
    _check_matrix(x)
    check_same_device(x.device, weight=weight, bias=bias)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tuple(tensor.shape) != (x.shape[1],):
            raise ValueError(f"{name}: expected shape ({x.shape[1]},), got {tuple(tensor.shape)}")


def _check_matrix(x: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"x: expected shape (T, D) with D > 0, got {tuple(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"x: {x.dtype} is not supported")


def _compute(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# --- plain norms ---------------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension of `x (T, D)`: `(T, D)` in x's dtype, differentiable in x and weight."""
    _check_norm(x, weight, None, "rmsnorm")
    return _differentiable_norm(x, weight, None, eps, False)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """LayerNorm over the last dimension of `x (T, D)`: `(T, D)` in x's dtype, differentiable in x, weight and bias."""
    _check_norm(x, weight, bias, "layernorm")
    return _differentiable_norm(x, weight, bias, eps, True)[0]


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *, rstd: Tensor, mean: Tensor | None, kind: Kind
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of a norm: `(d x, d weight, d bias)` for the gradient `grad (T, D)` of its output, in the dtypes of x and weight.

    Behind `norm_quantize`, `grad` is the gradient of the output as if it had not been quantised (straight-through), before any Hadamard
    transform. d bias is the column sum of `grad`, None for rmsnorm.
    """
    _check_norm(x, weight, None, kind)
    if grad.shape != x.shape:
        raise ValueError(f"grad: expected shape {tuple(x.shape)}, got {tuple(grad.shape)}")
    dx, d_weight, d_bias = _plain_backward(grad, x, weight, mean, rstd, kind == "layernorm")
    return dx, d_weight, d_bias if kind == "layernorm" else None


def _normalise(x: Tensor, eps: float, layernorm: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x_hat in the computing dtype, and mean and rstd of each row."""
    wide = _compute(x)
    mean = wide.mean(1) if layernorm else wide.new_zeros(0)
    centred = wide - mean.unsqueeze(1) if layernorm else wide
    rstd = torch.rsqrt(centred.square().mean(1) + eps)
    return centred * rstd.unsqueeze(1), mean, rstd


def _affine(x_hat: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x_hat * weight.to(x_hat.dtype)
    return y if bias is None else y + bias.to(x_hat.dtype)


@torch.library.custom_op("planner_kernels::norm_forward", mutates_args=(), device_types="cpu")
def _norm_forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, layernorm: bool) -> tuple[Tensor, Tensor, Tensor]:
    x_hat, mean, rstd = _normalise(x, eps, layernorm)
    return _affine(x_hat, weight, bias).to(x.dtype), mean, rstd


@_norm_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, layernorm: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty(x.shape[0] if layernorm else 0, dtype=dtype), x.new_empty(x.shape[0], dtype=dtype)


@torch.library.custom_op("planner_kernels::norm_backward", mutates_args=(), device_types="cpu")
def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, layernorm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _compute(x)
    if layernorm:
        assert mean is not None
        wide = wide - mean.unsqueeze(1)
    x_hat = wide * rstd.unsqueeze(1)
    grad = grad.to(x_hat.dtype)
    scaled = grad * weight.to(x_hat.dtype)
    dx = scaled - x_hat * (scaled * x_hat).mean(1, keepdim=True)
    if layernorm:
        dx = dx - scaled.mean(1, keepdim=True)
    d_bias = grad.sum(0) if layernorm else grad.new_zeros(0)
    return (dx * rstd.unsqueeze(1)).to(x.dtype), (grad * x_hat).sum(0).to(weight.dtype), d_bias.to(weight.dtype)


@_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, layernorm: bool):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape if layernorm else 0)


def _forward_setup(ctx, inputs, output) -> None:
    x, weight, bias, _, layernorm = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.layernorm, ctx.has_bias = layernorm, bias is not None
    ctx.set_materialize_grads(False)


def _forward_backward(ctx, grad: Tensor | None, grad_mean: Tensor | None, grad_rstd: Tensor | None):
    if grad is None:
        return None, None, None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    dx, d_weight, d_bias = _plain_backward(grad, x, weight, mean, rstd, ctx.layernorm)
    return dx, d_weight, d_bias if ctx.has_bias else None, None, None


_plain_backward = direct(_norm_backward)
_differentiable_norm = differentiable(_norm_forward, _forward_backward, setup_context=_forward_setup)


# --- fused with quantisation ---------------------------------------------------------------------------------------------------------


def _check_scaling(x: Tensor, scaling: str, scale: Tensor | None, e8m0_rounding: str, hadamard: bool) -> None:
    if scaling not in _BLOCK:
        raise ValueError(f"scaling: {scaling!r} is not one of {', '.join(_BLOCK)}")
    if (scale is not None) != (scaling == "tensor_delayed"):
        raise ValueError(f"scale: {'needed' if scale is None else 'not taken'} with scaling={scaling!r}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"scale: expected one fp32 number, got {scale.dtype} {tuple(scale.shape)}")
    if e8m0_rounding not in ("rceil", "floor"):
        raise ValueError(f"e8m0_rounding: {e8m0_rounding!r} is not 'rceil' or 'floor'")
    check_same_device(x.device, scale=scale)
    block = _BLOCK[scaling] or 1
    if x.shape[1] % block:
        raise ValueError(f"x: {x.shape[1]} columns are not a multiple of {block}, which scaling={scaling!r} needs")
    if hadamard and x.shape[1] % HADAMARD_BLOCK:
        raise ValueError(f"x: {x.shape[1]} columns are not a multiple of {HADAMARD_BLOCK}, which the Hadamard transform needs")
    if x.dtype == torch.float64:
        raise ValueError("x: float64 cannot be quantised, arithmetic is fp32")


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: Kind,
    eps: float = 1e-6,
    scaling: Scaling,
    scale: Tensor | None = None,
    e8m0_rounding: E8m0Rounding = "rceil",
    hadamard: bool = False,
    hadamard_seed: int = 0,
    stochastic_rounding_seed: int | None = None,
) -> NormQuantized:
    """Normalise `x (T, D)` and quantise the result to fp8 in one pass.

    scale: the tensor's scale for `tensor_delayed` (one fp32 number), refused otherwise. e8m0_rounding: for the MXFP8 scalings.
    hadamard: transform the normalised rows by `hadamard_transform(., seed=hadamard_seed)` before they are quantised.
    stochastic_rounding_seed: None rounds to nearest even. The gradient is `norm_backward`; nothing here is recorded by autograd.
    Raises ValueError for shapes, dtypes and devices that do not fit (block sizes must divide D).
    """
    _check_norm(x, weight, bias, kind)
    _check_scaling(x, scaling, scale, e8m0_rounding, hadamard)
    quantized, mean, rstd = _quantize_call(
        x, weight, bias, kind, eps, scaling, scale, e8m0_rounding, hadamard_seed if hadamard else None, stochastic_rounding_seed
    )
    return NormQuantized(quantized=quantized, rstd=rstd, mean=mean if kind == "layernorm" else None)


def quantize(
    x: Tensor,
    *,
    scaling: Scaling,
    scale: Tensor | None = None,
    e8m0_rounding: E8m0Rounding = "rceil",
    hadamard: bool = False,
    hadamard_seed: int = 0,
    stochastic_rounding_seed: int | None = None,
) -> Quantized:
    """Quantise `x (T, D)` to fp8 as it is; arguments as in `norm_quantize`."""
    _check_matrix(x)
    _check_scaling(x, scaling, scale, e8m0_rounding, hadamard)
    return _quantize_call(
        x, None, None, "none", 0.0, scaling, scale, e8m0_rounding, hadamard_seed if hadamard else None, stochastic_rounding_seed
    )[0]


def _quantize_call(x, weight, bias, kind, eps, scaling, scale, e8m0_rounding, hadamard_seed, seed) -> tuple[Quantized, Tensor, Tensor]:
    values, scales, amax, mean, rstd = torch.ops.planner_kernels.norm_quantize(
        x.detach(), None if weight is None else weight.detach(), None if bias is None else bias.detach(),
        kind, eps, scaling, scale, e8m0_rounding == "rceil", hadamard_seed, seed,
    )  # fmt: skip
    if scaling in TENSOR_WISE:
        quantized = Quantized(values=values, scales=scales if scale is None else scale.reshape(()), scaling=scaling, amax=amax)
    else:
        quantized = Quantized(values=values, scales=scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales, scaling=scaling)
    return quantized, mean, rstd


@torch.library.custom_op("planner_kernels::norm_quantize", mutates_args=(), device_types="cpu")
def _norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    scaling: str,
    scale: Tensor | None,
    rceil: bool,
    hadamard_seed: int | None,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values (e4m3), scales (fp32 or E8M0 codes as uint8), amax, mean, rstd; what does not apply is empty."""
    num_rows, dim = x.shape
    mean = rstd = torch.zeros(0)
    y = x.float()
    if kind != "none":
        assert weight is not None
        x_hat, mean, rstd = _normalise(x, eps, kind == "layernorm")
        y = _affine(x_hat, weight, bias)
    if hadamard_seed is not None:
        y = hadamard_transform(y, seed=hadamard_seed)
    amax = torch.zeros(0)
    if scaling in TENSOR_WISE:
        amax = y.abs().amax() if y.numel() else torch.zeros(())
        if scale is None:
            scales, inverse = _fp8.fp32_scale(amax)
            return _fp8.to_e4m3(y * inverse, seed=seed), scales, amax, mean, rstd.clone()
        return _fp8.to_e4m3(y * (1.0 / scale.reshape(())), seed=seed), torch.zeros(0), amax, mean, rstd.clone()
    if scaling == "rowwise":
        scales, inverse = _fp8.fp32_scale(y.abs().amax(1, keepdim=True))
        return _fp8.to_e4m3(y * inverse, seed=seed), scales, amax, mean, rstd.clone()
    block = _BLOCK[scaling]
    blocks = y.reshape(num_rows, dim // block, block)
    block_amax = blocks.abs().amax(2)
    if scaling == "block128":
        scales, inverse = _fp8.fp32_scale(block_amax)
    else:
        if scaling == "mxfp8_32x32":
            padded = torch.nn.functional.pad(block_amax, (0, 0, 0, -num_rows % 32))
            block_amax = padded.reshape(-1, 32, dim // 32).amax(1)
        scales = _fp8.e8m0_code(block_amax, rceil=rceil)
        inverse = _fp8.e8m0_inverse(scales)
        if scaling == "mxfp8_32x32":
            inverse = inverse.repeat_interleave(32, dim=0)[:num_rows]
    return _fp8.to_e4m3((blocks * inverse.unsqueeze(2)).view(num_rows, dim), seed=seed), scales, amax, mean, rstd.clone()


@_norm_quantize.register_fake
def _(x, weight, bias, kind, eps, scaling, scale, rceil, hadamard_seed, seed):
    num_rows, dim = x.shape
    rstd = x.new_empty(num_rows if kind != "none" else 0, dtype=torch.float32)
    mean = x.new_empty(num_rows if kind == "layernorm" else 0, dtype=torch.float32)
    amax = x.new_empty(() if scaling in TENSOR_WISE else (0,), dtype=torch.float32)
    shape, dtype = scales_shape(num_rows, dim, scaling)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(shape, dtype=dtype), amax, mean, rstd


def scales_shape(num_rows: int, dim: int, scaling: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the scales that the operator writes (E8M0 codes as uint8)."""
    return {
        "rowwise": ((num_rows, 1), torch.float32),
        "block128": ((num_rows, dim // 128), torch.float32),
        "tensor_delayed": ((0,), torch.float32),
        "tensor_dynamic": ((), torch.float32),
        "mxfp8_1x32": ((num_rows, dim // 32), torch.uint8),
        "mxfp8_32x32": ((-(-num_rows // 32), dim // 32), torch.uint8),
    }[scaling]


for _op, _name in ((_norm_forward, "norm_forward"), (_norm_backward, "norm_backward"), (_norm_quantize, "norm_quantize")):
    register_cuda(_op, "kernels._norm_triton", _name)
