"""What only whole batches in the trainer show: the allocator's slack, the context, what blocks cost within a step."""
from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

from costmodel.calibration import Calibration
from costmodel.estimate import estimate
from costmodel.lower import lower
from costmodel.ops import BACKWARD, FORWARD
from costmodel.plan import Plan
from costmodel.pricer import STEP_OVERHEAD_SECONDS
from costmodel.regions import regions
from costmodel.samples import Sample
from runtime.data import open_source
from runtime.microbench.gpu import Report, constant, context_bytes
from runtime.trainer import WARMUP_STEPS, Trainer

# Steps of a run.
STEPS = 8
# Launches over a step of whole batches up to which the device makes it; runs that `in_step` needs, and its bounds.
DEVICE_BOUND, FEWEST, IN_STEP = 0.7, 3, (0.9, 1.15)


def whole_samples(calibration: Calibration, plans: list[Plan], device: torch.device, *, until: float = math.inf,
                  report: Report = lambda _: None) -> Iterator[Sample]:
    """Short runs of whole batches. `allocator_overhead`: the most that the caching allocator held over the most that was allocated; `context_bytes`
    and `step_overhead` of each run; `in_step`: forward and backward over what `calibration` makes of their blocks, in steps that the device makes."""
    over, excess = [], defaultdict(list)
    for plan in plans:
        if time.perf_counter() > until and over:
            break
        trainer = short_run(plan, device, WARMUP_STEPS + STEPS)
        over.append(torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated() - 1.0)
        steps = trainer.phases[WARMUP_STEPS:]
        del trainer
        took = {phase: statistics.median(step[phase] for step in steps) for phase in (FORWARD, BACKWARD, "other")}
        launched = sum(t.host_seconds for t in lower(plan, calibration).graph.tasks)
        made = estimate(plan, calibration)
        yield from (constant("context_bytes", context_bytes()), constant("step_overhead", min(took["other"], STEP_OVERHEAD_SECONDS)))
        if launched > DEVICE_BOUND * sum(statistics.median(step[phase] for step in steps) for phase in steps[0]):
            report(f"whole: {plan.model.name}: the host makes its steps")
            continue
        for phase in (FORWARD, BACKWARD):
            excess[phase].append(took[phase] / made.phases[phase].value)
        report(f"whole: {plan.model.name} {layer_policy(plan)}: " + ", ".join(
            f"{phase} {1e3 * took[phase]:.2f} ms, {excess[phase][-1]:.3f} of the prediction" for phase in (FORWARD, BACKWARD)))
    yield constant("allocator_overhead", max(over))
    for phase, ratios in excess.items():
        if len(ratios) >= FEWEST:
            yield constant("in_step", min(max(statistics.median(ratios), IN_STEP[0]), IN_STEP[1]), phase)


def short_run(plan: Plan, device: torch.device, steps: int) -> Trainer:
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


def layer_policy(plan: Plan) -> str:
    """The checkpoint policy of a plan's first layer."""
    return next((r for r in plan.regions if r.region.split(".")[-1].isdigit()), plan.regions[0]).options[0].checkpoint


def under(plan: Plan, policy: str) -> Plan:
    """The plan with every layer of its histories under `policy`."""
    layers = {r.name for r in regions(plan.model) if r.layer}
    return dataclasses.replace(plan, fingerprints={}, regions=tuple(
        dataclasses.replace(r, options=tuple(dataclasses.replace(o, checkpoint=policy) for o in r.options)) if r.region in layers else r
        for r in plan.regions))
