"""What data-parallel tables change of a step, as linear lower bounds.

A table on every rank of its sparse group is off the exchanges of ids, rows and gradients, and its dense gradient is all-reduced once a step; replicas
of the group average more bytes. With D the share of an exchange's bytes that such tables keep off it, f an exchange's seconds, g the all-reduce's, B
its bytes:

    f(1 - D)  >=  f(1) - D x the steepest secant of f from 1 downwards, over the shares that there can be       -> steepest
    g(B)      >=  fixed + slope x B for B > 0                                                                   -> below
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from costmodel.model import DTYPE_BYTES, TableGroup
from costmodel.sparse import expected_unique, ids_per_table, state_bytes

REPLICA_TASKS = {
    "tables average": ("all_reduce", True, True, True),
    "tables average weights": ("all_reduce", True, False, True),
    "tables average state": ("all_reduce", False, True, False),
    "tables scatter": ("reduce_scatter", True, True, True),
    "tables scatter weights": ("reduce_scatter", True, False, True),
    "tables scatter state": ("reduce_scatter", False, True, False),
    "tables gather forward": ("all_gather", True, False, False),
    "tables gather backward": ("all_gather", True, True, False),
    "tables gather lookup": ("all_gather", True, False, False),
    "tables gather update": ("all_gather", True, True, False),
    "tables gather next": ("all_gather", True, False, False),
}
"""Collectives over the replicas of a sparse group (`costmodel.replicas`), which grow with the bytes that a rank holds: kind, and whether weights,
state and what 16-bit weights are wider on their way are in them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalTable:
    """One of `count` tables that may be on every rank: rows that a rank asks for and their elements in a micro-batch (0 where it is pinned there:
    then no exchange has it), bytes of its gradient, bytes (weights, state, extra of 16-bit weights that travel as fp32) that a rank holds more of
    it."""

    name: str
    count: int
    rows: float
    elements: float
    gradient: float
    weights: float
    state: float
    widened: float

    @classmethod
    def of(cls, name: str, count: int, table: TableGroup, zipf: float, samples: float, tokens: dict[str, float], group: int, *,
           pinned: bool) -> LocalTable:
        rows = 0.0 if pinned else expected_unique(table.rows, zipf, ids_per_table(table, samples, tokens))
        more, each = 1.0 - 1.0 / group, DTYPE_BYTES[table.dtype]
        return cls(name=name, count=count, rows=rows, elements=rows * table.dim, gradient=4.0 * table.rows * (table.dim + 1),
                   weights=more * table.rows * table.dim * each, state=more * state_bytes(table, 1.0, table.dim) * table.rows,
                   widened=more * table.rows * table.dim * 2.0 * (each < 4))

    def held(self, task: str) -> float:
        """Bytes that a collective over replicas has more of."""
        _, *parts = REPLICA_TASKS[task]
        return sum(size for size, there in zip((self.weights, self.state, self.widened), parts) if there)


def steepest(seconds: Callable[[float], float], most: float) -> float:
    """The most that `seconds(1 - D)` falls per D, for D up to `most`."""
    if most <= 0:
        return 0.0
    whole = seconds(1.0)
    return max(0.0, *((whole - seconds(max(0.0, 1.0 - share))) / share for share in np.linspace(most / 8, most, 8)))


def below(seconds: Callable[[float], float], sizes: Sequence[float]) -> tuple[float, float]:
    """(fixed, slope) of a line from the least to the largest of `sizes` that is nowhere above `seconds`; both >= 0."""
    grid = np.geomspace(min(sizes), max(max(sizes), min(sizes) * 1.01), 12)
    found = np.array([seconds(float(size)) for size in grid])
    slope = max(0.0, float((found[-1] - found[0]) / (grid[-1] - grid[0])))
    fixed = float((found - slope * grid).min())
    return (fixed, slope) if fixed >= 0 else (0.0, float((found / grid).min()))
