"""Every balance mode on two gloo ranks: work of the slowest rank, step time and saved activations, against prediction. Run by `benchmarks.train`.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.train_modes OUT

OUT gets measured.json. The modes take turns step by step, so that other programs on the machine slow all of them alike, and beside the wall's clock
stands what the slowest rank's own clock says (CPU seconds of its process, waits not counted). Both are compared with arrival order, measured and
predicted (`estimate` without a calibration: ratios of one machine's steps follow from their work, but for a CPU's attention, which computes padded
whatever the mode).
"""
from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import runtime.trainer
from benchmarks.results import Row
from benchmarks.train_faults import tiny_plan
from costmodel.estimate import estimate
from costmodel.imbalance import slowest_rank
from costmodel.model import LayerGroup, Sequence
from costmodel.plan import Layout, Plan
from costmodel.regions import default_region_plans
from costmodel.workload import EventSource, Lengths
from planner.space import BATCHINGS
from runtime import balance, mesh
from runtime.data import open_source
from runtime.trainer import Trainer

RANKS, BATCH, STEPS, TRACKED = 2, 512, 24, 8
LENGTHS = Lengths(kind="lognormal", median=12.0, sigma=1.2, maximum=128)


def plans() -> dict[str, Plan]:
    """One model of two attention layers, its global batches arranged in every way."""
    base = tiny_plan(Layout(fsdp=RANKS, sparse_group=RANKS), steps=STEPS, dim=64, batch=BATCH)
    layers = (LayerGroup(kind="self_attention", count=2, heads=4, head_dim=16, mlp_dim=256),)
    model = dataclasses.replace(base.model, sequences=(Sequence(name="history", layers=layers),))
    source = EventSource(kind="synthetic", num_events=2 * STEPS * BATCH)
    load = dataclasses.replace(base.workload, lengths={"history": LENGTHS}, source=source)
    made = {mode: dataclasses.replace(base, model=model, workload=load, regions=default_region_plans(model), batching=mode) for mode in BATCHINGS}
    return {mode: dataclasses.replace(plan, fingerprints=plan.expected_fingerprints()) for mode, plan in made.items()}


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    mesh.start(torch.device("cpu"))
    found = measure(plans())
    if torch.distributed.get_rank() == 0:
        (out / "measured.json").write_text(json.dumps(found))
    mesh.leave()


def measure(every: dict[str, Plan], *, steps: int = STEPS, tracked: int = TRACKED) -> dict[str, dict[str, float]]:
    """By mode, means over steps: seconds of a step, CPU seconds of its slowest rank, max / mean attention work of the ranks, and bytes of activations
    that the fullest rank keeps for backward. Collective."""
    device = torch.device("cpu")
    trainers = {mode: Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=device) for mode, plan in every.items()}
    own: dict[str, list[float]] = {mode: [] for mode in every}
    for step in range(steps):
        for mode, trainer in trainers.items():
            begin = time.process_time()
            trainer.train(step + 1)
            own[mode].append(time.process_time() - begin)
    found = {}
    for mode, trainer in trainers.items():
        trainer.phases += trainer.timer.finished(wait=True)
        warm = min(runtime.trainer.WARMUP_STEPS, steps - 1)
        seconds = [sum(phases.values()) for phases in trainer.phases[warm:]]
        found[mode] = {"seconds": float(np.mean(seconds)), "busy": _slowest(own[mode][warm:]), "work": work(trainer, steps),
                       "saved": _slowest(saved(every[mode], tracked))}
    return found


def _slowest(values: list[float]) -> float:
    """The mean over steps of the largest over ranks. Collective."""
    everyone = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(everyone, op=torch.distributed.ReduceOp.MAX)
    return float(everyone.mean())


def work(trainer: Trainer, steps: int) -> float:
    """Attention pairs that the slowest rank computes over the mean rank's, padding included where the mode pads."""
    lengths = trainer.source.lengths(np.arange(trainer.source.num_train))["history"]
    samples = np.stack([trainer.loader.samples(step) for step in range(steps)])
    if trainer.plan.batching != "padded":
        return balance.imbalance(balance.attention_pairs(lengths), samples)
    pairs = balance.attention_pairs(lengths[samples].max(axis=2))
    return float(pairs.max(axis=1).sum() / pairs.mean(axis=1).sum())


def saved(plan: Plan, steps: int) -> list[float]:
    """Bytes of saved activations in every one of `steps` steps."""
    kept, held = runtime.trainer.TRACKED_STEP, []
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    try:
        trainer.train(1)  # which also allocates what lives for the whole run
        for step in range(1, steps + 1):
            runtime.trainer.TRACKED_STEP = step
            trainer.train(step + 1)
            held.append(float(trainer.saved_activations or 0))
    finally:
        runtime.trainer.TRACKED_STEP = kept
    return held


def rows(measured: dict[str, dict[str, float]]) -> Iterator[Row]:
    """What main() found beside what the cost model says."""
    every = plans()
    predicted = {mode: estimate(plan, None) for mode, plan in every.items()}
    of, base = f"measured on {RANKS} gloo ranks, {STEPS} steps of {BATCH} histories, lognormal median 12, sigma 1.2, at most 128", "jagged"
    for mode, found in measured.items():
        slowest = slowest_rank(every[mode]).sequences["history"].pairs
        yield Row(name=f"modes: {mode}, max / mean attention work", value=found["work"], unit="ratio", better="lower",
                  note=f"{of}; predicted {slowest:.3f}")
        ratio, wall = predicted[mode].step_time.value / predicted[base].step_time.value, found["seconds"] / measured[base]["seconds"]
        yield Row(name=f"modes: {mode}, step of the slowest rank over that in arrival order", value=found["busy"] / measured[base]["busy"],
                  unit="ratio", better="lower", note=f"{found['busy'] * 1e3:.1f} ms of CPU time, predicted {ratio:.3f}; by the wall's clock beside "
                                                     f"other programs {wall:.3f}, {found['seconds'] * 1e3:.1f} ms")
        expected = predicted[mode].memory.categories["saved_activations"]
        yield Row(name=f"modes: {mode}, saved activations over predicted", value=found["saved"] / expected, unit="ratio",
                  note=f"fullest rank, mean of {TRACKED} steps: {found['saved'] / 1e6:.2f} MB, predicted {expected / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
