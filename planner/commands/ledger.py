"""`planner ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import JsonOption, LedgerOption, QuietOption, begin


def command(
    ledger: LedgerOption = None,
    scenario: Annotated[str | None, typer.Option(help="Only runs of this scenario.", show_default=False)] = None,
    last: Annotated[int, typer.Option(min=1, help="Show the latest so many.")] = 20,
    export: Annotated[Path | None, typer.Option(help="Write all rows to a .csv or .parquet file.", show_default=False)] = None,
    add: Annotated[Path | None, typer.Option(help="Append the row that a run left in its folder; once, however often.", show_default=False)] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List what was predicted and what was measured, run by run, or export it.

    Example: planner ledger --export out/ledger.csv
    """
    from planner.ledger import Ledger, load_entry, table
    from planner.report import console, terminal
    from planner.report.tables import write_rows

    begin(quiet=quiet)
    book = Ledger(ledger)
    if add is not None:
        book.append(load_entry(add))
    entries = book.entries(scenario=scenario, last=None if export or json else last)
    if export is not None:
        write_rows(export, table(entries))
        console.say(f"{len(entries)} rows in {export}")
        if json:
            console.print_json({"ledger": str(book.path), "export": str(export), "rows": len(entries)})
        return
    if json:
        from costmodel.codec import encode

        console.print_json({"ledger": str(book.path), "entries": [encode(e) for e in entries]})
        return
    rows = [
        [
            e.time[:19].replace("T", " "),
            e.scenario,
            e.layout,
            str(e.local_batch),
            e.status,
            terminal.seconds(e.predicted_step_s),
            terminal.seconds(e.measured_step_s),
            terminal.percent(e.error, sign=True),
            next((f"{v:.4f}" for k, v in e.quality.items() if k.startswith("ne.")), "-"),
        ]
        for e in entries
    ]
    columns = [
        ("time", "left"),
        ("scenario", "left"),
        ("layout", "left"),
        ("batch", "right"),
        ("status", "left"),
        ("predicted", "right"),
        ("measured", "right"),
        ("error", "right"),
        ("NE", "right"),
    ]
    caption = str(book.path) if entries else f"no runs yet in {book.path}"
    console.show(console.grid("", columns, rows, caption=caption))
