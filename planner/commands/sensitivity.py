"""`planner sensitivity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import JsonOption, QuietOption, ScenarioArgument, begin


def command(
    scenario: ScenarioArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("sensitivity.json"),
    batches: Annotated[int, typer.Option(min=1, help="Batches to measure on.")] = 2,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a batch at most.")] = 256,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure what each region loses below 16 bits: output SNR, gradient cosine, saturation and underflow on real batches.

    The file feeds a scenario's `search: {sensitivity: FILE, risk_budget: N}`.

    Example: planner sensitivity quickstart -o sensitivity.json
    """
    from planner import sensitivity
    from planner.report import console
    from planner.scenario import load_scenario

    begin(quiet=quiet)
    body = sensitivity.run(load_scenario(scenario, with_variants=False), output, batches=batches, samples=samples)
    if json:
        console.print_json(body)
    else:
        console.show(sensitivity.table(body))
        console.say(f"written to {output}")
