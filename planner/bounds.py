"""Linear lower bounds of a step, read off lowered graphs.

The bound of a graph (`costmodel.simulate.bound`) is the length of one critical chain: task durations, host launches, and where collectives slow
compute beside them, `share x seconds` of theirs. Any chain of one plan is a chain of every plan of the same candidate, as options change durations and
not the order of a step (a policy that recomputes puts its recomputation right before the block's backward). So its length, written in the
durations of whatever options a plan has, bounds that plan too:

    step >= constant + sum over regions r, options o of count(r, o) x coefficient(r, o) + slope x (load - 1)

where for each kind of task the coefficient counts the sweeps (forward or backward of a micro-batch) in which the chain passes all blocks of the
region, times the option's duration; blocks of a sweep that it passes only in part are charged at the cheapest option. `load` is the heaviest rank's share of table rows over the mean. Nothing here
knows what a step consists of: a change of the lowering changes the graphs, and the bounds follow.
"""
from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from costmodel.contention import RATE_FLOOR
from costmodel.model import DTYPE_BYTES, Model
from costmodel.plan import Plan, RegionOption, RegionPlan
from costmodel.regions import regions
from costmodel.sparse import TableLoads, expected_unique, ids_per_table, skew, state_bytes
from costmodel.stepgraph import COMPUTE, HOST, StepGraph, Task
from planner.space import RegionChoice

Key = tuple[str, str, str, str]
"""(task name, phase, stream, what): what is `seconds`, `host` (launch) or `taken` (share x seconds)."""

SECONDS, LAUNCH, TAKEN = "seconds", "host", "taken"


# --- the critical chain of a graph ---

def critical_chain(graph: StepGraph) -> tuple[float, list[tuple[int, str]]]:
    """(bound of the graph [s], its terms): each term is a task index and what of it the chain is charged; the terms add up to the bound."""
    tasks = graph.tasks
    if not tasks:
        return 0.0, []
    start, end, issue = _free_schedule(tasks)
    last = max(range(len(tasks)), key=lambda i: end[i])
    free = _walk_back(tasks, start, end, last)
    contended = _contended_chain(tasks, start, end)
    if contended is not None and contended[0] > end[last]:
        return contended
    return end[last], free


def _free_schedule(tasks: Sequence[Task]) -> tuple[list[float], list[float], list[float]]:
    start, end, issue = ([0.0] * len(tasks) for _ in range(3))
    free: dict[str, float] = defaultdict(float)
    host = 0.0
    for i, task in enumerate(tasks):
        ready = max((end[d] for d in task.deps), default=0.0)
        if task.stream == HOST:
            start[i] = max(host, ready)
            host = end[i] = start[i] + task.seconds
        else:
            host += task.host_seconds
            start[i] = max(host, free[task.stream], ready)
            free[task.stream] = end[i] = start[i] + task.seconds
        issue[i] = host
    return start, end, issue


def _walk_back(tasks: Sequence[Task], start: list[float], end: list[float], i: int) -> list[tuple[int, str]]:
    """The terms of the longest path that ends with task i."""
    previous: dict[str, int] = {}
    before = [-1] * len(tasks)
    for at, task in enumerate(tasks):
        before[at] = previous.get(task.stream, -1)
        previous[task.stream] = at
    terms: list[tuple[int, str]] = []
    while i >= 0:
        terms.append((i, SECONDS))
        task = tasks[i]
        reasons = [d for d in task.deps if end[d] == start[i]]
        if task.stream != HOST and before[i] >= 0 and end[before[i]] == start[i]:
            reasons.append(before[i])
        if start[i] == 0.0:
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


def _contended_chain(tasks: Sequence[Task], start: list[float], end: list[float]) -> tuple[float, list[tuple[int, str]]] | None:
    """The same for chains over whole phases: compute of the phases plus what the collectives inside them take from it."""
    lossy = [i for i, t in enumerate(tasks) if t.sm_fraction and t.seconds]
    compute = [i for i, t in enumerate(tasks) if t.stream == COMPUTE]
    if not lossy or not compute:
        return None
    cap = contention_cap(tasks)
    released, needed = _windows(tasks, compute)
    before = np.concatenate([[0.0], np.cumsum([tasks[i].seconds for i in compute])])
    taken = np.array([min(tasks[k].sm_fraction, cap) * tasks[k].seconds for k in lossy])
    opened, closed = np.array([released[k] for k in lossy]), np.array([needed[k] for k in lossy])
    stops = [p for p in range(len(compute)) if p + 1 == len(compute) or tasks[compute[p]].phase != tasks[compute[p + 1]].phase]
    # milestone -> (least time, the one before it or None for a free path)
    least: dict[int, tuple[float, int | None]] = {-1: (0.0, None)}
    for q in [*stops, len(compute)]:
        found: tuple[float, int | None] = (end[compute[q]] if q < len(compute) else max(end), None)
        for p, (at, _) in least.items():
            inside = float(taken[(opened >= p) & (closed <= q)].sum())
            value = at + float(before[min(q + 1, len(compute))] - before[p + 1]) + inside
            if value > found[0]:
                found = (value, p)
        least[q] = found
    terms: list[tuple[int, str]] = []
    q = len(compute)
    while q >= 0:
        p = least[q][1]
        if p is None:
            last = compute[q] if q < len(compute) else max(range(len(tasks)), key=lambda i: end[i])
            terms += _walk_back(tasks, start, end, last)
            break
        terms += [(i, SECONDS) for i in compute[p + 1:min(q + 1, len(compute))]]
        terms += [(k, TAKEN) for k, o, c in zip(lossy, opened, closed) if o >= p and c <= q]
        q = p
    return least[len(compute)][0], terms


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

    `slopes`: added seconds of a task outside regions per unit of (heaviest rank's load over the mean - 1).
    """

    regions: dict[str, dict[RegionChoice, dict[Key, float]]]
    rest: dict[Key, float]
    slopes: dict[Key, float]

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
    return tuple(RegionPlan(region=r.name, options=(RegionOption(count=r.count, precision=choice[r.name].precision,
                                                                 checkpoint=choice[r.name].checkpoint),)) for r in regions(model))


def mean_loads(plan: Plan, tokens: Mapping[str, float], scale: float = 1.0) -> TableLoads:
    """What every rank of a sparse group holds and serves when all is spread evenly, with rows served `scale` times over.

    Sharding does not change these means: a rank draws `unique` rows of each table and serves as many (see costmodel.sparse).
    """
    group = plan.layout.sparse_group
    flat = np.ones(group)
    weights = state = served = 0.0
    held = {}
    for table in plan.model.tables:
        ids = ids_per_table(table, plan.local_batch, dict(tokens))
        rows = elements = distinct = 0.0
        for name in table.names if plan.workload.zipf else table.names[:1]:
            count = 1 if plan.workload.zipf else table.count
            zipf = skew(table, name, plan.workload)
            unique = expected_unique(table.rows, zipf, ids)
            rows += count * unique * scale
            elements += count * unique * table.dim * scale
            distinct += count * expected_unique(table.rows, zipf, ids * group * plan.accumulation) / group * scale
        share = table.count * table.rows / group
        held[table.name] = np.stack([rows * flat, elements * flat, share * flat, distinct * flat])
        served += elements
        weights += share * table.dim * DTYPE_BYTES[table.dtype]
        state += state_bytes(table, 1.0, table.dim) * share
    return TableLoads(weights=weights * flat, state=state * flat, host_weights=0.0 * flat, served=served * flat, held=held)


# --- a chain as a linear function of a plan ---

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """step >= constant + sum of coefficients[region][choice] x blocks + slope x (load - 1), seconds."""

    constant: float
    coefficients: dict[str, dict[RegionChoice, float]]
    slope: float

    def at(self, counts: Mapping[str, Mapping[RegionChoice, int]], load: float = 1.0) -> float:
        """The bound for `counts` of blocks by region and choice."""
        return (self.constant + self.slope * (load - 1.0)
                + sum(self.coefficients[r].get(c, 0.0) * n for r, by_choice in counts.items() for c, n in by_choice.items() if r in self.coefficients))


def cut(graph: StepGraph, durations: Durations, blocks: Mapping[str, int]) -> Cut:
    """The critical chain of `graph` as a bound for every plan of its candidate. `blocks`: block count by region."""
    _, terms = critical_chain(graph)
    tasks = graph.tasks
    by_launch = {i for i, what in terms if what == "entered by launch"}
    # passes of the chain by region, kind of task and sweep over the region's blocks
    passed: dict[tuple[str, Key], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    sweep = _sweeps(tasks, blocks)
    constant = slope = 0.0
    for i, what in terms:
        if what == "entered by launch":
            continue
        task = tasks[i]
        key = (task.name, task.phase, task.stream, what)
        if not task.region:
            constant += durations.rest.get(key, 0.0)
            slope += durations.slopes.get(key, 0.0)
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
    return Cut(constant=constant, coefficients=coefficients, slope=slope)


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
