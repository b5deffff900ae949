"""The risk budget in measured units: read from a file, assumed and said so elsewhere."""
import dataclasses
import json

import pytest

from planner import runner
from planner.errors import Interrupted, UsageError
from planner.scenario import load_scenario
from planner.sensitivity import risks, run
from planner.space import RISK, SAVED_RISK, build_space


def write(path, model="gem-wide", **noise):
    rows = [{"region": "interaction", "recipe": recipe, "noise": value, "gradient_noise": 10 * value} for recipe, value in noise.items()]
    path.write_text(json.dumps({"model": model, "rows": [*rows, {"region": "heads", "recipe": "fp8_row", "refused": "width"}]}))
    return path


def test_a_file_replaces_assumed_figures_and_what_it_lacks_is_said(tmp_path):
    base = load_scenario("gem-wide-8xh200", with_variants=False)
    path = write(tmp_path / "s.json", bf16=2e-6, fp8_row=7e-4, quantized=5e-6)
    scenario = dataclasses.replace(base, search=dataclasses.replace(base.search, risk_budget=1e6, sensitivity=path))
    space = build_space(scenario)
    risk = {(c.precision, c.checkpoint): c.risk for c in space.regions["interaction"]}
    assert risk["bf16", "none"] == pytest.approx(2.0) and risk["fp8_row", "none"] == pytest.approx(700.0)
    assert risk["bf16", "quantized"] == pytest.approx(2.0 + 30.0) and risk["bf16", "quantized4"] == pytest.approx(2.0 + SAVED_RISK["quantized4"])
    others = [c.risk for name, choices in space.regions.items() if name != "interaction" for c in choices
              if (c.precision, c.checkpoint) == ("bf16", "none")]
    assert others and set(others) == {RISK["bf16"]}
    said = [e for e in space.excluded if e.kind == "assumed"]
    assert any("interaction" in e.what and "fp8_tensor" in e.what and "fp8_row" not in e.what for e in said)


def test_a_file_of_another_model_or_none_at_all(tmp_path):
    with pytest.raises(UsageError, match="measured on model other"):
        risks(write(tmp_path / "s.json", model="other", bf16=1e-6), "gem-wide")
    with pytest.raises(UsageError, match="not a file of `planner sensitivity`"):
        risks(tmp_path / "missing.json", "gem-wide")
    assert risks(None, "gem-wide") == {}


def test_formats_below_16_bits_are_offered_when_a_budget_or_a_pin_asks():
    base = load_scenario("gem-wide-8xh200", with_variants=False)
    plain = build_space(base)
    assert {c.precision for by in plain.regions.values() for c in by} <= {"fp32", "bf16"}
    assert any("training changes" in e.why for e in plain.excluded)
    asked = build_space(dataclasses.replace(base, search=dataclasses.replace(base.search, risk_budget=1e5)))
    assert "fp8_row" in {c.precision for by in asked.regions.values() for c in by}


def test_an_interrupted_measurement_is_130_and_a_bad_folder_is_said_before_it_starts(tmp_path, monkeypatch):
    scenario = load_scenario("quickstart", with_variants=False)
    monkeypatch.setattr(runner, "check_runtime", lambda: None)
    monkeypatch.setattr(runner, "follow", lambda *_, log, **__: runner.Outcome(returncode=1, interrupted=True, log=log))
    with pytest.raises(Interrupted, match="nothing was written"):
        run(scenario, tmp_path / "s.json", batches=1, samples=8)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no folder"):
        run(scenario, tmp_path / "file" / "s.json", batches=1, samples=8)
