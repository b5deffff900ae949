"""Where the rows of every table live inside a sparse group, and how an id finds them.

A table group's tables share one key space: the key of row r of table c is `c * rows + r`. A shard is a key range x a column range on one
rank. A rank stacks its shards of one table group and width into a storage `(rows, width)`: one lookup and one update serve them all, whatever
their number. `wire` lists all shards of the group in the order in which every rank sends and receives them: by rank, storage, key.
"""
from __future__ import annotations

import dataclasses

from costmodel.model import TableGroup
from costmodel.plan import TablePlacement

EXCHANGED = ("table_wise", "row_wise", "column_wise", "table_row_wise")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One stacked weight `(num_rows, width)` of table group `group` on `rank`; `index` numbers all storages of the sparse group."""

    index: int
    group: str
    rank: int
    width: int
    num_rows: int


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
    """All shards of a sparse group in wire order, and all storages."""

    wire: tuple[PlacedShard, ...]
    storages: tuple[Storage, ...]

    def of_group(self, group: str) -> tuple[PlacedShard, ...]:
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
            if placement.sharding not in EXCHANGED:
                raise ValueError(f"table {name}: sharding {placement.sharding} is not executable; the runtime has {', '.join(EXCHANGED)}")
            for shard in placement.shards(t.rows, t.dim, group_size):
                pieces.append((shard, t, name, c))
    order = {t.name: i for i, t in enumerate(tables)}
    pieces.sort(key=lambda p: (p[0].rank, order[p[1].name], p[0].col_end - p[0].col_begin, p[3], p[0].row_begin, p[0].col_begin))
    wire: list[PlacedShard] = []
    storages: list[Storage] = []
    for shard, t, name, c in pieces:
        width = shard.col_end - shard.col_begin
        if not storages or (storages[-1].rank, storages[-1].group, storages[-1].width) != (shard.rank, t.name, width):
            storages.append(Storage(index=len(storages), group=t.name, rank=shard.rank, width=width, num_rows=0))
        storage = storages[-1]
        wire.append(PlacedShard(table=name, group=t.name, rank=shard.rank, key_begin=c * t.rows + shard.row_begin,
                                key_end=c * t.rows + shard.row_end, col_begin=shard.col_begin, col_end=shard.col_end,
                                row_begin=shard.row_begin, base=storage.num_rows, storage=storage.index))
        storages[-1] = dataclasses.replace(storage, num_rows=storage.num_rows + shard.row_end - shard.row_begin)
    return ShardLayout(wire=tuple(wire), storages=tuple(storages))
