"""Sparse work of one rank: ids, unique rows, rows served to others, and what its table shards weigh.

A table of `rows` rows has popularities p_k = k^-a / sum j^-a (Zipf a; ids are scrambled, so hot rows spread evenly over row-wise
shards). Of n ids drawn from it

    unique(n) = sum over k of 1 - (1 - p_k)^n

are distinct. In a sparse group of G ranks each rank makes its ids unique and asks the owners; the owner of a table-wise shard serves
G unique(n) rows of full width, of one of s row-wise shards G unique(n) / s, of one of s column-wise shards G unique(n) rows of dim / s.

A data-parallel table serves its own rank only; its gradient, dense and with a count a row, is all-reduced over the group once a step. A host-cached
table and its state are in host memory: the distinct rows asked for are fetched to the device for the lookup, and with their state for the update,
after which they are written back.
"""
from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict

import numpy as np

from costmodel.model import DTYPE_BYTES, Model, TableGroup
from costmodel.plan import Plan, TablePlacement
from costmodel.workload import Workload

_HEAD = 2048
_BINS = 512


@functools.lru_cache(maxsize=4096)
def _popularity(rows: int, zipf: float) -> tuple[np.ndarray, np.ndarray]:
    """(probability of one row, number of such rows) with the tail in log-spaced bins; the counts sum to `rows`, the mass to 1."""
    head = min(rows, _HEAD)
    ranks, counts = np.arange(1, head + 1, dtype=np.float64), np.ones(head)
    if rows > head:
        edges = np.unique(np.round(np.geomspace(head + 0.5, rows + 0.5, _BINS + 1) - 0.5)) + 0.5
        ranks = np.concatenate([ranks, np.sqrt(edges[:-1] * edges[1:])])
        counts = np.concatenate([counts, np.diff(edges)])
    weight = ranks ** -zipf
    return weight / (weight @ counts), counts


@functools.lru_cache(maxsize=65536)
def expected_unique(rows: int, zipf: float, ids: float) -> float:
    """Expected distinct rows among `ids` draws."""
    if ids <= 0:
        return 0.0
    p, counts = _popularity(rows, zipf)
    return float(min(counts @ -np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-12))), ids, rows))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """One table group on one rank and micro-batch: ids drawn by all its tables, their distinct rows, and where they go.

    dim: width of an output row; asked: those of `unique` that other ranks may own; served_rows, served_width: rows looked up here for the whole
    sparse group, and their mean width;
    storage_rows: rows held here; distinct_served: distinct rows among those of a whole step, which the update touches.
    """

    table: TableGroup
    ids: float
    unique: float
    asked: float
    served_rows: float
    served_width: float
    storage_rows: float
    distinct_served: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableLoads:
    """Bytes by rank of a sparse group, `(G,)` each: weights, optimizer state, weights and state in host memory; served: elements of rows sent per
    micro-batch; held: table group name -> (rows looked up, elements of them, rows held, distinct rows of a step) by rank, `(4, G)`. fetched: bytes
    from host memory `(2, G)`, for a micro-batch's lookup and for a step's update (as many go back then); replicated: elements of the gradients of
    data-parallel tables; shards: of all tables (0: not known, one a table at least)."""

    weights: np.ndarray
    state: np.ndarray
    host_weights: np.ndarray
    served: np.ndarray
    held: dict[str, np.ndarray]
    fetched: np.ndarray | None = None
    replicated: float = 0.0
    shards: float = 0.0


def ids_per_table(table: TableGroup, samples: float, tokens: dict[str, float]) -> float:
    """Ids that one table of the group sees in a micro-batch of `samples` samples and `tokens` events by sequence."""
    return tokens[table.sequence] if table.sequence is not None else samples * table.ids_per_sample


def skew(table: TableGroup, name: str, workload: Workload) -> float:
    """The Zipf exponent of table `name` of the group: the workload's, by table or group, else the model's."""
    return workload.zipf.get(name, workload.zipf.get(table.name, table.zipf))


def state_bytes(table: TableGroup, rows: float, width: float) -> float:
    """Optimizer state of a shard [bytes]. Raises ValueError for an optimizer that the runtime does not have."""
    if table.optimizer == "rowwise_adagrad":
        return 4.0 * rows
    if table.optimizer in ("adagrad", "adam"):
        return (4.0 if table.optimizer == "adagrad" else 8.0) * rows * width
    if table.optimizer == "sgd":
        return 0.0
    raise ValueError(f"table {table.name}: unknown optimizer {table.optimizer!r}; known: rowwise_adagrad, adagrad, sgd, adam")


def table_loads(plan: Plan, tokens: dict[str, float]) -> TableLoads:
    """What every rank of a sparse group holds and serves. Raises ValueError unless each table of the model is placed exactly once."""
    group = plan.layout.sparse_group
    weights, state, host, served = (np.zeros(group) for _ in range(4))
    fetched, replicated, pieces = np.zeros((2, group)), 0.0, 0.0
    held: dict[str, np.ndarray] = {}
    for table, alike in _placed_alike(plan):
        each, ids = DTYPE_BYTES[table.dtype], ids_per_table(table, plan.local_batch, tokens)
        rows_of = held[table.name] = np.zeros((4, group))
        pools = plan.exchange == "pooled" and table.sequence is None
        for (sharding, zipf), (shards, rows, width) in alike:
            # an owner that pools looks up every id, repeated or not
            unique = group * (ids if plan.exchange == "pooled" else expected_unique(table.rows, zipf, ids))
            distinct = expected_unique(table.rows, zipf, ids * group * plan.accumulation)
            share = rows / table.rows
            found = np.empty((4, group))
            found[0] = unique * share
            found[1] = found[0] * width
            found[2] = rows
            found[3] = distinct * share
            sent = found[1]
            if sharding == "data_parallel":
                found[:2] /= group
                sent = 0.0 * sent
                replicated += float(rows[0]) * (width + 1) if group > 1 else 0.0
            elif pools:
                sent = group * plan.local_batch * width * shards
            rows_of += found
            served += sent
            pieces += float(shards.sum())
            if sharding == "host_cached":
                host += rows * width * each + state_bytes(table, 1.0, width) * rows
                fetched[0] += expected_unique(table.rows, zipf, ids * group) * share * width * each
                fetched[1] += distinct * share * (width * each + state_bytes(table, 1.0, width))
            else:
                weights += rows * width * each
                state += state_bytes(table, 1.0, width) * rows
    return TableLoads(weights=weights, state=state, host_weights=host, served=served, held=held, fetched=fetched if host.any() else None,
                      replicated=replicated, shards=pieces)


def _spread(sharding: str, placed: tuple[tuple[tuple[int, ...], int], ...], table: TableGroup, group: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Of tables of one group under one sharding, `(ranks, how many)` each: (shards, rows of all of them) by rank `(G,)`, and the width of a shard.
    Column shards of one group must have one width: `_alike_of` keeps others apart."""
    shards, rows = np.zeros(group), np.zeros(group)
    width = float(table.dim)
    if sharding in ("table_wise", "host_cached"):
        np.add.at(shards, np.array([ranks[0] if ranks else 0 for ranks, _ in placed]), np.array([float(count) for _, count in placed]))
        return shards, table.rows * shards, width
    for ranks, count in placed:
        at = np.array(ranks) if ranks else np.arange(group)
        everywhere = len(at) == group and len(set(ranks)) in (0, group)
        if sharding == "column_wise":
            if table.dim % len(at):
                raise ValueError(f"table {table.name}: dim {table.dim} does not divide into {len(at)} column shards")
            width = table.dim / len(at)
        each = np.full(len(at), float(table.rows))
        if sharding in ("row_wise", "table_row_wise"):
            step = -(-table.rows // len(at))
            each = np.clip(table.rows - step * np.arange(len(at)), 0, step).astype(np.float64)
        if everywhere:  # an assignment by index, which adds no rank twice
            rows[at] += count * each
            shards[at] += count * (each > 0)
        else:
            np.add.at(rows, at, count * each)
            np.add.at(shards, at, count * (each > 0))
    return shards, rows, width


_Alike = tuple[tuple[TableGroup, tuple[tuple[tuple[str, float], tuple[np.ndarray, np.ndarray, float]], ...]], ...]
_alike: dict[tuple[int, int, int, int], tuple[object, object, object, _Alike]] = {}


def _placed_alike(plan: Plan) -> _Alike:
    """Of every table group: (sharding, skew), and what is placed so as `_spread` gives it. Kept by the identity of model, tables and
    workload."""
    group = plan.layout.sparse_group
    key = (id(plan.model), id(plan.tables), id(plan.workload), group)
    if key not in _alike:
        if len(_alike) >= 64:
            _alike.clear()
        _alike[key] = (plan.model, plan.tables, plan.workload, _alike_of(plan, group))
    return _alike[key][3]


def _alike_of(plan: Plan, group: int) -> _Alike:
    placements, found = _placed_once(plan.model, plan.tables), []
    for table in plan.model.tables:
        counted: dict[tuple[str, float], dict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
        columns: set[int] = set()
        for name in table.names:
            one = placements[name]
            if one.ranks and not 0 <= min(one.ranks) <= max(one.ranks) < group:
                raise ValueError(f"table {name}: ranks {min(one.ranks)} to {max(one.ranks)} are outside its sparse group of {group}")
            counted[(one.sharding, skew(table, name, plan.workload))][one.ranks] += 1
            if one.sharding == "column_wise":
                columns.add(len(one.ranks) or group)
        split = []
        for (sharding, zipf), ranks in counted.items():
            for width in columns if sharding == "column_wise" else (None,):
                part = tuple((r, n) for r, n in ranks.items() if width is None or (len(r) or group) == width)
                if part:
                    split.append(((sharding, zipf), _spread(sharding, part, table, group)))
        found.append((table, tuple(split)))
    return tuple(found)


def _placed_once(model: Model, placements: tuple[TablePlacement, ...]) -> dict[str, TablePlacement]:
    placed = {p.table: p for p in placements}
    names = [n for t in model.tables for n in t.names]
    if len(placed) != len(placements):
        twice = sorted(n for n in placed if sum(p.table == n for p in placements) > 1)
        raise ValueError(f"tables placed twice: {', '.join(twice[:5])}")
    missing, extra = [n for n in names if n not in placed], sorted(set(placed) - set(names))
    if missing or extra:
        raise ValueError(f"tables without a placement: {', '.join(missing[:5]) or 'none'}; "
                         f"placements without a table: {', '.join(extra[:5]) or 'none'}")
    return placed


def group_work(plan: Plan, loads: TableLoads, rank: int, tokens: dict[str, float]) -> tuple[GroupWork, ...]:
    """The work of `rank` (its place in the sparse group) by table group."""
    work, local = [], {p.table for p in plan.tables if p.sharding == "data_parallel"}
    for table in plan.model.tables:
        ids = ids_per_table(table, plan.local_batch, tokens)
        unique = sum(expected_unique(table.rows, skew(table, name, plan.workload), ids) for name in table.names) if plan.workload.zipf else (
            table.count * expected_unique(table.rows, table.zipf, ids))
        asked = unique
        if local:
            asked -= sum(expected_unique(table.rows, skew(table, name, plan.workload), ids) for name in table.names if name in local)
        rows, elements, storage, distinct = loads.held[table.name][:, rank]
        work.append(GroupWork(table=table, ids=ids * table.count, unique=unique, asked=asked, served_rows=float(rows), storage_rows=float(storage),
                              served_width=float(elements / rows) if rows else float(table.dim), distinct_served=float(distinct)))
    return tuple(work)
