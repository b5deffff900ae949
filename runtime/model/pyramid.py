"""Levels of a pyramid over a history: fewer and fewer of the newest events, parallel modules on each level.

Shape legend: T events of all samples, D model width.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from costmodel.model import LayerGroup
from runtime.model.hstu import HSTU
from runtime.model.llama import Llama
from runtime.model.self_attention import GDPA, BlockAttention, SelfAttention

_BRANCHES: dict[str, type[nn.Module]] = {"self_attention": SelfAttention, "gdpa": GDPA, "block_attention": BlockAttention, "hstu": HSTU,
                                         "llama": Llama}


class Pyramid(nn.Module):
    """The mean of its branches' outputs. The encoder has cut the histories to the level's newest events (`newest_events`).

    GEM stacks "multiple parallel interaction modules in a pyramid formation" (engineering.fb.com, 2025-11-10) and gives no formulas: this form is
    ours.
    """

    def __init__(self, dim: int, layer: LayerGroup) -> None:
        super().__init__()
        self.timed = tuple(b.timed for b in layer.branches)
        self.branches = nn.ModuleList(_BRANCHES[b.kind](dim, LayerGroup.of_layer(b)) for b in layer.branches)

    def forward(self, x_TD: Tensor, offsets: Tensor, max_length: int, times_2T: Tensor | None = None) -> Tensor:
        total = None
        for branch, timed in zip(self.branches, self.timed):
            out = branch(x_TD, offsets, max_length, times_2T) if timed else branch(x_TD, offsets, max_length)
            total = out if total is None else total + out
        return total / len(self.branches) if len(self.branches) > 1 else total


def newest_events(x_TD: Tensor, offsets: Tensor, lengths: np.ndarray, limit: int) -> tuple[Tensor, Tensor]:
    """The newest `limit` events of every history and their offsets. `lengths`: `(B,)` on the host, so that the device need not be asked how many."""
    sizes = offsets.diff().clamp(max=limit)
    kept = torch.cat([offsets[:1], sizes.cumsum(0)])
    total = int(np.minimum(lengths, limit).sum())
    skipped = torch.repeat_interleave(offsets[1:] - kept[1:], sizes, output_size=total)
    return x_TD.index_select(0, torch.arange(total, device=offsets.device) + skipped), kept
