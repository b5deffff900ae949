"""Interaction and expert layers: parameters, FLOPs and saved bytes equal the cost model's; gradients against float64."""
from __future__ import annotations

import attention_reference
import interaction_models as layers
import pytest
import runtime_models as models
import torch
from torch.utils.flop_counter import FlopCounterMode

from costmodel import blocks as costs
from costmodel.blocks import BatchShape, JaggedShape
from costmodel.ops import BACKWARD, FORWARD
from costmodel.regions import regions
from runtime.checkpointing import apply_checkpointing
from runtime.memory import StorageTracker, storage_ids
from runtime.model import GEM
from runtime.model import interformer as interformer_module
from runtime.model import self_attention as transformer_module
from runtime.model import sequence as sequence_module
from runtime.model.interformer import last_events
from runtime.model.registry import EXPERT_BLOCKS, INTERACTION_BLOCKS

LENGTHS = [9, 0, 33, 1]
CASES = [pytest.param(kind, layer, id=f"{kind}-{i}") for kind, found in layers.LAYERS.items() for i, layer in enumerate(found)]


def shape() -> BatchShape:
    return BatchShape(samples=len(LENGTHS), sequences={"history": JaggedShape.of_lengths(LENGTHS)})


def inputs(kind: str, dtype: torch.dtype = torch.float32) -> tuple:
    """Arguments of a layer; the floating ones require gradients."""
    if kind == "moe":
        return (torch.randn(len(LENGTHS), layers.DIM, dtype=dtype, requires_grad=True),)
    tokens = torch.randn(len(LENGTHS), layers.TOKENS, layers.FEATURE_DIM, dtype=dtype, requires_grad=True)
    if kind in ("wukong", "dcn_cross"):
        return (tokens,)
    events = torch.randn(sum(LENGTHS), layers.DIM, dtype=dtype, requires_grad=True)
    return tokens, events, torch.tensor([0, *LENGTHS]).cumsum(0), max(LENGTHS)


def outputs(found) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture
def counted(monkeypatch):
    """The reference attention in place of the kernels."""
    reference = attention_reference.Counted()
    for module in (interformer_module, transformer_module, sequence_module):
        monkeypatch.setattr(module, "jagged_attention", reference.softmax)
    for module in (interformer_module, transformer_module):
        monkeypatch.setattr(module, "gdpa", reference.activated)
    monkeypatch.setattr(transformer_module, "block_attention", reference.blocks)
    monkeypatch.setattr("runtime.model.hstu.gdpa", reference.activated)
    return reference


def test_both_sides_know_the_same_kinds():
    assert set(INTERACTION_BLOCKS) == set(costs.INTERACTION_BLOCKS)
    assert set(EXPERT_BLOCKS) == set(costs.EXPERT_BLOCKS)
    assert set(layers.LAYERS) == set(INTERACTION_BLOCKS) | set(EXPERT_BLOCKS)


@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_parameters(kind, layer):
    module, cost = layers.build(kind, layer)
    assert sorted(tuple(p.shape) for p in module.parameters()) == sorted(found for _, found in cost.parameters)


@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_flops(kind, layer, counted):
    module, cost = layers.build(kind, layer)
    arguments = inputs(kind)
    with FlopCounterMode(display=False) as forward:
        out = outputs(module(*arguments))
    with FlopCounterMode(display=False) as backward:
        sum(o.sum() for o in out).backward()
    assert forward.get_total_flops() - counted.excess == cost.flops(shape(), FORWARD)
    assert backward.get_total_flops() - 2 * counted.excess == cost.flops(shape(), BACKWARD)


@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_saved_bytes(kind, layer):
    arguments = inputs(kind)
    for policy in ("none", "selective", "full"):
        module, cost = layers.build(kind, layer)
        apply_checkpointing(module, policy)
        module(*arguments)
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        with StorageTracker() as tracker:
            out = outputs(module(*arguments))
        kept = tracker.alive_bytes(storage_ids([*module.parameters(), *tensors, *out])) + sum(t.nbytes for t in tensors if t.requires_grad)
        assert kept == pytest.approx(cost.saved_bytes(shape(), "fp32", policy), rel=0.05), policy


@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_gradients(kind, layer):
    """Against finite differences in float64."""
    torch.manual_seed(0)
    module, arguments = layers.build(kind, layer)[0].double(), inputs(kind, torch.float64)
    small = [p for p in module.parameters() if p.numel() <= 256]
    assert torch.autograd.gradcheck(lambda *_: module(*arguments), (*[a for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()],
                                                                   *small), fast_mode=True)


def test_last_events_of_short_histories_are_zeros():
    events = torch.arange(1.0, 6.0).unsqueeze(1)
    found = last_events(events, torch.tensor([0, 1, 1, 5]), 3).squeeze(2)
    assert found.tolist() == [[0, 0, 1], [0, 0, 0], [3, 4, 5]]
    assert last_events(events[:0], torch.tensor([0, 0]), 2).tolist() == [[[0.0], [0.0]]]


def test_a_sample_does_not_depend_on_its_batch_mates():
    """A history's summary and its features alone give the same logits."""
    spec = layers.full_model()
    torch.manual_seed(0)
    gem, batch = GEM(spec).double(), models.batch(spec, [5, 0, 12])
    batch = batch.with_tensors(lambda t: t.double() if t.is_floating_point() else t)
    edges = batch.sequence_offsets["history"].tolist()
    embeddings = {t.name: torch.randn(t.count, 17 if t.sequence else 3, t.dim, dtype=torch.float64) for t in spec.tables}
    together = gem(embeddings, batch)
    for i, length in enumerate([5, 0, 12]):
        alone = {t.name: embeddings[t.name][:, edges[i]:edges[i + 1]] if t.sequence else embeddings[t.name][:, i:i + 1] for t in spec.tables}
        single = models.batch(spec, [length]).with_tensors(lambda t: t.double() if t.is_floating_point() else t)
        object.__setattr__(single, "dense", batch.dense[i:i + 1])
        object.__setattr__(single, "times", {"history": batch.times["history"][edges[i]:edges[i + 1]]})
        torch.testing.assert_close(gem(alone, single), together[i:i + 1], rtol=1e-9, atol=1e-12)


def test_whole_model(counted):
    spec = layers.full_model()
    gem, found, batch = GEM(spec), regions(spec), models.batch(spec, LENGTHS)
    assert list(gem.regions()) == [r.name for r in found]
    assert [r.name for r in found][-7:] == ["interaction.0", "interaction.1", "interaction.2", "interaction.3", "interaction", "experts.0", "heads"]
    for region in found:
        blocks = [parent.get_submodule(key) for parent, key in gem.regions()[region.name]]
        assert sum(p.numel() for b in blocks for p in b.parameters()) == region.num_parameters, region.name
    embeddings = {t.name: torch.randn(t.count, sum(LENGTHS) if t.sequence else len(LENGTHS), t.dim) for t in spec.tables}
    with FlopCounterMode(display=False) as counter:
        gem(embeddings, batch).sum().backward()
    expected = sum(r.count * (r.block.flops(shape()) + r.block.flops(shape(), BACKWARD)) for r in found)
    assert counter.get_total_flops() - 3 * counted.excess == expected - missing_input_gradients(found)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in gem.parameters())


def missing_input_gradients(found) -> float:
    """Backward FLOPs that nobody needs here: gradients of embeddings and dense features, which do not require any in this test."""
    first = {"history.input", "bottom"}
    total = 0.0
    for region in found:
        if region.name in first:
            linear = next(op for op in region.block.forward(shape()) if op.kind == "linear")
            total += linear.flops(FORWARD)
    return total


@pytest.mark.parametrize(("changes", "message"), [
    ({"feature_dim": 7}, "feature_dim that divides the 88"),
    ({"interaction_layers": (layers.WUKONG,), "feature_dim": 0}, "feature_dim that divides"),
])
def test_models_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        layers.full_model(**changes)


@pytest.mark.parametrize(("layer", "message"), [
    (dict(kind="wukong", mlp_dim=4), "options num_fm, num_linear, rank, mlp_layers, compressed are needed"),
    (dict(kind="interformer", heads=1, head_dim=8, activation="gelu", divisor=1.0, num_queries=1), "sequence must be given"),
    (dict(kind="wokong"), "did you mean 'wukong'"),
])
def test_layers_that_do_not_fit_are_refused(layer, message):
    spec = layers.full_model(interaction_layers=(layers.WUKONG.__class__(**layer),))
    with pytest.raises(ValueError, match=message):
        regions(spec)
