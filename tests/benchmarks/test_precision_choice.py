"""Plans that the planner chooses below 16 bits: predicted, run on the CPU in small, reported."""
import dataclasses
import json

import pytest
import torch

from benchmarks import precision_choice as choice
from benchmarks import precision_gate as gate
from benchmarks import precision_gpu as gpu
from costmodel.codec import encode
from costmodel.estimate import estimate


@pytest.fixture
def work(tmp_path):
    """Two plans of a small model, as `wide`."""
    plans = gate.recipes(512, 16)
    for name, plan in (("wide-chosen", plans["row-wise fp8"]), ("wide-opposite", gate.gates.restricted(plans["row-wise fp8"], ()))):
        (tmp_path / name).mkdir()
        dataclasses.replace(plan, prediction=encode(estimate(plan, None)), fingerprints={}).save(tmp_path / name / "plan.json")
    return tmp_path


def test_plans_run_once_and_are_reported(work, monkeypatch):
    monkeypatch.setattr(gpu, "GPU", torch.device("cpu"))
    rows = {row.name: row for row in choice.run(work, steps=2)}
    step = rows["gem-wide: step in fp8 as the planner chooses it"]
    assert step.value > 0 and "host" in step.note and "the planner's choice for gem-tiny against its opposite" in rows
    assert {f"prediction of these plans, {what}: median absolute error" for what in ("step time", "peak memory")} < set(rows) and len(rows) == 4
    monkeypatch.setattr(gpu, "run_plan", lambda *args, **options: pytest.fail("ran again"))
    assert {row.name for row in choice.run(work, steps=2)} == set(rows)


def test_budgets_and_saved_activations_are_compared(work):
    plan = choice.Plan.load(work / "wide-opposite" / "plan.json")
    figures = {"none": (1.0, 10.0, 20.0), "quantized": (1.03, 5.0, 15.0), "regions": (1.1, 4.0, 14.0), "global": (1.2, 4.0, 14.0)}
    for name, (seconds, saved, peak) in figures.items():
        folder = work / f"full-{name}"
        folder.mkdir()
        plan.save(folder / "plan.json")
        (folder / "step.json").write_text(json.dumps(encode(gpu.Step(seconds=seconds, phases={}, host={}, peak=peak, saved=saved, loss=1.0))))
    rows = {row.name: row for row in choice.report(work)}
    assert rows["quantised saved activations: less activation memory"].value == 0.5
    assert rows["quantised saved activations: step time"].value == pytest.approx(0.03) and rows["quantised saved activations: step time"].passed
    assert rows["budgets by region against the best one for all, measured: step time"].value == pytest.approx(1.2 / 1.1 - 1)


def test_gate_2_trains_pairs_of_a_seed_on_the_same_batches(tmp_path):
    go = tmp_path / "go"
    go.touch()
    found = gate.judge(gate.stream_recipes(1500, local_batch=100), 3, 1500, workers=1, go=go)
    mild = found["row-wise fp8"]
    assert len(mild.differences) == 3 and all(abs(d) < 0.05 for d in mild.differences) and len(set(mild.differences)) == 3
    assert found["built to fail"].mean > 2 * abs(mild.mean)
