"""Entry point, alone or under torchrun: times what the plans' steps are made of and writes samples.jsonl.

    python -m torch.distributed.run --standalone --nproc-per-node N -m runtime.microbench --out samples.jsonl --models PLAN [PLAN ...]

Rank 0 prints JSON progress lines on stdout. Exit codes: 0, 2 for a plan that cannot be read.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from costmodel import ops
from costmodel.ops import KINDS
from costmodel.plan import Layout, Plan
from costmodel.samples import BLOCK_PREFIX, CONSTANT_PREFIX, Sample, write_samples
from runtime import mesh
from runtime.data import open_source
from runtime.microbench import blocks, cases, collectives, contention, inputs, steps, timing
from runtime.microbench import session as gpu_session
from runtime.microbench.environment import environment
from runtime.microbench.requests import requests
from runtime.microbench.timing import Timing, measure, summarize

# Seconds of processor time a launch may measure, seconds a point, spread points against those of quick.
PRESETS = {"quick": (40.0, 0.012, 1.0), "full": (220.0, 0.05, 3.0)}
# Seconds that one GPU is timed for.
GPU_SECONDS = {"quick": 90.0, "full": 420.0}
# Copies of the data so that a run does not find what the run before left in the cache [bytes to exceed: L2, or a core's share of L3].
ROTATE_BYTES = {"cpu": 16e6, "cuda": 120e6}
MAX_COPIES = 8
# What touches tables: once a step, after everything else has gone through the caches.
TABLE_KINDS = ("embedding_lookup", "embedding_update")


@dataclasses.dataclass(slots=True)
class Session:
    """One launch: the ranks time together until rank 0's budget is spent; rank 0 keeps the samples, means over ranks."""

    device: torch.device
    meshes: mesh.Meshes
    budget: float
    seconds: float
    samples: list[Sample] = dataclasses.field(default_factory=list)
    skipped: int = 0

    @property
    def ranks(self) -> int:
        return self.meshes.world_size

    def go_on(self) -> bool:
        """Whether rank 0 has processor time left of the budget; also brings the ranks together.

        Processor time, not wall time: on a machine that others use too a calibration takes longer, but covers as much.
        """
        left = torch.tensor([float(time.process_time() < self.budget)], device=self.device)
        if self.ranks > 1:
            dist.broadcast(left, src=0)
        return bool(left)

    def keep(self, kind: str, phase: str, features: dict[str, float], timing: Timing, *, variant: str = "", dtype: str = "fp32",
             held_out: bool = False) -> None:
        """Records the mean over ranks."""
        values = torch.tensor([timing.seconds, timing.noise, timing.host_seconds or 0.0], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(values)
            values /= self.ranks
        seconds, noise, host = values.tolist()
        self.samples.append(Sample(op=kind, variant=variant, phase=phase, features=features, dtype=dtype, seconds=seconds, noise=noise,
                                   host_seconds=host if timing.host_seconds is not None else None, repeats=timing.repeats,
                                   active_ranks=self.ranks, held_out=held_out))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="runtime.microbench", description="Time the operations of a training step.")
    parser.add_argument("--out", type=Path, required=True, help="samples.jsonl to write")
    parser.add_argument("--models", type=Path, nargs="+", required=True, metavar="PLAN", help="plan files whose steps are timed")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quick")
    parser.add_argument("--budget", type=float, help="seconds of processor time for measurements (default: the preset's)")
    options = parser.parse_args(arguments)
    try:
        plans = [Plan.load(path) for path in options.models]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cuda" and world_size == 1:
        return _calibrate_gpu(plans, device, options)
    if world_size > 1:
        mesh.start(device)
    budget, seconds, points = PRESETS[options.preset]
    layout, threads = Layout(fsdp=world_size, sparse_group=world_size), torch.get_num_threads()
    session = Session(device, mesh.build_meshes(layout, device), time.process_time() + threads * (options.budget or budget), seconds)
    _time_everything(session, plans, points=points, full=options.preset == "full")
    if session.meshes.rank == 0:
        write_samples(options.out, environment(device), session.samples)
        _report({"event": "done", "samples": len(session.samples), "skipped": session.skipped})
    if world_size > 1:
        mesh.leave()
    return 0


def _calibrate_gpu(plans: list[Plan], device: torch.device, options: argparse.Namespace) -> int:
    """One GPU: device and host time apart, blocks under every policy (`runtime.microbench.gpu`)."""
    def report(text: str) -> None:
        _report({"event": "calibrate", "what": text, "ranks": 1})

    found, samples = gpu_session.calibrate(plans, device, budget=options.budget or GPU_SECONDS[options.preset], report=report)
    write_samples(options.out, found, samples)
    _report({"event": "done", "samples": len(samples), "skipped": 0})
    return 0


def _time_everything(session: Session, plans: list[Plan], *, points: float, full: bool) -> None:
    """What cannot be interpolated first: collectives, units, blocks, input, overhead; then ops until the budget is spent."""
    if session.ranks > 1:
        sizes = collectives.FULL_SIZES if full else collectives.QUICK_SIZES
        for kind, features, timing in collectives.collective_timings(session.meshes, sizes=sizes, seconds=session.seconds * 3):
            session.keep(kind, ops.STEP, features, timing)
        for kind, features, timing in collectives.unit_timings(session.meshes, repeats=30 if full else 12):
            session.keep(kind, ops.STEP, features, timing)
        if session.device.type == "cuda":  # a host's transport takes from its ranks what processor_share and peer_wait already hold
            for kind, _, timing in contention.contention(session.meshes):
                session.keep(f"{CONSTANT_PREFIX}collective_share", ops.STEP, {}, timing, variant=f"nccl/{kind}")
        _report_stage(session, "collectives")
    for plan in plans:
        source = open_source(plan.model, plan.workload, seed=plan.seed)
        for policy, features, timing in inputs.input_timings(plan, device=session.device, ranks=session.ranks, source=source):
            session.keep("input", ops.STEP, features, timing, variant=policy)
    keep_step_constants(session, plans)
    _report_stage(session, "input and overhead")
    block_requests = blocks.block_requests(plans)
    for i, request in enumerate(block_requests):
        if not session.go_on():
            session.skipped += len(block_requests) - i
            break
        for phase in (ops.FORWARD, ops.BACKWARD):
            timing = measure(blocks.block_runs(request, phase, session.device, _copies(dict(request.features).get("tokens", 0) * 4e3, session)),
                             device=session.device, seconds=session.seconds * 2, cold=True)
            session.keep(BLOCK_PREFIX + request.kind, phase, dict(request.features), timing, dtype=request.dtype)
    _report_stage(session, "blocks")
    _time_ops(session, plans, points=points)
    keep_processor_share(session)

def _time_ops(session: Session, plans: list[Plan], *, points: float) -> None:
    wanted = [r for r in requests(plans, points=points, gpu=session.device.type == "cuda") if cases.executable(r)]
    if session.ranks > 1:  # sharded parameters are timed as such, with their units
        wanted = [r for r in wanted if r.op.kind != "adamw"]
    for i, request in enumerate(wanted):
        if not session.go_on():
            session.skipped += len(wanted) - i
            break
        for phase in KINDS[request.op.kind].phases:
            runs = cases.cases(request, phase, session.device, _copies(cases.footprint(request), session))
            timing = measure(runs, device=session.device, seconds=session.seconds, cold=True, evicted=request.op.kind in TABLE_KINDS)
            session.keep(request.op.kind, phase, dict(request.op.features), timing, variant=request.op.variant, dtype=request.op.dtype,
                         held_out=request.held_out)
        if i % 20 == 0:
            _report_stage(session, "ops", done=i, of=len(wanted))


def keep_step_constants(session: Session, plans: list[Plan]) -> None:
    for plan in plans:
        source = open_source(plan.model, plan.workload, seed=plan.seed)
        for name, found in steps.step_constants(plan, source, device=session.device, ranks=session.ranks).items():
            session.keep(CONSTANT_PREFIX + name, ops.STEP, {}, found, variant=str(session.ranks))


def keep_processor_share(session: Session) -> None:
    """How much of a core the ranks had while they were timed, other programs aside."""
    share = timing.PROCESSOR.share
    if session.device.type == "cpu" and share is not None:
        session.keep(CONSTANT_PREFIX + "processor_share", ops.STEP, {}, summarize([share]), variant=str(session.ranks))


def _copies(num_bytes: float, session: Session) -> int:
    return int(max(1, min(MAX_COPIES, ROTATE_BYTES[session.device.type] // max(num_bytes, 1.0))))


def _report(event: dict) -> None:
    print(json.dumps(event), flush=True)


def _report_stage(session: Session, what: str, **more: int) -> None:
    if session.meshes.rank == 0:
        _report({"event": "calibrate", "what": what, "samples": len(session.samples), "ranks": session.ranks, **more})



if __name__ == "__main__":
    raise SystemExit(main())
