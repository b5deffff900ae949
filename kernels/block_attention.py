"""BlockAttention: every sequence is cut into blocks of 32, 64 or 128 rows that attend only inside themselves.

One K/V tile per query tile: no loop over keys, no running maximum, no log-sum-exp to store. On a GPU it moves each tensor once.
"""

import math

import torch
from torch import Tensor

from kernels import _attention_cpu
from kernels._attention_ops import check_offsets_content, check_offsets_like, check_qkv
from kernels._autograd import differentiable, direct

BLOCKS = (32, 64, 128)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_len: int,
    block: int = 64,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention inside consecutive blocks of `block` rows; a sequence's last block may be short.

    q: `(total, H, D)`; k, v: `(total, Hkv, D)`; offsets: `(B + 1,)`; the blocks of a sequence start at its first row. Other
    arguments and guarantees as in `kernels.jagged_attention`. Raises ValueError, naming the argument.
    """
    check_qkv(q, k, v)
    check_offsets_like("offsets", offsets, q)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: {k.shape[0]} rows, q has {q.shape[0]}; blocks attend within themselves")
    if block not in BLOCKS:
        raise ValueError(f"block: {block} is not one of {BLOCKS}")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _differentiable_blocks(q, k, v, offsets, max_len, block, causal, float(scale))


@torch.library.custom_op("planner_kernels::block_attention_forward", mutates_args=())
def block_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, block: int, causal: bool, scale: float
) -> Tensor:
    """Output like `q`."""
    check_offsets_content("offsets", offsets, q.shape[0], max_len, "max_len")
    if q.is_cuda:
        from kernels import _block_triton  # triton is absent on machines without an accelerator

        return _block_triton.forward(q, k, v, offsets, block, causal, scale)
    return _cpu_forward(q, k, v, block_edges(offsets, block), causal, scale)[0]


@block_forward.register_fake
def _(q, k, v, offsets, max_len, block, causal, scale):
    return q.new_empty(q.shape)


@torch.library.custom_op("planner_kernels::block_attention_backward", mutates_args=())
def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, block: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; everything is recomputed inside the block, so the forward saves nothing but its inputs."""
    if grad.is_cuda:
        from kernels import _block_triton

        return _block_triton.backward(grad, q, k, v, offsets, block, causal, scale)
    edges = block_edges(offsets, block)
    out, lse = _cpu_forward(q, k, v, edges, causal, scale)
    options = _options(causal, scale)
    return _attention_cpu.backward(grad, q, k, v, out, lse, (edges, edges), (None,) * 4, options)[:3]


@block_backward.register_fake
def _(grad, q, k, v, offsets, max_len, block, causal, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, offsets, *options = inputs
    ctx.save_for_backward(q, k, v, offsets)
    ctx.options = options


def _backward(ctx, grad):
    q, k, v, offsets = ctx.saved_tensors
    return *_plain_backward(grad, q, k, v, offsets, *ctx.options), None, None, None, None, None


_plain_backward = direct(block_backward)
_differentiable_blocks = differentiable(block_forward, _backward, setup_context=_setup_context, costly=True)


def block_edges(offsets: Tensor, block: int) -> Tensor:
    """Offsets whose sequences are the blocks: `(number of blocks + 1,)` int64. Reads the offsets' values, so CPU only."""
    offsets = offsets.long()
    counts = (offsets.diff() + block - 1) // block
    total = int(counts.sum())
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=total)
    first = torch.cumsum(counts, 0) - counts
    starts = offsets[:-1][sequence] + (torch.arange(total) - first[sequence]) * block
    return torch.cat([starts, offsets[-1:]])


def _options(causal: bool, scale: float) -> _attention_cpu.AttentionOptions:
    return _attention_cpu.AttentionOptions(kind="softmax", causal=causal, window=0, scale=scale, divisor=1.0)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, causal: bool, scale: float):
    return _attention_cpu.forward(q, k, v, (edges, edges), (None,) * 4, _options(causal, scale))
