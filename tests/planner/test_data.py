import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from costmodel.state import movielens_path
from planner import data
from planner.cli import main

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(
    f"{user}\t{item}\t{1 + (user + item) % 5}\t{1000 * user + item}\n" for user in range(6) for item in range(8)
)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "recbole-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("recbole/dataset_example/ml-100k/ml-100k.inter", INTER)
    return path


def test_a_wheel_becomes_an_event_table(wheel, capsys):
    assert main(["data", "movielens", "--wheel", str(wheel), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["events"], summary["users"], summary["items"]) == (48, 6, 8)
    assert movielens_path().is_file()
    assert main(["data", "movielens"]) == 0
    assert "already there" in capsys.readouterr().out


def test_a_wheel_without_the_data_set_is_exit_6_and_what_was_there_stays(wheel, tmp_path, capsys):
    assert main(["data", "movielens", "--wheel", str(wheel), "--quiet"]) == 0
    before = movielens_path().read_bytes()
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("x", "")
    capsys.readouterr()
    assert main(["data", "movielens", "--wheel", str(empty)]) == 6
    assert "ml-100k.inter" in capsys.readouterr().err
    assert main(["data", "movielens", "--wheel", str(tmp_path / "gone.whl")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert movielens_path().read_bytes() == before


def test_pip_downloads_with_its_own_settings(wheel, monkeypatch):
    real, asked = subprocess.run, []

    def run(command, **options):
        if "pip" not in command:
            return real(command, **options)
        asked.append(command)
        assert "env" not in options
        target = Path(command[command.index("--dest") + 1])
        (target / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(data.subprocess, "run", run)
    assert data.movielens()["events"] == 48
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "recbole"
    assert not any(word.startswith("--index") or "://" in word for word in command)


def test_without_a_network(monkeypatch, capsys):
    def refused(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found for recbole\n")

    monkeypatch.setattr(data.subprocess, "run", refused)
    assert main(["data", "movielens"]) == 6
    assert "No matching distribution found" in capsys.readouterr().err
    assert main(["data", "movielens", "--or-synthetic", "--json"]) == 0
    captured = capsys.readouterr()
    assert "synthetic stream" in captured.err
    assert json.loads(captured.out)["out"] is None
    assert not movielens_path().exists()
