"""Plans on several ranks: declared, run one after the other by one launch (gloo, two CPU ranks, one plan broken), and what a report says of them."""
import dataclasses
import json
import shutil
import threading

import pytest

from benchmarks import multi_gpu, multi_gpu_ranks, multi_gpu_report, results
from benchmarks import multi_gpu_space as space
from benchmarks.multi_gpu_report import Ran
from costmodel.calibration import load as load_calibration
from costmodel.codec import encode
from costmodel.estimate import estimate
from costmodel.gpu import launches
from costmodel.lower import lower
from costmodel.plan import TablePlacement
from costmodel.runresult import PHASES
from costmodel.samples import Environment, Sample, write_samples
from runtime.microbench import contention
from runtime.microbench.timing import Timing


def predicted(plan):
    return dataclasses.replace(plan, prediction=encode(estimate(plan, None)))


def test_declared_plans_cover_what_is_asked():
    made = space.plans("cuda")
    several = [p for p in made.values() if p.layout.world_size == 2]
    assert len({p.identity() for p in made.values()}) == len(made) and len(several) >= 8
    assert {p.layout.ddp for p in several} == {1, 2} and {p.layout.ep for p in several} == {1, 2}
    assert {(p.layout.sparse_replicas, p.layout.fully_sharded_2d) for p in several} == {(1, False), (2, False), (2, True)}
    assert {o.checkpoint for p in several for r in p.regions for o in r.options} == {"none", "selective", "full"}
    for name, plan in made.items():
        one = made.get(space.subject(name) + "-one")
        assert one is not None and plan.model == one.model
        if name.endswith("-local"):  # a rank's batch on one GPU
            assert plan.layout.world_size == 1 and 2 * plan.local_batch == one.local_batch
        else:
            assert plan.local_batch * plan.accumulation * plan.layout.world_size == one.local_batch and plan.workload == one.workload
    assert {p.model.name for p in space.plans("cpu").values()} == {p.model.name for p in made.values()}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A launch on two ranks: one plan on one rank, two on both, and one that no rank can build."""
    folder = tmp_path_factory.mktemp("multi")
    made = space.plans("cpu")
    broken = made["tables-2d"]
    broken = dataclasses.replace(broken, tables=tuple(TablePlacement(table=t.table, sharding="host_cached", ranks=(0,)) for t in broken.tables))
    chosen = {name: made.get(name, broken) for name in ("tables-one", "tables-broken", "tables-fsdp", "tables-table-wise")}
    for name, plan in chosen.items():
        (folder / name).mkdir()
        predicted(plan).save(folder / name / "plan.json")
    (folder / "plans.json").write_text(json.dumps(list(chosen)))
    multi_gpu.run(folder, "cpu", made["tables-fsdp"].cluster, seconds=100)
    return folder


def test_plans_run_one_after_the_other_and_a_broken_one_is_recorded(work):
    ran, failed = multi_gpu_report.load(work)
    assert [one.name for one in ran] == ["tables-one", "tables-fsdp", "tables-table-wise"]
    assert len(failed) == 1 and "rank 0: ValueError" in failed[0] and "rank 1: ValueError" in failed[0] and "host_cached" in failed[0]
    for one in ran:
        assert one.measured > 0 and 0.0 <= max(one.found["device_s"].values()) <= max(one.found["steps_s"])
    assert max(multi_gpu_report.loss_difference(one, ran[0]) for one in ran[1:]) < multi_gpu_report.LOSS["fp32"]
    assert not list(work.glob("*/started"))


@pytest.mark.slow  # waits for time limits: 100 s on two cores, more beside other load
def test_a_plan_that_fails_or_hangs_on_one_rank_does_not_stop_the_next(tmp_path, monkeypatch):
    """Rank 0 waits in a collective that rank 1 never joins: after moments, not after the transport's timeout, the next plan runs."""
    plan = predicted(space.plans("cpu")["tables-fsdp"])
    names = ["one-raises", "two-hangs", "three"]
    for name in names:
        (tmp_path / name).mkdir()
        plan.save(tmp_path / name / "plan.json")
    (tmp_path / "plans.json").write_text(json.dumps(names))
    monkeypatch.setattr(multi_gpu, "MODULE", "tests.benchmarks.faulty_ranks")
    multi_gpu.run(tmp_path, "cpu", plan.cluster, seconds=500, parts=("plans",), extra=("--steps", "2", "--plan-seconds", "40"))
    found = {name: json.loads((tmp_path / name / "run.json").read_text()) for name in names}
    assert "rank 1: RuntimeError: out of memory, say" in found["one-raises"]["failed"]
    assert "did not end within 40 s" in found["two-hangs"]["failed"]
    assert len(found["three"]["steps_s"]) == 2 and not list(tmp_path.glob("*/started")) + list(tmp_path.glob("three/failed-*"))


def test_what_has_a_result_is_not_run_again(work, monkeypatch):
    before = (work / "tables-fsdp" / "run.json").stat().st_mtime_ns
    started = []
    monkeypatch.setattr(multi_gpu, "start", lambda *args, **kwargs: started.append(args) or 0)
    multi_gpu.run(work, "cpu", space.plans("cpu")["tables-fsdp"].cluster, seconds=100)
    assert len(started) == 1 and (work / "tables-fsdp" / "run.json").stat().st_mtime_ns == before


def test_the_report_of_a_launch(work, tmp_path):
    found = {row["name"]: row for row in json.loads(multi_gpu_report.report(work, "cpu", out=tmp_path).read_text())["rows"]}
    assert found["plans scored"]["value"] == 2 and not found["plans scored"]["passed"]
    assert found["losses as on one rank, fp32: largest relative difference"]["passed"]
    assert {"plan tables-fsdp", "tables: speed-up 1 -> 2, the same global batch, absolute error: median",
            "tables: regret of the plan predicted best"} <= set(found)
    assert "tables-broken: rank 0: ValueError" in (tmp_path / "multi-gpu-cpu.md").read_text()


def test_the_report_before_any_plan_has_run_on_several_ranks(work, tmp_path):
    calibrated = tmp_path / "calibrated"
    shutil.copytree(work, calibrated, ignore=shutil.ignore_patterns("run.json"))
    with pytest.raises(SystemExit, match="no plan on several ranks has run yet and no link was timed"):
        multi_gpu_report.report(calibrated, "cpu", out=tmp_path)
    timed = [Sample(op="all_gather", phase="step", features={"bytes": 2.0**30, "group": 2.0}, seconds=2.0)]
    write_samples(calibrated / "collectives.jsonl", Environment(device_name="CPU", device_kind="cpu"), timed)
    elsewhere = {"date": "2026-01-02T03:04:05+00:00", "commit": "0123abc", "environment": {**results.environment(), "device": "another device"}}
    (calibrated / "measured.json").write_text(json.dumps(elsewhere))
    text = json.loads(multi_gpu_report.report(calibrated, "cpu", out=tmp_path).read_text())
    rows = {row["name"]: row for row in text["rows"]}
    assert rows["plans scored"]["value"] == 0 and rows["plans scored"]["passed"] is False
    assert rows["all_gather: rate of the largest message"]["value"] == pytest.approx(2.0**30 / 2.0 / 1e9)
    assert (text["date"], text["commit"], text["environment"]["device"]) == ("2026-01-02T03:04:05+00:00", "0123abc", "another device")


def known(name: str, *, step: float, of: float, exposed: tuple[float, float] = (0.0, 0.0), peak: float | None = None, losses=(1.0,)) -> Ran:
    """A run of `step` seconds predicted as `of`; exposed: (predicted, measured)."""
    plan = predicted(space.plans("cuda")[name])
    plan.prediction["step_time"]["value"] = of
    plan.prediction["alone"] = exposed[0]
    found = {"step_s": step, "exposed_s": exposed[1], "device_s": dict.fromkeys(PHASES, step / len(PHASES)), "losses": list(losses),
             "memory_bytes": {"peak_allocated": peak} if peak else {}}
    return Ran(name=name, plan=plan, found=found)


def test_figures_of_known_runs():
    ran = [known("full-one", step=0.2, of=0.2, losses=(1.0, 2.0)), known("full-fsdp", step=0.10, of=0.11, losses=(1.0, 2.001), exposed=(0.01, 0.02)),
           known("full-ddp", step=0.09, of=0.12, losses=(1.0, 2.0), exposed=(0.0105, 0.01)),
           known("full-one-micro", step=0.2, of=0.2, losses=(1.0, 2.002))]  # fmt: skip
    rows = {row.name: row for row in multi_gpu_report.plan_rows(ran)}
    assert rows["step time, absolute error: median"].value == pytest.approx(100 * (0.1 + 1 / 3) / 2)
    assert rows["exposed communication: plans within 15 % or 1 ms"].value == 50
    assert rows["full: regret of the plan predicted best"].value == pytest.approx(100 * (0.10 / 0.09 - 1))
    assert rows["full: speed-up 1 -> 2, the same global batch, absolute error: median"].value == pytest.approx(100 * (2 - 0.2 / 0.11) / 2)
    losses = rows["losses as on one rank, bf16: largest relative difference"]
    assert losses.value == pytest.approx(0.0005) and losses.note.endswith("one rank in two micro-batches differs by 0.001")


def test_exposed_communication_holds_within_a_share_or_a_millisecond():
    for predicted_s, measured_s, holds in ((1.0, 1.14, True), (1.0, 1.3, False), (0.0, 9e-4, True), (0.0, 2e-3, False)):
        assert known("full-fsdp", step=2.0, of=2.0, exposed=(predicted_s, measured_s)).exposed_holds is holds


def test_memory_is_scored_where_there_is_a_peak():
    one = known("full-fsdp", step=1.0, of=1.0)
    peak = one.plan.prediction["memory"]["peak"]["value"]
    others = [known("full-ddp", step=1.0, of=1.0, peak=1e9), known("full-fsdp", step=1.0, of=1.0, peak=peak / 2)]
    median, worst = multi_gpu_report._memory_rows([one, *others])
    assert worst.value >= 100 and median.note.endswith("2 plans")


def test_exposure_is_a_collective_with_nothing_beside_it():
    events = [("ncclDevKernel_AllGather", 0.0, 4.0), ("gemm", 1.0, 2.0), ("gemm", 1.5, 3.0), ("Memcpy HtoD (Pinned -> Device)", 3.0, 4.0),
              ("ncclDevKernel_AllGather", 5.0, 6.0)]  # fmt: skip
    found = multi_gpu_ranks.exposure(events, steps=1)
    assert found == {"exposed_s": 3.0, "collective_s": 5.0, "busy_s": 2.0, "span_s": 6.0}
    later = multi_gpu_ranks.exposure(events, steps=1, skipped=1)  # from the end of the first collective on
    assert later["exposed_s"] == 1.0 and later["busy_s"] == 0.0 and later["span_s"] == 1.0


def test_a_fit_takes_the_later_of_two_and_leaves_the_loader_out(tmp_path):
    cluster = space.scenario("full", "cuda").cluster
    environment = Environment(device_name="NVIDIA H200", device_kind="cuda")

    def sample(kind, seconds, **features):
        return Sample(op=kind, phase="step" if kind in ("input", "all_gather") else "forward", features=features, seconds=seconds)

    earlier = [sample("linear", 1.0, m=8.0, k=8.0, n=8.0), sample("input", 1.0, samples=8.0, events=8.0)]
    write_samples(tmp_path / "samples.jsonl", environment, earlier)
    write_samples(tmp_path / "ops-0.jsonl", environment, [sample("linear", 2.0, m=8.0, k=8.0, n=8.0)])
    write_samples(tmp_path / "collectives.jsonl", environment, [sample("all_gather", 3.0, bytes=2.0**20, group=2.0)])
    calibration = multi_gpu.refit(tmp_path, cluster)
    assert calibration == load_calibration(tmp_path / "calibration.json") and calibration.environment.device_name == "H200-SXM"
    (linear,) = (c for c in calibration.curves if c.op == "linear")
    assert [row[3] for row in linear.points] == [2.0]
    assert {c.op for c in multi_gpu.without_loader(calibration).curves} == {"linear", "all_gather"}


def beside(share: float, *, ctas: int | None = 4, launched: bool = True) -> contention.Beside:
    timing = Timing(seconds=share, noise=0.0, repeats=1)
    return contention.Beside(kind="all_gather", compute="attention", ctas=ctas, bytes=2.0**28, seconds=1e-3, share=timing, slowed=1.0,
                             launched=launched)


def test_a_share_that_could_not_be_seen_is_no_figure():
    assert beside(0.2).measured and beside(1e-9, ctas=0).measured
    assert not beside(1e-9).measured and not beside(0.2, launched=False).measured
    notes = {"beside": [{**encode(one), "measured": one.measured} for one in (beside(0.2), beside(1e-9, ctas=8))], "copies": {}, "failed": {}}
    seen, unseen = multi_gpu_report._beside_rows(notes)
    assert seen.value == 0.2 and unseen.value is None and unseen.note == multi_gpu_report.UNSEEN


def test_earlier_rows_of_links_stay_but_for_what_was_not_measured(tmp_path):
    name = "all_gather beside {}, 4 CTAs: compute lost a second of it"
    earlier = [results.Row(name=name.format("product"), value=0.2, unit="s"), results.Row(name=name.format("attention"), value=1e-9, unit="s"),
               results.Row(name="plan full-old", value=1.0, unit="ms a step")]
    results.write("some", earlier, command="-", title="-", out=tmp_path, measured={**results.stamped(), "date": "2026-11-30T18:17:20+00:00"})
    path = results.write("some", [results.Row(name="plan full-fsdp", value=2.0, unit="ms a step")], command="-", title="-", out=tmp_path, resume=True,
                         keep=multi_gpu_report._of_links)
    values = {row["name"]: row["value"] for row in json.loads(path.read_text())["rows"]}
    assert values == {name.format("product"): 0.2, name.format("attention"): None, "plan full-fsdp": 2.0}


def test_the_scaling_ratio_is_a_local_step_over_those_of_plans_like_it_and_says_where_each_ran():
    here = {**results.stamped(), "date": "2026-12-01T00:32:11+00:00", "commit": "0123abc"}
    there = {**here, "date": "2026-12-01T03:20:00+00:00", "commit": "9876fed"}
    local = dataclasses.replace(known("full-local", step=0.09, of=0.10), where=there)
    several = [dataclasses.replace(known(name, step=step, of=of), where=here)
               for name, step, of in (("full-fsdp", 0.10, 0.10), ("full-ddp", 0.12, 0.10), ("full-fsdp-full", 0.2, 0.1), ("tables-fsdp", 0.1, 0.1))]
    (row,) = multi_gpu_report._scaling_rows([local, *several])
    # 1 against 0.9, 1 against 0.75; another checkpoint policy is another recipe
    assert row.name.startswith("full: scaling ratio 1 -> 2") and row.value == pytest.approx(100 * (1 / 0.9 + 1 / 0.75 - 2) / 2)
    assert "fsdp predicted 1.000, measured 0.900" in row.note and "another lease (2026-12-01T03:20:00+00:00, commit 9876fed" in row.note
    (row,) = multi_gpu_report._scaling_rows([dataclasses.replace(local, where=here), *several])
    assert "another lease" not in row.note


def test_one_call_does_what_is_missing_in_order(tmp_path, monkeypatch):
    done, work = [], tmp_path / "w"

    def warmed(folder, *args, **kwargs):
        done.append("warm")
        (folder / "warmed").touch()
        thread = threading.Thread(target=lambda: None)
        thread.start()
        return thread

    monkeypatch.setattr(multi_gpu, "predict", lambda folder, *args, **kwargs: (folder / "plans.json").write_text('["full-one"]'))
    monkeypatch.setattr(multi_gpu, "warm", warmed)
    monkeypatch.setattr(multi_gpu, "run", lambda *args, parts, **kwargs: done.append(parts))
    monkeypatch.setattr(multi_gpu_report, "report", lambda *args, **kwargs: done.append("report"))
    assert multi_gpu.main(["--work", str(work), "--total", "100"]) == 0
    assert done == ["warm", ("collectives", "plans", "alone", "links"), "report"]
    (work / "full-one").mkdir()
    (work / "full-one" / "run.json").write_text("{}")
    (work / "collectives.jsonl").touch()
    (work / "beside.json").write_text('{"copies": {"copy alone": 1.0}}')
    done.clear()
    assert multi_gpu.main(["--work", str(work), "--resume", "--total", "100"]) == 0
    assert done == ["report"]


def test_hindsight_stands_beside_the_score_and_is_none():
    one = known("full-fsdp", step=0.10, of=0.08, exposed=(0.001, 0.02))
    later = {"commit": "0123abc", "prediction": {**one.plan.prediction, "step_time": {"value": 0.101}, "alone": 0.0195}}
    ran = [dataclasses.replace(one, after=later), known("full-ddp", step=0.1, of=0.1)]
    rows = {row.name: row for row in multi_gpu_report.plan_rows(ran)}
    assert rows["step time, absolute error: median"].value == pytest.approx(10.0)  # of both, as they were predicted
    after = rows["after the fact: step time, absolute error: median"]
    assert after.value == pytest.approx(1.0) and after.target is None and "0123abc" in after.note and "no score" in after.note
    assert rows["after the fact: exposed communication, plans within 15 % or 1 ms"].value == 100
    assert not any(name.startswith("after") for name in (row.name for row in multi_gpu_report.plan_rows([ran[1]])))


def test_what_slow_main_threads_explain_is_told_apart(tmp_path):
    """The same run with hosts as fast as predicted, and with one of them three times as slow."""
    calibration, plan = load_calibration(multi_gpu.KNOWN), predicted(space.plans("cuda")["tables-fsdp"])
    calibration = dataclasses.replace(calibration, constants={**calibration.constants, "host/spread": 0.0})
    made = launches(lower(plan, multi_gpu.without_loader(calibration)).graph)
    steps = {}
    for name, factors in (("as-fast", (1.0, 1.0)), ("one-slow", (1.0, 3.0))):
        (tmp_path / name).mkdir()
        plan.save(tmp_path / name / "plan.json")
        ranks = [{"host": {phase: factor * made[phase] for phase in ("forward", "backward")}} for factor in factors]
        (tmp_path / name / "run.json").write_text(json.dumps({"step_s": 0.05, "ranks": ranks}))
    multi_gpu.predict_after(tmp_path, calibration)
    for name in ("as-fast", "one-slow"):
        steps[name] = json.loads((tmp_path / name / "after.json").read_text())
    assert steps["as-fast"]["as_slow"]["step_s"] == pytest.approx(steps["as-fast"]["prediction"]["step_time"]["value"], rel=0.05)
    assert steps["one-slow"]["as_slow"]["step_s"] > 2 * steps["as-fast"]["as_slow"]["step_s"]
    assert steps["one-slow"]["as_slow"]["alone_s"] > 10 * steps["as-fast"]["as_slow"]["alone_s"]  # the other rank waits inside collectives
