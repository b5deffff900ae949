"""90 % intervals from runs that were neither fitted nor scored.

A residual is (measured - predicted) / sqrt(predicted x predicted step), of the step or a phase: between an error relative to the phase, which tiny
phases exceed, and one relative to the step, which large ones do. Residuals come in cells, `<step or phase>@<host or device>` by what makes the step:
steps that the host makes are off by more. Each residual is standardised by median and mean deviation of the others of its cell, which one run gone
wrong moves little; quantiles of all of them together, at the finite-sample level (n + 1) / n, hold a new one with probability COVERAGE, whatever the
shape of the errors, if cells differ in place and scale alone.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

COVERAGE = 0.90
# Residuals of a cell from which it stands alone (below: those of either maker together), and of all cells that intervals need.
OWN, FEWEST = 5, 20
# Spread that a cell has at least: clocks and events are no better.
LEAST_SPREAD = 1e-4


def norm(value: float, step: float) -> float:
    """What an error of a figure `value` of a step is divided by [s]."""
    return math.sqrt(value * step)


def widening(by_source: Mapping[str, float]) -> float:
    """How much wider a prediction's intervals are, and its residuals count less, for the share of its time that no measurement nearby tells; from the
    shares of its time by source."""
    return 2.0 - min(1.0, sum(by_source.get(source, 0.0) for source in ("measured", "interpolated")))


def cell(name: str, maker: str) -> str:
    """`name`: `step` or a phase; `maker`: `host` or `device`."""
    return f"{name}@{maker}"


class Intervals:
    """Bounds of what will be measured, from residuals by cell."""

    def __init__(self, residuals: Mapping[str, Sequence[float]]) -> None:
        grouped = {name: list(values) for name, values in residuals.items() if "@" in name}
        whole: dict[str, list[float]] = {}
        for name, values in grouped.items():
            whole.setdefault(name.split("@")[0], []).extend(values)
        self._cells = {name: own if len(own) >= OWN else whole[name.split("@")[0]] for name, own in grouped.items()}
        self._whole = {name: values for name, values in whole.items() if len(values) >= OWN}
        self._cells = {name: values for name, values in self._cells.items() if len(values) >= OWN}
        standard = [z for name, own in grouped.items() if len(own) >= OWN for z in _standardised(own)]
        standard += [z for name, values in self._whole.items() if not any(len(grouped.get(cell(name, m), ())) >= OWN for m in ("host", "device"))
                     for z in _standardised(values)]  # fmt: skip
        self._quantiles = _quantiles(standard) if len(standard) >= FEWEST else None
        self._places = {name: _place(values) for name, values in (*self._whole.items(), *self._cells.items())}

    def bounds(self, name: str, maker: str, value: float, step: float, *, widened: float = 1.0) -> tuple[float, float] | None:
        """(low, high) around the predicted `value` of a predicted `step`, `widened` times; None where too little is known."""
        known = self._places.get(cell(name, maker), self._places.get(name))
        if self._quantiles is None or known is None:
            return None
        place, spread = known
        low, high = (value + widened * norm(value, step) * (place + quantile * spread) for quantile in self._quantiles)
        return max(0.0, min(value, low)), max(value, high)


def _place(values: Sequence[float]) -> tuple[float, float]:
    """Median and mean absolute deviation from it."""
    median = float(np.median(values))
    return median, max(float(np.abs(np.asarray(values) - median).sum()) / max(len(values) - 1, 1), LEAST_SPREAD)


def _standardised(values: Sequence[float]) -> list[float]:
    """Each value by place and spread of the others."""
    found = []
    for i, value in enumerate(values):
        place, spread = _place([*values[:i], *values[i + 1:]])
        found.append((value - place) / spread)
    return found


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Those that leave (1 - COVERAGE) / 2 beyond them on either side."""
    high = min(1.0, (1.0 + COVERAGE) / 2 * (len(values) + 1) / len(values))
    return float(np.quantile(values, 1.0 - high, method="lower")), float(np.quantile(values, high, method="higher"))
