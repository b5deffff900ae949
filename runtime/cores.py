"""How fast the cores of a host are just now.

A machine's cores need not be alike: on the 16 of a shared host, nothing else running in the machine, about half of them took 1.9 times as long for
the same piece of Python as the others, others of them a few tenths of a second later, without any stolen time to be seen; one of the machine's own
threads in a busy loop on any other core slowed none down [Measured: hosts of H200s, 2026-12-01], so what does is outside. A step that the host makes
takes as long as its main thread, so what that thread spends is known no better than this, and two ranks of a host are not slow at the same time.

Choosing cores does not help. A launching thread that visited all cores before every step and stayed on the fastest did worse than one left alone
(forward and backward of small steps 10 to 25 % longer). A process kept to the cores that a look of 20 ms before training found quiet, 8.7 of 16 on
average, was on a slow one in 44 % of its steps, as often as a core taken at random, 46 % [Measured: 333 runs of `benchmarks.fidelity --seed 71077`,
commit 35f13fd, 2026-12-01]: which of the machine's cores are slow changes sooner than a run begins. Threads of lowest priority that keep every core
awake, fewer threads that compute and an idle loop that polls made no difference that five turns of 24 steps each would show [Measured: H200's host,
2026-12-01]. It is left where the system puts it.
"""
from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence

# Times that the piece runs on a core, of which the shortest counts.
TRIES = 4
# How often it runs where the caller is, beside what it takes on every core, to find full speed.
PIECES = 300


def piece() -> float:
    """Seconds of a fixed piece of Python, about a tenth of a millisecond."""
    begin = time.perf_counter()
    total, seen = 0, {}
    for i in range(800):
        seen[i & 255] = total
        total += seen.get((i * 7) & 255, 1) & 3
    return time.perf_counter() - begin


def own_part(cores: Sequence[int], rank: int, ranks: int) -> list[int]:
    """The cores of one of `ranks` processes of a host: neighbours, which share caches and hardware threads; all where there is not one for each."""
    if len(cores) < ranks:
        return list(cores)
    return list(cores)[rank * len(cores) // ranks:(rank + 1) * len(cores) // ranks]


def speeds(cores: Sequence[int], timed: Callable[[], float] = piece) -> dict[int, float]:
    """Seconds of the piece by core; the calling thread visits each of them and comes back to where it was."""
    before, found = os.sched_getaffinity(0), {}
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            found[core] = min(timed() for _ in range(TRIES))
    finally:
        os.sched_setaffinity(0, before)
    return found


def full_speed(timed: Callable[[], float] = piece) -> float:
    """Seconds of the piece on a core that nothing slows down: the least on all cores of this process and where the caller is. A thread of its own
    visits the cores, so that the caller stays where it is."""
    found: list[float] = []

    def visit() -> None:
        with contextlib.suppress(OSError):  # a process that may not choose its cores
            found.extend(speeds(sorted(os.sched_getaffinity(0)), timed).values())

    visitor = threading.Thread(target=visit)
    visitor.start()
    visitor.join()
    return min([*found, *(timed() for _ in range(PIECES))])


def spread(seconds: Sequence[float]) -> float:
    """Standard deviation over the mean: how unlike the hosts of ranks are at one time (`host/spread`, `costmodel.peers`)."""
    return statistics.pstdev(seconds) / statistics.fmean(seconds)
