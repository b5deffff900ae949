"""Saved activations in 8 and 4 bits: the formats, what is kept, the gradients, and the cost model's bytes."""
import copy
import math

import pytest
import runtime_models as models
import torch
from torch import nn

from costmodel.blocks import BatchShape, JaggedShape
from costmodel.memory import block_memories, embedding_bytes
from costmodel.plan import Layout
from kernels import _fp8
from kernels.saved import from_mx4, to_mx4
from runtime.data import open_source
from runtime.memory import StorageTracker, storage_ids
from runtime.model.registry import build_block
from runtime.precision import saved
from runtime.precision.saved import quantize_saved
from runtime.trainer import Trainer

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("exponent", [*range(-126, 128, 9), 127])
def test_mx4_is_the_nearest_value_under_the_power_of_two_of_the_largest(exponent):
    torch.manual_seed(exponent)
    x = torch.rand(7, 32).double().sub(0.5).mul(2.0 ** exponent).float()
    x[0] = 0.0
    back = from_mx4(*to_mx4(x), x.numel()).view_as(x)
    for row, restored in zip(x.tolist(), back.tolist()):
        amax = max(map(abs, row))
        scale = 2.0 ** max(math.frexp(amax)[1] - 1 - 2, -126) if amax else 1.0
        for value, got in zip(row, restored):
            distance = min(abs(min(abs(value) / scale, 6.0) - level) for level in LEVELS)
            assert abs(min(abs(value) / scale, 6.0) - abs(got) / scale) == pytest.approx(distance, abs=1e-6)
            assert got * value >= 0


def test_mx4_says_where_it_is_not_finite_and_takes_any_length():
    x = torch.ones(3, 33)
    x[0, 1] = math.nan
    back = from_mx4(*to_mx4(x), x.numel()).view_as(x)
    assert back[0, :32].isnan().all() and torch.equal(back[1:], x[1:])
    assert torch.equal(_fp8.e8m0_scale(to_mx4(torch.full((32,), 6.0))[1]), torch.ones(1))


@pytest.mark.parametrize(("policy", "error", "most"), [("quantized", 0.05, 0.58), ("quantized4", 0.25, 0.34)])
@pytest.mark.parametrize("kind", sorted(models.LAYERS))
def test_gradients_stay_close_and_memory_falls(kind, policy, error, most):
    torch.manual_seed(0)
    block = build_block(128, models.LAYERS[kind][0]).to(torch.bfloat16)
    kept = copy.deepcopy(block)
    quantize_saved(block, policy, torch.bfloat16)
    offsets, x = torch.tensor([0, 50, 120, 200]), torch.randn(200, 128, dtype=torch.bfloat16)
    sizes, grads = [], []
    for one in (kept, block):
        leaf = x.clone().requires_grad_()
        with StorageTracker() as tracker:
            out = one(leaf * 1.0, offsets, 80)
        sizes.append(tracker.alive_bytes(storage_ids([out, *one.parameters()])))
        grads.append(torch.autograd.grad(out.float().square().sum(), [leaf, *one.parameters()]))
        assert torch.equal(out, kept(x, offsets, 80))
    most = 0.66 if (kind, policy) == ("pyramid", "quantized") else most  # a narrow feed-forward part, and its block keeps the rest in 16 bits
    assert sizes[1] < most * sizes[0]
    for exact, lossy in zip(*grads):
        assert (exact.float() - lossy.float()).norm() < error * exact.float().norm() + 1e-2


@pytest.mark.parametrize("policy", ["none", "quantized", "quantized4"])
def test_the_cost_model_counts_what_is_kept(policy):
    plan = models.plan(Layout(), precision="bf16", checkpoint=policy)
    source = open_source(plan.model, plan.workload, seed=1)
    trainer = Trainer(plan, source, device=torch.device("cpu"))
    trainer.train(2)
    lengths = source.lengths(trainer.loader.samples(1).ravel())
    batch = BatchShape(samples=float(plan.local_batch), sequences={k: JaggedShape.of_lengths(v) for k, v in lengths.items()})
    blocks = block_memories(plan, batch)  # on one rank autograd keeps the bf16 copies of the parameters too
    expected = sum(b.saved + b.unsharded for b in blocks) + embedding_bytes(plan, batch)
    assert trainer.saved_activations == pytest.approx(expected, rel=0.03)


def test_fp32_blocks_are_refused():
    with pytest.raises(ValueError, match="quantised from 16 bits"):
        quantize_saved(nn.Linear(4, 4), "quantized", torch.float32)
    with pytest.raises(ValueError, match="quantised from 16 bits"):
        Trainer(models.plan(Layout(), checkpoint="quantized"), open_source(models.model(), models.workload(), seed=1), device=torch.device("cpu"))


def test_columns_of_one_product_are_packed_and_restored_once(monkeypatch):
    layer = models.LAYERS["self_attention"][0]
    block, width = build_block(128, layer).to(torch.bfloat16), layer.heads * layer.head_dim
    quantize_saved(block, "quantized4", torch.bfloat16)
    packed, restored = [], []
    quantise, restore = saved._Hooks.quantise, saved._Packed.restore
    monkeypatch.setattr(saved._Hooks, "quantise", lambda self, t: packed.append(tuple(t.shape)) or quantise(self, t))
    monkeypatch.setattr(saved._Packed, "restore", lambda self: restored.append(tuple(self.shape)) or restore(self))
    x = torch.randn(60, 128, dtype=torch.bfloat16, requires_grad=True)
    block(x, torch.tensor([0, 25, 60]), 35).float().sum().backward()
    assert packed.count((60, 3 * width)) == restored.count((60, 3 * width)) == 1
