"""Event simulation of a step graph, and a closed-form bound that it never falls below.

A stream runs its tasks one at a time in list order. The host launches tasks in list order; a task starts when it is launched, its
dependencies have ended
and its stream is free. Compute beside collectives runs at the rate

    1 - sum of the shares of the collectives that run          (at least RATE_FLOOR)

so a task's end is known once every collective that may start before it is known. Those are exactly the ones that depend on nothing later: one
pass over the compute stream, resolving the others as far as they go, gives the exact schedule without an event queue.

A collective takes its seconds from when the last rank has come to it; a rank that came earlier waits inside of it, and its compute meanwhile lacks
the SMs that the collective holds (`waiting_fraction`). `together` gives the schedules of several ranks that meet so in every collective.

bound: the schedule without contention (a longest path: every order above is an edge), and for compute tasks p before q

    end(q) >= end(p) + compute between + sum of share x seconds of the collectives that run after p and before q

because compute proceeds at most at the rate above. p and q are the last compute tasks of each phase, the begin and the end of the step.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from costmodel.contention import RATE_FLOOR
from costmodel.stepgraph import COMPUTE, HOST, PHASES, StepGraph, Task

_UNKNOWN = -1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step, seconds throughout.

    spans: (task index, start, end) in task order. exposed: compute-stream waits for collectives by tier; alone: a collective runs (or waits for
    another rank) and no compute does, whatever compute waits for. phases: main-thread time by phase, disjoint, summing to `step_seconds`. idle: waits
    of the compute stream by cause: `tier:<name>`, `h2d`, `host` (host tasks), `launch`. busy: by stream. contention: what collectives added to
    compute beside them.
    """

    spans: tuple[tuple[int, float, float], ...]
    step_seconds: float
    exposed: dict[str, float]
    phases: dict[str, float]
    idle: dict[str, float]
    busy: dict[str, float]
    contention: float
    alone: float = 0.0


# Seconds within which ranks agree on a meeting, and rounds after which they need not.
AGREED, ROUNDS = 1e-6, 200


def simulate(graph: StepGraph, *, contention: bool = True) -> Timeline:
    """The schedule of `graph`; without `contention` compute keeps its full rate beside collectives."""
    start, end, issue = _schedule(graph.tasks, contention)
    return _timeline(graph.tasks, start, end, issue)


def together(graphs: Sequence[StepGraph]) -> list[Timeline]:
    """The schedules of ranks that wait for one another in every collective; their graphs have the same collectives in the same order, else
    ValueError."""
    calls = [[i for i, task in enumerate(graph.tasks) if task.kind == "collective"] for graph in graphs]
    if len({tuple(graph.tasks[i].name for i in own) for graph, own in zip(graphs, calls)}) > 1:
        raise ValueError("ranks that meet in collectives must have the same ones in the same order")
    come = [[0.0] * len(calls[0]) for _ in graphs]
    for _ in range(ROUNDS):
        made, before = [], [row[:] for row in come]
        for rank, (graph, own) in enumerate(zip(graphs, calls)):
            last = {i: max((come[peer][n] for peer in range(len(graphs)) if peer != rank), default=0.0) for n, i in enumerate(own)}
            made.append(_schedule(graph.tasks, True, last))
            come[rank] = [made[-1][0][i] for i in own]
        if all(abs(a - b) <= AGREED for one, other in zip(come, before) for a, b in zip(one, other)):
            break
    return [_timeline(graph.tasks, *one) for graph, one in zip(graphs, made)]


def step_seconds(graph: StepGraph, *, contention: bool = True) -> float:
    """Only the length of the step."""
    return max(_schedule(graph.tasks, contention)[1], default=0.0)


def _schedule(tasks: Sequence[Task], contention: bool, come: Mapping[int, float] | None = None) -> tuple[list[float], list[float], list[float]]:
    """(start, end, launch time) of every task. come: when the last other rank comes to a collective, by task."""
    if not contention or not any(t.sm_fraction and t.seconds for t in tasks):
        return _free_schedule(tasks, come or {})
    return _Contended(tasks, come or {}).run()


def _free_schedule(tasks: Sequence[Task], come: Mapping[int, float] = MappingProxyType({})) -> tuple[list[float], list[float], list[float]]:
    count = len(tasks)
    start, end, issue = [0.0] * count, [0.0] * count, [0.0] * count
    free: dict[str, float] = {}
    host = 0.0
    for i, task in enumerate(tasks):
        stream = task.stream
        if stream == HOST:
            at = host
        else:
            host += task.host_seconds
            at = free.get(stream, 0.0)
            if host > at:
                at = host
        issue[i] = host
        for d in task.deps:
            if end[d] > at:
                at = end[d]
        start[i] = at
        end[i] = max(at, come.get(i, at)) + task.seconds
        if stream == HOST:
            host = end[i]
        else:
            free[stream] = end[i]
    return start, end, issue


class _Contended:
    """One pass over the compute stream; before each compute task everything that cannot depend on it is resolved."""

    def __init__(self, tasks: Sequence[Task], come: Mapping[int, float]) -> None:
        self.tasks, self.come = tasks, come
        count = len(tasks)
        self.start, self.end, self.issue = [0.0] * count, [_UNKNOWN] * count, [_UNKNOWN] * count
        self.host_time, self.host_next = 0.0, 0
        queues: dict[str, list[int]] = {}
        for i, task in enumerate(tasks):
            if task.stream != HOST:
                queues.setdefault(task.stream, []).append(i)
        self.compute = queues.pop(COMPUTE, [])
        # per stream: [queue, next position, free from, intervals (start, end, share) that may still touch compute]
        self.others = [[queue, 0, 0.0, []] for queue in queues.values()]

    def run(self) -> tuple[list[float], list[float], list[float]]:
        tasks, end = self.tasks, self.end
        free = 0.0
        for i in self.compute:
            self.resolve()
            at = max(free, self.issue[i])
            for d in tasks[i].deps:
                if end[d] > at:
                    at = end[d]
            self.start[i] = at
            free = end[i] = self.progress(at, tasks[i].seconds)
        self.resolve()
        return self.start, self.end, self.issue

    def resolve(self) -> None:
        """Schedules host and side-stream tasks until each waits for compute that is not yet scheduled."""
        tasks, end, start, issue = self.tasks, self.end, self.start, self.issue
        moved = True
        while moved:
            moved = self.advance_host()
            for stream in self.others:
                queue, position, free, intervals = stream
                while position < len(queue):
                    i = queue[position]
                    at = issue[i]
                    if at < 0.0:
                        break
                    if free > at:
                        at = free
                    task = tasks[i]
                    for d in task.deps:
                        ended = end[d]
                        if ended < 0.0:
                            at = _UNKNOWN
                            break
                        if ended > at:
                            at = ended
                    if at < 0.0:
                        break
                    start[i] = at
                    come = max(at, self.come.get(i, at))
                    free = end[i] = come + task.seconds
                    if task.waiting_fraction and come > at:
                        intervals.append((at, come, task.waiting_fraction))
                    if task.sm_fraction and task.seconds:
                        intervals.append((come, free, task.sm_fraction))
                    position += 1
                    moved = True
                stream[1], stream[2] = position, free

    def advance_host(self) -> bool:
        tasks, end, issue = self.tasks, self.end, self.issue
        i, host, before = self.host_next, self.host_time, self.host_next
        while i < len(tasks):
            task = tasks[i]
            if task.stream != HOST:
                host += task.host_seconds
                issue[i] = host
            else:
                at = host
                for d in task.deps:
                    if end[d] < 0.0:
                        at = _UNKNOWN
                        break
                    if end[d] > at:
                        at = end[d]
                if at < 0.0:
                    break
                issue[i], self.start[i] = host, at
                host = end[i] = at + task.seconds
            i += 1
        self.host_next, self.host_time = i, host
        return i > before

    def progress(self, at: float, work: float) -> float:
        """When `work` seconds of compute begun at `at` are done."""
        for stream in self.others:
            intervals = stream[3]
            passed = 0
            while passed < len(intervals) and intervals[passed][1] <= at:
                passed += 1
            if passed:
                del intervals[:passed]
        while work > 0.0:
            rate, change = 1.0, float("inf")
            for stream in self.others:
                for begin, finish, share in stream[3]:
                    if begin > at:
                        change = min(change, begin)
                        break
                    if finish > at:
                        rate -= share
                        change = min(change, finish)
            rate = max(rate, RATE_FLOOR)
            if at + work / rate <= change:
                return at + work / rate
            work -= (change - at) * rate
            at = change
        return at


def _timeline(tasks: Sequence[Task], start: list[float], end: list[float], issue: list[float]) -> Timeline:
    step = max(end, default=0.0)
    phases = dict.fromkeys(PHASES, 0.0)
    exposed: dict[str, float] = {}
    idle: dict[str, float] = {}
    busy: dict[str, float] = {}
    previous, hosts = _stream_predecessors(tasks), _hosts_before(tasks)
    contention, cursor = 0.0, 0.0

    def wait(i: int, until: float) -> None:
        for cause, task, seconds in _causes(tasks, start, end, issue, previous, hosts, i, cursor, until):
            idle[cause] = idle.get(cause, 0.0) + seconds
            if task.kind == "collective" and cause.startswith("tier:"):
                tier = cause.removeprefix("tier:")
                exposed[tier] = exposed.get(tier, 0.0) + seconds
                phases["exposed_communication"] += seconds
            else:
                phases[task.phase] += seconds

    for i, task in enumerate(tasks):
        busy[task.stream] = busy.get(task.stream, 0.0) + end[i] - start[i]
        if task.stream != COMPUTE:
            continue
        if start[i] > cursor:
            wait(i, start[i])
        phases[task.phase] += end[i] - start[i]
        contention += end[i] - start[i] - task.seconds
        cursor = end[i]
    if step > cursor:
        last = max(range(len(tasks)), key=lambda i: end[i])
        wait(-last - 1, step)
    spans = tuple((i, start[i], end[i]) for i in range(len(tasks)))
    return Timeline(spans=spans, step_seconds=step, exposed=exposed, phases=phases, idle=idle, busy=busy,
                    contention=max(contention, 0.0), alone=_alone(tasks, start, end))


def _alone(tasks: Sequence[Task], start: list[float], end: list[float]) -> float:
    """Seconds in which a collective runs and no compute does."""
    sent = sorted((start[i], end[i]) for i, task in enumerate(tasks) if task.kind == "collective")
    busy = sorted((start[i], end[i]) for i, task in enumerate(tasks) if task.stream == COMPUTE and end[i] > start[i])
    return _covered([*sent, *busy]) - _covered(busy)


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total = until = 0.0
    for begin, finish in sorted(intervals):
        if finish > until:
            total += finish - max(begin, until)
            until = finish
    return total


def _stream_predecessors(tasks: Sequence[Task]) -> list[int]:
    last: dict[str, int] = {}
    previous = []
    for i, task in enumerate(tasks):
        previous.append(last.get(task.stream, -1))
        last[task.stream] = i
    return previous


def _hosts_before(tasks: Sequence[Task]) -> list[int]:
    """The last host task before each task, -1 for none."""
    last, found = -1, []
    for i, task in enumerate(tasks):
        found.append(last)
        if task.stream == HOST:
            last = i
    return found


def _causes(tasks: Sequence[Task], start: list[float], end: list[float], issue: list[float], previous: list[int], hosts: list[int], i: int,
            begin: float, until: float) -> list[tuple[str, Task, float]]:
    """What filled [begin, until] before task `i` could start (or, for -i - 1, until task i ended): the chain of tasks that ended last,
    walked back."""
    found: list[tuple[str, Task, float]] = []

    def add(cause: str, task: Task, since: float) -> float:
        since = max(since, begin)
        if since < until:
            found.append((cause, task, until - since))
        return min(since, until)

    if i < 0:
        i = -i - 1
        until = add(tasks[i].stream, tasks[i], start[i])
    while until > begin:
        latest, blocker = max(((end[d], d) for d in (*tasks[i].deps, previous[i]) if d >= 0), default=(_UNKNOWN, -1))
        if issue[i] >= latest:
            # the launch came last: the host was launching, and before that in its last task of its own
            host = hosts[i]
            until = add("launch", tasks[i], end[host] if host >= 0 else begin)
            if host < 0:
                break
            blocker = host
        elif tasks[blocker].stream == COMPUTE:
            break  # compute itself was the last to end: nothing waits, what remains is rounding
        until = add(tasks[blocker].stream, tasks[blocker], start[blocker])
        i = blocker
    if until > begin:
        found.append(("launch", tasks[i], until - begin))
    return found


def bound(graph: StepGraph) -> float:
    """A lower bound of `simulate(graph).step_seconds`, see the module's formulas."""
    tasks = graph.tasks
    _, free_end, _ = _free_schedule(tasks)
    if not free_end:
        return 0.0
    return max(max(free_end), _contention_bound(tasks, free_end))


def _contention_bound(tasks: Sequence[Task], free_end: list[float]) -> float:
    lossy = [i for i, t in enumerate(tasks) if t.sm_fraction and t.seconds]
    compute = [i for i, t in enumerate(tasks) if t.stream == COMPUTE]
    if not lossy or not compute:
        return 0.0
    # several tiers at once may ask for more than there is; each is then charged its even part of what the rate floor leaves
    cap = (1.0 - RATE_FLOOR) / len({tasks[i].stream for i in lossy})
    released, needed = _windows(tasks, compute)
    before = [0.0]
    for i in compute:
        before.append(before[-1] + tasks[i].seconds)
    ends = [p for p in range(len(compute)) if p + 1 == len(compute) or tasks[compute[p]].phase != tasks[compute[p + 1]].phase]
    # milestones: -1 the begin, the last compute task of each phase, and len(compute) the end of the step
    least = {-1: 0.0}
    for q in [*ends, len(compute)]:
        value = free_end[compute[q]] if q < len(compute) else max(free_end)
        for p, at in least.items():
            taken = sum(min(tasks[k].sm_fraction, cap) * tasks[k].seconds for k in lossy if released[k] >= p and needed[k] <= q)
            value = max(value, at + before[min(q + 1, len(compute))] - before[p + 1] + taken)
        least[q] = value
    return least[len(compute)]


def _windows(tasks: Sequence[Task], compute: list[int]) -> tuple[list[int], list[int]]:
    """Per task: position of the last compute task that must end before it starts, and of the first that must wait for its end."""
    count = len(tasks)
    position = {index: at for at, index in enumerate(compute)}
    previous = _stream_predecessors(tasks)
    released, needed = [-1] * count, [len(compute)] * count
    for i, task in enumerate(tasks):
        for d in (*task.deps, previous[i]):
            if d >= 0:
                released[i] = max(released[i], position.get(d, -1), released[d])
    for i in range(count - 1, -1, -1):
        for d in (*tasks[i].deps, previous[i]):
            if d >= 0:
                needed[d] = min(needed[d], position.get(i, len(compute)), needed[i])
    return released, needed
