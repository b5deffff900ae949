"""Jagged flash attention: softmax attention over sequences of very different lengths, packed without padding."""

from torch import Tensor

from kernels._attention_ops import attend
from kernels._masks import AttentionBias


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    max_q: int,
    max_k: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    bias: AttentionBias | None = None,
) -> Tensor:
    """Softmax attention of every sequence's queries to its own keys and values; differentiable in q, k, v and the bias tables.

    q: `(total_q, H, D)`; k, v: `(total_k, Hkv, D)`, `Hkv` divides `H`. Rows may be strided views of a fused projection.
    q_offsets, k_offsets: `(B + 1,)` int32 or int64 on the same device; sequence b owns rows `offsets[b] : offsets[b + 1]`.
        Rows that no sequence owns get output 0 and gradient 0, and so do rows that keep no column.
    max_q, max_k: the longest sequence, or any bound above it. On CUDA a tuning hint only: the result does not depend on it.
    causal, window, bias: as `kernels._masks` defines them (bottom-right aligned where the lengths differ).
    scale: on `q . k`, default `D ** -0.5`.

    Returns `(total_q, H, D)` in q's dtype; accumulation is float32. Output and gradients, the bias tables' too, repeat bitwise from run to run.
    Raises ValueError, naming the argument. Decreasing offsets are found on the CPU always, on CUDA under PLANNER_CHECK_OFFSETS=1.
    """
    return attend(
        q, k, v, q_offsets, k_offsets, max_q=max_q, max_k=max_k, kind="softmax", causal=causal, window=window,
        scale=scale, divisor=1.0, bias=bias,
    )  # fmt: skip
