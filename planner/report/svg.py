"""Pictures as inline SVG, by hand: a few hundred bytes a bar, sharp in print, light and dark by the page's CSS variables.

A `Figure` is drawn on a canvas of WIDTH units and scales with its card: type stays readable at 390 px. `standalone` adds the colours, for a file
of its own.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

WIDTH = 460
_ROW, _BAR = 25, 15
LIGHT = {"ink": "#1b1f24", "soft": "#5b6570", "line": "#d5dae0", "card": "#ffffff",
         "c0": "#2f6fb7", "c1": "#7db0e3", "c2": "#8a63c7", "c3": "#c2a3e8",
         "c4": "#b98b1d", "c5": "#e0b75a", "c6": "#c4483c", "c7": "#e58a4e", "c8": "#2c8c74", "c9": "#8b949e", "c10": "#d1608f",
         "bad": "#c4483c", "good": "#2c8c74"}
DARK = {"ink": "#e6eaee", "soft": "#9aa5b1", "line": "#3a424c", "card": "#1c2127",
        "c0": "#5b9ae0", "c1": "#355f8f", "c2": "#a987e0", "c3": "#674a91",
        "c4": "#d6a93a", "c5": "#846620", "c6": "#e8695d", "c7": "#b0622f", "c8": "#49b498", "c9": "#77818c", "c10": "#f08fb3",
        "bad": "#e8695d", "good": "#49b498"}
COLOURS = {"compute": "c0", "memory_bound": "c1", "recompute": "c2", "quantize": "c3", "padding": "c4", "contention": "c5", "straggler_wait": "c7",
           "synchronisation": "c10", "input": "c8", "host": "c9", "unattributed": "line"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """name: of its file; body: SVG elements on a canvas of WIDTH x height; text: what it says, for readers who cannot see it."""

    name: str
    title: str
    body: str
    height: float
    text: str
    caption: str = ""

    def inline(self) -> str:
        return (f'<svg viewBox="0 0 {WIDTH} {self.height:.0f}" role="img" aria-label="{html.escape(self.text)}" class="figure" id="{self.name}">'
                f"{self.body}</svg>")

    def standalone(self) -> str:
        """A file of its own, light."""
        colours = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
        style = f"svg{{{colours}background:var(--card);font-family:system-ui,sans-serif}}{STYLE}"
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" width="{2 * WIDTH}" height="{2 * self.height:.0f}">'
                f"<title>{html.escape(self.title)}</title><style>{style}</style>{self.body}</svg>\n")


STYLE = ("text{fill:var(--ink);font-size:12px}text.soft{fill:var(--soft);font-size:11px}text.end{text-anchor:end}text.mid{text-anchor:middle}"
         "line{stroke:var(--line)}.ink{stroke:var(--ink)}")


def colour(category: str) -> str:
    """A CSS colour of an accounting category."""
    return f"var(--{'c6' if category.startswith('communication') else COLOURS.get(category, 'c9')})"


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{f""" class="{style}" """ if style else ""}>{html.escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, hint: str = "", *, edged: bool = False) -> str:
    edge = ' stroke="var(--card)" stroke-width="0.7"' if edged else ""
    title = f"<title>{html.escape(hint)}</title>" if hint else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" fill="{fill}"{edge}>{title}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, style: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{f""" class="{style}" """ if style else ""}/>'


def bars(rows: Sequence[tuple[str, float, str, str]], *, label: float = 150, value: float = 64,
         start: Sequence[float] | None = None) -> tuple[str, float]:
    """Horizontal bars: (label, length, words at the end, colour). `start`: where each begins (a waterfall). Returns (elements, height)."""
    starts = start or [0.0] * len(rows)
    top = max((s + r[1] for s, r in zip(starts, rows)), default=0.0) or 1.0
    room, parts = WIDTH - label - value - 8, []
    for i, ((name, length, words, fill), begin) in enumerate(zip(rows, starts)):
        y = 6 + i * _ROW
        parts.append(text(label - 6, y + 12, clipped(name, label), "end"))
        parts.append(rect(label + begin / top * room, y, length / top * room, _BAR, fill, f"{name}: {words}"))
        parts.append(text(label + (begin + length) / top * room + 5, y + 12, words, "soft"))
    return "".join(parts), 12 + len(rows) * _ROW


def clipped(words: str, width: float) -> str:
    """What fits into `width` units."""
    count = int(width / 6.4)
    return words if len(words) <= count else words[:count - 1] + "…"


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], *, words: Sequence[str], label: float = 96) -> tuple[str, float]:
    """Stacked horizontal bars: (label, [(part, length, colour)]); a legend below."""
    top = max((sum(v for _, v, _ in parts) for _, parts in rows), default=0.0) or 1.0
    room, made = WIDTH - label - 78, []
    for i, (name, parts) in enumerate(rows):
        y, x = 6 + i * 30, label
        made.append(text(label - 6, y + 14, clipped(name, label), "end"))
        for part, length, fill in parts:
            made.append(rect(x, y, length / top * room, 19, fill, part, edged=True))
            x += length / top * room
        made.append(text(x + 5, y + 14, words[i], "soft"))
    legend: dict[str, str] = {}
    for _, parts in rows:
        legend |= {part: fill for part, length, fill in parts if length > 0.004 * top}
    block, height = _legend(list(legend.items()), 6 + len(rows) * 30 + 8)
    return "".join(made) + block, height


def _legend(entries: Sequence[tuple[str, str]], y: float) -> tuple[str, float]:
    x, parts = 8.0, []
    for name, fill in entries:
        width = 20 + 6.3 * len(name)
        if x + width > WIDTH - 6:
            x, y = 8.0, y + 18
        parts.append(rect(x, y, 11, 11, fill) + text(x + 16, y + 10, name, "soft"))
        x += width + 8
    return "".join(parts), y + 20


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high` over [begin, end] units."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values, at most about five."""
        if self.log:
            found = [m * 10.0**e for e in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1) for m in (1, 2, 5)]
            found = [t for t in found if self.low <= t <= self.high]
            return found if len(found) <= 5 else found[::math.ceil(len(found) / 5)]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 3))
        step *= next((m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 5), 10)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def axes(x: Axis, y: Axis, *, show_x, show_y, name_x: str, name_y: str) -> str:
    """Grid lines, ticks and names of both axes; `y.begin` is the bottom."""
    parts = [text(x.begin, y.end - 8, name_y, "soft"), text(x.end, y.begin + 34, name_x, "soft end")]
    for t in y.ticks():
        parts += [line(x.begin, y.at(t), x.end, y.at(t)), text(x.begin - 5, y.at(t) + 4, show_y(t), "soft end")]
    for t in x.ticks():
        parts += [line(x.at(t), y.begin, x.at(t), y.begin + 4), text(x.at(t), y.begin + 17, show_x(t), "soft mid")]
    return "".join(parts)


def spread(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    """An axis' ends with some air."""
    low, high = min(values), max(values)
    if log:
        return low / 1.25, high * 1.25
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - air, high + air
