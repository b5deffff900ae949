"""Two gates for plans that change numbers: time, and quality against the same plan in 16 bits.

    reference   the plan with every precision below 16 bits at bf16, quantised checkpoints at none, rows of tables as they are stored
    pairs       one training of the plan and one of the reference per seed: the same samples, the same initial parameters
    quality     d_s = NE(plan) / NE(reference) - 1 on held-out events, NE of the worst task; of n seeds mean m and deviation s give the one-sided
                95 % bounds m -+ t(0.95, n - 1) s / sqrt(n). pass: the upper one is within the tolerance. fail: the lower one is above it. Else
                inconclusive, with the seeds that would decide if m and s stay
    time        the same of median step times; pass: the upper bound is below 0. Not asked of emulated formats: their speed says nothing

A failed quality gate is bisected: halves of what differs from the reference are put back until one part fails alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

from costmodel.blocks.base import QUANTIZED
from costmodel.codec import encode
from costmodel.plan import Plan
from costmodel.precision import LOW_PRECISIONS
from costmodel.wire import LOW_WIRES

CONFIDENCE = 0.95
MIN_SEEDS, MOST_NEEDED = 3, 10_000
VERDICT_FILE = "verdict.json"
Verdict = Literal["pass", "fail", "inconclusive", "not_applicable"]
Trained = tuple[float, float]
Train = Callable[[Sequence[tuple[Plan, str]]], Sequence[Trained]]
"""Trains plans of one shape, each with a name that tells it from others. Returns (NE of the worst task, median step seconds) of each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate: relative differences by seed, their mean and one-sided 95 % bounds, what is allowed, and how many seeds would decide."""

    verdict: Verdict
    differences: tuple[float, ...] = ()
    mean: float | None = None
    lower: float | None = None
    upper: float | None = None
    allowed: float | None = None
    seeds_needed: int | None = None
    events_needed: int | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What `planner validate` writes beside the plan. `blame`: the part of the plan that fails by itself, or parts that fail together only."""

    plan_identity: str
    reference_identity: str
    time: Gate
    quality: Gate
    events: int
    blame: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worse of both gates; a time gate that does not apply decides nothing."""
        both = {self.time.verdict, self.quality.verdict}
        return "fail" if "fail" in both else "inconclusive" if "inconclusive" in both else "pass"


def parts(plan: Plan) -> tuple[str, ...]:
    """What of the plan is below 16 bits: `precision REGION`, `checkpoint REGION`, `wire`, `gather`."""
    found = [f"precision {r.region}" for r in plan.regions if any(o.precision in LOW_PRECISIONS for o in r.options)]
    found += [f"checkpoint {r.region}" for r in plan.regions if any(o.checkpoint in QUANTIZED for o in r.options)]
    return (*found, *["wire"] * bool({plan.wire, plan.wire_gradients} & set(LOW_WIRES)), *["gather"] * (plan.gather_dtype is not None))


def restricted(plan: Plan, keep: Sequence[str]) -> Plan:
    """The plan with all `parts` but those in `keep` as in the reference."""
    regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(
        o, precision="bf16" if o.precision in LOW_PRECISIONS and f"precision {r.region}" not in keep else o.precision,
        checkpoint="none" if o.checkpoint in QUANTIZED and f"checkpoint {r.region}" not in keep else o.checkpoint) for o in r.options))
        for r in plan.regions)
    plan = dataclasses.replace(plan, regions=regions, prediction={}, search={}, emulated=())
    if not any(part.startswith("precision ") for part in keep):  # options of layers that are not there any more
        plan = dataclasses.replace(plan, recipe=())
    plan = plan if "gather" in keep else dataclasses.replace(plan, gather_dtype=None)
    return plan if "wire" in keep else dataclasses.replace(plan, wire=None, wire_gradients=None)


def decide(differences: Sequence[float], allowed: float, *, events: int = 0) -> Gate:
    """The gate of relative differences by seed against `allowed`; `events`: trained per seed."""
    n = len(differences)
    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1)) if n > 1 else math.inf
    half = float(stats.t.ppf(CONFIDENCE, n - 1)) * deviation / math.sqrt(n) if n > 1 else math.inf
    lower, upper = mean - half, mean + half
    verdict: Verdict = "pass" if upper <= allowed else "fail" if lower > allowed else "inconclusive"
    needed = seeds_needed(mean, deviation, allowed) if verdict == "inconclusive" and n > 1 else None
    finite = {k: v if math.isfinite(v) else None for k, v in {"lower": lower, "upper": upper}.items()}
    return Gate(verdict=verdict, differences=tuple(differences), mean=mean, allowed=allowed, seeds_needed=needed,
                events_needed=needed * events if needed is not None and events else None,
                reason="" if verdict != "inconclusive" or needed is not None else f"more than {MOST_NEEDED} seeds would be needed", **finite)


def seeds_needed(mean: float, deviation: float, allowed: float) -> int | None:
    """The least number of seeds whose interval, were mean and deviation to stay, does not hold `allowed`; None beyond `MOST_NEEDED`."""
    counts = np.arange(2, MOST_NEEDED + 1)
    half = stats.t.ppf(CONFIDENCE, counts - 1) * deviation / np.sqrt(counts)
    enough = np.flatnonzero(half < abs(allowed - mean))
    return int(counts[enough[0]]) if len(enough) else None


def validate(plan: Plan, train: Train, *, seeds: int, tolerance: float, events: int, blame: bool = True,
             progress: Callable[[str], None] = lambda text: None) -> Validation:
    """Both gates of `plan` over `seeds` pairs. `events`: trained per seed. Raises ValueError where nothing of the plan is below 16 bits."""
    below = parts(plan)
    if not below:
        raise ValueError("nothing of this plan is below 16 bits: there is nothing to validate")
    numbers = [plan.seed + k for k in range(seeds)]

    def asked(keep: Sequence[str], name: str) -> list[tuple[Plan, str]]:
        progress(f"{len(numbers)} seeds: {name}")
        return [(dataclasses.replace(restricted(plan, keep), seed=number), f"{name.replace(' ', '-')}-{number}") for number in numbers]

    def differences(found: Sequence[Trained]) -> list[Trained]:
        return [(ne / of_ne - 1, seconds / of_seconds - 1) for (ne, seconds), (of_ne, of_seconds) in zip(found, references)]

    first = train(asked((), "16-bit reference") + asked(below, "plan"))
    references = first[:seeds]
    pairs = differences(first[seeds:])
    quality = decide([d for d, _ in pairs], tolerance, events=events)
    time = decide([d for _, d in pairs], 0.0)
    if plan.emulated:
        time = Gate(verdict="not_applicable", reason="; ".join(plan.emulated))
    found: tuple[str, ...] = ()
    if blame and quality.verdict == "fail":
        def fails(keep: Sequence[str]) -> bool:
            alone = differences(train(asked(keep, "only " + " + ".join(keep))))
            return decide([d for d, _ in alone], tolerance).verdict == "fail"

        found = bisect(below, fails)
    return Validation(plan_identity=plan.identity(), reference_identity=restricted(plan, ()).identity(), time=time, quality=quality, events=events,
                      blame=found)


def bisect(below: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """The smallest part found by halving that fails alone; of halves that pass alone, their union fails only together and is named whole."""
    while len(below) > 1:
        middle = len(below) // 2
        for half in (below[:middle], below[middle:]):
            if fails(half):
                below = half
                break
        else:
            break
    return tuple(below)


def save(found: Validation, directory: Path) -> Path:
    """Writes the verdict into the plan's folder."""
    path = directory / VERDICT_FILE
    path.write_text(json.dumps({"verdict": found.verdict, **encode(found)}, indent=1, allow_nan=False) + "\n")
    return path


def standing(plan: Plan, directory: Path) -> str | None:
    """What `run` says of a plan that has not passed; None where nothing is below 16 bits, or both gates are passed."""
    below = parts(plan)
    if not below:
        return None
    path, what = directory / VERDICT_FILE, f"this plan computes below 16 bits ({', '.join(below)})"
    try:
        body: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return f"{what} and has passed no gate: `planner validate {directory}`"
    if body.get("plan_identity") != plan.identity():
        return f"{what}; {path} is of another plan: `planner validate {directory}`"
    if body.get("verdict") == "pass":
        return None
    quality = body["quality"]
    more = f"; {quality['seeds_needed']} seeds would decide" if quality.get("seeds_needed") else ""
    return f"{what}; its gates: time {body['time']['verdict']}, quality {quality['verdict']}{more} ({path})"
