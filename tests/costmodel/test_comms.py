"""Collectives: laws over tiers, curves, published measurements, imported logs."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import collectives
from costmodel import contention
from costmodel.calibration import fit
from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.comms import GroupShape, Network, bound_seconds, collective_seconds, layout_groups, published_curves, spans
from costmodel.comms_curves import CollectiveCurve, fit_curves, one_host_seconds, uneven_weight, wire_factor
from costmodel.comms_import import parse_csv, parse_nccl_tests, read_collectives
from costmodel.ops import COLLECTIVES
from costmodel.plan import Layout
from costmodel.samples import CONSTANT_PREFIX, Environment, Sample

GPU = Device(name="unlisted", kind="gpu", peak_flops={"bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12, num_sms=132)
CORE = Device(name="core", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)
TABLE = Path(collectives.PUBLISHED) / "nccl_hopper_one_host.csv"


def cluster(*, device: Device = GPU, hosts: int = 16, per_host: int = 8, zones: int = 4, scale: float = 1.0, oversubscription: float = 4.0,
            reduces: bool = False) -> Cluster:
    tiers = (LinkTier(name="nvlink", scope="host", bandwidth=450e9 * scale, latency=3.4e-6, in_network_reduction=reduces),
             LinkTier(name="rdma", scope="zone", bandwidth=50e9 * scale, latency=8e-6),
             LinkTier(name="spine", scope="cluster", bandwidth=50e9 * scale, latency=12e-6, oversubscription=oversubscription))
    return Cluster(name="c", device=device, num_hosts=hosts, devices_per_host=per_host, hosts_per_zone=max(1, hosts // zones), tiers=tiers)


def seconds(kind: str, num_bytes: float, group: GroupShape, where: Cluster, **options) -> float:
    return Network(where, **options).cost(kind, num_bytes, group).seconds


GROUPS = st.sampled_from([GroupShape(size=s, stride=t) for s, t in (
    (2, 1), (4, 1), (8, 1), (32, 1), (128, 1), (16, 8), (4, 32), (2, 4), (4, 2), (6, 1))])
SIZES = st.floats(1, 4e9)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(COLLECTIVES), SIZES, GROUPS, st.sampled_from(["nccl", "ncclx", "copy_engine"]), st.booleans())
def test_laws(kind, num_bytes, group, transport, reduces):
    base = cluster(reduces=reduces)
    found = seconds(kind, num_bytes, group, base, transport=transport)
    assert bound_seconds(kind, num_bytes, group, base) <= found
    assert found <= seconds(kind, num_bytes * 1.5, group, base, transport=transport)
    # monotone in bandwidth, latency and oversubscription: what is changed is felt, in the right direction
    assert seconds(kind, num_bytes, group, cluster(scale=2.0, reduces=reduces), transport=transport) <= found
    assert seconds(kind, num_bytes, group, cluster(oversubscription=8.0, reduces=reduces), transport=transport) >= found
    if kind != "all_reduce":
        assert found == seconds(kind, num_bytes, group, cluster(reduces=not reduces), transport=transport)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(COLLECTIVES), st.floats(1e6, 4e9))
def test_bulk_time_grows_with_the_group_and_outward(kind, num_bytes):
    base = cluster()
    inside = [seconds(kind, num_bytes, GroupShape(size=n), base) for n in (2, 4, 8)]
    assert inside == sorted(inside)
    assert inside[-1] < seconds(kind, num_bytes, GroupShape(size=16), base) < seconds(kind, num_bytes, GroupShape(size=128), base)
    # eight ranks on eight hosts have one NIC each; on one host they have NVLink
    assert seconds(kind, num_bytes, GroupShape(size=4, stride=8), base) > seconds(kind, num_bytes, GroupShape(size=4), base)


def test_spans_and_rates():
    base = cluster()
    host, zone, far = spans(GroupShape(size=128), base)
    assert [(s.tier.name, s.inner, s.outer) for s in (host, zone, far)] == [("nvlink", 1, 8), ("rdma", 8, 32), ("spine", 32, 128)]
    # 8 members share 8 NICs; 32 members' uplinks are oversubscribed four times
    assert (host.rate, zone.rate, far.rate) == (450e9, 8 * 50e9, 32 * 50e9 / 4)
    # 32 groups of one rank a zone share that uplink; alone, one is held back by its own NIC only
    (shared,) = spans(GroupShape(size=4, stride=32), base)
    (alone,) = spans(GroupShape(size=4, stride=32), base, active_groups=1)
    assert (shared.rate, alone.rate) == (50e9 / 4, 50e9)
    with pytest.raises(ValueError, match="no link tier joins a group of 256"):
        spans(GroupShape(size=256), base)


def test_groups_of_a_layout():
    groups = layout_groups(Layout(ddp=4, fsdp=32, ep=2, sparse_group=16, sparse_replicas=8))
    assert groups["ddp"] == GroupShape(size=4, stride=32) and groups["efsdp"] == GroupShape(size=16, stride=2)
    assert groups["sparse_replicas"] == GroupShape(size=8, stride=16) and groups["world"].size == 128


def test_a_group_of_one_and_an_empty_message_cost_nothing():
    assert collective_seconds("all_gather", 1e6, GroupShape(size=1), cluster()) == (0.0, "", "measured")
    assert collective_seconds("all_gather", 0.0, GroupShape(size=8), cluster())[0] == 0.0
    with pytest.raises(ValueError, match="did you mean 'all_gather'"):
        collective_seconds("all_gathr", 1e6, GroupShape(size=8), cluster())


def test_uneven_all_to_all_is_that_of_the_heaviest_rank():
    net = Network(cluster())
    even, uneven = (net.cost("all_to_all", n, GroupShape(size=32), max_over_mean=m).seconds for n, m in ((2e9, 1.0), (1e9, 2.0)))
    assert uneven == even


def test_a_calibration_says_what_unevenness_costs():
    """w: what the heaviest rank has more than the average counts so much; never less than what its link must carry."""
    sizes = [2.0**e for e in range(12, 32, 2)]
    curve = CollectiveCurve(collective="all_to_all", transport="nccl", group=2, link_bandwidth=450e9, bytes=tuple(sizes),
                            seconds=tuple(7e-6 + b / 400e9 for b in sizes))
    points = [(b, x, curve.at(b * (1 + 0.6 * (x - 1)), 450e9)[0]) for b in sizes for x in (1.0, 1.25, 1.9)]
    assert uneven_weight(curve, points) == pytest.approx(0.6) and uneven_weight(curve, points[::3]) is None
    host, group = cluster(hosts=1, per_host=2), GroupShape(size=2)
    samples = [Sample(op="all_to_all", variant="nccl", phase="step", features={"bytes": b, "group": 2.0}, seconds=s)
               for b, s in zip(curve.bytes, curve.seconds)]
    known = fit(Environment(device_name="unlisted", device_kind="cuda"), samples, device=GPU)
    for weight, expected in ((0.6, curve.at(2.0**28 * 1.54, 450e9)[0]), (0.0, 2.0**28 * 1.9 / 2 / 450e9)):
        net = Network(host, dataclasses.replace(known, constants={"uneven_weight": weight}))
        found = net.cost("all_to_all", 2.0**28, group, max_over_mean=1.9).seconds
        assert found == pytest.approx(max(expected, curve.at(2.0**28, 450e9)[0]), rel=1e-6)


def test_resharding_in_two_dimensions_is_two_exchanges():
    """S(0) -> S(1) over 16 x 8 ranks: an all-to-all along each axis, not a gather of everything."""
    base, whole = cluster(), 8e9
    local = whole / 128
    exchange = seconds("all_to_all", local, GroupShape(size=8), base) + seconds("all_to_all", local, GroupShape(size=16, stride=8), base)
    assert exchange < 0.2 * seconds("all_gather", whole, GroupShape(size=128), base)


# --- published measurements ---

@pytest.fixture(scope="module")
def table():
    return collectives.read_table(TABLE)


def test_bound_holds_for_every_published_row(table):
    assert collectives.bound_excess(table) <= 1.0


def test_four_gpus_from_two_and_eight(table):
    scored = collectives.score_one_host(table)
    large = scored[scored["bytes"] > collectives.SCORED_ABOVE]["error"].abs()
    assert len(large) > 250 and large.median() <= 0.08 and large.quantile(0.9) <= 0.20


def test_nvls_lifts_all_reduce_only_and_only_from_five_gpus():
    """Curves of 8 GPUs with busbw above the link's stand for no smaller group and no other collective."""
    device = dataclasses.replace(GPU, name="H200-SXM")
    on, off = cluster(device=device, hosts=1, zones=1, reduces=True), cluster(device=device, hosts=1, zones=1)
    size = 2.0**29
    busbw = {(n, net is on): size * wire_factor("all_reduce", n) / seconds("all_reduce", size, GroupShape(size=n), net)
             for n in (4, 8) for net in (on, off)}
    assert busbw[8, True] == pytest.approx(460e9, rel=0.02)
    assert busbw[8, False] < 0.85 * busbw[8, True]
    assert busbw[4, True] == busbw[4, False] == pytest.approx(348e9, rel=0.03)
    gather = size * wire_factor("all_gather", 8) / seconds("all_gather", size, GroupShape(size=8), on)
    assert gather == pytest.approx(337e9, rel=0.03)


def test_a_curve_of_one_collective_stands_for_no_other():
    curve = CollectiveCurve(collective="all_reduce", transport="nccl", group=8, link_bandwidth=450e9, bytes=(1e6, 1e9), seconds=(2e-5, 3e-3))
    assert one_host_seconds([curve], 8, 1e8, 450e9, in_network_reduction=False) is not None
    assert one_host_seconds([], 8, 1e8, 450e9, in_network_reduction=False) is None
    samples = [Sample(op="all_reduce", phase="step", features={"bytes": b, "group": 8.0}, seconds=s) for b, s in ((1e6, 1.0), (1e9, 2.0))]
    # an absurd all-reduce leaves all-gather alone
    calibration = fit(Environment(device_name="unlisted", device_kind="gpu"), samples, device=GPU)
    base = cluster()
    assert Network(base, calibration).cost("all_reduce", 1e6, GroupShape(size=8)).seconds == pytest.approx(1.0)
    assert Network(base, calibration).cost("all_gather", 1e6, GroupShape(size=8)) == Network(base).cost("all_gather", 1e6, GroupShape(size=8))


def test_curves_scale_with_the_link_and_say_so():
    curve = CollectiveCurve(collective="all_gather", transport="nccl", group=8, link_bandwidth=450e9, bytes=(1e3, 1e6, 1e9),
                            seconds=(1e-5, 2e-5, 3e-3))
    assert curve.at(1e6, 450e9) == (2e-5, "measured")
    value, source = curve.at(1e9, 900e9)
    assert value == pytest.approx(1e-5 + (3e-3 - 1e-5) / 2) and source == "extrapolated"
    assert curve.at(1.0, 450e9)[0] == 1e-5 and curve.at(2e9, 450e9) == (6e-3, "extrapolated")
    assert curve.at(3e4, 450e9)[1] == "interpolated"


def test_noise_never_makes_a_larger_message_cheaper():
    samples = [Sample(op="all_gather", phase="step", features={"bytes": b, "group": 4.0}, seconds=s)
               for b, s in ((1e3, 9e-6), (2e3, 2e-5), (4e3, 9e-6))]
    (curve,) = fit_curves(samples, link_bandwidth=450e9)
    assert list(curve.seconds) == sorted(curve.seconds) and curve.seconds[0] == pytest.approx(9e-6)


def test_bundled_curves_are_those_of_the_table(table):
    for system, device in collectives.DEVICES.items():
        rows = table[(table["system"] == system) & (table["nccl_dir"].astype(str) == collectives.BUNDLED_BUILD)]
        fresh = {(c.collective, c.group): c.seconds for c in collectives.curves(rows)}
        assert {(c.collective, c.group): c.seconds for c in published_curves(device)} == fresh
    assert published_curves("B200") == ()


def test_benchmark_writes_its_result(tmp_path, capsys):
    assert collectives.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "collectives.json").exists() and "median" in (tmp_path / "collectives.md").read_text()
    bad = tmp_path / "bad.csv"
    bad.write_text("system,op_name\nx,y\n")
    assert collectives.main(["--table", str(bad), "--out", str(tmp_path)]) == 2
    assert "missing column nccl_dir" in capsys.readouterr().err


# --- transports and gloo ---

def test_transports_differ_in_what_they_take_from_compute():
    base = cluster()
    shares = {name: Network(base, transport=name).cost("all_gather", 1e9, GroupShape(size=8)).share for name in ("nccl", "ncclx", "copy_engine")}
    assert shares["copy_engine"] < shares["ncclx"] < shares["nccl"] < 0.5
    assert shares["nccl"] - shares["copy_engine"] > 0.1
    # reductions need SMs under every transport, and copy engines stay inside the host
    reductions = {name: Network(base, transport=name).cost("reduce_scatter", 1e9, GroupShape(size=8)) for name in shares}
    assert reductions["nccl"] == reductions["ncclx"] == reductions["copy_engine"]
    far = GroupShape(size=32)
    assert Network(base, transport="copy_engine").cost("all_gather", 1e9, far) == Network(base).cost("all_gather", 1e9, far)
    with pytest.raises(ValueError, match="did you mean 'ncclx'"):
        Network(base, transport="ncclxx")


def test_a_measured_share_replaces_the_formula():
    chosen = contention.transport("nccl")
    assert contention.compute_share("all_gather", 1e9, 1e-3, GPU, chosen, {"collective_share/nccl/all_gather": 0.25}) == 0.25
    assert 0.3 < contention.compute_share("all_gather", 2 * 2**30, 3.89e-3, GPU, chosen) < 0.4


def test_copy_engines_have_the_curve_and_the_share_that_were_measured_for_them():
    host, group, sizes = cluster(hosts=1, per_host=2), GroupShape(size=2), [2.0**e for e in (20, 24, 28, 31)]
    rates, shares = {"": 550e9, "copy_engine": 630e9}, {"nccl": 0.28, "copy_engine": 0.06}
    samples = [Sample(op="all_gather", variant=v, phase="step", features={"bytes": b, "group": 2.0}, seconds=1e-5 + b / r)
               for v, r in rates.items() for b in sizes]
    samples += [Sample(op=f"{CONSTANT_PREFIX}collective_share", variant=f"{t}/all_gather", phase="step", features={}, seconds=s)
                for t, s in shares.items()]
    known = fit(Environment(device_name="unlisted", device_kind="cuda"), samples, device=GPU)
    for name, variant in (("nccl", ""), ("copy_engine", "copy_engine")):
        found = Network(host, known, name).cost("all_gather", 2.0**28, group)
        assert found.seconds == pytest.approx(1e-5 + 2.0**28 / rates[variant]) and found.share == shares[name] and found.source == "measured"
    assert Network(host, known, "copy_engine").cost("reduce_scatter", 2.0**28, group) == Network(host, known).cost("reduce_scatter", 2.0**28, group)


def test_gloo_on_a_cpu_uses_its_calibrated_curve():
    tier = LinkTier(name="loopback", scope="host", bandwidth=2e9, latency=1e-4)
    here = Cluster(name="local", device=CORE, num_hosts=1, devices_per_host=2, tiers=(tier,))
    samples = [Sample(op="all_gather", phase="step", features={"bytes": b, "group": 2.0}, seconds=2e-4 + b / 4e9) for b in (1e3, 1e5, 1e7)]
    calibration = fit(Environment(device_name="core", device_kind="cpu"), samples, device=CORE)
    assert collective_seconds("all_gather", 1e5, GroupShape(size=2), here, calibration) == (pytest.approx(2.25e-4), "loopback", "measured")
    # a link that is faster than stated is believed
    assert collective_seconds("all_gather", 1e7, GroupShape(size=2), here, calibration)[0] == pytest.approx(2e-4 + 1e7 / 4e9)
    assert collective_seconds("all_gather", 1e5, GroupShape(size=2), here)[2] == "roofline"


# --- imports ---

LOG = """# nThread 1 nGpus 2 minBytes 1024 maxBytes 2048 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   1 on      node-a device  0 [0x1b] NVIDIA H200
#  Rank  1 Group  0 Pid   1 on      node-a device  1 [0x43] NVIDIA H200
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           128     float    none      -1    12.50    0.08    0.04      0    12.00    0.08    0.04      0
  1073741824     134217728     float    none      -1   2070.0  518.72  259.36      0   2060.0  521.24  260.62    N/A
# Out of bounds values : 0 OK
"""


def test_nccl_tests_text():
    samples = parse_nccl_tests(LOG, collective="all_gather")
    assert [(s.op, s.variant, s.features, s.dtype) for s in samples] == [
        ("all_gather", "nccl", {"bytes": 1024.0, "group": 2.0}, "fp32"), ("all_gather", "nccl", {"bytes": 2.0**30, "group": 2.0}, "fp32")]
    assert [s.seconds for s in samples] == pytest.approx([12.5e-6, 2.07e-3])
    named = "# Collective test starting: alltoall_perf\n" + LOG.replace("node-a device  1", "node-b device  1")
    assert {(s.op, s.variant) for s in parse_nccl_tests(named)} == {("all_to_all", "nccl:2")}
    short = LOG.replace("    none      -1 ", "")
    assert [s.seconds for s in parse_nccl_tests(short, collective="all_to_all")] == pytest.approx([12.5e-6, 2.07e-3])


@pytest.mark.parametrize(("text", "message"), [
    (LOG, "before any `\\*_perf` program"), ("nothing here", "no nccl-tests measurement"),
    ("all_gather_perf\n" + "\n".join(line for line in LOG.splitlines() if "Rank" not in line), "group size and hosts are unknown"),
    ("all_gather_perf\n" + LOG.replace("0.04      0    12.00", "0.04      7    12.00"), "line 11: nccl-tests reports 7 wrong values"),
    ("all_gather_perf\n" + LOG.replace("12.50", "x"), "line 11: not a whole nccl-tests row"),
])
def test_bad_logs_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_nccl_tests(text)


def test_csv(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("collective,group,bytes,seconds,hosts\nalltoall,32,1048576,1e-4,4\nall_gather,8,2048,1.2e-5,\n")
    assert [(s.op, s.variant, s.seconds) for s in read_collectives(path)] == [("all_to_all", "nccl:4", 1e-4), ("all_gather", "nccl", 1.2e-5)]
    for text, message in (("collective,group,bytes\n", "missing column seconds"),
                          ("collective,group,bytes,seconds\nall_gathr,2,1,1\n", "did you mean"),
                          ("collective,group,bytes,seconds\nall_gather,2,nan,1\n", "line 2: bytes"),
                          ("collective,group,bytes,seconds\nall_gather,2,8,0\n", "line 2: seconds"),
                          ("collective,group,bytes,seconds\n", "no rows")):
        with pytest.raises(ValueError, match=message):
            parse_csv(text)


@pytest.mark.parametrize(("changes", "message"), [
    ({"collective": "broadcast"}, "none of"), ({"group": 1}, "group >= 2"), ({"bytes": (2.0, 1.0)}, "ascend"), ({"seconds": (1.0,)}, "as many"),
    ({"seconds": (1.0, float("nan"))}, "finite"),
])
def test_bad_curves_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CollectiveCurve(**{"collective": "all_gather", "transport": "nccl", "group": 2, "link_bandwidth": 1e9, "bytes": (1.0, 2.0),
                           "seconds": (1.0, 2.0), **changes})
