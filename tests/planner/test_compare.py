"""Two plans or runs side by side."""
import dataclasses
import json

import pytest

from costmodel.plan import Plan
from planner.cli import main
from planner.compare import compare
from tests.planner.made_traces import cpu_rank, write
from tests.planner.test_cli import TINY


@pytest.fixture
def folders(tmp_path):
    """Two plans: the second has ten times slower links and recomputes everything."""
    (tmp_path / "a.yaml").write_text(TINY)
    (tmp_path / "b.yaml").write_text(TINY.replace("1 GB/s", "20 MB/s") + 'checkpoint: {"*": full}\n')
    for name in "ab":
        assert main(["estimate", str(tmp_path / f"{name}.yaml"), "--quiet", "-o", str(tmp_path / name)]) == 0
    return tmp_path / "a", tmp_path / "b"


def test_what_differs_and_where_the_time_went(folders):
    found = compare(*folders)
    assert found.evidence == "simulated" and found.speedup < 1 and found.binding[1] == "communication:loop"
    assert any(d.what == "cluster" and "tiers" in d.before for d in found.choices)
    assert any(d.what == "history.0" and "none" in d.before and "full" in d.after for d in found.choices)
    assert found.categories[0].category == "communication:loop" and found.categories[0].change > 0
    assert any(m.category == "recompute" and m.before == 0 for m in found.categories)
    assert found.memory["saved_activations"][1] < found.memory["saved_activations"][0]
    back = compare(folders[1], folders[0])
    assert back.speedup == pytest.approx(1 / found.speedup)


def test_nothing_differs_between_a_plan_and_itself(folders):
    found = compare(folders[0], folders[0])
    assert not found.choices and found.speedup == 1 and all(m.change == 0 for m in found.categories)


def test_traces_of_both_are_compared_with_traces(folders):
    write(folders[0], cpu_rank(0), cpu_rank(1))
    assert compare(*folders).evidence == "simulated"
    write(folders[1], cpu_rank(0, sleeps=50), cpu_rank(1, sleeps=50))
    found = compare(*folders)
    assert found.evidence == "measured, from traces" and found.binding[1] == "synchronisation"
    assert found.categories[0].category == "synchronisation" and found.categories[0].change == pytest.approx(0.05)


def test_moved_tables_are_told(folders, tmp_path):
    plan = Plan.load(folders[0] / "plan.json")
    moved = dataclasses.replace(plan, tables=tuple(dataclasses.replace(t, ranks=tuple(1 - r for r in t.ranks)) for t in plan.tables))
    (tmp_path / "c").mkdir()
    moved.save(tmp_path / "c" / "plan.json")
    assert any(d.what == "table placement" for d in compare(folders[0], tmp_path / "c").choices)


def test_the_verb(folders, capsys):
    assert main(["explain", str(folders[0]), "--against", str(folders[1])]) == 0
    assert "what differs" in capsys.readouterr().out
    assert main(["explain", str(folders[0]), "--against", str(folders[1]), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"].startswith("B trains")
    assert main(["explain", str(folders[0]), "--against", "nothing.json"]) == 2


def test_a_damaged_result_of_either_side_is_told(folders, capsys):
    (folders[1] / "result.json").write_text('{"schema')
    capsys.readouterr()
    assert main(["explain", str(folders[0]), "--against", str(folders[1]), "--json"]) == 0
    captured = capsys.readouterr()
    words = f"{folders[1] / 'result.json'}:1:2: not JSON"
    assert words in captured.err.replace("\n", "") and any(words in note for note in json.loads(captured.out)["notes"])
