import dataclasses
import multiprocessing
import os
import sqlite3
from pathlib import Path

import pytest

from planner.errors import USAGE
from planner.ledger import Entry, Ledger, LedgerError, default_path, load_entry, save_entry, table
from planner.report.tables import write_rows

ENTRY = Entry(
    time="2026-11-29T12:00:00+00:00", scenario="s", plan_identity="abc", cluster="c", device="d", model="m", workload="w", world_size=2,
    layout="ddp1 fsdp2 sparse2x1", local_batch=4, status="completed", steps=10, predicted_step_s=0.1, measured_step_s=0.12, error=0.2,
    measured_phases_s={"forward": 0.05}, quality={"ne.like": 0.86}, environment={"torch": "2", "list": [1]},
)  # fmt: skip


def write_many(path: str, writer: int) -> None:
    book = Ledger(path)
    for number in range(100):
        book.append(dataclasses.replace(ENTRY, scenario=f"writer {writer}", steps=number))


def test_eight_writers_lose_nothing(tmp_path: Path):
    path = str(tmp_path / "deep" / "ledger.sqlite")
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, number)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(100)
    assert [w.exitcode for w in writers] == [0] * 8
    entries = Ledger(path).entries()
    assert len(entries) == 800
    assert {(e.scenario, e.steps) for e in entries} == {(f"writer {w}", n) for w in range(8) for n in range(100)}


def test_a_row_comes_back_as_it_went(tmp_path: Path):
    book = Ledger(tmp_path / "l.sqlite")
    book.append(ENTRY)
    book.append(ENTRY)
    assert book.entries() == [ENTRY]


def test_filters_and_order(tmp_path: Path):
    book = Ledger(tmp_path / "l.sqlite")
    book.append_all([dataclasses.replace(ENTRY, steps=n, scenario="a" if n % 2 else "b") for n in range(6)])
    assert [e.steps for e in book.entries(last=2)] == [4, 5]
    assert [e.steps for e in book.entries(scenario="a")] == [1, 3, 5]


def test_no_ledger_yet_is_empty_and_stays_absent(tmp_path: Path):
    book = Ledger(tmp_path / "none.sqlite")
    assert book.entries() == []
    assert not book.path.exists()
    assert Ledger().path == default_path()


@pytest.mark.parametrize(
    "content", [b"this is no database at all, but long enough to have a header of a hundred bytes" * 3, b"SQLite format 3\x00" + b"\xff" * 4096]
)
def test_a_damaged_ledger_is_refused_and_left_alone(tmp_path: Path, content: bytes):
    path = tmp_path / "l.sqlite"
    path.write_bytes(content)
    for action in (lambda: Ledger(path).append(ENTRY), lambda: Ledger(path).entries()):
        with pytest.raises(LedgerError, match="not a usable ledger") as caught:
            action()
        assert caught.value.exit_code == USAGE
        assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_another_programs_table_is_refused(tmp_path: Path):
    path = tmp_path / "l.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE runs (x)")
    connection.close()
    with pytest.raises(LedgerError, match="not a usable ledger"):
        Ledger(path).append(ENTRY)


def test_a_newer_ledger_is_refused(tmp_path: Path):
    path = tmp_path / "l.sqlite"
    Ledger(path).append(ENTRY)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(LedgerError, match="newer version"):
        Ledger(path).entries()


def test_a_ledger_in_an_impossible_place(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(tmp_path / "file" / "l.sqlite").append(ENTRY)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_ledger(tmp_path: Path):
    book = Ledger(tmp_path / "l.sqlite")
    book.append(ENTRY)
    book.path.chmod(0o444)
    with pytest.raises(LedgerError):
        book.append(dataclasses.replace(ENTRY, steps=11))


def test_the_row_kept_in_the_folder_can_be_added_later(tmp_path: Path):
    save_entry(ENTRY, tmp_path)
    assert load_entry(tmp_path) == ENTRY
    with pytest.raises(ValueError, match="not the folder of a finished run"):
        load_entry(tmp_path / "other")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_export(tmp_path: Path, suffix: str):
    import pandas as pd

    path = write_rows(tmp_path / f"l.{suffix}", table([ENTRY, dataclasses.replace(ENTRY, steps=11, error=None)]))
    frame = pd.read_csv(path) if suffix == "csv" else pd.read_parquet(path)
    assert list(frame["steps"]) == [10, 11]
    assert frame["measured_phases_s.forward"][0] == 0.05
    assert frame["quality.ne.like"][0] == 0.86
    with pytest.raises(ValueError, match=r"\.csv or \.parquet"):
        write_rows(tmp_path / "l.xlsx", [])
