"""`planner run`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import JsonOption, LedgerOption, QuietOption, begin


def command(
    directory: Annotated[Path, typer.Argument(help="A folder that `planner search -o` wrote.", show_default=False)],
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's checkpoint.")] = False,
    no_eval: Annotated[bool, typer.Option("--no-eval", help="Skip the evaluation on held-out events.")] = False,
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Write none at the end: faster with large tables, but `--resume` has nothing to go on from.")
    ] = False,
    max_error: Annotated[
        float | None, typer.Option(min=0.0, help="Exit 4 when the step time is further from its prediction, e.g. 0.2.", show_default=False)
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FIRST:END", help="torch.profiler trace of these steps (from 0) on every rank.", show_default=False)
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="A checkpoint after every K steps, besides the last.", show_default=False)
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Start dead ranks again so often, from the newest checkpoint.")] = 0,
    ledger: LedgerOption = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT where several hosts meet; start the command on each.", show_default=False)
    ] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="This host's number, 0 for the first.", show_default=False)] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="Names the job at the meeting point.", show_default=False)] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Execute a plan with torchrun, and compare what was predicted with what was measured.

    Example: planner run out/quickstart --steps 50
    """
    from costmodel.codec import encode
    from planner import gates, run
    from planner.errors import UsageError
    from planner.ledger import Ledger
    from planner.report import console, terminal
    from planner.report.progress import Progress

    begin(quiet=quiet)
    if trace is not None and not ((ends := re.fullmatch(r"(\d+):(\d+)", trace)) and int(ends[1]) < int(ends[2])):
        raise UsageError(f"--trace {trace!r}: FIRST:END with FIRST < END is needed, e.g. 5:8 for steps 5, 6 and 7")
    if (warning := gates.standing(*run.load_plan(directory))) is not None:
        console.say(f"note: {warning}")
    meeting = run.Rendezvous(endpoint=rdzv_endpoint, node_rank=node_rank, id=rdzv_id)
    with Progress("training", quiet=quiet) as progress:
        done = run.execute(
            directory,
            steps=steps,
            resume=resume,
            evaluate=not no_eval,
            trace=trace,
            checkpoint=not no_checkpoint,
            checkpoint_every=checkpoint_every,
            max_restarts=max_restarts,
            rendezvous=meeting,
            ledger=Ledger(ledger),
            on_event=progress.event,
        )
    if done.entry is None or done.result is None:
        console.say("done; the first host keeps the result")
        return
    if json:
        console.print_json(
            {"entry": encode(done.entry), "comparison": run.comparison(done.entry), "ledger": str(done.ledger), "directory": str(done.directory)}
        )
    else:
        quality = terminal.quality_table(done.entry.quality)
        shown = [terminal.plan_line(done.plan), terminal.comparison_tables(run.comparison(done.entry))]
        console.show(*shown, *([quality] if quality is not None else []))
        console.say(f"appended to {done.ledger}")
    run.check_error(done.entry, max_error)
