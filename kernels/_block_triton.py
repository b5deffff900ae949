"""CUDA path of BlockAttention: one program per (block, head), every tensor read or written once.

A block's scores fit one tile, so the softmax is a single pass and the backward needs neither the output nor a stored statistic: with
the whole row at hand, `sum_d dO O` equals `sum_j P dP`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import run
from kernels._tiles import tile_map, zero_unowned

LOG2E = tl.constexpr(1.4426950408889634)
WARPS = {32: 2, 64: 4, 128: 8}  # 16 query rows a warp
BACKWARD_WARPS = {32: 4, 64: 4, 128: 8}  # [Measured H200] 64: 2.94 TB/s with 4 warps, 2.06 with 8; 32: 3.60 with 4, 3.55 with 2


@triton.jit
def _load(base, rows, length, stride, D: tl.constexpr):
    pointers = base + rows.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=(rows < length)[:, None], other=0.0)


@triton.jit
def _store(base, rows, length, stride, x, D: tl.constexpr):
    pointers = base + rows.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(rows < length)[:, None])


@triton.jit
def _locate(offsets, slots, slot, BLOCK: tl.constexpr):
    """First row of the slot's block and how many rows it has (0: an empty slot)."""
    sequence = tl.load(slots + slot)
    known = sequence >= 0
    start = tl.load(offsets + sequence, mask=known, other=0).to(tl.int64)
    end = tl.load(offsets + sequence + 1, mask=known, other=0).to(tl.int64)
    first = start + (slot - start // BLOCK - sequence) * BLOCK
    return first, tl.where(known, tl.maximum(tl.minimum(end - first, BLOCK), 0), 0).to(tl.int32)


@triton.jit
def _probabilities(q, k, length, scale, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    rows = tl.arange(0, BLOCK)
    keep = (rows < length)[None, :]
    if CAUSAL:
        keep = keep & (rows[:, None] >= rows[None, :])
    s = tl.where(keep, s, -float("inf"))
    p = tl.exp2(s - tl.max(s, axis=1)[:, None])  # column 0 is always kept, so the maximum is finite
    return p / tl.sum(p, axis=1)[:, None]


@triton.jit
def block_forward_kernel(
    q, k, v, out, offsets, slots, q_stride, q_head, k_stride, k_head, v_stride, v_head, H, GROUP: tl.constexpr, scale,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    first, length = _locate(offsets, slots, tl.program_id(0) // H, BLOCK)
    if length == 0:
        return
    rows = tl.arange(0, BLOCK)
    q_tile = _load(q + first * q_stride + head * q_head, rows, length, q_stride, D)
    k_tile = _load(k + first * k_stride + (head // GROUP) * k_head, rows, length, k_stride, D)
    v_tile = _load(v + first * v_stride + (head // GROUP) * v_head, rows, length, v_stride, D)
    p = _probabilities(q_tile, k_tile, length, scale, CAUSAL, PRECISION, BLOCK)
    o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    _store(out + first * (H * D) + head * D, rows, length, H * D, o, D)


@triton.jit
def block_backward_kernel(
    grad, q, k, v, dq, dk, dv, offsets, slots,
    g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, H, GROUP: tl.constexpr, scale, dq_scale,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    kv_heads = H // GROUP
    kv_head = tl.program_id(0) % kv_heads
    first, length = _locate(offsets, slots, tl.program_id(0) // kv_heads, BLOCK)
    if length == 0:
        return
    rows = tl.arange(0, BLOCK)
    k_tile = _load(k + first * k_stride + kv_head * k_head, rows, length, k_stride, D)
    v_tile = _load(v + first * v_stride + kv_head * v_head, rows, length, v_stride, D)
    dk_acc = tl.zeros([BLOCK, D], tl.float32)
    dv_acc = tl.zeros([BLOCK, D], tl.float32)
    for sub in tl.static_range(GROUP):
        head = kv_head * GROUP + sub
        q_tile = _load(q + first * q_stride + head * q_head, rows, length, q_stride, D)
        do = _load(grad + first * g_stride + head * g_head, rows, length, g_stride, D)
        p = _probabilities(q_tile, k_tile, length, scale, CAUSAL, PRECISION, BLOCK)
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None])).to(q_tile.dtype)
        dv_acc = tl.dot(tl.trans(p.to(do.dtype)), do, dv_acc, input_precision=PRECISION)
        dk_acc = tl.dot(tl.trans(ds), q_tile, dk_acc, input_precision=PRECISION)
        dq_tile = tl.dot(ds, k_tile, input_precision=PRECISION) * dq_scale
        _store(dq + first * (H * D) + head * D, rows, length, H * D, dq_tile, D)
    _store(dk + first * (kv_heads * D) + kv_head * D, rows, length, kv_heads * D, dk_acc * dq_scale, D)
    _store(dv + first * (kv_heads * D) + kv_head * D, rows, length, kv_heads * D, dv_acc, D)


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block: int, causal: bool, scale: float) -> Tensor:
    """Output `(total, H, D)`."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or offsets.shape[0] < 2:
        return out.zero_()
    slots = tile_map(offsets, q.shape[0], block, out)
    run(
        block_forward_kernel, (slots.shape[0] * q.shape[1],),
        q, k, v, out, offsets, slots, *_strides(q, k, v), q.shape[1], q.shape[1] // k.shape[1], scale * LOG2E.value,
        CAUSAL=causal, PRECISION=_precision(q), BLOCK=block, D=q.shape[2], num_warps=WARPS[block],
    )  # fmt: skip
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grad, q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (grad, q, k, v))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if dq.numel() == 0 or offsets.shape[0] < 2:
        return dq.zero_(), dk.zero_(), dv.zero_()
    zero_unowned(offsets, dq, dk, dv)
    if q.is_cuda:
        from kernels import _hopper_launch  # Gluon's Hopper half; only where there is a GPU

        if _hopper_launch.block_fits((q, k, v, grad), block):
            _hopper_launch.block_backward(grad, q, k, v, dq, dk, dv, offsets, causal, scale)
            return dq, dk, dv
    slots = tile_map(offsets, q.shape[0], block)
    run(
        block_backward_kernel, (slots.shape[0] * k.shape[1],),
        grad, q, k, v, dq, dk, dv, offsets, slots, *_strides(grad, q, k, v),
        q.shape[1], q.shape[1] // k.shape[1], scale * LOG2E.value, scale,
        CAUSAL=causal, PRECISION=_precision(q), BLOCK=block, D=q.shape[2], num_warps=BACKWARD_WARPS[block],
    )  # fmt: skip
    return dq, dk, dv


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"
