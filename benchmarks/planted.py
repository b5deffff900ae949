"""Training with a planted fault, on the ranks that torchrun started; `benchmarks.diagnose` starts it and must find each fault again.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.planted PLANS OUT

PLANS/CASE.json holds each case's plan. Steps come in pairs on the same samples: the even one healthy, the odd one with the fault, so that what
else the machine does meets both alike. A case leaves OUT/CASE/{plan.json,traces/,rank-R.json}; rank-R.json by traced step: `planted` seconds
timed where the fault is, `own` seconds of the phase timers without waits, `cpu` seconds of the main thread.
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

FIRST, PAIRS = 6, 6
STEPS = FIRST + 2 * PAIRS


def is_planted(step: int) -> bool:
    return step % 2 == 1


@dataclasses.dataclass(slots=True)
class Planted:
    """Seconds by step, added up where a fault strikes several times."""

    trainer: Trainer
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    cpu: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether the step in progress has the fault."""
        return is_planted(self.trainer.step)

    @property
    def last_rank(self) -> bool:
        return self.trainer.meshes.rank == self.trainer.meshes.world_size - 1

    @contextlib.contextmanager
    def timed(self):
        start = time.perf_counter()
        yield
        step = self.trainer.step
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start

    def watch(self) -> None:
        """Counts the main thread's processor time of each step, and gives both steps of a pair the same samples."""
        timer, loader = self.trainer.timer, self.trainer.loader
        start, end, deal, began = timer.start_step, timer.end_step, loader.samples, 0.0

        def start_step() -> None:
            nonlocal began
            start()
            began = time.thread_time()

        def end_step() -> None:
            self.cpu[self.trainer.step] = time.thread_time() - began
            end()
        timer.start_step, timer.end_step = start_step, end_step  # type: ignore[method-assign]
        loader.samples = lambda step: deal(step // 2)  # type: ignore[method-assign]


def slow_reader(planted: Planted, seconds: float = 0.4) -> None:
    """Every rank's reader sleeps before it builds a batch."""
    loader = planted.trainer.loader
    build = loader.build

    def late(step: int):
        if is_planted(step):
            with planted.timed():
                time.sleep(seconds)
        return build(step)
    loader.build = late  # type: ignore[method-assign]


def slow_rank(planted: Planted, seconds: float = 0.4) -> None:
    """The last rank sleeps in each forward."""
    def late(*_: object) -> None:
        if planted.active and planted.last_rank:
            with planted.timed():
                time.sleep(seconds)
    planted.trainer.model.dense.register_forward_pre_hook(late)


def tiny_kernels(planted: Planted, count: int = 60_000) -> None:
    """Each forward launches many ops on one element."""
    one = torch.zeros(1)

    def busy(*_: object) -> None:
        if planted.active:
            with planted.timed():
                for _ in range(count):
                    one.add_(1.0)
    planted.trainer.model.dense.register_forward_pre_hook(busy)


def slow_link(planted: Planted, seconds: float = 0.015) -> None:
    """Every wait for a collective lasts longer, on all ranks alike."""
    timer = planted.trainer.timer
    leave = timer.leave

    def late(name: str) -> None:
        if name == "exposed_communication" and planted.active:
            with planted.timed():
                time.sleep(seconds)
        leave(name)
    timer.leave = late  # type: ignore[method-assign]


def uneven_lengths(planted: Planted) -> None:
    """The longest histories of a step go to the last rank."""
    loader = planted.trainer.loader
    deal = loader.samples

    def sorted_deal(step: int) -> np.ndarray:
        samples = deal(step)
        if not is_planted(step):
            return samples
        lengths = next(iter(loader.source.lengths(samples.ravel()).values()))
        return samples.ravel()[np.argsort(lengths, kind="stable")].reshape(samples.shape)
    loader.samples = sorted_deal  # type: ignore[method-assign]


def padded(planted: Planted) -> None:
    """Histories are padded to the longest of the batch; the healthy steps compute them jagged."""
    trainer = planted.trainer
    plan, start = trainer.plan, trainer.timer.start_step
    jagged = dataclasses.replace(plan, batching="jagged")

    def start_step() -> None:
        trainer.plan = plan if planted.active else jagged
        for encoder in trainer.model.dense.sequences:
            encoder.padded = planted.active
        start()
    trainer.timer.start_step = start_step  # type: ignore[method-assign]


CASES: dict[str, Callable[[Planted], None]] = {
    "healthy": lambda planted: None, "slow_reader": slow_reader, "slow_rank": slow_rank, "tiny_kernels": tiny_kernels, "slow_link": slow_link,
    "uneven_lengths": uneven_lengths, "padded": padded}


def run(name: str, plan_file: Path, out: Path) -> None:
    """One case: train, trace, report."""
    plan = Plan.load(plan_file)
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    tracer = Tracer(trainer, out, first=FIRST, end=STEPS)
    planted = Planted(trainer)
    planted.watch()
    CASES[name](planted)  # after the tracer, so that a fault inside a phase is inside its annotation
    trainer.train(STEPS)
    tracer.close()
    rank = trainer.meshes.rank
    if rank == 0:
        plan.save(out / "plan.json")
    traced = range(FIRST, STEPS)
    own = {s: sum(seconds for phase, seconds in trainer.phases[s].items() if phase != "exposed_communication") for s in traced}
    found = {"planted": {s: planted.seconds.get(s, 0.0) for s in traced}, "own": own, "cpu": {s: planted.cpu[s] for s in traced}}
    (out / f"rank-{rank}.json").write_text(json.dumps(found) + "\n")


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
