"""What is particular to a step on GPUs: who waits for whom, and what checkpoint policies add to blocks.

Steady state. The host runs ahead: it enqueues a step while the device is still in the one before, and only then reads that one's loss
(runtime/trainer.py). So device and host are two servers in a row with a step between them, and a step takes

    max(device, launch, load)     device: the schedule with launches never in the way
                                  launch: host seconds to enqueue everything
                                  load:   the loader's thread, which builds ahead

A step in which the host reads something from the device (split sizes of an exchange) has no such lead; its schedule is simulated with its launches.

Blocks under a policy are timed whole, backward with what runs again; their corrections are kept by `block_key`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from costmodel.ops import BACKWARD, FORWARD, Op
from costmodel.stepgraph import HOST, PHASES, StepGraph

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The three servers of a step in steady state [s]; launches: host seconds by phase."""

    device: float
    launches: dict[str, float]
    load: float

    @property
    def launch(self) -> float:
        return sum(self.launches.values())

    @property
    def seconds(self) -> float:
        return max(self.device, self.launch, self.load)

    def phases(self, device: dict[str, float]) -> dict[str, float]:
        """`device`'s phases, or those of the server that holds the others up: a device that waits for launches shows the host's phases,
        one that waits for a batch does so in `input`."""
        if self.launch >= max(self.device, self.load):
            return {name: self.launches.get(name, 0.0) for name in PHASES}
        return {**device, "input": device["input"] + max(0.0, self.load - self.device)}


def has_lead(graph: StepGraph) -> bool:
    """Whether the host never waits for the device within the step."""
    return not any(task.stream == HOST for task in graph.tasks)


def without_launches(graph: StepGraph) -> StepGraph:
    """The same tasks, all of them enqueued before the step begins."""
    return StepGraph(tasks=tuple(dataclasses.replace(task, host_seconds=0.0) for task in graph.tasks))


def launches(graph: StepGraph) -> dict[str, float]:
    """Host seconds by phase."""
    found = dict.fromkeys(PHASES, 0.0)
    for task in graph.tasks:
        found[task.phase] += task.host_seconds
    return found
