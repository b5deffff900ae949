"""Run the families and write their rows as they come."""

import argparse
import dataclasses
import importlib
import json
import pkgutil
import shlex
import sys
import time
from pathlib import Path

import torch

import benchmarks.kernels
from benchmarks import results
from benchmarks.kernels._tried import tried

NAME = "kernels-h200"
TITLE = "Kernels on one H200"
INTRO = """TFLOPS count true query-key pairs: forward 4 H D sum(Lq Lk), backward 2.5 times that, causal half. Shares are of the copy rate,
measured in the same run, with every input read once and every output written once. Times are medians; host launch time is kept out
by CUDA graphs of up to ten calls (2 ms), except in the backward of attention's peers. A peer's figure was measured in the same run where the
note says so, else it is the one of the same shape on another lent H200 (torch 2.11, triton 3.6, 2026-11-29)."""


def families() -> dict:
    """Modules of this package that define `measure`, by name."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.kernels.__path__) if not module.name.startswith("_")]
    modules = {name: importlib.import_module(f"benchmarks.kernels.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "measure")}


def earlier_peers(row: dict | None, now: dict[str, float]) -> dict[str, float]:
    """Figures of peers that an earlier call ran beside a row and this one does not, with the day it did."""
    here = " (this run)"
    return {
        f"{name.removesuffix(here)} ({row['date'][:10]})": value
        for name, value in (row["peers"] if row else {}).items() if name.endswith(here) and name not in now
    }  # fmt: skip


def report(out: Path) -> int:
    """The files once more from the rows they hold, each with its own date and commit; exit code 4 if a target is missed."""
    document = json.loads((out / f"{NAME}.json").read_text())
    names = [field.name for field in dataclasses.fields(results.Row)]
    rows = [(row, results.Row(**{name: row[name] for name in names})) for row in document["rows"]]
    for stamp, row in rows:
        measured = {"date": stamp["date"], "commit": stamp["commit"], "environment": document["environment"]}
        row = dataclasses.replace(row, note=tried(row.name, row.passed, row.note))
        results.write(NAME, [row], command=document["command"], title=TITLE, intro=INTRO, resume=True, out=out, measured=measured)
    return 4 if any(row.passed is False for _, row in rows) else 0


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; exit code 4 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help=f"families to run: {', '.join(families())}")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the result file has already")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="with --resume: measure rows again whose names begin so")
    parser.add_argument("--report", action="store_true", help="measure nothing: write the files anew, with what was tried where targets are missed")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further row after so long")
    options = parser.parse_args(arguments)
    chosen = families()
    unknown = set(options.only or []) - set(chosen)
    if unknown:
        parser.error(f"unknown family {', '.join(sorted(unknown))}; known: {', '.join(chosen)}")
    if options.report:
        return report(options.out)
    if not torch.cuda.is_available():
        print("benchmarks.kernels measures CUDA kernels and found no CUDA device", file=sys.stderr)
        return 6
    command = shlex.join(["python", "-m", "benchmarks.kernels", *(arguments if arguments is not None else sys.argv[1:])])
    path, started, missed = options.out / f"{NAME}.json", time.monotonic(), 0
    existing = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {row["name"] for row in existing if not row["name"].startswith(tuple(options.again))} if options.resume else set()
    earlier = {row["name"]: row for row in existing} if options.resume else {}
    for family, module in chosen.items():
        if options.only and family not in options.only:
            continue
        for row in module.measure(done):
            row = dataclasses.replace(row, peers={**earlier_peers(earlier.get(row.name), row.peers), **row.peers})
            row = dataclasses.replace(row, note=tried(row.name, row.passed, row.note))
            missed += row.passed is False
            # rows of other families stay in the file: each is stamped with the date and commit of its own measurement
            results.write(NAME, [row], command=command, title=TITLE, intro=INTRO, resume=True, out=options.out)
            print(f"{row.name}: {row.value:.4g} {row.unit} (target {row.target}, aim {row.aim})", file=sys.stderr, flush=True)
            if time.monotonic() - started > options.seconds:
                print("time is up; --resume goes on from here", file=sys.stderr)
                return 6
    return 4 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
