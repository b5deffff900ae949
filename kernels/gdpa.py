"""Generalised dot-product attention: an activation in place of the softmax. HSTU is `activation="silu"`, causal, with a bias."""

from typing import Literal

from torch import Tensor

from kernels._attention_ops import attend
from kernels._masks import AttentionBias

Activation = Literal["gelu", "gelu_fast", "silu", "relu", "identity"]


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    max_q: int,
    max_k: int,
    activation: Activation = "gelu",
    scale: float | None = None,
    divisor: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    bias: AttentionBias | None = None,
) -> Tensor:
    """`out_i = sum_j activation(scale * q_i . k_j + bias_ij) / divisor * v_j` over the kept columns of a row's own sequence.

    Shapes, offsets, masks and bias as in `kernels.jagged_attention`.
    activation: "gelu" is the tanh form; "gelu_fast" the same function with the GPU's approximate tanh (2**-11 relative), exact on
        the CPU.
    divisor: fixed by the caller. It never follows the batch's longest sequence: a result must not depend on its batch mates.

    Raises ValueError, naming the argument.
    """
    return attend(
        q, k, v, q_offsets, k_offsets, max_q=max_q, max_k=max_k, kind=activation, causal=causal, window=window,
        scale=scale, divisor=divisor, bias=bias,
    )  # fmt: skip
