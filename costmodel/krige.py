"""Smooth interpolation of scattered measurements in log space (kriging), with hyperparameters and errors by leave-one-out.

Of n points with log features X (n, d), centred and scaled to unit spread, values y and relative noise s:

    y(x) = mean + k(x, X) w,   w = (K + diag(nugget + s^2 / var y))^-1 (y - mean),   k(a, b) = Matern-3/2(|(a - b) / length|) + trend a.b

The linear part is a regularised log-linear trend, the Matern part a local correction; `length` has one value a feature, so that one that
does not matter drops out. Length, trend and nugget are those with the least mean absolute leave-one-out error (w_i / inverse_ii), found
from the best common length by two passes over the features. A point whose own error is far beyond the others' is trusted less. Outside the
box of X the nearest point of the box is taken.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_LENGTHS, _TRENDS, _NUGGETS, _STRETCHES = (0.5, 1.0, 2.0, 4.0), (0.0, 1.0), (1e-4, 1e-2, 1e-1), (0.5, 2.0, 8.0)
_GAIN = 0.98  # a feature's own length must lower the error by 2 %, else it only follows the noise
_OUTLIER = 4.0  # times the robust spread of leave-one-out errors
_SQRT3 = math.sqrt(3.0)
MINIMUM_POINTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surface:
    """A fitted interpolant: y as a function of log(1 + features). Arrays are lists in files: `points` (n, d) raw features, `lengths` (d,),
    `weights` (n,)."""

    points: Any
    mean: float
    lengths: Any
    trend: float
    weights: Any

    @functools.cached_property
    def _ready(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[float, float, float, float]], np.ndarray]:
        """Points over their lengths, weights, slope of the trend, (low, high, centre, spread) by feature, spread over lengths."""
        raw = np.log1p(np.asarray(self.points, dtype=np.float64))
        centre, spread = raw.mean(axis=0), spread_of(raw)
        x, stretch = (raw - centre) / spread, _SQRT3 / np.asarray(self.lengths, dtype=np.float64)
        weights = np.asarray(self.weights, dtype=np.float64)
        box = list(zip(raw.min(axis=0).tolist(), raw.max(axis=0).tolist(), centre.tolist(), spread.tolist()))
        return x * stretch, weights, self.trend * (weights @ x), box, stretch

    def at(self, features: Sequence[float]) -> tuple[float, float]:
        """(y, log distance outside the box of the points) at raw features `(d,)`; `kernel` with what does not change taken out of it."""
        points, weights, slope, box, stretch = self._ready
        here, outside = [], 0.0
        for feature, (low, high, centre, spread) in zip(features, box):  # a handful: arrays of them would take longer than the points
            raw = inside = math.log1p(feature)
            if not low <= raw <= high:
                inside = low if raw < low else high
                outside = max(outside, abs(raw - inside))
            here.append((inside - centre) / spread)
        place = np.array(here)
        away = points - place * stretch
        distance = np.sqrt(np.einsum("ij,ij->i", away, away))
        return self.mean + float(((1.0 + distance) * np.exp(-distance)) @ weights + place @ slope), outside


def spread_of(raw: np.ndarray) -> np.ndarray:
    """Standard deviation by column, 1 for a constant one."""
    spread = raw.std(axis=0)
    return np.where(spread > 1e-9, spread, 1.0)


def kernel(a: np.ndarray, b: np.ndarray, lengths: np.ndarray, trend: float) -> np.ndarray:
    """`(n, m)` covariances of scaled points `a` (n, d) and `b` (m, d)."""
    distance = np.sqrt((((a[:, None] - b[None]) / lengths) ** 2).sum(axis=-1)) * _SQRT3
    return (1.0 + distance) * np.exp(-distance) + trend * (a @ b.T)


def fit_surface(points: np.ndarray, y: np.ndarray, noise: np.ndarray) -> tuple[Surface, np.ndarray]:
    """(surface, leave-one-out errors) of raw features `(n, d)`, values `(n,)` and their relative noise `(n,)`. With fewer than 4 points the mean, and
    the errors are the deviations from it."""
    mean, count = float(np.median(y)), points.shape[1]
    centred = y - mean
    if len(y) < MINIMUM_POINTS:
        return Surface(points=points.tolist(), mean=mean, lengths=[1.0] * count, trend=0.0, weights=[0.0] * len(y)), centred
    raw = np.log1p(points)
    x = (raw - raw.mean(axis=0)) / spread_of(raw)
    own = noise ** 2 / max(float(centred.var()), 1e-6)
    best = min((_solve(x, centred, own, np.full(count, length), trend, nugget) for length in _LENGTHS for trend in _TRENDS for nugget in _NUGGETS),
               key=lambda s: s.score)
    for _ in range(2):
        for feature in range(count):
            for stretch in _STRETCHES:
                lengths = best.lengths.copy()
                lengths[feature] *= stretch
                tried = _solve(x, centred, own, lengths, best.trend, best.nugget)
                if tried.score < _GAIN * best.score:
                    best = tried
    errors = best.errors
    limit = _OUTLIER * 1.48 * float(np.median(np.abs(errors)))
    far = np.abs(errors) > max(limit, 1e-3)
    if far.any():
        best = _solve(x, centred, own + np.where(far, errors ** 2 / max(float(centred.var()), 1e-6), 0.0), best.lengths, best.trend, best.nugget)
    surface = Surface(points=points.tolist(), mean=mean, lengths=best.lengths.tolist(), trend=best.trend, weights=best.weights.tolist())
    return surface, errors


@dataclasses.dataclass(frozen=True, slots=True)
class _Solution:
    lengths: np.ndarray
    trend: float
    nugget: float
    weights: np.ndarray
    errors: np.ndarray
    score: float


def _solve(x: np.ndarray, y: np.ndarray, own: np.ndarray, lengths: np.ndarray, trend: float, nugget: float) -> _Solution:
    inverse = np.linalg.inv(kernel(x, x, lengths, trend) + np.diag(nugget + own))
    weights = inverse @ y
    errors = weights / np.diag(inverse)
    return _Solution(lengths, trend, nugget, weights, errors, float(np.mean(np.abs(errors))))
