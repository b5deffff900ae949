"""Rows to CSV and Parquet, through a temporary file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.files import replacing


def write_rows(path: Path | str, rows: list[dict[str, Any]]) -> Path:
    """Writes `.csv` or `.parquet`; columns in the order in which they first appear. Raises UsageError for another suffix."""
    import pandas as pd

    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise UsageError(f"{path}: a name that ends in .csv or .parquet is needed")
    frame = pd.DataFrame(rows)
    with replacing(path) as temporary:
        if path.suffix == ".csv":
            frame.to_csv(temporary, index=False)
        else:
            frame.to_parquet(temporary, index=False)
    return path
