"""How fast the cores of a host are just now, and which of them a training process keeps to.

A machine's cores need not be alike: on the 16 of a shared host, nothing else running in the machine, about half of them took 1.9 times as long for
the same piece of Python as the others, without any stolen time to be seen [Measured: host of an H200, 2026-12-01]; one of the machine's own threads
in a busy loop on any other core slowed none down, so what does is outside. A step that the host makes takes as long as its main thread. Of eight ways
to run the same eager steps in turns, five times 24 steps each, all cores open took 8.4 to 12.9 ms, the same four cores, three of which were fast, 8.1
to 9.1, one core alone 11.9 to 16.9; threads of lowest priority that keep cores awake, or fewer threads that compute, changed nothing [Measured: H200
host, 2026-12-01]. A launching thread that visited all cores before every step and stayed on the fastest did worse than one left alone.

So a process that drives a GPU alone on its host keeps all its threads to the cores that are quiet (`Quiet`): several, that its threads do not wait
for one another, and looks again where the one that it is on has become slow.
"""
from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

# Times that the piece runs on a core, of which the shortest counts.
TRIES = 4
# How often it runs where the caller is, beside what it takes on every core, to find full speed.
PIECES = 300
# A core is quiet up to so many times the fastest one's seconds, and cores that are kept at least; times that each is looked at; a launching thread's
# piece over the fastest one's from which they are looked at again; seconds between two pieces, and after a look before the next.
QUIET, LEAST, LOOKS, SLOW, EVERY, REST = 1.25, 4, 3, 1.5, 0.5, 2.0


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


def quiet(seconds: Mapping[int, float]) -> list[int]:
    """Of cores whose pieces take `seconds` those within QUIET of the fastest, the LEAST fastest at least."""
    order = sorted(seconds, key=lambda core: (seconds[core], core))
    return sorted(core for i, core in enumerate(order) if i < LEAST or seconds[core] <= QUIET * seconds[order[0]])


def keep_to(cores: Iterable[int]) -> None:
    """Every thread of this process, and those that they start from now on, runs on `cores` alone; nothing where a process may not choose."""
    cores = set(cores)
    for thread in _threads():
        with contextlib.suppress(OSError):  # it has ended, or may not
            os.sched_setaffinity(thread, cores)


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]


class Quiet:
    """Keeps this process to quiet cores of those that it may use: `settle()` before work begins, `look()` now and then between steps, on the
    launching thread; `leave()` gives all of them back. kept: where it is."""

    def __init__(self, timed: Callable[[], float] = piece, clock: Callable[[], float] = time.perf_counter) -> None:
        self.cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._timed, self._clock, self._next, self._fastest = timed, clock, 0.0, 0.0
        self.kept = list(self.cores)

    def settle(self) -> None:
        """Looks at every core and keeps to the quiet ones."""
        if len(self.cores) > LEAST:
            found: list[dict[int, float]] = []

            def visit() -> None:
                with contextlib.suppress(OSError):
                    found.extend(speeds(self.cores, self._timed) for _ in range(LOOKS))

            visitor = threading.Thread(target=visit)
            visitor.start()
            visitor.join()
            if len(found) == LOOKS:
                usual = {core: statistics.median(one[core] for one in found) for core in self.cores}
                self.kept, self._fastest = quiet(usual), min(usual.values())
                keep_to(self.kept)
        self._next = self._clock() + REST

    def look(self) -> None:
        """Settles anew where the caller's core has become slow; asks it every EVERY seconds."""
        if self._clock() < self._next or len(self.kept) == len(self.cores):
            return
        self._next = self._clock() + EVERY
        if min(self._timed() for _ in range(2)) > SLOW * self._fastest:
            self.settle()

    def leave(self) -> None:
        """All cores again; `kept` still says where it was."""
        if len(self.kept) < len(self.cores):
            keep_to(self.cores)


def alone_on_host() -> bool:
    """Whether no other rank of this training is on the host: ranks of one host would choose the same cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1


def spread(seconds: Sequence[float]) -> float:
    """Standard deviation over the mean: how unlike the hosts of ranks are at one time (`host/spread`, `costmodel.peers`)."""
    return statistics.pstdev(seconds) / statistics.fmean(seconds)
