"""A dense language model's decoder block over jagged events, and the head that predicts the next event.

Shape legend: T events of all samples, D model width, H heads of width d, G heads of keys and values, C classes.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from costmodel.model import LayerGroup
from kernels import jagged_attention

ROTARY_BASE = 500_000.0  # arXiv 2407.21783, section 3.2
_IGNORED = -100


class _KeptRMSNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one number a row, as the CUDA kernel does."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale_T1 = (x_TD.float() if x_TD.dtype != torch.float64 else x_TD).square().mean(1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        return (x_TD * scale_T1 * weight_D).to(x_TD.dtype)

    @staticmethod
    def backward(ctx, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        normed_TD, scaled_TD = x_TD * scale_T1, grad_TD * weight_D
        grad_x = scale_T1 * (scaled_TD - normed_TD * (scaled_TD * normed_TD).mean(1, keepdim=True))
        return grad_x.to(x_TD.dtype), (grad_TD * normed_TD).sum(0).to(weight_D.dtype), None


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight`. On the CPU PyTorch composes it of parts and keeps each; here nothing more is kept than on CUDA."""

    def forward(self, x_TD: Tensor) -> Tensor:
        if x_TD.is_cuda:
            return super().forward(x_TD)
        return _KeptRMSNorm.apply(x_TD, self.weight, torch.finfo(x_TD.dtype).eps if self.eps is None else self.eps)


class Llama(nn.Module):
    """`x += Wo attention(rotated q, rotated k, v)`, then `x += W2 (SiLU(W1 h) * W3 h)`, each after an RMSNorm; no bias."""

    def __init__(self, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.layer, width, kv_width = layer, layer.heads * layer.head_dim, int(layer.options["kv_heads"]) * layer.head_dim
        self.attention_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)
        self.query = nn.Linear(dim, width, bias=False)
        self.key, self.value = nn.Linear(dim, kv_width, bias=False), nn.Linear(dim, kv_width, bias=False)
        self.out = nn.Linear(width, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, layer.mlp_dim, bias=False), nn.Linear(dim, layer.mlp_dim, bias=False)
        self.down = nn.Linear(layer.mlp_dim, dim, bias=False)

    def forward(self, x_TD: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        layer, h = self.layer, self.attention_norm(x_TD)
        cos, sin = rotation(offsets, x_TD.shape[0], layer.head_dim)
        q_THd, k_TGd, v_TGd = (linear(h).unflatten(1, (-1, layer.head_dim)) for linear in (self.query, self.key, self.value))
        q_THd, k_TGd = rotate(q_THd, cos, sin), rotate(k_TGd, cos, sin)
        repeats = layer.heads // k_TGd.shape[1]
        if repeats > 1:
            k_TGd, v_TGd = k_TGd.repeat_interleave(repeats, dim=1), v_TGd.repeat_interleave(repeats, dim=1)
        attended = jagged_attention(q_THd, k_TGd, v_TGd, offsets, offsets, max_q=max_length, max_k=max_length, causal=layer.causal,
                                    window=layer.window)
        x_TD = x_TD + self.out(attended.flatten(1))
        h = self.mlp_norm(x_TD)
        return x_TD + self.down(F.silu(self.gate(h)) * self.up(h))


def rotation(offsets: Tensor, num_events: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), `(T, 1, d / 2)` fp32, of every event's place in its history times each frequency."""
    event = torch.arange(num_events, device=offsets.device)
    place = event - offsets[torch.searchsorted(offsets, event, right=True) - 1]
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=offsets.device, dtype=torch.float32) / head_dim)
    angle = place[:, None, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + d / 2) turned by the event's angles; computed in fp32 (fp64 for fp64), in the dtype of x."""
    first, second = x_THd.chunk(2, dim=2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2).to(x_THd.dtype)


class NextEvent(nn.Module):
    """Cross entropy of the following event's id: `(T, D), (T,) ids` -> the sum over histories of their events' mean, 0-dim fp32."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.norm, self.logits = RMSNorm(dim), nn.Linear(dim, classes, bias=False)

    def forward(self, x_TD: Tensor, ids_T: Tensor, offsets: Tensor) -> Tensor:
        targets = torch.cat([ids_T[1:], ids_T[:1]])
        last = offsets[1:] - 1
        targets = targets.index_fill(0, last[last >= 0], _IGNORED) if len(ids_T) else targets
        logits_TC = self.logits(self.norm(x_TD))
        total = F.cross_entropy(logits_TC.float(), targets, ignore_index=_IGNORED, reduction="sum")
        counted = (targets != _IGNORED).sum().clamp(min=1)
        return total / counted * (offsets.shape[0] - 1)
