"""What a run tells while it runs: metrics.jsonl (one line a step) and progress lines on stdout, both from rank 0 only."""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

PROGRESS_INTERVAL = 0.25  # seconds between progress lines; a fast run would otherwise spend its time on them


class Metrics:
    """`step` writes a metrics line and, now and then, a progress line. On other ranks than 0 (`out` None) nothing is written."""

    def __init__(self, out: Path | None, *, resume: bool, progress: bool) -> None:
        self._file: TextIO | None = None
        self._progress, self._last = progress, 0.0
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            self._file = open(out / "metrics.jsonl", "a" if resume else "w", buffering=1)

    def step(self, step: int, of: int, loss: float, phases: dict[str, float]) -> None:
        """Step `step` (from 0) of `of` is done; `loss` over the global batch, `phases` [s] of this rank."""
        seconds = sum(phases.values())
        if self._file is not None:
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
            self._file = None
