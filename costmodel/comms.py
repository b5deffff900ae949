"""Time of collectives over the link tiers of a cluster.

Bytes are those of the whole message, as nccl-tests counts them: the gathered result of an all-gather, the full input of a reduce-scatter or
all-reduce,
one rank's whole send buffer of an all-to-all. An uneven all-to-all takes as long as an even one of more bytes: of all that its heaviest rank has, or
as a calibration says (`uneven_weight`). For a group of n ranks, S bytes, and the tiers k that it crosses from the inside out, with m_k
members inside
one unit below the tier (a rank, a host, a zone):

    ring        wire = S (n - 1) / n (all-reduce: twice) crosses every unit's boundary once; t_k = wire / r_k
    all-to-all  each rank sends S (n - m_k) / n beyond its unit;                            t_k = S (n - m_k) / n m_k / r_k
    rate        r_k = min(m_k B_k, u_k B_k / (o_k a_k)): u_k ranks share an uplink oversubscribed o_k times with a_k groups at once
    time        latency + max_k t_k / efficiency; the least over algorithm (ring, tree, PAT, NVLS) and protocol (LL, LL128, Simple)

A calibration's size curves (`comms_curves`) replace latency and efficiency inside a host, and for a group over hosts of exactly that shape.
`bound_seconds` is what no algorithm beats: bytes that must cross over the rate, without latency.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel import contention
from costmodel.cluster import Cluster, LinkTier
from costmodel.codec import suggest
from costmodel.comms_curves import (
    NVLS_MIN_GROUP,
    CollectiveCurve,
    load_curves,
    one_host_seconds,
    transport_variant,
    wire_factor,
)
from costmodel.ops import COLLECTIVES
from costmodel.plan import Layout
from costmodel.quantity import Source, worst

if TYPE_CHECKING:
    from costmodel.calibration import Calibration

PROTOCOLS = ("LL", "LL128", "Simple")
# Seconds before the first byte, by algorithm and protocol [NCCL src/graph/tuning.cc].
BASE_SECONDS = {
    "ring": {"LL": 6.6e-6, "LL128": 14.0e-6, "Simple": 8.4e-6},
    "tree": {"LL": 6.8e-6, "LL128": 14.0e-6, "Simple": 8.4e-6},
    "pat": {"LL": 6.6e-6, "LL128": 14.0e-6, "Simple": 8.4e-6},
}
# A hop under each protocol against a bulk (Simple) hop, whose seconds the tier states: NVLink 0.6, 1.9, 3.4 us; network 2.7, 4.0, 14 us
# [NCCL src/graph/tuning.cc].
HOP_FACTOR = {"host": {"LL": 0.6 / 3.4, "LL128": 1.9 / 3.4, "Simple": 1.0}, "network": {"LL": 2.7 / 14.0, "LL128": 4.0 / 14.0, "Simple": 1.0}}
# Share of the wire that carries data: LL sends a flag with every word, LL128 8 bytes of 128 and some stores [NCCL src/graph/tuning.cc].
PROTOCOL_EFFICIENCY = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}
# 20.6 of 25 GB/s a link on Hopper [NCCL src/graph/tuning.cc]; 380 of 400 GB/s in 32-GPU all-reduce over 8 x 400G [published: nccl_multi_host].
LINK_EFFICIENCY = {"host": 0.824, "network": 0.95}
NVLS_SECONDS = 25e-6  # [NCCL src/graph/tuning.cc]
NVLS_EFFICIENCY = 0.85 * 5.0 / 6.0  # of the message over the link's achieved rate [NCCL src/graph/tuning.cc]; 263 of 450 GB/s measured
TREE_EFFICIENCY = 0.92  # [NCCL src/graph/tuning.cc]
# Each peer of an all-to-all costs a send of its own: 6.4 -> 7.4 us from 2 to 8 GPUs [published: nccl_hopper_one_host]; network: assumed.
PEER_SECONDS = {"host": 0.17e-6, "network": 0.5e-6}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A process group: `size` ranks, `stride` apart; every rank of the world is in one such group, and all of them run the collective together."""

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise ValueError(f"group: size and stride must be >= 1, got {self.size} and {self.stride}")

    def members(self, unit: int) -> int:
        """How many of the group's ranks share one unit of `unit` consecutive ranks (the fewest, where groups straddle units)."""
        span = self.size * self.stride
        if span <= unit and unit % span == 0:
            return self.size
        if span <= unit:
            return max(1, self.size // 2)
        return min(self.size, max(1, unit // self.stride))


def layout_groups(layout: Layout) -> dict[str, GroupShape]:
    """The process groups of a layout by axis: fsdp, ddp, ep, efsdp, sparse_group, sparse_replicas, world."""
    return {
        "fsdp": GroupShape(size=layout.fsdp),
        "ddp": GroupShape(size=layout.ddp, stride=layout.fsdp),
        "ep": GroupShape(size=layout.ep),
        "efsdp": GroupShape(size=layout.fsdp // layout.ep, stride=layout.ep),
        "sparse_group": GroupShape(size=layout.sparse_group),
        "sparse_replicas": GroupShape(size=layout.sparse_replicas, stride=layout.sparse_group),
        "world": GroupShape(size=layout.world_size),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A tier that a group crosses: `inner` members inside one unit of `unit` ranks below it, `outer` members inside its scope; bytes/s of
    the group."""

    tier: LinkTier
    unit: int
    inner: int
    outer: int
    rate: float

    @property
    def kind(self) -> str:
        return "host" if self.tier.scope == "host" else "network"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Seconds of one collective; `tier`: the outermost tier crossed, whose stream it occupies (empty for a group of one); `share`: what it takes from
    compute beside it, `waiting`: while it only waits for another rank; `algorithm`: e.g. `ring/Simple`, `curve`."""

    seconds: float
    tier: str
    source: Source
    share: float
    algorithm: str
    waiting: float = 0.0


NOTHING = CollectiveCost(seconds=0.0, tier="", source="measured", share=0.0, algorithm="none")


def spans(group: GroupShape, cluster: Cluster, active_groups: int | None = None) -> tuple[Span, ...]:
    """Tiers that `group` crosses, inside out. active_groups: groups that use an uplink at once (default: all of them, which is what a step does).

    Raises ValueError when no tier of the cluster joins the group.
    """
    found, unit, inner = [], 1, 1
    for tier in cluster.tiers:
        scope = cluster.scope_size(tier.scope)
        everywhere = scope == cluster.num_ranks and group.size * group.stride <= scope
        outer = group.size if everywhere else group.members(scope)
        if outer > inner:
            sharing = min(active_groups or unit // inner or 1, max(1, unit // inner))
            rate = min(inner * tier.bandwidth, unit * tier.bandwidth / (tier.oversubscription * sharing))
            found.append(Span(tier=tier, unit=unit, inner=inner, outer=outer, rate=rate))
            inner = outer
        if outer >= inner:
            unit = max(unit, scope)
    if inner < group.size:
        raise ValueError(f"cluster {cluster.name}: no link tier joins a group of {group.size} ranks with stride {group.stride}; "
                         f"tiers reach {cluster.scope_size(cluster.tiers[-1].scope) if cluster.tiers else 1} ranks")
    return tuple(found)


def bound_seconds(kind: str, num_bytes: float, group: GroupShape, cluster: Cluster, *, active_groups: int | None = None,
                  max_over_mean: float = 1.0) -> float:
    """What no algorithm beats: bytes that must cross each tier over its rate, latency left out."""
    _check_kind(kind)
    if group.size == 1:
        return 0.0
    return max(_least_bytes(kind, num_bytes, group.size, span) * max_over_mean / span.rate for span in spans(group, cluster, active_groups))


def _least_bytes(kind: str, num_bytes: float, n: int, span: Span) -> float:
    """Bytes that must leave (or enter) one unit below the tier."""
    crossing = num_bytes * (n - span.inner) / n
    if kind == "all_to_all":
        return crossing * span.inner
    if kind == "all_reduce":
        # a switch that reduces takes every rank's message once and returns the sum once; without it each unit also carries the others' partial sums
        return crossing if span.tier.in_network_reduction and n >= NVLS_MIN_GROUP else 2 * crossing
    return crossing


def _check_kind(kind: str) -> None:
    if kind not in COLLECTIVES:
        raise ValueError(f"collective {kind!r} is unknown{suggest(kind, COLLECTIVES)}; known: {', '.join(COLLECTIVES)}")


class Network:
    """Collectives of one cluster under one transport. `calibration`: its curves serve where they fit; of collectives that it did not measure inside
    a host published ones of this device, else the model."""

    def __init__(self, cluster: Cluster, calibration: Calibration | None = None, transport: str = "nccl") -> None:
        contention.transport(transport)
        self.cluster = cluster
        self.transport = "gloo" if cluster.device.kind == "cpu" else transport
        self._constants = dict(calibration.constants) if calibration is not None else {}
        own = calibrated_curves(calibration, cluster) if calibration is not None else ()
        known = {curve.collective for curve in own if curve.hosts == 1}
        self._curves = (*own, *(curve for curve in published_curves(cluster.device.name) if curve.collective not in known))
        self._memo: dict[tuple[object, ...], CollectiveCost] = {}

    def cost(self, kind: str, num_bytes: float, group: GroupShape, *, active_groups: int | None = None, max_over_mean: float = 1.0) -> CollectiveCost:
        """Time of one collective. max_over_mean: the heaviest rank's bytes of an all-to-all over the average, whose message `num_bytes` is."""
        key = (kind, num_bytes, group, active_groups, max_over_mean)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._cost(kind, num_bytes, group, active_groups, max_over_mean)
        return found

    def _cost(self, kind: str, num_bytes: float, group: GroupShape, active_groups: int | None, max_over_mean: float) -> CollectiveCost:
        _check_kind(kind)
        if max_over_mean < 1 or num_bytes < 0:
            raise ValueError(f"{kind}: bytes >= 0 and max_over_mean >= 1 are needed, got {num_bytes} and {max_over_mean}")
        if group.size == 1 or num_bytes == 0:
            return NOTHING
        crossed = spans(group, self.cluster, active_groups)
        one_host = len(crossed) == 1 and crossed[0].kind == "host"
        chosen = contention.serving(self.transport, kind, one_host=one_host)
        heavy = num_bytes * (1.0 + self._constants.get("uneven_weight", 1.0) * (max_over_mean - 1.0))
        seconds, source, algorithm = self._seconds(kind, heavy, group, crossed, chosen)
        if max_over_mean > 1.0:
            seconds = max(seconds, bound_seconds(kind, num_bytes, group, self.cluster, active_groups=active_groups, max_over_mean=max_over_mean))
        share = contention.compute_share(kind, heavy, seconds, self.cluster.device, chosen, self._constants)
        return CollectiveCost(seconds=seconds, tier=crossed[-1].tier.name, source=source, share=share, algorithm=algorithm,
                              waiting=min(share, contention.waiting_share(kind, self.cluster.device, chosen)))

    def _seconds(self, kind: str, num_bytes: float, group: GroupShape, crossed: Sequence[Span],
                 chosen: contention.Transport) -> tuple[float, Source, str]:
        """(seconds, source, algorithm). A transport without curves of its own borrows NCCL's for its bulk rate, marked extrapolated."""
        names = (chosen.name,) if chosen.fallback is None else (chosen.name, chosen.fallback)
        for name in names:
            found = self._from_curves(kind, num_bytes, group, crossed, name)
            if found is not None:
                seconds, source, algorithm = found
                return seconds, source if name == chosen.name else worst((source, "extrapolated")), algorithm
        seconds, algorithm = modelled_seconds(kind, num_bytes, group.size, crossed, latency_factor=chosen.latency_factor, gloo=chosen.name == "gloo")
        return seconds, "roofline", algorithm

    def _from_curves(self, kind: str, num_bytes: float, group: GroupShape, crossed: Sequence[Span], name: str) -> tuple[float, Source, str] | None:
        members = crossed[0].outer if crossed[0].kind == "host" else 1
        if len(crossed) > 1 or crossed[0].kind != "host":
            hosts = group.size // members
            for curve in self._curves:
                if (curve.collective, curve.transport, curve.group, curve.hosts) == (kind, name, group.size, hosts):
                    seconds, source = curve.at(num_bytes, crossed[-1].tier.bandwidth)
                    return max(seconds, num_bytes * wire_factor(kind, group.size) / crossed[-1].rate), source, "curve"
        if crossed[0].kind != "host":
            return None
        curves = [c for c in self._curves if c.collective == kind and c.transport == name and c.hosts == 1]
        span = crossed[0]
        if len(crossed) == 1:
            found = one_host_seconds(curves, group.size, num_bytes, span.tier.bandwidth, in_network_reduction=span.tier.in_network_reduction)
            return None if found is None else (*found, "curve")
        # Over hosts, NVLink carries the whole ring's wire bytes; the message of a one-host collective with as many bytes on the wire stands
        # for that part.
        inside = _inside_message(kind, num_bytes, group.size, members)
        found = one_host_seconds(curves, members, inside, span.tier.bandwidth, in_network_reduction=False)
        if found is None:
            return None
        outside, algorithm = modelled_seconds(kind, num_bytes, group.size, crossed, inside_free=True)
        return max(found[0], outside), "extrapolated", f"curve+{algorithm}"


def _inside_message(kind: str, num_bytes: float, size: int, members: int) -> float:
    if kind == "all_to_all":
        return num_bytes * members / size
    return num_bytes * wire_factor(kind, size) / wire_factor(kind, members)


def modelled_seconds(kind: str, num_bytes: float, n: int, crossed: Sequence[Span], *, latency_factor: float = 1.0, gloo: bool = False,
                     inside_free: bool = False) -> tuple[float, str]:
    """(seconds, algorithm/protocol) by NCCL's own latency and bandwidth model, the least over both; gloo: one ring, no protocol.

    inside_free: leave out the host tier's bandwidth (a curve gives it).
    """
    if gloo:
        steps = (n - 1) * (2 if kind == "all_reduce" else 1)
        return steps * crossed[-1].tier.latency + _slowest(kind, num_bytes, n, crossed, 1.0, {}, False), "ring"
    if kind == "all_to_all":
        peers = sum(PEER_SECONDS[s.kind] * (s.outer - s.inner) for s in crossed)
        bulk = _slowest(kind, num_bytes, n, crossed, 1.0, LINK_EFFICIENCY, inside_free)
        hop = crossed[-1].tier.latency * HOP_FACTOR[crossed[-1].kind]["LL"]
        return latency_factor * (BASE_SECONDS["ring"]["LL"] + hop + peers) + bulk, "p2p"
    best: tuple[float, str] | None = None
    for algorithm in _algorithms(kind, crossed):
        for protocol in PROTOCOLS:
            efficiency = PROTOCOL_EFFICIENCY[protocol] * (TREE_EFFICIENCY if algorithm == "tree" else 1.0)
            seconds = latency_factor * (BASE_SECONDS[algorithm][protocol] + _hops(kind, algorithm, protocol, n, crossed))
            seconds += _slowest(kind, num_bytes, n, crossed, efficiency, LINK_EFFICIENCY, inside_free)
            if best is None or seconds < best[0]:
                best = (seconds, f"{algorithm}/{protocol}")
    assert best is not None
    span = crossed[0]
    if kind == "all_reduce" and len(crossed) == 1 and span.tier.in_network_reduction and n >= NVLS_MIN_GROUP and span.kind == "host":
        nvls = latency_factor * NVLS_SECONDS + num_bytes / (span.rate * LINK_EFFICIENCY["host"] * NVLS_EFFICIENCY)
        best = min(best, (nvls, "nvls"))
    return best


def _algorithms(kind: str, crossed: Sequence[Span]) -> tuple[str, ...]:
    if kind == "all_reduce":
        return ("ring", "tree")
    # PAT is logarithmic, but only for groups with one member a host [NCCL 2.23 release notes]
    return ("ring", "pat") if crossed[0].kind == "network" else ("ring",)


def _hops(kind: str, algorithm: str, protocol: str, n: int, crossed: Sequence[Span]) -> float:
    """Seconds of the latency chain: a ring takes n - 1 steps (all-reduce twice), units - 1 of them over each outer tier; trees are logarithmic."""
    total, inner_steps = 0.0, 0
    for span in reversed(crossed):
        hop = span.tier.latency * HOP_FACTOR[span.kind][protocol]
        if algorithm == "ring":
            steps = n // span.inner - 1 - inner_steps
            inner_steps += steps
        elif span.kind == "host":
            steps = span.outer - 1
        else:
            steps = math.ceil(math.log2(span.outer / span.inner))
        total += steps * hop
    return total * (2 if kind == "all_reduce" else 1)


def _slowest(kind: str, num_bytes: float, n: int, crossed: Sequence[Span], efficiency: float, link: dict[str, float], inside_free: bool) -> float:
    times = [0.0]
    for span in crossed:
        if inside_free and span.kind == "host":
            continue
        if kind == "all_to_all":
            crossing = num_bytes * (n - span.inner) / n * span.inner
        else:
            crossing = num_bytes * wire_factor(kind, n)
        times.append(crossing / (span.rate * efficiency * link.get(span.kind, 1.0)))
    return max(times)


def calibrated_curves(calibration: Calibration, cluster: Cluster) -> tuple[CollectiveCurve, ...]:
    """Curves out of a calibration's collective points (rows of bytes, group, seconds, host seconds) on the cluster's inner link, those over hosts on
    the outermost link that such a group crosses here; groups of more ranks or hosts than the cluster has are left out."""
    default = "gloo" if calibration.environment.device_kind == "cpu" else "nccl"
    bandwidth = calibration.constants.get("link_bandwidth") or (cluster.tiers[0].bandwidth if cluster.tiers else 1.0)
    curves = []
    for curve in calibration.curves:
        if curve.op not in COLLECTIVES:
            continue
        transport, _, hosts = (curve.variant or default).partition(":")
        by_group: dict[int, list[tuple[float, float]]] = {}
        for num_bytes, group, seconds, *_ in curve.points:
            if group >= 2 and num_bytes > 0:
                by_group.setdefault(int(group), []).append((num_bytes, seconds))
        for group, points in sorted(by_group.items()):
            link = bandwidth
            if int(hosts or 1) > 1:
                if int(hosts) > cluster.num_hosts or group > cluster.num_hosts * cluster.devices_per_host:
                    continue
                link = spans(GroupShape(size=group), cluster)[-1].tier.bandwidth
            sizes, seconds = zip(*sorted(points))
            curves.append(CollectiveCurve(collective=curve.op, transport=transport, group=group, hosts=int(hosts or 1), link_bandwidth=link,
                                          bytes=sizes, seconds=seconds, in_network_reduction=_reduces(cluster)))
    return tuple(curves)


def _reduces(cluster: Cluster) -> bool:
    return bool(cluster.tiers) and cluster.tiers[0].in_network_reduction


@functools.lru_cache(maxsize=8)
def published_curves(device: str) -> tuple[CollectiveCurve, ...]:
    """Published NCCL curves of this very device (one host, its NVLink), else none."""
    return load_curves(Path(__file__).parent / "calibrations" / "nccl-hopper.json").get(device, ())


_networks: dict[tuple[int, int, str], tuple[Cluster, Calibration | None, Network]] = {}


def network(cluster: Cluster, calibration: Calibration | None = None, transport: str = "nccl") -> Network:
    """The Network of these very objects, made once."""
    key = (id(cluster), id(calibration), transport)
    if key not in _networks:
        if len(_networks) > 64:
            _networks.clear()
        _networks[key] = (cluster, calibration, Network(cluster, calibration, transport))
    return _networks[key][2]


def collective_seconds(kind: str, num_bytes: float, group: GroupShape, cluster: Cluster, calibration: Calibration | None = None, *,
                       transport: str = "nccl") -> tuple[float, str, Source]:
    """(seconds, outermost tier crossed, source) of one collective."""
    cost = network(cluster, calibration, transport).cost(kind, num_bytes, group)
    return cost.seconds, cost.tier, cost.source


__all__ = ["CollectiveCost", "GroupShape", "Network", "Span", "bound_seconds", "calibrated_curves", "collective_seconds", "layout_groups",
           "modelled_seconds", "network", "published_curves", "spans", "transport_variant"]
