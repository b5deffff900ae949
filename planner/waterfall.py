"""What several changes bring together: one after another, each alone, and all without each. Every bar is planned and simulated again.

    so far        changes 1..i together
    alone         change i only
    left out      all changes but i
    interaction   all together / product of each alone; below 1 they compete for the same loss, above 1 one opens the way for another

The changes are a scenario's variants; a scenario without variants is asked for its levers. From a ledger the bars are measured runs, in the
order in which they ran; there is no alone and no left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from costmodel.calibration import Calibration
from planner import calibrate
from planner.errors import NoFeasiblePlan, UsageError
from planner.ledger import Entry, Ledger
from planner.levers import Outcome, as_pinned, levers, plan_and_simulate
from planner.scenario import ResolvedScenario, combined, load_scenario

MAX_LEVERS = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One change. step_time_s and speedup (examples per second against the base) with all changes so far; alone, left_out: speedups; None where
    there is no feasible plan or it was not asked for. binding: what binds so far."""

    name: str
    step_time_s: float | None
    speedup: float | None
    alone: float | None = None
    left_out: float | None = None
    cost_ratio: float | None = None
    binding: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The base is the first bar; the last bar holds all changes. evidence: `simulated` or `measured`."""

    title: str
    steps: tuple[Bar, ...]
    interaction: float | None
    evidence: str
    summary: str


Build = Callable[[Sequence[int]], ResolvedScenario]


def waterfall(reference: Path | str, *, time_limit: float = 2.0, search: bool = True, calibration_file: Path | None = None,
              progress: Callable[[str], None] = lambda name: None) -> Waterfall:
    """Bars of a scenario's variants or levers. `search` False: each bar is the scenario's pinned configuration, not a search.

    Raises UsageError, and NoFeasiblePlan when the base has no plan.
    """
    base = load_scenario(reference)
    calibration = calibrate.find(base.cluster, path=calibration_file).calibration
    names, build = _changes(reference, base)
    known = _Known(build, calibration, time_limit if search else None, progress)
    everything = tuple(range(len(names)))
    first = known(())
    if first.plan is None:
        raise NoFeasiblePlan(first.reason)
    alone = [_speed(known((i,)), first) for i in everything]
    so_far = [known(everything[:i + 1]) for i in everything]
    left_out = [_speed(known(everything[:i] + everything[i + 1:]), first) for i in everything]
    bars = [_bar("base", first, first)]
    bars += [dataclasses.replace(_bar(names[i], so_far[i], first), alone=alone[i], left_out=left_out[i]) for i in everything]
    product = math.prod(s for s in alone if s) if all(alone) else None
    together = bars[-1].speedup
    interaction = together / product if together and product else None
    summary = "" if interaction is None else f"together {together:.3f}x; alone they multiply to {product:.3f}x; interaction {interaction:.3f}"
    return Waterfall(title=f"{base.name}: one change at a time, {'planned and ' if search else ''}simulated again", steps=tuple(bars),
                     interaction=interaction, evidence="simulated", summary=summary)


def _changes(reference: Path | str, base: ResolvedScenario) -> tuple[list[str], Build]:
    if base.variants:
        names = [v.name for v in base.variants]
        return names, lambda chosen: combined(reference, [names[i] for i in chosen])
    found = levers(base)[:MAX_LEVERS]

    def build(chosen: Sequence[int]) -> ResolvedScenario:
        scenario = base
        for i in chosen:
            scenario = found[i].apply(scenario)
        return scenario
    return [lever.name for lever in found], build


class _Known:
    """Outcomes by set of changes, each made once; plans found on the way are tried on every later set."""

    def __init__(self, build: Build, calibration: Calibration | None, time_limit: float | None, progress: Callable[[str], None]) -> None:
        self._build, self._calibration, self._time_limit, self._progress = build, calibration, time_limit, progress
        self._found: dict[tuple[int, ...], Outcome] = {}

    def __call__(self, chosen: tuple[int, ...]) -> Outcome:
        if chosen not in self._found:
            scenario = self._build(chosen)
            self._progress(" + ".join(str(i + 1) for i in chosen) or "base")
            if self._time_limit is None:
                self._found[chosen] = as_pinned(scenario, self._calibration)
            else:
                given = [o.plan for o in self._found.values() if o.plan is not None]
                self._found[chosen] = plan_and_simulate(scenario, self._calibration, time_limit=self._time_limit, given=given)
        return self._found[chosen]


def _speed(made: Outcome, base: Outcome) -> float | None:
    return made.examples_per_second / base.examples_per_second if made.plan is not None else None


def _bar(name: str, made: Outcome, base: Outcome) -> Bar:
    if made.plan is None or made.estimate is None or made.accounting is None or base.estimate is None:
        return Bar(name=name, step_time_s=None, speedup=None, binding=made.reason.splitlines()[0] if made.reason else "no feasible plan")
    before, after = base.estimate.dollars_per_billion_examples, made.estimate.dollars_per_billion_examples
    return Bar(name=name, step_time_s=made.estimate.step_time.value, speedup=_speed(made, base), binding=made.accounting.binding,
               cost_ratio=after / before if after and before else None)


# --- measured runs ---

def from_ledger(reference: str, *, ledger: Ledger | None = None) -> Waterfall:
    """Completed runs of a scenario in the order in which they ran, each against the first."""
    book = ledger or Ledger()
    entries = [e for e in book.entries(scenario=reference) if e.measured_step_s and e.examples_per_second and e.status == "completed"]
    if len(entries) < 2:
        raise UsageError(f"{book.path}: {len(entries)} completed runs of scenario {reference!r}, two are needed; `planner ledger` lists them")
    first = entries[0]
    assert first.examples_per_second
    bars = [Bar(name=f"{first.time[:16].replace('T', ' ')} {first.layout}", step_time_s=first.measured_step_s, speedup=1.0, binding=_longest(first))]
    for before, after in itertools.pairwise(entries):
        assert after.examples_per_second
        bars.append(Bar(name=_what_changed(before, after), step_time_s=after.measured_step_s,
                        speedup=after.examples_per_second / first.examples_per_second, binding=_longest(after)))
    return Waterfall(title=f"{reference}: measured runs, in the order in which they ran", steps=tuple(bars), interaction=None, evidence="measured",
                     summary="binding: the longest phase of the run; speed against the first run")


def _what_changed(before: Entry, after: Entry) -> str:
    names = ("layout", "local_batch", "accumulation", "model", "workload", "cluster", "world_size")
    changed = [f"{n} {getattr(before, n)} -> {getattr(after, n)}" for n in names if getattr(before, n) != getattr(after, n)]
    if not changed and before.plan_identity != after.plan_identity:
        changed = ["other options of the plan"]
    return "; ".join(changed) or "the same plan again"


def _longest(entry: Entry) -> str:
    return max(entry.measured_phases_s, key=lambda p: entry.measured_phases_s[p]) if entry.measured_phases_s else ""
