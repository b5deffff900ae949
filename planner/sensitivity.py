"""`planner sensitivity`: what each region loses below 16 bits on real batches, in a file that a scenario's numeric-risk budget reads.

Risk is noise: 1e6 x |y' - y|^2 / |y|^2 of a block's output, as noise powers of blocks add. `search: {sensitivity: FILE, risk_budget: N}` limits the
sum over blocks; a pair of region and recipe that the file has not keeps the assumed figure of `planner.space.RISK`, and the search says so.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from costmodel.blocks.base import QUANTIZED
from planner import runner
from planner.errors import Interrupted, RunFailed, UsageError
from planner.files import check_writable
from planner.scenario import ResolvedScenario

PARTS_PER_MILLION = 1e6


def run(scenario: ResolvedScenario, out: Path, *, batches: int, samples: int) -> dict:
    """Measures the scenario's model on its own workload on this machine's CPU and writes `out`. Raises UsageError, RunFailed, Interrupted."""
    from planner.configure import default_plan

    runner.check_runtime()
    check_writable(out.parent)
    plan, _ = default_plan(scenario)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "plan.json", Path(folder) / "sensitivity.log"
        plan.save(path)
        words = [sys.executable, "-m", "runtime.precision.sensitivity", str(path), "--out", str(out.resolve()), "--batches", str(batches),
                 "--samples", str(samples)]
        outcome = runner.follow(words, variables={}, log=log, on_event=lambda event: None)
        if outcome.interrupted:
            raise Interrupted("interrupted; nothing was written")
        if outcome.returncode:
            raise RunFailed(f"sensitivity: {outcome.reason()}")
    return json.loads(out.read_text())


def risks(path: Path | None, model: str) -> dict[tuple[str, str], float]:
    """(region, recipe) -> risk from a file of `planner sensitivity`; empty without one. Raises UsageError for another model's file."""
    if path is None:
        return {}
    try:
        body = json.loads(path.read_text())
        rows = body["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"search.sensitivity: {path}: not a file of `planner sensitivity` ({error})") from error
    if body.get("model") != model:
        raise UsageError(f"search.sensitivity: {path} was measured on model {body.get('model')}, the scenario has {model}")
    measured = {(row["region"], row["recipe"]): row for row in rows if "noise" in row}
    found = {key: PARTS_PER_MILLION * row["noise"] for key, row in measured.items()}
    for (region, recipe), row in measured.items():
        if recipe in QUANTIZED:  # what they add to the noise of gradients under bf16
            found[region, recipe] = PARTS_PER_MILLION * max(0.0, row["gradient_noise"] - measured[region, "bf16"]["gradient_noise"])
    return found


def table(body: dict) -> Any:
    """A row per region and recipe."""
    from planner.report.console import grid

    rows = [[r["region"], r["recipe"], *([f"{r['snr_db']:.1f}", f"{r['cosine']:.6f}", f"{r['saturation']:.4%}", f"{r['underflow']:.4%}",
                                          f"{PARTS_PER_MILLION * r['noise']:.4g}"] if "noise" in r else ["-"] * 5), r.get("refused", "")]
            for r in body["rows"]]
    columns = [("region", "left"), ("recipe", "left"), ("SNR dB", "right"), ("cosine", "right"), ("saturated", "right"), ("underflow", "right"),
               ("risk", "right"), ("", "left")]
    return grid(f"{body['model']}, {body['samples']} samples of {body['origin']}", columns, rows)
