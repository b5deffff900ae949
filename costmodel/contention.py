"""What a collective takes from compute beside it, by transport: SMs it holds and HBM bandwidth it moves.

    share = 1 - (1 - SMs / num_SMs) (1 - HBM bytes / (seconds x bandwidth))

Compute beside it runs at 1 - share. Measured on two H200s: 12.88 ms of GEMM beside a 3.89 ms all-gather of 2 GiB took 14.39 ms; 24 of 132 SMs and
4.3 GB of HBM traffic in that time give a share of 0.37 and 14.32 ms. Wave quantisation is inside the SM term only on average: a GEMM's own
waves are not known here.
A calibration that measured the share (`constant:collective_share`, variant `transport/kind`) replaces the formula; a share of nothing of what holds
SMs is no measurement (compute launched more slowly than it ran) and does not.
"""
from __future__ import annotations

import dataclasses

from costmodel.cluster import Device
from costmodel.codec import suggest
from costmodel.ops import COLLECTIVES

# Compute never stops wholly: blocks already resident go on. The simulator's floor for the rate beside any number of collectives [Assumed].
RATE_FLOOR = 0.05
# A measured share up to this is that of a timing which saw nothing.
NOTHING_SEEN = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A collective library. `sms`: SMs held by each collective it serves; kinds it lacks run on `fallback`'s terms.

    latency_factor: its fixed cost against NCCL's. hosts: whether it serves groups that span hosts. cpu_share: share of a CPU rank's core
    that its own threads
    take. executable: whether code here can run it, else the plan is predict-only.
    """

    name: str
    sms: dict[str, float]
    fallback: str | None = None
    latency_factor: float = 1.0
    hosts: bool = True
    cpu_share: float = 0.0
    executable: bool = True
    source: str = ""


TRANSPORTS = {
    "nccl": Transport(
        name="nccl", sms=dict.fromkeys(COLLECTIVES, 24.0),
        source="about 24 SMs for all-gather and reduce-scatter [facts: GEM training infrastructure]; all-reduce and all-to-all assumed alike"),
    "ncclx": Transport(
        name="ncclx", sms={"all_gather": 1.0, "all_to_all": 1.0}, fallback="nccl", executable=False,
        source="24 -> 1 SM for all-gather: copy engines inside the host, RDMA outside [facts: GEM training infrastructure]; reductions "
               "still need SMs"),
    "copy_engine": Transport(
        name="copy_engine", sms={"all_gather": 0.0, "all_to_all": 0.0}, fallback="nccl", hosts=False, executable=False,
        source="copies by the DMA engines hold no SM, inside a host only; reductions still need SMs"),
    "gloo": Transport(
        name="gloo", sms={}, cpu_share=0.5,
        source="gloo's threads copy and reduce on the rank's own core; half of it while a collective runs is assumed until calibrated"),
}


def transport(name: str) -> Transport:
    """The preset; ValueError with a near name."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport {name!r} is unknown{suggest(name, TRANSPORTS)}; known: {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def serving(name: str, kind: str, *, one_host: bool) -> Transport:
    """The transport that really serves `kind`: the preset itself or its fallback."""
    chosen = transport(name)
    if chosen.fallback is not None and (kind not in chosen.sms or (not one_host and not chosen.hosts)):
        return transport(chosen.fallback)
    return chosen


def waiting_share(kind: str, device: Device, chosen: Transport) -> float:
    """Share of a GPU [0, 1) that a collective takes which waits for another rank: it holds its SMs and moves nothing."""
    return min(chosen.sms.get(kind, 0.0) / device.num_sms, 1.0 - RATE_FLOOR) if device.kind == "gpu" and device.num_sms else 0.0


# HBM bytes that one rank reads and writes, per byte of message: gathered output written and forwarded; input read and partial sums added;
# both [Derived].
HBM_TRAFFIC = {"all_gather": 2.0, "reduce_scatter": 3.0, "all_reduce": 4.0, "all_to_all": 2.0}


def compute_share(kind: str, num_bytes: float, seconds: float, device: Device, chosen: Transport, measured: dict[str, float] | None = None) -> float:
    """Share of the device [0, 1) that a collective of `seconds` takes from compute beside it. `measured`: a calibration's constants."""
    found = (measured or {}).get(f"collective_share/{chosen.name}/{kind}")
    if found is not None and (found > NOTHING_SEEN or not (device.kind == "gpu" and chosen.sms.get(kind, 0.0))):
        return min(max(found, 0.0), 1.0 - RATE_FLOOR)
    if device.kind == "cpu":
        return chosen.cpu_share
    sms = chosen.sms.get(kind, 0.0) / device.num_sms if device.num_sms else 0.0
    traffic = HBM_TRAFFIC[kind] * num_bytes / (seconds * device.memory_bandwidth) if seconds > 0 else 0.0
    return min(1.0 - (1.0 - min(sms, 1.0)) * (1.0 - min(traffic, 1.0)), 1.0 - RATE_FLOOR)
