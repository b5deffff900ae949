"""PyTorch truth for the attention kernels: one sequence at a time, plain autograd, any floating dtype (float64 in tests).

    out_i = sum_j w_ij v_j,   s_ij = scale * q_i . k_j + bias_ij
    softmax:      w_ij = exp(s_ij) / sum_j exp(s_ij)   over the kept columns
    activations:  w_ij = act(s_ij) / divisor           for the kept columns, 0 elsewhere

Slow and clear on purpose; the masks and buckets are those of `kernels._masks`.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels._masks import AttentionBias, mask_keeps, position_bucket, time_bucket

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),  # the same function; on a GPU its tanh is the hardware's approximation
    "silu": F.silu,
    "relu": F.relu,
    "identity": lambda x: x,
}


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    kind: str = "softmax",
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    divisor: float = 1.0,
    bias: AttentionBias | None = None,
) -> Tensor:
    """Attention over jagged sequences, shapes as in `kernels.jagged_attention`; `kind` is "softmax" or an activation's name.

    Rows that no sequence owns (past `q_offsets[-1]`) are zero.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for (q0, q1), (k0, k1) in zip(_spans(q_offsets), _spans(k_offsets), strict=True):
        if q1 == q0 or k1 == k0:
            continue
        keys = k[k0:k1].repeat_interleave(group, dim=1)
        values = v[k0:k1].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * scale
        rows = torch.arange(q1 - q0, device=q.device)[:, None] + (k1 - k0) - (q1 - q0)
        delta = rows - torch.arange(k1 - k0, device=q.device)[None, :]
        if bias is not None:
            scores = scores + _bias(bias, delta, slice(q0, q1), slice(k0, k1)).to(scores.dtype)
        keep = mask_keeps(delta, causal=causal, window=window or 0)
        weights = _weights(scores, keep, kind, divisor)
        out = torch.cat([out[:q0], torch.einsum("hqk,khd->qhd", weights, values), out[q1:]])
    return out


def block_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, block: int, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Softmax attention inside consecutive blocks of `block` rows of every sequence; its last block may be short."""
    starts = [s for a, b in _spans(offsets) for s in range(a, b, block)]
    ends = [min(s + block, b) for a, b in _spans(offsets) for s in range(a, b, block)]
    out = torch.zeros_like(q)
    for start, end in zip(starts, ends, strict=True):
        one = torch.tensor([0, end - start])
        part = attention_reference(q[start:end], k[start:end], v[start:end], one, one, causal=causal, scale=scale)
        out = torch.cat([out[:start], part, out[end:]])
    return out


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    edges = offsets.tolist()
    return list(itertools.pairwise(edges))


def _bias(bias: AttentionBias, delta: Tensor, q_rows: slice, k_rows: slice) -> Tensor:
    total = torch.zeros((1, *delta.shape), dtype=torch.float64, device=delta.device)
    if bias.position_table is not None:
        total = total + bias.position_table[position_bucket(delta, bias.position_table.shape[0])].permute(2, 0, 1)
    if bias.time_table is not None:
        difference = bias.q_times[q_rows].long()[:, None] - bias.k_times[k_rows].long()[None, :]
        total = total + bias.time_table[time_bucket(difference, bias.time_table.shape[0])].permute(2, 0, 1)
    return total


def _weights(scores: Tensor, keep: Tensor, kind: str, divisor: float) -> Tensor:
    if kind != "softmax":
        return torch.where(keep, ACTIVATIONS[kind](scores) / divisor, 0.0)
    empty_row = ~keep.any(dim=-1, keepdim=True)
    masked = scores.masked_fill(~(keep | empty_row), -math.inf)
    return torch.softmax(masked, dim=-1).masked_fill(empty_row, 0.0)
