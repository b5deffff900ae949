"""Every verb's help has an example that works when pasted; shells complete verbs and options."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import app, main
from planner.report.console import PIPED_WIDTH

# Those that answer within a few seconds, and those that search for longer or look at the whole machine.
# `calibrate`, `run`, `validate` and `data` time this machine, train or download.
QUICK = ("estimate", "explain", "export", "ledger", "record", "report", "search")
SLOW = ("diagnose", "doctor", "sensitivity", "size", "waterfall", "whatif")
NOT_PASTED = ("calibrate", "data", "run", "validate")
ROOT = Path(__file__).resolve().parents[2]


def example(verb, capsys):
    assert main([verb, "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    found = re.search(r"Example: (.*?) (Arguments|Options):", words)
    assert found
    last = found[1].split("Example: ")[-1].strip()
    assert f"planner {verb}" in last
    return last


def test_all_verbs_are_known_here():
    assert {c.name for c in app.registered_commands} | {g.name for g in app.registered_groups} == {*QUICK, *SLOW, *NOT_PASTED}


@pytest.mark.parametrize("verb", [*QUICK, *SLOW, *NOT_PASTED])
def test_help_has_an_example(verb, capsys):
    example(verb, capsys)


@pytest.mark.parametrize("verb", [*QUICK, *(pytest.param(v, marks=pytest.mark.slow) for v in SLOW)])
def test_the_example_works_when_pasted(verb, capsys, tmp_path):
    command = example(verb, capsys).replace("/tmp/", f"{tmp_path}/").replace("planner ", "$PLANNER ")
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False, env={
        "PLANNER": f"{sys.executable} -m planner.cli", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PLANNER_STATE": str(tmp_path / "state")})
    assert done.returncode == 0, done.stderr
    assert (done.stdout or verb == "ledger") and "\x1b[" not in done.stdout
    assert max(map(len, done.stdout.splitlines()), default=0) <= PIPED_WIDTH


@pytest.mark.parametrize(("typed", "offered"), [("planner dia", "diagnose"), ("planner export --t", "--to"), ("planner run --tr", "--trace")])
def test_shells_complete(typed, offered):
    words = {"_PLANNER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    program = "from planner.cli import app; app(prog_name='planner')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **words}, check=False)
    assert offered in done.stdout.split(), done.stderr
