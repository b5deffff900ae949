import dataclasses
import json

import pytest

from costmodel.codec import encode
from planner import api, whatif
from planner.cli import main
from planner.configure import default_plan
from planner.errors import NoFeasiblePlan
from tests.planner.test_cli import TINY

VARIED = TINY + (
    "variants:\n  - {name: fast links, set: {cluster.tiers.loop.bandwidth: 10 GB/s}}\n  - {name: no room, set: {memory_budget: 1 MB}}\n"
    "  - {name: priced, set: {cluster.price: {per_device_hour: 2 $/h, source: 'made up'}}}\n"
)


@dataclasses.dataclass
class Found:
    plan: object


@pytest.fixture
def varied(tmp_path, monkeypatch):
    """A scenario with variants, and a search that predicts the default plan, or finds nothing in 1 MB."""
    path = tmp_path / "varied.yaml"
    path.write_text(VARIED)

    def search(scenario, **_):
        from costmodel.estimate import estimate

        if scenario.cluster.usable_memory < 1e7:
            raise NoFeasiblePlan("tables need 0.4 MiB\nmore words")
        plan, _ = default_plan(scenario)
        return Found(dataclasses.replace(plan, prediction=encode(estimate(plan, None)))), None

    monkeypatch.setattr(api, "search", search)
    return path


def test_rows_stand_against_the_base(varied):
    base, fast, none, priced = whatif.compare(varied)
    assert (base.name, base.speedup, base.different) == ("varied", 1.0, ())
    assert fast.speedup is not None and fast.speedup > 1
    assert fast.changes == {"cluster.tiers.loop.bandwidth": "10 GB/s"}
    assert none.step_time_s is None and none.reason.startswith("tables need")
    assert base.dollars_per_billion_examples is None and priced.dollars_per_billion_examples > 0
    assert priced.cost_ratio is None  # the base has no price
    assert priced.step_time_s == base.step_time_s


def test_what_changes_for_the_whole_job_is_said(varied, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    varied.write_text(TINY + "variants:\n  - {name: padded, set: {batching: padded}}\n")
    base, padded = whatif.compare(varied)
    assert padded.different[:1] == ("job",) and base.job != padded.job
    assert main(["whatif", str(varied)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("padded")


def test_the_table(varied, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal folds cells
    assert main(["whatif", str(varied)]) == 0
    captured = capsys.readouterr()
    assert "fast links" in captured.out and "no feasible plan" in captured.out and "tables need 0.4 MiB" in captured.out
    assert "searching: priced" in captured.err


def test_json_and_files(varied, tmp_path, capsys):
    import pandas as pd

    assert main(["whatif", str(varied), "--json", "--quiet", "-o", str(tmp_path / "out")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["base"] == "varied"
    assert [row["name"] for row in answer["rows"]] == ["varied", "fast links", "no room", "priced"]
    frame = pd.read_csv(tmp_path / "out" / "whatif.csv")
    assert list(frame["name"]) == [row["name"] for row in answer["rows"]]
    assert list(pd.read_parquet(tmp_path / "out" / "whatif.parquet")["name"]) == list(frame["name"])


def test_nothing_feasible_at_all_is_exit_3(varied, capsys):
    varied.write_text(VARIED + "memory_budget: 2 MB\n")
    assert main(["whatif", str(varied)]) == 3
    error = capsys.readouterr().err
    assert "priced: tables need 0.4 MiB" in error and "Traceback" not in error


def test_a_variant_with_a_mistake_is_exit_2_with_its_name(varied, capsys):
    varied.write_text(VARIED.replace("bandwidth: 10 GB/s}}", "bandwidth: 10 GB}}"))
    assert main(["whatif", str(varied)]) == 2
    assert "(in variant 'fast links')" in capsys.readouterr().err
