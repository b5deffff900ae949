"""Workload: what a step eats. Batch, history lengths, id skew and the source of events.

A length distribution is reduced once to a probability mass function over integer lengths; every cost takes its moments from there, and the
runtime's synthetic stream samples from the same one.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Events per user history. Lengths are clipped into [minimum, maximum] (a lognormal's tail piles up at `maximum`).

    kind: `fixed` (every history has `maximum` events), `uniform` (integers in [minimum, maximum]), `lognormal` (`median`, `sigma` of the log), or
    `histogram` (`values` with `weights`; a file is read into this by the planner).
    """

    kind: Literal["fixed", "uniform", "lognormal", "histogram"]
    maximum: int
    minimum: int = 1
    median: float | None = None
    sigma: float | None = None
    values: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ValueError(f"lengths: 0 <= minimum <= maximum is needed, got {self.minimum} and {self.maximum}")
        if self.kind == "lognormal" and not (self.median and self.median > 0 and self.sigma and self.sigma > 0):
            raise ValueError("lengths: lognormal needs median > 0 and sigma > 0")
        if self.kind == "histogram":
            if not self.values or len(self.values) != len(self.weights):
                raise ValueError("lengths: histogram needs as many weights as values, and at least one")
            if min(self.weights) < 0 or sum(self.weights) <= 0:
                raise ValueError("lengths: histogram weights must be >= 0 and not all 0")
            if min(self.values) < self.minimum or max(self.values) > self.maximum:
                raise ValueError(f"lengths: histogram values must lie in [{self.minimum}, {self.maximum}]")

    def pmf(self) -> tuple[np.ndarray, np.ndarray]:
        """`(lengths, probabilities)`, int64 and float64, ascending, probabilities sum to 1."""
        return _pmf(self)

    def moment(self, power: float) -> float:
        """E[L ** power]."""
        lengths, p = self.pmf()
        return float(np.dot(p, lengths.astype(np.float64) ** power))

    def mean(self) -> float:
        return self.moment(1)

    def windowed(self, window: int) -> float:
        """E[sum over rows of min(row + 1, window)]: the causal (row, column) pairs of one history under a sliding window."""
        lengths, p = self.pmf()
        length = lengths.astype(np.float64)
        inside = np.minimum(length, window)
        return float(np.dot(p, inside * (inside + 1) / 2 + (length - inside) * window))

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """`size` lengths, int64."""
        lengths, p = self.pmf()
        return rng.choice(lengths, size=size, p=p)


def _lognormal_cdf(values: np.ndarray, median: float, sigma: float) -> np.ndarray:
    """P(X <= value) of a lognormal. With `math.erf`, for importing scipy.stats takes longer than most searches."""
    with np.errstate(divide="ignore"):
        z = np.log(values / median) / (sigma * math.sqrt(2.0))
    return np.array([0.5 * (1.0 + math.erf(x)) for x in z])


@functools.lru_cache(maxsize=256)
def _pmf(spec: Lengths) -> tuple[np.ndarray, np.ndarray]:
    if spec.kind == "fixed":
        lengths, p = np.array([spec.maximum]), np.array([1.0])
    elif spec.kind == "uniform":
        lengths = np.arange(spec.minimum, spec.maximum + 1)
        p = np.full(len(lengths), 1.0 / len(lengths))
    elif spec.kind == "histogram":
        lengths, inverse = np.unique(np.array(spec.values), return_inverse=True)
        p = np.bincount(inverse, weights=np.array(spec.weights))
        p = p / p.sum()
    else:
        lengths = np.arange(spec.minimum, spec.maximum + 1)
        edges = np.concatenate([[0.0], lengths[:-1] + 0.5, [np.inf]])
        p = np.diff(_lognormal_cdf(edges, spec.median, spec.sigma))
        p = p / p.sum()
    lengths = lengths.astype(np.int64)
    lengths.setflags(write=False)
    p.setflags(write=False)
    return lengths, p


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """Where training events come from.

    kind: `synthetic` (learnable labels, ids by each table's Zipf exponent), `movielens` (MovieLens-100K, prepared by `planner data movielens`),
    `recbole` (an `.inter` file) or `parquet`; `path` for the latter two, or a folder that `python -m runtime.prepare histories` made of one.
    `max_history` caps a user's past. `num_events` bounds a synthetic stream.
    """

    kind: Literal["synthetic", "movielens", "recbole", "parquet"] = "synthetic"
    path: str | None = None
    max_history: int | None = None
    num_events: int = 100_000
    like_threshold: float = 4.0

    def __post_init__(self) -> None:
        if self.kind in ("recbole", "parquet") and not self.path:
            raise ValueError(f"source: kind {self.kind} needs `path`")
        if self.num_events < 1 or (self.max_history is not None and self.max_history < 1):
            raise ValueError(f"source: num_events and max_history must be >= 1, got {self.num_events} and {self.max_history}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one training job eats.

    `global_batch` samples per optimizer step over all ranks; a layout's local batch is global_batch / (ranks x accumulation). When a model is defined
    per rank, give `local_batch` instead and the global batch follows the world size; exactly one of the two is set. `lengths` maps a sequence's name
    to its distribution; `zipf` overrides id skew per table name. `num_steps` bounds a run; `epochs` repeats a finite source.
    """

    name: str
    lengths: dict[str, Lengths]
    local_batch: int | None = None
    global_batch: int | None = None
    zipf: dict[str, float] = dataclasses.field(default_factory=dict)
    source: EventSource = EventSource()
    num_steps: int | None = None
    epochs: int = 1
    learning_rate: float = 1e-3
    sparse_learning_rate: float = 0.02
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if (self.local_batch is None) == (self.global_batch is None):
            raise ValueError("workload: exactly one of local_batch and global_batch is needed")
        for key in ("local_batch", "global_batch", "num_steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"workload: {key} must be >= 1, got {value}")
        if self.epochs < 1:
            raise ValueError(f"workload: epochs must be >= 1, got {self.epochs}")
        for key in ("learning_rate", "sparse_learning_rate", "weight_decay"):
            if getattr(self, key) < 0:
                raise ValueError(f"workload: {key} must be >= 0, got {getattr(self, key)}")
        for name, exponent in self.zipf.items():
            if exponent < 0:
                raise ValueError(f"workload: zipf of {name} must be >= 0, got {exponent}")

    def global_batch_on(self, world_size: int) -> int:
        """Samples per optimizer step over `world_size` ranks."""
        return self.global_batch if self.global_batch is not None else self.local_batch * world_size
