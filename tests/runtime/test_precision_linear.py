"""Linear layers in 8 bits: the reference's numbers, gradients, options, refusals, and training under a plan."""
import copy
import dataclasses

import pytest
import runtime_models as models
import torch
from torch import nn

from costmodel.blocks import EXPERT_BLOCKS as EXPERT_COSTS
from costmodel.model import LayerGroup
from costmodel.plan import Layout
from costmodel.precision import LOW_PRECISIONS, MULTIPLES, unfit_block
from kernels import norm_quant
from runtime.data import open_source
from runtime.model.registry import EXPERT_BLOCKS, build_block
from runtime.model.self_attention import SelfAttention
from runtime.precision import fused as precision_fused
from runtime.precision import linear
from runtime.precision.attention import use_fp8_attention
from runtime.precision.linear import _FusedLinear, _LowPrecisionLinear, quantize_factor, use_low_precision
from runtime.trainer import Trainer

CPU = torch.device("cpu")
SCALINGS = {"fp8_tensor": ("tensor_delayed", "tensor_delayed"), "fp8_row": ("rowwise",) * 2,
            "fp8_block": ("block128",) * 2, "mxfp8": ("mxfp8_1x32", "mxfp8_32x32")}


def layer(precision: str, *options: str, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """(the layer under `precision`, the same at its own precision)."""
    torch.manual_seed(3)
    plain = nn.Linear(256, 128, bias=bias)
    low = copy.deepcopy(plain)
    use_low_precision(low, precision, device=CPU, options=options)
    return low, plain


def restored(x: torch.Tensor, scaling: str) -> torch.Tensor:
    scale = x.abs().max() / 448 if scaling == "tensor_delayed" else None
    return norm_quant.quantize(x, scaling=scaling, scale=scale).dequantize().double()


@pytest.mark.parametrize("precision", LOW_PRECISIONS)
def test_products_are_those_of_the_quantised_factors(precision):
    low, plain = layer(precision)
    x, grad = torch.randn(96, 256, requires_grad=True), torch.randn(96, 128)
    out = low(x)
    first, second = SCALINGS[precision]
    weight = plain.weight.detach()
    expected = restored(x.detach(), first) @ restored(weight, second).T + plain.bias.detach().double()
    torch.testing.assert_close(out.detach().double(), expected, rtol=1e-5, atol=1e-5)
    dx, dw, db = torch.autograd.grad(out, [x, low.weight, low.bias], grad)
    torch.testing.assert_close(dx.double(), restored(grad, first) @ restored(weight.T.contiguous(), second).T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw, grad.T @ x.detach())  # weight gradients keep the layer's own dtype
    torch.testing.assert_close(db, grad.sum(0))
    assert not torch.equal(out, plain(x))


def test_a_square_of_scales_is_the_same_for_a_matrix_and_its_transpose():
    weight = torch.randn(96, 64) * torch.logspace(-6, 6, 64)
    direct, turned = (quantize_factor(w, "mxfp8_32x32") for w in (weight, weight.T.contiguous()))
    assert torch.equal(direct.dequantize().T, turned.dequantize())


@pytest.mark.parametrize("precision", LOW_PRECISIONS)
def test_weight_gradients_on_request_and_for_any_number_of_rows(precision):
    low, plain = layer(precision, "low_weight_gradients")
    x = torch.randn(37, 256)
    grads = [torch.autograd.grad(m(x).square().mean(), m.weight)[0] for m in (low, plain)]
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert 1e-3 < error < 0.1


def test_options_do_what_they_are_for():
    """Outlier columns cost a tensor-wise scale its small values; multiplying them apart brings them back, a Hadamard transform spreads them."""
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    x[:, 7] *= 1e5
    errors = {}
    for options in ((), ("outliers",)):
        low, plain = layer("fp8_tensor", *options)
        low.weight.data[:, 7] = plain.weight.data[:, 7] = 0.0  # what is left of the output comes from the small values
        errors[options] = ((low(x) - plain(x)).norm() / plain(x).norm()).item()
    assert errors["outliers",] < 0.05 < 0.25 < errors[()]
    turned, plain = layer("mxfp8", "hadamard")
    assert 0.001 < (turned(x) - plain(x)).norm() / plain(x).norm() < 0.1
    low, _ = layer("fp8_row", "stochastic_rounding")
    leaf = x[:, :].clone().requires_grad_()
    runs = [torch.autograd.grad(low(leaf), leaf, torch.ones(64, 128) * torch.rand(128))[0] for _ in range(2)]
    assert not torch.equal(*runs) and torch.equal(low(x), low(x))  # gradients only


@pytest.mark.parametrize("precision", [p for p in LOW_PRECISIONS if p != "mxfp8"])
@pytest.mark.parametrize("options", [(), ("low_weight_gradients",)])
@pytest.mark.parametrize("rows", [0, 37, 128])
def test_one_operator_a_direction_gives_the_bits_of_its_parts(precision, options, rows):
    low, _ = layer(precision, *options)
    x, grad = torch.randn(rows, 256), torch.randn(rows, 128)
    found = []
    for function in (_FusedLinear, _LowPrecisionLinear):
        leaf = x.clone().requires_grad_()
        out = function.apply(leaf, low.weight, low.bias, low.recipe, *[{}] * (function is _LowPrecisionLinear))
        found.append((out, *torch.autograd.grad(out, [leaf, low.weight, low.bias], grad)))
        frozen = function.apply(x, low.weight.detach(), low.bias, low.recipe, *[{}] * (function is _LowPrecisionLinear))
        found[-1] += torch.autograd.grad(frozen, [low.bias], grad)
    assert low.recipe.fused
    for whole, parts in zip(*found):
        assert torch.equal(whole, parts)


def test_static_scales_are_those_of_the_first_step():
    low, plain = layer("fp8_tensor", "static_scales", "low_weight_gradients")
    x = torch.randn(32, 256)
    first = low(x)
    torch.testing.assert_close(first, layer("fp8_tensor")[0](x))
    largest = x.abs().max()
    grown = low(10 * x) - plain.bias
    clipped = (10 * x).clamp(-largest, largest) @ plain.weight.T
    assert (grown - clipped).norm() < 0.06 * clipped.norm() < 0.6 * (10 * x @ plain.weight.T).norm()
    with pytest.raises(ValueError, match="region r: recipe static_scales keeps scales of whole tensors; precision fp8_row"):
        use_low_precision(nn.Linear(32, 32), "fp8_row", device=CPU, options=("static_scales",), region="r")


@pytest.mark.parametrize("precision", LOW_PRECISIONS)
def test_shapes_that_cannot_run_are_refused_with_the_reason(precision):
    width = MULTIPLES[precision] + 8
    with pytest.raises(ValueError, match=rf"region r: a linear layer of {width} inputs .* {precision} needs multiples of {MULTIPLES[precision]}"):
        use_low_precision(nn.Sequential(nn.Linear(width, MULTIPLES[precision])), precision, device=CPU, region="r")
    with pytest.raises(ValueError, match="no linear layer"):
        use_low_precision(nn.LayerNorm(4), precision, device=CPU)


def test_the_router_of_experts_keeps_16_bits():
    group = LayerGroup(kind="moe", num_experts=3, mlp_dim=64)
    module = EXPERT_BLOCKS["moe"](64, group)
    use_low_precision(module, "mxfp8", device=CPU)
    assert type(module.gate) is nn.Linear and type(module.experts.get_submodule("0").up) is not nn.Linear
    assert unfit_block(EXPERT_COSTS["moe"](group, 64), "mxfp8") is None


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_a_plan_trains_near_bf16_and_keeps_as_much(checkpoint):
    spec = models.model((models.LAYERS["llama"][1],))
    losses, saved = {}, {}
    for precision in ("bf16", "fp8_row", "mxfp8"):
        plan = models.plan(Layout(), model_spec=spec, precision="bf16", checkpoint=checkpoint)
        regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(o, precision=precision) for o in r.options))
                        if r.region == "history.0" else r for r in plan.regions)
        trainer = Trainer(dataclasses.replace(plan, regions=regions), open_source(spec, plan.workload, seed=1), device=CPU)
        trainer.train(5)
        losses[precision], saved[precision] = trainer.losses, trainer.saved_activations
    assert losses["fp8_row"] == pytest.approx(losses["bf16"], rel=1e-2)
    assert losses["mxfp8"] == pytest.approx(losses["bf16"], rel=1e-2)
    assert losses["bf16"] != losses["fp8_row"] != losses["mxfp8"]
    assert saved["fp8_row"] == saved["mxfp8"] == saved["bf16"]


def test_attention_in_8_bits_is_a_recipe_of_regions_below_16_bits():
    offsets, x = torch.tensor([0, 30, 70]), torch.randn(70, 128)
    for name in ("self_attention", "gdpa"):
        group = dataclasses.replace(models.LAYERS[name][0], window=None)
        block = build_block(128, group)
        low = copy.deepcopy(block)
        use_fp8_attention(low, device=CPU, region="r")
        outs = [one(x, offsets, 40) for one in (block, low)]
        assert 0 < (outs[0] - outs[1]).norm() < 0.05 * outs[0].norm()
        grads = [torch.autograd.grad(out.square().sum(), one.qkv.weight)[0] for out, one in zip(outs, (block, low))]
        assert (grads[0] - grads[1]).norm() < 0.1 * grads[0].norm()
    with pytest.raises(ValueError, match="region r: recipe fp8_attention: HSTU has no attention in 8 bits"):
        use_fp8_attention(build_block(128, models.LAYERS["hstu"][0]), device=CPU, region="r")
    with pytest.raises(ValueError, match="region r: recipe fp8_attention knows no window, the region's is 3"):
        use_fp8_attention(build_block(128, dataclasses.replace(models.LAYERS["self_attention"][0], window=3)), device=CPU, region="r")
    plan = models.plan(Layout(), precision="bf16")
    kept = {r.region for r in plan.regions if r.region != "history.0"}
    regions = tuple(r if r.region in kept else dataclasses.replace(r, options=tuple(dataclasses.replace(o, precision="fp8_row") for o in r.options))
                    for r in plan.regions)
    plan = dataclasses.replace(plan, regions=regions, recipe=("fp8_attention",))
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=1), device=CPU)
    assert [part.in_8_bits for part in trainer.model.dense.modules() if isinstance(part, SelfAttention)].count(True) == 1
    trainer.train(1)


@pytest.mark.parametrize("kind", ["self_attention", "hstu"])
def test_the_pass_before_a_layer_quantises_for_it(kind, monkeypatch):
    torch.manual_seed(0)
    block = build_block(128, models.LAYERS[kind][0]).to(torch.bfloat16)
    fused = copy.deepcopy(block)
    use_low_precision(fused, "fp8_row", device=CPU)
    with monkeypatch.context() as patch:
        patch.setattr(precision_fused, "fuse_quantisation", lambda block: None)
        use_low_precision(block, "fp8_row", device=CPU)
    offsets, x = torch.tensor([0, 30, 70]), torch.randn(70, 128, dtype=torch.bfloat16)
    read = []
    for module in (linear, precision_fused):
        monkeypatch.setattr(module, "direct", lambda _x: True)
    plain_rows = linear.factor_rows
    monkeypatch.setattr(linear, "factor_rows", lambda x, *a, **k: read.append(tuple(x.shape)) or plain_rows(x, *a, **k))
    grads, forwards = [], []
    for one in (block, fused):
        leaf = x.clone().requires_grad_()
        read.clear()
        out = one(leaf, offsets, 40)
        forwards.append(len(read))
        grads.append([out, *torch.autograd.grad(out.float().square().sum(), [leaf, *one.parameters()])])
    assert forwards[0] - forwards[1] == {"self_attention": 3, "hstu": 1}[kind]
    for one, other in zip(*grads):
        assert (one.float() - other.float()).norm() < 0.02 * one.float().norm() + 1e-3
    assert not any(m.given for m in fused.modules() if isinstance(m, linear.LowPrecisionLinear))


@pytest.mark.parametrize("way", [0, 1, 2])
def test_products_that_cublas_has_no_kernel_for_are_completed(way, monkeypatch):
    multiply, tried = torch._scaled_mm, []

    def refuses(a, b, *, bias=None, **options):
        tried.append((tuple(a.shape), bias is not None))
        if len(tried) <= way:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")
        return multiply(a, b, bias=bias, **options)

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    linear._ways.clear()
    a, b = (quantize_factor(torch.randn(n, 64).bfloat16(), "rowwise") for n in (6, 32))
    bias = torch.randn(32).bfloat16()
    want = linear.product(a, b, native=False, dtype=torch.bfloat16, bias=bias)
    for _ in range(2):
        got = linear.product(a, b, native=True, dtype=torch.bfloat16, bias=bias)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert tried[:way + 1] == [((16, 64), True), ((16, 64), False), ((128, 128), False)][:way + 1] and len(tried) == way + 2
    linear._ways.clear()
