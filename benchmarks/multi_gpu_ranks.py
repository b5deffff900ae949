"""What each rank of `benchmarks.multi_gpu` does, under torchrun, part after part in one process:

    ops          a rank's own share of the subjects' ops, on its own device
    alone        plans of one rank, dealt to the ranks
    collectives  collectives, even and uneven, what FSDP2 and the sparse exchange do around them, contention
    predict      the plans anew, from the samples that are there by then
    plans        those of all ranks, in the order of plans.json
    links        copies from the host, an all-gather by the copy engines, contention by CTAs

`ops` comes before the ranks know each other, the others in the order asked, a part that is asked twice takes the second time what was not compiled
the first time. Without torchrun `--warm PLAN` trains two steps and leaves compiled kernels in Triton's cache.

Rank 0 says which plan is next, so all ranks stop at the same one when the time is over. A plan that fails is recorded and the next one begins in the
same process group; where it failed on some ranks only, hangs, or left a collective that no rank answers, `multi_gpu_guard` ends the job, which is
started anew behind that plan.

A plan's batches are built before its first step and repeated: device, host and links are scored here, the loader is elsewhere
(`benchmarks.fidelity`). The last `TRACED` steps run under the profiler and are in no other figure.
"""
from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import functools
import json
import math
import os
import re
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import results
from benchmarks.fidelity_gpu import MEASURED, _empty
from benchmarks.multi_gpu_guard import LIMIT, Guard
from benchmarks.multi_gpu_space import BATCHES, PARTS, warming
from costmodel.codec import content_hash, encode
from costmodel.plan import Layout, Plan
from costmodel.runresult import PHASES
from costmodel.samples import CONSTANT_PREFIX, Sample, read_samples, write_samples
from runtime import cores, mesh
from runtime.batch import Batch
from runtime.data import open_source
from runtime.microbench import collectives, contention, exchange, gpu, peercopy
from runtime.microbench.__main__ import Session
from runtime.microbench.environment import environment
from runtime.microbench.timing import summarize
from runtime.microbench.warm import run_blocks
from runtime.trainer import WARMUP_STEPS, Trainer

# Seconds of measured steps that a run aims at, its bounds [steps], different batches that it repeats, traced steps.
RUN_SECONDS, MIN_STEPS, MAX_STEPS, TRACED = 0.8, 8, 60, 3
# Steps after the warm-up that no figure holds; every batch has its turn until then.
SETTLING = BATCHES - WARMUP_STEPS
# Of a rank's own ops: seconds in all and a point; of peer copies, before they are given up.
OP_SECONDS, POINT_SECONDS, PEER_SECONDS = 36.0, 0.02, 25.0
# That plans leave to parts behind them: to `links` for all of it but contention by CTAs.
RESERVED = {"collectives": 13.0, "links": 8.0}
STACKS_EVERY = 20


# --- calibrate ---


class Calibrating:
    """Samples of this job, written by rank 0 after every part."""

    def __init__(self, work: Path, meshes: mesh.Meshes, device: torch.device, *, until: float = math.inf, resume: bool = False) -> None:
        """With `resume` what an earlier job has written stays."""
        self.until = until
        self.work, self.meshes, self.session = work, meshes, Session(device, meshes, math.inf, 0.02)
        self.notes: dict[str, Any] = {"beside": [], "copies": {}, "failed": {}, "uneven": []}
        if resume and (work / "beside.json").exists() and (work / "collectives.jsonl").exists():
            self.notes = json.loads((work / "beside.json").read_text()) | {"failed": {}}
            self.session.samples += read_samples(work / "collectives.jsonl")[1]

    def keep(self, timings: Iterator[tuple], *, variant: str = "") -> None:
        for kind, features, timing in timings:
            self.session.keep(kind, "step", features, timing, variant=variant)

    def uneven(self, found: Iterator[tuple[float, float, Any]]) -> None:
        for num_bytes, share, timing in found:
            self.notes["uneven"].append([num_bytes, share, timing.seconds])

    def exchanged(self, found: dict[str, tuple[float, float, float]]) -> None:
        """What the main thread spends on a sparse exchange."""
        self.notes["exchange_host"] = found
        self.hosts({f"exchange:{phase}{what}": seconds for phase, parts in found.items() for what, seconds in zip(("", ":group", ":shard"), parts)})

    def units(self) -> None:
        """What FSDP2 does around a unit's collectives."""
        self.keep(collectives.unit_timings(self.meshes, repeats=6 if self._gpu else 4))
        if self._gpu:
            self.hosts(collectives.unit_hosts(self.session.samples))
            ranks = self.meshes.world_size
            replicas = mesh.build_meshes(Layout(ddp=ranks, sparse_group=ranks), self.session.device)
            whole = [Sample(op=kind, phase="step", features=features, seconds=timing.seconds, host_seconds=timing.host_seconds)
                     for kind, features, timing in collectives.unit_timings(replicas, repeats=4)]
            self.hosts({name.replace(":", "@1:") if ":" in name else f"{name}@1": seconds
                        for name, seconds in collectives.unit_hosts(whole).items() if name.startswith("fsdp")})

    def cores(self) -> None:
        """How unlike the cores are that ranks run on at one time."""
        found = list(cores.speeds(cores.own_part(sorted(os.sched_getaffinity(0)), self.meshes.rank, self.meshes.world_size)).values())
        everyone: list[list[float]] = [[]] * self.meshes.world_size
        dist.all_gather_object(everyone, found, group=mesh.background_group())
        self.notes["cores"] = everyone
        self.hosts({"spread": cores.spread([seconds for one in everyone for seconds in one])})

    def hosts(self, figures: dict[str, float]) -> None:
        """Constants of `costmodel.hosttime`."""
        for name, seconds in figures.items():
            self.session.keep(f"{CONSTANT_PREFIX}host", "step", {}, summarize([seconds]), variant=name)

    def beside(self, found: Iterator[contention.Beside], transport: str) -> None:
        """The share of NCCL's own choice of CTAs, and of no CTA at all, become constants."""
        for one in found:
            self.notes["beside"].append({**encode(one), "measured": one.measured})
            if one.ctas in (None, 0) and one.measured:
                self.session.keep(f"{CONSTANT_PREFIX}collective_share", "step", {}, one.share, variant=f"{transport}/{one.kind}")

    def part(self, name: str, run: Callable[[], None]) -> None:
        """One part, while there is time; what fails is noted and the next part begins. All ranks fail alike, or the job ends by its collectives'
        timeout."""
        if not _agreed(time.time() < self.until):
            return _say(f"out of time before {name}", self.meshes.rank)
        begin = time.perf_counter()
        try:
            run()
        except Exception as error:  # an interface that this version of torch has not, say
            self.notes["failed"][name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if self.meshes.rank == 0:
            samples = [dataclasses.replace(s, active_ranks=1) for s in self.session.samples] if self._gpu else self.session.samples
            write_samples(self.work / "collectives.jsonl", environment(self.session.device), samples)
            (self.work / "beside.json").write_text(json.dumps(self.notes) + "\n")
            _say(f"{name}: {time.perf_counter() - begin:.1f} s, {len(samples)} samples" + (
                f"; failed: {self.notes['failed'][name]}" if name in self.notes["failed"] else ""))

    @property
    def _gpu(self) -> bool:
        return self.session.device.type == "cuda"


def calibrate(job: Calibrating) -> None:
    """What plans on several ranks are made of."""
    meshes, device, cuda = job.meshes, job.session.device, job.session.device.type == "cuda"
    job.part("collectives", lambda: job.keep(collectives.collective_timings(meshes, sizes=collectives.QUICK_SIZES, seconds=0.03)))
    if cuda:
        job.part("cores", job.cores)
        job.part("uneven", lambda: job.uneven(collectives.uneven_timings(meshes)))
    job.part("units", job.units)
    job.part("shards", lambda: job.exchanged(exchange.host_seconds(meshes)))
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") if cuda else ("all_gather",)
    job.part("contention", lambda: job.beside(contention.beside_compute(meshes, repeats=5 if cuda else 1, kinds=kinds), "nccl" if cuda else "gloo"))
    _empty(device)


def links(job: Calibrating) -> None:
    """What is particular to GPUs and their links. Comes last: mapping a peer's memory may hang, and then the job ends, everything else written; the
    contention by CTAs takes longest, and is the first that a short launch does without."""
    meshes = job.meshes
    if job.session.device.type != "cuda":
        return
    job.part("copies", lambda: job.notes["copies"].update(contention.host_copies(meshes)))
    watch = threading.Timer(PEER_SECONDS, lambda: os._exit(0))
    watch.daemon = True
    watch.start()
    job.part("peer copies", lambda: job.keep(peercopy.gather_timings(meshes), variant=peercopy.TRANSPORT))
    job.part("peer copies beside compute", lambda: job.beside(peercopy.gather_beside(meshes), peercopy.TRANSPORT))
    watch.cancel()
    job.part("CTAs", lambda: job.beside(contention.by_ctas(meshes), "nccl"))


def own_ops(work: Path, plans: list[Plan], device: torch.device, rank: int, *, until: float) -> None:
    """Blocks, tables and ops of this rank's subjects on its own device, as long as there is time."""
    samples: list[Sample] = []
    begin, share = time.time(), 0.55
    for number, plan in enumerate(plans):
        _collect(samples, _shapes(plan, device), until=begin + (until - begin) * share * (number + 1) / len(plans))
        _empty(device)
    _collect(samples, gpu.op_samples(plans, device, points=0.3, seconds=POINT_SECONDS / 2, until=math.inf), until=until)
    write_samples(work / f"ops-{rank}.jsonl", environment(device), samples)
    _empty(device)
    _say(f"rank {rank}: {len(samples)} samples of its own ops, {time.time() - begin:.1f} s")


def _collect(samples: list[Sample], found: Iterator[Sample], *, until: float) -> None:
    """As many as there is time for; what cannot be timed is said, and nothing after it is."""
    try:
        for sample in found:
            samples.append(sample)
            if time.time() > until:
                return
    except Exception:
        traceback.print_exc()


def _shapes(plan: Plan, device: torch.device) -> Iterator[Sample]:
    precision = plan.regions[0].options[0].precision
    policies = gpu.POLICIES if precision == "bf16" else ("none",)
    batch = gpu.batches(plan, np.random.default_rng(7))[0]
    source = open_source(plan.model, plan.workload, seed=plan.seed)
    yield gpu.optimizer_sample(plan, device, seconds=POINT_SECONDS)
    yield from gpu.block_samples(plan, batch, device, precision=precision, policies=policies, seconds=POINT_SECONDS)
    yield from exchange.exchange_samples(plan, source, plan.local_batch, device, seconds=POINT_SECONDS)
    yield from gpu.sparse_samples(plan, source, plan.local_batch, device, seconds=POINT_SECONDS)


# --- run ---


def waiting(work: Path) -> dict[str, Plan]:
    """Plans without a result, by name."""
    names = json.loads((work / "plans.json").read_text()) if (work / "plans.json").exists() else []
    return {name: Plan.load(work / name / "plan.json") for name in names if not (work / name / "run.json").exists()}


def _ready(work: Path, name: str, *, patient: bool) -> bool:
    """Whether the kernels of a plan are compiled. Those of fp32 take long, and are waited for only if `patient`; others meanwhile."""
    mark = work / warming(name)
    while mark.exists() and (patient or mark.name != warming("full-fp32")):
        time.sleep(0.1)
    return not mark.exists()


def run_alone(work: Path, plans: dict[str, Plan], device: torch.device, guard: Guard, *, until: float, steps: int | None, patient: bool) -> None:
    """This rank's share of the plans of one rank; what is not compiled yet comes another time, or if `patient` is waited for."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in [n for n in plans if plans[n].layout.world_size == 1][rank::world]:
        if not (work / name / "run.json").exists() and time.time() < until and _ready(work, name, patient=patient):
            guard.begin(work / name)
            found = _attempt(plans[name], device, steps=steps)
            _record(work / name, found if "failed" in found else _together([found]), 0)
            guard.end()


def run(work: Path, plans: dict[str, Plan], device: torch.device, guard: Guard, *, until: float, steps: int | None, patient: bool) -> None:
    """Those of all ranks until the time is over, as `run_alone`."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), mesh.background_group()
    for name in plans:
        if (work / name / "started").exists():  # and did not end: the job before this one died of it
            _record(work / name, {"failed": "the job ended inside this plan"}, rank)
    dist.barrier(group)
    for name in (n for n in plans if plans[n].layout.world_size > 1 and not (work / n / "run.json").exists()):
        if not _agreed(time.time() < until):
            _say(f"out of time before {name}", rank)
            break
        if not _agreed(_ready(work, name, patient=patient)):
            continue
        if rank == 0:
            (work / name / "started").touch()
        guard.begin(work / name)
        found = _attempt(plans[name], device, steps=steps, failed=guard.failed)
        everyone: list[dict] = [{}] * world
        dist.all_gather_object(everyone, found, group=group)
        if words := "; ".join(f"rank {r}: {one['failed']}" for r, one in enumerate(everyone) if "failed" in one):
            guard.settle(words)
            _come_together(device)
        _record(work / name, {"failed": words} if words else _together(everyone), rank)
        guard.end()


def _agreed(answer: bool) -> bool:
    """Rank 0's answer on all ranks."""
    said = [answer]
    dist.broadcast_object_list(said, src=0, group=mesh.background_group())
    return said[0]


def _come_together(device: torch.device) -> None:
    """Returns where nothing that ranks have issued waits for an answer any more."""
    dist.all_reduce(torch.zeros(1, device=device))
    _empty(device)


@functools.cache
def _stamp() -> dict[str, Any]:
    return results.stamped()


def _record(folder: Path, found: dict[str, Any], rank: int) -> None:
    if rank:
        return
    (folder / "run.json").write_text(json.dumps({**found, "measured": _stamp()}) + "\n")
    (folder / "started").unlink(missing_ok=True)
    if "failed" in found:
        _say(f"{folder.name}: {found['failed']}")
        return
    predicted = Plan.load(folder / "plan.json").prediction["step_time"]["value"]
    _say(f"{folder.name}: predicted {predicted * 1e3:.2f} ms, measured {found['step_s'] * 1e3:.2f} ms ({predicted / found['step_s'] - 1:+.1%}), "
         f"{found['wall_s']:.1f} s")  # fmt: skip


def _attempt(plan: Plan, device: torch.device, *, steps: int | None, failed: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """What `execute` found, or `failed` with why; `failed` is told at once."""
    try:
        found = execute(plan, device, steps=steps)
        _empty(device)
        return found
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        failed(why)
        return {"failed": why}


def execute(plan: Plan, device: torch.device, *, steps: int | None = None) -> dict[str, Any]:
    """Trains a few steps, `steps` measured ones; this rank's figures. Seconds unless the name says bytes.

    steps: phases of every measured step; host: the main thread's; losses: of every step from the first one on; trace: of the traced steps, what
    `exposure` says and what the device did.
    """
    begin = time.perf_counter()
    _empty(device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=device)
    trainer.loader.build = Repeated(trainer)  # type: ignore[method-assign]
    ready = time.perf_counter() - begin
    expected = plan.prediction["step_time"]["value"]
    first = WARMUP_STEPS + SETTLING
    trainer.train(first + (steps or max(MIN_STEPS, min(MAX_STEPS, math.ceil(RUN_SECONDS / expected)))))
    measured, _ = trainer.measured()
    assert measured is not None
    trained = time.perf_counter() - begin
    memory = {name: value for name, value in encode(measured.memory_bytes).items() if value is not None}
    context = gpu.context_bytes() if cuda else None
    phases, host = trainer.phases[first:], trainer.timer.host[first:]
    traced = _traced(trainer) if cuda else None
    found = {"steps": phases, "host": host, "losses": trainer.losses, "memory_bytes": memory, "context_bytes": context, "trace": traced,
             "ready_s": ready, "trained_s": trained}
    del trainer
    return {**found, "wall_s": time.perf_counter() - begin}


_kept: dict[str, list[tuple[Batch, ...]]] = {}


class Repeated:
    """A trainer's loader that has built `BATCHES` steps beforehand and deals them again and again. Plans of the same batches share them."""

    def __init__(self, trainer: Trainer) -> None:
        plan, loader = trainer.plan, trainer.loader
        key = content_hash((plan.model, plan.workload, plan.seed, plan.local_batch, plan.accumulation, plan.batching, plan.layout.world_size,
                            trainer.meshes.rank, trainer.device.type))
        if key not in _kept:
            while len(_kept) > 3:  # page-locked memory
                del _kept[next(iter(_kept))]
            _kept[key] = [loader.build(step) for step in range(min(BATCHES, loader.num_steps))]
        self.batches = _kept[key]
        loader.source.built = True  # type: ignore[attr-defined]

    def __call__(self, step: int) -> tuple[Batch, ...]:
        return self.batches[step % len(self.batches)]


def _together(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks' figures: phases are means over ranks, the step the median of what they sum to, memory the largest rank's; of traces
    the first rank's keeps its events."""
    def mean(key: str) -> list[dict[str, float]]:
        return [{name: statistics.fmean(phases[name] for phases in ranks) for name in PHASES} for ranks in zip(*(one[key] for one in everyone))]

    def largest(values: list[float | None]) -> float | None:
        return max((v for v in values if v is not None), default=None)

    steps, host = mean("steps"), mean("host")
    sums = [sum(step.values()) for step in steps]
    memory = {name: largest([one["memory_bytes"].get(name) for one in everyone]) for name in everyone[0]["memory_bytes"]}
    traces = [{k: v for k, v in one["trace"].items() if k != "events" or not rank} if one["trace"] else None for rank, one in enumerate(everyone)]
    return {
        "step_s": statistics.median(sums), "steps_s": sums, "losses": everyone[0]["losses"], "memory_bytes": memory,
        "device_s": {name: statistics.median(step[name] for step in steps) for name in PHASES},
        "host_s": {name: statistics.median(step[name] for step in host) for name in PHASES},
        "ranks": [{key: {name: statistics.median(step[name] for step in one[key]) for name in PHASES} for key in ("steps", "host")}
                  for one in everyone],
        "exposed_s": statistics.fmean(t["exposed_s"] for t in traces) if all(traces) else None,
        "context_bytes": largest([one["context_bytes"] for one in everyone]), "traces": traces,
        **{key: max(one[key] for one in everyone) for key in ("ready_s", "trained_s", "wall_s")},
    }  # fmt: skip


# --- traces ---

_COLLECTIVE, _ANNOTATION = re.compile("nccl", re.I), re.compile(r"^(nccl:|FSDP::|c10d::|Optimizer\.|phase:|step:|region:)")


def _traced(trainer: Trainer) -> dict[str, Any] | None:
    """`TRACED` more steps under the profiler, device activity only. A profiler that does not work leaves None."""
    from torch.profiler import ProfilerActivity, profile

    wanted, trainer_step = trainer.step + TRACED, trainer.step
    with profile(activities=[ProfilerActivity.CUDA]) as running:
        trainer.train(wanted)
        torch.cuda.synchronize()
    assert trainer.step == trainer_step + TRACED
    events = [e for e in running.profiler.kineto_results.events() if "CUDA" in str(e.device_type()) and not _ANNOTATION.match(e.name())]
    if not events:
        return None
    names = {name: i for i, name in enumerate(sorted({e.name() for e in events}))}
    start = min(e.start_ns() for e in events)
    rows = [(names[e.name()], int(e.device_resource_id()), e.start_ns() - start, e.duration_ns()) for e in events]
    spans = [(e.name(), (e.start_ns() - start) * 1e-9, (e.start_ns() - start + e.duration_ns()) * 1e-9) for e in events]
    busiest = dict(sorted(_by_name(spans).items(), key=lambda item: -item[1])[:40])
    return {**exposure(spans, steps=TRACED - 1, skipped=1), "kernels_s": busiest, "names": list(names),
            "events": sorted(rows, key=lambda row: row[2])}


def _by_name(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds of a traced step by name, whatever runs beside."""
    found: dict[str, float] = {}
    for name, begin, end in spans:
        found[name[:80]] = found.get(name[:80], 0.0) + (end - begin) / TRACED
    return found


def exposure(events: list[tuple[str, float, float]], *, steps: int, skipped: int = 0) -> dict[str, float]:
    """Seconds a step of (name, begin, end) device events: `exposed_s`, a collective runs and nothing else does; `collective_s`, one runs; `busy_s`,
    anything else runs. Copies from the host count as neither. The first `skipped` steps are left out, up to the end of as many collectives: ranks
    begin to trace at different moments, and what one of them then waits is the profiler's."""
    calls = sorted((b for name, _, b in events if _COLLECTIVE.search(name)))
    if skipped and calls:
        since = calls[max(0, len(calls) * skipped // (steps + skipped) - 1)]
        events = [(name, max(a, since), b) for name, a, b in events if b > since]
    sent = _merged([(a, b) for name, a, b in events if _COLLECTIVE.search(name)])
    busy = _merged([(a, b) for name, a, b in events if not _COLLECTIVE.search(name) and "HtoD" not in name])
    both = _length(_merged([*sent, *busy]))
    return {"exposed_s": (both - _length(busy)) / steps, "collective_s": _length(sent) / steps, "busy_s": _length(busy) / steps,
            "span_s": (max(b for *_, b in events) - min(a for _, a, _ in events)) / steps}


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


# --- entry ---


def _say(text: str, rank: int = 0) -> None:
    if rank == 0:
        print(text, flush=True)


def _predict(work: Path, rank: int) -> None:
    """Rank 0 predicts the plans from what this job has measured; where it cannot, the predictions that they came with stay."""
    from benchmarks.multi_gpu import predict_again

    begin = time.perf_counter()
    if rank == 0:
        try:
            predict_again(work)
        except Exception:
            traceback.print_exc()
    dist.barrier(mesh.background_group())
    _say(f"predicted anew: {time.perf_counter() - begin:.1f} s", rank)


def _parts(options: argparse.Namespace, device: torch.device) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parts, work, until = options.parts, options.work, options.until
    plans, guard = waiting(work), Guard(rank, limit=options.plan_seconds)
    if rank == 0:
        (work / MEASURED).write_text(json.dumps(results.stamped()) + "\n")
    if "ops" in parts and device.type == "cuda":
        subjects = [Plan.load(path) for path in sorted((work / "subjects").glob("*.json"))]
        own_ops(work, subjects[rank::world], device, rank, until=min(until, time.time() + options.op_seconds))
    if not {"alone", "collectives", "plans", "links"} & set(parts):
        return
    mesh.start(device)
    job = Calibrating(work, mesh.build_meshes(Layout(fsdp=world, sparse_group=world), device), device, until=until,
                      resume="collectives" not in parts)
    for number, part in enumerate(parts):
        patient = part not in parts[number + 1:]
        if part == "alone":
            run_alone(work, plans, device, guard, until=until, steps=options.steps, patient=patient)
            dist.barrier(mesh.background_group())
        elif part == "collectives":
            calibrate(job)
        elif part == "predict":
            _predict(work, rank)
            plans = waiting(work)
        elif part == "plans":
            end = until - sum(RESERVED.get(later, 0.0) for later in parts[number:])
            run(work, plans, device, guard, until=end, steps=options.steps, patient=patient)
        elif part == "links":
            links(job)
    mesh.leave()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.multi_gpu_ranks", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--warm", type=Path, metavar="PLAN")
    parser.add_argument("--op-seconds", type=float, default=OP_SECONDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--until", type=float, default=math.inf, help="seconds of the epoch after which nothing new begins")
    parser.add_argument("--steps", type=int, help="measured steps of a plan (default: about a second of them)")
    parser.add_argument("--plan-seconds", type=float, default=LIMIT, help="that a plan may take before the job is started anew behind it")
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(STACKS_EVERY, repeat=True)
    begin = time.perf_counter()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.warm is not None:
        plan = Plan.load(options.warm)
        Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=device).train(2)
        run_blocks(plan, device)  # of even lengths, too: integers divisible by 16 get kernels of their own
        print(f"\nwarm {options.warm.stem}: {time.perf_counter() - begin:.1f} s", flush=True)
        return 0
    _parts(options, device)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
