"""Activation checkpointing of single blocks, by policy.

    none        everything that autograd saves stays until backward
    selective   outputs of matrix products and attention stay; norms, activations and copies run again
    full        only the block's inputs stay; the whole forward runs again

`quantized` and `quantized4` keep everything in fewer bits: `runtime.precision.saved`.
"""
from __future__ import annotations

import contextlib
import functools

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels  # noqa: F401 - registers the operators named below
import runtime.precision.linear  # noqa: F401 - registers the product below 16 bits
from costmodel.plan import Checkpoint
from runtime.model.hstu import HSTU
from runtime.model.llama import Llama
from runtime.model.masknet import MaskNet
from runtime.model.pyramid import Pyramid
from runtime.model.self_attention import TransformerBlock
from runtime.recompute import recompute_in_backward

EXECUTABLE = ("none", "selective", "full")
_LAYERS = (TransformerBlock, HSTU, Llama, MaskNet, Pyramid)


def _saved_operators() -> frozenset:
    aten, own = torch.ops.aten, torch.ops.planner_kernels
    return frozenset({
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
        own.attention_forward.default, own.block_attention_forward.default, own.fp8_attention_forward.default,
        torch.ops.planner_runtime.low_precision_product.default, torch.ops.planner_runtime.low_precision_linear.default,
    })


def _policy(saved: frozenset, _context, operator, *_args, **_kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE


def apply_checkpointing(block: nn.Module, policy: Checkpoint, *, compiled: bool = False) -> None:
    """Replaces `block.forward` in place. `compiled`: the result is compiled, which takes the library's contexts only; a recomputation then has no
    name in traces. Raises ValueError for a policy that is not executable."""
    if policy not in EXECUTABLE:
        raise ValueError(f"checkpoint policy {policy!r} is not executable; the runtime has {', '.join(EXECUTABLE)}")
    if policy == "none":
        return
    if not compiled and (policy == "full" or _products_are_modules(block)):
        recompute_in_backward(block, keep_products=policy == "selective")
        return
    contexts = _no_contexts
    if policy == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, _saved_operators()))
    options = {"context_fn": functools.partial(_annotated, contexts)}
    if compiled:
        options = {} if policy == "full" else {"context_fn": contexts}
    # no block draws random numbers, so the generator's state need not be kept
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)


def _products_are_modules(block: nn.Module) -> bool:
    """Whether all of its products are of `nn.Linear` modules in 16 bits or more, and attention; other blocks are seen operator by operator."""
    return isinstance(block, _LAYERS) and all(type(m) is nn.Linear for m in block.modules() if isinstance(m, nn.Linear))


def _no_contexts():
    return contextlib.nullcontext(), contextlib.nullcontext()


def _annotated(contexts):
    """(context of the forward, context of the recomputation), the second one named for traces."""
    forward, again = contexts()
    return forward, _Recompute(again)


class _Recompute(contextlib.ExitStack):
    """`recompute` around another context."""

    def __init__(self, inner: contextlib.AbstractContextManager) -> None:
        super().__init__()
        self._inner = inner

    def __enter__(self) -> _Recompute:
        self.enter_context(record_function("recompute"))
        self.enter_context(self._inner)
        return self
