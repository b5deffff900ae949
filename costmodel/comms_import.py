"""Collective measurements from elsewhere: the text that nccl-tests prints, and CSV files with one measurement a row.

nccl-tests prints a header per program (`# nThread 1 nGpus 8 ...`, `# Collective test starting: all_gather_perf` in newer versions) and rows

    size  count  type  redop  root   time  algbw  busbw  #wrong   time  algbw  busbw  #wrong      (out of place, then in place; redop, root
    where they apply)

with `size` in bytes of the whole message (the gathered result, the scattered input, one rank's send buffer of an all-to-all), which is our
convention too (`costmodel.comms`), and `time` in microseconds. FSDP and the embedding exchange run out of place, so those columns are read.
"""
from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from costmodel.codec import suggest
from costmodel.comms_curves import transport_variant
from costmodel.ops import COLLECTIVES
from costmodel.samples import Sample

_PROGRAM = re.compile(r"\b(all_gather|reduce_scatter|all_reduce|alltoall)_perf\b")
_NAMES = {"alltoall": "all_to_all", **{kind: kind for kind in COLLECTIVES}}
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)", re.IGNORECASE)
_ROW = re.compile(r"^\s*\d+\s+\d+\s+\w+\s+\S+.*$")
_DTYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16"}
CSV_COLUMNS = ("collective", "group", "bytes", "seconds")


def parse_nccl_tests(text: str, *, collective: str | None = None) -> list[Sample]:
    """Samples of one nccl-tests log. `collective` is needed where the log does not name its program.

    Group size and hosts come from the `# Rank` lines. Raises ValueError naming the line when rows stand without a known program or ranks, or
    a row does
    not parse; rows that the program reports wrong are refused.
    """
    kind = collective
    hosts_of_rank: dict[int, str] = {}
    samples: list[Sample] = []
    rows_open = False
    for number, line in enumerate(text.splitlines(), start=1):
        program = _PROGRAM.search(line)
        if program:
            kind, rows_open = _NAMES[program.group(1)], False
        rank = _RANK.match(line)
        if rank:
            if rows_open:
                hosts_of_rank, rows_open = {}, False
            hosts_of_rank[int(rank.group(1))] = rank.group(2)
        if line.lstrip().startswith("#") or not _ROW.match(line):
            continue
        rows_open = True
        if kind is None:
            raise ValueError(f"line {number}: a measurement before any `*_perf` program name; say which collective it is")
        if kind not in COLLECTIVES:
            raise ValueError(f"collective {kind!r} is none of {', '.join(COLLECTIVES)}{suggest(kind, COLLECTIVES)}")
        if len(hosts_of_rank) < 2:
            raise ValueError(f"line {number}: a measurement before the `# Rank` lines; group size and hosts are unknown")
        samples.append(_row(number, line, kind, hosts_of_rank))
    if not samples:
        raise ValueError("no nccl-tests measurement found (rows of size, count, type, ..., time, algbw, busbw)")
    return samples


def _row(number: int, line: str, kind: str, hosts_of_rank: dict[int, str]) -> Sample:
    words = line.split()
    # size count type [redop root] then (time algbw busbw #wrong) once or twice; counted from the left, since `#wrong` may be missing.
    numeric = 3 + (2 if len(words) > 3 and not _is_number(words[3]) else 1 if len(words) in (8, 12) and _is_int(words[3]) else 0)
    try:
        size, microseconds = float(words[0]), float(words[numeric])
        wrong = words[numeric + 3] if len(words) > numeric + 3 else "0"
    except (IndexError, ValueError) as error:
        raise ValueError(f"line {number}: not an nccl-tests row: {line.strip()!r}") from error
    if wrong not in ("0", "N/A"):
        raise ValueError(f"line {number}: nccl-tests reports {wrong} wrong values at {words[0]} bytes; the measurement is void")
    if not (size > 0 and microseconds > 0):
        raise ValueError(f"line {number}: size and time must be > 0, got {words[0]} and {words[numeric]}")
    hosts = len(set(hosts_of_rank.values()))
    return Sample(op=kind, variant=transport_variant("nccl", hosts), phase="step", features={"bytes": size, "group": float(len(hosts_of_rank))},
                  dtype=_DTYPES.get(words[2], "fp32"), seconds=microseconds * 1e-6)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_int(word: str) -> bool:
    return word.lstrip("-").isdigit()


def parse_csv(text: str, *, transport: str = "nccl") -> list[Sample]:
    """Samples of a CSV with columns `collective, group, bytes, seconds` and optionally `hosts` (default 1), `transport`, `noise`.

    Raises ValueError naming the line and column.
    """
    reader = csv.DictReader(io.StringIO(text))
    missing = [c for c in CSV_COLUMNS if c not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; needed: {', '.join(CSV_COLUMNS)}")
    samples = []
    for number, row in enumerate(reader, start=2):
        kind = _NAMES.get(row["collective"])
        if kind is None:
            raise ValueError(f"line {number}: collective: {row['collective']!r} is unknown{suggest(row['collective'], _NAMES)}")
        values = {}
        for column in ("group", "bytes", "seconds", "hosts", "noise"):
            word = row.get(column) or {"hosts": "1", "noise": "0"}.get(column, "")
            if not _is_number(word) or not 0 <= float(word) < float("inf"):
                raise ValueError(f"line {number}: {column}: a number >= 0 is needed, not {word!r}")
            values[column] = float(word)
        try:
            samples.append(Sample(op=kind, variant=transport_variant(row.get("transport") or transport, int(values["hosts"])), phase="step",
                                  features={"bytes": values["bytes"], "group": values["group"]}, seconds=values["seconds"], noise=values["noise"]))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    if not samples:
        raise ValueError("no rows")
    return samples


def read_collectives(path: Path | str, *, collective: str | None = None) -> list[Sample]:
    """Samples of a file: CSV when it ends in `.csv`, else nccl-tests text. Raises ValueError naming file and line."""
    path = Path(path)
    try:
        text = path.read_text()
        return parse_csv(text) if path.suffix == ".csv" else parse_nccl_tests(text, collective=collective)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
