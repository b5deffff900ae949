"""Where the user's own files live: calibrations, ledger, prepared data sets. The planner writes them, the runtime finds them."""
from __future__ import annotations

import os
from pathlib import Path


def state_directory() -> Path:
    """`$PLANNER_STATE`, else `planner` in `$XDG_STATE_HOME` (default `~/.local/state`). Not created."""
    if os.environ.get("PLANNER_STATE"):
        return Path(os.environ["PLANNER_STATE"])
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "planner"


def movielens_path() -> Path:
    """MovieLens-100K as `planner data movielens` prepares it (an event table, see runtime.prepare)."""
    return state_directory() / "data" / "movielens-100k.parquet"
