"""Training with a planted fault, on the ranks that torchrun started; `benchmarks.diagnose` starts it and must find each fault again.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.planted PLANS OUT

PLANS/CASE.json holds each case's plan. A case trains STEPS steps, traces TRACED of them and leaves OUT/CASE/{plan.json,traces/,rank-R.json};
rank-R.json: seconds a traced step that were planted on this rank, and the mean time of the untraced steps.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from costmodel.plan import Plan
from runtime import mesh
from runtime.data import open_source
from runtime.tracing import Tracer
from runtime.trainer import Trainer

STEPS, TRACED = 9, (6, 9)


@dataclasses.dataclass(slots=True)
class Planted:
    """Seconds by step, added up where a fault strikes several times."""

    trainer: Trainer
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self):
        start = time.perf_counter()
        yield
        step = self.trainer.step
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start


def slow_reader(planted: Planted, seconds: float = 0.1) -> None:
    """Every rank's reader sleeps before it builds a batch."""
    loader = planted.trainer.loader
    build = loader.build

    def late(step: int):
        with planted.timed():
            time.sleep(seconds)
        return build(step)
    loader.build = late  # type: ignore[method-assign]


def slow_rank(planted: Planted, seconds: float = 0.1) -> None:
    """The last rank sleeps in each forward."""
    def late(*_: object) -> None:
        if planted.trainer.meshes.rank == planted.trainer.meshes.world_size - 1:
            with planted.timed():
                time.sleep(seconds)
    planted.trainer.model.dense.register_forward_pre_hook(late)


def tiny_kernels(planted: Planted, count: int = 20_000) -> None:
    """Each forward launches many ops on one element."""
    one = torch.zeros(1)

    def busy(*_: object) -> None:
        with planted.timed():
            for _ in range(count):
                one.add_(1.0)
    planted.trainer.model.dense.register_forward_pre_hook(busy)


def slow_link(planted: Planted, seconds: float = 0.006) -> None:
    """Every wait for a collective lasts longer, on all ranks alike."""
    timer = planted.trainer.timer
    leave = timer.leave

    def late(name: str) -> None:
        if name == "exposed_communication":
            with planted.timed():
                time.sleep(seconds)
        leave(name)
    timer.leave = late  # type: ignore[method-assign]


def uneven_lengths(planted: Planted) -> None:
    """The longest histories of every step go to the last rank."""
    loader = planted.trainer.loader
    deal = loader.samples

    def sorted_deal(step: int) -> np.ndarray:
        samples = deal(step)
        lengths = next(iter(loader.source.lengths(samples.ravel()).values()))
        return samples.ravel()[np.argsort(lengths, kind="stable")].reshape(samples.shape)
    loader.samples = sorted_deal  # type: ignore[method-assign]


CASES: dict[str, Callable[[Planted], None]] = {
    "healthy": lambda planted: None, "slow_reader": slow_reader, "slow_rank": slow_rank, "tiny_kernels": tiny_kernels, "slow_link": slow_link,
    "uneven_lengths": uneven_lengths, "jagged": lambda planted: None, "padded": lambda planted: None}


def run(name: str, plan_file: Path, out: Path) -> None:
    """One case: train, trace, report."""
    plan = Plan.load(plan_file)
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    tracer = Tracer(trainer, out, first=TRACED[0], end=TRACED[1])
    planted = Planted(trainer)
    CASES[name](planted)  # after the tracer, so that a fault inside a phase is inside its annotation
    trainer.train(STEPS)
    tracer.close()
    untraced = [sum(p.values()) for p in trainer.phases[2:TRACED[0] - 1]]
    found = [planted.seconds.get(step, 0.0) for step in range(*TRACED)]
    rank = trainer.meshes.rank
    if rank == 0:
        plan.save(out / "plan.json")
    (out / f"rank-{rank}.json").write_text(json.dumps({"planted_s": float(np.mean(found)), "untraced_step_s": float(np.mean(untraced))}) + "\n")


def main() -> int:
    plans, out = map(Path, sys.argv[1:3])
    torch.set_num_threads(1)
    mesh.start(torch.device("cpu"))
    for name in CASES:
        if (plans / f"{name}.json").is_file():
            (out / name).mkdir(parents=True, exist_ok=True)
            run(name, plans / f"{name}.json", out / name)
            dist.barrier()
    mesh.leave([])
    return 0


if __name__ == "__main__":
    sys.exit(main())
