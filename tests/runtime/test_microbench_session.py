"""A GPU's calibration as a whole, on this machine's CPU: what comes when, what is kept, how the host is fitted, kernels compiled ahead."""
import dataclasses
import os
import time

import pytest
import torch

from benchmarks.fidelity_gpu_space import _one
from benchmarks.fidelity_space import _subject
from costmodel.calibration import fit
from costmodel.cluster import Cluster, Device
from costmodel.estimate import estimate
from costmodel.plan import Layout, Plan
from runtime.microbench import session, trained, warm

CPU = torch.device("cpu")
H200 = Device(name="H200-SXM", kind="gpu", peak_flops={"fp32": 67e12, "bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12)


def drawn(kind: str = "hstu", **options) -> Plan:
    model, workload = _subject("tiny", {
        "kind": kind, "dim": 32, "heads": 2, "depth": 2, "mlp_factor": 2, "num_tables": 3, "rows": 100, "table_dim": 16, "maximum": 20,
        "length_kind": "uniform", "global_batch": 8, "dense": 4,
    })  # fmt: skip
    return _one(model, workload, Cluster(name="one", device=H200, num_hosts=1, devices_per_host=1, tiers=()), **options)


def test_a_calibration_keeps_what_it_has_and_predicts(monkeypatch):
    monkeypatch.setattr(session, "KEPT_EVERY", 0.0)
    monkeypatch.setattr(trained, "STEPS", 2)
    monkeypatch.setattr(trained, "SMALL_SAMPLES", 2)
    here = session.environment(CPU)
    monkeypatch.setattr(session, "environment", lambda device: dataclasses.replace(here, device_kind="cuda"))
    monkeypatch.setattr(session.gpu, "op_requests", lambda *_, **__: [])
    said, kept = [], []
    found, samples = session.calibrate([drawn(), drawn(precision="fp32")], CPU, budget=300.0, report=said.append,
                                       keep=lambda _, some: kept.append(len(some)))  # fmt: skip
    assert kept == sorted(kept) and len(kept) > 5 and kept[-1] <= len(samples)
    constants = {s.op for s in samples if s.op.startswith("constant:")}
    assert {"constant:host_scale", "constant:step_host"} <= constants and any("selective" in line for line in said)
    assert estimate(drawn(), fit(found, samples, device=H200)).step_time.value > 0


@pytest.mark.parametrize(("scale", "rest"), [(1.3, 2e-3), (0.9, 0.0)])
def test_the_host_fit_finds_scale_and_rest(scale, rest):
    pairs = [(p, scale * p + rest) for p in (5e-3, 1e-2, 3e-2) for _ in range(20)]
    found = trained.host_fit(pairs)
    assert found[0] == pytest.approx(scale, rel=0.05) and found[1] == pytest.approx(rest, abs=6e-4)


def test_a_negative_rest_becomes_a_scale_alone():
    scale, rest = trained.host_fit([(1e-2, 0.5e-2), (2e-2, 2e-2)] * 50)
    assert rest == 0.0 and scale == pytest.approx(0.75)


def test_few_runs_that_disagree_do_not_make_a_rest_of_half_a_step():
    """What one H200's host showed on 2026-11-30: least squares alone said 0.89 and 14 ms, and the steps that followed had 4 ms beside launches."""
    pairs = [(30.2, 44.1), (28.1, 45.0), (32.3, 36.3), (21.3, 32.8), (58.7, 76.1), (54.5, 70.5), (62.8, 61.9)]
    scale, rest = trained.host_fit([(1e-3 * a, 1e-3 * b) for a, b in pairs])
    assert 1.05 < scale < 1.25 and 2e-3 < rest < 6e-3


class _Task:
    def __init__(self, name: str, host_seconds: float) -> None:
        self.name, self.host_seconds = name, host_seconds


@pytest.mark.parametrize(("slower", "taken"), [(1.5, 1.5), (11.7, 1.0)])
def test_a_host_scale_that_cannot_be_is_said_and_not_taken(monkeypatch, slower, taken):
    """Steps that wait for the device once made it 11.7. A kind of layers under a policy has a scale of its own."""
    layers = lambda plan: 0.01 * plan.accumulation * (3 if plan.model.sequences[0].layers[0].kind == "gdpa" else 2)

    def run(plan, device, steps):
        spent = 3e-3 + slower * ((2.0 if trained.layer_policy(plan) == "full" else 1.0) * layers(plan) + 1e-3)
        return type("Ran", (), {"timer": type("Timer", (), {"host": [{"forward": spent}] * steps})})()

    monkeypatch.setattr(trained, "_trained", run)
    monkeypatch.setattr(trained, "lower", lambda plan, calibration: type("Lowered", (), {"graph": type("Graph", (), {
        "tasks": [_Task("recompute history.0", layers(plan)), _Task("adamw", 1e-3)]})})())  # fmt: skip
    said = []
    found = {(s.op, s.variant): s.seconds for s in trained.host_samples(None, trained.small_plans([drawn(), drawn("gdpa")]), CPU, report=said.append)}
    assert found["constant:host_scale", ""] == pytest.approx(taken, rel=0.1)
    assert any("times the launches is not taken" in line for line in said) == (taken == 1.0)
    if taken == slower:
        plain, full = ([found["constant:host_scale", f"{kind}@bf16{policy}"] for kind in ("hstu", "gdpa")] for policy in ("", ":full"))
        assert plain == pytest.approx([1.0, 1.0], rel=0.1) and full == pytest.approx([2 ** (1 / 7)] * 2, rel=0.1)


@pytest.mark.parametrize("slower", [1.08, 3.0])
def test_steps_that_the_device_makes_show_what_they_make_of_blocks(monkeypatch, slower):
    """Not those that wait for the host, and no more than can be."""
    made = {"forward": 0.5, "backward": 1.0, "other": 1e-5}
    plans = [dataclasses.replace(drawn(), seed=i) for i in range(4)]

    def run(plan, device, steps):
        return type("Ran", (), {"phases": [{**made, "backward": slower * made["backward"]}] * steps})()

    monkeypatch.setattr(trained, "_trained", run)
    monkeypatch.setattr(trained, "estimate", lambda plan, calibration: type("Made", (), {"phases": {
        name: type("Quantity", (), {"value": value})() for name, value in made.items()}})())  # fmt: skip
    monkeypatch.setattr(trained, "lower", lambda plan, calibration: type("Lowered", (), {"graph": type("Graph", (), {
        "tasks": [_Task("adamw", 100.0 if plan.seed == 3 else 1e-3)]})})())  # fmt: skip
    monkeypatch.setattr(trained, "context_bytes", lambda: 1e9)
    for name, value in (("max_memory_reserved", 11.0), ("max_memory_allocated", 10.0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    said = []
    found = [(s.op.removeprefix("constant:"), s.variant, s.seconds) for s in trained.whole_samples(None, plans, CPU, report=said.append)]
    assert found.count(("context_bytes", "", 1e9)) == found.count(("step_overhead", "", 1e-5)) == 4 and "the host makes its steps" in said[3]
    rest = dict(((name, variant), value) for name, variant, value in found)
    assert rest["allocator_overhead", ""] == pytest.approx(0.1) and rest["in_step", "forward"] == pytest.approx(1.0)
    assert rest["in_step", "backward"] == pytest.approx(min(slower, trained.IN_STEP[1]))
    assert not any(name == "in_step" for name, *_ in [(s.op.removeprefix("constant:"),) for s in trained.whole_samples(None, plans[:2], CPU)])


def test_small_plans_leave_the_device_nothing_to_do():
    found = trained.small_plans([drawn(), drawn("gdpa"), drawn(precision="fp32"), drawn()])
    kinds = [(p.model.sequences[0].layers[0].kind, trained.layer_policy(p), p.accumulation) for p in found]
    assert kinds == [(kind, *run) for run in (("none", 1), ("none", 2), ("selective", 1), ("full", 1)) for kind in ("hstu", "gdpa")]
    assert all(p.local_batch * p.workload.lengths["history"].maximum <= trained.SMALL_SAMPLES * trained.SMALL_LENGTH for p in found)
    assert all(t.rows <= trained.SMALL_ROWS for p in found for t in p.model.tables)


def test_plans_that_need_the_same_kernels_are_compiled_by_one_process():
    plans = [drawn(), drawn("gdpa"), drawn(precision="fp32"), drawn()]
    assert [len(group) for group in warm.grouped(plans)] == [2, 1, 1]


def test_kernels_are_compiled_by_running_every_block_and_table():
    assert warm.run_blocks(drawn(), CPU) == 2 * 6  # input, layer, summary, bottom, interaction and heads on batches of two kinds
    assert warm.run_blocks(drawn(), CPU, layers_only=True) == 2
    assert warm.run_tables(drawn(), CPU) == 2 * 8  # lookups and updates of four table groups


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_compile_ahead_and_say_what_they_could_not(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    begin = time.perf_counter()
    ahead = warm.Ahead([drawn(), drawn("gdpa", precision="fp32")])
    assert ahead.running
    said = ahead.wait(120)
    assert "tables of 1 plans" in said and said.count("blocks of 1 plans") == 2 and "Traceback" not in said, said
    assert time.perf_counter() - begin < 120 and not ahead.running


def test_a_compiler_that_takes_too_long_is_ended():
    ahead = warm.Ahead([drawn()])
    ahead.wait(0.2)
    assert not ahead.running


def test_a_plan_of_many_ranks_is_timed_on_one():
    many = dataclasses.replace(drawn(), layout=Layout(fsdp=8, sparse_group=8), tables=tuple(
        dataclasses.replace(p, sharding="row_wise", ranks=()) for p in drawn().tables))
    found = session.alone(many)
    assert found.layout.world_size == 1 and {(p.sharding, p.ranks) for p in found.tables} == {("table_wise", (0,))}
    assert found.local_batch == drawn().local_batch
