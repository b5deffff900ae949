"""Batches built by a process of their own."""

import os
import threading
import time

import numpy as np
import pytest
import torch

from runtime import data, worker
from runtime.batch import Batch


def _batch(step: int, events: int = 6) -> Batch:
    lengths = {"s": np.array([events - 2, 2])}
    return Batch(ids={"t": torch.arange(events) + step}, offsets={}, sequence_offsets={"s": torch.tensor([0, events - 2, events])},
                 max_lengths={"s": events - 2}, lengths=lengths, dense=torch.full((2, 3), float(step)), labels=torch.zeros(2, 1), num_samples=2)


def _seen(build, steps: range, slots: int = 2) -> list[tuple[list[int], float, list[int]]]:
    found = []
    for batches in worker.built_by_process(build, steps, slots=slots):
        found += [(b.ids["t"].tolist(), float(b.dense.sum()), b.lengths["s"].tolist()) for b in batches]
    return found


def test_a_process_gives_what_the_caller_would_have_built():
    build = lambda step: (_batch(step), _batch(step + 100))
    expected = [(b.ids["t"].tolist(), float(b.dense.sum()), b.lengths["s"].tolist()) for step in range(3, 9) for b in build(step)]
    assert _seen(build, range(3, 9)) == expected
    assert _seen(build, range(3, 3)) == []


def test_a_step_that_outgrows_its_slot_arrives_whole():
    build = lambda step: (_batch(step, 6 if step % 2 == 0 else 400_000),)
    found = _seen(build, range(4))
    assert [len(ids) for ids, _, _ in found] == [6, 400_000, 6, 400_000]
    assert found[3][0][-1] == 400_002


def test_it_is_another_process_and_ends_with_the_iteration():
    def build(step: int):
        batch = _batch(step)
        batch.ids["t"][0] = os.getpid()
        return (batch,)

    batches = worker.built_by_process(build, range(100), slots=2)
    first, second = int(next(batches)[0].ids["t"][0]), int(next(batches)[0].ids["t"][0])
    assert first == os.getpid() != second
    batches.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_its_errors_and_its_death_surface():
    def broken(step: int):
        if step == 2:
            raise ValueError("no such day")
        return (_batch(step),)

    with pytest.raises(ValueError, match="no such day"):
        _seen(broken, range(5))

    def dies(step: int):
        if step == 1:
            os._exit(3)
        return (_batch(step),)

    with pytest.raises(RuntimeError, match="died"):
        _seen(dies, range(5))


def test_it_builds_ahead_of_the_caller_but_not_beyond_its_slots(tmp_path):
    def build(step: int):
        (tmp_path / str(step)).touch()
        return (_batch(step),)

    batches = worker.built_by_process(build, range(10), slots=2)
    next(batches)
    time.sleep(0.5)
    built = len(list(tmp_path.iterdir()))
    batches.close()
    assert 3 <= built <= 4  # the first, two slots, and one more that waits for a slot


def test_a_thread_takes_what_the_process_made_and_hands_errors_on():
    def build(step: int):
        if step == 6:
            raise ValueError("no such day")
        return (_batch(step),)

    def drained(steps: range):
        built = worker.built_by_process(build, steps, slots=2)
        # copied before the slot is given back, as pinning does
        return worker.drained_by_thread((tuple(b.with_tensors(torch.clone) for b in batches) for batches in built), built)

    assert [int(b.ids["t"][0]) for (b,) in drained(range(6))] == list(range(6))
    with pytest.raises(ValueError, match="no such day"):
        list(drained(range(3, 9)))
    early = drained(range(6))
    next(early)
    early.close()
    assert not [t for t in threading.enumerate() if t.name == "loader"]


def test_threads_that_pin_use_the_device_of_the_rank(monkeypatch):
    """On a rank above 0 a thread begins at device 0 and would open a context there."""
    used: dict[str, set[int]] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.setdefault(threading.current_thread().name, set()).add(device))
    seen: list[tuple[str, bool]] = []

    def pinned(step: int):
        name = threading.current_thread().name
        seen.append((name, used.get(name) == {3}))
        return (_batch(step),)

    steps = range(4)
    made = map(pinned, steps)
    assert len(list(worker.drained_by_thread(made, (one for one in ())))) == 4
    assert len(list(data._ahead(pinned, steps, 2, 2))) == 4
    assert len(seen) == 8 and all(name.startswith("loader") and there for name, there in seen)
