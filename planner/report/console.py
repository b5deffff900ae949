"""The two streams: data on stdout, progress and remarks on stderr. `NO_COLOR` and pipes give plain text; `--quiet` silences remarks."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 140
quiet = False


def stdout() -> Console:
    """Data for people."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _width())


def stderr() -> Console:
    """Progress, warnings and errors."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _width())


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) > 20 else PIPED_WIDTH


def say(message: str) -> None:
    """A remark on stderr, unless `--quiet`."""
    if not quiet:
        stderr().print(Text(message))


def warn(message: str) -> None:
    """A warning on stderr, also with `--quiet`."""
    stderr().print(Text.assemble(("warning: ", "yellow"), message))


def show(*renderables: RenderableType) -> None:
    """Data for people on stdout, a blank line between two renderables; nothing trails a line in a pipe."""
    console = stdout()
    with console.capture() as captured:
        for number, renderable in enumerate(renderables):
            if number:
                console.print()
            console.print(Text(renderable) if isinstance(renderable, str) else renderable)
    text = captured.get()
    sys.stdout.write(text if sys.stdout.isatty() else "".join(line.rstrip() + "\n" for line in text.splitlines()))
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """One JSON document on stdout; NaN and infinities are a bug, not output."""
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def grid(title: str, columns: list[tuple[str, str]], rows: list[list[str]], *, caption: str = "") -> Group:
    """A table under its title; `columns` are (heading, justify). Cells are shown as they are, never read as markup."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in columns:
        made.add_column(Text(heading), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    parts = ([Text(title, style="bold")] if title else []) + [made] + ([Text(caption, style="dim")] if caption else [])
    return Group(*parts)
