"""What the planner chooses where formats below 16 bits and budgets of activations are allowed, predicted first and then run.

    python -m benchmarks.precision --stage predict --work W --calibration FILE     where there is no GPU: searches, and writes plans with predictions
    python -m benchmarks.precision --stage run --work W                            where there is one: runs them, and reports

    full-none        gem-full in bf16, everything kept
    full-quantized   the same with saved activations in 8 bits, in regions that keep a hundredth of them or more
    full-regions     within MEMORY, every region with a budget of its own
    full-global      the fastest of those that give all regions the same and fit
    wide, narrow     the planner's choice of formats for gem-wide and for a model 64 wide, and the opposite of it: fp8 everywhere or nowhere
"""
from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import precision_gate as gate
from benchmarks import precision_gpu as gpu
from benchmarks.results import Row
from costmodel.blocks import BatchShape
from costmodel.blocks.base import QUANTIZED
from costmodel.calibration import load as load_calibration
from costmodel.codec import decode, encode
from costmodel.estimate import estimate
from costmodel.plan import Plan
from costmodel.precision import LOW_PRECISIONS
from costmodel.regions import regions
from planner.configure import default_plan
from planner.scenario import Pins, ResolvedScenario, load_scenario
from planner.search import search

SCENARIO, WIDE = "gem-full-1xh200", "gem-wide-8xh200"
MEMORY = 56e9  # where 8 bits everywhere do not fit
WORTH = 0.01  # of all that is saved
POLICIES = ("none", "selective", "full", *QUANTIZED)
WIDE_BATCH, NARROW_BATCH = 128, 8192
ANY_RISK = 1e18
ORDER = ("wide-opposite", "wide-chosen", "full-none", "full-quantized", "full-regions", "full-global", "narrow-chosen", "narrow-opposite")
# Bars of docs/results/fidelity: step and peak memory.
STEP_ERROR, MEMORY_ERROR = 0.05, 0.03


def predict(work: Path, calibration_file: Path, *, seconds: float = 12.0) -> None:
    """Writes every plan with its prediction to `work`/NAME/plan.json."""
    calibration = load_calibration(calibration_file)

    def keep(name: str, plan: Plan) -> None:
        plan = dataclasses.replace(plan, prediction={}, search={}, fingerprints={})
        path = work / name / "plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        dataclasses.replace(plan, prediction=encode(estimate(plan, calibration))).save(path)

    def chosen(scenario: ResolvedScenario, pins: Pins) -> Plan:
        asked = dataclasses.replace(scenario, pins=pins, search=dataclasses.replace(scenario.search, risk_budget=ANY_RISK))
        return search(asked, calibration=calibration, time_limit=seconds, gap=0.005).plan

    full = load_scenario(SCENARIO, with_variants=False)
    within = dataclasses.replace(full, cluster=dataclasses.replace(full.cluster, memory_budget=MEMORY))
    keep("full-regions", chosen(within, Pins(accumulation=1, precision={"*": "bf16"})))
    base, _ = default_plan(within)
    estimates = {policy: estimate(gpu.under(base, checkpoint=policy), calibration) for policy in POLICIES}
    fitting = {policy: found.step_time.value for policy, found in estimates.items() if found.memory.reserved.value <= MEMORY}
    keep("full-global", gpu.under(base, checkpoint=min(fitting, key=lambda policy: fitting[policy])))
    keep("full-none", base)
    keep("full-quantized", gpu.under(base, checkpoint=dict.fromkeys(large_regions(base), "quantized")))

    tiny = gate.recipes(2_000_000, NARROW_BATCH)["row-wise fp8"]
    models = {"wide": (load_scenario(WIDE, with_variants=False).model, dataclasses.replace(full.workload, local_batch=WIDE_BATCH)),
              "narrow": (tiny.model, dataclasses.replace(tiny.workload, global_batch=tiny.local_batch, local_batch=None))}
    for name, (model, workload) in models.items():
        own = dataclasses.replace(full, model=model, workload=workload)
        found = chosen(own, Pins(accumulation=1, batching="jagged", checkpoint={"*": "none"}))
        plain = gpu.under(found, precision={r.region: "bf16" for r in found.regions}, emulated=())
        keep(f"{name}-chosen", found)
        keep(f"{name}-opposite", plain if below_16_bits(found) else gpu.under(plain, precision="fp8_row"))


def large_regions(plan: Plan) -> list[str]:
    """Those whose saved activations are worth a pass of their own."""
    batch = BatchShape.expected(plan.workload.lengths, plan.local_batch)
    saved = {r.name: r.count * r.block.saved_bytes(batch, "bf16", "none") for r in regions(plan.model)}
    return [name for name, size in saved.items() if size >= WORTH * sum(saved.values())]


def below_16_bits(plan: Plan) -> bool:
    return any(o.precision in LOW_PRECISIONS for r in plan.regions for o in r.options)


def run(work: Path, *, steps: int) -> Iterator[Row]:
    """Runs every plan that has no result, and reports on those that have."""
    for name in ORDER:
        path = work / name / "plan.json"
        if path.exists() and not (path.parent / "step.json").exists():
            yield from gpu.guarded(f"plan {name}", "s", lambda p=path: _run(p, steps))
    yield from report(work)


def _run(path: Path, steps: int) -> Iterator[Row]:
    plan = Plan.load(path)
    done = {Plan.load(other.with_name("plan.json")).identity(): other for other in path.parents[1].glob("*/step.json")}
    twin = done.get(plan.identity())
    step = gpu.run_plan(plan, gpu.GPU, steps=steps) if twin is None else decode(gpu.Step, json.loads(twin.read_text()))
    (path.parent / "step.json").write_text(json.dumps(encode(step)) + "\n")
    print(f"{path.parent.name}: {step.seconds * 1e3:.1f} ms, peak {step.peak / 1e9:.2f} GB", flush=True)
    yield from ()


def described(step: gpu.Step) -> str:
    """Its phases on the device and the host's."""
    device, host = (", ".join(f"{k} {v * 1e3:.1f}" for k, v in phases.items() if v > 1e-4) for phases in (step.phases, step.host))
    return f"device {device}; host {host} ms"


def report(work: Path) -> Iterator[Row]:
    """Rows of what has run."""
    plans = {path.parent.name: Plan.load(path) for path in sorted(work.glob("*/plan.json")) if (path.parent / "step.json").exists()}
    steps = {name: decode(gpu.Step, json.loads((work / name / "step.json").read_text())) for name in plans}
    predicted = {name: plan.prediction["step_time"]["value"] for name, plan in plans.items()}
    if {"full-regions", "full-global"} <= set(plans):
        policies = {o.checkpoint for r in plans["full-global"].regions for o in r.options}
        own = ", ".join(f"{r.region} {r.options[0].checkpoint}" for r in plans["full-regions"].regions if r.options[0].checkpoint != "none")
        note = f"gem-full in {MEMORY / 1e9:.0f} GB: {own}; against {', '.join(sorted(policies))} everywhere"
        for what, seconds in (("predicted", predicted), ("measured", {name: step.seconds for name, step in steps.items()})):
            slow, fast = seconds["full-global"], seconds["full-regions"]
            yield Row(name=f"budgets by region against the best one for all, {what}: step time", value=slow / fast - 1, unit="relative", target=0.03,
                      note=f"{what}: {fast * 1e3:.1f} against {slow * 1e3:.1f} ms; {note}")
    if {"full-none", "full-quantized"} <= set(plans):
        none, low = steps["full-none"], steps["full-quantized"]
        note = (f"measured: gem-full, batch {plans['full-none'].local_batch}, in 8 bits or computed again: {low.saved / 1e9:.2f} of "
                f"{none.saved / 1e9:.2f} GB saved, peak {low.peak / 1e9:.2f} of {none.peak / 1e9:.2f} GB, {low.seconds * 1e3:.1f} against "
                f"{none.seconds * 1e3:.1f} ms")
        yield Row(name="quantised saved activations: less activation memory", value=1 - low.saved / none.saved, unit="share", target=0.4, note=note)
        yield Row(name="quantised saved activations: step time", value=low.seconds / none.seconds - 1, unit="relative", better="lower", target=0.04,
                  note=note)
    if {"wide-chosen", "wide-opposite"} <= set(plans) and below_16_bits(plans["wide-chosen"]):
        low, wide = steps["wide-chosen"], steps["wide-opposite"]
        yield Row(name="gem-wide: step in fp8 as the planner chooses it", value=wide.seconds / low.seconds, unit="x bf16", target=1.10,
                  note=f"measured: batch {plans['wide-chosen'].local_batch}, {low.seconds * 1e3:.1f} against {wide.seconds * 1e3:.1f} ms; "
                       f"{described(low)}; in bf16 {described(wide)}")
    for name in ("wide", "narrow"):
        chosen, opposite = f"{name}-chosen", f"{name}-opposite"
        if {chosen, opposite} <= set(plans):
            formats = sorted({o.precision for r in plans[chosen].regions for o in r.options})
            yield Row(name=f"the planner's choice for {plans[chosen].model.name} against its opposite", unit="x", target=1.0,
                      value=steps[opposite].seconds / steps[chosen].seconds,
                      note=f"chose {', '.join(formats)}: predicted {predicted[chosen] * 1e3:.1f} against {predicted[opposite] * 1e3:.1f} ms, "
                           f"measured {steps[chosen].seconds * 1e3:.1f} against {steps[opposite].seconds * 1e3:.1f} ms")
    if plans:
        distinct = {plan.identity(): name for name, plan in plans.items()}.values()  # one plan under two names counts once
        errors = {name: predicted[name] / steps[name].seconds - 1 for name in distinct}
        memory = {name: plans[name].prediction["memory"]["peak"]["value"] / steps[name].peak - 1 for name in distinct if steps[name].peak}
        for what, found, bar in (("step time", errors, STEP_ERROR), ("peak memory", memory, MEMORY_ERROR)):
            yield Row(name=f"prediction of these plans, {what}: median absolute error", unit="relative", better="lower", target=bar,
                      value=statistics.median(map(abs, found.values())) if found else None,
                      note="predicted / measured - 1: " + ", ".join(f"{name} {error:+.1%}" for name, error in found.items()))
