"""Saved activations in 8 or 4 bits: what autograd keeps of a 16-bit block is quantised when it is saved and restored when backward asks for it.

    quantized    e4m3 with an fp32 scale a row (the first dimension is the rows)
    quantized4   MX4: e2m1, two to a byte, with an E8M0 scale per 32 consecutive elements

Only tensors of two or more dimensions in the block's compute dtype are; statistics in fp32, indices and parameters stay. A tensor that
several operators save is kept once.
"""
from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.factor import factor_rows
from kernels.norm_quant import Quantized
from kernels.saved import from_mx4, restore_rows, to_mx4

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
    inner: Callable[..., Any] = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hooks = _Hooks(policy, dtype, {p.untyped_storage()._cdata for p in block.parameters()})
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return inner(*args, **kwargs)

    block.forward = forward
