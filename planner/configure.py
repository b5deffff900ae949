"""The plan that a scenario describes when nothing is searched: its pins, and plain defaults for the rest.

`estimate` predicts it, `calibrate` times its shapes.

Defaults, each listed in the notes: FSDP over a zone, replicas across zones; one sparse group over all ranks; bf16 on a GPU, fp32 on a CPU; nothing
recomputed; large tables row-wise over the group, the others table-wise on the rank with the fewest bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from costmodel.execution import refusal
from costmodel.model import TableGroup
from costmodel.plan import Layout, Plan, RegionOption, RegionPlan, TablePlacement
from costmodel.precision import emulated, unfit_block
from costmodel.regions import regions
from planner.errors import UsageError
from planner.scenario import ResolvedScenario
from planner.space import CHECKPOINTS, PRECISIONS, predict_only_reasons, training_pins

# A table whose weights and state exceed this share of a rank's memory is spread over the group [Assumed: four such tables would fill a rank].
_LARGE_TABLE = 0.25
_NARROWEST_COLUMNS = 32


def default_plan(scenario: ResolvedScenario) -> tuple[Plan, tuple[str, ...]]:
    """The plan and remarks on what was not pinned. Raises UsageError when the pins contradict each other."""
    notes: list[str] = []
    layout = _layout(scenario, notes)
    local_batch, accumulation = _batch(scenario)
    default = "fp32" if scenario.cluster.device.kind == "cpu" else "bf16"
    options = []
    for region in regions(scenario.model):
        precision = _option(scenario, "precision", region.name, (default, *PRECISIONS))
        checkpoint = _option(scenario, "checkpoint", region.name, CHECKPOINTS)
        options.append(RegionPlan(region=region.name, options=(RegionOption(count=region.count, precision=precision, checkpoint=checkpoint),)))  # type: ignore[arg-type]
    if not scenario.pins.precision:
        notes.append(f"precision is not pinned: {default} everywhere")
    if not scenario.pins.checkpoint:
        notes.append("checkpoint is not pinned: all activations are kept")
    plan = Plan(
        scenario=scenario.name,
        cluster=scenario.cluster,
        model=scenario.model,
        workload=scenario.workload,
        layout=layout,
        local_batch=local_batch,
        accumulation=accumulation,
        regions=tuple(options),
        tables=_tables(scenario, layout, notes),
        seed=scenario.seed,
        input_overlap=bool(scenario.input_overlap),
        tables_ahead=scenario.tables_ahead or 0,
        transport=scenario.pins.transport or ("gloo" if scenario.cluster.device.kind == "cpu" else "nccl"),
        **{k: getattr(scenario.pins, k) for k in ("batching", "execution") if getattr(scenario.pins, k) is not None},
        **training_pins(scenario),
    )
    plan = dataclasses.replace(plan, predict_only=predict_only(plan), emulated=emulated(plan), fingerprints=plan.expected_fingerprints())
    return plan, tuple(notes)


def predict_only(plan: Plan) -> tuple[str, ...]:
    """Why no code here can execute the plan; empty when it can be run."""
    options = [o for r in plan.regions for o in r.options]
    reasons = set(
        predict_only_reasons(
            options={"batching": plan.batching, "transport": plan.transport, "execution": plan.execution},
            precisions=(o.precision for o in options),
            checkpoints=(o.checkpoint for o in options),
            shardings=(t.sharding for t in plan.tables),
        )
    )
    known = {r.name: r.block for r in regions(plan.model)}
    reasons |= {f"precision {o.precision} in {r.region}: {why}" for r in plan.regions for o in r.options
                if (why := unfit_block(known[r.region], o.precision)) is not None}
    if (refused := refusal(plan)) is not None:
        reasons.add(f"execution {plan.execution}: {refused}")
    if plan.exchange != "rows":
        reasons.add("exchange: the runtime sends distinct rows")
    return tuple(sorted(reasons))


def _option(scenario: ResolvedScenario, what: Literal["precision", "checkpoint"], region: str, preferred: Sequence[str]) -> str:
    """The pinned option of a region, else the first of `preferred` that is not excluded. Raises UsageError when none is left."""
    pinned, out = scenario.pins.option(what, region), scenario.pins.excluded(what, region)
    if pinned in out:
        raise UsageError(f"scenario {scenario.name}: region {region}: {what} {pinned} is pinned and excluded at once")
    left = [name for name in preferred if name not in out]
    if pinned is None and not left:
        raise UsageError(f"scenario {scenario.name}: region {region}: every {what} is excluded")
    return pinned or left[0]


def _layout(scenario: ResolvedScenario, notes: list[str]) -> Layout:
    pins, cluster = dict(scenario.pins.layout), scenario.cluster
    world = cluster.num_ranks
    if "fsdp" not in pins and "ddp" not in pins:
        pins["fsdp"] = cluster.scope_size("zone")
        notes.append(f"layout is not pinned: fsdp {pins['fsdp']} (a zone)")
    pins.setdefault("fsdp", world // pins.get("ddp", world))
    pins.setdefault("ddp", world // pins["fsdp"])
    pins.setdefault("sparse_group", world // pins.get("sparse_replicas", 1))
    pins.setdefault("sparse_replicas", world // pins["sparse_group"])
    try:
        layout = Layout(**pins)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"scenario {scenario.name}: layout: {error}") from error
    if cluster.devices_per_host % layout.ep:
        raise UsageError(f"scenario {scenario.name}: layout.ep {layout.ep} does not divide the {cluster.devices_per_host} ranks of a host")
    try:
        regions(scenario.model, layout)
    except ValueError as error:
        raise UsageError(f"scenario {scenario.name}: layout: {error}") from error
    if layout.world_size != world:
        raise UsageError(f"scenario {scenario.name}: layout {layout.short} is for {layout.world_size} ranks, cluster {cluster.name} has {world}")
    return layout


def _batch(scenario: ResolvedScenario) -> tuple[int, int]:
    """(local batch, accumulation)."""
    world, pins = scenario.cluster.num_ranks, scenario.pins
    total = scenario.workload.global_batch_on(world)
    if total % world:
        raise UsageError(
            f"scenario {scenario.name}: a global batch of {total} does not divide over {world} ranks; nearest: {total // world * world or world}"
        )
    per_rank = total // world
    accumulation = pins.accumulation or (per_rank // pins.local_batch if pins.local_batch and per_rank % pins.local_batch == 0 else 1)
    if per_rank % accumulation or (pins.local_batch or per_rank // accumulation) * accumulation != per_rank:
        raise UsageError(
            f"scenario {scenario.name}: local_batch {pins.local_batch or 'any'} x accumulation {accumulation} is not the {per_rank} samples of a rank"
        )
    return per_rank // accumulation, accumulation


def _tables(scenario: ResolvedScenario, layout: Layout, notes: list[str]) -> tuple[TablePlacement, ...]:
    group, local = layout.sparse_group, min(layout.sparse_group, scenario.cluster.devices_per_host)
    held = np.zeros(group)
    large = _LARGE_TABLE * scenario.cluster.usable_memory
    placed: dict[str, TablePlacement] = {}
    tables = [(name, table) for table in scenario.model.tables for name in table.names]
    for name, table in sorted(tables, key=lambda item: -_bytes(item[1])):
        sharding = scenario.pins.option("sharding", name) or ("row_wise" if group > 1 and _bytes(table) > large else "table_wise")
        ranks = _ranks(sharding, table, held, local)
        held[list(ranks)] += _bytes(table) / (1 if sharding == "data_parallel" else len(ranks))
        everywhere = ranks == tuple(range(group)) and sharding in ("row_wise", "column_wise", "data_parallel")
        placed[name] = TablePlacement(table=name, sharding=sharding, ranks=() if everywhere else ranks)  # type: ignore[arg-type]
    if not scenario.pins.sharding:
        spread = sum(p.sharding == "row_wise" for p in placed.values())
        notes.append(f"sharding is not pinned: {spread} tables row-wise, {len(placed) - spread} table-wise")
    return tuple(placed[name] for name, _ in tables)


def _bytes(table: TableGroup) -> float:
    return table.weight_bytes + table.state_bytes


def _ranks(sharding: str, table: TableGroup, held: np.ndarray, local: int) -> tuple[int, ...]:
    group = len(held)
    if sharding in ("table_wise", "host_cached"):
        return (int(np.argmin(held)),)
    if sharding == "table_row_wise":
        host = int(np.argmin(held.reshape(-1, local).sum(axis=1)))
        return tuple(range(host * local, (host + 1) * local))
    if sharding == "column_wise":
        shards = max(n for n in range(1, group + 1) if table.dim % n == 0 and (n == 1 or table.dim // n >= _NARROWEST_COLUMNS))
        return tuple(sorted(int(r) for r in np.argsort(held, kind="stable")[:shards]))
    return tuple(range(group))
