"""90 % intervals from runs that were neither fitted nor scored.

A residual is (measured - predicted) / sqrt(predicted x predicted step), of the step or a phase: between an error relative to the phase, which tiny
phases exceed, and one relative to the step, which large ones do. Residuals come in cells, `<step or phase>@<maker>` by what makes the step: `host`,
`device`, or `either` of them, as fast as the host happens to be. Steps that the host can make are off by more: of 86 plans, 45 that the device makes
whatever the host's speed were 3 % off in the median and 9 % at most, the others 7 % and 42 % [Measured: H200, 2026-12-01]. Each residual is
standardised by median and mean deviation of the n - 1 others of its cell, which one run gone wrong moves little. How far such a figure strays depends
on n, so it is taken to the normal score that has its probability under Student's t of as many degrees of freedom (Wallace 1959); the absolute scores
of all cells together, which then differ in nothing that is known, give one quantile at the finite-sample level (n + 1) / n, and that, taken back
through t for the residuals that a cell has, its interval: place -+ t x spread. New runs are held with probability COVERAGE whatever the shape of the
errors, if cells differ in place, scale and number alone. Without the scores small cells would widen all the others: of normal residuals, 5 in half of
the cells and 22 in the others, the large cells then held 93 % of new runs, so 90.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

COVERAGE = 0.90
MAKERS = ("host", "device", "either")
# Residuals of a cell from which it stands alone (below: those of either maker together), and of all cells that intervals need. Three say little of
# their spread, and Student's t says so; those of the other maker say something wrong: intervals of theirs held 31 to 56 % of new runs (simulated).
OWN, FEWEST = 3, 20
# Spread that a cell has at least: clocks and events are no better.
LEAST_SPREAD = 1e-4
# A phase below this share of its step has no residual and no part in coverage: it is measured to a few microseconds only.
SMALL_PHASE = 0.005
# Degrees of freedom a residual: Student's t with so many has the 90 % quantile of a new normal value's distance from the median of others over their
# mean deviation, within 2 % for 5 to 22 residuals (simulated, 40,000 draws each).
FREEDOM = 1.15


def norm(value: float, step: float) -> float:
    """What an error of a figure `value` of a step is divided by [s]."""
    return math.sqrt(value * step)


def widening(by_source: Mapping[str, float]) -> float:
    """How much wider a prediction's intervals are, and its residuals count less, for the share of its time that no measurement nearby tells; from the
    shares of its time by source."""
    return 2.0 - min(1.0, sum(by_source.get(source, 0.0) for source in ("measured", "interpolated")))


def cell(name: str, maker: str) -> str:
    """`name`: `step` or a phase; `maker`: one of MAKERS."""
    return f"{name}@{maker}"


def residuals_of(pairs: Mapping[str, tuple[float, float]], maker: str, by_source: Mapping[str, float]) -> dict[str, float]:
    """Residuals of one run by cell. pairs: (predicted, measured) seconds of `step` and of phases; by_source: shares of the prediction's time."""
    step, measured_step = pairs["step"]
    return {cell(name, maker): (measured - predicted) / norm(predicted, step) / widening(by_source)
            for name, (predicted, measured) in pairs.items() if predicted > 0 and measured > SMALL_PHASE * measured_step}


class Intervals:
    """Bounds of what will be measured, from residuals by cell."""

    def __init__(self, residuals: Mapping[str, Sequence[float]]) -> None:
        grouped = {name: list(values) for name, values in residuals.items() if "@" in name}
        whole: dict[str, list[float]] = {}
        for name, values in grouped.items():
            whole.setdefault(name.split("@")[0], []).extend(values)
        cells = {name: own if len(own) >= OWN else whole[name.split("@")[0]] for name, own in grouped.items()}
        cells = {name: values for name, values in cells.items() if len(values) >= OWN}
        whole = {name: values for name, values in whole.items() if len(values) >= OWN}
        scores = [z for own in grouped.values() if len(own) >= OWN for z in _scores(own)]
        scores += [z for name, values in whole.items() if not any(len(grouped.get(cell(name, m), ())) >= OWN for m in MAKERS)
                   for z in _scores(values)]  # fmt: skip
        quantile = _quantile(scores) if len(scores) >= FEWEST else None
        # (middle, half-width) by cell, and by figure where a cell has too few
        self._places: dict[str, tuple[float, float]] = {}
        for name, values in () if quantile is None else (*whole.items(), *cells.items()):
            place, spread = _place(values)
            self._places[name] = place, spread * _scale(len(values)) * _from_score(quantile, _freedom(len(values)))

    def bounds(self, name: str, maker: str, value: float, step: float, *, widened: float = 1.0) -> tuple[float, float] | None:
        """(low, high) around the predicted `value` of a predicted `step`, `widened` times; None where too little is known."""
        known = self._places.get(cell(name, maker), self._places.get(name))
        if known is None:
            return None
        place, half = known
        low, high = (value + widened * norm(value, step) * (place + way * half) for way in (-1.0, 1.0))
        return max(0.0, min(value, low)), max(value, high)


def _place(values: Sequence[float]) -> tuple[float, float]:
    """Median, and the standard deviation that normal values of their mean deviation from it have."""
    median = float(np.median(values))
    return median, max(float(np.abs(np.asarray(values) - median).sum()) / _deviation(len(values)), LEAST_SPREAD)


@functools.cache
def _deviation(count: int) -> float:
    """Expected sum of the distances of `count` standard normal values from their median; order statistics by Blom."""
    upper = range(count - count // 2 + 1, count + 1)
    return 2.0 * sum(NormalDist().inv_cdf((i - 0.375) / (count + 0.25)) for i in upper) if count > 1 else 1.0


def _scores(values: Sequence[float]) -> list[float]:
    """The absolute normal score of each value, by place and spread of the others."""
    found, others = [], len(values) - 1
    for i, value in enumerate(values):
        place, spread = _place([*values[:i], *values[i + 1:]])
        found.append(_to_score(abs(value - place) / (spread * _scale(others)), _freedom(others)))
    return found


def _scale(count: int) -> float:
    """Standard deviation of a new standard normal value's distance from the median of `count` others."""
    return math.sqrt(1.0 + math.pi / (2.0 * count + math.pi - 2.0))


def _freedom(count: int) -> float:
    """Degrees of freedom of the mean deviation of `count` values."""
    return FREEDOM * (count - 1)


def _to_score(t: float, freedom: float) -> float:
    """The normal score of the same probability as `t` >= 0 under Student's t, to a few thousandths (Wallace 1959)."""
    return (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0) * math.sqrt(freedom * math.log1p(t * t / freedom))


def _from_score(score: float, freedom: float) -> float:
    """The inverse of `_to_score`."""
    wide = score * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return math.sqrt(freedom * math.expm1(wide * wide / freedom))


def _quantile(scores: Sequence[float]) -> float:
    """The one that leaves 1 - COVERAGE beyond it."""
    return float(np.quantile(scores, min(1.0, COVERAGE * (len(scores) + 1) / len(scores)), method="higher"))
