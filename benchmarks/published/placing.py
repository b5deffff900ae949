"""Where tables of a published step lie, as systems place them that plan for a step's time: HugeCTR's `auto` (mlcommons/training_results_v4.0,
NVIDIA's submission of dlrm_dcnv2: sharding, with DP_SHARDING_THRESHOLD=0.008).

Tables whose weights and state take less than `REPLICATED_BYTES` are on every rank. Of the others a rank pays

    cost = sum over its shards (ids a sample / shards of the table + c)        c = bandwidth of memory / link / 4

since a bag that crosses the link costs as much as c rows that are read (a quarter: its defaults 8 / 2, bytes and directions). Tables begin whole; the
one with most ids a shard is halved again and again, shards go to the rank that pays least so far and has room, and the placement whose most burdened
rank pays least is taken.
"""
from __future__ import annotations

from collections.abc import Mapping

REPLICATED_BYTES = 8e6
# Of the memory, for tables: 60 of 80 GB [NVIDIA's train.py: memory_cap_for_embedding].
ROOM = 0.75
COMM_SHARE = 0.25
SPLITS = 20


def placed(ids: Mapping[str, float], num_bytes: Mapping[str, float], ranks: int, *, crossing: float, room: float) -> dict[str, tuple[int, ...]]:
    """Table -> its ranks; an empty tuple: every one holds it whole. ids: a sample's of each table; num_bytes: its weights and state; crossing: c
    above; room: bytes a rank has for tables. What fits nowhere is on all ranks in parts."""
    whole = [name for name in ids if num_bytes[name] < REPLICATED_BYTES]
    apart = sorted((name for name in ids if name not in set(whole)), key=lambda name: -ids[name])
    everywhere = tuple(range(ranks))
    best = {name: everywhere for name in apart}
    least = sum(ids[name] / ranks + crossing for name in apart)
    shards = dict.fromkeys(apart, 1)
    for _ in range(SPLITS):
        found = _greedy(ids, num_bytes, shards, ranks, crossing, room)
        if found is not None and max(found[1]) < least:
            best, least = found[0], max(found[1])
        hottest = next((name for name in sorted(apart, key=lambda n: -ids[n] / shards[n]) if 2 * shards[name] <= ranks), None)
        if hottest is None:
            break
        shards[hottest] *= 2
    return {name: best.get(name, ()) for name in ids}


def _greedy(ids: Mapping[str, float], num_bytes: Mapping[str, float], shards: Mapping[str, int], ranks: int, crossing: float,
            room: float) -> tuple[dict[str, tuple[int, ...]], list[float]] | None:
    """(table -> ranks, cost by rank), heaviest shards first; None where a table finds no room."""
    cost, left = [0.0] * ranks, [room] * ranks
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(shards, key=lambda n: -ids[n] / shards[n]):
        fitting = [rank for rank in sorted(range(ranks), key=lambda r: cost[r]) if left[rank] >= num_bytes[name] / shards[name]][:shards[name]]
        if len(fitting) < shards[name]:
            return None
        for rank in fitting:
            cost[rank] += ids[name] / shards[name] + crossing
            left[rank] -= num_bytes[name] / shards[name]
        found[name] = tuple(sorted(fitting))
    return found, cost
