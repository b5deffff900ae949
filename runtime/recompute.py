"""A block's forward that runs again in backward, at little cost to the host.

`torch.utils.checkpoint` without reentrancy does the same with more bookkeeping a saved tensor, and with a policy it takes every operator of forward
and of the second run through Python: on an H200's host 4.4 ms for a block whose forward takes 1.6 ms (docs/results/fidelity-h200). Here hooks count
what autograd saves; the first one that backward asks for runs the forward again, up to the last tensor that was saved. What is to be kept of the
first run are products and attention, and those are where this code can stand without seeing operators: `nn.Linear` modules, and the operators that
`kernels` marks as costly.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.profiler import record_function

from kernels import keeping


class _Stop(Exception):
    """The last saved tensor is there again."""


class _Product(torch.autograd.Function):
    """`F.linear(x, weight, bias)` of `(T, D)`, whose output is kept by a tape or taken from it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return keeping.kept(F.linear, x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = grad.mm(weight) if ctx.needs_input_grad[0] else None
        return of_x, grad.t().mm(x), grad.sum(0) if ctx.has_bias else None


class _Run:
    """One forward: how many tensors autograd saved, and how to have them again. No reference to the output, whose graph refers to this."""

    __slots__ = ("again", "args", "count", "forward", "tape")

    def __init__(self, forward: Callable, args: tuple, tape: list | None) -> None:
        self.forward, self.args, self.tape = forward, args, tape
        self.count, self.again = 0, None

    def pack(self, _tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, index: int) -> Tensor:
        if self.again is None:
            self.again = self.run_again()
        found, self.again[index] = self.again[index], None
        if found is None:
            raise RuntimeError("a checkpointed block's backward runs once; keep its activations to run it twice")
        return found

    def run_again(self) -> list[Tensor | None]:
        found: list[Tensor | None] = []

        def pack(tensor: Tensor) -> int:
            found.append(tensor.detach() if tensor.requires_grad else tensor)  # offsets stay the object that maps are kept at
            if len(found) == self.count:
                raise _Stop
            return len(found) - 1

        args = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.requires_grad else a for a in self.args]
        with contextlib.suppress(_Stop), torch.enable_grad(), keeping.replay(self.tape), saved_tensors_hooks(pack, _never):
            self.forward(*args)
        self.args, self.tape = (), None
        if len(found) != self.count:
            raise RuntimeError(f"a block that ran again saved {len(found)} tensors, {self.count} the first time: not a function of its inputs")
        return found


def _never(_index: int) -> Tensor:
    raise AssertionError("backward through a recomputation")


def recompute_in_backward(block: nn.Module, *, keep_products: bool) -> None:
    """From now on backward of `block` runs its forward again, or what of it is no product of an `nn.Linear` and no attention. In place. Arguments of
    forward are positional; no random numbers are drawn."""
    if keep_products:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.forward = _product_of(module)
    inner: Callable[..., Any] = block.forward

    def forward(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args)
        tape = [] if keep_products else None
        run = _Run(_named(inner), args, tape)
        with keeping.record(tape), saved_tensors_hooks(run.pack, run.unpack):
            return inner(*args)

    block.forward = forward


def _product_of(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        return _Product.apply(x, weight, bias) if torch.is_grad_enabled() else F.linear(x, weight, bias)

    return forward


def _named(forward: Callable) -> Callable:
    """`forward`, by its name in a trace."""

    def again(*args: Any) -> Any:
        if not torch._C._autograd._profiler_enabled():
            return forward(*args)
        with record_function("recompute"):
            return forward(*args)

    return again
