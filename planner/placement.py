"""Table placement: shards to the ranks of one sparse group.

    minimise   max over ranks r and kinds k of load   score(r, k) = load(r, k) / target(k)
    where      load(r, k) = base(r, k) + sum of the shards on r,  target(k) = max(mean, largest unsplittable shard)
    subject to memory on each rank <= its cap, host memory on each host <= its cap, every shard exactly once.

Kinds are seconds of the step that follow the table (lookup, all-to-all) and bytes. Every replica group is placed alike, so one
group is solved and `groups_per_host` of them share a host's memory. Shards that go to every rank (row-wise, data-parallel) are
`base`; a table spread over one host (table-row-wise) is an item that takes a whole host. Longest item first (LPT), then moves and
swaps out of the heaviest rank while they help; each step is one NumPy expression over all ranks or all shards, and nothing
depends on time or chance, so equal inputs give equal placements.
"""

from __future__ import annotations

import dataclasses

import numpy as np

IMPROVEMENT_CELLS = 3e7
"""(item, rank) and (item, item) pairs that local improvement may weigh in all: about a second. A count, not a time, keeps
placements reproducible."""

TOLERANCE = 1e-3
"""Improvement stops when the heaviest rank is this near its bound: far below what any cost model is right by."""


class PlacementError(ValueError):
    """A shard that fits no rank; `shard` is its index, `missing` the bytes by which it fails on the emptiest rank or host."""

    def __init__(self, message: str, *, shard: int, missing: float) -> None:
        super().__init__(message)
        self.shard = shard
        self.missing = missing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """`n` unsplittable shards. `loads` `(n, kinds)` in seconds or any unit that adds up; `memory`, `host_memory` `(n,)` bytes.

    `spans_host` marks items that put the given load on every rank of one host. `pinned` `(n,)`: rank (or host, for spanning
    items), or -1.
    """

    loads: np.ndarray
    memory: np.ndarray
    host_memory: np.ndarray
    spans_host: np.ndarray
    pinned: np.ndarray

    def __post_init__(self) -> None:
        n = len(self.loads)
        if any(len(a) != n for a in (self.memory, self.host_memory, self.spans_host, self.pinned)):
            raise ValueError("items: all arrays need one entry per shard")
        if n and (self.loads.min() < 0 or self.memory.min() < 0 or self.host_memory.min() < 0):
            raise ValueError("items: loads and bytes must be >= 0")

    @classmethod
    def of(
        cls,
        loads: np.ndarray,
        memory: np.ndarray | None = None,
        *,
        host_memory: np.ndarray | None = None,
        spans_host: np.ndarray | None = None,
        pinned: np.ndarray | None = None,
    ) -> Items:
        """Fills what is left out: no bytes, no spans, no pins. `loads` may be `(n,)`."""
        loads = np.asarray(loads, dtype=np.float64)
        loads = loads[:, None] if loads.ndim == 1 else loads
        n = len(loads)
        none = np.zeros(n)
        return cls(
            loads=loads,
            memory=none if memory is None else np.asarray(memory, dtype=np.float64),
            host_memory=none if host_memory is None else np.asarray(host_memory, dtype=np.float64),
            spans_host=np.zeros(n, dtype=bool) if spans_host is None else np.asarray(spans_host, dtype=bool),
            pinned=np.full(n, -1) if pinned is None else np.asarray(pinned),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of one sparse group: `num_ranks`, in order, `ranks_per_host` of them on a host, `groups_per_host` such groups on
    one host.

    `memory_cap` [bytes] per rank and `host_cap` [bytes] per host; `base_loads` `(num_ranks, kinds)` and `base_memory`
    `(num_ranks,)` are there already.
    """

    num_ranks: int
    ranks_per_host: int
    groups_per_host: int = 1
    memory_cap: float = np.inf
    host_cap: float = np.inf
    base_loads: np.ndarray | None = None
    base_memory: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_ranks % self.ranks_per_host:
            raise ValueError(f"a group of {self.num_ranks} ranks does not divide into hosts of {self.ranks_per_host}")

    @property
    def num_hosts(self) -> int:
        return self.num_ranks // self.ranks_per_host


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`ranks` `(n,)`: the rank of each item (the host, for a spanning item). `loads` `(num_ranks, kinds)`, `memory`
    `(num_ranks,)`, `host_memory` per host.

    `bounds` `(kinds,)` = max(mean, largest item): no placement can do better in that kind. `excess` = heaviest rank / bound - 1
    per kind.
    """

    ranks: np.ndarray
    loads: np.ndarray
    memory: np.ndarray
    host_memory: np.ndarray
    bounds: np.ndarray

    @property
    def excess(self) -> np.ndarray:
        return self.loads.max(axis=0) / np.maximum(self.bounds, 1e-300) - 1.0


def lower_bounds(items: Items, group: Group) -> np.ndarray:
    """`(kinds,)`: max(mean over ranks, largest unsplittable shard on the least loaded rank); spanning items count on each rank of
    a host."""
    base = _base_loads(items, group)
    copies = np.where(items.spans_host, group.ranks_per_host, 1)[:, None]
    mean = (base.sum(axis=0) + (items.loads * copies).sum(axis=0)) / group.num_ranks
    if not len(items.loads):
        return np.maximum(mean, base.max(axis=0))
    return np.maximum(np.maximum(mean, base.max(axis=0)), items.loads.max(axis=0) + base.min(axis=0))


def place(items: Items, group: Group) -> Placement:
    """Places every item once. Raises PlacementError when some shard fits nowhere, naming it."""
    bounds = lower_bounds(items, group)
    target = np.where(bounds > 0, bounds, 1.0)
    weight = (items.loads / target).max(axis=1) if len(items.loads) else np.zeros(0)
    memory_share = items.memory / group.memory_cap + items.host_memory / group.host_cap
    failure: PlacementError | None = None
    # The load order packs time best; where it cannot pack memory, the memory order is tried, which packs bytes best.
    for order in (_order(items, weight), _order(items, memory_share), _order(items, np.maximum(weight, 4 * memory_share))):
        state = _State(items, group, target)
        try:
            for i in order:
                state.put(i, state.best_rank(i))
        except PlacementError as error:
            failure = failure or error
            continue
        _improve(state)
        return Placement(ranks=state.where, loads=state.loads, memory=state.memory, host_memory=state.host_memory, bounds=bounds)
    assert failure is not None
    raise failure


def _order(items: Items, key: np.ndarray) -> np.ndarray:
    """Pinned items first (they have no choice), then items that take a host, then by falling `key`; ties by index."""
    return np.lexsort((np.arange(len(key)), -key, ~items.spans_host, items.pinned < 0))


def _base_loads(items: Items, group: Group) -> np.ndarray:
    if group.base_loads is None:
        return np.zeros((group.num_ranks, items.loads.shape[1]))
    return np.asarray(group.base_loads, dtype=np.float64)


class _State:
    """Loads under construction."""

    def __init__(self, items: Items, group: Group, target: np.ndarray) -> None:
        self.items, self.group, self.target = items, group, target
        self.loads = _base_loads(items, group).copy()
        self.memory = np.zeros(group.num_ranks) if group.base_memory is None else np.asarray(group.base_memory, dtype=np.float64).copy()
        self.host_memory = np.zeros(group.num_hosts)
        self.where = np.full(len(items.loads), -1)
        self.host_of = np.arange(group.num_ranks) // group.ranks_per_host

    def score(self) -> np.ndarray:
        """`(num_ranks,)`: the worst kind of each rank."""
        return (self.loads / self.target).max(axis=1)

    def put(self, i: int, rank: int) -> None:
        self._add(i, rank, 1.0)
        self.where[i] = rank

    def take(self, i: int) -> None:
        self._add(i, int(self.where[i]), -1.0)

    def _add(self, i: int, rank: int, sign: float) -> None:
        ranks: slice | int = rank
        host = self.host_of[rank] if not self.items.spans_host[i] else rank
        if self.items.spans_host[i]:
            ranks = slice(rank * self.group.ranks_per_host, (rank + 1) * self.group.ranks_per_host)
        self.loads[ranks] += sign * self.items.loads[i]
        self.memory[ranks] += sign * self.items.memory[i]
        self.host_memory[host] += sign * self.items.host_memory[i] * self.group.groups_per_host

    def best_rank(self, i: int) -> int:
        """The rank (host) where item i leaves the lowest worst score, then the least memory; lowest index on a tie."""
        items, group = self.items, self.group
        score = ((self.loads + items.loads[i]) / self.target).max(axis=1)
        free = group.memory_cap - self.memory - items.memory[i]
        host_free = group.host_cap - self.host_memory - items.host_memory[i] * group.groups_per_host
        fits = (free >= 0) & (host_free >= 0)[self.host_of]
        if items.spans_host[i]:
            score = score.reshape(group.num_hosts, -1).max(axis=1)
            fits = fits.reshape(group.num_hosts, -1).all(axis=1)
        if items.pinned[i] >= 0:
            if not fits[items.pinned[i]]:
                raise self._misfit(i, free, host_free, f"its pinned {'host' if items.spans_host[i] else 'rank'} {items.pinned[i]}")
            return int(items.pinned[i])
        if not fits.any():
            raise self._misfit(i, free, host_free, "any rank")
        score = np.where(fits, score, np.inf)
        near = np.flatnonzero(score <= score.min() * (1 + 1e-12) + 1e-15)
        if len(near) == 1 or items.spans_host[i]:
            return int(near[0])
        return int(near[np.argmin(self.memory[near] + self.host_memory[self.host_of[near]])])

    def _misfit(self, i: int, free: np.ndarray, host_free: np.ndarray, where: str) -> PlacementError:
        on_rank, on_host = max(0.0, -float(free.max())), max(0.0, -float(host_free.max()))
        what = f"{on_rank / 2**30:.2f} GiB of device memory" if on_rank >= on_host else f"{on_host / 2**30:.2f} GiB of host memory"
        return PlacementError(
            f"a shard of {(self.items.memory[i] + self.items.host_memory[i]) / 2**30:.2f} GiB does not fit on {where}: {what} missing",
            shard=int(i),
            missing=max(on_rank, on_host),
        )


def _improve(state: _State) -> None:
    """Moves or swaps items out of the heaviest rank while its score falls."""
    movable = np.flatnonzero((state.items.pinned < 0) & ~state.items.spans_host)
    if not len(movable) or state.group.num_ranks == 1:
        return
    cells = 0.0
    while cells < IMPROVEMENT_CELLS:
        score = state.score()
        heavy = int(score.argmax())
        if score[heavy] <= 1 + TOLERANCE:
            return
        mine = movable[state.where[movable] == heavy]
        if not len(mine):
            return
        cells += len(mine) * (len(movable) + state.group.num_ranks)
        move = _best_move(state, heavy, mine)
        swap = _best_swap(state, heavy, mine, movable[state.where[movable] != heavy])
        gain, first, second, rank = min(move, swap)
        if gain >= score[heavy] * (1 - 1e-9):
            return
        state.take(first)
        if second >= 0:
            state.take(second)
            state.put(second, heavy)
        state.put(first, rank)


def _best_move(state: _State, heavy: int, mine: np.ndarray) -> tuple[float, int, int, int]:
    """`(worst score after, item, -1, rank)` of the best single move out of `heavy`."""
    items, group = state.items, state.group
    left = ((state.loads[heavy] - items.loads[mine]) / state.target).max(axis=1)
    there = ((state.loads[None] + items.loads[mine][:, None]) / state.target).max(axis=2)
    fits = state.memory[None] + items.memory[mine][:, None] <= group.memory_cap
    after_host = state.host_memory[state.host_of][None] + items.host_memory[mine][:, None] * group.groups_per_host
    fits &= (after_host <= group.host_cap) | (state.host_of == state.host_of[heavy])[None]
    worst = np.where(fits, np.maximum(left[:, None], there), np.inf)
    worst[:, heavy] = np.inf
    i, rank = np.unravel_index(worst.argmin(), worst.shape)
    return float(worst[i, rank]), int(mine[i]), -1, int(rank)


def _best_swap(state: _State, heavy: int, mine: np.ndarray, others: np.ndarray) -> tuple[float, int, int, int]:
    """`(worst score after, mine, other, rank)` of the best exchange of one item of `heavy` with one elsewhere."""
    if not len(others):
        return np.inf, -1, -1, -1
    items, group = state.items, state.group
    ranks = state.where[others]
    delta = items.loads[mine][:, None] - items.loads[others][None]
    worst = np.maximum(((state.loads[heavy] - delta) / state.target).max(axis=2), ((state.loads[ranks][None] + delta) / state.target).max(axis=2))
    bytes_delta = items.memory[mine][:, None] - items.memory[others][None]
    fits = (state.memory[heavy] - bytes_delta <= group.memory_cap) & (state.memory[ranks][None] + bytes_delta <= group.memory_cap)
    host_delta = (items.host_memory[mine][:, None] - items.host_memory[others][None]) * group.groups_per_host
    hosts = state.host_of[ranks]
    host_fits = (state.host_memory[state.host_of[heavy]] - host_delta <= group.host_cap) & (
        state.host_memory[hosts][None] + host_delta <= group.host_cap
    )
    fits &= host_fits | (hosts == state.host_of[heavy])[None]
    worst = np.where(fits, worst, np.inf)
    i, j = np.unravel_index(worst.argmin(), worst.shape)
    return float(worst[i, j]), int(mine[i]), int(others[j]), int(ranks[j])
