"""Wukong layer over feature tokens (arXiv 2403.02545): a factorisation machine block beside a linear compression.

Shape legend: B samples, n tokens of width d, k rank of the factorisation machine, m tokens out.
"""
from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from costmodel.model import LayerGroup


class Wukong(nn.Module):
    """`LN(concat(FMB(X), LCB(X)) + R)`: `(B, n, d) -> (B, n_F + n_L, d)`.

    FMB(X) = MLP(LN(flatten(X (X^T Y)))) as n_F tokens; LCB(X) = W_L X; R = X, or W_R X where the number of tokens changes. Y `(n, k)` is attentive:
    made per sample from W_C X by two Linears with a ReLU between them. The paper does not state the shape of that MLP; this is our choice. W_L, W_C
    and W_R are rows of one matrix, so that X is read once.
    """

    def __init__(self, num_tokens: int, feature_dim: int, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        options = {name: int(value) for name, value in layer.options.items()}
        self.num_fm, self.num_linear, self.rank, compressed = (options[k] for k in ("num_fm", "num_linear", "rank", "compressed"))
        self.num_outputs, d = self.num_fm + self.num_linear, feature_dim
        parts = [self.num_linear, compressed] + ([self.num_outputs] if self.num_outputs != num_tokens else [])
        self.parts = parts
        self.compress = nn.Parameter(torch.empty(sum(parts), num_tokens))
        nn.init.normal_(self.compress, std=num_tokens ** -0.5)
        self.attentive = nn.ModuleList([nn.Linear(compressed * d, compressed * self.rank), nn.Linear(compressed * self.rank, num_tokens * self.rank)])
        self.fm_norm = nn.LayerNorm(num_tokens * self.rank)
        widths = [num_tokens * self.rank, *[layer.mlp_dim] * options["mlp_layers"], self.num_fm * d]
        self.mlp = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))
        self.norm = nn.LayerNorm(d)

    def forward(self, x_Bnd: Tensor) -> Tensor:
        compressed = torch.bmm(self.compress.expand(x_Bnd.shape[0], -1, -1), x_Bnd)
        linear, context, *residual = compressed.split(self.parts, dim=1)
        y_Bnk = self.attentive[1](torch.relu(self.attentive[0](context.flatten(1)))).view(-1, x_Bnd.shape[1], self.rank)
        machine = torch.bmm(x_Bnd, torch.bmm(x_Bnd.transpose(1, 2), y_Bnk))
        hidden = self.fm_norm(machine.flatten(1))
        for layer in self.mlp[:-1]:
            hidden = torch.relu(layer(hidden))
        tokens = self.mlp[-1](hidden).unflatten(1, (self.num_fm, -1))
        return self.norm(torch.cat([tokens, linear], dim=1) + (residual[0] if residual else x_Bnd))
