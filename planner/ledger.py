"""The ledger: one row a run, with what was predicted and what was measured. SQLite, safe for many writers at once.

Every append is one `BEGIN IMMEDIATE` transaction that waits for its turn. A file that is no ledger is never written to: the row stays in the
run's own folder (`entry.json`), and `planner ledger --add DIR` appends it later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from costmodel.codec import DecodeError, content_hash, decode, encode
from costmodel.state import state_directory
from planner.errors import UsageError

SCHEMA_VERSION = 1
ENTRY_FILE = "entry.json"
# SQLite waits this long for other writers [s].
_PATIENCE = 60.0


class LedgerError(UsageError):
    """The ledger cannot be read or written; nothing was changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run. Times in seconds, memory in bytes per rank; `error` = measured / predicted step time - 1, None where one is missing.

    `predicted_*` and `measured_*` dictionaries have the keys of the phases (docs/model.md, section 3) and of the memory categories.
    """

    time: str
    scenario: str
    plan_identity: str
    calibration: str = ""
    cluster: str
    device: str
    model: str
    workload: str
    world_size: int
    layout: str
    local_batch: int
    accumulation: int = 1
    status: str
    steps: int = 0
    predicted_step_s: float | None = None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    measured_step_s: float | None = None
    measured_p10_s: float | None = None
    measured_p90_s: float | None = None
    error: float | None = None
    examples_per_second: float | None = None
    final_loss: float | None = None
    predicted_phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    measured_phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    predicted_memory_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    measured_memory_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    quality: dict[str, float] = dataclasses.field(default_factory=dict)
    predicted_sources: dict[str, float] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    directory: str = ""

    @property
    def uid(self) -> str:
        """Identity of the row: appending the same entry twice keeps one."""
        return content_hash(self)


_FIELDS = tuple(f.name for f in dataclasses.fields(Entry))
_JSON = tuple(f.name for f in dataclasses.fields(Entry) if str(f.type).startswith("dict"))
_TYPES = {"str": "TEXT", "int": "INTEGER", "float | None": "REAL"}
_CREATE = (
    "CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, uid TEXT UNIQUE NOT NULL, "
    + ", ".join(f"{f.name} {_TYPES.get(str(f.type), 'TEXT')}" for f in dataclasses.fields(Entry))
    + ")"
)


def default_path() -> Path:
    """The ledger in the user's state directory."""
    return state_directory() / "ledger.sqlite"


class Ledger:
    """A ledger file. It is created by the first append; reading a missing one gives no rows."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()

    def append(self, entry: Entry) -> None:
        """Adds a row, once. Raises LedgerError; then nothing was written."""
        self.append_all([entry])

    def append_all(self, entries: list[Entry]) -> None:
        """Adds rows in one transaction."""
        columns = ("uid", *_FIELDS)
        statement = f"INSERT OR IGNORE INTO runs ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        with self._open(write=True) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_CREATE)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.executemany(statement, [(entry.uid, *_row(entry)) for entry in entries])
            connection.execute("COMMIT")

    def entries(self, *, last: int | None = None, scenario: str | None = None) -> list[Entry]:
        """Rows, oldest first; the `last` ones of `scenario` where given. Raises LedgerError."""
        if not self.path.exists():
            return []
        where, values = ("WHERE scenario = ?", [scenario]) if scenario else ("", [])
        limit = f"LIMIT {int(last)}" if last is not None else ""
        with self._open(write=False) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'runs'").fetchone():
                return []
            rows = connection.execute(f"SELECT {', '.join(_FIELDS)} FROM runs {where} ORDER BY id DESC {limit}", values).fetchall()
        return [_entry(row) for row in reversed(rows)]

    def check(self) -> None:
        """Raises LedgerError or UsageError when a row could not be appended; better known before a training than after it."""
        from planner.files import check_writable

        check_writable(self.path.parent)
        if self.path.exists() and not os.access(self.path, os.W_OK):
            raise LedgerError(f"{self.path}: the ledger cannot be written to; name another with --ledger")
        self.entries(last=1)

    @contextlib.contextmanager
    def _open(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"{self.path}: the ledger cannot be opened ({error})") from error
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise LedgerError(f"{self.path}: written by a newer version (schema {version}, this one reads {SCHEMA_VERSION})")
            yield connection
        except sqlite3.Error as error:
            raise LedgerError(
                f"{self.path}: not a usable ledger ({error}); it was left as it is. Move it away to start a new one, or name another with --ledger"
            ) from error
        finally:
            connection.close()


def _row(entry: Entry) -> tuple[Any, ...]:
    return tuple(json.dumps(getattr(entry, n), sort_keys=True) if n in _JSON else getattr(entry, n) for n in _FIELDS)


def _entry(row: tuple[Any, ...]) -> Entry:
    return Entry(**{n: json.loads(v) if n in _JSON else v for n, v in zip(_FIELDS, row)})


def save_entry(entry: Entry, directory: Path | str) -> Path:
    """Keeps the row in the run's folder as well, before the ledger is touched."""
    from planner.files import write_text

    path = Path(directory) / ENTRY_FILE
    write_text(path, json.dumps(encode(entry), indent=1, allow_nan=False) + "\n")
    return path


def load_entry(directory: Path | str) -> Entry:
    """The row that a run left in its folder. Raises UsageError."""
    path = Path(directory) / ENTRY_FILE
    try:
        return decode(Entry, json.loads(path.read_text()))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; {directory} is not the folder of a finished run") from None
    except (OSError, json.JSONDecodeError, DecodeError) as error:
        raise UsageError(f"{path}: not a ledger entry ({error})") from error


def table(entries: list[Entry]) -> list[dict[str, Any]]:
    """Rows for CSV and Parquet: nested values become columns, `measured_phases_s.forward`."""
    flat = []
    for entry in entries:
        row: dict[str, Any] = {}
        for name, value in encode(entry).items():
            if isinstance(value, dict):
                row.update({f"{name}.{k}": v for k, v in value.items() if not isinstance(v, (dict, list))})
            else:
                row[name] = value
        flat.append(row)
    return flat
