"""The integer program of one candidate: options per region and sharding per table group.

    sets        r regions, o options of r (precision, checkpoint), in the order of the plan; g table groups, s sharding choices of g
    variables   n[r,o]  blocks of region r under option o, integer      u[r,o] = 1 when n[r,o] > 0
                x[g,s]  tables of group g sharded as s, integer         v[g,s] = 1 when x[g,s] > 0
                T       step time [ms]; L >= 1 heaviest rank's rows over the mean; W, S fullest rank's table and state bytes [GiB]
                d[g]    the x[g,s] of s = data-parallel, local(g) the share of an even rank's rows that one of them keeps off the exchange;
                Y       1 when any table is data-parallel

    minimise    T + tie-break

    every block and table has one option                                                  -> add_unique_option_constraint
        sum_o n[r,o] = count(r),  sum_s x[g,s] = count(g),  u <= n <= count u,  v <= x <= count v
    a step lasts at least as long as each chain found (planner.bounds)                    -> add_time_constraint
        T >= constant + sum n[r,o] coefficient[r,o] + slope (L - 1) + sum d[g] coefficient[g] + once Y,  Y >= v[g,data-parallel]
    the heaviest rank carries the mean and the largest unsplittable shard                 -> add_table_load_constraint
        L >= served(shard of g,s) v[g,s] / mean served + sum d[g] local(g),   W >= sum x[g,s] bytes(g,s) / G,  W >= bytes(shard) v[g,s],  S alike
    memory at the end of forward, in each run of equal blocks of backward, in the sparse phase and in the optimizer fits
                                                                                          -> add_memory_constraint
        resting + W + S + buffer L + sum d[g] dense(g) + sum over blocks up to there (saved + kept unsharded) + workspace + gradients <= usable
    numeric risk                                                                          -> add_risk_constraint
        sum n[r,o] risk(o) <= budget
    solutions already seen are cut off                                                    -> add_no_good_constraint
        sum over counts of [n or x is above what it was] >= 1

T is exact for the chains that are in: `planner.search` adds the critical chain of each solution until its own bound is met. Memory is exact up to the
parameters that a region's first block finds gathered of its neighbour, of which the least is taken; every solution is checked again by the
cost model. Identical blocks and tables are tied by counts, dominated options never enter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pulp

from costmodel.memory import BlockMemory
from planner.bounds import Cut, Durations
from planner.points import MAX_POINTS, Points, num_points
from planner.solver import Solution, solve
from planner.space import CHECKPOINTS, PRECISIONS, RegionChoice, TableChoice

GIB = 2.0**30
MILLI = 1e-3
ENUMERATE_AFTER = 3
TIE_BREAK = 1e-7
"""Weight of the tie-break against the first chain: below any gap that is ever asked for, above the solver's tolerance."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow:
    """A region in the program: blocks, choices with their memory per block, in plan order. `sharded`: bytes of one block's shard of parameters."""

    name: str
    count: int
    memory: dict[RegionChoice, BlockMemory]
    sharded: float

    @property
    def effort(self) -> dict[RegionChoice, int]:
        """Tie-break: wider formats first, then less recomputation."""
        ranked = sorted(self.memory, key=lambda c: (PRECISIONS.index(c.precision), CHECKPOINTS.index(c.checkpoint)))
        return {c: rank for rank, c in enumerate(ranked, start=1)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A table group in the program. Per choice: device bytes per rank of one table spread evenly, bytes and served share of its largest shard.

    `state`: the same for the optimizer's state; `served`: elements of the largest shard over the mean rank's elements; `effort`: tie-break. `local`:
    share of the mean rank's elements that one data-parallel table keeps off the exchange, `dense`: bytes that its buffers take more.
    """

    name: str
    count: int
    weights: dict[TableChoice, float]
    shard: dict[TableChoice, float]
    state: dict[TableChoice, float]
    shard_state: dict[TableChoice, float]
    served: dict[TableChoice, float]
    effort: dict[TableChoice, float]
    local: float = 0.0
    dense: float = 0.0

    @property
    def replicated(self) -> tuple[TableChoice, ...]:
        """Its data-parallel choice, if it has one."""
        return tuple(c for c in self.weights if c.sharding == "data_parallel")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """The candidate's memory beside tables and blocks, bytes: `resting` (parameters, optimizer, input, buffers at even load), `buffer` (what
    an evenly
    loaded rank's exchange takes, grows with L), `gradients` of all blocks, `embeddings` kept until backward, `usable` (allocated bytes that
    still fit). tables_in_flight: whole shards of fully sharded 2D are there at the update, tables_early: states from there to the next backward."""

    resting: float
    buffer: float
    gradients: float
    usable: float
    embeddings: float
    accumulates: bool
    keeps_unsharded: bool
    table_share: float = 1.0
    tables_in_flight: bool = False
    tables_early: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A solution in words: counts by region and option, by table group and sharding; what the program says of time, and its proven bound [s]."""

    regions: dict[str, dict[RegionChoice, int]]
    tables: dict[str, dict[TableChoice, int]]
    seconds: float
    bound: float
    gap: float
    optimal: bool

    def key(self) -> tuple:
        return (
            tuple((r, tuple(sorted((c.precision, c.checkpoint, n) for c, n in by.items() if n))) for r, by in self.regions.items()),
            tuple((g, tuple(sorted((c.name, n) for c, n in by.items() if n))) for g, by in self.tables.items()),
        )


class CandidateProgram:
    """One candidate's MILP, kept between solves so that chains and no-good cuts add up."""

    def __init__(
        self, *, regions: Sequence[RegionRow], tables: Sequence[TableRow], memory: MemoryRow, durations: Durations, risk_budget: float | None = None
    ) -> None:
        self.regions, self.tables, self.memory, self.durations, self.risk_budget = regions, tables, memory, durations, risk_budget
        self.cuts: list[Cut] = []
        self.no_goods: list[Choice] = []
        self.points: Points | None = None
        self._dropped = 0

    # --- the program ---

    def build(self, *, extra_memory: float = 0.0, relax_memory: bool = False, no_goods: bool = True) -> pulp.LpProblem:
        """The program with all chains and cuts so far. `no_goods` leaves seen solutions out. `extra_memory` [bytes] on top of what is
        usable; `relax_memory` minimises the bytes that are
        missing instead of time."""
        problem = pulp.LpProblem("candidate", pulp.LpMinimize)
        self.add_variables(problem)
        missing = problem.add_variable("missing", 0, None) if relax_memory else None
        if missing is not None:
            problem += missing
        else:
            problem += self.T + self.tie_break()
        self.add_unique_option_constraint(problem)
        self.add_time_constraint(problem)
        self.add_table_load_constraint(problem)
        self.add_memory_constraint(problem, self.memory.usable + extra_memory, missing)
        self.add_risk_constraint(problem)
        if no_goods:
            self.add_no_good_constraint(problem)
        return problem

    def add_variables(self, problem: pulp.LpProblem) -> None:
        self.T = problem.add_variable("T", 0)
        self.L, self.W, self.S = problem.add_variable("L", 1), problem.add_variable("W", 0), problem.add_variable("S", 0)
        self.Y = problem.add_variable("Y", 0, 1)
        self.n, self.u, self.x, self.v = {}, {}, {}, {}
        for i, row in enumerate(self.regions):
            for j, choice in enumerate(row.memory):
                self.n[row.name, choice] = problem.add_variable(f"n_{i}_{j}", 0, row.count, cat="Integer")
                self.u[row.name, choice] = self.n[row.name, choice] if row.count == 1 else problem.add_variable(f"u_{i}_{j}", 0, 1, cat="Integer")
        for i, row in enumerate(self.tables):
            for j, choice in enumerate(row.weights):
                self.x[row.name, choice] = problem.add_variable(f"x_{i}_{j}", 0, row.count, cat="Integer")
                self.v[row.name, choice] = self.x[row.name, choice] if row.count == 1 else problem.add_variable(f"v_{i}_{j}", 0, 1, cat="Integer")

    def tie_break(self) -> pulp.LpAffineExpression:
        """Between plans of equal time: fewer shards, less recomputation, fewer kinds of options in one region."""
        scale = TIE_BREAK * self.scale / MILLI
        tables = [row.effort[c] / row.count * self.x[row.name, c] for row in self.tables for c in row.weights]
        options = [row.effort[c] / row.count * self.n[row.name, c] + self.u[row.name, c] for row in self.regions for c in row.memory]
        return scale / max(1, len(tables) + 3 * len(options)) * pulp.lpSum(tables + options)

    @property
    def scale(self) -> float:
        """Seconds of the first chain at its constant and cheapest options: the size of T."""
        if not self.cuts:
            return 1.0
        first = self.cuts[0]
        return first.constant + sum(row.count * min(first.coefficients[row.name].values(), default=0.0) for row in self.regions) or 1.0

    def add_unique_option_constraint(self, problem: pulp.LpProblem) -> None:
        for kind, rows, amount, used in (
            ("region", [(r.name, r.count, r.memory) for r in self.regions], self.n, self.u),
            ("table", [(t.name, t.count, t.weights) for t in self.tables], self.x, self.v),
        ):
            for i, (name, count, choices) in enumerate(rows):
                problem += pulp.lpSum(amount[name, c] for c in choices) == count, f"one_option_{kind}_{i}"
                if count > 1:
                    for j, choice in enumerate(choices):
                        problem += amount[name, choice] <= count * used[name, choice], f"used_{kind}_{i}_{j}"
                        problem += used[name, choice] <= amount[name, choice], f"unused_{kind}_{i}_{j}"

    def add_time_constraint(self, problem: pulp.LpProblem) -> None:
        for k, chain in enumerate(self.cuts):
            blocks = pulp.lpSum(chain.coefficients[row.name].get(c, 0.0) / MILLI * self.n[row.name, c] for row in self.regions for c in row.memory)
            tables = pulp.lpSum(chain.tables.get(row.name, 0.0) / MILLI * self.x[row.name, c] for row in self.tables for c in row.replicated)
            time = chain.constant / MILLI + blocks + chain.slope / MILLI * (self.L - 1) + tables + chain.once / MILLI * self.Y
            problem += time <= self.T, f"chain_{k}"
        for i, row in enumerate(self.tables):
            for c in row.replicated:
                problem += self.v[row.name, c] <= self.Y, f"shard_replicated_{i}"

    def add_table_load_constraint(self, problem: pulp.LpProblem) -> None:
        for name, variable, mean, largest in (("weights", self.W, "weights", "shard"), ("state", self.S, "state", "shard_state")):
            problem += (
                variable >= pulp.lpSum(getattr(row, mean)[c] / GIB * self.x[row.name, c] for row in self.tables for c in row.weights),
                f"mean_{name}",
            )
            for i, row in enumerate(self.tables):
                for j, c in enumerate(row.weights):
                    if getattr(row, largest)[c] > getattr(row, mean)[c] * row.count:
                        problem += variable >= getattr(row, largest)[c] / GIB * self.v[row.name, c], f"shard_{name}_{i}_{j}"
        local = pulp.lpSum(row.local * self.x[row.name, c] for row in self.tables for c in row.replicated if row.local)
        most = sum(row.local * row.count for row in self.tables if row.replicated)
        for i, row in enumerate(self.tables):
            for j, c in enumerate(row.weights):
                if row.served[c] + most > 1.0 and row.served[c] > 0.0:
                    problem += row.served[c] * self.v[row.name, c] + local <= self.L, f"shard_load_{i}_{j}"

    def add_memory_constraint(self, problem: pulp.LpProblem, usable: float, missing: pulp.LpVariable | None) -> None:
        memory = self.memory
        tables = memory.table_share * (self.W + self.S)
        dense = pulp.lpSum(row.dense / GIB * self.x[row.name, c] for row in self.tables for c in row.replicated)
        resting = (memory.resting - memory.buffer) / GIB + tables + memory.buffer / GIB * self.L + dense
        right = usable / GIB if missing is None else usable / GIB + missing
        for name, bytes_there in self.peaks():
            early = self.S if memory.tables_early and name == "forward" else 0
            problem += resting + memory.embeddings / GIB + bytes_there + early <= right, f"memory_{name}"
        if memory.tables_in_flight:
            problem += resting + self.W + self.S + max(memory.embeddings, memory.gradients) / GIB <= right, "memory_sparse"
        problem += resting + memory.gradients / GIB <= right, "memory_optimizer"

    def peaks(self) -> Iterable[tuple[str, pulp.LpAffineExpression]]:
        """(name, GiB over the resting ones) at the end of forward and at both ends of every run of equal blocks in backward."""
        keep, memory = self.memory.keeps_unsharded, self.memory
        kept = {(row.name, c): m.saved + (m.unsharded if keep else 0.0) for row in self.regions for c, m in row.memory.items()}
        everything = pulp.lpSum(kept[key] / GIB * self.n[key] for key in kept)
        yield "forward", everything + (memory.gradients / GIB if memory.accumulates else 0)
        before: list[pulp.LpAffineExpression] = []
        neighbour = 0.0
        gradients_behind = sum(row.sharded * row.count for row in self.regions)
        for i, row in enumerate(self.regions):
            gradients_behind -= row.sharded * row.count
            own_neighbour = min(m.unsharded for m in row.memory.values())
            least = min(neighbour, own_neighbour) if row.count > 1 else neighbour
            for j, (c, m) in enumerate(row.memory.items()):
                earlier, later = list(row.memory)[:j], list(row.memory)[j + 1 :]
                there = max(0.0, m.whole - m.saved) + m.workspace + m.unsharded + (0.0 if keep else m.unsharded + least)
                mine = there / GIB * self.u[row.name, c]
                prior = before + [kept[row.name, o] / GIB * self.n[row.name, o] for o in earlier]
                after = [self.n[row.name, o] for o in later]
                for end, own, behind in (
                    ("last", self.n[row.name, c], after),
                    ("first", self.u[row.name, c], [*after, self.n[row.name, c] - self.u[row.name, c]]),
                ):
                    if end == "first" and row.count == 1:
                        continue
                    gradients = memory.gradients / GIB if memory.accumulates else gradients_behind / GIB + row.sharded / GIB * pulp.lpSum(behind)
                    yield f"backward_{i}_{j}_{end}", pulp.lpSum(prior) + kept[row.name, c] / GIB * own + mine + gradients
            before += [kept[row.name, c] / GIB * self.n[row.name, c] for c in row.memory]
            neighbour = own_neighbour

    def add_risk_constraint(self, problem: pulp.LpProblem) -> None:
        if self.risk_budget is not None:
            problem += pulp.lpSum(c.risk * self.n[row.name, c] for row in self.regions for c in row.memory) <= self.risk_budget, "risk"

    def add_no_good_constraint(self, problem: pulp.LpProblem) -> None:
        """A solution that differs from one seen has a count above it, as the counts of a row add up; a binary tells where the count is not
        one itself."""
        for k, seen in enumerate(self.no_goods):
            moved = []
            pairs = itertools.chain(
                ((self.n, row.name, row.memory, row.count, seen.regions) for row in self.regions),
                ((self.x, row.name, row.weights, row.count, seen.tables) for row in self.tables),
            )
            for index, (variables, name, choices, count, counts) in enumerate(pairs):
                if len(choices) == 1:
                    continue
                for j, c in enumerate(choices):
                    variable, value = variables[name, c], counts[name].get(c, 0)
                    if value == 0:
                        if count == 1:
                            moved.append(variable)
                            continue
                    elif value == count:
                        continue
                    up = problem.add_variable(f"up_{k}_{index}_{j}", 0, 1, cat="Integer")
                    problem += variable >= (value + 1) * up, f"rise_{k}_{index}_{j}"
                    moved.append(up)
            problem += pulp.lpSum(moved) >= 1, f"no_good_{k}"

    # --- solving ---

    def solve(self, *, time_limit: float | None, gap: float) -> Choice | None:
        """The best choice under all chains and cuts so far; None when there is none (proven). Raises TimeoutError when the limit came first.

        From the `ENUMERATE_AFTER`-th solution of a program with few points on, all points are looked through instead.
        """
        if len(self.no_goods) >= ENUMERATE_AFTER and num_points(self) <= MAX_POINTS:
            return self.next_point()
        solution = solve(self.build(), time_limit=time_limit, gap=gap)
        if solution.status == "infeasible":
            return None
        if not solution.has_values:
            raise TimeoutError("no solution within the time limit")
        return self.read(solution)

    def next_point(self) -> Choice | None:
        """The best point that is not among those seen."""
        if self.points is None:
            self.points = Points(self)
        points = self.points
        for seen in self.no_goods[self._dropped :]:
            points.drop(
                np.array(
                    [seen.regions[r.name].get(c, 0) for r in self.regions for c in r.memory]
                    + [seen.tables[t.name].get(c, 0) for t in self.tables for c in t.weights],
                    dtype=np.float64,
                )
            )
        self._dropped = len(self.no_goods)
        k = points.best()
        if k is None:
            return None
        counts = iter(points.counts[k])
        regions = {r.name: {c: round(next(counts)) for c in r.memory} for r in self.regions}
        tables = {t.name: {c: round(next(counts)) for c in t.weights} for t in self.tables}
        seconds = float(points.seconds[k])
        return Choice(regions=regions, tables=tables, seconds=seconds, bound=seconds, gap=0.0, optimal=True)

    def read(self, solution: Solution) -> Choice:
        """Counts of a solution; the tie-break is taken off its time and bound."""
        value = solution.values
        regions = {row.name: {c: round(value[self.n[row.name, c].name]) for c in row.memory} for row in self.regions}
        tables = {row.name: {c: round(value[self.x[row.name, c].name]) for c in row.weights} for row in self.tables}
        seconds = value["T"] * MILLI
        assert solution.bound is not None and solution.gap is not None
        most = TIE_BREAK * self.scale
        return Choice(
            regions=regions,
            tables=tables,
            seconds=seconds,
            bound=min(seconds, solution.bound * MILLI - most),
            gap=solution.gap,
            optimal=solution.status == "optimal",
        )

    def prices(self) -> dict[str, float]:
        """Shadow prices of the linear relaxation: seconds per GiB for `memory_*`, per unit of risk for `risk`; binding rows only."""
        solution = solve(self.build(), relax=True)
        wanted = {name: dual * MILLI for name, dual in solution.duals.items() if name.startswith(("memory_", "risk")) and abs(dual) > 1e-9}
        return dict(sorted(wanted.items(), key=lambda item: item[1]))


def missing_memory(program: CandidateProgram) -> tuple[float, Choice | None]:
    """(bytes that the leanest choice lacks, that choice): 0 when something fits; the choice is None when even unlimited memory helps nothing."""
    solution = solve(program.build(relax_memory=True))
    if not solution.has_values:
        return 0.0, None
    value = solution.values
    choice = Choice(
        regions={row.name: {c: round(value[program.n[row.name, c].name]) for c in row.memory} for row in program.regions},
        tables={row.name: {c: round(value[program.x[row.name, c].name]) for c in row.weights} for row in program.tables},
        seconds=0.0,
        bound=0.0,
        gap=0.0,
        optimal=True,
    )
    return max(0.0, value["missing"]) * GIB, choice


def undominated(
    choices: Sequence[RegionChoice], durations: Mapping[RegionChoice, Mapping], memory: Mapping[RegionChoice, BlockMemory], *, risk_matters: bool
) -> tuple[tuple[RegionChoice, ...], dict[RegionChoice, RegionChoice]]:
    """(choices that no other beats in every duration, byte and risk; dominated choice -> its better). Of equals the first stays."""
    kept: list[RegionChoice] = []
    worse: dict[RegionChoice, RegionChoice] = {}

    keys = sorted({k for c in choices for k in durations[c]})
    figures = {
        c: np.array(
            [durations[c].get(k, 0.0) for k in keys]
            + [memory[c].saved, memory[c].whole - memory[c].saved + memory[c].workspace, memory[c].unsharded, c.risk * risk_matters]
        )
        for c in choices
    }

    def beats(a: RegionChoice, b: RegionChoice) -> bool:
        return bool((figures[a] <= figures[b]).all())

    for choice in choices:
        by = next((k for k in kept if beats(k, choice)), None)
        if by is not None:
            worse[choice] = by
            continue
        for other in [k for k in kept if beats(choice, k)]:
            kept.remove(other)
            worse[other] = choice
        kept.append(choice)
    return tuple(kept), worse


def undominated_tables(row: TableRow) -> TableRow:
    """The table group without shardings that another one beats in bytes, load and effort: the program's bound stays what it is. Data-parallel tables
    also change the step, so they are beside the others."""
    fields = ("weights", "shard", "state", "shard_state", "served", "effort")

    def figures(c: TableChoice) -> tuple[float, ...]:
        # what an even load holds anyway does not count
        return tuple(max(1.0, row.served[c]) if f == "served" else getattr(row, f)[c] for f in fields)

    kept: list[TableChoice] = []
    for choice in sorted(row.weights, key=lambda c: row.effort[c]):
        beside = choice in row.replicated
        if beside or not any(all(a <= b for a, b in zip(figures(k), figures(choice))) for k in kept if k not in row.replicated):
            kept.append(choice)
    kept = [c for c in row.weights if c in kept]
    return dataclasses.replace(row, **{f: {c: getattr(row, f)[c] for c in kept} for f in fields})
