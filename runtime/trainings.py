"""Several plans of one layout, one after the other in one job, under torchrun: `-m runtime.trainings FOLDER... [--steps K]`.

Each FOLDER holds a `plan.json` and gets a `result.json`. What differs between them (seed, precision, what is saved) costs no start of processes and
no process groups, and what they train on is built once (`runtime.kept`); no checkpoints are written. Rank 0 prints an event as each is done. Exit
codes are those of `runtime.train`.
"""
from __future__ import annotations

import argparse
import collections
import os
import sys
from pathlib import Path

import torch

from costmodel.codec import content_hash
from costmodel.plan import Plan
from costmodel.runresult import Quality, RunResult
from runtime import mesh
from runtime.data import Source, open_source
from runtime.kept import KeptSource
from runtime.metrics import Metrics
from runtime.train import FAILED, INTERRUPTED, OK, USAGE, StopSignal, check_plan, environment, pick_device
from runtime.trainer import NonFiniteLoss, Trainer

# Of batches that a rank keeps, for all seeds.
KEPT_BYTES = 16e9


def main(arguments: list[str] | None = None) -> int:
    """Trains every folder's plan; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runtime.trainings", description="Train several plans of one layout in one job.")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, help="stop each after this optimizer step")
    options = parser.parse_args(arguments)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        plans = [check_plan(Plan.load(folder / "plan.json"), world_size) for folder in options.folders]
        device = pick_device(plans[0])
    except (OSError, ValueError) as error:
        return _refuse(rank, str(error), USAGE)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    stop, owners, code = StopSignal(), [], OK
    mesh.start(device)
    shared = collections.Counter(map(_data, plans))
    sources: dict[str, KeptSource] = {}
    for folder, plan in zip(options.folders, plans):
        owners.clear()
        try:
            source: Source = open_source(plan.model, plan.workload, seed=plan.seed)
            if shared[_data(plan)] > 1:
                source = sources.setdefault(_data(plan), KeptSource(source, most_bytes=KEPT_BYTES / len(shared)))
            owners.append(Trainer(plan, source, device=device, stop=stop))
            code = _train(owners[0], folder, options.steps)
        except (NonFiniteLoss, ValueError) as error:  # every rank meets them alike
            code = _refuse(rank, f"{folder.name}: {error}", FAILED if isinstance(error, NonFiniteLoss) else USAGE)
        if code != OK:
            break
    mesh.leave(owners)
    return code


def _data(plan: Plan) -> str:
    """The same for plans that train on the same samples."""
    return content_hash((plan.model, plan.workload, plan.seed))


def _train(trainer: Trainer, folder: Path, steps: int | None) -> int:
    trainer.train(steps)
    measured, warmup = trainer.measured()
    if trainer.interrupted:
        return INTERRUPTED
    quality = Quality(ne=trainer.evaluate(), baselines=trainer.source.baselines, final_loss=trainer.losses[-1] if trainer.losses else None)
    if trainer.meshes.rank == 0:
        plan = trainer.plan
        RunResult(plan_identity=plan.identity(), environment=environment(trainer.device), status="completed", world_size=plan.layout.world_size,
                  steps=trainer.step, warmup_steps=warmup, measured=measured, quality=quality, losses=tuple(trainer.losses)).save(
                      folder / "result.json")
    with Metrics(None, resume=False, progress=trainer.meshes.rank == 0) as words:
        words.event("trained", folder=folder.name, ne=quality.ne)
    return OK


def _refuse(rank: int, message: str, code: int) -> int:
    if rank == 0:
        sys.stderr.write(f"error: {message}\n")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, OSError) as error:  # of one rank: the others wait in a collective, which this process must not join
        sys.stderr.write(f"error: rank {os.environ.get('RANK', '0')}: {error}\n")
        sys.stderr.flush()
        os._exit(FAILED)
