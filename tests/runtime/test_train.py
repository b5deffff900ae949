"""The entry point: exit codes, files, signals, dead peers."""
from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runtime_models as models
from conftest import ROOT, torchrun

from costmodel.plan import Layout
from costmodel.runresult import RunResult
from runtime import checkpoint, train
from runtime.model import GEM

pytestmark = pytest.mark.usefixtures("keep_handlers")


def run(plan, tmp_path, *arguments: str) -> int:
    path = tmp_path / "plan.json"
    plan.save(path)
    return train.main([str(path), "--out", str(tmp_path / "out"), *arguments])


def result(tmp_path) -> RunResult:
    return RunResult.load(tmp_path / "out" / "result.json")


def test_without_a_checkpoint_there_is_a_result_and_nothing_to_continue_from(tmp_path, capsys):
    assert run(models.plan(Layout()), tmp_path, "--steps", "2", "--no-eval", "--no-checkpoint") == 0
    assert (tmp_path / "out" / "result.json").exists() and not (tmp_path / "out" / "checkpoint").exists()
    assert "writing a checkpoint" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(models.plan(Layout()), tmp_path, "--no-checkpoint", "--checkpoint-every", "2")


def test_one_rank_from_plan_to_result(tmp_path, capsys):
    plan = models.plan(Layout())
    assert run(plan, tmp_path, "--steps", "6") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events if e["event"] not in ("step", "working")] == ["source", "done"]
    long = [e["what"].split(",")[0] for e in events if e["event"] == "working" and "done" not in e]
    assert long == ["setting up model and tables", "writing a checkpoint"]
    last = [e for e in events if e["event"] == "step"][-1]
    assert last == {"event": "step", "step": 6, "of": 6, "loss": last["loss"], "step_time_s": last["step_time_s"]}
    found = result(tmp_path)
    assert (found.status, found.steps, found.warmup_steps, len(found.losses)) == ("completed", 6, 3, 6)
    assert found.plan_identity == plan.identity()
    assert set(found.quality.ne) == {"click", "like"} and found.quality.final_loss == found.losses[-1]
    assert found.measured.memory_bytes.tables == 4 * sum(t.rows * t.dim * t.count for t in plan.model.tables)
    assert found.measured.memory_bytes.parameters == 4 * sum(p.numel() for p in GEM(plan.model).parameters())
    assert found.measured.memory_bytes.optimizer == 2 * found.measured.memory_bytes.parameters
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == list(found.losses)
    assert checkpoint.latest(tmp_path / "out" / "checkpoint").name == "step-00000006"


def test_same_seed_same_curve_and_resume_is_bitwise(tmp_path):
    plan = models.plan(Layout(), checkpoint="selective")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    assert run(plan, tmp_path / "a", "--steps", "8", "--no-eval") == 0
    assert run(plan, tmp_path / "b", "--steps", "3", "--no-eval") == 0
    assert run(plan, tmp_path / "b", "--steps", "8", "--no-eval", "--resume") == 0
    whole, resumed = result(tmp_path / "a"), result(tmp_path / "b")
    assert resumed.first_step == 3 and resumed.steps == 8
    assert resumed.losses == whole.losses[3:]


@pytest.mark.parametrize(("change", "words"), [
    ({"predict_only": ("precision mxfp8 needs Blackwell",)}, "predict-only: precision mxfp8 needs Blackwell"),
    ({"layout": Layout(fsdp=4, sparse_group=4), "local_batch": 4}, "is for 4 ranks .* this job has 1"),
    ({"execution": "cuda_graph"}, "execution cuda_graph is not executable here: a CPU has no CUDA graphs"),
    ({"fingerprints": {"model": "0" * 16}}, "fingerprint of model"),
])
def test_refused_with_one_message(tmp_path, capsys, change, words):
    plan = dataclasses.replace(models.plan(Layout()), **change)
    assert run(plan, tmp_path) == 2
    err = capsys.readouterr().err
    assert re.search(words, err) and err.count("\n") == 1 and "Traceback" not in err
    assert not (tmp_path / "out" / "result.json").exists()


def test_padding_needs_causal_layers(tmp_path, capsys):
    plan = models.plan(Layout(), model_spec=models.model(layers=(models.LAYERS["self_attention"][2],)), batching="padded")
    assert run(plan, tmp_path) == 2
    assert "layer self_attention is not causal" in capsys.readouterr().err


def test_padded_batches_give_the_jagged_curve(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    for name, batching in (("a", "jagged"), ("b", "padded")):
        assert run(models.plan(Layout(), batching=batching), tmp_path / name, "--steps", "5", "--no-eval") == 0
    assert result(tmp_path / "b").losses == pytest.approx(result(tmp_path / "a").losses, rel=1e-5)


def test_restarted_ranks_continue_from_the_checkpoint(tmp_path, monkeypatch):
    plan = models.plan(Layout())
    (tmp_path / "whole").mkdir(), (tmp_path / "parts").mkdir()
    assert run(plan, tmp_path / "whole", "--steps", "7", "--no-eval") == 0
    assert run(plan, tmp_path / "parts", "--steps", "5", "--no-eval", "--checkpoint-every", "2") == 0
    checkpoints = tmp_path / "parts" / "out" / "checkpoint"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-00000004", "step-00000005"]
    (checkpoints / "step-00000005").rename(checkpoints / "step-00000005.tmp")  # as a kill while saving leaves it
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run(plan, tmp_path / "parts", "--steps", "7", "--no-eval") == 0
    assert result(tmp_path / "parts").first_step == 4
    assert result(tmp_path / "parts").losses == result(tmp_path / "whole").losses[4:]


def test_missing_and_damaged_plan(tmp_path, capsys):
    assert train.main([str(tmp_path / "none.json"), "--out", str(tmp_path / "out")]) == 2
    (tmp_path / "bad.json").write_text("{")
    assert train.main([str(tmp_path / "bad.json"), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "none.json" in err and "bad.json:1:2: not JSON" in err and err.count("\n") == 2


def test_checkpoint_of_another_model_is_refused(tmp_path, capsys):
    assert run(models.plan(Layout()), tmp_path, "--steps", "1", "--no-eval") == 0
    other = models.plan(Layout(), model_spec=models.model(dim=16))
    assert run(other, tmp_path, "--resume", "--no-eval") == 2
    assert "holds model" in capsys.readouterr().err


def test_loss_that_is_not_finite_stops_with_the_step_named(tmp_path, capsys):
    plan = models.plan(Layout(), workload_spec=models.workload(learning_rate=1e38))
    assert run(plan, tmp_path, "--no-eval") == 6
    found = result(tmp_path)
    assert found.status == "failed"
    assert re.search(r"the loss of step \d+ is (nan|inf)", found.message)
    assert found.message in capsys.readouterr().err


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run of 2 ranks that got SIGINT at its rank 1 only, after some steps; then one that was resumed and lost rank 1 to SIGKILL."""
    out = tmp_path_factory.mktemp("interrupted")
    plan = models.plan(Layout(fsdp=2, sparse_group=2), workload_spec=models.workload(num_steps=100_000))
    plan.save(out / "plan.json")
    codes = []
    for number, extra in ((signal.SIGINT, []), (signal.SIGKILL, ["--resume"])):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "runtime.train",
                   str(out / "plan.json"), "--out", str(out), "--no-eval", *extra]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in process.stdout:
            if json.loads(line)["event"] == "step":
                break
        os.kill(_workers(process.pid)[1], number)
        _, err = process.communicate(timeout=120)
        found = RunResult.load(out / "result.json") if (out / "result.json").exists() else None
        codes.append((process.returncode, found, err))
        if number == signal.SIGINT:
            (out / "result.json").rename(out / "first.json")
    return out, codes


def _workers(agent: int) -> list[int]:
    """Process ids of the workers that torchrun started, by rank."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = {}
        for pid in os.listdir("/proc"):
            try:
                stat, env = Path(f"/proc/{pid}/stat").read_text(), Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            rank = re.search(rb"(?:^|\0)RANK=(\d+)", env)
            if int(stat.rsplit(")", 1)[1].split()[1]) == agent and rank:
                found[int(rank[1])] = int(pid)
        if len(found) == 2:
            return [found[0], found[1]]
        time.sleep(0.1)
    raise AssertionError("the workers did not start")


def test_interrupt_of_one_rank_stops_all_at_one_step(interrupted):
    out, codes = interrupted
    _, found, err = codes[0]
    assert found.status == "interrupted" and 0 < found.steps < 100_000
    assert (out / "checkpoint" / f"step-{found.steps:08d}").exists()
    assert "exitcode  : 130" in err


def test_dead_peer_ends_the_others_with_its_name(interrupted):
    _, codes = interrupted
    code, _, err = codes[1]
    assert code != 0
    assert "rank      : 1" in err and "Signal 9" in err


def test_torchrun_leaves_cleanly(tmp_path):
    plan = models.plan(Layout(ddp=2, sparse_group=1, sparse_replicas=2, sync_every=2))
    plan.save(tmp_path / "plan.json")
    done = torchrun(2, "-m", "runtime.train", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out"), "--steps", "4", "--no-eval")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert result(tmp_path).status == "completed"
