import dataclasses
import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from costmodel import launch
from costmodel.plan import Plan
from costmodel.runresult import PHASES
from planner import machine, run
from planner.cli import main
from planner.errors import RunFailed, UsageError
from planner.ledger import Ledger
from tests.planner.test_cli import TINY

# Stands in for torchrun: does what the trainer promises to do, in the way that $FAKE names.
FAKE_TRAINER = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from costmodel.plan import Plan
plan, out, how = Plan.load(sys.argv[1]), Path(sys.argv[3]), os.environ.get("FAKE", "completed")
print(json.dumps({{"event": "step", "step": 1, "of": 2, "loss": 0.5, "step_time_s": 0.1}}), flush=True)
if how == "dies":
    sys.stderr.write("RuntimeError: rank 1 is gone\\n"); sys.exit(1)
if how == "silent":
    sys.exit(0)
phases = dict.fromkeys({phases!r}, 0.01)
memory = dict.fromkeys(["parameters", "gradients", "optimizer", "tables", "table_state", "saved_activations"], 1000.0)
result = {{"schema_version": 1, "plan_identity": "other" if how == "stranger" else plan.identity(),
          "environment": {{"threads": os.environ["OMP_NUM_THREADS"]}}, "message": "NaN loss" if how == "fails" else "",
          "status": {{"interrupts": "interrupted", "fails": "failed"}}.get(how, "completed"), "world_size": plan.layout.world_size,
          "steps": 2, "warmup_steps": 1,
          "measured": {{"step_time_s": {{"median": 0.07, "mean": 0.07, "p10": 0.06, "p90": 0.08}}, "phases_s": phases, "memory_bytes": memory,
                       "examples_per_second": 900.0}},
          "quality": {{"ne": {{"like": 0.86}}, "baselines": {{"item_mean": 0.91}}, "final_loss": 0.5}}, "losses": [0.6, 0.5]}}
(out / "result.json").write_text(json.dumps(result))
if how == "interrupts":
    os.kill(os.getppid(), 2); time.sleep(1); sys.exit(130)
sys.exit(6 if how == "fails" else 0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, and a stand-in for torchrun."""
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(TINY)
    assert main(["estimate", str(scenario), "--quiet", "-o", str(tmp_path / "out")]) == 0
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(FAKE_TRAINER.format(root=str(Path(run.__file__).resolve().parents[1]), phases=PHASES)))
    monkeypatch.setattr(launch, "torchrun_command", lambda module, arguments, **_: [sys.executable, str(script), *arguments])
    return tmp_path / "out"


def rewrite(folder: Path, **changes) -> None:
    plan = Plan.load(folder / "plan.json")
    plan = dataclasses.replace(plan, **changes)
    dataclasses.replace(plan, fingerprints=plan.expected_fingerprints()).save(folder / "plan.json")


def test_a_run_is_compared_and_recorded(folder, tmp_path, capsys):
    book = tmp_path / "l.sqlite"
    assert main(["run", str(folder), "--ledger", str(book), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (entry,) = Ledger(book).entries()
    plan = Plan.load(folder / "plan.json")
    assert entry.plan_identity == plan.identity()
    assert entry.measured_step_s == 0.07
    assert entry.error == pytest.approx(0.07 / plan.prediction["step_time"]["value"] - 1)
    assert entry.environment == {"threads": "1"}
    assert entry.quality == {"ne.like": 0.86, "baseline.item_mean": 0.91}
    assert answer["comparison"]["memory_bytes"]["parameters"]["measured"] == 1000.0
    assert set(answer["comparison"]["phases_s"]) == set(PHASES)
    assert run.load_plan(folder / "plan.json")[1] == folder


def test_the_terminal_shows_phases_memory_and_quality(folder, capsys):
    assert main(["run", str(folder)]) == 0
    captured = capsys.readouterr()
    for words in ("exposed_communication", "step (median)", "saved_activations", "baseline: item_mean", "0.8600"):
        assert words in captured.out
    assert "appended to" in captured.err


@pytest.mark.parametrize(("limit", "code"), [("0.01", 4), ("1e9", 0)])
def test_max_error_is_exit_4_after_the_row_is_kept(folder, tmp_path, limit, code, capsys):
    book = tmp_path / "l.sqlite"
    assert main(["run", str(folder), "--ledger", str(book), "--max-error", limit]) == code
    assert len(Ledger(book).entries()) == 1
    assert ("--max-error allows" in capsys.readouterr().err) == (code == 4)


def test_a_dead_worker_is_exit_6_with_its_last_words(folder, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "dies")
    assert main(["run", str(folder)]) == 6
    error = capsys.readouterr().err
    assert "RuntimeError: rank 1 is gone" in error and "full log:" in error and "Traceback" not in error
    assert Ledger().entries() == []


def test_a_failed_run_is_kept_in_the_ledger(folder, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "fails")
    assert main(["run", str(folder)]) == 6
    assert "NaN loss" in capsys.readouterr().err
    assert [e.status for e in Ledger().entries()] == ["failed"]


@pytest.mark.parametrize(("how", "words"), [("silent", "the run failed"), ("stranger", "measured for plan other")])
def test_a_run_without_its_own_result_is_exit_6(folder, monkeypatch, capsys, how, words):
    (folder / "result.json").write_text("{}")  # of an earlier run: must not be taken for this one's
    monkeypatch.setenv("FAKE", how)
    assert main(["run", str(folder)]) == 6
    assert words in capsys.readouterr().err


def test_ctrl_c_is_130_and_the_ledger_has_the_row(folder, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "interrupts")
    assert main(["run", str(folder)]) == 130
    assert "continue with --resume" in capsys.readouterr().err
    assert [e.status for e in Ledger().entries()] == ["interrupted"]


def test_a_damaged_ledger_stops_before_the_training_and_the_row_can_be_added_later(folder, tmp_path, capsys):
    book = tmp_path / "l.sqlite"
    book.write_bytes(b"x" * 500)
    assert main(["run", str(folder), "--ledger", str(book)]) == 2
    assert not (folder / "result.json").exists()
    assert main(["run", str(folder)]) == 0
    capsys.readouterr()
    assert main(["ledger", "--ledger", str(tmp_path / "new.sqlite"), "--add", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] == [json.loads((folder / "entry.json").read_text())]


def test_no_plan_is_exit_2(tmp_path, capsys):
    assert main(["run", str(tmp_path)]) == 2
    assert "plan.json: no such file" in capsys.readouterr().err


def test_predict_only_plans_are_refused_with_the_reason(folder, capsys):
    rewrite(folder, predict_only=("precision fp8_row: no fp8 layers",))
    assert main(["run", str(folder)]) == 2
    assert "precision fp8_row: no fp8 layers" in capsys.readouterr().err


def test_a_plan_for_other_machines_is_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr(machine, "gpus", list)
    plan = Plan.load(folder / "plan.json")
    gpu = dataclasses.replace(plan.cluster.device, kind="gpu", name="H200-SXM")
    other = dataclasses.replace(plan.cluster.device, name=machine.PREFIX + "other")
    for cluster, words in (
        (dataclasses.replace(plan.cluster, devices_per_host=4), "for 2 ranks, cluster pair has 4"),
        (dataclasses.replace(plan.cluster, device=gpu), "the plan needs 2 H200-SXM on this host; NVIDIA GPUs found: none"),
        (dataclasses.replace(plan.cluster, device=other), "was made for cpu-core-other"),
        (dataclasses.replace(plan.cluster, num_hosts=2, devices_per_host=1, tiers=(dataclasses.replace(plan.cluster.tiers[0], scope="cluster"),)),
         "--rdzv-endpoint HOST:PORT"),
    ):  # fmt: skip
        rewrite(folder, cluster=cluster)
        assert main(["run", str(folder)]) == 2
        assert words in capsys.readouterr().err
        plan.save(folder / "plan.json")


def test_a_plan_whose_model_was_changed_is_refused(folder, capsys):
    path = folder / "plan.json"
    path.write_text(path.read_text().replace('"rows": 1700', '"rows": 1701', 1))
    assert main(["run", str(folder)]) == 2
    assert "content_hash" in capsys.readouterr().err


def test_the_command_line_of_a_plan(tmp_path):
    scenario = tmp_path / "t.yaml"
    scenario.write_text(TINY)
    assert main(["estimate", str(scenario), "--quiet", "-o", str(tmp_path)]) == 0
    plan, _ = run.load_plan(tmp_path)
    words = run.command(plan, tmp_path, steps=3, resume=True, evaluate=False)
    assert words[1:] == ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "runtime.train", str(tmp_path / "plan.json"),
                         "--out", str(tmp_path), "--steps", "3", "--resume", "--no-eval"]  # fmt: skip
    assert run.command(plan, tmp_path, checkpoint=False)[-1] == "--no-checkpoint"
    with pytest.raises(UsageError, match="give one of them"):
        run.execute(tmp_path, checkpoint=False, checkpoint_every=3)
    with pytest.raises(UsageError):
        run.load_plan(tmp_path / "nowhere")


def test_a_result_that_is_damaged_is_said(folder, monkeypatch):
    plan = Plan.load(folder / "plan.json")
    (folder / "result.json").write_text('{"schema_version": 1}')
    with pytest.raises(RunFailed, match="missing"):
        run._result(folder / "result.json", plan)
    assert os.environ.get("FAKE") is None


def test_two_runs_in_one_folder(folder, tmp_path, capsys):
    from planner import runner

    with runner.alone(folder):
        assert main(["run", str(folder), "--ledger", str(tmp_path / "l.sqlite")]) == 2
    assert "another run is using this folder" in capsys.readouterr().err
    assert sorted(p.name for p in folder.iterdir()) == ["plan.json"]
    assert main(["run", str(folder), "--ledger", str(tmp_path / "l.sqlite"), "--quiet"]) == 0


def test_a_ledger_that_cannot_be_written_stops_before_the_training(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["run", str(folder), "--ledger", str(tmp_path / "file" / "l.sqlite")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert not (folder / "result.json").exists()


def test_without_torch_nothing_is_started(folder, monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["run", str(folder)]) == 2
    assert "torch is not installed" in capsys.readouterr().err
    assert main(["calibrate", str(folder.parent / "tiny.yaml")]) == 2
    assert not (folder / "run.log").exists()


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    from planner.report import progress

    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.Progress("training") as shown:
        shown.event({"event": "working", "what": "writing a checkpoint, 20 GB"})
        for step in range(1, 31):
            clock[0] += 1.0
            shown.event({"event": "step", "step": step, "of": 30, "loss": 0.5, "step_time_s": 0.04})
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["training: writing a checkpoint, 20 GB", *(f"training {n} of 30: loss 0.5000 40.0 ms/step" for n in (10, 20, 30))]
    with progress.Progress("training", quiet=True) as shown:
        shown.event({"event": "working", "what": "writing"})
    assert capsys.readouterr().err == ""
