"""Steps on GPUs: steady state of device, host and loader; blocks under checkpoint policies."""
import dataclasses

import pytest
from small_plans import H200, build_model, build_plan

from costmodel.blocks.base import MATRIX_OPS
from costmodel.blocks.measured import block_features
from costmodel.calibration import Calibration, fit
from costmodel.estimate import estimate
from costmodel.gpu import Piece, Steady, block_key, has_lead, launches, played, timed_ops, without_launches
from costmodel.hosttime import HostTimes, products
from costmodel.lower import batch_shape, lower
from costmodel.model import LayerGroup
from costmodel.ops import BACKWARD, FORWARD, KINDS, STEP, op
from costmodel.plan import Layout, Plan
from costmodel.pricer import Pricer
from costmodel.regions import regions
from costmodel.samples import BLOCK_PREFIX, CONSTANT_PREFIX, Environment, Sample
from costmodel.simulate import simulate
from costmodel.stepgraph import PHASES

LAYER = LayerGroup(kind="self_attention", count=3, heads=4, head_dim=64, mlp_dim=1024)


def one_gpu(**fields) -> Plan:
    return build_plan(model=build_model(layers=(LAYER,)), device=H200, ranks=1, precision="bf16", **fields)


def phases(**seconds: float) -> dict[str, float]:
    return {**dict.fromkeys(PHASES, 0.0), **seconds}


@pytest.mark.parametrize(("device", "launch", "load", "expected"), [
    (3.0, 1.0, 2.0, phases(input=0.5, forward=1.0, backward=1.5)),
    (1.0, 3.0, 2.0, phases(forward=3.0)),
    (1.0, 0.5, 2.0, phases(input=1.5, forward=0.5)),
])  # fmt: skip
def test_the_slowest_server_makes_the_step_and_its_phases(device, launch, load, expected):
    own = phases(input=0.5, forward=1.0, backward=1.5) if device == 3.0 else phases(input=0.5, forward=0.5)
    steady = Steady(device=device, launches=phases(forward=launch), load=load)
    assert steady.seconds == max(device, launch, load)
    assert steady.phases(own) == expected and sum(expected.values()) == pytest.approx(steady.seconds)


@pytest.mark.parametrize("local_batch", [4, 4096])
def test_a_host_with_a_lead_hides_its_launches_behind_the_device(local_batch):
    plan = one_gpu(local_batch=local_batch)
    graph, made = lower(plan, None).graph, estimate(plan, None)
    assert has_lead(graph)
    device, host = simulate(without_launches(graph)).step_seconds, sum(launches(graph).values())
    assert made.step_time.value == pytest.approx(max(device, host))
    assert (made.limiting == "host") == (host > device) == (local_batch == 4)
    assert sum(q.value for q in made.phases.values()) == pytest.approx(made.step_time.value)
    assert estimate(plan, None, mode="bound").step_time.value <= made.step_time.value * (1 + 1e-12)


def test_a_library_chooses_kernels_once_for_each_shape_of_a_micro_batch():
    """The layers of a group share their products' shapes, backward has two to each, what runs again has none of its own."""
    plan = one_gpu()
    batch, region = batch_shape(plan), next(r for r in regions(plan.model) if r.layer)
    assert region.count == 3 and batch.sequences[region.sequence].varied
    shapes = {(one.feature("k"), one.feature("n")) for one in region.block.forward(batch, "bf16") if one.kind == "linear"}
    assert [region.count * products(region.block, batch, "bf16", phase) for phase in (FORWARD, BACKWARD)] == pytest.approx(
        [len(shapes), 2 * len(shapes)])
    even = dataclasses.replace(batch, sequences={n: s.padded() for n, s in batch.sequences.items()})
    assert products(region.block, even, "bf16", FORWARD) == 0.0
    figures = {f"host/{phase}:self_attention@bf16{policy}+mlp": 1e-3 for phase in (FORWARD, BACKWARD) for policy in ("", ":full")}
    known = HostTimes({**figures, f"host/{FORWARD}:product": 3e-4, f"host/{BACKWARD}:product": 2e-4})
    each = len(shapes) / 3
    assert known.block(region.block, batch, "bf16", FORWARD) == pytest.approx(1e-3 + each * 3e-4)
    for policy in ("none", "full"):
        assert known.block(region.block, batch, "bf16", BACKWARD, policy) == pytest.approx(1e-3 + 2 * each * 2e-4)
    assert known.policy(region.block, batch, "bf16", "full") == pytest.approx((0.0, 0.0))


def test_an_exchange_costs_the_host_what_was_measured():
    """Of every micro-batch, table group and shard; in the sparse phase, whose device work waits for it."""
    plan = build_plan(device=H200, ranks=2, precision="bf16", bandwidth=4e11)
    figures = {"exchange:forward": 2e-3, "exchange:forward:group": 1e-3, "exchange:forward:shard": 1e-4,
               "exchange:backward": 1e-3, "exchange:backward:group": 0.0, "exchange:backward:shard": 0.0}
    samples = [Sample(op=f"{CONSTANT_PREFIX}host", variant=name, phase="step", features={}, seconds=value) for name, value in figures.items()]
    samples.append(Sample(op="elementwise", variant="add", phase=FORWARD, features={"m": 1e3, "n": 1e3}, seconds=1e-5))
    known = fit(Environment(device_name=H200.name, device_kind="cuda"), samples, device=H200)
    without = dataclasses.replace(known, constants={})
    lowered, shards = lower(plan, known), lower(plan, known).loads.shards
    assert shards == sum(2 if t.sharding == "row_wise" else 1 for t in plan.tables)
    wanted = 2e-3 + 1e-3 * len(plan.model.tables) + 1e-4 * shards + 1e-3
    names = ("unique ids", "lookup", "spread", "gather gradients", "update")
    assert sum(t.host_seconds for t in lowered.graph.tasks if t.name in names) == pytest.approx(wanted)
    gained = estimate(plan, known).phases["sparse"].value - estimate(plan, without).phases["sparse"].value
    assert 0.5 * wanted < gained < 1.1 * wanted


def test_a_unit_of_fsdp_costs_the_host_by_its_tensors():
    known = HostTimes({"host/fsdp_gather": 1e-3, "host/fsdp_gather:tensor": 1e-5})
    assert known.op(op("fsdp_gather", parameters=1e6, tensors=20, count=2), STEP) == pytest.approx(2 * 1.2e-3)
    assert known.op(op("fsdp_reduce", parameters=1e6, tensors=20), STEP) is None
    plan = build_plan(device=H200, ranks=2, precision="bf16", bandwidth=4e11)
    figures = {"host/fsdp_gather": 1e-3, "host/fsdp_gather:tensor": 0.0, "host/fsdp_gather@1": 2e-4, "host/fsdp_gather@1:tensor": 0.0}
    fitted = fit(Environment(device_name=H200.name, device_kind="cuda"), [
        Sample(op="elementwise", variant="add", phase=FORWARD, features={"m": 1e3, "n": 1e3}, seconds=1e-5),
        *(Sample(op=f"{CONSTANT_PREFIX}host", variant=name.removeprefix("host/"), phase="step", features={}, seconds=v)
          for name, v in figures.items()),
    ], device=H200)
    for layout, expected in ((Layout(fsdp=2, sparse_group=2), 1e-3), (Layout(ddp=2, sparse_group=2), 2e-4)):
        tasks = lower(dataclasses.replace(plan, layout=layout), fitted).graph.tasks
        assert {t.host_seconds for t in tasks if t.name.startswith("unshard")} == {expected}


def test_a_host_that_reads_split_sizes_has_no_lead():
    plan = build_plan(device=H200, ranks=2, precision="bf16", bandwidth=4e11)
    graph = lower(plan, None).graph
    assert not has_lead(graph)
    # it waits for launches within the step, if not for those ahead of what it reads
    assert simulate(without_launches(graph)).step_seconds < estimate(plan, None).step_time.value < 1.05 * simulate(graph).step_seconds


def calibrated(plan: Plan, policy: str, *, slower: float, host: float, **constants: float) -> Calibration:
    """Ops at half their ideal rate with 10 us of launch each; the plan's block as the sum of them, times `slower` and `host` under `policy`."""
    region = next(r for r in regions(plan.model) if r.name == "history.0")
    batch = batch_shape(plan)
    forward = region.block.forward(batch, "bf16")
    samples = []
    for region_ in regions(plan.model):
        for one in region_.block.forward(batch, "bf16"):
            for phase in KINDS[one.kind].phases:
                samples.append(Sample(op=one.kind, variant=one.variant, phase=phase, features=dict(one.features), dtype=one.dtype, host_seconds=1e-5,
                                      seconds=one.bytes(phase) / 1e12 + one.flops(phase) / 1e14 + 2e-6))
    time = {(s.op, s.variant, s.phase, s.dtype, *sorted(s.features.items())): s.seconds for s in samples}
    for phase, variant in ((FORWARD, ""), (BACKWARD, ""), (FORWARD, policy), (BACKWARD, policy)):
        run = timed_ops(forward, phase, variant, MATRIX_OPS)
        seconds = sum(time[one.kind, one.variant, at, one.dtype, *sorted(dict(one.features).items())] * one.count for one, at in run)
        samples.append(Sample(op=BLOCK_PREFIX + region.block.kind, variant=variant, phase=phase, features=block_features(region.block, batch),
                              dtype="bf16", seconds=seconds * (slower if variant else 1.0),
                              host_seconds=len(run) * 1e-5 * (host if variant else 1.0)))
    samples += [Sample(op=CONSTANT_PREFIX + name, phase="step", features={}, seconds=value) for name, value in constants.items()]
    return fit(Environment(device_name=H200.name, device_kind="cuda"), samples, device=H200)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_is_what_the_timed_backward_takes_beyond_the_plain_one(policy):
    plan = one_gpu(checkpoint=policy)
    region, batch = next(r for r in regions(plan.model) if r.name == "history.0"), batch_shape(plan)
    calibration = calibrated(plan, policy, slower=1.25, host=2.0)
    assert calibration.composition(block_key("self_attention", "bf16", policy), BACKWARD, 1) is not None
    pricer = Pricer(plan, calibration)
    plain, again = pricer.block(region.block, batch, "bf16", BACKWARD), pricer.recompute(region.block, batch, "bf16", policy)
    ops = [*timed_ops(region.block.forward(batch, "bf16"), BACKWARD, policy, MATRIX_OPS)]
    whole = 1.25 * sum(calibration.predict(one, phase).seconds for one, phase in ops)
    assert plain.seconds + again.seconds == pytest.approx(whole, rel=1e-6)
    forward = len(region.block.forward(batch, "bf16"))
    # twice the launches in both directions
    assert plain.host_seconds + again.host_seconds == pytest.approx(1e-5 * (2 * len(ops) + forward), rel=1e-6)


def test_a_timed_block_needs_no_curves_of_its_ops():
    """The roofline stands below its correction then; the block is as well known as it was measured."""
    plan = one_gpu()
    region, batch = next(r for r in regions(plan.model) if r.name == "history.0"), batch_shape(plan)
    whole = calibrated(plan, "full", slower=1.25, host=2.0)
    block = Sample(op=BLOCK_PREFIX + region.block.kind, phase=FORWARD, features=block_features(region.block, batch), dtype="bf16", seconds=7e-3,
                   host_seconds=3e-3)
    other = Sample(op="adamw", phase="step", features={"parameters": 1e6, "tensors": 4.0}, seconds=1e-4)
    cost = Pricer(plan, fit(whole.environment, [block, other], device=H200)).block(region.block, batch, "bf16", FORWARD)
    assert (cost.seconds, cost.host_seconds) == (pytest.approx(7e-3), pytest.approx(3e-3))
    assert cost.source == "interpolated" and not any(curve.startswith("roofline") for curve, *_ in cost.parts)


def test_without_a_timed_policy_recomputation_is_the_sum_of_its_ops():
    plan = one_gpu(checkpoint="full")
    region, batch = next(r for r in regions(plan.model) if r.name == "history.0"), batch_shape(plan)
    pricer = Pricer(plan, calibrated(plan, "selective", slower=1.25, host=2.0))
    assert pricer.recompute(region.block, batch, "bf16", "full").seconds == pytest.approx(
        pricer.block(region.block, batch, "bf16", FORWARD).seconds)  # fmt: skip


def test_what_runs_again_in_part_costs_its_part():
    """Of a block that was timed without a policy alone: the ops beside its matrix products, not all of its forward."""
    plan = one_gpu(checkpoint="selective")
    region, batch = next(r for r in regions(plan.model) if r.name == "history.0"), batch_shape(plan)
    calibration = calibrated(plan, "full", slower=1.25, host=2.0)
    assert calibration.composition(block_key("self_attention", "bf16"), FORWARD, 1).shares
    pricer = Pricer(plan, calibration)
    whole, forward = region.block.forward(batch, "bf16"), pricer.block(region.block, batch, "bf16", FORWARD).seconds
    again = region.block.recomputed(batch, "bf16", "selective")
    part = sum(calibration.predict(one, FORWARD).seconds for one in again) / sum(calibration.predict(one, FORWARD).seconds for one in whole)
    assert 0 < len(again) < len(whole) and part < 0.5
    # by the ops' work, which shares the block's time out a little differently
    assert pricer.recompute(region.block, batch, "bf16", "selective").seconds == pytest.approx(part * forward, rel=0.25)


def test_blocks_take_what_a_step_makes_of_them():
    plan = one_gpu(checkpoint="full")
    region, batch = next(r for r in regions(plan.model) if r.name == "history.0"), batch_shape(plan)
    bare = calibrated(plan, "full", slower=1.1, host=1.0)
    known = dataclasses.replace(bare, constants={**bare.constants, "in_step/backward": 1.05})
    for one, factor in (("forward", 1.0), ("backward", 1.05), ("recompute", 1.05)):
        found = [p.recompute(region.block, batch, "bf16", "full") if one == "recompute" else p.block(region.block, batch, "bf16", one)
                 for p in (Pricer(plan, bare), Pricer(plan, known))]  # fmt: skip
        assert found[1].seconds == pytest.approx(factor * found[0].seconds)


def test_a_slow_loader_makes_the_step():
    plan = one_gpu()
    calibration = calibrated(plan, "full", slower=1.0, host=1.0)
    loader = [Sample(op="input", variant="jagged", phase="step", features={"samples": 64.0, "events": e}, seconds=0.5) for e in (100.0, 1e4, 1e6)]
    environment = Environment(device_name=H200.name, device_kind="cuda")
    loads = fit(environment, loader, device=H200)
    slow = dataclasses.replace(calibration, curves=(*calibration.curves, *loads.curves))
    made = estimate(plan, slow)
    assert made.step_time.value == pytest.approx(0.5, rel=0.01) and made.limiting == "input"
    assert made.phases["input"].value == pytest.approx(0.5 - estimate(plan, calibration).step_time.value, abs=0.02)


def test_phases_of_a_step_that_device_and_host_make_in_turns():
    """A host that is slow in forward and fast in backward, whose device is the other way round: the device waits where the host has no lead left."""
    device_made = played((Piece("forward", 1.0, 2.0), Piece("backward", 3.0, 4.0), Piece("optimizer", 1.0, 1.0)))
    assert device_made == phases(forward=2.0, backward=4.0, optimizer=1.0)
    host_made = played((Piece("forward", 2.0, 0.1), Piece("backward", 3.0, 0.1), Piece("other", 1.0, 0.0)))
    assert sum(host_made.values()) == pytest.approx(6.0) and host_made["backward"] == pytest.approx(3.0)
    mixed = played((Piece("forward", 4.0, 1.0), Piece("backward", 1.0, 3.5)))
    assert sum(mixed.values()) == pytest.approx(5.0) and mixed["backward"] == pytest.approx(3.5) and mixed["forward"] == pytest.approx(1.5)


def host_calibrated(plan: Plan) -> Calibration:
    figures = {"forward:self_attention@bf16+mlp": 1e-3, "backward:self_attention@bf16+mlp": 2e-3, "forward:self_attention@bf16:full+mlp": 1.5e-3,
               "backward:self_attention@bf16:full+mlp": 3e-3, "forward:region@bf16": 1e-4, "backward:region@bf16": 2e-4, "forward:loss": 3e-4,
               "backward:loss": 4e-4, "lookup": 5e-4, "update": 6e-4, "optimizer": 1e-3, "tensor": 1e-6, "input": 2e-3, "other": 1e-4}  # fmt: skip
    return dataclasses.replace(calibrated(plan, "full", slower=1.0, host=1.0), constants={f"host/{name}": value for name, value in figures.items()})


@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_host_s_time_is_the_sum_of_the_parts_that_a_trainer_showed(policy):
    plan = one_gpu(local_batch=4, accumulation=2)
    added = lower(plan, host_calibrated(plan)).accumulated[0]
    assert added > 12.0 * sum(r.num_parameters for r in regions(plan.model)) / H200.memory_bandwidth
    plan = dataclasses.replace(plan, regions=tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(
        o, checkpoint=policy if r.region == "history.0" else "none") for o in r.options)) for r in plan.regions))  # fmt: skip
    known = host_calibrated(plan)
    own, tables = regions(plan.model), len(plan.model.tables)
    others, tensors = sum(r.count for r in own) - LAYER.count, sum(r.count * r.block.num_tensors for r in own)
    forward = 2 * (LAYER.count * (1.5e-3 if policy == "full" else 1e-3) + others * 1e-4 + 3e-4)
    backward = 2 * (LAYER.count * (3e-3 if policy == "full" else 2e-3) + others * 2e-4 + 4e-4)
    expected = phases(input=4e-3, sparse=tables * (2 * 5e-4 + 6e-4), forward=forward, backward=backward, optimizer=1e-3 + tensors * 1e-6, other=1e-4)
    made = estimate(plan, known)
    assert made.maker == "host" and made.step_time.value == pytest.approx(sum(expected.values()))
    for name, seconds in expected.items():
        assert made.phases[name].value == pytest.approx(seconds, rel=0.05, abs=1.5e-4 + 2.5 * added), name  # the device is behind by what it adds
    assert sum(launches(lower(plan, known).graph).values()) == pytest.approx(sum(expected.values()) - 4e-3 - 1e-4)
    eager, captured = (estimate(dataclasses.replace(plan, execution=e, accumulation=1), known).step_time.value for e in ("eager", "cuda_graph"))
    assert captured < eager


def test_a_host_is_expected_to_be_as_slow_as_the_calibration_saw_it():
    """Every figure of one GPU's steps, but no ratio and nothing that ranks measured with their slowness inside; without it all is as it was."""
    plan = one_gpu(local_batch=4, accumulation=2)
    known = host_calibrated(plan)
    made = estimate(plan, known)
    slow = known.with_constants({"host/slow": 1.5, "host/slow:p90": 2.0})
    assert made.maker == "host" and estimate(plan, slow).step_time.value == pytest.approx(1.5 * made.step_time.value)
    assert estimate(plan, slow.with_constants({"host/slow": 1.0})).step_time.value == made.step_time.value
    assert estimate(plan, slow).host == pytest.approx(1.5 * made.host) and estimate(plan, slow).device == made.device < made.host
    several = {"host/spread": 0.3, "host/fsdp_gather": 1e-3, "host/fsdp_gather:tensor": 1e-5, "host/exchange:forward": 1e-3, "host/other": 1e-3,
               "in_step/host": 1.2}  # fmt: skip
    plain, under = HostTimes(several), HostTimes({**several, "host/slow": 1.5})
    for name, factor in (("spread", 1.0), ("fsdp_gather", 1.0), ("exchange:forward", 1.0), ("other", 1.5)):
        assert under.get(name) == pytest.approx(factor * plain.get(name)), name
    assert plain.get("spread") == 0.3 and plain.get("other") == pytest.approx(1.2e-3)


def test_what_makes_a_step_can_hang_on_the_host_s_speed():
    """At full speed 1, at its slowest 2 seconds of the host, whose expected time is 1.25."""
    host = HostTimes({"host/other": 1.0, "host/slow": 1.25})
    assert [host.may_make(1.25, device) for device in (0.9, 1.1, 1.9, 2.1)] == [True, None, None, False]
    for constants in ({"host/other": 1.0}, {"host/other": 1.0, "host/slow": 1.0}):  # nothing is known of its speed, or that it is full
        assert [HostTimes(constants).may_make(1.25, device) for device in (0.9, 1.1, 1.9, 2.1)] == [True, True, False, False]


def test_what_makes_a_step_hangs_on_the_speeds_that_the_host_was_seen_at():
    """Ten percent of the time faster than 1.1 times full speed's seconds, ten slower than 2.4 times: an expected 2 s are 1.1 to 2.4."""
    host = HostTimes({"host/other": 1.0, "host/slow": 2.0, "host/slow:p10": 1.1, "host/slow:p90": 2.4})
    assert [host.may_make(2.0, device) for device in (1.0, 1.2, 2.3, 2.5)] == [True, None, None, False]
    steady = HostTimes({"host/other": 1.0, "host/slow": 1.2, "host/slow:p10": 1.3, "host/slow:p90": 1.1})  # quantiles beside the mean count no more
    assert [steady.may_make(1.2, device) for device in (1.1, 1.3)] == [True, False]


def test_a_step_that_either_makes_has_residuals_of_its_own():
    plan = one_gpu(local_batch=4, accumulation=2)
    known = host_calibrated(plan)
    made = estimate(plan, known)
    quicker = made.device / (1.3 * made.host)  # a host that at full speed needs less than the device
    known = known.with_constants({name: quicker * value for name, value in known.constants.items()})
    under = known.with_constants({"host/slow": 1.01})
    found = estimate(plan, under)
    assert found.host / 1.01 < found.device < 2.0 * found.host / 1.01 and found.maker == "either" and estimate(plan, known).maker == "device"
    residuals = {"step@either": (0.1,) * 12 + (0.3,) * 12, "step@device": (0.0,) * 24, "step@host": (-0.2,) * 24}
    step = estimate(plan, dataclasses.replace(under, run_residuals=residuals)).step_time
    assert step.high > 1.2 * step.value >= step.low
