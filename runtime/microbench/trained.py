"""What only the trainer itself shows: the host's time of a step, from short runs of small batches, and the allocator's slack, from whole ones."""
from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch

from costmodel.calibration import Calibration
from costmodel.gpu import launches
from costmodel.lower import lower
from costmodel.plan import Plan
from costmodel.samples import Sample
from costmodel.workload import Lengths
from runtime.data import open_source
from runtime.microbench.gpu import POLICIES, Report, constant, context_bytes, layer_precision
from runtime.trainer import WARMUP_STEPS, Trainer

# Steps of a run; histories, events of a history and rows of a table of those that time the host; kinds that run under each policy; scales of
# launches alone that are taken.
STEPS, SMALL_SAMPLES, SMALL_LENGTH, SMALL_ROWS, SMALL_POLICIES, PLAUSIBLE = 12, 8, 264, 1000, 2, (0.5, 2.0)



def host_samples(calibration: Calibration, plans: list[Plan], device: torch.device, *, until: float = math.inf,
                 report: Report = lambda _: None) -> Iterator[Sample]:
    """`host_scale` and `step_host` from short runs of batches so small that the device waits for the host: their main thread's time against what
    `calibration` gives for the launches; then, of layers under a policy, `host_scale` of what that adds."""
    found: dict[str, list[tuple[Plan, float, float]]] = defaultdict(list)
    for plan in plans:
        if time.perf_counter() > until and found:
            break
        trainer = _trained(plan, device, WARMUP_STEPS + STEPS)
        spent = statistics.median(sum(step.values()) for step in trainer.timer.host[WARMUP_STEPS:])
        predicted = sum(launches(lower(plan, calibration).graph).values())
        policy = layer_policy(plan)
        report(f"host: {plan.model.name} {policy} x {plan.accumulation}: {1e3 * predicted:.1f} ms of launches, {1e3 * spent:.1f} ms spent")
        found[policy].append((plan, predicted, spent))
        del trainer
    pairs = [(predicted, spent) for _, predicted, spent in found["none"] if predicted > 0]
    if not pairs:
        return
    scale, rest = host_fit(pairs)
    if not PLAUSIBLE[0] <= scale <= PLAUSIBLE[1]:
        report(f"host: a scale of {scale:.2f} is not taken")
        scale = 1.0
    yield from (constant("host_scale", scale), constant("step_host", rest))
    for policy, runs in found.items():
        added = []
        for plan, predicted, spent in runs if policy != "none" else ():
            plain = sum(launches(lower(under(plan, "none"), calibration).graph).values())
            if predicted > plain:
                added.append((spent - rest - scale * plain) / (scale * (predicted - plain)))
        if added:
            yield constant("host_scale", min(max(statistics.median(added), 1 / PLAUSIBLE[1]), PLAUSIBLE[1]), policy)


def allocator_samples(plans: list[Plan], device: torch.device) -> Iterator[Sample]:
    """`allocator_overhead`: the most that the caching allocator held over the most that was allocated, over short runs of whole batches; and
    `context_bytes` beside each."""
    over = []
    for plan in plans:
        trainer = _trained(plan, device, WARMUP_STEPS + STEPS)
        over.append(torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated() - 1.0)
        yield constant("context_bytes", context_bytes())
        del trainer
    yield constant("allocator_overhead", max(over))


def _trained(plan: Plan, device: torch.device, steps: int) -> Trainer:
    """A trainer after `steps` steps, in an allocator that held nothing before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=device)
    trainer.train(steps)
    trainer.phases += trainer.timer.finished(wait=True)
    return trainer


def host_fit(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """(scale, rest >= 0) of spent = scale x predicted + rest with the least relative error."""
    predicted, spent = np.array(pairs).T
    scale, rest = np.linalg.lstsq(np.stack([predicted / spent, 1 / spent], axis=1), np.ones(len(pairs)), rcond=None)[0]
    if rest < 0 or scale <= 0:
        scale, rest = float(np.median(spent / predicted)), 0.0
    return float(scale), float(rest)


def small_plans(plans: list[Plan]) -> list[Plan]:
    """A few short histories of each block kind in bf16: without checkpoints, in turn on one and two micro-batches, then under each policy."""
    kinds: dict[str, Plan] = {}
    for plan in plans:
        if layer_precision(plan) != "fp32":
            kinds.setdefault(plan.model.sequences[0].layers[0].kind, plan)
    found = []
    for policy in POLICIES:
        for number, plan in enumerate(kinds.values() or plans[:1]):
            micro = 1 + number % 2 if policy == "none" else 1
            if policy == "none" or number < SMALL_POLICIES:
                found.append(_small(under(plan, policy), micro))
    return found


def _small(plan: Plan, micro: int) -> Plan:
    """The plan on `micro` batches of a few short histories and tables of few rows."""
    model = dataclasses.replace(plan.model, tables=tuple(dataclasses.replace(t, rows=min(t.rows, SMALL_ROWS)) for t in plan.model.tables))
    lengths = {s.name: Lengths(kind="fixed", maximum=min(SMALL_LENGTH, plan.workload.lengths[s.name].maximum)) for s in plan.model.sequences}
    workload = dataclasses.replace(plan.workload, lengths=lengths, global_batch=micro * SMALL_SAMPLES, local_batch=None)
    return dataclasses.replace(plan, model=model, workload=workload, local_batch=SMALL_SAMPLES, accumulation=micro, fingerprints={})


def layer_policy(plan: Plan) -> str:
    """The checkpoint policy of a plan's first layer."""
    return next((r for r in plan.regions if r.region.split(".")[-1].isdigit()), plan.regions[0]).options[0].checkpoint


def under(plan: Plan, policy: str) -> Plan:
    """The plan with every layer of its histories under `policy`."""
    return dataclasses.replace(plan, fingerprints={}, regions=tuple(
        dataclasses.replace(r, options=tuple(dataclasses.replace(o, checkpoint=policy) for o in r.options)) if r.region.split(".")[-1].isdigit()
        else r for r in plan.regions))
