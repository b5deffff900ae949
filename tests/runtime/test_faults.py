"""What long jobs meet: killed ranks, kills while saving, collectives that hang, losses that are not finite."""
from __future__ import annotations

import json

import pytest
import runtime_models as models
import torch

from benchmarks import train_faults
from costmodel.plan import Layout
from costmodel.runresult import RunResult
from runtime import checkpoint, mesh, train
from runtime.data import open_source
from runtime.metrics import Metrics
from runtime.phases import PhaseTimer
from runtime.trainer import Trainer

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("keep_handlers")


def _trainer(plan) -> Trainer:
    return Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=CPU)


@pytest.fixture
def job():
    """A process group of this process, as a run has it: without one a checkpoint is waited for."""
    mesh.start(CPU)
    yield
    mesh.leave()


def test_a_checkpoint_holds_the_state_of_its_moment(tmp_path, job):
    """Written while training goes on, it is what training was when it was asked for."""
    plan = models.plan(Layout())
    first = _trainer(plan)
    first.train(3)
    first.save(tmp_path, wait=False)
    first.train(7)
    first.settle()
    second = _trainer(plan)
    second.resume(checkpoint.latest(tmp_path))
    assert second.step == 3
    second.train(7)
    assert second.losses == first.losses


def test_what_goes_wrong_while_a_checkpoint_is_written_is_raised(tmp_path):
    trainer = _trainer(models.plan(Layout()))
    trainer.train(1)
    trainer.save(tmp_path)
    saving = checkpoint.Saving(tmp_path / "step-00000009")
    broken: checkpoint.Future = checkpoint.Future()
    saving.publish_when(broken)
    broken.set_exception(OSError("No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        saving.wait()
    assert checkpoint.latest(tmp_path).name == "step-00000001"


def test_a_new_run_does_not_continue_from_an_old_one(tmp_path, monkeypatch):
    """The older run's checkpoint is of a later step: a restart must not take it for this run's."""
    plan = models.plan(Layout())
    plan.save(tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json"), "--out", str(tmp_path), "--no-eval", "--steps"]
    assert train.main([*words, "5"]) == 0
    assert train.main([*words, "2"]) == 0
    assert checkpoint.latest(tmp_path / "checkpoint").name == "step-00000002"
    assert checkpoint.latest(tmp_path / "checkpoint.old").name == "step-00000005"


def test_a_loss_that_is_not_finite_is_not_tried_again(tmp_path, monkeypatch, capsys):
    plan = models.plan(Layout(), workload_spec=models.workload(learning_rate=1e38))
    plan.save(tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json"), "--out", str(tmp_path), "--no-eval"]
    assert train.main(words) == 6
    found = RunResult.load(tmp_path / "result.json")
    assert not found.retry and f"the loss of step {found.steps} is" in found.message
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(train, "Trainer", None)  # a second attempt would need one
    capsys.readouterr()
    assert train.main(words) == 6
    assert found.message in capsys.readouterr().err


def test_metrics_have_every_step_once_and_attempts_say_what_was_lost(tmp_path):
    def attempt(first: int, last: int, *, restarted: bool) -> Metrics:
        metrics = Metrics(tmp_path, resume=restarted, progress=False)
        metrics.start(first, startup=2.0, restarted=restarted)
        for step in range(first, last):
            metrics.step(step, 10, float(step), {"forward": 0.5})
        metrics.close()
        return metrics

    attempt(0, 7, restarted=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # a kill in the middle of a line
    last = attempt(4, 10, restarted=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10))
    tries = train_faults.attempts(tmp_path)
    assert [(t["first_step"], t["lost_steps"], t["lost"]) for t in tries] == [(0, 0, 0.0), (4, 3, 1.5)]
    wall = last.wall_seconds(train=3.0, checkpoint=0.25)
    assert (wall["train"], wall["lost"], wall["startup"]) == (5.0, 1.5, 2.0) and wall["checkpoint"] >= 0.25 and last.attempts == 2
    attempt(0, 1, restarted=False)
    assert len(train_faults.attempts(tmp_path)) == 1


def test_the_phase_that_an_error_left_is_known():
    timer = PhaseTimer(CPU)
    timer.start_step()
    with pytest.raises(RuntimeError), timer.phase("sparse"), timer.phase("exposed_communication"):
        raise RuntimeError("timed out")
    assert timer.failed_in == "sparse > exposed_communication"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Two ranks, of which one is killed twice, and the same job undisturbed."""
    return train_faults.soak(tmp_path_factory.mktemp("killed"), steps=40, every=5, ranks=2)


@pytest.mark.slow
def test_killed_ranks_are_started_again_and_nothing_is_lost(killed):
    values = {row.name: row.value for row in killed}
    assert values["faults: steps whose loss differs from the undisturbed run"] == 0
    assert values["faults: most steps repeated after a kill"] <= 10


@pytest.mark.slow
def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path):
    (row,) = train_faults.kills_while_saving(tmp_path, kills=2)
    assert row.value == 2 and "equal the undisturbed" in row.note


@pytest.mark.slow
def test_a_hung_collective_names_rank_phase_and_the_silent_one(tmp_path):
    (row,) = train_faults.hung(tmp_path, timeout=5.0)
    assert row.value == 1.0, row.note
