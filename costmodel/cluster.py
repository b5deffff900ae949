"""Devices, links and clusters, in SI units: bytes, bytes/s, FLOP/s, seconds, watts, dollars per hour.

A rank is one device. Ranks are numbered host by host; a zone is `hosts_per_zone` consecutive hosts. `tiers` go from the innermost to the outermost
link; a collective whose group spans a tier pays that tier's bandwidth and latency.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or CPU rank). `peak_flops` maps a number format to its dense peak [FLOP/s] [Datasheet: `sources`]."""

    name: str
    kind: Literal["gpu", "cpu"]
    peak_flops: dict[str, float]
    memory_bytes: float
    memory_bandwidth: float
    num_sms: int = 0
    l2_bytes: float = 0.0
    host_link_bandwidth: float = 0.0
    power: float | None = None
    native_formats: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0 or self.memory_bandwidth <= 0 or not self.peak_flops or min(self.peak_flops.values()) <= 0:
            raise ValueError(f"device {self.name}: memory, bandwidth and every peak must be > 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkTier:
    """A tier of links: `bandwidth` [bytes/s per rank and direction], `latency` [s per hop of a bulk transfer], `scope`: how many ranks it joins.

    `oversubscription` n: n ranks' worth of traffic share one rank's bandwidth when all cross the tier at once. `in_network_reduction`: switches
    reduce (NVLS, SHARP), which serves all-reduce only; off unless the cluster is known to allow it.
    """

    name: str
    scope: Literal["host", "zone", "cluster"]
    bandwidth: float
    latency: float
    oversubscription: float = 1.0
    in_network_reduction: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency < 0 or self.oversubscription < 1:
            raise ValueError(f"tier {self.name}: bandwidth > 0, latency >= 0 and oversubscription >= 1 are needed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Failures per device-hour, seconds from failure to training again, and slow nodes: a share of hosts that run `slow_factor` times slower.

    `startup_seconds`: from the start of a job to its first step. `checkpoint_bandwidth`: bytes/s at which a rank's state leaves it while training
    waits [defaults assumed: 5 minutes each, 2 GB/s a rank].
    """

    failures_per_device_hour: float = 0.0
    restart_seconds: float = 300.0
    startup_seconds: float = 300.0
    checkpoint_bandwidth: float = 2e9
    slow_node_probability: float = 0.0
    slow_node_factor: float = 1.0
    step_jitter: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if min(self.failures_per_device_hour, self.restart_seconds, self.startup_seconds, self.step_jitter) < 0:
            raise ValueError("reliability: failures_per_device_hour, restart, startup and step_jitter must be >= 0")
        if self.checkpoint_bandwidth <= 0:
            raise ValueError("reliability: checkpoint_bandwidth must be > 0")
        if not 0 <= self.slow_node_probability <= 1 or self.slow_node_factor < 1:
            raise ValueError("reliability: 0 <= slow_node_probability <= 1 and slow_node_factor >= 1 are needed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Dollars per device-hour, never without a source."""

    dollars_per_device_hour: float
    source: str

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError("price: a source is needed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_hosts` hosts of `devices_per_host` devices; `memory_budget` [bytes per rank] caps what a plan may use (default: the device's memory).

    Zones are `hosts_per_zone` hosts each, or `zone_hosts` hosts where they are unequal; groups are then laid out, and links counted, in blocks of
    their greatest common divisor, which never cross a zone's border.
    """

    name: str
    device: Device
    num_hosts: int
    devices_per_host: int
    tiers: tuple[LinkTier, ...]
    hosts_per_zone: int | None = None
    zone_hosts: tuple[int, ...] = ()
    host_memory_bytes: float = 0.0
    memory_budget: float | None = None
    reliability: Reliability = Reliability()
    price: Price | None = None

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.devices_per_host < 1:
            raise ValueError(f"cluster {self.name}: num_hosts and devices_per_host must be >= 1")
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise ValueError(f"cluster {self.name}: memory_budget must be > 0, got {self.memory_budget:g}")
        if self.hosts_per_zone is not None and self.hosts_per_zone < 1:
            raise ValueError(f"cluster {self.name}: hosts_per_zone must be >= 1, got {self.hosts_per_zone}")
        if self.hosts_per_zone is not None and self.num_hosts % self.hosts_per_zone and self.num_hosts > self.hosts_per_zone:
            legal = [d for d in range(1, self.num_hosts + 1) if self.num_hosts % d == 0]
            raise ValueError(f"cluster {self.name}: {self.num_hosts} hosts do not divide into zones of {self.hosts_per_zone}; legal: {legal}")
        if self.zone_hosts and (self.hosts_per_zone is not None or min(self.zone_hosts) < 1):
            raise ValueError(f"cluster {self.name}: zone_hosts are whole numbers >= 1, in place of hosts_per_zone; got {list(self.zone_hosts)}")
        if self.zone_hosts and sum(self.zone_hosts) != self.num_hosts:
            raise ValueError(f"cluster {self.name}: zones of {list(self.zone_hosts)} add up to {sum(self.zone_hosts)} hosts, not to {self.num_hosts}")
        if not self.tiers and self.num_ranks > 1:
            raise ValueError(f"cluster {self.name}: {self.num_ranks} ranks need at least one link tier")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"cluster {self.name}: tier names must be unique, got {', '.join(names)}")

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def usable_memory(self) -> float:
        """Bytes a rank may use: the budget where given, else the device's memory."""
        return min(self.memory_budget or self.device.memory_bytes, self.device.memory_bytes)

    def scope_size(self, scope: str) -> int:
        """Ranks joined by a tier's scope; of unequal zones, those of a block that fits into each of them."""
        zone = (math.gcd(*self.zone_hosts) or self.hosts_per_zone or self.num_hosts) * self.devices_per_host
        return {"host": self.devices_per_host, "zone": min(zone, self.num_ranks), "cluster": self.num_ranks}[scope]
