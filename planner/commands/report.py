"""`planner report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import CalibrationOption, JsonOption, LedgerOption, QuietOption, begin


def command(
    directory: Annotated[Path, typer.Argument(help="The folder of a plan or run, or a torch.profiler trace.", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write there; default: into the folder.", show_default=False)] = None,
    pictures: Annotated[bool, typer.Option("--pictures", help="Each picture as an SVG file too; the page itself saves SVG and PNG.")] = False,
    calibration: CalibrationOption = None,
    ledger: LedgerOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write report.html, one page that opens offline, and timeline.json.gz with predicted and measured ranks side by side (for Perfetto).

    Example: planner search gem-8xh200 -o out/gem && planner report out/gem
    """
    from planner.ledger import Ledger
    from planner.report import console, page, timeline

    begin(quiet=quiet)
    path, found = page.build(directory, out=out, ledger=Ledger(ledger), calibration_file=calibration, export=pictures)
    for note in found.notes:
        console.say(f"note: {note}")
    written = [path, path.parent / timeline.FILE, *(sorted((path.parent / page.FOLDER).glob("*.svg")) if pictures else [])]
    if json:
        console.print_json({"files": [str(p) for p in written], "binding": found.binding, "notes": list(found.notes)})
        return
    console.show("\n".join(str(p) for p in written))
