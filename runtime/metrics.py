"""What a run tells while it runs, from rank 0 only: metrics.jsonl (one line a step), attempts.jsonl (one line a start) and progress lines on stdout.

A run that goes on from step K drops the lines of the steps that it repeats, so that metrics.jsonl has every step once; attempts.jsonl keeps what they
took. Where a launcher starts ranks again, the job's wall time is then

    train        steps that count           lost      steps that were repeated
    startup      of the first attempt       restart   from a dead attempt's last step to the next one's first
    checkpoint   training stood still for
"""
from __future__ import annotations

import dataclasses
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
        self._attempts: list[Attempt] = []

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
            line = {"step": step, "loss": loss, "step_time_s": seconds, "phases_s": {k: round(v, 7) for k, v in phases.items()}, "time": time.time()}
            self._file.write(json.dumps(line) + "\n")
        now = time.monotonic()
        if now - self._last >= PROGRESS_INTERVAL or step + 1 == of:
            self._last = now
            self.event("step", step=step + 1, of=of, loss=loss, step_time_s=seconds)

    def working(self, what: str, *, done: int | None = None, of: int | None = None) -> None:
        """What takes long and is no step; with `done` of `of` parts, now and then."""
        now = time.monotonic()
        if done is None or now - self._last >= PROGRESS_INTERVAL or done == of:
            self._last = now
            self.event("working", what=what, **({} if done is None else {"done": done, "of": of}))

    def start(self, step: int, *, startup: float, restarted: bool) -> None:
        """Training begins at `step`, `startup` seconds after the process did. `restarted`: by the launcher, in the same job."""
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        path, lines = self._out / "metrics.jsonl", []
        if self._resume and path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            kept = [line for line in lines if line["step"] < step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            temporary.replace(path)
        self._attempts = _read_attempts(self._out) if restarted else []
        now, repeated, gone = time.time(), [line["step_time_s"] for line in lines if line["step"] >= step], 0.0
        if self._attempts:
            gone = now - max([line["time"] for line in lines] + [self._attempts[-1].began])
        self._attempts.append(Attempt(first_step=step, began=now, startup=startup, lost_steps=len(repeated) if self._attempts else 0,
                                      lost=sum(repeated) if self._attempts else 0.0, restart=gone))
        (self._out / "attempts.jsonl").write_text("".join(json.dumps(dataclasses.asdict(a)) + "\n" for a in self._attempts))

    def wall_seconds(self, *, train: float, checkpoint: float) -> dict[str, float]:
        """The job's wall time by what it went to; `train` and `checkpoint` [s]: of this attempt, the others' from the files."""
        wall = {"startup": self._attempts[0].startup if self._attempts else 0.0, "train": train, "checkpoint": checkpoint}
        if len(self._attempts) > 1:
            first, begins = self._attempts[0], [a.began for a in self._attempts]
            steps = [json.loads(line) for line in (self._out / "metrics.jsonl").read_text().splitlines()]
            before = sum(s["step_time_s"] for s in steps if first.first_step <= s["step"] and s["time"] < begins[-1])
            lost, restart = sum(a.lost for a in self._attempts), sum(a.restart for a in self._attempts)
            wall |= {"train": train + before, "lost": lost, "restart": restart}
            wall["checkpoint"] += max(0.0, begins[-1] - begins[0] - before - lost - restart)
        return wall

    @property
    def attempts(self) -> int:
        return len(self._attempts)

    def event(self, name: str, **fields: Any) -> None:
        """One JSON line on stdout."""
        if self._progress:
            sys.stdout.write(json.dumps({"event": name, **fields}) + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._resume = None, True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the ranks: its first step, when that began (seconds since the epoch), seconds from the process' start to it; steps of the attempt
    before that are repeated and their seconds; seconds from that one's last step to this one's first."""

    first_step: int
    began: float
    startup: float
    lost_steps: int
    lost: float
    restart: float


def _read_attempts(out: Path) -> list[Attempt]:
    path = out / "attempts.jsonl"
    return [Attempt(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
