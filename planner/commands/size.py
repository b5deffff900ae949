"""`planner size`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands._options import CalibrationOption, JsonOption, QuietOption, ScenarioArgument, StrictOption, begin

if TYPE_CHECKING:
    from planner.size import Point, Sizing


def command(
    scenario: ScenarioArgument,
    deadline: Annotated[str | None, typer.Option("--deadline", help="Wall time to train the examples, e.g. `36 h`.", show_default=False)] = None,
    qps: Annotated[str | None, typer.Option("--qps", help="Examples per second of wall time, e.g. 250K.", show_default=False)] = None,
    budget: Annotated[str | None, typer.Option("--budget", help="Dollars for all examples, e.g. 40K.", show_default=False)] = None,
    examples: Annotated[str | None, typer.Option("--examples", help="How much is trained, e.g. 10B; default: num_steps.", show_default=False)] = None,
    device: Annotated[list[str] | None, typer.Option("--device", help="Also this device of the catalogue, or all.", show_default=False)] = None,
    max_gpus: Annotated[int | None, typer.Option("--max-gpus", min=1, help="Largest size; default: the cluster.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write size.{csv,parquet,svg}, plan.json there.", show_default=False)] = None,
    time_limit: Annotated[float | None, typer.Option(min=0.1, help="Seconds per size; default: the scenario's.", show_default=False)] = None,
    calibration: CalibrationOption = None,
    strict: StrictOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """The fewest GPUs that meet a deadline, a rate or a budget, with failures, checkpoints and start-up in the time, and the curve of sizes.

    Exit 4 when plans exist but none meets the demand: by how much the best misses, and what would help.

    Example: planner size gem-8xh200 --qps 5K --time-limit 1
    """
    from planner import api
    from planner.errors import TargetMissed
    from planner.files import check_writable
    from planner.report import console

    begin(quiet=quiet)
    if out is not None:
        check_writable(out)
    found = api.size(
        scenario,
        deadline=deadline,
        qps=qps,
        budget=budget,
        examples=examples,
        devices=device or (),
        most=max_gpus,
        time_limit=time_limit,
        calibration_file=calibration,
        strict=strict,
        progress=lambda name: console.say(f"sizing: {name}"),
    )
    for note in found.notes:
        console.say(f"note: {note}")
    if out is not None:
        console.say(f"wrote {', '.join(_write(found, out))}")
    if json:
        console.print_json(_answer(found))
    else:
        _show(found)
    if found.best is None:
        raise TargetMissed(_missed(found))


def _write(found: Sizing, out: Path) -> list[str]:
    from planner import api
    from planner.files import write_text
    from planner.report.sizing import curve
    from planner.report.tables import write_rows

    rows = [_flat(p) for p in found.points]
    written = [str(write_rows(out / f"size.{suffix}", rows)) for suffix in ("csv", "parquet")]
    write_text(out / "size.svg", curve(found).standalone())
    written.append(str(out / "size.svg"))
    if found.plan is not None:
        written.append(str(api.save_plan(found.plan, out)))
    return written


def _flat(point: Point) -> dict[str, Any]:
    from costmodel.codec import encode

    body = encode(point)
    for name, seconds in (body.pop("job") or {}).items():
        body[name if name in ("checkpoints", "failures") else f"{name}_s"] = seconds
    for name, ratio in body.pop("misses").items():
        body[f"misses_{name}"] = _finite(ratio)
    return {**body, "meets": point.meets}


def _answer(found: Sizing) -> dict[str, Any]:
    from costmodel.codec import encode
    from planner import api

    demand = found.demand
    return {
        "scenario": found.scenario,
        "demand": {"deadline_s": demand.deadline, "examples_per_second": demand.rate, "budget_dollars": demand.budget, "examples": demand.examples},
        "best": _flat(found.best) if found.best else None,
        "plan": api.describe(found.plan) if found.plan else None,
        "nearest": _flat(found.nearest) if found.nearest else None,
        "helps": [{**encode(lever), "meets": meets} for lever, meets in found.helps],
        "larger": [_flat(p) for p in found.larger],
        "points": [_flat(p) for p in found.points],
        "notes": list(found.notes),
    }


def _finite(ratio: float) -> float | None:
    return ratio if ratio < float("inf") else None


def _times(ratio: float) -> str:
    if _finite(ratio) is None:
        return "beyond any measure: no price is known, or it never ends"
    return f"by {ratio - 1:.1%}" if ratio < 2 else f"{ratio:.3g} times over"


def _show(found: Sizing) -> None:
    from planner.report import console
    from planner.report.sizing import table

    best = found.best
    lines = [table(found)]
    if best is not None:
        from planner.report import terminal

        asked = found.demand.deadline or found.demand.rate or found.demand.budget
        verdict = "meet the demand" + ("" if best.sure else ", but not at the slow end of the interval") if asked else "are the fewest with a plan"
        cost = f", {terminal.dollars(best.dollars)}" if best.dollars is not None else ""
        time = f", {best.hours:.3g} h" if best.hours is not None else ""
        assert found.plan is not None
        lines.append(f"{best.num_devices} x {best.device} {verdict}{time}{cost}: {terminal.plan_line(found.plan)}")
    console.show(*lines)


def _missed(found: Sizing) -> str:
    nearest = found.nearest
    assert nearest is not None
    by = ", ".join(f"the {name} {_times(ratio)}" for name, ratio in nearest.misses.items())
    lines = [f"scenario {found.scenario}: no size meets the demand; the nearest, {nearest.num_devices} x {nearest.device}, misses {by}"]
    if found.helps:
        lines.append("what would help, each planned again on that size:")
        lines += [
            f"  {k}. {lever.name} ({lever.how}): {lever.speedup:.2f}x as fast{', which meets the demand' if meets else ''}"
            for k, (lever, meets) in enumerate(found.helps, start=1)
        ]
    else:
        lines.append("no single change that was tried makes that size faster")
    for point in found.larger:
        does = "meets the demand" if point.meets else "misses " + (", ".join(f"the {n} {_times(r)}" for n, r in point.misses.items()) or point.reason)
        lines.append(f"{point.num_devices} x {point.device}, more than the cluster describes, with the same links (--max-gpus): {does}")
    lines.append("another device: --device NAME or all")
    return "\n".join(lines)
