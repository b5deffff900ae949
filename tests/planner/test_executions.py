"""Executions are chosen by measured prices only, and never where they cannot be run."""
import dataclasses

import numpy as np
import pytest

from costmodel.calibration import fit
from costmodel.execution import refusal
from costmodel.ops import FORWARD
from costmodel.plan import Plan
from costmodel.regions import over_samples
from costmodel.samples import CONSTANT_PREFIX, Environment, Sample
from planner.configure import default_plan, predict_only
from planner.errors import UsageError
from planner.scenario import ResolvedScenario, load_scenario
from planner.search import Search
from planner.space import EXECUTIONS, build_space

EAGER = {"forward:self_attention@bf16+mlp": 1e-3, "backward:self_attention@bf16+mlp": 2e-3, "forward:region@bf16": 1e-3, "backward:region@bf16": 1e-3,
         "forward:loss": 3e-4, "backward:loss": 4e-4, "lookup": 5e-4, "update": 6e-4, "optimizer": 1e-3, "tensor": 1e-6, "input": 1e-3, "other": 1e-4}
GRAPH = {"forward:graph": 1e-4, "backward:graph": 1e-4}
KINDS = ("self_attention", "sequence_input", "summary", "mlp", "heads")


def compiled(host: float) -> dict[str, float]:
    return {f"{name}/{phase}:{kind}": share for phase in ("forward", "backward") for kind in KINDS
            for name, share in (("compiled", 1.0), ("compiled_host", host))}


def calibration(*figures: dict[str, float], **constants: float):
    h200 = load_scenario("gem-1xh200", with_variants=False).cluster.device
    samples = [Sample(op=f"{CONSTANT_PREFIX}host", variant=name, phase="step", features={}, seconds=value)
               for some in figures for name, value in some.items()]
    samples.append(Sample(op="elementwise", variant="add", phase=FORWARD, features={"m": 1e3, "n": 1e3}, seconds=1e-5))
    made = fit(Environment(device_name=h200.name, device_kind="cuda"), samples, device=h200)
    return dataclasses.replace(made, constants={**made.constants, **constants})


def tiny(name: str = "gem-1xh200", **pins) -> ResolvedScenario:
    """A model so small that launches make its step."""
    host, small = load_scenario(name, with_variants=False), load_scenario("quickstart", with_variants=False)
    workload = dataclasses.replace(small.workload, global_batch=64, local_batch=None)
    pinned = dataclasses.replace(host.pins, **{"precision": {"*": "bf16"}, **pins})
    return dataclasses.replace(host, model=small.model, workload=workload, pins=pinned)


def found(scenario: ResolvedScenario, known) -> tuple[Search, Plan]:
    state = Search(scenario, known, time_limit=None, gap=0.01)
    state.run()
    return state, state.incumbent.plan


@pytest.mark.parametrize(("known", "expected"), [
    (calibration(EAGER), "eager"), (calibration(EAGER, GRAPH), "cuda_graph"), (calibration(EAGER, **compiled(0.3)), "compile"),
    (calibration(EAGER, {name: 50 * value for name, value in GRAPH.items()}, **compiled(1.1)), "eager")])
def test_the_fastest_that_was_timed_is_chosen(known, expected):
    state, plan = found(tiny(), known)
    assert plan.execution == expected and plan.predict_only == () and refusal(plan) is None
    names = over_samples(plan.model)
    assert plan.execution != "cuda_graph" or (plan.accumulation == 1 and all(
        o.checkpoint == "none" for r in plan.regions if r.region in names for o in r.options))
    rng = np.random.default_rng(0)
    for i in map(int, rng.choice(np.flatnonzero(state.fits), 10)):
        choice = state.pricing.program(i).solve(time_limit=None, gap=0.0)
        priced = state.pricing.price(state.pricing.plan(i, choice), choice)
        assert refusal(priced.plan) is None and state.first[i] <= priced.seconds * (1 + 1e-9)


def test_out_with_a_reason():
    def reasons(scenario: ResolvedScenario, known) -> dict[str, tuple[str, str]]:
        return {e.what.split()[1]: (e.kind, e.why) for e in build_space(scenario, known).excluded if e.what.startswith("execution")}

    assumed = reasons(tiny(), calibration(EAGER))
    assert set(assumed) == {"compile", "cuda_graph"} and all(kind == "predict_only" and "pin execution" in why for kind, why in assumed.values())
    assert reasons(tiny(), calibration(EAGER, GRAPH, **compiled(0.5))) == {}
    several = reasons(tiny("gem-8xh200"), calibration(EAGER, GRAPH, **compiled(0.5)))
    assert set(several) == {"cuda_graph"} and "one rank" in several["cuda_graph"][1]
    kept = reasons(tiny(checkpoint={"heads": "full"}), calibration(EAGER, GRAPH, **compiled(0.5)))
    assert set(kept) == {"compile", "cuda_graph"} and all("heads" in why for _, why in kept.values())


def test_pinned_is_run_or_says_why_not():
    for name, reason in (("gem-1xh200", None), ("gem-8xh200", "8 ranks")):
        plan = default_plan(tiny(name, execution="cuda_graph", accumulation=1))[0]
        assert (predict_only(plan) == ()) if reason is None else reason in predict_only(plan)[0]
    space = build_space(tiny(execution="compile"), None)
    assert {EXECUTIONS[i] for i in space.candidates["execution"]} == {"compile"}
    with pytest.raises(UsageError, match="pinned and excluded"):
        build_space(tiny(execution="compile", exclude=dataclasses.replace(tiny().pins.exclude, execution=("compile",))))
