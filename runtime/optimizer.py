"""The optimizer of the dense parameters (tables have theirs fused into backward, `runtime.tables`)."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class AdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW without what its `step` looks up and sorts anew each time: a third of the host's time for it. Parameters that are
    sharded, or of which some have no gradient, go its own way."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, fused=True, **options)
        self._forget()

    def _forget(self) -> None:
        self._known: list[tuple[dict, list[nn.Parameter], list[list[Tensor]]]] | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._forget()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._known is None:
            super().step(closure)
            self._known = self._states()
            return
        gradients = [[p.grad for p in parameters] for _, parameters, _ in self._known]
        if not self._known or any(g is None for found in gradients for g in found):
            super().step(closure)
            return
        for (group, parameters, (averages, squares, steps)), found in zip(self._known, gradients):
            torch._foreach_add_(steps, 1)
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(parameters, found, averages, squares, [], steps, amsgrad=False, lr=group["lr"], beta1=beta1, beta2=beta2,
                                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False, grad_scale=None, found_inf=None)

    def _states(self) -> list[tuple[dict, list[nn.Parameter], list[list[Tensor]]]]:
        """(group, parameters, their averages, squares and steps); nothing where PyTorch's own step is needed: parameters of several kinds, shards."""
        found = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.requires_grad]
            if any(isinstance(p, DTensor) or not self.state.get(p) for p in parameters) or len({(p.dtype, p.device) for p in parameters}) > 1:
                return []
            if parameters:
                found.append((group, parameters, [[self.state[p][k] for p in parameters] for k in ("exp_avg", "exp_avg_sq", "step")]))
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def build_dense_optimizer(parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW, fused: one pass over parameter, gradient and both moments instead of a dozen, on CPU and CUDA alike."""
    return AdamW(parameters, lr=lr, weight_decay=weight_decay)
