"""StepGraph: one training step of one rank as tasks on streams with dependencies; `lower` builds it, `simulate` times it."""
from __future__ import annotations

import dataclasses
from typing import Literal

from costmodel.quantity import Source

PHASES = ("input", "sparse", "forward", "backward", "exposed_communication", "optimizer", "other")
HOST, COMPUTE, H2D = "host", "compute", "h2d"


def tier_stream(tier: str) -> str:
    """The stream of a link tier: `tier:<name>`."""
    return f"tier:{tier}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work of `seconds` on one stream, after every task in `deps` (indices of earlier tasks) has ended.

    stream: `host`, `compute`, `h2d` or `tier:<name>`; a stream runs its tasks one at a time in list order. host_seconds: host time to launch the
    task, spent on the host stream before it may start. phase: the phase whose main-thread time it is (one of PHASES; a collective's own phase is
    where a wait for it would be felt). kind: `compute`, `collective`, `copy` or `host`. sm_fraction: share of the device that a collective takes
    from compute beside it; waiting_fraction: while it waits for another rank. compute_bound: how many of `seconds` are ops whose roof is compute.
    """

    name: str
    stream: str
    seconds: float
    host_seconds: float = 0.0
    deps: tuple[int, ...] = ()
    phase: str = "other"
    region: str = ""
    kind: Literal["compute", "collective", "copy", "host"] = "compute"
    sm_fraction: float = 0.0
    waiting_fraction: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    compute_bound: float = 0.0
    source: Source = "measured"

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.host_seconds >= 0):
            raise ValueError(f"task {self.name}: seconds and host_seconds must be >= 0")
        if self.phase not in PHASES:
            raise ValueError(f"task {self.name}: phase {self.phase!r} is none of {', '.join(PHASES)}")

    def enqueued(self) -> Task:
        """The same task with no launch; not by `dataclasses.replace`, which takes three times as long, for every task of every prediction."""
        if self.host_seconds == 0.0:
            return self
        made = object.__new__(Task)
        for name in _FIELDS:
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "host_seconds", 0.0)
        return made


_FIELDS = tuple(field.name for field in dataclasses.fields(Task))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """Tasks in issue order; a dependency always points back, so the graph is acyclic by construction."""

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        for i, task in enumerate(self.tasks):
            if task.deps and not (min(task.deps) >= 0 and max(task.deps) < i):
                raise ValueError(f"task {i} ({task.name}): dependencies {task.deps} must be indices of earlier tasks")
