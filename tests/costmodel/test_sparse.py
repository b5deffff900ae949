"""What ranks hold and serve: every sharding against its shards one by one, and bags pooled by their owners."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costmodel.estimate import estimate
from costmodel.lower import lower
from costmodel.plan import TablePlacement
from costmodel.sparse import expected_unique, state_bytes, table_loads

RANKS = 8
PLACES = {"table_wise": (3,), "host_cached": (5,), "column_wise": (1, 4), "row_wise": (), "table_row_wise": (0, 1, 2, 3), "data_parallel": ()}


def one_by_one(plan, tokens):
    """weights, state, host bytes, served rows by rank from `TablePlacement.shards`, a shard at a time."""
    weights, state, host, served = (np.zeros(RANKS) for _ in range(4))
    tables = {name: t for t in plan.model.tables for name in t.names}
    for placement in plan.tables:
        table = tables[placement.table]
        ids = tokens["history"] if table.sequence else plan.local_batch * table.ids_per_sample
        for shard in placement.shards(table.rows, table.dim, RANKS):
            rows, width = shard.row_end - shard.row_begin, shard.col_end - shard.col_begin
            asking = 0 if placement.sharding == "data_parallel" else RANKS
            served[shard.rank] += asking * expected_unique(table.rows, table.zipf, ids) * rows / table.rows * width
            if placement.sharding == "host_cached":
                host[shard.rank] += rows * width * 4 + state_bytes(table, rows, width)
            else:
                state[shard.rank] += state_bytes(table, rows, width)
                weights[shard.rank] += rows * width * 4
    return weights, state, host, served


@pytest.mark.parametrize("first", range(len(PLACES)))
def test_loads_are_the_sum_of_shards(make_plan, first):
    plan = make_plan(ranks=RANKS)
    names = [n for t in plan.model.tables for n in t.names]
    kinds = [*PLACES][first:] + [*PLACES][:first]
    placed = tuple(TablePlacement(table=n, sharding=kinds[i % len(kinds)], ranks=PLACES[kinds[i % len(kinds)]]) for i, n in enumerate(names))
    plan, tokens = dataclasses.replace(plan, tables=placed), {"history": 1234.0}
    found = table_loads(plan, tokens)
    for got, wanted in zip((found.weights, found.state, found.host_weights, found.served), one_by_one(plan, tokens)):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    copied = [t for t in plan.model.tables for n in t.names if kinds[names.index(n) % len(kinds)] == "data_parallel"]
    assert found.replicated == sum(t.rows * (t.dim + 1) for t in copied)


def test_a_host_cached_table_costs_the_host_its_bytes_and_the_step_its_rows(make_plan, h200):
    """In one sparse group of 8 ranks: less on the device, the same in host memory, a longer step; a host that is too small does not fit."""
    plan = make_plan(device=h200, ranks=RANKS, sharding="table_wise")
    cached = dataclasses.replace(plan, tables=tuple(dataclasses.replace(t, sharding="host_cached") for t in plan.tables))
    before, after = estimate(plan, None), estimate(cached, None)
    whole = sum((t.weight_bytes + t.state_bytes) * t.count for t in plan.model.tables)
    assert after.memory.host == pytest.approx(whole) and before.memory.host == 0
    assert after.memory.categories["table_state"] == 0 < after.memory.categories["tables"]
    assert after.step_time.value > before.step_time.value
    small = dataclasses.replace(cached, cluster=dataclasses.replace(plan.cluster, host_memory_bytes=whole / 2))
    assert after.memory.fits and not estimate(small, None).memory.fits


def test_a_data_parallel_table_is_reduced_not_exchanged(make_plan, h200):
    plan = make_plan(device=h200, ranks=RANKS, sharding="row_wise")
    copied = dataclasses.replace(plan, tables=tuple(dataclasses.replace(t, sharding="data_parallel", ranks=()) for t in plan.tables))
    loads = table_loads(copied, {"history": 100.0})
    assert loads.served.tolist() == [0.0] * RANKS
    assert loads.weights.tolist() == [sum(t.weight_bytes * t.count for t in plan.model.tables)] * RANKS
    names = {t.name: t for t in lower(copied, None).graph.tasks}
    assert names["tables all-reduce"].bytes == 4 * loads.replicated
    exchanges = {"counts", "ids", "embeddings", "gradients"}
    assert not exchanges & set(names) and exchanges < {t.name for t in lower(plan, None).graph.tasks}


def test_two_column_shards_on_one_rank_are_both_counted(make_plan):
    """torchrec #1388: a rank that appears twice holds, and pays for, two shards."""
    plan = make_plan(ranks=RANKS)
    names = [n for t in plan.model.tables for n in t.names]
    placed = tuple(TablePlacement(table=n, sharding="column_wise", ranks=(4, 4)) for n in names)
    found = table_loads(dataclasses.replace(plan, tables=placed), {"history": 100.0})
    total = sum(t.weight_bytes * t.count for t in plan.model.tables)
    assert found.weights.tolist() == [0.0] * 4 + [total] + [0.0] * 3


def test_a_rank_outside_the_group_is_refused(make_plan):
    plan = make_plan(ranks=2)
    names = [n for t in plan.model.tables for n in t.names]
    with pytest.raises(ValueError, match="ranks 2 to 2 are outside its sparse group of 2"):
        table_loads(dataclasses.replace(plan, tables=tuple(TablePlacement(table=n, sharding="table_wise", ranks=(2,)) for n in names)),
                    {"history": 10.0})


def test_pooled_owners_send_one_row_a_bag(make_plan, h200):
    """20 ids a bag: pooled by the owner a bag crosses once, in half the bytes where the wire is fp16; the lookup reads every id."""
    plan = dataclasses.replace(make_plan(device=h200, ranks=RANKS, sharding="table_wise", precision="bf16"), predict_only=("exchange",))
    pooled = dataclasses.replace(plan, exchange="pooled", wire="fp16")
    tokens = {"history": 100.0}
    rows, bags = table_loads(plan, tokens), table_loads(pooled, tokens)
    events = RANKS * 100.0 * (48 + 16)
    assert bags.served.sum() == pytest.approx(RANKS * plan.local_batch * 32 * 4 + events)
    assert bags.held["liked"][0].sum() == RANKS * plan.local_batch * 20
    assert rows.held["liked"][0].sum() < bags.held["liked"][0].sum()
    assert np.array_equal(rows.weights, bags.weights)
    assert estimate(pooled, None).step_time.value > 0
