"""Explanations: shadow prices of what binds, runners-up that differ, sensitivities that point the right way."""

import dataclasses
from typing import get_args

import pytest

from benchmarks.instances import instance
from costmodel.estimate import estimate
from costmodel.memory import BlockMemory
from costmodel.plan import Wire
from costmodel.workload import Lengths
from planner.bounds import Cut, Durations
from planner.cli import main
from planner.explain import GIB, bindings, explain, listing, stretched
from planner.ilp import CandidateProgram, MemoryRow, RegionRow
from planner.scenario import load_scenario
from planner.space import (
    BATCHINGS,
    CHECKPOINTS,
    EXECUTIONS,
    PRECISIONS,
    SHARDINGS,
    TRANSPORTS,
    RegionChoice,
    build_space,
)


@pytest.fixture(scope="module")
def found():
    return explain(instance(1), None, time_limit=60.0, gap=0.0, top=3)


def test_runners_up_are_slower_and_say_what_differs(found):
    assert found.seconds == pytest.approx(estimate(found.plan, None).step_time.value)
    assert found.runners_up
    for other in found.runners_up:
        assert other.seconds >= found.seconds * (1 - 1e-9) and other.differences
        assert all(d.before != d.after for d in other.differences)


def test_more_of_anything_never_slows_and_less_never_speeds_up(found):
    moves = {s.what: s for s in found.sensitivities}
    assert moves["memory bandwidth x1.25"].percent < 0 < moves["memory bandwidth x0.8"].percent
    assert moves["nvlink bandwidth x2"].percent <= 0 <= moves["nvlink bandwidth x0.5"].percent
    assert moves["histories x0.5"].percent < 0 < moves["histories x2"].percent
    assert any(name.startswith("SMs of collectives") for name in moves)


def test_binding_memory_has_the_price_that_a_gib_more_is_worth():
    """Two blocks keep 3 GiB, or 1 GiB and 1 ms of recomputation each: with 6 GiB both keep all, with 5.5 none can."""
    keep, drop = (RegionChoice(precision="bf16", checkpoint=c, risk=0.0) for c in ("none", "full"))
    memory = {
        c: BlockMemory(region="r", saved=s * GIB, whole=3 * GIB, workspace=0.0, unsharded=0.0, sharded=0.0) for c, s in ((keep, 3.0), (drop, 1.0))
    }

    def made(usable: float) -> CandidateProgram:
        room = MemoryRow(resting=0.0, buffer=0.0, gradients=0.0, usable=usable * GIB, embeddings=0.0, accumulates=False, keeps_unsharded=False)
        program = CandidateProgram(
            regions=[RegionRow(name="r", count=2, memory=memory, sharded=0.0)],
            tables=[],
            memory=room,
            durations=Durations(regions={}, rest={}, slopes={}),
        )
        program.cuts.append(Cut(constant=0.0, coefficients={"r": {keep: 1e-3, drop: 2e-3}}, slope=0.0))
        return program

    tight, *moments = bindings(made(5.5))
    assert (tight.name, tight.unit) == ("HBM", "GiB") and tight.seconds == pytest.approx(-2e-3, rel=1e-3)
    assert moments and all(m.name.startswith("HBM at ") and m.seconds < 0 for m in moments)
    assert bindings(made(60.0)) == ()


def test_stretched_lengths():
    lognormal = Lengths(kind="lognormal", median=100.0, sigma=1.0, maximum=1000)
    assert stretched(lognormal, 2.0) == dataclasses.replace(lognormal, median=200.0, maximum=2000, minimum=2)
    histogram = Lengths(kind="histogram", values=(0, 3, 10), weights=(1.0, 2.0, 3.0), minimum=0, maximum=10)
    assert stretched(histogram, 0.5).values == (0, 2, 5)


def test_transports_and_executions_are_moves_of_their_own(found):
    moves = {s.what: s.seconds for s in found.sensitivities}
    launches = [moves[name] for name in ("launches of the host: compile for eager", "launches of the host: cuda_graph for eager")]
    assert launches[1] < found.seconds < launches[0]  # graphs save launches; compiled blocks were measured to cost the host more


def test_the_certificate_is_of_the_plan_that_is_shown(found):
    assert found.certificate.incumbent == pytest.approx(found.plan.search["incumbent"])
    assert all(r.seconds >= found.certificate.lowest_open * (1 - 1e-9) for r in found.runners_up)


@pytest.mark.parametrize(("name", "predict_only"), [("gem-512xh200", False), ("gem-512xh200", True), ("dlrm-dcnv2", False)])
def test_the_listing_has_every_option_offered_or_out(name, predict_only):
    scenario = load_scenario(name, with_variants=False)
    scenario = dataclasses.replace(scenario, search=dataclasses.replace(scenario.search, predict_only=predict_only))
    listed = listing(scenario)
    offered = {o.what: o.values for o in listed.offers}
    assert listed.candidates == len(build_space(scenario).candidates)
    for what, known in (("batching", BATCHINGS), ("transport", TRANSPORTS), ("execution", EXECUTIONS), ("precision", PRECISIONS),
                        ("checkpoint", CHECKPOINTS), ("sharding", SHARDINGS), ("wire", get_args(Wire)), ("wire_gradients", get_args(Wire))):
        here = {v for key, values in offered.items() if key.split()[0] == what for v in values}
        out = " ".join(e.what for e in listed.excluded if e.what.startswith(what))
        assert all(any(v.startswith(option) for v in here) or option in out for option in known), what
    assert all(e.why for e in listed.excluded)
    assert offered["input_overlap"] == ("0", "1")
    assert ("ncclx" in offered["transport"]) == predict_only


def test_the_space_on_the_command_line(capsys):
    import json

    assert main(["explain", "quickstart", "--space", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["candidates"] == 48 and {"what": "transport", "values": ["gloo"]} in answer["offers"]
    assert main(["explain", "quickstart", "--space"]) == 0
    assert "48 candidates" in capsys.readouterr().out


def test_a_plan_cannot_be_explained_without_another(tmp_path, capsys):
    found = tmp_path / "plan.json"
    found.write_text("{}")
    assert main(["explain", str(found)]) == 2
    assert "--against" in capsys.readouterr().err
