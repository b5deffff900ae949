"""Pre-norm transformer blocks over jagged events: attention, then an optional GELU feed-forward. The kinds differ in their attention.

Shape legend: T events of all samples, D model width, H heads of width d.
"""
from __future__ import annotations

import abc

from torch import Tensor, nn

from costmodel.model import LayerGroup
from kernels import AttentionBias, block_attention, gdpa, jagged_attention
from kernels.fp8_attention import fp8_attention
from runtime.model.norm import LayerNorm
from runtime.model.times import RelativeBias


class TransformerBlock(nn.Module, abc.ABC):
    """`x += Wo attend(q, k, v)`, then `x += W2 GELU(W1 LayerNorm(x))` where `mlp_dim` is set. `in_8_bits`: multiplies q, k and v in e4m3.
    Where the layer has a bias, attention's scores get it; forward takes `times_2T` (`runtime.model.times.event_times`) where that is by time."""

    in_8_bits = False

    def __init__(self, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.layer, width = layer, layer.heads * layer.head_dim
        self.attention_norm = LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * width)
        self.out = nn.Linear(width, dim)
        self.bias = RelativeBias(layer) if layer.biased else None
        self.has_mlp = layer.mlp_dim > 0
        if self.has_mlp:
            self.mlp_norm = LayerNorm(dim)
            self.up = nn.Linear(dim, layer.mlp_dim)
            self.gelu = nn.GELU()
            self.down = nn.Linear(layer.mlp_dim, dim)

    @abc.abstractmethod
    def attend(self, q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, offsets: Tensor, max_length: int, bias: AttentionBias | None) -> Tensor:
        """`(T, H, d)`."""

    def forward(self, x_TD: Tensor, offsets: Tensor, max_length: int, times_2T: Tensor | None = None) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_TD)).view(-1, 3, self.layer.heads, self.layer.head_dim)
        q_THd, k_THd, v_THd = qkv.unbind(1)
        bias = None if self.bias is None else self.bias(times_2T)
        x_TD = x_TD + self.out(self.attend(q_THd, k_THd, v_THd, offsets, max_length, bias).flatten(1))
        if self.has_mlp:
            x_TD = x_TD + self.down(self.gelu(self.up(self.mlp_norm(x_TD))))
        return x_TD


class SelfAttention(TransformerBlock):
    """`softmax(q k^T / sqrt(d) + bias) v`; causal or full, optional sliding window and bias."""

    def attend(self, q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, offsets: Tensor, max_length: int, bias: AttentionBias | None) -> Tensor:
        if self.in_8_bits:
            return fp8_attention(q_THd, k_THd, v_THd, offsets, offsets, max_q=max_length, max_k=max_length, causal=self.layer.causal)
        return jagged_attention(q_THd, k_THd, v_THd, offsets, offsets, max_q=max_length, max_k=max_length, causal=self.layer.causal,
                                window=self.layer.window, bias=bias)


class GDPA(TransformerBlock):
    """`activation(q k^T / sqrt(d) + bias) v / divisor`; causal or full, optional sliding window and bias."""

    def attend(self, q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, offsets: Tensor, max_length: int, bias: AttentionBias | None) -> Tensor:
        if self.in_8_bits:
            return fp8_attention(q_THd, k_THd, v_THd, offsets, offsets, max_q=max_length, max_k=max_length, kind=self.layer.activation,
                                 causal=self.layer.causal, divisor=self.layer.divisor)
        return gdpa(q_THd, k_THd, v_THd, offsets, offsets, max_q=max_length, max_k=max_length, activation=self.layer.activation,
                    divisor=self.layer.divisor, causal=self.layer.causal, window=self.layer.window, bias=bias)


class BlockAttention(TransformerBlock):
    """Softmax attention inside consecutive runs of `block` events of a history; causal or full."""

    def attend(self, q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, offsets: Tensor, max_length: int, bias: AttentionBias | None) -> Tensor:
        return block_attention(q_THd, k_THd, v_THd, offsets, max_len=max_length, block=self.layer.block, causal=self.layer.causal)
