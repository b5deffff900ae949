"""From traces of a run to spans that `costmodel.accounting` accounts for, step by step and rank by rank.

CPU ranks: the main thread is the device, and a span of it is

    inside phase:exposed_communication    communication; up to when the last peer began to wait too, waiting for that peer
    inside phase:input                    input
    an op, outside of its children        compute (products, attention, convolution) or memory_bound (the rest); inside `recompute`: recompute
    anything else inside a phase          host: Python, and ops written in it; so are the first DISPATCH_SECONDS of an op and of what it does between
                                          two children
    outside phases                        unattributed

GPU ranks: kernels are the device, NCCL's kernels the tiers; copies to the device and the input phase are input; the main thread inside a
phase is the host.

Padding, where the batching policy pads: a share of device time inside sequence regions, by events, of attention by pairs; `runtime.tracing`
counts both. Backward has no regions: a node of autograd is where the forward op of its sequence number was; without such numbers backward takes
the forward's share of time in sequences.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from costmodel.accounting import COMMUNICATION, DEVICE, HOST_TIME, INPUT, STRAGGLER, SYNCHRONISATION, Accounting, Spans, account
from costmodel.cluster import Cluster
from planner.traces import Trace

# What PyTorch spends on an op's dispatch on a CPU, whatever its size [Measured: an empty add takes 2-4 us here].
DISPATCH_SECONDS = 3e-6
# Shorter ops are not drawn.
_SHOWN_SECONDS = 20e-6
_PRODUCT = re.compile(r"mm|matmul|attention|conv|flash|gemm|cutlass|cublas|sm90|sm100|xmma|wgmma|einsum", re.I)
_NO_WORK = re.compile(r"aten::(view|_unsafe_view|reshape|empty\w*|as_strided\w*|detach|t|transpose|permute|expand|select|slice|unsqueeze|squeeze|"
                      r"split\w*|resolve_conj|resolve_neg|unbind|alias|resize_|lift_fresh|item|_local_scalar_dense|narrow|chunk|result_type|is_nonzero)$|^detach")
_DISPATCHERS = ("phase:", "region:", "step:", "recompute", "FSDP::", "autograd::", "c10d::")
_NODE = "autograd::engine::evaluate_function"
_NCCL = re.compile(r"nccl", re.I)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank: bounds [s, the host's clock], spans with categories, named spans for pictures, the work that its batch had."""

    rank: int
    step: int
    begin: float
    end: float
    intervals: tuple[tuple[str, float, float], ...]
    named: tuple[tuple[str, str, float, float], ...]
    waits: tuple[tuple[float, float], ...]
    work: dict[str, float]

    def account(self) -> Accounting:
        return account(Spans.of(self.intervals), self.begin, self.end, source="trace")

    @property
    def waited(self) -> float:
        return sum(end - begin for name, begin, end in self.intervals if name in (STRAGGLER, SYNCHRONISATION))


def rank_steps(traces: Sequence[Trace], cluster: Cluster | None) -> tuple[list[list[RankStep]], list[str]]:
    """By step, the ranks' steps with waits for stragglers told apart; and remarks. Only steps that every trace has."""
    notes = [note for trace in traces for note in trace.notes]
    by_step: dict[int, list[RankStep]] = defaultdict(list)
    for trace in traces:
        steps = trace.steps()
        if not steps:
            notes.append(f"{trace.path.name}: no `step:N` and no `ProfilerStep#N` annotation; nothing to account for")
        gpu = bool(trace.of_category("kernel").any())
        for number, begin, end, thread in steps:
            by_step[number].append((_gpu_step if gpu else _cpu_step)(trace, number, begin, end, thread, cluster))
    complete = [ranks for _, ranks in sorted(by_step.items()) if len(ranks) == len(traces)]
    hosts = {trace.host for trace in traces}
    if len(traces) > 1 and len(hosts) > 1:
        notes.append("traces of several hosts: their clocks differ, waiting for stragglers is inside communication")
        return complete, notes
    return [_stragglers(ranks, notes) for ranks in complete], list(dict.fromkeys(notes))


def median_rank(ranks: Sequence[RankStep]) -> RankStep:
    """The rank of median wait (of two the one that waits more): what it waits is its gap to the slowest."""
    return sorted(ranks, key=lambda r: r.waited)[len(ranks) // 2]


def _inside(trace: Trace, begin: float, end: float) -> np.ndarray:
    return (trace.ts < end) & (trace.ts + trace.dur > begin)


# --- CPU ranks ---

def _cpu_step(trace: Trace, number: int, begin: float, end: float, thread: int, cluster: Cluster | None) -> RankStep:
    tier = COMMUNICATION + (cluster.tiers[0].name if cluster is not None and cluster.tiers else "link")
    chosen = np.flatnonzero(_inside(trace, begin, end) & (trace.thread == thread) & trace.of_category("cpu_op", "user_annotation"))
    order = chosen[np.lexsort((-trace.dur[chosen], trace.ts[chosen]))]
    starts, ends = trace.ts[order].tolist(), (trace.ts[order] + trace.dur[order]).tolist()
    names = [trace.names[i] for i in trace.name[order].tolist()]
    numbers, in_sequence = trace.sequence[order].tolist(), dict[int, bool]()
    work = trace.meta.get("steps", {}).get(str(number), {})
    shares = _padding(work)
    intervals: list[tuple[str, float, float]] = []
    named: list[tuple[str, str, float, float]] = []
    waits: list[tuple[float, float]] = []
    stack: list[tuple[str, float, _Inside]] = []
    cursor = begin
    sequence, parents = _sequence_share(names, starts, ends), _parents(names, starts, ends)

    def close(until: float) -> None:
        nonlocal cursor
        while stack and stack[-1][1] <= until:
            name, stop, inside = stack.pop()
            fill(name, inside, stop)
        if stack and until > cursor:
            fill(stack[-1][0], stack[-1][2], until)

    def fill(name: str, inside: _Inside, until: float) -> None:
        nonlocal cursor
        until = min(max(until, cursor), end)
        if until > cursor:
            intervals.extend(_cpu_parts(name, inside, cursor, until, tier, shares, sequence))
            cursor = until

    for place, (name, start, stop) in enumerate(zip(names, starts, ends)):
        close(start)
        cursor = max(cursor, min(start, end)) if not stack else cursor
        inside = stack[-1][2].child(name) if stack else _Inside().child(name)
        if inside.phase == "forward" and numbers[place] >= 0:
            in_sequence[numbers[place]] = inside.sequence  # the op that makes the node is the last with its number
        elif in_sequence and name.startswith(_NODE):
            inside = dataclasses.replace(inside, sequence=in_sequence.get(numbers[place], False), linked=True)
        stack.append((name, stop, dataclasses.replace(inside, parent=parents[place])))
        if name == "phase:exposed_communication":
            waits.append((start, stop))
        if name.startswith("phase:") or (name.startswith(("region:", "recompute")) or (not parents[place] and stop - start > _SHOWN_SECONDS)):
            named.append(("phases" if name.startswith("phase:") else "regions" if name.startswith("region:") else "ops", name, start, stop))
    close(float("inf"))
    return RankStep(rank=trace.rank, step=number, begin=begin, end=end, intervals=tuple(intervals), named=tuple(named), waits=tuple(waits), work=work)


def _parents(names: list[str], starts: list[float], ends: list[float]) -> list[bool]:
    """Whether an event has others inside that do work of their own; views and allocations do none."""
    found = [False] * len(names)
    stack: list[int] = []
    for place, (name, start) in enumerate(zip(names, starts)):
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        if stack and not _NO_WORK.search(name):
            found[stack[-1]] = True
        stack.append(place)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Inside:
    """Where an event of the main thread is."""

    phase: str = ""
    recompute: bool = False
    sequence: bool = False
    attention: bool = False
    linked: bool = False
    parent: bool = False

    def child(self, name: str) -> _Inside:
        phase = name.removeprefix("phase:") if name.startswith("phase:") else self.phase
        return _Inside(phase, self.recompute or name == "recompute", self.sequence or (name.startswith("region:") and "." in name),
                       self.attention or "attention" in name, self.linked)


def _cpu_parts(name: str, inside: _Inside, start: float, stop: float, tier: str, shares: dict[str, float],
               sequence: float) -> list[tuple[str, float, float]]:
    if inside.phase == "exposed_communication":
        return [(tier, start, stop)]
    if inside.phase == "input":
        return [(INPUT, start, stop)]
    if not inside.phase:
        return []
    # a C++ op with others inside still works itself (addmm adds its bias in one of its own); what is written in Python only dispatches
    if (inside.parent and not name.startswith("aten::")) or name.startswith(_DISPATCHERS) or _NO_WORK.search(name):
        return [(HOST_TIME, start, stop)]
    work = min(start + DISPATCH_SECONDS, stop)
    parts = [(HOST_TIME, start, work)]
    kind = "recompute" if inside.recompute else "compute" if _PRODUCT.search(name) or inside.attention else "memory_bound"
    padded = shares["pairs" if inside.attention else "events"] if inside.sequence else 0.0
    if inside.phase == "backward" and not inside.sequence and not inside.linked:
        padded = shares["pairs"] if inside.attention else sequence * shares["events"]
    cut = stop - (stop - work) * padded
    parts += [(kind, work, cut), ("padding", cut, stop)]
    return [p for p in parts if p[2] > p[1]]


def _padding(work: dict[str, float]) -> dict[str, float]:
    """Share of padding among events and among pairs."""
    return {"events": 1 - work["events"] / work["computed"] if work.get("computed") else 0.0,
            "pairs": 1 - work["pairs"] / work["computed_pairs"] if work.get("computed_pairs") else 0.0}


def _sequence_share(names: list[str], starts: list[float], ends: list[float]) -> float:
    regions, forward = 0.0, 0.0
    for name, start, stop in zip(names, starts, ends):
        if name.startswith("region:") and "." in name:
            regions += stop - start
        elif name == "phase:forward":
            forward += stop - start
    return min(1.0, regions / forward) if forward > 0 else 0.0


# --- GPU ranks ---

def _gpu_step(trace: Trace, number: int, begin: float, end: float, thread: int, cluster: Cluster | None) -> RankStep:
    inside = _inside(trace, begin, end)
    kernels = np.flatnonzero(inside & trace.of_category("kernel", "gpu_memcpy", "gpu_memset"))
    recomputed = _recomputed(trace, kernels)
    intervals: list[tuple[str, float, float]] = []
    named: list[tuple[str, str, float, float]] = []
    waits: list[tuple[float, float]] = []
    kinds = {i: _kernel_kind(n) for i, n in enumerate(trace.names)}
    for index, again in zip(kernels.tolist(), recomputed.tolist()):
        start, stop = float(trace.ts[index]), float(trace.ts[index] + trace.dur[index])
        kind = kinds[int(trace.name[index])]
        if kind == "collective":
            kind = COMMUNICATION + _tier(trace.groups.get(index), cluster)
            waits.append((start, stop))
        elif again and kind in DEVICE:
            kind = "recompute"
        intervals.append((kind, start, stop))
        named.append((f"stream {trace.stream[index]}", trace.names[trace.name[index]], start, stop))
    main = np.flatnonzero(inside & (trace.thread == thread) & trace.named("phase:"))
    for index in main.tolist():
        start, stop = float(trace.ts[index]), float(trace.ts[index] + trace.dur[index])
        phase = trace.names[trace.name[index]].removeprefix("phase:")
        intervals.append((INPUT if phase == "input" else HOST_TIME, start, stop))
        named.append(("phases", f"phase:{phase}", start, stop))
    if not len(main):
        intervals += [(HOST_TIME, float(trace.ts[i]), float(trace.ts[i] + trace.dur[i]))
                      for i in np.flatnonzero(inside & (trace.thread == thread) & trace.of_category("cpu_op", "cuda_runtime"))]
    work = trace.meta.get("steps", {}).get(str(number), {})
    return RankStep(rank=trace.rank, step=number, begin=begin, end=end, intervals=tuple(intervals), named=tuple(named), waits=tuple(waits), work=work)


def _kernel_kind(name: str) -> str:
    if _NCCL.search(name):
        return "collective"
    if re.search(r"memcpy.*HtoD|HtoD", name, re.I):
        return INPUT
    if re.search(r"quant|scaled_cast|fp8_cast", name, re.I):
        return "quantize"
    return "compute" if _PRODUCT.search(name) else "memory_bound"


def _recomputed(trace: Trace, kernels: np.ndarray) -> np.ndarray:
    """Mask over `kernels`: launched inside a `recompute` annotation of the launching thread."""
    marks = np.flatnonzero(trace.of_category("user_annotation") & trace.named("recompute"))
    found = np.zeros(len(kernels), dtype=bool)
    if not len(marks):
        return found
    launches = np.flatnonzero(trace.of_category("cuda_runtime", "cuda_driver") & (trace.correlation >= 0))
    of = dict(zip(trace.correlation[launches].tolist(), launches.tolist()))
    for place, index in enumerate(kernels.tolist()):
        launch = of.get(int(trace.correlation[index]), -1)
        if launch >= 0:
            at = trace.ts[launch]
            same = marks[trace.thread[marks] == trace.thread[launch]]
            found[place] = bool(((trace.ts[same] <= at) & (at < trace.ts[same] + trace.dur[same])).any())
    return found


def _tier(group: dict | None, cluster: Cluster | None) -> str:
    """The outermost tier that a process group crosses."""
    if cluster is None or not cluster.tiers:
        return "link"
    ranks = [int(r) for r in re.findall(r"\d+", str((group or {}).get("Process Group Ranks", "")))]
    size = int((group or {}).get("Group size", 0) or 0)
    for tier in cluster.tiers:
        joined = cluster.scope_size(tier.scope)
        known = bool(ranks) and size in (0, len(ranks))
        if (len({r // joined for r in ranks}) == 1) if known else size <= joined:
            return tier.name
    return cluster.tiers[-1].name


# --- stragglers ---

def _stragglers(ranks: list[RankStep], notes: list[str]) -> list[RankStep]:
    """Cuts each wait at the moment when the last peer began to wait: before it the rank waited for that peer."""
    if len(ranks) < 2:
        return ranks
    if len({len(r.waits) for r in ranks}) > 1:
        notes.append("ranks wait for different numbers of collectives: waiting for stragglers is inside communication")
        return ranks
    begun = np.array([[w[0] for w in r.waits] for r in ranks])
    if not begun.size:
        return ranks
    last = begun.max(axis=0)
    kind = _why(ranks)
    cut = []
    for rank in ranks:
        waits = {(w[0], w[1]): at for w, at in zip(rank.waits, last.tolist())}
        intervals: list[tuple[str, float, float]] = []
        edges = sorted(waits)
        for name, start, stop in rank.intervals:
            until = _until(edges, waits, start, stop) if name.startswith(COMMUNICATION) else start
            if until > start:
                intervals.append((kind, start, min(until, stop)))
            if stop > until:
                intervals.append((name, max(start, until), stop))
        cut.append(dataclasses.replace(rank, intervals=tuple(intervals)))
    return cut


def _until(edges: list[tuple[float, float]], waits: dict[tuple[float, float], float], start: float, stop: float) -> float:
    import bisect

    place = bisect.bisect_right(edges, (start, float("inf"))) - 1
    if place >= 0 and edges[place][0] <= start and stop <= edges[place][1] + 1e-9:
        return waits[edges[place]]
    return start


def _why(ranks: list[RankStep]) -> str:
    """Load balance where the rank that the others wait for had more work (half of its excess time shows in its pairs or events), else a slow rank."""
    own = [r.end - r.begin - sum(b - a for a, b in r.waits) for r in ranks]
    slowest, mean = int(np.argmax(own)), float(np.mean(own))
    excess = own[slowest] / mean - 1 if mean > 0 else 0.0
    for key in ("computed_pairs", "computed"):
        work = [r.work.get(key, 0.0) for r in ranks]
        if np.mean(work) > 0 and work[slowest] / np.mean(work) - 1 >= excess / 2:
            return STRAGGLER
    return SYNCHRONISATION
