"""Where a step's time goes: one identity for a simulated timeline and for a profiler's trace of a run.

    step = device work + waits of the device + unattributed           every instant of the step belongs to exactly one category

Device work (first come, first served where kernels overlap):

    compute, memory_bound       by the roof of the op; what a collective beside it adds is `contention`, what padded events cost is `padding`
    recompute, quantize         activations computed again; conversions to narrow formats

Waits: a gap of the device is walked back from its end. What ended last before the device went on is what it waited for; before that one began,
the next is looked for, so that a collective that merely runs on beside the gap is not blamed:

    communication:TIER          an exposed collective
    straggler_wait              waiting for peers with more work; `synchronisation`: for peers that are slow at equal work, and jitter
    input                       waiting for the batch
    host                        none of these, and the host was launching; no activity at all is `unattributed`

Relief [s] is what a step loses at most when a constraint is relieved:

    compute, hbm_bandwidth                half of their time: twice as fast
    communication:TIER, input, host       min(exposed, half of what the resource is busy): twice as fast, and only what is exposed can be won
    hbm_capacity                          all recomputation: twice the memory keeps everything
    load_balance, synchronisation         all padding and waiting

The binding constraint is the loss (anything but compute and hbm_bandwidth) with the largest relief, if that is at least LOSS of the step; else
the step does what it is for, and the device binds: compute or hbm_bandwidth, whichever takes longer.
"""
from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from costmodel import peers
from costmodel.calibration import Calibration
from costmodel.imbalance import slowest_rank
from costmodel.lower import Factors, Lowered, lower
from costmodel.plan import Plan
from costmodel.simulate import Timeline, simulate
from costmodel.stepgraph import COMPUTE, H2D, HOST, StepGraph, Task

DEVICE = ("compute", "memory_bound", "recompute", "quantize", "padding", "contention")
STRAGGLER, SYNCHRONISATION, INPUT, HOST_TIME, UNATTRIBUTED = "straggler_wait", "synchronisation", "input", "host", "unattributed"
COMMUNICATION = "communication:"
# A loss of less than this share of the step does not bind [Assumed: about what separates a tuned job from an untuned one].
LOSS = 0.10
# A device goes on this long after what it waited for has ended: an event's way through the driver [Assumed: a few us on CUDA].
RESUME_SECONDS = 20e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Spans:
    """Intervals of one rank: `start`, `end` `(n,)` [s], `code` `(n,)` into `categories`. Any order, overlaps allowed."""

    start: np.ndarray
    end: np.ndarray
    code: np.ndarray
    categories: tuple[str, ...]

    @classmethod
    def of(cls, intervals: Iterable[tuple[str, float, float]]) -> Spans:
        """From (category, start, end)."""
        rows = list(intervals)
        names = tuple(dict.fromkeys(name for name, _, _ in rows))
        place = {name: i for i, name in enumerate(names)}
        return cls(np.array([r[1] for r in rows], dtype=np.float64), np.array([r[2] for r in rows], dtype=np.float64),
                   np.array([place[r[0]] for r in rows], dtype=np.int64), names)

    def select(self, wanted: Iterable[str]) -> np.ndarray:
        """Indices of the spans of these categories, by start."""
        codes = [i for i, name in enumerate(self.categories) if name in set(wanted)]
        found = np.flatnonzero(np.isin(self.code, codes))
        return found[np.argsort(self.start[found], kind="stable")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """`seconds` by category sum to `step` [s]. busy: how long each resource worked at all, exposed or not. source: where it was seen."""

    step: float
    seconds: dict[str, float]
    busy: dict[str, float]
    source: str

    def __post_init__(self) -> None:
        total = sum(self.seconds.values())
        assert abs(total - self.step) <= 1e-6 * max(self.step, 1e-9), f"categories sum to {total}, the step is {self.step}"

    @property
    def unattributed(self) -> float:
        """Share of the step that nothing explains."""
        return self.seconds.get(UNATTRIBUTED, 0.0) / self.step if self.step > 0 else 0.0

    def relief(self) -> dict[str, float]:
        """Seconds that a step loses at most when a constraint is relieved, see the module docstring; largest first."""
        s, busy = defaultdict(float, self.seconds), self.busy
        tiers = {name: seconds for name, seconds in s.items() if name.startswith(COMMUNICATION)}
        found = {"compute": s["compute"] / 2, "hbm_bandwidth": (s["memory_bound"] + s["quantize"]) / 2, "hbm_capacity": s["recompute"],
                 "load_balance": s[STRAGGLER] + s["padding"], "synchronisation": s[SYNCHRONISATION]}
        for name in (INPUT, HOST_TIME, *tiers):
            found[name] = min(s[name], max(busy.get(name, 0.0), s[name]) / 2)
        crowded = {name: seconds for name, seconds in busy.items() if name.startswith(COMMUNICATION)}
        if s["contention"] and crowded:
            # shorter collectives crowd compute for less long; the busiest tier is named
            name = max(crowded, key=lambda tier: crowded[tier])
            found[name] = found.get(name, 0.0) + s["contention"] / 2
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def binding(self) -> str:
        """What binds, see the module docstring."""
        relief = self.relief()
        loss = next((name for name in relief if name not in ("compute", "hbm_bandwidth")), "")
        if loss and relief[loss] >= LOSS * self.step:
            return loss
        return "compute" if relief["compute"] >= relief["hbm_bandwidth"] else "hbm_bandwidth"


def account(spans: Spans, begin: float, end: float, *, source: str) -> Accounting:
    """The identity over [begin, end] of one rank."""
    step = end - begin
    seconds: dict[str, float] = defaultdict(float)
    edges, codes = _lane(spans, spans.select(DEVICE), begin, end)
    for code, lasted in zip(*_sums(codes, edges)):
        seconds[spans.categories[code]] += lasted
    gaps = _gaps(edges, begin, end)
    waits = [name for name in spans.categories if name.startswith(COMMUNICATION) or name in (STRAGGLER, SYNCHRONISATION, INPUT)]
    left = _walk_back(spans, spans.select(waits), gaps, seconds)
    host = _union(spans, spans.select((HOST_TIME,)))
    launching = _overlap(host, left)
    if launching:
        seconds[HOST_TIME] += launching
    seconds[UNATTRIBUTED] += step - sum(seconds.values())
    if abs(seconds[UNATTRIBUTED]) < 1e-9 * step:
        # rounding goes where the most time is, so that the sum stays exact
        rest = seconds.pop(UNATTRIBUTED)
        seconds[max(seconds, key=lambda name: seconds[name])] += rest
    busy = {name: _overlap(_union(spans, spans.select((name,))), np.array([[begin, end]])) for name in spans.categories if name not in DEVICE}
    return Accounting(step=step, seconds=dict(seconds), busy=busy, source=source)


def _lane(spans: Spans, order: np.ndarray, begin: float, end: float) -> tuple[np.ndarray, np.ndarray]:
    """`(n, 2)` disjoint intervals inside [begin, end], and their codes: each span from where those before it have ended."""
    start, stop = np.clip(spans.start[order], begin, end), np.clip(spans.end[order], begin, end)
    if not len(order):
        return np.zeros((0, 2)), np.zeros(0, dtype=np.int64)
    before = np.concatenate([[begin], np.maximum.accumulate(stop)[:-1]])
    start = np.maximum(start, before)
    kept = stop > start
    return np.stack([start[kept], stop[kept]], axis=1), spans.code[order][kept]


def _sums(codes: np.ndarray, edges: np.ndarray) -> tuple[list[int], list[float]]:
    totals = np.bincount(codes, weights=edges[:, 1] - edges[:, 0]) if len(codes) else np.zeros(0)
    present = np.unique(codes)
    return present.tolist(), totals[present].tolist()


def _gaps(edges: np.ndarray, begin: float, end: float) -> np.ndarray:
    starts = np.concatenate([[begin], edges[:, 1]])
    ends = np.concatenate([edges[:, 0], [end]])
    kept = ends > starts
    return np.stack([starts[kept], ends[kept]], axis=1)


def _union(spans: Spans, order: np.ndarray) -> np.ndarray:
    """`(m, 2)` disjoint ascending intervals."""
    if not len(order):
        return np.zeros((0, 2))
    start, stop = spans.start[order], np.maximum.accumulate(spans.end[order])
    new = np.concatenate([[True], start[1:] > stop[:-1]])
    last = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(order) - 1]])
    return np.stack([start[new], stop[last]], axis=1)


def _overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Seconds in both of two lists of disjoint ascending intervals."""
    if not len(first) or not len(second):
        return 0.0
    lengths = np.concatenate([[0.0], np.cumsum(first[:, 1] - first[:, 0])])

    def covered(at: np.ndarray) -> np.ndarray:
        place = np.searchsorted(first[:, 0], at, side="right")
        inside = np.minimum(at, first[np.maximum(place - 1, 0), 1]) - first[np.maximum(place - 1, 0), 0]
        return np.where(place > 0, lengths[np.maximum(place - 1, 0)] + inside, 0.0)

    return float((covered(second[:, 1]) - covered(second[:, 0])).sum())


def _walk_back(spans: Spans, order: np.ndarray, gaps: np.ndarray, seconds: dict[str, float]) -> np.ndarray:
    """Gives the parts of gaps to what the device waited for; returns the parts that are left, `(m, 2)` ascending."""
    by_end = order[np.argsort(spans.end[order], kind="stable")]
    ends, starts = spans.end[by_end].tolist(), spans.start[by_end].tolist()
    names = [spans.categories[c] for c in spans.code[by_end].tolist()]
    left: list[tuple[float, float]] = []
    for begin, end in gaps.tolist():
        until = end
        place = bisect.bisect_right(ends, end + RESUME_SECONDS) - 1
        while place >= 0 and ends[place] > begin and until > begin:
            stop, start = min(ends[place], until), max(starts[place], begin)
            if stop > start:
                if until > stop:
                    left.append((stop, until))
                seconds[names[place]] += stop - start
                until = start
            place -= 1
        if until > begin:
            left.append((begin, until))
    return np.array(sorted(left)).reshape(-1, 2)


# --- a simulated step ---

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRanks:
    """The steps of the average and of the slowest rank; equal objects where work is even. slow_node: the slowest device's time over the nominal. met:
    seconds of a step of several GPUs, whose ranks and steps wait for one another; None elsewhere."""

    average: Lowered
    timeline: Timeline
    slowest: Lowered
    slowest_timeline: Timeline
    slow_node: float
    met: float | None = None


def simulate_ranks(plan: Plan, calibration: Calibration | None) -> SimulatedRanks:
    """Lowers and simulates both ranks."""
    slowest = slowest_rank(plan)
    factors = {name: Factors(tokens=f.tokens, pairs=f.pairs) for name, f in slowest.sequences.items()}
    average = lower(plan, calibration)
    timeline = simulate(average.graph)
    even = all(f.tokens <= 1.0 and f.pairs <= 1.0 for f in factors.values())
    uneven = average if even else lower(plan, calibration, factors=factors)
    met = peers.step_of(plan, calibration, uneven, factors)
    return SimulatedRanks(average=average, timeline=timeline, slowest=uneven, slowest_timeline=timeline if even else simulate(uneven.graph),
                          slow_node=slowest.slow_node, met=None if met is None else met.seconds)


def simulated(plan: Plan, calibration: Calibration | None, ranks: SimulatedRanks | None = None) -> Accounting:
    """The identity of a plan's step as `costmodel.estimate` predicts it: the average rank's timeline, then what it waits for others."""
    ranks = ranks or simulate_ranks(plan, calibration)
    timeline, uneven = ranks.timeline, ranks.slowest_timeline.step_seconds if ranks.met is None else ranks.met
    spans = timeline_spans(ranks.average.graph, timeline, padding_shares(plan, ranks.average.graph, calibration))
    found = account(spans, 0.0, timeline.step_seconds, source="simulated")
    # a curve that is not monotone can make the slowest rank no slower: then everything shrinks alike, as in the estimate
    scale = min(1.0, uneven / timeline.step_seconds) if timeline.step_seconds > 0 else 1.0
    seconds = {name: value * scale for name, value in found.seconds.items()}
    waits = {STRAGGLER: max(0.0, uneven - timeline.step_seconds), SYNCHRONISATION: uneven * (ranks.slow_node - 1.0)}
    seconds |= {name: value for name, value in waits.items() if value > 0}
    return Accounting(step=uneven * ranks.slow_node, seconds=seconds, busy={k: v * scale for k, v in found.busy.items()}, source="simulated")


def padding_shares(plan: Plan, graph: StepGraph, calibration: Calibration | None) -> list[float]:
    """Share of each task's seconds that padded events cost: against the same step without padding."""
    if plan.batching != "padded":
        return [0.0] * len(graph.tasks)
    jagged = lower(dataclasses.replace(plan, batching="jagged"), calibration).graph.tasks
    return [max(0.0, 1.0 - true.seconds / task.seconds) if task.seconds > 0 else 0.0 for task, true in zip(graph.tasks, jagged)]


def timeline_spans(graph: StepGraph, timeline: Timeline, padding: list[float]) -> Spans:
    """A simulated timeline as spans: tasks of several categories become one span after another, launches become spans of the host."""
    rows: list[tuple[str, float, float]] = []
    for (index, start, end), padded in zip(timeline.spans, padding):
        at = start
        shares = task_shares(graph.tasks[index], end - start, padded)
        for name, share in shares.items():
            rows.append((name, at, at + share))
            at += share
    rows += [(HOST_TIME, start, end) for _, start, end in launches(graph, timeline)]
    return Spans.of(rows)


def launches(graph: StepGraph, timeline: Timeline) -> list[tuple[int, float, float]]:
    """(task, start, end) of each launch on the host stream."""
    host, found = 0.0, []
    for index, _, end in timeline.spans:
        task = graph.tasks[index]
        if task.stream == HOST:
            host = end
        elif task.host_seconds > 0:
            found.append((index, host, host + task.host_seconds))
            host += task.host_seconds
    return found


def task_shares(task: Task, lasted: float, padded: float) -> Mapping[str, float]:
    """Seconds of one task, which lasted `lasted` with contention, by category."""
    if task.stream == H2D or (task.stream in (HOST, COMPUTE) and task.phase == "input"):
        return {INPUT: lasted}
    if task.stream == HOST or task.phase == "other":
        return {HOST_TIME: lasted}
    if task.stream != COMPUTE:
        return {COMMUNICATION + task.stream.removeprefix("tier:"): lasted}
    own, shares = min(task.seconds, lasted), {}
    shares["contention"] = lasted - own
    shares["padding"] = own * padded
    true = own - shares["padding"]
    if task.name.startswith("recompute"):
        shares["recompute"] = true
    else:
        shares["compute"] = true * min(1.0, task.compute_bound / task.seconds) if task.seconds > 0 else 0.0
        shares["memory_bound"] = true - shares["compute"]
    return {name: value for name, value in shares.items() if value > 1e-12 * lasted}
