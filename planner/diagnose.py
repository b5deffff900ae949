"""What a plan or a run says about itself: the metric tree, where the time goes, what binds, and what would help.

Every figure of the tree has a value, where it comes from and its evidence: `measured`, `simulated` (predicted by the cost model), or
`unknown` with what is missing. A rung that was not measured is never filled from another rung in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from costmodel.accounting import UNATTRIBUTED, Accounting, SimulatedRanks, simulate_ranks, simulated
from costmodel.calibration import Calibration
from costmodel.codec import encode
from costmodel.estimate import Estimate, estimate
from costmodel.execution import compile_seconds
from costmodel.jobtime import job_time, state_bytes
from costmodel.plan import Plan
from costmodel.runresult import RunResult
from planner import calibrate, traces, tracesteps
from planner.errors import UsageError
from planner.run import PLAN_FILE, RESULT_FILE, load_plan

LEVELS = ("kernel", "module", "device", "step", "job", "model", "cost")
Evidence = Literal["measured", "simulated", "unknown"]
# How a run's own phases, without a trace, map to categories; device work stays unsplit.
DEVICE_UNSPLIT = "device (no trace: not split)"
_OF_PHASE = {"input": "input", "exposed_communication": "communication (no trace: with waiting)", "other": "host", "sparse": DEVICE_UNSPLIT,
             "forward": DEVICE_UNSPLIT, "backward": DEVICE_UNSPLIT, "optimizer": DEVICE_UNSPLIT}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One figure of the metric tree. `value` is None where `evidence` is unknown; `missing` then says what would fill it."""

    level: str
    name: str
    value: float | None
    unit: str
    evidence: Evidence
    source: str
    missing: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """A run's mean step by category without a trace. No constraint can be told from it."""

    step: float
    seconds: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`predicted` accounts for the simulated step, `measured` for the traced ones (the median rank; mean over steps), `phases` for a run
    without a trace. ranks, steps: the simulated and the traced steps, for pictures."""

    plan: Plan | None
    estimate: Estimate | None
    result: RunResult | None
    predicted: Accounting | None
    measured: Accounting | None
    phases: Phases | None
    slowest_rank: int | None
    tree: tuple[Rung, ...]
    ranks: SimulatedRanks | None
    steps: tuple[tuple[tracesteps.RankStep, ...], ...]
    activations: dict[str, dict[str, float]]
    notes: tuple[str, ...]
    directory: Path

    @property
    def binding(self) -> str:
        """What binds, by the best evidence there is."""
        accounting = self.measured or self.predicted
        return accounting.binding if accounting is not None else "unknown"


def diagnose(reference: Path | str, *, calibration_file: Path | None = None) -> Diagnosis:
    """Diagnoses a plan's or run's folder, a plan.json, or a trace. What cannot be read is noted, the rest is shown.

    Raises UsageError when there is neither a plan nor a trace.
    """
    path = Path(reference)
    notes: list[str] = []
    if path.is_file() and path.name != PLAN_FILE and path.suffix in (".gz", ".json") and not _is_plan(path):
        return _of_traces(None, None, [traces.read(path)], path.parent, None, notes)
    directory = path if path.is_dir() else path.parent
    plan = _plan(path, notes)
    result = _result(directory, plan, notes)
    found = _traces(directory, notes)
    if plan is None and not found:
        raise UsageError("\n".join(notes) or f"{path}: neither a plan nor a trace")
    calibration = None
    if plan is not None:
        known = calibrate.find(plan.cluster, path=calibration_file)
        calibration = known.calibration
        notes += known.notes
    return _of_traces(plan, result, found, directory, calibration, notes)


def _is_plan(path: Path) -> bool:
    with path.open("rb") as stream:
        return b'"schema_version"' in stream.read(200) and path.suffix == ".json"


def _plan(path: Path, notes: list[str]) -> Plan | None:
    try:
        return load_plan(path)[0]
    except UsageError as error:
        notes.append(str(error))
        return None


def _result(directory: Path, plan: Plan | None, notes: list[str]) -> RunResult | None:
    where = directory / RESULT_FILE
    if not where.is_file():
        return None
    try:
        result = RunResult.load(where)
    except (ValueError, OSError) as error:
        notes.append(f"the run's result is left out: {error}")
        return None
    if plan is not None and result.plan_identity != plan.identity():
        notes.append(f"the run's result is left out: measured for plan {result.plan_identity}, this folder holds {plan.identity()}")
        return None
    if result.status != "completed":
        notes.append(f"the run was {result.status} after {result.steps} steps" + (f": {result.message}" if result.message else ""))
    return result


def _traces(directory: Path, notes: list[str]) -> list[traces.Trace]:
    found = []
    for path in sorted((directory / "traces").glob("*.json*")):
        try:
            found.append(traces.read(path))
        except UsageError as error:
            notes.append(f"left out: {error}")
    return found


def _of_traces(plan: Plan | None, result: RunResult | None, found: Sequence[traces.Trace], directory: Path, calibration: Calibration | None,
               notes: list[str]) -> Diagnosis:
    for trace in found:
        identity = trace.meta.get("plan")
        if plan is not None and identity and identity != plan.identity():
            notes.append(f"{trace.path.name} was written for plan {identity}, not for {plan.identity()}")
    steps, remarks = tracesteps.rank_steps(found, plan.cluster if plan is not None else None)
    notes += remarks
    made = estimate(plan, calibration) if plan is not None else None
    ranks = simulate_ranks(plan, calibration) if plan is not None else None
    predicted = simulated(plan, calibration, ranks) if plan is not None else None
    measured = average([tracesteps.median_rank(ranks).account() for ranks in steps])
    phases = _phases(result) if measured is None else None
    activations: dict[str, dict[str, float]] = {}
    for trace in found:
        for region, values in trace.meta.get("activations", {}).items():
            if values["largest"] >= activations.get(region, {"largest": 0.0})["largest"]:
                activations[region] = values
    tree: tuple[Rung, ...] = ()
    if plan is not None and made is not None and ranks is not None and predicted is not None:
        tree = _tree(plan, made, ranks, predicted, result, measured, steps)
    return Diagnosis(plan=plan, estimate=made, result=result, predicted=predicted, measured=measured, phases=phases, slowest_rank=_slowest(steps),
                     tree=tree, ranks=ranks, steps=tuple(tuple(s) for s in steps), activations=activations, notes=tuple(dict.fromkeys(notes)),
                     directory=directory)


def average(accountings: Sequence[Accounting]) -> Accounting | None:
    """The mean over steps, category by category; None for none."""
    if not accountings:
        return None
    count = len(accountings)
    names = dict.fromkeys(name for a in accountings for name in a.seconds)
    busy = dict.fromkeys(name for a in accountings for name in a.busy)
    return Accounting(step=sum(a.step for a in accountings) / count, source=accountings[0].source,
                      seconds={n: sum(a.seconds.get(n, 0.0) for a in accountings) / count for n in names},
                      busy={n: sum(a.busy.get(n, 0.0) for a in accountings) / count for n in busy})


def _slowest(steps: Sequence[Sequence[tracesteps.RankStep]]) -> int | None:
    """The rank that waits least, where there are several."""
    waited: dict[int, float] = {}
    for ranks in steps:
        for rank in ranks:
            waited[rank.rank] = waited.get(rank.rank, 0.0) + rank.waited
    return min(waited, key=lambda r: waited[r]) if len(waited) > 1 else None


def _phases(result: RunResult | None) -> Phases | None:
    if result is None or result.measured is None:
        return None
    seconds: dict[str, float] = {}
    for phase, value in result.measured.phases_s.items():
        name = _OF_PHASE.get(phase, DEVICE_UNSPLIT)
        seconds[name] = seconds.get(name, 0.0) + value
    return Phases(step=sum(seconds.values()), seconds=seconds)


# --- the metric tree ---

def _tree(plan: Plan, made: Estimate, ranks: SimulatedRanks, predicted: Accounting, result: RunResult | None, measured: Accounting | None,
          steps: Sequence[Sequence[tracesteps.RankStep]]) -> tuple[Rung, ...]:
    run = result.measured if result is not None else None
    no_run = "a run: planner run DIR"
    no_trace = "a trace: planner run DIR --trace 5:8"
    rungs: list[Rung] = []

    def both(level: str, name: str, unit: str, simulated_value: float | None, measured_value: float | None, *, source: str, missing: str,
             cause: str = "") -> None:
        rungs.append(_rung(level, f"{name}, predicted", unit, simulated_value, "simulated", made.step_time.source, cause))
        rungs.append(_rung(level, f"{name}, measured", unit, measured_value, "measured", source, missing))

    peak, flops, world = made.mfu_peak, made.flops_per_rank, plan.layout.world_size
    both("kernel", "MFU of compute-bound ops", "", _ratio(flops, predicted.seconds.get("compute", 0.0) * peak),
         _ratio(flops, measured.seconds.get("compute", 0.0) * peak) if measured else None, source="trace: model FLOPs / compute time / peak",
         missing=no_trace, cause="no op of the simulated step is bound by compute")
    simulated_modules, traced = _simulated_modules(ranks), _modules(steps)
    for region in list(simulated_modules)[:3]:
        both("module", f"{region} forward, share of step", "", simulated_modules[region], traced.get(region), source="trace annotations",
             missing=no_trace if not steps else "the traces have no annotation of this region")
    both("device", "local MFU", "", made.local_mfu, _ratio(flops, run.step_time_s.median * peak) if run and world == 1 else None,
         source="run on one rank", missing="a run of the same local batch on one rank", cause="")
    both("device", "examples per second and device", "/s", made.examples_per_second / world, run.examples_per_second / world if run else None,
         source="result.json", missing=no_run)
    both("step", "step time", "s", made.step_time.value, run.step_time_s.median if run else None, source="result.json, median", missing=no_run)
    alone = made.step_time.value - _losses(predicted)
    both("step", "scaling ratio", "", alone / made.step_time.value, None, source="", missing="a run of the same local batch on one rank")
    both("step", "straggler gap", "s", _waits(predicted), _waits(measured) if measured and len(steps[0]) > 1 else None, source="traces of all ranks",
         missing="traces of several ranks: planner run DIR --trace 5:8")
    both("job", "end-to-end MFU", "", _ratio(flops, made.step_time.value * peak), _ratio(flops, run.step_time_s.median * peak) if run else None,
         source="model FLOPs / median step / peak", missing=no_run)
    wall = result.wall_seconds if result is not None else {}
    steps_planned = plan.workload.num_steps
    job = job_time(plan.cluster.reliability, ranks=world, training_seconds=steps_planned * made.step_time.value,
                   bytes_per_rank=state_bytes(made.memory), compiling=compile_seconds(plan)) if steps_planned else None
    rungs.append(_rung("job", "effective training time, predicted", "", job.effective if job else None, "simulated",
                       f"{steps_planned} steps with start-up, checkpoints and failures as the cluster's reliability states them",
                       "the workload states no num_steps"))
    rungs.append(_rung("job", "effective training time, measured", "", _ratio(wall.get("train", 0.0), sum(wall.values())), "measured",
                       "result.json: steps that count / the job's wall time (start-up, checkpoints, lost steps, restarts, evaluation)", no_run))
    quality = result.quality if result is not None else None
    rungs.append(_rung("model", "loss of the last step", "", quality.final_loss if quality else None, "measured", "result.json", no_run))
    for task in [h.name for h in plan.model.heads]:
        rungs.append(_rung("model", f"normalized entropy: {task}", "", quality.ne.get(task) if quality else None, "measured", "held-out events",
                           "a run with evaluation"))
    rungs.append(_rung("model", "numeric gate", "", None, "measured", "", "a numeric-quality gate against a bf16 or fp32 run"))
    rungs += _costs(plan, made, run)
    return tuple(rungs)


def _rung(level: str, name: str, unit: str, value: float | None, evidence: Evidence, source: str, missing: str) -> Rung:
    if value is None:
        return Rung(level=level, name=name, value=None, unit=unit, evidence="unknown", source="", missing=missing)
    return Rung(level=level, name=name, value=value, unit=unit, evidence=evidence, source=source)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and part > 0 else None


def _waits(accounting: Accounting) -> float:
    return accounting.seconds.get("straggler_wait", 0.0) + accounting.seconds.get("synchronisation", 0.0)


def _losses(accounting: Accounting) -> float:
    """What a rank alone would not have: exposed communication, contention, waiting."""
    exposed = sum(v for k, v in accounting.seconds.items() if k.startswith("communication:"))
    return exposed + accounting.seconds.get("contention", 0.0) + _waits(accounting)


def _simulated_modules(ranks: SimulatedRanks) -> dict[str, float]:
    """Share of the average rank's step in each region's forward, the largest first."""
    seconds: dict[str, float] = {}
    for index, start, end in ranks.timeline.spans:
        task = ranks.average.graph.tasks[index]
        if task.region and task.phase == "forward" and task.kind == "compute":
            seconds[task.region] = seconds.get(task.region, 0.0) + end - start
    return {name: value / ranks.timeline.step_seconds for name, value in sorted(seconds.items(), key=lambda item: -item[1])}


def _modules(steps: Sequence[Sequence[tracesteps.RankStep]]) -> dict[str, float]:
    """The same of the median rank's traced steps."""
    seconds: dict[str, float] = {}
    total = 0.0
    for ranks in steps:
        rank = tracesteps.median_rank(ranks)
        total += rank.end - rank.begin
        for lane, name, begin, end in rank.named:
            if lane == "regions" and name.startswith("region:"):
                region = name.removeprefix("region:")
                seconds[region] = seconds.get(region, 0.0) + end - begin
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


def _costs(plan: Plan, made: Estimate, run: Any) -> list[Rung]:
    price, power, world = plan.cluster.price, plan.cluster.device.power, plan.layout.world_size
    rates = (("predicted", made.examples_per_second, "simulated"), ("measured", run.examples_per_second if run else None, "measured"))
    rungs = []
    for word, rate, evidence in rates:
        dollars = 1e9 / rate * world * price.dollars_per_device_hour / 3600 if rate and price else None
        energy = 1e9 / rate * world * power / 3.6e6 if rate and power else None
        missing = "a run: planner run DIR" if rate is None else "the cluster has no price"
        rungs.append(_rung("cost", f"$ per billion examples, {word}", "$", dollars, evidence, price.source if price else "", missing))  # type: ignore[arg-type]
        missing = "a run: planner run DIR" if rate is None else "the device has no power in its file"
        rungs.append(_rung("cost", f"kWh per billion examples, {word}", "kWh", energy, evidence,  # type: ignore[arg-type]
                           "the device's power limit, all the time; hosts and cooling not counted", missing))
    return rungs


def to_json(found: Diagnosis, levers: Sequence[Any] = ()) -> dict[str, Any]:
    """Everything but the pictures' spans, JSON-ready."""

    def accounting(a: Accounting | None) -> dict[str, Any] | None:
        if a is None:
            return None
        return {"step_s": a.step, "seconds": a.seconds, "binding": a.binding, "relief_s": a.relief(), "unattributed": a.unattributed,
                "source": a.source}

    return {
        "directory": str(found.directory), "binding": found.binding, "evidence": "measured" if found.measured else "simulated",
        "predicted": accounting(found.predicted), "measured": accounting(found.measured), "phases": encode(found.phases),
        "slowest_rank": found.slowest_rank, "tree": [encode(r) for r in found.tree], "levers": [encode(lever) for lever in levers],
        "activations": found.activations, "notes": list(found.notes)}


__all__ = ["LEVELS", "UNATTRIBUTED", "Diagnosis", "Rung", "average", "diagnose", "to_json"]
