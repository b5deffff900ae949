"""Where the rows of every table live inside a sparse group, and how an id finds them.

A table group's tables share one key space: the key of row r of table c is `c * rows + r`. A shard is a key range x a column range on one
rank. A rank stacks its shards of one table group and width into a storage `(rows, width)`: one lookup and one update serve them all, whatever
their number. `wire` lists the shards that are exchanged, in the order in which every rank sends and receives them: by rank, storage, key. A
data-parallel table is a shard of every rank (`replicated`) and is never on the wire; a host-cached one is exchanged like a table-wise one, but its
storage is in host memory.
"""
from __future__ import annotations

import dataclasses

from costmodel.model import TableGroup
from costmodel.plan import Shard, TablePlacement

EXECUTABLE = ("table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel", "host_cached")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One stacked weight `(num_rows, width)` of table group `group` on `rank`; `index` numbers all storages of the sparse group. `host`: in host
    memory; `replicated`: every rank has the same one."""

    index: int
    group: str
    rank: int
    width: int
    num_rows: int
    host: bool = False
    replicated: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedShard:
    """Keys [key_begin, key_end) and columns [col_begin, col_end); its rows are `base ...` of storage `storage`. `row_begin`: in its table."""

    table: str
    group: str
    rank: int
    key_begin: int
    key_end: int
    col_begin: int
    col_end: int
    row_begin: int
    base: int
    storage: int

    @property
    def num_rows(self) -> int:
        return self.key_end - self.key_begin

    @property
    def width(self) -> int:
        return self.col_end - self.col_begin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """All shards of a sparse group, exchanged ones in wire order, and all storages."""

    wire: tuple[PlacedShard, ...]
    replicated: tuple[PlacedShard, ...]
    storages: tuple[Storage, ...]

    def of_group(self, group: str) -> tuple[PlacedShard, ...]:
        """Exchanged ones."""
        return tuple(s for s in self.wire if s.group == group)


def place(tables: tuple[TableGroup, ...], placements: tuple[TablePlacement, ...], group_size: int) -> ShardLayout:
    """Raises ValueError for a table without a placement, a placement without a table, or a sharding that is not executable here."""
    by_table = {p.table: p for p in placements}
    known = [name for t in tables for name in t.names]
    missing, extra = [n for n in known if n not in by_table], sorted(set(by_table) - set(known))
    if missing or extra or len(by_table) != len(placements):
        raise ValueError(f"placements: missing {missing[:3]}, unknown {extra[:3]}, {len(placements) - len(by_table)} twice")
    pieces = []
    for t in tables:
        for c, name in enumerate(t.names):
            placement = by_table[name]
            if placement.sharding not in EXECUTABLE:
                raise ValueError(f"table {name}: sharding {placement.sharding} is not executable; the runtime has {', '.join(EXECUTABLE)}")
            shards = placement.shards(t.rows, t.dim, group_size)
            replicated = placement.sharding == "data_parallel" and group_size > 1
            if replicated and sorted(s.rank for s in shards) != list(range(group_size)):
                raise ValueError(f"table {name}: data_parallel needs a copy on every rank of its sparse group, got ranks {placement.ranks}")
            pieces += [_Piece(shard, t, name, c, placement.sharding == "host_cached", replicated) for shard in shards]
    order = {t.name: i for i, t in enumerate(tables)}
    pieces.sort(key=lambda p: (p.shard.rank, order[p.group.name], p.host, p.replicated, p.width, p.number, p.shard.row_begin, p.shard.col_begin))
    placed: list[PlacedShard] = []
    storages: list[Storage] = []
    for p in pieces:
        shard, rows = p.shard, p.shard.row_end - p.shard.row_begin
        storage = Storage(index=len(storages), group=p.group.name, rank=shard.rank, width=p.width, num_rows=0, host=p.host, replicated=p.replicated)
        if not storages or dataclasses.replace(storages[-1], index=storage.index, num_rows=0) != storage:
            storages.append(storage)
        storage, first = storages[-1], p.number * p.group.rows
        placed.append(PlacedShard(table=p.table, group=p.group.name, rank=shard.rank, key_begin=first + shard.row_begin,
                                  key_end=first + shard.row_end, col_begin=shard.col_begin, col_end=shard.col_end, row_begin=shard.row_begin,
                                  base=storage.num_rows, storage=storage.index))
        storages[-1] = dataclasses.replace(storage, num_rows=storage.num_rows + rows)
    apart = {s.index for s in storages if s.replicated}
    return ShardLayout(wire=tuple(s for s in placed if s.storage not in apart), replicated=tuple(s for s in placed if s.storage in apart),
                       storages=tuple(storages))


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A shard of table `table`, number `number` of its group, and how it is kept."""

    shard: Shard
    group: TableGroup
    table: str
    number: int
    host: bool
    replicated: bool

    @property
    def width(self) -> int:
        return self.shard.col_end - self.shard.col_begin
