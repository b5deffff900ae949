"""Bundled devices, clusters, models, workloads and scenarios, by name; files of the user's own, by path.

A name is looked up beside the file that mentions it first (`clusters/NAME.yaml`, `models/...`), then in what ships with the planner.
"""

from __future__ import annotations

from pathlib import Path

import costmodel
from costmodel.codec import suggest

KINDS = ("clusters", "models", "workloads", "devices")
_PACKAGE = Path(costmodel.__file__).resolve().parent
_SCENARIOS = _PACKAGE.parent / "scenarios"


def folder(kind: str) -> Path:
    """Where bundled files of `kind` (`clusters`, `models`, `workloads`, `devices`, `scenarios`) are."""
    if kind == "devices":
        return _PACKAGE / "devices"
    return _SCENARIOS if kind == "scenarios" else _SCENARIOS / kind


def names(kind: str) -> list[str]:
    """Names of the bundled files of `kind`, sorted."""
    return sorted(p.stem for p in folder(kind).glob("*.yaml"))


def find(kind: str, reference: str, mentioned_in: Path) -> Path:
    """The file that `reference` means: a path (it has a `/` or ends in .yaml), relative to the mentioning file, or a name. Raises ValueError."""
    if "/" in reference or reference.endswith((".yaml", ".yml")):
        path = Path(reference).expanduser()
        path = path if path.is_absolute() else mentioned_in.parent / path
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        return path
    for base in (mentioned_in.parent / kind, mentioned_in.parent.parent / kind, folder(kind)):
        if (base / f"{reference}.yaml").is_file():
            return base / f"{reference}.yaml"
    known = names(kind)
    raise ValueError(f"no {kind[:-1]} named {reference!r}{suggest(reference, known)}; bundled: {', '.join(known) or 'none'}")


def scenario_path(reference: str) -> Path:
    """A scenario's file by path, or a bundled one by name. Raises ValueError."""
    path = Path(reference)
    if path.is_file():
        return path
    bundled = folder("scenarios") / f"{path.stem}.yaml"
    if path.parent == Path(".") and path.suffix == "" and bundled.is_file():
        return bundled
    known = names("scenarios")
    hint = suggest(path.stem, known) or f"; bundled: {', '.join(known)}"
    raise ValueError(f"{reference}: no such scenario file{hint}")
