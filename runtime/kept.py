"""Batches that are built once: several trainings on the same samples, which differ in numbers and not in data, share them."""
from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from multiprocessing.pool import Pool

import numpy as np
import torch
from torch import Tensor

from runtime.batch import Batch
from runtime.data import Loader, Source, evaluation_samples


class KeptSource:
    """`source`, whose batches stay until `most_bytes` are taken; pinned where there is a CUDA device. `built`: a loader need start no process."""

    built = True

    def __init__(self, source: Source, *, most_bytes: float = 16e9) -> None:
        self._source, self._room, self._pin = source, most_bytes, torch.cuda.is_available()
        self._batches: dict[bytes, Batch] = {}
        self.num_train, self.num_evaluation, self.origin, self.baselines = source.num_train, source.num_evaluation, source.origin, source.baselines

    def lengths(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return self._source.lengths(samples)

    def build(self, samples: np.ndarray) -> Batch:
        return self._batches.get(samples.tobytes()) or self.keep(samples, self._source.build(samples))

    def keep(self, samples: np.ndarray, batch: Batch) -> Batch:
        """`batch` of `samples`, kept if there is room."""
        if batch.num_bytes <= self._room:
            self._room -= batch.num_bytes
            batch = self._batches[samples.tobytes()] = batch.pin() if self._pin else batch
        return batch


def all_samples(loader: Loader, source: Source, *, batch: int) -> Iterator[np.ndarray]:
    """Sample numbers of every micro-batch that rank 0 of one trains on, then of every evaluation batch of about `batch`."""
    for step in range(loader.num_steps):
        yield from loader.microbatch_samples(step)
    yield from evaluation_samples(source, batch=batch)


class Builders:
    """Processes that build batches of sources, which they are forked with: start them before CUDA is touched."""

    def __init__(self, sources: dict[int, Source], processes: int | None = None) -> None:
        global _forked
        _forked = sources
        self._pool: Pool = multiprocessing.get_context("fork").Pool(processes or max(1, (os.cpu_count() or 2) - 2), initializer=torch.set_num_threads,
                                                                    initargs=(1,))

    def build(self, number: int, samples: Iterable[np.ndarray]) -> Iterator[Batch]:
        """Batches of source `number`, in order. Begins at once."""
        found = self._pool.imap(_build, [(number, part) for part in samples])
        return (one.with_tensors(torch.from_numpy) for one in found)

    def close(self) -> None:
        self._pool.terminate()


_forked: dict[int, Source] = {}


def _build(asked: tuple[int, np.ndarray]) -> Batch:
    """Arrays instead of tensors: those would cross by file descriptors, one each."""
    number, samples = asked
    return _forked[number].build(samples).with_tensors(Tensor.numpy)
