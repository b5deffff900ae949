"""Low-rank cross network of DCN v2 (arXiv 2008.13535) over the flattened feature tokens.

Shape legend: B samples, n tokens of width d, W = n d, r rank.
"""
from __future__ import annotations

from torch import Tensor, nn

from costmodel.model import LayerGroup


class DcnCross(nn.Module):
    """`x <- x_0 * (U (V x) + b) + x`, `layers` times: `(B, n, d) -> (B, n, d)`."""

    def __init__(self, num_tokens: int, feature_dim: int, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.num_outputs, width = num_tokens, num_tokens * feature_dim
        rank, count = int(layer.options["rank"]), int(layer.options["layers"])
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(count))

    def forward(self, x_Bnd: Tensor) -> Tensor:
        first_BW = x_Bnd.flatten(1)
        x_BW = first_BW
        for down, up in zip(self.down, self.up):
            x_BW = first_BW * up(down(x_BW)) + x_BW
        return x_BW.view(x_Bnd.shape)
