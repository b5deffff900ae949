"""The optimizer of the dense parameters (tables have theirs fused into backward, `runtime.tables`)."""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def build_dense_optimizer(parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW, fused: one pass over parameter, gradient and both moments instead of a dozen, on CPU and CUDA alike."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
