"""All integer points of a small candidate program, at once: next-best solutions without solving again.

After a few no-good cuts an integer program that is nearly tied everywhere becomes slow to prove, while a program with few choices has few
points. Its own rows are
evaluated for every point: T, L, W, S and Y take the least values that their rows allow, what breaks another row is out.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pulp

if TYPE_CHECKING:
    from planner.ilp import CandidateProgram

MAX_POINTS = 100_000
_SLACK = 1e-9


def num_points(program: CandidateProgram) -> int:
    """How many ways there are to choose counts for every region and table group."""
    rows = [(r.count, len(r.memory)) for r in program.regions] + [(t.count, len(t.weights)) for t in program.tables]
    return math.prod(math.comb(count + choices - 1, choices - 1) for count, choices in rows)


def compositions(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `count` as an ordered sum of `parts` counts."""
    if parts == 1:
        yield (count,)
        return
    for first in range(count + 1):
        for rest in compositions(count - first, parts - 1):
            yield (first, *rest)


class Points:
    """The points of a program as columns: `counts` `(points, choices)` in the order of regions and tables, `seconds` `(points,)` by all
    chains so far."""

    def __init__(self, program: CandidateProgram) -> None:
        self.program = program
        rows = [(r.count, len(r.memory)) for r in program.regions] + [(t.count, len(t.weights)) for t in program.tables]
        blocks = [np.array(list(compositions(count, parts)), dtype=np.float64) for count, parts in rows]
        index = np.indices([len(b) for b in blocks]).reshape(len(blocks), -1)
        self.counts = np.concatenate([b[i] for b, i in zip(blocks, index)], axis=1)
        self.offsets = list(itertools.accumulate([b.shape[1] for b in blocks], initial=0))
        problem = program.build(no_goods=False)
        # a variable that no row of the program uses is none of the problem's
        names = dict.fromkeys([v.name for v in (program.T, program.L, program.W, program.S, program.Y)] + [v.name for v in problem.variables()])
        self.column = {name: k for k, name in enumerate(names)}
        values = np.zeros((len(self.counts), len(self.column)))
        names = [*program.n.items(), *program.x.items()]
        used = [*program.u.items(), *program.v.items()]
        for k, ((_, amount), (_, flag)) in enumerate(zip(names, used)):
            values[:, self.column[amount.name]] = self.counts[:, k]
            if flag is not amount:
                values[:, self.column[flag.name]] = self.counts[:, k] > 0
        self.values = values
        self.feasible = np.ones(len(values), dtype=bool)
        self._settle(problem)
        self.chains = 0
        self.seconds = np.zeros(len(values))
        self.refresh()

    def _settle(self, problem: pulp.LpProblem) -> None:
        """The least L, W, S and Y of every point, then the rows that do not hold."""
        for variable in (self.program.L, self.program.W, self.program.S, self.program.Y):
            column = self.column[variable.name]
            least = np.full(len(self.values), variable.lowBound or 0.0)
            for row in problem.constraints():
                if row.name.startswith(("mean_", "shard_")) and row.get(variable, 0.0):
                    others = sum(c * self.values[:, self.column[v.name]] for v, c in row.items() if v is not variable) + row.constant
                    least = np.maximum(least, -others / row.get(variable, 0.0))
            self.values[:, column] = least
        for row in problem.constraints():
            if row.name.startswith(("memory_", "risk")):
                left = sum(c * self.values[:, self.column[v.name]] for v, c in row.items()) + row.constant
                over = left if row.sense == pulp.LpConstraintLE else -left
                self.feasible &= over <= _SLACK * max(1.0, abs(row.constant))

    def refresh(self) -> None:
        """Takes in the chains that were added."""
        load, any_local = self.values[:, self.column[self.program.L.name]] - 1.0, self.values[:, self.column[self.program.Y.name]]
        shardings = [(t.name, c) for t in self.program.tables for c in t.weights]
        for chain in self.program.cuts[self.chains:]:
            coefficients = np.array([chain.coefficients[r.name].get(c, 0.0) for r in self.program.regions for c in r.memory])
            blocks = self.counts[:, :len(coefficients)] @ coefficients
            local = np.array([chain.tables.get(name, 0.0) * (c.sharding == "data_parallel") for name, c in shardings])
            tables = self.counts[:, len(coefficients):] @ local + chain.once * any_local
            self.seconds = np.maximum(self.seconds, chain.constant + blocks + chain.slope * load + tables)
        self.chains = len(self.program.cuts)

    def best(self) -> int | None:
        """The feasible point with the least seconds, then the least tie-break; None when all are used up."""
        self.refresh()
        seconds = np.where(self.feasible, self.seconds, np.inf)
        if not np.isfinite(seconds.min()):
            return None
        near = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-12))
        return int(near[np.argmin(self.effort()[near])])

    def effort(self) -> np.ndarray:
        tables = [row.effort[c] / row.count for row in self.program.tables for c in row.weights]
        options = [row.effort[c] / row.count for row in self.program.regions for c in row.memory]
        kinds = (self.counts[:, :len(options)] > 0).sum(axis=1)
        return self.counts @ np.array(options + tables) + kinds

    def drop(self, counts: np.ndarray) -> None:
        """Takes the point with these counts out."""
        self.feasible &= (self.counts != counts).any(axis=1)
