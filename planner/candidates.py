"""First bounds of all candidates at once: a step time and a memory that no plan of the candidate goes below.

Parts that depend on few columns are priced once per distinct combination of those and spread over the candidates by index:

    blocks     (local batch, batching)                                  cheapest option of every block, forward and backward
    dense      (blocks) x (fsdp, ddp, reshard, transport)               recurrences over the blocks: gathers beside compute, reductions behind it
    sparse     (sparse layout, local batch, accumulation or transport)  ids, lookups and exchanges at even load, in series with the dense part

    step  >=  accumulation x (sparse + forward + backward) + update and average + optimizer            (gathers waited for, or the last reduction)
    step  >=  the same without waits + what collectives take of compute + the least recomputation that makes forward's activations fit

    step  >=  what the host takes to launch the ops of blocks, units, optimizer and spreading, options with the fewest launches

What the host waits for, uneven tables and shared links are left out, so this is below the bound of every plan; a candidate's own program
(planner.ilp) has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from costmodel.batch_blocks import BlockPrices
from costmodel.batch_phases import Keys
from costmodel.blocks import Block, activation_dtype
from costmodel.comms import layout_groups, network
from costmodel.contention import RATE_FLOOR
from costmodel.lower import batch_shape
from costmodel.memory import (
    INPUT_BATCHES,
    communicator_bytes,
    distributed_bytes,
    embedding_bytes,
    exchange_bytes,
    input_bytes,
    memory,
    reserving,
)
from costmodel.ops import BACKWARD, FORWARD, STEP, Op, dtype_bytes, op
from costmodel.plan import Plan
from costmodel.pricer import pricer
from costmodel.regions import regions
from costmodel.sparse import GroupWork, group_work
from costmodel.wire import gather_width, wire_bytes
from planner.bounds import least_serving, mean_loads
from planner.pricing import Pricing
from planner.replication import below, steepest
from planner.space import RegionChoice

_EXPERTS = ("ep", "expert_all_to_all")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstBounds:
    """`(candidates,)` each: least seconds of a step, least reserved bytes of a rank."""

    seconds: np.ndarray
    reserved: np.ndarray


def first_bounds(pricing: Pricing) -> FirstBounds:
    """The module's formulas over all candidates of a space."""
    made = _Bounds(pricing)
    made.weigh()
    seconds = made.seconds()
    return FirstBounds(seconds=seconds, reserved=made.reserved(made.block_of))


class _Bounds:
    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.columns = pricing, pricing.candidates
        self.regions = regions(pricing.scenario.model)
        self.choices = pricing.space.regions
        self.low = {name: min(dtype_bytes(activation_dtype(c.precision)) for c in choices) for name, choices in self.choices.items()}
        self.calibration = pricing.calibration
        self.slow = pricing.slowest(pricing.base(0))[1]
        self.curves: list[tuple[np.ndarray, np.ndarray]] = []
        self.sent: dict[tuple[int, int, bool], tuple[float, float, float, float, float]] = {}

    def per(self, names: Iterable[str], price: Callable[[int, Plan], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(`price` of one representative for each distinct combination of the columns `names`, stacked; which of them each candidate has)."""
        keys = Keys(*[self.columns[name] for name in names])
        return np.stack([np.asarray(price(int(i), self.pricing.base(int(i))), dtype=np.float64) for i in keys.first]), keys.of

    # --- time ---

    def seconds(self) -> np.ndarray:
        blocks, block_of = self.block_seconds()
        self.block_of = block_of
        moves, move_of = self.per(("fsdp", "ddp", "ep", "reshard_after_forward", "transport"), self.move_seconds)
        sparse, sparse_of = self.per(("sparse_group", "local_batch", "accumulation", "input_overlap"), self.sparse_compute)
        moved = ("sparse_group", "sparse_replicas", "fully_sharded_2d", "sync_every", "transport", "local_batch", "input_overlap", "tables_ahead")
        sent, sent_of = self.per(moved, self.sparse_moves)
        distinct, pair_of = np.unique(block_of * len(moves) + move_of, return_inverse=True)
        dense = dense_times(blocks[distinct // len(moves)], moves[distinct % len(moves)], len(self.units))[pair_of]
        accumulation = self.columns["accumulation"]
        local, local_of = self.per(("sparse_group", "transport", "local_batch", "accumulation", "input_overlap"), self.local_savings)
        before, saved = local[local_of].T
        lookups, turn, update = sparse[sparse_of].T
        exchanges, exchanged, tier, average, beside, early = sent[sent_of].T
        each, update = lookups + exchanges, update + average
        repeats = (accumulation - 1) * (dense[:, 0] + turn + exchanged)
        move = moves[:, -3:][move_of]
        # the exchange of gradients queues behind reductions on the same link
        queue = np.maximum(np.where(tier == move[:, -3], dense[:, 2], 0.0), np.where(tier == move[:, -2], dense[:, 3], 0.0))
        turned = np.maximum(dense[:, 1] + turn, np.where(exchanged > 0, queue, 0.0))
        # tables on every rank save exchanges; what their all-reduce costs may hide behind the last reduction
        free = repeats + np.maximum(turned + exchanged + update - saved, dense[:, 4] - before)
        # compute alone, with what collectives take of it and what the memory makes it compute again
        again = accumulation * self.recomputation(block_of)
        worked = (accumulation - 1) * (dense[:, 5] + turn + exchanged) + dense[:, 6] + turn + exchanged + update + again - saved
        # the optimizer is launched last, and what no op has comes behind it
        ended = move[:, -1] + pricer(self.pricing.base(0), self.calibration).step_overhead[0]
        # means over replicas that run beside the optimizer begin behind the update
        # and what they gather for the first lookup runs beside all that comes before it
        first = np.maximum(0.0, early - each)
        done = accumulation * each + first + np.maximum(free, worked) + np.maximum(ended, beside)
        return self.slow * np.maximum(done, self.launches() + ended)

    def launches(self) -> np.ndarray:
        """`(candidates,)`: least seconds in which the host launches a step's dense ops and the spreading of embeddings, under any options."""
        # a launch is as long under any batch where none is measured
        shapes = ("local_batch", "batching") if self.calibration is not None else ()
        blocks, block_of = self.per((*shapes, "execution", *_EXPERTS), self.block_launches)
        units, unit_of = self.per(("fsdp", "execution", *_EXPERTS), self.unit_launches)
        names = ("local_batch", "sparse_group", "execution") if self.calibration is not None else ("sparse_group", "execution")
        sparse, sparse_of = self.per(names, self.sparse_launches)
        gathered, reduced, optimizer = units[unit_of].T
        again = 1 + self.columns["reshard_after_forward"]
        each = blocks[block_of, 0] + sparse[sparse_of, 0] + again * gathered
        return self.columns["accumulation"] * each + reduced + optimizer

    def block_launches(self, i: int, plan: Plan) -> list[float]:
        batch, prices = batch_shape(plan, self.pricing.slowest(plan)[0]), pricer(plan, self.calibration)
        prices.keep(batch)

        def least(block: Block, c: RegionChoice) -> float:
            passes = [prices.block(block, batch, c.precision, phase) for phase in (FORWARD, BACKWARD)]
            return sum(p.host_seconds for p in (*passes, prices.recompute(block, batch, c.precision, c.checkpoint)))

        loss = sum(prices.ops([op("bce", m=batch.samples * len(plan.model.heads))], phase).host_seconds for phase in (FORWARD, BACKWARD))
        return [loss + sum(r.count * min(least(r.block, c) for c in self.choices[r.name]) for r in regions(plan.model, plan.layout))]

    def unit_launches(self, i: int, plan: Plan) -> list[float]:
        """Of gathered parameters, of reductions, of the optimizer."""
        prices, found, wrapped = pricer(plan, self.calibration), regions(plan.model, plan.layout), plan.layout.world_size > 1
        copies = [wrapped * sum(r.count * prices.unit(kind, r.block, whole=plan.layout.fsdp == 1).host_seconds for r in found)
                  for kind in ("fsdp_gather", "fsdp_reduce")]
        elements = sum(r.count * r.block.sharded_elements(plan.layout.fsdp) for r in found)
        tensors = sum(r.count * r.block.num_tensors for r in found)
        return [*copies, prices.ops([op("adamw", parameters=elements, tensors=tensors)], STEP).host_seconds]

    def sparse_launches(self, i: int, plan: Plan) -> list[float]:
        plan = dataclasses.replace(plan, batching="jagged")
        if plan.layout.sparse_group == 1:  # where a table is in host memory, other ops are launched instead
            return [0.0]
        tokens = {name: shape.tokens for name, shape in batch_shape(plan).sequences.items()}
        work, prices = group_work(plan, mean_loads(plan, tokens), 0, tokens), pricer(plan, self.calibration)
        spread = [_spread(w, w.unique) for w in work]
        unique = [op("unique", ids=w.ids) for w in work]
        return [sum(prices.ops(ops, phase).host_seconds for ops, phase in ((spread, FORWARD), (spread, BACKWARD), (unique, FORWARD)))]

    def recomputation(self, block_of: np.ndarray) -> np.ndarray:
        """`(candidates,)`: least seconds of recomputation in a micro-batch that bring what forward keeps under the memory that is left.

        Relaxed to fractions of blocks: per class of blocks a convex, falling function of the bytes that may stay.
        """
        room = self.usable - self.resting - self.kept
        extra = np.zeros(len(room))
        for k, curve in enumerate(self.curves):
            here = block_of == k
            extra[here] = np.interp(room[here], curve[0], curve[1])
        return extra

    @property
    def units(self) -> list[int]:
        """Region index of every block in forward order."""
        return [k for k, r in enumerate(self.regions) for _ in range(r.count)]

    def block_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """(`(keys, 2 units + 1)`: least forward and backward seconds of every block, and of the loss both ways, by local batch, batching, execution
        and places of experts; the key of each candidate). Sets the curve of recomputation of each key."""
        keys = Keys(*[self.columns[name] for name in ("local_batch", "batching", "execution", *_EXPERTS)])
        plans = [self.pricing.base(int(i)) for i in keys.first]
        batches, prices = [batch_shape(plan, self.pricing.slowest(plan)[0]) for plan in plans], [pricer(plan, self.calibration) for plan in plans]
        for batch, own in zip(batches, prices):
            own.keep(batch)
        priced: dict[tuple[int, ...], BlockPrices] = {}
        found = []
        for k, choices in enumerate(self.choices[r.name] for r in self.regions):
            blocks = [(regions(plan.model, plan.layout)[k].block, own) for plan, own in zip(plans, prices)]
            rows_of = {(id(block), id(own)): tuple(i for i, (b, p) in enumerate(blocks) if b is block and p is own) for block, own in blocks}
            parts = []
            for rows in rows_of.values():
                if rows not in priced:
                    priced[rows] = BlockPrices(prices[rows[0]], [batches[i] for i in rows])
                parts.append(self.region_seconds(blocks[rows[0]][0], choices, priced[rows]))
            back = np.argsort(np.concatenate([np.array(rows) for rows in rows_of.values()]))
            found.append(tuple(np.concatenate(arrays, axis=1)[:, back] for arrays in zip(*parts)))
        times = np.stack([least for least, _ in found], axis=-1)[..., self.units]
        self.curves = [saving_curve([(r.count, points[:, k].tolist()) for r, (_, points) in zip(self.regions, found)]) for k in range(len(batches))]
        rows = [batch.samples * len(plans[0].model.heads) for batch in batches]
        loss = [sum(own.ops([op("bce", m=m)], phase).seconds for phase in (FORWARD, BACKWARD)) for m, own in zip(rows, prices)]
        return np.concatenate([*times, np.array(loss)[:, None]], axis=1), keys.of

    @staticmethod
    def region_seconds(block: Block, choices: tuple[RegionChoice, ...], prices: BlockPrices) -> tuple[np.ndarray, np.ndarray]:
        """(`(2, keys)` least forward and backward seconds, `(choices, keys, 2)` bytes kept and seconds over the least) of one block."""
        seconds: dict[Hashable, np.ndarray] = {}
        again, saved = {}, {}
        for c in choices:
            # all that a choice's seconds and bytes depend on
            timed, kept = prices.alike(c.precision), (activation_dtype(c.precision), c.checkpoint)
            if timed not in seconds:
                seconds[timed] = np.stack([prices.block(block, c.precision, phase) for phase in (FORWARD, BACKWARD)])
            if (timed, c.checkpoint) not in again:
                again[timed, c.checkpoint] = prices.recompute(block, c.precision, c.checkpoint)
            if kept not in saved:
                saved[kept] = prices.saved(block, c.precision, c.checkpoint)
        least = np.min(list(seconds.values()), axis=0)
        points = {
            (timed, kept): (saved[kept], np.maximum(0.0, seconds[timed].sum(axis=0) + again[timed, kept[1]] - least.sum(axis=0)))
            for c in choices
            for timed, kept in [(prices.alike(c.precision), (activation_dtype(c.precision), c.checkpoint))]
        }
        return least, np.array(list(points.values())).swapaxes(1, 2)

    def move_seconds(self, i: int, plan: Plan) -> np.ndarray:
        """`(8 units + 6,)` by block: gather, unshard, pack, scatter, all-reduce, whether it is gathered again, and what the gather and the
        reductions take from compute; then whether everything is one chain, whether all-reduces share the scatters' link, whether anything is
        scattered, the
        links (numbers) of the scatters and all-reduces, and the optimizer."""
        prices, net = pricer(plan, self.calibration), network(plan.cluster, self.calibration, plan.transport)
        groups, layout = layout_groups(plan.layout), plan.layout
        wrapped, gpu = layout.world_size > 1, plan.cluster.device.kind == "gpu"
        cap = (1.0 - RATE_FLOOR) / max(1, len(plan.cluster.tiers)) * gpu
        table, reduced = [], float(dtype_bytes(plan.reduce_dtype))
        found = regions(plan.model, layout)
        for r in found:
            gather, scatter, summed, taken_gather, taken_reduce = np.zeros(5)
            for axis, ranks, elements in r.block.shards(layout.fsdp):
                costs = (net.cost("all_gather", gather_width(r.block, self.low[r.name], plan.gather_dtype) * ranks * elements, groups[axis]),
                         net.cost("reduce_scatter", reduced * elements * ranks, groups[axis]),
                         net.cost("all_reduce", reduced * elements, groups["ddp"]))
                gather, scatter, summed = (total + cost.seconds for total, cost in zip((gather, scatter, summed), costs))
                taken_gather += min(costs[0].share, cap) * costs[0].seconds
                taken_reduce += sum(min(cost.share, cap) * cost.seconds for cost in costs[1:])
            unshard, pack = prices.unit("fsdp_gather", r.block).seconds, prices.unit("fsdp_reduce", r.block).seconds
            table.append(
                [v * wrapped for v in (gather, unshard, pack, scatter, summed, layout.reshard_after_forward, taken_gather, taken_reduce)]
            )
        elements = sum(r.count * r.block.sharded_elements(layout.fsdp) for r in found)
        tensors = sum(r.count * r.block.num_tensors for r in found)
        optimizer = prices.ops([op("adamw", parameters=elements, tensors=tensors)], STEP).seconds
        links = [self.link(net.cost("all_gather", 1e6, groups["fsdp"]).tier), self.link(net.cost("all_reduce", 1e6, groups["ddp"]).tier)]
        return np.concatenate([np.array(table).T[:, self.units].ravel(), [float(not gpu), links[0] == links[1], layout.fsdp > 1, *links, optimizer]])

    def link(self, tier: str, missing: float = -1.0) -> float:
        """A number for a tier's stream; `missing` for none."""
        names = [t.name for t in self.pricing.scenario.cluster.tiers]
        return float(names.index(tier)) if tier else missing

    def sparse_compute(self, i: int, plan: Plan) -> np.ndarray:
        """`(3,)`: seconds of sparse compute before forward in every micro-batch, behind its backward up to the exchange of gradients, and of
        the update."""
        plan = dataclasses.replace(plan, batching="jagged")
        batch, exchanged = batch_shape(plan), plan.layout.sparse_group > 1
        tokens = {name: shape.tokens for name, shape in batch.sequences.items()}
        loads = mean_loads(plan, tokens)
        work, prices = group_work(plan, loads, 0, tokens), pricer(plan, self.calibration)
        rows, gradients = wire_bytes(plan, loads)
        self.sent[plan.layout.sparse_group, plan.local_batch, plan.input_overlap] = (
            0.0 if plan.input_overlap else 8.0 * sum(w.asked for w in work),
            rows,
            gradients,
            float(loads.weights[0]),
            float(loads.state[0]),
        )

        def time(ops: list[Op], phase: str) -> float:
            return prices.ops(ops, phase).seconds

        spread = [_spread(w, w.unique if exchanged else w.storage_rows) for w in work]
        forward = time(spread, FORWARD)
        if exchanged:
            lookup, update = least_serving(plan, tokens, float(loads.served.mean()), prices)
            hidden = 0.0 if plan.input_overlap else time([op("unique", ids=w.ids) for w in work], FORWARD)
            forward += hidden + lookup
        else:
            updates = [
                op(
                    "embedding_update",
                    variant=w.table.optimizer,
                    ids=plan.accumulation * w.ids,
                    unique=w.distinct_served,
                    dim=w.table.dim,
                    rows=w.storage_rows,
                    tables=1,
                    dtype=w.table.dtype,
                )
                for w in work
            ]
            update = time(updates, STEP)
        return np.array([forward, time(spread, BACKWARD) if exchanged else 0.0, update])

    def sparse_moves(self, i: int, plan: Plan) -> np.ndarray:
        """`(6,)`: seconds of exchanges before forward in every micro-batch, of the exchange of gradients with its link, of the replicas' average, and
        of what replicas do beside the optimizer and before the first lookup."""
        ids, sent, returned, weights, state = self.sent[plan.layout.sparse_group, plan.local_batch, plan.input_overlap]
        net, group = network(plan.cluster, self.calibration, plan.transport), layout_groups(plan.layout)["sparse_group"]
        rows, gradients = net.cost("all_to_all", sent, group), net.cost("all_to_all", returned, group)
        gather, average, beside, early = self.replica_seconds(plan, weights, state)
        return np.array(
            [net.cost("all_to_all", ids, group).seconds + rows.seconds + gather, gradients.seconds, self.link(rows.tier, missing=-2.0), average,
             beside, early]
        )

    def local_savings(self, i: int, plan: Plan) -> np.ndarray:
        """`(2,)`: the most seconds of a step that data-parallel tables save of the exchanges before the last backward, and of all exchanges less what
        their all-reduce takes (planner.replication)."""
        plan = dataclasses.replace(plan, batching="jagged")
        tokens = {name: shape.tokens for name, shape in batch_shape(plan).sequences.items()}
        tables = [t for t in self.pricing.local_tables(plan, tokens) if t.rows]
        if not tables:
            return np.zeros(2)
        ids, sent, returned, *_ = self.sent[plan.layout.sparse_group, plan.local_batch, plan.input_overlap]
        net, group = network(plan.cluster, self.calibration, plan.transport), layout_groups(plan.layout)["sparse_group"]
        served = float(mean_loads(plan, tokens).served[0])
        falls = []
        for size, parts in ((ids, [8.0 * t.rows / ids if ids else 0.0 for t in tables]), (sent, [t.elements / served for t in tables]),
                            (returned, [t.elements / served for t in tables])):
            most = min(1.0, sum(t.count * part for t, part in zip(tables, parts)))
            fall = steepest(lambda load, size=size: net.cost("all_to_all", size * load, group).seconds, 1.0 if most > 0.999 else most)
            falls.append([fall * part for part in parts])
        forward, backward = np.array(falls[0]) + np.array(falls[1]), np.array(falls[2])
        fixed, slope = below(lambda size: net.cost("all_reduce", size, group).seconds,
                             [*(t.gradient for t in tables), sum(t.count * t.gradient for t in tables)])
        count, reduced = np.array([t.count for t in tables]), slope * np.array([t.gradient for t in tables])
        net_saving = count @ np.maximum(0.0, plan.accumulation * (forward + backward) - reduced)
        early = count @ (plan.accumulation * forward + (plan.accumulation - 1) * backward)
        return np.array([early, max(0.0, net_saving - fixed)])

    def replica_seconds(self, plan: Plan, weights: float, state: float) -> tuple[float, float, float, float]:
        """(seconds of each micro-batch, of each step, of each step beside the optimizer, and before the first lookup) that several replicas of a
        sparse group cost."""
        layout = plan.layout
        if layout.sparse_replicas == 1:
            return 0.0, 0.0, 0.0, 0.0
        net, group = network(plan.cluster, self.calibration, plan.transport), layout_groups(layout)["sparse_replicas"]
        if layout.fully_sharded_2d:
            gather, scatter = (net.cost(kind, weights, group).seconds for kind in ("all_gather", "reduce_scatter"))
            return (0.0, 0.0, scatter, gather) if plan.tables_ahead else (gather, gather + scatter, 0.0, 0.0)
        if plan.tables_ahead:
            return 0.0, 0.0, net.cost("all_reduce", weights, group).seconds / layout.sync_every, 0.0
        return 0.0, net.cost("all_reduce", weights + state, group).seconds / layout.sync_every, 0.0, 0.0

    # --- memory ---

    def weigh(self) -> None:
        """Sets the memory of every candidate: `resting` beside activations, `kept` through forward whatever the options, `usable` allocated bytes,
        `slope` and `context` of reserved over allocated, and the terms of the other phases."""
        columns, multiple = self.columns, self.columns["accumulation"] > 1
        parameters, fsdp_of = self.per(
            ("fsdp", "ep"),
            lambda i, plan: [4.0 * sum(r.count * r.block.sharded_elements(plan.layout.fsdp) for r in regions(plan.model, plan.layout))],
        )
        exchange, group_of = self.per(("sparse_group", "local_batch", "input_overlap"), self.exchange)
        links, link_of = self.per(
            ("fsdp", "ddp", "ep", "sparse_group", "sparse_replicas"),
            lambda i, plan: [communicator_bytes(plan)],
        )
        weights, swapped, embeddings, inputs = exchange[group_of].T
        replicas = columns["sparse_replicas"]
        full = (columns["fully_sharded_2d"] > 0) & (replicas > 1)
        tables = weights / np.where(full, replicas, 1)
        first = dataclasses.replace(self.pricing.base(0), execution="eager")  # graphs' own memory is left out: a lower bound
        batch = batch_shape(dataclasses.replace(first, batching="jagged"))
        loads = mean_loads(first, {n: s.tokens for n, s in batch.sequences.items()})
        found = memory(first, batch, loads, self.calibration)
        self.context, self.slope = reserving(first, self.calibration)
        self.usable = (found.limit - self.context) / self.slope
        libraries = found.categories["buffers"] - exchange_bytes(first, loads) - links[link_of[0], 0]
        self.gradients = parameters[fsdp_of, 0]
        self.resting = 3 * self.gradients + tables + INPUT_BATCHES * inputs + swapped + libraries + links[link_of, 0] / self.slope
        self.in_flight = np.where(full, weights + embeddings, 0.0)
        low, low_of = self.per(("ep",), self.narrowest)
        keep = (columns["reshard_after_forward"] == 0) & (columns["fsdp"] > 1)
        self.kept = embeddings + multiple * self.gradients + keep * low[low_of, 0]

    def narrowest(self, i: int, plan: Plan) -> list[float]:
        """Bytes of a rank's unsharded parameters in the narrowest formats of their regions."""
        return [sum(r.count * r.block.num_parameters * self.low[r.name] for r in regions(plan.model, plan.layout))]

    def exchange(self, i: int, plan: Plan) -> np.ndarray:
        """`(4,)` bytes at even load: tables with their state, exchange buffers and ids sent ahead, what tables keep for backward,
        one batch of input."""
        plan = dataclasses.replace(plan, batching="jagged")
        batch = batch_shape(plan)
        loads = mean_loads(plan, {n: s.tokens for n, s in batch.sequences.items()})
        group = plan.layout.sparse_group
        offloadable = [t for t in self.pricing.tied if any(c.sharding == "host_cached" for c in self.pricing.choices(t, group))]
        offloaded = sum(len(t.tables) * (t.group.weight_bytes + t.group.state_bytes) / group for t in offloadable)
        tables = max(0.0, loads.weights[0] + loads.state[0] - offloaded)
        tokens = {n: s.tokens for n, s in batch.sequences.items()}
        ahead = distributed_bytes(plan, batch) if plan.input_overlap else 0.0
        freed = sum(t.count * max(0.0, 8.0 * t.elements - t.gradient) for t in self.pricing.local_tables(plan, tokens))
        return np.array([tables, exchange_bytes(plan, loads) - freed + ahead, embedding_bytes(plan, batch), input_bytes(plan, batch)])

    def reserved(self, block_of: np.ndarray) -> np.ndarray:
        """Least reserved bytes: everything that rests, tables spread evenly, and each block's leanest option."""
        saved = np.array([curve[0][0] for curve in self.curves])[block_of]
        return self.slope * (self.resting + np.maximum(self.kept + saved, np.maximum(self.gradients, self.in_flight))) + self.context


def _spread(work: GroupWork, rows: float) -> Op:
    variant = "sequence" if work.table.pooling == "sequence" else "pooled"
    return op("embedding_lookup", variant=variant, ids=work.ids, unique=work.unique, dim=work.table.dim, rows=rows, tables=work.table.count,
              dtype=work.table.dtype)


def saving_curve(options: list[tuple[int, list[tuple[float, float]]]]) -> tuple[np.ndarray, np.ndarray]:
    """(bytes kept, least extra seconds), ascending in bytes: `options` are (count, [(bytes, extra seconds) of one block]) of every region.

    The lower convex hull of each region's options is walked from the fastest to the leanest; all steps together, best seconds per byte first.
    """
    kept, steps = 0.0, []
    for count, points in options:
        points = sorted(points, key=lambda p: (p[1], p[0]))
        here = points[0]
        kept += count * here[0]
        while True:
            leaner = [(max(0.0, p[1] - here[1]) / (here[0] - p[0]), p) for p in points if p[0] < here[0]]
            if not leaner:
                break
            price, following = min(leaner, key=lambda step: (step[0], step[1][0]))
            steps.append((price, count * (here[0] - following[0])))
            here = following
    prices, sizes = np.array(sorted(steps)).T if steps else (np.zeros(0), np.zeros(0))
    left = kept - np.concatenate([[0.0], np.cumsum(sizes)])
    spent = np.concatenate([[0.0], np.cumsum(prices * sizes)])
    return left[::-1].copy(), spent[::-1].copy()


def dense_times(blocks: np.ndarray, moves: np.ndarray, units: int) -> np.ndarray:
    """`(n, 7)` least seconds of the dense part: a micro-batch that reduces nothing; of the last one its compute, the ends of its gathers and
    scatters, of its all-reduces, and of its last reduction; and compute with what collectives take of it, of a micro-batch that reduces
    nothing and of the last.

    `blocks` `(n, 2 units + 1)` and `moves` `(n, 8 units + 5)` as `_Bounds` prices them. A gather runs beside the block before its own, a
    reduction behind its block, one at a time; gathers and scatters share a link, and all-reduces too where `moves` says so. On a CPU
    everything is one chain.
    """
    forward, backward, loss = blocks[:, :units], blocks[:, units : 2 * units], blocks[:, -1]
    gather, unshard, pack, scatter, summed, again, gather_takes, reduce_takes = (moves[:, k * units : (k + 1) * units] for k in range(8))
    worked = (forward + backward + (1 + again) * unshard).sum(axis=1) + loss
    chained, one_link, scatters = moves[:, 8 * units], moves[:, 8 * units + 1] > 0, moves[:, 8 * units + 2] > 0
    if chained[0] > 0:
        plain = worked + ((1 + again) * gather).sum(axis=1)
        last = plain + (pack + scatter + summed).sum(axis=1)
        return np.stack([plain, last, last, last, last, plain, last], axis=1)
    end = before = sent = np.zeros(len(blocks))
    for u in range(units):
        sent = np.maximum(before, sent) + gather[:, u]
        before, end = end, np.maximum(end, sent) + unshard[:, u] + forward[:, u]
    after = end
    now, link, other, scattered, reduced = (
        after + loss,
        after + again[:, -1] * gather[:, -1],
        np.zeros(len(blocks)),
        np.zeros(len(blocks)),
        np.zeros(len(blocks)),
    )
    plain, plain_sent, gathered = now, link, link
    for u in range(units - 1, -1, -1):
        start, plain_start = now, plain
        waited, plain_waited = np.where(again[:, u] > 0, gathered, 0.0), np.where(again[:, u] > 0, plain_sent, 0.0)
        if u:
            following = again[:, u - 1] * gather[:, u - 1]
            link = np.where(following > 0, np.maximum(start, link) + following, link)
            plain_sent = np.maximum(plain_start, plain_sent) + following
            gathered = link
        work = again[:, u] * unshard[:, u] + backward[:, u]
        plain = np.maximum(plain, plain_waited) + work
        now = np.maximum(np.maximum(now, waited) + work, scattered) + pack[:, u]
        sent = np.maximum(np.maximum(now, reduced), link) + scatter[:, u]
        link, scattered = np.where(scatters, sent, link), np.where(scatters, sent, 0.0)
        ready = np.maximum(np.maximum(now, scattered), np.where(one_link, link, other)) + summed[:, u]
        sums = summed[:, u] > 0
        link, other = np.where(one_link & sums, ready, link), np.where(~one_link & sums, ready, other)
        reduced = np.where(sums, ready, scattered)
    worked = worked + ((1 + again) * gather_takes).sum(axis=1)
    # the last blocks' reductions may outlast backward
    reducing = worked + pack.sum(axis=1) + reduce_takes[:, 2:].sum(axis=1)
    return np.stack([plain, now, link, other, np.maximum(now, reduced), worked, reducing], axis=1)
