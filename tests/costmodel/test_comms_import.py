"""Logs in the form that nccl-tests prints, whole and broken."""
import dataclasses

import pytest

from costmodel.calibration import fit, with_collectives
from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.comms import GroupShape, Network
from costmodel.comms_import import parse_csv, parse_nccl_tests
from costmodel.samples import Environment, Sample

SIZES = (2**20, 2**24, 2**30)
GPU = Device(name="H200-SXM", kind="gpu", peak_flops={"bf16": 989e12, "fp32": 67e12}, memory_bytes=141e9, memory_bandwidth=4.8e12)
NVLINK = LinkTier(name="nvlink", scope="host", bandwidth=450e9, latency=3e-6)
LINEAR = fit(Environment(device_name="H200-SXM", device_kind="cuda"),
             [Sample(op="linear", phase="forward", features={"m": m, "k": 64.0, "n": 64.0}, seconds=1e-5) for m in (64.0, 128.0)], device=GPU)


def log(program: str, rows: list[str], *, ranks: int = 8, hosts: int = 1, last: str = "#wrong") -> str:
    lines = [f"# Collective test starting: {program}", "# nThread 1 nGpus 8 minBytes 1048576 maxBytes 1073741824", "#", "# Using devices"]
    lines += [f"#  Rank {i:2d} Group  0 Pid  {20000 + i} on   node{i * hosts // ranks} device  {i % 8} [0000:0{i % 8}:00] NVIDIA H200"
              for i in range(ranks)]
    lines += ["#", "#       out-of-place                       in-place",
              f"#       size         count      type   redop    root     time   algbw   busbw {last}     time   algbw   busbw {last}",
              "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"]  # fmt: skip
    return "\n".join([*lines, *rows, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 229.36", "#"]) + "\n"


def row(size: int, *, wrong: str = "0", redop: str = "sum     -1", time: float | None = None) -> str:
    seconds = time or 8 + size / 250e3
    figures = f"{seconds:7.2f} {size / seconds / 1e3:7.2f} {1.75 * size / seconds / 1e3:7.2f} {wrong:>6}"
    return f"{size:12d} {size // 4:12d}     float     {redop} {figures} {figures}"


def test_several_programs_in_one_log():
    text = "".join(log(program, [row(size) for size in SIZES], hosts=hosts)
                   for program, hosts in (("all_gather_perf", 1), ("alltoall_perf", 1), ("all_reduce_perf", 2)))  # fmt: skip
    found = parse_nccl_tests(text)
    assert [(s.op, s.variant) for s in found] == [("all_gather", "nccl")] * 3 + [("all_to_all", "nccl")] * 3 + [("all_reduce", "nccl:2")] * 3
    assert [s.seconds for s in found[:3]] == pytest.approx([1e-6 * (8 + size / 250e3) for size in SIZES], rel=1e-3)


def test_rows_of_another_operation_are_not_taken_for_the_one_before():
    """Broadcasts behind all-to-alls once counted as twelve all-to-alls."""
    text = log("alltoall_perf", [row(size) for size in SIZES]) + log("broadcast_perf", [row(size) for size in SIZES])
    with pytest.raises(ValueError, match="'broadcast_perf' is none of all_gather"):
        parse_nccl_tests(text)


def test_messages_of_no_bytes_are_passed_over():
    empty = "           0             0     float    none      -1     6.12    0.00    0.00      0     6.05    0.00    0.00      0"
    assert [s.features["bytes"] for s in parse_nccl_tests(log("all_gather_perf", [empty, row(2**20)]))] == [2.0**20]


def test_the_column_of_older_versions_is_a_difference_not_a_count():
    old = [row(2**20, wrong="4e-07", redop="sum"), row(2**24, wrong="4e-07", redop="sum")]
    assert len(parse_nccl_tests(log("all_reduce_perf", old, last=" error"))) == 2
    assert len(parse_nccl_tests(log("all_gather_perf", [row(2**20, wrong="0e+00", redop="")]))) == 1
    with pytest.raises(ValueError, match="reports 3 wrong values at 16777216"):
        parse_nccl_tests(log("all_reduce_perf", [row(2**20), row(2**24, wrong="3")]))


@pytest.mark.parametrize("broken", [row(2**24)[:52], row(2**24)[:57], row(2**24)[:63], row(2**24).replace("75.11", "7.51", 1),
                                    row(2**24, time=float("inf"))])  # fmt: skip
def test_rows_cut_off_or_garbled_are_refused_with_their_line(broken):
    with pytest.raises(ValueError, match="line 18: "):
        parse_nccl_tests(log("all_reduce_perf", [row(2**20), broken]))


@pytest.mark.parametrize(("cells", "words"), [
    ("all_reduce,1,1024,1e-5,1,nccl", "group: an integer >= 2"), ("all_reduce,2.5,1024,1e-5,1,nccl", "group: an integer >= 2"),
    ("all_reduce,8,0,1e-5,1,nccl", "bytes: a finite number > 0"), ("all_reduce,8,1024,inf,1,nccl", "seconds: a finite number > 0"),
    ("all_reduce,8,1024,1e-5,0,nccl", "hosts: an integer >= 1"), ("all_reduce,8,1024,1e-5,3,nccl", "does not divide over 3 hosts"),
    ("all_reduce,8,1024,1e-5,1,nclx", "did you mean 'ncclx'"), ("all_reduce,8,1024,1e-5,1,nccl,7", "more cells"),
])  # fmt: skip
def test_csv_cells_that_no_measurement_has(cells, words):
    with pytest.raises(ValueError, match=f"line 2: .*{words}"):
        parse_csv(f"collective,group,bytes,seconds,hosts,transport\n{cells}\n")


def test_csv_columns():
    with pytest.raises(ValueError, match=r"'secnds' is unknown \(did you mean 'seconds'"):
        parse_csv("collective,group,bytes,seconds,secnds\nall_reduce,8,1024,1e-5,1\n")
    assert len(parse_csv("\ufeffcollective,group,bytes,seconds\nall_reduce,8,1024,1e-5\n")) == 1


def test_what_was_imported_over_hosts_is_what_is_predicted_there():
    """Such curves once counted as measured on NVLink: on NICs of a ninth of its rate they made nine times the time that had been measured."""
    nic = LinkTier(name="rdma", scope="cluster", bandwidth=50e9, latency=1e-5)
    there = Cluster(name="two hosts", device=GPU, num_hosts=2, devices_per_host=8, tiers=(NVLINK, nic))
    found = parse_nccl_tests(log("all_reduce_perf", [row(size, time=30 + size / 150e3) for size in SIZES], ranks=16, hosts=2))
    network = Network(there, with_collectives(LINEAR, found))
    for sample in found:
        cost = network.cost("all_reduce", sample.features["bytes"], GroupShape(size=16))
        assert (cost.seconds, cost.source, cost.algorithm) == (pytest.approx(sample.seconds), "measured", "curve")
    one = dataclasses.replace(there, num_hosts=1, tiers=(NVLINK,))
    assert Network(one, with_collectives(LINEAR, found)).cost("all_reduce", 2**24, GroupShape(size=8)) == Network(one).cost(
        "all_reduce", 2**24, GroupShape(size=8))


def test_collectives_that_were_not_imported_keep_their_published_curves():
    host = Cluster(name="one host", device=GPU, num_hosts=1, devices_per_host=8, tiers=(NVLINK,))
    found = with_collectives(LINEAR, parse_nccl_tests(log("all_reduce_perf", [row(size) for size in SIZES])))
    own, published = Network(host, found), Network(host)
    eight = GroupShape(size=8)
    assert own.cost("all_gather", 2**24, eight) == published.cost("all_gather", 2**24, eight)
    assert published.cost("all_gather", 2**24, eight).algorithm == "curve"
    assert own.cost("all_reduce", 2**24, eight).seconds == pytest.approx(1e-6 * (8 + 2**24 / 250e3), rel=1e-3)
    assert own.cost("all_reduce", 2**24, eight).seconds != published.cost("all_reduce", 2**24, eight).seconds
