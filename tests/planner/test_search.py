"""The search: equal to exhaustive enumeration, truthful gaps, reproducible plans, and plain words when nothing fits."""
import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.instances import best_of_all, broad_instance, enumerate_plans, instance, odd_calibration
from costmodel.plan import RegionOption
from costmodel.regions import regions
from costmodel.simulate import bound
from planner.bounds import critical_chain
from planner.errors import NoFeasiblePlan
from planner.ilp import Choice
from planner.placement import PlacementError
from planner.pricing import Pricing, plan_order
from planner.scenario import Exclusions, Pins, load_scenario
from planner.search import Search, search
from planner.space import build_space


def _slow(*seeds):
    return [pytest.param(seed, marks=pytest.mark.slow) for seed in seeds]


@pytest.mark.parametrize("seed", [1, 95, *_slow(2, 6, 12, 15, 16, 98, 185)])
def test_equals_exhaustive_enumeration_of_simulated_time(seed):
    """95, 98 and 185: the busiest rank of the best plan serves one table and launches fewer lookups than an evenly loaded one."""
    scenario = instance(seed)
    best, plans = best_of_all(scenario)
    state = Search(scenario, None, time_limit=None, gap=0.0)
    state.run()
    assert plans > 5 and best is not None and state.incumbent is not None
    assert state.incumbent.seconds == pytest.approx(best, rel=2e-6)
    assert state.certificate(state.lowest_open()).status == "optimal"


def test_formats_below_16_bits_equal_enumeration_too():
    """8 bits on the wire, in linear layers and in saved activations, priced in the program, the bounds and the simulation alike."""
    scenario = instance(1)
    device = dataclasses.replace(scenario.cluster.device, peak_flops={**scenario.cluster.device.peak_flops, "fp8": 1e15},
                                 native_formats=(*scenario.cluster.device.native_formats, "fp8_row"))
    scenario = dataclasses.replace(scenario, cluster=dataclasses.replace(scenario.cluster, device=device),
                                   pins=dataclasses.replace(scenario.pins, wire="fp8", recipe=("low_weight_gradients",), precision={"*[!0]": "bf16"},
                                                            checkpoint={"*[!0]": "none"}, exclude=Exclusions(
                                       precision={"*": ("fp32", "fp8_tensor", "fp8_block", "mxfp8")}, checkpoint={"*": ("selective", "quantized4")},
                                       sharding={"*": ("data_parallel",)})),
                                   search=dataclasses.replace(scenario.search, risk_budget=1e9))
    state = Search(scenario, None, time_limit=None, gap=0.0)
    assert "fp8_row" in {c.precision for by in state.space.regions.values() for c in by}
    best, _ = best_of_all(scenario)
    state.run()
    assert state.incumbent.plan.wire == "fp8" and state.incumbent.seconds == pytest.approx(best, rel=2e-6)
    assert state.first[state.incumbent_at] <= state.incumbent.seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", [18, 20, *_slow(0, 1, 4, 5, 6, 10, 12, 14, 17, 21, 22)])
def test_equals_exhaustive_enumeration_of_a_part_that_is_wide_open(seed):
    """Shardings, precisions, checkpoints, jobs by turns; 4-6, 12-14 and 20-22 under an odd calibration."""
    scenario, calibration = broad_instance(seed)
    best, _ = best_of_all(scenario, calibration)
    state = Search(scenario, calibration, time_limit=None, gap=0.0)
    state.run()
    found = state.incumbent.seconds if state.incumbent is not None else None
    assert found == (None if best is None else pytest.approx(best, rel=2e-6))


@pytest.mark.parametrize("seed", [100, 424, *_slow(180, 420, 516)])
def test_small_tables_on_every_rank_are_chosen_where_they_are_fastest(seed):
    """424 under rooflines, the others under odd calibrations; every bound is below every plan."""
    scenario, calibration = broad_instance(seed)
    state = Search(scenario, calibration, time_limit=None, gap=0.0)
    best = _least_of_plans_above_bounds(state)
    state.run()
    assert state.incumbent.seconds == pytest.approx(best, rel=2e-6)
    assert "data_parallel" in {t.sharding for t in state.incumbent.plan.tables}


@pytest.mark.parametrize("seed", [5, *_slow(0, 4, 8, 9, 12, 16, 26)])
@pytest.mark.parametrize("calibrated", [False, True])
def test_program_and_chain_are_below_every_plan(seed, calibrated):
    """5 and 9: the rank that serves most holds few of the bytes that replicas average. Calibrated: lookups and updates have fixed costs, which a rank
    with one table pays once, and collectives bend."""
    scenario = instance(seed)
    calibration = odd_calibration(scenario.cluster.device, seed) if calibrated else None
    _least_of_plans_above_bounds(Search(scenario, calibration, time_limit=None, gap=0.0))


@pytest.mark.parametrize(("seed", "full", "calibrated"), [(5, True, True), *(pytest.param(*c, marks=pytest.mark.slow) for c in (
    (5, True, False), (5, False, True), (5, False, False)))])
def test_replicas_beside_compute_are_bounded_and_searched(seed, full, calibrated):
    """Gathers for the update late, for half of backward and for all of it; averages beside the optimizer."""
    scenario = instance(seed)
    world = scenario.cluster.num_ranks
    layout = {"reshard_after_forward": True, "fsdp": min(world, scenario.cluster.devices_per_host), "sparse_replicas": 2, "fully_sharded_2d": full}
    scenario = dataclasses.replace(scenario, pins=dataclasses.replace(scenario.pins, layout=layout))
    state = Search(scenario, odd_calibration(scenario.cluster.device, seed) if calibrated else None, time_limit=None, gap=0.0)
    blocks = sum(r.count for r in regions(scenario.model))
    assert set(state.space.candidates["tables_ahead"].tolist()) == ({0, -(-blocks // 2), blocks} if full else {1})
    best = _least_of_plans_above_bounds(state)
    state.run()
    assert state.incumbent.seconds == pytest.approx(best, rel=2e-6) and state.incumbent.plan.tables_ahead > 0


def _least_of_plans_above_bounds(state):
    """Least simulated seconds of the plans that fit, after each was held against its candidate's bounds."""
    scenario, calibration = state.scenario, state.calibration
    programs, seen = {}, []
    for i, choice, priced in enumerate_plans(scenario, calibration):
        if priced is None or not priced.memory.fits:
            continue
        seen.append(priced.seconds)
        if i not in programs:
            programs[i] = state.pricing.program(i)
        program = programs[i]
        local = sum(row.local * choice.tables[row.name].get(c, 0) for row in program.tables for c in row.replicated)
        shards = [row.served[c] + local for row in program.tables for c, n in choice.tables[row.name].items() if n and row.served.get(c)]
        assert max(c.at(choice.regions, max([1.0, *shards]), choice.tables) for c in program.cuts) <= priced.seconds * (1 + 1e-9)
        assert state.first[i] <= priced.seconds * (1 + 1e-9)
        assert state.least_memory[i] <= priced.memory.reserved.value * (1 + 1e-9)
    return min(seen)


@pytest.mark.parametrize("seed", [0, *_slow(3, 5)])
def test_no_order_of_a_regions_options_is_faster_than_the_plans_under_any_memory(seed):
    """Three equal blocks: every order of every choice of policies is simulated."""
    scenario, _ = broad_instance(4 * seed + 2)
    history = tuple(dataclasses.replace(g, count=3) for g in scenario.model.sequences[0].layers[:1])
    model = dataclasses.replace(scenario.model, sequences=(dataclasses.replace(scenario.model.sequences[0], layers=history),))
    pins = dataclasses.replace(scenario.pins, checkpoint={**scenario.pins.checkpoint, "interaction": "none"}, sharding={"*": "row_wise"})
    scenario = dataclasses.replace(scenario, model=model, pins=pins, cluster=dataclasses.replace(scenario.cluster, memory_budget=60e9),
                                   workload=dataclasses.replace(scenario.workload, local_batch=1024),
                                   search=dataclasses.replace(scenario.search, predict_only=False))
    space = build_space(scenario)
    pricing, choices = Pricing(scenario, space, None), space.regions["history.0"]
    tables = {t.name: {pricing.choices(t, int(space.candidates["sparse_group"][0]))[0]: len(t.tables)} for t in pricing.tied}
    found = {True: [], False: []}
    for order in itertools.product(choices, repeat=3):
        counts = {name: {(order[0] if name == "history.0" else c[0]): pricing.blocks[name]} for name, c in space.regions.items()}
        choice = Choice(regions=counts, tables=tables, seconds=0.0, bound=0.0, gap=0.0, optimal=True)
        options = tuple(RegionOption(count=len(list(run)), precision=c.precision, checkpoint=c.checkpoint) for c, run in itertools.groupby(order))
        plan = pricing.plan(0, choice)
        regions = tuple(dataclasses.replace(r, options=options) if r.region == "history.0" else r for r in plan.regions)
        priced = pricing.price(dataclasses.replace(plan, regions=regions), choice)
        found[list(order) == plan_order(order)].append((priced.seconds, priced.memory.reserved.value))
    assert len(found[True]) == 10 and len(found[False]) == 17
    for seconds, size in found[False]:
        assert any(s <= seconds * (1 + 1e-9) and m <= size * (1 + 1e-9) for s, m in found[True])


@pytest.mark.slow
def test_first_bounds_are_below_simulated_plans_of_a_large_space():
    scenario = load_scenario("gem-512xh200", with_variants=False)
    state = Search(scenario, None, time_limit=None, gap=0.0)
    rng = np.random.default_rng(5)
    seen = 0
    for i in rng.choice(state.order, 6, replace=False):
        program = state.pricing.program(int(i))
        choice = program.solve(time_limit=20.0, gap=1e-3)
        if choice is None:
            continue
        try:
            priced = state.pricing.price(state.pricing.plan(int(i), choice), choice)
        except PlacementError:
            continue
        seen += 1
        assert state.first[i] <= priced.seconds * (1 + 1e-9)
        assert choice.bound <= priced.seconds * (1 + 1e-9)
    assert seen >= 3


@pytest.mark.parametrize("execution", ["eager", None])
def test_a_job_that_the_host_holds_back_is_proven_quickly(execution):
    """Blocks so small that launching them takes longer than computing: first bounds hold the launches and nearly reach the simulation."""
    big, tiny = load_scenario("gem-8xh200", with_variants=False), load_scenario("quickstart", with_variants=False)
    workload = dataclasses.replace(tiny.workload, global_batch=512, local_batch=None)
    scenario = dataclasses.replace(big, model=tiny.model, workload=workload, pins=dataclasses.replace(big.pins, execution=execution))
    scenario = dataclasses.replace(scenario, search=dataclasses.replace(scenario.search, predict_only=execution is None))
    state = Search(scenario, None, time_limit=None, gap=0.01)
    state.run()
    assert state.certificate(state.lowest_open()).gap <= 0.01
    assert state.solves < (300 if execution else 700)  # each execution is a candidate of its own
    rng, indices = np.random.default_rng(0), np.flatnonzero(state.fits)
    for i in map(int, rng.choice(indices, 25, replace=False)):
        choice = state.pricing.program(i).solve(time_limit=None, gap=0.0)
        priced = state.pricing.price(state.pricing.plan(i, choice), choice)
        assert state.first[i] <= priced.seconds * (1 + 1e-9)
    assert state.first[state.incumbent_at] > (0.9 if execution else 0.85) * state.incumbent.seconds  # launches of compiled blocks bind less


def test_critical_chain_lies_between_the_bound_and_the_simulation():
    scenario = load_scenario("gem-8xh200", with_variants=False)
    space = build_space(scenario)
    pricing = Pricing(scenario, space, None)
    for i in np.random.default_rng(0).integers(0, len(space.candidates), 3):
        program = pricing.program(int(i))
        choice = program.solve(time_limit=20.0, gap=1e-3)
        priced = pricing.price(pricing.plan(int(i), choice), choice)
        slow = pricing.slowest(priced.plan)[1]
        value, terms = critical_chain(priced.lowered.graph)
        assert bound(priced.lowered.graph) * (1 - 1e-12) <= value <= priced.seconds / slow * (1 + 1e-9)
        assert terms


def test_two_searches_write_byte_identical_plans(tmp_path):
    scenario = load_scenario("quickstart", with_variants=False)
    for name in ("a", "b"):
        search(scenario, time_limit=60.0).plan.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_time_limit_gives_the_best_found_with_its_true_gap():
    scenario = load_scenario("gem-512xh200", with_variants=False)
    result = search(scenario, time_limit=0.5, gap=0.0, top=1)
    certificate = result.certificate
    assert certificate.status == "time_limit"
    assert 0 < certificate.gap < 1 and certificate.lowest_open < certificate.incumbent
    assert certificate.gap == pytest.approx(1 - certificate.lowest_open / certificate.incumbent)
    assert result.plan.prediction["memory"]["fits"]


def test_every_table_is_placed_exactly_once_and_the_plan_loads():
    scenario = load_scenario("gem-8xh200", with_variants=False)
    plan = search(scenario, time_limit=30.0, gap=0.02, top=1).plan
    names = [n for t in scenario.model.tables for n in t.names]
    assert sorted(p.table for p in plan.tables) == sorted(names)
    assert plan.search["gap"] <= 0.02 and plan.layout.world_size == 8


def test_pins_hold():
    scenario = load_scenario("gem-8xh200", with_variants=False)
    pins = Pins(layout={"fsdp": 4}, precision={"heads": "fp32"}, checkpoint={"history.0": "full"}, sharding={"feature.3": "table_wise"})
    plan = search(dataclasses.replace(scenario, pins=pins), time_limit=30.0, gap=0.05, top=1).plan
    options = {r.region: r.options for r in plan.regions}
    assert plan.layout.fsdp == 4
    assert {o.precision for o in options["heads"]} == {"fp32"} and {o.checkpoint for o in options["history.0"]} == {"full"}
    assert next(t for t in plan.tables if t.table == "feature.3").sharding == "table_wise"


def test_nothing_fits_says_by_how_much_and_what_would_help():
    scenario = load_scenario("gem-8xh200", with_variants=False)
    tight = dataclasses.replace(scenario, cluster=dataclasses.replace(scenario.cluster, memory_budget=3e9))
    with pytest.raises(NoFeasiblePlan) as caught:
        search(tight, time_limit=20.0)
    text = str(caught.value)
    assert "candidates fits into 2.794 GiB per rank (memory_budget; the device has 131.3 GiB)" in text and "GiB missing" in text
    assert "its largest parts: " in text and "ways out, each solved:" in text and "no memory_budget" in text


def test_a_way_out_whose_search_ran_out_of_time_is_not_called_none(monkeypatch):
    monkeypatch.setattr("planner.infeasible._KNOB_SECONDS", 0.0)
    scenario = load_scenario("gem-8xh200", with_variants=False)
    tight = dataclasses.replace(scenario, cluster=dataclasses.replace(scenario.cluster, memory_budget=3e9))
    with pytest.raises(NoFeasiblePlan, match=r"not decided within 0 s each: .*no memory_budget") as caught:
        search(tight, time_limit=20.0)
    assert "no single change" not in str(caught.value)
