"""Phase timers of a training step: disjoint by construction, summing to the step.

One clock and a stack. Entering a phase credits the time since the last boundary to the phase below and starts the new one; leaving
does the reverse. What no phase claims is `other`. On CUDA a boundary is an event on the current stream, so that a phase's time is
what the stream spent there, including the time it stood idle because the host was late, and nothing waits for the device inside the step:
events of a step are read when a later step asks, after they have completed.
"""
from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import torch

from costmodel.runresult import PHASES


class PhaseTimer:
    """`start_step()`, `with phase(name)` nested at will, `end_step()`; `finished()` gives the phases [s] of steps that are complete."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stack: list[str] = []
        self._boundaries: list[tuple[str, float | torch.cuda.Event]] = []
        self._steps: list[list[tuple[str, float | torch.cuda.Event]]] = []

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start_step(self) -> None:
        assert not self._stack, f"step started inside {self._stack}"
        self._stack = ["other"]
        self._boundaries = [("other", self._now())]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time inside belongs to `name`, except inside a nested phase. Outside a step nothing is timed."""
        if not self._stack:
            yield
            return
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def enter(self, name: str) -> None:
        """Start `name`; pair with `leave`. For hooks, where a `with` block does not fit. Outside a step nothing happens."""
        assert name in PHASES, name
        if self._stack:
            self._stack.append(name)
            self._boundaries.append((name, self._now()))

    def leave(self, name: str) -> None:
        if self._stack:
            top = self._stack.pop()
            assert top == name, f"left phase {name} inside {top}"
            self._boundaries.append((self._stack[-1], self._now()))

    def end_step(self) -> None:
        assert self._stack == ["other"], f"step ended inside {self._stack}"
        self._stack = []
        self._boundaries.append(("end", self._now()))
        self._steps.append(self._boundaries)

    def abandon_step(self) -> None:
        """Forget the step in progress (it failed)."""
        self._stack, self._boundaries = [], []

    def finished(self, *, wait: bool = False) -> list[dict[str, float]]:
        """Phases of steps ended since the last call, oldest first; on CUDA those whose last event has completed (`wait`: all)."""
        done = []
        while self._steps:
            boundaries = self._steps[0]
            if self._cuda:
                last = boundaries[-1][1]
                if wait:
                    last.synchronize()
                elif not last.query():
                    break
            done.append(_durations(self._steps.pop(0), self._cuda))
        return done


def _durations(boundaries: list[tuple[str, float | torch.cuda.Event]], cuda: bool) -> dict[str, float]:
    phases = dict.fromkeys(PHASES, 0.0)
    for (name, begin), (_, end) in itertools.pairwise(boundaries):
        phases[name] += begin.elapsed_time(end) * 1e-3 if cuda else end - begin
    return phases
