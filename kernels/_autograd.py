"""Gradients of the package's operators without what `torch.library` adds to each call.

An operator's registered formula is what tracing and selective checkpointing rely on, but its eager path looks every argument up in the schema
again: with the 16 arguments of attention that took 0.3 ms of a call's 0.5 ms on a CPU core. Outside a trace the same two functions run as a plain
autograd.Function around the operator, which policies over operators still see.
"""

from collections.abc import Callable
from typing import Any

import torch


def differentiable(op: Any, backward: Callable, *, setup_context: Callable) -> Callable:
    """Registers the formula with the custom operator `op`, and returns `op` for callers: arguments by position, all of them given."""
    op.register_autograd(backward, setup_context=setup_context)
    overload = op._opoverload

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = overload(*inputs)
            ctx.set_materialize_grads(False)
            ctx.num_inputs = len(inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return (None,) * ctx.num_inputs if all(g is None for g in grads) else backward(ctx, *grads)

    Eager.__name__ = Eager.__qualname__ = overload._schema.name.split("::")[-1].title().replace("_", "")

    def call(*inputs):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return overload(*inputs)
        return Eager.apply(*inputs)

    return call
