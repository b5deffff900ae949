"""How fast the cores of a host are just now.

A machine's cores need not be alike: on the 16 of a shared host, nothing else running in the machine, about half of them took 1.9 times as long for
the same piece of Python as the others, others of them a few tenths of a second later, without any stolen time to be seen [Measured: host of an
H200, 2026-12-01]. A step that the host makes takes as long as its main thread, so what that thread spends is known no better than this, and two
ranks of a host are not slow at the same time. `FastCore` keeps a thread on cores that are fast: it looks again and again, which costs a small part of
what a slow core does.
"""
from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

# Times that the piece runs on a core, of which the shortest counts.
TRIES = 4
# Of `FastCore`: seconds between two looks, times the shortest piece seen from which on a core is slow, cores tried at once.
LOOK_EVERY, SLOW, MOST_TRIED = 0.05, 1.25, 6
WINDOW = 0.1


def piece() -> float:
    """Seconds of a fixed piece of Python, about a tenth of a millisecond."""
    begin = time.perf_counter()
    total, seen = 0, {}
    for i in range(800):
        seen[i & 255] = total
        total += seen.get((i * 7) & 255, 1) & 3
    return time.perf_counter() - begin


class FastCore:
    """Keeps the calling thread on a core of this process' part of the host that is fast just now; threads that it starts later are bound as it is.
    Does nothing where the system has no such call."""

    def __init__(self, timed: Callable[[], float] | None = None) -> None:
        self._timed = timed or (lambda: min(piece(), piece()))
        self._before = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
        rank, ranks = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
        self.cores = own_part(sorted(self._before), rank, ranks)
        self.best, self.moves, self._looked, self._turn = float("inf"), 0, 0.0, 0

    def keep(self) -> None:
        """Looks, if the last look is some time ago, and moves on where this core has become slow."""
        if len(self.cores) < 2 or time.perf_counter() - self._looked < LOOK_EVERY:
            return
        if not self.moves:  # what fast is shows on all of them
            found = [speeds([core], self._timed)[core] for core in self.cores]
            self.best = min(found)
            self._move_to(found.index(self.best))
        for _ in range(MOST_TRIED):
            taken = self._timed()
            self.best = min(self.best, taken)
            if taken <= SLOW * self.best:
                break
            self._move_to((self._turn + 1) % len(self.cores))
        self._looked = time.perf_counter()

    def _move_to(self, turn: int) -> None:
        self._turn, self.moves = turn, self.moves + 1
        os.sched_setaffinity(0, {self.cores[turn]})

    def release(self) -> None:
        """The thread may run where it might before."""
        if self.moves:
            os.sched_setaffinity(0, self._before)


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


def windows(seconds: float) -> list[float]:
    """Mean seconds of the piece in windows of a step's length, one behind the other, of a thread that `FastCore` keeps; as a trainer's."""
    placed, found, until = FastCore(), [], time.perf_counter() + seconds
    try:
        placed.keep()
        while time.perf_counter() < until:
            end, times = time.perf_counter() + WINDOW, []
            while time.perf_counter() < end:
                times.append(piece())
            found.append(statistics.fmean(times))
            placed.keep()
    finally:
        placed.release()
    return found


def spread(seconds: Sequence[float]) -> float:
    """Standard deviation over the mean: how unlike the hosts of ranks are at one time (`host/spread`, `costmodel.peers`)."""
    return statistics.pstdev(seconds) / statistics.fmean(seconds)
