"""No feasible plan: what was tried, by how much it failed, what is large, and ways out - each of them solved before it is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from costmodel.memory import CATEGORIES
from costmodel.units import show, show_gib
from planner.ilp import Choice, missing_memory
from planner.pricing import Priced
from planner.scenario import Exclusions, ResolvedScenario

if TYPE_CHECKING:
    from planner.search import Search

_TRIED = 12
"""Candidates whose missing memory is solved for exactly: those with the lowest first bound of memory."""
_KNOB_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeastBad:
    """The candidate that lacks the fewest bytes: its plan at the leanest options, and what a rank and a host are missing [bytes]."""

    candidate: int
    missing: float
    host_missing: float
    choice: Choice
    priced: Priced


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A change that was tried: `what` in the scenario's words, the step time it leads to [s], or None where time ran out before a plan was found."""

    what: str
    seconds: float | None


def report(state: Search) -> str:
    """The message of NoFeasiblePlan."""
    found = least_bad(state)
    scenario, limit = state.scenario, state.scenario.cluster.usable_memory
    budget = scenario.cluster.memory_budget
    reserved = f" (memory_budget; the device has {show_gib(scenario.cluster.device.memory_bytes)})" if budget is not None and budget == limit else ""
    by = f"({int((~state.fits).sum()):,} by their least memory, {state.solves} by their integer program)"
    if found is None and scenario.search.risk_budget is not None:
        lines = [
            f"scenario {scenario.name}: none of {len(state.first):,} candidates keeps the search.risk_budget of {scenario.search.risk_budget:g}: the "
            f"formats that are left take at least {least_risk(state):g} [bf16 blocks]"
        ]
    else:
        lines = [f"scenario {scenario.name}: none of {len(state.first):,} candidates fits into {show_gib(limit)} per rank{reserved} {by}"]
    if found is not None:
        where = state.space.candidates.describe(found.candidate)
        memory = found.priced.memory
        parts = sorted(((memory.categories[name], name) for name in CATEGORIES if memory.categories[name] > 0), reverse=True)[:4]
        host = found.host_missing
        short = [f"{show_gib(found.missing)} missing"] if found.missing > 0 else []
        short += [f"{show_gib(host)} of host memory missing: {show_gib(scenario.cluster.host_memory_bytes)} a host"] if host > 0 else []
        lines.append(f"least bad: {where}: {', '.join(short) or 'its tables fit on no ranks together'}")
        lines.append(
            "its largest parts: "
            + ", ".join(f"{name.replace('_', ' ')} {show_gib(size)}" for size, name in parts)
            + f"; reserved {show_gib(memory.reserved.value)}, peak in phase {memory.peak_phase}"
        )
    lines += [f"table {name}: {text}" for name, text in oversized(state)]
    tried = list(ways_out(state, found))
    knobs = [(knob.what, knob.seconds) for knob in tried if knob.seconds is not None]
    undecided = [knob.what for knob in tried if knob.seconds is None]
    if knobs:
        lines.append("ways out, each solved:")
        lines += [f"  {k}. {what}: step {show(seconds, 'seconds')}" for k, (what, seconds) in enumerate(knobs, start=1)]
    elif not undecided:
        lines.append("no single change that was tried (memory, pins, exclusions, predict-only options) makes a plan fit")
    if undecided:
        lines.append(f"not decided within {_KNOB_SECONDS:g} s each: {'; '.join(undecided)}")
    return "\n".join(lines)


def least_bad(state: Search) -> LeastBad | None:
    """The candidate with the fewest missing bytes, of those whose first bound of memory is lowest and those whose program was infeasible."""
    order = [int(i) for i in np.argsort(state.least_memory, kind="stable")[:_TRIED]]
    best: LeastBad | None = None
    for i in [*order, *[i for i in state.infeasible if i not in order][:_TRIED]]:
        program = state.infeasible.get(i) or state.pricing.program(i)
        missing, choice = missing_memory(program)
        if choice is None or (best is not None and missing >= best.missing):
            continue
        priced = state.pricing.price(state.pricing.plan(i, choice, any_size=True), choice)
        missing = priced.memory.reserved.value - priced.memory.limit
        capacity = state.scenario.cluster.host_memory_bytes
        host = priced.memory.host - capacity if capacity else 0.0
        if best is None or max(missing, 0.0) + max(host, 0.0) < max(best.missing, 0.0) + max(best.host_missing, 0.0):
            best = LeastBad(candidate=i, missing=missing, host_missing=host, choice=choice, priced=priced)
    return best


def least_risk(state: Search) -> float:
    """Numeric risk of the job when every block takes its safest option that is left."""
    return sum(count * min(c.risk for c in state.space.regions[name]) for name, count in state.pricing.blocks.items())


def oversized(state: Search) -> Iterator[tuple[str, str]]:
    """Tables whose smallest legal shard is larger than a rank's memory in every sparse group that is left."""
    limit, pricing = state.scenario.cluster.usable_memory, state.pricing
    groups = [int(g) for g in np.unique(state.space.candidates["sparse_group"])]
    for tied in pricing.tied:
        sizes = []
        for group in groups:
            for choice in pricing.choices(tied, group):
                if choice.sharding == "host_cached":
                    sizes.append(0.0)
                    continue
                rows, width = pricing.shard(tied.group, choice, group)
                sizes.append(tied.group.weight_bytes * rows / tied.group.rows * width / tied.group.dim)
        if min(sizes) > limit:
            names = sorted({c.sharding for g in groups for c in pricing.choices(tied, g)})
            yield (
                tied.name,
                (
                    f"{show_gib(tied.group.weight_bytes)}; its smallest shard is {show_gib(min(sizes))} under {', '.join(names)} in groups "
                    f"of up to {max(groups)} ranks, a rank has {show_gib(limit)}"
                ),
            )


def ways_out(state: Search, found: LeastBad | None) -> Iterator[Knob]:
    """Changes of one thing that lead to a plan, each searched for, and those whose search ran out of time."""
    from planner.search import Search

    for what, scenario in changes(state.scenario, found.missing if found else 0.0, found.host_missing if found else 0.0):
        trial = None
        try:
            trial = Search(scenario, state.calibration, time_limit=_KNOB_SECONDS, gap=0.05)
            trial.run(give_up=True)
        except ValueError:
            if trial is not None and trial.timed_out:
                yield Knob(what=what, seconds=None)
            continue
        if trial.incumbent is not None:
            yield Knob(what=what, seconds=trial.incumbent.seconds)
        elif trial.timed_out:
            yield Knob(what=what, seconds=None)


def changes(scenario: ResolvedScenario, missing: float, host: float = 0.0) -> Iterator[tuple[str, ResolvedScenario]]:
    """(the change in words, the scenario with it): more memory, each pin or exclusion undone, predict-only options, half the batch."""
    pins, cluster = scenario.pins, scenario.cluster
    if missing > 0:
        room = cluster.usable_memory + missing * 1.001 + 1e6
        device = dataclasses.replace(cluster.device, memory_bytes=max(cluster.device.memory_bytes, room))
        of_device = "" if room <= cluster.device.memory_bytes else f" (the device has {show_gib(cluster.device.memory_bytes)})"
        yield (
            f"memory per rank {show_gib(cluster.usable_memory)} -> {show_gib(room)}{of_device}",
            dataclasses.replace(scenario, cluster=dataclasses.replace(cluster, device=device, memory_budget=room)),
        )
    if host > 0:
        more = cluster.host_memory_bytes + host
        yield (
            f"host memory {show_gib(cluster.host_memory_bytes)} -> {show_gib(more)}",
            dataclasses.replace(scenario, cluster=dataclasses.replace(cluster, host_memory_bytes=more)),
        )
    if cluster.memory_budget is not None and cluster.memory_budget < cluster.device.memory_bytes:
        yield (
            f"no memory_budget: {show_gib(cluster.device.memory_bytes)}",
            dataclasses.replace(scenario, cluster=dataclasses.replace(cluster, memory_budget=None)),
        )
    for field in ("layout", "precision", "checkpoint", "sharding", "local_batch", "accumulation", "batching", "transport", "execution"):
        value = getattr(pins, field)
        if value:
            free: object = {} if isinstance(value, dict) else None
            yield f"without the pin {field}: {value}", dataclasses.replace(scenario, pins=dataclasses.replace(pins, **{field: free}))
    if pins.local_batch and pins.accumulation:
        yield (
            "without the pins local_batch and accumulation",
            dataclasses.replace(scenario, pins=dataclasses.replace(pins, local_batch=None, accumulation=None)),
        )
    if scenario.search.risk_budget is not None:
        yield (
            f"without search.risk_budget: {scenario.search.risk_budget:g}",
            dataclasses.replace(scenario, search=dataclasses.replace(scenario.search, risk_budget=None)),
        )
    if pins.exclude != Exclusions():
        yield "without exclusions", dataclasses.replace(scenario, pins=dataclasses.replace(pins, exclude=Exclusions()))
    if not scenario.search.predict_only:
        yield (
            "search: {predict_only: true} (options that no code here executes)",
            dataclasses.replace(scenario, search=dataclasses.replace(scenario.search, predict_only=True)),
        )
    workload = scenario.workload
    field = "local_batch" if workload.local_batch is not None else "global_batch"
    size = getattr(workload, field)
    if size > 1 and size % 2 == 0:
        yield f"workload.{field} {size} -> {size // 2}", dataclasses.replace(scenario, workload=dataclasses.replace(workload, **{field: size // 2}))
