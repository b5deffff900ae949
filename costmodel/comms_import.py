"""Collective measurements from elsewhere: the text that nccl-tests prints, and CSV files with one measurement a row.

nccl-tests prints a header per program (`# nThread 1 nGpus 8 ...`, `# Collective test starting: all_gather_perf` in newer versions) and rows

    size  count  type  redop  root   time  algbw  busbw  #wrong   time  algbw  busbw  #wrong      (out of place, then in place; redop, root
    where they apply)

with `size` in bytes of the whole message (the gathered result, the scattered input, one rank's send buffer of an all-to-all), which is our
convention too (`costmodel.comms`), and `time` in microseconds. FSDP and the embedding exchange run out of place, so those columns are read.
Where the last one is headed `error`, as before 2.11, it holds the largest difference instead of a count of wrong values. A message so small that
nothing is left of it for each rank stands there as 0 bytes, which says nothing and is passed over.
"""
from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

from costmodel.codec import suggest
from costmodel.comms_curves import transport_variant
from costmodel.contention import TRANSPORTS
from costmodel.ops import COLLECTIVES
from costmodel.samples import Sample

_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_NAMES = {"alltoall": "all_to_all", **{kind: kind for kind in COLLECTIVES}}
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)", re.IGNORECASE)
_ROW = re.compile(r"^\s*\d+\s+\d+\s+\w+\s+\S+.*$")
_HEADER = re.compile(r"^#\s+size\s+count\s+type\b.*\bbusbw\s+(#wrong|error)\b")
_DTYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16"}
CSV_COLUMNS = ("collective", "group", "bytes", "seconds")
_CSV_MORE = ("hosts", "transport", "noise")
_TRANSPORTS = ("gloo", *TRANSPORTS)


def parse_nccl_tests(text: str, *, collective: str | None = None) -> list[Sample]:
    """Samples of one nccl-tests log. `collective` is needed where the log does not name its program.

    Group size and hosts come from the `# Rank` lines. Raises ValueError naming the line when rows stand without a known program or ranks, are of a
    program that measures another operation, or a row does not parse or was cut off; rows that the program reports wrong are refused.
    """
    kind = collective
    hosts_of_rank: dict[int, str] = {}
    samples: list[Sample] = []
    rows_open, counts_wrong = False, True
    for number, line in enumerate(text.splitlines(), start=1):
        program = _PROGRAM.search(line)
        if program:
            kind, rows_open = _NAMES.get(program.group(1), program.group(0)), False
        header = _HEADER.match(line)
        if header:
            counts_wrong = header.group(1) == "#wrong"
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
            raise ValueError(f"line {number}: collective {kind!r} is none of {', '.join(COLLECTIVES)}{suggest(kind, COLLECTIVES)}")
        if len(hosts_of_rank) < 2:
            raise ValueError(f"line {number}: a measurement before the `# Rank` lines; group size and hosts are unknown")
        sample = _row(number, line, kind, hosts_of_rank, counts_wrong=counts_wrong)
        samples += [sample] if sample is not None else []
    if not samples:
        raise ValueError("no nccl-tests measurement found (rows of size, count, type, ..., time, algbw, busbw)")
    return samples


def _row(number: int, line: str, kind: str, hosts_of_rank: dict[int, str], *, counts_wrong: bool) -> Sample | None:
    """The sample of one row, None of 0 bytes. counts_wrong: whether the column behind the rates counts wrong values."""
    words = line.split()
    # size count type [redop root] then (time algbw busbw #wrong) once or twice; counted from the left, since `#wrong` may be missing.
    numeric = 3 + (1 if len(words) > 3 and not _is_number(words[3]) else 0)
    if len(words) in (numeric + 5, numeric + 9) and _is_int(words[numeric]):
        numeric += 1  # root
    try:
        size, microseconds, rate, _ = float(words[0]), *(float(word) for word in words[numeric:numeric + 3])
    except ValueError as error:
        raise ValueError(f"line {number}: not a whole nccl-tests row: {line.strip()!r}") from error
    if size == 0:
        return None
    wrong = words[numeric + 3] if counts_wrong and len(words) > numeric + 3 else "0"
    if wrong != "N/A" and not (_is_number(wrong) and float(wrong) == 0):
        raise ValueError(f"line {number}: nccl-tests reports {wrong} wrong values at {words[0]} bytes; the measurement is void")
    if not (0 < microseconds < math.inf and size < math.inf):
        raise ValueError(f"line {number}: size and time must be finite and > 0, got {words[0]} and {words[numeric]}")
    # time and rate are printed with two decimals each and say the same, or one of them is not what this row measured
    if abs(size / microseconds / 1e3 - rate) > 0.006 + 0.05 * rate + 0.006 * rate / microseconds:
        raise ValueError(f"line {number}: {words[0]} bytes in {words[numeric]} us are {size / microseconds / 1e3:.2f} GB/s, not {words[numeric + 1]}")
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
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
    header = reader.fieldnames or ()
    missing = [c for c in CSV_COLUMNS if c not in header]
    if missing:
        raise ValueError(f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; needed: {', '.join(CSV_COLUMNS)}")
    if unknown := [c for c in header if c not in (*CSV_COLUMNS, *_CSV_MORE)]:
        raise ValueError(f"line 1: column {unknown[0]!r} is unknown{suggest(unknown[0], (*CSV_COLUMNS, *_CSV_MORE))}")
    samples = []
    for number, row in enumerate(reader, start=2):
        if None in row:
            raise ValueError(f"line {number}: more cells than the header has")
        kind = _NAMES.get(row["collective"])
        if kind is None:
            raise ValueError(f"line {number}: collective: {row['collective']!r} is unknown{suggest(row['collective'] or '', _NAMES)}")
        carrier = row.get("transport") or transport
        if carrier not in _TRANSPORTS:
            raise ValueError(f"line {number}: transport: {carrier!r} is none of {', '.join(_TRANSPORTS)}{suggest(carrier, _TRANSPORTS)}")
        count, hosts = _cell(number, row, "group", least=2, whole=True), _cell(number, row, "hosts", least=1, whole=True, default=1.0)
        if count % hosts:
            raise ValueError(f"line {number}: hosts: a group of {count:g} does not divide over {hosts:g} hosts")
        samples.append(Sample(op=kind, variant=transport_variant(carrier, int(hosts)), phase="step",
                              features={"bytes": _cell(number, row, "bytes"), "group": count}, seconds=_cell(number, row, "seconds"),
                              noise=_cell(number, row, "noise", least=0.0, default=0.0)))
    if not samples:
        raise ValueError("no rows")
    return samples


def _cell(number: int, row: dict[str, str | None], column: str, *, least: float | None = None, whole: bool = False,
          default: float | None = None) -> float:
    """A number of a row: finite, > 0 or at least `least`, an integer where `whole`; `default` where the cell is empty."""
    word = row.get(column) or ""
    if not word and default is not None:
        return default
    value = float(word) if _is_number(word) else math.nan
    if not (value > 0 if least is None else value >= least) or value == math.inf or (whole and value % 1):
        raise ValueError(f"line {number}: {column}: {'an integer' if whole else 'a finite number'} {'> 0' if least is None else f'>= {least:g}'} "
                         f"is needed, not {word!r}")
    return value


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
