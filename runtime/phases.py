"""Phase timers of a training step: disjoint by construction, summing to the step.

One clock and a stack. Entering a phase credits the time since the last boundary to the phase below and starts the new one; leaving
does the reverse. What no phase claims is `other`. On CUDA a boundary is an event on the stream where the step began, so that a phase's time is
what that stream spent there, including the time it stood idle because the host was late, and nothing waits for the device inside the step:
events of a step are read when a later step asks, after they have completed. A step there begins where the one before it ended, so that the
host's work between them is not lost; `pause()` where something else runs between two steps. The host's own clock at the same boundaries gives
`host`: the time that the main thread spent in each phase, waits for the device included. `failed_in`: the phases, outermost first, that an exception
left.
"""
from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import torch

from costmodel.runresult import PHASES

# What is no part of any step, though it lies between two of them.
APART = "apart"
# The phase that begins, its event (CUDA), the host's clock.
_Boundary = tuple[str, "torch.cuda.Event | None", float]


class PhaseTimer:
    """`start_step()`, `with phase(name)` nested at will, `end_step()`; `finished()` gives the phases [s] of steps that are complete."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stack: list[str] = []
        self._boundaries: list[_Boundary] = []
        self._steps: list[list[_Boundary]] = []
        self._last: _Boundary | None = None
        self._stream: torch.cuda.Stream | None = None
        self._events: list[torch.cuda.Event] = []  # to be recorded again
        self.host: list[dict[str, float]] = []
        self.failed_in = ""

    def _mark(self, name: str) -> _Boundary:
        """`name` begins now."""
        if not self._cuda:
            return name, None, time.perf_counter()
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return name, event, time.perf_counter()

    def start_step(self) -> None:
        assert not self._stack, f"step started inside {self._stack}"
        self._stack = ["other"]
        if self._cuda:
            self._stream = torch.cuda.current_stream()
        self._boundaries = [("other", *self._last[1:]) if self._last is not None else self._mark("other")]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time inside belongs to `name`, except inside a nested phase. Outside a step nothing is timed."""
        if not self._stack:
            yield
            return
        self.enter(name)
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or " > ".join(self._stack[1:])
            raise
        finally:
            self.leave(name)

    def enter(self, name: str) -> None:
        """Start `name`; pair with `leave`. For hooks, where a `with` block does not fit. Outside a step nothing happens."""
        assert name in PHASES, name
        if self._stack:
            self._stack.append(name)
            self._boundaries.append(self._mark(name))

    def leave(self, name: str) -> None:
        if self._stack:
            top = self._stack.pop()
            assert top == name, f"left phase {name} inside {top}"
            self._boundaries.append(self._mark(self._stack[-1]))

    def end_step(self) -> None:
        assert self._stack == ["other"], f"step ended inside {self._stack}"
        self._stack = []
        self._boundaries.append(self._mark("end"))
        self._steps.append(self._boundaries)
        self._last = self._boundaries[-1] if self._cuda else None

    def abandon_step(self) -> None:
        """Forget the step in progress (it failed)."""
        self._stack, self._boundaries = [], []
        self.pause()

    def pause(self) -> None:
        """What runs until the next step begins belongs to none."""
        self._last = None

    def finished(self, *, wait: bool = False) -> list[dict[str, float]]:
        """Phases of steps ended since the last call, oldest first; on CUDA those whose last event has completed (`wait`: all). `host` grows alike."""
        done = []
        while self._steps:
            boundaries = self._steps[0]
            if self._cuda:
                last = boundaries[-1][1]
                if wait:
                    last.synchronize()
                elif not last.query():
                    break
            steps = self._steps.pop(0)
            self.host.append(_durations(steps, lambda begin, end: end[2] - begin[2]))
            done.append(_durations(steps, lambda begin, end: begin[1].elapsed_time(end[1]) * 1e-3) if self._cuda else dict(self.host[-1]))
            if self._cuda:
                self._events += [event for _, event, _ in steps[:-1]]  # the last one is the next step's first
        return done


def _durations(boundaries: list[_Boundary], seconds: Callable[[_Boundary, _Boundary], float]) -> dict[str, float]:
    phases = dict.fromkeys(PHASES, 0.0)
    for begin, end in itertools.pairwise(boundaries):
        if begin[0] != APART:
            phases[begin[0]] += seconds(begin, end)
    return phases
