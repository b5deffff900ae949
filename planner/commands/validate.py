"""`planner validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import JsonOption, QuietOption, begin


def command(
    directory: Annotated[Path, typer.Argument(help="A folder that `planner search -o` or `planner estimate -o` wrote.", show_default=False)],
    seeds: Annotated[int, typer.Option(min=2, help="Pairs of trainings, one per seed.")] = 5,
    steps: Annotated[int | None, typer.Option(min=5, help="Steps of each training; default: what the workload says.", show_default=False)] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Relative NE allowed, e.g. 0.0005; default: the scenario's ne_tolerance.", show_default=False)
    ] = None,
    blame: Annotated[bool, typer.Option("--blame/--no-blame", help="Bisect a failed quality gate for the region to blame.")] = True,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a plan below 16 bits against itself in bf16, over several seeds, and say whether it may be used: gates of time and of quality.

    The verdict is written beside the plan. Exit 4 unless both gates are passed.

    Example: planner validate out/quickstart --seeds 5
    """
    from costmodel.codec import encode
    from planner import gates, validate
    from planner.errors import TargetMissed
    from planner.report import console

    begin(quiet=quiet)
    found, path = validate.run(directory, seeds=seeds, steps=steps, tolerance=tolerance, blame=blame, progress=console.say)
    if json:
        console.print_json({"verdict": found.verdict, **encode(found), "file": str(path)})
    else:
        console.show(validate.table(found))
        console.say(f"written to {path}")
    if found.verdict != "pass":
        raise TargetMissed(gates.standing(validate.load(directory)[0], path.parent) or f"verdict: {found.verdict}")
