"""Prices of one scenario's candidates: the program of a candidate, the placed plan of a solution, and what the cost model says of it.

Everything here goes through `costmodel.lower`; what depends on less than a whole plan (slowest rank, durations of blocks, mean table loads) is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from costmodel.blocks import BatchShape, activation_dtype
from costmodel.blocks.base import QUANTIZED
from costmodel.calibration import Calibration
from costmodel.comms import GroupShape, Network, layout_groups, network
from costmodel.execution import fits_execution, refusal
from costmodel.imbalance import slowest_rank
from costmodel.lower import Factors, Lowered, batch_shape, lower
from costmodel.memory import (
    BlockMemory,
    Memory,
    captured_regions,
    communicator_bytes,
    graph_bytes,
    keeps_unsharded,
    largest_batch,
    memory,
    option_memory,
    reserving,
)
from costmodel.model import DTYPE_BYTES, TableGroup
from costmodel.plan import Layout, Plan, RegionOption, RegionPlan, TablePlacement
from costmodel.precision import emulated
from costmodel.pricer import pricer
from costmodel.regions import Region, regions
from costmodel.simulate import simulate
from costmodel.sparse import expected_unique, ids_per_table, skew, state_bytes
from costmodel.stepgraph import StepGraph, Task
from planner.bounds import (
    SECONDS,
    Cut,
    Durations,
    Key,
    block_durations,
    contention_cap,
    cut,
    least_serving,
    mean_loads,
    own_durations,
    rest_durations,
    single_blocks,
    task_keys,
    uniform,
)
from planner.ilp import CandidateProgram, Choice, MemoryRow, RegionRow, TableRow, undominated, undominated_tables
from planner.placement import Group, Items, place
from planner.points import MAX_POINTS
from planner.replication import REPLICA_TASKS, LocalTable, below, steepest
from planner.scenario import ResolvedScenario
from planner.space import Candidates, Excluded, RegionChoice, Space, TableChoice, predict_only_reasons, table_choices, training_pins

LEANEST_FIRST = ("full", "selective", "quantized4", "quantized", "none")
_EXCHANGES = ("ids", "embeddings", "gradients")
_SERVING = ("lookup", "update")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TiedTables:
    """Tables of one group that no pin, exclusion or skew tells apart: they are chosen by count."""

    name: str
    group: TableGroup
    tables: tuple[str, ...]
    zipf: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan with its simulated step time [s] and its memory."""

    plan: Plan
    choice: Choice
    seconds: float
    memory: Memory
    lowered: Lowered


class Pricing:
    """All prices of one scenario; `candidates` index the space."""

    def __init__(self, scenario: ResolvedScenario, space: Space, calibration: Calibration | None) -> None:
        self.scenario, self.space, self.calibration = scenario, space, calibration
        self.candidates: Candidates = space.candidates
        self.blocks = {r.name: r.count for r in regions(scenario.model)}
        self.single = single_blocks(scenario.model)
        self.first_options = uniform(scenario.model, {name: choices[0] for name, choices in space.regions.items()})
        self.tied = tied_tables(scenario)
        self.table_log: list[Excluded] = []
        self.dominated: dict[str, dict[RegionChoice, RegionChoice]] = {}
        self.lowerings = 0
        self._slowest: dict[tuple, tuple[dict[str, Factors], float]] = {}
        self._undominated: dict[tuple, tuple[RegionChoice, ...]] = {}
        self.pinned_tables = tuple(TablePlacement(table=name, sharding="data_parallel") for tied in self.tied for name in tied.tables
                                   if scenario.pins.option("sharding", name) == "data_parallel")
        self._durations: dict[tuple, dict[str, dict[RegionChoice, dict[Key, float]]]] = {}

    # --- plans ---

    def base(self, i: int) -> Plan:
        """Candidate i with the first option everywhere and its tables unplaced, but for those that are pinned to data_parallel."""
        scenario = self.scenario
        return Plan(
            scenario=scenario.name,
            cluster=scenario.cluster,
            model=scenario.model,
            workload=scenario.workload,
            seed=scenario.seed,
            layout=self.candidates.layout(i),
            **self.candidates.options(i),
            **training_pins(scenario),
            regions=self.first_options,
            tables=self.pinned_tables,
        )

    def slowest(self, plan: Plan) -> tuple[dict[str, Factors], float]:
        """(the slowest rank's factors by sequence, the slowest device's time over the nominal)."""
        key = (plan.batching, plan.local_batch, plan.layout.world_size)
        if key not in self._slowest:
            found = slowest_rank(plan)
            self._slowest[key] = ({n: Factors(tokens=f.tokens, pairs=f.pairs) for n, f in found.sequences.items()}, found.slow_node)
        return self._slowest[key]

    def lower(self, plan: Plan, **known: object) -> Lowered:
        self.lowerings += 1
        return lower(plan, self.calibration, factors=self.slowest(plan)[0], **known)

    def region_plans(self, choice: Choice) -> tuple[RegionPlan, ...]:
        """Options in plan order, so that equal counts are equal plans."""
        return tuple(
            RegionPlan(
                region=name,
                options=tuple(
                    RegionOption(count=n, precision=c.precision, checkpoint=c.checkpoint)
                    for c in plan_order(self.space.regions[name])
                    if (n := choice.regions[name].get(c, 0))
                ),
            )
            for name in self.blocks
        )

    def plan(self, i: int, choice: Choice, *, any_size: bool = False) -> Plan:
        """The placed plan of a solution. Raises PlacementError when a shard fits nowhere; with `any_size` memory is no object."""
        plan = dataclasses.replace(self.base(i), regions=self.region_plans(choice))
        plan = dataclasses.replace(plan, tables=self.place(plan, choice, np.inf if any_size else self.table_cap(plan)))
        used = [c for by in choice.regions.values() for c, n in by.items() if n]
        reasons = predict_only_reasons(
            options=self.candidates.options(i),
            precisions=[c.precision for c in used],
            checkpoints=[c.checkpoint for c in used],
            shardings=[t.sharding for t in plan.tables],
        )
        refused = refusal(plan)
        return dataclasses.replace(plan, predict_only=(*reasons, *([f"execution {plan.execution}: {refused}"] if refused else [])),
                                   emulated=emulated(plan))

    def price(self, plan: Plan, choice: Choice) -> Priced:
        """Simulated time and memory of a placed plan."""
        lowered, slow = self.lower(plan), self.slowest(plan)[1]
        return Priced(
            plan=plan,
            choice=choice,
            seconds=simulate(lowered.graph).step_seconds * slow,
            memory=memory(plan, lowered.batch, lowered.loads, self.calibration),
            lowered=lowered,
        )

    # --- programs ---

    def program(self, i: int) -> CandidateProgram:
        """The MILP of candidate i with the chain of its fastest options."""
        plan, scenario = self.base(i), self.scenario
        factors, slow = self.slowest(plan)
        batch = batch_shape(plan, factors)
        durations = self.durations(plan)
        largest = largest_batch(plan, batch)
        graphs = captured_regions(plan)
        memories = {r.name: self.memories(r, largest, plan.layout.fsdp, captured=r.name in graphs) for r in regions(scenario.model, plan.layout)}
        rows, kept = [], {}
        key = self.duration_key(plan)
        for r in regions(scenario.model):
            if (key, r.name) not in self._undominated:
                offered = self.offered(plan, r.name)
                choices, worse = undominated(
                    offered, durations[r.name], memories[r.name], risk_matters=scenario.search.risk_budget is not None
                )
                self._undominated[key, r.name] = tuple(c for c in offered if c in choices)
                self.dominated.setdefault(r.name, {}).update(worse)
            choices = self._undominated[key, r.name]
            kept[r.name] = {c: durations[r.name][c] for c in choices}
            ordered = {c: memories[r.name][c] for c in plan_order(choices)}
            rows.append(RegionRow(name=r.name, count=r.count, memory=ordered, sharded=memories[r.name][choices[0]].sharded))
        tokens = {name: shape.tokens for name, shape in batch.sequences.items()}
        loads = mean_loads(plan, tokens)
        fastest = {name: min(by, key=lambda c: sum(v for k, v in by[c].items() if k[3] == "seconds")) for name, by in kept.items()}
        local = self.local_tables(plan, tokens)
        # the chain of an all-reduce that some plans have holds for those without: it then takes no time
        shown = dataclasses.replace(loads, replicated=min((t.gradient for t in local), default=0.0) / 4.0)
        lowered = self.lower(dataclasses.replace(plan, regions=uniform(scenario.model, fastest)), loads=shown)
        lowered = dataclasses.replace(lowered, loads=loads)
        rest = {key: seconds for key, seconds in rest_durations(lowered.graph).items() if key[0] != "tables all-reduce"}
        if plan.layout.sparse_group > 1:
            # what the busiest rank serves, and how many ops it launches for that, is up to the placement
            served = dict(zip(_SERVING, least_serving(plan, tokens, float(loads.served.mean()), pricer(plan, self.calibration))))
            rest = {key: (served[key[0]] if key[3] == SECONDS else 0.0) if key[0] in served else value for key, value in rest.items()}
        most_local = sum(t.count * t.elements for t in local) / max(float(loads.served[0]), 1e-300)
        slopes = self.slopes(plan, lowered.graph, min(1.0, most_local)) if plan.layout.sparse_group > 1 else {}
        tables, once = self.replicating(plan, lowered.graph, local, float(loads.served[0])) if local else ({}, {})
        all_durations = Durations(regions=kept, rest=rest, slopes=slopes, tables=tables, once=once)
        program = CandidateProgram(
            regions=rows,
            tables=self.table_rows(plan, tokens, float(loads.served[0]), {t.name: t for t in local}),
            memory=self.memory_row(plan, lowered, fastest, memories),
            durations=all_durations,
            risk_budget=scenario.search.risk_budget,
        )
        program.cuts.append(scaled(cut(lowered.graph, all_durations, self.blocks), slow))
        return program

    def chain(self, priced: Priced, program: CandidateProgram) -> Cut:
        """The critical chain of a priced plan as a constraint of its candidate's program."""
        return scaled(cut(priced.lowered.graph, program.durations, self.blocks), self.slowest(priced.plan)[1])

    def offered(self, plan: Plan, region: str) -> tuple[RegionChoice, ...]:
        """The choices of a region that can be launched as the plan is, or all where a pin asks for what cannot."""
        choices = self.space.regions[region]
        fitting = tuple(c for c in choices if fits_execution(plan.model, plan.execution, region, c.precision, c.checkpoint))
        return fitting or choices

    @staticmethod
    def duration_key(plan: Plan) -> tuple:
        """What the durations and the memory of blocks depend on."""
        layout = plan.layout
        dense = (layout.ddp, layout.fsdp, layout.ep, layout.expert_all_to_all, layout.reshard_after_forward)
        return (*dense, plan.local_batch, plan.batching, plan.transport, plan.execution)

    def memories(self, region: Region, batch: BatchShape, fsdp: int, *, captured: bool = False) -> dict[RegionChoice, BlockMemory]:
        """Memory of one block by choice; number formats with one dtype of activations take the same."""
        found: dict[tuple[str, str], BlockMemory] = {}
        for c in self.space.regions[region.name]:
            key = (activation_dtype(c.precision), c.checkpoint)
            if key not in found:
                found[key] = option_memory(region, batch, precision=c.precision, checkpoint=c.checkpoint, fsdp=fsdp, calibration=self.calibration,
                                           captured=captured)
        return {c: found[activation_dtype(c.precision), c.checkpoint] for c in self.space.regions[region.name]}

    def durations(self, plan: Plan) -> dict[str, dict[RegionChoice, dict[Key, float]]]:
        """Durations of one block by region and choice: what depends on the activations' dtype only (gathers, reductions, copies) read off one lowered
        graph per dtype (with spread experts also per whether samples are sent again), the block's own passes from the pricer that the lowering asks
        too."""
        key = self.duration_key(plan)
        if key not in self._durations:
            found: dict[str, dict[RegionChoice, dict[Key, float]]] = {name: {} for name in self.blocks}
            small = dataclasses.replace(plan, model=self.single, accumulation=1)
            factors, _ = self.slowest(plan)
            loads = mean_loads(small, {name: s.tokens for name, s in batch_shape(small, factors).sequences.items()})
            known = {r.name: r for r in regions(self.single, plan.layout)}
            for kind in dict.fromkeys(_moves_as(c, plan.layout) for choices in self.space.regions.values() for c in choices):
                alike = {name: [c for c in choices if _moves_as(c, plan.layout) == kind] for name, choices in self.space.regions.items()}
                picked = {name: (alike[name] or choices)[0] for name, choices in self.space.regions.items()}
                lowered = self.lower(dataclasses.replace(small, regions=uniform(self.single, picked)), loads=loads)
                prices = pricer(small, self.calibration)
                for name, durations in block_durations(lowered.graph).items():
                    for c in alike[name]:
                        found[name][c] = durations | own_durations(name, known[name].block, lowered.batch, c, prices)
            self._durations[key] = found
        return self._durations[key]

    def slopes(self, plan: Plan, graph: StepGraph, most_local: float) -> dict[Key, float]:
        """Added seconds of each exchange per unit of load over the mean: the least secant, so that the line stays below a measured curve's bends.

        Lookups and updates have none (`planner.bounds.least_serving`). `most_local`: the largest share of the exchange that tables on every rank may
        take off it; lines then start there too, and ids, whose share is another one, count as even.
        """
        net, group = network(plan.cluster, self.calibration, plan.transport), layout_groups(plan.layout)["sparse_group"]
        cap, loads = contention_cap(graph.tasks), np.geomspace(1.02, max(2.0, group.size), 10)
        least: dict[Key, float] = {}
        for task in {(t.name, t.phase, t.stream): t for t in graph.tasks if t.name in _EXCHANGES}.values():
            if most_local and task.name == "ids":
                continue
            for begin in sorted({1.0, 1.0 - most_local / 2, max(1e-3, 1.0 - most_local)}):
                even = self.exchanged(task, begin, net, group, cap)
                for load in loads:
                    heavy = self.exchanged(task, begin + float(load) - 1.0, net, group, cap)
                    for key, seconds in heavy.items():
                        secant = max(0.0, seconds - even[key]) / (load - 1.0)
                        least[key] = min(least.get(key, secant), secant)
        return {key: float(slope) for key, slope in least.items() if slope > 0}

    @staticmethod
    def exchanged(task: Task, load: float, net: Network, group: GroupShape, cap: float) -> dict[Key, float]:
        """An exchange of `load` times the task's bytes on the heaviest rank."""
        cost = net.cost("all_to_all", task.bytes * min(load, 1.0), group, max_over_mean=max(1.0, load))
        return task_keys(dataclasses.replace(task, seconds=cost.seconds, sm_fraction=cost.share if task.sm_fraction else 0.0), cap)

    def local_tables(self, plan: Plan, tokens: Mapping[str, float]) -> list[LocalTable]:
        """The tables that may be on every rank of a sparse group, or are pinned there."""
        group = plan.layout.sparse_group
        if group == 1 or plan.exchange != "rows":
            return []
        pinned = {p.table for p in plan.tables}
        return [
            LocalTable.of(t.name, len(t.tables), t.group, t.zipf, plan.local_batch, dict(tokens), group, pinned=t.tables[0] in pinned)
            for t in self.tied
            if any(c.sharding == "data_parallel" for c in self.choices(t, group))
        ]

    def replicating(
        self, plan: Plan, graph: StepGraph, local: Sequence[LocalTable], served: float
    ) -> tuple[dict[Key, dict[str, float]], dict[Key, float]]:
        """(added seconds of a task outside regions per data-parallel table by its group, added where there is any); `served`: elements that an even
        rank exchanges with no such table."""
        net, groups, cap = network(plan.cluster, self.calibration, plan.transport), layout_groups(plan.layout), contention_cap(graph.tasks)
        found: dict[Key, dict[str, float]] = {}
        once: dict[Key, float] = {}
        free = [t for t in local if t.rows]
        everything = sum(t.count for t in free) + len(self.pinned_tables) == sum(len(t.tables) for t in self.tied)
        for task in {(t.name, t.phase, t.stream): t for t in graph.tasks if not t.region}.values():
            if task.name in _EXCHANGES and free:
                parts = {t.name: 8.0 * t.rows / task.bytes if task.name == "ids" else t.elements / served for t in free}
                most = 1.0 if everything else min(1.0, sum(t.count * parts[t.name] for t in free))
                for key in task_keys(task, cap):
                    fall = steepest(lambda load, task=task, key=key: self.exchanged(task, load, net, groups["sparse_group"], cap)[key], most)
                    found[key] = {name: -fall * part for name, part in parts.items()}
            elif task.name == "counts" and everything:
                found |= {key: {t.name: -value / sum(o.count for o in free) for t in free} for key, value in task_keys(task, cap).items()}
            elif task.name == "tables all-reduce":
                sizes = [*(t.gradient for t in local), sum(t.count * t.gradient for t in local)]
                priced = functools.partial(self.grown, task, "all_reduce", net=net, group=groups["sparse_group"], share=1.0, cap=cap)
                for key in task_keys(task, cap):
                    fixed, slope = below(lambda size, key=key, priced=priced: priced(size)[key], sizes)
                    found[key], once[key] = {t.name: slope * t.gradient for t in local}, fixed
            elif task.name in REPLICA_TASKS:
                kind, *_ = REPLICA_TASKS[task.name]
                share = 1.0 / plan.layout.sync_every if task.name.startswith("tables average") else 1.0
                most, even = sum(t.count * t.held(task.name) for t in local), task_keys(task, cap)
                for part in np.linspace(most / 8, most, 8):
                    size = task.bytes / share + float(part)
                    more = self.grown(task, kind, size, net, groups["sparse_replicas"], share, cap)
                    for key, seconds in more.items():
                        secant = max(0.0, seconds - even[key]) / part
                        slopes = {t.name: secant * t.held(task.name) for t in local}
                        found[key] = {name: min(found.get(key, slopes)[name], value) for name, value in slopes.items()}
        return found, once

    @staticmethod
    def grown(task: Task, kind: str, size: float, net: Network, group: GroupShape, share: float, cap: float) -> dict[Key, float]:
        """A collective of another size that `share` of the steps run."""
        cost = net.cost(kind, size, group)
        return task_keys(dataclasses.replace(task, seconds=cost.seconds * share, sm_fraction=cost.share if task.sm_fraction else 0.0), cap)

    def memory_row(self, plan: Plan, lowered: Lowered, fastest: Mapping[str, RegionChoice], memories: Mapping) -> MemoryRow:
        """What rests and what a phase adds, in allocated bytes."""
        plan = dataclasses.replace(plan, regions=uniform(self.scenario.model, fastest))
        found = memory(plan, lowered.batch, lowered.loads, self.calibration)
        context, slope = reserving(plan, self.calibration)
        usable = (found.limit - context) / slope
        categories, layout = found.categories, plan.layout
        graphs = graph_bytes(plan, largest_batch(plan, lowered.batch), self.calibration)[1]
        outside = communicator_bytes(plan) + graphs  # beside the allocator, whose slack it has not
        resting = categories["parameters"] + categories["optimizer"] + categories["input"] + categories["buffers"] - outside + outside / slope
        buffer = 4.0 * float(lowered.loads.served.max(initial=0.0)) if layout.sparse_group > 1 else 0.0
        full = layout.fully_sharded_2d and layout.sparse_replicas > 1
        blocks = sum(self.blocks[name] * memories[name][choice].saved for name, choice in fastest.items())
        return MemoryRow(
            resting=resting,
            buffer=buffer,
            embeddings=max(0.0, categories["saved_activations"] - blocks),
            gradients=categories["gradients"],
            usable=usable,
            accumulates=plan.accumulation > 1,
            keeps_unsharded=keeps_unsharded(layout),
            table_share=1.0 / layout.sparse_replicas if full else 1.0,
            tables_in_flight=full,
            tables_early=full and plan.tables_ahead > 0,
        )

    # --- tables ---

    def table_rows(self, plan: Plan, tokens: Mapping[str, float], mean_served: float, local: Mapping[str, LocalTable]) -> list[TableRow]:
        group, rows = plan.layout.sparse_group, []
        for tied in self.tied:
            table = tied.group
            choices = self.choices(tied, group)
            shards = {c: self.shard(table, c, group) for c in choices}
            elements = group * expected_unique(table.rows, tied.zipf, ids_per_table(table, plan.local_batch, dict(tokens))) * table.dim
            each = DTYPE_BYTES[table.dtype]
            spread = {c: {"data_parallel": 1.0, "host_cached": 0.0}.get(c.sharding, 1.0 / group) for c in choices}
            on_device = {c: 0.0 if c.sharding == "host_cached" else 1.0 for c in choices}
            state = state_bytes(table, 1.0, table.dim) * table.rows
            unsent = {c for c in choices if c.sharding == "data_parallel"}
            rows.append(
                TableRow(
                    name=tied.name,
                    count=len(tied.tables),
                    weights={c: table.rows * table.dim * each * spread[c] for c in choices},
                    shard={c: r * w * each * on_device[c] for c, (r, w) in shards.items()},
                    state={c: state * spread[c] for c in choices},
                    shard_state={c: state_bytes(table, 1.0, w) * r * on_device[c] for c, (r, w) in shards.items()},
                    served={
                        c: elements
                        * (r / table.rows)
                        * (w / table.dim)
                        * (c not in unsent)
                        / max(mean_served, 1e-300)
                        for c, (r, w) in shards.items()
                    },
                    effort={c: effort(c, table, group) for c in choices},
                    local=local[tied.name].elements / max(mean_served, 1e-300) if tied.name in local else 0.0,
                    dense=local[tied.name].gradient - 8.0 * local[tied.name].elements if tied.name in local else 0.0,
                )
            )
        return (
            rows if math.prod(math.comb(r.count + len(r.weights) - 1, r.count) for r in rows) <= MAX_POINTS else [undominated_tables(r) for r in rows]
        )

    def choices(self, tied: TiedTables, group: int) -> tuple[TableChoice, ...]:
        return _choices(self, tied.name, group)

    @staticmethod
    def shard(table: TableGroup, choice: TableChoice, group: int) -> tuple[float, float]:
        """(rows, width) of the largest shard."""
        if choice.sharding in ("row_wise", "table_row_wise"):
            return float(-(-table.rows // choice.num_shards)), float(table.dim)
        return float(table.rows), table.dim / (choice.num_shards if choice.sharding == "column_wise" else 1)

    def place(self, plan: Plan, choice: Choice, cap: float) -> tuple[TablePlacement, ...]:
        """Every table once, at most `cap` bytes of them on a rank (infinite: hosts have no cap either): the first tables of a tied set take the
        first sharding. Raises PlacementError."""
        group, cluster = plan.layout.sparse_group, self.scenario.cluster
        factors, _ = self.slowest(plan)
        tokens = {name: shape.tokens for name, shape in batch_shape(plan, factors).sequences.items()}
        local = min(group, cluster.devices_per_host)
        decided: list[tuple[str, TiedTables, TableChoice]] = []
        for tied in self.tied:
            names = iter(tied.tables)
            for c in self.choices(tied, group):
                decided += [(next(names), tied, c) for _ in range(choice.tables[tied.name].get(c, 0))]
        base_loads, base_memory = np.zeros((group, 1)), np.zeros(group)
        loads, bytes_, host, spans, owner = [], [], [], [], []
        for k, (_, tied, c) in enumerate(decided):
            table = tied.group
            elements = group * expected_unique(table.rows, tied.zipf, ids_per_table(table, plan.local_batch, tokens)) * table.dim
            rows, width = self.shard(table, c, group)
            size = rows * width * DTYPE_BYTES[table.dtype]
            state = state_bytes(table, 1.0, width) * rows
            if c.sharding in ("row_wise", "data_parallel"):
                held = np.clip(table.rows - rows * np.arange(group), 0, rows) if c.sharding == "row_wise" else np.full(group, rows)
                base_loads[:, 0] += elements * held / table.rows / (group if c.sharding == "data_parallel" else 1)
                base_memory += held / rows * (size + state)
                continue
            repeat = c.num_shards if c.sharding == "column_wise" else 1
            offloaded = c.sharding == "host_cached"
            loads += [elements * rows / table.rows * width / table.dim] * repeat
            bytes_ += [0.0 if offloaded else state + size] * repeat
            host += [state + size if offloaded else 0.0] * repeat
            spans += [c.sharding == "table_row_wise"] * repeat
            owner += [k] * repeat
        found = place(
            Items.of(np.array(loads), np.array(bytes_), host_memory=np.array(host), spans_host=np.array(spans, dtype=bool)),
            Group(
                num_ranks=group,
                ranks_per_host=local,
                groups_per_host=max(1, cluster.devices_per_host // group),
                memory_cap=cap,
                host_cap=cluster.host_memory_bytes if cap < np.inf and cluster.host_memory_bytes else np.inf,
                base_loads=base_loads,
                base_memory=base_memory,
            ),
        )
        ranks: list[list[int]] = [[] for _ in decided]
        for k, rank, whole in zip(owner, found.ranks, spans):
            ranks[k] += range(rank * local, (rank + 1) * local) if whole else [int(rank)]
        return tuple(TablePlacement(table=name, sharding=c.sharding, ranks=tuple(r)) for (name, _, c), r in zip(decided, ranks))

    def table_cap(self, plan: Plan) -> float:
        """Bytes of weights and state that a rank may hold so that the plan fits, from the memory of the plan with tables spread evenly."""
        factors, _ = self.slowest(plan)
        batch = batch_shape(plan, factors)
        loads = mean_loads(plan, {name: s.tokens for name, s in batch.sequences.items()})
        found = memory(plan, batch, loads, self.calibration)
        mean = float(loads.weights[0] + loads.state[0])
        share = plan.layout.sparse_replicas if plan.layout.fully_sharded_2d else 1
        return max(mean, mean + share * (found.limit - found.reserved.value) / reserving(plan, self.calibration)[1])


@functools.lru_cache(maxsize=65536)
def _choices(pricing: Pricing, name: str, group: int) -> tuple[TableChoice, ...]:
    tied = next(t for t in pricing.tied if t.name == name)
    table = tied.group if tied.group.count == 1 else dataclasses.replace(tied.group, name=tied.tables[0], count=1)
    return table_choices(pricing.scenario, table, group, allow=pricing.space.predict_only, log=pricing.table_log)


def plan_order(choices: Iterable[RegionChoice]) -> list[RegionChoice]:
    """The order of a region's options over its blocks: those that keep least come first. Backward then frees what the later blocks keep before the
    first block that recomputes needs its whole activations; no other order of three or four equal blocks was better under any memory budget, and the
    opposite one cost 5 % on average and up to 8 % of the step (random small instances, all orders simulated)."""
    return sorted(choices, key=lambda c: LEANEST_FIRST.index(c.checkpoint))


def tied_tables(scenario: ResolvedScenario) -> tuple[TiedTables, ...]:
    """Table groups, split where a pin, an exclusion or the workload's skew tells tables apart."""
    pins, found, taken = scenario.pins, [], {t.name for t in scenario.model.tables}
    for table in scenario.model.tables:
        parts: dict[tuple, list[str]] = {}
        for name in table.names:
            key = (pins.option("sharding", name), pins.excluded("sharding", name), skew(table, name, scenario.workload))
            parts.setdefault(key, []).append(name)
        numbers = (f"{table.name}#{k}" for k in itertools.count())
        for key, names in parts.items():
            name = table.name if len(parts) == 1 else next(n for n in numbers if n not in taken)
            taken.add(name)
            found.append(TiedTables(name=name, group=table, tables=tuple(names), zipf=key[2]))
    return tuple(found)


def effort(choice: TableChoice, table: TableGroup, group: int) -> float:
    """Tie-break between shardings of equal time: even spread first where a table has rows for all ranks, then whole tables, then pieces."""
    if choice.sharding == "row_wise":
        return 0.0 if table.rows >= 8 * group else 2.0
    return {"table_wise": 1.0, "column_wise": 1.0 + choice.num_shards / 64, "table_row_wise": 1.5, "data_parallel": 3.0, "host_cached": 4.0}[
        choice.sharding
    ]


def scaled(chain: Cut, factor: float) -> Cut:
    """A chain of seconds on a nominal device on one that is `factor` slower."""
    return Cut(
        constant=chain.constant * factor,
        slope=chain.slope * factor,
        coefficients={r: {c: s * factor for c, s in by.items()} for r, by in chain.coefficients.items()},
        tables={name: s * factor for name, s in chain.tables.items()},
        once=chain.once * factor,
    )


def _moves_as(choice: RegionChoice, layout: Layout) -> tuple[str, bool]:
    """Choices whose collectives and copies are alike."""
    return activation_dtype(choice.precision), layout.ep > 1 and choice.checkpoint not in ("none", *QUANTIZED)
