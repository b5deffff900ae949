"""Two plans or runs against each other: what differs in the choices, where the time went, how the constraint moved.

Both sides are shown with the same evidence: traces of both, else phases of both runs, else both simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from costmodel.codec import content_hash
from costmodel.plan import Plan
from costmodel.units import show
from planner import api
from planner.configure import default_plan
from planner.diagnose import Diagnosis, diagnose
from planner.errors import UsageError
from planner.report.terminal import sharding
from planner.scenario import load_scenario


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    what: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Seconds of one category on both sides; `change` = after - before."""

    category: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`before` and `after` describe A and B in a line; `speedup`: B's examples per second over A's; categories by the size of their change;
    `notes`: what of either side was left out, and how it was priced."""

    before: str
    after: str
    evidence: str
    choices: tuple[Difference, ...]
    categories: tuple[Moved, ...]
    memory: dict[str, tuple[float, float]]
    speedup: float
    binding: tuple[str, str]
    verdict: str
    notes: tuple[str, ...] = ()


def compare(first: Path | str, second: Path | str, *, calibration_file: Path | None = None) -> Comparison:
    """A against B: folders of plans or runs, plan files, or scenarios (their pins and plain defaults). Raises UsageError."""
    a, b = (_side(reference, calibration_file) for reference in (first, second))
    assert a.plan is not None and b.plan is not None and a.estimate is not None and b.estimate is not None
    evidence, before, after = _seconds(a, b)
    names = dict.fromkeys((*before, *after))
    categories = sorted((Moved(category=n, before=before.get(n, 0.0), after=after.get(n, 0.0)) for n in names), key=lambda m: -abs(m.change))
    speedup = _rate(b, sum(after.values())) / _rate(a, sum(before.values()))
    binding = (_binding(a, evidence), _binding(b, evidence))
    held = a.estimate.memory.categories, b.estimate.memory.categories
    memory = {name: (held[0].get(name, 0.0), held[1].get(name, 0.0)) for name in held[0]}
    memory = {name: pair for name, pair in memory.items() if max(pair) > 0 and abs(pair[0] - pair[1]) > 0.01 * max(pair)}
    memory["reserved"] = (a.estimate.memory.reserved.value, b.estimate.memory.reserved.value)
    return Comparison(before=_describe(a.plan), after=_describe(b.plan), evidence=evidence, choices=tuple(choices(a.plan, b.plan)),
                      categories=tuple(m for m in categories if max(m.before, m.after) > 0), memory=memory, speedup=speedup, binding=binding,
                      verdict=_verdict(speedup, binding, categories),
                      notes=tuple(dict.fromkeys((*a.notes, *b.notes))))


def _side(reference: Path | str, calibration_file: Path | None) -> Diagnosis:
    if api.is_plan(reference):
        found = diagnose(reference, calibration_file=calibration_file)
        if found.plan is None:
            raise UsageError(f"{reference}: no plan to compare" + "".join(f"\n  - {note}" for note in found.notes))
        return found
    import tempfile

    plan, _ = default_plan(load_scenario(reference, with_variants=False))
    with tempfile.TemporaryDirectory(prefix="planner-compare-") as folder:
        api.save_plan(plan, Path(folder))
        return diagnose(folder, calibration_file=calibration_file)


def _seconds(a: Diagnosis, b: Diagnosis) -> tuple[str, Mapping[str, float], Mapping[str, float]]:
    if a.measured is not None and b.measured is not None:
        return "measured, from traces", a.measured.seconds, b.measured.seconds
    measured = [d.result.measured if d.result is not None else None for d in (a, b)]
    if measured[0] is not None and measured[1] is not None:
        return "measured, phases of the runs", measured[0].phases_s, measured[1].phases_s
    assert a.predicted is not None and b.predicted is not None
    return "simulated", a.predicted.seconds, b.predicted.seconds


def _rate(side: Diagnosis, step: float) -> float:
    assert side.plan is not None
    return side.plan.local_batch * side.plan.accumulation * side.plan.layout.world_size / step


def _binding(side: Diagnosis, evidence: str) -> str:
    accounting = side.measured if evidence.endswith("traces") else side.predicted
    return accounting.binding if accounting is not None else "unknown"


def _describe(plan: Plan) -> str:
    return f"{plan.scenario}: {plan.model.name} on {plan.layout.world_size} x {plan.cluster.device.name}, {plan.layout.short}"


def choices(a: Plan, b: Plan) -> list[Difference]:
    """What was chosen differently in two plans."""
    rows = [("model", a.model.name, b.model.name), ("cluster", a.cluster.name, b.cluster.name), ("layout", a.layout.short, b.layout.short)]
    jobs = ("local_batch", "accumulation", "batching", "transport", "execution", "input_overlap", "tables_ahead")
    rows += [(name, str(getattr(a, name)), str(getattr(b, name))) for name in jobs]
    rows.append(("tables", sharding(a), sharding(b)))
    for what in ("model", "cluster", "workload"):
        first, second = getattr(a, what), getattr(b, what)
        if first.name == second.name and content_hash(first) != content_hash(second):
            rows.append((what, *(", ".join(side) for side in _inside(first, second))))
    options = [{r.region: ", ".join(f"{o.count} {o.precision} {o.checkpoint}" for o in r.options) for r in plan.regions} for plan in (a, b)]
    rows += [(region, options[0].get(region, "-"), options[1].get(region, "-")) for region in dict.fromkeys((*options[0], *options[1]))]
    placed = [{t.table: t for t in plan.tables} for plan in (a, b)]
    moved = [name for name in placed[0] if name in placed[1] and placed[0][name] != placed[1][name]]
    found = [Difference(what=what, before=before, after=after) for what, before, after in rows if before != after]
    if moved and sharding(a) == sharding(b):
        found.append(Difference(what="table placement", before="", after=f"{len(moved)} tables elsewhere"))
    return found


def _inside(first: object, second: object) -> tuple[list[str], list[str]]:
    """Fields of two nouns that differ, as `name value`."""
    names = [f.name for f in dataclasses.fields(first) if getattr(first, f.name) != getattr(second, f.name)]  # type: ignore[arg-type]

    def words(value: object) -> str:
        text = str(value) if isinstance(value, (int, float, str, type(None))) else f"#{content_hash(value)[:6]}"
        return text if len(text) < 40 else text[:37] + "..."
    return [f"{n} {words(getattr(first, n))}" for n in names], [f"{n} {words(getattr(second, n))}" for n in names]


def _verdict(speedup: float, binding: tuple[str, str], categories: list[Moved]) -> str:
    from planner.report.diagnosis import category

    moved = [m for m in categories if abs(m.change) > 0][:2]
    words = "; ".join(f"{category(m.category)} {'+' if m.change > 0 else '-'}{show(abs(m.change), 'seconds')}" for m in moved)
    bound = f"both are bound by {binding[0]}" if binding[0] == binding[1] else f"A is bound by {binding[0]}, B by {binding[1]}"
    faster = f"B trains {speedup:.3f}x as many examples a second as A"
    return f"{faster}; {bound}" + (f"; most of it: {words}" if words else "")
