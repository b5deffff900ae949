"""The dense part of the bound over candidates: blocks, what FSDP moves, and the recurrences of `costmodel.lower` over all blocks as arrays."""
from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from costmodel.batch_phases import CAPS, NEVER, NOTHING, Phase
from costmodel.lower import _Unit, needs_fsdp
from costmodel.ops import BACKWARD, FORWARD, op
from costmodel.stepgraph import COMPUTE, Task

if TYPE_CHECKING:
    from costmodel.batch import Evaluation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Distinct units and which of them each block of the model is; `(keys, units)` seconds and launch seconds; loss `(keys, 4)`: forward,
    backward, and the launches of each."""

    units: tuple[_Unit, ...]
    place: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    again: np.ndarray
    launch: np.ndarray
    loss: np.ndarray
    wrapped: np.ndarray


def block_table(run: Evaluation) -> tuple[Blocks, np.ndarray]:
    """The blocks of every block key, and the slow node's factor of each."""
    rows, losses, wrapped, slow = [], [], [], []
    units: tuple[_Unit, ...] = ()
    place = np.zeros(0, dtype=np.int64)
    for i in run.blocks.first:
        plan = run.plan(i)
        made = run.builder(plan)
        distinct = {(u.region.name, u.precision, u.checkpoint): u for u in made.units}
        units, names = tuple(distinct.values()), list(distinct)
        place = np.array([names.index((u.region.name, u.precision, u.checkpoint)) for u in made.units])
        row = []
        for unit in units:
            block = unit.region.block
            costs = [made.pricer.block(block, made.batch, unit.precision, FORWARD), made.pricer.block(block, made.batch, unit.precision, BACKWARD),
                     made.pricer.recompute(block, made.batch, unit.precision, unit.checkpoint)]
            row.append([c.seconds for c in costs] + [c.host_seconds for c in costs])
        rows.append(row)
        bce = [made.pricer.ops([op("bce", m=made.batch.samples * len(plan.model.heads))], phase) for phase in (FORWARD, BACKWARD)]
        losses.append([c.seconds for c in bce] + [c.host_seconds for c in bce])
        wrapped.append(needs_fsdp(plan))
        slow.append(run.slowest(plan)[1])
    table = np.array(rows)
    return Blocks(units=units, place=place, forward=table[:, :, 0], backward=table[:, :, 1], again=table[:, :, 2], launch=table[:, :, 3:],
                   loss=np.array(losses), wrapped=np.array(wrapped)), np.array(slow)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """By move key and distinct unit `(keys, units)`: seconds and shares of gather, scatter, all-reduce; seconds and launches of unshard and pack;
    tiers `(keys, 2)` of fsdp and ddp; optimizer `(keys, 3)`: AdamW's seconds, its launch, seconds after it."""

    gather: np.ndarray
    scatter: np.ndarray
    summed: np.ndarray
    shares: np.ndarray
    copies: np.ndarray
    tiers: np.ndarray
    optimizer: np.ndarray


def move_table(run: Evaluation) -> Moves:
    rows, tiers, optimizers = [], [], []
    for i in run.moves.first:
        made = run.builder(dataclasses.replace(run.plan(i), execution="eager"))
        distinct = {(u.region.name, u.precision, u.checkpoint): u for u in made.units}
        row, names = [], ["", ""]
        for unit in distinct.values():
            found: dict[str, Task] = {}
            if made.wrapped:
                made.last, begin = None, len(made.tasks)
                made.unshard(unit, made.gather(unit, None), "forward")
                made.reduce(unit, None, None)
                found = {t.name.removesuffix(unit.region.name).strip(): t for t in made.tasks[begin:]}
            moves = [found.get(name, NOTHING) for name in ("gather", "reduce", "all-reduce", "unshard", "pack gradients")]
            row.append([t.seconds for t in moves] + [t.sm_fraction for t in moves[:3]] + [t.host_seconds for t in moves[3:]])
            names[0] = moves[0].stream if moves[0].stream != COMPUTE else names[0]
            names[1] = moves[2].stream if moves[2].stream != COMPUTE else names[1]
        made.last, begin = None, len(made.tasks)
        made.optimizer([])
        adamw, rest = made.tasks[begin:]
        rows.append(row)
        tiers.append([run.tier(n) for n in names])
        optimizers.append([adamw.seconds, adamw.host_seconds, rest.seconds])
    table = np.array(rows)
    return Moves(gather=table[:, :, 0], scatter=table[:, :, 1], summed=table[:, :, 2], copies=table[:, :, [3, 4, 8, 9]], shares=table[:, :, 5:8],
                  tiers=np.array(tiers), optimizer=np.array(optimizers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """By exchange key and distinct unit `(keys, units, 2)`: seconds and shares of what blocks with spread experts send in forward and backward; their
    tier `(keys,)`."""

    seconds: np.ndarray
    shares: np.ndarray
    tiers: np.ndarray


def exchange_table(run: Evaluation) -> Exchanges:
    seconds, shares, tiers = [], [], []
    for i in run.exchanges.first:
        made = run.builder(dataclasses.replace(run.plan(i), execution="eager"))
        distinct = {(u.region.name, u.precision, u.checkpoint): u for u in made.units}
        found = [[made.tasks[at] if (at := made.exchange(unit, phase)) is not None else NOTHING for phase in (FORWARD, BACKWARD)]
                 for unit in distinct.values()]
        seconds.append([[t.seconds for t in both] for both in found])
        shares.append([[t.sm_fraction for t in both] for both in found])
        tiers.append(max(run.tier(t.stream if t.stream != COMPUTE else "") for both in found for t in both))
    return Exchanges(seconds=np.array(seconds), shares=np.array(shares), tiers=np.array(tiers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """By dense key: phases forward and backward without and with reductions; ends of the last scatter and all-reduce `(keys, 2)` after device (0)
    and launches (1) alone; left `(keys, 3, 4)`: what reductions that outlive backward take, the first block's scatter, its all-reduce, other
    all-reduces; tiers of fsdp, ddp and ep `(keys, 3)`, whether their collectives take from compute; optimizer as in `Moves`."""

    forward: Phase
    backward: Phase
    last: Phase
    scattered: np.ndarray
    summed: np.ndarray
    left: np.ndarray
    tiers: np.ndarray
    lossy: np.ndarray
    optimizer: np.ndarray


def dense_table(run: Evaluation, blocks: Blocks, moves: Moves, exchanges: Exchanges) -> Dense:
    first = run.dense.first
    b, m, x = run.blocks.of[first], run.moves.of[first], run.exchanges.of[first]
    parts = DenseParts(blocks=blocks, moves=moves, exchanges=exchanges, b=b, m=m, x=x, again=run.columns["reshard_after_forward"][first].astype(bool),
                        scatters=run.columns["fsdp"][first] > 1,
                        sums=run.columns["ddp"][first] > 1, gpu=run.owner.gpu)
    return parts.table()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseParts:
    """The recurrences over blocks, for all dense keys at once. State arrays are `(2, keys)`: device alone and launches alone."""

    blocks: Blocks
    moves: Moves
    exchanges: Exchanges
    b: np.ndarray
    m: np.ndarray
    x: np.ndarray
    again: np.ndarray
    scatters: np.ndarray
    sums: np.ndarray
    gpu: bool

    def table(self) -> Dense:
        forward = self._forward()
        backward, *_ = self._backward(reduce=False)
        last, scattered, summed, left = self._backward(reduce=True)
        tiers = np.column_stack([self.moves.tiers[self.m], self.exchanges.tiers[self.x]])
        shares, exchanged = self.moves.shares[self.m], self.exchanges.shares[self.x]
        lossy = np.stack([self.scatters & ((shares[:, :, :2] > 0).any(axis=(1, 2))), self.sums & (shares[:, :, 2] > 0).any(axis=1),
                          (exchanged > 0).any(axis=(1, 2))], axis=1)
        return Dense(forward=forward, backward=backward, last=last, scattered=scattered, summed=summed, left=left,
                      tiers=tiers, lossy=lossy, optimizer=self.moves.optimizer[self.m])

    def _unit(self, u: int) -> dict[str, np.ndarray]:
        """Everything of distinct unit u, `(keys,)` each."""
        blocks, moves, b, m = self.blocks, self.moves, self.b, self.m
        sent, shares = self.exchanges.seconds[self.x, u], self.exchanges.shares[self.x, u]
        launch, copies = blocks.launch[b, u], moves.copies[m, u]
        return {"forward": blocks.forward[b, u], "backward": blocks.backward[b, u], "again": blocks.again[b, u], "forward host": launch[:, 0],
                "backward host": launch[:, 1], "again host": launch[:, 2], "gather": moves.gather[m, u], "scatter": moves.scatter[m, u],
                "summed": moves.summed[m, u], "unshard": copies[:, 0], "pack": copies[:, 1], "unshard host": copies[:, 2],
                "pack host": copies[:, 3], "share gather": moves.shares[m, u, 0], "share scatter": moves.shares[m, u, 1],
                "share summed": moves.shares[m, u, 2], "sent": sent[:, 0], "returned": sent[:, 1], "share sent": shares[:, 0],
                "share returned": shares[:, 1], "count": np.float64((blocks.place == u).sum())}

    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        """(d, h) of the two passes: device free at 0 and launches never in the way, and the other way round."""
        n = len(self.b)
        return np.stack([np.zeros(n), np.full(n, NEVER)]), np.stack([np.full(n, NEVER), np.zeros(n)])

    @functools.cached_property
    def _distinct(self) -> dict[int, dict[str, np.ndarray]]:
        return {int(u): self._unit(int(u)) for u in np.unique(self.blocks.place)}

    def _units(self) -> list[dict[str, np.ndarray]]:
        return [self._distinct[int(u)] for u in self.blocks.place]

    def _chained(self, times: np.ndarray) -> Phase:
        """A phase of a CPU, whose one thread issues each collective and waits for it: a sum."""
        zero = np.zeros(len(times))
        return Phase(D=times, V=zero + NEVER, H=zero, compute=zero, taken=np.zeros((len(times), len(CAPS))))

    def _forward(self) -> Phase:
        loss = self.blocks.loss[self.b]
        wrapped = self.blocks.wrapped[self.b]
        if not self.gpu:
            each = (u["forward"] + u["sent"] + wrapped * (u["unshard"] + u["gather"] * self.scatters) for u in self._units())
            return self._chained(sum(each, loss[:, 0]))
        d, h = self._start()
        begun, tier = d, d
        compute, device = np.zeros(len(self.b)), d
        taken = self._taken("gather", self.scatters) + self._taken("sent", self.scatters)
        for unit in self._units():
            device = d
            # gather: behind the block before the last one, on its tier; without fsdp nothing is gathered
            tier = np.where(self.scatters, np.maximum(np.maximum(tier, begun), h) + unit["gather"], NEVER)
            h = h + unit["unshard host"]
            d = np.where(wrapped, np.maximum(np.maximum(d, h), tier) + unit["unshard"], d)
            d, tier = self._exchanged(unit["sent"], d, h, tier)
            h = h + unit["forward host"]
            d = np.maximum(d, h) + unit["forward"]
            begun = device
            compute = compute + unit["unshard"] + unit["forward"]
        h = h + loss[:, 2]
        d = np.maximum(d, h) + loss[:, 0]
        return Phase(D=d[0], V=d[1], H=h[1], compute=compute + loss[:, 0], taken=taken)

    def _backward(self, *, reduce: bool) -> tuple[Phase, np.ndarray, np.ndarray, np.ndarray]:
        d, h = self._start()
        n = len(self.b)
        compute, left = np.zeros(n), np.zeros((n, 3, len(CAPS)))
        wrapped = self.blocks.wrapped[self.b]
        regathers, scatters, sums = self.again & self.scatters & wrapped, self.scatters & wrapped & reduce, self.sums & wrapped & reduce
        copies = self.again & wrapped
        one_tier = (self.moves.tiers[self.m, 0] == self.moves.tiers[self.m, 1]) & self.scatters & self.sums
        units = self._units()[::-1]
        if not self.gpu:
            each = (u["again"] + u["backward"] + u["returned"] + copies * u["unshard"] + regathers * u["gather"] + scatters * u["scatter"]
                    + sums * u["summed"] + (wrapped & reduce) * u["pack"] for u in units)
            never = np.full((n, 2), NEVER)
            return self._chained(sum(each, self.blocks.loss[self.b][:, 1])), never, never, left
        taken = self._taken("gather", regathers) + self._taken("returned", self.scatters)
        if reduce:
            # a reduction is felt within backward when a later pack waits for it: a scatter by the next one, an all-reduce by the one after that. The
            # rest outlives backward: of the first block both, of the second the all-reduce, without scatters every all-reduce.
            first, second = units[-1], units[-2:-1]
            left[:, 0], left[:, 1] = self._taken_by(first, "scatter", scatters), self._taken_by(first, "summed", sums)
            near = sum((self._taken_by(u, "summed", sums) for u in second), np.zeros((n, len(CAPS))))
            total = self._taken("summed", sums)
            left[:, 2] = np.where(scatters[:, None], near, total - left[:, 1])
            taken = taken + self._taken("scatter", scatters) - left[:, 0] + total - left[:, 1] - left[:, 2]
        tier = d  # of fsdp; that of ddp while it is another
        other = d
        scattered, reduced, summed = (np.full((2, n), NEVER) for _ in range(3))
        loss = self.blocks.loss[self.b]
        h = h + loss[:, 3]
        tier = np.where(regathers, np.maximum(tier, h) + units[0]["gather"], tier)
        gathered = np.where(regathers, tier, NEVER)
        d = np.maximum(d, h) + loss[:, 1]
        compute = compute + loss[:, 1]
        for at, unit in enumerate(units):
            start = d
            h = h + np.where(copies, unit["unshard host"], 0.0)
            d = np.where(copies, np.maximum(np.maximum(d, h), gathered) + unit["unshard"], d)
            if at + 1 < len(units):
                following = units[at + 1]
                tier = np.where(regathers, np.maximum(np.maximum(tier, start), h) + following["gather"], tier)
                gathered = np.where(regathers, tier, NEVER)
            d, tier = self._exchanged(unit["returned"], d, h, tier)
            h = h + unit["again host"]
            d = np.where(unit["again"] > 0, np.maximum(d, h) + unit["again"], d)
            h = h + unit["backward host"]
            d = np.maximum(d, h) + unit["backward"]
            compute = compute + np.where(copies, unit["unshard"], 0.0) + unit["again"] + unit["backward"]
            if not reduce:
                continue
            h = h + np.where(wrapped, unit["pack host"], 0.0)
            d = np.where(wrapped, np.maximum(np.maximum(d, h), scattered) + unit["pack"], d)
            compute = compute + np.where(wrapped, unit["pack"], 0.0)
            end = np.maximum(np.maximum(np.maximum(d, reduced), tier), h) + unit["scatter"]
            scattered = np.where(scatters, end, scattered)
            tier = np.where(scatters, end, tier)
            free = np.where(one_tier, tier, other)
            end = np.maximum(np.maximum(np.maximum(d, np.where(scatters, scattered, NEVER)), free), h) + unit["summed"]
            summed = np.where(sums, end, summed)
            other = np.where(sums, end, other)
            tier = np.where(one_tier & sums, end, tier)
            reduced = np.where(sums, summed, scattered)
        return Phase(D=d[0], V=d[1], H=h[1], compute=compute, taken=taken), scattered.T, summed.T, left

    @functools.cached_property
    def _one_link(self) -> np.ndarray:
        """Whether experts exchange on the tier of fsdp."""
        return self.moves.tiers[self.m, 0] == self.exchanges.tiers[self.x]

    def _exchanged(self, seconds: np.ndarray, d: np.ndarray, h: np.ndarray, tier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(device, fsdp's tier) free after an exchange, which the device waits for and which queues behind gathers and reductions of its tier."""
        end = np.maximum(np.maximum(d, h), np.where(self._one_link, tier, NEVER)) + seconds
        there = seconds > 0
        return np.where(there, end, d), np.where(there & self._one_link, end, tier)

    def _taken_by(self, unit: dict[str, np.ndarray], name: str, present: np.ndarray) -> np.ndarray:
        """`(keys, 4)` seconds that one block's collective takes of compute, where it is `present`."""
        return np.where(present[:, None], np.minimum(unit[f"share {name}"][:, None], CAPS) * unit[name][:, None], 0.0)

    def _taken(self, name: str, present: np.ndarray) -> np.ndarray:
        """The same of all blocks."""
        return sum((u["count"] * self._taken_by(u, name, present) for u in self._distinct.values()), np.zeros((len(self.b), len(CAPS))))
