"""A figure with its interval and its source; sources survive addition by falling to the weakest."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

Source = Literal["measured", "interpolated", "extrapolated", "roofline", "assumed"]

# Strongest first. A sum is only as trustworthy as its weakest part.
SOURCES: tuple[Source, ...] = ("measured", "interpolated", "extrapolated", "roofline", "assumed")
_RANK = {source: i for i, source in enumerate(SOURCES)}


def worst(sources: Iterable[Source]) -> Source:
    """The weakest of `sources`; `measured` for none at all (an empty sum is exact)."""
    return SOURCES[max((_RANK[s] for s in sources), default=0)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """`value` in SI units with a 90 % interval [`low`, `high`] and where it comes from.

    Raises ValueError unless low <= value <= high. Adding two quantities adds both ends: errors of one calibration are treated as fully correlated,
    which is never narrower than the truth.
    """

    value: float
    low: float
    high: float
    source: Source

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"interval [{self.low}, {self.high}] does not hold its value {self.value}")

    @classmethod
    def exact(cls, value: float, source: Source = "measured") -> Quantity:
        """A value without width."""
        return cls(value=value, low=value, high=value, source=source)

    @classmethod
    def relative(cls, value: float, below: float, above: float, source: Source) -> Quantity:
        """`value` (>= 0) with an interval [value * (1 - below), value * (1 + above)]."""
        return cls(value=value, low=value * max(0.0, 1.0 - below), high=value * (1.0 + above), source=source)

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(value=self.value + other.value, low=self.low + other.low, high=self.high + other.high,
                        source=worst((self.source, other.source)))

    def scaled(self, factor: float) -> Quantity:
        """Times a non-negative number."""
        if factor < 0:
            raise ValueError(f"a quantity scales by a factor >= 0, not {factor}")
        return Quantity(value=self.value * factor, low=self.low * factor, high=self.high * factor, source=self.source)
