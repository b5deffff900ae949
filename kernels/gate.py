"""The gate between HSTU's attention and its output product, in one pass each way: `concat(SiLU(u), a, SiLU(u) * LayerNorm(a))`.

As operators of PyTorch that reads and writes 13 matrices of T x W forward and about 20 backward; here it is 5 and 7, and neither SiLU(u) nor the
normed `a` is kept for backward: both follow from u, a and two numbers a row. On CUDA one Triton launch each way; on the CPU vectorised PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._autograd import differentiable, direct, register_cuda
from kernels._checks import accumulate_dtype, check_same_device

__all__ = ["gated_concat"]


def gated_concat(u: Tensor, a: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """`concat(SiLU(u), a, SiLU(u) * LayerNorm(a))`: `u (T, W)`, `a (T, W)`, LayerNorm's `weight (W,)` and `bias (W,)` -> `(T, 3 W)` in a's dtype.

    Rounds to that dtype where the separate operators do. Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    if a.dim() != 2 or u.shape != a.shape:
        raise ValueError(f"u: expected the shape of a, (T, W), got {tuple(u.shape)} and {tuple(a.shape)}")
    check_same_device(a.device, u=u, weight=weight, bias=bias)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor.shape != a.shape[1:]:
            raise ValueError(f"{name}: expected shape ({a.shape[1]},), got {tuple(tensor.shape)}")
    if u.dtype != a.dtype or not a.is_floating_point():
        raise ValueError(f"u: expected a's floating dtype, got {u.dtype} and {a.dtype}")
    return _differentiable_gate(u, a, weight, bias, eps)[0]


@torch.library.custom_op("planner_kernels::gated_concat", mutates_args=(), device_types="cpu")
def _gated_concat(u: Tensor, a: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    silu = F.silu(u)
    normed, mean, rstd = torch.native_layer_norm(a, a.shape[1:], weight, bias, eps)
    out = torch.cat([silu, a, silu * normed], dim=1)
    wide = accumulate_dtype(a.dtype)
    return out, mean.flatten().to(wide), rstd.flatten().to(wide)


@_gated_concat.register_fake
def _(u: Tensor, a: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulate_dtype(a.dtype)
    return a.new_empty((a.shape[0], 3 * a.shape[1])), a.new_empty(a.shape[0], dtype=wide), a.new_empty(a.shape[0], dtype=wide)


@torch.library.custom_op("planner_kernels::gated_concat_backward", mutates_args=(), device_types="cpu")
def _gated_concat_backward(
    grad: Tensor, u: Tensor, a: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g_gate, g_plain, g_product = grad.chunk(3, dim=1)
    silu = F.silu(u)
    stats = [s.to(a.dtype).unsqueeze(1) for s in (mean, rstd)]  # as native_layer_norm has them on the CPU
    normed = _normed(a, weight, bias, mean, rstd)
    du = torch.ops.aten.silu_backward(g_gate + g_product * normed, u)
    da, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(g_product * silu, a, a.shape[1:], *stats, weight, bias, [True, True, True])
    return du, da + g_plain, d_weight, d_bias


def _normed(a: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    wide = mean.dtype
    return ((a.to(wide) - mean.unsqueeze(1)) * rstd.unsqueeze(1) * weight.to(wide) + bias.to(wide)).to(a.dtype)


@_gated_concat_backward.register_fake
def _(grad: Tensor, u: Tensor, a: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor):
    return u.new_empty(u.shape), a.new_empty(a.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _setup(ctx, inputs, output) -> None:
    u, a, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(u, a, weight, bias, mean, rstd)


def _backward(ctx, grad: Tensor, _mean, _rstd):
    return *_plain_backward(grad, *ctx.saved_tensors), None


_plain_backward = direct(_gated_concat_backward)
_differentiable_gate = differentiable(_gated_concat, _backward, setup_context=_setup)
for _op, _name in ((_gated_concat, "gated_concat"), (_gated_concat_backward, "gated_concat_backward")):
    register_cuda(_op, "kernels._gate_triton", _name)
