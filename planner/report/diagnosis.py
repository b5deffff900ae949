"""A diagnosis, a waterfall and a comparison as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from costmodel.units import show_count
from planner.report.console import grid
from planner.report.terminal import percent, seconds

if TYPE_CHECKING:
    from planner.compare import Comparison
    from planner.diagnose import Diagnosis, Rung
    from planner.levers import Ranked
    from planner.waterfall import Waterfall

NAMES = {"memory_bound": "memory-bound", "straggler_wait": "wait: uneven work", "synchronisation": "wait: slow ranks", "input": "input stall",
         "host": "host launch"}


def category(name: str) -> str:
    """A category in words: `communication:rdma` as `exposed rdma`."""
    return f"exposed {name.removeprefix('communication:')}" if name.startswith("communication:") else NAMES.get(name, name)


def value_of(rung: Rung) -> str:
    """A rung's value with its unit."""
    if rung.value is None:
        return "unknown"
    if rung.unit == "s":
        return seconds(rung.value)
    if rung.unit == "$":
        return f"${rung.value:,.2f}"
    if (not rung.unit and rung.level in ("kernel", "module", "device", "job")) or rung.name.startswith("scaling"):
        return percent(rung.value)
    return f"{show_count(rung.value) if rung.unit == '/s' else f'{rung.value:.4g}'} {rung.unit}".strip()


def tree(rungs: Sequence[Rung]) -> Group:
    """The metric tree; what is missing stands beside what is unknown."""
    rows, last = [], ""
    for rung in rungs:
        rows.append([rung.level if rung.level != last else "", rung.name, value_of(rung), rung.evidence, rung.source or rung.missing])
        last = rung.level
    columns = [("level", "left"), ("metric", "left"), ("value", "right"), ("evidence", "left"), ("source, or what is missing", "left")]
    return grid("metric tree", columns, rows)


def accounting(found: Diagnosis) -> Group:
    """Where the time of a step goes, simulated beside measured."""
    predicted, measured = found.predicted, found.measured
    other: Mapping[str, float] = measured.seconds if measured is not None else found.phases.seconds if found.phases is not None else {}
    total = measured.step if measured is not None else found.phases.step if found.phases is not None else 0.0
    simulated: Mapping[str, float] = predicted.seconds if predicted is not None else {}
    names = sorted(dict.fromkeys((*simulated, *other)), key=lambda n: -max(simulated.get(n, 0.0), other.get(n, 0.0)))
    step = predicted.step if predicted is not None else 0.0
    rows = [[category(n), *_pair(simulated.get(n), step), *_pair(other.get(n), total)] for n in names]
    rows.append(["step", *_pair(step or None, step), *_pair(total or None, total)])
    head = "measured" if measured is not None else "run without trace" if found.phases is not None else "measured"
    columns = [("where the time goes", "left"), ("simulated", "right"), ("share", "right"), (head, "right"), ("share", "right")]
    return grid("", columns, rows)


def _pair(value: float | None, whole: float) -> list[str]:
    return ["-", "-"] if value is None or whole <= 0 else [seconds(value), percent(value / whole)]


def binding(found: Diagnosis) -> Text:
    """The verdict in a line or two."""
    lines = []
    for word, a in (("measured", found.measured), ("simulated", found.predicted)):
        if a is not None:
            relief = [f"{name} {percent(value / a.step)}" for name, value in list(a.relief().items())[:3] if value > 0]
            lines.append(f"{word}: bound by {a.binding}; relieved, a step loses at most: {', '.join(relief)}; unattributed {percent(a.unattributed)}")
    if found.slowest_rank is not None and found.measured is not None and found.measured.binding in ("synchronisation", "load_balance"):
        lines.append(f"the others wait for rank {found.slowest_rank}")
    return Text("\n".join(lines))


def levers(ranked: Sequence[Ranked], constraint: str) -> Group:
    """Levers by their end-to-end gain; those that relieve the binding constraint are marked."""
    rows = []
    for r in ranked:
        mark = "*" if constraint in r.constraints else ""
        if r.speedup is None:
            rows.append([mark, r.name, "-", "-", "-", "-", r.reason])
            continue
        rows.append([mark, r.name, f"{r.speedup:.3f}x", seconds(r.step_time_s), f"{r.cost_ratio:.3f}x" if r.cost_ratio else "-", r.next_constraint,
                     r.layout if r.replanned else "same plan"])
    columns = [("", "left"), ("lever", "left"), ("speed", "right"), ("step", "right"), ("cost", "right"), ("then bound by", "left"), ("plan", "left")]
    return grid("levers, each planned and simulated again (* relieves what binds; speed in examples per second)", columns, rows)


def waterfall(found: Waterfall) -> Group:
    """One change at a time, alone, and left out."""
    rows = []
    for step in found.steps:
        rows.append([step.name, seconds(step.step_time_s), _gain(step.speedup), _gain(step.alone), _gain(step.left_out), step.binding])
    columns = [("change", "left"), ("step, so far", "right"), ("speed so far", "right"), ("alone", "right"), ("all without it", "right"),
               ("then bound by", "left")]
    return grid(found.title, columns, rows, caption=found.summary)


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"


def comparison(found: Comparison) -> Group:
    """Two plans or runs side by side."""
    rows = [[d.what, d.before, d.after] for d in found.choices]
    parts = [Text(f"A {found.before}\nB {found.after}"), Text("")]
    parts.append(grid("what differs", [("choice", "left"), ("A", "left"), ("B", "left")], rows) if rows else Text("no choice differs"))
    cells = [[category(c.category), seconds(c.before), seconds(c.after), f"{'+' if c.change >= 0 else '-'}{seconds(abs(c.change))}"]
             for c in found.categories]
    columns = [("category", "left"), ("A", "right"), ("B", "right"), ("change", "right")]
    parts += [Text(""), grid(f"where the time went ({found.evidence})", columns, cells)]
    if found.memory:
        from planner.report.terminal import gib

        rows = [[name, gib(a), gib(b)] for name, (a, b) in found.memory.items()]
        parts += [Text(""), grid("memory of a rank (predicted)", [("category", "left"), ("A", "right"), ("B", "right")], rows)]
    return Group(*parts, Text(""), Text(found.verdict))
