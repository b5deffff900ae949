"""Gate 2 in processes of this machine: recipes of one model on a synthetic stream and on MovieLens, no process group needed on one rank.

A training of so small a model waits for the host, not for the device, so several seeds train side by side, each in a process that builds the seed's
batches once for all recipes.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Row
from costmodel.model import TableGroup
from costmodel.plan import Plan
from costmodel.state import movielens_path
from costmodel.workload import Lengths, Workload
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
# Samples a step, and seeds that train side by side.
SIZES = {"cpu": (256, 1), "cuda": (8192, 8)}
FASTER = 3.0
# Of the stream's model: tables that say most of a label, learned within a few hundred steps. What is left to learn is small by then, and so is what
# two trainings differ by that differ in roundings alone.
FEATURES, FEATURE_ROWS, FEATURE_DIM = 6, 256, 32


def recipes(events: int, local_batch: int | None = None) -> dict[str, Plan]:
    """gem-tiny with small tables on one rank and a synthetic stream of short histories: row-wise fp8 layers."""
    base, _ = default_plan(load_scenario("quickstart", with_variants=False))
    load = dataclasses.replace(base.workload, lengths={"history": Lengths(kind="lognormal", median=8.0, sigma=0.5, maximum=16)})
    tables = tuple(dataclasses.replace(t, sharding="table_wise", ranks=(0,)) for t in base.tables)
    load = dataclasses.replace(load, learning_rate=FASTER * load.learning_rate, sparse_learning_rate=FASTER * load.sparse_learning_rate)
    model = dataclasses.replace(base.model, tables=tuple(
        dataclasses.replace(t, rows=min(t.rows, ROWS), ids_per_sample=min(t.ids_per_sample, BAG)) for t in base.model.tables))
    base = dataclasses.replace(base, model=model, tables=tables, layout=type(base.layout)())
    return {"row-wise fp8": with_options(_on_the_stream(base, load, events, local_batch or SIZES["cpu"][0]),
                                         dict.fromkeys(("history.0", "interaction"), "fp8_row"))}


def stream_recipes(events: int, *, device: str = "cpu", local_batch: int | None = None) -> dict[str, Plan]:
    """A model of pooled features on one rank: row-wise fp8 in everything but the heads, and a recipe built to fail: tensor-wise scales of the first
    step kept for good, weights' gradients in 8 bits, 4-bit saved activations."""
    scenario = load_scenario("quickstart", with_variants=False)
    features = tuple(TableGroup(name=f"feature_{i}", rows=FEATURE_ROWS, dim=FEATURE_DIM, pooling="sum", ids_per_sample=1, zipf=0.5)
                     for i in range(FEATURES))
    model = dataclasses.replace(scenario.model, name="gate", sequences=(), tables=features, num_dense_features=16, bottom_hidden=(64, 32),
                                interaction_hidden=(256, 128))
    load = dataclasses.replace(scenario.workload, lengths={}, sparse_learning_rate=FASTER * scenario.workload.sparse_learning_rate)
    cluster = dataclasses.replace(scenario.cluster, devices_per_host=1, memory_budget=None)
    base, _ = default_plan(dataclasses.replace(scenario, model=model, workload=load, cluster=cluster))
    base = _on_the_stream(base, load, events, local_batch or SIZES[device][0])
    return {"row-wise fp8": with_options(base, dict.fromkeys(("bottom", "interaction"), "fp8_row")),
            "built to fail": with_options(base, {"interaction": "fp8_tensor"}, checkpoint="quantized4",
                                          recipe=("low_weight_gradients", "static_scales"))}


def _on_the_stream(plan: Plan, load: Workload, events: int, local_batch: int) -> Plan:
    load = dataclasses.replace(load, source=dataclasses.replace(load.source, kind="synthetic", num_events=events), num_steps=None, epochs=1)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, devices_per_host=1), workload=load, accumulation=1, batching="jagged",
                               local_batch=local_batch, prediction={}, search={})


def with_options(plan: Plan, precision: dict[str, str], *, checkpoint: str = "none", **fields: Any) -> Plan:
    """The plan with these precisions, bf16 elsewhere, and one checkpoint policy."""
    regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(
        o, precision=precision.get(r.region, "bf16"), checkpoint=checkpoint) for o in r.options)) for r in plan.regions)  # type: ignore[arg-type]
    return dataclasses.replace(plan, regions=regions, **fields)


def quality(events: int, seeds: int, *, go: Path | None = None, local_batch: int | None = None, workers: int | None = None,
            seconds: float | None = None) -> list[Row]:
    """Gate 2 of both recipes on the synthetic stream. `go`: see `train_seed`; `seconds`: no seed is waited for longer, those that are done decide."""
    device = "cuda" if torch.cuda.device_count() else "cpu"
    start = time.perf_counter()
    found = judge(stream_recipes(events, device=device, local_batch=local_batch), seeds, events, device=device,
                  workers=workers or min(seeds, SIZES[device][1]), go=go, seconds=seconds)
    print(f"gate 2: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    seeds = min(len(gate.differences) for gate in found.values())
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


def judge(plans: dict[str, Plan], seeds: int, events: int, *, device: str = "cpu", workers: int | None = None, go: Path | None = None,
          seconds: float | None = None) -> dict[str, gates.Gate]:
    """The quality gate of each plan. Trainings that two of them share run once."""
    wanted = {plan.identity(): plan for own in plans.values() for plan in (gates.restricted(own, ()), own)}
    first, workers, until = next(iter(plans.values())).seed, workers or SIZES[device][1], time.perf_counter() + (seconds or 1e9)
    known: dict[int, dict[str, float]] = {}

    def asked(seed: int) -> list[Plan]:
        return [dataclasses.replace(plan, seed=seed) for plan in wanted.values()]

    def note(seed: int, found: Sequence[gates.Trained]) -> None:
        known[seed] = dict(zip(wanted, (ne for ne, _ in found)))

    if workers == 1:
        for seed in range(first, first + seeds):
            if time.perf_counter() < until:
                note(seed, train_seed(asked(seed), device, go))
    else:
        pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        running = {pool.submit(train_seed, asked(seed), device, go): seed for seed in range(first, first + seeds)}
        with contextlib.suppress(concurrent.futures.TimeoutError):
            for done in concurrent.futures.as_completed(running, timeout=seconds):
                note(running[done], done.result())
        for process in list((pool._processes or {}).values()) if len(known) < seeds else ():
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)

    def differences(plan: Plan) -> list[float]:
        return [known[seed][plan.identity()] / known[seed][gates.restricted(plan, ()).identity()] - 1 for seed in sorted(known)]

    return {name: gates.decide(differences(plan), TOLERANCE, events=events) for name, plan in plans.items()}


def train_seed(plans: Sequence[Plan], device: str, go: Path | None = None) -> list[gates.Trained]:
    """(NE of the worst task, seconds a step) of each plan, all of one seed and data, whose batches two processes build once. go: a file to wait for
    when batches are built and kernels compiled, so that what else is measured on the device is not disturbed."""
    one, begin = plans[0], time.perf_counter()
    plain = open_source(one.model, one.workload, seed=one.seed)
    source, found = KeptSource(plain), []
    if device == "cuda":
        builders = Builders({one.seed: plain}, processes=2)
        samples = list(all_samples(Loader.of_plan(one, plain, rank=0), plain, batch=one.local_batch))
        for asked, batch in zip(samples, builders.build(one.seed, samples)):
            source.keep(asked, batch)
        builders.close()
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if go is not None:
        for plan in plans:
            warm = Trainer(plan, source, device=on)
            warm.train(1)
            warm.evaluate()
        print(f"seed {one.seed}: ready after {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        while not go.exists():
            time.sleep(0.2)
    said = [f"batches {time.perf_counter() - begin:.1f} s"]
    for plan in plans:
        start = time.perf_counter()
        trainer = Trainer(plan, source, device=on)
        trainer.train()
        seconds = time.perf_counter() - start
        found.append((max(trainer.evaluate().values()), seconds / max(1, trainer.step)))
        said.append(f"NE {found[-1][0]:.5f} ({found[-1][0] / found[0][0] - 1:+.3%}) after {trainer.step} steps in {seconds:.1f} s")
    print(f"seed {one.seed}: {'; '.join(said)}", file=sys.stderr, flush=True)
    return found


def _verdict_row(name: str, gate: gates.Gate, events: int, what: str, device: str) -> Row:
    bounds = "none" if gate.lower is None or gate.upper is None else f"{gate.lower:+.5%} to {gate.upper:+.5%}"
    note = (f"{gate.verdict}: 95 % bounds {bounds}, allowed {TOLERANCE:.2%}; {len(gate.differences)} seeds x "
            f"{events:,} events of {what}, on {device}; {_still_needed(gate, events)}")
    return Row(name=name, value=gate.mean, unit="ratio", better="lower", note=note)


def _still_needed(gate: gates.Gate, events: int) -> str:
    """Events beyond those used that a verdict at the default tolerance needs, were mean and deviation to stay."""
    used = len(gate.differences) * events
    if gate.verdict != "inconclusive":
        return f"{used:,} events used, 0 more needed"
    return f"{used:,} events used, " + (f"{gate.events_needed - used:,} more would decide" if gate.events_needed else gate.reason)
