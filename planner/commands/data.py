"""`planner data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands._options import JsonOption, QuietOption, begin


def command(
    name: Annotated[str, typer.Argument(help="movielens: MovieLens-100K, out of the wheel of PyPI's recbole.", show_default=False)],
    wheel: Annotated[Path | None, typer.Option(help="Use this wheel instead of downloading one.", show_default=False)] = None,
    force: Annotated[bool, typer.Option(help="Prepare it again when it is there already.")] = False,
    or_synthetic: Annotated[
        bool, typer.Option("--or-synthetic", help="When it cannot be had, warn and go on: runs then use a synthetic stream.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fetch and prepare a public data set in the state directory.

    Example: planner data movielens
    """
    from planner import data
    from planner.errors import RunFailed, UsageError
    from planner.report import console

    begin(quiet=quiet)
    if name != "movielens":
        from costmodel.codec import suggest

        raise UsageError(f"no data set {name!r}{suggest(name, ['movielens'])}; known: movielens")
    try:
        summary = data.movielens(wheel=wheel, force=force)
    except RunFailed as error:
        if not or_synthetic:
            raise
        console.warn(f"{error}; runs will use a synthetic stream and say so")
        if json:
            console.print_json({"out": None, "reason": str(error)})
        return
    if json:
        console.print_json(summary)
    elif "events" in summary:
        console.show(
            f"{summary['events']} events of {summary['users']} users on {summary['items']} items: {summary['train']} to train on, "
            f"{summary['evaluation']} later ones to evaluate\n{summary['out']}"
        )
    else:
        console.show(f"already there: {summary['out']}")
