"""A sizing as a table and as a picture: effective examples per second over devices, one line a device, the demand beside them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from costmodel.units import show_count
from planner.report.console import grid
from planner.report.svg import WIDTH, Axis, Figure, axes, line, spread, text
from planner.report.terminal import dollars, gib, percent, seconds
from planner.size import Point, Sizing

_COLOURS = ("c0", "c6", "c8", "c2", "c4", "c9")


_COLUMNS = (("devices", "right"), ("", "left"), ("step", "right"), ("examples/s", "right"), ("effective", "right"), ("net/s", "right"),
            ("hours", "right"), ("$", "right"), ("$ per billion", "right"), ("memory", "right"), ("limited by", "left"), ("layout", "left"),
            ("demand", "left"))


def table(found: Sizing) -> RenderableType:
    """A row per size that has a plan; below it the sizes without, and why the largest of them has none."""
    rows = [_cells(p, found) for p in found.points if p.step_time_s is not None]
    return grid("", list(_COLUMNS), rows, caption="\n".join(_without(found)))


def _without(found: Sizing) -> Iterator[str]:
    left = [p for p in found.points if p.step_time_s is None]
    for device, missed in dict.fromkeys((p.device, bool(p.misses)) for p in left):
        mine = [p for p in left if (p.device, bool(p.misses)) == (device, missed)]
        sizes = ", ".join(f"{p.num_devices}" for p in mine)
        last = mine[-1]
        yield f"not planned: {sizes} x {device}: " + (f"{last.num_devices}: " if len(mine) > 1 else "") + last.reason


def _cells(p: Point, found: Sizing) -> list[str]:
    asked = found.demand.deadline or found.demand.rate or found.demand.budget
    words = "met" if p.sure else "met, not at the slow end"
    missed = ", ".join(f"{k} x{v:.2f}" if v < 1e3 else f"{k} x{v:.1e}" if v < float("inf") else f"{k}: unknown" for k, v in p.misses.items())
    return [f"{p.num_devices}", p.device, seconds(p.step_time_s), show_count(p.examples_per_second or 0.0), percent(p.effective), show_count(p.net),
            "-" if p.hours is None else f"{p.hours:,.3g}", dollars(p.dollars), dollars(p.dollars_per_billion_examples), gib(p.memory_bytes),
            p.limiting or "-", p.layout or "-", (missed or words) if asked else ""]


def curve(found: Sizing) -> Figure:
    """Effective examples per second over devices, both logarithmic."""
    points = [p for p in found.points if p.step_time_s is not None and p.net > 0]
    rates = [p.net for p in points] + ([found.demand.rate] if found.demand.rate else [])
    x = Axis(*spread([p.num_devices for p in points], log=True), 62, WIDTH - 14, log=True)
    y = Axis(*spread(rates, log=True), 236, 26, log=True)
    parts = [axes(x, y, show_x=lambda v: f"{v:g}", show_y=show_count, name_x="devices", name_y="examples per second of wall time")]
    names = list(dict.fromkeys(p.device for p in points))
    for number, device in enumerate(names):
        mine = sorted((p for p in points if p.device == device), key=lambda p: p.num_devices)
        fill = f"var(--{_COLOURS[number % len(_COLOURS)]})"
        places = [(x.at(p.num_devices), y.at(p.net)) for p in mine]
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{fill}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{4 if p.meets else 2.5}" fill="{fill}"/>' for p, (a, b) in zip(mine, places)]
        parts.append(text(x.begin + 8, y.end + 14 + 15 * number, device, "soft"))
        parts.append(f'<circle cx="{x.begin + 3:.1f}" cy="{y.end + 10 + 15 * number:.1f}" r="3" fill="{fill}"/>')
    if found.demand.rate:
        parts.append(line(x.begin, y.at(found.demand.rate), x.end, y.at(found.demand.rate), "ink"))
    said = ", ".join(f"{p.num_devices} x {p.device}: {show_count(p.net)}/s" for p in points)
    return Figure(name="size", title=f"Sizes of {found.scenario}", body="".join(parts), height=280, text=said,
                  caption="Large points meet the demand.")
