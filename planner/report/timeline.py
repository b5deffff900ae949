"""timeline.json.gz: predicted and measured ranks side by side, for Perfetto (ui.perfetto.dev), chrome://tracing and HTA.

One process per rank, one thread per stream; events of a thread never overlap. The predicted step of the average and of the slowest rank begins at
0, and so does each measured rank's first traced step.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from costmodel.accounting import SimulatedRanks, launches
from costmodel.simulate import Timeline
from costmodel.stepgraph import COMPUTE, HOST, StepGraph
from planner.files import replacing
from planner.tracesteps import RankStep

FILE = "timeline.json.gz"


def predicted_ranks(ranks: SimulatedRanks | None) -> dict[str, tuple[StepGraph, Timeline]]:
    """The average rank's step, and the slowest one's where it differs."""
    if ranks is None:
        return {}
    found = {"predicted, average rank": (ranks.average.graph, ranks.timeline)}
    if ranks.slowest is not ranks.average:
        found["predicted, slowest rank"] = (ranks.slowest.graph, ranks.slowest_timeline)
    return found


def write(path: Path, ranks: SimulatedRanks | None, steps: Sequence[Sequence[RankStep]]) -> Path:
    """Writes the timeline through a temporary file."""
    events = list(_events(ranks, steps))
    body = {"schemaVersion": 1, "displayTimeUnit": "ms", "distributedInfo": {"rank": 0}, "traceEvents": events, "traceName": FILE}
    with replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(json.dumps(body, separators=(",", ":")).encode(), 6, mtime=0))
    return path


def _events(ranks: SimulatedRanks | None, steps: Sequence[Sequence[RankStep]]) -> Iterator[dict[str, Any]]:
    process = 0
    for name, (graph, timeline) in predicted_ranks(ranks).items():
        yield from _process(process, name, [HOST, COMPUTE, *sorted({t.stream for t in graph.tasks} - {HOST, COMPUTE})], _predicted(graph, timeline))
        process += 1
    by_rank: dict[int, list[RankStep]] = {}
    for step in steps:
        for rank in step:
            by_rank.setdefault(rank.rank, []).append(rank)
    for number, own in sorted(by_rank.items()):
        spans = list(_measured(own))
        yield from _process(process, f"measured, rank {number}", list(dict.fromkeys(s[0] for s in spans)), spans)
        process += 1


def _process(pid: int, name: str, streams: list[str], spans: Sequence[tuple[str, str, str, float, float]]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
    threads = {stream: i for i, stream in enumerate(streams)}
    for stream, tid in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": stream}}
    ends: dict[str, float] = {}
    for stream, category, what, start, end in sorted(spans, key=lambda s: (s[0], s[3])):
        # whole nanoseconds, so that a successor never begins before its predecessor ends
        start = max(round(start * 1e6, 3), ends.get(stream, 0.0))
        ends[stream] = max(round(end * 1e6, 3), start)
        if ends[stream] > start:
            yield {"ph": "X", "cat": category, "name": what, "pid": pid, "tid": threads[stream], "ts": start, "dur": round(ends[stream] - start, 3)}


def _predicted(graph: StepGraph, timeline: Timeline) -> list[tuple[str, str, str, float, float]]:
    spans = []
    for index, start, end in timeline.spans:
        task = graph.tasks[index]
        if end > start:
            spans.append((task.stream, task.phase, task.name, start, end))
    spans += [(HOST, "launch", f"launch {graph.tasks[index].name}", start, end) for index, start, end in launches(graph, timeline) if end > start]
    return spans


def _measured(own: Sequence[RankStep]) -> Iterator[tuple[str, str, str, float, float]]:
    zero = own[0].begin
    for step in own:
        yield "step", "step", f"step {step.step}", step.begin - zero, step.end - zero
        for category, start, end in _merged(step.intervals):
            yield "time goes to", category, category, start - zero, end - zero
        lanes = [s for s in step.named if s[0].startswith("stream")]
        yield from ((lane, "kernel", name, start - zero, end - zero) for lane, name, start, end in lanes)
        for lane in ("phases", "regions", "ops"):
            spans = [(name, start, end) for found, name, start, end in step.named if found == lane]
            yield from ((lane, lane, name, start - zero, end - zero) for name, start, end in _innermost(spans))


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
