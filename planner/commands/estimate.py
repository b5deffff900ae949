"""`planner estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import CalibratedOnlyOption, CalibrationOption, JsonOption, QuietOption, StrictOption, begin


def command(
    reference: Annotated[
        str, typer.Argument(help="A scenario (its pins, plain defaults for the rest), a plan.json, or a folder with one.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan there, ready for `planner run`.", show_default=False)] = None,
    bound: Annotated[bool, typer.Option("--bound", help="The closed form that is never above the simulated time.")] = False,
    calibration: CalibrationOption = None,
    calibrated_only: CalibratedOnlyOption = False,
    strict: StrictOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Predict step time, breakdown and memory of one configuration: the one in use today.

    Example: planner estimate scenarios/quickstart.yaml
    """
    from costmodel.codec import encode
    from planner import api
    from planner.report import console, terminal

    begin(quiet=quiet)
    mode = "bound" if bound else "simulated"
    made = api.estimate(reference, calibration_file=calibration, calibrated_only=calibrated_only, mode=mode, strict=strict)
    for note in made.notes:
        console.say(f"note: {note}")
    if out is not None:
        api.save_plan(made.plan, out)
        console.say(f"wrote {out}/plan.json")
    if json:
        console.print_json(
            {
                "plan": api.describe(made.plan),
                "estimate": encode(made.estimate),
                "notes": list(made.notes),
                "calibration": str(made.calibration) if made.calibration else None,
            }
        )
        return
    console.show(terminal.plan_tables(made.plan), terminal.estimate_tables(made.estimate))
