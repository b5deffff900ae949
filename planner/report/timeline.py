"""timeline.json.gz: predicted and measured ranks side by side, for Perfetto (ui.perfetto.dev), chrome://tracing and HTA.

One process per rank, one thread per stream; events of a thread never overlap. The predicted step of the average and of the slowest rank begins at
0, and so does each measured rank's first traced step. Arrows go from a launch to its kernel.

HTA takes a file for one rank and knows a kernel by its `stream`: only the first process has them, so that its breakdowns are of that rank. A
predicted collective's name begins as NCCL's kernels do, by which HTA tells communication.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from costmodel.accounting import SimulatedRanks, launches
from costmodel.simulate import Timeline
from costmodel.stepgraph import COMPUTE, H2D, HOST, StepGraph
from planner.files import replacing
from planner.tracesteps import RankStep

FILE, STEP = "timeline.json.gz", "step"


def predicted_ranks(ranks: SimulatedRanks | None) -> dict[str, tuple[StepGraph, Timeline]]:
    """The average rank's step, and the slowest one's where it differs."""
    if ranks is None:
        return {}
    found = {"predicted, average rank": (ranks.average.graph, ranks.timeline)}
    if ranks.slowest is not ranks.average:
        found["predicted, slowest rank"] = (ranks.slowest.graph, ranks.slowest_timeline)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """An event of a stream; start, end [s]. device: it runs on the device; correlation: what a launch and its kernel share (0: none)."""

    stream: str
    category: str
    name: str
    start: float
    end: float
    device: bool = False
    correlation: int = 0
    phase: str = ""


def write(path: Path, ranks: SimulatedRanks | None, steps: Sequence[Sequence[RankStep]]) -> Path:
    """Writes the timeline through a temporary file."""
    events = list(_events(ranks, steps))
    # HTA looks for `"rank": N` with the space
    head = '{"schemaVersion":1,"displayTimeUnit":"ms","distributedInfo":{"rank": 0,"world_size": 1,"backend": "nccl"},"traceEvents":'
    body = head + json.dumps(events, separators=(",", ":")) + f',"traceName":"{FILE}"}}'
    with replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(body.encode(), 6, mtime=0))
    return path


def _events(ranks: SimulatedRanks | None, steps: Sequence[Sequence[RankStep]]) -> Iterator[dict[str, Any]]:
    process = 0
    for name, (graph, timeline) in predicted_ranks(ranks).items():
        streams = [STEP, HOST, COMPUTE, *sorted({t.stream for t in graph.tasks} - {HOST, COMPUTE})]
        yield from _process(process, name, streams, _predicted(graph, timeline))
        process += 1
    by_rank: dict[int, list[RankStep]] = {}
    for step in steps:
        for rank in step:
            by_rank.setdefault(rank.rank, []).append(rank)
    for number, own in sorted(by_rank.items()):
        spans = list(_measured(own))
        yield from _process(process, f"measured, rank {number}", list(dict.fromkeys(s.stream for s in spans)), spans)
        process += 1


def _process(pid: int, name: str, streams: list[str], spans: Sequence[_Span]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
    threads = {stream: i for i, stream in enumerate(streams)}
    for stream, tid in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": stream}}
    ends: dict[str, float] = {}
    shown: dict[tuple[int, bool], dict[str, Any]] = {}
    for span in sorted(spans, key=lambda s: (s.stream, s.start)):
        # whole nanoseconds, so that a successor never begins before its predecessor ends
        start = max(round(span.start * 1e6, 3), ends.get(span.stream, 0.0))
        ends[span.stream] = end = max(round(span.end * 1e6, 3), start)
        if end > start:
            tid = threads[span.stream]
            event = {"ph": "X", "cat": span.category, "name": span.name, "pid": pid, "tid": tid, "ts": start, "dur": round(end - start, 3)}
            arguments = {"phase": span.phase} if span.phase else {}
            if span.correlation:
                arguments["correlation"] = span.correlation
                shown[span.correlation, span.device] = event
            if span.device and pid == 0:
                arguments |= {"device": 0, "stream": tid}
            yield event | ({"args": arguments} if arguments else {})
    for (correlation, device), event in shown.items():
        if device and (launch := shown.get((correlation, False))) is not None:
            for ph, at, extra in (("s", launch, {}), ("f", event, {"bp": "e"})):
                yield {"ph": ph, "id": pid << 24 | correlation, "cat": "ac2g", "name": "ac2g", "pid": pid, "tid": at["tid"], "ts": at["ts"], **extra}


def _predicted(graph: StepGraph, timeline: Timeline) -> list[_Span]:
    spans = [_Span(stream=STEP, category="user_annotation", name="ProfilerStep#0", start=0.0, end=timeline.step_seconds)]
    for index, start, end in timeline.spans:
        task = graph.tasks[index]
        if task.stream == HOST:
            spans.append(_Span(stream=HOST, category="cpu_op", name=task.name, start=start, end=end, phase=task.phase))
            continue
        copy = task.stream == H2D
        name = f"ncclDevKernel {task.name}" if task.kind == "collective" else f"Memcpy HtoD {task.name}" if copy else task.name
        spans.append(_Span(stream=task.stream, category="gpu_memcpy" if copy else "kernel", name=name, start=start, end=end, device=True,
                           correlation=index + 1, phase=task.phase))
    spans += [_Span(stream=HOST, category="cuda_runtime", name=f"launch {graph.tasks[index].name}", start=start, end=end, correlation=index + 1)
              for index, start, end in launches(graph, timeline)]
    return spans


def _measured(own: Sequence[RankStep]) -> Iterator[_Span]:
    zero = own[0].begin

    def span(stream: str, category: str, name: str, start: float, end: float, *, device: bool = False) -> _Span:
        return _Span(stream=stream, category=category, name=name, start=start - zero, end=end - zero, device=device)
    for step in own:
        yield span(STEP, "user_annotation", f"ProfilerStep#{step.step}", step.begin, step.end)
        for category, start, end in _merged(step.intervals):
            yield span("time goes to", category, category, start, end)
        yield from (span(lane, "kernel", name, start, end, device=True) for lane, name, start, end in step.named if lane.startswith("stream"))
        for lane in ("phases", "regions", "ops"):
            spans = [(name, start, end) for found, name, start, end in step.named if found == lane]
            yield from (span(lane, lane, name, start, end) for name, start, end in _innermost(spans))


def _merged(intervals: Sequence[tuple[str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Neighbours of one category joined, so that a trace of a million ops stays readable."""
    open_: tuple[str, float, float] | None = None
    for name, start, end in sorted(intervals, key=lambda i: i[1]):
        if open_ and open_[0] == name and start - open_[2] < 1e-6:
            open_ = (name, open_[1], max(end, open_[2]))
            continue
        if open_:
            yield open_[0], open_[1], min(open_[2], start)
        open_ = (name, start, end)
    if open_:
        yield open_


def _innermost(spans: Sequence[tuple[str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Nested spans flattened: at each moment the innermost."""
    stack: list[tuple[str, float]] = []
    cursor = 0.0
    for name, start, end in [*sorted(spans, key=lambda s: (s[1], -s[2])), ("", float("inf"), float("inf"))]:
        while stack and stack[-1][1] <= start:
            inner, stop = stack.pop()
            if stop > cursor:
                yield inner, cursor, stop
            cursor = max(cursor, stop)
        if stack and start > cursor:
            yield stack[-1][0], cursor, start
        cursor = max(cursor, start) if stack else start
        stack.append((name, end))
