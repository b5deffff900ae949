"""Parameters and FLOPs of every block are equal in the cost model and in the modules that run."""
from __future__ import annotations

import importlib

import attention_reference
import pytest
import runtime_models as models
import torch
from torch.utils.flop_counter import FlopCounterMode

from costmodel import blocks as costs
from costmodel.blocks import BatchShape, JaggedShape
from costmodel.model import Sequence
from costmodel.ops import BACKWARD, FORWARD
from costmodel.regions import regions
from runtime.checkpointing import apply_checkpointing
from runtime.loss import model_loss, task_loss
from runtime.memory import StorageTracker, storage_ids
from runtime.model import BLOCKS, GEM, build_block

LENGTHS = ([3, 0, 17, 1], [8], [5, 5, 70, 2, 9, 0])
KINDS = sorted(set(BLOCKS) | set(costs.BLOCKS))


def shapes(lengths: list[int]) -> BatchShape:
    return BatchShape(samples=len(lengths), sequences={"history": JaggedShape.of_lengths(lengths)})


@pytest.fixture
def counted(monkeypatch):
    """The reference attention in place of the kernels, in every module of the model."""
    return replace_kernels(monkeypatch)


def replace_kernels(monkeypatch) -> attention_reference.Counted:
    reference = attention_reference.Counted()
    names = {"jagged_attention": reference.softmax, "gdpa": reference.activated, "block_attention": reference.blocks}
    for module in {cls.__module__ for cls in BLOCKS.values()}:
        loaded = importlib.import_module(module)
        for name, function in names.items():
            if hasattr(loaded, name):
                monkeypatch.setattr(loaded, name, function)
    return reference


def block_cases() -> list:
    cases = []
    for kind in KINDS:
        for i, layer in enumerate(models.LAYERS.get(kind, (None,))):
            cases.append(pytest.param(kind, layer, id=f"{kind}-{i}"))
    return cases


def test_both_sides_know_the_same_kinds():
    assert set(BLOCKS) == set(costs.BLOCKS) == set(models.LAYERS)


@pytest.mark.parametrize(("kind", "layer"), block_cases())
@pytest.mark.parametrize("dim", [16, 40])
def test_block_parameters(kind, layer, dim):
    module, cost = build_block(dim, layer), costs.BLOCKS[kind](layer, dim, "history")
    assert sorted(tuple(p.shape) for p in module.parameters()) == sorted(shape for _, shape in cost.parameters)


@pytest.mark.parametrize(("kind", "layer"), block_cases())
@pytest.mark.parametrize("lengths", LENGTHS)
def test_block_flops(kind, layer, lengths, counted):
    dim, batch = 16, shapes(lengths)
    module, cost = build_block(dim, layer), costs.BLOCKS[kind](layer, dim, "history")
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(sum(lengths), dim, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = module(x, offsets, max(lengths))
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() - counted.excess == cost.flops(batch, FORWARD)
    assert backward.get_total_flops() - 2 * counted.excess == cost.flops(batch, BACKWARD)


@pytest.mark.parametrize(("kind", "layer"), block_cases())
def test_block_values(kind, layer, monkeypatch):
    """The kernels compute what the formulas say."""
    lengths = [3, 0, 17, 1]
    torch.manual_seed(0)
    module, offsets, x = build_block(16, layer).double(), torch.tensor([0, *lengths]).cumsum(0), torch.randn(sum(lengths), 16).double()
    fast = module(x, offsets, max(lengths))
    replace_kernels(monkeypatch)
    torch.testing.assert_close(module(x, offsets, max(lengths)), fast, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "layer"), block_cases())
def test_block_saved_bytes(kind, layer):
    """What autograd keeps of a block is what the cost model says; a block counts its input, never its output."""
    lengths, dim = [30, 0, 17, 100], 32
    module, cost = build_block(dim, layer), costs.BLOCKS[kind](layer, dim, "history")
    offsets, x = torch.tensor([0, *lengths]).cumsum(0), torch.randn(sum(lengths), dim, requires_grad=True)
    for policy in ("none", "selective", "full"):
        apply_checkpointing(module, policy)
        module(x, offsets, max(lengths))  # what lives for good, such as cached masks
        with StorageTracker() as tracker:
            out = module(x, offsets, max(lengths))
        kept = tracker.alive_bytes(storage_ids([*module.parameters(), offsets, x, out])) + x.nbytes
        assert kept == pytest.approx(cost.saved_bytes(shapes(lengths), "fp32", policy), rel=0.03), policy
        module = build_block(dim, layer)


@pytest.mark.parametrize(("kind", "layer"), block_cases())
def test_block_gradients(kind, layer):
    """Against finite differences in float64."""
    torch.manual_seed(0)
    module, offsets = build_block(8, layer).double(), torch.tensor([0, 3, 3, 8])
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    parameters = [p for p in module.parameters() if p.dim() == 1 or p.numel() <= 256]
    assert torch.autograd.gradcheck(lambda x, *_: module(x, offsets, 5), (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("changes", [{}, {"num_dense_features": 0, "bottom_hidden": ()}, {"dim": 24, "interaction_hidden": (40,)},
                                     {"sequences": (Sequence(name="history", layers=models.PYRAMID),)}])
def test_whole_model(lengths, changes, counted):
    spec = models.model(**changes)
    gem, found, batch = GEM(spec), regions(spec), models.batch(spec, lengths)
    runtime_regions = gem.regions()
    assert list(runtime_regions) == [r.name for r in found]
    for region in found:
        blocks = [parent.get_submodule(key) for parent, key in runtime_regions[region.name]]
        assert len(blocks) == region.count
        assert sum(p.numel() for b in blocks for p in b.parameters()) == region.num_parameters, region.name
    embeddings = {t.name: torch.randn(t.count, sum(lengths) if t.sequence else len(lengths), t.dim) for t in spec.tables}
    with FlopCounterMode(display=False) as counter:
        gem(embeddings, batch)
    expected = sum(r.count * r.block.flops(shapes(lengths), FORWARD) for r in found)
    assert counter.get_total_flops() - counted.excess == expected


def test_next_events(counted):
    """A sequence that predicts its next events: regions, parameters, FLOPs and saved bytes of the head; the loss against its definition."""
    lengths = [30, 0, 17, 1]
    spec = models.model(sequences=(Sequence(name="history", layers=models.LAYERS["llama"], next_event="item"),))
    gem, found, batch = GEM(spec), {r.name: r for r in regions(spec)}, models.batch(spec, lengths)
    assert list(gem.regions()) == list(found)
    head, cost = gem.next["history"], found["history.next"].block
    assert sorted(tuple(p.shape) for p in head.parameters()) == sorted(shape for _, shape in cost.parameters)
    x = torch.randn(sum(lengths), spec.dim, requires_grad=True)
    arguments = (x, batch.ids["item"], batch.sequence_offsets["history"])
    head(*arguments)
    with StorageTracker() as tracker, FlopCounterMode(display=False) as counter:
        loss = head(*arguments)
    assert counter.get_total_flops() == cost.flops(shapes(lengths))
    kept = tracker.alive_bytes(storage_ids([*head.parameters(), *arguments[1:], x, loss])) + x.nbytes
    assert kept == pytest.approx(cost.saved_bytes(shapes(lengths), "fp32", "none"), rel=0.03)
    log_p, ids = head.logits(head.norm(x)).log_softmax(1), batch.ids["item"]
    each = [-log_p[i, ids[i + 1]] for i in [*range(29), *range(30, 46)]]
    torch.testing.assert_close(loss, torch.stack(each).mean() * len(lengths))
    embeddings = {t.name: torch.randn(t.count, sum(lengths) if t.sequence else len(lengths), t.dim) for t in spec.tables}
    logits, events = gem(embeddings, batch)
    assert logits.shape == (4, 2) and model_loss((logits, events), batch.labels) == task_loss(logits, batch.labels) + events
    with pytest.raises(ValueError, match="next_event 'tag' is none of its single tables"):
        models.model(sequences=(Sequence(name="history", layers=models.LAYERS["llama"], next_event="tag"),))
