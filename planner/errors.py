"""What can go wrong, and the exit code of each kind. One mapping for the whole command line.

0 ok, 1 a bug, 2 usage or an invalid file, 3 no feasible plan, 4 a target was missed, 5 a calibration is required but missing or stale,
6 a run failed, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

OK, BUG, USAGE, INFEASIBLE, TARGET_MISSED, UNCALIBRATED, RUN_FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in a file; lines and columns count from 1."""

    file: Path
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong with a file: where, at which dotted path, and what."""

    position: Position | None
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.position}: " if self.position else ""
        return f"{where}{self.path + ': ' if self.path else ''}{self.message}"


class PlannerError(Exception):
    """A failure that has a plain explanation; `exit_code` says which kind."""

    exit_code = BUG


class UsageError(PlannerError, ValueError):
    """The command or its arguments make no sense."""

    exit_code = USAGE


class FileError(UsageError):
    """An invalid file, with every fault found in it."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = tuple(faults)


class NoFeasiblePlan(PlannerError):
    """No plan satisfies all constraints. The message says what was tried, by how much it failed, and numbered ways out."""

    exit_code = INFEASIBLE


class TargetMissed(PlannerError):
    """A figure is worse than what was asked for (`--max-error`, gates)."""

    exit_code = TARGET_MISSED


class CalibrationRequired(PlannerError):
    """`--calibrated-only`, and the calibration is missing or stale."""

    exit_code = UNCALIBRATED


class RunFailed(PlannerError):
    """Workers died or a subprocess failed."""

    exit_code = RUN_FAILED


class Interrupted(PlannerError):
    """Stopped by the user, cleanly."""

    exit_code = INTERRUPTED


def exit_code(error: BaseException) -> int:
    """The exit code of any exception: KeyboardInterrupt is 130, what is not foreseen is 1."""
    if isinstance(error, PlannerError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else BUG
