"""`planner record`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import JsonOption, QuietOption, begin


def command(
    sources: Annotated[list[Path], typer.Argument(help="Event files, sample files with list columns, folders of runs, earlier recordings.",
                                                  show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The workload file; statistics and lengths go beside it.")] = Path("workload.yaml"),
    model: Annotated[str | None, typer.Option(help="A model's file or bundled name: id skew is written for its tables.", show_default=False)] = None,
    sequence: Annotated[str, typer.Option(help="The name of the history that events make.")] = "history",
    max_history: Annotated[int | None, typer.Option(min=1, help="Keep a user's latest so many events.", show_default=False)] = None,
    global_batch: Annotated[int, typer.Option(min=1, help="Written into the workload.")] = 512,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record the distribution of data or runs as a workload that scenarios can use: lengths, id skew, attention shapes, rank load. Merges.

    Example: printf 'user_id,item_id,timestamp\\n1,7,0\\n1,8,5\\n2,7,6\\n' > /tmp/events.csv && planner record /tmp/events.csv -o /tmp/recorded.yaml
    """
    from planner import record
    from planner.report import console
    from planner.report.console import grid

    begin(quiet=quiet)
    made = record.record(sources, sequence=sequence, max_history=max_history)
    written = record.save(made, out, global_batch=global_batch, model=_model(model))
    found = record.summary(made)
    for note in made.notes:
        console.say(f"note: {note}")
    if json:
        console.print_json({"files": [str(p) for p in written], **found})
        return
    lengths = [[n, *(f"{v:.4g}" for v in values.values())] for n, values in found["lengths"].items()]
    heads = [("history", "left"), *((h, "right") for h in ("mean", "p10", "median", "p90", "p99", "max"))]
    parts = [grid(f"{made.samples:,} samples", heads, lengths)]
    if found["ids"]:
        rows = [[n, f"{s['ids']:,}", f"{s['rows']:,}", "-" if s["zipf"] is None else f"{s['zipf']:.3f}",
                 ", ".join(f"{ratio:.3f} of {size}" for size, ratio in s["unique_ratio"].items())] for n, s in found["ids"].items()]
        columns = [("ids", "left"), ("seen", "right"), ("distinct", "right"), ("Zipf", "right"), ("unique ratio by batch", "left")]
        parts.append(grid("", columns, rows))
    rows = [[f"rank load: {n}", f"{v:.3f}x"] for n, v in found["rank_load"].items()]
    rows += [[f"largest activation over rms: {n}", f"{v:.1f}"] for n, v in found["activation_outliers"].items()]
    if rows:
        parts.append(grid("", [("from traces", "left"), ("", "right")], rows))
    console.show(*parts, "\n".join(str(p) for p in written))


def _model(reference: str | None):
    if reference is None:
        return None
    from planner import catalogue
    from planner.errors import UsageError
    from planner.files import check, load
    from planner.spec import ModelFile

    try:
        path = catalogue.find("models", reference, Path("."))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return check(ModelFile, load(path)).build()
