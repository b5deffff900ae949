import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import CalibrationRequired, Interrupted, NoFeasiblePlan, RunFailed, TargetMissed, UsageError, exit_code

TINY = """\
cluster:
  name: pair
  device: {name: made-up, kind: cpu, peak_flops: {fp32: 50 GFLOP/s}, memory: 4 GB, memory_bandwidth: 10 GB/s, native_formats: [fp32]}
  num_hosts: 1
  devices_per_host: 2
  tiers: [{name: loop, scope: host, bandwidth: 1 GB/s, latency: 50 us}]
model: gem-tiny
workload: {name: w, global_batch: 64, lengths: {history: {kind: fixed, maximum: 8}}, num_steps: 4}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_help_is_quick_and_lists_the_verbs():
    """Processor time, the best of three starts: the machine may be busy with other tests, and then the clock says nothing."""
    best = 10.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = subprocess.run([sys.executable, "-m", "planner.cli", "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    for verb in ("doctor", "calibrate", "estimate", "search", "run", "whatif", "ledger", "data"):
        assert f"  {verb} " in answer.stdout
    assert best < 0.5


def test_help_imports_nothing_heavy():
    heavy = ("numpy", "pandas", "scipy", "torch", "pulp")
    program = f"import sys, planner.cli; planner.cli.main(['--help']); print([m for m in {heavy} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip().endswith("[]")


@pytest.mark.parametrize("verb", ["doctor", "calibrate", "estimate", "search", "run", "whatif", "ledger", "data"])
def test_every_verb_has_help_with_an_example(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"Example: planner {verb}" in " ".join(capsys.readouterr().out.split())


def test_no_verb_shows_the_help(capsys):
    assert main([]) == 0
    assert "Usage: planner" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serch", "x"], "serch"),
        (["search"], "scenario"),
        (["search", "quickstart", "--tim-limit", "3"], "tim-limit"),
        (["run", "x", "--steps", "many"], "--steps"),
        (["run", "x", "--steps", "0"], "--steps"),
        (["run", "x", "--trace", "8:5"], "FIRST < END"),
        (["run", "x", "--trace", "5"], "FIRST:END"),
        (["data", "movielen"], "did you mean 'movielens'"),
        (["estimate", "quikstart"], "did you mean 'quickstart'"),
        (["estimate", "no-such-folder/plan.json"], "no such file"),
        (["calibrate", "quickstart", "--preset", "slow"], "quick, full"),
        (["whatif", "quickstart"], "nothing to compare"),
    ],
)
def test_bad_usage_is_exit_2_without_a_traceback(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("model: gem-tiny", "modle: gem-tiny"), "tiny.yaml:7:1: modle: unknown key (did you mean 'model'?)"),
        (("memory: 4 GB", "memory: 4 GB/s"), "cluster.device.memory: '4 GB/s' is in bytes/s"),
        (("maximum: 8", "maximum: -8"), "workload.lengths.history"),
        (("global_batch: 64", "global_batch: 0"), "global_batch must be >= 1, got 0"),
        (("devices_per_host: 2", "devices_per_host: 2.5"), "tiny.yaml:5:3: cluster.devices_per_host"),
    ],
)
def test_a_bad_file_is_exit_2_with_file_line_and_column(tiny, change, words, capsys):
    tiny.write_text(TINY.replace(*change))
    assert main(["estimate", str(tiny)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_errors_are_json_too_when_json_is_asked_for(tiny, capsys):
    tiny.write_text(TINY.replace("model: gem-tiny", "modle: gem-tiny"))
    assert main(["estimate", str(tiny), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 2
    assert {f["path"] for f in error["faults"]} == {"modle", "model"}
    assert any(f["position"].endswith("tiny.yaml:7:1") for f in error["faults"])


def test_exit_codes():
    codes = {UsageError("x"): 2, NoFeasiblePlan("x"): 3, TargetMissed("x"): 4, CalibrationRequired("x"): 5, RunFailed("x"): 6, Interrupted("x"): 130}
    assert all(exit_code(error) == code for error, code in codes.items())
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(ZeroDivisionError()) == 1


def test_a_bug_is_one_line_and_the_traceback_only_on_demand(monkeypatch, capsys):
    from planner import doctor

    def broken():
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(doctor, "examine", broken)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: this should not happen: ZeroDivisionError: surprise")
    assert "Traceback" not in captured.err
    monkeypatch.setenv("PLANNER_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_an_interrupt_is_130(monkeypatch, capsys):
    from planner import doctor

    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", stopped)
    assert main(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_estimate_of_a_scenario(tiny, capsys):
    assert main(["estimate", str(tiny)]) == 0
    captured = capsys.readouterr()
    for words in ("forward", "saved_activations", "limited by", "90 % interval", "- per billion examples"):
        assert words in captured.out
    assert "no calibration of made-up: times are rooflines" in captured.err
    assert all(line == line.rstrip() for line in captured.out.splitlines())
    assert "\x1b" not in captured.out


def test_estimate_as_json_and_as_a_plan(tiny, tmp_path, capsys):
    assert main(["estimate", str(tiny), "--json", "--quiet", "-o", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    step = answer["estimate"]["step_time"]
    assert step["low"] < step["value"] < step["high"]
    assert sum(p["value"] for p in answer["estimate"]["phases"].values()) == pytest.approx(step["value"])
    assert any("no calibration" in note for note in answer["notes"])
    for reference in (tmp_path / "out", tmp_path / "out" / "plan.json"):
        assert main(["estimate", str(reference), "--json", "--quiet"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["estimate"] == answer["estimate"]
        assert again["plan"] == answer["plan"]


def test_the_bound_is_not_above_the_simulation(tiny, capsys):
    values = []
    for flags in ([], ["--bound"]):
        assert main(["estimate", str(tiny), "--json", "--quiet", *flags]) == 0
        values.append(json.loads(capsys.readouterr().out)["estimate"]["step_time"]["value"])
    assert values[1] <= values[0]


def test_calibrated_only_is_exit_5(tiny, capsys):
    assert main(["estimate", str(tiny), "--calibrated-only"]) == 5
    assert "no calibration of made-up" in capsys.readouterr().err


def test_a_foreign_or_changed_plan_is_exit_2(tiny, tmp_path, capsys):
    assert main(["estimate", str(tiny), "--quiet", "-o", str(tmp_path / "out")]) == 0
    plan = tmp_path / "out" / "plan.json"
    text = plan.read_text()
    capsys.readouterr()
    for before, after, words in (
        ('"dim": 64', '"dim": 96', "content_hash"),
        ('"schema_version": 1', '"schema_version": 7', "schema_version 7 is not 1"),
        ('"fsdp": 2', '"fsdp": 4', "layout"),
        ("{", "", "not JSON"),
    ):
        plan.write_text(text.replace(before, after, 1))
        assert main(["estimate", str(plan)]) == 2, before
        assert words in capsys.readouterr().err


def test_a_pipe_that_closes_is_no_error(tiny):
    command = f"{sys.executable} -m planner.cli estimate {tiny} --quiet | head -n 1"
    answer = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert answer.stderr == ""
    assert answer.stdout.startswith("tiny: gem-tiny on pair")


def test_the_ledger_verb(tmp_path, capsys):
    from planner.ledger import Ledger
    from tests.planner.test_ledger import ENTRY

    book = tmp_path / "l.sqlite"
    assert main(["ledger", "--ledger", str(book)]) == 0
    assert "no runs yet" in capsys.readouterr().out
    Ledger(book).append(ENTRY)
    assert main(["ledger", "--ledger", str(book)]) == 0
    shown = capsys.readouterr().out
    assert "+20.0%" in shown and "0.8600" in shown
    assert main(["ledger", "--ledger", str(book), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["steps"] == 10
    assert main(["ledger", "--ledger", str(book), "--export", str(tmp_path / "l.csv")]) == 0
    assert (tmp_path / "l.csv").read_text().startswith("time,scenario")
    book.write_bytes(b"garbage that is long enough to be looked at as a file header, one hundred bytes of it at the very least")
    capsys.readouterr()
    assert main(["ledger", "--ledger", str(book)]) == 2
    assert "not a usable ledger" in capsys.readouterr().err


def test_every_scenario_can_be_estimated(capsys):
    from planner import catalogue

    for name in catalogue.names("scenarios"):
        assert main(["estimate", name, "--json", "--quiet"]) == 0, name
        answer = json.loads(capsys.readouterr().out)
        assert answer["estimate"]["step_time"]["value"] > 0
        assert (answer["estimate"]["dollars_per_billion_examples"] is None) == (name == "quickstart")
