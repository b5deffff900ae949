"""Options that several verbs share, and what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ScenarioArgument = Annotated[str, typer.Argument(help="A scenario file, or the name of a bundled one.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="The whole answer as one JSON document on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks on stderr.")]
CalibrationOption = Annotated[Path | None, typer.Option("--calibration", help="Predict with this calibration file.", show_default=False)]
CalibratedOnlyOption = Annotated[bool, typer.Option("--calibrated-only", help="Exit 5 when the device's calibration is missing or stale.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Refuse files that leave out a figure which the answer rests on.")]
LedgerOption = Annotated[Path | None, typer.Option("--ledger", help="The ledger file; default: the one in the state directory.", show_default=False)]


def begin(*, quiet: bool) -> None:
    """Sets the streams up for one command."""
    from planner.report import console

    console.quiet = quiet
