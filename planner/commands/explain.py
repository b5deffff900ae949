"""`planner explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands._options import CalibrationOption, JsonOption, QuietOption, begin

if TYPE_CHECKING:
    from planner.explain import Explanation


def command(
    plan: Annotated[str, typer.Argument(help="A scenario; with --against also a folder of a plan or run, or a plan.json.", show_default=False)],
    against: Annotated[str | None, typer.Option("--against", help="The other plan or run.", show_default=False)] = None,
    space: Annotated[bool, typer.Option("--space", help="List what a search may choose and what is out with why; nothing is searched.")] = False,
    time_limit: Annotated[float | None, typer.Option(min=0.1, help="Seconds; default: the scenario's.", show_default=False)] = None,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Why a scenario's best plan is chosen: what binds, how the runners-up differ, what moves the step. With --against, compare two plans or runs.

    Example: planner explain gem-8xh200

    Example: planner explain gem-8xh200 --against hstu-ranking
    """
    from costmodel.codec import encode
    from planner.report import console, diagnosis

    begin(quiet=quiet)
    if against is not None:
        from planner.compare import compare

        compared = compare(plan, against, calibration_file=calibration)
        for note in compared.notes:
            console.say(f"note: {note}")
        if json:
            console.print_json(encode(compared))
        else:
            console.show(diagnosis.comparison(compared))
        return
    if space:
        from planner import calibrate
        from planner.explain import listing
        from planner.scenario import load_scenario

        scenario = load_scenario(plan, with_variants=False)
        listed = listing(scenario, calibrate.find(scenario.cluster, path=calibration).calibration)
        if json:
            console.print_json(encode(listed))
            return
        console.show(
            f"{listed.candidates:,} candidates, each with the options of every region and table",
            console.grid("offered", [("choice", "left"), ("values", "left")], [[o.what, ", ".join(o.values)] for o in listed.offers]),
            console.grid("out", [("option", "left"), ("kind", "left"), ("why", "left")], [[e.what, e.kind, e.why] for e in listed.excluded]),
        )
        return
    found = _explain(plan, time_limit, calibration)
    if json:
        body = encode(found)
        console.print_json({**body, "plan": {"identity": found.plan.identity(), "layout": encode(found.plan.layout)}})
    else:
        _show(found)


def _explain(reference: str, time_limit: float | None, calibration_file: Path | None) -> Explanation:
    from planner import api, calibrate
    from planner.errors import UsageError
    from planner.explain import explain
    from planner.scenario import load_scenario

    if api.is_plan(reference):
        raise UsageError(f"{reference} is a plan: a scenario is searched and explained; --against OTHER compares plans")
    scenario = load_scenario(reference, with_variants=False)
    return explain(scenario, calibrate.find(scenario.cluster, path=calibration_file).calibration, time_limit=time_limit)


def _show(found: Explanation) -> None:
    from planner.report import console, terminal

    proof = found.certificate
    left = [("", "left")]
    why = [
        [f"{terminal.seconds(found.seconds)} a step, limited by {found.limiting}; {terminal.gib(found.free_bytes)} of HBM left"],
        [f"{proof.status}: no plan of {proof.candidates:,} candidates can be more than {proof.gap:.2%} faster"],
        [terminal.plan_line(found.plan)],
    ]
    binds = [[b.name, f"+1 {b.unit} = {1e3 * b.seconds:+.3g} ms"] for b in found.bindings] or [["nothing: memory and risk have room", ""]]
    others = [
        [
            terminal.seconds(r.seconds) + (" (tie)" if r.tie else ""),
            f"{r.seconds / found.seconds - 1:+.2%}",
            "; ".join(f"{d.what} {d.after or d.before}" for d in r.differences[:6]),
        ]
        for r in found.runners_up
    ]
    moves = [[s.what, terminal.seconds(s.seconds), f"{s.percent:+.1f} %", "" if s.fits else "does not fit"] for s in found.sensitivities]
    out = [[e.what, e.why] for e in found.excluded]
    console.show(
        console.grid("why this plan", left, why),
        console.grid("binding constraints", [("constraint", "left"), ("worth", "right")], binds),
        console.grid("runners-up", [("step", "right"), ("over the best", "right"), ("what differs", "left")], others),
        console.grid("the same plan under other conditions", [("change", "left"), ("step", "right"), ("change", "right"), ("", "left")], moves),
        console.grid("options that were out", [("option", "left"), ("why", "left")], out),
    )
