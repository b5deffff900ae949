"""What the main thread spends on each part of a step (`costmodel.hosttime`), from short runs of the trainer itself.

Batches are so small that nothing waits for the device. The runs differ in how many layers there are, of which kind, under which policy and precision,
in micro-batches, in regions and in parameter tensors; what each of these takes is the least-squares solution of the main thread's time by phase. So
everything counts that the interpreter does in a step, and no launch has to be timed out of its place.
"""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from costmodel.hosttime import PASSES, layer_name, products
from costmodel.lower import batch_shape
from costmodel.ops import BACKWARD
from costmodel.plan import Plan, RegionOption, RegionPlan
from costmodel.regions import regions
from costmodel.samples import Sample
from costmodel.workload import Lengths
from runtime.microbench.gpu import POLICIES, Report, constant, layer_precision
from runtime.microbench.trained import layer_policy, short_run
from runtime.trainer import WARMUP_STEPS

# Steps that are timed; histories, events of a history and rows of a table; layers of the runs that tell a layer from the rest.
STEPS, SAMPLES, LENGTH, ROWS, FEW, MANY, SOME = 10, 4, 264, 1000, 1, 4, 3
# Of the runs' rests that is taken: in some the report waits for the device.
REST_QUANTILE = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A run: how often each part occurs in forward and backward of a micro-batch, products with ever other rows by direction, and median main-thread
    seconds by phase."""

    parts: Mapping[str, int]
    products: Mapping[str, int]
    micro: int
    groups: int
    tensors: int
    phases: Mapping[str, float]


def host_samples(plans: Sequence[Plan], device: torch.device, *, until: float, report: Report = lambda _: None) -> Iterator[Sample]:
    """Constants `host` from runs of the designs until the clock says `until`."""
    runs: list[Spent] = []
    wanted = designs(plans)
    for number, plan in enumerate(wanted):
        if time.perf_counter() > until:
            report(f"out of time for the host before run {number + 1}/{len(wanted)}")
            break
        try:
            runs.append(spent(plan, device))
        except RuntimeError as error:
            report(f"host: {plan.model.name}: {str(error).splitlines()[0][:200]}")
    for name, value in solved(runs, report).items():
        yield constant("host", value, name)


def spent(plan: Plan, device: torch.device) -> Spent:
    """Runs a plan for a few steps."""
    trainer = short_run(plan, device, WARMUP_STEPS + STEPS)
    steps = trainer.timer.host[WARMUP_STEPS:]
    phases = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    return Spent(parts=parts(plan), products={phase: varied_products(plan, phase) for phase in PASSES}, micro=plan.accumulation,
                 groups=len(plan.model.tables), phases=phases, tensors=sum(1 for _ in trainer.model.dense.parameters()))


def parts(plan: Plan) -> dict[str, int]:
    """How many of each part (`costmodel.hosttime.layer_name`) a micro-batch passes."""
    found: dict[str, int] = defaultdict(int)
    options = {r.region: r.options for r in plan.regions}
    for region in regions(plan.model):
        for option in options[region.name]:
            found[layer_name(region.block, option.precision, option.checkpoint)] += option.count
    return dict(found)


def varied_products(plan: Plan, phase: str) -> int:
    """Products of a micro-batch in one direction whose rows differ from step to step."""
    options, batch = {r.region: r.options for r in plan.regions}, batch_shape(plan)
    return sum(option.count * products(region.block, batch, option.precision, phase, option.checkpoint)
               for region in regions(plan.model) for option in options[region.name])


def solved(runs: Sequence[Spent], report: Report = lambda _: None) -> dict[str, float]:
    """Seconds of every part: the non-negative ones with the least relative error."""
    if not runs:
        return {}
    found = {}
    for phase in PASSES:
        rows = [({f"{phase}:{name}": r.micro * count for name, count in r.parts.items()}
                 | {f"{phase}:loss": r.micro, f"{phase}:product": r.micro * r.products[phase]}
                 | ({"accumulate": (r.micro - 1) * r.tensors} if phase == BACKWARD else {}), r.phases[phase]) for r in runs]
        found |= _least(rows, phase, report)
    found |= _least([({"lookup": r.micro * r.groups, "update": r.groups}, r.phases["sparse"]) for r in runs], "sparse", report)
    found |= _least([({"optimizer": 1, "tensor": r.tensors}, r.phases["optimizer"]) for r in runs], "optimizer", report)
    found |= _least([({"input": r.micro}, r.phases["input"]) for r in runs], "input", report)
    found["other"] = float(np.quantile([r.phases["other"] for r in runs], REST_QUANTILE))
    return found


def _least(rows: Sequence[tuple[Mapping[str, int], float]], what: str, report: Report) -> dict[str, float]:
    """Non-negative values of the names with sum(count x value) = seconds, by relative least squares, then again without the runs that something else
    disturbed. Of several solutions the one that spreads evenly."""
    from scipy.optimize import nnls

    names = sorted({name for counts, _ in rows for name in counts})
    matrix = np.array([[counts.get(name, 0) for name in names] for counts, _ in rows], dtype=np.float64)
    seconds = np.array([max(value, 1e-9) for _, value in rows])
    relative, typical = matrix / seconds[:, None], float(np.median(seconds))
    weights = np.ones(len(rows))
    for _ in range(3):
        system = np.vstack([relative * weights[:, None], np.eye(len(names)) * 1e-3 / typical])
        values = nnls(system, np.concatenate([weights, np.zeros(len(names))]))[0]
        off = np.abs(relative @ values - 1.0)
        weights = 1.0 / np.maximum(1.0, off / max(2.0 * float(np.median(off)), 0.01))
    report(f"host: {what}: off by {float(np.median(off)):.1%} in the median, {float(off.max()):.1%} at most; "
           + ", ".join(f"{name} {1e6 * value:.0f}" for name, value in zip(names, values)) + " us")
    return dict(zip(names, map(float, values)))


# --- what is run ---


def designs(plans: Sequence[Plan]) -> list[Plan]:
    """Small plans of the layers of `plans`: each kind with few and with many layers, under every policy; with and without a feed-forward part; on
    histories of all lengths; on two micro-batches; with other regions around it; in other precisions."""
    kinds: dict[str, dict[bool, Plan]] = defaultdict(dict)
    others: dict[tuple[str, str], Plan] = {}
    shapes: dict[tuple, Plan] = {}
    for plan in plans:
        layers = [layer for s in plan.model.sequences for layer in s.layers]
        if not layers:
            continue
        if layer_precision(plan) != "bf16":
            others.setdefault((layer_precision(plan), layers[0].kind), plan)
            continue
        kinds[layers[0].kind].setdefault(bool(layers[0].mlp_dim), plan)
        shapes.setdefault((bool(plan.model.num_dense_features), *sorted({layer.kind for layer in plan.model.interaction_layers})), plan)
    first = [next(iter(made.values())) for made in kinds.values()]
    second = [plan for made in kinds.values() for plan in list(made.values())[1:]]
    found = [small(plan, count) for plan in first for count in (FEW, MANY)]
    found += [small(plan, SOME, policy=policy, varied=True) for policy in ("none", "full") for plan in first]
    found += [small(plan, SOME, micro=2, policy=policy) for plan, policy in zip(first, ("none", *POLICIES, "none"))]
    found += [small(plan, count, policy=policy) for policy in POLICIES if policy != "none" for plan in first for count in (FEW, MANY)]
    found += [small(plan, SOME, policy=policy) for policy in POLICIES for plan in second]
    around = list(shapes.values())
    found += [small(plan, SOME) for plan in around] + [small(plan, SOME, interactions=2) for plan in around if plan.model.interaction_layers]
    found += [small(plan, count) for (_, plan), count in zip(others.items(), (FEW, MANY) * len(others))]
    return found


def small(plan: Plan, count: int, *, micro: int = 1, policy: str | None = None, interactions: int | None = None, varied: bool = False) -> Plan:
    """The plan with `count` layers a group under `policy` (default: its own), on `micro` batches of a few short histories, `varied` in length or not,
    and tables of few rows; `interactions`: times that each interaction layer is there."""
    own, precision = policy or layer_policy(plan), layer_precision(plan)
    model = dataclasses.replace(
        plan.model, tables=tuple(dataclasses.replace(t, rows=min(t.rows, ROWS)) for t in plan.model.tables),
        sequences=tuple(dataclasses.replace(s, layers=tuple(dataclasses.replace(g, count=count) for g in s.layers)) for s in plan.model.sequences),
        interaction_layers=tuple(dataclasses.replace(g, count=interactions or g.count) for g in plan.model.interaction_layers))
    kind = "uniform" if varied else "fixed"
    lengths = {s.name: Lengths(kind=kind, maximum=min(LENGTH, plan.workload.lengths[s.name].maximum)) for s in plan.model.sequences}
    workload = dataclasses.replace(plan.workload, lengths=lengths, global_batch=micro * SAMPLES, local_batch=None)
    known = {r.region: r.options[0] for r in plan.regions}
    options = []
    for region in regions(model):
        given = known[region.name].precision if region.name in known else precision
        options.append(RegionPlan(region=region.name, options=(
            RegionOption(count=region.count, precision=given, checkpoint=own if region.layer else "none"),)))  # type: ignore[arg-type]
    return dataclasses.replace(plan, model=model, workload=workload, local_batch=SAMPLES, accumulation=micro, regions=tuple(options), fingerprints={})
