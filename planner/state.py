"""The user's state directory: `$PLANNER_STATE`, else `$XDG_STATE_HOME/planner`, else `~/.local/state/planner`. Holds the ledger, calibrations and data."""
from __future__ import annotations

import os
from pathlib import Path


def state_dir() -> Path:
    """The directory's path; it need not exist yet."""
    if os.environ.get("PLANNER_STATE"):
        return Path(os.environ["PLANNER_STATE"]).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "planner"
