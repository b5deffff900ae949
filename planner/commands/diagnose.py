"""`planner diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import CalibrationOption, JsonOption, QuietOption, begin


def command(
    directory: Annotated[Path, typer.Argument(help="The folder of a plan or run, a plan.json, or a torch.profiler trace.", show_default=False)],
    levers: Annotated[bool, typer.Option("--levers/--no-levers", help="Plan and simulate again under each lever.")] = True,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds of search per lever.")] = 2.0,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Name what binds a step: the metric tree, where the time goes (simulated, and measured from traces), and levers ranked end to end.

    Example: planner search gem-8xh200 -o out/gem && planner diagnose out/gem
    """
    from planner import diagnose
    from planner.report import console, diagnosis

    begin(quiet=quiet)
    found = diagnose.diagnose(directory, calibration_file=calibration)
    for note in found.notes:
        console.say(f"note: {note}")
    ranked = _ranked(found, calibration, time_limit) if levers and found.plan is not None else []
    if json:
        console.print_json(diagnose.to_json(found, ranked))
        return
    parts = [diagnosis.accounting(found), diagnosis.binding(found)]
    if found.tree:
        parts.insert(0, diagnosis.tree(found.tree))
    if ranked:
        parts.append(diagnosis.levers(ranked, found.binding))
    console.show(*parts)


def _ranked(found, calibration: Path | None, time_limit: float):
    from costmodel.accounting import simulated
    from costmodel.estimate import estimate
    from planner import calibrate, levers
    from planner.report import console

    known = calibrate.find(found.plan.cluster, path=calibration).calibration
    base = levers.Outcome(plan=found.plan, estimate=estimate(found.plan, known), accounting=simulated(found.plan, known))
    scenario = levers.scenario_of(found.plan)
    return levers.rank(scenario, base, known, time_limit=time_limit, progress=lambda name: console.say(f"planning with {name}"))
