"""The step of several GPUs whose ranks wait for one another.

Two ranks stand for all R: one carries what the slowest of R carries of samples (`costmodel.imbalance`), the other what the rest carries on average,

    rest = (R - slowest) / (R - 1)        of a factor whose mean is 1

and it is the other one whose host is slow: histories and hosts know nothing of each other. Hosts of one job run the same Python at speeds of their
own; the spread of these (`host/spread` of a calibration, a standard deviation over the mean) gives the slowest of R in expectation. Both ranks meet
in every collective (`costmodel.simulate.together`): who comes early waits inside of it, and its compute beside it loses what the collective takes.

A step begins while the device is in the one before it: so several steps follow one another, the host ends each only when the device has ended the
one before, and what the last one adds counts. Where the host reads what the device has not come to yet it loses that lead, as in the graph.

least: no step is shorter than what any one stream has to do in it, launches on the main thread among them.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from costmodel.calibration import Calibration
from costmodel.hosttime import HostTimes
from costmodel.imbalance import standard_maximum
from costmodel.lower import Factors, Lowered, lower
from costmodel.plan import Plan
from costmodel.pricer import pricer
from costmodel.simulate import Timeline, together
from costmodel.stepgraph import COMPUTE, HOST, StepGraph

# Steps after which one is like the next.
STEPS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of all ranks. slow: the rank with most work; mean: phases, exposed and alone of the mean over ranks, in the slow one's timeline for
    the rest. launch: main-thread seconds of the slowest host."""

    seconds: float
    slow: Timeline
    mean: Timeline
    launch: float


def rest(slowest: float, ranks: int) -> float:
    """What the other ranks carry on average where one carries `slowest` of a mean of 1."""
    return max(0.0, (ranks - slowest) / (ranks - 1)) if ranks > 1 else 1.0


def rest_of(factors: dict[str, Factors], ranks: int) -> dict[str, Factors]:
    """The same of events and pairs."""
    return {name: Factors(tokens=rest(f.tokens, ranks), pairs=rest(f.pairs, ranks)) for name, f in factors.items()}


def step_of(plan: Plan, calibration: Calibration | None, slow: Lowered, factors: Mapping[str, Factors], *,
            hosts: tuple[float, float] | None = None) -> Step | None:
    """The step of a plan on several GPUs, whose slowest rank is lowered already, with what it carries over the average; None elsewhere. hosts: as of
    `meeting`."""
    ranks = plan.layout.world_size
    if plan.cluster.device.kind != "gpu" or ranks == 1:
        return None
    other = lower(plan, calibration, factors=rest_of(dict(factors), ranks))
    return meeting(slow.graph, other.graph, ranks=ranks, host=pricer(plan, calibration).host, hosts=hosts)


def meeting(slow: StepGraph, other: StepGraph, *, ranks: int, host: HostTimes, hosts: tuple[float, float] | None = None) -> Step:
    """The step of the graphs of the slowest rank and of another one, launches as their tasks have them times `hosts` (default: as far apart as the
    spread says)."""
    late = 1.0 + (host.get("spread") or 0.0) * standard_maximum(ranks)
    factors = hosts or (rest(late, ranks), late)
    graphs = [_launched(graph, factor, host) for graph, factor in zip((slow, other), factors)]
    launch = max(sum(task.host_seconds for task in graph.tasks) for graph in graphs)
    longer, shorter = (together([_repeated(graph, count) for graph in graphs]) for count in (STEPS, STEPS - 1))
    made = [_difference(a, b) for a, b in zip(longer, shorter)]
    shares = (1.0 / ranks, 1.0 - 1.0 / ranks)
    mean = dataclasses.replace(made[0], alone=_mean(shares, [t.alone for t in made]), exposed=_mixed(shares, [t.exposed for t in made]),
                               phases=_mixed(shares, [t.phases for t in made]))
    seconds = max(t.step_seconds for t in made)
    mean = dataclasses.replace(mean, step_seconds=sum(mean.phases.values()))
    return Step(seconds=seconds, slow=made[0], mean=mean, launch=launch)


def _launched(graph: StepGraph, factor: float, host: HostTimes) -> StepGraph:
    """The graph with the main thread's other work, every launch `factor` times as long: batches taken where they are waited for, what a step has
    beside its tasks at its end."""
    more = {"input wait": host.get("input") or 0.0, "step overhead": host.get("other") or 0.0}
    return StepGraph(tasks=tuple(dataclasses.replace(task, host_seconds=factor * (task.host_seconds + more.get(task.name, 0.0)))
                                 for task in graph.tasks))


def least(graph: StepGraph, host: HostTimes) -> float:
    """Seconds that no step of the graph's rank falls below."""
    busy: dict[str, float] = {}
    for task in _launched(graph, 1.0, host).tasks:
        busy[task.stream] = busy.get(task.stream, 0.0) + task.seconds
        busy[HOST] = busy.get(HOST, 0.0) + task.host_seconds
    return max(busy.values(), default=0.0)


def _repeated(graph: StepGraph, count: int) -> StepGraph:
    """So many steps, each behind the one before on the device; the host ends one when the device has ended the one before it."""
    tasks, ends = [], []
    for _ in range(count):
        first = len(tasks)
        before = ends[-1:]
        for task in graph.tasks:
            deps = tuple(d + first for d in task.deps)
            tasks.append(dataclasses.replace(task, deps=deps if deps or task.stream != COMPUTE else tuple(before)))
        ends.append(len(tasks) - 1)
        if before:
            waited = next(t for t in graph.tasks if t.stream == COMPUTE)
            tasks.append(dataclasses.replace(waited, name="report", stream=HOST, seconds=0.0, host_seconds=0.0, deps=tuple(before), phase="other",
                                             kind="host", flops=0.0, bytes=0.0, compute_bound=0.0))
    return StepGraph(tasks=tuple(tasks))


def _difference(longer: Timeline, shorter: Timeline) -> Timeline:
    """What one more step adds."""
    def less(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
        return {name: max(0.0, value - b.get(name, 0.0)) for name, value in a.items()}

    return dataclasses.replace(longer, step_seconds=longer.step_seconds - shorter.step_seconds, exposed=less(longer.exposed, shorter.exposed),
                               phases=less(longer.phases, shorter.phases), idle=less(longer.idle, shorter.idle), busy=less(longer.busy, shorter.busy),
                               contention=max(0.0, longer.contention - shorter.contention), alone=max(0.0, longer.alone - shorter.alone))


def _mean(shares: Sequence[float], values: Sequence[float]) -> float:
    return sum(share * value for share, value in zip(shares, values))


def _mixed(shares: Sequence[float], found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: _mean(shares, [one.get(name, 0.0) for one in found]) for name in sorted({name for one in found for name in one})}
