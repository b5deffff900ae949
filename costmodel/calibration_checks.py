"""What a calibration file must hold beyond types, so that a damaged one is refused where it is read and not where a prediction leans on it."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.blocks.attention import ATTENTION_VARIANTS
from costmodel.codec import suggest
from costmodel.conformal import MAKERS
from costmodel.ops import KINDS, dtype_bytes
from costmodel.samples import CONSTANTS
from costmodel.samples import SCHEMA_VERSION as SAMPLES_VERSION
from costmodel.stepgraph import PHASES
from costmodel.work import PARTS, TIMED

if TYPE_CHECKING:
    from costmodel.calibration import Calibration, Composition, Curve

_DEVICE_KINDS = ("cpu", "cuda", "gpu")
# No utilisation is e^50 off.
_MOST_LOG = 50.0


def check(calibration: Calibration) -> None:
    """Raises ValueError, `field: what is wrong with it`."""
    environment = calibration.environment
    if environment.schema_version > SAMPLES_VERSION:
        _refuse("environment.schema_version", f"{environment.schema_version} is newer than {SAMPLES_VERSION}, which this version reads")
    if environment.device_kind not in _DEVICE_KINDS:
        _refuse("environment.device_kind", f"{environment.device_kind!r} is none of {', '.join(_DEVICE_KINDS)}")
    if (environment.device_kind == "cpu") != (calibration.device.kind == "cpu"):
        _refuse("environment.device_kind", f"{environment.device_kind}, but device.kind is {calibration.device.kind}")
    if environment.device_name != calibration.device.name:
        _refuse("environment.device_name", f"{environment.device_name!r}, but utilisations refer to device.name {calibration.device.name!r}")
    if not calibration.curves:
        _refuse("curves", "none")
    seen: dict[Any, int] = {}
    for i, curve in enumerate(calibration.curves):
        _curve(f"curves[{i}]", curve)
        if curve.key in seen:
            _refuse(f"curves[{i}]", f"the same op, variant, phase, dtype and active_ranks as curves[{seen[curve.key]}]")
        seen[curve.key] = i
    for name, value in calibration.constants.items():
        _constant(f"constants.{name}", name, value)
    for key, composition in calibration.compositions.items():
        _composition(f"compositions.{key}", key, composition)
    for name in calibration.run_residuals:
        figure, _, maker = name.partition("@")
        if figure not in ("step", *PHASES) or maker not in MAKERS:
            _refuse(f"run_residuals.{name}", f"`step` or a phase @ one of {', '.join(MAKERS)} is needed")


def _refuse(where: str, what: str) -> None:
    raise ValueError(f"{where}: {what}")


def _curve(where: str, curve: Curve) -> None:
    if curve.op not in KINDS:
        _refuse(f"{where}.op", f"unknown kind {curve.op!r}{suggest(curve.op, KINDS)}")
    spec = KINDS[curve.op]
    if curve.features != spec.features:
        missing = [f for f in spec.features if f not in curve.features]
        _refuse(f"{where}.features", f"{curve.op} needs {list(spec.features)}; missing: {', '.join(missing) or 'none (other order)'}")
    if spec.variants and curve.variant not in spec.variants:
        _refuse(f"{where}.variant", f"{curve.variant!r} of {curve.op} is none of {', '.join(spec.variants)}{suggest(curve.variant, spec.variants)}")
    if curve.op == "attention" and curve.variant not in ATTENTION_VARIANTS:
        _refuse(f"{where}.variant", f"{curve.variant!r} is no kernel's name{suggest(curve.variant, ATTENTION_VARIANTS)}")
    if curve.phase not in spec.phases:
        _refuse(f"{where}.phase", f"{curve.phase!r} of {curve.op} is none of {', '.join(spec.phases)}{suggest(curve.phase, spec.phases)}")
    try:
        dtype_bytes(curve.dtype)
    except ValueError as error:
        _refuse(f"{where}.dtype", str(error))
    if curve.active_ranks < 1:
        _refuse(f"{where}.active_ranks", f"{curve.active_ranks} is not >= 1")
    for name in ("fixed", "ideal", "spilled", "width", "noise"):
        _at_least_zero(f"{where}.{name}", getattr(curve, name))
    if not curve.fixed + curve.ideal + curve.spilled > 0:
        _refuse(f"{where}.ideal", "with fixed and spilled 0 as well, no time refers to anything")
    if abs(curve.mean) > _MOST_LOG:
        _refuse(f"{where}.mean", f"a logarithm within {_MOST_LOG:g} is needed, not {curve.mean:g}")
    count = len(curve.features)
    points = _array(f"{where}.points", curve.points, (None, count + 3))
    _array(f"{where}.weights", curve.weights, (len(points),))
    _lengths(f"{where}.lengths", curve.lengths, count)
    if (points[:, count] <= 0).any():
        _refuse(f"{where}.points", "seconds must be > 0")
    if (points < 0).any():
        _refuse(f"{where}.points", "features, host seconds and noise must be >= 0")


def _constant(where: str, name: str, value: float) -> None:
    known = name.split("/")[0]
    if known not in CONSTANTS:
        _refuse(where, f"unknown constant{suggest(known, CONSTANTS)}")
    if name != "in_step/slope" and known != "workspace":  # less than the formula's by more than that, where gradients do not meet
        _at_least_zero(where, value)


def _composition(where: str, key: str, composition: Composition) -> None:
    parts = key.split("/")
    if len(parts) != 3 or not parts[2].isdigit():
        _refuse(where, "a key is kind/phase/ranks")
    count = len(composition.features)
    points = _array(f"{where}.surface.points", composition.surface.points, (None, count))
    _array(f"{where}.surface.weights", composition.surface.weights, (len(points),))
    _lengths(f"{where}.surface.lengths", composition.surface.lengths, count)
    if (points < 0).any():
        _refuse(f"{where}.surface.points", "features must be >= 0")
    if abs(composition.surface.mean) > _MOST_LOG:
        _refuse(f"{where}.surface.mean", f"a logarithm within {_MOST_LOG:g} is needed, not {composition.surface.mean:g}")
    if len(composition.shares) not in (0, len(TIMED), len(PARTS)):
        _refuse(f"{where}.shares", f"{len(TIMED)} or {len(PARTS)} numbers, or none, are needed, got {len(composition.shares)}")
    for i, share in enumerate(composition.shares):
        _at_least_zero(f"{where}.shares[{i}]", share)
    _at_least_zero(f"{where}.width", composition.width)
    _at_least_zero(f"{where}.host_ratio", composition.host_ratio)


def _at_least_zero(where: str, value: float) -> None:
    if not 0 <= value < math.inf:
        _refuse(where, f"a number >= 0 is needed, not {value:g}")


def _lengths(where: str, value: Any, count: int) -> None:
    if (_array(where, value, (count,)) <= 0).any():
        _refuse(where, "numbers > 0 are needed")


def _array(where: str, value: Any, shape: Sequence[int | None]) -> np.ndarray:
    """`value`, a list of numbers or of lists of them, as an array of `shape` (None: at least one)."""
    needed = f"rows of {shape[1]} numbers are" if len(shape) == 2 else f"{shape[0]} numbers are"
    if not isinstance(value, list) or (len(shape) == 2 and not all(isinstance(row, list) for row in value)):
        _refuse(where, f"{needed} needed, in a list")
    for row in value if len(shape) == 2 else (value,):
        if len(row) != shape[-1]:
            _refuse(where, f"{needed} needed, got {len(row)}")
        if odd := set(map(type, row)) - {float, int}:
            _refuse(where, f"{needed} needed, not {', '.join(sorted(one.__name__ for one in odd))}")
    if shape[0] is None and not value:
        _refuse(where, f"{needed} needed, got none")
    found = np.array(value, dtype=np.float64)
    if not np.isfinite(found).all():
        _refuse(where, "holds NaN or infinity")
    return found


__all__ = ["check"]
