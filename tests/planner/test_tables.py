"""Sharding of tables alone: never below its bound, equal to enumeration where a group is small."""
import itertools

import numpy as np
import pytest

from planner.placement import Group
from planner.tables import ShardingOption, plan_tables


@pytest.mark.parametrize("seed", range(6))
def test_bound_holds_for_every_sharding_and_placement(seed):
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(3):
        whole = float(rng.uniform(1, 5))
        tables.append([ShardingOption(name="table_wise", num_shards=1, seconds=whole, memory=0.0),
                       ShardingOption(name="column_wise2", num_shards=2, seconds=whole * 0.7, memory=0.0),
                       ShardingOption(name="row_wise", num_shards=2, seconds=whole * 0.6, memory=0.0, spread="all")])
    plan = plan_tables(tables, Group(num_ranks=2, ranks_per_host=2))
    best = np.inf
    for options in itertools.product(*tables):
        items = [o.seconds for o in options for _ in range(o.num_shards) if o.spread == "ranks"]
        base = sum(o.seconds for o in options if o.spread == "all")
        for where in itertools.product(range(2), repeat=len(items)):
            best = min(best, max(np.bincount(where, weights=items, minlength=2)) + base if items else base)
    assert plan.bound <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= plan.heaviest <= best * 1.3
    assert len(plan.ranks) == 3 and all(len(r) == o.num_shards for r, o in zip(plan.ranks, plan.options))
