"""Linear lower bounds of a step, read off lowered graphs.

A step is at least as long as its critical chain: task durations, host launches, and where collectives slow compute beside them, `share x seconds`
of theirs. Any chain of one plan is a chain of every plan of the same candidate, as options change durations and
not the order of a step (a policy that recomputes puts its recomputation right before the block's backward). So its length, written in the
durations of whatever options a plan has, bounds that plan too:

    step >= constant + sum over regions r, options o of count(r, o) x coefficient(r, o) + slope x (load - 1)
            + sum over data-parallel tables (planner.replication) + once where there is any

where for each kind of task the coefficient counts the sweeps (forward or backward of a micro-batch) in which the chain passes all blocks of the
region, times the option's duration; blocks of a sweep that it passes only in part are charged at the cheapest option. `load` is the heaviest
rank's share of table rows over the mean. Nothing here
knows what a step consists of: a change of the lowering changes the graphs, and the bounds follow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from costmodel.blocks import BatchShape, Block
from costmodel.contention import RATE_FLOOR
from costmodel.model import DTYPE_BYTES, Model
from costmodel.ops import BACKWARD, FORWARD, STEP, op
from costmodel.plan import Plan, RegionOption, RegionPlan
from costmodel.pricer import Pricer
from costmodel.regions import regions
from costmodel.sparse import TableLoads, expected_unique, ids_per_table, skew, state_bytes
from costmodel.stepgraph import COMPUTE, HOST, StepGraph, Task
from planner.space import MIN_COLUMNS, RegionChoice, TableChoice, divisors

Key = tuple[str, str, str, str]
"""(task name, phase, stream, what): what is `seconds`, `host` (launch) or `taken` (share x seconds)."""

SECONDS, LAUNCH, TAKEN = "seconds", "host", "taken"


# --- the critical chain of a graph ---

WINDOW = 16
"""Milestones ahead to which a chain looks for a path of its own from each: about half a micro-batch, as nothing is prefetched further."""
MAX_TASKS = 4000
"""Tasks up to which milestones are ends of regions; in longer graphs (many micro-batches) they are ends of phases."""
_NEVER = float("-inf")


def critical_chain(graph: StepGraph) -> tuple[float, list[tuple[int, str]]]:
    """(lower bound of the simulated step [s], its terms): each term is a task index and what of it the chain is charged; the terms add up to
    the bound.

    Between milestones p before q, the ends of regions and phases, a step takes at least the longest path from p to q, and at least the
    compute in between plus what the
    collectives that run after p and before q take of it. Never below `costmodel.simulate.bound`, which allows paths from the begin only.
    """
    tasks = graph.tasks
    if not tasks:
        return 0.0, []
    compute = [i for i, t in enumerate(tasks) if t.stream == COMPUTE]
    milestones = [-1, *_stops(tasks, compute), len(compute)]
    paths = {}
    for at, p in enumerate(milestones[:-1]):
        reach = milestones[min(at + WINDOW, len(milestones) - 1)]
        until = len(tasks) if p < 0 or reach == len(compute) else compute[reach] + 1
        paths[p] = _paths_from(tasks, compute[p] if p >= 0 else -1, until)
    charge = _Contention(tasks, compute)
    least: dict[int, tuple[float, int, bool]] = {-1: (0.0, -1, False)}
    for at, q in enumerate(milestones[1:], start=1):
        found = (_NEVER, -1, False)
        for p in dict.fromkeys((-1, *milestones[max(0, at - WINDOW) : at])):
            ends = paths[p][1]
            for value, worked in ((ends[compute[q]] if q < len(compute) else max(ends), False), (charge.between(p, q), True)):
                if least[p][0] + value > found[0]:
                    found = (least[p][0] + value, p, worked)
        least[q] = found
    terms: list[tuple[int, str]] = []
    q = len(compute)
    while q >= 0:
        _, p, worked = least[q]
        if worked:
            terms += charge.terms(p, q)
        else:
            start, end = paths[p]
            last = compute[q] if q < len(compute) else max(range(len(tasks)), key=lambda i: end[i])
            terms += _walk_back(tasks, start, end, last, compute[p] if p >= 0 else -1)
        q = p
    return least[len(compute)][0], terms


def _stops(tasks: Sequence[Task], compute: list[int]) -> list[int]:
    """Positions in `compute` of the last task of every region and phase in a row; in a long graph of every phase."""
    parts = [(tasks[i].phase, tasks[i].region if len(tasks) <= MAX_TASKS else "") for i in compute]
    return [p for p in range(len(compute)) if p + 1 == len(compute) or parts[p] != parts[p + 1]]


def _paths_from(tasks: Sequence[Task], root: int, until: int) -> tuple[list[float], list[float]]:
    """(start, end) of tasks before `until` on their longest paths from the end of task `root` (-1: the begin of the step), -inf where there
    is none."""
    start, end = [_NEVER] * len(tasks), [_NEVER] * len(tasks)
    free: dict[str, float] = {}
    host = begin = 0.0 if root < 0 else _NEVER
    if root >= 0:
        start[root] = end[root] = free[tasks[root].stream] = 0.0
    for i in range(root + 1, until):
        task = tasks[i]
        at = free.get(task.stream, begin)
        if task.stream == HOST:
            at = host
        else:
            host += task.host_seconds
            at = max(at, host)
        for d in task.deps:
            if end[d] > at:
                at = end[d]
        start[i] = at
        end[i] = at + task.seconds
        if task.stream == HOST:
            host = end[i]
        else:
            free[task.stream] = end[i]
    return start, end


def _walk_back(tasks: Sequence[Task], start: list[float], end: list[float], i: int, root: int) -> list[tuple[int, str]]:
    """The terms of the longest path from `root` that ends with task i."""
    previous: dict[str, int] = {}
    before = [-1] * len(tasks)
    for at, task in enumerate(tasks):
        before[at] = previous.get(task.stream, -1)
        previous[task.stream] = at
    terms: list[tuple[int, str]] = []
    while i >= 0 and i != root:
        terms.append((i, SECONDS))
        task = tasks[i]
        reasons = [d for d in task.deps if end[d] == start[i]]
        if task.stream != HOST and before[i] >= 0 and end[before[i]] == start[i]:
            reasons.append(before[i])
        if root < 0 and start[i] == 0.0:
            return terms
        if reasons:
            i = max(reasons)
            continue
        # the launch came last: everything launched since the host last waited, then what it waited for
        terms.append((i, "entered by launch"))
        j = i - 1 if task.stream == HOST else i
        while j >= 0 and tasks[j].stream != HOST:
            terms.append((j, LAUNCH))
            j -= 1
        i = j
    return terms


class _Contention:
    """Compute between phase ends and what collectives inside take of it."""

    def __init__(self, tasks: Sequence[Task], compute: list[int]) -> None:
        self.compute = compute
        self.lossy = [i for i, t in enumerate(tasks) if t.sm_fraction and t.seconds]
        cap = contention_cap(tasks)
        released, needed = _windows(tasks, compute)
        self.before = np.concatenate([[0.0], np.cumsum([tasks[i].seconds for i in compute])])
        self.taken = np.array([min(tasks[k].sm_fraction, cap) * tasks[k].seconds for k in self.lossy])
        self.opened = np.array([released[k] for k in self.lossy], dtype=np.int64)
        self.closed = np.array([needed[k] for k in self.lossy], dtype=np.int64)

    def inside(self, p: int, q: int) -> np.ndarray:
        return (self.opened >= p) & (self.closed <= q)

    def between(self, p: int, q: int) -> float:
        return float(self.before[min(q + 1, len(self.compute))] - self.before[p + 1] + self.taken[self.inside(p, q)].sum())

    def terms(self, p: int, q: int) -> list[tuple[int, str]]:
        work = [(i, SECONDS) for i in self.compute[p + 1 : min(q + 1, len(self.compute))]]
        return work + [(self.lossy[k], TAKEN) for k in np.flatnonzero(self.inside(p, q))]


def contention_cap(tasks: Sequence[Task]) -> float:
    """The most that one collective is charged of compute: the rate floor's even part, when several streams may run at once."""
    streams = {t.stream for t in tasks if t.sm_fraction and t.seconds}
    return (1.0 - RATE_FLOOR) / max(1, len(streams))


def _windows(tasks: Sequence[Task], compute: list[int]) -> tuple[list[int], list[int]]:
    """Per task: the position of the last compute task that ends before it may start, and of the first that waits for its end."""
    position = {index: at for at, index in enumerate(compute)}
    released, needed = [-1] * len(tasks), [len(compute)] * len(tasks)
    previous: dict[str, int] = {}
    links = []
    for i, task in enumerate(tasks):
        links.append((*task.deps, previous[task.stream]) if task.stream in previous else task.deps)
        previous[task.stream] = i
        for d in links[i]:
            released[i] = max(released[i], position.get(d, -1), released[d])
    for i in range(len(tasks) - 1, -1, -1):
        for d in links[i]:
            needed[d] = min(needed[d], position.get(i, len(compute)), needed[i])
    return released, needed


# --- durations of options ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds by task key: of one block of each region under each choice, and of the tasks outside regions (`rest`).

    `slopes`: added seconds of a task outside regions per unit of (heaviest rank's load over the mean - 1). `tables`: added seconds of such a task per
    data-parallel table, by table group, less than none where it saves; `once`: added where there is any such table.
    """

    regions: dict[str, dict[RegionChoice, dict[Key, float]]]
    rest: dict[Key, float]
    slopes: dict[Key, float]
    tables: dict[Key, dict[str, float]] = dataclasses.field(default_factory=dict)
    once: dict[Key, float] = dataclasses.field(default_factory=dict)

    def cheapest(self, region: str, key: Key) -> float:
        """The least over the region's choices; a choice without the task takes no time for it."""
        return min(durations.get(key, 0.0) for durations in self.regions[region].values())


def task_keys(task: Task, cap: float) -> dict[Key, float]:
    """What a chain can be charged of one task."""
    name = (task.name, task.phase, task.stream)
    return {(*name, SECONDS): task.seconds, (*name, LAUNCH): task.host_seconds, (*name, TAKEN): min(task.sm_fraction, cap) * task.seconds}


def block_durations(graph: StepGraph) -> dict[str, dict[Key, float]]:
    """Durations of the first block's tasks of every region of a graph whose regions have one option each."""
    cap = contention_cap(graph.tasks)
    found: dict[str, dict[Key, float]] = defaultdict(dict)
    for task in graph.tasks:
        if task.region:
            for key, value in task_keys(task, cap).items():
                found[task.region].setdefault(key, value)
    return found


def own_durations(region: str, block: Block, batch: BatchShape, choice: RegionChoice, prices: Pricer) -> dict[Key, float]:
    """Durations of a block's own passes under a choice, as the lowering makes its tasks."""
    passes = {
        (region, "forward"): prices.block(block, batch, choice.precision, FORWARD),
        (region, "backward"): prices.block(block, batch, choice.precision, BACKWARD),
        (f"recompute {region}", "backward"): prices.recompute(block, batch, choice.precision, choice.checkpoint),
    }
    return {
        (*name, COMPUTE, what): value
        for name, cost in passes.items()
        for what, value in ((SECONDS, cost.seconds), (LAUNCH, cost.host_seconds), (TAKEN, 0.0))
    }


def rest_durations(graph: StepGraph) -> dict[Key, float]:
    """The least duration of every task outside regions, over its repetitions in the micro-batches."""
    cap = contention_cap(graph.tasks)
    found: dict[Key, float] = {}
    for task in graph.tasks:
        if not task.region:
            for key, value in task_keys(task, cap).items():
                found[key] = min(found.get(key, value), value)
    return found


def single_blocks(model: Model) -> Model:
    """The model with one block in each layer group: enough to read durations of blocks, and quick to lower."""
    sequences = tuple(dataclasses.replace(s, layers=tuple(dataclasses.replace(g, count=1) for g in s.layers)) for s in model.sequences)
    return dataclasses.replace(model, sequences=sequences)


def uniform(model: Model, choice: Mapping[str, RegionChoice]) -> tuple[RegionPlan, ...]:
    """Every block of a region under the region's one choice."""
    return tuple(
        RegionPlan(region=r.name, options=(RegionOption(count=r.count, precision=choice[r.name].precision, checkpoint=choice[r.name].checkpoint),))
        for r in regions(model)
    )


def mean_loads(plan: Plan, tokens: Mapping[str, float]) -> TableLoads:
    """What every rank of a sparse group holds and serves when all is spread evenly.

    Sharding does not change these means: a rank draws `unique` rows of each table and serves as many (see costmodel.sparse). Tables that are pinned
    to data_parallel (those of `plan.tables`) send nothing.
    """
    local = {p.table for p in plan.tables if p.sharding == "data_parallel"}
    group = plan.layout.sparse_group
    flat = np.ones(group)
    weights = state = served = 0.0
    held = {}
    for table in plan.model.tables:
        ids = ids_per_table(table, plan.local_batch, dict(tokens))
        rows = elements = distinct = 0.0
        sent = table.count - sum(name in local for name in table.names)
        for name in table.names if plan.workload.zipf else table.names[:1]:
            count = 1 if plan.workload.zipf else table.count
            zipf = skew(table, name, plan.workload)
            unique = expected_unique(table.rows, zipf, ids)
            rows += count * unique
            elements += count * unique * table.dim
            distinct += count * expected_unique(table.rows, zipf, ids * group * plan.accumulation) / group
        share = table.count * table.rows / group
        held[table.name] = np.stack([rows * flat, elements * flat, share * flat, distinct * flat])
        served += elements * sent / table.count
        weights += share * table.dim * DTYPE_BYTES[table.dtype]
        state += state_bytes(table, 1.0, table.dim) * share
    return TableLoads(weights=weights * flat, state=state * flat, host_weights=0.0 * flat, served=served * flat, held=held)


def least_serving(plan: Plan, tokens: Mapping[str, float], served: float, prices: Pricer) -> tuple[float, float]:
    """Least seconds of the (lookup of a micro-batch, update) of a rank that serves at least `served` elements, wherever the tables lie.

    The busiest rank may serve one table only: one whose rows are wide, or of which a step updates few distinct rows, or whose launch has to be paid
    once. So each table counts with its least seconds per element over the shards that a rank may hold, and the cheapest come first up to all that
    there is of them. A time that grows with the shard has its least at one of the sizes tried: a single row shard, a whole table, all of its group.
    """
    group = plan.layout.sparse_group
    rates: list[tuple[float, float, float]] = []
    for table in plan.model.tables:
        ids = ids_per_table(table, plan.local_batch, dict(tokens))
        for zipf, count in Counter(skew(table, name, plan.workload) for name in table.names).items():
            rows = group * expected_unique(table.rows, zipf, ids)
            if rows == 0:
                continue
            distinct = expected_unique(table.rows, zipf, ids * group * plan.accumulation)
            # without curves a time is a fixed part and one that grows with the bytes: least per element on the widest rows and all tables at once
            widths, shares = [table.dim], [float(count)]
            if prices.calibration is not None:
                widths = [table.dim // n for n in divisors(table.dim) if n <= group and (n == 1 or table.dim // n >= MIN_COLUMNS)]
                shares = sorted({1.0, *np.geomspace(1.0 / group, count, 7)})
            found = []
            for width, share in itertools.product(widths, shares):
                shape = {"unique": share * distinct, "dim": width, "rows": share * table.rows, "tables": 1, "dtype": table.dtype}
                elements = share * rows * width
                lookup = prices.ops([op("embedding_lookup", variant="sequence", ids=share * rows, **shape)], FORWARD).seconds
                update = prices.ops([op("embedding_update", variant=table.optimizer, ids=share * rows * plan.accumulation, **shape)], STEP).seconds
                found.append((lookup / elements, update / elements))
            if prices.calibration is not None:
                # on every rank: its own rows of the whole table
                shape = {"unique": distinct, "dim": table.dim, "rows": table.rows, "tables": 1, "dtype": table.dtype}
                own, elements = rows / group, rows / group * table.dim
                lookup = prices.ops([op("embedding_lookup", variant="sequence", ids=own, **shape)], FORWARD).seconds
                update = prices.ops([op("embedding_update", variant=table.optimizer, ids=own * plan.accumulation, **shape)], STEP).seconds
                found.append((lookup / elements, update / elements))
            rates.append((count * rows * table.dim, *np.min(found, axis=0)))
    return _cheapest(served, [(r[1], r[0]) for r in rates]), _cheapest(served, [(r[2], r[0]) for r in rates])


def _cheapest(wanted: float, offers: list[tuple[float, float]]) -> float:
    """Cost of `wanted` elements from (cost each, how many there are), cheapest first."""
    total = 0.0
    for rate, available in sorted(offers):
        taken = min(wanted, available)
        total, wanted = total + rate * taken, wanted - taken
    return total


# --- a chain as a linear function of a plan ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """step >= constant + sum of coefficients[region][choice] x blocks + slope x (load - 1) + sum of tables[group] x its data-parallel tables + once
    where there are any, seconds."""

    constant: float
    coefficients: dict[str, dict[RegionChoice, float]]
    slope: float
    tables: dict[str, float] = dataclasses.field(default_factory=dict)
    once: float = 0.0

    def at(
        self,
        counts: Mapping[str, Mapping[RegionChoice, int]],
        load: float = 1.0,
        tables: Mapping[str, Mapping[TableChoice, int]] = MappingProxyType({}),
    ) -> float:
        """The bound for `counts` of blocks by region and choice, of `tables` by group and sharding."""
        local = {name: sum(n for c, n in by.items() if c.sharding == "data_parallel") for name, by in tables.items()}
        return (
            self.constant
            + self.once * any(local.values())
            + sum(self.tables.get(name, 0.0) * n for name, n in local.items())
            + self.slope * (load - 1.0)
            + sum(self.coefficients[r].get(c, 0.0) * n for r, by_choice in counts.items() for c, n in by_choice.items() if r in self.coefficients)
        )


def cut(graph: StepGraph, durations: Durations, blocks: Mapping[str, int]) -> Cut:
    """The critical chain of `graph` as a bound for every plan of its candidate. `blocks`: block count by region."""
    _, terms = critical_chain(graph)
    tasks = graph.tasks
    by_launch = {i for i, what in terms if what == "entered by launch"}
    # passes of the chain by region, kind of task and sweep over the region's blocks
    passed: dict[tuple[str, Key], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    sweep = _sweeps(tasks, blocks)
    constant = slope = once = 0.0
    local: dict[str, float] = defaultdict(float)
    for i, what in terms:
        if what == "entered by launch":
            continue
        task = tasks[i]
        key = (task.name, task.phase, task.stream, what)
        if not task.region:
            constant += durations.rest.get(key, 0.0)
            slope += durations.slopes.get(key, 0.0)
            once += durations.once.get(key, 0.0)
            for name, seconds in durations.tables.get(key, {}).items():
                local[name] += seconds
            continue
        passed[(task.region, key)][sweep[i]] += 1
        if task.phase == "backward" and task.name == task.region and what == SECONDS and i not in by_launch and not _recomputed_before(tasks, i):
            passed[(task.region, (f"recompute {task.region}", "backward", task.stream, SECONDS))][sweep[i]] += 1
    coefficients: dict[str, dict[RegionChoice, float]] = {r: dict.fromkeys(durations.regions[r], 0.0) for r in durations.regions}
    for (region, key), counts in passed.items():
        whole = sum(n == blocks[region] for n in counts.values())
        extra = sum(counts.values()) - whole * blocks[region]
        constant += extra * durations.cheapest(region, key)
        for choice, seconds in durations.regions[region].items():
            coefficients[region][choice] += whole * seconds.get(key, 0.0)
    return Cut(constant=constant, coefficients=coefficients, slope=slope, tables=dict(local), once=once)


def _recomputed_before(tasks: Sequence[Task], i: int) -> bool:
    return i > 0 and tasks[i - 1].name == f"recompute {tasks[i].region}"


def _sweeps(tasks: Sequence[Task], blocks: Mapping[str, int]) -> list[int]:
    """Which sweep over its region's blocks a task belongs to: tasks of one name, phase and stream come in sweeps of one a block. A recomputation
    belongs to the backward that it precedes."""
    seen: dict[tuple[str, str, str], int] = defaultdict(int)
    sweep = [-1] * len(tasks)
    for i, task in enumerate(tasks):
        if task.region and not task.name.startswith("recompute "):
            name = (task.name, task.phase, task.stream)
            sweep[i] = seen[name] // blocks[task.region]
            seen[name] += 1
            if _recomputed_before(tasks, i):
                sweep[i - 1] = sweep[i]
    return sweep
