"""Gate 2 in processes of this machine: recipes of one model on a synthetic stream and on MovieLens, no process group needed on one rank.

A training of so small a model waits for the host, not for the device, so several seeds train side by side, each in a process that builds the seed's
batches once for all recipes.
"""
from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.results import Row
from costmodel.plan import Plan
from costmodel.state import movielens_path
from costmodel.workload import Lengths
from planner import gates
from planner.configure import default_plan
from planner.scenario import load_scenario
from runtime.data import Loader, open_source
from runtime.kept import Builders, KeptSource, all_samples
from runtime.trainer import Trainer

# The default, and one that a few ten thousand events can resolve.
TOLERANCE, COARSE = 0.0005, 0.0025
# Tables small and rates high enough that a model learns within what a training has: one that has not hides harm.
ROWS, BAG = 128, 4
# Samples a step, factor of the learning rates, seeds that train side by side.
SIZES = {"cpu": (256, 3.0, 1), "cuda": (8192, 1.0, 5)}


def recipes(events: int, local_batch: int | None = None, *, device: str = "cpu", faster: float | None = None) -> dict[str, Plan]:
    """gem-tiny with small tables on one rank and a synthetic stream of short histories: row-wise fp8 layers, and a recipe built to fail: 4-bit
    saved activations everywhere, tensor-wise layers with 8-bit weights' gradients."""
    batch, factor, _ = SIZES[device]
    factor = faster or factor
    base, _ = default_plan(load_scenario("quickstart", with_variants=False))
    cluster = dataclasses.replace(base.cluster, devices_per_host=1)
    load = dataclasses.replace(base.workload, source=dataclasses.replace(base.workload.source, kind="synthetic", num_events=events), num_steps=None,
                               epochs=1, lengths={"history": Lengths(kind="lognormal", median=8.0, sigma=0.5, maximum=16)})
    tables = tuple(dataclasses.replace(t, sharding="table_wise", ranks=(0,)) for t in base.tables)
    load = dataclasses.replace(load, learning_rate=factor * load.learning_rate, sparse_learning_rate=factor * load.sparse_learning_rate)
    model = dataclasses.replace(base.model, tables=tuple(
        dataclasses.replace(t, rows=min(t.rows, ROWS), ids_per_sample=min(t.ids_per_sample, BAG)) for t in base.model.tables))
    base = dataclasses.replace(base, cluster=cluster, model=model, workload=load, layout=type(base.layout)(), tables=tables, accumulation=1,
                               batching="jagged", local_batch=local_batch or batch, prediction={}, search={})

    def with_(precision: dict[str, str], checkpoint: dict[str, str], **fields) -> Plan:
        regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(
            o, precision=precision.get(r.region, "bf16"), checkpoint=checkpoint.get(r.region, "none")) for o in r.options)) for r in base.regions)
        return dataclasses.replace(base, regions=regions, **fields)

    low = ("history.0", "interaction")
    everywhere = {r.region: "quantized4" for r in base.regions}
    return {"row-wise fp8": with_(dict.fromkeys(low, "fp8_row"), {}),
            "built to fail": with_(dict.fromkeys(low, "fp8_tensor"), everywhere, recipe=("low_weight_gradients",))}


def quality(events: int, seeds: int) -> list[Row]:
    """Gate 2 of both recipes on the synthetic stream."""
    device = "cuda" if torch.cuda.device_count() else "cpu"
    start = time.perf_counter()
    found = judge(recipes(events, device=device), seeds, events, device=device)
    print(f"gate 2: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    rows = [_verdict_row(f"gate 2, {name}: relative NE over bf16", gate, events, "the synthetic stream", device) for name, gate in found.items()]
    for allowed in (TOLERANCE, COARSE):
        verdicts = {name: gates.decide(gate.differences, allowed).verdict for name, gate in found.items()}
        decided = sum(v != "inconclusive" for v in verdicts.values())
        what = ", ".join(f"{name}: {v}" for name, v in verdicts.items())
        rows.append(Row(name=f"gate 2: recipes with a verdict at {allowed:.2%}", value=decided, unit="of 2", target=2, note=f"measured here; {what}"))
    return [*rows,
            Row(name="gate 2: events trained a recipe", value=events * seeds, unit="events", target=20e6, note="measured here, " + "; ".join(
                f"{name}: {_still_needed(gate, events)}" for name, gate in found.items()))]


def movielens(events: int, seeds: int) -> list[Row]:
    """Gate 2 of the mild recipe on MovieLens-100K, the first `events` of each seed's order, all held-out events."""
    if not movielens_path().exists():
        print("movielens: not prepared; `planner data movielens`, then again", file=sys.stderr)
        return []
    plan = recipes(events)["row-wise fp8"]
    base, _ = default_plan(load_scenario("quickstart", with_variants=False))
    load = dataclasses.replace(base.workload, num_steps=events // plan.local_batch)
    gate = judge({"MovieLens": dataclasses.replace(plan, model=base.model, workload=load)}, seeds, events)["MovieLens"]
    return [_verdict_row("gate 2 on MovieLens, row-wise fp8: relative NE over bf16", gate, events, "MovieLens-100K", "cpu")]


def judge(plans: dict[str, Plan], seeds: int, events: int, *, device: str = "cpu", workers: int | None = None) -> dict[str, gates.Gate]:
    """The quality gate of each plan. Trainings that two of them share run once."""
    variants = {p.identity(): p for plan in plans.values() for p in (gates.restricted(plan, ()), plan)}
    first = next(iter(plans.values())).seed
    known: dict[tuple[int, str], gates.Trained] = {}

    def wanted(seed: int) -> list[Plan]:
        return [dataclasses.replace(plan, seed=seed, prediction={}, search={}, emulated=()) for plan in variants.values()]

    def note(seed: int, found: Sequence[gates.Trained]) -> None:
        known.update({(seed, plan.identity()): one for plan, one in zip(wanted(seed), found)})

    numbers, workers = range(first, first + seeds), workers or SIZES[device][2]
    if workers == 1:
        for seed in numbers:
            note(seed, train_seed(wanted(seed), device))
    else:
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            asked = {pool.submit(train_seed, wanted(seed), device): seed for seed in numbers}
            for done in concurrent.futures.as_completed(asked):
                note(asked[done], done.result())

    def train(asked: Sequence[tuple[Plan, str]]) -> list[gates.Trained]:
        return [known[plan.seed, plan.identity()] for plan, _ in asked]

    return {name: gates.validate(dataclasses.replace(plan, emulated=("emulated",)), train, seeds=seeds, tolerance=TOLERANCE, events=events,
                                 blame=False).quality for name, plan in plans.items()}


def train_seed(plans: Sequence[Plan], device: str) -> list[gates.Trained]:
    """(NE of the worst task, seconds a step) of each plan, all of one seed and data, whose batches two processes build once."""
    one, begin = plans[0], time.perf_counter()
    plain = open_source(one.model, one.workload, seed=one.seed)
    source, found = KeptSource(plain), []
    if device == "cuda":
        builders = Builders({one.seed: plain}, processes=2)
        samples = list(all_samples(Loader.of_plan(one, plain, rank=0), plain, batch=one.local_batch))
        for asked, batch in zip(samples, builders.build(one.seed, samples)):
            source.keep(asked, batch)
        builders.close()
    said = [f"batches {time.perf_counter() - begin:.1f} s"]
    for plan in plans:
        start = time.perf_counter()
        trainer = Trainer(plan, source, device=torch.device(device, 0) if device == "cuda" else torch.device(device))
        trainer.train()
        seconds = time.perf_counter() - start
        found.append((max(trainer.evaluate().values()), seconds / max(1, trainer.step)))
        said.append(f"NE {found[-1][0]:.5f} ({found[-1][0] / found[0][0] - 1:+.3%}) after {trainer.step} steps in {seconds:.1f} s")
    print(f"seed {one.seed}: {'; '.join(said)}", file=sys.stderr, flush=True)
    return found


def _verdict_row(name: str, gate: gates.Gate, events: int, what: str, device: str) -> Row:
    note = (f"{gate.verdict}: 95 % bounds {gate.lower:+.5%} to {gate.upper:+.5%}, allowed {TOLERANCE:.2%}; {len(gate.differences)} seeds x "
            f"{events:,} events of {what}, on {device}; {_still_needed(gate, events)}")
    return Row(name=name, value=gate.mean, unit="ratio", better="lower", note=note)


def _still_needed(gate: gates.Gate, events: int) -> str:
    """Events beyond those used that a verdict at the default tolerance needs, were mean and deviation to stay."""
    used = len(gate.differences) * events
    if gate.verdict != "inconclusive":
        return f"{used:,} events used, 0 more needed"
    return f"{used:,} events used, " + (f"{gate.events_needed - used:,} more would decide" if gate.events_needed else gate.reason)
