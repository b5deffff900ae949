"""Levers: changes that could speed a job up, each planned again and simulated again from end to end.

No lever's gain is a kernel's or a link's own: it is the whole step's, under the layout, precision and memory policy that suit the changed job
best. The plan of the unchanged job is always among those compared, so that a search cut short never turns a relief into a loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from costmodel.accounting import Accounting, simulated
from costmodel.calibration import Calibration
from costmodel.cluster import Cluster, Device
from costmodel.codec import encode
from costmodel.estimate import Estimate, estimate
from costmodel.plan import Plan
from planner.configure import default_plan, predict_only
from planner.errors import NoFeasiblePlan, UsageError
from planner.scenario import Pins, ResolvedScenario

Change = Callable[[ResolvedScenario], ResolvedScenario]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change of a job: `constraints` are those that it relieves, `how` is who could pull it."""

    name: str
    constraints: tuple[str, ...]
    how: str
    apply: Change


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A planned job: its plan, estimate and accounting; or, without a feasible plan, the reason. `replanned`: whether another plan than the
    given one was best."""

    plan: Plan | None
    estimate: Estimate | None
    accounting: Accounting | None
    replanned: bool = False
    reason: str = ""

    @property
    def examples_per_second(self) -> float:
        return self.estimate.examples_per_second if self.estimate is not None else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A lever's end-to-end effect against the unchanged job: speedup > 1 is faster, cost_ratio < 1 is cheaper per example; `next_constraint`
    binds when it is pulled."""

    name: str
    constraints: tuple[str, ...]
    how: str
    step_time_s: float | None
    speedup: float | None
    cost_ratio: float | None
    next_constraint: str
    replanned: bool
    layout: str
    reason: str = ""


def scenario_of(plan: Plan, *, pinned: bool = False) -> ResolvedScenario:
    """The job of a plan, for a search: number formats as the plan has them, everything else free (`pinned`: the layout and the batch too)."""
    formats = {region.region: region.options[0].precision for region in plan.regions if len({o.precision for o in region.options}) == 1}
    pins = Pins(precision=formats)
    if pinned:
        layout = {key: value for key, value in encode(plan.layout).items()}
        pins = dataclasses.replace(pins, layout=layout, local_batch=plan.local_batch, accumulation=plan.accumulation, batching=plan.batching,
                                   transport=plan.transport, execution=plan.execution)
    return ResolvedScenario(name=plan.scenario, cluster=plan.cluster, model=plan.model, workload=plan.workload, pins=pins, seed=plan.seed)


# --- the levers of a job ---

def levers(scenario: ResolvedScenario) -> tuple[Lever, ...]:
    """All that apply to this job, in no order."""
    device, tiers = scenario.cluster.device, scenario.cluster.tiers
    found = [
        Lever(name="kernels x2 (compute)", constraints=("compute",), how="kernels", apply=_on_device("compute x2", _double_compute)),
        Lever(name="memory bandwidth x2", constraints=("hbm_bandwidth",), how="fusion, smaller formats, hardware",
              apply=_on_device("bandwidth x2", lambda d: dataclasses.replace(d, memory_bandwidth=2 * d.memory_bandwidth))),
        Lever(name="memory x2", constraints=("hbm_capacity",), how="hardware, offloading", apply=_double_memory),
        Lever(name="local batch x2", constraints=("host", "synchronisation"), how="training recipe", apply=_double_batch),
        Lever(name="balance: base batch shuffling", constraints=("load_balance",), how="data reader", apply=_pin(batching="base_batch_shuffling")),
        Lever(name="balance: global", constraints=("load_balance",), how="data reader, one more exchange a step", apply=_pin(batching="global")),
        Lever(name="layout, checkpoints free", constraints=("hbm_capacity", "load_balance"), how="planner search", apply=_free),
    ]
    for tier in tiers:
        exposed = (f"communication:{tier.name}",)
        found.append(Lever(name=f"{tier.name} bandwidth x2", constraints=exposed, how="network", apply=_double_tier(tier.name)))
        if tier.oversubscription > 1:
            found.append(Lever(name=f"{tier.name} not oversubscribed", constraints=exposed, how="network",
                               apply=_on_tier(tier.name, lambda t: dataclasses.replace(t, oversubscription=1.0))))
    if scenario.cluster.reliability.slow_node_probability > 0:
        found.append(Lever(name="no slow hosts", constraints=("synchronisation",), how="fleet health", apply=_healthy))
    if device.kind == "gpu":
        communication = tuple(f"communication:{t.name}" for t in tiers)
        if communication:
            found.append(Lever(name="SM-free collectives", constraints=communication, how="NCCLX", apply=_pin(transport="ncclx")))
        found.append(Lever(name="CUDA graphs", constraints=("host",), how="runtime", apply=_pin(execution="cuda_graph")))
        if "fp8" in device.peak_flops or "mxfp8" in device.native_formats:
            found.append(Lever(name="fp8 where it is safe", constraints=("compute", "hbm_capacity"), how="precision recipe", apply=_eight_bits))
    return tuple(found)


def _device(cluster: Cluster, suffix: str, change: Callable[[Device], Device]) -> Cluster:
    # another name, so that no curve that was measured on the real device is taken for this one's
    made = change(cluster.device)
    return dataclasses.replace(cluster, device=dataclasses.replace(made, name=f"{cluster.device.name} ({suffix})"))


def _on_device(suffix: str, change: Callable[[Device], Device]) -> Change:
    return lambda s: dataclasses.replace(s, cluster=_device(s.cluster, suffix, change))


def _double_compute(device: Device) -> Device:
    return dataclasses.replace(device, peak_flops={name: 2 * peak for name, peak in device.peak_flops.items()})


def _double_memory(scenario: ResolvedScenario) -> ResolvedScenario:
    cluster, device = scenario.cluster, scenario.cluster.device
    budget = None if cluster.memory_budget is None else 2 * cluster.memory_budget
    device = dataclasses.replace(device, memory_bytes=2 * device.memory_bytes)
    return dataclasses.replace(scenario, cluster=dataclasses.replace(cluster, memory_budget=budget, device=device))


def _double_batch(scenario: ResolvedScenario) -> ResolvedScenario:
    workload, pins = scenario.workload, scenario.pins
    doubled = {key: 2 * value for key in ("local_batch", "global_batch") if (value := getattr(workload, key)) is not None}
    pinned = pins.local_batch and 2 * pins.local_batch
    return dataclasses.replace(scenario, workload=dataclasses.replace(workload, **doubled), pins=dataclasses.replace(pins, local_batch=pinned))


def _pin(**pins: str) -> Change:
    return lambda s: dataclasses.replace(s, pins=dataclasses.replace(s.pins, **pins))


def _on_tier(name: str, change: Callable) -> Change:
    def apply(scenario: ResolvedScenario) -> ResolvedScenario:
        tiers = tuple(change(t) if t.name == name else t for t in scenario.cluster.tiers)
        return dataclasses.replace(scenario, cluster=dataclasses.replace(scenario.cluster, tiers=tiers))
    return apply


def _double_tier(name: str) -> Change:
    return _on_tier(name, lambda t: dataclasses.replace(t, bandwidth=2 * t.bandwidth))


def _free(scenario: ResolvedScenario) -> ResolvedScenario:
    return dataclasses.replace(scenario, pins=Pins(precision=scenario.pins.precision))


def _healthy(scenario: ResolvedScenario) -> ResolvedScenario:
    reliability = dataclasses.replace(scenario.cluster.reliability, slow_node_probability=0.0, slow_node_factor=1.0)
    return dataclasses.replace(scenario, cluster=dataclasses.replace(scenario.cluster, reliability=reliability))


def _eight_bits(scenario: ResolvedScenario) -> ResolvedScenario:
    from costmodel.regions import regions
    from planner.space import HIGH_PRECISION_KINDS

    formats = {r.name: "fp8_row" for r in regions(scenario.model) if r.block.kind not in HIGH_PRECISION_KINDS}
    return dataclasses.replace(scenario, pins=dataclasses.replace(scenario.pins, precision={**scenario.pins.precision, **formats}))


# --- planning and simulating ---

def plan_and_simulate(scenario: ResolvedScenario, calibration: Calibration | None, *, time_limit: float, given: Sequence[Plan] = ()) -> Outcome:
    """The best of what a search of `time_limit` seconds finds and of the `given` plans carried over to this job."""
    found: list[tuple[Plan, Estimate, bool]] = []
    reason = ""
    try:
        from planner.search import search

        plan = search(scenario, calibration=calibration, time_limit=time_limit, gap=scenario.search.gap, top=1).plan
        found.append((plan, estimate(plan, calibration), True))
    except NoFeasiblePlan as error:
        reason = str(error)
    except UsageError as error:
        reason = str(error)
    for plan in given:
        moved = carried_over(plan, scenario)
        if moved is not None:
            made = estimate(moved, calibration)
            if made.memory.fits:
                found.append((moved, made, False))
    if not found:
        return Outcome(plan=None, estimate=None, accounting=None, reason=reason)
    plan, made, replanned = max(found, key=lambda f: (f[1].examples_per_second, not f[2]))
    return Outcome(plan=plan, estimate=made, accounting=simulated(plan, calibration), replanned=replanned)


def as_pinned(scenario: ResolvedScenario, calibration: Calibration | None) -> Outcome:
    """The scenario's own configuration without a search: its pins, plain defaults for the rest."""
    plan, _ = default_plan(scenario)
    made = estimate(plan, calibration)
    return Outcome(plan=plan, estimate=made, accounting=simulated(plan, calibration))


def carried_over(plan: Plan, scenario: ResolvedScenario) -> Plan | None:
    """The same choices for a changed job; None where they cannot be kept (another number of ranks, other tables, what the change pins)."""
    if plan.layout.world_size != scenario.cluster.num_ranks or plan.model != scenario.model:
        return None
    samples = scenario.workload.global_batch_on(plan.layout.world_size)
    local, rest = divmod(samples, plan.layout.world_size * plan.accumulation)
    if rest or not local:
        return None
    pins = scenario.pins
    chosen = {name: value for name in ("batching", "transport", "execution") if (value := getattr(pins, name)) is not None}
    regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(o, precision=pins.option("precision", r.region) or o.precision)
                                                         for o in r.options)) for r in plan.regions)
    moved = dataclasses.replace(plan, scenario=scenario.name, cluster=scenario.cluster, workload=scenario.workload, local_batch=local,
                                regions=regions, prediction={}, search={}, fingerprints={}, **chosen)
    return dataclasses.replace(moved, predict_only=predict_only(moved), fingerprints=moved.expected_fingerprints())


def rank(scenario: ResolvedScenario, base: Outcome, calibration: Calibration | None, *, time_limit: float = 2.0,
         chosen: Sequence[Lever] | None = None, progress: Callable[[str], None] = lambda name: None) -> list[Ranked]:
    """Every lever (or the `chosen` ones) against `base`, the largest gain first."""
    assert base.plan is not None and base.estimate is not None
    answers = []
    for lever in levers(scenario) if chosen is None else chosen:
        progress(lever.name)
        made = plan_and_simulate(lever.apply(scenario), calibration, time_limit=time_limit, given=(base.plan,))
        answers.append(_ranked(lever, made, base))
    return sorted(answers, key=lambda r: -(r.speedup or 0.0))


def _ranked(lever: Lever, made: Outcome, base: Outcome) -> Ranked:
    common = {"name": lever.name, "constraints": lever.constraints, "how": lever.how}
    if made.plan is None or made.estimate is None or made.accounting is None:
        return Ranked(**common, step_time_s=None, speedup=None, cost_ratio=None, next_constraint="", replanned=False, layout="",
                      reason=made.reason.splitlines()[0] if made.reason else "no feasible plan")
    before, after = base.estimate, made.estimate
    assert before is not None
    cost = after.dollars_per_billion_examples / before.dollars_per_billion_examples if (
        after.dollars_per_billion_examples and before.dollars_per_billion_examples) else None
    return Ranked(**common, step_time_s=after.step_time.value, speedup=after.examples_per_second / before.examples_per_second, cost_ratio=cost,
                  next_constraint=made.accounting.binding, replanned=made.replanned, layout=made.plan.layout.short)
