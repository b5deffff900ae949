"""Calibration: measured op times as curves, with residuals, provenance and source hashes.

One curve per (op, variant, phase, dtype, active ranks). With the reference

    r = a max(FLOPs / peak, bytes / bandwidth) + b spilled bytes / bandwidth + c
    y = log(seconds / r)

c >= 0 is the fixed cost, by relative least squares. Where an op has no spilled bytes (`ops.OpKind.spilled`) a = 1 and y is minus the logarithm of
utilisation; where it has, a, b and c are those of the least relative error. y is interpolated over the logarithms of the features, or of what is made
of them (`ops.coordinates`, `costmodel.krige`). Past the measured box the utilisation at its edge is held. A measured shape
returns its measurement, unless that was noisy itself.

Block samples (`block:<kind>`) are compared with a reference, on a host the sum of their ops, on a GPU their ops by what they are or their work
(`costmodel.work`); log(seconds /
reference) is interpolated over the block's features in the same way: what autograd, Python and the caches add between ops, and what the reference is
wrong by there. Runs that are scored never enter a fit.
"""
from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel import compute
from costmodel.blocks.base import MATRIX_OPS
from costmodel.blocks.measured import measured_block_ops
from costmodel.calibration_checks import check
from costmodel.cluster import Device
from costmodel.codec import DecodeError, content_hash, decode, encode
from costmodel.conformal import Intervals
from costmodel.gpu import block_key, timed_ops
from costmodel.krige import MINIMUM_POINTS, Surface, fit_surface
from costmodel.ops import KINDS, Op, coordinates, op
from costmodel.precision import LOW_PRECISIONS, expanded
from costmodel.quantity import Source
from costmodel.samples import BLOCK_PREFIX, CONSTANT_PREFIX, Environment, Sample
from costmodel.work import Measured, fit_shares, fit_timed, timed_work, work

SCHEMA_VERSION = 1
# |log error| at 90 % that a figure gets at least, by source [Assumed where no residual says more].
MINIMUM_WIDTH: dict[Source, float] = {"measured": 0.02, "interpolated": 0.04, "extrapolated": 0.25, "roofline": 0.55, "assumed": 0.55}
STALE_WIDENING = 2.0
QUANTILE = 0.9
# Log error from which a sample is timed again, times the median one, and shapes of a curve that say so.
DOUBTFUL, USUAL, ENOUGH = 0.04, 1.5, 12
# Points of attention, or of products, from which a block around it is the sum of its ops.
WELL_KNOWN = 12
# Significant digits of measured times and of weights.
DIGITS = 8
# A point with more noise than this is smoothed, not returned as it was measured.
EXACT_NOISE = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured points of one op variant. `points`: rows of features, then seconds, host seconds (0 where not measured) and noise.

    fixed, ideal, spilled: c [s], a and b above; mean, lengths, trend, weights: the interpolant; width: 90 % quantile of |leave-one-out log error|;
    noise: median MAD / median.
    """

    op: str
    variant: str
    phase: str
    dtype: str
    active_ranks: int
    features: tuple[str, ...]
    points: Any
    fixed: float
    mean: float
    lengths: Any
    trend: float
    weights: Any
    width: float
    noise: float
    ideal: float = 1.0
    spilled: float = 0.0

    def reference(self, one: Op, device: Device) -> float:
        """r above of a single op on `device` [s]."""
        return (self.ideal * compute.ideal_seconds(one, self.phase, device) + self.spilled * one.spilled(self.phase) / device.memory_bandwidth
                + self.fixed)

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return (self.op, self.variant, self.phase, self.dtype, self.active_ranks)


# Blocks whose correction is kept, of a kind.
MOST_KEPT = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composition:
    """A block kind against a reference: log(seconds / reference) over the block's features. The reference is the sum of its ops, or with `shares`
    (one for each of `work.PARTS`, or of `work.TIMED`) their sum over the block's work. width: 90 % quantile of |leave-one-out log error|;
    host_ratio: its launch time over that of its ops."""

    features: tuple[str, ...]
    surface: Surface
    width: float
    host_ratio: float = 1.0
    shares: tuple[float, ...] = ()

    def ratio(self, features: Mapping[str, float]) -> tuple[float, float, float]:
        """(seconds over the reference, |log error| at 90 %, log distance outside what was measured) of a block with these features."""
        values = tuple([features.get(name) or 0.0 for name in self.features])
        found = self._memo.get(values)
        if found is None:
            if len(self._memo) >= MOST_KEPT:
                self._memo.clear()
            y, outside = self.surface.at(values)
            found = self._memo[values] = math.exp(y), self.width + 0.05 * outside, outside
        return found

    @functools.cached_property
    def _memo(self) -> dict[tuple[float, ...], tuple[float, float, float]]:
        return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Seconds of an op (all repetitions), host seconds to launch it, source, |log error| at 90 %, and the curve that it leans on."""

    seconds: float
    host_seconds: float
    source: Source
    width: float
    curve: str


class _Interpolant:
    """A curve made ready: its surface, its exact points, a typical launch time."""

    __slots__ = ("curve", "exact", "host", "surface")

    def __init__(self, curve: Curve) -> None:
        rows, count = [[float(v) for v in row] for row in curve.points], len(curve.features)
        self.curve = curve
        self.surface = Surface(points=[coordinates(curve.op, tuple(row[:count])) for row in rows], mean=curve.mean, lengths=curve.lengths,
                               trend=curve.trend, weights=curve.weights)
        self.exact = {tuple(row[:count]): (row[count], row[count + 1]) for row in rows if row[count + 2] <= EXACT_NOISE}
        self.host = float(np.median([row[count + 1] for row in rows]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted curves of one device. `device`: the figures that utilisation refers to. `constants`: single figures (`samples.CONSTANTS`).

    `compositions` maps `kind/phase/ranks`; `run_residuals` maps a cell to residuals of runs neither fitted nor scored (costmodel.conformal);
    `stale`: op kinds whose sources changed since, whose intervals are widened.
    """

    environment: Environment
    device: Device
    curves: tuple[Curve, ...]
    constants: dict[str, float] = dataclasses.field(default_factory=dict)
    compositions: dict[str, Composition] = dataclasses.field(default_factory=dict)
    run_residuals: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    stale_kinds: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @functools.cached_property
    def _index(self) -> dict[tuple[str, str, str, str, int], Curve]:
        return {c.key: c for c in self.curves}

    @functools.cached_property
    def _ready(self) -> dict[tuple[str, str, str, str, int], _Interpolant]:
        return {}

    @functools.cached_property
    def _memo(self) -> dict[Any, OpTime]:
        return {}

    @functools.cached_property
    def _nearest(self) -> dict[tuple[str, str, int], Composition | None]:
        return {}

    @functools.cached_property
    def intervals(self) -> Intervals:
        """What `run_residuals` make of a prediction."""
        return Intervals(self.run_residuals)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Content hash: what a plan records as its calibration."""
        return content_hash({**encode(self), "stale_kinds": []})

    def matches(self, device: Device) -> bool:
        """Whether it was measured on this very device (by name)."""
        return device.name == self.environment.device_name

    def stale(self, current_hashes: Mapping[str, str]) -> list[str]:
        """Op kinds timed from sources that have changed or are gone since."""
        return sorted(kind for kind, value in self.environment.source_hashes.items() if current_hashes.get(kind) != value)

    def with_stale(self, kinds: Iterable[str]) -> Calibration:
        """A copy that widens the intervals of `kinds`."""
        return dataclasses.replace(self, stale_kinds=tuple(sorted(kinds)))

    def with_constants(self, constants: Mapping[str, float]) -> Calibration:
        """A copy with these constants in place of its own, as `{"host/slow": 1.0}` for a host that nothing disturbs."""
        copy = dataclasses.replace(self, constants={**self.constants, **constants})
        copy.__dict__["_ready"] = self._ready  # curves made ready, of which constants are no part
        return copy

    def curve(self, kind: str, variant: str, phase: str, dtype: str, active_ranks: int) -> Curve | None:
        """The curve with exactly these keys."""
        return self._index.get((kind, variant, phase, dtype, active_ranks))

    def op_seconds(self, op: Op, phase: str, *, active_ranks: int = 1) -> tuple[float, float, Source]:
        """(seconds, host seconds, source) of all repetitions on the calibrated device."""
        time = self.predict(op, phase, active_ranks=active_ranks)
        return time.seconds, time.host_seconds, time.source

    def predict(self, op: Op, phase: str, *, active_ranks: int = 1, device: Device | None = None) -> OpTime:
        """Time of an op on `device` (default: the calibrated one). On another device the utilisation carries over and is marked extrapolated.

        Without a curve for these keys the nearest relative stands in, marked extrapolated: another number of active ranks, then another variant,
        then another dtype of the same kind and phase. With none, the roofline. To an attention without a bias that stands in for one with one,
        `compute.bias_seconds` is added.
        """
        device = device or self.device
        key = (op, phase, active_ranks, device.name)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._predict(op, phase, active_ranks, device)
        return found

    def _predict(self, op: Op, phase: str, active_ranks: int, device: Device) -> OpTime:
        one = op if op.count == 1 else dataclasses.replace(op, count=1)
        ready, relative = self._relative(one, phase, active_ranks)
        if ready is None:
            seconds = op.count * compute.roofline_seconds(one, phase, device)
            return OpTime(seconds=seconds, host_seconds=op.count * self.launch_seconds, source="roofline", width=MINIMUM_WIDTH["roofline"],
                          curve=f"roofline:{op.kind}")
        curve = ready.curve
        values = tuple(value for _, value in one.features)
        transferred = device.name != self.device.name
        name = "/".join(map(str, curve.key))
        exact = ready.exact.get(values)
        if exact is not None and not relative and not transferred:
            source: Source = "measured"
            seconds, host, width = exact[0], exact[1], max(MINIMUM_WIDTH["measured"], 1.7 * curve.noise)
        else:
            log_ratio, outside = ready.surface.at(coordinates(op.kind, values))
            source = "extrapolated" if relative or transferred or outside > 0.1 else "interpolated"
            seconds = math.exp(log_ratio) * curve.reference(one, device)
            if transferred:
                seconds *= compute.flash_share(one, self.device) / compute.flash_share(one, device)
            if op.dtype in LOW_PRECISIONS and curve.dtype not in LOW_PRECISIONS:
                seconds = max(seconds, compute.limits(one, phase, device)[0] / compute.LOW_UTILISATION)
            if not curve.variant.endswith("_bias"):
                seconds += compute.bias_seconds(one, phase, device)
            width = max(MINIMUM_WIDTH[source], curve.width + 0.1 * outside)
            host = ready.host
        if op.kind in self.stale_kinds:
            width *= STALE_WIDENING
        return OpTime(seconds=op.count * seconds, host_seconds=op.count * (host or self.launch_seconds), source=source, width=width, curve=name)

    def _relative(self, op: Op, phase: str, active_ranks: int) -> tuple[_Interpolant | None, bool]:
        """The interpolant of this op, or of its nearest relative (second value true)."""
        key = (op.kind, op.variant, phase, op.dtype, active_ranks)
        curve, relative = self._index.get(key), False
        if curve is None:
            kin = [c for c in self.curves if c.op == op.kind and c.phase == phase]
            plain = op.variant.removesuffix("_bias")
            curve = min(kin, default=None, key=lambda c: (c.dtype != op.dtype, c.variant != op.variant, c.variant != plain,
                                                          abs(c.active_ranks - active_ranks), c.key))
            relative = curve is not None
        if curve is None:
            return None, False
        if curve.key not in self._ready:
            self._ready[curve.key] = _Interpolant(curve)
        return self._ready[curve.key], relative

    def host_constant(self, name: str, ranks: int, default: float) -> float:
        """A constant of host ranks as it was measured with so many of them; `default` where it was not, or on a GPU."""
        if self.environment.device_kind != "cpu":
            return default
        return self.constants.get(f"{name}/{ranks}", default)

    @property
    def launch_seconds(self) -> float:
        """Host time to launch one eager op; 0 on a CPU, whose op times hold it."""
        if self.environment.device_kind == "cpu":
            return 0.0
        return self.constants.get("launch_seconds", compute.EAGER_LAUNCH_SECONDS)

    def composition(self, kind: str, phase: str, active_ranks: int) -> Composition | None:
        """The correction of a block kind measured with the nearest number of active ranks."""
        wanted = kind, phase, active_ranks
        if wanted not in self._nearest:
            keys = [k for k in self.compositions if k.startswith(f"{kind}/{phase}/")]
            nearest = min(keys, key=lambda k: (abs(int(k.rsplit("/", 1)[1]) - active_ranks), k), default=None)
            self._nearest[wanted] = None if nearest is None else self.compositions[nearest]
        return self._nearest[wanted]

    def save(self, path: Path | str) -> None:
        """Writes through a temporary file; byte-identical for equal calibrations."""
        path = Path(path)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**encode(self), "stale_kinds": []}, allow_nan=False) + "\n")
        temporary.replace(path)


def load(path: Path | str, *, device: str | None = None) -> Calibration:
    """Reads a calibration file. Raises ValueError naming file and field: not JSON, a newer schema, an unknown kernel, a missing column, a NaN, a
    figure that nothing measured can be (`costmodel.calibration_checks`), or (with `device`) another device's figures."""
    path = Path(path)
    try:
        body = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg})") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(body, dict) or "schema_version" not in body:
        raise ValueError(f"{path}: schema_version: missing; not a calibration")
    if body["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version: {body['schema_version']!r} is not {SCHEMA_VERSION}, which this version reads; calibrate again")
    try:
        calibration = decode(Calibration, body)
    except DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        check(calibration)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if device is not None and calibration.environment.device_name != device:
        raise ValueError(f"{path}: environment.device_name: measured on {calibration.environment.device_name!r}, not on {device!r}")
    return calibration


def fit(environment: Environment, samples: Iterable[Sample], *, device: Device | None = None) -> Calibration:
    """Curves, constants and block corrections from samples; held-out samples are left out. `device`: the datasheet that utilisation refers to, so
    that curves carry over to other devices; without one, the best rates among the samples stand for its peaks.

    Raises ValueError when there is nothing to fit.
    """
    kept = [s for s in samples if not s.held_out]
    ops = [s for s in kept if s.op in KINDS]
    if not ops:
        raise ValueError("no op samples to fit a calibration from")
    device = device or _observed_device(environment, ops)
    grouped: dict[tuple[str, str, str, str, int], list[Sample]] = defaultdict(list)
    for sample in ops:
        grouped[(sample.op, sample.variant, sample.phase, sample.dtype, sample.active_ranks)].append(sample)
    curves = tuple(_fit_curve(key, grouped[key], device)[0] for key in sorted(grouped))
    figures: dict[str, list[float]] = defaultdict(list)
    for sample in kept:
        if sample.op.startswith(CONSTANT_PREFIX):
            figures[sample.op.removeprefix(CONSTANT_PREFIX) + (f"/{sample.variant}" if sample.variant else "")].append(sample.seconds)
    constants = {name: float(np.median(values)) for name, values in sorted(figures.items())}
    bare = Calibration(environment=environment, device=device, curves=curves, constants=constants)
    return rounded(dataclasses.replace(bare, compositions=_fit_compositions(bare, [s for s in kept if s.op.startswith(BLOCK_PREFIX)])))


def with_collectives(calibration: Calibration, samples: Iterable[Sample]) -> Calibration:
    """A copy in which collectives measured elsewhere stand beside its own, in place of those of the same message and group; its other curves stay as
    they are."""
    grouped: dict[tuple[str, str, str, str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[(sample.op, sample.variant, sample.phase, sample.dtype, sample.active_ranks)].append(sample)
    curves = dict(calibration._index)
    for key, new in grouped.items():
        known, anew = curves.get(key), {tuple(sorted(one.features.items())) for one in new}
        for *values, seconds, host, noise in known.points if known is not None else ():
            features = dict(zip(known.features, values))
            if tuple(sorted(features.items())) not in anew:
                new.append(dataclasses.replace(new[0], features=features, seconds=seconds, host_seconds=host or None, noise=noise))
        curves[key] = _fit_curve(key, new, calibration.device)[0]
    return rounded(dataclasses.replace(calibration, curves=tuple(curves[key] for key in sorted(curves))))


def rounded(calibration: Calibration) -> Calibration:
    """A copy whose times and weights have DIGITS significant digits, which predictions do not show and files do; features stay as they are."""
    curves = []
    for c in calibration.curves:
        points = [[*row[:len(c.features)], *_short(row[len(c.features):])] for row in c.points]
        curves.append(dataclasses.replace(c, weights=_short(c.weights), points=points))
    compositions = {key: dataclasses.replace(c, surface=dataclasses.replace(c.surface, weights=_short(c.surface.weights)))
                    for key, c in calibration.compositions.items()}  # fmt: skip
    return dataclasses.replace(calibration, curves=tuple(curves), compositions=compositions)


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


def _observed_device(environment: Environment, samples: list[Sample]) -> Device:
    """A device whose peaks are the best rates seen."""
    peaks: dict[str, float] = {"fp32": 1.0}
    bandwidth = 1.0
    for sample in samples:
        one = sample.as_op()
        rate = one.flops(sample.phase) / sample.seconds
        peaks[sample.dtype] = max(peaks.get(sample.dtype, 1.0), rate)
        if not KINDS[sample.op].matrix and sample.op != "input":
            bandwidth = max(bandwidth, one.bytes(sample.phase) / sample.seconds)
    return Device(name=environment.device_name, kind="cpu" if environment.device_kind == "cpu" else "gpu", peak_flops=peaks,
                  memory_bytes=1.0, memory_bandwidth=bandwidth, sources=("best rates among the calibration's samples",))


def doubtful(samples: Iterable[Sample], device: Device) -> list[Sample]:
    """Op samples that took longer than all others of their curve make of them (leave-one-out), worst first: by more than DOUBTFUL, and by more than
    is usual. What ran beside is one reason, a kernel that only this shape gets another: timed again they tell."""
    grouped: dict[tuple[str, str, str, str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.op in KINDS and not sample.held_out:
            grouped[(sample.op, sample.variant, sample.phase, sample.dtype, sample.active_ranks)].append(sample)
    found: list[tuple[float, Sample]] = []
    for key, own in grouped.items():
        if len(own) >= ENOUGH:
            shaped, errors = _fit_curve(key, own, device)[1:]
            limit = max(DOUBTFUL, USUAL * float(np.median(np.abs(errors))))
            found += [(float(error), sample) for error, same in zip(errors, shaped) if error > limit for sample in same]
    return [sample for _, sample in sorted(found, key=lambda one: -one[0])]


def _fit_curve(key: tuple[str, str, str, str, int], samples: list[Sample], device: Device) -> tuple[Curve, list[list[Sample]], np.ndarray]:
    """(curve, samples by shape, log error of each shape where the others predict it)."""
    kind, variant, phase, dtype, ranks = key
    names = KINDS[kind].features
    merged: dict[tuple[float, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        merged[tuple(float(sample.features[n]) for n in names)].append(sample)
    shapes = sorted(merged)
    timed = [op(kind, variant=variant, dtype=dtype, **dict(zip(names, shape))) for shape in shapes]
    seconds = np.array([np.median([s.seconds for s in merged[shape]]) for shape in shapes])
    host = [float(np.median([s.host_seconds or 0.0 for s in merged[shape]])) for shape in shapes]
    noises = np.array([np.median([s.noise for s in merged[shape]]) for shape in shapes])
    ideal = np.array([compute.ideal_seconds(one, phase, device) for one in timed])
    spilled = np.array([one.spilled(phase) for one in timed]) / device.memory_bandwidth
    if spilled.any() and len(shapes) >= MINIMUM_POINTS:
        share, spill, fixed = _work(ideal, spilled, seconds)
    else:
        share, spill, fixed = 1.0, 0.0, _fixed_seconds(ideal, seconds)
    y = np.log(seconds / (share * ideal + spill * spilled + fixed))
    surface, errors = fit_surface(np.array([coordinates(kind, shape) for shape in shapes]), y, noises)
    noise = float(np.median(noises))
    curve = Curve(op=kind, variant=variant, phase=phase, dtype=dtype, active_ranks=ranks, features=names, fixed=fixed, ideal=share, spilled=spill,
                  mean=surface.mean, points=[[*shape, float(s), h, float(e)] for shape, s, h, e in zip(shapes, seconds, host, noises)],
                  lengths=surface.lengths, trend=surface.trend, weights=surface.weights, width=max(_width(errors, y), 1.7 * noise), noise=noise)
    return curve, [merged[shape] for shape in shapes], errors


def _work(ideal: np.ndarray, spilled: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """a, b, c >= 0 of seconds = a ideal + b spilled + c with the least relative error."""
    from scipy.optimize import nnls  # takes longer to import than a prediction takes

    scale = np.array([np.median(ideal), np.median(spilled), np.median(seconds)])
    columns = np.stack([ideal, spilled, np.ones_like(seconds)], axis=1) / scale
    found = nnls(columns / seconds[:, None], np.ones_like(seconds))[0] / scale
    return float(found[0]), float(found[1]), float(found[2])


def _width(errors: np.ndarray, y: np.ndarray) -> float:
    """The 90 % quantile of |errors|; of too few points for errors, what they span."""
    return float(np.quantile(np.abs(errors), QUANTILE)) if len(y) >= MINIMUM_POINTS else max(0.3, float(np.ptp(y)))


def _fixed_seconds(ideal: np.ndarray, seconds: np.ndarray) -> float:
    """c >= 0 of seconds = a ideal + c with the least relative error; an op whose ideal time is 0 everywhere is all fixed cost."""
    a, b = ideal / seconds, 1.0 / seconds
    if not a.any():
        return float(np.median(seconds))
    matrix = np.array([[a @ a, a @ b], [a @ b, b @ b]])
    if len(seconds) < 3 or abs(np.linalg.det(matrix)) < 1e-12 * matrix[0, 0] * matrix[1, 1]:
        return 0.5 * float(seconds.min()) if (ideal < 1e-9 * seconds).any() else 0.0
    slope, fixed = np.linalg.solve(matrix, np.array([a.sum(), b.sum()]))
    if slope <= 0:
        fixed = b.sum() / (b @ b)
    return float(min(max(fixed, 0.0), seconds.min()))


def _fit_compositions(calibration: Calibration, samples: list[Sample]) -> dict[str, Composition]:
    """On a GPU every dtype and checkpoint policy has its own correction (`costmodel.gpu`)."""
    grouped: dict[str, list[tuple[Sample, float, float]]] = defaultdict(list)
    works: dict[str, list[np.ndarray]] = defaultdict(list)
    measured: list[Measured] = []
    unknown: set[str] = set()
    on_gpu = calibration.environment.device_kind != "cpu"
    for sample in samples:
        kind = sample.op.removeprefix(BLOCK_PREFIX)
        forward = measured_block_ops(kind, sample.features, sample.dtype)
        key = f"{block_key(kind, sample.dtype, sample.variant) if on_gpu else kind}/{sample.phase}/{sample.active_ranks}"
        timed = expanded(timed_ops(forward, sample.phase, sample.variant, MATRIX_OPS), calibration.device)
        times = [calibration.predict(one, phase, active_ranks=sample.active_ranks) for one, phase in timed]
        launched = sum(t.host_seconds for t in times)
        host = sample.host_seconds / launched if sample.host_seconds and launched > 0 else 1.0
        grouped[key].append((sample, sum(t.seconds for t in times), host))
        if on_gpu:
            if not _ops_known(calibration, timed, sample.active_ranks):
                unknown.add(key)
            works[key].append(timed_work((one.kind, t.seconds) for (one, _), t in zip(timed, times)))
            attention = next((one.variant for one in forward if one.kind == "attention"), "")
            measured.append(Measured(group=key, dtype=sample.dtype, attention=attention, seconds=sample.seconds,
                                     work=work(timed, sample.features, calibration.device)))
    if not on_gpu:
        return {key: _compose(rows) for key, rows in sorted(grouped.items())}
    shares = fit_shares([m for m in measured if m.group in unknown])
    works |= {key: [m.work for m in measured if m.group == key] for key in unknown}
    for key in grouped.keys() - unknown:
        shares[key] = fit_timed(np.array(works[key]), np.array([sample.seconds for sample, *_ in grouped[key]]))
    return {key: _compose([(sample, float(own @ shares[key]), host) for (sample, _, host), own in zip(rows, works[key])], shares[key])
            for key, rows in sorted(grouped.items())}


def _ops_known(calibration: Calibration, timed: Sequence[tuple[Op, str]], active_ranks: int) -> bool:
    """Whether what the ops spend most on, attention, or without it products, was timed alone at enough shapes: then the sum of a block's ops is its
    reference. Sums of work alone, which have no fixed costs, tell little of larger batches: of Wukong layers timed on 120 to 788 samples they made
    twice the time on 2,344 [Measured: H200, 2026-12-01]."""
    has_attention = any(one.kind == "attention" for one, _ in timed)
    found = [calibration.curve(one.kind, one.variant, phase, one.dtype, active_ranks) for one, phase in timed
             if one.kind in (("attention",) if has_attention else ("linear", "bmm"))]
    return bool(found) and all(curve is not None and len(curve.points) >= WELL_KNOWN for curve in found)


def _compose(rows: list[tuple[Sample, float, float]], shares: Iterable[float] = ()) -> Composition:
    """From (sample, seconds of the reference, launch time over that of the ops)."""
    names = tuple(sorted({name for sample, _, _ in rows for name in sample.features}))
    points = np.array([[sample.features.get(name, 0.0) for name in names] for sample, _, _ in rows])
    y = np.array([math.log(sample.seconds / reference) for sample, reference, _ in rows])
    surface, errors = fit_surface(points, y, np.array([sample.noise for sample, _, _ in rows]))
    host = float(np.median([host for _, _, host in rows]))
    return Composition(features=names, surface=surface, width=max(0.03, _width(errors, y)), host_ratio=host,
                       shares=tuple(map(float, shares)))


def score(calibration: Calibration, samples: Iterable[Sample]) -> list[tuple[Sample, float]]:
    """log(predicted / measured) of held-out op samples."""
    scored = []
    for sample in samples:
        if sample.held_out and sample.op in KINDS:
            time = calibration.predict(sample.as_op(), sample.phase, active_ranks=sample.active_ranks)
            scored.append((sample, math.log(time.seconds / sample.seconds)))
    return scored
