"""Answers of earlier searches, kept by the content of everything that they depend on.

    $PLANNER_STATE/searches/KEY.json    one SearchResult; KEY hashes scenario, calibration, gap, number of plans, source code and solver

An answer is kept when no limit of time cut it short: such a search repeats to the byte, so the kept answer is what searching again would give.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path

import costmodel
import planner
from costmodel.calibration import Calibration
from costmodel.codec import DecodeError, decode, encode
from costmodel.state import state_directory
from planner.files import replacing
from planner.scenario import ResolvedScenario
from planner.search import SearchResult

KEPT = 100
"""Answers kept; the ones used longest ago go first."""
_SOLVERS = ("numpy", "highspy", "pulp")


def answer_path(scenario: ResolvedScenario, calibration: Calibration | None, *, gap: float, top: int) -> Path:
    """Where the answer to a question is kept."""
    described = {f.name: getattr(scenario, f.name) for f in dataclasses.fields(scenario) if f.name not in ("path", "variants")}
    described["search"] = dataclasses.replace(scenario.search, time_limit=0.0, gap=gap, top=top)
    measured = (calibration.fingerprint, calibration.stale_kinds) if calibration is not None else None
    # the order of keys counts: of pins by glob the first that matches holds
    text = json.dumps([encode(described), encode(measured), code_version()])
    return state_directory() / "searches" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@functools.cache
def code_version() -> str:
    """Hash of the source of both packages that a search runs, and of the versions of what solves and adds up."""
    digest = hashlib.sha256(" ".join(f"{name} {importlib.metadata.version(name)}" for name in _SOLVERS).encode())
    for package in (costmodel, planner):
        root = Path(package.__file__).parent
        for file in sorted(f for f in root.rglob("*") if f.suffix in (".py", ".yaml")):
            digest.update(f"\n{file.relative_to(root.parent)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def recall(path: Path) -> SearchResult | None:
    """The answer kept at `path`; None when there is none, or the file is damaged."""
    try:
        found = decode(SearchResult, json.loads(path.read_text()))
        path.touch()
    except (OSError, ValueError, DecodeError):
        return None
    return dataclasses.replace(found, kept=str(path))


def keep(result: SearchResult, path: Path) -> None:
    """Keeps an answer that no limit cut short. Raises UsageError when the state directory cannot be written."""
    if result.certificate.status == "time_limit":
        return
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(encode(result), separators=(",", ":")))
    for old in sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
