"""Pyramids over histories: what a level keeps, and that nothing but the newest events reaches what follows."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import runtime_models as models
import torch

from costmodel.blocks import BatchShape, JaggedShape
from costmodel.model import Layer, LayerGroup, Sequence
from costmodel.regions import regions
from runtime.memory import StorageTracker, storage_ids
from runtime.model import GEM
from runtime.model.pyramid import newest_events
from runtime.model.sequence import SequenceEncoder

LENGTHS = [30, 0, 17, 3]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)


def encoder(layers=models.PYRAMID) -> SequenceEncoder:
    torch.manual_seed(0)
    return SequenceEncoder(24, 32, layers)


@pytest.mark.parametrize("limit", [1, 4, 17, 40])
def test_newest_events(limit):
    x = torch.arange(50.0).unsqueeze(1)
    kept, offsets = newest_events(x, OFFSETS, np.array(LENGTHS), limit)
    parts = [x[a:b][-limit:] for a, b in zip(OFFSETS.tolist(), OFFSETS.tolist()[1:])]
    assert torch.equal(kept, torch.cat(parts)) and offsets.diff().tolist() == [len(p) for p in parts]


def test_a_level_sees_the_newest_events_alone():
    """A first level of 5 events gives what the same layers give on histories of those 5."""
    level = dataclasses.replace(models.LAYERS["pyramid"][0], newest=5)
    module, events = encoder((level, models.LAYERS["self_attention"][0])), torch.randn(50, 24)
    history, summary = module(events, OFFSETS, 30, np.array(LENGTHS))
    short, edges = newest_events(events, OFFSETS, np.array(LENGTHS), 5)
    alone, expected = module(short, edges, 5, np.array([5, 0, 5, 3]))
    torch.testing.assert_close(summary, expected)
    torch.testing.assert_close(history.events, alone.events)
    assert history.max_length == 5 and torch.equal(history.offsets, edges)


def test_padding_changes_no_value():
    module, events = encoder(), torch.randn(50, 24)
    jagged, summary = module(events, OFFSETS, 30, np.array(LENGTHS))
    module.pad()
    padded, expected = module(events, OFFSETS, 30, np.array(LENGTHS))
    torch.testing.assert_close(jagged.events, padded.events)
    torch.testing.assert_close(summary, expected)
    with pytest.raises(ValueError, match="layer gdpa is not causal"):
        full = Layer(kind="gdpa", heads=2, head_dim=8, activation="gelu", divisor=2.0, causal=False)
        encoder((LayerGroup(kind="pyramid", branches=(full,)),)).pad()


def test_saved_bytes_of_a_whole_history():
    """Rows of the copies included, which lie between the blocks."""
    spec = models.model(sequences=(Sequence(name="history", layers=models.PYRAMID),))
    module, events = encoder(), torch.randn(50, 24, requires_grad=True)
    shape = BatchShape(samples=4.0, sequences={"history": JaggedShape.of_lengths(LENGTHS)})
    with StorageTracker() as tracker:
        history, summary = module(events, OFFSETS, 30, np.array(LENGTHS))
    kept = tracker.alive_bytes(storage_ids([*module.parameters(), OFFSETS, events, history.events, summary])) + events.nbytes
    expected = sum(r.count * r.block.saved_bytes(shape, "fp32", "none") for r in regions(spec) if r.sequence == "history")
    out = history.events.nbytes  # read by the summary's norm, which counts it
    assert kept + out == pytest.approx(expected, rel=0.03)


def test_gradients_through_every_level():
    spec = models.model(sequences=(Sequence(name="history", layers=models.PYRAMID),))
    torch.manual_seed(0)
    gem, batch = GEM(spec).double(), models.batch(spec, [6, 0, 12])
    object.__setattr__(batch, "dense", batch.dense.double())
    embeddings = {t.name: torch.randn(t.count, 18 if t.sequence else 3, t.dim, dtype=torch.float64) for t in spec.tables}
    events = embeddings["item"].requires_grad_()
    assert torch.autograd.gradcheck(lambda item: gem({**embeddings, "item": item}, batch), (events,), fast_mode=True)
    gem(embeddings, batch).sum().backward()
    reached = events.grad[0].abs().sum(1) > 0
    assert reached.all()  # the first layer attends before anything is dropped
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in gem.parameters())


def test_next_events_need_them_all():
    with pytest.raises(ValueError, match="next_event needs all events of a history, but its layers keep the newest 4"):
        Sequence(name="history", layers=models.PYRAMID, next_event="item")
