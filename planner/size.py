"""How many devices, and which: the fewest that train so many examples by a deadline, at a rate, or for a budget.

    sizes      parts of one host that divide it, whole hosts inside a zone, then whole zones; what the global batch does not divide over is left out
    a size     is searched like any scenario (planner.search); its plan's step gives examples/s, and the cluster's reliability what share of the
               wall time trains (costmodel.jobtime): start-up, checkpoints, failures, restarts and lost work
    curve      sizes at least twice as large as the one before, and the largest
    fewest     every legal size below the curve's first that meets the demand is searched too, unless even the lower bound of its step misses

Dollars are wall hours x devices x the price that the cluster's file states with its source; without one they are unknown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from costmodel.accounting import simulated
from costmodel.calibration import Calibration
from costmodel.cluster import Cluster, Reliability
from costmodel.codec import decode
from costmodel.estimate import Estimate
from costmodel.execution import compile_seconds
from costmodel.jobtime import JobTime, job_time, state_bytes
from costmodel.plan import Plan
from costmodel.units import show_count, show_gib
from planner import calibrate, catalogue
from planner.errors import NoFeasiblePlan, UsageError
from planner.files import check, load
from planner.levers import Outcome, Ranked, levers, rank
from planner.scenario import ResolvedScenario, load_scenario
from planner.search import Search
from planner.spec import ClusterFile, DeviceFile

PERIOD = 30 * 86400.0
"""Seconds over which the effective share is taken when nobody says how much is to be trained."""
_HELPS = 5
_LEVER_SECONDS = 2.0
_DOUBLINGS = (2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a size has to meet, all that is given at once: wall seconds, effective examples/s, dollars; `examples`: how much is to be trained."""

    deadline: float | None = None
    rate: float | None = None
    budget: float | None = None
    examples: float | None = None

    def misses(self, *, hours: float | None, rate: float, dollars: float | None) -> dict[str, float]:
        """What is missed and how many times over: 1.25 is a quarter too slow or too dear. An unknown price misses a budget infinitely."""
        ratios: dict[str, float] = {}
        if self.deadline is not None and hours is not None:
            ratios["deadline"] = hours * 3600.0 / self.deadline
        if self.rate is not None:
            ratios["rate"] = self.rate / rate if rate > 0 else math.inf
        if self.budget is not None:
            ratios["budget"] = math.inf if dollars is None else dollars / self.budget
        return {name: ratio for name, ratio in ratios.items() if ratio > 1.0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size. Figures are None, and `reason` says why, where there is no plan.

    step_time_s with its 90 % interval; examples_per_second while it trains; effective: share of the wall time that trains; hours and dollars of the
    whole job, dollars of a billion examples of wall time. misses: demand -> times over (empty: met). sure: met at the slow end of the interval too.
    """

    device: str
    num_devices: int
    num_hosts: int
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    source: str | None = None
    examples_per_second: float | None = None
    effective: float | None = None
    hours: float | None = None
    dollars: float | None = None
    dollars_per_billion_examples: float | None = None
    memory_bytes: float | None = None
    limiting: str | None = None
    layout: str | None = None
    gap: float | None = None
    misses: dict[str, float] = dataclasses.field(default_factory=dict)
    sure: bool = False
    job: JobTime | None = None
    reason: str = ""

    @property
    def meets(self) -> bool:
        return self.step_time_s is not None and not self.misses

    @property
    def net(self) -> float:
        """Examples per second of wall time."""
        return (self.examples_per_second or 0.0) * (self.effective or 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """`points` by device and size; `best`: the fewest devices that meet the demand, with its plan, or None; `nearest`: the point that misses by
    least; `helps`: changes of the nearest that were planned again, and whether each meets the demand; `larger`: what more devices than the cluster
    describes would do."""

    scenario: str
    demand: Demand
    points: tuple[Point, ...]
    best: Point | None
    plan: Plan | None
    nearest: Point | None
    helps: tuple[tuple[Ranked, bool], ...]
    larger: tuple[Point, ...]
    notes: tuple[str, ...]


def size(
    reference: Path | str | ResolvedScenario,
    demand: Demand,
    *,
    devices: Sequence[str] = (),
    most: int | None = None,
    time_limit: float | None = None,
    calibration_file: Path | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Sizing:
    """The fewest devices that meet `demand`, of the scenario's own device and of the catalogue's `devices` (`all`: every GPU).

    `most`: largest number of devices (default: the cluster's). Raises UsageError for a demand that lacks `examples`, and NoFeasiblePlan when no size
    has a plan.
    """
    scenario = reference if isinstance(reference, ResolvedScenario) else load_scenario(reference, with_variants=False)
    notes: list[str] = []
    demand = _complete(demand, scenario, notes)
    made = _Sizer(demand=demand, time_limit=time_limit, calibration_file=calibration_file, progress=progress)
    compared = list(clusters(scenario.cluster, devices, notes))
    if demand.budget is not None and all(c.price is None for c in compared):
        raise UsageError(f"scenario {scenario.name}: a budget needs a price; cluster.price: {{per_device_hour: 2.5 $/h, source: where it is from}}")
    for cluster in compared:
        made.device(dataclasses.replace(scenario, cluster=cluster), most, notes)
    points = sorted(made.points, key=lambda p: (p.device != scenario.cluster.device.name, p.device, p.num_devices))
    if all(p.step_time_s is None for p in points):
        raise NoFeasiblePlan(
            f"scenario {scenario.name}: no size has a plan\n" + "\n".join(f"{p.num_devices} x {p.device}: {p.reason}" for p in points)
        )
    met = [p for p in points if p.meets]
    best = min(met, key=lambda p: (p.num_devices, p.dollars if p.dollars is not None else math.inf, -p.net), default=None)
    nearest, helps, larger = None, (), ()
    if best is None:
        nearest = min((p for p in points if p.step_time_s is not None), key=lambda p: (max(p.misses.values()), p.num_devices))
        helps, larger = tuple(made.helps(nearest)), tuple(made.larger(nearest))
    return Sizing(
        scenario=scenario.name,
        demand=demand,
        points=tuple(points),
        best=best,
        plan=made.plans[best.device, best.num_devices][0] if best else None,
        nearest=nearest,
        helps=helps,
        larger=larger,
        notes=tuple(dict.fromkeys(notes)),
    )


def _complete(demand: Demand, scenario: ResolvedScenario, notes: list[str]) -> Demand:
    """Takes the examples of a deadline or budget from the workload's steps where they are not given. Raises UsageError for what makes no sense."""
    for name in ("deadline", "rate", "budget", "examples"):
        value = getattr(demand, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name}: a number > 0 is needed, not {value:g}")
    if demand.examples is not None:
        return demand
    if demand.deadline is None and demand.budget is None:
        notes.append("no --examples: the effective share is that of 30 days, and there are no hours and dollars of a job")
        return demand
    if scenario.workload.num_steps is not None:
        ranks, steps = scenario.cluster.num_ranks, scenario.workload.num_steps
        examples = float(steps * scenario.workload.global_batch_on(ranks))
        notes.append(f"{show_count(examples)} examples: the workload's {steps} steps on {ranks} ranks; --examples for another number")
        return dataclasses.replace(demand, examples=examples)
    raise UsageError(f"scenario {scenario.name}: a deadline or budget needs to know how much is trained: --examples N, or workload.num_steps")


def clusters(own: Cluster, devices: Sequence[str], notes: list[str]) -> Iterator[Cluster]:
    """The cluster, and the same hosts with each of the catalogue's `devices`: links inside the host, and the price, are those of a bundled cluster
    of that device where there is one; links between hosts stay. Raises UsageError for a name that the catalogue does not have."""
    yield own
    known = catalogue.names("devices")
    wanted = known if "all" in devices else list(dict.fromkeys(devices))
    for name in wanted:
        if name == own.device.name:
            continue
        if name not in known:
            raise UsageError(f"no device named {name!r}; bundled: {', '.join(known)}, or all")
        device = check(DeviceFile, load(catalogue.folder("devices") / f"{name}.yaml")).build()
        twin = next((c for c in _bundled(name) if c.device == device), None)
        inside = {t.name: t for t in twin.tiers if t.scope == "host"} if twin is not None else {}
        tiers = tuple(next(iter(inside.values()), t) if t.scope == "host" else t for t in own.tiers)
        links = f"links inside its host and price of cluster {twin.name}" if twin is not None else "the cluster's own links, no price"
        notes.append(f"{name}: {links}; links between hosts, reliability and zones of cluster {own.name}")
        budget = own.memory_budget if own.memory_budget is not None and own.memory_budget <= device.memory_bytes else None
        yield dataclasses.replace(own, device=device, tiers=tiers, price=twin.price if twin is not None else None, memory_budget=budget)


def _bundled(device: str) -> Iterator[Cluster]:
    for name in catalogue.names("clusters"):
        path = catalogue.folder("clusters") / f"{name}.yaml"
        document = load(path)
        if document.data.get("device") == device:
            document.graft(("device",), load(catalogue.find("devices", device, path)))
            yield check(ClusterFile, document).build()


def sizes(cluster: Cluster, most: int) -> list[Cluster]:
    """Legal parts and multiples of a cluster with at most `most` devices, ascending, that its links join: divisors of a host, hosts of one zone,
    whole zones."""
    per_host, found = cluster.devices_per_host, []
    for part in (d for d in range(1, per_host) if per_host % d == 0 and d <= most):
        share = cluster.host_memory_bytes * part / per_host
        found.append(_hosts(dataclasses.replace(cluster, devices_per_host=part, host_memory_bytes=share), 1))
    zones = sorted(cluster.zone_hosts, reverse=True)
    if zones:
        found += [_hosts(cluster, hosts) for hosts in range(1, zones[0] + 1)]
        found += [_hosts(cluster, sum(zones[:n]), tuple(zones[:n])) for n in range(2, len(zones) + 1)]
        return [c for c in found if c.num_ranks <= most]
    limit = most // per_host
    zone = cluster.hosts_per_zone or limit
    found += [_hosts(cluster, hosts) for hosts in range(1, min(zone, limit) + 1)]
    found += [_hosts(cluster, hosts) for hosts in range(2 * zone, limit + 1, zone) if zone < limit]
    return [c for c in found if c.num_ranks == 1 or max((c.scope_size(t.scope) for t in c.tiers), default=1) >= c.num_ranks]


def _hosts(cluster: Cluster, hosts: int, zones: tuple[int, ...] = ()) -> Cluster:
    whole = cluster.hosts_per_zone if cluster.hosts_per_zone is not None and hosts > cluster.hosts_per_zone else None
    return dataclasses.replace(cluster, num_hosts=hosts, hosts_per_zone=whole, zone_hosts=zones)


def ladder(ranks: Sequence[int]) -> list[int]:
    """Sizes at least twice as large as the one before, and the largest."""
    chosen: list[int] = []
    for n in ranks:
        if not chosen or n >= 2 * chosen[-1]:
            chosen.append(n)
    return [*chosen, *ranks[-1:]] if ranks and ranks[-1] not in chosen else chosen


@dataclasses.dataclass(slots=True, kw_only=True)
class _Sizer:
    """Searches sizes and keeps their points and plans."""

    demand: Demand
    time_limit: float | None
    calibration_file: Path | None
    progress: Callable[[str], None]
    points: list[Point] = dataclasses.field(default_factory=list)
    plans: dict[tuple[str, int], tuple[Plan, Estimate, ResolvedScenario, Calibration | None]] = dataclasses.field(default_factory=dict)

    def device(self, scenario: ResolvedScenario, most: int | None, notes: list[str]) -> None:
        """The curve of one device, then what is smaller than its first size that meets the demand and was left out."""
        cluster = scenario.cluster
        limit = most or cluster.num_ranks
        legal = {c.num_ranks: c for c in sizes(cluster, limit) if scenario.workload.global_batch_on(c.num_ranks) % c.num_ranks == 0}
        if not legal:
            raise UsageError(f"scenario {scenario.name}: no size of at most {limit} devices divides the global batch")
        if scenario.workload.global_batch is not None:
            notes.append(f"sizes that do not divide the global batch of {scenario.workload.global_batch} are left out")
        else:
            notes.append(f"the global batch grows with the devices: {scenario.workload.local_batch} examples each")
        if limit > cluster.num_ranks:
            notes.append(f"beyond the {cluster.num_ranks} devices of cluster {cluster.name} its links are taken to reach as far")
        calibration = calibrate.find(cluster, path=self.calibration_file).calibration
        steps = ladder(sorted(legal))
        for n in steps:
            self.points.append(self.point(dataclasses.replace(scenario, cluster=legal[n]), calibration))
        met = min((p.num_devices for p in self.points if p.device == cluster.device.name and p.meets), default=max(legal) + 1)
        asked = self.demand.deadline or self.demand.rate or self.demand.budget
        for n in sorted(n for n in legal if n < met and n not in steps) if asked else ():
            point = self.point(dataclasses.replace(scenario, cluster=legal[n]), calibration, unless_missed=True)
            self.points.append(point)
            if point.meets:
                break

    def point(self, scenario: ResolvedScenario, calibration: Calibration | None, *, unless_missed: bool = False) -> Point:
        """One size, searched; with `unless_missed` not when its lower bound misses the demand."""
        cluster = scenario.cluster
        where = {"device": cluster.device.name, "num_devices": cluster.num_ranks, "num_hosts": cluster.num_hosts}
        self.progress(f"{cluster.num_ranks} x {cluster.device.name}")
        limit = scenario.search.time_limit if self.time_limit is None else self.time_limit
        try:
            state = Search(scenario, calibration, time_limit=limit, gap=scenario.search.gap)
        except UsageError as error:
            return Point(**where, reason=str(error).splitlines()[0])
        if not state.fits.any():
            missing = float(state.least_memory.min()) - cluster.usable_memory
            return Point(**where, reason=f"at least {show_gib(missing)} a device too little memory")
        if unless_missed:
            least = float(state.first[state.fits].min())
            misses = self.misses(cluster, scenario.workload.global_batch_on(cluster.num_ranks) / least, 1.0)[0]
            if misses:
                return Point(**where, misses=misses, reason=f"misses even at its lower bound of {least * 1e3:.4g} ms a step")
        state.run(give_up=True)
        if state.incumbent is None:
            return Point(**where, reason="no plan found within the time limit" if state.timed_out else "no plan fits")
        certificate = state.certificate(state.lowest_open())
        plan = state.finished(state.incumbent, certificate)
        made = decode(Estimate, plan.prediction)
        self.plans[cluster.device.name, cluster.num_ranks] = plan, made, scenario, calibration
        step, rate = made.step_time, made.examples_per_second
        job = self.job(cluster.reliability, plan, made, rate)
        misses, hours, dollars = self.misses(cluster, rate, job.effective, job.wall_seconds)
        slow = self.job(cluster.reliability, plan, made, rate * step.value / step.high)
        price = cluster.price.dollars_per_device_hour * cluster.num_ranks / 3600.0 if cluster.price is not None and job.effective > 0 else None
        return Point(
            **where,
            step_time_s=step.value,
            low_s=step.low,
            high_s=step.high,
            source=step.source,
            examples_per_second=rate,
            effective=job.effective,
            hours=hours,
            dollars=dollars,
            dollars_per_billion_examples=None if price is None else 1e9 * price / (rate * job.effective),
            memory_bytes=made.memory.reserved.value,
            limiting=made.limiting,
            layout=plan.layout.short,
            gap=certificate.gap,
            misses=misses,
            sure=not self.misses(cluster, rate * step.value / step.high, slow.effective, slow.wall_seconds)[0],
            job=job if math.isfinite(job.wall_seconds) else None,
        )

    def job(self, reliability: Reliability, plan: Plan, made: Estimate, rate: float) -> JobTime:
        seconds = self.demand.examples / rate if self.demand.examples is not None else PERIOD
        return job_time(reliability, ranks=plan.layout.world_size, training_seconds=seconds, bytes_per_rank=state_bytes(made.memory),
                        compiling=compile_seconds(plan))

    def misses(
        self, cluster: Cluster, rate: float, effective: float, wall: float | None = None
    ) -> tuple[dict[str, float], float | None, float | None]:
        """(what is missed, wall hours, dollars) at `rate` examples/s of training; hours are None without `examples`."""
        examples = self.demand.examples
        hours = None
        if examples is not None:
            hours = (examples / rate if wall is None else wall) / 3600.0
            hours = hours if math.isfinite(hours) else None
        price = cluster.price
        dollars = hours * cluster.num_ranks * price.dollars_per_device_hour if price is not None and hours is not None else None
        misses = self.demand.misses(hours=hours, rate=rate * effective, dollars=dollars)
        if self.demand.deadline is not None and examples is not None and hours is None:
            misses["deadline"] = math.inf
        return misses, hours, dollars

    def helps(self, nearest: Point) -> Iterator[tuple[Ranked, bool]]:
        """Levers of the size that misses by least, planned again, the largest gain first: those of its binding constraint before the others."""
        plan, made, scenario, calibration = self.plans[nearest.device, nearest.num_devices]
        accounting = simulated(plan, calibration)
        base = Outcome(plan=plan, estimate=made, accounting=accounting)
        every = levers(scenario)
        chosen = [lever for lever in every if accounting.binding in lever.constraints]
        chosen += [lever for lever in every if lever not in chosen]
        ranked = rank(
            scenario, base, calibration, time_limit=_LEVER_SECONDS, chosen=chosen[:_HELPS], progress=lambda name: self.progress(f"would help: {name}")
        )
        for one in ranked:
            if one.speedup is not None and one.speedup > 1.001:
                rate = made.examples_per_second * one.speedup
                job = self.job(scenario.cluster.reliability, plan, made, rate)
                yield one, not self.misses(scenario.cluster, rate, job.effective, job.wall_seconds)[0]

    def larger(self, nearest: Point) -> Iterator[Point]:
        """Twice the devices of the largest size, and twice that, until the demand is met."""
        _, _, scenario, calibration = self.plans[nearest.device, nearest.num_devices]
        whole = max((s.cluster for (device, _), (_, _, s, _) in self.plans.items() if device == nearest.device), key=lambda c: c.num_ranks)
        if set(nearest.misses) == {"budget"}:
            return
        for factor in _DOUBLINGS:
            bigger = [c for c in sizes(whole, factor * whole.num_ranks) if c.num_ranks == factor * whole.num_ranks]
            if not bigger or scenario.workload.global_batch_on(bigger[0].num_ranks) % bigger[0].num_ranks:
                return
            point = self.point(dataclasses.replace(scenario, cluster=bigger[0]), calibration)
            yield point
            if point.meets:
                return
