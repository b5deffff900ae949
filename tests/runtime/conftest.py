"""Launches of torchrun that several tests share: a start costs seconds, so there is one per world size."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def keep_handlers(monkeypatch):
    """main() replaces signal handlers and the thread count; this process wants its own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)


def torchrun(world: int, *arguments: str, timeout: float = 480) -> subprocess.CompletedProcess:
    """Runs `python -m torch.distributed.run ARGUMENTS` on `world` ranks of one thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def _checks(world: int, out: Path) -> list[dict]:
    done = torchrun(world, "tests/runtime/ranks.py", str(out))
    found = [json.loads(p.read_text()) for p in sorted(out.glob("rank-*.json"))]
    errors = [check["error"] for rank in found for check in rank.values() if "error" in check]
    assert not errors, errors[0]
    assert done.returncode == 0 and len(found) == world, done.stderr[-3000:]
    return found


@pytest.fixture(scope="session")
def checks_on_2(tmp_path_factory) -> list[dict]:
    """What tests/runtime/ranks.py found on 2 ranks, by rank."""
    return _checks(2, tmp_path_factory.mktemp("ranks2"))


@pytest.fixture(scope="session")
def checks_on_4(tmp_path_factory) -> list[dict]:
    """The same on 4 ranks."""
    return _checks(4, tmp_path_factory.mktemp("ranks4"))
