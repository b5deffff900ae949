"""Clusters: what does not divide or cannot be is refused with the legal values."""
from __future__ import annotations

import pytest

from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.codec import DecodeError, decode, encode

DEVICE = Device(name="gpu", kind="gpu", peak_flops={"bf16": 1e15}, memory_bytes=141e9, memory_bandwidth=4.8e12)
TIER = LinkTier(name="nvlink", scope="host", bandwidth=450e9, latency=3e-6)


def build(**changes) -> Cluster:
    return Cluster(**{"name": "c", "device": DEVICE, "num_hosts": 12, "devices_per_host": 8, "hosts_per_zone": 4, "tiers": (TIER,), **changes})


def test_scopes():
    cluster = build()
    assert cluster.num_ranks == 96
    assert [cluster.scope_size(s) for s in ("host", "zone", "cluster")] == [8, 32, 96]
    assert build(hosts_per_zone=None).scope_size("zone") == 96
    assert build(num_hosts=2, hosts_per_zone=4).scope_size("zone") == 16


def test_memory_budget_caps_but_never_exceeds_the_device():
    assert build(memory_budget=80e9).usable_memory == 80e9
    assert build(memory_budget=200e9).usable_memory == build().usable_memory == 141e9


@pytest.mark.parametrize(("changes", "message"), [
    ({"hosts_per_zone": 5}, r"do not divide into zones of 5; legal: \[1, 2, 3, 4, 6, 12\]"), ({"num_hosts": 0}, "must be >= 1"),
    ({"tiers": ()}, "need at least one link tier"),
])
def test_impossible_clusters_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize("changes", [{"bandwidth": 0.0}, {"latency": -1.0}, {"oversubscription": 0.5}])
def test_impossible_tiers_are_refused(changes):
    with pytest.raises(ValueError, match="tier nvlink"):
        LinkTier(**{"name": "nvlink", "scope": "host", "bandwidth": 1e9, "latency": 0.0, **changes})


def test_round_trip_and_dotted_faults():
    cluster = build()
    assert decode(Cluster, encode(cluster)) == cluster
    body = encode(cluster)
    body["tiers"][0]["bandwith"] = 1.0
    with pytest.raises(DecodeError, match=r"tiers\[0\]\.bandwith.*did you mean 'bandwidth'"):
        decode(Cluster, body)
