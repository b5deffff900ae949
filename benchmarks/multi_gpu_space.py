"""The plans of `benchmarks.multi_gpu`: what a few GPUs of one host are to train, under every layout, and the same on one of them.

    full    gem-full, every kind of layer      bf16; fp32 on a smaller batch
    tables  97 tables beside few layers        bf16

`NAME-one` is a workload on one GPU with the same global batch, whose losses the others must repeat, as far as `NAME-one-micro` does, the same in two
micro-batches: sums in another order, and whatever a training makes of that; `NAME-local` one with the batch that a rank has
in the others, of which each is to be a share (the scaling ratio). Tables lie row-wise where a plan says nothing else.
On a CPU the same plans are made of models shrunk to a test's size.
"""
from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.cluster import Cluster
from costmodel.codec import decode
from costmodel.model import Model
from costmodel.plan import Layout, Plan, RegionPlan, TablePlacement
from costmodel.regions import default_region_plans
from costmodel.workload import EventSource, Workload

if TYPE_CHECKING:
    from planner.scenario import ResolvedScenario

SCENARIOS = {"full": "scenarios/gem-2xh200.yaml", "tables": "scenarios/gem-2xh200-tables.yaml"}
# fp32 on tensor cores' slow side: a twelfth of the batch takes about as long.
FP32_BATCH = 16
# Parts of a launch (`benchmarks.multi_gpu_ranks`), and a file that is there while kernels are compiled beside it.
PARTS, WARMING = ("ops", "alone", "collectives", "predict", "plans", "links"), "warming"
# Different steps of batches that a run repeats.
BATCHES = 5
# Blocks before the end of backward at which whole shards are gathered for the update, where they are gathered ahead.
AHEAD = 2
TINY_BATCH = {"full": 8, "tables": 16, "full-fp32": 8}
# What a seed draws of a subject's workload, one value each: samples of a global batch, and of `full` the lengths of histories. The workloads without
# a seed were looked at while the model was made, those of a seed are drawn to be scored.
DRAWN_BATCH = {"full": (256, 288, 320, 352), "full-fp32": (16, 24, 32), "tables": (4096, 6144, 8192)}
DRAWN_MEDIAN, DRAWN_SIGMA = (520.0, 600.0, 680.0), (0.6, 0.7, 0.8)
# Learning rates at which losses of the first steps fall: equal losses are not compared where a training diverges.
DRAWN_RATE, DRAWN_SPARSE_RATE = 1e-4, 2e-3


@functools.cache
def scenario(subject: str, device: str, ranks: int = 2) -> ResolvedScenario:
    """What the search of a subject is asked: on `ranks` GPUs, or shrunk on so many CPU ranks. Needs what reads scenarios, which a GPU machine may
    lack."""
    from planner.scenario import load_scenario

    found = load_scenario(SCENARIOS[subject], with_variants=False)
    if device == "cuda":
        return dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, devices_per_host=ranks))
    local = load_scenario("scenarios/quickstart.yaml", with_variants=False).cluster
    workload = dataclasses.replace(_tiny_workload(found.workload), global_batch=TINY_BATCH[subject])
    return dataclasses.replace(found, cluster=dataclasses.replace(local, devices_per_host=ranks, memory_budget=None), model=_tiny_model(found.model),
                               workload=workload)


def drawn(workload: Workload, name: str, seed: int | None) -> Workload:
    """The workload of subject `name` that `seed` draws; without a seed as it is."""
    if seed is None:
        return workload
    own, lengths = random.Random(f"{name} {seed}"), random.Random(f"lengths {seed}")
    median, sigma = lengths.choice(DRAWN_MEDIAN), lengths.choice(DRAWN_SIGMA)
    specs = {n: dataclasses.replace(spec, median=median, sigma=sigma) if spec.kind == "lognormal" else spec for n, spec in workload.lengths.items()}
    return dataclasses.replace(workload, name=f"{workload.name}-seed-{seed}", global_batch=own.choice(DRAWN_BATCH[name]), lengths=specs,
                               learning_rate=DRAWN_RATE, sparse_learning_rate=DRAWN_SPARSE_RATE)


def plans(device: str, ranks: int = 2, seed: int | None = None) -> dict[str, Plan]:
    """Every declared plan by name, most wanted first, on the workloads that `seed` draws."""
    full, fp32, tables = (functools.partial(_plan, *_subject(name, device, ranks, seed), seed=seed or 0) for name in ("full", "full-fp32", "tables"))
    whole = Layout(fsdp=ranks, sparse_group=ranks)
    replicas = dataclasses.replace(whole, sparse_group=1, sparse_replicas=ranks)
    local = {name: _a_ranks(plan, ranks) for name, plan in (("full", full), ("tables", tables))}
    low = "bf16" if device == "cuda" else "fp32"
    return {
        "full-one": full(Layout(), precision=low),
        "tables-one": tables(Layout(), precision=low),
        "full-one-micro": full(Layout(), precision=low, accumulation=2),
        "tables-one-micro": tables(Layout(), precision=low, accumulation=2),
        "full-local": local["full"](Layout(), precision=low),
        "tables-local": local["tables"](Layout(), precision=low),
        "full-fsdp": full(whole, precision=low),
        "tables-fsdp": tables(whole, precision=low),
        "full-ddp": full(Layout(ddp=ranks, sparse_group=ranks), precision=low),
        "full-fsdp-full": full(whole, precision=low, checkpoint="full"),
        "full-ep": full(dataclasses.replace(whole, ep=2), precision=low),
        "tables-fully-sharded-2d": tables(dataclasses.replace(replicas, fully_sharded_2d=True), precision=low),
        "tables-2d": tables(replicas, precision=low),
        "full-ep-all-to-all": full(dataclasses.replace(whole, ep=2, expert_all_to_all=True), precision=low, checkpoint="selective"),
        "full-overlap-micro": full(whole, precision=low, accumulation=2, input_overlap=True),
        "tables-table-wise": tables(Layout(ddp=ranks, sparse_group=ranks), precision=low, sharding="table_wise"),
        "tables-2d-ahead": dataclasses.replace(tables(replicas, precision=low), tables_ahead=AHEAD),
        "tables-fully-sharded-2d-ahead": dataclasses.replace(tables(dataclasses.replace(replicas, fully_sharded_2d=True), precision=low),
                                                             tables_ahead=AHEAD),
        # last: their kernels take longest to compile
        "full-fp32-one": fp32(Layout(), precision="fp32"),
        "full-fp32-fsdp": fp32(whole, precision="fp32"),
    }


def _a_ranks(made: functools.partial, ranks: int) -> functools.partial:
    """The same on the batch of one of so many ranks."""
    model, workload, cluster = made.args
    return functools.partial(made.func, model, dataclasses.replace(workload, global_batch=workload.global_batch // ranks), cluster, **made.keywords)


def calibration_plans(device: str, seed: int | None = None) -> list[Plan]:
    """The plans whose shapes are timed on one GPU, in turn by the ranks: a rank's share of each subject."""
    made = plans(device, seed=seed)
    return [_share(made[name]) for name in ("full-fsdp", "tables-fsdp", "full-overlap-micro", "full-fp32-fsdp")]


def warm_plans(device: str, seed: int | None = None) -> list[Plan]:
    """Plans of one rank and a rank's share of a batch that together launch every kernel of the declared ones: a layer each, so that all compile at
    once."""
    full, tables = (scenario(name, device) for name in SCENARIOS)
    layers = [layer for s in full.model.sequences for layer in s.layers]
    models = [_few_rows(dataclasses.replace(full.model, sequences=tuple(dataclasses.replace(s, layers=(layer,)) for s in full.model.sequences),
                                            interaction_layers=(), feature_dim=0)) for layer in layers]
    first = tuple(dataclasses.replace(s, layers=s.layers[:1]) for s in full.model.sequences)
    models.append(_few_rows(dataclasses.replace(full.model, sequences=first)))
    declared = plans(device, seed=seed)
    share = {name: (plan.local_batch, plan.workload) for name, plan in declared.items()}
    made = [(m, full, p, share[name]) for p, name in (("bf16", "full-fsdp"), ("fp32", "full-fp32-fsdp")) for m in models]
    made.append((_few_rows(tables.model), tables, "bf16", share["tables-fsdp"]))
    return [_plan(model, dataclasses.replace(workload, global_batch=batch), found.cluster, Layout(), precision=precision)
            for model, found, precision, (batch, workload) in made]


def _few_rows(model: Model) -> Model:
    return dataclasses.replace(model, tables=tuple(dataclasses.replace(t, rows=10_000) for t in model.tables))


def _share(plan: Plan) -> Plan:
    """A rank's batch on one rank that holds every table."""
    names = [n for t in plan.model.tables for n in t.names]
    workload = dataclasses.replace(plan.workload, global_batch=plan.local_batch, local_batch=None)
    return dataclasses.replace(plan, layout=Layout(), accumulation=1, input_overlap=False, workload=workload, fingerprints={},
                               tables=tuple(TablePlacement(table=n, sharding="table_wise", ranks=(0,)) for n in names))


def warming(name: str) -> str:
    """The file that is there while the kernels of a plan are compiled; nothing waits for the few of `tables`."""
    return f"{WARMING}-{ {'full': 'bf16', 'full-fp32': 'fp32'}.get(subject(name), subject(name)) }"


def subject(name: str) -> str:
    """The subject of a plan: its model and batch, which only plans that share both are compared by."""
    return "full-fp32" if name.startswith("full-fp32") else name.split("-")[0]


def subject_workload(name: str, device: str, ranks: int, seed: int | None) -> Workload:
    """The workload of subject `name`."""
    return _subject(name, device, ranks, seed)[1]


def _subject(name: str, device: str, ranks: int, seed: int | None = None) -> tuple[Model, Workload, Cluster]:
    found = scenario(name.split("-")[0], device, ranks)
    workload = found.workload
    if name == "full-fp32":
        workload = dataclasses.replace(workload, name="fp32", global_batch=FP32_BATCH if device == "cuda" else TINY_BATCH[name])
    return found.model, drawn(workload, name, seed if device == "cuda" else None), found.cluster


def _plan(model: Model, workload: Workload, cluster: Cluster, layout: Layout, *, precision: str, checkpoint: str = "none", accumulation: int = 1,
          sharding: str = "row_wise", input_overlap: bool = False, seed: int = 0) -> Plan:
    names, group = [n for t in model.tables for n in t.names], layout.sparse_group
    whole = sharding == "row_wise" and group > 1
    tables = tuple(TablePlacement(table=n, sharding="row_wise" if whole else "table_wise", ranks=() if whole else (i % group,))
                   for i, n in enumerate(names))
    regions = tuple(_checkpointed(r, checkpoint) for r in default_region_plans(model, precision=precision))
    batch = workload.global_batch_on(layout.world_size)
    plan = Plan(scenario=model.name, cluster=cluster, model=model, workload=workload, layout=layout, accumulation=accumulation,
                local_batch=batch // layout.world_size // accumulation, input_overlap=input_overlap, regions=regions, tables=tables,
                transport="nccl" if cluster.device.kind == "gpu" else "gloo", seed=seed)
    return dataclasses.replace(plan, fingerprints=plan.expected_fingerprints())


def _checkpointed(region: RegionPlan, policy: str) -> RegionPlan:
    """Policies are for layers of histories, whose activations are most of what is kept."""
    if not region.region.split(".")[-1].isdigit() or region.region.startswith(("interaction", "experts")):
        return region
    return dataclasses.replace(region, options=tuple(dataclasses.replace(o, checkpoint=policy) for o in region.options))


def _tiny_model(model: Model) -> Model:
    heads = {"heads": 2, "head_dim": 16}
    shrink: Callable = lambda g: dataclasses.replace(g, mlp_dim=min(g.mlp_dim, 64), **(heads if g.heads else {}))
    return dataclasses.replace(
        model, dim=32, bottom_hidden=(32,), interaction_hidden=(32,), feature_dim=16 if model.feature_dim else model.feature_dim,
        sequences=tuple(dataclasses.replace(s, layers=tuple(map(shrink, s.layers))) for s in model.sequences),
        interaction_layers=tuple(map(shrink, model.interaction_layers)), expert_layers=tuple(map(shrink, model.expert_layers)),
        heads=tuple(dataclasses.replace(h, hidden=(8,)) for h in model.heads),
        tables=tuple(dataclasses.replace(t, rows=100, dim=16, count=min(t.count, 4)) for t in model.tables))


def _tiny_workload(workload: Workload) -> Workload:
    lengths = {n: dataclasses.replace(spec, maximum=24, minimum=1, **({"median": 8.0} if spec.median else {}))
               for n, spec in workload.lengths.items()}
    return dataclasses.replace(workload, lengths=lengths, source=EventSource(num_events=2000))


def recorded(folder: Path) -> Plan:
    """The plan that `folder` keeps, whichever version of this repository wrote it: options that are newer have their defaults, and its hash does not
    count them."""
    body = json.loads((folder / "plan.json").read_text())
    body.pop("content_hash", None)
    return decode(Plan, body)


def describe(plans: dict[str, Plan]) -> str:
    """One paragraph for the report of these plans."""
    words = {}
    for name, plan in sorted(plans.items(), key=lambda item: -item[1].layout.world_size):
        lengths = next(iter(plan.workload.lengths.values()))
        precision = "fp32" if subject(name) == "full-fp32" else "bf16"
        words.setdefault(subject(name), f"{plan.model.name} ({precision}, global batch {plan.workload.global_batch}, histories of about "
                                        f"{lengths.mean():.0f} events)")
    return (f"{', '.join(words.values())} on two H200: FSDP, DDP, expert parallelism by all-gather and by all-to-all, a sparse group over both, "
            "plain and fully sharded 2D, recomputation none, selective and full, two micro-batches with ids ahead; the planner's first and "
            "second choice for gem-full; and each workload on one of the GPUs")
