"""The sparse part of the bound over candidates: chains of exchange, lookup and update, recorded once and priced for every transport and group."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.batch_phases import NOTHING, Chains, Keys, Slot
from costmodel.comms import GroupShape
from costmodel.lower import _Builder, batch_shape
from costmodel.plan import Plan
from costmodel.stepgraph import HOST, Task, tier_stream

if TYPE_CHECKING:
    from costmodel.batch import Evaluation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """By sparse key: copy of the input [s]; the chains before the splits are read and after (`synced`: whether they are); behind backward,
    by `_TAIL`:
    seconds, launch seconds `(keys, 5)` and what is taken of compute `(keys, 5, 4)`; tiers `(keys, 2)` of exchange and replicas, and whether
    their collectives take from compute."""

    copy: np.ndarray
    before: Chains
    after: Chains
    synced: np.ndarray
    tail: np.ndarray
    launch: np.ndarray
    taken: np.ndarray
    tiers: np.ndarray
    lossy: np.ndarray


_TAIL = ("gather gradients", "gradients", "tables gather backward", "update", "average")
GATHER, EXCHANGE, TABLES, UPDATE, AVERAGE = range(5)
_BEFORE = ("input", "tables gather forward", "unique ids", "counts")
_AFTER = ("ids", "lookup", "embeddings", "spread")
_OF_REPLICAS = ("tables gather forward", "tables gather backward", "average")
_ONE_NAME = {"tables average": "average", "tables scatter": "average"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A collective as the lowering asks for it, before a transport and a group size price it."""

    kind: str
    num_bytes: float
    replicas: bool
    max_over_mean: float


class Recorder(_Builder):
    """The lowering's builder, which writes down collectives instead of pricing them. What `input_overlap` may hide is left out: a lower bound."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: dict[str, _Asked] = {}
        self.found: dict[str, Task] = {}
        self.synced = False

    def add(self, task: Task) -> int:
        if self.overlaps and task.name == "unique ids":
            return super().add(task)
        self.found[_ONE_NAME.get(task.name, task.name)] = task
        self.synced = self.synced or task.stream == HOST
        return super().add(task)

    def collective(self, name: str, kind: str, num_bytes: float, group: GroupShape, *, max_over_mean: float = 1.0, apart: bool = False,
                   **_: object) -> int | None:
        num_bytes = 0.0 if apart else num_bytes
        self.asked[_ONE_NAME.get(name, name)] = _Asked(kind=kind, num_bytes=num_bytes, replicas=group is self.groups["sparse_replicas"],
                                                       max_over_mean=max_over_mean)
        return self.last


def sparse_table(run: Evaluation) -> Sparse:
    c, first = run.columns, run.sparse.first
    works = Keys(run.batches.of[first], c["accumulation"][first], c["sparse_group"][first])
    records = [_record(run, run.plan(first[i])) for i in works.first]
    row = works.of
    slots = {name: _slot(run, name, records, row) for name in (*_BEFORE, *_AFTER, *_TAIL)}
    if run.owner.gpu:
        copy = np.array([r.found["input"].seconds for r in records])[row]
        slots["input"] = dataclasses.replace(slots["input"], seconds=np.zeros(len(row)))
    else:
        copy = np.zeros(len(row))
    synced = np.array([r.synced for r in records])[row]
    # without an exchange the lookup is all there is
    alone = np.array(["embeddings" not in r.asked for r in records])[row]
    if alone.any():
        empty = Slot(seconds=np.where(alone, 0.0, slots["lookup"].seconds), launch=np.where(alone, 0.0, slots["lookup"].launch),
                      share=slots["lookup"].share, tier=slots["lookup"].tier)
        slots["unique ids"] = Slot(seconds=np.where(alone, slots["lookup"].seconds, slots["unique ids"].seconds),
                                    launch=np.where(alone, slots["lookup"].launch, slots["unique ids"].launch),
                                    share=empty.share, tier=empty.tier)
        slots["lookup"] = empty
    tail = [slots[name] for name in _TAIL]
    exchange, replicas = ([slots[n] for n in names] for names in (("counts", "ids", "embeddings", "gradients"),
                                                                 ("tables gather forward", "tables gather backward", "average")))
    return Sparse(before=Chains.of([slots[n] for n in _BEFORE]), after=Chains.of([slots[n] for n in _AFTER]),
                   copy=copy, synced=synced, tail=np.stack([s.seconds for s in tail], axis=1), launch=np.stack([s.launch for s in tail], axis=1),
                   taken=np.stack([s.taken for s in tail], axis=1),
                   tiers=np.stack([np.max([s.tier for s in group], axis=0) for group in (exchange, replicas)], axis=1),
                   lossy=np.stack([np.any([(s.share > 0) & (s.seconds > 0) for s in group], axis=0) for group in (exchange, replicas)], axis=1))


def _record(run: Evaluation, plan: Plan) -> Recorder:
    """The sparse phases of a plan, with what replicas cost under both ways of keeping tables: `full:` before the name for fully sharded 2D."""
    key = (plan.local_batch, plan.batching, plan.layout.world_size, plan.accumulation, plan.layout.sparse_group)
    if key in run.owner.records:
        return run.owner.records[key]
    plan = dataclasses.replace(plan, execution="eager", layout=dataclasses.replace(plan.layout, fully_sharded_2d=False, sync_every=1))
    shape = batch_shape(plan, run.factors(plan))
    loads = run.owner.loads(plan, {name: s.tokens for name, s in shape.sequences.items()})
    made = Recorder(plan, run.pricer(plan), run.network(plan.transport), shape, loads)
    made.input()
    made.sparse_forward()
    made.sparse_backward(True)
    if plan.layout.sparse_replicas > 1:
        plain, made.asked = made.asked, {}
        made.plan = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, fully_sharded_2d=True))
        for name in ("tables gather forward", "tables gather backward"):
            made.gather_replicas(name)
        made.average_replicas()
        made.asked = {**plain, **{f"full:{name}": asked for name, asked in made.asked.items()}}
    known = {*_BEFORE, *_AFTER, *_TAIL, "input wait", "ids wait", "splits"}
    unknown = {name.removeprefix("full:") for name in (*made.found, *made.asked)} - known
    assert not unknown, f"tasks of the sparse phase that the batch does not know: {sorted(unknown)}"
    run.owner.records[key] = made
    return made


def _slot(run: Evaluation, name: str, records: Sequence[Recorder], row: np.ndarray) -> Slot:
    """Task `name` for every sparse key, whose record is `row`."""
    zero = np.zeros(len(row))
    if not any(name in r.asked or f"full:{name}" in r.asked for r in records):
        tasks = [r.found.get(name, NOTHING) for r in records]
        return Slot(seconds=np.array([t.seconds for t in tasks])[row], launch=np.array([t.host_seconds for t in tasks])[row], share=zero,
                     tier=zero.astype(np.int64))
    c, first = run.columns, run.sparse.first
    # a record knows its group, and with the ranks its replicas; only what replicas do depends on how they keep tables
    full_sharding = c["fully_sharded_2d"][first] if name in _OF_REPLICAS else zero.astype(np.int64)
    keys = Keys(row, c["transport"][first], full_sharding)
    costs = []
    for i in keys.first:
        at = first[i]
        group, replicas = int(c["sparse_group"][at]), int(c["sparse_replicas"][at])
        full = c["fully_sharded_2d"][at] and replicas > 1 and name in _OF_REPLICAS
        asked = records[row[i]].asked.get(f"full:{name}" if full else name)
        if asked is None:
            costs.append((0.0, 0.0, 0))
            continue
        shape = GroupShape(size=replicas, stride=group) if asked.replicas else GroupShape(size=group)
        net = run.network(run.owner.codes["transport"][c["transport"][at]])
        cost = net.cost(asked.kind, asked.num_bytes, shape, max_over_mean=asked.max_over_mean)
        costs.append((cost.seconds, cost.share if run.owner.gpu else 0.0, run.tier(tier_stream(cost.tier)) if cost.tier else 0))
    table = np.array(costs)[keys.of]
    # plain 2D averages every so many steps
    share = 1.0 / np.where(c["fully_sharded_2d"][first] == 0, c["sync_every"][first], 1) if name == "average" else 1.0
    return Slot(seconds=table[:, 0] * share, launch=zero, share=table[:, 1], tier=table[:, 2].astype(np.int64))
