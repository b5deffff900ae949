"""The pictures of a report: each is made from one part of a diagnosis, and left out with its reason where that part is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.accounting import COMMUNICATION
from costmodel.estimate import Estimate
from costmodel.plan import Plan
from costmodel.simulate import Timeline
from costmodel.stepgraph import StepGraph
from costmodel.units import show, show_count, show_gib
from planner.diagnose import Diagnosis
from planner.ledger import Entry
from planner.report.diagnosis import category
from planner.report.svg import WIDTH, Axis, Figure, axes, bars, clipped, colour, line, rect, spread, stacked, text
from planner.report.terminal import percent, seconds
from planner.report.timeline import predicted_ranks

_BINS = 400


class Missing(Exception):
    """Why a picture cannot be drawn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What pictures are made of. changes: the bars of a `planner waterfall -o` in the folder; entries: runs in the ledger."""

    found: Diagnosis
    entries: Sequence[Entry]
    changes: Mapping[str, Any] | None

    @property
    def plan(self) -> Plan:
        if self.found.plan is None:
            raise Missing("no plan in the folder")
        return self.found.plan

    @property
    def estimate(self) -> Estimate:
        if self.found.estimate is None:
            raise Missing("no plan in the folder")
        return self.found.estimate


def draw(material: Material) -> tuple[list[Figure], list[tuple[str, str]]]:
    """All pictures that can be drawn, and (title, reason) of the others."""
    figures, missing = [], []
    for title, make in PICTURES:
        try:
            figures.append(make(material, title))
        except Missing as reason:
            missing.append((title, str(reason)))
    return figures, missing


def _shares(seconds_by_category: Mapping[str, float]) -> list[tuple[str, float, str]]:
    return [(category(n), v, colour(n)) for n, v in sorted(seconds_by_category.items(), key=lambda i: _order(i[0])) if v > 0]


def _order(name: str) -> int:
    known = ("compute", "memory_bound", "recompute", "quantize", "padding", "contention")
    if name in known:
        return known.index(name)
    return 10 if name.startswith(COMMUNICATION) else {"straggler_wait": 11, "synchronisation": 12, "input": 13, "host": 14}.get(name, 15)


def _time(m: Material, title: str) -> Figure:
    rows, words = [], []
    for name, a in (("simulated", m.found.predicted), ("measured", m.found.measured)):
        if a is not None:
            rows.append((name, _shares(a.seconds)))
            words.append(seconds(a.step))
    if not rows:
        raise Missing("neither a plan nor a trace")
    if m.found.phases is not None:
        rows.append(("run, no trace", _shares(m.found.phases.seconds)))
        words.append(seconds(m.found.phases.step))
    body, height = stacked(rows, words=words)
    return Figure(name="time", title=title, body=body, height=height, text="; ".join(f"{r[0]} {w}" for r, w in zip(rows, words)),
                  caption=f"Bound by {m.found.binding}. Every instant of the step belongs to one category.")


def _cascade(m: Material, title: str) -> Figure:
    accounting = m.found.measured or m.found.predicted
    if accounting is None:
        raise Missing("neither a plan nor a trace")
    parts = sorted(((n, v) for n, v in accounting.seconds.items() if v > 0.001 * accounting.step), key=lambda i: _order(i[0]))
    starts, rows, at = [], [], 0.0
    for name, value in parts:
        starts.append(at)
        rows.append((category(name), value, percent(value / accounting.step), colour(name)))
        at += value
    rows.append(("step", accounting.step, seconds(accounting.step), "var(--soft)"))
    body, height = bars(rows, start=[*starts, 0.0])
    return Figure(name="cascade", title=title, body=body, height=height, text=", ".join(f"{r[0]} {r[2]}" for r in rows),
                  caption=f"From pure compute to the {'measured' if m.found.measured else 'simulated'} step.")


def _changes(m: Material, title: str) -> Figure:
    if not m.changes:
        raise Missing("no waterfall.json in the folder; planner waterfall SCENARIO -o DIR writes it")
    steps = [s for s in m.changes["steps"] if s["speedup"]]
    rows, starts, before = [], [], 0.0
    for i, step in enumerate(steps):
        gain = step["speedup"] - before
        rows.append((step["name"], abs(gain), f"{step['speedup']:.3f}x", "var(--soft)" if i == 0 else "var(--good)" if gain >= 0 else "var(--bad)"))
        starts.append(min(before, step["speedup"]))
        before = step["speedup"]
    body, height = bars(rows, start=starts, label=190, value=60)
    return Figure(name="changes", title=title, body=body, height=height, text=", ".join(f"{r[0]} {r[2]}" for r in rows), caption=m.changes["summary"])


def _pareto(m: Material, title: str) -> Figure:
    path = m.found.directory / "candidates.parquet"
    if not path.is_file():
        raise Missing("no candidates.parquet in the folder; planner search SCENARIO -o DIR writes it")
    import pandas as pd

    frame = pd.read_parquet(path)
    world = m.plan.layout.world_size
    frame = frame.assign(step=frame["simulated_s"].fillna(frame["bound_s"]), memory=frame["reserved_bytes"].fillna(frame["least_memory_bytes"]))
    frame = frame[np.isfinite(frame["step"]) & np.isfinite(frame["memory"]) & (frame["step"] > 0)]
    if frame.empty:
        raise Missing("the search kept no candidate with a step time")
    frame = frame.assign(rate=frame["local_batch"] * frame["accumulation"] * world / frame["step"])
    frame = frame.sort_values("rate", ascending=False).head(1200)
    own = (m.estimate.examples_per_second, m.estimate.memory.reserved.value)
    price = m.plan.cluster.price
    ys = [*frame["rate"], own[0]]
    unit, name = (2**30, "GiB") if max(frame["memory"].max(), own[1]) >= 2**30 else (2**20, "MiB")
    x = Axis(*spread([*(frame["memory"] / unit), own[1] / unit], log=False), 62, WIDTH - 14)
    y = Axis(*spread(ys, log=False), 236, 26)
    parts = [axes(x, y, show_x=lambda v: f"{v:g}", show_y=show_count, name_x=f"memory of a rank [{name}]", name_y="examples per second")]
    seen: set[tuple[int, int]] = set()
    for row in frame.itertuples():
        place = (round(x.at(row.memory / unit)), round(y.at(row.rate)))
        if place in seen:
            continue
        seen.add(place)
        solved = row.simulated_s == row.simulated_s
        parts.append(f'<circle cx="{place[0]}" cy="{place[1]}" r="{3 if solved else 2}" fill="var(--{"c0" if solved else "c1"})" opacity="0.75"/>')
    parts.append(f'<circle cx="{x.at(own[1] / unit):.1f}" cy="{y.at(own[0]):.1f}" r="6" fill="none" stroke="var(--c6)" stroke-width="2.5"/>')
    parts.append(text(x.at(own[1] / unit) - 10, y.at(own[0]) + 18, "this plan", "end"))
    cost = ""
    if price is not None:
        dollars = [1e9 / r * world * price.dollars_per_device_hour / 3600 for r in (max(ys), own[0])]
        cost = f" At ${price.dollars_per_device_hour:g} per device hour: ${dollars[1]:,.0f} per billion examples here, ${dollars[0]:,.0f} at the top."
    return Figure(name="pareto", title=title, body="".join(parts), height=280, text=f"{len(frame)} candidates of the search; this plan is ringed",
                  caption=f"Large dots: planned and simulated. Small: bound and least memory only.{cost}")


def _memory(m: Material, title: str) -> Figure:
    memory = m.estimate.memory
    c = memory.categories
    rest = ("parameters", "optimizer", "tables", "table_state", "input", "buffers")
    fills = dict(zip(("parameters", "optimizer", "tables", "table_state", "saved_activations", "gradients", "input", "buffers"),
                     ("c0", "c1", "c8", "c5", "c2", "c3", "c9", "c4")))
    resting = [(n, c[n]) for n in rest]
    more = [("forward's end", "saved_activations", c["saved_activations"]), ("optimizer", "gradients", c["gradients"])]
    if memory.peak_phase == "backward":
        more.insert(1, ("peak: backward", "gradients, gathered, workspace, saved", memory.peak.value - sum(v for _, v in resting)))
    phases = [("at rest", resting), *((name, [*resting, (part, value)]) for name, part, value in more)]
    fills["gradients, gathered, workspace, saved"] = "c7"
    rows = [(name, [(n.replace("_", " "), v, f"var(--{fills[n]})") for n, v in parts if v > 0]) for name, parts in phases]
    body, height = stacked(rows, words=[show_gib(sum(v for _, v in parts)) for _, parts in phases], label=110)
    caption = (f"Peak {show_gib(memory.peak.value)} in {memory.peak_phase}; reserved with context and slack {show_gib(memory.reserved.value)} of "
               f"{show_gib(memory.limit)}{'' if memory.fits else ': does not fit'}.")
    return Figure(name="memory", title=title, body=body, height=height, text=caption, caption=caption + _against(m))


def _against(m: Material) -> str:
    measured = m.found.result.measured if m.found.result is not None else None
    if measured is None or measured.memory_bytes.peak_allocated is None:
        return ""
    return f" Measured peak: {show_gib(measured.memory_bytes.peak_allocated)}."


def _load(m: Material, title: str) -> Figure:
    if m.found.ranks is None:
        raise Missing("no plan in the folder")
    loads = m.found.ranks.average.loads
    held, served = np.asarray(loads.weights, dtype=float), np.asarray(loads.served, dtype=float)
    if len(held) < 2:
        raise Missing("one rank holds all tables")
    parts = []
    for lane, (name, values, fill) in enumerate((("bytes held", held, "c8"), ("elements served", served, "c0"))):
        bottom, mean = 96 + lane * 118, float(values.mean()) or 1.0
        top = max(float(values.max()) / mean, 1.2)
        grouped = [float(v.max()) / mean for v in np.array_split(values, min(len(values), 128))]
        width = (WIDTH - 78) / len(grouped)
        for i, value in enumerate(grouped):
            parts.append(rect(62 + i * width, bottom - value / top * 72, max(width - 0.6, 0.5), value / top * 72, f"var(--{fill})"))
        parts.append(line(62, bottom - 72 / top, WIDTH - 14, bottom - 72 / top, "ink"))
        parts.append(text(62, bottom - 78, f"{name} over their mean; the fullest rank has {values.max() / mean:.3f}x", "soft"))
        parts.append(text(56, bottom - 72 / top + 4, "mean", "soft end"))
        parts.append(text(62, bottom + 14, "0", "soft mid") + text(WIDTH - 14, bottom + 14, f"rank {len(values) - 1}", "soft end"))
    imbalance = ", ".join(f"{name} {value:.3f}x" for name, value in list(m.estimate.imbalance.items())[:4])
    return Figure(name="load", title=title, body="".join(parts), height=236, text="table bytes and rows served by rank, over the mean",
                  caption=f"Slowest rank over the average: {imbalance}." if imbalance else "")


def _lengths(m: Material, title: str) -> Figure:
    parts, y = [], 26.0
    items = [(s.name, m.plan.workload.lengths[s.name]) for s in m.plan.model.sequences if s.name in m.plan.workload.lengths]
    if not items:
        raise Missing("the model has no sequences")
    for i, (name, spec) in enumerate(items[:4]):
        lengths, p = spec.pmf()
        counts, edges = np.histogram(lengths, bins=min(60, max(2, len(lengths))), weights=p)
        top, width = counts.max() or 1.0, (WIDTH - 76) / len(counts)
        fill = f"var(--{('c0', 'c8', 'c2', 'c4')[i]})"
        parts += [rect(62 + j * width, y + 62 - share / top * 60, max(width - 0.7, 0.5), share / top * 60, fill) for j, share in enumerate(counts)]
        cumulative = np.cumsum(p)
        median, high = lengths[np.searchsorted(cumulative, 0.5)], lengths[min(np.searchsorted(cumulative, 0.99), len(lengths) - 1)]
        parts.append(text(62, y - 4, f"{name}: median {median}, mean {spec.mean():.0f}, p99 {high}", "soft"))
        parts.append(line(62, y + 62, WIDTH - 14, y + 62))
        parts += [text(62, y + 76, f"{edges[0]:.0f}", "soft mid"), text(WIDTH - 14, y + 76, f"{edges[-1]:.0f} events", "soft end")]
        y += 106
    return Figure(name="lengths", title=title, body="".join(parts), height=y - 18, text="histogram of history lengths")


def _scatter(m: Material, title: str) -> Figure:
    rows = [(e.predicted_step_s, e.predicted_low_s or e.predicted_step_s, e.predicted_high_s or e.predicted_step_s, e.measured_step_s, e.scenario,
             m.found.plan is not None and e.plan_identity == m.found.plan.identity()) for e in m.entries if e.predicted_step_s and e.measured_step_s]
    if not rows:
        raise Missing("the ledger has no run with a predicted and a measured step")
    values = [v for r in rows for v in r[:4]]
    low, high = spread(values, log=True)
    x, y = Axis(low, high, 62, WIDTH - 14, log=True), Axis(low, high, 236, 26, log=True)
    parts = [axes(x, y, show_x=seconds, show_y=seconds, name_x="predicted step, 90 % interval", name_y="measured step"),
             line(x.begin, y.begin, x.end, y.end, "ink")]
    inside = 0
    for predicted, below, above, measured, name, own in rows[-400:]:
        inside += below <= measured <= above
        level = y.at(measured)
        parts.append(f'<line x1="{x.at(below):.1f}" x2="{x.at(above):.1f}" y1="{level:.1f}" y2="{level:.1f}" style="stroke:var(--c1)"/>')
        parts.append(f'<circle cx="{x.at(predicted):.1f}" cy="{y.at(measured):.1f}" r="{5 if own else 3}" fill="var(--{"c6" if own else "c0"})">'
                     f"<title>{name}: {seconds(predicted)} predicted, {seconds(measured)} measured</title></circle>")
    shown = min(len(rows), 400)
    runs = f"{shown} run{'' if shown == 1 else 's'}"
    return Figure(name="scatter", title=title, body="".join(parts), height=280, text=f"{shown} runs; {inside} inside their interval",
                  caption=f"{runs}, {inside} inside their 90 % interval; this plan's are red. On the line prediction and measurement agree.")


def _timeline(m: Material, title: str) -> Figure:
    lanes: list[tuple[str, list[tuple[str, float, float]], float]] = []
    for name, (graph, timeline) in predicted_ranks(m.found.ranks).items():
        rank = name.split(", ")[1].split()[0]
        lanes += [(f"{rank}: {lane}", spans, timeline.step_seconds) for lane, spans in _predicted_lanes(graph, timeline)]
    if m.found.steps:
        for step in sorted(m.found.steps[0], key=lambda r: r.rank)[:4]:
            lanes.append((f"measured r{step.rank}", [(n, s - step.begin, e - step.begin) for n, s, e in step.intervals], step.end - step.begin))
    if not lanes:
        raise Missing("neither a plan nor a trace")
    longest = max(length for _, _, length in lanes)
    parts = []
    for i, (name, spans, length) in enumerate(lanes):
        y = 8 + i * 24
        parts.append(text(112, y + 12, clipped(name, 118), "soft end"))
        parts.append(rect(118, y, length / longest * (WIDTH - 132), 16, "var(--line)"))
        parts += [rect(118 + a * (WIDTH - 132) / longest, y, (b - a) * (WIDTH - 132) / longest, 16, colour(n), category(n))
                  for n, a, b in _binned(spans, longest)]
    y = 8 + len(lanes) * 24 + 12
    parts += [text(118, y, "0", "soft"), text(WIDTH - 14, y, seconds(longest), "soft end")]
    return Figure(name="timeline", title=title, body="".join(parts), height=y + 10, text="streams of the predicted and measured ranks over a step",
                  caption="The whole timeline with names: timeline.json.gz, opens at ui.perfetto.dev. Colours as above.")


def _predicted_lanes(graph: StepGraph, timeline: Timeline) -> list[tuple[str, list[tuple[str, float, float]]]]:
    from costmodel.accounting import task_shares

    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for index, start, end in timeline.spans:
        task = graph.tasks[index]
        shares = task_shares(task, end - start, 0.0)
        if end > start and shares:
            lanes.setdefault(task.stream.removeprefix("tier:"), []).append((max(shares, key=lambda n: shares[n]), start, end))
    return sorted(lanes.items(), key=lambda lane: (lane[0] != "compute", lane[0]))


def _binned(spans: Sequence[tuple[str, float, float]], longest: float) -> list[tuple[str, float, float]]:
    """At most one rectangle per bin: each bin takes the category that fills most of it, neighbours of one category are joined."""
    names = list(dict.fromkeys(n for n, _, _ in spans))
    filled = np.zeros((len(names), _BINS))
    step = longest / _BINS
    for name, start, end in spans:
        row, first, last = filled[names.index(name)], start / step, end / step
        a, b = int(first), min(int(last), _BINS - 1)
        if a >= _BINS:
            continue
        if a == b:
            row[a] += last - first
        else:
            row[a] += a + 1 - first
            row[a + 1:b] += 1.0
            row[b] += last - b
    best, full = filled.argmax(axis=0), filled.sum(axis=0) > 0.3
    found: list[tuple[str, float, float]] = []
    for i in np.flatnonzero(full):
        name = names[best[i]]
        if found and found[-1][0] == name and abs(found[-1][2] - i * step) < step / 2:
            found[-1] = (name, found[-1][1], (i + 1) * step)
        else:
            found.append((name, i * step, (i + 1) * step))
    return found


PICTURES: tuple[tuple[str, Callable[[Material, str], Figure]], ...] = (
    ("Where the time goes", _time), ("From compute to the step", _cascade), ("What changes would bring", _changes),
    ("Speed against memory", _pareto), ("Memory by phase", _memory), ("Tables by rank", _load), ("History lengths", _lengths),
    ("Predicted against measured", _scatter), ("Timeline", _timeline))


def write_files(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Each picture as an SVG file."""
    from planner.files import write_text

    made = []
    for figure in figures:
        made.append(folder / f"{figure.name}.svg")
        write_text(made[-1], figure.standalone())
    return made


__all__ = ["Material", "Missing", "draw", "show", "write_files"]
