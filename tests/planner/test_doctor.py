import json

import pytest

from planner import doctor, machine
from planner.cli import main


@pytest.fixture(scope="module")
def checks():
    return {c.name: c for c in doctor.examine()}


def test_what_is_looked_at(checks):
    assert set(checks) >= {"Python", "torch", "triton", "highspy", "cores", "GPUs", "allocator", "state", "calibration", "MovieLens"}
    assert all(c.state in ("ok", "missing", "note") for c in checks.values())
    assert all(c.remedy for c in checks.values() if c.state == "missing")


def test_the_torch_build_is_named(checks):
    pytest.importorskip("torch")
    assert "build" in checks["torch"].detail
    assert "gloo" in checks["collectives"].detail


def test_the_machine_is_a_device():
    device = machine.device_document().data
    assert device["name"] == machine.device_name() and device["name"].startswith(machine.PREFIX)
    assert machine.peak_flops()["fp32"] > 1e9
    assert machine.memory_bytes() > 1e8
    assert device["memory_bandwidth"] == "10 GB/s"  # what the state directory holds


def test_the_bandwidth_is_measured_once(state, monkeypatch):
    (state / "machine.json").write_text("{damaged")
    monkeypatch.setattr(machine, "_COPY_BYTES", 1_000_000)
    first = machine.memory_bandwidth()
    assert first > 1e8
    monkeypatch.setattr(machine, "_measure_bandwidth", lambda: pytest.fail("measured again"))
    assert machine.memory_bandwidth() == first


def test_another_machines_bandwidth_is_not_taken(state, monkeypatch):
    (state / "machine.json").write_text(json.dumps({"cpu": "another", "memory_bandwidth": 5.0}))
    monkeypatch.setattr(machine, "_measure_bandwidth", lambda: 7e9)
    assert machine.memory_bandwidth() == 7e9


def test_missing_torch_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    (torch,) = doctor._torch()
    assert torch.state == "missing" and "calibrate and run do not" in torch.detail


def test_as_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_torch", list)
    assert main(["doctor", "--json"]) == 0
    assert {c["name"] for c in json.loads(capsys.readouterr().out)["checks"]} >= {"Python", "cores"}
