"""Pieces of the bound over candidates (costmodel.batch has the mathematics): phases as arrays, distinct combinations of columns, chains of tasks."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from costmodel.contention import RATE_FLOOR
from costmodel.stepgraph import COMPUTE, Task

NEVER = -1e30
# Streams whose collectives may run at once: each is charged its even part of what the rate floor leaves (see `simulate.bound`); 1, 2, 3 or 4 of them.
CAPS = np.array([(1.0 - RATE_FLOOR) / n for n in (1, 2, 3, 4)])
NOTHING = Task(name="", stream=COMPUTE, seconds=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Arrays `(n,)` of one phase: D, V, H as above, `compute` seconds, and `taken` `(n, 4)` by how many streams share the rate floor."""

    D: np.ndarray
    V: np.ndarray
    H: np.ndarray
    compute: np.ndarray
    taken: np.ndarray

    def at(self, index: np.ndarray, cap: np.ndarray) -> At:
        return At(D=self.D[index], V=self.V[index], H=self.H[index], W=self.compute[index] + self.taken[index, cap])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """A phase spread over candidates; W = compute + taken."""

    D: np.ndarray
    V: np.ndarray
    H: np.ndarray
    W: np.ndarray

    def after(self, d: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.maximum(d + self.D, h + self.V), h + self.H

    def sliced(self, part: slice) -> At:
        return At(D=self.D[part], V=self.V[part], H=self.H[part], W=self.W[part])


class Keys:
    """Distinct combinations of columns: `of` `(n,)` which one each candidate has, `first` a candidate of each."""

    def __init__(self, *parts: np.ndarray) -> None:
        code, size = np.zeros(len(parts[0]), dtype=np.int64), 1
        for part in parts:
            ranks, count = _ranks(part)
            if size * count > max(1 << 16, 4 * len(code)):
                code, size = _ranks(code)
            code, size = code * count + ranks, size * count
        self.of, self.count = _ranks(code)
        self.first = np.empty(self.count, dtype=np.int64)
        self.first[self.of[::-1]] = np.arange(len(self.of) - 1, -1, -1)


def _ranks(values: np.ndarray) -> tuple[np.ndarray, int]:
    """(rank of each value among the distinct ones, how many these are); a table look-up where the values span little."""
    low, high = int(values.min()), int(values.max())
    if high - low < max(1 << 16, 16 * len(values)):
        seen = np.zeros(high - low + 1, dtype=bool)
        seen[values - low] = True
        rank = np.cumsum(seen) - 1
        return rank[values - low], int(rank[-1]) + 1
    distinct, which = np.unique(values, return_inverse=True)
    return which, len(distinct)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One task of a chain for every sparse key `(keys,)`: seconds, launch seconds, share taken of compute, tier (0: the compute stream)."""

    seconds: np.ndarray
    launch: np.ndarray
    share: np.ndarray
    tier: np.ndarray

    @property
    def compute(self) -> np.ndarray:
        return np.where(self.tier == 0, self.seconds, 0.0)

    @property
    def taken(self) -> np.ndarray:
        """`(keys, 4)`."""
        return np.minimum(self.share[:, None], CAPS) * self.seconds[:, None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Chains of tasks that wait for one another in order, `(n,)`."""

    D: np.ndarray
    V: np.ndarray
    H: np.ndarray
    compute: np.ndarray
    taken: np.ndarray

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> Chains:
        n = len(slots[0].seconds)
        host, end = np.zeros(n), np.full(n, NEVER)
        for slot in slots:
            # an empty slot is no task: nothing of it waits for a launch
            there = (slot.seconds > 0) | (slot.launch > 0)
            host = host + slot.launch
            end = np.where(there, np.maximum(end, host) + slot.seconds, end)
        return cls(D=np.sum([s.seconds for s in slots], axis=0), V=end, H=host, compute=np.sum([s.compute for s in slots], axis=0),
                   taken=np.sum([s.taken for s in slots], axis=0))

    def at(self, index: np.ndarray, cap: np.ndarray) -> At:
        return At(D=self.D[index], V=self.V[index], H=self.H[index], W=self.compute[index] + self.taken[index, cap])
