"""The verbs as Python functions. The command line calls these; so can a notebook.

from planner import api
estimate = api.estimate("scenarios/quickstart.yaml")
result = api.search("scenarios/gem-512xh200.yaml")
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.codec import encode
from costmodel.estimate import Estimate
from costmodel.estimate import estimate as estimate_plan
from costmodel.plan import Plan
from costmodel.precision import LOW_PRECISIONS, native
from planner import calibrate as calibration
from planner import coverage, runner
from planner.calibrate import Found, Preset
from planner.configure import default_plan
from planner.errors import UsageError
from planner.files import check_writable, replacing
from planner.run import PLAN_FILE, Run, check_device, check_error, execute, load_plan
from planner.scenario import ResolvedScenario, defaults_taken, load_scenario
from planner.space import EXECUTABLE

if TYPE_CHECKING:
    from planner.search import SearchResult
    from planner.size import Sizing

Event = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """A plan and what it is predicted to do; `notes` hold defaults and what is to be known about the calibration."""

    plan: Plan
    estimate: Estimate
    calibration: Path | None
    notes: tuple[str, ...]


def is_plan(reference: Path | str) -> bool:
    """Whether a reference is a plan or a run's folder (and not a scenario)."""
    path = Path(reference)
    return path.is_dir() or path.suffix == ".json"


def estimate(
    reference: Path | str,
    *,
    calibration_file: Path | None = None,
    calibrated_only: bool = False,
    mode: str = "simulated",
    strict: bool = False,
) -> Estimated:
    """Predicts one configuration: a plan, a folder with one, or what a scenario pins (with plain defaults for the rest).

    `strict` refuses a scenario whose files leave out a figure that the prediction rests on.
    """
    if is_plan(reference):
        plan, _ = load_plan(reference)
        notes: tuple[str, ...] = ()
    else:
        scenario = load_scenario(reference, with_variants=False)
        taken = _taken(scenario, strict)
        plan, notes = default_plan(scenario)
        notes += taken
    found = calibration.find(plan.cluster, path=calibration_file, calibrated_only=calibrated_only)
    made = estimate_plan(plan, found.calibration, mode=mode)  # type: ignore[arg-type]
    if calibrated_only and found.calibration is not None:
        coverage.require(plan, found.calibration, made.by_source)
    fingerprints = {**plan.expected_fingerprints(), **({"calibration": found.calibration.fingerprint} if found.calibration else {})}
    plan = dataclasses.replace(plan, prediction=encode(made), fingerprints=fingerprints)
    return Estimated(plan=plan, estimate=made, calibration=found.path, notes=notes + found.notes)


def _taken(scenario: ResolvedScenario, strict: bool) -> tuple[str, ...]:
    line = defaults_taken(scenario, strict=strict)
    return (line,) if line else ()


def search(
    reference: Path | str | ResolvedScenario,
    *,
    calibration_file: Path | None = None,
    calibrated_only: bool = False,
    time_limit: float | None = None,
    top: int | None = None,
    cache: bool = True,
    strict: bool = False,
) -> tuple[SearchResult, Found]:
    """Searches a scenario; with `cache` an equal question is answered by what an earlier search found (planner.answers).

    Raises NoFeasiblePlan, and UsageError for what is wrong with the files, with `strict` also for figures that they leave out.
    """
    from planner import answers
    from planner.search import search as run_search

    scenario = reference if isinstance(reference, ResolvedScenario) else load_scenario(reference, with_variants=False)
    defaults_taken(scenario, strict=strict)
    found = calibration.find(scenario.cluster, path=calibration_file, calibrated_only=calibrated_only)
    options = scenario.search
    top = options.top if top is None else top
    path = answers.answer_path(scenario, found.calibration, gap=options.gap, top=top) if cache else None
    result = answers.recall(path) if path is not None else None
    if result is None:
        time_limit = options.time_limit if time_limit is None else time_limit
        result = run_search(scenario, calibration=found.calibration, time_limit=time_limit, gap=options.gap, top=top)
        if path is not None:
            with contextlib.suppress(UsageError):  # where the state directory cannot be written, the next search finds the answer again
                answers.keep(result, path)
    if calibrated_only and found.calibration is not None:
        coverage.require(result.plan, found.calibration, result.plan.prediction["by_source"])
    return result, dataclasses.replace(found, notes=_taken(scenario, strict) + found.notes)


def size(
    reference: Path | str | ResolvedScenario,
    *,
    deadline: str | None = None,
    qps: str | float | None = None,
    budget: str | float | None = None,
    examples: str | float | None = None,
    devices: Sequence[str] = (),
    most: int | None = None,
    time_limit: float | None = None,
    calibration_file: Path | None = None,
    strict: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> Sizing:
    """The fewest devices that train `examples` by a deadline (`36 h`), at a rate [examples/s], for a budget [$]; the curve of sizes.

    Raises UsageError for values that make no sense, NoFeasiblePlan when no size has a plan; a demand that no size meets is `best` None.
    """
    from costmodel.units import parse, parse_count
    from planner.size import Demand
    from planner.size import size as run_size

    try:
        demand = Demand(
            deadline=None if deadline is None else parse(deadline, "seconds"),
            rate=None if qps is None else parse_count(qps),
            budget=None if budget is None else parse_count(budget),
            examples=None if examples is None else parse_count(examples),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    scenario = reference if isinstance(reference, ResolvedScenario) else load_scenario(reference, with_variants=False)
    taken = _taken(scenario, strict)
    found = run_size(
        scenario, demand, devices=devices, most=most, time_limit=time_limit, calibration_file=calibration_file, progress=progress
    )
    return dataclasses.replace(found, notes=taken + found.notes)


def calibrate(reference: Path | str, *, preset: Preset = "quick", ranks: tuple[int, ...] | None = None, on_event: Event = lambda event: None) -> Path:
    """Measures this machine with the shapes of a scenario and writes the calibration of its device."""
    scenario = load_scenario(reference, with_variants=False)
    runner.check_runtime()
    if scenario.cluster.num_hosts == 1:  # several are refused below, whatever their devices
        check_device(scenario.cluster, "the calibration")
    check_writable(calibration.calibration_path(scenario.cluster.device.name).parent)
    with tempfile.TemporaryDirectory(prefix="planner-subjects-") as folder:
        subjects = []
        for number, plan in enumerate(subject_plans(scenario)):
            subjects.append(Path(folder) / f"plan-{number}.json")
            plan.save(subjects[-1])
        path = calibration.calibrate(scenario.cluster, subjects, preset=preset, ranks=ranks, on_event=on_event)
    coverage.remember(scenario, formats(scenario))
    return path


def calibration_needed(reference: Path | str) -> str:
    """Why a scenario's calibration should be measured (again); empty when the one that is there was made for it and is not stale."""
    scenario = load_scenario(reference, with_variants=False)
    return coverage.out_of_date(scenario, formats(scenario))


def formats(scenario: ResolvedScenario) -> tuple[str, ...]:
    """Number formats that a search of the scenario may choose and the runtime executes."""
    excluded = scenario.pins.excluded("precision", "*")
    return tuple(name for name in EXECUTABLE["precision"] if name not in (*excluded, *LOW_PRECISIONS) and native(scenario.cluster.device, name))


def subject_plans(scenario: ResolvedScenario) -> list[Plan]:
    """The plans whose shapes a calibration times: what the scenario describes, once per number format that its search may choose."""
    if scenario.pins.precision:
        return [default_plan(scenario)[0]]
    pinned = [dataclasses.replace(scenario, pins=dataclasses.replace(scenario.pins, precision={"*": name})) for name in formats(scenario)]
    return [default_plan(one)[0] for one in pinned]


def save_plan(plan: Plan, out: Path) -> Path:
    """Writes `out/plan.json` through a temporary file."""
    with replacing(out / PLAN_FILE) as temporary:
        plan.save(temporary)
    return out / PLAN_FILE


def describe(plan: Plan) -> dict[str, Any]:
    """A plan's choices, JSON-ready, without the nouns that it embeds."""
    body = encode(plan)
    return {
        key: body[key]
        for key in ("scenario", "layout", "local_batch", "accumulation", "batching", "transport", "execution", "regions", "tables", "predict_only")
    } | {"identity": plan.identity(), "cluster": plan.cluster.name, "model": plan.model.name, "workload": plan.workload.name}


__all__ = [
    "Estimated",
    "Run",
    "UsageError",
    "calibrate",
    "calibration_needed",
    "check_error",
    "describe",
    "estimate",
    "execute",
    "is_plan",
    "save_plan",
    "search",
    "size",
]
