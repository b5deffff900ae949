"""One screen per verb: predictions, plans, comparisons as tables of text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from costmodel.estimate import Estimate
from costmodel.plan import Plan
from costmodel.units import show, show_count, show_gib
from planner.report.console import grid


def seconds(value: float | None) -> str:
    return "-" if value is None else show(value, "seconds")


def gib(value: float | None) -> str:
    return "-" if value is None else show_gib(value)


def percent(value: float | None, *, sign: bool = False) -> str:
    return "-" if value is None else f"{value:+.1%}" if sign else f"{value:.1%}"


def dollars(value: float | None) -> str:
    return "-" if value is None else f"${value:,.2f}" if value < 1e4 else f"${value:,.0f}"


def interval(quantity: Mapping[str, Any] | None) -> str:
    return "-" if not quantity else f"{seconds(quantity['low'])} .. {seconds(quantity['high'])}"


def options(plan: Plan) -> list[list[str]]:
    """A row per region: its blocks, number formats and checkpoint policies."""
    return [
        [
            region.region,
            str(sum(o.count for o in region.options)),
            ", ".join((f"{o.count} x " if len(region.options) > 1 else "") + f"{o.precision} {o.checkpoint}" for o in region.options),
        ]
        for region in plan.regions
    ]


def sharding(plan: Plan) -> str:
    """E.g. `36 table_wise, 4 row_wise`."""
    counts = Counter(table.sharding for table in plan.tables)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def plan_line(plan: Plan) -> str:
    """The choice in one line."""
    steps, ahead = f" x {plan.accumulation}" if plan.accumulation > 1 else "", ", ids ahead" if plan.input_overlap else ""
    ahead += f", tables {plan.tables_ahead} blocks ahead" if plan.tables_ahead else ""
    return (
        f"{plan.layout.short}, local batch {plan.local_batch}{steps}, {plan.batching}, {plan.transport}, {plan.execution}{ahead}; "
        f"tables: {sharding(plan)}"
    )


def plan_tables(plan: Plan) -> Group:
    """What a plan does."""
    model, cluster = plan.model, plan.cluster
    head = [
        f"{plan.scenario}: {model.name} on {cluster.name} ({cluster.num_ranks} x {cluster.device.name}), workload {plan.workload.name}",
        plan_line(plan),
    ]
    if plan.emulated:
        head += ["emulated:"] + [f"  - {reason}" for reason in plan.emulated]
    if plan.predict_only:
        head += ["predict-only:"] + [f"  - {reason}" for reason in plan.predict_only]
    return Group(
        Text("\n".join(head)), Text(""), grid("", [("region", "left"), ("blocks", "right"), ("precision and checkpoint", "left")], options(plan))
    )


def estimate_tables(estimate: Estimate) -> Group:
    """Step time by phase, memory by category, and what limits the step."""
    step = estimate.step_time
    rows = [[name, seconds(q.value), interval(dataclasses.asdict(q)), percent(q.value / step.value), q.source] for name, q in estimate.phases.items()]
    rows.append(["step", seconds(step.value), interval(dataclasses.asdict(step)), "100.0%", step.source])
    times = grid("time", [("phase", "left"), ("predicted", "right"), ("90 % interval", "right"), ("share", "right"), ("source", "left")], rows)
    memory = estimate.memory
    cells = [[name, gib(value)] for name, value in memory.categories.items() if value > 0]
    cells += [
        [f"peak allocated ({memory.peak_phase})", gib(memory.peak.value)],
        ["reserved", gib(memory.reserved.value)],
        ["limit", gib(memory.limit) + ("" if memory.fits else ": does not fit")],
    ]
    space = grid("memory of a rank", [("category", "left"), ("bytes", "right")], cells)
    lines = [
        f"limited by {estimate.limiting} ({estimate.mode}); {show_count(estimate.examples_per_second)} examples/s; "
        f"local MFU {percent(estimate.local_mfu)} of {show(estimate.mfu_peak, 'FLOP/s')}; "
        f"{dollars(estimate.dollars_per_billion_examples)} per billion examples"
    ]
    if estimate.exposed:
        lines.append("exposed: " + ", ".join(f"{tier} {seconds(value)}" for tier, value in estimate.exposed.items()))
    lines.append("sources: " + ", ".join(f"{source} {percent(share)}" for source, share in estimate.by_source.items()))
    return Group(times, Text(""), space, Text(""), Text("\n".join(lines)))


def comparison_tables(comparison: Mapping[str, Any]) -> Group:
    """Predicted against measured."""
    step = comparison["step_time_s"]
    rows = [[name, seconds(p["predicted"]), seconds(p["measured"]), percent(p["error"], sign=True)] for name, p in comparison["phases_s"].items()]
    rows.append(["step (median)", seconds(step["predicted"]), seconds(step["measured"]), percent(step["error"], sign=True)])
    times = grid(
        "time",
        [("phase", "left"), ("predicted", "right"), ("measured", "right"), ("error", "right")],
        rows,
        caption=f"90 % interval of the step: {interval(step) if step['low'] is not None else '-'}",
    )
    cells = [[name, gib(p["predicted"]), gib(p["measured"]), percent(p["error"], sign=True)] for name, p in comparison["memory_bytes"].items()]
    if not cells:
        return Group(times)
    space = grid("memory of a rank", [("category", "left"), ("predicted", "right"), ("measured", "right"), ("error", "right")], cells)
    return Group(times, Text(""), space)


def quality_table(quality: Mapping[str, float]) -> Group | None:
    """Normalized entropy on held-out events, beside the baselines."""
    rows = [
        [name.removeprefix("ne.") if name.startswith("ne.") else f"baseline: {name.removeprefix('baseline.')}", f"{value:.4f}"]
        for name, value in quality.items()
    ]
    return grid("normalized entropy on later events (lower is better)", [("predictor", "left"), ("NE", "right")], rows) if rows else None
