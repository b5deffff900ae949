"""Pre-norm transformer block over jagged events: softmax attention, then an optional GELU feed-forward.

Shape legend: T events of all samples, D model width, H heads of width d.
"""
from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from costmodel.model import LayerGroup
from kernels import jagged_attention


class SelfAttention(nn.Module):
    """`x += Wo softmax(q k^T / sqrt(d)) v`, then `x += W2 GELU(W1 LayerNorm(x))` where `mlp_dim` is set; causal or full, optional window."""

    def __init__(self, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.heads, self.head_dim, self.causal, self.window = layer.heads, layer.head_dim, layer.causal, layer.window
        width = layer.heads * layer.head_dim
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * width)
        self.out = nn.Linear(width, dim)
        self.has_mlp = layer.mlp_dim > 0
        if self.has_mlp:
            self.mlp_norm = nn.LayerNorm(dim)
            self.up = nn.Linear(dim, layer.mlp_dim)
            self.down = nn.Linear(layer.mlp_dim, dim)

    def forward(self, x_TD: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_TD)).view(-1, 3, self.heads, self.head_dim)
        q_THd, k_THd, v_THd = qkv.unbind(1)
        attended = jagged_attention(q_THd, k_THd, v_THd, offsets, offsets, max_q=max_length, max_k=max_length, causal=self.causal,
                                    window=self.window)
        x_TD = x_TD + self.out(attended.flatten(1))
        if self.has_mlp:
            x_TD = x_TD + self.down(F.gelu(self.up(self.mlp_norm(x_TD))))
        return x_TD
