"""Kept answers are what searching again gives, and equal questions only get them."""
from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest
from typer.testing import CliRunner

from planner import answers, api
from planner.cli import app
from planner.scenario import load_scenario
from planner.search import search


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANNER_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "searches"


def test_the_kept_answer_is_the_searched_one_byte_for_byte(tmp_path, state):
    outputs = []
    for name, flags in (("first", ()), ("kept", ()), ("again", ("--no-cache",))):
        done = CliRunner().invoke(app, ["search", "quickstart", "-o", str(tmp_path / name), "--quiet", *flags])
        assert done.exit_code == 0, done.output
        outputs.append([(tmp_path / name / file).read_bytes() for file in ("plan.json", "candidates.csv", "candidates.parquet")])
        assert len(list(state.glob("*.json"))) == 1
    assert outputs[0] == outputs[1] == outputs[2]
    result, _ = api.search("quickstart")
    assert result.kept is not None and result.plan.save(tmp_path / "plan.json") is None
    assert (tmp_path / "plan.json").read_bytes() == outputs[0][0]


@pytest.mark.parametrize("change", [
    lambda s: dataclasses.replace(s, workload=dataclasses.replace(s.workload, local_batch=(s.workload.local_batch or 64) * 2, global_batch=None)),
    lambda s: dataclasses.replace(s, cluster=dataclasses.replace(s.cluster, memory_budget=9e9)),
    lambda s: dataclasses.replace(s, pins=dataclasses.replace(s.pins, precision={"heads": "bf16", "*": "fp32"})),
    lambda s: dataclasses.replace(s, pins=dataclasses.replace(s.pins, precision={"*": "fp32", "heads": "bf16"})),
    lambda s: dataclasses.replace(s, search=dataclasses.replace(s.search, risk_budget=3.0)),
    lambda s: dataclasses.replace(s, seed=7),
], ids=["batch", "memory", "pins", "order of pins", "risk", "seed"])
def test_another_question_has_another_key(change):
    scenario = load_scenario("quickstart", with_variants=False)
    paths = {answers.answer_path(s, None, gap=0.01, top=5) for s in (scenario, change(scenario))}
    assert len(paths) == 2
    pinned = [dataclasses.replace(scenario, pins=dataclasses.replace(scenario.pins, precision=p)) for p in (
        {"heads": "bf16", "*": "fp32"}, {"*": "fp32", "heads": "bf16"})]
    assert len({answers.answer_path(s, None, gap=0.01, top=5) for s in pinned}) == 2


def test_gap_number_of_plans_and_code_are_part_of_the_question_time_is_not(monkeypatch):
    scenario = load_scenario("quickstart", with_variants=False)
    path = answers.answer_path(scenario, None, gap=0.01, top=5)
    hurried = dataclasses.replace(scenario, search=dataclasses.replace(scenario.search, time_limit=1.0))
    assert path == answers.answer_path(hurried, None, gap=0.01, top=5)
    assert path != answers.answer_path(scenario, None, gap=0.02, top=5) != answers.answer_path(scenario, None, gap=0.01, top=4)
    monkeypatch.setattr(answers, "code_version", lambda: "another")
    assert path != answers.answer_path(scenario, None, gap=0.01, top=5)


def test_a_damaged_answer_is_searched_again_and_the_oldest_go(tmp_path, state, monkeypatch):
    result = search(load_scenario("quickstart", with_variants=False), time_limit=60.0)
    monkeypatch.setattr(answers, "KEPT", 2)
    for k in range(3):
        answers.keep(result, state / f"{k}.json")
        os.utime(state / f"{k}.json", (k, k))
    assert sorted(p.name for p in state.glob("*")) == ["1.json", "2.json"]
    assert answers.recall(state / "0.json") is None
    assert dataclasses.replace(answers.recall(state / "2.json"), kept=None) == result
    body = json.loads((state / "1.json").read_text())
    (state / "1.json").write_text(json.dumps({**body, "ties": "many"}))
    assert answers.recall(state / "1.json") is None


def test_a_search_that_a_limit_cuts_short_is_feasible_with_its_gap_and_not_kept(state):
    done = CliRunner().invoke(app, ["search", "gem-512xh200", "--time-limit", "0.1", "--top", "1"])
    assert done.exit_code == 0, done.output
    gap = float(re.search(r"feasible, gap (\d+\.\d+)%: ", done.output)[1])
    assert 0 < gap < 100 and f"no plan can be more than {gap:.2f}% faster" in " ".join(done.output.split())
    assert not list(state.glob("*"))
