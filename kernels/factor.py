"""Factors of products in 8 bits: a matrix quantised along its rows now and along its columns later, each in one pass.

    y  = x w^T       rows of x, rows of w
    dx = dy w        rows of dy, columns of w
    dw = dy^T x      columns of dy, columns of x

`factor_rows` quantises `x (M, K)` along K and notes on the way what the other direction needs (`rest`) and, for a bias, the sums of its columns;
`factor_columns` quantises `x^T (K, M)` along M. Bytes per element of bf16: 3 for rows, 3 for columns, where apart they would be 3 and 5.

    scaling          scale along K covers     rest
    rowwise          a row                    (K,) fp32 largest magnitude of each column
    tensor_delayed   the tensor, of itself    () fp32 its scale
    block128         1 x 128                  nothing, (0,)

Scales and rounding are those of `kernels._fp8`, so both directions are `norm_quant.quantize` of the matrix and of its transpose bit by bit.
"""
from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import _fp8
from kernels.norm_quant import Quantized, Scaling, quantize

SCALINGS = ("rowwise", "tensor_delayed", "block128")
MULTIPLES = {"rowwise": 16, "tensor_delayed": 16, "block128": 128}


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """`quantized (M, K)` along K; `rest` for `factor_columns`; `sums (K,)` fp32 of the columns, empty where not asked for."""

    quantized: Quantized
    rest: Tensor
    sums: Tensor


def factor_rows(x: Tensor, scaling: Scaling, *, columns: bool = False, sums: bool = False) -> Factor:
    """Quantises `x (M, K)` along K. columns: `factor_columns` follows. Raises ValueError for another scaling."""
    _check(x, scaling)
    values, scales, rest, total = _operator("factor_rows", x)(x.detach(), scaling, columns, sums)
    return Factor(Quantized(values=values, scales=scales, scaling=scaling), rest, total)


def factor_columns(x: Tensor, scaling: Scaling, rest: Tensor | None = None) -> Quantized:
    """Quantises `x^T (K, M)` along M, completed by zeros to what the scaling's products need: `(K, M')`. `rest`: what `factor_rows` noted of x;
    without it x is read once more."""
    _check(x, scaling)
    values, scales = _operator("factor_columns", x)(x.detach(), scaling, rest)
    return Quantized(values=values, scales=scales, scaling=scaling)


def padded(num_rows: int, scaling: str) -> int:
    """The length of a contraction over `num_rows`; never 0, of which products know nothing."""
    return max(1, -(-num_rows // MULTIPLES[scaling])) * MULTIPLES[scaling]


def tensor_scale(x: Tensor) -> Tensor:
    """The fp32 scale of the tensor itself."""
    amax = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    return _fp8.fp32_scale(amax)[0]


def _check(x: Tensor, scaling: str) -> None:
    if scaling not in SCALINGS:
        raise ValueError(f"scaling: {scaling!r} is not one of {', '.join(SCALINGS)}")
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (M, K), got {tuple(x.shape)}")


def _rows_cpu(x: Tensor, scaling: str, columns: bool, sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.float().sum(0) if sums else x.new_empty(0, dtype=torch.float32)
    rest, scale = x.new_empty(0, dtype=torch.float32), None
    if scaling == "tensor_delayed":
        rest = scale = tensor_scale(x)
    elif scaling == "rowwise" and columns:
        rest = x.abs().amax(0).float() if len(x) else x.new_zeros(x.shape[1], dtype=torch.float32)
    made = quantize(x, scaling=scaling, scale=scale)  # type: ignore[arg-type]
    return made.values, made.scales.clone() if scaling == "tensor_delayed" else made.scales, rest, total


def _columns_cpu(x: Tensor, scaling: str, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    if rest is None and scaling == "tensor_delayed":
        rest = tensor_scale(x)
    turned = torch.nn.functional.pad(x, (0, 0, 0, padded(x.shape[0], scaling) - x.shape[0])).t().contiguous()
    made = quantize(turned, scaling=scaling, scale=rest if scaling == "tensor_delayed" else None)  # type: ignore[arg-type]
    return made.values, made.scales.clone() if scaling == "tensor_delayed" else made.scales


def _rows_fake(x: Tensor, scaling: str, columns: bool, sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, dim = x.shape
    shape = {"rowwise": (num_rows, 1), "tensor_delayed": (), "block128": (num_rows, dim // 128)}[scaling]
    rest = () if scaling == "tensor_delayed" else (dim,) if scaling == "rowwise" and columns else (0,)
    fp32 = dict(dtype=torch.float32)
    return (x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(shape, **fp32), x.new_empty(rest, **fp32),
            x.new_empty(dim if sums else 0, **fp32))


def _columns_fake(x: Tensor, scaling: str, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    length, dim = padded(x.shape[0], scaling), x.shape[1]
    shape = {"rowwise": (dim, 1), "tensor_delayed": (), "block128": (dim, length // 128)}[scaling]
    return x.new_empty((dim, length), dtype=torch.float8_e4m3fn), x.new_empty(shape, dtype=torch.float32)


def _operator(name: str, x: Tensor) -> Callable:
    """The operator, or for tensors on a GPU what it comes to: a linear layer calls four, and the dispatcher's way there costs as much as a launch."""
    if x.is_cuda and type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
        return _on_cuda(name)
    return getattr(torch.ops.planner_kernels, name)


@functools.cache
def _on_cuda(name: str) -> Callable:
    """The Triton function, imported on the first call."""
    return getattr(importlib.import_module("kernels._factor_triton"), name)


# Defined without the wrappers of `torch.library.custom_op`, whose host time small layers wait for.
_LIBRARY = torch.library.Library("planner_kernels", "FRAGMENT")
_LIBRARY.define("factor_rows(Tensor x, str scaling, bool columns, bool sums) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define("factor_columns(Tensor x, str scaling, Tensor? rest) -> (Tensor, Tensor)")
for _name, _cpu, _fake in (("factor_rows", _rows_cpu, _rows_fake), ("factor_columns", _columns_cpu, _columns_fake)):
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, functools.partial(lambda name, *args: _on_cuda(name)(*args), _name), "CUDA")
    torch.library.register_fake(f"planner_kernels::{_name}", _fake, lib=_LIBRARY)
