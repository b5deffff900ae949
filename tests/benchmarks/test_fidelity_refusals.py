"""What a command line of the fidelity benchmark or of the collectives' asks in vain is exit code 2 and said in a line."""
import dataclasses

import pandas as pd
import pytest

from benchmarks import collectives, fidelity, fidelity_gpu
from costmodel.calibration import load

COMMITTED = "costmodel/calibrations/H200-SXM.json"


@pytest.mark.parametrize(("arguments", "words"), [
    (["--device", "cuda", "-n", "0"], "-n must be >= 1"),
    (["--device", "cuda", "--residuals", "-1"], "--residuals >= 0"),
    (["--device", "cuda", "--stage", "predict"], "calibration.json: no such file"),
    (["--device", "cuda", "--stage", "predict", "--calibration", "README.md"], "README.md:1:1: not JSON"),
    (["--device", "cuda", "--stage", "predict", "--calibration", "docs"], "docs"),
    (["--device", "cuda", "--stage", "report", "--calibration", COMMITTED], "no plan to score has run yet"),
    (["--device", "cuda", "--stage", "refit"], "samples.jsonl: no such file"),
    (["--device", "cpu", "--stage", "report"], "plans-1.json: no such file"),
    (["--device", "cpu", "--stage", "calibrate"], "--stage calibrate is cuda's"),
])  # fmt: skip
def test_stages_without_what_they_need(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        fidelity.main([*arguments, "--work", str(tmp_path / "work")])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_another_devices_calibration_predicts_no_score(tmp_path, capsys):
    known = load(COMMITTED)
    other = dataclasses.replace(known, environment=dataclasses.replace(known.environment, device_name="H100-SXM"),
                                device=dataclasses.replace(known.device, name="H100-SXM"))  # fmt: skip
    other.save(tmp_path / "other.json")
    with pytest.raises(SystemExit) as ended:
        fidelity.main(["--device", "cuda", "--stage", "predict", "--calibration", str(tmp_path / "other.json"), "--work", str(tmp_path / "work")])
    assert ended.value.code == 2 and "environment.device_name: measured on 'H100-SXM', not on 'H200-SXM'" in capsys.readouterr().err
    assert not list(tmp_path.glob("work/*/plan.json")) and fidelity_gpu.cluster().device.name == "H200-SXM"


@pytest.mark.parametrize(("column", "cell", "words"), [
    ("time_ms", "nan", "time_ms: a finite number > 0"), ("time_ms", "abc", "'abc'"), ("time_ms", "-1", "'-1.0'"),
    ("num_gpus", "2.5", "an integer >= 2"),
    ("op_name", "broadcast", "op_name: one of all_gather"), ("message_bytes_if_elements_x2", "inf", "message_bytes_if_elements_x2"),
])  # fmt: skip
def test_cells_of_a_table_of_collectives_that_no_measurement_has(tmp_path, capsys, column, cell, words):
    table = pd.read_csv(collectives.PUBLISHED / "nccl_hopper_one_host.csv", dtype=str)
    table.loc[5, column] = cell
    table.to_csv(tmp_path / "mine.csv", index=False)
    assert collectives.main(["--table", str(tmp_path / "mine.csv"), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "mine.csv:7: " in said and words in said
