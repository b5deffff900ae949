"""Where the tables of other systems lie."""
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.placing import REPLICATED_BYTES, placed


def burden(ids: dict[str, float], ranks: dict[str, tuple[int, ...]], count: int, crossing: float) -> list[float]:
    cost = [0.0] * count
    for name, held in ranks.items():
        for rank in held:
            cost[rank] += ids[name] / len(held) + crossing
    return cost


def test_hot_tables_are_halved_until_ranks_carry_alike():
    ids = {"hot": 100.0, "warm": 30.0, "a": 10.0, "b": 10.0, "c": 5.0, "small": 7.0}
    sizes = {**dict.fromkeys(ids, 4e9), "small": 1e6}
    found = placed(ids, sizes, 8, crossing=2.0, room=60e9)
    assert found["small"] == () and len(found["hot"]) > 2 and len(found["a"]) == 1
    carried = burden(ids, found, 8, 2.0)
    assert max(carried) < 1.3 * sum(carried) / 8 and max(carried) < 0.3 * ids["hot"]


def test_the_more_a_crossing_costs_the_fewer_parts_tables_have():
    ids, sizes = {"hot": 40.0, "warm": 10.0}, {"hot": 4e9, "warm": 4e9}
    shards = [len(placed(ids, sizes, 8, crossing=crossing, room=60e9)["hot"]) for crossing in (0.0, 2.0, 100.0)]
    assert shards == sorted(shards, reverse=True) and shards[-1] < shards[0] == 8


def test_what_fits_on_no_rank_is_on_all_of_them():
    assert placed({"huge": 5.0}, {"huge": 400e9}, 8, crossing=2.0, room=60e9)["huge"] == tuple(range(8))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.5, 200), st.floats(1e3, 5e10)), min_size=1, max_size=12), st.sampled_from((2, 4, 8)), st.floats(0, 50))
def test_every_table_has_a_place_and_no_rank_twice(tables, ranks, crossing):
    ids, sizes = ({str(i): table[at] for i, table in enumerate(tables)} for at in (0, 1))
    found = placed(ids, sizes, ranks, crossing=crossing, room=1e12)
    assert set(found) == set(ids)
    for name, held in found.items():
        assert (held == ()) == (sizes[name] < REPLICATED_BYTES) and len(set(held)) == len(held) and all(0 <= r < ranks for r in held)
