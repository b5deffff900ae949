"""First bounds of all candidates at once: a step time and a memory that no plan of the candidate goes below.

Parts that depend on few columns are priced once per distinct combination of those and spread over the candidates by index:

    blocks     (local batch, batching)                                  cheapest option of every block, forward and backward
    dense      (blocks) x (fsdp, ddp, reshard, transport)               recurrences over the blocks: gathers beside compute, reductions behind it
    sparse     (sparse layout) x (local batch, accumulation)            ids, lookups and exchanges at even load, in series with the dense part

    step  >=  accumulation (sparse + forward + backward) + update and average + max(optimizer after compute, after the last reduction)

Host launches, uneven tables and recomputation are left out, so this is below the bound of every plan; a candidate's own program
(planner.ilp) puts them in.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from costmodel.blocks import activation_dtype
from costmodel.comms import layout_groups, network
from costmodel.lower import batch_shape, pricer
from costmodel.memory import embedding_bytes, memory, option_memory
from costmodel.ops import BACKWARD, FORWARD, STEP, Op, dtype_bytes, op
from costmodel.plan import Plan
from costmodel.regions import regions
from costmodel.sparse import group_work
from planner.bounds import mean_loads
from planner.pricing import Pricing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstBounds:
    """`(candidates,)` each: least seconds of a step, least reserved bytes of a rank."""

    seconds: np.ndarray
    reserved: np.ndarray


def first_bounds(pricing: Pricing) -> FirstBounds:
    """The module's formulas over all candidates of a space."""
    made = _Bounds(pricing)
    return FirstBounds(seconds=made.seconds(), reserved=made.reserved())


class _Bounds:
    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.columns = pricing, pricing.candidates
        self.regions = regions(pricing.scenario.model)
        self.choices = pricing.space.regions
        self.calibration = pricing.calibration
        self.slow = pricing.slowest(pricing.base(0))[1]

    def per(self, names: Iterable[str], price: Callable[[int, Plan], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(`price` of one representative for each distinct combination of the columns `names`, stacked; which of them each candidate has)."""
        rows = np.stack([self.columns[name].astype(np.int64) for name in names], axis=1)
        span = rows.max(axis=0) - rows.min(axis=0) + 1
        code = np.zeros(len(rows), dtype=np.int64)
        for column in range(rows.shape[1]):
            code = code * span[column] + rows[:, column] - rows[:, column].min()
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        return np.stack([np.asarray(price(int(i), self.pricing.base(int(i))), dtype=np.float64) for i in first]), which

    # --- time ---

    def seconds(self) -> np.ndarray:
        blocks, block_of = self.per(("local_batch", "batching"), self.block_seconds)
        moves, move_of = self.per(("fsdp", "ddp", "reshard_after_forward", "transport", "execution"), self.move_seconds)
        sparse, sparse_of = self.per(("sparse_group", "sparse_replicas", "fully_sharded_2d", "sync_every", "transport", "local_batch", "accumulation"),
                                     self.sparse_seconds)
        pair = block_of * len(moves) + move_of
        distinct, pair_of = np.unique(pair, return_inverse=True)
        dense = dense_times(blocks[distinct // len(moves)], moves[distinct % len(moves)], len(self.units))[pair_of]
        micro, last = dense[:, 0], dense[:, 1:]
        accumulation = self.columns["accumulation"]
        each, update = sparse[sparse_of, 0], sparse[sparse_of, 1]
        before = accumulation * each + (accumulation - 1) * micro
        optimizer = moves[move_of, -1]
        return self.slow * (np.maximum(before + last[:, 0] + update, before - sparse[sparse_of, 2] + last[:, 1]) + optimizer)

    @property
    def units(self) -> list[int]:
        """Region index of every block in forward order."""
        return [k for k, r in enumerate(self.regions) for _ in range(r.count)]

    def block_seconds(self, i: int, plan: Plan) -> np.ndarray:
        """`(2 units + 1,)`: least forward and backward seconds of every block, and of the loss both ways with the input's copy."""
        batch, prices = batch_shape(plan, self.pricing.slowest(plan)[0]), pricer(plan, self.calibration)
        prices.keep(batch)
        times = [[min(prices.block(r.block, batch, p, phase).seconds for p in {c.precision for c in self.choices[r.name]}) for r in self.regions]
                 for phase in (FORWARD, BACKWARD)]
        rows = batch.samples * len(plan.model.heads)
        loss = sum(prices.ops([op("bce", m=rows)], phase).seconds for phase in (FORWARD, BACKWARD))
        return np.concatenate([np.array(times)[:, self.units].ravel(), [loss]])

    def move_seconds(self, i: int, plan: Plan) -> np.ndarray:
        """`(6 units + 2,)` by block: gather, unshard, pack, scatter, all-reduce, regather; then whether ranks share a tier, and the optimizer."""
        prices, net = pricer(plan, self.calibration), network(plan.cluster, self.calibration, plan.transport)
        groups, layout = layout_groups(plan.layout), plan.layout
        low = {r.name: min(dtype_bytes(activation_dtype(c.precision)) for c in self.choices[r.name]) for r in self.regions}
        wrapped = layout.world_size > 1
        table = []
        for r in self.regions:
            shard = 4.0 * r.block.sharded_elements(layout.fsdp)
            gather = net.cost("all_gather", low[r.name] * layout.fsdp * shard / 4.0, groups["fsdp"]).seconds
            unshard = prices.unit("fsdp_gather", r.block).seconds
            pack = prices.unit("fsdp_reduce", r.block).seconds
            scatter = net.cost("reduce_scatter", shard * layout.fsdp, groups["fsdp"]).seconds
            summed = net.cost("all_reduce", shard, groups["ddp"]).seconds
            table.append([v * wrapped for v in (gather, unshard, pack, scatter, summed, layout.reshard_after_forward)])
        elements = sum(r.count * r.block.sharded_elements(layout.fsdp) for r in self.regions)
        tensors = sum(r.count * r.block.num_tensors for r in self.regions)
        optimizer = prices.ops([op("adamw", parameters=elements, tensors=tensors)], STEP).seconds
        return np.concatenate([np.array(table).T[:, self.units].ravel(), [float(plan.cluster.device.kind == "cpu"), optimizer]])

    def sparse_seconds(self, i: int, plan: Plan) -> np.ndarray:
        """`(3,)`: seconds of the sparse part of every micro-batch, of the last one's update and average, and of what follows backward in each."""
        plan = dataclasses.replace(plan, batching="jagged")
        batch = batch_shape(plan)
        tokens = {name: shape.tokens for name, shape in batch.sequences.items()}
        loads = mean_loads(plan, tokens)
        work = group_work(plan, loads, 0, tokens)
        prices, net = pricer(plan, self.calibration), network(plan.cluster, self.calibration, plan.transport)
        layout, group = plan.layout, layout_groups(plan.layout)["sparse_group"]
        wire = (2.0 if all(t.dtype == "bf16" for t in plan.model.tables) else 4.0) * float(loads.served.mean())

        def exchange(num_bytes: float) -> float:
            return net.cost("all_to_all", num_bytes, group).seconds

        def time(ops: list[Op], phase: str) -> float:
            return prices.ops(ops, phase).seconds

        spread = [op("embedding_lookup", variant="sequence" if w.table.pooling == "sequence" else "pooled", ids=w.ids, unique=w.unique, dim=w.table.dim,
                     rows=w.unique if layout.sparse_group > 1 else w.storage_rows, tables=w.table.count, dtype=w.table.dtype) for w in work]
        if layout.sparse_group == 1:
            forward, backward = time(spread, FORWARD), 0.0
        else:
            served = [op("embedding_lookup", variant="sequence", ids=w.served_rows, unique=w.distinct_served, dim=w.served_width, rows=w.storage_rows, tables=1,
                         dtype=w.table.dtype) for w in work]
            forward = (time([op("unique", ids=w.ids) for w in work], FORWARD) + exchange(8.0 * sum(w.unique for w in work)) + time(served, FORWARD)
                       + exchange(wire) + time(spread, FORWARD))
            backward = time(spread, BACKWARD) + exchange(wire)
        update = time([op("embedding_update", variant=w.table.optimizer, ids=plan.accumulation * (w.served_rows if layout.sparse_group > 1 else w.ids),
                          unique=w.distinct_served, dim=w.served_width if layout.sparse_group > 1 else w.table.dim, rows=w.storage_rows, tables=1,
                          dtype=w.table.dtype) for w in work], STEP)
        forward_gather, average = self.replica_seconds(plan, float(loads.weights[0]), float(loads.state[0]))
        return np.array([forward + backward + forward_gather, update + average, backward])

    def replica_seconds(self, plan: Plan, weights: float, state: float) -> tuple[float, float]:
        """(seconds of each micro-batch, of each step) that several replicas of a sparse group cost."""
        layout = plan.layout
        if layout.sparse_replicas == 1:
            return 0.0, 0.0
        net, group = network(plan.cluster, self.calibration, plan.transport), layout_groups(layout)["sparse_replicas"]
        if layout.fully_sharded_2d:
            gather = net.cost("all_gather", weights, group).seconds
            return gather, gather + net.cost("reduce_scatter", weights, group).seconds
        return 0.0, net.cost("all_reduce", weights + state, group).seconds / layout.sync_every

    # --- memory ---

    def reserved(self) -> np.ndarray:
        """Least reserved bytes: everything that rests, tables spread evenly, and each block's leanest option."""
        multiple = self.columns["accumulation"] > 1
        resting, rest_of = self.per(("fsdp", "ddp", "sparse_group", "sparse_replicas", "fully_sharded_2d", "local_batch"), self.resting_bytes)
        dense, dense_of = self.per(("fsdp", "reshard_after_forward", "local_batch", "batching"), self.dense_bytes)
        gradients = resting[rest_of, 1]
        in_step = dense[dense_of].max(axis=1) + multiple * gradients + resting[rest_of, 5]
        peak = resting[rest_of, 0] + np.maximum(in_step, np.maximum(gradients, resting[rest_of, 2]))
        return resting[rest_of, 3] * peak + resting[rest_of, 4]

    def resting_bytes(self, i: int, plan: Plan) -> np.ndarray:
        """`(6,)`: bytes that rest, gradients, tables in flight, slope and constant of reserved over allocated, and what tables keep for backward."""
        plan = dataclasses.replace(plan, batching="jagged")
        batch = batch_shape(plan)
        loads = mean_loads(plan, {n: s.tokens for n, s in batch.sequences.items()})
        found = memory(plan, batch, loads, self.calibration)
        c, full = found.categories, plan.layout.fully_sharded_2d and plan.layout.sparse_replicas > 1
        in_flight = float(loads.weights[0] + loads.state[0]) if full else 0.0
        half = dataclasses.replace(batch, sequences={n: s.scaled(0.5, 1.0) for n, s in batch.sequences.items()})
        other = memory(plan, half, loads, self.calibration)
        rise = found.peak.value - other.peak.value
        slope = (found.reserved.value - other.reserved.value) / rise if rise else 1.0
        rest = c["parameters"] + c["optimizer"] + c["tables"] - (float(loads.weights[0] + loads.state[0]) if full else 0.0) + c["table_state"]
        return np.array([rest + c["input"] + c["buffers"], c["gradients"], in_flight, slope, found.reserved.value - slope * found.peak.value,
                         embedding_bytes(plan, batch)])

    def dense_bytes(self, i: int, plan: Plan) -> np.ndarray:
        """`(2,)` bytes over the resting ones at the end of forward, and in the backward of the last block (what tables keep is in `resting_bytes`)."""
        batch, keep = batch_shape(plan, self.pricing.slowest(plan)[0]), not plan.layout.reshard_after_forward
        least = [[option_memory(r, batch, precision=c.precision, checkpoint=c.checkpoint, fsdp=plan.layout.fsdp) for c in self.choices[r.name]]
                 for r in self.regions]
        saved = sum(r.count * min(m.saved + (m.unsharded if keep else 0.0) for m in options) for r, options in zip(self.regions, least))
        last = min(max(0.0, m.whole - m.saved) + m.workspace + m.unsharded * (1.0 if keep else 2.0) for m in least[-1])
        return np.array([saved, saved + last])


def dense_times(blocks: np.ndarray, moves: np.ndarray, units: int) -> np.ndarray:
    """`(n, 3)`: least seconds of forward and backward of a micro-batch that reduces nothing, of the last one's compute, and until its last reduction.

    `blocks` `(n, 2 units + 1)` and `moves` `(n, 6 units + 2)` as `_Bounds` prices them. A gather runs beside the block before its own, a reduction
    behind its block; which of them shares a link with which is left out. On a CPU everything is one chain.
    """
    forward, backward, loss = blocks[:, :units], blocks[:, units:2 * units], blocks[:, -1]
    gather, unshard, pack, scatter, summed, regather = (moves[:, k * units:(k + 1) * units] for k in range(6))
    if moves[0, -2] > 0:
        plain = (gather + unshard + forward + backward + regather * (gather + unshard)).sum(axis=1) + loss
        last = plain + (pack + scatter + summed).sum(axis=1)
        return np.stack([plain, last, last], axis=1)
    end = before = sent = np.zeros(len(blocks))
    for u in range(units):
        sent = np.maximum(before, sent) + gather[:, u]
        before, end = end, np.maximum(end, sent) + unshard[:, u] + forward[:, u]
    results = []
    for packing in (np.zeros_like(pack), pack):
        sent = end + regather[:, -1] * gather[:, -1]
        now = end + loss
        reduction = now
        for u in range(units - 1, -1, -1):
            start = now
            now = np.maximum(now, np.where(regather[:, u] > 0, sent, 0.0)) + regather[:, u] * unshard[:, u] + backward[:, u]
            if u:
                sent = np.maximum(start, sent) + regather[:, u - 1] * gather[:, u - 1]
            now = now + packing[:, u]
            reduction = np.maximum(reduction, now) + scatter[:, u]
        results += [now, np.maximum(reduction, now + scatter[:, 0] + summed[:, 0])]
    return np.stack([results[0], results[2], results[3]], axis=1)
