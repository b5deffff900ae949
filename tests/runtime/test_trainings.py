"""Several plans in one job: each gets the result that it has alone, and a plan for other ranks ends the job before anything is trained."""
import dataclasses

import pytest
import runtime_models as models

from costmodel.plan import Layout
from costmodel.runresult import RunResult
from runtime import train, trainings
from runtime.data import open_source
from runtime.trainer import Trainer


@pytest.mark.usefixtures("keep_handlers")
def test_each_plan_trains_as_it_does_alone(tmp_path, capsys):
    plans = [models.plan(Layout(), precision="bf16"), dataclasses.replace(models.plan(Layout(), precision="bf16"), seed=2)]
    folders = [tmp_path / str(k) for k in range(len(plans))]
    for folder, plan in zip(folders, plans):
        folder.mkdir()
        plan.save(folder / "plan.json")
    assert trainings.main([*map(str, folders), "--steps", "5"]) == train.OK
    assert capsys.readouterr().out.count('"event": "trained"') == 2
    for folder, plan in zip(folders, plans):
        found = RunResult.load(folder / "result.json")
        alone = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=train.pick_device(plan))
        alone.train(5)
        assert found.plan_identity == plan.identity() and found.losses == pytest.approx(alone.losses, rel=1e-6)
        assert found.quality.ne == pytest.approx(alone.evaluate(), rel=1e-6)
        assert not (folder / "checkpoint").exists()


def test_a_plan_for_more_ranks_is_refused(tmp_path, capsys):
    models.plan(Layout(fsdp=2, sparse_group=2)).save(tmp_path / "plan.json")
    assert trainings.main([str(tmp_path)]) == train.USAGE
    assert "is for 2 ranks" in capsys.readouterr().err and not (tmp_path / "result.json").exists()
