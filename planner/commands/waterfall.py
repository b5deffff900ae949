"""`planner waterfall`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import CalibrationOption, JsonOption, LedgerOption, QuietOption, begin


def command(
    scenario: Annotated[str, typer.Argument(help="A scenario with variants (else its levers are taken); with --from-ledger its name.",
                                            show_default=False)],
    from_ledger: Annotated[bool, typer.Option("--from-ledger", help="Bars are the measured runs of the scenario.")] = False,
    pinned: Annotated[bool, typer.Option("--pinned", help="Simulate the pinned configuration under each change instead of searching.")] = False,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds of search per bar.")] = 2.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write waterfall.json there, for `planner report`.", show_default=False)] = None,
    calibration: CalibrationOption = None,
    ledger: LedgerOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """What several changes bring together: one at a time, each alone, all without each, and their interaction.

    Example: planner waterfall gem-8xh200 --time-limit 1
    """
    from json import dumps

    from costmodel.codec import encode
    from planner import waterfall
    from planner.ledger import Ledger
    from planner.report import console, diagnosis

    begin(quiet=quiet)
    if from_ledger:
        found = waterfall.from_ledger(scenario, ledger=Ledger(ledger))
    else:
        found = waterfall.waterfall(scenario, time_limit=time_limit, search=not pinned, calibration_file=calibration,
                                    progress=lambda name: console.say(f"planning: {name}"))
    if out is not None:
        from planner.files import write_text

        write_text(out / "waterfall.json", dumps(encode(found), indent=1, allow_nan=False) + "\n")
        console.say(f"wrote {out}/waterfall.json")
    if json:
        console.print_json(encode(found))
        return
    console.show(diagnosis.waterfall(found))
