"""`planner doctor`."""

from __future__ import annotations

from planner.commands._options import JsonOption


def command(json: JsonOption = False) -> None:
    """Say what this machine can do, which torch build it has, and what is missing.

    Example: planner doctor
    """
    import dataclasses

    from planner.doctor import examine
    from planner.report import console

    checks = examine()
    if json:
        console.print_json({"checks": [dataclasses.asdict(c) for c in checks]})
        return
    rows = [[c.name, c.state, c.detail + (f"\n-> {c.remedy}" if c.remedy else "")] for c in checks]
    console.show(console.grid("", [("what", "left"), ("state", "left"), ("", "left")], rows))
