"""Operators and their gradients without what `torch.library` adds to each call.

An operator's registered formula is what tracing and selective checkpointing rely on, but its eager path looks every argument up in the schema
again: with the 16 arguments of attention that took 0.3 ms of a call's 0.5 ms on a CPU core. Outside a trace the same two functions run as a plain
autograd.Function around the operator, which policies over operators still see. Where nobody looks at operators, no trace, mode or profiler, the
function behind one is called in its place (`direct`): dispatch, schema and the check for aliases take 20 us.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import keeping

# the compiler's callback for Python frames, None where none is set; releases before it had a name are not asked
_looking_into_frames = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
_PLAIN = (Tensor, torch.nn.Parameter)
_cuda: dict[str, tuple[str, str]] = {}  # operator -> (module, function) of its CUDA kernel


def register_cuda(op: Any, module: str, function: str) -> None:
    """Make `module.function` the CUDA kernel of a custom op; the module, and Triton with it, is imported on the first CUDA call."""
    _cuda[op._qualname] = module, function

    @op.register_kernel("cuda")
    def _(*args: Any) -> Any:
        return _on_cuda(op._qualname)(*args)


@functools.cache
def _on_cuda(name: str) -> Callable:
    module, function = _cuda[name]
    return getattr(importlib.import_module(module), function)


def observed() -> bool:
    """Whether something watches or changes what operators do: a trace, a compiler that looks into frames, a mode over operators, a profiler."""
    return (torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack()) or torch._C._autograd._profiler_enabled()
            or _looking_into_frames() is not None)


def direct(op: Any) -> Callable:
    """The custom operator `op` for callers that give all arguments by position, a tensor first, and need no gradient of it."""
    overload, name, own = op._opoverload, op._qualname, op._init_fn

    def call(*inputs: Any) -> Any:
        first = inputs[0]
        if type(first) not in _PLAIN or observed():
            return overload(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return (_on_cuda(name) if first.is_cuda and name in _cuda else own)(*inputs)

    return call


def differentiable(op: Any, backward: Callable, *, setup_context: Callable, costly: bool = False) -> Callable:
    """Registers the formula with the custom operator `op`, and returns `op` for callers: arguments by position, all of them given. costly: what
    `kernels.keeping` keeps."""
    op.register_autograd(backward, setup_context=setup_context)
    overload, plain = op._opoverload, direct(op)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = keeping.kept(plain, *inputs) if costly else plain(*inputs)
            ctx.set_materialize_grads(False)
            ctx.num_inputs = len(inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return (None,) * ctx.num_inputs if all(g is None for g in grads) else backward(ctx, *grads)

    Eager.__name__ = Eager.__qualname__ = overload._schema.name.split("::")[-1].title().replace("_", "")

    def call(*inputs):
        if torch.compiler.is_compiling():
            return overload(*inputs)
        return Eager.apply(*inputs) if torch.is_grad_enabled() else plain(*inputs)

    return call
