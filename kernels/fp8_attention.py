"""Attention whose products run in fp8 e4m3: forward on Hopper's fp8 tensor cores, backward in bf16 from the quantised queries and keys.

    q, k       one fp32 scale per row and head
    v          one per head and block of 64 keys of a sequence
    weights    softmax: 256 p, p <= 1; activations: one scale per row and block of 64 keys (GPU; the CPU path leaves weights unrounded)

Saved for the backward: q and k in 8 bits, v as it came. Gradients are those of the function of the quantised q and k, handed to the
unquantised ones unchanged (straight through), so weights and log-sum-exp of both directions agree.
"""

import math

import torch
from torch import Tensor

from kernels import _attention_cpu
from kernels._attention_ops import KINDS, attention_backward, check_offsets_content, check_offsets_like, check_qkv
from kernels._fp8 import fp32_scale, from_e4m3, to_e4m3
from kernels.block_attention import block_edges

BLOCK = 64  # keys that share a scale of v, and of a row's weights
HEAD_DIMS = (64, 128)  # on CUDA
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *,
    max_q: int, max_k: int, kind: str = "softmax", causal: bool = False, scale: float | None = None, divisor: float = 1.0,
) -> Tensor:  # fmt: skip
    """`kernels.jagged_attention` (kind "softmax") or `kernels.gdpa` (an activation's name) with e4m3 products in the forward.

    Shapes, offsets, `causal`, `scale` and `divisor` as there; no window and no bias. Relative error about 4 % of a row's norm.
    Raises ValueError, naming the argument.
    """
    check_qkv(q, k, v)
    check_offsets_like("q_offsets", q_offsets, q)
    check_offsets_like("k_offsets", k_offsets, q)
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(f"k_offsets: has shape {tuple(k_offsets.shape)}, q_offsets {tuple(q_offsets.shape)}")
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is not one of {', '.join(KINDS)}")
    if not divisor > 0:
        raise ValueError(f"divisor: {divisor} must be positive")
    if q.dtype not in DTYPES:
        raise ValueError(f"q: {q.dtype} is not quantised to fp8")
    if q.is_cuda and (q.shape[2] not in HEAD_DIMS or torch.cuda.get_device_capability(q.device) < (8, 9)):
        raise ValueError(f"q: fp8 attention takes head dims {HEAD_DIMS} on GPUs from compute capability 8.9 on")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return fp8_attention_forward(q, k, v, q_offsets, k_offsets, max_q, max_k, kind, causal, float(scale), float(divisor))[0]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values like `x` and the fp32 scales `(H, rows)` that restore them."""
    scale, inverse = fp32_scale(x.float().abs().amax(-1, keepdim=True))
    return to_e4m3((x.float() * inverse).flatten(0, 1)).view(x.shape), scale.squeeze(-1).t().contiguous()


def dequantize_rows(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `quantize_rows`, rounded to `dtype`."""
    return (from_e4m3(x) * scale.t().unsqueeze(-1)).to(dtype)


def round_values(v: Tensor, offsets: Tensor) -> Tensor:
    """`v` as fp32 after a round trip through e4m3, one scale per head and block of 64 keys. CPU only: it reads the offsets."""
    edges = block_edges(offsets, BLOCK)
    own = v[int(edges[0]) : int(edges[-1])].float()
    block = torch.repeat_interleave(torch.arange(len(edges) - 1), edges.diff())
    amax = torch.zeros(len(edges) - 1, v.shape[1]).scatter_reduce_(0, block[:, None].expand(-1, v.shape[1]), own.abs().amax(-1), "amax")
    scale, inverse = (x[block].unsqueeze(-1) for x in fp32_scale(amax))
    result = torch.zeros(v.shape)
    result[int(edges[0]) : int(edges[-1])] = from_e4m3(to_e4m3((own * inverse).flatten(0, 1))).view(own.shape) * scale
    return result


@torch.library.custom_op("planner_kernels::fp8_attention_forward", mutates_args=())
def fp8_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    max_q: int, max_k: int, kind: str, causal: bool, scale: float, divisor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, log-sum-exp `(H, total_q)` (softmax; else `(H, 0)`), and q and k in 8 bits, each with its scales."""
    check_offsets_content("q_offsets", q_offsets, q.shape[0], max_q, "max_q")
    check_offsets_content("k_offsets", k_offsets, k.shape[0], max_k, "max_k")
    options = _attention_cpu.AttentionOptions(kind=kind, causal=causal, window=0, scale=scale, divisor=divisor)
    if q.is_cuda:
        from kernels import _fp8_attention_triton  # triton is absent on machines without an accelerator

        return _fp8_attention_triton.forward(q, k, v, (q_offsets, k_offsets), options)
    (q8, q_scale), (k8, k_scale) = quantize_rows(q), quantize_rows(k)
    rounded = dequantize_rows(q8, q_scale, torch.float32), dequantize_rows(k8, k_scale, torch.float32), round_values(v, k_offsets)
    out, lse = _attention_cpu.forward(*rounded, (q_offsets, k_offsets), (None,) * 4, options)
    return out.to(q.dtype), lse, q8, q_scale, k8, k_scale


@fp8_attention_forward.register_fake
def _(q, k, v, q_offsets, k_offsets, max_q, max_k, kind, causal, scale, divisor):
    rows = q.shape[0] if kind == "softmax" else 0
    lse = q.new_empty((q.shape[1], rows), dtype=torch.float32)
    eighth = [x.new_empty(x.shape, dtype=torch.float8_e4m3fn) for x in (q, k)]
    scales = [x.new_empty((x.shape[1], x.shape[0]), dtype=torch.float32) for x in (q, k)]
    return q.new_empty(q.shape), lse, eighth[0], scales[0], eighth[1], scales[1]


def _setup_context(ctx, inputs, output):
    _, _, v, q_offsets, k_offsets, *options = inputs
    out, lse, q8, q_scale, k8, k_scale = output
    saved_out = out if options[2] == "softmax" else None
    ctx.save_for_backward(v, saved_out, lse, q8, q_scale, k8, k_scale, q_offsets, k_offsets)
    ctx.options = options
    ctx.mark_non_differentiable(lse, q8, q_scale, k8, k_scale)


def _backward(ctx, grad, *_):
    v, out, lse, q8, q_scale, k8, k_scale, q_offsets, k_offsets = ctx.saved_tensors
    max_q, max_k, kind, causal, scale, divisor = ctx.options
    q, k = dequantize_rows(q8, q_scale, v.dtype), dequantize_rows(k8, k_scale, v.dtype)
    out = grad if out is None else out
    none = (None,) * 4
    dq, dk, dv, _, _ = attention_backward(
        grad, q, k, v, out, lse, q_offsets, k_offsets, *none, max_q, max_k, kind, causal, 0, scale, divisor
    )  # fmt: skip
    return dq, dk, dv, *(None,) * (2 + len(ctx.options))


fp8_attention_forward.register_autograd(_backward, setup_context=_setup_context)
