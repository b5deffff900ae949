"""`planner doctor`: what this machine can do, which torch build it has, and what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from typing import Literal

from costmodel import units
from costmodel.state import movielens_path, state_directory
from planner import machine
from planner.calibrate import calibration_path

State = Literal["ok", "missing", "note"]
# Asked of torch in a process of its own, for the planner never imports it.
_TORCH_PROBE = """
import json, torch
import torch.distributed as d
print(json.dumps({"cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "gloo": d.is_gloo_available(), "nccl": d.is_nccl_available()}))
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. `remedy`: the command or step that would change a `missing`."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def examine() -> list[Check]:
    """All checks, in the order in which they matter."""
    return [
        _python(),
        *_torch(),
        _package("triton", "kernels on a GPU; their CPU paths work without"),
        _package("highspy", "the solver of the search"),
        _cores(),
        _gpus(),
        _launch(),
        _state_directory(),
        _calibration(),
        _movielens(),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    good = sys.version_info >= (3, 11)
    return Check(
        name="Python",
        state="ok" if good else "missing",
        detail=f"{sys.version.split()[0]} ({sys.executable})",
        remedy="" if good else "Python >= 3.11 is needed",
    )


def _package(name: str, what: str) -> Check:
    version = _version(name)
    return Check(
        name=name, state="ok" if version else "missing", detail=version or f"not installed: {what}", remedy="" if version else f"pip install {name}"
    )


def _torch() -> list[Check]:
    version = _version("torch")
    if version is None:
        return [
            Check(
                name="torch",
                state="missing",
                detail="not installed: estimate, search and whatif work, calibrate and run do not",
                remedy="pip install -c constraints.txt -e '.[runtime]'",
            )
        ]
    answer = subprocess.run([sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=300, check=False)
    if answer.returncode != 0:
        words = answer.stderr.strip().splitlines()
        return [Check(name="torch", state="missing", detail=f"{version} cannot be imported: {words[-1] if words else ''}", remedy="reinstall torch")]
    facts = json.loads(answer.stdout.strip().splitlines()[-1])
    build = f"CUDA {facts['cuda']} build" if facts["cuda"] else "CPU build"
    backends = [name for name in ("gloo", "nccl") if facts[name]]
    return [
        Check(name="torch", state="ok", detail=f"{version}, {build}, {facts['gpus']} GPU(s) usable"),
        Check(
            name="collectives",
            state="ok" if backends else "missing",
            detail=", ".join(backends) or "neither gloo nor nccl",
            remedy="" if backends else "a torch build with distributed support",
        ),
    ]


def _cores() -> Check:
    cores, memory = machine.num_cores(), machine.memory_bytes()
    peak = units.show(machine.peak_flops()["fp32"], "FLOP/s")
    detail = (
        f"{cores} cores of {machine.cpu_name()}: {peak} fp32 a core at most, {units.show(machine.memory_bandwidth(), 'bytes/s')} copied; "
        f"{units.show_gib(memory)} of memory"
    )
    return Check(
        name="cores",
        state="ok" if cores >= 2 else "note",
        detail=detail,
        remedy="" if cores >= 2 else "two ranks will share one core: times will be off",
    )


def _gpus() -> Check:
    found = machine.gpus()
    return Check(name="GPUs", state="ok" if found else "note", detail=", ".join(found) or "none (nvidia-smi): plans for GPUs are predicted, not run")


def _launch() -> Check:
    from costmodel import launch

    tunables = launch.allocator()
    return Check(
        name="allocator",
        state="ok" if tunables else "note",
        detail=" ".join(f"{k}={v}" for k, v in tunables.items()) or "not glibc: freed memory goes back to the kernel as it likes",
    )


def _state_directory() -> Check:
    path = state_directory()
    parent = path
    while not parent.exists():
        parent = parent.parent
    writable = os.access(parent, os.W_OK)
    free = units.show(shutil.disk_usage(parent).free, "bytes")
    return Check(
        name="state",
        state="ok" if writable else "missing",
        detail=f"{path} ({free} free)" + ("" if writable else ", not writable"),
        remedy="" if writable else "set PLANNER_STATE to a folder that can be written",
    )


def _calibration() -> Check:
    path = calibration_path(machine.device_name())
    return Check(
        name="calibration",
        state="ok" if path.is_file() else "missing",
        detail=str(path) if path.is_file() else "none of this machine yet",
        remedy="" if path.is_file() else "planner calibrate scenarios/quickstart.yaml",
    )


def _movielens() -> Check:
    path = movielens_path()
    return Check(
        name="MovieLens",
        state="ok" if path.is_file() else "missing",
        detail=str(path) if path.is_file() else "not prepared: runs use the synthetic stream and say so",
        remedy="" if path.is_file() else "planner data movielens",
    )
