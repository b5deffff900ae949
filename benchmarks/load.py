"""What other programs do to a measurement on this machine: the share of its cores that they used meanwhile (Linux)."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")


class LoadMeter:
    """Starts when made. Children of this process count as its own once they have been waited for."""

    def __init__(self) -> None:
        self._begin = self._now()

    def _now(self) -> tuple[float, float, float] | None:
        """(seconds on the wall, busy seconds of all cores, own seconds)."""
        if not _STAT.exists():
            return None
        user, nice, system, _, _, irq, softirq = (int(v) for v in _STAT.read_text().split("\n", 1)[0].split()[1:8])
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return time.monotonic(), (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"), own

    def others(self) -> float | None:
        """Share of all cores, in [0, 1], that others have used since the start; None where the system does not say."""
        end = self._now()
        if end is None or self._begin is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self._begin, end))
        return min(1.0, max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))) if wall > 0 else 0.0


def wait_until_quiet(limit: float, timeout: float, *, window: float = 2.0) -> bool:
    """Waits until others use at most `limit` of the cores over `window` seconds; False after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        meter = LoadMeter()
        time.sleep(window)
        others = meter.others()
        if others is None or others <= limit:
            return True
        if time.monotonic() >= end:
            return False
