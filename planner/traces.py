"""torch.profiler traces of a run, read event by event: what happened when on one rank, without holding the file in memory.

`read` keeps the complete events (`ph: X`) as columns. A trace that ends early is read up to there and says so; a file that is no trace is
refused. `runtime.tracing` writes `step:N`, `phase:NAME`, `region:NAME` and `recompute` annotations and the metadata key `planner`.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from planner.errors import UsageError

_CHUNK = 1 << 22
_LONGEST_HEADER = 1 << 24
_KEPT_ARGUMENTS = ("stream", "correlation", "Sequence number")
_GROUP_ARGUMENTS = ("Collective name", "Group size", "Process Group Description", "Process Group Ranks")


class TraceError(UsageError):
    """A file that is no torch.profiler trace."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Trace:
    """Complete events of one rank. Columns `(n,)`: ts [s, since the trace's base], dur [s], name, category, thread (codes into the lists of
    words), stream, correlation and sequence, which a forward op and its backward share (-1: none). groups: by event index, what a collective says
    of its process group.

    notes: what is wrong with the file, in words.
    """

    path: Path
    rank: int
    world_size: int
    host: str
    meta: dict[str, Any]
    ts: np.ndarray
    dur: np.ndarray
    name: np.ndarray
    category: np.ndarray
    thread: np.ndarray
    stream: np.ndarray
    correlation: np.ndarray
    sequence: np.ndarray
    names: list[str]
    categories: list[str]
    threads: list[str]
    groups: dict[int, dict[str, Any]]
    notes: tuple[str, ...] = ()

    def of_category(self, *wanted: str) -> np.ndarray:
        """Mask of the events of these categories."""
        return np.isin(self.category, [i for i, c in enumerate(self.categories) if c in wanted])

    def named(self, prefix: str) -> np.ndarray:
        """Mask of annotations and ops whose name begins with `prefix`."""
        return np.isin(self.name, [i for i, n in enumerate(self.names) if n.startswith(prefix)])

    def steps(self) -> list[tuple[int, float, float, int]]:
        """(number, begin, end, thread) of each `step:N`, or of each `ProfilerStep#N` of another trainer."""
        found = []
        mask = self.of_category("user_annotation")
        for prefix in ("step:", "ProfilerStep#"):
            for i in np.flatnonzero(mask & self.named(prefix)):
                number = self.names[self.name[i]].removeprefix(prefix)
                if number.isdigit():
                    found.append((int(number), float(self.ts[i]), float(self.ts[i] + self.dur[i]), int(self.thread[i])))
            if found:
                break
        return sorted(found)


class _Words:
    """Codes of texts in the order of their first appearance."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.codes.setdefault(text, len(self.codes))


def read(path: Path | str) -> Trace:
    """Reads a trace, plain or gzipped. Raises TraceError (no trace at all) and UsageError (cannot be opened)."""
    path = Path(path)
    names, categories, threads = _Words(), _Words(), _Words()
    columns: tuple[list[float], ...] = ([], [], [], [], [], [], [], [])
    groups: dict[int, dict[str, Any]] = {}
    try:
        with _open(path) as stream:
            source = _Source(stream)
            header = source.header(path)
            for event in source.events():
                if event.get("ph") != "X" or "dur" not in event or "ts" not in event:
                    continue
                arguments = event.get("args") or {}
                if "Group size" in arguments or "Process Group Ranks" in arguments:
                    groups[len(columns[0])] = {key: arguments[key] for key in _GROUP_ARGUMENTS if key in arguments}
                values = (float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6, names(str(event.get("name", ""))),
                          categories(str(event.get("cat", ""))), threads(f"{event.get('pid')}/{event.get('tid')}"),
                          *(_whole(arguments.get(key)) for key in _KEPT_ARGUMENTS))
                for column, value in zip(columns, values):
                    column.append(value)
            footer, notes = source.footer()
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from error
    meta = {**header, **footer}
    distributed = meta.get("distributedInfo") or {}
    own = meta.get("planner") or {}
    if not columns[0]:
        raise TraceError(f"{path}: a trace without a single complete event" + (f"; {notes[0]}" if notes else ""))
    floats = [np.array(c, dtype=np.float64) for c in columns[:2]]
    codes = [np.array(c, dtype=np.int64) for c in columns[2:]]
    rank, world = (int(own.get(key, distributed.get(key, default))) for key, default in (("rank", 0), ("world_size", 1)))
    return Trace(path=path, rank=rank, world_size=world, host=str(meta.get("host_name", "")), meta=own, ts=floats[0], dur=floats[1], name=codes[0],
                 category=codes[1], thread=codes[2], stream=codes[3], correlation=codes[4], sequence=codes[5], names=list(names.codes),
                 categories=list(categories.codes), threads=list(threads.codes), groups=groups, notes=tuple(f"{path.name}: {note}" for note in notes))


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) or (isinstance(value, str) and value.isdigit()) else -1


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else path.open("rb")  # type: ignore[return-value]


class _Source:
    """A trace's text in a sliding buffer: the header up to `traceEvents`, the events, what follows."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._decode = stream, codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._at, self._ended, self._cut = "", 0, False, ""
        self._decoder = json.JSONDecoder()

    def _more(self) -> bool:
        if self._ended:
            return False
        try:
            data = self._stream.read(_CHUNK)
        except EOFError:
            data, self._cut = b"", "the compressed file ends early"
        self._ended = not data
        self._text = self._text[self._at:] + self._decode.decode(data, final=self._ended)
        self._at = 0
        return not self._ended

    def header(self, path: Path) -> dict[str, Any]:
        """What precedes the events; a bare list of events has none."""
        self._more()
        start = self._text.lstrip()[:1]
        if start == "[":
            self._at = self._text.index("[") + 1
            return {}
        place, opening = -1, -1
        while opening < 0:
            place = self._text.find('"traceEvents"')
            opening = self._text.find("[", place) if place >= 0 else -1
            if len(self._text) > _LONGEST_HEADER or (opening < 0 and not self._more()):
                break
        if start != "{" or opening < 0:
            raise TraceError(f"{path}: not a torch.profiler trace (JSON with `traceEvents` is needed)")
        try:
            header = json.loads(self._text[:place].rstrip().rstrip(",") + "}")
        except json.JSONDecodeError as error:
            raise TraceError(f"{path}: not a torch.profiler trace ({error.msg} at {error.pos} before `traceEvents`)") from error
        self._at = opening + 1
        return header

    def events(self) -> Iterator[dict[str, Any]]:
        """Events until the list or the file ends."""
        count = 0
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            self._at = at
            if at < len(text) and text[at] == "]":
                self._at += 1
                return
            try:
                event, self._at = self._decoder.raw_decode(text, at)
            except json.JSONDecodeError:
                if self._more():
                    continue
                self._cut = self._cut or "truncated"
                self._cut += f" after {count} events; those are shown"
                return
            count += 1
            if isinstance(event, dict):
                yield event

    def footer(self) -> tuple[dict[str, Any], list[str]]:
        """Keys after the events, and notes."""
        while self._more():
            pass
        if self._cut:
            return {}, [self._cut]
        rest = self._text[self._at:].strip()
        if not rest or rest == "}":
            return {}, []
        try:
            return json.loads("{" + rest.lstrip(",")), []
        except json.JSONDecodeError:
            return {}, ["what follows the events is damaged"]
