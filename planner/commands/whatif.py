"""`planner whatif`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands._options import CalibratedOnlyOption, JsonOption, QuietOption, ScenarioArgument, begin

if TYPE_CHECKING:
    from planner.whatif import Row


def command(
    scenario: ScenarioArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write whatif.csv and whatif.parquet there.", show_default=False)] = None,
    time_limit: Annotated[float | None, typer.Option(min=0.1, help="Seconds per variant; default: the scenario's.", show_default=False)] = None,
    calibrated_only: CalibratedOnlyOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Search the scenario and each of its variants: step time, $ per billion examples, memory, layout, and what changed.

    Example: planner whatif scenarios/gem-512xh200.yaml
    """
    from planner import whatif
    from planner.files import check_writable
    from planner.report import console

    begin(quiet=quiet)
    if out is not None:
        check_writable(out)
    rows = whatif.compare(scenario, time_limit=time_limit, calibrated_only=calibrated_only, progress=lambda name: console.say(f"searching: {name}"))
    if out is not None:
        from planner.report.tables import write_rows

        for suffix in ("csv", "parquet"):
            write_rows(out / f"whatif.{suffix}", [_flat(row) for row in rows])
        console.say(f"wrote {out}/whatif.csv and .parquet")
    if json:
        console.print_json(whatif.to_json(rows))
        return
    columns = [
        ("variant", "left"),
        ("step", "right"),
        ("examples/s", "right"),
        ("speed", "right"),
        ("$ per billion", "right"),
        ("cost", "right"),
        ("memory", "right"),
        ("limited by", "left"),
        ("layout", "left"),
        ("changed in the plan", "left"),
    ]
    console.show(console.grid("", columns, [_cells(row, rows[0]) for row in rows]))


def _cells(row: Row, base: Row) -> list[str]:
    from costmodel.units import show_count
    from planner.report import terminal

    if row.step_time_s is None:
        return [row.name, "-", "-", "-", "-", "-", "-", "no feasible plan", row.reason.splitlines()[0], ""]
    assert row.examples_per_second is not None
    regions = sum(":" in d for d in row.different)
    words = [f"{d} {getattr(row, d)}" for d in row.different if d in ("sharding", "local_batch")]
    if "job" in row.different and row.job and base.job:
        words += [now for now, before in zip(row.job.split(", "), base.job.split(", ")) if now != before]
    words += [f"options of {regions} region{'s' if regions > 1 else ''}"] if regions else []
    return [
        row.name,
        terminal.seconds(row.step_time_s),
        show_count(row.examples_per_second),
        f"{row.speedup:.3f}x" if row.speedup else "-",
        terminal.dollars(row.dollars_per_billion_examples),
        f"{row.cost_ratio:.2f}x" if row.cost_ratio else "-",
        terminal.gib(row.memory_bytes),
        row.limiting or "-",
        row.layout or "-",
        "" if row is base else "; ".join(words) or "nothing",
    ]


def _flat(row: Row) -> dict[str, object]:
    from costmodel.codec import encode

    body = encode(row)
    for key, value in body.pop("changes").items():
        body[f"set.{key}"] = str(value)
    for key, value in body.pop("options").items():
        body[f"options.{key}"] = value
    body["different"] = "; ".join(row.different)
    return body
