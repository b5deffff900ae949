"""From a workload to batches: sources of samples, and the loader that deals the same global batches to any number of ranks.

A source builds a `Batch` from sample numbers. Step s of an epoch takes the s-th run of `global_batch` numbers of the epoch's
shuffle; a batching policy (runtime.balance) says which rank trains which of them; rank r builds only its own. Everything
follows from (seed, samples consumed), so a run resumes at a sample, and 2 ranks see what 1 rank saw.

History sources feed a table by the last word of its name:
    pooled     `user`; `item`: the candidate; `liked`: the items of the history that the user liked
    sequence   `item` and `action` (0 unknown: the candidate, 1 dislike, 2 like), the candidate last
and dense features, 4 or none: log-odds of the user's and the item's like-rate so far, log(1 + count) of both.
"""
from __future__ import annotations

import collections
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from costmodel.codec import suggest
from costmodel.model import Model, TableGroup
from costmodel.plan import Batching, Plan
from costmodel.state import movielens_path
from costmodel.workload import Workload
from runtime import balance, histories, worker
from runtime.batch import Batch
from runtime.prepare import read_events
from runtime.synthetic import SyntheticStream

EVALUATION_SHARE = 0.2
# That build a rank's batches ahead, where it has so many cores and two more.
THREADS = 4
POOLED_FEATURES, EVENT_FEATURES = ("user", "item", "liked"), ("item", "action")
NUM_STATISTICS = 4


class Source(Protocol):
    """Samples 0..num_train-1 are for training, the next `num_evaluation` for evaluation. `origin` says in words what they are."""

    num_train: int
    num_evaluation: int
    origin: str
    baselines: dict[str, float]

    def lengths(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Events per sequence name and sample, without building anything."""
        ...

    def build(self, samples: np.ndarray) -> Batch:
        """The batch of these samples, in this order, on the host."""
        ...


class SyntheticSource:
    """`workload.source.num_events` training samples of a synthetic stream, and a quarter as many for evaluation."""

    def __init__(self, model: Model, workload: Workload, *, seed: int, reason: str = "") -> None:
        self._model = model
        self._stream = SyntheticStream(model, workload, seed=seed)
        self.num_train = workload.source.num_events
        self.num_evaluation = max(1, int(self.num_train * EVALUATION_SHARE / (1 - EVALUATION_SHARE)))
        self.origin = "synthetic stream with the workload's lengths and id skew" + (f" ({reason})" if reason else "")
        self.baselines: dict[str, float] = {}

    def lengths(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return {s.name: self._stream.lengths(s.name, samples) for s in self._model.sequences}

    def build(self, samples: np.ndarray) -> Batch:
        lengths = self.lengths(samples)
        ids, offsets, pooled, events = {}, {}, {}, {}
        for table in self._model.tables:
            if table.sequence is None:
                sizes = self._stream.bag_sizes(table, samples)
                offsets[table.name] = _offsets(sizes)
            else:
                sizes = np.tile(lengths[table.sequence], table.count)
            ids[table.name] = self._stream.ids(table, samples, sizes)
            first = sizes[:len(samples)]
            (events if table.sequence else pooled)[table.name] = (ids[table.name][:first.sum()], first)
        dense = self._stream.dense(samples) if self._model.num_dense_features else None
        times = {s.name: self._stream.times(s.name, samples, lengths[s.name]) for s in self._model.sequences if s.timed}
        return _batch(ids, offsets, lengths, dense, self._stream.labels(samples, pooled, events), times)


class HistorySource:
    """User histories from an event table (runtime.histories), for models whose tables are named after its features. A folder of prepared histories is
    read as samples ask for it."""

    def __init__(self, model: Model, workload: Workload, path: Path | str, *, origin: str) -> None:
        source = workload.source
        self._model = model
        if Path(path).is_dir():
            self._histories, about = histories.open_folder(path)
            for key in ("max_history", "like_threshold"):
                if about[key] != getattr(source, key):
                    raise ValueError(f"{path}: was prepared with {key} {about[key]}, workload {workload.name} has {getattr(source, key)}")
            self.baselines = about["baselines"]
        else:
            events = read_events(path, like_threshold=source.like_threshold)
            self._histories = histories.build(events, max_history=source.max_history)
            self.baselines = histories.baselines(self._histories)
        self._features = {t.name: _feature(t) for t in model.tables}
        self._check(model)
        self.num_train = self._histories.num_train
        self.num_evaluation = len(self._histories) - self.num_train
        self.origin = f"{origin}: {len(self._histories)} events of {self._histories.num_users} users"

    def _check(self, model: Model) -> None:
        items = self._histories.num_items
        rows = {"user": self._histories.num_users, "item": items, "liked": items, "action": 3}
        for table in model.tables:
            needed = rows[self._features[table.name]]
            if table.rows < needed:
                feature = self._features[table.name]
                raise ValueError(f"table {table.name}: {table.rows} rows are too few for {needed} values of {feature}")
        if model.num_dense_features not in (0, NUM_STATISTICS):
            raise ValueError(f"model {model.name}: histories give {NUM_STATISTICS} dense features or none, "
                             f"not {model.num_dense_features}")
        if len(model.heads) != 1:
            raise ValueError(f"model {model.name}: histories have one label (like), but there are {len(model.heads)} heads")

    def lengths(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        lengths = self._histories.lengths_of(samples)
        return {s.name: lengths for s in self._model.sequences}

    def build(self, samples: np.ndarray) -> Batch:
        items, actions, bounds = self._histories.sequences(samples)
        ids, offsets = {}, {}
        for table in self._model.tables:
            feature = self._features[table.name]
            if table.sequence is not None:
                ids[table.name] = items if feature == "item" else actions
            elif feature == "liked":
                liked = actions == histories.LIKE
                ids[table.name] = items[liked]
                offsets[table.name] = np.concatenate([[0], np.cumsum(liked)])[bounds]
            else:
                ids[table.name] = (self._histories.user if feature == "user" else self._histories.item)[samples]
                offsets[table.name] = np.arange(len(samples) + 1)
        lengths = {s.name: np.diff(bounds) for s in self._model.sequences}
        dense = self._histories.statistics[samples] if self._model.num_dense_features else None
        timed = [s.name for s in self._model.sequences if s.timed]
        times = dict.fromkeys(timed, self._histories.times(samples)) if timed else {}
        return _batch(ids, offsets, lengths, dense, self._histories.label[samples][:, None], times)


def open_source(model: Model, workload: Workload, *, seed: int) -> Source:
    """The source that the workload names. Raises ValueError where its file is missing or does not fit the model.

    MovieLens that was never prepared (no network, say) is replaced by a synthetic stream, and `origin` says so.
    """
    source = workload.source
    if source.kind == "synthetic":
        return SyntheticSource(model, workload, seed=seed)
    if source.kind != "movielens" and source.path is None:
        raise ValueError(f"workload {workload.name}: source {source.kind} needs a path")
    path = Path(source.path) if source.path is not None else movielens_path()
    if source.kind == "movielens" and not path.exists():
        reason = f"MovieLens-100K is not at {path}; `planner data movielens` puts it there"
        return SyntheticSource(model, workload, seed=seed, reason=reason)
    return HistorySource(model, workload, path, origin="MovieLens-100K" if source.kind == "movielens" else path.name)


class Loader:
    """One rank's batches, step by step: `for microbatches in loader` gives `accumulation` batches a step.

    `start`: samples (of all ranks, over all epochs) that an earlier run has consumed; `position` is the same count now, to be
    kept in a checkpoint. Only whole global batches are trained: what is left at the end of an epoch waits for the next shuffle.
    With `prefetch` > 0 up to `THREADS` threads build that many steps ahead, or with `pin` one process, which takes no turns with the training loop
    at the interpreter's lock, and a thread pins what it built (`runtime.worker`). 0 builds in the caller's thread, where a rank has one core and
    nothing to hide behind.
    """

    def __init__(self, source: Source, *, global_batch: int, world_size: int = 1, rank: int = 0, accumulation: int = 1,
                 seed: int = 0, batching: Batching = "jagged", epochs: int = 1, num_steps: int | None = None, start: int = 0,
                 prefetch: int = 0, pin: bool = False) -> None:
        if global_batch % (world_size * accumulation):
            raise ValueError(f"global batch {global_batch} does not divide over {world_size} ranks x {accumulation} microbatches")
        self.steps_per_epoch = source.num_train // global_batch
        if not self.steps_per_epoch:
            raise ValueError(f"global batch {global_batch} exceeds the {source.num_train} training samples of {source.origin}")
        if start % global_batch:
            raise ValueError(f"start {start} is no multiple of the global batch {global_batch}")
        self.source, self.global_batch, self.accumulation = source, global_batch, accumulation
        self.num_steps = epochs * self.steps_per_epoch if num_steps is None else num_steps
        self.position = start
        self._world_size, self._rank, self._seed, self._batching = world_size, rank, seed, batching
        self._prefetch, self._pin = prefetch, pin
        self._shuffle: tuple[int, np.ndarray] | None = None
        self._window: tuple[tuple[int, int], np.ndarray] | None = None
        self._order = threading.Lock()  # of the two above

    @classmethod
    def of_plan(cls, plan: Plan, source: Source, *, rank: int, start: int = 0, prefetch: int = 0, pin: bool = False) -> Loader:
        """The loader that a plan asks for."""
        world_size = plan.layout.world_size
        return cls(source, global_batch=plan.local_batch * plan.accumulation * world_size, world_size=world_size, rank=rank,
                   accumulation=plan.accumulation, seed=plan.seed, batching=plan.batching, epochs=plan.workload.epochs,
                   num_steps=plan.workload.num_steps, start=start, prefetch=prefetch, pin=pin)

    def __len__(self) -> int:
        """Steps that are left."""
        return max(0, self.num_steps - self.position // self.global_batch)

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        steps = range(self.position // self.global_batch, self.num_steps)
        made = self._made_ahead(steps) if self._prefetch else map(self.build, steps)
        for microbatches in made:
            self.position += self.global_batch
            yield microbatches

    def samples(self, step: int) -> np.ndarray:
        """Sample numbers of a step, `(world_size, global_batch / world_size)`: row r is rank r's."""
        epoch, step = divmod(step, self.steps_per_epoch)
        width = balance.window_steps(self._batching)
        key = (epoch, step // width)
        with self._order:
            if self._window is None or self._window[0] != key:
                self._window = (key, self._arranged(*key, width))
            return self._window[1][step % width]

    def _arranged(self, epoch: int, window: int, width: int) -> np.ndarray:
        first = window * width
        steps = min(width, self.steps_per_epoch - first)
        if self._shuffle is None or self._shuffle[0] != epoch:
            self._shuffle = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self.source.num_train))
        samples = self._shuffle[1][first * self.global_batch:(first + steps) * self.global_batch]
        work = np.zeros(len(samples))
        if self._batching not in ("padded", "jagged"):
            work = sum((balance.attention_pairs(lengths) for lengths in self.source.lengths(samples).values()), work)
        return samples[balance.arrange(self._batching, work, steps=steps, ranks=self._world_size, seed=self._seed + first)]

    def build(self, step: int) -> tuple[Batch, ...]:
        """This rank's batches of a step, its samples dealt to them in turn: policies order by work, and a first batch of all the longest
        histories would need the memory that accumulation is to save."""
        batches = self._assemble(step)
        return tuple(b.pin() for b in batches) if self._pin else batches

    def _assemble(self, step: int) -> tuple[Batch, ...]:
        return tuple(self.source.build(samples) for samples in self.microbatch_samples(step))

    def microbatch_samples(self, step: int) -> np.ndarray:
        """Sample numbers of this rank's batches of a step, `(accumulation, local batch)`."""
        return np.ascontiguousarray(self.samples(step)[self._rank].reshape(-1, self.accumulation).T)

    def _made_ahead(self, steps: range) -> Iterator[tuple[Batch, ...]]:
        if not self._pin or getattr(self.source, "built", False):  # nothing left for a process to do
            return _ahead(self.build, steps, self._prefetch, loader_threads(self._prefetch))
        built = worker.built_by_process(self._assemble, steps, slots=self._prefetch)
        return worker.drained_by_thread((tuple(b.pin().with_lengths() for b in batches) for batches in built), built)


def loader_threads(prefetch: int) -> int:
    """Threads that build ahead in this process: no more than there are batches to build, and two of the rank's cores are left to it."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(THREADS, prefetch, cores - 2))


def evaluation_batches(source: Source, *, batch: int, world_size: int = 1, rank: int = 0, prefetch: int = 0) -> Iterator[tuple[int, Batch]]:
    """(batches in all, batch): every evaluation sample once over all ranks, in about `batch` samples a time; every rank gets equally many batches (of
    sizes that differ by one at most), for evaluation too runs collectives. Raises ValueError when there are fewer samples than
    ranks.
    """
    own = evaluation_samples(source, batch=batch, world_size=world_size, rank=rank)

    def build(i: int) -> tuple[Batch, ...]:
        return (source.build(own[i]),)

    numbers = range(len(own))
    for (one,) in _ahead(build, numbers, prefetch, loader_threads(prefetch)) if prefetch else map(build, numbers):
        yield len(own), one


def evaluation_samples(source: Source, *, batch: int, world_size: int = 1, rank: int = 0) -> list[np.ndarray]:
    """Sample numbers of a rank's `evaluation_batches`."""
    if source.num_evaluation < world_size:
        raise ValueError(f"{source.num_evaluation} evaluation samples are too few for {world_size} ranks")
    count = max(1, source.num_evaluation // (batch * world_size))
    samples = source.num_train + np.arange(source.num_evaluation)
    return np.array_split(samples, count * world_size)[rank::world_size]


def _ahead(build: Callable[[int], tuple[Batch, ...]], steps: range, depth: int, threads: int) -> Iterator[tuple[Batch, ...]]:
    """`build(step)` for every step, up to `depth` of them made early by `threads` threads; an error surfaces at its step."""
    waiting: collections.deque[Future] = collections.deque()
    left = iter(steps)
    with_threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="loader", initializer=worker.callers_device())
    try:
        waiting.extend(with_threads.submit(build, step) for step in itertools.islice(left, depth))
        while waiting:
            batches = waiting.popleft().result()
            waiting.extend(with_threads.submit(build, step) for step in itertools.islice(left, 1))
            yield batches
    finally:
        with_threads.shutdown(wait=True, cancel_futures=True)


def _batch(ids: dict[str, np.ndarray], offsets: dict[str, np.ndarray], lengths: dict[str, np.ndarray], dense: np.ndarray | None,
           labels: np.ndarray, times: dict[str, np.ndarray]) -> Batch:
    return Batch(
        ids={name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in ids.items()},
        offsets={name: torch.from_numpy(v) for name, v in offsets.items()},
        sequence_offsets={name: torch.from_numpy(_offsets(v)) for name, v in lengths.items()},
        max_lengths={name: int(v.max(initial=0)) for name, v in lengths.items()}, lengths=lengths,
        times={name: torch.from_numpy(v) for name, v in times.items()},
        dense=None if dense is None else torch.from_numpy(np.ascontiguousarray(dense)),
        labels=torch.from_numpy(np.ascontiguousarray(labels)), num_samples=len(labels))


def _offsets(sizes: np.ndarray) -> np.ndarray:
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def _feature(table: TableGroup) -> str:
    feature = table.name.rsplit("_", 1)[-1]
    known = POOLED_FEATURES if table.sequence is None else EVENT_FEATURES
    if feature not in known or table.count != 1:
        kind = "pooled" if table.sequence is None else "sequence"
        what = "comes in several copies" if feature in known else f"has the unknown feature {feature!r}{suggest(feature, known)}"
        raise ValueError(f"table {table.name} {what}; histories feed {kind} tables by the last word of their name: "
                         f"{', '.join(known)}")
    return feature
