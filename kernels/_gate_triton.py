"""Triton kernels behind `kernels.gate`: one pass over the rows each way. R rows of W columns a tile; W is one block, so a row's sums need no second
read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import cdiv, next_power_of_2, run
from kernels._norm_triton import _sum_partials_kernel

ROWS, WARPS = 2, 4
PROGRAMS_PER_SM = 8  # of the backward, which keep sums of the weight's gradient over all their rows


@triton.jit
def _load(base, rows, columns, stride, width, mask):
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _forward_kernel(
    u, a, weight, bias, out, means, rstds, total, width, u_stride, a_stride, eps, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, W)
    inside = columns < width
    mask = (rows < total)[:, None] & inside[None, :]
    gate = _load(u, rows, columns, u_stride, width, mask).to(tl.float32)
    plain = _load(a, rows, columns, a_stride, width, mask)
    x = plain.to(tl.float32)
    mean = tl.sum(x, axis=1) / width
    centred = tl.where(inside[None, :], x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / width + eps)
    normed = centred * rstd[:, None] * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    normed = normed.to(out.dtype.element_ty)  # rounded as the operators it replaces round
    place = out + rows[:, None] * (3 * width) + columns[None, :]
    tl.store(place, silu, mask=mask)
    tl.store(place + width, plain, mask=mask)
    tl.store(place + 2 * width, silu.to(tl.float32) * normed.to(tl.float32), mask=mask)
    tl.store(means + rows, mean, mask=rows < total)
    tl.store(rstds + rows, rstd, mask=rows < total)


@triton.jit
def _backward_kernel(
    grad, u, a, weight, bias, means, rstds, du, da, partial, total, width, g_stride, u_stride, a_stride, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, W)
    inside = columns < width
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([R, W], tl.float32)  # summed over rows once, at the end: each sum across rows goes through shared memory
    d_bias = tl.zeros([R, W], tl.float32)
    for first in range(tl.program_id(0) * R, total, tl.num_programs(0) * R):
        rows = tl.cast(first, tl.int64) + tl.arange(0, R)
        known = rows < total
        mask = known[:, None] & inside[None, :]
        place = grad + rows[:, None] * g_stride + columns[None, :]
        g_gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        g_plain = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
        g_product = tl.load(place + 2 * width, mask=mask, other=0.0).to(tl.float32)
        gate = _load(u, rows, columns, u_stride, width, mask).to(tl.float32)
        x = _load(a, rows, columns, a_stride, width, mask).to(tl.float32)
        mean = tl.load(means + rows, mask=known, other=0.0)
        rstd = tl.load(rstds + rows, mask=known, other=0.0)
        x_hat = tl.where(inside[None, :], (x - mean[:, None]) * rstd[:, None], 0.0)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        d_gate = (g_gate + g_product * (x_hat * w + b)) * (sigmoid + silu - silu * sigmoid)
        d_normed = g_product * silu
        d_weight += d_normed * x_hat
        d_bias += d_normed
        scaled = d_normed * w
        inner = (tl.sum(scaled * x_hat, axis=1) / width)[:, None]
        d_plain = g_plain + rstd[:, None] * (scaled - (tl.sum(scaled, axis=1) / width)[:, None] - x_hat * inner)
        target = rows[:, None] * width + columns[None, :]
        tl.store(du + target, d_gate, mask=mask)
        tl.store(da + target, d_plain, mask=mask)
    own = partial + tl.program_id(0).to(tl.int64) * width + columns
    tl.store(own, tl.sum(d_weight, axis=0), mask=inside)
    tl.store(own + tl.num_programs(0).to(tl.int64) * width, tl.sum(d_bias, axis=0), mask=inside)


def gated_concat(u: Tensor, a: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total, width = a.shape
    u, a = (x if x.stride(1) == 1 else x.contiguous() for x in (u, a))
    out = torch.empty((total, 3 * width), dtype=a.dtype, device=a.device)
    mean, rstd = (torch.empty(total, dtype=torch.float32, device=a.device) for _ in range(2))  # an operator's outputs must not share storage
    if total and width:
        run(
            _forward_kernel, (cdiv(total, ROWS),),
            u, a, weight, bias, out, mean, rstd, total, width, u.stride(0), a.stride(0), eps,
            R=ROWS, W=next_power_of_2(width), num_warps=WARPS,
        )  # fmt: skip
    return out, mean, rstd


def gated_concat_backward(
    grad: Tensor, u: Tensor, a: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, width = a.shape
    grad, u, a = (x if x.stride(1) == 1 else x.contiguous() for x in (grad, u, a))
    du, da = torch.empty((total, width), dtype=u.dtype, device=u.device), torch.empty((total, width), dtype=a.dtype, device=a.device)
    if not (total and width):
        return du, da, torch.zeros_like(weight), torch.zeros_like(bias)
    programs = min(cdiv(total, ROWS), PROGRAMS_PER_SM * _multiprocessors(a.device))
    partial = torch.empty((2, programs, width), dtype=torch.float32, device=a.device)
    run(
        _backward_kernel, (programs,),
        grad, u, a, weight, bias, mean, rstd, du, da, partial, total, width, grad.stride(0), u.stride(0), a.stride(0),
        R=ROWS, W=next_power_of_2(width), num_warps=WARPS,
    )  # fmt: skip
    d_weight, d_bias = torch.empty_like(weight), torch.empty_like(bias)
    run(_sum_partials_kernel, (cdiv(width, 32),), partial, d_weight, d_bias, programs, width, ROWS=128, COLS=32, LAYERNORM=True, ACC=tl.float32,
        num_warps=4)
    return du, da, d_weight, d_bias


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
