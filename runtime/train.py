"""Entry point under torchrun: executes a plan on the ranks that torchrun started.

    python -m torch.distributed.run --standalone --nproc-per-node N -m runtime.train PLAN --out DIR [--resume] [--steps K] [--no-eval]
        [--no-checkpoint] [--trace-steps FIRST:END]

With torchrun's `--max-restarts`, ranks that are started again continue from the newest checkpoint, so give `--checkpoint-every` too; a loss that is
not finite would come again, and ends the job. A start without --resume sets older checkpoints aside, in checkpoint.old.
DIR gets metrics.jsonl, attempts.jsonl, result.json and checkpoint/. Rank 0 prints JSON progress lines on stdout. SIGINT or SIGTERM: the step in
progress is finished, a checkpoint written, status `interrupted`, exit code 130; a second signal ends at once.

Exit codes: 0 completed, 2 a plan that cannot be executed here, 6 the run failed (a dead peer, a loss that is not finite), 130 interrupted.
"""
from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from costmodel.plan import Plan
from costmodel.runresult import Quality, RunResult, Status
from runtime import checkpoint, mesh, tracing
from runtime.data import Source, open_source
from runtime.metrics import Metrics
from runtime.trainer import NonFiniteLoss, Trainer, wall_clock

OK, USAGE, FAILED, INTERRUPTED = 0, 2, 6, 130
IMPORTED = time.time()
# How long a rank whose collective timed out waits for the others to say the same [s].
ROLL_CALL = 5.0
ALLOCATOR_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD")


class StopSignal:
    """Remembers SIGINT and SIGTERM; the second one gets the default treatment."""

    def __init__(self) -> None:
        self.caught = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._catch)

    def _catch(self, number: int, _frame) -> None:
        self.caught = True
        signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.caught


def main(arguments: list[str] | None = None) -> int:
    """Runs the plan; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runtime.train", description="Execute a plan on the ranks that torchrun started.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for metrics, result and checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in OUT, if there is one")
    parser.add_argument("--steps", type=int, help="stop after this optimizer step, counted from the beginning of training")
    parser.add_argument("--checkpoint-every", type=int, metavar="K", help="a checkpoint after every K steps, besides the one at the end")
    parser.add_argument("--no-checkpoint", action="store_true", help="none at the end either: the run cannot be continued")
    parser.add_argument("--no-eval", action="store_true", help="skip the evaluation on held-out events")
    parser.add_argument("--trace-steps", type=tracing.parse_steps, metavar="FIRST:END", help="torch.profiler trace of these steps in OUT/traces")
    options = parser.parse_args(arguments)
    if options.no_checkpoint and options.checkpoint_every:
        parser.error("--no-checkpoint with --checkpoint-every")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        plan = check_plan(Plan.load(options.plan), world_size)
        device = pick_device(plan)
        source = open_source(plan.model, plan.workload, seed=plan.seed)
    except (OSError, ValueError) as error:
        _say(rank, str(error))
        return USAGE
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted and (message := _final_failure(options.out)):
        _say(rank, message)
        return FAILED
    stop = StopSignal()
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    mesh.start(device)
    owners: list[Any] = []
    found = checkpoint.latest(options.out / "checkpoint") if options.resume or restarted else None
    if rank == 0 and not (options.resume or restarted):
        checkpoint.set_aside(options.out / "checkpoint")
    with Metrics(options.out if rank == 0 else None, resume=found is not None, progress=rank == 0) as metrics:
        code, message = _attempt(plan, source, options, device=device, stop=stop, metrics=metrics, found=found, restarted=restarted, owners=owners)
    if message and code == FAILED:
        _report_failure(options.out, plan, rank, message, steps=len(owners[0].losses), retry=False)
    elif message:
        _say(rank, message)
    mesh.leave(owners)
    return code


def _attempt(plan: Plan, source: Source, options: argparse.Namespace, *, device: torch.device, stop: StopSignal, metrics: Metrics,
             found: Path | None, restarted: bool, owners: list[Any]) -> tuple[int, str]:
    """(exit code, message): faults that every rank meets alike. Others end this process, since no barrier can be reached any more."""
    rank = dist.get_rank()
    try:
        metrics.working(f"setting up model and tables, {sum(t.weight_bytes for t in plan.model.tables) / 1e9:.3g} GB of them over all ranks")
        trainer = Trainer(plan, source, device=device, metrics=metrics, stop=stop)
        owners.append(trainer)
        metrics.event("source", origin=source.origin)
        if found is not None:
            trainer.resume(found)
            metrics.event("resume", step=trainer.step, checkpoint=str(found))
        metrics.start(trainer.step, startup=_process_age(), restarted=restarted)
    except ValueError as error:
        return USAGE, str(error)
    except (RuntimeError, OSError) as error:
        _die(options.out, plan, rank, error, "while the job was set up")
    try:
        return _run(trainer, options), ""
    except NonFiniteLoss as error:
        trainer.settle()
        return FAILED, str(error)
    except Exception as error:
        where = f" of step {trainer.step}, in {trainer.timer.failed_in}" if trainer.timer.failed_in else f" after step {trainer.step}"
        _die(options.out, plan, rank, error, where.strip())


def _die(out: Path, plan: Plan, rank: int, error: BaseException, where: str) -> NoReturn:
    """A peer is gone, a collective timed out, or this rank alone has a fault: leave without waiting for anybody."""
    if not isinstance(error, (RuntimeError, OSError)):
        traceback.print_exception(error)
    absent = _absent(rank) if re.search(r"timed? ?out", str(error), re.IGNORECASE) else ""
    _report_failure(out, plan, rank, f"rank {rank}, {where}: {_first_line(error)}{absent}")
    sys.stdout.flush()
    os._exit(FAILED)


def _absent(rank: int) -> str:
    """Whom the others wait for: ranks that do not say within ROLL_CALL seconds that a collective of theirs timed out too."""
    try:
        store = dist.PrefixStore("timed out", dist.distributed_c10d._get_default_store())
        store.set(str(rank), "")
        time.sleep(ROLL_CALL)
        silent = [str(r) for r in range(dist.get_world_size()) if not store.check([str(r)])]
    except (RuntimeError, ValueError):
        return ""
    return f"; no word from rank {', '.join(silent)}" if silent else "; every rank waits"


def _final_failure(out: Path) -> str:
    """Why this job must not be started again; empty where it may."""
    try:
        result = RunResult.load(out / "result.json")
    except (OSError, ValueError):
        return ""
    return "" if result.retry else result.message


def _process_age() -> float:
    """Seconds since this process was started; without /proc, since this module was imported."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.time() - IMPORTED


def check_plan(plan: Plan, world_size: int) -> Plan:
    """Raises ValueError for a plan that this job cannot execute."""
    if plan.predict_only:
        raise ValueError(f"plan {plan.identity()} is predict-only: {'; '.join(plan.predict_only)}")
    if plan.layout.world_size != world_size:
        raise ValueError(f"plan {plan.identity()} is for {plan.layout.world_size} ranks ({plan.layout.short}), this job has {world_size}; "
                         f"start torchrun with --nproc-per-node {plan.layout.world_size} or search again")
    for name, value in plan.expected_fingerprints().items():
        if plan.fingerprints.get(name, value) != value:
            raise ValueError(f"fingerprint of {name} is {plan.fingerprints[name]}, but the plan holds {value}; search again")
    return plan


def pick_device(plan: Plan) -> torch.device:
    """This rank's device. Raises ValueError where the plan wants a GPU and there is none."""
    if plan.cluster.device.kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise ValueError(f"the plan is for {plan.cluster.device.name}, but there is no CUDA device {index} here")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _run(trainer: Trainer, options: argparse.Namespace) -> int:
    lap, first, plan = wall_clock(), trainer.step, trainer.plan
    wall: dict[str, float] = {}
    tracer = tracing.Tracer(trainer, options.out, first=options.trace_steps[0], end=options.trace_steps[1]) if options.trace_steps else None
    trainer.train(options.steps, checkpoint_every=options.checkpoint_every, root=options.out / "checkpoint")
    if tracer is not None:
        tracer.close()
    train = lap() - sum(trainer.checkpoint_seconds)
    measured, warmup = trainer.measured()
    ne: dict[str, float] = {}
    if not trainer.interrupted and not options.no_eval:
        lap()
        ne = trainer.evaluate()
        wall["evaluate"] = lap()
    if not options.no_checkpoint:
        trainer.metrics.working(f"writing a checkpoint, {trainer.checkpoint_bytes / 1e9:.3g} GB on this rank")
        trainer.save(options.out / "checkpoint")
    wall |= trainer.metrics.wall_seconds(train=train, checkpoint=sum(trainer.checkpoint_seconds))
    status: Status = "interrupted" if trainer.interrupted else "completed"
    if trainer.meshes.rank == 0:
        quality = Quality(ne=ne, baselines=trainer.source.baselines if ne else {}, final_loss=trainer.losses[-1] if trainer.losses else None)
        RunResult(plan_identity=plan.identity(), environment=environment(trainer.device), status=status, world_size=plan.layout.world_size,
                  steps=trainer.step, warmup_steps=warmup, first_step=first, measured=measured, quality=quality,
                  losses=tuple(trainer.losses[first:]), wall_seconds=wall, attempts=trainer.metrics.attempts).save(options.out / "result.json")
        trainer.metrics.event("done", status=status, steps=trainer.step, ne=ne, wall_s=wall)
    return INTERRUPTED if trainer.interrupted else OK


def environment(device: torch.device) -> dict[str, Any]:
    """Device, threads, allocator and versions that timings depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device_name": name, "device_kind": "gpu" if device.type == "cuda" else "cpu", "threads": torch.get_num_threads(),
            "allocator": {k: os.environ[k] for k in ALLOCATOR_VARIABLES if k in os.environ}, "torch": torch.__version__,
            "python": platform.python_version(), "backend": dist.get_backend() if dist.is_initialized() else "none"}


def _report_failure(out: Path, plan: Plan, rank: int, message: str, *, steps: int = 0, retry: bool = True) -> None:
    """Rank 0 leaves a result that says what happened; every rank says it on stderr."""
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        RunResult(plan_identity=plan.identity(), environment={}, status="failed", world_size=plan.layout.world_size, steps=steps, warmup_steps=0,
                  retry=retry, message=message).save(out / "result.json")
    sys.stderr.write(f"error: {message}\n")


def _say(rank: int, message: str) -> None:
    if rank == 0:
        sys.stderr.write(f"error: {message}\n")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.exit(main())
