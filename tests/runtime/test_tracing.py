"""Traces of a run: the steps that were asked for, annotated, with what no event shows."""
from __future__ import annotations

import gzip
import json

import pytest
import runtime_models as models
import torch

from costmodel.plan import Layout
from runtime import tracing
from runtime.data import open_source
from runtime.trainer import Trainer


def trainer(**changes) -> Trainer:
    plan = models.plan(Layout(), **changes)
    return Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))


def traced(tmp_path, first, end, steps=6, **changes):
    made = trainer(**changes)
    tracer = tracing.Tracer(made, tmp_path, first=first, end=end)
    made.train(steps)
    tracer.close()
    return made, json.loads(gzip.decompress(tracer.path.read_bytes())) if tracer.path.exists() else None


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory):
    return traced(tmp_path_factory.mktemp("trace"), 2, 4, checkpoint="full", batching="padded")


def test_the_chosen_steps_are_annotated(checkpointed):
    names = [e["name"] for e in checkpointed[1]["traceEvents"] if e.get("cat") == "user_annotation"]
    assert [n for n in names if n.startswith("step:")] == ["step:2", "step:3"]
    assert {"phase:input", "phase:sparse", "phase:forward", "phase:backward", "phase:optimizer", "recompute", "region:heads"} <= set(names)


def test_work_and_activations_are_in_the_metadata(checkpointed):
    own = checkpointed[1]["planner"]
    assert own["rank"] == 0 and own["plan"] == checkpointed[0].plan.identity() and set(own["steps"]) == {"2", "3"}
    for counted in own["steps"].values():
        assert 0 < counted["events"] < counted["computed"] and counted["pairs"] < counted["computed_pairs"]
    assert set(own["activations"]) == set(checkpointed[0].model.dense.regions())
    assert all(v["largest"] >= v["rms"] > 0 for v in own["activations"].values())


def test_the_planner_accounts_for_it(checkpointed, tmp_path):
    from planner.diagnose import diagnose

    path = tmp_path / "trace.json"
    path.write_text(json.dumps(checkpointed[1]))
    found = diagnose(path).measured
    assert found.seconds["recompute"] > 0 and found.seconds["padding"] > 0 and found.unattributed < 0.1
    assert sum(found.seconds.values()) == pytest.approx(found.step)


def test_training_goes_on_as_it_did(checkpointed):
    plain = trainer(checkpoint="full", batching="padded")
    plain.train(6)
    assert plain.losses == checkpointed[0].losses and len(plain.phases) == len(checkpointed[0].phases)


def test_a_run_that_ends_early_leaves_what_it_had(tmp_path):
    _, body = traced(tmp_path, 2, 100, steps=4)
    assert [e["name"] for e in body["traceEvents"] if e["name"].startswith("step:")] == ["step:2", "step:3"]


def test_steps_that_never_come_leave_no_file(tmp_path):
    assert traced(tmp_path, 50, 60, steps=3)[1] is None


@pytest.mark.parametrize("text", ["5", "5:", ":5", "5:5", "7:5", "a:b", "-1:4"])
def test_wrong_steps_are_refused(text):
    with pytest.raises(ValueError, match="FIRST"):
        tracing.parse_steps(text)
