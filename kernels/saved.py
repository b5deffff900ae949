"""Formats in which activations wait for backward: e4m3 rows back to 16 bits, and MX4 both ways, each in one pass.

    rows    values e4m3 `(T, D)` times scales fp32 `(T, 1)`, rounded once to the dtype asked for
    MX4     e2m1, two to a byte, with an E8M0 scale per 32 consecutive elements: `(ceil(n / 32) * 16,)` and `(ceil(n / 32),)` uint8
"""
from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from kernels import _fp8

MX4_BLOCK = 32
MX4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX4_EXPONENT = 2  # 6 = 1.5 x 2^2


def restore_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`values (T, D)` e4m3 times `scales (T, 1)` in `dtype`."""
    return torch.ops.planner_kernels.restore_rows(values, scales, dtype)


def to_mx4(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of the elements of `x` in order, completed by zeros to blocks of 32. The scale is the OCP rule's,
    2^(floor(log2 amax) - 2); magnitudes above 6 saturate, midpoints go to the smaller magnitude. Exact for `x` of 16 bits."""
    return torch.ops.planner_kernels.to_mx4(x.detach())


def from_mx4(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The first `numel` elements, rounded once to `dtype`."""
    return torch.ops.planner_kernels.from_mx4(codes, scales, numel, dtype)


def _restore_rows_cpu(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (_fp8.from_e4m3(values) * scales).to(dtype)


def _to_mx4_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.float().flatten()
    if missing := -flat.numel() % MX4_BLOCK:
        flat = torch.nn.functional.pad(flat, (0, missing))
    flat = flat.view(-1, MX4_BLOCK)
    sizes = flat.abs()
    amax = sizes.amax(1)
    exponent = (amax.contiguous().view(torch.int32) >> 23) - MX4_EXPONENT
    scales = torch.where(amax.isfinite(), exponent.clamp(min=1), _fp8.E8M0_NAN).to(torch.uint8)
    sizes = sizes.div_(_fp8.e8m0_scale(scales).unsqueeze(1))
    # a magnitude's code is piecewise linear and concave: 2 a up to 2, a + 2 up to 4, a / 2 + 4 beyond
    places = torch.minimum(torch.minimum(sizes * 2, sizes + 2), sizes * 0.5 + 4)
    codes = places.sub_(0.5).ceil_().clamp_(max=7.0).nan_to_num_().to(torch.uint8) | (flat < 0).to(torch.uint8) << 3
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4, scales


def _from_mx4_cpu(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    values = _mx4_pairs().index_select(0, codes.int()).view(-1, MX4_BLOCK)
    return values.mul_(_fp8.e8m0_scale(scales).unsqueeze(1)).flatten()[:numel].to(dtype)


@functools.cache
def _mx4_pairs() -> Tensor:
    """Both values of every byte of codes, `(256, 2)` fp32."""
    levels, byte = torch.tensor([*MX4_LEVELS, *(-v for v in MX4_LEVELS)]), torch.arange(256)
    return torch.stack([levels[byte & 15], levels[byte >> 4]], dim=1)


def _to_mx4_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = -(-x.numel() // MX4_BLOCK)
    return x.new_empty(blocks * MX4_BLOCK // 2, dtype=torch.uint8), x.new_empty(blocks, dtype=torch.uint8)


def _on_cuda(name: str):
    return lambda *args: getattr(importlib.import_module("kernels._saved_triton"), name)(*args)


# As in `kernels.factor`: called once or twice for every saved tensor, so without the wrappers of `torch.library.custom_op`.
_LIBRARY = torch.library.Library("planner_kernels", "FRAGMENT")
_LIBRARY.define("restore_rows(Tensor values, Tensor scales, ScalarType dtype) -> Tensor")
_LIBRARY.define("to_mx4(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.define("from_mx4(Tensor codes, Tensor scales, int numel, ScalarType dtype) -> Tensor")
for _name, _cpu, _fake in (
        ("restore_rows", _restore_rows_cpu, lambda values, scales, dtype: values.new_empty(values.shape, dtype=dtype)),
        ("to_mx4", _to_mx4_cpu, _to_mx4_fake), ("from_mx4", _from_mx4_cpu, lambda codes, scales, numel, dtype: codes.new_empty(numel, dtype=dtype))):
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _on_cuda(_name), "CUDA")
    torch.library.register_fake(f"planner_kernels::{_name}", _fake, lib=_LIBRARY)
