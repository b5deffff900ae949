"""`planner calibrate --from-ledger`: what runs were off by, given back to the calibration as the width of its intervals.

Every completed run of the device whose folder still has its plan is predicted again by the calibration that predictions use now, so that it does not
matter which one had predicted it; what was measured less that is a residual (`costmodel.conformal`). Runs are never fitted: curves stay as they are.
A plan that ran several times counts once, by its median: ten runs of one say nothing of another. Residuals that ship with the bundled calibration
stay beside those of the ledger while its curves are still the ones in use. Folding again replaces what an earlier fold has added.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from pathlib import Path

from costmodel.calibration import Calibration
from costmodel.cluster import Cluster
from costmodel.codec import content_hash
from costmodel.conformal import FEWEST, residuals_of
from costmodel.estimate import estimate
from costmodel.plan import Plan
from planner import calibrate
from planner.errors import CalibrationRequired, UsageError
from planner.ledger import Entry, Ledger


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """How many runs and plans gave how many residuals, of which the calibration holds `held` with those that it came with; why others gave none."""

    runs: int
    plans: int
    residuals: int
    held: int
    left: tuple[str, ...]

    def remarks(self) -> list[str]:
        """What was done, in words."""
        found = [f"{self.residuals} residuals of {self.plans} plans, from {self.runs} runs"]
        if self.held < FEWEST:
            found.append(f"intervals follow residuals from {FEWEST} on; until then those of the curves stand")
        return found + [f"left out: {reason}" for reason in self.left]


def fold(cluster: Cluster, ledger: Ledger) -> tuple[Path, Folded]:
    """Writes the user's calibration of the cluster's device with the residuals of the ledger's runs: (its file, what went in).

    Raises CalibrationRequired where the device has none, UsageError where no run of the device can be used.
    """
    device = cluster.device
    found = calibrate.find(cluster)
    if found.calibration is None or not found.calibration.matches(device):
        raise CalibrationRequired(f"there is no calibration of {device.name} to fold residuals into; `planner calibrate SCENARIO` makes one")
    bare = dataclasses.replace(found.calibration, run_residuals={}, stale_kinds=())
    usable, left = _plans([entry for entry in ledger.entries() if entry.device == device.name])
    added: dict[str, list[float]] = defaultdict(list)
    for plan, entries in usable:
        made = estimate(plan, bare)
        pairs = {"step": (made.step_time.value, statistics.median(e.measured_step_s for e in entries if e.measured_step_s is not None))}
        for name, quantity in made.phases.items():
            if values := [e.measured_phases_s[name] for e in entries if name in e.measured_phases_s]:
                pairs[name] = quantity.value, statistics.median(values)
        for name, residual in residuals_of(pairs, made.maker, made.by_source).items():
            added[name].append(residual)
    if not usable:
        raise UsageError(f"{ledger.path}: no run of {device.name} whose plan is still there" + "".join(f"; {reason}" for reason in left))
    kept = _bundled(bare)
    together = {name: tuple(sorted((*kept.get(name, ()), *added.get(name, ())))) for name in sorted({*kept, *added})}
    path = calibrate.calibration_path(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(bare, run_residuals=together).save(path)
    return path, Folded(runs=sum(len(entries) for _, entries in usable), plans=len(usable), residuals=sum(map(len, added.values())),
                        held=sum(map(len, together.values())), left=left)  # fmt: skip


def _plans(entries: list[Entry]) -> tuple[list[tuple[Plan, list[Entry]]], tuple[str, ...]]:
    """Plans that ran with their runs, and in words why other runs say nothing."""
    usable: dict[str, tuple[Plan, list[Entry]]] = {}
    left: dict[str, int] = defaultdict(int)
    for entry in entries:
        if entry.status != "completed" or entry.measured_step_s is None:
            left["not completed"] += 1
            continue
        plan = _plan(entry)
        if plan is None:
            left["their folder or its plan is gone or another"] += 1
            continue
        usable.setdefault(entry.plan_identity, (plan, []))[1].append(entry)
    return list(usable.values()), tuple(f"{count} run{'s' * (count > 1)}: {reason}" for reason, count in sorted(left.items()))


def _plan(entry: Entry) -> Plan | None:
    try:
        plan = Plan.load(Path(entry.directory) / "plan.json")
    except (OSError, ValueError):
        return None
    return plan if plan.identity() == entry.plan_identity else None


def _bundled(bare: Calibration) -> dict[str, tuple[float, ...]]:
    """Residuals that ship with these very curves."""
    path = calibrate.bundled_path(bare.device.name)
    if not path.is_file():
        return {}
    shipped = calibrate.read(path)
    return shipped.run_residuals if content_hash(shipped.curves) == content_hash(bare.curves) else {}
