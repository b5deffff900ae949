"""`planner explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.commands._options import CalibrationOption, JsonOption, QuietOption, begin


def command(
    plan: Annotated[str, typer.Argument(help="A folder of a plan or run, a plan.json, or a scenario.", show_default=False)],
    against: Annotated[str, typer.Option("--against", help="The other plan or run.", show_default=False)],
    calibration: CalibrationOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare two plans or runs: what differs, where the time went, how the constraint moved.

    Example: planner explain gem-8xh200 --against hstu-ranking
    """
    from costmodel.codec import encode
    from planner.compare import compare
    from planner.report import console, diagnosis

    begin(quiet=quiet)
    found = compare(plan, against, calibration_file=calibration)
    if json:
        console.print_json(encode(found))
        return
    console.show(diagnosis.comparison(found))
