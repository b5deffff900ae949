"""Progress on stderr, fed by the JSON events of a training process: a bar on a terminal, else a line now and then; nothing with `--quiet`."""

from __future__ import annotations

import sys
import time
from typing import Any

from planner.report import console

LINE_INTERVAL = 10.0
"""Seconds between lines where there is no terminal."""


class Progress:
    """`event` takes {"event": "step", "step": i, "of": n, "loss": x, "step_time_s": t}, {"event": "stage", "ranks": n},
    {"event": "calibrate" or "working", "what": ..., "done": i, "of": n} and {"event": "note", "message": ...}."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._bar: Any = None
        self._task: Any = None
        self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[detail]}"),
                console=console.stderr(),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None, detail="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def event(self, event: dict[str, Any]) -> None:
        """Shows one event; kinds that are not known are not shown."""
        kind = event.get("event")
        if kind in ("note", "data") and event.get("message"):
            self._say(str(event["message"]))
        elif kind == "stage" and event.get("ranks"):
            self._say(f"{self._title}: {event['ranks']} rank(s)")
        done = event.get("step", event.get("done"))
        if done is None and "what" not in event:
            return
        words = []
        if isinstance(event.get("loss"), (int, float)):
            words.append(f"loss {event['loss']:.4f}")
        if isinstance(event.get("step_time_s"), (int, float)):
            words.append(f"{event['step_time_s'] * 1e3:.1f} ms/step")
        if event.get("what"):
            words.append(str(event["what"]))
        if self._bar is not None:
            self._bar.update(self._task, completed=done or 0, total=event.get("of"), detail=" ".join(words))
        elif (kind == "working" and done is None) or time.monotonic() - self._said >= LINE_INTERVAL:
            self._said = time.monotonic()
            count = "" if done is None else f" {done} of {event.get('of', '?')}"
            self._say(f"{self._title}{count}: {' '.join(words)}")

    def _say(self, message: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(message, markup=False)
        else:
            console.say(message)
