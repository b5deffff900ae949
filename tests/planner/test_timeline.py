"""timeline.json.gz: loads as a Chrome trace, threads never overlap, predicted and measured ranks are there."""
import gzip
import itertools
import json

import pytest

from costmodel.accounting import simulate_ranks
from planner.cli import main
from planner.configure import default_plan
from planner.diagnose import diagnose
from planner.report import timeline
from planner.scenario import load_scenario
from tests.planner.made_traces import cpu_rank, gpu_rank, write
from tests.planner.test_cli import TINY


def threads(events):
    found = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return found


@pytest.fixture
def body(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY.replace("kind: fixed, maximum: 8", "kind: uniform, minimum: 1, maximum: 16"))
    assert main(["estimate", str(tmp_path / "tiny.yaml"), "--quiet", "-o", str(tmp_path / "out")]) == 0
    write(tmp_path / "out", cpu_rank(0, sleeps=20), cpu_rank(1, sleeps=20))
    found = diagnose(tmp_path / "out")
    path = timeline.write(tmp_path / timeline.FILE, found.ranks, found.steps)
    return json.loads(gzip.decompress(path.read_bytes())), found


def test_events_of_a_thread_never_overlap(body):
    lanes = threads(body[0]["traceEvents"])
    assert len(lanes) > 6
    for spans in lanes.values():
        for (_, end, name), (start, _, after) in itertools.pairwise(sorted(spans)):
            assert start >= end - 1e-6, (name, after)


def test_predicted_and_measured_ranks_stand_side_by_side(body):
    document, found = body
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert list(names.values()) == ["predicted, average rank", "predicted, slowest rank", "measured, rank 0", "measured, rank 1"]
    ends = {pid: max(e["ts"] + e["dur"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == pid) for pid in names}
    assert ends[0] == pytest.approx(found.ranks.timeline.step_seconds * 1e6, rel=1e-3)
    assert ends[2] == pytest.approx(240e3, rel=1e-6)  # two steps of 120 ms
    goes = [e for e in document["traceEvents"] if e.get("cat") == "synchronisation" and e["pid"] == 2]
    assert sum(e["dur"] for e in goes) == pytest.approx(40e3)


def test_the_format_that_viewers_parse(body):
    """Chrome's keys and Kineto's: complete events ascend on their thread, arrows have both ends, HTA finds a rank, a step and streams."""
    document, _ = body
    assert '"rank": 0' in json.dumps(document["distributedInfo"]) and document["schemaVersion"] == 1
    needed = {"X": {"cat", "name", "pid", "tid", "ts", "dur"}, "M": {"name", "pid", "args"}, "s": {"id", "cat", "name", "pid", "tid", "ts"}}
    needed["f"] = needed["s"] | {"bp"}
    for event in document["traceEvents"]:
        assert needed[event["ph"]] <= set(event), event
    for spans in threads(document["traceEvents"]).values():
        assert spans == sorted(spans)
    kernels = [e for e in document["traceEvents"] if e.get("cat") == "kernel" and "stream" in e.get("args", {})]
    assert kernels and {e["pid"] for e in kernels} == {0} and all(e["args"]["correlation"] > 0 for e in kernels)
    assert any(e["name"].startswith("ncclDevKernel ") for e in kernels)
    assert {e["name"] for e in document["traceEvents"] if e.get("cat") == "user_annotation"} == {"ProfilerStep#0", "ProfilerStep#1"}


def test_arrows_go_from_a_launch_to_its_kernel(tmp_path):
    plan = default_plan(load_scenario("gem-8xh200", with_variants=False))[0]
    path = timeline.write(tmp_path / timeline.FILE, simulate_ranks(plan, None), ())
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert len(starts) > 10 and starts.keys() == ends.keys()
    assert all(starts[i]["ts"] <= ends[i]["ts"] and starts[i]["pid"] == ends[i]["pid"] for i in starts)
    inside = {(e["pid"], e["tid"], e["ts"]): e["cat"] for e in events if e["ph"] == "X"}
    for arrows, category in ((starts, "cuda_runtime"), (ends, "kernel")):
        assert {inside[e["pid"], e["tid"], e["ts"]] for e in arrows.values()} == {category}


def test_the_rank_is_written_as_hta_looks_for_it(tmp_path, body):
    path = timeline.write(tmp_path / "t.json.gz", body[1].ranks, body[1].steps)
    assert b'"rank": 0' in gzip.decompress(path.read_bytes())[:200]


def test_kernels_keep_their_streams(tmp_path):
    found = diagnose(write(tmp_path, gpu_rank())[0])
    path = timeline.write(tmp_path / timeline.FILE, found.ranks, found.steps)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"stream 7", "stream 20", "phases", "time goes to"} <= lanes


def test_the_same_content_gives_the_same_bytes(tmp_path, body):
    paths = [timeline.write(tmp_path / f"{i}.json.gz", body[1].ranks, body[1].steps) for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
