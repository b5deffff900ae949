"""Saved activations in 8 or 4 bits: what autograd keeps of a 16-bit block is quantised when it is saved and restored when backward asks for it.

    quantized    e4m3 with an fp32 scale a row (the first dimension is the rows)
    quantized4   MX4: e2m1, two to a byte, with an E8M0 scale per 32 consecutive elements

Quantising a tensor and restoring it moves 6 bytes for one saved, so a block with LayerNorms over events takes less under `quantized`: norms and GELU
keep their input only, as rows, written in the pass that computes them; what they return, and the concatenation behind HSTU's attention, which linear
layers keep, is computed again from what is kept; the rest stays in 16 bits. Norms of one input share its rows.

Elsewhere every tensor of two or more dimensions in the block's compute dtype is quantised; statistics in fp32, indices and parameters stay. A tensor
that several operators save is kept once.
"""
from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.factor import factor_rows
from kernels.gate import gated_concat
from kernels.norm_quant import Quantized
from kernels.saved import (
    from_mx4,
    gelu_again,
    gelu_gradient,
    gelu_restore,
    gelu_rows,
    norm_gradient,
    norm_restore,
    norm_rows,
    restore_rows,
    to_mx4,
)
from runtime.model.hstu import HSTU
from runtime.model.norm import LayerNorm
from runtime.model.self_attention import TransformerBlock

QUANTIZED_POLICIES = ("quantized", "quantized4")


@dataclasses.dataclass(slots=True)
class _Packed:
    """One saved tensor: fp8 rows, or MX4 codes and scales."""

    shape: torch.Size
    dtype: torch.dtype
    fp8: Quantized | None = None
    mx4: tuple[Tensor, Tensor] | None = None
    restored: weakref.ref | None = None  # the storage that views of it share

    def restore(self) -> Tensor:
        if self.fp8 is not None:
            return restore_rows(self.fp8.values, self.fp8.scales, self.dtype).view(self.shape)
        assert self.mx4 is not None
        return from_mx4(*self.mx4, self.shape.numel(), self.dtype).view(self.shape)


@dataclasses.dataclass(slots=True)
class _View:
    """A saved tensor that is columns of a packed one, as a query is of the product that gives queries, keys and values: all are restored at once, for
    the first of them that is asked for."""

    whole: _Packed
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        storage = None if self.whole.restored is None else self.whole.restored()
        if storage is None:
            storage = self.whole.restore().untyped_storage()
            self.whole.restored = weakref.ref(storage)
        return torch.empty(0, dtype=self.whole.dtype, device=storage.device).set_(storage, self.offset, self.shape, self.stride)


def _rows_of(tensor: Tensor) -> Tensor | None:
    """The whole matrix, by rows, that `tensor` is columns of; None where it is none or all of one."""
    if tensor.is_contiguous() or not tensor.stride(0):
        return None
    count, width = tensor.shape[0], tensor.stride(0)
    if count * width * tensor.element_size() != tensor.untyped_storage().nbytes() or max(tensor.stride()) != width:
        return None
    return tensor.as_strided((count, width), (width, 1), 0)


class _Gelu8(torch.autograd.Function):
    """GELU that keeps its input as e4m3 rows. Returns (output, values, scales)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, values, scales = gelu_rows(x)
        ctx.mark_non_differentiable(values, scales)
        ctx.set_materialize_grads(False)  # those of the rows would be written for nothing
        ctx.rows = values, scales  # not by save_for_backward: hooks would be asked for them
        return out, values, scales

    @staticmethod
    def backward(ctx, grad: Tensor, _values: None, _scales: None) -> Tensor:
        return gelu_gradient(*ctx.rows, grad)


class _GeluLinear8(torch.autograd.Function):
    """`F.linear(GELU(x), weight, bias)` of `x (T, D)`, which is kept as e4m3 rows: in backward one pass gives GELU's output again and its
    gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out, *ctx.rows = gelu_rows(x)
        ctx.save_for_backward(weight)
        ctx.has_bias = bias is not None
        return F.linear(out, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        dx = grad @ ctx.saved_tensors[0]
        out = gelu_again(*ctx.rows, dx)  # dx is GELU's from here on
        return dx, grad.t() @ out, grad.sum(0) if ctx.has_bias else None


@dataclasses.dataclass(slots=True)
class _NormKept:
    """What a LayerNorm keeps: its parameters, the rows of its input, which may be given, and their statistics."""

    weight: Tensor
    bias: Tensor
    rows: tuple[Tensor, Tensor] | None
    mean: Tensor | None = None
    rstd: Tensor | None = None

    def restore(self, dtype: torch.dtype) -> Tensor:
        """The norm's output."""
        return norm_restore(*self.rows, self.weight, self.bias, mean=self.mean, rstd=self.rstd, dtype=dtype)  # type: ignore[misc, arg-type]


class _Norm8(torch.autograd.Function):
    """LayerNorm that keeps its input as e4m3 rows; fills `kept`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float, kept: _NormKept) -> Tensor:
        out, values, scales, kept.mean, kept.rstd = norm_rows(x, weight, bias, eps=eps, keep="input" if kept.rows is None else "nothing")
        if kept.rows is None:
            kept.rows = values, scales
        ctx.kept = kept
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        kept = ctx.kept
        return *norm_gradient(*kept.rows, grad.contiguous(), kept.weight, mean=kept.mean, rstd=kept.rstd), None, None


class _SharedRows:
    """The rows of tensors that live, for the next norm of the same one: a history's summary and a cross block norm what its last block returned."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, int, tuple[Tensor, Tensor]]] = {}

    def of(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        found = self._known.get(x.untyped_storage()._cdata)
        return found[2] if found is not None and found[0]() is not None and found[1] == x._version and found[2][0].shape == x.shape else None

    def note(self, x: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        storage = x.untyped_storage()
        if x.is_contiguous() and x.nbytes == storage.nbytes():
            key = storage._cdata
            self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key, None)), x._version, rows


_shared = _SharedRows()


@dataclasses.dataclass(slots=True)
class _Again:
    """A saved tensor that is computed again."""

    shape: torch.Size
    run: Callable[[], Tensor]

    def restore(self) -> Tensor:
        return self.run().view(self.shape)


class _Recomputing:
    """Pack and unpack for one forward of a block: what its norms, its GELU and its gate return is computed again."""

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

    def norm(self, module: nn.LayerNorm, x: Tensor) -> Tensor:
        """`module`'s parameters are looked up now; those of this call hold for what is computed again."""
        kept = _NormKept(module.weight.detach(), module.bias.detach(), _shared.of(x))
        given = kept.rows is not None
        out = _Norm8.apply(x, module.weight, module.bias, module.eps, kept)
        if not given:
            _shared.note(x, kept.rows)  # type: ignore[arg-type]
        return self.note(out, functools.partial(kept.restore, x.dtype))

    def gate(self, block: HSTU, u: Tensor, a: Tensor) -> Tensor:
        norm = block.attention_norm
        given = u.detach(), a.detach(), norm.weight.detach(), norm.bias.detach()

        @torch.no_grad()
        def again() -> Tensor:
            return gated_concat(*given, eps=norm.eps)

        return self.note(gated_concat(u, a, norm.weight, norm.bias, eps=norm.eps), again)


class _Hooks:
    """Pack and unpack for one forward of a block whose parameters have storages `kept`."""

    def __init__(self, policy: str, dtype: torch.dtype, kept: set[int]) -> None:
        self.policy, self.dtype, self.kept = policy, dtype, kept
        self.seen: dict[tuple, tuple[weakref.ref, _Packed]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Packed | _View:
        if tensor.dtype != self.dtype or tensor.dim() < 2 or tensor.numel() == 0 or tensor.untyped_storage()._cdata in self.kept:
            return tensor
        tensor = tensor.detach()
        whole = _rows_of(tensor)
        if whole is not None:
            return _View(self.packed(whole), tensor.shape, tensor.stride(), tensor.storage_offset())
        return dataclasses.replace(self.packed(tensor), shape=tensor.shape)

    def packed(self, tensor: Tensor) -> _Packed:
        storage = tensor.untyped_storage()
        # views of one contiguous tensor with equal rows are one tensor: (T, H, d) for attention, (T, H d) for a linear layer
        layout = (tensor.shape[0], tensor.numel()) if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        key = (storage._cdata, tensor.storage_offset(), tensor._version, *layout)
        known = self.seen.get(key)
        if known is None or known[0]() is None:
            known = self.seen[key] = weakref.ref(storage), self.quantise(tensor)
        return known[1]

    def quantise(self, tensor: Tensor) -> _Packed:
        if self.policy == "quantized4":
            return _Packed(tensor.shape, tensor.dtype, mx4=to_mx4(tensor))
        return _Packed(tensor.shape, tensor.dtype, fp8=factor_rows(tensor.reshape(tensor.shape[0], -1), "rowwise").quantized)

    @staticmethod
    def unpack(packed: Tensor | _Packed | _View) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.restore()


def quantize_saved(block: nn.Module, policy: str, dtype: torch.dtype) -> None:
    """From now on autograd keeps `block`'s activations quantised. In place, inside of what casts or gathers its parameters.

    Raises ValueError for another policy, and for a block that computes in fp32, whose statistics could not be told from activations.
    """
    if policy not in QUANTIZED_POLICIES:
        raise ValueError(f"checkpoint policy {policy!r} is not one of {', '.join(QUANTIZED_POLICIES)}")
    if dtype == torch.float32:
        raise ValueError(f"checkpoint policy {policy!r}: activations are quantised from 16 bits; give the region a 16-bit or lower precision")
    if policy == "quantized" and any(isinstance(part, LayerNorm) for part in block.modules()):
        return _compute_again(block)
    inner: Callable[..., Any] = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hooks = _Hooks(policy, dtype, {p.untyped_storage()._cdata for p in block.parameters()})
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return inner(*args, **kwargs)

    block.forward = forward


def _itself(x: Tensor) -> Tensor:
    return x


def _gelu_linear(module: nn.Linear, x: Tensor) -> Tensor:
    return _GeluLinear8.apply(x, module.weight, module.bias)


def _compute_again(block: nn.Module) -> None:
    inner: Callable[..., Any] = block.forward
    parts = list(block.modules())
    norms = [part for part in parts if isinstance(part, LayerNorm)]
    gelus = [part for part in parts if isinstance(part, TransformerBlock) and part.has_mlp]
    gates = [part for part in parts if isinstance(part, HSTU)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        hooks = _Recomputing()
        for part in gelus:
            if type(part.down) is nn.Linear:
                part.gelu.forward, part.down.forward = _itself, functools.partial(_gelu_linear, part.down)
            else:
                part.gelu.forward = hooks.gelu
        for norm in norms:
            norm.forward = functools.partial(hooks.norm, norm)
        for gate in gates:
            gate.gate = functools.partial(hooks.gate, gate)
        try:
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                return inner(*args, **kwargs)
        finally:
            hooks.known.clear()  # the modules keep `hooks`, which would keep the rows until the next step

    block.forward = forward
