"""The declared space of `benchmarks.fidelity`: groups of plans, each group one model and workload under several plans.

A draw is a function of (device, seed, group): the same seed always scores the same configurations, and a longer run only adds groups.
Calibration plans sit at the centre of the space; their shapes are timed, and a drawn configuration equals none of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from costmodel.cluster import Cluster
from costmodel.model import Head, LayerGroup, Model, Sequence, TableGroup
from costmodel.plan import Layout, Plan, RegionOption, RegionPlan, TablePlacement
from costmodel.regions import regions
from costmodel.workload import EventSource, Lengths, Workload

PLANS_PER_GROUP = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be drawn. Calibration plans, one per kind each: `centre` and, where given, `off_grid`, whose values differ from all that is drawn."""

    name: str
    kinds: tuple[str, ...]
    dims: tuple[int, ...]
    heads: tuple[int, ...]
    depths: tuple[int, ...]
    mlp_factors: tuple[int, ...]
    num_tables: tuple[int, ...]
    table_rows: tuple[int, ...]
    table_dims: tuple[int, ...]
    maximum_lengths: tuple[int, ...]
    length_kinds: tuple[str, ...]
    global_batches: tuple[int, ...]
    ranks: tuple[int, ...]
    checkpoints: tuple[str, ...]
    shardings: tuple[str, ...]
    precisions: tuple[str, ...]
    executions: tuple[str, ...]
    centre: dict[str, Any]
    off_grid: tuple[dict[str, Any], ...] = ()

    def describe(self) -> str:
        """One line for the report."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("name", "centre", "off_grid")}
        return "; ".join(f"{name.replace('_', ' ')} {', '.join(map(str, values))}" for name, values in fields.items())


CPU = Space(
    name="cpu",
    kinds=("self_attention", "hstu"),
    dims=(32, 48, 64, 96),
    heads=(1, 2, 4),
    depths=(1, 2, 3),
    mlp_factors=(0, 2, 4),
    num_tables=(1, 2, 4),
    table_rows=(500, 2000, 10_000),
    table_dims=(16, 32, 48),
    maximum_lengths=(20, 50, 100),
    length_kinds=("uniform", "lognormal", "fixed"),
    global_batches=(128, 256, 512),
    ranks=(1, 2),
    checkpoints=("none", "full"),
    shardings=("table_wise", "row_wise"),
    precisions=("fp32",),
    executions=("eager",),
    centre={
        "dim": 64,
        "heads": 2,
        "depth": 1,
        "mlp_factor": 4,
        "num_tables": 2,
        "rows": 2000,
        "table_dim": 32,
        "maximum": 50,
        "length_kind": "uniform",
        "global_batch": 256,
        "dense": 4,
    },
    off_grid=(
        {"dim": 40, "heads": 1, "mlp_factor": 3, "num_tables": 1, "rows": 1000, "table_dim": 24, "maximum": 30, "global_batch": 192},
        {"dim": 88, "heads": 4, "mlp_factor": 2, "num_tables": 3, "rows": 6000, "table_dim": 40, "maximum": 80, "length_kind": "lognormal"},
        {"dim": 56, "heads": 2, "depth": 2, "mlp_factor": 0, "rows": 3000, "table_dim": 24, "maximum": 65, "length_kind": "fixed",
         "global_batch": 384},
    ),
)
SPACES = {space.name: space for space in (CPU,)}


def calibration_plans(space: Space, cluster: Cluster) -> list[Plan]:
    """The plans whose shapes a calibration for this space times: the centre and what lies off the grid of draws, once per block kind."""
    plans = []
    values = [{**space.centre, **changes, "kind": kind} for changes in ({}, *space.off_grid) for kind in space.kinds]
    for i, chosen in enumerate(values):
        model, workload = _subject(f"fidelity-calibration-{i}", chosen)
        ranks = min(max(space.ranks), cluster.num_ranks)
        plans.append(
            _plan(
                model,
                workload,
                cluster,
                ranks=ranks,
                checkpoint="none",
                sharding="table_wise",
                precision=space.precisions[0],
                execution="eager",
                accumulation=1,
                ddp=False,
            )
        )
    return plans


def draw_group(space: Space, cluster: Cluster, *, seed: int, group: int) -> list[Plan]:
    """The plans of one group: different from each other, of one model, workload and global batch."""
    rng = np.random.default_rng([seed, group])
    pick = lambda options: options[int(rng.integers(len(options)))]
    values = {
        "kind": pick(space.kinds),
        "dim": pick(space.dims),
        "heads": pick(space.heads),
        "depth": pick(space.depths),
        "mlp_factor": pick(space.mlp_factors),
        "num_tables": pick(space.num_tables),
        "rows": pick(space.table_rows),
        "table_dim": pick(space.table_dims),
        "maximum": pick(space.maximum_lengths),
        "length_kind": pick(space.length_kinds),
        "global_batch": pick(space.global_batches),
        "dense": int(rng.integers(0, 2)) * 8,
    }
    model, workload = _subject(f"fidelity-{seed}-{group}", values)
    chosen: dict[tuple, Plan] = {}
    for _ in range(100):
        if len(chosen) == PLANS_PER_GROUP:
            break
        options = {
            "ranks": pick(space.ranks),
            "checkpoint": pick(space.checkpoints),
            "sharding": pick(space.shardings),
            "precision": pick(space.precisions),
            "execution": pick(space.executions),
            "accumulation": pick((1, 1, 2)),
            "ddp": bool(rng.integers(0, 2)),
        }
        if options["ranks"] == 1:
            options |= {"sharding": "table_wise", "ddp": False}
        chosen.setdefault(tuple(options.values()), _plan(model, workload, cluster, **options))
    return list(chosen.values())


def _subject(name: str, values: dict[str, Any]) -> tuple[Model, Workload]:
    dim, kind = values["dim"], values["kind"]
    head_dim = dim // values["heads"]
    layer = LayerGroup(
        kind=kind,
        count=values["depth"],
        heads=values["heads"],
        head_dim=head_dim,
        mlp_dim=0 if kind == "hstu" else dim * values["mlp_factor"],
        divisor=float(values["maximum"]) if kind in ("hstu", "gdpa") else None,
        activation="silu" if kind == "gdpa" else None,
        block=64 if kind == "block_attention" else None,
    )
    tables = (
        TableGroup(name="event_item", rows=values["rows"], dim=values["table_dim"], pooling="sequence", sequence="history", zipf=0.8),
        TableGroup(name="event_action", rows=8, dim=16, pooling="sequence", sequence="history", zipf=0.5),
        TableGroup(
            name="pooled", rows=values["rows"], dim=values["table_dim"], count=values["num_tables"], pooling="sum", ids_per_sample=3, zipf=0.8
        ),
        TableGroup(name="bag", rows=values["rows"], dim=values["table_dim"], pooling="mean", ids_per_sample=20, zipf=0.8),
    )
    model = Model(
        name=name,
        dim=dim,
        tables=tables,
        sequences=(Sequence(name="history", layers=(layer,)),),
        num_dense_features=values["dense"],
        bottom_hidden=(32,) if values["dense"] else (),
        interaction_hidden=(2 * dim, dim),
        heads=(Head(name="like", hidden=(32,)),),
    )
    maximum = values["maximum"]
    shape = {"median": maximum / 3, "sigma": 0.8} if values["length_kind"] == "lognormal" else {}
    lengths = Lengths(kind=values["length_kind"], maximum=maximum, **shape)
    workload = Workload(
        name=name, lengths={"history": lengths}, global_batch=values["global_batch"], source=EventSource(num_events=200_000), num_steps=200
    )
    return model, workload


def _plan(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    *,
    ranks: int,
    checkpoint: str,
    sharding: str,
    precision: str,
    execution: str,
    accumulation: int,
    ddp: bool,
) -> Plan:
    layout = Layout(ddp=ranks if ddp else 1, fsdp=1 if ddp else ranks, sparse_group=ranks)
    names = [(t, n) for t in model.tables for n in t.names]
    tables = tuple(
        TablePlacement(
            table=n,
            sharding="row_wise" if sharding == "row_wise" and t.rows >= ranks else "table_wise",  # type: ignore[arg-type]
            ranks=() if sharding == "row_wise" and t.rows >= ranks else (i % ranks,),
        )
        for i, (t, n) in enumerate(names)
    )
    options = tuple(
        RegionPlan(
            region=r.name,
            options=(
                RegionOption(
                    count=r.count,
                    precision=precision,
                    checkpoint=checkpoint if r.sequence and r.count and "." in r.name and r.name.split(".")[1].isdigit() else "none",
                ),
            ),
        )
        for r in regions(model)
    )  # type: ignore[arg-type]
    plan = Plan(
        scenario=model.name,
        cluster=cluster,
        model=model,
        workload=workload,
        layout=layout,
        local_batch=workload.global_batch_on(ranks) // ranks // accumulation,
        accumulation=accumulation,
        execution=execution,  # type: ignore[arg-type]
        regions=options,
        tables=tables,
    )
    return dataclasses.replace(plan, fingerprints=plan.expected_fingerprints())
