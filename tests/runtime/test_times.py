"""Times of events: buckets, the module against the cost model, and what the sources give."""
from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import runtime_models as models
import torch

from costmodel.blocks import BatchShape, JaggedShape, SequenceInput
from costmodel.memory import input_bytes
from costmodel.model import Sequence
from costmodel.plan import Layout
from runtime import histories
from runtime.checkpointing import apply_checkpointing
from runtime.data import open_source
from runtime.memory import StorageTracker, storage_ids
from runtime.model.times import TimedInput, time_buckets
from runtime.prepare import read_events

LENGTHS = [30, 0, 17, 3]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)


def times() -> torch.Tensor:
    return torch.randint(1 << 20, (50,), generator=torch.Generator().manual_seed(0)).sort().values


def test_buckets():
    """Floors of log2(1 + dt), exact at powers of two and one below, the last bucket open; an event later than the newest counts as it."""
    gaps = [0, 1, 2, 3, 6, 7, 8, 2**20 - 2, 2**20 - 1, 2**40]
    stamps = torch.tensor([2**41 - gap for gap in gaps[::-1]])
    found = time_buckets(stamps, torch.tensor([0, len(gaps)]), 24).tolist()[::-1]
    assert found == [min(math.floor(math.log2(1 + gap)), 23) for gap in gaps] == [0, 1, 1, 2, 2, 3, 3, 19, 20, 23]
    assert time_buckets(torch.tensor([9, 5, 8, 1]), torch.tensor([0, 2, 2, 4]), 8).tolist() == [0, 0, 0, 0]
    assert time_buckets(times()[:0], torch.tensor([0, 0]), 8).tolist() == []


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_parameters_and_saved_bytes(policy):
    module, cost = TimedInput(24, 32, 8), SequenceInput("history", 24, 2, 32, 8)
    assert sorted(tuple(p.shape) for p in module.parameters()) == sorted(shape for _, shape in cost.parameters)
    apply_checkpointing(module, policy)
    x, stamps = torch.randn(50, 24, requires_grad=True), times()
    with StorageTracker() as tracker:
        out = module(x, stamps, OFFSETS)
    kept = tracker.alive_bytes(storage_ids([*module.parameters(), OFFSETS, stamps, x, out])) + x.nbytes
    shape = BatchShape(samples=4.0, sequences={"history": JaggedShape.of_lengths(LENGTHS)})
    assert kept == pytest.approx(cost.saved_bytes(shape, "fp32", policy), rel=0.03)


def test_values_and_gradients():
    torch.manual_seed(0)
    module, x, stamps = TimedInput(6, 8, 8).double(), torch.randn(50, 6, dtype=torch.float64, requires_grad=True), times()
    rows = module.times[time_buckets(stamps, OFFSETS, 8)]
    torch.testing.assert_close(module(x, stamps, OFFSETS), module.linear(x) + rows)
    assert torch.autograd.gradcheck(lambda x, *_: module(x, stamps, OFFSETS), (x, *module.parameters()), fast_mode=True)


def timed(**changes):
    history = models.model().sequences[0]
    return models.model(sequences=(dataclasses.replace(history, time_buckets=16),), **changes)


def test_synthetic_times_do_not_depend_on_the_batch():
    source = open_source(timed(), models.workload(), seed=0)
    together, alone = source.build(np.array([5, 9, 2])), source.build(np.array([9]))
    edges = together.sequence_offsets["history"]
    assert torch.equal(together.times["history"][edges[1]:edges[2]], alone.times["history"])
    assert (alone.times["history"].diff() > 0).all() and alone.times["history"].dtype == torch.int64
    assert not open_source(models.model(), models.workload(), seed=0).build(np.array([9])).times


def test_times_of_an_event_table(tmp_path):
    """The past's own times, then the candidate's."""
    frame = pd.DataFrame({"user_id": [1, 1, 2, 1, 2], "item_id": [1, 2, 3, 4, 5], "rating": [5.0, 1, 5, 1, 5], "timestamp": [10.5, 20, 25, 30, 40]})
    path = tmp_path / "events.parquet"
    frame.to_parquet(path)
    found = histories.build(read_events(path, like_threshold=4.0), max_history=None)
    assert found.times(np.array([3, 4, 0])).tolist() == [10, 20, 30, 25, 40, 10]


def test_input_bytes():
    """A batch with times is larger by eight bytes an event, in the cost model as in the loader."""
    plain, with_times = models.plan(Layout()), models.plan(Layout(), model_spec=timed())
    shape = BatchShape(samples=4.0, sequences={"history": JaggedShape.of_lengths(LENGTHS)})
    assert input_bytes(with_times, shape) - input_bytes(plain, shape) == 8 * 50
    batches = [models.batch(plan.model, LENGTHS) for plan in (plain, with_times)]
    assert batches[1].num_bytes - batches[0].num_bytes == 8 * 50


def test_one_bucket_says_nothing():
    with pytest.raises(ValueError, match="time_buckets must be >= 2, got 1"):
        Sequence(name="history", layers=(), time_buckets=1)
