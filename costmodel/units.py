"""Written quantities to SI floats and back: `4.8 TB/s`, `141 GB`, `5 us`, `989 TFLOP/s`, `2.5 $/h`.

Decimal and binary prefixes are different: 1 GB = 1e9 bytes, 1 GiB = 2**30 bytes. `b` and `bit` are bits (links are sold as `400 Gb/s`), `B` is bytes.
A number without a unit is refused, 0 excepted: nobody can tell whether 80 means GB or GiB.
"""

from __future__ import annotations

import decimal
import math
import re
from typing import Literal

Kind = Literal["bytes", "bytes/s", "FLOP/s", "seconds", "$/h", "watts"]

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{p}B": f for p, f in {**_DECIMAL, **_BINARY}.items()}
_BITS = {f"{p}{unit}": f / 8 for p, f in _DECIMAL.items() for unit in ("b", "bit")}

UNITS: dict[str, dict[str, float]] = {
    "bytes": {**_BYTES, "byte": 1.0, "bytes": 1.0},
    "bytes/s": {f"{u}{s}": f for u, f in {**_BYTES, **_BITS}.items() for s in ("/s", "ps")},
    "FLOP/s": {f"{p}{u}": f for p, f in _DECIMAL.items() for u in ("FLOP/s", "FLOPS", "FLOPs/s")},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "$/h": {"$/h": 1.0, "$/hour": 1.0, "$/day": 1 / 24.0},
    "watts": {"W": 1.0, "kW": 1e3, "MW": 1e6},
}
EXAMPLES = {"bytes": "141 GB (or GiB)", "bytes/s": "4.8 TB/s", "FLOP/s": "989 TFLOP/s", "seconds": "5 us", "$/h": "2.5 $/h", "watts": "700 W"}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"\s*([+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")


def parse(text: str | int | float, kind: Kind) -> float:
    """The SI value of a written quantity of `kind` [bytes, bytes/s, FLOP/s, s, $/h, W]. Raises ValueError that says what was expected."""
    wanted = f"a quantity in {kind}, e.g. `{EXAMPLES[kind]}`"
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ValueError(f"{wanted}, is needed, not {text!r}")
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{wanted}, is needed, not {text!r}")
    value, unit = float(match[1].replace("_", "")), match[2]
    if not unit:
        if value == 0:
            return 0.0
        raise ValueError(f"{text!r} has no unit; {wanted}, is needed")
    factor = UNITS[kind].get(unit)
    if factor is None:
        other = next((k for k, units in UNITS.items() if unit in units), None)
        if other is not None:
            raise ValueError(f"{text!r} is in {other}; {wanted}, is needed")
        same = [u for u in UNITS[kind] if u.lower() == unit.lower()]
        hint = f" (did you mean {same[0]!r}?)" if same else ""
        raise ValueError(f"unknown unit {unit!r} in {text!r}{hint}; {wanted}, is needed")
    if not math.isfinite(value * factor):
        raise ValueError(f"{text!r} is too large; {wanted}, is needed")
    return float(decimal.Decimal(repr(value)) * decimal.Decimal(repr(factor)))


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for factor, unit in steps:
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.4g} {unit}"
    factor, unit = steps[-1]
    return f"{value / factor:.4g} {unit}"


def _decimal(unit: str) -> tuple[tuple[float, str], ...]:
    return tuple((f, p + unit) for f, p in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")))


_STEPS = {
    "bytes": _decimal("B"),
    "bytes/s": _decimal("B/s"),
    "FLOP/s": _decimal("FLOP/s"),
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "$/h": ((1.0, "$/h"),),
    "watts": ((1e6, "MW"), (1e3, "kW"), (1.0, "W")),
}
_GIB_STEPS = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def show(value: float, kind: Kind) -> str:
    """Four significant digits with the largest fitting decimal prefix: `show(1.41e11, "bytes") == "141 GB"`. `parse` reads it back to 4 digits."""
    if value == 0:
        return f"0 {_STEPS[kind][-1][1]}" if kind != "seconds" else "0 s"
    return _scaled(value, _STEPS[kind])


def show_gib(num_bytes: float) -> str:
    """Bytes with binary prefixes, as allocators and out-of-memory messages count them: `show_gib(2**30) == "1 GiB"`."""
    return "0 B" if num_bytes == 0 else _scaled(num_bytes, _GIB_STEPS)


def show_count(value: float) -> str:
    """A count with K, M, B (billion) or T: parameters and examples."""
    return _scaled(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (1.0, ""))).rstrip()


def parse_count(text: str | int | float) -> float:
    """A count with an optional K, M, B (billion) or T: `parse_count("2.5B") == 2.5e9`; what `show_count` writes. Raises ValueError."""
    match = _NUMBER.fullmatch(str(text))
    factor = _COUNTS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r}: a number, with K, M, B (billion) or T at its end, is needed")
    value = float(match[1].replace("_", "")) * factor
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is too large")
    return value
