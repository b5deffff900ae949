"""A state directory of the tests' own: nobody's ledger or calibration is read or written, and GPUs have the rooflines that figures here refer to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import calibrate, machine


@pytest.fixture(scope="session", autouse=True)
def no_bundled_calibration(tmp_path_factory: pytest.TempPathFactory):
    """Also for fixtures of a module, which are made before any test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_BUNDLED", tmp_path_factory.mktemp("bundled"))
        yield


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$PLANNER_STATE, with this machine's bandwidth already known so that no test measures it."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "machine.json").write_text(json.dumps({"cpu": machine.cpu_name(), "memory_bandwidth": 1e10}))
    monkeypatch.setenv("PLANNER_STATE", str(folder))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("PLANNER_DEBUG", raising=False)
    return folder
