"""Draws of the fidelity benchmark and its figures."""

import dataclasses
import math

import pytest

from benchmarks import fidelity
from benchmarks.fidelity_space import CPU, PLANS_PER_GROUP, calibration_plans, draw_group
from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.codec import content_hash, encode
from costmodel.estimate import estimate
from costmodel.runresult import PHASES, Measured, MeasuredMemory, RunResult, StepTime

DEVICE = Device(name="cpu", kind="cpu", peak_flops={"fp32": 5e10, "bf16": 5e10}, memory_bytes=8e10, memory_bandwidth=1e10)
CLUSTER = Cluster(
    name="test", device=DEVICE, num_hosts=1, devices_per_host=2, tiers=(LinkTier(name="lo", scope="host", bandwidth=1e9, latency=1e-4),)
)


def _shape(plan):
    """What a calibration would have timed: model without its name, workload without its name, local batch."""
    model, workload = encode(plan.model), encode(plan.workload)
    model.pop("name"), workload.pop("name")
    return content_hash([model, workload, plan.local_batch])


def test_draws_repeat_differ_and_are_never_those_of_calibration():
    space = CPU
    calibrated = {_shape(p) for p in calibration_plans(space, CLUSTER)}
    seen = set()
    for group in range(8):
        plans = draw_group(space, CLUSTER, seed=3, group=group)
        assert [p.identity() for p in plans] == [p.identity() for p in draw_group(space, CLUSTER, seed=3, group=group)]
        assert 2 <= len({p.identity() for p in plans}) == len(plans) <= PLANS_PER_GROUP
        assert len({(content_hash(p.model), content_hash(p.workload)) for p in plans}) == 1
        assert not calibrated & {_shape(p) for p in plans}
        for plan in plans:
            assert plan.local_batch * plan.accumulation * plan.layout.world_size == plan.workload.global_batch
        seen |= {p.identity() for p in plans}
    assert seen.isdisjoint(p.identity() for p in draw_group(space, CLUSTER, seed=4, group=0))


def test_the_space_reaches_both_kinds_and_both_rank_counts():
    plans = [p for g in range(12) for p in draw_group(CPU, CLUSTER, seed=1, group=g)]
    assert {p.model.sequences[0].layers[0].kind for p in plans} == set(CPU.kinds)
    assert {p.layout.world_size for p in plans} == {1, 2}
    assert {o.checkpoint for p in plans for r in p.regions for o in r.options} == {"none", "full"}


def _scored(group: int, number: int, *, predicted: float, measured: float, spread: float = 0.0) -> fidelity.Scored:
    plan = draw_group(CPU, CLUSTER, seed=1, group=group)[number]
    prediction = encode(estimate(plan, None))
    scale = predicted / prediction["step_time"]["value"]
    for key in ("value", "low", "high"):
        prediction["step_time"][key] *= scale
    step = StepTime(median=measured, mean=measured, p10=measured * (1 - spread), p90=measured * (1 + spread))
    phases = {p: measured / len(PHASES) for p in PHASES}
    memory = MeasuredMemory(**{k: prediction["memory"]["categories"][k] for k in fidelity.MEMORY})
    result = RunResult(
        plan_identity=plan.identity(),
        environment={},
        status="completed",
        world_size=1,
        steps=100,
        warmup_steps=3,
        measured=Measured(step_time_s=step, phases_s=phases, memory_bytes=memory, examples_per_second=1.0),
    )
    return fidelity.Scored(name=f"1-{group}-{number}", group=group, plan=plan, prediction=prediction, result=result)


def test_figures():
    scored = [_scored(0, i, predicted=m * (1 + e), measured=m) for i, (m, e) in enumerate([(0.1, 0.1), (0.2, -0.2), (0.3, 0.05), (0.4, 0.0)])]
    rows = {r.name: r for r in fidelity.rows(scored, "cpu")}
    assert rows["step time, absolute error: median"].value == pytest.approx(7.5) and rows["step time, absolute error: median"].passed
    assert rows["step time, absolute error: worst"].value == pytest.approx(20)
    assert rows["step time bias"].value == pytest.approx(100 * abs((1.1 * 0.8 * 1.05) ** 0.25 - 1))
    assert rows["memory tables: absolute error, median"].value == 0
    assert rows["rank correlation within groups, median"].value == pytest.approx(1.0)
    assert rows["regret of the best prediction, worst"].value == 0
    assert sum(name.startswith("plan ") for name in rows) == 4
    assert all(r.value is None or math.isfinite(r.value) for r in rows.values())


def test_rank_correlation_leaves_ties_out():
    swapped = [_scored(0, 0, predicted=0.2, measured=0.1), _scored(0, 1, predicted=0.1, measured=0.2)]
    assert fidelity.kendall(swapped) == -1.0
    noisy = [dataclasses.replace(s, result=_scored(0, i, predicted=1.0, measured=0.1 + 0.001 * i, spread=0.5).result) for i, s in enumerate(swapped)]
    assert fidelity.kendall(noisy) == 1.0


def test_regret_of_a_wrong_first_choice():
    scored = [_scored(0, 0, predicted=0.1, measured=0.15), _scored(0, 1, predicted=0.2, measured=0.1), _scored(0, 2, predicted=0.3, measured=0.3)]
    rows = {r.name: r.value for r in fidelity.rows(scored, "cpu")}
    assert rows["regret of the best prediction, worst"] == pytest.approx(50)
