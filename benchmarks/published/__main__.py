"""Predicts published measurements: `python -m benchmarks.published [FILE.csv ...]` (default: the tables of benchmarks/published).

Every row comes from the datasheet of its device and the nearest calibration (utilisations carry over by the datasheets' ratio); nothing is fitted to
the rows. Rows of one configuration are one point, their median. Against each point stands the best that one constant could do: the TFLOP/s (or
bytes/s) whose median error over these very points is the least. Rows that cannot be expressed are listed with the reason.

docs/published.md has the schema. Exit codes: 0, 2 for a file that breaks the schema (every fault is printed), 4 for a missed target.
"""
from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.published.predict import CALIBRATIONS, NotExpressible, Predicted, calibrations, predict
from benchmarks.published.table import Published, TableError, read
from benchmarks.results import Row, write

FOLDER = Path(__file__).parent
TARGET, BETTER_BY = 0.15, 1 / 3
_CONSTANTS = np.geomspace(1e9, 1e17, 20001)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration: the rows that measured it, their median [s], and its prediction."""

    rows: tuple[Published, ...]
    predicted: Predicted

    @property
    def first(self) -> Published:
        return self.rows[0]

    @property
    def measured(self) -> float:
        return statistics.median(r.seconds for r in self.rows)

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted.seconds / self.measured - 1.0

    @property
    def memory_error(self) -> float | None:
        peaks = [r.peak_memory for r in self.rows if r.peak_memory is not None]
        if not peaks or self.predicted.reserved is None:
            return None
        return self.predicted.reserved / statistics.median(peaks) - 1.0


def score(rows: Sequence[Published], known) -> tuple[list[Point], list[tuple[Published, str]]]:
    """(points in the order of their first rows, rows that cannot be expressed with the reason)."""
    grouped: dict[tuple, list[Published]] = defaultdict(list)
    for row in rows:
        grouped[row.configuration].append(row)
    points, left = [], []
    for alike in grouped.values():
        try:
            points.append(Point(rows=tuple(alike), predicted=predict(alike[0], known)))
        except NotExpressible as reason:
            left += [(row, str(reason)) for row in alike]
    return points, left


def best_constant(points: Sequence[Point], what: str) -> tuple[float, float]:
    """(the constant rate, its median |error|) that predicts the points best, from their FLOPs or bytes over one rate."""
    work = np.array([getattr(p.predicted, what) for p in points])
    measured = np.array([p.measured for p in points])
    rates = np.concatenate([_CONSTANTS, (work / measured)[work > 0]])
    errors = np.median(np.abs(work / measured / rates[:, None] - 1.0), axis=1)
    return float(rates[errors.argmin()]), float(errors.min())


def report(points: Sequence[Point], left: Sequence[tuple[Published, str]], alone: Sequence[Point] = ()) -> list[Row]:
    """Summary first, then every point, then what cannot be expressed. alone: the same points from their datasheets alone."""
    rows: list[Row] = []
    for kind in ("step", "kernel"):
        some = [p for p in points if p.first.kind == kind]
        if some:
            rows += _summary(kind, some)
        errors = [abs(p.error) for p in alone if p.first.kind == kind]
        if errors:
            rows.append(Row(name=f"{kind} time, datasheets alone: median |error|", value=float(np.median(errors)), unit="relative", better="lower",
                            note=f"without any calibration; p90 {np.quantile(errors, 0.9):.3f}, worst {max(errors):.3f}"))
    remembered = [abs(p.memory_error) for p in points if p.memory_error is not None]
    if remembered:
        rows.append(Row(name="peak memory: median |error|", value=float(np.median(remembered)), unit="relative", better="lower",
                        note=f"{len(remembered)} points; what the allocator reserves, predicted against the peak that the source prints"))
    for p in points:
        memory = "" if p.memory_error is None else f", memory {p.memory_error:+.1%}"
        many = f"median of {len(p.rows)} rows" if len(p.rows) > 1 else "1 row"
        rows.append(Row(name=f"{p.first.kind} {p.first.id}", value=p.error, unit="relative error", better="lower",
                        note=f"predicted {p.predicted.seconds * 1e3:.4g} ms [{p.predicted.low * 1e3:.4g}, {p.predicted.high * 1e3:.4g}] "
                             f"({p.predicted.source}{', ' + p.predicted.limiting if p.predicted.limiting else ''}), published {p.measured * 1e3:.4g} "
                             f"ms, {many}{memory} | published: {p.first.source}"))
    rows += [Row(name=f"not expressible: {row.id}", value=None, unit="-", note=f"{row.where.rsplit('/', 1)[-1]}: {reason} | published: {row.source}")
             for row, reason in left]
    return rows


def _summary(kind: str, points: list[Point]) -> list[Row]:
    errors = np.abs([p.error for p in points])
    median = float(np.median(errors))
    constants = {what: best_constant(points, what) for what in ("flops", "num_bytes")}
    what, (rate, least) = min(constants.items(), key=lambda item: item[1][1])
    unit = "TFLOP/s" if what == "flops" else "TB/s"
    steps = kind == "step"
    note = f"{len(points)} configurations, {sum(len(p.rows) for p in points)} rows"
    found = [
        Row(name=f"{kind} time: median |error|", value=median, unit="relative", target=TARGET if steps else None, better="lower",
            peers={"best constant": least}, note=note),
        Row(name=f"{kind} time: p90 |error|", value=float(np.quantile(errors, 0.9)), unit="relative", better="lower", note=note),
        Row(name=f"{kind} time: worst |error|", value=float(errors.max()), unit="relative", better="lower", note=note),
        Row(name=f"{kind} time: bias", value=float(np.mean([p.error for p in points])), unit="relative", better="lower", note="mean signed error"),
        Row(name=f"{kind} time: inside the 90 % interval", value=float(np.mean([p.predicted.low <= p.measured <= p.predicted.high for p in points])),
            unit="share", note=note),
    ]
    if len(points) > 1:
        found.append(Row(name=f"{kind} time: error over that of the best constant", value=median / least if least > 0 else None, unit="x",
                         target=1 - BETTER_BY if steps else None, better="lower",
                         note=f"best constant {rate / 1e12:.4g} {unit}, chosen on these very points: median |error| {least:.3f}"))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv")
    parser.add_argument("--calibrations", type=Path, default=CALIBRATIONS, help="folder of calibrations (default: those that are committed)")
    parser.add_argument("--datasheet", action="store_true", help="no calibration: rooflines only")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args(argv)
    files = args.files or sorted(p for p in FOLDER.glob("*.csv") if not p.name.startswith("nccl_"))
    try:
        rows = _read_all(files)
        known = [] if args.datasheet else calibrations(args.calibrations)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    points, left = score(rows, known)
    for row, reason in left:
        print(f"not expressible: {row.where}: {row.id}: {reason}", file=sys.stderr)
    if not points:
        print("no row can be predicted", file=sys.stderr)
        return 2
    found = report(points, left, score(rows, [])[0] if known else ())
    names = ", ".join(c.environment.device_name for c in known) or "none: every figure is a roofline"
    command = "python -m benchmarks.published" + "".join(f" {p.name}" for p in args.files) + (" --datasheet" if args.datasheet else "")
    path = write("published", found, command=command, title="Other people's measurements", out=args.out,
                 intro=re.sub(r"\s+", " ", __doc__.split("\n\n")[1]) + f"\n\nCalibrations: {names}.")
    for row in found[:15]:
        if row.name.startswith(("step time", "kernel time", "peak memory")) and row.value is not None:
            print(f"{row.name}: {row.value:.4f}" + ("" if row.passed is None else " ok" if row.passed else " MISSED"))
    print(path)
    return 4 if any(row.passed is False for row in found) else 0


def _read_all(files: Sequence[Path]) -> list[Published]:
    rows, faults = [], []
    for file in files:
        try:
            rows += read(file)
        except TableError as error:
            faults += error.faults
    if faults:
        raise TableError(faults)
    return rows


if __name__ == "__main__":
    sys.exit(main())
