"""Saved activations in 8 or 4 bits: what autograd keeps of a 16-bit block is quantised when it is saved and restored when backward asks for it.

    quantized    e4m3 with an fp32 scale a row (the first dimension is the rows)
    quantized4   MX4: e2m1, two to a byte, with an E8M0 scale per 32 consecutive elements

A feed-forward part (LayerNorm, Linear, GELU, Linear) under `quantized` takes less: of GELU only the input is kept, as rows, written in the pass that
computes it; GELU's output and the norms' outputs, which linear layers keep, are computed again; what else the block keeps stays in 16 bits. Bytes
moved for one byte saved: 1 to 2, where quantising and restoring a tensor takes 6.

Elsewhere only tensors of two or more dimensions in the block's compute dtype are; statistics in fp32, indices and parameters stay. A tensor that
several operators save is kept once.
"""
from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.factor import factor_rows
from kernels.norm_quant import Quantized
from kernels.saved import from_mx4, gelu_gradient, gelu_restore, gelu_rows, restore_rows, to_mx4
from runtime.model.self_attention import TransformerBlock

QUANTIZED_POLICIES = ("quantized", "quantized4")


@dataclasses.dataclass(slots=True)
class _Packed:
    """One saved tensor: fp8 rows, or MX4 codes and scales."""

    shape: torch.Size
    dtype: torch.dtype
    fp8: Quantized | None = None
    mx4: tuple[Tensor, Tensor] | None = None

    def restore(self) -> Tensor:
        if self.fp8 is not None:
            return restore_rows(self.fp8.values, self.fp8.scales, self.dtype).view(self.shape)
        assert self.mx4 is not None
        return from_mx4(*self.mx4, self.shape.numel(), self.dtype).view(self.shape)


class _Gelu8(torch.autograd.Function):
    """GELU that keeps its input as e4m3 rows. Returns (output, values, scales)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, values, scales = gelu_rows(x)
        ctx.mark_non_differentiable(values, scales)
        ctx.rows = values, scales  # not by save_for_backward: hooks would be asked for them
        return out, values, scales

    @staticmethod
    def backward(ctx, grad: Tensor, _values: None, _scales: None) -> Tensor:
        return gelu_gradient(*ctx.rows, grad)


@dataclasses.dataclass(slots=True)
class _Again:
    """A saved tensor that is computed again."""

    shape: torch.Size
    run: Callable[[], Tensor]

    def restore(self) -> Tensor:
        return self.run().view(self.shape)


class _FeedForward:
    """Pack and unpack for one forward of a block with a feed-forward part: what its norms and its GELU return is computed again."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref, Callable[[], Tensor]]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Again:
        storage = tensor.untyped_storage()
        known = self.known.get(storage._cdata)
        if known is None or known[0]() is None or not tensor.is_contiguous() or tensor.nbytes != storage.nbytes():
            return tensor
        return _Again(tensor.shape, known[1])

    @staticmethod
    def unpack(packed: Tensor | _Again) -> Tensor:
        return packed.restore() if isinstance(packed, _Again) else packed

    def note(self, out: Tensor, again: Callable[[], Tensor]) -> Tensor:
        storage = out.untyped_storage()
        self.known[storage._cdata] = weakref.ref(storage), again
        return out

    def gelu(self, x: Tensor) -> Tensor:
        out, values, scales = _Gelu8.apply(x)
        return self.note(out, functools.partial(gelu_restore, values, scales, x.dtype))

    def norm(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`forward`: a norm's own, which looks its parameters up when it is called; those of the first call hold for the second."""
        module = forward.__self__  # type: ignore[attr-defined]
        weight, bias = module.weight, module.bias

        @torch.no_grad()
        def again() -> Tensor:
            kept = module._parameters["weight"], module._parameters["bias"]
            module._parameters["weight"], module._parameters["bias"] = weight, bias
            try:
                return forward(x)
            finally:
                module._parameters["weight"], module._parameters["bias"] = kept

        return self.note(forward(x), again)


class _Hooks:
    """Pack and unpack for one forward of a block whose parameters have storages `kept`."""

    def __init__(self, policy: str, dtype: torch.dtype, kept: set[int]) -> None:
        self.policy, self.dtype, self.kept = policy, dtype, kept
        self.seen: dict[tuple, tuple[weakref.ref, _Packed]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        if tensor.dtype != self.dtype or tensor.dim() < 2 or tensor.numel() == 0 or tensor.untyped_storage()._cdata in self.kept:
            return tensor
        storage = tensor.untyped_storage()
        # views of one contiguous tensor with equal rows are one tensor: (T, H, d) for attention, (T, H d) for a linear layer
        layout = (tensor.shape[0], tensor.numel()) if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        key = (storage._cdata, tensor.storage_offset(), tensor._version, *layout)
        known = self.seen.get(key)
        if known is not None and known[0]() is not None:
            return dataclasses.replace(known[1], shape=tensor.shape)
        packed = self.quantise(tensor.detach())
        self.seen[key] = weakref.ref(storage), packed
        return packed

    def quantise(self, tensor: Tensor) -> _Packed:
        if self.policy == "quantized4":
            return _Packed(tensor.shape, tensor.dtype, mx4=to_mx4(tensor))
        return _Packed(tensor.shape, tensor.dtype, fp8=factor_rows(tensor.reshape(tensor.shape[0], -1), "rowwise").quantized)

    @staticmethod
    def unpack(packed: Tensor | _Packed) -> Tensor:
        return packed.restore() if isinstance(packed, _Packed) else packed


def quantize_saved(block: nn.Module, policy: str, dtype: torch.dtype) -> None:
    """From now on autograd keeps `block`'s activations quantised. In place, inside of what casts or gathers its parameters.

    Raises ValueError for another policy, and for a block that computes in fp32, whose statistics could not be told from activations.
    """
    if policy not in QUANTIZED_POLICIES:
        raise ValueError(f"checkpoint policy {policy!r} is not one of {', '.join(QUANTIZED_POLICIES)}")
    if dtype == torch.float32:
        raise ValueError(f"checkpoint policy {policy!r}: activations are quantised from 16 bits; give the region a 16-bit or lower precision")
    if policy == "quantized":
        for part in block.modules():
            if isinstance(part, TransformerBlock) and part.has_mlp:
                _keep_feed_forward(part)
        if isinstance(block, TransformerBlock) and block.has_mlp:
            return
    inner: Callable[..., Any] = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hooks = _Hooks(policy, dtype, {p.untyped_storage()._cdata for p in block.parameters()})
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return inner(*args, **kwargs)

    block.forward = forward


def _keep_feed_forward(block: TransformerBlock) -> None:
    inner: Callable[..., Any] = block.forward
    norms = [(module, module.forward) for module in block.modules() if isinstance(module, nn.LayerNorm)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        hooks = _FeedForward()
        block.gelu.forward = hooks.gelu
        for norm, own in norms:
            norm.forward = functools.partial(hooks.norm, own)
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return inner(*args, **kwargs)

    block.forward = forward
