"""What is particular to a step on GPUs: who waits for whom, and what checkpoint policies add to blocks.

Steady state. The host runs ahead: it enqueues a step while the device is still in the one before, and only then reads that one's loss
(runtime/trainer.py). So device and host are two servers in a row with a step between them, and a step takes

    max(device, launch, load)     device: the schedule with launches never in the way
                                  launch: host seconds to enqueue everything
                                  load:   the loader's thread, which builds ahead

The first two alternate within a step: a phase of few large kernels and one of many small ones make one step together, and how long the device is seen
in each depends on how far ahead the host is. `Steady.phases` plays a few steps on one GPU: a piece of work begins when the device is free and its
first launch is out, and ends when its work is done and its last launch is out.

A step in which the host reads something from the device (split sizes of an exchange) has no such lead; its schedule is simulated with its launches.

Blocks under a policy are timed whole, backward with what runs again; their corrections are kept by `block_key`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from costmodel.ops import BACKWARD, FORWARD, Op
from costmodel.stepgraph import COMPUTE, HOST, PHASES, StepGraph

# Policies that are timed beside `none`.
POLICIES = ("selective", "full")


def block_key(kind: str, dtype: str, policy: str = "") -> str:
    """The name of a block kind's correction on a GPU, where every dtype and policy has its own; `policy` empty: `none`."""
    return f"{kind}@{dtype}" + (f":{policy}" if policy and policy != "none" else "")


def timed_ops(forward: Sequence[Op], phase: str, policy: str, matrix_ops: Sequence[str]) -> list[tuple[Op, str]]:
    """(op, phase) of everything that runs when a block is timed in `phase` under `policy`."""
    own = [(one, phase) for one in forward]
    if phase != BACKWARD or policy in ("", "none"):
        return own
    return own + [(one, FORWARD) for one in forward if policy == "full" or one.kind not in matrix_ops]


# Steps that are played until their phases repeat.
_PLAYED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Work of one phase: host seconds to launch it, device seconds."""

    phase: str
    launch: float
    device: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The three servers of a step in steady state [s]; launches: host seconds by phase. pieces: the step in order, where it is known."""

    device: float
    launches: dict[str, float]
    load: float
    pieces: tuple[Piece, ...] = ()

    @property
    def launch(self) -> float:
        return sum(self.launches.values())

    @property
    def seconds(self) -> float:
        return max(self.device, self.launch, self.load)

    def phases(self, device: dict[str, float]) -> dict[str, float]:
        """`device`'s phases, or those of the server that holds the others up: a device that waits for launches shows the host's phases,
        one that waits for a batch does so in `input`."""
        if self.pieces:
            found = played(self.pieces)
            return {**found, "input": found["input"] + max(0.0, self.load - sum(found.values()))}
        if self.launch >= max(self.device, self.load):
            return {name: self.launches.get(name, 0.0) for name in PHASES}
        return {**device, "input": device["input"] + max(0.0, self.load - self.device)}


def played(pieces: Sequence[Piece]) -> dict[str, float]:
    """Seconds of the device in every phase of a step in steady state, waits for launches included; a phase begins on the device where the host has
    said so and everything before is done. The host ends a step when the device has ended the one before."""
    host = free = ended = mark = 0.0
    found = dict.fromkeys(PHASES, 0.0)
    for _ in range(_PLAYED):
        before, found = ended, dict.fromkeys(PHASES, 0.0)
        for piece in pieces:
            launched = host + piece.launch
            if piece.device > 0.0:
                free = max(max(free, host) + piece.device, launched)
            host = launched
            now = max(free, host)
            found[piece.phase] += now - mark
            mark = free = now
        ended = mark
        host = max(host, before)
    return found


def has_lead(graph: StepGraph) -> bool:
    """Whether the host never waits for the device within the step."""
    return not any(task.stream == HOST for task in graph.tasks)


def without_launches(graph: StepGraph) -> StepGraph:
    """The same tasks, all of them enqueued before the step begins."""
    return StepGraph(tasks=tuple([task.enqueued() for task in graph.tasks]))


def pieces(graph: StepGraph, *, early: float = 0.0, accumulated: tuple[float, float] = (0.0, 0.0), micro: float = 0.0,
           rest: float = 0.0) -> tuple[Piece, ...]:
    """The compute tasks of a graph in order, copies with what waits for them; empty where anything crosses a link. early: launches of recomputation
    that forward makes; accumulated: (device, host) seconds of adding gradients up, in the last backward; micro, rest: host seconds of taking a
    micro-batch, and of a step's end."""
    if any(task.stream.startswith("tier:") for task in graph.tasks):
        return ()
    own = [task for task in graph.tasks if task.stream == COMPUTE]
    forward = sum(task.host_seconds for task in own if task.phase == FORWARD)
    again = sum(task.host_seconds for task in own if task.name.startswith("recompute "))
    early = min(early, again) if forward > 0 else 0.0
    found = []
    for task in own:
        launch = task.host_seconds
        if task.phase == FORWARD:
            launch *= 1.0 + early / forward if forward > 0 else 1.0
        elif task.name.startswith("recompute ") and again > 0:
            launch *= 1.0 - early / again
        found.append(Piece(task.phase, launch + (micro if task.phase == "input" else rest if task.phase == "other" else 0.0),
                           task.seconds + sum(graph.tasks[i].seconds for i in task.deps if graph.tasks[i].kind == "copy")))
    last = max((i for i, piece in enumerate(found) if piece.phase == BACKWARD), default=None)
    if last is not None and any(accumulated):
        found.insert(last + 1, Piece(BACKWARD, accumulated[1], accumulated[0]))
    return tuple(found)


def launches(graph: StepGraph) -> dict[str, float]:
    """Host seconds by phase."""
    found = dict.fromkeys(PHASES, 0.0)
    for task in graph.tasks:
        found[task.phase] += task.host_seconds
    return found
