"""Why a search chose its plan: what binds and what relief is worth, how the runners-up differ, what was never an option, and what moves the step.

- What a GiB of HBM is worth comes from solving the chosen candidate's integer program again with one more. Moments of memory and the risk budget have
  shadow prices: duals of the relaxed program, which hold for small changes. Both are of this candidate's layout; another layout may gain more.
- A sensitivity is the same plan estimated again on a changed cluster or workload, nothing else chosen anew; `planner whatif` searches anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from costmodel.calibration import Calibration
from costmodel.cluster import Cluster
from costmodel.estimate import estimate
from costmodel.plan import Plan
from costmodel.wire import wires
from costmodel.workload import Lengths
from planner.compare import Difference, choices
from planner.configure import predict_only
from planner.errors import NoFeasiblePlan
from planner.ilp import MILLI, CandidateProgram
from planner.scenario import ResolvedScenario
from planner.search import Certificate, Search
from planner.solver import solve
from planner.space import BATCHINGS, EXECUTIONS, TRANSPORTS, Excluded, build_space, table_choices

GIB = 2.0**30
_SOLVE_SECONDS = 10.0
KINDS = {"batching": BATCHINGS, "transport": TRANSPORTS, "execution": EXECUTIONS}
_NOTHING = 1e-4
"""Gains below this share of a step are the gap of the solver."""
_MOMENTS = {"forward": "the end of forward", "sparse": "the sparse phase", "optimizer": "the optimizer"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A constraint that holds the plan back: its name in words, and seconds of a step that one more `unit` of room gains (negative)."""

    name: str
    unit: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The best plan of another candidate: step seconds, whether it lies inside the chosen one's interval, what differs (chosen, runner-up)."""

    seconds: float
    tie: bool
    differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The plan estimated again with one thing changed: step seconds and their change in percent; whether it still fits."""

    what: str
    seconds: float
    percent: float
    fits: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    plan: Plan
    seconds: float
    limiting: str
    free_bytes: float
    certificate: Certificate
    bindings: tuple[Binding, ...]
    runners_up: tuple[RunnerUp, ...]
    excluded: tuple[Excluded, ...]
    sensitivities: tuple[Sensitivity, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The values of one choice that a search of the scenario may take."""

    what: str
    values: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a search chooses from, without searching: `candidates` in number, every choice with its values, and what is out with why."""

    candidates: int
    offers: tuple[Offer, ...]
    excluded: tuple[Excluded, ...]


def listing(scenario: ResolvedScenario, calibration: Calibration | None = None) -> Listing:
    """The space of a scenario under a calibration. Raises UsageError when pins and exclusions leave nothing."""
    space = build_space(scenario, calibration)
    columns, log = space.candidates.columns, []
    offers = [Offer(what=name, values=tuple(f"{v}" for v in sorted(set(values.tolist())))) for name, values in columns.items() if name not in KINDS]
    offers += [Offer(what=name, values=tuple(known[v] for v in sorted(set(columns[name].tolist())))) for name, known in KINDS.items()]
    sent = wires(scenario.model.tables, scenario.pins.wire, scenario.pins.wire_gradients)
    offers += [Offer(what=what, values=(name,)) for what, name in zip(("wire", "wire_gradients"), sent)]
    for what in ("precision", "checkpoint"):
        alike: dict[tuple[str, ...], list[str]] = {}
        for region, options in space.regions.items():
            alike.setdefault(tuple(dict.fromkeys(getattr(c, what) for c in options)), []).append(region)
        offers += [Offer(what=f"{what} of {_some(names)}", values=values) for values, names in alike.items()]
    groups = sorted(set(columns["sparse_group"].tolist()))
    tables: dict[tuple[str, ...], list[str]] = {}
    for table in scenario.model.tables:
        one = dataclasses.replace(table, name=table.names[0], count=1)
        found = dict.fromkeys(c.name for group in groups for c in table_choices(scenario, one, group, allow=space.predict_only, log=log))
        tables.setdefault(tuple(found), []).append(table.name)
    offers += [Offer(what=f"sharding of {_some(names)}", values=values) for values, names in tables.items()]
    return Listing(candidates=len(space.candidates), offers=tuple(offers), excluded=tuple(dict.fromkeys((*space.excluded, *log))))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def explain(
    scenario: ResolvedScenario, calibration: Calibration | None, *, time_limit: float | None = None, gap: float | None = None, top: int | None = None
) -> Explanation:
    """Searches and explains. `time_limit` [s], `gap` and `top` default to the scenario's. Raises NoFeasiblePlan like a search."""
    options = scenario.search
    state = Search(
        scenario, calibration, time_limit=options.time_limit if time_limit is None else time_limit, gap=options.gap if gap is None else gap
    )
    state.run()
    if state.incumbent is None:
        from planner.infeasible import report

        raise NoFeasiblePlan(report(state))
    lowest = state.lowest_open()
    state.fill(options.top if top is None else top)
    certificate = state.certificate(lowest)
    plan = state.finished(state.incumbent, certificate)
    made = estimate(plan, calibration)
    return Explanation(
        plan=plan,
        seconds=made.step_time.value,
        limiting=made.limiting,
        free_bytes=made.memory.limit - made.memory.reserved.value,
        certificate=certificate,
        bindings=bindings(chosen_program(state)),
        runners_up=tuple(runners_up(state, plan, made.step_time.high)),
        excluded=state.space.excluded + tuple(dict.fromkeys(state.pricing.table_log)),
        sensitivities=tuple(sensitivities(plan, calibration, made.step_time.value)),
    )


def chosen_program(state: Search) -> CandidateProgram:
    """The integer program of the chosen candidate with the critical chain of the chosen plan, nothing cut off."""
    assert state.incumbent is not None
    program = state.pricing.program(state.incumbent_at)
    program.cuts.append(state.pricing.chain(state.incumbent, program))
    return program


def bindings(program: CandidateProgram) -> tuple[Binding, ...]:
    """One more GiB as solved again, then rows of the relaxed program with a price, dearest first; moments that bind together share theirs."""
    found = []
    now, more = (solve(program.build(extra_memory=extra), time_limit=_SOLVE_SECONDS) for extra in (0.0, GIB))
    if now.has_values and more.has_values:
        gain = (more.values["T"] - now.values["T"]) * MILLI
        if gain < -_NOTHING * now.values["T"] * MILLI:
            found.append(Binding(name="HBM", unit="GiB", seconds=gain))
    for name, seconds in program.prices().items():
        if name == "risk":
            found.append(Binding(name="numeric-risk budget", unit="block", seconds=seconds))
            continue
        moment = name.removeprefix("memory_")
        if moment.startswith("backward_"):
            row, choice = (int(n) for n in moment.split("_")[1:3])
            region = program.regions[row]
            option = list(region.memory)[choice]
            words = f"backward of {region.name} ({option.precision}, {option.checkpoint})"
        else:
            words = _MOMENTS[moment]
        found.append(Binding(name=f"HBM at {words}", unit="GiB", seconds=seconds))
    return tuple(found)


def runners_up(state: Search, plan: Plan, high: float) -> Iterator[RunnerUp]:
    """Best plans of other candidates that were simulated, fastest first."""
    for i, priced in sorted(state.best.items(), key=lambda item: (item[1].seconds, item[0])):
        if i != state.incumbent_at:
            yield RunnerUp(seconds=priced.seconds, tie=priced.seconds <= high, differences=tuple(choices(plan, priced.plan)))


def sensitivities(plan: Plan, calibration: Calibration | None, seconds: float) -> Iterator[Sensitivity]:
    """The same plan with faster links, memory, fewer SMs for collectives, fewer launches, and longer histories."""
    for what, changed in changes(plan):
        changed = dataclasses.replace(changed, fingerprints=changed.expected_fingerprints(), prediction={}, search={})
        made = estimate(changed, calibration)
        step = made.step_time.value
        yield Sensitivity(what=what, seconds=step, percent=100 * (step / seconds - 1), fits=made.memory.fits)


def changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """(the change in words, the plan with it)."""
    cluster: Cluster = plan.cluster
    for tier in cluster.tiers:
        for factor in (0.5, 2.0):
            tiers = tuple(dataclasses.replace(t, bandwidth=factor * t.bandwidth) if t is tier else t for t in cluster.tiers)
            yield f"{tier.name} bandwidth x{factor:g}", dataclasses.replace(plan, cluster=dataclasses.replace(cluster, tiers=tiers))
    device = cluster.device
    for factor in (0.8, 1.25):
        faster = dataclasses.replace(device, memory_bandwidth=factor * device.memory_bandwidth)
        yield f"memory bandwidth x{factor:g}", dataclasses.replace(plan, cluster=dataclasses.replace(cluster, device=faster))
    if device.kind == "gpu":
        # the presets differ in the SMs that a collective holds: many, one, none
        for transport in ("nccl", "ncclx", "copy_engine"):
            if transport != plan.transport:
                moved = dataclasses.replace(plan, transport=transport)
                yield f"SMs of collectives: {transport} for {plan.transport}", dataclasses.replace(moved, predict_only=predict_only(moved))
        for execution in EXECUTIONS:
            if execution != plan.execution:
                moved = dataclasses.replace(plan, execution=execution)
                yield f"launches of the host: {execution} for {plan.execution}", dataclasses.replace(moved, predict_only=predict_only(moved))
    for factor in (0.5, 2.0) if plan.workload.lengths else ():
        lengths = {name: stretched(spec, factor) for name, spec in plan.workload.lengths.items()}
        yield f"histories x{factor:g}", dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, lengths=lengths))


def stretched(lengths: Lengths, factor: float) -> Lengths:
    """The distribution with every length `factor` times as long, at least one event."""

    def scaled(n: int) -> int:
        return max(1, round(n * factor)) if n else 0

    median = None if lengths.median is None else lengths.median * factor
    values = tuple(scaled(v) for v in lengths.values)
    return dataclasses.replace(lengths, maximum=scaled(lengths.maximum), minimum=scaled(lengths.minimum), median=median, values=values)
