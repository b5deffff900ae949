"""Logs in the form that nccl-tests prints, whole and broken."""
import pytest

from costmodel.comms_import import parse_csv, parse_nccl_tests

SIZES = (2**20, 2**24, 2**30)


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
