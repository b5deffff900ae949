"""What predictions on a GPU are scored by: step time, ranking within groups, memory, coverage of intervals (docs/results/fidelity-h200.md)."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Row
from costmodel.calibration import Calibration
from costmodel.calibration import load as load_calibration
from costmodel.conformal import SMALL_PHASE
from costmodel.estimate import estimate
from costmodel.hosttime import PREFIX, SLOW, SLOW_SHARE
from costmodel.plan import Plan
from costmodel.runresult import PHASES

GROUP_PLANS, COVERAGE = 5, 0.90
TRIMMED = 0.1
SPEED_ROUNDS = 25
# The constant that says how slow the host is expected to be, and what is notably slow.
EXPECTED, NOTABLY = f"{PREFIX}{SLOW}", 1.3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan with the prediction that it was written with, and what `benchmarks.fidelity_gpu.execute` found."""

    name: str
    group: str
    plan: Plan
    found: dict[str, Any]

    @property
    def measured(self) -> float:
        """Seconds a step: the median over visits of the `typical` one."""
        return statistics.median(self.found["visits_s"])

    @property
    def predicted(self) -> float:
        return self.plan.prediction["step_time"]["value"]

    @property
    def error(self) -> float:
        """Signed, relative: > 0 where the prediction is too slow."""
        return self.predicted / self.measured - 1

    @property
    def maker(self) -> str:
        """`host`, `device` or `either`, as it was predicted."""
        return self.plan.prediction["maker"]

    @property
    def noise(self) -> float:
        """Standard error of the measured step [s]: that of its steps, or where visits tell more apart, theirs."""
        steps, visits = np.array(self.found["steps_s"]), self.found["visits_s"]
        within = 1.48 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(len(steps))
        return max(within, statistics.stdev(visits) / math.sqrt(len(visits)) if len(visits) > 1 else 0.0)

    @property
    def slowness(self) -> np.ndarray:
        """How many times slower than at full speed the host was, by step."""
        found = np.mean(self.found["pieces_s"], axis=1)
        return np.maximum(1.0, found / self.found["full_speed_s"]) ** SLOW_SHARE

    def pairs(self) -> dict[str, tuple[float, float]]:
        """`step` and every phase: (predicted, measured) seconds."""
        phases = {name: (self.plan.prediction["phases"][name]["value"], statistics.median(self.found["visits_device_s"][name]))
                  for name in PHASES}
        return {"step": (self.predicted, self.measured), **phases}

    @property
    def allocated(self) -> float | None:
        """Bytes of the plan's own at the peak: without what the process had allocated before."""
        peak = self.found["measured"]["memory_bytes"]["peak_allocated"]
        return peak - self.found.get("held_before", 0) if peak else None

    @property
    def reserved(self) -> float | None:
        """Bytes that the device gave: the allocator's and the context."""
        reserved, context = self.found["measured"]["memory_bytes"]["reserved"], self.found["context_bytes"]
        return reserved + context if reserved and context is not None else None


def typical(seconds: Sequence[float]) -> float:
    """The mean without the shortest and longest TRIMMED of them: a shared host's cores run at one of two speeds, between which a median jumps."""
    cut = int(TRIMMED * len(seconds))
    return statistics.fmean(sorted(seconds)[cut:len(seconds) - cut])


def rows(runs: list[Run], calibration: Calibration, *, load: Path) -> list[Row]:
    """Figures of the whole set, then one row a plan. `calibration` carries the residuals; `load`: a file of it, to time reading it."""
    return [*_step_rows(runs), *_ranking_rows(runs), *_memory_rows(runs), *_interval_rows(runs, calibration), *_speed_rows(runs, load),
            *_host_rows(runs, calibration), *[_plan_row(one) for one in runs]]  # fmt: skip


def again_rows(runs: list[Run]) -> list[Row]:
    """The same runs under a later fit: what the model makes of them, no test of it."""
    errors, bias = _errors(runs)
    note = f"not blind: the calibration's samples fitted again by later code; {len(runs)} plans"
    return [Row(name=f"step time predicted again, absolute error: {name}", value=value, unit="%", better="lower", note=note)
            for name, value in (("median", float(np.median(errors))), ("p90", float(np.quantile(errors, 0.9))), ("worst", float(errors.max())),
                                ("bias", abs(bias)))]  # fmt: skip


def _errors(runs: list[Run]) -> tuple[np.ndarray, float]:
    """Absolute errors and bias [%]."""
    bias = 100 * math.expm1(float(np.mean([math.log1p(one.error) for one in runs])))
    return np.array([abs(one.error) for one in runs]) * 100, bias


def _bound_rows(runs: list[Run]) -> list[Row]:
    """Errors apart for steps that the device makes and steps that its host makes, as predicted."""
    found = []
    for maker, name in (("device", "the device"), ("host", "the host"), ("either", "either of them, by the host's speed,")):
        if chosen := [run for run in runs if run.maker == maker]:
            errors, bias = _errors(chosen)
            found.append(Row(name=f"steps that {name} was predicted to make: absolute error, median", value=float(np.median(errors)), unit="%",
                             better="lower", note=f"measured here, {len(chosen)} plans; worst {errors.max():.1f} %, bias {bias:+.1f} %"))  # fmt: skip
    return found


def _step_rows(runs: list[Run]) -> list[Row]:
    errors, bias = _errors(runs)
    note = f"measured here, {len(runs)} plans"
    return [
        Row(name="configurations scored", value=len(runs), unit="", target=40, note="measured here"),
        Row(name="step time, absolute error: median", value=float(np.median(errors)), unit="%", target=5, better="lower", note=note),
        Row(name="step time, absolute error: p90", value=float(np.quantile(errors, 0.9)), unit="%", target=10, better="lower", note=note),
        Row(name="step time, absolute error: worst", value=float(errors.max()), unit="%", target=20, better="lower", note=note),
        Row(name="step time bias", value=abs(bias), unit="%", target=2, better="lower",
            note=f"measured here; predictions are {'slow' if bias > 0 else 'fast'} on geometric mean"),
        *_bound_rows(runs),
        *[_phase_row(runs, phase) for phase in PHASES],
    ]  # fmt: skip


def _phase_row(runs: list[Run], phase: str) -> Row:
    off = [100 * (one.pairs()[phase][0] - one.pairs()[phase][1]) / one.measured for one in runs]
    return Row(name=f"phase {phase}: absolute error as share of the step, median", value=statistics.median(map(abs, off)), unit="% of step",
               better="lower", note=f"measured here; mean signed {statistics.fmean(off):+.1f} %")  # fmt: skip


def kendall(runs: list[Run]) -> float:
    """tau-b of predicted and measured order, measured differences below twice their noise counted as ties of the measurement."""
    agree = differ = tied = 0
    for i, a in enumerate(runs):
        for b in runs[i + 1:]:
            if abs(a.measured - b.measured) <= 2 * math.hypot(a.noise, b.noise):
                tied += 1
                continue
            same = (a.measured - b.measured) * (a.predicted - b.predicted)
            agree, differ = agree + (same > 0), differ + (same < 0)
    pairs = agree + differ
    # both sides may call a pair tied: such a pair is out of the numerator and out of both factors of the denominator
    return (agree - differ) / pairs if pairs else 1.0


def regret(runs: list[Run]) -> float:
    """Relative loss of taking the plan predicted fastest."""
    return min(runs, key=lambda one: one.predicted).measured / min(one.measured for one in runs) - 1


def _ranking_rows(runs: list[Run]) -> list[Row]:
    grouped: dict[str, list[Run]] = defaultdict(list)
    for one in runs:
        grouped[one.group].append(one)
    groups = [g for g in grouped.values() if len(g) >= GROUP_PLANS]
    found = [Row(name=f"groups of at least {GROUP_PLANS} plans", value=len(groups), unit="", target=8, note="measured here")]
    if not groups:
        return found
    taus, regrets = [kendall(g) for g in groups], [100 * regret(g) for g in groups]
    return [
        *found,
        Row(name="rank correlation within groups (Kendall tau-b), mean", value=statistics.fmean(taus), unit="", target=0.8,
            note=f"measured here; lowest {min(taus):.2f}; differences below twice the noise are ties"),
        Row(name="regret of the plan predicted fastest, median", value=statistics.median(regrets), unit="%", target=2, better="lower"),
        Row(name="regret of the plan predicted fastest, worst", value=max(regrets), unit="%", target=5, better="lower"),
    ]  # fmt: skip


def _memory_rows(runs: list[Run]) -> list[Row]:
    found = []
    pairs = {
        "peak allocated": [(one.plan.prediction["memory"]["peak"]["value"], one.allocated) for one in runs],
        "reserved and context": [(one.plan.prediction["memory"]["reserved"]["value"], one.reserved) for one in runs],
    }
    for name, values in pairs.items():
        errors = [100 * (predicted / measured - 1) for predicted, measured in values if measured]
        if errors:
            found.append(Row(name=f"{name}: absolute error, median", value=statistics.median(map(abs, errors)), unit="%",
                             target=3 if name == "peak allocated" else None, better="lower", note=f"measured here, {len(errors)} plans"))  # fmt: skip
            found.append(Row(name=f"{name}: furthest below the measurement", value=max(0.0, -min(errors)), unit="%", target=5, better="lower"))
    return found


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % Wilson band of a share."""
    share, spread = hits / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return centre - half, centre + half


def _host_rows(runs: list[Run], calibration: Calibration) -> list[Row]:
    """A diagnosis beside the score: how slow the host was while steps ran, and the errors of predictions that are told so, where the calibration
    tells the host's slowness from its figures."""
    runs = [one for one in runs if one.found.get("visits_slow")]
    if not runs:
        return []
    slow = np.concatenate([one.slowness for one in runs])
    note = f"diagnosis, not scored: a piece of Python before and after each of {len(slow)} steps of {len(runs)} plans"
    known = calibration.constants.get(EXPECTED)
    expected = "" if known is None else f"; {known:.2f} was expected"
    found = [Row(name="host while plans ran: times slower than at full speed, mean over steps", value=float(slow.mean()), unit="", better="lower",
                 note=note + expected),
             Row(name=f"host while plans ran: steps at which it was more than {NOTABLY:g} times slower", value=100 * float(np.mean(slow > NOTABLY)),
                 unit="%", better="lower", note=note)]  # fmt: skip
    if known is None:
        return found
    told = [(one, _told(one, calibration) / one.measured - 1.0) for one in runs]
    for name, chosen in (("all plans", told), ("plans that the host was predicted to make", [(one, e) for one, e in told if one.maker == "host"]),
                         ("plans that either was predicted to make", [(one, e) for one, e in told if one.maker == "either"])):  # fmt: skip
        if chosen:
            errors = np.array([100 * abs(e) for _, e in chosen])
            bias = 100 * math.expm1(float(np.mean([math.log1p(e) for _, e in chosen])))
            note = (f"diagnosis, not scored: predicted again, by present code, with the host as slow as it was in each visit; {len(chosen)} plans; "
                    f"predictions are {'slow' if bias > 0 else 'fast'} on geometric mean")
            figures = {"median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9)), "worst": float(errors.max()), "bias": abs(bias)}
            found += [Row(name=f"step time told of the host's speed, {name}: {what}", value=value, unit="%", better="lower", note=note)
                      for what, value in figures.items()]  # fmt: skip
    return found


def _told(one: Run, calibration: Calibration) -> float:
    """Seconds a step with the host as slow as it was: the median over visits, as what is measured."""
    return statistics.median(estimate(one.plan, calibration.with_constants({EXPECTED: slow})).step_time.value for slow in one.found["visits_slow"])


def _interval_rows(runs: list[Run], calibration: Calibration) -> list[Row]:
    """Of the step and every phase of at least SMALL_PHASE of it, under the calibration with its residuals; points stay as they were predicted."""
    hits, widths = [], []
    for one in runs:
        made = estimate(one.plan, calibration)
        quantities = {"step": made.step_time, **made.phases}
        for name, (predicted, measured) in one.pairs().items():
            quantity = quantities[name]
            if measured < SMALL_PHASE * one.measured or quantity.value <= 0:
                continue
            scale = predicted / quantity.value  # 1 unless the model has changed since
            hits.append(quantity.low * scale <= measured <= quantity.high * scale)
            widths.append(100 * (quantity.high - quantity.low) / quantity.value)
    if not hits:
        return []
    low, high = wilson(sum(hits), len(hits))
    note = f"measured here, {len(hits)} predictions; 95 % Wilson band {low:.1%}-{high:.1%} {'holds' if low <= COVERAGE <= high else 'misses'} 90 %"
    return [
        Row(name="90 % intervals: distance of the coverage's 95 % Wilson band from 90 %", value=100 * max(0.0, low - COVERAGE, COVERAGE - high),
            unit="%", target=0, better="lower", note=note),
        Row(name="90 % intervals: coverage", value=100 * statistics.fmean(hits), unit="%", note=note),
        Row(name="90 % intervals: predictions", value=len(hits), unit="", target=200),
        Row(name="90 % intervals: width, median", value=statistics.median(widths), unit="%", aim=12, better="lower"),
    ]  # fmt: skip


def _speed_rows(runs: list[Run], path: Path) -> list[Row]:
    """Of SPEED_ROUNDS rounds, each under a calibration read anew, whose curves nothing has asked yet, the least: other programs run beside."""
    times, loaded = [math.inf] * len(runs), math.inf
    for _ in range(SPEED_ROUNDS):
        start = time.perf_counter()
        calibration = load_calibration(path)
        loaded = min(loaded, time.perf_counter() - start)
        estimate(runs[0].plan, calibration)  # makes the curves ready
        for i, one in enumerate(runs):
            start = time.process_time()
            estimate(one.plan, calibration)
            times[i] = min(times[i], time.process_time() - start)
    least = f"the least of {SPEED_ROUNDS} rounds"
    return [Row(name="prediction of one plan, median", value=1e3 * statistics.median(times), unit="ms", target=5, better="lower",
                note=f"processor time, {least}"),
            Row(name="loading the calibration", value=1e3 * loaded, unit="ms", target=50, better="lower", note=least)]  # fmt: skip


def _plan_row(one: Run) -> Row:
    plan, layer = one.plan, one.plan.model.sequences[0].layers[0]
    lengths = plan.workload.lengths[plan.model.sequences[0].name]
    option = next(r for r in plan.regions if r.region.split(".")[-1].isdigit()).options[0]
    what = (f"{layer.kind} x{layer.count} D{plan.model.dim} head dim {layer.head_dim} mlp {layer.mlp_dim}, "
            f"histories {lengths.kind} <= {lengths.maximum}, "
            f"batch {plan.local_batch} x {plan.accumulation}, {option.precision}, checkpoint {option.checkpoint}, {plan.execution}")  # fmt: skip
    phases = ", ".join(f"{name} {1e3 * measured:.2f} ({1e3 * predicted:.2f})" for name, (predicted, measured) in one.pairs().items()
                       if name != "step" and measured > SMALL_PHASE * one.measured)  # fmt: skip
    slow = "".join(f" {slow:.2f}" for slow in one.found.get("visits_slow", ()))
    host = f", host slower by{slow}" if slow else ""
    return Row(name=f"plan {one.name}", value=one.measured * 1e3, unit="ms a step", better="lower",
               note=f"predicted {one.predicted * 1e3:.2f} ms ({one.error:+.1%}) by the {one.maker}; {what}; phases (predicted): {phases}; "
                    f"visits {' '.join(f'{1e3 * visit:.2f}' for visit in one.found['visits_s'])} ms{host}{_memory_note(one)}")  # fmt: skip


def _memory_note(one: Run) -> str:
    """Measured and predicted peak and reserved bytes, and what the process had held before."""
    if not one.allocated or not one.reserved:
        return ""
    memory = one.plan.prediction["memory"]
    return (f"; allocated {one.allocated / 1e9:.2f} GB ({memory['peak']['value'] / 1e9:.2f}), reserved and context {one.reserved / 1e9:.2f} GB "
            f"({memory['reserved']['value'] / 1e9:.2f}), held before {one.found.get('held_before', 0) / 1e9:.2f} GB")
