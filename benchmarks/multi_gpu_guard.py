"""Keeps a job of several ranks from hanging in one plan: whatever a plan does, it is recorded and the next one gets its turn.

A thread on every rank looks at the clock and at what the others say. A rank whose attempt fails leaves a note beside the plan; where another rank
finds it and is not done itself soon after, its collectives wait for an answer that never comes. Then, and when a plan takes longer than it may, the
rank writes down why and ends its process with `AGAIN`: torchrun ends the others, and the job is started anew behind that plan.
"""
from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path

AGAIN = 75
# Seconds that a plan may take, that a rank has behind another's failure, and between two looks.
LIMIT, GRACE, LOOK = 40.0, 3.0, 0.1


class Guard:
    """`begin(folder)` a plan, `failed(why)` where this rank's attempt did, `settle()` while ranks come together again behind it, `end()` it."""

    def __init__(self, rank: int, *, limit: float = LIMIT, grace: float = GRACE) -> None:
        self.rank, self.limit, self.grace = rank, limit, grace
        self._folder: Path | None = None
        self._deadline, self._why, self._lock = 0.0, "", threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, folder: Path) -> None:
        """The clock of a plan starts; notes of earlier tries go."""
        with self._lock:
            self._deadline, self._why = time.time() + self.limit, f"rank {self.rank}: did not end within {self.limit:g} s"
            self._folder = folder
        _note(folder, self.rank).unlink(missing_ok=True)

    def failed(self, why: str) -> None:
        """Tells the other ranks."""
        if self._folder is not None:
            _note(self._folder, self.rank).write_text(why)

    def settle(self, why: str) -> None:
        """Ranks come together behind a failure: soon, or the job is of no use any more."""
        with self._lock:
            self._deadline, self._why = min(self._deadline, time.time() + self.grace), why

    def end(self) -> None:
        """This plan is done."""
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            _note(folder, self.rank).unlink(missing_ok=True)

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK)
            with self._lock:
                folder, deadline, why = self._folder, self._deadline, self._why
            if folder is None:
                continue
            others = [note for note in folder.glob("failed-*") if note != _note(folder, self.rank)]
            if others and not _note(folder, self.rank).exists():
                self.settle("; ".join(f"rank {note.name.removeprefix('failed-')}: {note.read_text()}" for note in others))
            if time.time() > deadline:
                self._leave(folder, why)

    def _leave(self, folder: Path, why: str) -> None:
        if not (folder / "run.json").exists():
            (folder / "run.json").write_text(json.dumps({"failed": why}) + "\n")
        (folder / "started").unlink(missing_ok=True)
        print(f"{folder.name}: {why}; rank {self.rank} ends", flush=True)
        faulthandler.dump_traceback(file=sys.stderr)
        os._exit(AGAIN)


def _note(folder: Path, rank: int) -> Path:
    return folder / f"failed-{rank}"
