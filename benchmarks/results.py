"""The one result schema of every benchmark: `docs/results/NAME.json` beside a readable `NAME.md`.

`target` is the least that is asked, `aim` the ambition; `passed` is None where there is no target. `write(resume=True)` merges rows by name, so that
long benchmarks can be run in several calls.
"""
from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from costmodel.calibration import Calibration, load

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `peers` maps a peer's name to its figure in the same unit; `better` is "higher" or "lower"."""

    name: str
    value: float | None
    unit: str
    target: float | None = None
    aim: float | None = None
    better: str = "higher"
    peers: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = "measured here"

    @property
    def passed(self) -> bool | None:
        """Whether the target holds; None without a target. A figure that could not be had fails its target."""
        if self.target is None:
            return None
        if self.value is None:
            return False
        return self.value >= self.target if self.better == "higher" else self.value <= self.target

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


def commit() -> str:
    """The short commit of the checkout, with `+` when the tree differs from it; `PLANNER_COMMIT` where it is set, as in a copy without its git."""
    if os.environ.get("PLANNER_COMMIT"):
        return os.environ["PLANNER_COMMIT"]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True).stdout
        return head + ("+" if dirty.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> dict[str, str]:
    """Device, driver and versions that a figure was measured on."""
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "-"

    device, driver = "cpu", "-"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
        driver = _driver()
    return {
        "device": device, "driver": driver, "torch": version("torch"), "triton": version("triton"),
        "cpu": f"{_cpu_name()} ({os.cpu_count()} cores)", "python": platform.python_version(),
    }


@functools.cache
def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "-"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def stamped() -> dict[str, Any]:
    """When, from which commit and where something is measured here and now."""
    return {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "commit": commit(), "environment": environment()}


def everything(row: dict[str, Any]) -> dict[str, Any]:
    """Keeps a row."""
    return row


def write(name: str, rows: list[Row], *, command: str, title: str, intro: str = "", resume: bool = False,
          out: Path | str = "docs/results", measured: dict[str, Any] | None = None,
          keep: Callable[[dict[str, Any]], dict[str, Any] | None] = everything, stamps: dict[str, dict[str, str]] | None = None) -> Path:
    """Writes `out/NAME.json` and `out/NAME.md`; with `resume`, rows of an earlier file that this call did not measure are kept in their places, or
    behind the others as what `keep` makes of them (None: dropped). `measured`: the `stamped()` of rows that were not measured here and now;
    `stamps`: date and commit of single rows by name."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    where = measured or stamped()
    stamp = {name: where[name] for name in ("date", "commit")}
    path = out / f"{name}.json"
    merged: dict[str, dict[str, Any]] = {}
    if resume and path.exists():
        merged = {row["name"]: row for row in map(keep, json.loads(path.read_text())["rows"]) if row is not None}
    fresh = {row.name: {**row.to_json(), **stamp, **(stamps or {}).get(row.name, {})} for row in rows}
    merged = merged | fresh if keep is everything else fresh | {name: row for name, row in merged.items() if name not in fresh}
    document = {"schema_version": SCHEMA_VERSION, "command": command, **stamp, "environment": where["environment"], "rows": list(merged.values())}
    for target, text in ((path, json.dumps(document, indent=1) + "\n"), (out / f"{name}.md", _markdown(title, intro, document))):
        temporary = target.with_suffix(target.suffix + ".tmp")
        temporary.write_text(text)
        temporary.replace(target)
    return path


def _markdown(title: str, intro: str, document: dict[str, Any]) -> str:
    env = document["environment"]
    where = f"{env['device']}, driver {env['driver']}, torch {env['torch']}, triton {env['triton']}, {env['cpu']}"
    lines = [f"# {title}", "", f"`{document['command']}` on {document['date']}, commit {document['commit']}; {where}.", ""]
    if intro:
        lines += [intro.strip(), ""]
    lines += ["| what | value | unit | target | aim | holds | peers | note |", "|---|---|---|---|---|---|---|---|"]
    for row in document["rows"]:
        peers = ", ".join(f"{peer} {_number(value)}" for peer, value in row["peers"].items())
        holds = {None: "", True: "yes", False: "**no**"}[row["passed"]]
        below = [p for p, v in row["peers"].items()
                 if row["value"] is not None and (row["value"] < v if row["better"] == "higher" else row["value"] > v)]
        note = row["note"] + (f"; below peer: {', '.join(below)}" if below else "")
        lines.append(f"| {row['name']} | {_number(row['value'])} | {row['unit']} | {_number(row['target'])} | {_number(row['aim'])} | {holds} "
                     f"| {peers} | {note} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def refuse(text: str) -> NoReturn:
    """Ends the process as a command does that makes no sense here or was given an invalid file: what is wrong, exit code 2."""
    print(text, file=sys.stderr)
    raise SystemExit(2)


def calibration_of(path: Path, *, device: str | None = None) -> Calibration:
    """The calibration in a file that a command line names; without one, with a damaged one or, given `device`, with another's, exit code 2."""
    try:
        return load(path, device=device)
    except FileNotFoundError:
        refuse(f"{path}: no such file; --calibration names one, --stage calibrate makes one where there is a GPU")
    except (OSError, ValueError) as error:
        refuse(str(error))
