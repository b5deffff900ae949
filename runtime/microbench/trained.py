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
from costmodel.estimate import estimate
from costmodel.gpu import block_key
from costmodel.lower import lower
from costmodel.ops import BACKWARD, FORWARD
from costmodel.plan import Plan
from costmodel.pricer import STEP_OVERHEAD_SECONDS
from costmodel.samples import Sample
from costmodel.workload import Lengths
from runtime.data import open_source
from runtime.microbench.gpu import POLICIES, Report, constant, context_bytes, layer_precision
from runtime.trainer import WARMUP_STEPS, Trainer

# Steps of a run; histories, events of a history and rows of a table of those that time the host; scales of launches alone that are taken, of all and
# of one kind of layers.
STEPS, SMALL_SAMPLES, SMALL_LENGTH, SMALL_ROWS, PLAUSIBLE, OWN_PLAUSIBLE, MOST_FIXED = 12, 8, 264, 1000, (0.5, 2.5), (0.25, 2.5), 0.01
# Main-thread seconds of a step beside its launches [Measured: one H200 host, 2-4 ms]; a scale that is HELD_SCALE from 1, and a rest that is twice
# this or nothing, weigh as much as a run that is off by HELD.
PLAIN_REST, HELD_SCALE, HELD = 3e-3, 0.3, 0.2
# Runs in which a kind's launches were as they were timed alone, added to those of its own: the same steps differ by a sixth within minutes.
DOUBT = 6
# Launches over a step of whole batches up to which the device makes it; runs that `in_step` needs, and its bounds.
DEVICE_BOUND, FEWEST, IN_STEP = 0.7, 3, (0.9, 1.15)



def host_samples(calibration: Calibration, plans: list[Plan], device: torch.device, *, until: float = math.inf,
                 report: Report = lambda _: None) -> Iterator[Sample]:
    """`host_scale` and `step_host` from short runs of batches so small that the device waits for the host: their main thread's time against what
    `calibration` gives for the launches; and `host_scale` of each kind of layers under each policy, from what then remains."""
    runs: list[tuple[Plan, float, float, float]] = []
    for plan in plans:
        if time.perf_counter() > until and runs:
            break
        trainer = _trained(plan, device, WARMUP_STEPS + STEPS)
        spent = statistics.median(sum(step.values()) for step in trainer.timer.host[WARMUP_STEPS:])
        del trainer
        tasks = lower(plan, calibration).graph.tasks
        layers = sum(t.host_seconds for t in tasks if t.name.rsplit(".")[-1].isdigit())
        rest = sum(t.host_seconds for t in tasks) - layers
        report(f"host: {plan.model.name} {layer_policy(plan)} x {plan.accumulation}: launches of layers {1e3 * layers:.1f} ms, others "
               f"{1e3 * rest:.1f} ms; {1e3 * spent:.1f} ms spent")
        if layers > 0:
            runs.append((plan, layers, rest, spent))
    plain = [(layers + rest, spent) for plan, layers, rest, spent in runs if layer_policy(plan) == "none"]
    if not plain:
        return
    scale, fixed = host_fit(plain)
    ratio = statistics.median(took / launched for launched, took in plain)
    if not PLAUSIBLE[0] <= ratio <= PLAUSIBLE[1]:
        report(f"host: {ratio:.2f} times the launches is not taken")
        scale, fixed = 1.0, min(max(statistics.median(took - launched for launched, took in plain), 0.0), MOST_FIXED)
    yield from (constant("host_scale", scale), constant("step_host", fixed))
    own = defaultdict(list)
    for plan, layers, rest, spent in runs:
        found = (spent - fixed - scale * rest) / (scale * layers)
        key = block_key(plan.model.sequences[0].layers[0].kind, layer_precision(plan), layer_policy(plan))
        if OWN_PLAUSIBLE[0] <= found <= OWN_PLAUSIBLE[1]:
            own[key].append(math.log(found))
        else:
            report(f"host: a scale of {found:.2f} for {key} is not taken")
    for key, logs in own.items():
        yield constant("host_scale", math.exp(sum(logs) / (len(logs) + DOUBT)), key)


def whole_samples(calibration: Calibration, plans: list[Plan], device: torch.device, *, until: float = math.inf,
                  report: Report = lambda _: None) -> Iterator[Sample]:
    """Short runs of whole batches. `allocator_overhead`: the most that the caching allocator held over the most that was allocated; `context_bytes`
    and `step_overhead` of each run; `in_step`: forward and backward over what `calibration` makes of their blocks, in steps that the device makes."""
    over, excess = [], defaultdict(list)
    for plan in plans:
        if time.perf_counter() > until and over:
            break
        trainer = _trained(plan, device, WARMUP_STEPS + STEPS)
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
        report(f"whole: {plan.model.name}: forward {excess[FORWARD][-1]:.3f}, backward {excess[BACKWARD][-1]:.3f} of the prediction")
    yield constant("allocator_overhead", max(over))
    for phase, ratios in excess.items():
        if len(ratios) >= FEWEST:
            yield constant("in_step", min(max(statistics.median(ratios), IN_STEP[0]), IN_STEP[1]), phase)


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
    """(scale, rest >= 0) of spent = scale x predicted + rest with the least relative error. Hosts differ from run to run by more than launches and
    the rest can be told apart by, so both are held near what they are where nothing is in the way: launches as timed alone, and `PLAIN_REST`."""
    predicted, spent = np.array(pairs).T
    system = np.concatenate([np.stack([predicted / spent, 1 / spent], axis=1), np.diag([HELD / HELD_SCALE, HELD / PLAIN_REST])])
    scale, rest = np.linalg.lstsq(system, np.concatenate([np.ones(len(pairs)), [HELD / HELD_SCALE, HELD]]), rcond=None)[0]
    if rest < 0 or scale <= 0:
        scale, rest = float(np.median(spent / predicted)), 0.0
    return float(scale), float(rest)


def small_plans(plans: list[Plan]) -> list[Plan]:
    """A few short histories of each block kind in bf16: without checkpoints on one and on two micro-batches, then under each policy."""
    kinds: dict[str, Plan] = {}
    for plan in plans:
        if layer_precision(plan) != "fp32":
            kinds.setdefault(plan.model.sequences[0].layers[0].kind, plan)
    runs = [("none", 1), ("none", 2), *((policy, 1) for policy in POLICIES if policy != "none")]
    return [_small(under(plan, policy), micro) for policy, micro in runs for plan in kinds.values() or plans[:1]]


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
