"""How one call is timed.

CPU     time of each call after a warm-up; the median over calls, which are repeated until `seconds` have passed. Where one thread computes it is
        that thread's processor time: what others run on the core meanwhile costs repeats, not accuracy.
CUDA    the stream is held back while the host enqueues a run of calls, so that events around the run see the device alone; the host's time
        to enqueue a call is kept apart. Calls rotate over several sets of inputs, together larger than the L2 cache.

A case is prepared outside the timed part (`prepare() -> state`, e.g. the forward of a backward) and then run (`run(state)`).
"""
from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

MIN_REPEATS, MAX_REPEATS = 5, 200
# A call slower than this is repeated less: its noise is averaged within.
SLOW_CALL = 0.04
SLOW_REPEATS = 3
HELD_RESULTS = 3
# A core's share of the last cache of the machines at hand, and more [bytes].
EVICTED_BYTES = 24_000_000
_EVICTED: list[torch.Tensor] = []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """seconds: median of one call; noise: median absolute deviation / median; host_seconds: to enqueue a call (CUDA only)."""

    seconds: float
    noise: float
    repeats: int
    host_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One thing to time. `prepare` is called before every run, outside the timed part; its result goes to `run`."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


class ProcessorShare:
    """Of all calls of this process that were timed on the CPU: the share of their time that the thread had a processor."""

    # A shorter call says more about the clocks [s].
    SHORTEST = 1e-3

    def __init__(self) -> None:
        self._processor, self._wall = 0.0, 0.0

    def add(self, processor: float, wall: float) -> None:
        if processor >= self.SHORTEST:
            self._processor += processor
            self._wall += wall

    @property
    def share(self) -> float | None:
        """In (0, 1]; None before anything was timed, or where several threads compute."""
        return min(1.0, self._processor / self._wall) if self._wall > 0 and torch.get_num_threads() == 1 else None


PROCESSOR = ProcessorShare()


def measure(runs: list[Run], *, device: torch.device, seconds: float, cold: bool = False, evicted: bool = False) -> Timing:
    """Times `runs` in rotation for about `seconds` in all. `cold`: on a CPU every call gets memory that the last ones have not touched, as in a step,
    whose tensors stay alive until backward; `evicted`: nothing of its inputs is in a core's caches either, as of tables,
    which a step touches once."""
    if device.type == "cuda":
        return _measure_cuda(runs, seconds)
    return _measure_cpu(runs, seconds, cold, evicted)


def evict() -> None:
    """Writes more than a core's share of the last cache."""
    if not _EVICTED:
        _EVICTED.append(torch.zeros(EVICTED_BYTES // 4))
    _EVICTED[0].add_(1.0)


def summarize(times: list[float], host: list[float] | None = None) -> Timing:
    """Median and spread of single calls."""
    median = statistics.median(times)
    spread = statistics.median(abs(t - median) for t in times)
    return Timing(seconds=max(median, 1e-9), noise=spread / max(median, 1e-9), repeats=len(times),
                  host_seconds=statistics.median(host) if host else None)


def _measure_cpu(runs: list[Run], seconds: float, cold: bool, evicted: bool) -> Timing:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    held: collections.deque[Any] = collections.deque(maxlen=HELD_RESULTS if cold else 0)
    for i in range(HELD_RESULTS + 1 if cold else min(2, len(runs))):  # until all the memory that is held has been touched once
        one = runs[i % len(runs)]
        state = one.prepare()
        held.append((one.run(state), state))
    times: list[float] = []
    end = time.process_time() + seconds
    while len(times) < MAX_REPEATS:
        one = runs[len(times) % len(runs)]
        state = one.prepare()
        if evicted:
            evict()
        wall = time.perf_counter()
        start = clock()
        result = one.run(state)
        stop = clock()
        PROCESSOR.add(stop - start, time.perf_counter() - wall)
        held.append((result, state))
        del result, state  # freed outside the timed part, as a step frees its tensors later
        times.append(stop - start)
        enough = SLOW_REPEATS if times[-1] > SLOW_CALL else MIN_REPEATS
        if time.process_time() > end and len(times) >= enough:
            break
    return summarize(times)


# The stream is held back for so much longer than the host needs to enqueue a run of calls.
_HOLD_FACTOR, _HOLD_EXTRA = 1.3, 40e-6
CYCLES_PER_SECOND = 1.98e9  # of an H200 at its highest clock; a lower clock holds longer
_CALLS_PER_RUN = 8
# Device times repeat to a few thousandths.
_CUDA_REPEATS = 3
# Bytes that the states of one run of calls may take together, and launches that the stream's queue takes without blocking the host.
_STATE_BYTES = 24e9


def _measure_cuda(runs: list[Run], seconds: float) -> Timing:
    """The first calls compile and warm up; the host's time for one call then sets how long the stream is held back."""
    for one in runs[:2]:
        one.run(one.prepare())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    state = runs[0].prepare()
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = runs[0].run(state)
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    taken = max(1, torch.cuda.memory_allocated() - before)
    del state, result
    calls = max(1, min(_CALLS_PER_RUN, int(_STATE_BYTES // taken), int(seconds / (SLOW_REPEATS * whole))))
    device_times: list[float] = []
    host_times: list[float] = []
    end = time.perf_counter() + seconds
    while len(device_times) < MAX_REPEATS and (time.perf_counter() < end or len(device_times) < _CUDA_REPEATS):
        device_seconds, host = _one_cuda_run(runs, calls, held=_HOLD_FACTOR * host * calls + _HOLD_EXTRA)
        device_times.append(device_seconds)
        host_times.append(host)
        if SLOW_REPEATS * whole * calls > seconds and len(device_times) >= SLOW_REPEATS:
            break
    return summarize(device_times, host_times)


def _one_cuda_run(runs: list[Run], calls: int, *, held: float) -> tuple[float, float]:
    """(device seconds, host seconds) a call, over `calls` calls enqueued while the stream is held back for `held` seconds."""
    states = [(one, one.prepare()) for one in (runs[i % len(runs)] for i in range(calls))]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(held * CYCLES_PER_SECOND))
    begin.record()
    start = time.perf_counter()
    for one, state in states:
        one.run(state)
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3 / calls, host / calls
