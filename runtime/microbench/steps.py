"""Steps of the calibrated plans themselves, on this launch's ranks: what no op curve holds.

    step_overhead   seconds of a step outside every phase that is modelled (`other`)
    peer_wait       host ranks: seconds that a rank waits for its peers to arrive at collectives, over its seconds of compute. Work is dealt evenly
                    (`global`), so this is what uneven speed costs: caches, the operating system and other programs, never the same on two cores.

Clocks of the ranks of one host agree (CLOCK_MONOTONIC), so that arrivals can be compared.
"""
from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch
import torch.distributed as dist

from costmodel.plan import Layout, Plan, TablePlacement
from costmodel.regions import default_region_plans
from runtime.data import Source
from runtime.microbench.timing import PROCESSOR, Timing, summarize
from runtime.phases import PhaseTimer
from runtime.trainer import WARMUP_STEPS, Trainer

STEPS = 15
# Histories a rank and step, at most: enough for steps that are like the plan's, few enough to be quick.
MAX_LOCAL_BATCH = 128
WAITING = "exposed_communication"


class ArrivalTimer(PhaseTimer):
    """A PhaseTimer that also keeps, by step, when each wait for a collective began and ended, and the processor seconds of the main thread."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.waits: list[list[tuple[float, float]]] = []
        self.processor: list[float] = []
        self._began = self._used = 0.0

    def start_step(self) -> None:
        super().start_step()
        self.waits.append([])
        self._used = time.thread_time()

    def end_step(self) -> None:
        super().end_step()
        self.processor.append(time.thread_time() - self._used)

    def enter(self, name: str) -> None:
        super().enter(name)
        self._began = time.perf_counter()

    def leave(self, name: str) -> None:
        if name == WAITING and self._stack:
            self.waits[-1].append((self._began, time.perf_counter()))
        super().leave(name)


def step_constants(plan: Plan, source: Source, *, device: torch.device, ranks: int) -> dict[str, Timing]:
    """The constants in the module docstring; `peer_wait` only where host ranks meet. Collective."""
    timer = ArrivalTimer(device)
    trainer = Trainer(executable_here(plan, ranks), source, device=device, timer=timer)
    trainer.train(STEPS)
    trainer.phases += timer.finished(wait=True)
    phases = trainer.phases[WARMUP_STEPS:]
    for processor, step in zip(timer.processor[WARMUP_STEPS:], phases):
        PROCESSOR.add(processor, sum(step.values()) - step[WAITING])
    found = {"step_overhead": summarize([p["other"] for p in phases])}
    if ranks > 1 and device.type == "cpu":
        own = (timer.waits[WARMUP_STEPS:], sum(sum(p.values()) - p[WAITING] for p in phases))
        everyone: list = [None] * ranks
        dist.all_gather_object(everyone, own)
        found["peer_wait"] = summarize([peer_wait([waits for waits, _ in everyone], [compute for _, compute in everyone])])
    return found


def peer_wait(waits: list[list[list[tuple[float, float]]]], compute: list[float]) -> float:
    """Seconds waited for the last rank to arrive over seconds of compute, all ranks together. `waits[rank][step]`: (begin, end) of each wait."""
    waited = 0.0
    for steps in zip(*waits):
        intervals = np.array(steps)  # (ranks, collectives, 2)
        last = intervals[:, :, 0].max(axis=0)
        waited += float(np.minimum(intervals[:, :, 1], last).clip(min=intervals[:, :, 0]).sum() - intervals[:, :, 0].sum())
    return waited / sum(compute)


def executable_here(plan: Plan, ranks: int) -> Plan:
    """The plan's model and batch on this launch's ranks: fp32 or bf16 as planned, tables in turn, nothing recomputed, work dealt evenly."""
    names = [n for t in plan.model.tables for n in t.names]
    local = max(1, min(plan.local_batch, MAX_LOCAL_BATCH))
    workload = dataclasses.replace(plan.workload, local_batch=local, global_batch=None, num_steps=STEPS)
    return dataclasses.replace(
        plan, layout=Layout(fsdp=ranks, sparse_group=ranks), local_batch=local, accumulation=1, batching="global", execution="eager",
        workload=workload, regions=default_region_plans(plan.model), predict_only=(), fingerprints={},
        tables=tuple(TablePlacement(table=n, sharding="table_wise", ranks=(i % ranks,)) for i, n in enumerate(names)))
