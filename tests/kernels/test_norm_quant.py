"""`kernels.norm_quant` on the CPU: norms against their definitions, fp8 against a table of its codes."""

import math
from functools import partial

import pytest
import torch

from kernels import _fp8, norm_quant
from kernels.reference_memory import e4m3_reference, e4m3_values, e8m0_reference, norm_reference

OPS = torch.ops.planner_kernels
SCALINGS = ["rowwise", "block128", "tensor_delayed", "tensor_dynamic", "mxfp8_1x32", "mxfp8_32x32"]
EDGES = [0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1e-38, 1.3e-36, 1e-5, 0.9999, 1.0, 447.9, 448.0, 448.1, 512.0, 1e30, 3e38]


def scale_for(scaling):
    return torch.tensor(0.02) if scaling == "tensor_delayed" else None


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("rows, dim", [(0, 5), (1, 1), (7, 33)])
def test_norm_and_gradients(kind, rows, dim):
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((rows, dim), (dim,), (dim,)))
    inputs = [x, weight] if kind == "rmsnorm" else [x, weight, bias]
    out = norm_quant.rms_norm(x, weight, eps=1e-3) if kind == "rmsnorm" else norm_quant.layer_norm(x, weight, bias, eps=1e-3)
    reference = norm_reference(x, weight, None if kind == "rmsnorm" else bias, kind, 1e-3)
    torch.testing.assert_close(out, reference)
    cotangent = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, inputs, cotangent), torch.autograd.grad(reference, inputs, cotangent), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_e4m3_neighbourhood_rounds_as_the_table_says():
    table = torch.tensor(e4m3_values()[:127], dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2  # ties, exact in fp32
    points = torch.cat([table, middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), torch.tensor([449.0, 465.0, 1e9, math.inf]).double()])
    points = torch.cat([points, -points]).float().unsqueeze(0)
    ours = _fp8.to_e4m3(points).float()[0].tolist()
    assert ours == [e4m3_reference(p) for p in points[0].tolist()]
    assert _fp8.to_e4m3(torch.tensor([[math.nan]])).float().isnan().all()


def test_e4m3_table_is_the_format():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    assert codes == e4m3_values()[:127]


@pytest.mark.parametrize("rceil", [True, False])
def test_e8m0_codes_are_exact(rceil):
    powers = [m * 2.0**e for e in range(-126, 120) for m in (1.0, 1.75, 1.75 * (1 + 2.0**-22), 1.9999)]
    amax = torch.tensor(EDGES + powers)
    codes = _fp8.e8m0_code(amax, rceil=rceil)
    assert codes.tolist() == [e8m0_reference(a, rceil) for a in amax.tolist()]
    finite = codes.float() < 255
    assert torch.equal(_fp8.e8m0_scale(codes)[finite], torch.exp2(codes[finite].double() - 127).float())
    if rceil:  # nothing saturates: the scaled maximum is at most 448
        assert (amax.double() * _fp8.e8m0_inverse(codes).double() <= 448).all()
    assert _fp8.e8m0_code(torch.tensor([math.inf, math.nan]), rceil=rceil).tolist() == [255, 255]


@pytest.mark.parametrize("scaling", [s for s in SCALINGS if s != "tensor_delayed"])  # that scale is the caller's
@pytest.mark.parametrize("size", EDGES)
def test_extreme_magnitudes_stay_finite_and_close(scaling, size):
    x = torch.full((33, 128), size)
    back = norm_quant.quantize(x, scaling=scaling).dequantize()
    assert back.isfinite().all()
    tolerance = max(size * 2.0**-4, 2.0**-127 if scaling.startswith("mx") else 2.0**-126)
    assert (back - x).abs().max() <= tolerance


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_blocks_say_so(scaling, bad):
    x = torch.ones(64, 128)
    x[3, 5] = bad
    back = norm_quant.quantize(x, scaling=scaling, scale=scale_for(scaling)).dequantize()
    if scaling == "tensor_delayed" and bad == math.inf:
        assert back[3, 5] == 448 * scale_for(scaling)  # saturates; amax tells
    else:
        assert back[3, 5].isnan()
    assert back[40].isnan().all() if scaling == "tensor_dynamic" else back[40].isfinite().all()  # one scale for all


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("options", [{}, {"hadamard": True}, {"stochastic_rounding_seed": 3}, {"e8m0_rounding": "floor"}])
def test_fused_is_norm_then_quantise(scaling, kind, options):
    x, weight = torch.randn(40, 256).bfloat16(), torch.randn(256)
    bias = torch.randn(256) if kind == "layernorm" else None
    result = norm_quant.norm_quantize(x, weight, bias, kind=kind, scaling=scaling, scale=scale_for(scaling), **options)
    y = norm_reference(x.double(), weight.double(), None if bias is None else bias.double(), kind, 1e-6).float()
    two_steps = norm_quant.quantize(y, scaling=scaling, scale=scale_for(scaling), **options)
    ours, theirs = result.quantized.dequantize(), two_steps.dequantize()
    different = ~torch.isclose(ours, theirs, rtol=1e-5)
    assert different.float().mean() < 0.02  # last-bit differences of y may cross a rounding boundary
    target = norm_quant.hadamard_transform(y) if options.get("hadamard") else y
    error = ((ours - target).norm() / target.norm()).item()
    assert error < 0.05
    if scaling == "tensor_delayed":
        torch.testing.assert_close(result.quantized.amax, target.abs().max())


def test_norm_backward_is_the_gradient_behind_the_quantised_output():
    x, weight, bias = torch.randn(9, 64), torch.randn(64), torch.randn(64)
    result = norm_quant.norm_quantize(x, weight, bias, kind="layernorm", scaling="rowwise")
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    grad = torch.randn(9, 64)
    theirs = torch.autograd.grad(norm_quant.layer_norm(*leaves), leaves, grad)
    ours = norm_quant.norm_backward(grad, x, weight, rstd=result.rstd, mean=result.mean, kind="layernorm")
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_hadamard_is_orthogonal_and_leaves_products_alone():
    x, w = torch.randn(5, 96), torch.randn(4, 96)
    hx, hw = (norm_quant.hadamard_transform(t, seed=9) for t in (x, w))
    torch.testing.assert_close(hx @ hw.T, x @ w.T, rtol=1e-4, atol=1e-4)
    assert not torch.equal(hx, norm_quant.hadamard_transform(x, seed=10))
    dense = norm_quant.hadamard_transform(torch.eye(32))
    torch.testing.assert_close(dense.abs(), torch.full((32, 32), 32**-0.5))


@pytest.mark.parametrize("value", [1.03, 300.7, 2.0**-6 * 1.01, 2.0**-8 * 1.3, 2.0**-11])
def test_stochastic_rounding_to_e4m3_is_unbiased(value):
    samples = torch.stack([_fp8.to_e4m3(torch.full((1, 4096), value), seed=s).float() for s in range(8)])
    low, high = samples.min().item(), samples.max().item()
    assert low <= value <= high and high > low and not torch.equal(samples[0], samples[1])
    share = (value - low) / (high - low)
    deviation = (high - low) * (share * (1 - share) / samples.numel()) ** 0.5
    assert abs(samples.double().mean().item() - value) < 5 * deviation + (high - low) * 2.0**-19
    exact = torch.tensor([e4m3_values()[:127]])
    assert torch.equal(_fp8.to_e4m3(exact, seed=1).float(), exact)


def test_operators_keep_their_contract():
    opcheck = partial(torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 32), (32,), (32,)))
    opcheck(OPS.norm_forward, (x, weight, bias, 1e-6, True))
    _, mean, rstd = OPS.norm_forward(x.detach(), weight.detach(), None, 1e-6, True)
    opcheck(OPS.norm_backward, (x.detach(), x.detach(), weight.detach(), mean, rstd, True))
    for scaling in ("tensor_delayed", "mxfp8_32x32"):
        arguments = (scaling, scale_for(scaling), True, None, None)
        opcheck(OPS.norm_quantize, (x.detach().float(), weight.detach().float(), None, "rmsnorm", 1e-6, *arguments))


X, V = torch.zeros(4, 96), torch.zeros(96)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: norm_quant.norm_quantize(X, V, kind="batchnorm", scaling="rowwise"), "kind: 'batchnorm'"),
        (lambda: norm_quant.norm_quantize(X, V, V, kind="rmsnorm", scaling="rowwise"), "bias: rmsnorm has none"),
        (lambda: norm_quant.norm_quantize(X, V[:5], kind="rmsnorm", scaling="rowwise"), r"weight: expected shape \(96,\)"),
        (lambda: norm_quant.norm_quantize(X, V.to("meta"), kind="rmsnorm", scaling="rowwise"), "weight: on meta"),
        (lambda: norm_quant.quantize(X, scaling="colwise"), "scaling: 'colwise'"),
        (lambda: norm_quant.quantize(X, scaling="block128"), "x: 96 columns are not a multiple of 128"),
        (lambda: norm_quant.quantize(X, scaling="tensor_delayed"), "scale: needed"),
        (lambda: norm_quant.quantize(X, scaling="rowwise", scale=torch.ones(())), "scale: not taken"),
        (lambda: norm_quant.quantize(X[:, :90], scaling="rowwise", hadamard=True), "not a multiple of 32"),
        (lambda: norm_quant.quantize(X, scaling="mxfp8_1x32", e8m0_rounding="up"), "e8m0_rounding: 'up'"),
        (lambda: norm_quant.quantize(X.double(), scaling="rowwise"), "x: float64"),
        (lambda: norm_quant.quantize(X[0], scaling="rowwise"), r"x: expected shape \(T, D\)"),
        (lambda: norm_quant.norm_backward(X[:2], X, V, rstd=V[:4], mean=None, kind="rmsnorm"), "grad: expected shape"),
    ],
)
def test_wrong_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
