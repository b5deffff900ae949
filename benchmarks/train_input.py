"""Histories from event files: how fast they are read and built into batches, whether a loader resumes at a sample, what training waits for them."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.results import Row
from costmodel.plan import Layout, Plan, TablePlacement
from costmodel.workload import EventSource
from planner.configure import default_plan
from planner.scenario import load_scenario
from runtime import histories, mesh, prepare
from runtime.batch import Batch
from runtime.data import Loader, open_source
from runtime.trainer import Trainer

EVENTS, USERS, ITEMS, BATCH, STEPS, RESUMED_AT = 200_000, 900, 1500, 64, 60, 23


def rows(work: Path, *, events: int = EVENTS, steps: int = STEPS) -> Iterator[Row]:
    """Of a RecBole file of `events` random events and the same events as Parquet, written to `work`."""
    inter, parquet = work / "events.inter", work / "events.parquet"
    _write(inter, events)
    found, seconds = _timed(lambda: prepare.read_inter(inter))
    yield Row(name="input: events read from a RecBole file", value=len(found) / seconds, unit="events/s", note=f"measured here, {len(found)} events")
    prepare.write_parquet(found, parquet)
    again, seconds = _timed(lambda: prepare.read_parquet(parquet))
    yield Row(name="input: events read from a Parquet file", value=len(again) / seconds, unit="events/s", note=f"measured here, {len(again)} events")
    plan = plan_of(parquet, steps)
    source, seconds = _timed(lambda: open_source(plan.model, plan.workload, seed=plan.seed))
    yield Row(name="input: start of a source whose histories are built from events", value=seconds, unit="s", better="lower",
              note=f"measured here, {len(again)} events, on every rank")
    folder = work / "histories"
    about = {"max_history": plan.workload.source.max_history, "like_threshold": plan.workload.source.like_threshold, "baselines": source.baselines}
    histories.save(histories.build(again, max_history=plan.workload.source.max_history), folder, about=about)
    prepared = dataclasses.replace(plan.workload, source=dataclasses.replace(plan.workload.source, path=str(folder)))
    mapped, seconds = _timed(lambda: open_source(plan.model, prepared, seed=plan.seed))
    yield Row(name="input: start of a source whose histories are a folder, read as samples ask", value=seconds, unit="s", better="lower",
              note=f"measured here, {len(again)} events, mapped into memory that ranks share")
    options = {"global_batch": BATCH, "num_steps": steps, "seed": 1, "epochs": 4}
    for name, prefetch in (("the caller's thread", 0), ("threads that build ahead", 4)):
        batches, seconds = _timed(lambda prefetch=prefetch: list(Loader(source, **options, prefetch=prefetch)))
        built = sum(int(length.sum()) for step in batches for batch in step for length in batch.lengths.values())
        yield Row(name=f"input: events of histories built into batches, {name}", value=built / seconds, unit="events/s",
                  note=f"measured here, {steps} steps of {BATCH} histories, {built / steps / BATCH:.0f} events each")
    from_folder, seconds = _timed(lambda: list(Loader(mapped, **options)))
    yield Row(name="input: events of histories built into batches, from a folder", value=built / seconds, unit="events/s",
              note=f"measured here, pages in memory; {sum(_same(from_folder, batches))} of {steps} batches equal those of the file")
    resumed = list(Loader(source, **options, start=RESUMED_AT * BATCH))
    same = _same(resumed, batches[RESUMED_AT:])
    yield Row(name="input: batches of a loader that resumes at a sample, equal to the undisturbed ones", value=sum(same), unit="batches",
              target=float(len(same)), note=f"measured here, resumed at sample {RESUMED_AT * BATCH}")
    started = not torch.distributed.is_initialized()
    if started:
        mesh.start(torch.device("cpu"))
    trainer = Trainer(plan, source, device=torch.device("cpu"))
    trainer.train(steps)
    measured, _ = trainer.measured()
    if started:
        mesh.leave()
    assert measured is not None
    step = measured.step_time_s.mean
    yield Row(name="input: share of a step that waits for batches, built by the caller", value=measured.phases_s["input"] / step,
              unit="share", better="lower", note=f"measured here, {plan.model.name} on one CPU rank, {step * 1e3:.1f} ms a step; a GPU's host "
                                                 "builds in a process of its own (train-h200: waiting for batches)")


def plan_of(path: Path, steps: int) -> Plan:
    """The quickstart's model on one rank, its histories from a file."""
    plan = default_plan(load_scenario("quickstart", with_variants=False))[0]
    source = EventSource(kind="parquet", path=str(path), num_events=plan.workload.source.num_events, max_history=plan.workload.source.max_history)
    load = dataclasses.replace(plan.workload, source=source, global_batch=BATCH, local_batch=None, num_steps=steps, epochs=4)
    placed = tuple(TablePlacement(table=n, sharding="table_wise", ranks=(0,)) for t in plan.model.tables for n in t.names)
    made = dataclasses.replace(plan, workload=load, layout=Layout(), local_batch=BATCH, accumulation=1, batching="jagged", tables=placed,
                               prediction={}, search={}, input_overlap=False)
    return dataclasses.replace(made, fingerprints=made.expected_fingerprints())


def _write(path: Path, events: int) -> None:
    rng = np.random.default_rng(0)
    users, items = rng.integers(USERS, size=events), rng.zipf(1.3, size=events) % ITEMS
    ratings, times = rng.integers(1, 6, size=events), np.sort(rng.integers(0, 10**8, size=events))
    lines = (f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in zip(users, items, ratings, times))
    path.write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(lines))


def _timed(call):
    begin = time.perf_counter()
    found = call()
    return found, time.perf_counter() - begin


def _same(ours: list[tuple[Batch, ...]], theirs: list[tuple[Batch, ...]]) -> list[bool]:
    return [_equal(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]


def _equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))
