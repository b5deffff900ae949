"""`planner export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import JsonOption, QuietOption, begin


def command(
    directory: Annotated[Path, typer.Argument(help="A folder with a plan, or a plan.json.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="torchrun, slurm, torchrec or torchtitan.", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write there; default: into the plan's folder.", show_default=False)] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a plan for other tools: a launch script, an sbatch file, a TorchRec sharding plan, a torchtitan configuration.

    Example: planner search gem-8xh200 -o out/gem && planner export out/gem --to torchrec
    """
    from planner import export
    from planner.report import console
    from planner.run import PLAN_FILE, load_plan

    begin(quiet=quiet)
    plan, folder = load_plan(directory)
    made = export.export(plan, to, plan_file=folder / PLAN_FILE)
    written = export.save(made, out or folder)
    for reason in made.not_expressed:
        console.say(f"not expressed: {reason}")
    if json:
        console.print_json({"files": [str(p) for p in written], "not_expressed": list(made.not_expressed)})
        return
    console.show("\n".join(str(p) for p in written))
