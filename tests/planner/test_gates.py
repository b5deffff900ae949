"""Gates of time and quality: bounds against a simulation, verdicts, seeds needed, blame, and what `run` says."""
import dataclasses
import json

import numpy as np
import pytest

from planner import gates, validate
from planner.configure import default_plan
from planner.scenario import load_scenario


@pytest.fixture(scope="module")
def low():
    """quickstart with 8 bits in the interaction, a quantised history and an 8-bit wire."""
    plan, _ = default_plan(load_scenario("quickstart", with_variants=False))
    options = {"interaction": {"precision": "fp8_row"}, "history.0": {"precision": "bf16", "checkpoint": "quantized"}}
    regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(o, **options.get(r.region, {})) for o in r.options))
                    for r in plan.regions)
    return dataclasses.replace(plan, regions=regions, wire="int8")


def trainer(harm: dict[str, float], *, noise: float = 1e-5, seconds: float = 0.9):
    """A training whose NE rises by `harm` for each part of the plan that is below 16 bits."""
    def train_one(plan):
        rng = np.random.default_rng([plan.seed, len(gates.parts(plan))])
        below = gates.parts(plan)
        ne = (0.8 + 0.01 * plan.seed) * (1 + sum(harm.get(p, 0.0) for p in below) + (noise * rng.standard_normal() if below else 0.0))
        return ne, seconds if below else 1.0 + 1e-3 * rng.standard_normal()

    return lambda asked: [train_one(plan) for plan, _ in asked]


def test_bounds_cover_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    found = [gates.decide(rng.normal(1.0, 2.0, 4), 0.0) for _ in range(4000)]
    assert np.mean([g.upper >= 1.0 for g in found]) == pytest.approx(0.95, abs=0.012)
    assert np.mean([g.lower <= 1.0 for g in found]) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize(("differences", "verdict"), [
    ([0.0, 1e-5, -1e-5], "pass"), ([1e-3, 1.01e-3, 0.99e-3], "fail"), ([0.0, 1e-3, 0.0], "inconclusive"), ([0.0], "inconclusive")])
def test_verdicts(differences, verdict):
    assert gates.decide(differences, 5e-4).verdict == verdict


def test_as_many_seeds_as_are_said_to_be_needed_decide_and_one_fewer_does_not():
    mean, deviation, allowed = 1e-4, 6e-4, 5e-4
    needed = gates.seeds_needed(mean, deviation, allowed)

    def made(n):
        values = np.linspace(-1, 1, n)
        return gates.decide(mean + deviation * values / values.std(ddof=1), allowed)

    assert made(needed).verdict == "pass" and made(needed - 1).verdict == "inconclusive"
    assert made(5).seeds_needed == needed and gates.decide([0.0, 1e-3, 0.0], 5e-4, events=100).events_needed % 100 == 0
    assert gates.seeds_needed(allowed, 1.0, allowed) is None


def test_parts_and_the_reference(low):
    assert gates.parts(low) == ("precision interaction", "checkpoint history.0", "wire")
    reference = gates.restricted(low, ())
    assert gates.parts(reference) == () and {o.precision for r in reference.regions for o in r.options} == {"bf16", "fp32"}
    assert gates.parts(gates.restricted(low, ("wire",))) == ("wire",)
    gathered = dataclasses.replace(low, gather_dtype="fp8", reduce_dtype="bf16")
    assert gates.parts(gathered)[-1] == "gather" and gates.parts(gates.restricted(gathered, ("gather",))) == ("gather",)
    assert gates.restricted(gathered, ()).gather_dtype is None


@pytest.mark.parametrize("guilty", ["precision interaction", "checkpoint history.0", "wire"])
def test_a_failed_gate_names_the_part(low, guilty):
    found = gates.validate(low, trainer({guilty: 2e-3}), seeds=4, tolerance=5e-4, events=1000)
    assert found.quality.verdict == "fail" and found.blame == (guilty,) and found.time.verdict == "pass" and found.verdict == "fail"


def test_parts_that_fail_together_only_are_named_together(low):
    found = gates.validate(low, trainer(dict.fromkeys(gates.parts(low), 2.4e-4)), seeds=4, tolerance=5e-4, events=0)
    assert found.quality.verdict == "fail" and found.blame == gates.parts(low)


def test_passing_needs_both_gates_unless_the_format_is_emulated(low):
    slow = gates.validate(low, trainer({}, seconds=1.2), seeds=4, tolerance=5e-4, events=0)
    assert (slow.quality.verdict, slow.time.verdict, slow.verdict) == ("pass", "fail", "fail")
    emulated = gates.validate(dataclasses.replace(low, emulated=("fp8_row",)), trainer({}, seconds=1.2), seeds=4, tolerance=5e-4, events=0)
    assert (emulated.time.verdict, emulated.verdict) == ("not_applicable", "pass")


def test_what_run_says(low, tmp_path):
    assert "has passed no gate" in gates.standing(low, tmp_path)
    gates.save(gates.validate(low, trainer({}), seeds=4, tolerance=5e-4, events=0), tmp_path)
    assert json.loads((tmp_path / gates.VERDICT_FILE).read_text())["verdict"] == "pass" and gates.standing(low, tmp_path) is None
    gates.save(gates.validate(low, trainer({"wire": 1e-2}), seeds=4, tolerance=5e-4, events=0), tmp_path)
    assert "quality fail" in gates.standing(low, tmp_path)
    assert "of another plan" in gates.standing(dataclasses.replace(low, seed=9), tmp_path)
    plain = gates.restricted(low, ())
    assert gates.standing(plain, tmp_path) is None
    with pytest.raises(ValueError, match="nothing to validate"):
        gates.validate(plain, trainer({}), seeds=3, tolerance=1e-3, events=0)


def test_trained_events_follow_steps_or_a_synthetic_stream(low):
    source = dataclasses.replace(low.workload.source, kind="synthetic", num_events=10_000)
    streamed = dataclasses.replace(low, workload=dataclasses.replace(low.workload, source=source, num_steps=None, epochs=2))
    batch = low.local_batch * low.accumulation * low.layout.world_size
    assert validate.trained_events(streamed, 7) == 7 * batch and validate.trained_events(streamed, None) == 2 * (10_000 // batch) * batch
