"""Triton kernels of fp8 attention: two quantising passes and the forward.

The tensor cores want both fp8 operands contiguous along the summed dimension, so the values are written transposed, `(Hkv, D, keys)`,
with every sequence's keys beginning at a multiple of 64 (the slots of `_tiles.tile_map`); the gaps between sequences are zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._attention_kernels import LOG2E, _activate
from kernels._launch import cdiv
from kernels._tiles import tile_map

BLOCK = tl.constexpr(64)
WEIGHT_SCALE = tl.constexpr(256.0)  # softmax weights are at most 1; an exact power of two below 448
E4M3_MAX = tl.constexpr(448.0)
MIN_AMAX = tl.constexpr(448.0 * 2.0**-126)


@triton.jit
def _scales(amax):
    """As `kernels._fp8.fp32_scale`."""
    amax = tl.where(amax == float("inf"), float("nan"), amax)
    amax = tl.where(amax < MIN_AMAX, MIN_AMAX, amax)
    return amax * (1.0 / E4M3_MAX), tl.math.div_rn(tl.zeros_like(amax) + E4M3_MAX, amax)


@triton.jit
def _to_e4m3(x):
    return tl.clamp(x, -E4M3_MAX, E4M3_MAX).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["rows"])
def quantize_rows_kernel(x, x8, scale, stride, head_stride, rows, H, M: tl.constexpr, D: tl.constexpr):
    head = tl.program_id(0) % H
    row = (tl.program_id(0) // H) * M + tl.arange(0, M)
    inside = row < rows
    columns = tl.arange(0, D)
    row64 = row.to(tl.int64)
    value = tl.load(x + row64[:, None] * stride + head * head_stride + columns[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    restore, inverse = _scales(tl.max(tl.abs(value), axis=1))
    tl.store(x8 + (row64[:, None] * H + head) * D + columns[None, :], _to_e4m3(value * inverse[:, None]), mask=inside[:, None])
    tl.store(scale + head.to(tl.int64) * rows + row, restore, mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def quantize_values_kernel(v, v8, scale, offsets, slots, stride, head_stride, num_slots, H, D: tl.constexpr):
    """One (slot, head): 64 keys of one sequence, transposed; an empty slot and the keys past a sequence's end become zero."""
    head = tl.program_id(0) % H
    slot = tl.program_id(0) // H
    sequence = tl.load(slots + slot)
    known = sequence >= 0
    start = tl.load(offsets + sequence, mask=known, other=0).to(tl.int64)
    end = tl.load(offsets + sequence + 1, mask=known, other=0).to(tl.int64)
    first = start + (slot - start // BLOCK - sequence) * BLOCK
    keys = tl.arange(0, BLOCK)
    columns = tl.arange(0, D)
    pointers = v + (first + keys)[:, None] * stride + head * head_stride + columns[None, :]
    value = tl.load(pointers, mask=(first + keys < end)[:, None], other=0.0).to(tl.float32)
    restore, inverse = _scales(tl.max(tl.max(tl.abs(value), axis=1), axis=0))
    places = v8 + (head * D + columns).to(tl.int64)[:, None] * (num_slots.to(tl.int64) * BLOCK) + slot * BLOCK + keys[None, :]
    tl.store(places, tl.trans(_to_e4m3(value * inverse)))
    tl.store(scale + head * num_slots + slot, restore)


@triton.jit(do_not_specialize=["total_q", "total_k", "num_slots"])
def fp8_forward_kernel(
    q8, k8, v8, q_scale, k_scale, v_scale, out, lse, q_offsets, k_offsets, tiles, total_q, total_k, num_slots, H,
    GROUP: tl.constexpr, scale, inv_divisor, KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns M query rows of one head."""
    head = tl.program_id(0) % H
    tile_slot = tl.program_id(0) // H
    sequence = tl.load(tiles + tile_slot)
    if sequence < 0:
        return
    q_start = tl.load(q_offsets + sequence).to(tl.int64)
    q_len = (tl.load(q_offsets + sequence + 1).to(tl.int64) - q_start).to(tl.int32)
    k_start = tl.load(k_offsets + sequence).to(tl.int64)
    k_len = (tl.load(k_offsets + sequence + 1).to(tl.int64) - k_start).to(tl.int32)
    first = (tile_slot - (q_start // M).to(tl.int32) - sequence) * M
    if first >= q_len:
        return
    kv_heads = H // GROUP
    kv_head = head // GROUP
    rows = first + tl.arange(0, M)
    columns = tl.arange(0, D)
    inside = (rows < q_len)[:, None]
    q_rows = (q_start + rows)[:, None] * H + head
    q_tile = tl.load(q8 + q_rows * D + columns[None, :], mask=inside, other=0.0)
    row_scale = tl.load(q_scale + head.to(tl.int64) * total_q + q_start + rows, mask=rows < q_len, other=0.0) * scale
    shift = k_len - q_len
    first_slot = (k_start // BLOCK).to(tl.int32) + sequence
    v_base = v8 + (kv_head * D).to(tl.int64) * (num_slots.to(tl.int64) * BLOCK) + first_slot.to(tl.int64) * BLOCK
    k_base = k8 + (k_start * kv_heads + kv_head) * D
    k_scales = k_scale + kv_head.to(tl.int64) * total_k + k_start
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], -float("inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    high = k_len
    if CAUSAL:
        high = tl.minimum(k_len, tl.maximum(tl.minimum(first + M, q_len) + shift, 0))
    for start in tl.range(0, high, BLOCK, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK)
        own = keys < k_len
        k_tile = tl.load(k_base + keys.to(tl.int64)[:, None] * (kv_heads * D) + columns[None, :], mask=own[:, None], other=0.0)
        column_scale = tl.load(k_scales + keys, mask=own, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile)) * (row_scale[:, None] * column_scale[None, :])
        keep = own[None, :]
        if CAUSAL:
            keep = keep & (rows[:, None] + shift >= keys[None, :])
        v_tile = tl.load(v_base + columns.to(tl.int64)[:, None] * (num_slots.to(tl.int64) * BLOCK) + keys[None, :])
        value_scale = tl.load(v_scale + kv_head * num_slots + first_slot + start // BLOCK)
        if KIND == "softmax":
            s = tl.where(keep, s, -float("inf"))
            m_next = tl.maximum(m, tl.max(s, axis=1))
            safe = tl.where(m_next == -float("inf"), 0.0, m_next)
            p = tl.exp2(s - safe[:, None])
            alpha = tl.exp2(m - safe)
            norm = norm * alpha + tl.sum(p, axis=1)
            acc = acc * alpha[:, None] + tl.dot((p * WEIGHT_SCALE).to(tl.float8e4nv), tl.trans(v_tile)) * (value_scale / WEIGHT_SCALE)
            m = m_next
        else:
            p = tl.where(keep, _activate(s, KIND, APPROX), 0.0)
            restore, inverse = _scales(tl.max(tl.abs(p), axis=1))
            acc += tl.dot(_to_e4m3(p * inverse[:, None]), tl.trans(v_tile)) * (restore * value_scale)[:, None]
    if KIND == "softmax":
        acc = acc / tl.where(norm == 0, 1.0, norm)[:, None]
        tl.store(lse + head.to(tl.int64) * total_q + q_start + rows, (m + tl.log2(norm)) * (1.0 / LOG2E), mask=rows < q_len)
    else:
        acc = acc * inv_divisor
    tl.store(out + q_rows * D + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], options) -> tuple[Tensor, ...]:
    """What `kernels.fp8_attention.fp8_attention_forward` returns."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    rows, heads, head_dim = q.shape
    softmax = options.kind == "softmax"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((heads, rows if softmax else 0), float("-inf"), dtype=torch.float32, device=q.device)
    q8, q_scale = _quantize_rows(q)
    k8, k_scale = _quantize_rows(k)
    if 0 in (rows, heads) or offsets[0].shape[0] < 2:
        return out.zero_(), lse, q8, q_scale, k8, k_scale
    kv_heads = k.shape[1]
    slots = tile_map(offsets[1], k.shape[0], BLOCK.value)
    v8 = torch.empty((kv_heads, head_dim, slots.shape[0] * BLOCK.value), dtype=torch.float8_e4m3fn, device=q.device)
    v_scale = torch.empty((kv_heads, slots.shape[0]), dtype=torch.float32, device=q.device)
    quantize_values_kernel[(slots.shape[0] * kv_heads,)](
        v, v8, v_scale, offsets[1], slots, v.stride(0), v.stride(1), slots.shape[0], kv_heads, D=head_dim, num_warps=4
    )
    tiles = tile_map(offsets[0], rows, 128, out)
    scale = options.scale * LOG2E.value if softmax else options.scale
    fp8_forward_kernel[(tiles.shape[0] * heads,)](
        q8, k8, v8, q_scale, k_scale, v_scale, out, lse if softmax else out, *offsets, tiles, rows, k.shape[0], slots.shape[0], heads,
        heads // kv_heads, scale, 1.0 / options.divisor, KIND="gelu" if options.kind == "gelu_fast" else options.kind,
        APPROX=options.kind == "gelu_fast", CAUSAL=options.causal, M=128, D=head_dim, STAGES=3, num_warps=8,
    )  # fmt: skip
    return out, lse, q8, q_scale, k8, k_scale


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, head_dim = x.shape
    x8 = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((heads, rows), dtype=torch.float32, device=x.device)
    if x.numel():
        quantize_rows_kernel[(cdiv(rows, 32) * heads,)](x, x8, scale, *x.stride()[:2], rows, heads, M=32, D=head_dim, num_warps=4)
    return x8, scale
