"""Waterfalls: the end is the full change's own estimate, alone and left out, measured runs."""
import pytest

from costmodel.estimate import estimate
from planner import levers
from planner.cli import main
from planner.configure import default_plan
from planner.errors import UsageError
from planner.ledger import Entry, Ledger
from planner.scenario import combined, load_scenario
from planner.waterfall import from_ledger, waterfall
from tests.planner.test_cli import TINY

VARIED = TINY + """variants:
  - {name: fast links, set: {cluster.tiers.loop.bandwidth: 10 GB/s}}
  - {name: faster cores, set: {cluster.device.peak_flops.fp32: 100 GFLOP/s}}
  - {name: slower memory, set: {cluster.device.memory_bandwidth: 5 GB/s}}
"""


@pytest.fixture
def varied(tmp_path):
    path = tmp_path / "varied.yaml"
    path.write_text(VARIED)
    return path


def test_the_end_is_the_full_changes_own_estimate(varied):
    found = waterfall(varied, search=False)
    everything = combined(varied, ["fast links", "faster cores", "slower memory"])
    full = estimate(default_plan(everything)[0], None)
    assert found.steps[-1].step_time_s == full.step_time.value
    assert [s.name for s in found.steps] == ["base", "fast links", "faster cores", "slower memory"]
    base, links, cores, memory = found.steps
    assert base.speedup == 1 and links.speedup == links.alone > 1 and cores.alone > 1 and memory.alone < 1
    assert memory.left_out == pytest.approx(cores.speedup)  # all without the last change is all so far before it
    together = memory.speedup
    assert found.interaction == pytest.approx(together / (links.alone * cores.alone * memory.alone))


def test_variants_together_keep_each_others_changes(varied):
    both = combined(varied, ["fast links", "slower memory"])
    assert both.cluster.tiers[0].bandwidth == 1e10 and both.cluster.device.memory_bandwidth == 5e9
    assert combined(varied, []).cluster == load_scenario(varied).cluster


def test_a_scenario_without_variants_uses_its_levers(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    found = waterfall(tmp_path / "tiny.yaml", search=False)
    assert found.steps[1].name == "kernels x2 (compute)" and found.steps[1].alone > 1


def test_a_lever_never_loses_to_a_search_cut_short(tmp_path, monkeypatch):
    """The given plan carried over is among those compared, also when the search finds nothing."""
    from planner import search
    from planner.errors import NoFeasiblePlan

    def nothing(*_, **__):
        raise NoFeasiblePlan("no time")
    monkeypatch.setattr(search, "search", nothing)
    (tmp_path / "tiny.yaml").write_text(TINY)
    scenario = load_scenario(tmp_path / "tiny.yaml")
    base = levers.as_pinned(scenario, None)
    ranked = {r.name: r for r in levers.rank(scenario, base, None)}
    assert ranked["kernels x2 (compute)"].speedup > 1 and not ranked["kernels x2 (compute)"].replanned
    assert ranked["loop bandwidth x2"].speedup > 1 and ranked["memory x2"].speedup == pytest.approx(1)


def entry(number, step, **changes):
    values = dict(time=f"2026-01-0{number}T00:00:00", scenario="s", plan_identity=str(number), cluster="c", device="d", model="m", workload="w",
                  world_size=2, layout="ddp2", local_batch=4, status="completed", measured_step_s=step, examples_per_second=8 / step,
                  measured_phases_s={"forward": step / 2, "backward": step / 3})
    return Entry(**{**values, **changes})


def test_measured_runs_in_their_order(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal folds cells
    book = Ledger(tmp_path / "ledger.sqlite")
    book.append_all([entry(1, 0.4), entry(2, 0.2, layout="fsdp2"), entry(3, 0.1, status="failed"), entry(4, 0.25, scenario="other"), entry(5, 0.1)])
    found = from_ledger("s", ledger=book)
    assert [s.speedup for s in found.steps] == [1.0, pytest.approx(2.0), pytest.approx(4.0)]
    assert found.steps[1].name == "layout ddp2 -> fsdp2" and found.evidence == "measured"
    with pytest.raises(UsageError, match="1 completed runs of scenario 'other'"):
        from_ledger("other", ledger=book)
    assert main(["waterfall", "s", "--from-ledger", "--ledger", str(book.path)]) == 0
    assert "layout ddp2 -> fsdp2" in capsys.readouterr().out


def test_the_verb_leaves_a_file_for_the_report(varied, tmp_path, capsys):
    assert main(["waterfall", str(varied), "--pinned", "-o", str(tmp_path / "out")]) == 0
    assert "interaction" in capsys.readouterr().out and (tmp_path / "out" / "waterfall.json").is_file()
