"""PMA as a history's summary: parameters, FLOPs and saved bytes equal the cost model's; values and gradients."""
from __future__ import annotations

import attention_reference
import pytest
import runtime_models as models
import torch
from torch.utils.flop_counter import FlopCounterMode

from costmodel.blocks import SUMMARIES as COSTS
from costmodel.blocks import BatchShape, JaggedShape
from costmodel.model import Layer, Sequence
from costmodel.ops import BACKWARD, FORWARD
from costmodel.regions import regions
from runtime.checkpointing import apply_checkpointing
from runtime.memory import StorageTracker, storage_ids
from runtime.model import sequence as sequence_module
from runtime.model.sequence import SUMMARIES

LENGTHS, DIM = [30, 0, 17, 3], 32
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
LAYERS = [models.PMA, Layer(kind="pma", heads=1, head_dim=8, num_queries=1)]


def shape() -> BatchShape:
    return BatchShape(samples=len(LENGTHS), sequences={"history": JaggedShape.of_lengths(LENGTHS)})


def build(layer: Layer):
    """(module, cost class's block)."""
    torch.manual_seed(0)
    return SUMMARIES[layer.kind](DIM, layer), COSTS[layer.kind](layer, DIM, "history")


def test_both_sides_know_the_same_kinds():
    assert set(SUMMARIES) == set(COSTS) == {layer.kind for layer in LAYERS}


@pytest.mark.parametrize("layer", LAYERS)
def test_parameters_and_flops(layer, monkeypatch):
    module, cost = build(layer)
    assert sorted(tuple(p.shape) for p in module.parameters()) == sorted(found for _, found in cost.parameters)
    monkeypatch.setattr(sequence_module, "jagged_attention", attention_reference.Counted().softmax)
    x = torch.randn(50, DIM, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = module(x, OFFSETS, 30)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == (cost.flops(shape(), FORWARD), cost.flops(shape(), BACKWARD))


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("layer", LAYERS)
def test_saved_bytes(layer, policy):
    module, cost = build(layer)
    apply_checkpointing(module, policy)
    x = torch.randn(50, DIM, requires_grad=True)
    module(x, OFFSETS, 30)
    with StorageTracker() as tracker:
        out = module(x, OFFSETS, 30)
    kept = tracker.alive_bytes(storage_ids([*module.parameters(), OFFSETS, x, out])) + x.nbytes
    assert kept == pytest.approx(cost.saved_bytes(shape(), "fp32", policy) - (out.nbytes if policy == "selective" else 0), rel=0.03)


@pytest.mark.parametrize("layer", LAYERS)
def test_values_and_gradients(layer):
    """One history at a time in plain PyTorch; an empty one gives the projection of zeros; finite differences in float64."""
    module, x = build(layer)[0].double(), torch.randn(50, DIM, dtype=torch.float64, requires_grad=True)
    out, normed = module(x, OFFSETS, 30), module.norm(x)
    for i, (a, b) in enumerate(zip(OFFSETS.tolist(), OFFSETS.tolist()[1:])):
        k, v = module.kv(normed[a:b]).view(b - a, 2, layer.heads, layer.head_dim).permute(1, 2, 0, 3)
        q = module.queries.view(layer.num_queries, layer.heads, layer.head_dim).transpose(0, 1)
        read = ((q @ k.transpose(1, 2) * layer.head_dim**-0.5).softmax(-1) @ v).transpose(0, 1).flatten()
        last = normed[b - 1] if b > a else torch.zeros(DIM, dtype=torch.float64)
        torch.testing.assert_close(out[i], module.project(torch.cat([read, last])), rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, *_: module(x, OFFSETS, 30), (x, module.queries, module.norm.weight, module.kv.bias), fast_mode=True)


def test_names_and_fields_are_checked():
    with pytest.raises(ValueError, match=r"unknown summary kind 'pms'.*did you mean 'pma'"):
        regions(models.model(sequences=(Sequence(name="history", layers=(), summary=Layer(kind="pms")),)))
    with pytest.raises(ValueError, match="layer pma: num_queries must be given"):
        regions(models.model(sequences=(Sequence(name="history", layers=(), summary=Layer(kind="pma", heads=2, head_dim=8)),)))
