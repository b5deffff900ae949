"""Metric tree, accounting of traces, planted faults in traces, and damaged folders."""
import json

import pytest

from costmodel.plan import Plan
from planner import traces, tracesteps
from planner.cli import main
from planner.diagnose import LEVELS, diagnose
from planner.errors import UsageError
from tests.planner.made_traces import cpu_rank, event, gpu_rank, write
from tests.planner.test_cli import TINY


@pytest.fixture
def folder(tmp_path):
    """A folder with a plan of two CPU ranks."""
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(TINY)
    assert main(["estimate", str(scenario), "--quiet", "-o", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def seconds(found):
    return {name: round(value * 1e3, 1) for name, value in found.measured.seconds.items()}


def test_a_plan_alone_is_simulated_and_the_rest_unknown(folder):
    found = diagnose(folder)
    assert found.measured is None and found.phases is None and found.predicted.step > 0
    assert [r.level for r in found.tree] == sorted((r.level for r in found.tree), key=LEVELS.index)
    assert {r.level for r in found.tree} == set(LEVELS)
    for rung in found.tree:
        assert (rung.value is None) == (rung.evidence == "unknown"), rung
        assert rung.source or rung.missing, rung
        assert rung.evidence != "measured", rung


def test_traces_of_cpu_ranks(folder):
    write(folder, cpu_rank(0), cpu_rank(1))
    found = diagnose(folder)
    assert seconds(found) == {"input": 10.0, "host": 30.0, "compute": 30.0, "communication:loop": 10.0, "memory_bound": 20.0}
    assert found.measured.unattributed == 0
    assert found.activations == {"history.0": {"largest": 9.0, "rms": 1.0}}


def test_a_slow_rank_is_named(folder):
    write(folder, cpu_rank(0, sleeps=50), cpu_rank(1, sleeps=50))
    found = diagnose(folder)
    assert seconds(found)["synchronisation"] == 50 and found.binding == "synchronisation" and found.slowest_rank == 1
    assert seconds(found)["communication:loop"] == 10


def test_a_rank_with_more_work_is_load_balance(folder):
    write(folder, cpu_rank(0, sleeps=50, events=100), cpu_rank(1, sleeps=50, events=200))
    assert diagnose(folder).binding == "load_balance"


def test_ranks_of_several_hosts_have_no_common_clock(folder):
    second = cpu_rank(1, sleeps=50)
    second["host_name"] = "two"
    write(folder, cpu_rank(0, sleeps=50), second)
    found = diagnose(folder)
    assert "synchronisation" not in found.measured.seconds and any("clocks differ" in note for note in found.notes)


def test_padding_is_a_share_of_device_time(folder):
    body = cpu_rank(0)
    for work in body["planner"]["steps"].values():
        work.update(computed=200.0, computed_pairs=400.0)
    write(folder, body)
    found = diagnose(folder)
    assert seconds(found)["padding"] > 14.9  # half of the product in the region, and the forward's share of the add
    assert found.binding == "load_balance"


def test_an_op_with_others_inside_works_itself(folder):
    """addmm multiplies in its own time after a copy of its bias; an op written in Python only dispatches."""
    body = cpu_rank(0)
    inside = [e for e in body["traceEvents"] if e["name"] == "aten::mm"]
    for op in inside:
        op["name"] = "aten::addmm"
        body["traceEvents"].append({**op, "name": "aten::copy_", "dur": 1e3})
    write(folder, body)
    found = seconds(diagnose(folder))
    assert found["compute"] == pytest.approx(29, abs=0.1) and found["memory_bound"] == pytest.approx(21, abs=0.1)
    for op in inside:
        op["name"] = "own::addmm"
    write(folder, body)
    assert seconds(diagnose(folder)).get("compute", 0.0) == 0


@pytest.mark.parametrize(("linked", "padding"), [(True, 15 + 10), (False, 15)])
def test_backward_is_padded_where_its_forward_op_was(folder, linked, padding):
    """The add of backward belongs to the product in the sequence region, or to an op after it; half of what was computed is padding."""
    body = cpu_rank(0)
    for work in body["planner"]["steps"].values():
        work.update(computed=200.0, computed_pairs=200.0)
    for step in range(2):
        at = 100 * step
        body["traceEvents"] += [event("aten::mul", "cpu_op", at + 46, at + 47, **{"Sequence number": 2}),
                                event("autograd::engine::evaluate_function: X", "cpu_op", at + 69, at + 91,
                                      **{"Sequence number": 1 if linked else 2})]
    for op in body["traceEvents"]:
        if op["name"] == "aten::mm":
            op["args"]["Sequence number"] = 1
    write(folder, body)
    assert seconds(diagnose(folder))["padding"] == pytest.approx(padding, abs=0.1)


def test_a_gpu_trace(tmp_path):
    path, = write(tmp_path, gpu_rank())
    found = diagnose(path)
    assert {n: round(v * 1e3, 1) for n, v in found.measured.seconds.items()} == {
        "compute": 35.0, "recompute": 10.0, "memory_bound": 20.0, "communication:link": 15.0, "host": 16.0, "unattributed": 4.0}
    assert found.plan is None and found.tree == ()


def test_another_trainers_steps(tmp_path):
    body = gpu_rank()
    body["traceEvents"][0]["name"] = "ProfilerStep#3"
    trace = traces.read(write(tmp_path, body)[0])
    assert trace.steps()[0][0] == 3
    assert tracesteps.rank_steps([trace], None)[0][0][0].step == 3


@pytest.mark.parametrize("cut", [0.5, 0.9])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_trace_is_read_up_to_its_end(folder, cut, zipped):
    path, _ = write(folder, cpu_rank(0, steps=20), cpu_rank(1, steps=20), zipped=zipped)
    path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * cut)])
    found = diagnose(folder)
    assert any("rank-0" in note and ("truncated" in note or "ends early" in note) for note in found.notes)
    assert found.measured is not None and found.measured.step > 0


@pytest.mark.parametrize("content", [b"", b"{}", b"hello", b'{"traceEvents": []}', b'{"a": {"traceEvents": 3}}', b"\x1f\x8bxx", b"[]"])
def test_what_is_no_trace_is_left_out_and_the_plan_is_shown(folder, content):
    (folder / "traces").mkdir()
    (folder / "traces" / "rank-0.json").write_bytes(content)
    found = diagnose(folder)
    assert found.measured is None and found.predicted is not None
    assert any("left out" in note and "rank-0.json" in note for note in found.notes)


def test_a_chunk_boundary_inside_an_event(tmp_path, monkeypatch):
    path, = write(tmp_path, cpu_rank(0, steps=5), zipped=False)
    whole = traces.read(path)
    monkeypatch.setattr(traces, "_CHUNK", 61)
    pieces = traces.read(path)
    assert pieces.ts.tolist() == whole.ts.tolist() and pieces.meta == whole.meta and not pieces.notes


def test_a_result_of_another_version_or_plan(folder):
    (folder / "result.json").write_text(json.dumps({"schema_version": 99}))
    assert any("schema_version 1" in note for note in diagnose(folder).notes)
    identity = Plan.load(folder / "plan.json").identity()
    body = {"schema_version": 1, "plan_identity": identity, "environment": {}, "status": "failed", "world_size": 2, "steps": 3, "warmup_steps": 0,
            "message": "loss is nan"}
    (folder / "result.json").write_text(json.dumps(body))
    found = diagnose(folder)
    assert any("failed after 3 steps: loss is nan" in note for note in found.notes) and found.result.status == "failed"
    (folder / "result.json").write_text(json.dumps({**body, "plan_identity": "other"}))
    found = diagnose(folder)
    assert found.result is None and any("measured for plan other" in note for note in found.notes)


def test_neither_plan_nor_trace_is_an_error(tmp_path, capsys):
    with pytest.raises(UsageError, match="no such file"):
        diagnose(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_trace_without_steps_says_so(tmp_path):
    path, = write(tmp_path, {"traceEvents": [event("aten::mm", "cpu_op", 0, 1)]})
    assert any("no `step:N`" in note for note in diagnose(path).notes)


def test_the_verb(folder, capsys):
    write(folder, cpu_rank(0, sleeps=50), cpu_rank(1, sleeps=50))
    assert main(["diagnose", str(folder), "--no-levers"]) == 0
    shown = capsys.readouterr().out
    assert "bound by synchronisation" in shown and "the others wait for rank 1" in shown and "\x1b[" not in shown
    assert main(["diagnose", str(folder), "--json", "--quiet", "--time-limit", "0.3"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["binding"] == "synchronisation" and body["evidence"] == "measured"
    assert sum(body["measured"]["seconds"].values()) == pytest.approx(body["measured"]["step_s"])
    gains = [lever["speedup"] or 0.0 for lever in body["levers"]]
    assert len(gains) >= 6 and gains == sorted(gains, reverse=True)
    faster = next(lever for lever in body["levers"] if lever["name"] == "kernels x2 (compute)")
    assert faster["speedup"] > 1 and faster["next_constraint"]
