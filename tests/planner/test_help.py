"""Help of the diagnosing verbs: an example that works when pasted."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import main

VERBS = ("size", "diagnose", "waterfall", "explain", "record", "report", "export")


def example(verb, capsys):
    assert main([verb, "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    found = re.search(r"Example: (.*?) (Arguments|Options):", words)
    assert found
    last = found[1].split("Example: ")[-1].strip()
    assert f"planner {verb}" in last
    return last


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb, capsys):
    example(verb, capsys)


@pytest.mark.parametrize("verb", ["record", "explain"])
def test_the_example_works_when_pasted(verb, capsys, tmp_path):
    """The quick ones; the others search for seconds and share their path with tests of their own."""
    command = example(verb, capsys).replace("/tmp/", f"{tmp_path}/").replace("planner ", "$PLANNER ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False, env={
        "PLANNER": f"{sys.executable} -m planner.cli", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PLANNER_STATE": str(tmp_path / "state")})
    assert done.returncode == 0, done.stderr
    assert done.stdout and "\x1b[" not in done.stdout
