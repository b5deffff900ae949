"""What a plan costs: step time with its breakdown, memory, what limits it, throughput and dollars - each with interval and source.

    interval     within one curve errors add up, between curves they are independent: spread = sqrt(sum over curves (sum of seconds x width)^2);
                 where the calibration holds residuals of enough runs (neither fitted nor scored), their quantiles take its place
                 (costmodel.conformal), widened by how much of the time is extrapolated or worse
    step         the simulated schedule; on one GPU the steady state of device, host and loader where the host has a lead (costmodel.gpu); on several
                 that of ranks which meet in their collectives (costmodel.peers)
    phases       a run reports means over ranks, on which the slowest rank's extra work is waiting: phases are the average rank's, and the step
                 minus their sum is exposed communication
    maker        what makes the step on GPUs: `device`, `host`, or `either` where that hangs on how fast the host happens to be
                 (`costmodel.hosttime.HostTimes.may_make`); residuals are told apart by it
    local MFU    model FLOPs / (step without exposed communication and contention x dense peak of bf16, on a CPU of fp32)
    limiting     the largest of: exposed communication by tier, input, host (launches and waits), compute and hbm_bandwidth
                 (device time by its ops' roof)
"""
from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

from costmodel import peers
from costmodel.calibration import Calibration
from costmodel.compute import peak_flops
from costmodel.conformal import widening
from costmodel.gpu import Steady, has_lead, launches, pieces, without_launches
from costmodel.imbalance import slowest_rank
from costmodel.lower import Factors, Lowered, lower
from costmodel.memory import Memory, memory
from costmodel.plan import Plan
from costmodel.pricer import pricer
from costmodel.quantity import SOURCES, Quantity, Source, worst
from costmodel.simulate import Timeline, bound, simulate
from costmodel.stepgraph import COMPUTE, PHASES

# Relative half-width that a step keeps even where every op is well known: what no op curve holds [Assumed until runs
# say better].
FLOOR_WIDTH = {"cpu": 0.12, "gpu": 0.06}
WAITED_PHASES = ("input", "sparse", "forward", "backward", "optimizer")
# By what `HostTimes.may_make` says.
MAKERS: dict[bool | None, Literal["host", "device", "either"]] = {True: "host", False: "device", None: "either"}
# A source that makes less than this share of a figure does not name it.
NEGLIGIBLE = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One plan's prediction. Seconds, bytes, FLOPs, dollars.

    phases sum to the step. limiting: e.g. `compute`, `hbm_bandwidth`, `communication:rdma`, `input`, `host`. flops_per_rank: model FLOPs of a step;
    local_mfu with `mfu_peak` as its denominator [FLOP/s]. by_source: share of serial time by source. exposed: seconds by tier. imbalance: the
    slowest rank over the average by what it counts. alone: seconds in which a collective runs on a device and no compute does, mean over ranks, as a
    trace shows them; not those in which compute waits for the host as well (`exposed_communication`). host: main-thread seconds of a step in which
    the host has a lead over the device, and device: what it is compared with; None elsewhere.
    """

    step_time: Quantity
    phases: dict[str, Quantity]
    memory: Memory
    limiting: str
    flops_per_rank: float
    local_mfu: float | None
    mfu_peak: float
    examples_per_second: float
    dollars_per_billion_examples: float | None
    by_source: dict[str, float]
    mode: Literal["simulated", "bound"]
    exposed: dict[str, float]
    imbalance: dict[str, float]
    maker: Literal["host", "device", "either"] = "device"
    notes: tuple[str, ...] = ()
    alone: float = 0.0
    host: float | None = None
    device: float | None = None


def estimate(plan: Plan, calibration: Calibration | None, *, mode: Literal["simulated", "bound"] = "simulated") -> Estimate:
    """Predicts one step of `plan`; without a calibration every time is roofline. Raises ValueError where the plan does not fit its own parts."""
    slowest = slowest_rank(plan)
    factors = {name: Factors(tokens=f.tokens, pairs=f.pairs) for name, f in slowest.sequences.items()}
    lowered = lower(plan, calibration, factors=factors)
    leads = plan.cluster.device.kind == "gpu" and has_lead(lowered.graph)
    graph = without_launches(lowered.graph) if leads else lowered.graph
    met = peers.step_of(plan, calibration, lowered, factors) if mode == "simulated" else None
    timeline = met.slow if met is not None else simulate(graph) if mode == "simulated" else None
    several = plan.cluster.device.kind == "gpu" and plan.layout.world_size > 1
    least = (lambda of: peers.least(of, pricer(plan, calibration).host)) if several else bound
    own = met.seconds if met is not None else timeline.step_seconds if timeline is not None else least(graph)
    steady = _steady(plan, calibration, lowered, own) if leads else None
    seconds = (own if steady is None or met is not None else steady.seconds) * slowest.slow_node
    if steady is not None:
        seconds = max(seconds, steady.load * slowest.slow_node)
    uneven = any(f.tokens > 1.0 or f.pairs > 1.0 for f in factors.values())
    average = timeline if met is None else met.mean
    if uneven and timeline is not None and met is None:
        other = lower(plan, calibration).graph
        average = simulate(without_launches(other) if leads else other)
    parts = _phase_seconds(lowered, average, (own if met is None else seconds / slowest.slow_node) * slowest.slow_node)
    if steady is not None and met is None:
        parts = steady.phases(parts)
        total = sum(parts.values())
        parts = {name: value * seconds / total if total > 0 else value for name, value in parts.items()}
    host = device = None
    maker = "device"
    if steady is not None:
        host, device = steady.launch, max(_compute_seconds(lowered) if met is not None else steady.device, steady.load)
        maker = MAKERS[pricer(plan, calibration).host.may_make(host, device)]
    sources = _by_source(lowered)
    widened = widening(sources)
    step = _interval(seconds, lowered.parts, "step", plan, calibration, seconds, maker, widened)
    phases = {name: _interval(value, [p for p in lowered.parts if p[0] == name], name, plan, calibration, seconds, maker, widened)
              for name, value in parts.items()}
    samples = plan.local_batch * plan.accumulation * plan.layout.world_size
    peak = peak_flops(plan.cluster.device, "bf16" if plan.cluster.device.kind == "gpu" else "fp32")
    exposed = timeline.exposed if timeline is not None else {}
    local = seconds - sum(exposed.values()) - (timeline.contention if timeline is not None else 0.0)
    price = plan.cluster.price
    rate = samples / seconds
    return Estimate(
        step_time=step, phases=phases, memory=memory(plan, lowered.batch, lowered.loads, calibration),
        limiting=_limiting(lowered, timeline, parts, steady),
        flops_per_rank=lowered.model_flops, local_mfu=lowered.model_flops / (local * peak) if local > 0 else None, mfu_peak=peak,
        examples_per_second=rate, by_source=sources, mode=mode, exposed=exposed, imbalance=slowest.report(), maker=maker,
        host=host, device=device, notes=lowered.notes, alone=average.alone if average is not None else 0.0,
        dollars_per_billion_examples=None if price is None else 1e9 / rate * plan.layout.world_size * price.dollars_per_device_hour / 3600)


def steady_of(plan: Plan, calibration: Calibration | None) -> Steady | None:
    """Device, host and loader of a step of a plan on one GPU, in which the host has a lead; None where it has none."""
    lowered = lower(plan, calibration)
    if plan.cluster.device.kind != "gpu" or not has_lead(lowered.graph):
        return None
    return _steady(plan, calibration, lowered, simulate(without_launches(lowered.graph)).step_seconds)


def _compute_seconds(lowered: Lowered) -> float:
    return sum(task.seconds for task in lowered.graph.tasks if task.stream == COMPUTE)


def _steady(plan: Plan, calibration: Calibration | None, lowered: Lowered, device: float) -> Steady:
    """Device, host and loader of a step in which the host has a lead."""
    host = pricer(plan, calibration).host
    micro, rest = host.get("input") or 0.0, host.get("other") or 0.0
    found = launches(lowered.graph)
    added, adding = lowered.accumulated
    found = {**found, "input": found["input"] + micro * plan.accumulation, "backward": found["backward"] + adding, "other": found["other"] + rest}
    return Steady(device=device + added, launches=found, load=lowered.load,
                  pieces=pieces(lowered.graph, early=lowered.early, accumulated=lowered.accumulated, micro=micro, rest=rest))


def _phase_seconds(lowered: Lowered, timeline: Timeline | None, seconds: float) -> dict[str, float]:
    """Main-thread seconds by phase of the average rank, summing to `seconds`. A bound has compute by phase, and what it must wait beyond."""
    phases = dict.fromkeys(PHASES, 0.0)
    if timeline is not None:
        timeline = _with_waiting(timeline, lowered.waiting)
        # a curve that is not monotone can make the slowest rank no slower: then everything shrinks alike
        scale = min(1.0, seconds / timeline.step_seconds) if timeline.step_seconds > 0 else 1.0
        phases |= {name: value * scale for name, value in timeline.phases.items()}
        phases["exposed_communication"] += max(0.0, seconds - timeline.step_seconds)
        return phases
    for task in lowered.graph.tasks:
        if task.stream == COMPUTE:
            phases[task.phase] += task.seconds
    phases["exposed_communication"] += max(0.0, seconds - sum(phases.values()))
    return phases


def _with_waiting(timeline: Timeline, waiting: float) -> Timeline:
    """Takes what ranks wait for slower ones out of the phases of compute: the main thread sees it at the next collective."""
    if waiting == 0:
        return timeline
    waited = {name: seconds * waiting / (1.0 + waiting) for name, seconds in timeline.phases.items() if name in WAITED_PHASES}
    phases = {name: seconds - waited.get(name, 0.0) for name, seconds in timeline.phases.items()}
    phases["exposed_communication"] = phases.get("exposed_communication", 0.0) + sum(waited.values())
    return dataclasses.replace(timeline, phases=phases)


def _interval(value: float, parts: object, name: str, plan: Plan, calibration: Calibration | None, step: float, maker: str,
              widened: float) -> Quantity:
    """`value` of a step of `step` seconds with its 90 % interval, see the module docstring."""
    by_curve: dict[str, float] = defaultdict(float)
    by_source: dict[Source, float] = defaultdict(float)
    total = 0.0
    for _, curve, source, seconds, spread in parts:
        by_curve[curve] += spread
        total += seconds
        by_source[source] += seconds
    source = worst(s for s, seconds in by_source.items() if seconds > NEGLIGIBLE * total)
    width = math.sqrt(sum(s * s for s in by_curve.values())) / total if total > 0 else 0.0
    found = None
    if calibration is not None:
        found = calibration.intervals.bounds(name, maker, value, step, widened=widened)
    if found is not None:
        return Quantity(value=value, low=found[0], high=found[1], source=source)
    width = max(width, FLOOR_WIDTH[plan.cluster.device.kind])
    return Quantity(value=value, low=value * math.exp(-width), high=value * math.exp(width), source=source)


def _by_source(lowered: Lowered) -> dict[str, float]:
    seconds: dict[Source, float] = defaultdict(float)
    for _, _, source, part, _ in lowered.parts:
        seconds[source] += part
    total = sum(seconds.values())
    return {source: seconds[source] / total for source in SOURCES if seconds[source] > 0} if total > 0 else {}


def _limiting(lowered: Lowered, timeline: Timeline | None, phases: Mapping[str, float], steady: Steady | None) -> str:
    compute = sum(t.seconds for t in lowered.graph.tasks if t.stream == COMPUTE and t.phase != "input")
    causes = {"compute": lowered.compute_bound, "hbm_bandwidth": max(0.0, compute - lowered.compute_bound), "input": phases["input"]}
    if timeline is not None:
        causes |= {f"communication:{tier}": seconds for tier, seconds in timeline.exposed.items()}
        causes["host"] = timeline.idle.get("launch", 0.0) + timeline.idle.get("host", 0.0)
    if steady is not None:
        causes["host"] = max(0.0, steady.launch - max(steady.device, steady.load))
        if causes["host"] > 0:
            causes["input"] = 0.0
    return max(causes, key=lambda name: causes[name])
