"""Event files into one table of events: RecBole `.inter` and Parquet in, Parquet out. Imports no torch.

    python -m runtime.prepare movielens --wheel WHEEL --out EVENTS.parquet     MovieLens-100K out of the wheel of PyPI's `recbole`
    python -m runtime.prepare events --input FILE.inter|FILE.parquet --out EVENTS.parquet
    python -m runtime.prepare histories --input FILE.inter|FILE.parquet --out FOLDER      samples for a workload's source: {path: FOLDER}

Prints one JSON object on stdout: counts, the split, two baselines' normalized entropy, and the length histogram of the histories.
"""
from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

MOVIELENS_MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
INTER_COLUMNS = {"user_id": "token", "item_id": "token", "rating": "float", "timestamp": "float"}
LIKE_THRESHOLD = 4.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """One row an event, ascending in time (ties in the order of user, then item).

    user, item: int64 in [0, num_users) and [0, num_items), in an order unrelated to popularity, as hashed ids would be.
    liked: bool, rating >= threshold. timestamp: float64 [s].
    """

    user: np.ndarray
    item: np.ndarray
    liked: np.ndarray
    timestamp: np.ndarray
    num_users: int
    num_items: int
    origin: str

    def __len__(self) -> int:
        return len(self.user)


def read_inter(path: Path | str, *, like_threshold: float = LIKE_THRESHOLD) -> Events:
    """A RecBole atomic file: tab-separated; the first line names user_id:token, item_id:token, rating:float and timestamp:float
    in any order; other columns are ignored.

    Raises ValueError naming file:line for a missing column, a line of another width, an empty token or a number that is none.
    """
    path = Path(path)
    with path.open(encoding="utf-8") as lines:
        return _parse_inter(lines, str(path), like_threshold)


def read_wheel(path: Path | str, *, like_threshold: float = LIKE_THRESHOLD) -> Events:
    """MovieLens-100K out of a `recbole` wheel. Raises ValueError when the file is no zip archive or lacks the data set."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(MOVIELENS_MEMBER) as member:
            return _parse_inter(io.TextIOWrapper(member, encoding="utf-8"), f"{path}!{MOVIELENS_MEMBER}", like_threshold)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: not a wheel ({error})") from error
    except KeyError as error:
        raise ValueError(f"{path}: no {MOVIELENS_MEMBER} inside; take the wheel of `pip download --no-deps recbole`") from error


def read_parquet(path: Path | str, *, like_threshold: float = LIKE_THRESHOLD) -> Events:
    """Columns user_id, item_id, timestamp, and rating or liked. Raises ValueError naming file and row (its number in the file,
    from 0).
    """
    path = Path(path)
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error
    for column in ("user_id", "item_id", "timestamp"):
        if column not in frame:
            raise ValueError(f"{path}: column {column} is missing; there are {', '.join(map(str, frame.columns))}")
    if "rating" not in frame and "liked" not in frame:
        raise ValueError(f"{path}: a column rating or liked is needed; there are {', '.join(map(str, frame.columns))}")
    value = "rating" if "rating" in frame else "liked"
    for column in ("user_id", "item_id", "timestamp", value):
        bad = np.flatnonzero(frame[column].isna().to_numpy())
        if len(bad):
            raise ValueError(f"{path}:row {bad[0]}: {column} is empty")
    numbers = {c: pd.to_numeric(frame[c], errors="coerce").to_numpy(dtype=np.float64) for c in ("timestamp", value)}
    for column, values in numbers.items():
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise ValueError(f"{path}:row {bad[0]}: {column} {frame[column].iloc[bad[0]]!r} is no number")
    liked = numbers[value] >= like_threshold if value == "rating" else numbers[value] > 0
    users, items = (frame[c].to_numpy() if frame[c].dtype.kind in "iu" else frame[c].astype(str).to_numpy()
                    for c in ("user_id", "item_id"))
    return _events(users, items, liked, numbers["timestamp"], str(path))


def read_events(path: Path | str, *, like_threshold: float = LIKE_THRESHOLD) -> Events:
    """By suffix: `.inter`, `.parquet` or `.whl`."""
    readers = {".inter": read_inter, ".parquet": read_parquet, ".whl": read_wheel}
    suffix = Path(path).suffix
    if suffix not in readers:
        raise ValueError(f"{path}: unknown kind of event file {suffix!r}; known: {', '.join(readers)}")
    if not Path(path).exists():
        raise ValueError(f"{path}: no such file")
    return readers[suffix](path, like_threshold=like_threshold)


def write_parquet(events: Events, path: Path | str) -> None:
    """Through a temporary file; `read_parquet` gives the same events back."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    frame = pd.DataFrame({"user_id": events.user, "item_id": events.item, "liked": events.liked.astype(np.int8),
                          "timestamp": events.timestamp})
    frame.to_parquet(temporary, index=False)
    temporary.replace(path)


def _parse_inter(lines: Iterable[str], name: str, like_threshold: float) -> Events:
    lines = iter(lines)
    header = next(lines, "").rstrip("\r\n").split("\t")
    names = [field.split(":")[0] for field in header]
    for column, kind in INTER_COLUMNS.items():
        if column not in names:
            raise ValueError(f"{name}:1: column {column}:{kind} is missing; the header is {header}")
    position = {column: names.index(column) for column in INTER_COLUMNS}
    users, items, ratings, times = [], [], [], []
    for number, line in enumerate(lines, start=2):
        fields = line.rstrip("\r\n").split("\t")
        if fields == [""]:
            continue
        if len(fields) != len(names):
            raise ValueError(f"{name}:{number}: {len(fields)} fields, but the header has {len(names)}")
        for column in ("user_id", "item_id"):
            if not fields[position[column]]:
                raise ValueError(f"{name}:{number}: {column} is empty")
        users.append(fields[position["user_id"]])
        items.append(fields[position["item_id"]])
        ratings.append(_number(fields[position["rating"]], name, number, "rating"))
        times.append(_number(fields[position["timestamp"]], name, number, "timestamp"))
    if not users:
        raise ValueError(f"{name}: no events")
    return _events(np.array(users), np.array(items), np.array(ratings) >= like_threshold, np.array(times), name)


def _number(text: str, name: str, line: int, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise ValueError(f"{name}:{line}: {column} {text!r} is no number")
    return value


def _events(users: np.ndarray, items: np.ndarray, liked: np.ndarray, times: np.ndarray, origin: str) -> Events:
    user, num_users = _dense_ids(users)
    item, num_items = _dense_ids(items)
    order = np.lexsort((item, user, times))
    return Events(user=user[order], item=item[order], liked=liked[order].astype(bool), timestamp=times[order].astype(np.float64),
                  num_users=num_users, num_items=num_items, origin=origin)


def _dense_ids(tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """Ids 0..n-1 in an order that is fixed but unrelated to the tokens, for catalogue numbers follow popularity and would load
    one row-wise shard more than another. Integers that are 0..n-1 already (a prepared file) are kept.
    """
    unique, inverse = np.unique(tokens, return_inverse=True)
    if tokens.dtype.kind in "iu" and unique[0] == 0 and unique[-1] == len(unique) - 1:
        return tokens.astype(np.int64), len(unique)
    scatter = np.random.default_rng(len(unique)).permutation(len(unique))
    return scatter[inverse].astype(np.int64), len(unique)


def main(argv: list[str] | None = None) -> int:
    from runtime.histories import build, save, summarize

    parser = argparse.ArgumentParser(prog="python -m runtime.prepare", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    movielens = commands.add_parser("movielens", help="MovieLens-100K")
    source = movielens.add_mutually_exclusive_group(required=True)
    source.add_argument("--wheel", type=Path, help="recbole-*.whl, from `pip download --no-deps recbole`")
    source.add_argument("--inter", type=Path, dest="input", help="ml-100k.inter")
    events = commands.add_parser("events", help="any .inter or .parquet file")
    events.add_argument("--input", type=Path, required=True)
    samples = commands.add_parser("histories", help="of any .inter or .parquet file, to be read while training asks for them")
    samples.add_argument("--input", type=Path, required=True)
    for command in (movielens, events, samples):
        command.add_argument("--out", type=Path, required=True, help="Parquet file to write; of histories a folder")
        command.add_argument("--max-history", type=int, default=50)
        command.add_argument("--like-threshold", type=float, default=LIKE_THRESHOLD)
    arguments = parser.parse_args(argv)
    try:
        table = read_events(getattr(arguments, "wheel", None) or arguments.input, like_threshold=arguments.like_threshold)
        summary = summarize(table, max_history=arguments.max_history)
        if arguments.command == "histories":
            about = {"max_history": arguments.max_history, "like_threshold": arguments.like_threshold, "baselines": summary["baselines"]}
            save(build(table, max_history=arguments.max_history), arguments.out, about=about)
        else:
            write_parquet(table, arguments.out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"out": str(arguments.out), **summary}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
