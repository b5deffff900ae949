import dataclasses
import json
import sys
import textwrap
from pathlib import Path

import pytest

from costmodel import launch
from costmodel.calibration import load
from costmodel.comms import GroupShape, collective_seconds
from costmodel.estimate import estimate
from costmodel.samples import Environment, Sample, read_samples, write_samples
from planner import calibrate
from planner.api import subject_plans
from planner.cli import main
from planner.configure import default_plan
from planner.errors import CalibrationRequired, UsageError
from planner.scenario import load_scenario
from tests.planner.test_cli import TINY

BUNDLED = calibrate._BUNDLED
HASHES = {"linear": "aaa", "layer_norm": "bbb"}


def environment(**changes) -> Environment:
    known = {
        "device_name": "x86_64",
        "device_kind": "cpu",
        "threads": 1,
        "allocator": launch.allocator(),
        "source_hashes": HASHES,
        "date": "2026-11-29",
    }
    return Environment(**{**known, **changes})


def samples(ranks: int, factor: float = 1.0) -> list[Sample]:
    made = []
    for m in (64, 256, 1024, 4096):
        for phase, cost in (("forward", 1.0), ("backward", 2.0)):
            seconds = factor * cost * (2e-5 + 2 * m * 64 * 64 / 3e10)
            made.append(Sample(op="linear", phase=phase, features={"m": m, "k": 64, "n": 64}, seconds=seconds, noise=0.01, active_ranks=ranks))
    return made


# Stands in for the microbenchmark: writes samples that were made beforehand, or fails in the way that $FAKE names.
FAKE_MICROBENCH = """
import json, os, shutil, sys
arguments = sys.argv[1:]
ranks = int(arguments[0])
out = arguments[arguments.index("--out") + 1]
plans = arguments[arguments.index("--models") + 1:]
assert all(json.load(open(plan))["schema_version"] == 1 for plan in plans), plans
if os.environ.get("FAKE") == "dies" and ranks == 2:
    sys.stderr.write("RuntimeError: peer is gone\\n"); sys.exit(1)
assert os.environ["OMP_NUM_THREADS"] == "1"
print(json.dumps({"event": "calibrate", "what": "ops", "done": 1, "of": 2}))
shutil.copy(os.path.join(FOLDER, f"{ranks}.jsonl"), out)
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scenario on a made-up CPU, and a stand-in for the microbenchmark."""
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(TINY + "precision: {'*': fp32}\n")
    for ranks in (1, 2):
        write_samples(tmp_path / f"{ranks}.jsonl", environment(), samples(ranks))
    script = tmp_path / "bench.py"
    script.write_text(f"FOLDER = {str(tmp_path)!r}\n" + textwrap.dedent(FAKE_MICROBENCH))
    monkeypatch.setattr(launch, "torchrun_command",
                        lambda module, arguments, *, ranks_per_host: [sys.executable, str(script), str(ranks_per_host), *arguments])  # fmt: skip
    monkeypatch.setattr(calibrate, "source_hashes", lambda *_, **__: dict(HASHES))
    return scenario


def test_measured_fitted_and_kept(bench, capsys):
    assert main(["calibrate", str(bench), "--json", "--quiet"]) == 0
    answer = json.loads(capsys.readouterr().out)
    path = calibrate.calibration_path("made-up")
    assert answer["path"] == str(path) and answer["device"] == "made-up"
    assert {(c["op"], c["active_ranks"]) for c in answer["curves"]} == {("linear", 1), ("linear", 2)}
    assert load(path).environment.threads == 1
    assert len(read_samples(calibrate.samples_path("made-up"))[1]) == 16
    assert main(["estimate", str(bench), "--json", "--quiet"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["calibration"] == str(path)
    assert any(source in answer["estimate"]["by_source"] for source in ("measured", "interpolated"))


def test_if_needed_measures_once(bench, monkeypatch, capsys):
    assert main(["calibrate", str(bench), "--if-needed", "--quiet"]) == 0
    monkeypatch.setenv("FAKE", "dies")
    assert main(["calibrate", str(bench), "--if-needed"]) == 0
    assert "is there and current" in capsys.readouterr().err
    monkeypatch.setattr(calibrate, "source_hashes", lambda: {**HASHES, "linear": "changed"})
    assert main(["calibrate", str(bench), "--if-needed"]) == 6


def test_if_needed_measures_again_for_other_shapes_or_sources(bench, monkeypatch, capsys):
    def said(*changes: tuple[str, str]) -> str:
        text = bench.read_text()
        for change in changes:
            text = text.replace(*change)
        bench.write_text(text)
        capsys.readouterr()
        assert main(["calibrate", str(bench), "--if-needed"]) == 0
        return capsys.readouterr().err

    assert "missing or stale" in said()
    assert "there and current" in said()
    assert "there and current" in said(("num_steps: 4", "num_steps: 9"))
    assert "measured with other shapes (scenario tiny)" in said(("maximum: 8", "maximum: 16"))
    assert "there and current" in said()
    monkeypatch.setattr(calibrate, "source_hashes", lambda *_, **__: {**HASHES, "linear": "changed"})
    assert "missing or stale" in said()


def test_calibrated_only_wants_the_formats_and_the_shapes(bench, capsys):
    """The stand-in times linear layers in fp32 alone: attention and collectives stay rooflines, and bf16 was never seen."""
    assert main(["calibrate", str(bench), "--quiet", "--json"]) == 0
    capsys.readouterr()
    for verb in ("estimate", "search"):
        assert main([verb, str(bench), "--calibrated-only", "--quiet"]) == 5
        assert "of the step has no curve" in capsys.readouterr().err
    bench.write_text(bench.read_text().replace("fp32: 50 GFLOP/s", "fp32: 50 GFLOP/s, bf16: 50 GFLOP/s").replace("{'*': fp32}", "{'*': bf16}"))
    assert main(["estimate", str(bench), "--calibrated-only", "--quiet"]) == 5
    assert "no linear layer was timed in bf16" in capsys.readouterr().err


def test_a_failure_keeps_the_earlier_calibration(bench, monkeypatch, capsys):
    assert main(["calibrate", str(bench), "--quiet"]) == 0
    before = calibrate.calibration_path("made-up").read_bytes()
    monkeypatch.setenv("FAKE", "dies")
    assert main(["calibrate", str(bench)]) == 6
    assert "RuntimeError: peer is gone" in capsys.readouterr().err
    assert calibrate.calibration_path("made-up").read_bytes() == before


def test_a_stale_calibration_is_a_warning_and_wider(bench, monkeypatch, capsys):
    assert main(["calibrate", str(bench), "--quiet"]) == 0
    cluster = load_scenario(bench).cluster
    assert calibrate.find(cluster).notes == ()
    monkeypatch.setattr(calibrate, "source_hashes", lambda: {**HASHES, "linear": "changed"})
    found = calibrate.find(cluster)
    assert found.calibration is not None and found.calibration.stale_kinds == ("linear",)
    assert "stale for linear (their sources changed)" in found.notes[0]
    capsys.readouterr()
    assert main(["estimate", str(bench)]) == 0
    assert "stale for linear" in capsys.readouterr().err
    assert main(["estimate", str(bench), "--calibrated-only"]) == 5
    with pytest.raises(CalibrationRequired, match="stale"):
        calibrate.find(cluster, calibrated_only=True)


def test_other_threads_or_allocator_settings_make_everything_stale(bench):
    cluster = load_scenario(bench).cluster
    calibrate.store(cluster.device, environment(threads=8), samples(1))
    found = calibrate.find(cluster)
    assert found.calibration is not None and found.calibration.stale_kinds == ("layer_norm", "linear")
    assert "other threads or allocator settings" in found.notes[0]


def test_a_damaged_calibration_is_exit_2_and_names_the_field(bench, capsys):
    assert main(["calibrate", str(bench), "--quiet"]) == 0
    path = calibrate.calibration_path("made-up")
    body = json.loads(path.read_text())
    capsys.readouterr()
    for change, words in (({"schema_version": 9}, "schema_version"), ({"curves": 3}, "curves"), ({"colour": 1}, "colour")):
        path.write_text(json.dumps({**body, **change}))
        assert main(["estimate", str(bench)]) == 2
        assert words in capsys.readouterr().err
    path.write_text("{")
    assert main(["estimate", str(bench), "--calibration", str(path)]) == 2
    assert "not JSON" in capsys.readouterr().err
    assert main(["estimate", str(bench), "--calibration", str(path) + "x"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_imports_replace_what_they_measure_anew(bench, tmp_path, capsys):
    device = load_scenario(bench).cluster.device
    file = tmp_path / "mine.jsonl"
    write_samples(file, environment(), samples(1))
    assert main(["calibrate", str(bench), "--import", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["imported"] == 8
    write_samples(file, environment(), samples(1, factor=2.0) + samples(2))
    assert calibrate.import_file(file, device)[1] == 16
    kept = read_samples(calibrate.samples_path(device.name))[1]
    assert len(kept) == 16
    assert {s.seconds for s in kept if s.active_ranks == 1} == {s.seconds for s in samples(1, factor=2.0)}


def test_collectives_are_added_to_what_is_there(bench, tmp_path):
    device = load_scenario(bench).cluster.device
    rows = tmp_path / "nccl.csv"
    rows.write_text("collective,group,bytes,seconds\nall_gather,2,1048576,0.001\nall_gather,2,4194304,0.003\n")
    with pytest.raises(UsageError, match="collectives only"):
        calibrate.import_file(rows, device)
    calibrate.store(device, environment(), samples(1))
    path, count = calibrate.import_file(rows, device)
    assert count == 2
    assert {s.op for s in read_samples(calibrate.samples_path(device.name))[1]} == {"linear", "all_gather"}
    assert load(path).matches(device)


def test_collectives_of_a_gpu_that_nobody_can_touch(tmp_path, monkeypatch, capsys):
    """No samples are kept of the bundled H200, whose calibration the first import was once refused for."""
    monkeypatch.setattr(calibrate, "_BUNDLED", BUNDLED)
    cluster = load_scenario("gem-8xh200").cluster
    before = calibrate.find(cluster).calibration
    assert before is not None
    rows = tmp_path / "nccl.csv"
    head = "collective,group,bytes,seconds\n"
    rows.write_text(head + "all_gather,8,1048576,0.001\nall_gather,8,4194304,0.003\n")
    assert main(["calibrate", "gem-8xh200", "--import", str(rows), "--quiet"]) == 0
    rows.write_text(head + "all_gather,8,4194304,0.004\nall_gather,4,4194304,0.002\n")
    assert main(["calibrate", "gem-8xh200", "--import", str(rows), "--quiet"]) == 0
    found = calibrate.find(cluster)
    assert found.path == calibrate.calibration_path("H200-SXM") and found.notes == () and found.calibration is not None
    curve = found.calibration.curve("all_gather", "nccl", "step", "fp32", 1)
    assert curve is not None
    assert [row[:3] for row in curve.points] == [[1048576.0, 8.0, 0.001], [4194304.0, 4.0, 0.002], [4194304.0, 8.0, 0.004]]
    assert [c for c in found.calibration.curves if c.op != "all_gather"] == list(before.curves)
    assert collective_seconds("all_gather", 4194304.0, GroupShape(size=8), cluster, found.calibration)[0] == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("name", "content", "words"), [("a.jsonl", "{", "a.jsonl"), ("a.log", "no rows", "a.log"), ("gone.log", None, "no such file")]
)
def test_bad_imports_are_exit_2(bench, tmp_path, name, content, words, capsys):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["calibrate", str(bench), "--import", str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err
    assert not calibrate.calibration_path("made-up").exists()


@pytest.mark.parametrize("spoilt", [
    Sample(op="constant:step_overhead", variant="1", phase="step", features={}, seconds=-1.0),
    Sample(op="linear", phase="forward", features={"m": 1e300, "k": 1e300, "n": 1e300}, seconds=1.0),
    Sample(op="block:mlp", phase="forward", features={}, seconds=1.0),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_import_that_makes_no_calibration_changes_nothing(bench, tmp_path, spoilt, capsys):
    """Once it left behind a calibration and samples with which every later command ended."""
    device = load_scenario(bench).cluster.device
    calibrate.store(device, environment(), samples(1))
    files = calibrate.calibration_path(device.name), calibrate.samples_path(device.name)
    before = [file.read_bytes() for file in files]
    write_samples(tmp_path / "mine.jsonl", environment(), [spoilt])
    assert main(["calibrate", str(bench), "--import", str(tmp_path / "mine.jsonl")]) == 2
    assert "mine.jsonl: the measurements of made-up cannot be fitted" in capsys.readouterr().err
    assert [file.read_bytes() for file in files] == before


def test_samples_of_another_kind_of_device_are_refused(bench):
    device = load_scenario(bench).cluster.device
    with pytest.raises(UsageError, match=r"measured on a gpu \(NVIDIA H200\), made-up is a cpu"):
        calibrate.store(device, environment(device_kind="cuda", device_name="NVIDIA H200"), samples(1))


def test_a_cpus_calibration_says_nothing_of_a_gpu(bench, capsys):
    calibrate.store(load_scenario(bench).cluster.device, environment(), samples(1))
    assert main(["estimate", "gem-1xh200", "--calibration", str(calibrate.calibration_path("made-up"))]) == 2
    assert "environment.device_kind: cpu; nothing of it carries over to H200-SXM, a gpu" in capsys.readouterr().err
    assert main(["estimate", str(bench), "--calibration", str(BUNDLED / "H200-SXM.json")]) == 2
    assert "environment.device_kind: cuda" in capsys.readouterr().err


def test_another_gpus_efficiencies_are_carried_over(bench):
    h100 = dataclasses.replace(load_scenario("gem-8xh200").cluster.device, name="H100-SXM")
    calibrate.store(h100, environment(device_kind="cuda", device_name="NVIDIA H100"), samples(1))
    found = calibrate.find(
        dataclasses.replace(load_scenario("gem-512xh200", with_variants=False).cluster, device=dataclasses.replace(h100, name="B300"))
    )
    assert found.path is not None and found.calibration is not None
    assert any("carried over" in note for note in found.notes)


def test_the_runtime_says_what_its_sources_are():
    pytest.importorskip("torch")
    hashes = calibrate.source_hashes()
    assert {"linear", "attention", "embedding_lookup"} <= set(hashes)
    assert calibrate.source_hashes() == hashes


def test_every_number_format_that_may_be_chosen_is_timed(bench):
    pinned = subject_plans(load_scenario(bench))
    assert [{o.precision for r in p.regions for o in r.options} for p in pinned] == [{"fp32"}]
    searched = subject_plans(load_scenario("gem-8xh200"))
    assert [{o.precision for r in p.regions for o in r.options} for p in searched] == [{"fp32"}, {"bf16"}]


def test_several_hosts_are_not_calibrated_at_once(capsys):
    assert main(["calibrate", "gem-512xh200"]) == 2
    assert "calibrate on one host" in capsys.readouterr().err


def test_a_gpu_calibration_is_compared_under_its_own_torch():
    pytest.importorskip("torch")
    here, there = calibrate.source_hashes(), calibrate.source_hashes(torch="0.0.1")
    assert set(here) == set(there) and not set(here.values()) & set(there.values())
    assert calibrate.source_hashes(torch="0.0.1") == there == calibrate.source_hashes(torch="0.0.1+cu130")


def test_the_bundled_calibration_of_the_h200_is_found(monkeypatch):
    monkeypatch.setattr(calibrate, "_BUNDLED", BUNDLED)
    scenario = load_scenario("gem-1xh200")
    found = calibrate.find(scenario.cluster)
    assert found.path == BUNDLED / "H200-SXM.json" and found.calibration is not None and found.calibration.matches(scenario.cluster.device)
    plan, _ = default_plan(scenario)
    known, bare = estimate(plan, found.calibration), estimate(plan, None)
    assert known.by_source.get("roofline", 0.0) < 0.05 < bare.by_source["roofline"]
    assert 0.6 < known.step_time.value / bare.step_time.value < 1.6
    assert known.step_time.high / known.step_time.low < bare.step_time.high / bare.step_time.low
