"""Measured size curves of collectives: seconds against message bytes for one (collective, transport, group size, hosts).

A curve answers only for its own collective: all-reduce may be faster than the link where switches reduce (NVLS), so it says nothing of all-gather.

    size        log-log interpolation; below the smallest size the floor is held, above the largest the utilisation is held
    group size  t(n, S) = wire(n, S) / B + excess(n, S), excess linear in n between two measured group sizes: the wire part is exact, and
    what is left is
                latency per hop (linear in n) and copies (nearly flat). Outside the measured sizes the nearest excess is held, plus one hop's
                latency each.
    link        on a link of another bandwidth B' everything above the floor scales by B / B' (utilisation held): extrapolated

    wire(n, S) = S (n - 1) / n, twice that for all-reduce: what one rank must send.
"""
from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from costmodel.codec import DecodeError, decode, encode
from costmodel.ops import COLLECTIVES
from costmodel.quantity import Source, worst
from costmodel.samples import Sample

# Switches reduce from this many GPUs on; a curve of a smaller group stands for no larger one and the other way round [facts: H200, measured tables].
NVLS_MIN_GROUP = 5
# Where NCCL's own model prefers NVLS (25 us + S / 262 GB/s) to the LL ring (15 us + S / 70 GB/s) on 8 Hopper GPUs [NCCL src/graph/tuning.cc].
NVLS_MIN_BYTES = 1e6
RING_HOP_SECONDS = 0.6e-6  # LL over NVLink [NCCL src/graph/tuning.cc]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """Seconds at message sizes [bytes], ascending, of one collective. `noise`: relative spread of each point.

    link_bandwidth: bytes/s per rank and direction of the link it was measured on. hosts: 1 inside a host, else how many hosts the group spanned.
    in_network_reduction: whether the switches could reduce when it was measured.
    Raises ValueError for an unknown collective, sizes out of order, or figures that are not positive.
    """

    collective: str
    transport: str
    group: int
    hosts: int = 1
    link_bandwidth: float
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    noise: tuple[float, ...] = ()
    in_network_reduction: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        name = f"curve {self.collective} {self.transport} group {self.group}"
        if self.collective not in COLLECTIVES:
            raise ValueError(f"{name}: collective is none of {', '.join(COLLECTIVES)}")
        if self.group < 2 or self.hosts < 1 or not self.link_bandwidth > 0:
            raise ValueError(f"{name}: group >= 2, hosts >= 1 and link_bandwidth > 0 are needed")
        if not self.bytes or len(self.bytes) != len(self.seconds):
            raise ValueError(f"{name}: as many seconds as bytes are needed, and at least one")
        if any(not (b > a) for a, b in zip(self.bytes, self.bytes[1:])) or not self.bytes[0] > 0:
            raise ValueError(f"{name}: bytes must be > 0 and ascend")
        if not all(0 < s < math.inf for s in self.seconds):
            raise ValueError(f"{name}: seconds must be > 0 and finite")

    def at(self, num_bytes: float, link_bandwidth: float) -> tuple[float, Source]:
        """(seconds, source) at a size, on a link of `link_bandwidth`."""
        sizes, seconds = self.bytes, self.seconds
        if num_bytes <= sizes[0]:
            value, source = seconds[0], "interpolated" if num_bytes < sizes[0] else "measured"
        elif num_bytes >= sizes[-1]:
            value, source = seconds[-1] * num_bytes / sizes[-1], "extrapolated" if num_bytes > sizes[-1] else "measured"
        else:
            i = bisect.bisect_right(sizes, num_bytes)
            if sizes[i - 1] == num_bytes:
                value, source = seconds[i - 1], "measured"
            else:
                share = math.log(num_bytes / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
                value, source = math.exp(math.log(seconds[i - 1]) * (1 - share) + math.log(seconds[i]) * share), "interpolated"
        if link_bandwidth != self.link_bandwidth:
            floor = min(seconds[0], value)
            value, source = floor + (value - floor) * self.link_bandwidth / link_bandwidth, "extrapolated"
        return value, source


def uneven_weight(curve: CollectiveCurve, points: Iterable[tuple[float, float, float]]) -> float | None:
    """w in [0, 1] such that an all-to-all of S bytes a rank whose heaviest rank has x times the average takes as long as an even one of
    S (1 + w (x - 1)) bytes: the w with the least median |log error| over `points` (S, x, seconds) with x > 1; None where there are none."""
    uneven = [(num_bytes, share, seconds) for num_bytes, share, seconds in points if share > 1.0]
    if not uneven:
        return None

    def error(weight: float) -> float:
        errors = sorted(abs(math.log(curve.at(b * (1.0 + weight * (x - 1.0)), curve.link_bandwidth)[0] / s)) for b, x, s in uneven)
        return (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2

    return min((step / 50 for step in range(51)), key=error)


def wire_factor(collective: str, group: int) -> float:
    """Bytes that one rank must send, per byte of message, when nobody reduces for it."""
    return (2.0 if collective == "all_reduce" else 1.0) * (group - 1) / group


def one_host_seconds(curves: Sequence[CollectiveCurve], group: int, num_bytes: float, link_bandwidth: float,
                     *, in_network_reduction: bool) -> tuple[float, Source] | None:
    """(seconds, source) of a group of `group` ranks of one host from `curves` (one collective and transport, hosts = 1); None without a
    usable curve."""
    usable = [c for c in curves if _same_algorithm(c, group, num_bytes, in_network_reduction)]
    if not usable:
        return None
    usable.sort(key=lambda c: c.group)
    exact = [c for c in usable if c.group == group]
    if exact:
        return exact[0].at(num_bytes, link_bandwidth)
    collective = usable[0].collective
    below = [c for c in usable if c.group < group][-1:]
    above = [c for c in usable if c.group > group][:1]
    found = [(c.group, *c.at(num_bytes, link_bandwidth)) for c in below + above]
    wires = [wire_factor(collective, g) * num_bytes / link_bandwidth for g, _, _ in found]
    # A measurement above the stated rate says that the statement is wrong: then whole times are carried over instead of what exceeds the wire.
    stated = all(seconds >= wire for (_, seconds, _), wire in zip(found, wires))
    wire = wire_factor(collective, group) * num_bytes / link_bandwidth if stated else 0.0
    excess = [seconds - (w if stated else 0.0) for (_, seconds, _), w in zip(found, wires)]
    if len(found) == 2:
        share = (group - found[0][0]) / (found[1][0] - found[0][0])
        return wire + excess[0] * (1 - share) + excess[1] * share, worst(("interpolated", found[0][2], found[1][2]))
    hops = (group - found[0][0]) * (2 if collective == "all_reduce" else 1)
    floor = excess[0] if stated else excess[0] * wire_factor(collective, group) / wire_factor(collective, found[0][0])
    return max(wire + floor + RING_HOP_SECONDS * hops, wire, 0.5 * floor), "extrapolated"


def _same_algorithm(curve: CollectiveCurve, group: int, num_bytes: float, in_network_reduction: bool) -> bool:
    """Whether the curve's algorithm at this size is the group's: an NVLS all-reduce stands for no ring and the other way round."""
    if curve.collective != "all_reduce" or num_bytes < NVLS_MIN_BYTES:
        return True
    return (curve.in_network_reduction and curve.group >= NVLS_MIN_GROUP) == (in_network_reduction and group >= NVLS_MIN_GROUP)


def transport_variant(transport: str, hosts: int) -> str:
    """The sample variant of a collective: `nccl`, or `nccl:4` over 4 hosts."""
    return transport if hosts == 1 else f"{transport}:{hosts}"


def fit_curves(samples: Iterable[Sample], *, link_bandwidth: float, default_transport: str = "nccl",
               in_network_reduction: bool = False, source: str = "") -> tuple[CollectiveCurve, ...]:
    """Curves from collective samples (features `bytes`, `group`; variant as `transport_variant`, empty: `default_transport`).

    Repeated sizes take their median; a smaller message never costs more than a larger one (noise is levelled by pooling neighbours). Samples of other
    ops, held-out ones and groups of one are passed over.
    """
    grouped: dict[tuple[str, str, int, int], dict[float, list[tuple[float, float]]]] = {}
    for sample in samples:
        if sample.op not in COLLECTIVES or sample.held_out or sample.features["group"] < 2 or sample.features["bytes"] <= 0:
            continue
        transport, _, hosts = (sample.variant or default_transport).partition(":")
        key = (sample.op, transport, int(sample.features["group"]), int(hosts or 1))
        grouped.setdefault(key, {}).setdefault(float(sample.features["bytes"]), []).append((sample.seconds, sample.noise))
    curves = []
    for (collective, transport, group, hosts), points in sorted(grouped.items()):
        sizes = sorted(points)
        seconds = _pooled([sorted(s for s, _ in points[b])[len(points[b]) // 2] for b in sizes])
        noise = tuple(max(n for _, n in points[b]) for b in sizes)
        curves.append(CollectiveCurve(collective=collective, transport=transport, group=group, hosts=hosts, link_bandwidth=link_bandwidth,
                                      bytes=tuple(sizes), seconds=tuple(seconds), noise=noise,
                                      in_network_reduction=in_network_reduction, source=source))
    return tuple(curves)


def _pooled(values: list[float]) -> list[float]:
    """The nearest ascending sequence in log space (pool adjacent violators)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([math.log(value), 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, weight = pools.pop()
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * weight) / (pools[-1][1] + weight), pools[-1][1] + weight]
    return [math.exp(mean) for mean, weight in pools for _ in range(int(weight))]


def save_curves(path: Path | str, curves: dict[str, tuple[CollectiveCurve, ...]]) -> None:
    """Writes curves by device name, through a temporary file."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"schema_version": 1, "devices": encode(curves)}, allow_nan=False) + "\n")
    temporary.replace(path)


def load_curves(path: Path | str) -> dict[str, tuple[CollectiveCurve, ...]]:
    """Curves by device name. Raises ValueError naming file and field."""
    path = Path(path)
    body = json.loads(path.read_text())
    if not isinstance(body, dict) or body.get("schema_version") != 1 or "devices" not in body:
        raise ValueError(f"{path}: schema_version 1 with `devices` is needed")
    try:
        return {device: tuple(decode(CollectiveCurve, c, f"devices.{device}[{i}]") for i, c in enumerate(curves))
                for device, curves in body["devices"].items()}
    except DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
