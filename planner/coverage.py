"""Whether a calibration was made for what a scenario would run: the subject it was measured with, and what of a plan it has no curve for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from costmodel.calibration import Calibration
from costmodel.codec import content_hash
from costmodel.plan import Plan
from planner import calibrate
from planner.errors import CalibrationRequired
from planner.files import write_text
from planner.scenario import ResolvedScenario

# Shares of the predicted seconds that a calibration may leave to rooflines, and to figures far from what it measured, and still count as covering a
# plan [Assumed: the 90 % intervals of a calibrated step are wider than the first; the second leaves most of the step measured or interpolated].
ROOFLINE_SHARE, EXTRAPOLATED_SHARE = 0.05, 0.5


def subject(scenario: ResolvedScenario, formats: tuple[str, ...]) -> str:
    """Identity of what a calibration of the scenario times: model, lengths, skew, batch, number formats, ranks of a host."""
    workload, cluster = scenario.workload, scenario.cluster
    return content_hash(
        {
            "model": scenario.model,
            "lengths": workload.lengths,
            "zipf": workload.zipf,
            "batch": workload.global_batch_on(cluster.num_ranks),
            "precision": scenario.pins.precision or list(formats),
            "ranks": cluster.devices_per_host,
        }
    )


def _path(device: str) -> Path:
    return calibrate.calibration_path(device).with_suffix(".subject.json")


def remember(scenario: ResolvedScenario, formats: tuple[str, ...]) -> None:
    """Notes beside the calibration of the scenario's device what it was just measured with."""
    write_text(_path(scenario.cluster.device.name), json.dumps({"scenario": scenario.name, "subject": subject(scenario, formats)}) + "\n")


def out_of_date(scenario: ResolvedScenario, formats: tuple[str, ...]) -> str:
    """Why the user's calibration of the scenario's device should be measured again; empty when it need not be."""
    device = scenario.cluster.device.name
    if not calibrate.is_current(scenario.cluster):
        return f"the calibration of {device} is missing or stale"
    try:
        known = json.loads(_path(device).read_text())
        name, made_for = str(known["scenario"]), known["subject"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"nothing says what the calibration of {device} was measured with"
    return "" if made_for == subject(scenario, formats) else f"the calibration of {device} was measured with other shapes (scenario {name})"


def gaps(plan: Plan, calibration: Calibration, by_source: Mapping[str, float]) -> list[str]:
    """What of the plan the calibration does not cover, in words; `by_source`: the estimate's shares of seconds by source."""
    found = []
    timed = {curve.dtype for curve in calibration.curves if curve.op == "linear"}
    used = sorted({option.precision for region in plan.regions for option in region.options})
    found += [f"no linear layer was timed in {name}" for name in used if name not in timed]
    roofline = by_source.get("roofline", 0.0) + by_source.get("assumed", 0.0)
    if roofline > ROOFLINE_SHARE:
        found.append(f"{roofline:.0%} of the step has no curve")
    if by_source.get("extrapolated", 0.0) > EXTRAPOLATED_SHARE:
        found.append(f"{by_source['extrapolated']:.0%} of the step is extrapolated from other shapes")
    return found


def require(plan: Plan, calibration: Calibration, by_source: Mapping[str, float]) -> None:
    """Raises CalibrationRequired when the calibration leaves gaps in the plan's prediction."""
    found = gaps(plan, calibration, by_source)
    if found:
        raise CalibrationRequired(
            f"--calibrated-only: the calibration of {calibration.environment.device_name} does not cover {plan.model.name} on {plan.cluster.name}: "
            + "; ".join(found)
            + "; `planner calibrate SCENARIO` measures what is missing"
        )
