"""Residuals of the ledger's runs in the calibration: `planner calibrate --from-ledger`."""
import dataclasses
import json

import pytest

from costmodel.calibration import load
from costmodel.codec import encode
from costmodel.conformal import FEWEST
from costmodel.estimate import estimate
from planner import calibrate
from planner.cli import main
from planner.configure import default_plan
from planner.ledger import Entry, Ledger
from planner.scenario import load_scenario
from tests.planner.test_calibrate import BUNDLED, bench, environment, samples  # noqa: F401  (bench: a fixture)

SLOWER = (1.30, 1.32, 1.35, 1.28, 1.31)


def entry(plan, folder, calibration, factor: float, **changes) -> Entry:
    """A run of `plan` in which everything took `factor` times what `calibration` predicts."""
    folder.mkdir(exist_ok=True)
    made = estimate(plan, calibration)
    dataclasses.replace(plan, prediction=encode(made)).save(folder / "plan.json")
    known = {"time": "2026-12-01T12:00:00+00:00", "scenario": "tiny", "plan_identity": plan.identity(), "cluster": plan.cluster.name,
             "device": plan.cluster.device.name, "model": "m", "workload": "w", "world_size": plan.layout.world_size, "layout": "l", "local_batch": 1,
             "status": "completed", "measured_step_s": factor * made.step_time.value, "directory": str(folder),
             "measured_phases_s": {name: factor * quantity.value for name, quantity in made.phases.items()}}  # fmt: skip
    return Entry(**{**known, **changes})


@pytest.fixture
def known(bench):  # noqa: F811
    """(scenario file, its plan, the calibration of its made-up CPU)."""
    scenario = load_scenario(bench)
    calibrate.store(scenario.cluster.device, environment(), samples(1) + samples(2))
    plan, _ = default_plan(scenario)
    return bench, plan, load(calibrate.calibration_path("made-up"))


def test_intervals_follow_what_runs_were_off_by(known, tmp_path, capsys):
    file, plan, calibration = known
    runs = [entry(dataclasses.replace(plan, seed=i), tmp_path / f"run-{i}", calibration, factor) for i, factor in enumerate(SLOWER)]
    again = dataclasses.replace(runs[0], time="later")
    gone = dataclasses.replace(runs[1], time="gone", directory=str(tmp_path / "nowhere"))
    failed = dataclasses.replace(runs[2], time="failed", status="failed", measured_step_s=None)
    book = Ledger()
    book.append_all([*runs, again, gone, failed])
    before = estimate(plan, calibration).step_time
    assert before.high < 1.3 * before.value
    assert main(["calibrate", str(file), "--from-ledger", "--json"]) == 0
    out, err = capsys.readouterr()
    folded = json.loads(out)["from_ledger"]
    assert (folded["runs"], folded["plans"]) == (6, 5) and folded["residuals"] >= FEWEST
    assert "1 run: not completed" in err and "1 run: their folder or its plan is gone" in err
    path = calibrate.calibration_path("made-up")
    after = load(path)
    assert (after.curves, after.constants) == (calibration.curves, calibration.constants)
    assert {len(values) for name, values in after.run_residuals.items() if name.startswith("step@")} == {5}
    step = estimate(plan, after).step_time
    assert step.value == before.value and step.high > 1.35 * step.value > step.low
    written = path.read_bytes()
    assert main(["calibrate", str(file), "--from-ledger", "--quiet"]) == 0
    assert path.read_bytes() == written
    capsys.readouterr()


def test_one_plan_run_often_says_nothing_of_another(known, tmp_path, capsys):
    file, plan, calibration = known
    one = entry(plan, tmp_path / "run", calibration, 1.3)
    Ledger().append_all([dataclasses.replace(one, time=str(i)) for i in range(30)])
    assert main(["calibrate", str(file), "--from-ledger"]) == 0
    assert f"from {FEWEST} on" in capsys.readouterr().err
    assert estimate(plan, load(calibrate.calibration_path("made-up"))).step_time == estimate(plan, calibration).step_time


def test_what_cannot_be_folded_is_refused(known, tmp_path, capsys):
    file, plan, calibration = known
    path = calibrate.calibration_path("made-up")
    before = path.read_bytes()
    assert main(["calibrate", str(file), "--from-ledger"]) == 2
    assert "no run of made-up" in capsys.readouterr().err
    run = entry(plan, tmp_path / "run", calibration, 1.3)
    Ledger().append(dataclasses.replace(run, plan_identity="of another plan"))
    assert main(["calibrate", str(file), "--from-ledger"]) == 2
    assert "gone or another" in capsys.readouterr().err
    assert main(["calibrate", str(file), "--from-ledger", "--if-needed"]) == 2
    assert path.read_bytes() == before
    Ledger().append(run)
    path.unlink()
    assert main(["calibrate", str(file), "--from-ledger"]) == 5
    assert "there is no calibration of made-up" in capsys.readouterr().err


def test_residuals_that_ship_with_the_calibration_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "_BUNDLED", BUNDLED)
    scenario = load_scenario("gem-1xh200")
    shipped = load(BUNDLED / "H200-SXM.json")
    plan, _ = default_plan(scenario)
    Ledger().append(entry(plan, tmp_path / "run", shipped, 1.05))
    for _ in range(2):
        assert main(["calibrate", "gem-1xh200", "--from-ledger", "--quiet", "--json"]) == 0
        after = load(calibrate.calibration_path("H200-SXM"))
        count = json.loads(capsys.readouterr().out)["from_ledger"]["residuals"]
        assert sum(map(len, after.run_residuals.values())) == count + sum(map(len, shipped.run_residuals.values()))
    assert after.curves == shipped.curves
