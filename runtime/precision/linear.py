"""Linear layers in 8 bits: forward and the input's gradient, and on request the weights' gradient too.

    y  = Q(x) Q(w)^T + b          contraction over k
    dx = Q(dy) Q(w^T)^T           contraction over n
    dw = dy^T x                   in the layer's own dtype, or Q(dy^T) Q(x^T)^T with `low_weight_gradients`

Q quantises along the contraction with the scales of the precision (costmodel.precision has the table, kernels._fp8 the rounding). A square of 32 x 32
scales is the same for w and w^T. Where the device multiplies the format itself, `torch._scaled_mm` does; elsewhere both factors are restored
and multiplied: the products are then exact in fp32, which also accumulates.

Without the options below a layer is one operator forward and one backward over the kernels of `kernels.factor`: x and dy are read once where
only rows are needed, twice where columns are too; the bias' gradient comes out of the pass that quantises dy; the bias is added in the product.

Recipe: `stochastic_rounding` rounds gradients stochastically (a seed a call), `hadamard` turns both factors by one randomised Hadamard transform
along the contraction, `static_scales` keeps the tensor-wise scales of a layer's first step (no pass for maxima any more; what grows beyond
saturates), `outliers` multiplies the columns of x with the largest magnitudes, 1 % of them, in the layer's own dtype beside the rest.
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.plan import RecipeOption
from costmodel.precision import LOW_PRECISIONS, unfit
from kernels import _fp8
from kernels.factor import factor_columns, factor_rows, tensor_scale
from kernels.norm_quant import HADAMARD_BLOCK, Quantized, quantize

OUTLIER_SHARE = 0.01
# Below it rows are completed to a multiple of 16: cuBLAS has no row-wise kernel for 6 [Measured: torch 2.11, CUDA 13.0], but for any large number.
FEW_ROWS = 4096
HADAMARD_SEED = 29
SCALINGS = {"fp8_tensor": ("tensor_delayed", "tensor_delayed"), "fp8_row": ("rowwise", "rowwise"), "fp8_block": ("block128", "block128"),
             "mxfp8": ("mxfp8_1x32", "mxfp8_32x32")}
_calls = itertools.count(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """An 8-bit precision with its options; `native`: the device multiplies it."""

    precision: str
    native: bool
    options: tuple[RecipeOption, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether the layer is one operator a direction."""
        return self.precision != "mxfp8" and set(self.options) <= {"low_weight_gradients", "fp8_attention"}

    def __contains__(self, option: str) -> bool:
        return option in self.options


def runs_natively(precision: str, device: torch.device) -> bool:
    """Whether `torch._scaled_mm` multiplies this format on `device` at the device's own speed: on CUDA from compute capability 8.9, blocks on 9.0,
    MX formats from 10.0. On CPUs torch 2.13 multiplies row-wise fp8 no faster than fp32 and tensor-wise fp8 a hundred times slower."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    if precision == "fp8_block":
        return capability == (9, 0)
    return capability >= ((10, 0) if precision == "mxfp8" else (8, 9))


def quantize_factor(x: Tensor, scaling: str, *, seed: int | None = None, hadamard: bool = False, scale: Tensor | None = None) -> Quantized:
    """`x (M, K)` with scales along K. A tensor-wise scale is that of the tensor itself unless given."""
    if scaling == "tensor_delayed" and scale is None:
        scale = tensor_scale(x)
    return quantize(x, scaling=scaling, scale=scale, hadamard=hadamard, hadamard_seed=HADAMARD_SEED, stochastic_rounding_seed=seed)  # type: ignore[arg-type]


def product(a: Quantized, b: Quantized, *, native: bool, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """`a (M, K)` times `b (N, K)` transposed, `(M, N)` in `dtype`, accumulated in fp32; plus `bias (N,)`."""
    if native and a.values.numel():
        return _scaled_mm(a, b, dtype, bias)
    if a.values.is_cuda and a.scaling.startswith("mxfp8"):  # e4m3 times a power of two is exact in bf16
        out = (a.dequantize().bfloat16() @ b.dequantize().bfloat16().t()).to(dtype)
    elif a.scaling in ("rowwise", "tensor_delayed"):  # scales are restored behind the product, as the device does
        out = _fp8.from_e4m3(a.values) @ _fp8.from_e4m3(b.values).t()
        out = (out * a.scales * b.scales.reshape(1, -1)).to(dtype)
    else:
        out = (a.dequantize() @ b.dequantize().t()).to(dtype)
    return out if bias is None else out + bias


def _scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Accumulated by the tensor cores alone: promoting sums to fp32 now and then costs a fifth of the rate, and what it adds is far below what three
    mantissa bits lose (docs/results/precision-h200.md). Blocks are promoted anyway."""
    values, scales_a, scales_b, blocks = a.values, a.scales, b.scales, a.scaling == "block128"
    num_rows = values.shape[0]
    missing = -num_rows % 16 if blocks or num_rows < FEW_ROWS else 0
    if missing:
        values = torch.nn.functional.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)
        scales_a = torch.nn.functional.pad(scales_a, (0, 0, 0, missing)) if scales_a.dim() else scales_a
    if blocks:  # cuBLAS wants both scales with the rows adjacent
        scales_a, scales_b = scales_a.t().contiguous().t(), scales_b.t().contiguous().t()
    out_dtype = torch.bfloat16 if dtype == torch.float32 and a.scaling == "rowwise" else dtype  # row scales come out in bf16 only
    added = bias if bias is not None and out_dtype == dtype == bias.dtype == torch.bfloat16 and not blocks else None
    out = _supported(values, b.values, scales_a, scales_b.t() if scales_b.dim() else scales_b, added, out_dtype=out_dtype, use_fast_accum=not blocks)
    if out.shape[0] != num_rows or out_dtype != dtype:
        out = out[:num_rows].to(dtype)
    return out if bias is None or added is not None else out + bias


_ways: dict[tuple, int] = {}  # shape -> the first way that cuBLAS has a kernel for
WHOLE = 128


def _supported(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """`a (M, K) b (N, K)^T + bias` the first way that cuBLAS has a kernel for: as it is, with the bias apart, or completed by zeros to whole tiles
    too, `(M', N)` then [Measured: of 6 samples' bottom tower, completed to 16, it had none: CUBLAS_STATUS_NOT_SUPPORTED, torch 2.11, CUDA 13.0]."""
    shape = (*a.shape, *b.shape, scales_a.dim(), bias is not None)
    for way in range(_ways.get(shape, 0), 3):
        if way == 2:
            rows, width = -a.shape[0] % WHOLE, -a.shape[1] % WHOLE
            a, b = (torch.nn.functional.pad(t.view(torch.uint8), (0, width, 0, more)).view(t.dtype) for t, more in ((a, rows), (b, 0)))
            scales_a = torch.nn.functional.pad(scales_a, (0, 0, 0, rows)) if scales_a.numel() > 1 else scales_a
        try:
            out = torch._scaled_mm(a, b.t(), scale_a=scales_a, scale_b=scales_b, bias=bias if way == 0 else None, **options)
        except RuntimeError as error:
            if way == 2 or "NOT_SUPPORTED" not in str(error) or options["use_fast_accum"] is False:
                raise
            continue
        _ways[shape] = way
        return out if way == 0 or bias is None else out + bias
    raise AssertionError


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str, native: bool, columns: bool, given: Quantized | None = None
            ) -> tuple[Tensor, Tensor]:
    """`x (M, K)`, `weight (N, K)` -> `(M, N)` in x's dtype, and what `factor_columns` needs of x where `columns` are to follow. given: x along K."""
    scaling = SCALINGS[precision][0]
    if given is not None and not columns:
        return product(given, factor_rows(weight, scaling).quantized, native=native, dtype=x.dtype, bias=bias), x.new_empty(0)
    factor = factor_rows(x, scaling, columns=columns)
    out = product(factor.quantized, factor_rows(weight, scaling).quantized, native=native, dtype=x.dtype, bias=bias)
    return out, factor.rest if columns or not factor.rest.numel() else factor.rest.new_empty(0)


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, rest: Tensor, precision: str, native: bool, low: bool, need: Sequence[bool]
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias), empty where not needed. low: the weights' in 8 bits, with `rest` of x."""
    scaling = SCALINGS[precision][0]
    none, low = grad.new_empty(0), low and need[1]
    if not (need[0] or low):
        return none, grad.t() @ x if need[1] else none, grad.sum(0) if need[2] else none
    factor = factor_rows(grad, scaling, columns=low, sums=need[2])
    dx = dw = none
    if need[0]:
        dx = product(factor.quantized, factor_columns(weight, scaling), native=native, dtype=grad.dtype)
    if low:
        dw = product(factor_columns(grad, scaling, factor.rest), factor_columns(x, scaling, rest), native=native, dtype=grad.dtype)
    elif need[1]:
        dw = grad.t() @ x
    return dx, dw, factor.sums.to(grad.dtype)


def _linear_fake(x, weight, bias, precision, native, columns):
    rest = {"fp8_row": (x.shape[1],), "fp8_tensor": (), "fp8_block": (0,)}[precision] if columns else (0,)
    return x.new_empty((x.shape[0], weight.shape[0])), x.new_empty(rest, dtype=torch.float32)


def _linear_backward_fake(grad, x, weight, rest, precision, native, low, need):
    return tuple(grad.new_empty(shape if wanted else (0,)) for shape, wanted in zip((x.shape, weight.shape, weight.shape[:1]), need))


_LIBRARY = torch.library.Library("planner_runtime", "FRAGMENT")
_LIBRARY.define("low_precision_linear(Tensor x, Tensor weight, Tensor? bias, str precision, bool native, bool columns) -> (Tensor, Tensor)")
_LIBRARY.define("low_precision_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor rest, str precision, bool native, bool low, bool[] need) "
                "-> (Tensor, Tensor, Tensor)")
for _name, _run, _fake in (("low_precision_linear", _linear, _linear_fake),
                           ("low_precision_linear_backward", _linear_backward, _linear_backward_fake)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"planner_runtime::{_name}", _fake, lib=_LIBRARY)


def direct(x: Tensor) -> bool:
    """Whether nobody looks at operators: no trace and no policy over them. Their way through the dispatcher costs as much as two launches."""
    return not torch.compiler.is_compiling() and x.is_cuda and type(x) is Tensor and not torch._C._len_torch_dispatch_stack()


class _FusedLinear(torch.autograd.Function):
    """As `_LowPrecisionLinear`, one operator a direction."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, given: Quantized | None = None) -> Tensor:
        columns = "low_weight_gradients" in recipe
        run = functools.partial(_linear, given=given) if direct(x) else torch.ops.planner_runtime.low_precision_linear
        out, rest = run(x, weight, bias, recipe.precision, recipe.native, columns)
        ctx.save_for_backward(x, weight, rest if columns else None)
        ctx.recipe, ctx.has_bias = recipe, bias is not None
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, rest = ctx.saved_tensors
        need = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2]]
        run = _linear_backward if direct(grad) else torch.ops.planner_runtime.low_precision_linear_backward
        found = run(
            grad.contiguous(), x, weight, grad.new_empty(0) if rest is None else rest, ctx.recipe.precision, ctx.recipe.native,
            "low_weight_gradients" in ctx.recipe, need)
        return *(g if wanted else None for g, wanted in zip(found, need)), None, None


@torch.library.custom_op("planner_runtime::low_precision_product", mutates_args=())
def _low_precision_product(a: Tensor, b: Tensor, precision: str, native: bool, square: bool, seed: int | None, hadamard: bool,
                           scale_a: Tensor | None, scale_b: Tensor | None) -> Tensor:
    """Quantises `a (M, K)` and `b (N, K)` and multiplies; one operator, so that a checkpoint policy sees one result.
    square: b takes the weights' scales."""
    first, second = SCALINGS[precision]
    scaled_b = quantize_factor(b, second if square else first, hadamard=hadamard, scale=scale_b)
    return product(quantize_factor(a, first, seed=seed, hadamard=hadamard, scale=scale_a), scaled_b, native=native, dtype=a.dtype)


@_low_precision_product.register_fake
def _(a, b, precision, native, square, seed, hadamard, scale_a, scale_b):
    return a.new_empty((a.shape[0], b.shape[0]))


def _multiply(a: Tensor, b: Tensor, recipe: Recipe, *, square: bool, gradient: bool = False, scales: tuple[Tensor | None, Tensor | None]) -> Tensor:
    seed = next(_calls) if gradient and "stochastic_rounding" in recipe else None
    return torch.ops.planner_runtime.low_precision_product(a, b, recipe.precision, recipe.native, square, seed, "hadamard" in recipe,
                                                             *scales)


Scales = dict[str, Tensor]
"""Of a layer's x, w and dy, as its first step had them (`static_scales`)."""


def _static(known: Scales, recipe: Recipe, name: str, x: Tensor) -> Tensor | None:
    if "static_scales" not in recipe:
        return None
    if name not in known:
        known[name] = tensor_scale(x)
    return known[name]


class _LowPrecisionLinear(torch.autograd.Function):
    """`x (M, K)`, `weight (N, K)`, bias `(N,)` or None -> `(M, N)` in x's dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, known: Scales) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.has_bias, ctx.known = recipe, bias is not None, known
        scales = _static(known, recipe, "x", x), _static(known, recipe, "w", weight)
        if "outliers" in recipe and x.numel():
            columns = _outliers(x)
            rest = x.index_fill(1, columns, 0.0)
            out = _multiply(rest, weight, recipe, square=True, scales=scales) + x[:, columns] @ weight[:, columns].t()
        else:
            out = _multiply(x, weight, recipe, square=True, scales=scales)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        recipe, grad = ctx.recipe, grad.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            scales = _static(ctx.known, recipe, "dy", grad), _static(ctx.known, recipe, "w", weight)
            dx = _multiply(grad, weight.t().contiguous(), recipe, square=True, gradient=True, scales=scales)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(grad, x, recipe, ctx.known)
        return dx, dw, grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None, None, None


def _weight_gradient(grad: Tensor, x: Tensor, recipe: Recipe, known: Scales) -> Tensor:
    """Samples are the contraction; where their number does not fit the format's blocks, rows of zeros complete it."""
    if "low_weight_gradients" not in recipe:
        return grad.t() @ x
    multiple = {"fp8_block": 128, "mxfp8": 32}.get(recipe.precision, 32 if "hadamard" in recipe else 16)
    missing = -x.shape[0] % multiple if len(x) else multiple
    dy_t, x_t = (torch.nn.functional.pad(t, (0, 0, 0, missing)).t().contiguous() for t in (grad, x))
    scales = _static(known, recipe, "dy", grad), _static(known, recipe, "x", x)
    return _multiply(dy_t, x_t, recipe, square=False, gradient=True, scales=scales)


def _outliers(x: Tensor) -> Tensor:
    """Columns of `x (M, K)` with the largest magnitudes, 1 % of them and at least one."""
    return x.abs().amax(0).topk(max(1, math.ceil(OUTLIER_SHARE * x.shape[1]))).indices


class LowPrecisionLinear(nn.Linear):
    """An nn.Linear whose products run under `recipe`; parameters and state are those of nn.Linear. given: its next input as the pass before it has
    quantised it (`runtime.precision.fused`)."""

    recipe: Recipe
    known_scales: Scales
    given: list[Quantized]

    def forward(self, input: Tensor) -> Tensor:
        flat = input.reshape(-1, self.in_features)
        if self.recipe.fused:
            out = _FusedLinear.apply(flat, self.weight, self.bias, self.recipe, self.given.pop() if self.given else None)
        else:
            out = _LowPrecisionLinear.apply(flat, self.weight, self.bias, self.recipe, self.known_scales)
        return out.view(*input.shape[:-1], self.out_features)


def use_low_precision(block: nn.Module, precision: str, *, device: torch.device, options: tuple[RecipeOption, ...] = (), region: str = "") -> None:
    """Every linear layer of `block` computes under `precision` from now on, and what is in front of it quantises for it where it can. In place; call
    it before the block is sharded and before what keeps or recomputes activations.

    Raises ValueError with the region and the reason where a layer's shape cannot run under it, or where there is none.
    """
    if precision not in LOW_PRECISIONS:
        raise ValueError(f"region {region}: precision {precision!r} is not one of {', '.join(LOW_PRECISIONS)}")
    if "static_scales" in options and precision != "fp8_tensor":
        raise ValueError(f"region {region}: recipe static_scales keeps scales of whole tensors; precision {precision} has others")
    kept = getattr(block, "keeps_16_bits", ())
    layers = [m for name, m in block.named_modules() if type(m) is nn.Linear and name not in kept]
    if not layers:
        raise ValueError(f"region {region}: precision {precision}: the region has no linear layer")
    for layer in layers:
        if (reason := unfit(precision, layer.in_features, layer.out_features)) is not None:
            raise ValueError(f"region {region}: {reason}; keep the region at bf16 or change the width")
        if "hadamard" in options and (layer.in_features % HADAMARD_BLOCK or layer.out_features % HADAMARD_BLOCK):
            raise ValueError(f"region {region}: recipe hadamard needs multiples of {HADAMARD_BLOCK}, not {layer.in_features} x {layer.out_features}")
    recipe = Recipe(precision=precision, native=runs_natively(precision, device), options=options)
    for layer in layers:
        layer.__class__ = LowPrecisionLinear
        layer.recipe, layer.known_scales, layer.given = recipe, {}, []  # type: ignore[assignment]
    from runtime.precision.fused import fuse_quantisation  # which needs the layers

    fuse_quantisation(block)
