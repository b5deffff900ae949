"""The integer program against brute force on tiny programs: its objective, every family of constraints, ties by count, and cut-off solutions."""

import dataclasses
import itertools

import numpy as np
import pulp
import pytest

from costmodel.memory import BlockMemory
from planner.bounds import Cut, Durations
from planner.ilp import GIB, CandidateProgram, Choice, MemoryRow, RegionRow, TableRow, missing_memory
from planner.solver import solve
from planner.space import RegionChoice, TableChoice

FAST = RegionChoice(precision="fp8_row", checkpoint="none", risk=1.0)
PLAIN = RegionChoice(precision="bf16", checkpoint="none", risk=0.0)
LEAN = RegionChoice(precision="bf16", checkpoint="full", risk=0.0)
ROWS = TableChoice(sharding="row_wise", num_shards=4)
WHOLE = TableChoice(sharding="table_wise", num_shards=1)
NO_DURATIONS = Durations(regions={}, rest={}, slopes={})


def region(
    name: str, count: int, saved: dict[RegionChoice, float], *, workspace: float = 0.0, unsharded: float = 0.0, sharded: float = 0.0
) -> RegionRow:
    """A region whose blocks keep `saved` GiB by choice."""
    memory = {
        c: BlockMemory(region=name, saved=s * GIB, whole=max(saved.values()) * GIB, workspace=workspace * GIB, unsharded=unsharded * GIB,
                       sharded=sharded * GIB)
        for c, s in saved.items()
    }
    return RegionRow(name=name, count=count, memory=memory, sharded=sharded * GIB)


def table(name: str, count: int, *, size: float = 1.0, served: float = 0.5) -> TableRow:
    """`count` tables of `size` GiB on 4 ranks: row-wise over all of them, or whole on one."""
    return TableRow(
        name=name,
        count=count,
        weights={ROWS: size / 4 * GIB, WHOLE: size / 4 * GIB},
        shard={ROWS: size / 4 * GIB, WHOLE: size * GIB},
        state={ROWS: size / 40 * GIB, WHOLE: size / 40 * GIB},
        shard_state={ROWS: size / 40 * GIB, WHOLE: size / 10 * GIB},
        served={ROWS: served / 4, WHOLE: served},
        effort={ROWS: 0.0, WHOLE: 1.0},
    )


def room(usable: float, **fields: object) -> MemoryRow:
    base = dict(resting=0.0, buffer=0.0, gradients=0.0, usable=usable * GIB, embeddings=0.0, accumulates=False, keeps_unsharded=False)
    return MemoryRow(**{**base, **fields})


def chain(*coefficients: dict[RegionChoice, float], constant: float = 0.0, slope: float = 0.0) -> Cut:
    return Cut(constant=constant, coefficients={f"r{k}": by for k, by in enumerate(coefficients)}, slope=slope)


def program(regions: list[RegionRow], tables: list[TableRow], memory: MemoryRow, chains: list[Cut], **fields: object) -> CandidateProgram:
    made = CandidateProgram(regions=regions, tables=tables, memory=memory, durations=NO_DURATIONS, **fields)
    made.cuts += chains
    return made


def ways(count: int, choices: list) -> list[dict]:
    return [dict(zip(choices, n)) for n in itertools.product(range(count + 1), repeat=len(choices)) if sum(n) == count]


def peak(made: CandidateProgram, blocks: list[dict], shards: list[dict]) -> float:
    """Largest bytes of any moment of a step, walked block by block; gathered parameters stay gathered (`keeps_unsharded`) or take none."""
    m = made.memory

    def spread(even: str, largest: str) -> float:
        mean = sum(n * getattr(t, even)[c] for t, by in zip(made.tables, shards) for c, n in by.items())
        return max([mean, *[getattr(t, largest)[c] for t, by in zip(made.tables, shards) for c, n in by.items() if n]])

    held = spread("weights", "shard") + spread("state", "shard_state")
    resting = m.resting + m.table_share * held + m.buffer * (heaviest(made, shards) - 1)
    order = [(row, c) for row, by in zip(made.regions, blocks) for c in row.memory for _ in range(by[c])]
    keep = [row.memory[c].saved + (row.memory[c].unsharded if m.keeps_unsharded else 0.0) for row, c in order]
    moments = [m.embeddings + sum(keep) + m.gradients * m.accumulates, m.gradients, held if m.tables_in_flight else 0.0]
    for at, (row, c) in enumerate(order):
        here = row.memory[c]
        behind = m.gradients if m.accumulates else sum(r.sharded for r, _ in order[at + 1 :])
        moments.append(m.embeddings + sum(keep[: at + 1]) + max(0.0, here.whole - here.saved) + here.workspace + here.unsharded + behind)
    return resting + max(moments)


def heaviest(made: CandidateProgram, shards: list[dict]) -> float:
    return max([1.0, *[t.served[c] for t, by in zip(made.tables, shards) for c, n in by.items() if n]])


def brute(made: CandidateProgram) -> list[tuple[float, list[dict], list[dict]]]:
    """(seconds, blocks, shards) of all points that fit, fastest first."""
    found = []
    for blocks in itertools.product(*(ways(r.count, list(r.memory)) for r in made.regions)):
        if made.risk_budget is not None and sum(c.risk * n for by in blocks for c, n in by.items()) > made.risk_budget:
            continue
        for shards in itertools.product(*(ways(t.count, list(t.weights)) for t in made.tables)):
            if peak(made, list(blocks), list(shards)) > made.memory.usable * (1 + 1e-9):
                continue
            counts = {r.name: by for r, by in zip(made.regions, blocks)}
            found.append((max(c.at(counts, heaviest(made, list(shards))) for c in made.cuts), list(blocks), list(shards)))
    return sorted(found, key=lambda p: p[0])


def check(made: CandidateProgram) -> Choice | None:
    """The program's optimum is that of brute force."""
    points, choice = brute(made), made.solve(time_limit=None, gap=0.0)
    assert (choice is None) == (not points)
    if choice is not None:
        assert choice.seconds == pytest.approx(points[0][0], rel=1e-6)
        assert choice.bound <= choice.seconds and choice.gap < 1e-7
    return choice


@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force_over_time_memory_load_and_risk(seed):
    rng = np.random.default_rng(seed)
    regions = [
        region(f"r{k}", int(rng.integers(1, 4)), {FAST: rng.uniform(1, 3), PLAIN: rng.uniform(1, 3), LEAN: rng.uniform(0, 1)},
               workspace=rng.uniform(0, 0.5), unsharded=0.2 * (seed % 2), sharded=rng.uniform(0, 0.2))
        for k in range(2)
    ]
    tables = [table("t0", int(rng.integers(1, 4)), size=rng.uniform(0.2, 2), served=rng.uniform(0.2, 3))]
    chains = []
    for _ in range(3):
        costs = ({c: rng.uniform(1e-3, 5e-3) for c in (FAST, PLAIN, LEAN)} for _ in regions)
        chains.append(chain(*costs, constant=rng.uniform(0, 5e-3), slope=rng.uniform(0, 1e-2)))
    gradients = sum(r.sharded * r.count for r in regions)
    memory = room(rng.uniform(5, 12), gradients=gradients, embeddings=0.3 * GIB, buffer=0.2 * GIB, resting=GIB, accumulates=bool(seed % 2),
                  keeps_unsharded=bool(seed % 2))
    made = program(regions, tables, memory, chains, risk_budget=float(rng.integers(0, 5)) if seed % 3 else None)
    check(made)


def test_every_block_and_table_has_one_option():
    made = program([region("r0", 3, {FAST: 1, PLAIN: 1})], [table("t0", 5)], room(100), [chain({FAST: 1e-3, PLAIN: 2e-3})])
    choice = check(made)
    assert choice is not None
    assert sum(choice.regions["r0"].values()) == 3 and sum(choice.tables["t0"].values()) == 5


def test_the_step_lasts_as_long_as_the_longest_chain():
    """Two chains that favour different options meet in a mixture."""
    made = program([region("r0", 4, {FAST: 1, PLAIN: 1})], [], room(100), [chain({FAST: 1e-3, PLAIN: 3e-3}), chain({FAST: 3e-3, PLAIN: 1e-3})])
    choice = check(made)
    assert choice is not None and choice.regions["r0"] == {FAST: 2, PLAIN: 2} and choice.seconds == pytest.approx(8e-3)


def test_the_heaviest_rank_carries_the_largest_unsplittable_shard():
    """Holding whole tables is three times the mean's load for one rank: it is taken only where rows over all ranks do not fit."""
    heavy = dataclasses.replace(table("t0", 2, served=3.0), weights={ROWS: 2 * GIB, WHOLE: 0.25 * GIB})
    regions, chains = [region("r0", 1, {PLAIN: 1})], [chain({PLAIN: 1e-3}, slope=1e-3)]
    roomy, tight = (check(program(regions, [heavy], room(usable), chains)) for usable in (100, 4.0))
    assert roomy.tables["t0"] == {ROWS: 2, WHOLE: 0} and roomy.seconds == pytest.approx(1e-3)
    assert tight.tables["t0"][WHOLE] >= 1 and tight.seconds == pytest.approx(3e-3)


def test_a_whole_table_must_fit_one_rank():
    """8 GiB and a tenth of it in state on one rank, beside 1 GiB of activations; a mean over ranks would let it pass."""
    whole = table("t0", 1, size=8.0)
    whole = dataclasses.replace(whole, **{f.name: {WHOLE: getattr(whole, f.name)[WHOLE]} for f in dataclasses.fields(whole)[2:8]})
    regions, chains = [region("r0", 1, {PLAIN: 1})], [chain({PLAIN: 1e-3})]
    assert check(program(regions, [whole], room(9.81), chains)) is not None
    assert check(program(regions, [whole], room(9.79), chains)) is None


@pytest.mark.parametrize("moment", ["forward", "sparse", "optimizer", "backward"])
def test_each_moment_of_memory_binds(moment):
    """A byte less than what one moment needs changes the choice or leaves none."""
    fields = {"optimizer": {"gradients": 6 * GIB}, "sparse": {"tables_in_flight": True, "table_share": 0.25}}.get(moment, {})
    rows = [region("r0", 2, {FAST: 2.0, LEAN: 0.1}, workspace=1.0 if moment == "backward" else 0.0)]
    tables = [table("t0", 4, size=4.0)] if moment == "sparse" else []
    chains = [chain({FAST: 1e-3, LEAN: 2e-3})]
    needs = {"forward": 4.0, "backward": 5.0, "optimizer": 6.0, "sparse": 4.4 * 1.25}[moment]
    assert check(program(rows, tables, room(needs, **fields), chains)).regions["r0"][FAST] == 2
    tight = check(program(rows, tables, room(needs - 1e-3, **fields), chains))
    assert tight is None if moment in ("optimizer", "sparse") else tight.regions["r0"][FAST] < 2


def test_numeric_risk_stays_in_its_budget():
    for budget in range(5):
        made = program([region("r0", 4, {FAST: 1, PLAIN: 1})], [], room(100), [chain({FAST: 1e-3, PLAIN: 2e-3})], risk_budget=float(budget))
        assert check(made).regions["r0"][FAST] == budget


def test_no_good_cuts_give_the_points_in_order():
    """Every solution once, best first, none left out, whether the solver or the enumeration finds it."""
    regions = [region("r0", 3, {FAST: 1, PLAIN: 1, LEAN: 0.5})]
    made = program(regions, [table("t0", 2)], room(4.6), [chain({FAST: 1e-3, PLAIN: 2.2e-3, LEAN: 3.1e-3})])
    points, seen = brute(made), []
    while (choice := made.solve(time_limit=None, gap=0.0)) is not None:
        seen.append(choice)
        made.no_goods.append(choice)
    assert len(points) > 5 and len({c.key() for c in seen}) == len(seen) == len(points)
    assert [c.seconds for c in seen] == pytest.approx([p[0] for p in points], rel=1e-6)


@pytest.mark.parametrize("usable", [3.0, 4.5, 6.0, 9.0])
def test_tied_layers_equal_expanded_layers(usable):
    """Four blocks tied by count have the objective of four rows of one block whose options come in the region's order."""
    costs, saved = {FAST: 1e-3, PLAIN: 2e-3, LEAN: 3.5e-3}, {FAST: 2.0, PLAIN: 1.4, LEAN: 0.3}
    tied = program([region("r0", 4, saved)], [], room(usable), [chain(costs)]).solve(time_limit=None, gap=0.0)
    apart = program([region(f"r{k}", 1, saved) for k in range(4)], [], room(usable), [chain(*[costs] * 4)])
    problem = apart.build()
    places = [pulp.lpSum(at * apart.n[f"r{k}", c] for at, c in enumerate(saved)) for k in range(4)]
    for before, after in itertools.pairwise(places):
        problem += before <= after
    expanded = solve(problem, gap=0.0)
    assert (tied is None) == (not expanded.has_values)
    if tied is not None:
        assert tied.seconds == pytest.approx(expanded.values["T"] * 1e-3, rel=1e-6)


def test_an_override_of_one_block_leaves_its_equals_alone():
    """Fault 23: equal blocks that share what describes them. The second of four keeps bf16; rows share their memory objects on purpose."""
    shared = region("r0", 1, {FAST: 1.0, PLAIN: 1.0})
    rows = [dataclasses.replace(shared, name=f"r{k}") for k in range(4)]
    rows[1] = dataclasses.replace(rows[1], memory={PLAIN: shared.memory[PLAIN]})
    costs = [{FAST: 1e-3, PLAIN: 2e-3}] * 4
    choice = program(rows, [], room(100), [chain(*costs)]).solve(time_limit=None, gap=0.0)
    assert [choice.regions[f"r{k}"].get(FAST, 0) for k in range(4)] == [1, 0, 1, 1]
    plain = program([dataclasses.replace(shared, name="r0", count=4)], [], room(100), [chain(costs[0])]).solve(time_limit=None, gap=0.0)
    assert plain.regions["r0"] == {FAST: 4, PLAIN: 0}


def test_missing_memory_is_what_makes_it_fit():
    rows, chains = [region("r0", 2, {PLAIN: 3.0, LEAN: 1.0})], [chain({PLAIN: 1e-3, LEAN: 2e-3})]
    made = program(rows, [], room(1.5), chains)
    assert made.solve(time_limit=None, gap=0.0) is None
    missing, choice = missing_memory(made)
    assert choice is not None and missing > 0
    assert check(program(rows, [], room(1.5 + missing / GIB), chains)) is not None
    assert check(program(rows, [], room(1.499 + missing / GIB), chains)) is None


def test_shadow_price_is_the_slope_of_the_relaxation():
    rows, chains = [region("r0", 2, {PLAIN: 3.0, LEAN: 1.0})], [chain({PLAIN: 1e-3, LEAN: 2e-3})]

    def relaxed(usable: float) -> float:
        return solve(program(rows, [], room(usable), chains).build(), relax=True).objective * 1e-3

    prices = program(rows, [], room(4.5), chains).prices()
    assert prices and sum(prices.values()) == pytest.approx((relaxed(4.51) - relaxed(4.5)) / 0.01, rel=1e-3)
    assert program(rows, [], room(100.0), chains).prices() == {}
