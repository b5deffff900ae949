"""HSTU block as its published code has it (meta-recsys/generative-recommenders, modules/stu.py): SiLU on u only, output width 3 H d.

Shape legend: T events of all samples, D model width, H heads of width d.
"""
from __future__ import annotations

from torch import Tensor, nn

from costmodel.model import LayerGroup
from kernels import gdpa
from kernels.gate import gated_concat
from runtime.model.norm import LayerNorm
from runtime.model.times import RelativeBias


class HSTU(nn.Module):
    """`u, v, q, k = Linear(LayerNorm(x))`, `a = SiLU(q k^T / sqrt(d) + bias) v / divisor` causal, `x += Linear(concat(SiLU(u), a, SiLU(u)
    LayerNorm(a)))`. The bias by time and position is the published one (`RelativeBias`), where the layer asks for it.

    `divisor` is fixed by the model file: were it the batch's longest history, a sample's output would depend on its batch mates.
    """

    def __init__(self, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        if layer.divisor is None:
            raise ValueError("layer hstu: `divisor` is needed, the number that attention scores are divided by")
        self.heads, self.head_dim, self.divisor = layer.heads, layer.head_dim, layer.divisor
        self.causal, self.window = layer.causal, layer.window
        width = layer.heads * layer.head_dim
        self.norm = LayerNorm(dim)
        self.uvqk = nn.Linear(dim, 4 * width)
        self.attention_norm = LayerNorm(width)
        self.out = nn.Linear(3 * width, dim)
        self.bias = RelativeBias(layer) if layer.biased else None

    def forward(self, x_TD: Tensor, offsets: Tensor, max_length: int, times_2T: Tensor | None = None) -> Tensor:
        u, v, q, k = self.uvqk(self.norm(x_TD)).chunk(4, dim=1)
        q_THd, k_THd, v_THd = (t.unflatten(1, (self.heads, self.head_dim)) for t in (q, k, v))
        a = gdpa(q_THd, k_THd, v_THd, offsets, offsets, max_q=max_length, max_k=max_length, activation="silu", divisor=self.divisor,
                 causal=self.causal, window=self.window, bias=None if self.bias is None else self.bias(times_2T)).flatten(1)
        return x_TD + self.out(self.gate(u, a))

    def gate(self, u_TW: Tensor, a_TW: Tensor) -> Tensor:
        """`(T, 3 W)`."""
        norm = self.attention_norm
        return gated_concat(u_TW, a_TW, norm.weight, norm.bias, eps=norm.eps)
