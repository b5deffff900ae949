"""What only whole batches in the trainer show: the allocator's slack, the context, what blocks cost within a step."""
from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from costmodel.calibration import Calibration
from costmodel.compute import peak_flops
from costmodel.estimate import estimate, steady_of
from costmodel.lower import lower
from costmodel.ops import BACKWARD, FORWARD
from costmodel.plan import Plan
from costmodel.pricer import STEP_OVERHEAD_SECONDS
from costmodel.regions import regions
from costmodel.samples import Sample
from runtime.data import open_source
from runtime.microbench.gpu import Report, constant, context_bytes, layer_precision
from runtime.microbench.speed import Probed, Speeds
from runtime.trainer import WARMUP_STEPS, Trainer

# Steps of a run.
STEPS = 8
# Launches over a step of whole batches up to which the device makes it; runs that `in_step` needs, and its bounds.
DEVICE_BOUND, FEWEST, IN_STEP = 0.7, 3, (0.9, 1.15)
# Of steps that the host makes: steps of a run, the share of their time that the device needs, policies in turns, bounds of `in_step/host`, samples of
# a batch at least. Without it the five plans of seed 20265 whose steps the host made were predicted 16 % too fast, and six more that gave intervals
# 22 %, from parts timed on tiny batches [Measured: H200, 2026-12-01].
HOST_STEPS, HOST_BATCH, HOST_POLICIES, IN_HOST_STEP, FEWEST_SAMPLES = 16, 0.6, ("none", "full", "selective"), (0.8, 1.6), 4
TRIMMED = 0.1
# What an allocator with growing segments held at most over what was allocated, in 65 runs of which a calibration's dozen need not have the worst
# [Measured: one H200, 2026-12-01: `benchmarks.fidelity --device cuda --seed 4242`, at commit fe53ab7; later seeds have no part in it].
LEAST_SLACK = 0.13
# A slope of 0.3 weighs as much as a run that is off by 3 %; the most that is believed.
SLOPE_HELD, MOST_SLOPE = 0.1, 0.6


def whole_samples(calibration: Calibration, plans: list[Plan], device: torch.device, *, speeds: Speeds, until: float = math.inf,
                  report: Report = lambda _: None) -> Iterator[Sample]:
    """Short runs of whole batches. `allocator_overhead`: the most that the caching allocator held over the most that was allocated; `step_overhead`
    of each run; `in_step`: forward and backward over what `calibration` makes of their blocks, in steps that the device makes. `calibration` has the
    host at full speed; what it was is added to `speeds`."""
    over: list[float] = []
    excess: list[tuple[str, float, float]] = []
    for plan in plans:
        if time.perf_counter() > until and over:
            break
        trainer = short_run(plan, device, WARMUP_STEPS + STEPS)
        over.append(torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated() - 1.0)
        steps = trainer.phases[WARMUP_STEPS:]
        slow = float(speeds.of(trainer.timer, steps, WARMUP_STEPS).mean())
        del trainer
        took = {phase: statistics.median(step[phase] for step in steps) for phase in (FORWARD, BACKWARD, "other")}
        tasks = lower(plan, calibration).graph.tasks
        launched = slow * sum(t.host_seconds for t in tasks)
        made = estimate(plan, calibration)
        yield constant("step_overhead", min(took["other"], STEP_OVERHEAD_SECONDS))
        if launched > DEVICE_BOUND * sum(statistics.median(step[phase] for step in steps) for phase in steps[0]):
            report(f"whole: {plan.model.name}: the host makes its steps")
            continue
        peak = peak_flops(plan.cluster.device, layer_precision(plan))
        for phase in (FORWARD, BACKWARD):
            seconds = made.phases[phase].value
            excess.append((phase, sum(t.flops for t in tasks if t.phase == phase) / (seconds * peak), took[phase] / seconds))
        report(f"whole: {plan.model.name} {layer_policy(plan)}: " + ", ".join(
            f"{phase} {1e3 * took[phase]:.2f} ms, {ratio:.3f} of the prediction, {used:.0%} of the peak" for phase, used, ratio in excess[-2:]))
    yield constant("allocator_overhead", max(LEAST_SLACK, *over))
    for name, value in in_step(excess).items():
        yield constant("in_step", value, name)


def host_samples(calibration: Calibration, plans: Sequence[Plan], device: torch.device, *, speeds: Speeds, until: float = math.inf,
                 report: Report = lambda _: None) -> Iterator[Sample]:
    """`in_step/host`: steps that the host makes, at full speed, over what `calibration` makes of their parts at full speed, from plans whose batches
    are made so small that the host makes them, with histories and models of their own: the median of the runs, whose steps' mean is taken without
    the fastest and slowest tenth. The speeds of the host are added to `speeds`."""
    ratios: list[float] = []
    for number, plan in enumerate(plans):
        if time.perf_counter() > until:
            break
        wanted = host_made(under(plan, HOST_POLICIES[number % len(HOST_POLICIES)]), calibration)
        if wanted is None:
            continue
        made = estimate(wanted, calibration).step_time.value
        trainer = short_run(wanted, device, WARMUP_STEPS + HOST_STEPS)
        phases = trainer.phases[WARMUP_STEPS:]
        slow = speeds.of(trainer.timer, phases, WARMUP_STEPS)
        steps = sorted(sum(step.values()) / by for step, by in zip(phases, slow))
        del trainer
        cut = int(TRIMMED * len(steps))
        ratios.append(statistics.fmean(steps[cut:len(steps) - cut]) / made)
        report(f"whole: {plan.model.name} {layer_policy(wanted)}, {wanted.local_batch} samples: {ratios[-1]:.3f} of the host's {1e3 * made:.1f} ms "
               f"at full speed, than which it was {slow.mean():.2f} times slower")
    if len(ratios) >= FEWEST:
        median = statistics.median(ratios)
        kept = min(max(median, IN_HOST_STEP[0]), IN_HOST_STEP[1])
        if kept != median:
            report(f"whole: steps of the host take {median:.3f} of their parts, out of bounds: {kept} is kept")
        yield constant("in_step", kept, "host")


def context_sample(plan: Plan, device: torch.device) -> Iterator[Sample]:
    """`context_bytes` of a process that has trained `plan` for a step. A kernel that spills makes it larger for good: before any of fp32, which few
    plans run, it was 1.39 GB, after all of a calibration 5.48 GB [Measured: H200, 2026-12-01]."""
    trainer = short_run(plan, device, 1)
    yield constant("context_bytes", context_bytes())
    del trainer
    empty(device)


def host_made(plan: Plan, calibration: Calibration) -> Plan | None:
    """The plan on a batch, no larger than its own, with which its device is predicted to need HOST_BATCH of the host's time; None where there is
    none."""
    batch = plan.local_batch
    for _ in range(3):  # the device's time is not quite proportional to the batch
        found = dataclasses.replace(plan, local_batch=batch, fingerprints={}, workload=dataclasses.replace(
            plan.workload, global_batch=batch * plan.accumulation, local_batch=None))
        steady = steady_of(found, calibration)
        if steady is None or steady.device <= HOST_BATCH * steady.launch or batch == FEWEST_SAMPLES:
            break
        batch = max(FEWEST_SAMPLES, int(batch * HOST_BATCH * steady.launch / steady.device))
    return found if estimate(found, calibration).maker == "host" else None


def in_step(rows: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """From (phase, share of the peak FLOP/s that its blocks reach alone, seconds in the step over theirs): the factor of each phase at the share
    `utilisation`, and what its logarithm gains with that share, `slope`: a device that computes without a pause lowers its clock. Empty for few
    runs."""
    phases = sorted({phase for phase, *_ in rows})
    if len(rows) < FEWEST * len(phases) or not rows:
        return {}
    used, logs = np.array([u for _, u, _ in rows]), np.log([ratio for *_, ratio in rows])
    mean = float(used.mean())
    columns = np.array([[*(float(phase == name) for name in phases), u - mean] for phase, u, _ in rows])
    weights = np.ones(len(rows))
    for _ in range(3):  # runs that something disturbed count less
        system = np.vstack([columns * weights[:, None], [*[0.0] * len(phases), SLOPE_HELD]])
        found = np.linalg.lstsq(system, np.concatenate([logs * weights, [0.0]]), rcond=None)[0]
        off = np.abs(columns @ found - logs)
        weights = 1.0 / np.maximum(1.0, off / max(2.0 * float(np.median(off)), 0.01))
    slope = min(max(float(found[-1]), 0.0), MOST_SLOPE)
    if slope != found[-1]:
        logs = logs - slope * (used - mean)
        found = [float(np.median([y for (phase, *_), y in zip(rows, logs) if phase == name])) for name in phases]
    factors = {name: min(max(math.exp(c), IN_STEP[0]), IN_STEP[1]) for name, c in zip(phases, found)}
    return {**factors, "utilisation": mean, "slope": slope}


def short_run(plan: Plan, device: torch.device, steps: int) -> Trainer:
    """A trainer after `steps` steps, in an allocator that held nothing before; its timer is Probed."""
    empty(device)
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=device, timer=Probed(device))
    trainer.train(steps)
    trainer.phases += trainer.timer.finished(wait=True)
    return trainer


def empty(device: torch.device) -> None:
    """Leaves the allocator nothing of what nobody holds, nor workspaces that cuBLAS keeps: each run takes its own, as a process of its own would."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def layer_policy(plan: Plan) -> str:
    """The checkpoint policy of a plan's first layer."""
    return next((r for r in plan.regions if r.region.split(".")[-1].isdigit()), plan.regions[0]).options[0].checkpoint


def under(plan: Plan, policy: str) -> Plan:
    """The plan with every layer of its histories under `policy`."""
    layers = {r.name for r in regions(plan.model) if r.layer}
    return dataclasses.replace(plan, fingerprints={}, regions=tuple(
        dataclasses.replace(r, options=tuple(dataclasses.replace(o, checkpoint=policy) for o in r.options)) if r.region in layers else r
        for r in plan.regions))
