"""Ctrl-C during a real run: exit 130, a row in the ledger, a checkpoint; `--resume` then ends where an undisturbed run ends, loss by loss."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.cli import main
from planner.ledger import Ledger
from tests.planner.test_cli import TINY

pytest.importorskip("torch")
STEPS = 60


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in sorted(lines, key=lambda line: line["step"])]


def planner(*words: str) -> subprocess.Popen[str]:
    """SIGINT is ignored at first, as in a script's background job."""
    return subprocess.Popen([sys.executable, "-m", "planner.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))  # fmt: skip


def test_ctrl_c_then_resume_gives_the_same_losses(tmp_path: Path):
    scenario, book = tmp_path / "tiny.yaml", tmp_path / "l.sqlite"
    scenario.write_text(TINY.replace("num_steps: 4", f"num_steps: {STEPS}, source: {{kind: synthetic, num_events: 4000}}"))
    for name in ("whole", "stopped"):
        assert main(["estimate", str(scenario), "--quiet", "-o", str(tmp_path / name)]) == 0
    assert main(["run", str(tmp_path / "whole"), "--no-eval", "--quiet", "--ledger", str(book)]) == 0
    folder = tmp_path / "stopped"
    process = planner("run", str(folder), "--no-eval", "--ledger", str(book))
    metrics, limit = folder / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "error: interrupted; continue with --resume" in err and "Traceback" not in err
    assert 0 < len(losses(folder)) < STEPS
    assert list((folder / "checkpoint").iterdir())
    assert [(e.status, e.directory) for e in Ledger(book).entries()][1] == ("interrupted", str(folder))
    assert main(["run", str(folder), "--no-eval", "--quiet", "--resume", "--ledger", str(book)]) == 0
    assert losses(folder) == losses(tmp_path / "whole")
    assert [e.status for e in Ledger(book).entries()] == ["completed", "interrupted", "completed"]
