import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import CPU, H200, build_plan

from costmodel.calibration import fit
from costmodel.cluster import Price
from costmodel.codec import decode, encode
from costmodel.estimate import Estimate, estimate
from costmodel.lower import lower
from costmodel.ops import KINDS
from costmodel.plan import RegionOption, RegionPlan
from costmodel.samples import Environment, Sample
from costmodel.stepgraph import PHASES

POLICIES = st.sampled_from(["none", "selective", "full", "quantized"])


@st.composite
def plans(draw):
    """Plans that differ in everything a candidate may choose."""
    device = draw(st.sampled_from([CPU, H200]))
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    fsdp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= ranks]))
    group = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= ranks]))
    precision = draw(st.sampled_from(["fp32", "bf16"] + (["fp8_row"] if device is H200 else [])))
    plan = build_plan(device=device, ranks=ranks, fsdp=fsdp, local_batch=draw(st.integers(1, 300)), accumulation=draw(st.integers(1, 3)),
                      precision=precision,
                      checkpoint=draw(POLICIES), sharding="row_wise", bandwidth=draw(st.sampled_from([1e8, 2e9, 1e11])),
                      layout={"sparse_group": group, "sparse_replicas": ranks // group, "reshard_after_forward": draw(st.booleans()),
                              "fully_sharded_2d": draw(st.booleans())},
                      wire=draw(st.sampled_from([None, "fp8", "int4"])), wire_gradients=draw(st.sampled_from([None, "int8"])),
                      gather_dtype=draw(st.sampled_from([None, "fp8"])), reduce_dtype=draw(st.sampled_from(["fp32", "bf16"])),
                      batching=draw(st.sampled_from(["jagged", "padded"])), execution=draw(st.sampled_from(["eager", "compile", "cuda_graph"])))
    second = RegionOption(count=1, precision=precision, checkpoint=draw(POLICIES))
    return dataclasses.replace(plan, regions=tuple(
        RegionPlan(region=r.region, options=(RegionOption(count=1, precision=precision), second)) if r.region == "history.0" else r
        for r in plan.regions))


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_bound_never_above_simulated_and_phases_sum_to_the_step(plan):
    simulated, bound = estimate(plan, None), estimate(plan, None, mode="bound")
    assert bound.step_time.value <= simulated.step_time.value * (1 + 1e-9)
    for found in (simulated, bound):
        assert set(found.phases) == set(PHASES) and min(q.value for q in found.phases.values()) >= 0
    assert sum(q.value for q in simulated.phases.values()) == pytest.approx(simulated.step_time.value)
    assert simulated.step_time.low < simulated.step_time.value < simulated.step_time.high
    assert sum(simulated.by_source.values()) == pytest.approx(1)
    assert simulated.memory.reserved.value >= simulated.memory.peak.value >= simulated.memory.categories["optimizer"]
    assert decode(Estimate, encode(simulated)) == simulated


@settings(max_examples=15, deadline=None)
@given(plan=plans(), factor=st.floats(1.0, 4.0))
def test_faster_hardware_is_never_slower(plan, factor):
    device, cluster = plan.cluster.device, plan.cluster
    base = estimate(plan, None).step_time.value
    faster = [dataclasses.replace(cluster, device=dataclasses.replace(device, memory_bandwidth=device.memory_bandwidth * factor)),
              dataclasses.replace(cluster, device=dataclasses.replace(device, peak_flops={k: v * factor for k, v in device.peak_flops.items()}))]
    if device.kind == "cpu":
        # on GPUs a faster link may move a collective beside other compute, where contention takes its share
        faster.append(dataclasses.replace(cluster, tiers=tuple(dataclasses.replace(t, bandwidth=t.bandwidth * factor) for t in cluster.tiers)))
    for other in faster:
        assert estimate(dataclasses.replace(plan, cluster=other), None).step_time.value <= base * (1.0 + (1e-9 if device.kind == "cpu" else 0.05))


def test_communication_falls_with_bandwidth_and_changes_with_ranks(make_plan):
    """astra-sim #207: a result that does not move with topology or node count is no result."""
    slow, fast = (estimate(make_plan(bandwidth=b), None) for b in (2e8, 2e9))
    assert slow.exposed["link"] > 2 * fast.exposed["link"] > 0
    more = estimate(make_plan(ranks=4, bandwidth=2e8), None)
    assert more.exposed["link"] > 1.1 * slow.exposed["link"]


def test_what_limits_follows_the_hardware(make_plan, h200):
    assert estimate(make_plan(bandwidth=1e6), None).limiting == "communication:link"
    assert estimate(make_plan(device=dataclasses.replace(h200, host_link_bandwidth=1e5), ranks=1), None).limiting == "input"
    assert estimate(make_plan(device=h200, ranks=1, local_batch=2), None).limiting == "host"
    assert estimate(make_plan(ranks=1), None).limiting == "compute"
    assert estimate(make_plan(ranks=1, device=dataclasses.replace(CPU, memory_bandwidth=1e7)), None).limiting == "hbm_bandwidth"


def test_recompute_costs_time_and_lowers_mfu(make_plan):
    none, full = (estimate(make_plan(ranks=1, checkpoint=c), None) for c in ("none", "full"))
    assert full.step_time.value > 1.1 * none.step_time.value and full.flops_per_rank == none.flops_per_rank
    assert full.local_mfu < none.local_mfu < 1
    assert none.local_mfu == pytest.approx(none.flops_per_rank / none.step_time.value / 1e11)


def test_throughput_and_dollars(make_plan):
    plan = make_plan(accumulation=2)
    found = estimate(plan, None)
    assert found.examples_per_second == pytest.approx(2 * 64 * 2 / found.step_time.value)
    assert found.dollars_per_billion_examples is None
    priced = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, price=Price(dollars_per_device_hour=3.6, source="test")))
    assert estimate(priced, None).dollars_per_billion_examples == pytest.approx(1e9 / found.examples_per_second * 2 * 3.6 / 3600)


def _calibration(plan, width=1.0):
    """Every op of the plan measured at 1.5 times its roofline."""
    from costmodel import compute
    from costmodel.pricer import Pricer

    seen = {}

    class Recorder(Pricer):
        def time(self, one, phase):
            seen[one, phase] = compute.roofline_seconds(dataclasses.replace(one, count=1), phase, self.device)
            return super().time(one, phase)

    import costmodel.lower as lowering

    recorder = Recorder(plan, None)
    original, lowering.pricer = lowering.pricer, lambda *_: recorder
    try:
        lower(plan, None)
    finally:
        lowering.pricer = original
    samples = [Sample(op=one.kind, variant=one.variant, phase=phase, features=dict(one.features), dtype=one.dtype, seconds=1.5 * max(seconds, 1e-9))
               for (one, phase), seconds in seen.items()]
    assert {s.op for s in samples} <= set(KINDS)
    return fit(Environment(device_name=plan.cluster.device.name, device_kind="cpu"), samples, device=plan.cluster.device)


def test_a_calibrated_step_is_the_sum_of_its_measurements(make_plan):
    plan = make_plan(ranks=1)
    calibration = _calibration(plan)
    bare, found = estimate(plan, None), estimate(plan, calibration)
    overhead = bare.phases["other"].value
    assert found.step_time.value - overhead == pytest.approx(1.5 * (bare.step_time.value - overhead), rel=1e-3)
    assert set(found.by_source) == {"measured", "assumed"} and found.notes == ()
    assert (found.step_time.high - found.step_time.low) / found.step_time.value < (bare.step_time.high - bare.step_time.low) / bare.step_time.value


def test_a_shared_machine_stretches_compute_and_uneven_ranks_wait(make_plan):
    calibration = _calibration(make_plan(ranks=2))
    plan = make_plan(ranks=2)
    alone = estimate(plan, calibration)
    shared = estimate(plan, dataclasses.replace(calibration, constants={"processor_share/2": 0.8, "peer_wait/2": 0.25}))
    compute = {name: alone.phases[name].value for name in ("sparse", "forward", "backward", "optimizer")}
    for name, seconds in compute.items():
        assert shared.phases[name].value == pytest.approx(seconds / 0.8, rel=1e-6)
    # the slowest rank makes the step: what it computes, from the share of a core alone, is stretched by the wait for peers too
    even = estimate(plan, dataclasses.replace(calibration, constants={"processor_share/2": 0.8}))
    slowest = (even.step_time.value - alone.step_time.value) / (1 / 0.8 - 1)
    assert slowest >= sum(compute.values()) + alone.phases["input"].value
    waited = shared.phases["exposed_communication"].value - even.phases["exposed_communication"].value
    assert waited == pytest.approx(0.25 / 0.8 * slowest, rel=1e-6)
    assert sum(q.value for q in shared.phases.values()) == pytest.approx(shared.step_time.value)
    one = estimate(make_plan(ranks=1), dataclasses.replace(calibration, constants={"peer_wait/2": 0.25}))
    assert one.step_time.value == estimate(make_plan(ranks=1), calibration).step_time.value


def test_intervals_come_from_runs_where_there_are_enough(make_plan):
    plan = make_plan(ranks=1)
    calibration = _calibration(plan)
    residuals = tuple(0.01 * i - 0.05 for i in range(21))
    found = estimate(plan, dataclasses.replace(calibration, run_residuals={"step@device": residuals})).step_time
    assert found.low == pytest.approx(found.value * 0.951, rel=0.03) and found.high == pytest.approx(found.value * 1.162, rel=0.03)
    few = estimate(plan, dataclasses.replace(calibration, run_residuals={"step@device": residuals[:5]})).step_time
    assert few.high == estimate(plan, calibration).step_time.high


def test_another_devices_calibration_is_carried_over_and_says_so(make_plan, h200):
    calibration = _calibration(make_plan(ranks=1))
    found = estimate(make_plan(ranks=1, device=dataclasses.replace(CPU, name="other core")), calibration)
    assert any("carried over from core to other core" in note for note in found.notes)
    assert "measured" not in found.by_source


def test_the_slowest_rank_makes_the_step(make_plan, h200):
    one, many = (estimate(make_plan(device=h200, ranks=n, local_batch=64), None) for n in (1, 8))
    assert many.imbalance["history.pairs"] > one.imbalance["history.pairs"] == 1.0


def test_an_estimate_takes_milliseconds(make_plan):
    plan = make_plan(ranks=2)
    estimate(plan, None)
    begin = time.process_time()
    for _ in range(10):
        estimate(plan, None)
    # 5 ms on an idle core; others share this one
    assert (time.process_time() - begin) / 10 < 0.02
