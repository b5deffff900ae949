"""InterFormer cross block (arXiv 2411.09852): feature tokens and one history summarise each other.

Shape legend: B samples, T events, n feature tokens of width d, s summary tokens, D width of a history, H heads of width h.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from costmodel.model import LayerGroup
from kernels import gdpa, jagged_attention
from runtime.model.norm import LayerNorm


class Gate(nn.Module):
    """`sigmoid(z * Linear(z))`, the paper's gating."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z * self.linear(z))


class InterFormer(nn.Module):
    """`(X, S) -> (X', S')`: `(B, n, d)` and `(T, D)` to `(B, n + s + num_queries + recent, d)` and `(T, D)`.

        X_sum = Gate(W_lce X)                                               s tokens
        S    += Linear(GDPA(Linear(LN(S)), Linear(X_sum)))                  personalised feed-forward part
        S    += Linear(attention(LN(S)))                                    self-attention
        S_sum = Gate(concat(attention(CLS, LN(S)), attention(PMA, LN(S)), recent))
        X'    = concat(X, S_sum)

    CLS queries are made of X_sum, PMA queries are learned; both read the whole history. Three choices differ from the paper: its personalised
    part multiplies S by a matrix made of X_sum, here it is Kunlun's GDPA with keys and values made of X_sum (arXiv 2602.10016), of which that is the
    case of identity activation and one fixed key a token; CLS tokens read the history instead of being prepended to it; X' takes the summary of S',
    so that the last block's S' is used. An interaction layer (Wukong) follows as the paper's Interaction.
    """

    def __init__(self, num_tokens: int, feature_dim: int, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.layer, d, width = layer, feature_dim, layer.heads * layer.head_dim
        self.num_summary, self.num_recent = int(layer.options["summary_tokens"]), int(layer.options["recent"])
        self.num_outputs = num_tokens + self.num_summary + layer.num_queries + self.num_recent
        self.lce = nn.Parameter(torch.empty(self.num_summary, num_tokens))
        nn.init.normal_(self.lce, std=num_tokens ** -0.5)
        self.feature_gate = Gate(d)
        self.personal_norm, self.personal_query = LayerNorm(dim), nn.Linear(dim, width)
        self.personal_context, self.personal_out = nn.Linear(d, 2 * width), nn.Linear(width, dim)
        self.attention_norm, self.qkv, self.out = LayerNorm(dim), nn.Linear(dim, 3 * width), nn.Linear(width, dim)
        self.summary_norm, self.summary_kv = LayerNorm(dim), nn.Linear(dim, 2 * width)
        self.cls = nn.Linear(d, width)
        self.queries = nn.Parameter(torch.empty(layer.num_queries, width))
        nn.init.normal_(self.queries, std=0.02)
        self.tokens, self.recent = nn.Linear(width, d), nn.Linear(dim, d)
        self.sequence_gate = Gate(d)

    def forward(self, x_Bnd: Tensor, s_TD: Tensor, offsets: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
        num_samples = x_Bnd.shape[0]
        summary = self.feature_gate(torch.bmm(self.lce.expand(num_samples, -1, -1), x_Bnd))
        s_TD = s_TD + self._personal(s_TD, summary, offsets, max_length)
        q, k, v = self.qkv(self.attention_norm(s_TD)).view(-1, 3, *self._heads).unbind(1)
        attended = jagged_attention(q, k, v, offsets, offsets, max_q=max_length, max_k=max_length, causal=self.layer.causal, window=self.layer.window)
        s_TD = s_TD + self.out(attended.flatten(1))
        normed = self.summary_norm(s_TD)
        read = self._read(normed, summary, offsets, max_length)
        tokens = torch.cat([self.tokens(read), self.recent(last_events(normed, offsets, self.num_recent))], dim=1)
        return torch.cat([x_Bnd, self.sequence_gate(tokens)], dim=1), s_TD

    @property
    def _heads(self) -> tuple[int, int]:
        return self.layer.heads, self.layer.head_dim

    def _personal(self, s_TD: Tensor, summary: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        q = self.personal_query(self.personal_norm(s_TD)).unflatten(1, self._heads)
        k, v = self.personal_context(summary.flatten(0, 1)).view(-1, 2, *self._heads).unbind(1)
        a = gdpa(q, k, v, offsets, even_offsets(offsets, self.num_summary), max_q=max_length, max_k=self.num_summary,
                 activation=self.layer.activation, divisor=self.layer.divisor)
        return self.personal_out(a.flatten(1))

    def _read(self, normed: Tensor, summary: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        """`(B, s + num_queries, H h)`; zeros from an empty history."""
        num_samples = summary.shape[0]
        cls = self.cls(summary)
        queries = torch.cat([cls, self.queries.to(cls.dtype).expand(num_samples, -1, -1)], dim=1)
        k, v = self.summary_kv(normed).view(-1, 2, *self._heads).unbind(1)
        count = queries.shape[1]
        out = jagged_attention(queries.view(-1, *self._heads), k, v, even_offsets(offsets, count), offsets, max_q=count, max_k=max_length)
        return out.view(num_samples, count, -1)


def even_offsets(offsets: Tensor, each: int) -> Tensor:
    """Offsets of as many rows as `offsets` has, `each` long."""
    return torch.arange(offsets.shape[0], device=offsets.device, dtype=offsets.dtype) * each


def last_events(s_TD: Tensor, offsets: Tensor, count: int) -> Tensor:
    """The last `count` events of every history, `(B, count, D)`; zeros where it is shorter."""
    if s_TD.shape[0] == 0:
        return s_TD.new_zeros((offsets.shape[0] - 1, count, s_TD.shape[1]))
    index = offsets[1:, None] - torch.arange(count, 0, -1, device=offsets.device)
    known = index >= offsets[:-1, None]
    events = s_TD.index_select(0, index.clamp(min=0).flatten()).unflatten(0, index.shape)  # its backward adds rows; that of s[i] sorts i first
    return events * known.to(s_TD.dtype).unsqueeze(2)
