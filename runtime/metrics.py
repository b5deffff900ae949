"""What a run tells while it runs: metrics.jsonl (one line a step) and progress lines on stdout, both from rank 0 only."""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

PROGRESS_INTERVAL = 0.25  # seconds between progress lines; a fast run would otherwise spend its time on them


class Metrics:
    """`step` writes a metrics line and, now and then, a progress line. On other ranks than 0 (`out` None) nothing is written.

    The file is opened at the first step, so that a run that never starts leaves an earlier one's file alone; `close` it, or use a `with` block.
    """

    def __init__(self, out: Path | None, *, resume: bool, progress: bool) -> None:
        self._file: TextIO | None = None
        self._out, self._resume, self._progress, self._last = out, resume, progress, 0.0

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def step(self, step: int, of: int, loss: float, phases: dict[str, float]) -> None:
        """Step `step` (from 0) of `of` is done; `loss` over the global batch, `phases` [s] of this rank."""
        seconds = sum(phases.values())
        if self._out is not None:
            if self._file is None:
                self._out.mkdir(parents=True, exist_ok=True)
                self._file = (self._out / "metrics.jsonl").open("a" if self._resume else "w", buffering=1)
            line = {"step": step, "loss": loss, "step_time_s": seconds, "phases_s": {k: round(v, 7) for k, v in phases.items()}}
            self._file.write(json.dumps(line) + "\n")
        now = time.monotonic()
        if now - self._last >= PROGRESS_INTERVAL or step + 1 == of:
            self._last = now
            self.event("step", step=step + 1, of=of, loss=loss, step_time_s=seconds)

    def event(self, name: str, **fields: Any) -> None:
        """One JSON line on stdout."""
        if self._progress:
            sys.stdout.write(json.dumps({"event": name, **fields}) + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._resume = None, True
