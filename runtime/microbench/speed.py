"""How fast the host was while steps ran.

A shared host's cores run at full speed or at about half of it, for tenths of a second up to whole runs [Measured: 16 cores of an H200's host,
2026-12-01; that their other hardware thread is busy then is inferred]. Medians of so few runs are those of one speed or the other; so every step has
a fixed piece of Python before and after it (`runtime.cores.piece`) that tells its speed, figures are taken at full speed, and the speed that is to
be expected is a figure of its own. The piece runs twice, and the second time counts: what the step left of the caches costs the first a half more.
Steps are slowed down less than the piece: between visits of one plan, whose pieces took 1.5 to 2.9 times as long as at full speed, steps that the
host made took (piece)^0.75 to 0.9 as long [Measured: H200, 2026-12-01, five plans], within visits ^0.5 to 0.8; hence SLOW_SHARE, and

    slowness = (piece / piece at full speed)^SLOW_SHARE

    slow = sum(seconds) / sum(seconds / slowness)       over all steps that were probed

by how much the same work takes longer on average. It is a constant of the calibration (`host/slow`, `costmodel.hosttime`), with the quantiles of
slowness over time beside it.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from costmodel.hosttime import SLOW, SLOW_SHARE
from costmodel.samples import Sample
from runtime.cores import full_speed, piece
from runtime.microbench.gpu import Report, constant
from runtime.phases import APART, PhaseTimer

# Shares of the time at which slowness is kept.
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


class Probed(PhaseTimer):
    """A PhaseTimer whose steps have a piece of Python before and after them, in no phase of theirs. pieces: seconds of both, by step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pieces: list[tuple[float, float]] = []

    def start_step(self) -> None:
        if self._last is None:
            before = warm_piece()
            super().start_step()
        else:  # a step begins where the one before ended: all but the piece belongs to it
            super().start_step()
            self._boundaries.append(self._mark(APART))
            before = warm_piece()
            self._boundaries.append(self._mark("other"))
        self.pieces.append((before, before))

    def end_step(self) -> None:
        super().end_step()
        self.pieces[-1] = (self.pieces[-1][0], warm_piece())
        if self._last is not None:
            self._last = self._mark("end")

    def abandon_step(self) -> None:
        if self._stack:
            self.pieces.pop()
        super().abandon_step()


def warm_piece() -> float:
    """Seconds of a piece of Python that has just run."""
    piece()
    return piece()


def slowness(pieces: Sequence[Sequence[float]], fastest: float) -> np.ndarray:
    """How many times slower than at full speed, where a piece takes `fastest` seconds, the host was in each step."""
    return np.maximum(1.0, np.mean(np.asarray(pieces, dtype=np.float64).reshape(-1, 2), axis=1) / fastest) ** SLOW_SHARE


def expected(seconds: Sequence[float], slow: Sequence[float]) -> float:
    """By how much the same work takes longer on average, from steps of `seconds` in which the host was `slow` times slower."""
    return float(np.sum(seconds) / np.sum(np.asarray(seconds) / np.asarray(slow)))


class Speeds:
    """The speeds at which a calibration saw its host. fastest: seconds of a piece at full speed."""

    def __init__(self, fastest: float | None = None) -> None:
        self.fastest = full_speed() if fastest is None else fastest
        self._seconds: list[float] = []
        self._slow: list[float] = []

    def of(self, timer: Probed, phases: Sequence[dict[str, float]], first: int) -> np.ndarray:
        """The slowness of every step of a run from the `first` on, whose phases are `phases` from there on; they are kept."""
        slow = slowness(timer.pieces[first:first + len(phases)], self.fastest)
        self._seconds += [sum(step.values()) for step in phases]
        self._slow += slow.tolist()
        return slow

    def samples(self, report: Report = lambda _: None) -> Iterator[Sample]:
        """Constants `host/slow` and its quantiles over time; none where no step was probed."""
        if not self._slow:
            return
        order = np.argsort(self._slow)
        slow, seconds = np.array(self._slow)[order], np.array(self._seconds)[order]
        shares = (np.cumsum(seconds) - seconds / 2.0) / seconds.sum()
        found = {SLOW: expected(seconds, slow), **{f"{SLOW}:{name}": float(np.interp(share, shares, slow)) for name, share in QUANTILES.items()}}
        report(f"host: {len(slow)} steps, {seconds.sum():.1f} s: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
        for name, value in found.items():
            yield constant("host", value, name)
