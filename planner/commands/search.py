"""`planner search`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands._options import CalibratedOnlyOption, CalibrationOption, JsonOption, QuietOption, ScenarioArgument, StrictOption, begin

if TYPE_CHECKING:
    from planner.search import SearchResult


def command(
    scenario: ScenarioArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write plan.json and candidates.{csv,parquet} there.", show_default=False)] = None,
    time_limit: Annotated[float | None, typer.Option(min=0.1, help="Seconds; default: the scenario's.", show_default=False)] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Plans to keep; default: the scenario's.", show_default=False)] = None,
    cache: Annotated[bool, typer.Option(help="Take the answer of an earlier equal search from the state directory.")] = True,
    calibration: CalibrationOption = None,
    calibrated_only: CalibratedOnlyOption = False,
    strict: StrictOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest plan for a scenario: layout, precision, recomputation and table placement under the memory of each rank.

    Example: planner search scenarios/quickstart.yaml -o out/quickstart
    """
    from planner import api
    from planner.files import check_writable
    from planner.report import console

    begin(quiet=quiet)
    if out is not None:
        check_writable(out)
    result, found = api.search(
        scenario,
        calibration_file=calibration,
        calibrated_only=calibrated_only,
        time_limit=time_limit,
        top=top,
        cache=cache,
        strict=strict,
    )
    if result.kept is not None:
        console.say(f"answer of an earlier equal search, kept in {result.kept} (--no-cache: search again)")
    for note in found.notes:
        console.say(f"note: {note}")
    if out is not None:
        _write(result, out)
        console.say(f"wrote {out}/plan.json and {out}/candidates.csv, .parquet")
    if json:
        console.print_json(_answer(result, found.notes))
    else:
        _show(result)


def _write(result: SearchResult, out: Path) -> None:
    from planner import api
    from planner.report.tables import write_rows

    write_rows(out / "candidates.csv", list(result.candidates))
    write_rows(out / "candidates.parquet", list(result.candidates))
    api.save_plan(result.plan, out)


def _answer(result: SearchResult, notes: tuple[str, ...]) -> dict[str, Any]:
    from costmodel.codec import encode
    from planner import api

    return {
        "plan": api.describe(result.plan),
        "prediction": result.plan.prediction,
        "certificate": encode(result.certificate),
        "runners_up": [{**api.describe(p), "prediction": p.prediction} for p in result.runners_up],
        "excluded": encode(result.excluded),
        "notes": list(notes),
    }


def _show(result: SearchResult) -> None:
    from costmodel.codec import decode
    from costmodel.estimate import Estimate
    from planner.report import console, terminal

    rows = [
        [
            str(rank),
            terminal.seconds(plan.prediction["step_time"]["value"]) + (" (tie)" if 1 < rank <= 1 + result.ties else ""),
            terminal.gib(plan.prediction["memory"]["reserved"]["value"]),
            plan.prediction["limiting"],
            terminal.plan_line(plan),
        ]
        for rank, plan in enumerate((result.plan, *result.runners_up), start=1)
    ]
    columns = [("", "right"), ("step", "right"), ("memory", "right"), ("limited by", "left"), ("plan", "left")]
    certificate = result.certificate
    status = f"feasible, gap {certificate.gap:.2%}" if certificate.status == "time_limit" else certificate.status
    proof = (
        f"{status}: {certificate.candidates} candidates, {certificate.solved} programs solved, {certificate.simulated} plans simulated "
        f"in {result.seconds:.1f} s; no plan can be more than {certificate.gap:.2%} faster (asked: {certificate.asked:.2%}), "
        f"the programs' own gap is {certificate.milp_gap:.2%}"
    )
    console.show(
        terminal.plan_tables(result.plan),
        terminal.estimate_tables(decode(Estimate, result.plan.prediction)),
        console.grid("best and runners-up", columns, rows, caption=proof),
    )
