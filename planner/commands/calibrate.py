"""`planner calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands._options import JsonOption, LedgerOption, QuietOption, ScenarioArgument, begin


def command(
    scenario: ScenarioArgument,
    preset: Annotated[str, typer.Option(help="quick (minutes) or full.")] = "quick",
    if_needed: Annotated[bool, typer.Option("--if-needed", help="Only when none is there, or it is stale or was made for other shapes.")] = False,
    import_file: Annotated[
        Path | None,
        typer.Option("--import", help="Merge a samples.jsonl, an nccl-tests log or a CSV of collectives instead of measuring.", show_default=False),
    ] = None,
    from_ledger: Annotated[
        bool, typer.Option("--from-ledger", help="Measure nothing: intervals follow what runs in the ledger were off by, one residual a plan.")
    ] = False,
    ledger: LedgerOption = None,
    collective: Annotated[str | None, typer.Option(help="What an imported log measured, where it does not say.", show_default=False)] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Time the operations that a run of SCENARIO executes, on this machine, and fit the calibration that predictions use.

    Example: planner calibrate scenarios/quickstart.yaml --if-needed
    """
    from planner import api
    from planner import calibrate as calibration
    from planner.errors import UsageError
    from planner.report import console
    from planner.report.progress import Progress
    from planner.scenario import load_scenario

    begin(quiet=quiet)
    if preset not in ("quick", "full"):
        raise UsageError(f"--preset {preset!r} is none of quick, full")
    if from_ledger and (import_file is not None or if_needed):
        raise UsageError("--from-ledger takes nothing but runs: neither --import nor --if-needed goes with it")
    device = load_scenario(scenario, with_variants=False).cluster
    measured = folded = None
    if from_ledger:
        from planner import residuals
        from planner.ledger import Ledger

        path, folded = residuals.fold(device, Ledger(ledger))
        for line in folded.remarks():
            console.say(line)
    elif import_file is not None:
        path, measured = calibration.import_file(import_file, device.device, collective=collective)
    elif if_needed and not (reason := api.calibration_needed(scenario)):
        path = calibration.calibration_path(device.device.name)
        console.say(f"the calibration of {device.device.name} is there and current")
    else:
        if if_needed:
            console.say(reason)
        with Progress("calibrating", quiet=quiet) as progress:
            path = api.calibrate(scenario, preset=preset, on_event=progress.event)  # type: ignore[arg-type]
    _show(path, measured, None if folded is None else {"runs": folded.runs, "plans": folded.plans, "residuals": folded.residuals}, json)


def _show(path: Path, imported: int | None, folded: dict[str, int] | None, json: bool) -> None:
    from costmodel.calibration import load
    from planner.report import console

    made = load(path)
    answer: dict[str, Any] = {
        "path": str(path),
        "device": made.environment.device_name,
        "date": made.environment.date,
        "imported": imported,
        "from_ledger": folded,
        "curves": [
            {
                "op": c.op,
                "variant": c.variant,
                "phase": c.phase,
                "dtype": c.dtype,
                "active_ranks": c.active_ranks,
                "points": len(c.points),
                "width": c.width,
                "noise": c.noise,
            }
            for c in made.curves
        ],
    }
    if json:
        console.print_json(answer)
        return
    rows = [
        [
            f"{c['op']} {c['variant']}".rstrip(),
            c["phase"],
            c["dtype"],
            str(c["active_ranks"]),
            str(c["points"]),
            f"{c['width']:.1%}",
            f"{c['noise']:.1%}",
        ]
        for c in answer["curves"]
    ]
    columns = [
        ("op", "left"),
        ("phase", "left"),
        ("dtype", "left"),
        ("ranks", "right"),
        ("points", "right"),
        ("90 % error", "right"),
        ("noise", "right"),
    ]
    console.show(console.grid(f"calibration of {answer['device']}", columns, rows, caption=str(path)))
