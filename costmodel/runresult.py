"""result.json: what a training run measured, written by the runtime and read by the planner.

    step_time_s   of the steps after the warm-up; a step's time is the mean over ranks (collectives keep the ranks together)
    phases_s      mean over ranks and steps; disjoint, they sum to the mean step time
    memory_bytes  bytes of tracked tensors on the rank that holds most of the category; `peak_allocated` and `reserved` are figures of
                  the CUDA allocator, None on CPU, where the process' size says little about the tensors
"""
from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

from costmodel.codec import DecodeError, decode, encode

SCHEMA_VERSION = 1
PHASES = ("input", "sparse", "forward", "backward", "exposed_communication", "optimizer", "other")
Status = Literal["completed", "interrupted", "failed"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds a step."""

    median: float
    mean: float
    p10: float
    p90: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Bytes per rank by category, the keys of `costmodel.estimate.Memory`; None where it could not be measured."""

    parameters: float
    gradients: float
    optimizer: float
    tables: float
    table_state: float
    saved_activations: float | None = None
    peak_allocated: float | None = None
    reserved: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Timings and memory of the steps after the warm-up."""

    step_time_s: StepTime
    phases_s: dict[str, float]
    memory_bytes: MeasuredMemory
    examples_per_second: float

    def __post_init__(self) -> None:
        if set(self.phases_s) != set(PHASES):
            raise ValueError(f"phases_s: {sorted(self.phases_s)} are not {sorted(PHASES)}")
        total = sum(self.phases_s.values())
        if not math.isclose(total, self.step_time_s.mean, rel_tol=1e-3, abs_tol=1e-6):
            raise ValueError(f"phases_s: sum to {total:.6g} s, but the mean step is {self.step_time_s.mean:.6g} s")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Normalized entropy by task and of each baseline on held-out events (empty: not evaluated); the last global loss."""

    ne: dict[str, float] = dataclasses.field(default_factory=dict)
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)
    final_loss: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run of a plan. `steps` counts optimizer steps from the beginning of training, those before a resume included.

    `losses[i]` is the mean loss over the global batch of step `first_step + i` (from 0). `measured` is None where no step came after the
    warm-up. `wall_seconds` is the whole job's by what it went to (`runtime.metrics`), in `attempts` starts of the ranks; `retry`: a failed run may go
    better when it is started again.
    """

    schema_version: int = SCHEMA_VERSION
    plan_identity: str
    environment: dict[str, Any]
    status: Status
    world_size: int
    steps: int
    warmup_steps: int
    first_step: int = 0
    measured: Measured | None = None
    quality: Quality = Quality()
    losses: tuple[float, ...] = ()
    wall_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    attempts: int = 1
    retry: bool = True
    message: str = ""

    def save(self, path: Path | str) -> None:
        """Writes through a temporary file."""
        path = Path(path)
        temporary = path.with_suffix(path.suffix + ".tmp")
        temporary.write_text(json.dumps(encode(self), indent=1, allow_nan=False) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path | str) -> RunResult:
        """Raises ValueError naming the file and the fault."""
        path = Path(path)
        try:
            body = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg})") from error
        if not isinstance(body, dict) or body.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"{path}: not a run result of schema_version {SCHEMA_VERSION}")
        try:
            return decode(cls, body)
        except DecodeError as error:
            raise ValueError(f"{path}: {error}") from error
