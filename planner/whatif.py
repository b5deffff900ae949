"""`planner whatif`: searches a scenario and each of its variants, and lays the answers side by side.

A variant that has no feasible plan is a row that says so; the others still stand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from costmodel.codec import encode
from planner import api
from planner.errors import NoFeasiblePlan, UsageError
from planner.report.terminal import sharding
from planner.scenario import ResolvedScenario, load_scenario


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant's answer; `base` is the first row's name. Figures are None, and `reason` says why, where there is no feasible plan.

    job: accumulation, batching, transport and execution.
    step_time_s with its interval; memory_bytes reserved per rank; speedup and cost_ratio against the base (> 1 is faster, < 1 is cheaper).
    """

    name: str
    changes: dict[str, Any]
    cluster: str
    num_ranks: int
    layout: str | None = None
    local_batch: int | None = None
    job: str | None = None
    sharding: str | None = None
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    source: str | None = None
    examples_per_second: float | None = None
    dollars_per_billion_examples: float | None = None
    memory_bytes: float | None = None
    limiting: str | None = None
    speedup: float | None = None
    cost_ratio: float | None = None
    different: tuple[str, ...] = ()
    reason: str = ""


def compare(
    reference: Path | str, *, time_limit: float | None = None, calibrated_only: bool = False, progress: Callable[[str], None] = lambda name: None
) -> list[Row]:
    """The base and all variants, in the scenario's order. Raises UsageError when the scenario lists none, and NoFeasiblePlan when nothing fits."""
    base = load_scenario(reference)
    if not base.variants:
        raise UsageError(f"{base.path}: no `variants` and no `vary`: nothing to compare with; see scenarios/gem-512xh200.yaml")
    rows = list(_rows(base, time_limit, calibrated_only, progress))
    if all(row.step_time_s is None for row in rows):
        raise NoFeasiblePlan("\n".join(f"{row.name}: {row.reason}" for row in rows))
    return rows


def _rows(base: ResolvedScenario, time_limit: float | None, calibrated_only: bool, progress: Callable[[str], None]) -> Iterator[Row]:
    first: Row | None = None
    for scenario in (base, *base.variants):
        progress(scenario.name)
        row = _row(scenario, time_limit, calibrated_only)
        first = first or row
        yield _against(row, first)


def _row(scenario: ResolvedScenario, time_limit: float | None, calibrated_only: bool) -> Row:
    changes = {change.key: change.after for change in scenario.changes}
    try:
        result, _ = api.search(scenario, time_limit=time_limit, top=1, calibrated_only=calibrated_only)
    except NoFeasiblePlan as error:
        return Row(name=scenario.name, changes=changes, cluster=scenario.cluster.name, num_ranks=scenario.cluster.num_ranks, reason=str(error))
    plan, prediction = result.plan, result.plan.prediction
    step = prediction["step_time"]
    options = {r.region: ", ".join(f"{o.count} {o.precision} {o.checkpoint}" for o in r.options) for r in plan.regions}
    return Row(
        name=scenario.name,
        changes=changes,
        cluster=scenario.cluster.name,
        num_ranks=scenario.cluster.num_ranks,
        layout=plan.layout.short,
        local_batch=plan.local_batch,
        job=f"accumulation {plan.accumulation}, {plan.batching}, {plan.transport}, {plan.execution}",
        sharding=sharding(plan),
        options=options,
        step_time_s=step["value"],
        low_s=step["low"],
        high_s=step["high"],
        source=step["source"],
        examples_per_second=prediction["examples_per_second"],
        dollars_per_billion_examples=prediction["dollars_per_billion_examples"],
        memory_bytes=prediction["memory"]["reserved"]["value"],
        limiting=prediction["limiting"],
    )


def _against(row: Row, base: Row) -> Row:
    if row.step_time_s is None or base.step_time_s is None:
        return row
    assert row.examples_per_second is not None and base.examples_per_second is not None
    ratio = (
        row.dollars_per_billion_examples / base.dollars_per_billion_examples
        if row.dollars_per_billion_examples and base.dollars_per_billion_examples
        else None
    )
    different = [name for name in ("layout", "local_batch", "job", "sharding", "limiting") if getattr(row, name) != getattr(base, name)]
    different += [f"{region}: {value}" for region, value in row.options.items() if base.options.get(region) not in (None, value)]
    return dataclasses.replace(row, speedup=row.examples_per_second / base.examples_per_second, cost_ratio=ratio, different=tuple(different))


def to_json(rows: list[Row]) -> dict[str, Any]:
    """JSON-ready; the first row is the base."""
    return {"base": rows[0].name, "rows": [encode(row) for row in rows]}
