"""Records the distribution of production data: lengths of histories, id skew, pooling, attention shapes, and what runs saw of activations and
rank load. The result is a workload file that a scenario can name, and a sidecar with everything else; both merge with other recordings.

    events      .parquet, .csv, .inter with user_id, item_id, timestamp: a sample is an event with the same user's strictly earlier ones and itself
    samples     .parquet with list columns: a row is a sample, a list its ids
    a run       a folder of `planner run`: the events of its plan's source, and its traces
    recordings  workload.yaml with workload.stats.json beside it

Files are read in chunks: memory grows with the number of users, not of events. Sketches: lengths are counted exactly up to EXACT and in bins of 1 %
above; distinct ids by the SKETCH smallest hashes (relative error about 1 / sqrt(SKETCH)); the Zipf exponent is the one whose expected number of
distinct ids equals that of the observed batches.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.codec import encode
from costmodel.model import Model
from costmodel.plan import Plan
from costmodel.sparse import expected_unique
from costmodel.state import movielens_path
from planner.errors import UsageError
from planner.files import write_text

CHUNK = 1 << 20
EXACT = 1 << 14
SKETCH = 4096
BATCHES = (512, 4096, 32768)
SCHEMA_VERSION = 1
# Batches of each size that a chunk is asked for.
_BATCHES_PER_CHUNK = 8
# A file that is not in time order is sorted in memory up to so many events [32 bytes each].
_SORTED_IN_MEMORY = 30_000_000
_EVENT_COLUMNS = ("user_id", "item_id", "timestamp")
_MOST_VALUES = 1024


@dataclasses.dataclass(slots=True, kw_only=True)
class IdStatistics:
    """Ids of one column. hashes: the smallest ones, ascending; distinct: by batch size, (batches, distinct ids in all)."""

    ids: int = 0
    hashes: list[int] = dataclasses.field(default_factory=list)
    distinct: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def add(self, ids: np.ndarray) -> None:
        """ids: int64 `(n,)`."""
        self.ids += len(ids)
        hashed = _hash(ids)
        if len(self.hashes) >= SKETCH:
            hashed = hashed[hashed < np.uint64(self.hashes[-1])]
        if len(hashed):
            merged = np.unique(np.concatenate([np.array(self.hashes, dtype=np.uint64), hashed]))
            self.hashes = [int(h) for h in merged[:SKETCH]]
        for size in BATCHES:
            count = min(len(ids) // size, _BATCHES_PER_CHUNK)
            if count:
                batches = np.sort(ids[:count * size].reshape(count, size), axis=1)
                found = count + int((np.diff(batches, axis=1) != 0).sum())
                before = self.distinct.get(str(size), (0.0, 0.0))
                self.distinct[str(size)] = (before[0] + count, before[1] + found)

    def merge(self, other: IdStatistics) -> None:
        self.ids += other.ids
        self.hashes = sorted({*self.hashes, *other.hashes})[:SKETCH]
        for size, (batches, found) in other.distinct.items():
            before = self.distinct.get(size, (0.0, 0.0))
            self.distinct[size] = (before[0] + batches, before[1] + found)

    @property
    def rows(self) -> int:
        """Estimated number of distinct ids."""
        if len(self.hashes) < SKETCH:
            return len(self.hashes)
        return round((SKETCH - 1) / (self.hashes[-1] / 2.0**64))

    def unique_ratio(self) -> dict[str, float]:
        """Distinct ids over ids, by batch size."""
        return {size: found / (batches * int(size)) for size, (batches, found) in self.distinct.items()}

    def zipf(self) -> float | None:
        """The exponent that explains the largest batches; None without a whole batch."""
        if not self.distinct or self.rows < 2:
            return None
        from scipy.optimize import brentq

        size = max(self.distinct, key=int)
        batches, found = self.distinct[size]

        def gap(exponent: float) -> float:
            return expected_unique(self.rows, exponent, int(size)) - found / batches
        if gap(0.0) <= 0:
            return 0.0
        return float(brentq(gap, 0.0, 4.0, xtol=1e-4)) if gap(4.0) < 0 else 4.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Recording:
    """What was seen. lengths: by sequence, {events: samples}. shapes: by pair of sequences, {"log2 Lq,log2 Lk": samples}. pooling: by list column
    that is no sequence, (samples, ids). rank_load: by count, (steps, sum of the heaviest rank over the mean). activations: by region, largest
    and root mean square."""

    schema_version: int = SCHEMA_VERSION
    sources: list[str] = dataclasses.field(default_factory=list)
    events: int = 0
    samples: int = 0
    lengths: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    shapes: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    pooling: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    ids: dict[str, IdStatistics] = dataclasses.field(default_factory=dict)
    rank_load: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    activations: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    source: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add_lengths(self, name: str, lengths: np.ndarray) -> None:
        """lengths: int64 `(samples,)`."""
        counts = self.lengths.setdefault(name, {})
        values, weights = np.unique(_binned(lengths), return_counts=True)
        for value, weight in zip(values.tolist(), weights.tolist()):
            counts[str(value)] = counts.get(str(value), 0) + weight

    def merge(self, other: Recording) -> None:
        """Adds another recording's counts."""
        self.sources += other.sources
        self.events, self.samples = self.events + other.events, self.samples + other.samples
        for mine, theirs in ((self.lengths, other.lengths), (self.shapes, other.shapes)):
            for name, counts in theirs.items():
                kept = mine.setdefault(name, {})
                for value, weight in counts.items():
                    kept[value] = kept.get(value, 0) + weight
        for mine, theirs in ((self.pooling, other.pooling), (self.rank_load, other.rank_load)):
            for name, sums in theirs.items():
                mine[name] = tuple(a + b for a, b in zip(mine.get(name, (0.0, 0.0)), sums))
        for name, statistics in other.ids.items():
            self.ids.setdefault(name, IdStatistics()).merge(statistics)
        for region, values in other.activations.items():
            if values["largest"] >= self.activations.get(region, {"largest": 0.0})["largest"]:
                self.activations[region] = values
        self.source = self.source if self.source == other.source or not other.source else (other.source if not self.source else {})
        self.notes += other.notes


def _hash(ids: np.ndarray) -> np.ndarray:
    """Uniform uint64 (the finaliser of SplitMix64)."""
    x = ids.astype(np.uint64)
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _binned(lengths: np.ndarray) -> np.ndarray:
    """Lengths up to EXACT as they are, above it the middle of their bin of 1 %."""
    long = lengths > EXACT
    if not long.any():
        return lengths
    place = np.floor(np.log(lengths[long] / EXACT) / np.log(1.01))
    binned = lengths.copy()
    binned[long] = np.round(EXACT * 1.01 ** (place + 0.5)).astype(np.int64)
    return binned


# --- sources ---

def record(sources: Sequence[Path | str], *, sequence: str = "history", max_history: int | None = None) -> Recording:
    """Records and merges all sources. Raises UsageError naming the file and what is wrong with it."""
    if not sources:
        raise UsageError("nothing to record: name an event file, a run's folder or an earlier recording")
    total: Recording | None = None
    for source in map(Path, sources):
        one = _one(source, sequence, max_history)
        if total is None:
            total = one
        else:
            total.merge(one)
    assert total is not None
    if not any(sum(counts.values()) for counts in total.lengths.values()):
        raise UsageError(f"{', '.join(map(str, sources))}: no history was found; nothing is written")
    return total


def _one(path: Path, sequence: str, max_history: int | None) -> Recording:
    if path.is_dir():
        return _of_run(path, sequence)
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if path.suffix in (".yaml", ".yml"):
        return load(path)
    if path.suffix == ".parquet" and (lists := _list_columns(path)):
        return _of_samples(path, lists)
    if path.suffix not in (".parquet", ".csv", ".inter", ".tsv"):
        raise UsageError(f"{path}: unknown kind of data {path.suffix!r}; known: .parquet, .csv, .tsv, .inter, a run's folder, a recording's .yaml")
    return _of_events(path, sequence, max_history)


def _list_columns(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path}: not a readable Parquet file ({error})") from error
    return [f.name for f in schema if pa.types.is_list(f.type) or pa.types.is_large_list(f.type)]


def _of_samples(path: Path, columns: list[str]) -> Recording:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    made = Recording(sources=[str(path)])
    for batch in pq.ParquetFile(path).iter_batches(batch_size=1 << 16, columns=columns):
        lengths = {}
        for name in columns:
            column = batch.column(name)
            lengths[name] = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
            ids = _integers(np.asarray(pc.list_flatten(column).drop_null()))
            made.ids.setdefault(name, IdStatistics()).add(ids)
            made.add_lengths(name, lengths[name])
            before = made.pooling.get(name, (0.0, 0.0))
            made.pooling[name] = (before[0] + len(lengths[name]), before[1] + float(lengths[name].sum()))
            made.events += int(lengths[name].sum())
        made.samples += batch.num_rows
        for i, first in enumerate(columns):
            for second in columns[i + 1:]:
                _add_shapes(made, f"{first} x {second}", lengths[first], lengths[second])
    return made


def _add_shapes(made: Recording, name: str, first: np.ndarray, second: np.ndarray) -> None:
    bins = [np.ceil(np.log2(np.maximum(v, 1))).astype(np.int64) for v in (first, second)]
    values, weights = np.unique(bins[0] * 64 + bins[1], return_counts=True)
    kept = made.shapes.setdefault(name, {})
    for value, weight in zip(values.tolist(), weights.tolist()):
        key = f"{value // 64},{value % 64}"
        kept[key] = kept.get(key, 0) + weight


def _integers(values: np.ndarray) -> np.ndarray:
    """int64 ids; texts are hashed."""
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    from pandas.util import hash_array

    return hash_array(values.astype(object)).view(np.int64)


def _chunks(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(user, item, timestamp) of up to CHUNK events a time."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        file = pq.ParquetFile(path)
        _check_columns(path, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=CHUNK, columns=list(_EVENT_COLUMNS)):
            if any(batch.column(name).null_count for name in _EVENT_COLUMNS):
                raise UsageError(f"{path}: user_id, item_id and timestamp must not be empty")
            user, item, time = (np.asarray(batch.column(name)) for name in _EVENT_COLUMNS)
            yield _integers(user), _integers(item), time.astype(np.float64)
        return
    import pandas as pd

    separator = "," if path.suffix == ".csv" else "\t"
    try:
        with pd.read_csv(path, sep=separator, chunksize=CHUNK) as frames:
            for frame in frames:
                frame.columns = [str(c).split(":")[0] for c in frame.columns]
                _check_columns(path, list(frame.columns))
                if frame[list(_EVENT_COLUMNS)].isna().any().any():
                    raise UsageError(f"{path}: user_id, item_id and timestamp must not be empty")
                user, item = (_integers(frame[name].to_numpy()) for name in ("user_id", "item_id"))
                time = pd.to_numeric(frame["timestamp"], errors="coerce")
                if time.isna().any():
                    row = int(time.index[time.isna()][0])
                    raise UsageError(f"{path}:{row + 2}: timestamp {frame['timestamp'][row]!r} is not a number")
                yield user, item, time.to_numpy(dtype=np.float64)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a readable table ({error})") from error
    except ValueError as error:
        raise error if isinstance(error, UsageError) else UsageError(f"{path}: {error}") from error


def _check_columns(path: Path, names: list[str]) -> None:
    missing = [name for name in _EVENT_COLUMNS if name not in names]
    if missing:
        raise UsageError(f"{path}: column {missing[0]} is missing; there are {', '.join(names)}")


def _of_events(path: Path, sequence: str, max_history: int | None) -> Recording:
    kind = "parquet" if path.suffix == ".parquet" else "recbole" if path.suffix == ".inter" else None
    made = Recording(sources=[str(path)])
    if kind is not None:
        made.source = {"kind": kind, "path": str(path), **({"max_history": max_history} if max_history is not None else {})}
    made.ids = {"user": IdStatistics(), "item": IdStatistics()}
    past, last = _Past(), -np.inf
    with contextlib.closing(_chunks(path)) as chunks:
        for user, item, time in chunks:
            if len(time) and (time[0] < last or (np.diff(time) < 0).any()):
                break
            last = time[-1] if len(time) else last
            _add_events(made, past, sequence, max_history, user, item, time)
        else:
            return made
    return _sorted_in_memory(path, sequence, max_history, made)


def _add_events(made: Recording, past: _Past, sequence: str, max_history: int | None, user: np.ndarray, item: np.ndarray, time: np.ndarray) -> None:
    before = past.before(user, time)
    made.add_lengths(sequence, (before if max_history is None else np.minimum(before, max_history)) + 1)
    made.ids["user"].add(user)
    made.ids["item"].add(item)
    made.events += len(user)
    made.samples += len(user)


def _sorted_in_memory(path: Path, sequence: str, max_history: int | None, made: Recording) -> Recording:
    """A file in another order: its three columns are sorted in memory."""
    fresh = Recording(sources=made.sources, source=made.source, ids={"user": IdStatistics(), "item": IdStatistics()})
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for chunk in _chunks(path):
        parts.append(chunk)
        if sum(len(p[0]) for p in parts) > _SORTED_IN_MEMORY:
            raise UsageError(f"{path}: events are not in time order, and {_SORTED_IN_MEMORY:,} are the most that are sorted here; sort by timestamp")
    user, item, time = (np.concatenate([p[i] for p in parts]) for i in range(3))
    order = np.argsort(time, kind="stable")
    past = _Past()
    for first in range(0, len(order), CHUNK):
        rows = order[first:first + CHUNK]
        _add_events(fresh, past, sequence, max_history, user[rows], item[rows], time[rows])
    return fresh


class _Past:
    """Events of each user so far: in all, at the latest time, and before that time."""

    def __init__(self) -> None:
        self._users = np.zeros(0, dtype=np.int64)
        self._state = np.zeros((3, 0))

    def before(self, user: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Strictly earlier events of each event's user, `(n,)` int64; events ascend in time, over all calls."""
        keys, place = np.unique(user, return_inverse=True)
        known = self._rows(keys)
        count, latest, earlier = self._state[:, known]
        order = np.argsort(place, kind="stable")
        group, times = place[order], time[order]
        first = np.concatenate([[True], group[1:] != group[:-1]]) if len(group) else np.zeros(0, dtype=bool)
        starts = np.flatnonzero(first)
        sizes = np.diff(np.append(starts, len(group)))
        position = np.arange(len(group)) - np.repeat(starts, sizes)
        new_time = first | np.concatenate([[True], times[1:] != times[:-1]]) if len(group) else first
        since = np.maximum.accumulate(np.where(new_time, np.arange(len(group)), 0)) - np.repeat(starts, sizes) if len(group) else position
        tied = times == latest[group]
        found = np.where(tied, earlier[group], count[group] + since)
        ends = starts + sizes - 1
        self._state[:, known] = np.stack([count + sizes, times[ends], found[ends]]) if len(group) else self._state[:, known]
        answer = np.empty(len(user), dtype=np.int64)
        answer[order] = found.astype(np.int64)
        return answer

    def _rows(self, keys: np.ndarray) -> np.ndarray:
        """Columns of the state for these ascending users; new ones are added."""
        new = keys[~np.isin(keys, self._users, assume_unique=True)]
        if len(new):
            users = np.concatenate([self._users, new])
            state = np.concatenate([self._state, np.stack([np.zeros(len(new)), np.full(len(new), -np.inf), np.zeros(len(new))])], axis=1)
            order = np.argsort(users, kind="stable")
            self._users, self._state = users[order], state[:, order]
        return np.searchsorted(self._users, keys)


def _of_run(folder: Path, sequence: str) -> Recording:
    from planner.run import load_plan
    from planner.traces import read

    plan, _ = load_plan(folder)
    made = _of_source(plan, sequence)
    loads: dict[str, dict[str, list[float]]] = {}
    for path in sorted((folder / "traces").glob("*.json*")):
        trace = read(path)
        for step, counts in trace.meta.get("steps", {}).items():
            for name, value in counts.items():
                loads.setdefault(name, {}).setdefault(step, []).append(float(value))
        for region, values in trace.meta.get("activations", {}).items():
            if values["largest"] >= made.activations.get(region, {"largest": 0.0})["largest"]:
                made.activations[region] = values
    for name, by_step in loads.items():
        ratios = [max(v) / (sum(v) / len(v)) for v in by_step.values() if sum(v) > 0]
        made.rank_load[name] = (float(len(ratios)), float(sum(ratios)))
    if not loads:
        made.notes.append(f"{folder}: no traces, so no rank load and no activations; planner run {folder} --trace 5:8")
    return made


def _of_source(plan: Plan, sequence: str) -> Recording:
    source = plan.workload.source
    path = Path(source.path) if source.path else movielens_path() if source.kind == "movielens" else None
    if source.kind != "synthetic" and path is not None and path.is_file():
        made = _of_events(path, next((s.name for s in plan.model.sequences), sequence), source.max_history)
        made.source = {key: value for key, value in encode(source).items() if value is not None and key != "num_events"}
        return made
    note = "the run's stream is synthetic: its lengths are those that the workload states, not measured"
    made = Recording(sources=[plan.workload.name], notes=[note])
    for name, lengths in plan.workload.lengths.items():
        values, p = lengths.pmf()
        made.lengths[name] = {str(v): w for v, w in zip(values.tolist(), p.tolist()) if w > 0}
    return made


# --- files ---

def statistics_path(workload: Path) -> Path:
    """The sidecar of a recorded workload."""
    return workload.with_suffix(".stats.json")


def load(workload: Path) -> Recording:
    """A recording, to merge. Raises UsageError."""
    path = statistics_path(workload)
    try:
        body = json.loads(path.read_text())
        if body.get("schema_version") != SCHEMA_VERSION:
            raise UsageError(f"{path}: schema_version {body.get('schema_version')} is not {SCHEMA_VERSION}")
        fields = dict(body["recording"])
        for name in ("pooling", "rank_load"):
            fields[name] = {key: tuple(sums) for key, sums in fields[name].items()}
        fields["ids"] = {name: IdStatistics(ids=s["ids"], hashes=s["hashes"], distinct={k: tuple(v) for k, v in s["distinct"].items()})
                         for name, s in fields["ids"].items()}
        return Recording(**fields)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; only a workload that `planner record` wrote can be merged") from None
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a recording ({error})") from error


def save(made: Recording, out: Path, *, global_batch: int = 512, model: Model | None = None) -> list[Path]:
    """Writes the workload, a CSV of lengths per sequence and the sidecar; returns the paths."""
    out = out if out.suffix in (".yaml", ".yml") else out.with_suffix(".yaml")
    wanted = [s.name for s in model.sequences] if model is not None else list(made.lengths)
    names = [n for n in made.lengths if n in wanted] or list(made.lengths)
    written = [out, statistics_path(out)]
    lines = [f"# Recorded from {', '.join(made.sources)}: {made.samples:,} samples.", f"name: {out.stem}", f"global_batch: {global_batch}"]
    lines.append("lengths:")
    for name in names:
        path = out.with_name(f"{out.stem}-{name}.csv")
        write_text(path, _csv(made.lengths[name]))
        written.append(path)
        lines.append(f"  {name}: {{file: {path.name}}}")
    skew = zipf_by_table(made, model) if model is not None else {}
    if skew:
        lines.append("zipf: {" + ", ".join(f"{table}: {exponent:.3f}" for table, exponent in skew.items()) + "}")
    if made.source:
        lines.append("source: {" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in made.source.items()) + "}")
    write_text(out, "\n".join(lines) + "\n")
    body = {"schema_version": SCHEMA_VERSION, "summary": summary(made), "recording": encode(made)}
    write_text(written[1], json.dumps(body, allow_nan=False) + "\n")
    return written


def _csv(counts: dict[str, float]) -> str:
    values = np.array(sorted(map(int, counts)))
    weights = np.array([counts[str(v)] for v in values], dtype=np.float64)
    if len(values) > _MOST_VALUES:
        # runs of equal mass, each at its median: no cumulative share moves by more than 1 / _MOST_VALUES
        cumulative = np.cumsum(weights) / weights.sum()
        group = np.minimum((cumulative * _MOST_VALUES).astype(np.int64), _MOST_VALUES - 1)
        edges = np.flatnonzero(np.diff(group, prepend=-1))
        totals = np.add.reduceat(weights, edges)
        ends = np.append(edges[1:], len(values)) - 1
        values, weights = values[(edges + ends) // 2], totals
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("length", "weight"))
    writer.writerows(zip(values.tolist(), (f"{w:.10g}" for w in weights)))
    return text.getvalue()


def zipf_by_table(made: Recording, model: Model) -> dict[str, float]:
    """Exponents for the tables that a recorded column feeds: a column of the table's name, or of the last word of it."""
    found = {}
    for table in model.tables:
        column = table.name if table.name in made.ids else table.name.rsplit("_", 1)[-1]
        exponent = made.ids[column].zipf() if column in made.ids else None
        if exponent is not None:
            found[table.name] = round(exponent, 3)
    return found


def summary(made: Recording) -> dict[str, Any]:
    """What a reader wants to know, JSON-ready."""
    lengths = {}
    for name, counts in made.lengths.items():
        values = np.array(sorted(map(int, counts)))
        weights = np.array([counts[str(v)] for v in values], dtype=np.float64)
        cumulative = np.cumsum(weights) / weights.sum()
        lengths[name] = {"mean": float(values @ weights / weights.sum()), **{
            f"p{q}": int(values[min(np.searchsorted(cumulative, q / 100), len(values) - 1)]) for q in (10, 50, 90, 99)}, "max": int(values[-1])}
    return {
        "events": made.events, "samples": made.samples, "lengths": lengths,
        "ids": {n: {"ids": s.ids, "rows": s.rows, "zipf": s.zipf(), "unique_ratio": s.unique_ratio()} for n, s in made.ids.items()},
        "pooling": {n: ids / samples for n, (samples, ids) in made.pooling.items() if samples},
        "rank_load": {n: total / steps for n, (steps, total) in made.rank_load.items() if steps},
        "activation_outliers": {r: v["largest"] / v["rms"] for r, v in made.activations.items() if v.get("rms")}, "notes": made.notes}
