"""Fidelity on a GPU: the space, the stages on a small plan (on this machine's CPU), and the figures of known runs."""
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import fidelity_gpu, fidelity_report, results
from benchmarks import fidelity_gpu_space as space
from benchmarks.fidelity_report import Run, kendall, regret, wilson
from benchmarks.fidelity_space import _subject
from costmodel.calibration import fit
from costmodel.cluster import Cluster, Device
from costmodel.codec import encode
from costmodel.estimate import estimate
from costmodel.hosttime import SLOW_SHARE
from costmodel.plan import Plan
from costmodel.runresult import PHASES
from costmodel.samples import Environment, Sample
from planner.scenario import load_scenario

H200 = Device(name="H200-SXM", kind="gpu", peak_flops={"fp32": 67e12, "bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12, num_sms=132,
              l2_bytes=50e6, host_link_bandwidth=64e9)
CLUSTER = Cluster(name="one", device=H200, num_hosts=1, devices_per_host=1, tiers=())


def small_plan(**options) -> Plan:
    model, workload = _subject("tiny", {
        "kind": "self_attention", "dim": 32, "heads": 2, "depth": 1, "mlp_factor": 2, "num_tables": 2, "rows": 50, "table_dim": 16, "maximum": 12,
        "length_kind": "uniform", "global_batch": 8, "dense": 4,
    })  # fmt: skip
    return space._one(model, workload, CLUSTER, **options)


def test_draws_repeat_are_legal_and_no_calibration_subject():
    subjects = {space._subject_hash(p.model, p.workload) for p in space.calibration_plans(CLUSTER)}
    for group in range(4):
        plans = space.draw_group(CLUSTER, seed=3, group=group)
        assert plans == space.draw_group(CLUSTER, seed=3, group=group)
        assert len({p.identity() for p in plans}) == len(plans) >= 5
        assert len({(p.local_batch * p.accumulation, space._subject_hash(p.model, p.workload)) for p in plans}) == 1
        layer = plans[0].model.sequences[0].layers[0]
        assert layer.head_dim in (64, 128) and layer.heads * layer.head_dim == plans[0].model.dim
        assert all(space._subject_hash(p.model, p.workload) not in subjects for p in plans)


def test_plans_are_predicted_run_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity_gpu, "RUN_SECONDS", 0.0)
    monkeypatch.setattr(fidelity_gpu, "MIN_STEPS", 3)
    samples = [Sample(op="linear", phase=p, features={"m": m, "k": 32.0, "n": 32.0}, dtype="bf16", seconds=1e-5) for p in ("forward", "backward")
               for m in (10.0, 100.0)]
    calibration = fit(Environment(device_name=H200.name, device_kind="cuda"), samples, device=H200)
    paths = []
    for i, plan in enumerate([small_plan(), small_plan(checkpoint="full"), small_plan(precision="fp32")]):
        paths.append(tmp_path / f"{'residual' if i == 2 else 'scored'}-1-0-{i}" / "plan.json")
        paths[-1].parent.mkdir()
        dataclasses.replace(plan, prediction=encode(estimate(plan, calibration))).save(paths[-1])
    fidelity_gpu.run(paths, torch.device("cpu"), until=math.inf)
    before = paths[0].parent.joinpath("run.json").read_text()
    fidelity_gpu.run(paths, torch.device("cpu"), until=math.inf)  # what has a result is not run again
    assert paths[0].parent.joinpath("run.json").read_text() == before
    residual, scored, failed = fidelity_gpu.load_runs(paths)
    assert len(residual) == 1 and len(scored) == 2 and not failed
    fidelity_gpu.report(paths, tmp_path, calibration, out=tmp_path, command="test")
    found = {row["name"]: row for row in json.loads((tmp_path / "fidelity-h200.json").read_text())["rows"]}
    assert found["configurations scored"]["value"] == 2 and not found["configurations scored"]["passed"]
    assert found["step time, absolute error: worst"]["value"] == pytest.approx(100 * max(abs(s.error) for s in scored))
    assert "plan scored-1-0-1" in found
    run = json.loads(before)
    assert len(run["pieces_s"]) == len(run["steps_s"]) == 3 * len(run["visits_s"]) == 3 * fidelity_gpu.VISITS
    assert all(a > 0 and b > 0 for a, b in run["pieces_s"])
    assert found["host while plans ran: times slower than at full speed, mean over steps"]["value"] >= 1.0
    assert not any("told of the host's speed" in name for name in found)  # a calibration that does not tell it
    where = {"date": "2026-11-30T18:00:00+00:00", "commit": "abc", "environment": {**results.environment(), "device": "NVIDIA H200"}}
    (tmp_path / fidelity_gpu.MEASURED).write_text(json.dumps(where))
    fidelity_gpu.report(paths, tmp_path, calibration, out=tmp_path, command="test")  # elsewhere than where it was measured
    document = json.loads((tmp_path / "fidelity-h200.json").read_text())
    assert (document["environment"]["device"], document["commit"], document["rows"][0]["commit"]) == ("NVIDIA H200", "abc", "abc")


def test_a_typical_step_is_no_jump_between_two_speeds():
    """The median of steps at two speeds is one or the other as one step more is slow; a stray step in ten does not count."""
    fast, slow = [1.0] * 10, [2.0] * 10
    assert fidelity_report.typical(fast + slow) == pytest.approx(1.5)
    assert fidelity_report.typical([*fast[:9], 50.0]) == pytest.approx(1.0) and fidelity_report.typical([1.0, 2.0]) == pytest.approx(1.5)


def visit(step: float, *, reserved: float = 1.0, slow: float = 1.0) -> dict:
    return {"measured": {"step_time_s": {"median": step, "mean": step, "p10": step, "p90": step}, "phases_s": {"forward": step},
                         "memory_bytes": {"reserved": reserved, "peak_allocated": None}, "examples_per_second": 10.0 / step},
            "steps_s": [step] * 3, "visits_s": [step], "visits_host_s": {"forward": [step / 2]}, "visits_device_s": {"forward": [step]},
            "pieces_s": [[slow, slow]] * 3, "visits_slow": [slow], "full_speed_s": 1.0, "final_loss": 1.0, "held_before": 0}  # fmt: skip


def test_visits_of_a_plan_are_merged():
    found = fidelity_gpu.merged(visit(1.0, reserved=5.0), visit(2.0, reserved=4.0))
    found = fidelity_gpu.merged(found, visit(3.0, reserved=6.0))
    assert found["visits_s"] == found["visits_device_s"]["forward"] == [1.0, 2.0, 3.0] and found["visits_host_s"]["forward"] == [0.5, 1.0, 1.5]
    assert found["steps_s"] == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    assert len(found["pieces_s"]) == 9 and found["visits_slow"] == [1.0] * 3 and found["full_speed_s"] == 1.0
    measured = found["measured"]
    assert measured["step_time_s"]["median"] == measured["phases_s"]["forward"] == pytest.approx(2.0)
    assert measured["memory_bytes"] == {"reserved": 6.0, "peak_allocated": None} and measured["examples_per_second"] == pytest.approx(5.0)


def test_a_disturbed_visit_does_not_count_once_two_others_agree():
    run = known_run("a", predicted=1.0, measured=1.0)
    found = {**run.found, "steps_s": [1.0, 1.5, 1.01], "visits_s": [1.0, 1.5, 1.01]}
    assert dataclasses.replace(run, found=found).measured == 1.01
    assert dataclasses.replace(run, found={**found, "visits_s": [1.0, 1.5]}).noise > run.noise


def test_who_is_visited_again(tmp_path):
    """First those that host and device make in nearly the same time, three times, then the others once more; then those that are near and those whose
    visits or whose host's speeds differ, the least visited first; never a plan that failed."""
    def put(name: str, found: dict, maker: str, device: float) -> Path:
        path = tmp_path / name / "plan.json"
        path.parent.mkdir()
        plan = small_plan()
        prediction = {**encode(estimate(plan, None)), "maker": maker, "host": 1.0, "device": device}
        dataclasses.replace(plan, prediction=prediction).save(path)
        (path.parent / fidelity_gpu.RUN).write_text(json.dumps(found))
        return path

    steady, host, near, unsteady, uneven, _ = paths = [
        put("steady", visit(1.0), "device", 2.1), put("host", visit(1.0), "host", 0.2), put("near", visit(1.0), "device", 1.9),
        put("unsteady", visit(1.0), "device", 9.0), put("uneven", visit(1.0), "device", 9.0), put("failed", {"failed": "out of memory"}, "host", 1.0)]
    again = lambda path, step, slow=1.0: (path.parent / fidelity_gpu.RUN).write_text(
        json.dumps(fidelity_gpu.merged(json.loads((path.parent / fidelity_gpu.RUN).read_text()), visit(step, slow=slow))))
    assert fidelity_gpu.next_visits(paths) == [host, near]
    again(host, 1.0)
    assert fidelity_gpu.next_visits(paths) == [near]  # once around before one of them runs again
    again(near, 1.0)
    assert fidelity_gpu.next_visits(paths) == [host, near]
    again(host, 1.0)
    again(near, 1.0)
    assert fidelity_gpu.next_visits(paths) == [steady, unsteady, uneven]
    again(steady, 1.01)
    again(unsteady, 1.5)
    again(uneven, 1.0, slow=1.6)
    assert fidelity_gpu.next_visits(paths) == [unsteady, uneven]
    again(unsteady, 1.0)
    assert fidelity_gpu.next_visits(paths) == [uneven]
    again(uneven, 1.0)
    for _ in range(2):
        assert fidelity_gpu.next_visits(paths) == [host, near, unsteady, uneven]
        for path in (host, near, unsteady, uneven):
            again(path, 1.0)
    assert fidelity_gpu.next_visits(paths) == []


def test_the_kept_cluster_is_the_scenario_s():
    cluster = load_scenario(Path(fidelity_gpu.SCENARIO)).cluster
    assert fidelity_gpu.cluster() == dataclasses.replace(cluster, memory_budget=None)


def test_residual_plans_are_spread_among_those_to_score(tmp_path):
    names = [name for name, _ in fidelity_gpu.drawn(CLUSTER, seed=3, count=10, residuals=4)]
    assert len(set(names)) == 14 and sum(name.startswith("scored-3-") for name in names) == 10
    order = [path.parent.name for path in fidelity_gpu.in_turns(tmp_path / name / "plan.json" for name in sorted(names))]
    assert [n for n in order if n.startswith("scored")] == [n for n in names if n.startswith("scored")]
    assert 0 < sum(name.startswith("residual") for name in order[:7]) < 4


def test_nothing_starts_after_the_time_is_over(tmp_path, capsys):
    path = tmp_path / "scored-1-0-0" / "plan.json"
    path.parent.mkdir()
    dataclasses.replace(small_plan(), prediction=encode(estimate(small_plan(), None))).save(path)
    fidelity_gpu.run([path], torch.device("cpu"), until=0.0)
    assert "out of time" in capsys.readouterr().out and not (path.parent / "run.json").exists()


def known_run(name: str, *, predicted: float, measured: float, jitter: float = 0.0, group: str = "g") -> Run:
    plan = small_plan()
    prediction = encode(estimate(plan, None))
    prediction["step_time"]["value"] = predicted
    steps = [measured - jitter, measured, measured + jitter]
    found = {"measured": {"step_time_s": {"median": measured}, "memory_bytes": {"peak_allocated": 100.0, "reserved": 110.0}}, "steps_s": steps,
             "visits_s": [measured], "visits_device_s": {name: [measured / len(PHASES)] for name in PHASES}, "context_bytes": 10.0}
    return Run(name=name, group=group, plan=dataclasses.replace(plan, prediction=prediction), found=found)


def test_predictions_are_told_of_the_host_s_speed(monkeypatch):
    """A diagnosis of steps that take as long as the host is slow: predicted at the expected speed, measured at others, told of it."""
    calibration = fit(Environment(device_name=H200.name, device_kind="cuda"), [
        Sample(op="linear", phase="forward", features={"m": 10.0, "k": 32.0, "n": 32.0}, dtype="bf16", seconds=1e-5),
        Sample(op="constant:host", variant="slow", phase="step", features={}, seconds=1.25)], device=H200)
    monkeypatch.setattr(fidelity_report, "estimate", lambda plan, known: type("Made", (), {"step_time": type("Time", (), {
        "value": known.constants["host/slow"]})()})())  # fmt: skip
    runs = []
    for name, speeds in (("a", (1.0, 1.2, 2.0)), ("b", (2.0, 2.0, 1.9))):
        run = known_run(name, predicted=1.25, measured=1.0)
        runs.append(dataclasses.replace(run, found={
            **run.found, "visits_s": list(speeds), "visits_slow": list(speeds), "full_speed_s": 2.0,
            "pieces_s": [[2.0, 2.0], [2.0 * 1.5 ** (1.0 / SLOW_SHARE)] * 2]}))  # fmt: skip
    found = {row.name: row for row in fidelity_report._host_rows(runs, calibration)}
    assert found["host while plans ran: times slower than at full speed, mean over steps"].value == pytest.approx(1.25)
    assert found["host while plans ran: steps at which it was more than 1.3 times slower"].value == pytest.approx(50.0)
    told = {name: row.value for name, row in found.items() if "told" in name}
    assert all(value == pytest.approx(0.0, abs=1e-9) for value in told.values()) and len(told) == 8  # all plans, and those of the host
    assert all("not scored" in row.note for row in found.values())
    assert [run.error for run in runs] == pytest.approx([1.25 / 1.2 - 1.0, 1.25 / 2.0 - 1.0])  # what is scored stays as it was predicted
    assert len(fidelity_report._host_rows(runs, dataclasses.replace(calibration, constants={}))) == 2
    assert fidelity_report._host_rows([known_run("c", predicted=1.0, measured=1.0)], calibration) == []  # of before it was probed


def test_ranking_counts_order_ties_and_what_the_best_prediction_loses():
    runs = [known_run("a", predicted=1.0, measured=1.0), known_run("b", predicted=2.0, measured=1.9), known_run("c", predicted=0.9, measured=1.2)]
    assert kendall(runs) == pytest.approx((2 - 1) / 3)  # a before c was predicted the other way round
    assert regret(runs) == pytest.approx(0.2)
    noisy = [known_run("a", predicted=1.0, measured=1.0, jitter=0.5), known_run("c", predicted=0.9, measured=1.2, jitter=0.5)]
    assert kendall(noisy) == 1.0  # a difference within the noise is no order


def test_memory_names_what_lies_furthest_below():
    found = {row.name: row for row in fidelity_report._memory_rows([known_run("a", predicted=1.0, measured=1.0)])}
    peak = known_run("a", predicted=1.0, measured=1.0).plan.prediction["memory"]["peak"]["value"]
    assert found["peak allocated: absolute error, median"].value == pytest.approx(100 * abs(peak / 100.0 - 1))
    assert found["peak allocated: furthest below the measurement"].value == pytest.approx(100 * max(0.0, 1 - peak / 100.0))


def test_what_a_process_held_before_is_not_the_plan_s():
    run = known_run("a", predicted=1.0, measured=1.0)
    assert run.allocated == 100.0
    assert dataclasses.replace(run, found={**run.found, "held_before": 30}).allocated == 70.0


def test_residuals_become_intervals_by_phase():
    runs = [known_run(str(i), predicted=1.0, measured=1.0 + 0.01 * i) for i in range(24)]
    samples = [Sample(op="linear", phase="forward", features={"m": 10.0, "k": 32.0, "n": 32.0}, dtype="bf16", seconds=1e-5)]
    calibration = fidelity_gpu.with_residuals(fit(Environment(device_name=H200.name, device_kind="cuda"), samples, device=H200), runs)
    assert len(calibration.run_residuals["step@host"]) == 24
    step = estimate(small_plan(), calibration).step_time
    assert step.high / step.value > step.value / step.low  # measured times lay above their predictions


def test_the_wilson_band_holds_the_share_and_narrows():
    low, high = wilson(180, 200)
    assert low < 0.9 < high and high - low < 0.09
    assert wilson(18, 20)[1] - wilson(18, 20)[0] > high - low


def test_the_plans_of_another_seed_in_the_folder_are_left_alone(tmp_path):
    for name in ("scored-5-0-1", "residual-1000008-0-0", "scored-6-0-1", "residual-1000009-2-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text("{}")
    assert sorted(path.parent.name for path in fidelity_gpu.of_seed(tmp_path, 5)) == ["residual-1000008-0-0", "scored-5-0-1"]
