"""Sharding and placement of tables alone, for a given cost of one shard: what a sparse-only planner does, with a bound.

For a threshold t let each table take its cheapest sharding (least seconds in sum) whose largest shard is at most t. Then

    heaviest rank  >=  min over t of max(mean over ranks of what is taken, largest shard taken)

as the best plan's own largest shard is one of the thresholds and no table can be cheaper under it. The thresholds with the lowest values are placed
(planner.placement), the plan with the lightest heaviest rank is kept.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from planner.placement import Group, Items, Placement, PlacementError, place

PLACED = 8
"""Thresholds that are placed: the relaxations next to the best one pack a little worse or better."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOption:
    """One way to shard a table: `num_shards` shards of `seconds` and `memory` [bytes] each; spread: `ranks` (shards go anywhere), `host`
    (one to every rank
    of a host), `all` (one to every rank of the group)."""

    name: str
    num_shards: int
    seconds: float
    memory: float
    spread: str = "ranks"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TablesPlan:
    """`options` and `ranks` (of every shard) by table; `heaviest` rank [s], `bound`: no plan is below it; `placement` of the shards that had
    a choice."""

    options: tuple[ShardingOption, ...]
    ranks: tuple[tuple[int, ...], ...]
    heaviest: float
    bound: float
    placement: Placement


def plan_tables(tables: Sequence[Sequence[ShardingOption]], group: Group) -> TablesPlan:
    """The sharding and placement of every table. Raises PlacementError when nothing fits."""
    per_host = group.ranks_per_host
    copies = {"ranks": lambda o: o.num_shards, "host": lambda o: per_host, "all": lambda o: group.num_ranks}
    shape = len(tables), max(map(len, tables))
    total, largest, everywhere = np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape, dtype=bool)
    for k, options in enumerate(tables):
        n = len(options)
        largest[k, :n], everywhere[k, :n] = [o.seconds for o in options], [o.spread == "all" for o in options]
        total[k, :n] = [o.seconds * copies[o.spread](o) for o in options]
    thresholds = np.unique(largest[np.isfinite(largest)])
    thresholds = thresholds[thresholds >= largest.min(axis=1).max()]
    if len(thresholds) > 400:
        thresholds = np.unique(thresholds[np.linspace(0, len(thresholds) - 1, 400).astype(int)])
    relaxed, bounds = [], []
    every = np.arange(len(tables))
    for threshold in thresholds:
        picks = np.where(largest <= threshold, total, np.inf).argmin(axis=1)
        mean, sizes, spread = float(total[every, picks].sum()) / group.num_ranks, largest[every, picks], everywhere[every, picks]
        bounds.append(max(mean, float(sizes.max())))
        # what goes to every rank lies under the largest of the others
        relaxed.append((max(mean, float(sizes[spread].sum() + sizes[~spread].max(initial=0.0))), tuple(picks.tolist())))
    bound = min(bounds)
    best: TablesPlan | None = None
    failure: PlacementError | None = None
    for value, picks in sorted(dict.fromkeys(relaxed))[:PLACED]:
        if best is not None and value >= best.heaviest:
            break
        try:
            made = _place([options[k] for options, k in zip(tables, picks)], group, bound)
        except PlacementError as error:
            failure = failure or error
            continue
        if best is None or made.heaviest < best.heaviest:
            best = made
    if best is None:
        assert failure is not None
        raise failure
    return best


def _place(options: Sequence[ShardingOption], group: Group, bound: float) -> TablesPlan:
    base, base_memory = np.zeros((group.num_ranks, 1)), np.zeros(group.num_ranks)
    owner: list[int] = []
    for k, option in enumerate(options):
        if option.spread == "all":
            base += option.seconds
            base_memory += option.memory
        else:
            owner += [k] * (option.num_shards if option.spread == "ranks" else 1)
    placed = place(Items.of(np.array([options[k].seconds for k in owner]), np.array([options[k].memory for k in owner]),
                            spans_host=np.array([options[k].spread == "host" for k in owner], dtype=bool)),
                   dataclasses.replace(group, base_loads=base, base_memory=base_memory))
    ranks: list[list[int]] = [list(range(group.num_ranks)) if o.spread == "all" else [] for o in options]
    for k, rank in zip(owner, placed.ranks):
        whole = options[k].spread == "host"
        ranks[k] += range(rank * group.ranks_per_host, (rank + 1) * group.ranks_per_host) if whole else [int(rank)]
    return TablesPlan(options=tuple(options), ranks=tuple(tuple(r) for r in ranks), heaviest=float(placed.loads.max()), bound=bound, placement=placed)
