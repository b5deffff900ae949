"""docs/results/multi-gpu.{md,json}: what ran on several GPUs against what was predicted, and what the links and copies gave."""
from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import multi_gpu_space as space
from benchmarks import results
from benchmarks.fidelity_gpu import MEASURED
from benchmarks.results import Row
from costmodel import contention
from costmodel.calibration import Calibration
from costmodel.calibration import load as load_calibration
from costmodel.comms import GroupShape, network
from costmodel.plan import Plan
from costmodel.runresult import PHASES
from costmodel.samples import Sample, read_samples

# The planner's first choice and the next.
CHOICES = ["full-pick", "full-runner-up"]
STEP, MEMORY, REGRET, SCALING, WANTED = 7.0, 5.0, 3.0, 5.0, 8
# Exposed communication holds within this share or so many seconds.
EXPOSED_SHARE, EXPOSED_SECONDS = 0.15, 1e-3
# What is written where a share is no measurement, and since when a collective's attention outlasts its own launches.
UNSEEN = "not measured: the attention was launched more slowly than it ran, so that nothing could be lost"
ATTENTION_SINCE = datetime.datetime.fromisoformat("2026-11-30T22:33:02+00:00")
# Relative difference of a step's loss on several GPUs from that on one: sums in another order; and in bf16 products rounded to 8 bits besides.
LOSS = {"fp32": 1e-4, "bf16": 1e-2}
LEASE = 1.0
# Plans that deal a step's samples in another order train other steps.
SAME_STEPS = ("jagged", "padded", "local")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A plan with the prediction that it was written with, and its run.json; `where`: the stamp of its run (`results.stamped`);
    `after`: what the model made of it later (`multi_gpu.predict_after`)."""

    name: str
    plan: Plan
    found: dict[str, Any]
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    after: dict[str, Any] | None = None

    @property
    def measured(self) -> float:
        return self.found["step_s"]

    @property
    def predicted(self) -> float:
        return self.plan.prediction["step_time"]["value"]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def exposed(self) -> tuple[float, float]:
        """(predicted, measured) exposed communication of a step; measured in the trace, on a CPU by the main thread's waits."""
        traced = self.found["exposed_s"]
        if traced is None:
            return self.plan.prediction["phases"]["exposed_communication"]["value"], self.found["device_s"]["exposed_communication"]
        return exposed_in(self.plan.prediction), traced

    @property
    def exposed_holds(self) -> bool:
        predicted, measured = self.exposed
        return abs(predicted - measured) <= max(EXPOSED_SHARE * measured, EXPOSED_SECONDS)

    @property
    def memory(self) -> tuple[float, float] | None:
        """(predicted, measured) peak bytes of the allocator; None on a CPU."""
        measured = self.found["memory_bytes"].get("peak_allocated")
        return (self.plan.prediction["memory"]["peak"]["value"], measured) if measured else None

    @property
    def hindsight(self) -> Ran | None:
        """The same with what the model made of it later in the place of its prediction."""
        if self.after is None:
            return None
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, prediction=self.after["prediction"]), after=None)

    @property
    def ranks(self) -> int:
        return self.plan.layout.world_size

    @property
    def precision(self) -> str:
        return "bf16" if any(o.precision == "bf16" for r in self.plan.regions for o in r.options) else "fp32"


def load(work: Path) -> tuple[list[Ran], list[str]]:
    """(runs, failures in words)."""
    ran, failed = [], []
    for name in json.loads((work / "plans.json").read_text()):
        path = work / name / "run.json"
        if path.exists():
            found = json.loads(path.read_text())
            if "failed" in found:
                failed.append(f"{name}: {found['failed']}")
            else:
                ran.append(Ran(name=name, plan=space.recorded(work / name), found=found, where=_where(work, name, found),
                               after=json.loads(later.read_text()) if (later := work / name / "after.json").exists() else None))
    return ran, failed


def exposed_in(prediction: dict[str, Any]) -> float:
    """Seconds of a collective with no compute beside it, as a trace shows them; predictions older than that figure have compute's waits alone."""
    return prediction["alone"] if "alone" in prediction else prediction["phases"]["exposed_communication"]["value"]


def _where(work: Path, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """When and on what a plan ran: its own stamp, else the launch's."""
    path = work / MEASURED
    return found.get("measured") or (json.loads(path.read_text()) if path.exists() else {})


def same_lease(one: Ran, other: Ran) -> bool:
    """Whether two runs are of one host within `LEASE` hours; runs without a stamp are taken for such."""
    a, b = one.where, other.where
    if not a or not b:
        return True
    apart = abs(datetime.datetime.fromisoformat(a["date"]) - datetime.datetime.fromisoformat(b["date"]))
    return a["environment"]["cpu"] == b["environment"]["cpu"] and apart < datetime.timedelta(hours=LEASE)


def report(work: Path, device: str, *, out: Path, note: str = "") -> Path:
    """Writes the result file; without a plan on several ranks what is known of links and of plans on one. Where no link was timed here, rows of an
    earlier file stay, each with its own date. `note`: what else is to be known of the runs. Raises SystemExit where nothing has run."""
    ran, failed = load(work)
    several, links = any(one.ranks > 1 for one in ran), link_rows(work)
    if not several and not links:
        raise SystemExit(f"{work}: no plan on several ranks has run yet and no link was timed; failed: {'; '.join(failed) or 'none'}")
    measured = json.loads((work / MEASURED).read_text()) if (work / MEASURED).exists() else None
    rows = [*(plan_rows(ran, measured) if several else [_none_row(work), *map(_plan_row, ran)]), *links]
    names = [one.name for one in ran] or json.loads((work / "plans.json").read_text())
    plans = {name: space.recorded(work / name) for name in names}
    what = space.describe(plans) if device == "cuda" else "The plans of several GPUs, shrunk, on two CPU ranks"
    intro = (f"{what}. Every plan was predicted before it ran; nothing of a run entered the calibration. Batches were built beforehand and repeated, "
             f"and the predictions leave the loader out. Exposed communication is what the devices' traces show of collectives with nothing beside "
             f"them. Failed: {'; '.join(failed) or 'none'}.")  # fmt: skip
    intro = f"{intro} {note}".strip()
    name = "multi-gpu" if device == "cuda" else "multi-gpu-cpu"
    return results.write(name, rows, command=f"python -m benchmarks.multi_gpu --device {device}", title="Several GPUs of one host" if device == "cuda"
                         else "Several CPU ranks", intro=intro, out=out, measured=measured, resume=True, keep=_of_links,
                         stamps={f"plan {one.name}": {k: one.where[k] for k in ("date", "commit")} for one in ran if one.where})  # fmt: skip


def _of_links(row: dict[str, Any]) -> dict[str, Any] | None:
    """Of an earlier file's rows those of links, with dates of their own in the JSON. Attention was launched more slowly than it ran until
    `ATTENTION_SINCE`: what was timed beside it before is none."""
    if not any(word in row["name"] for word in (" beside ", "host link", "largest message", "uneven all-to-alls", "sparse exchange")):
        return None
    if " beside attention" in row["name"] and datetime.datetime.fromisoformat(row["date"]) < ATTENTION_SINCE:
        return {**row, "value": None, "note": UNSEEN}
    return row


def _none_row(work: Path) -> Row:
    plans = [space.recorded(work / name) for name in json.loads((work / "plans.json").read_text())]
    return Row(name="plans scored", value=0, unit="", target=WANTED,
               note=f"{sum(p.layout.world_size > 1 for p in plans)} are predicted and wait; step error, exposed communication, memory, regret, "
                    "scaling and equal losses are not measured")


def plan_rows(ran: list[Ran], launch: dict[str, Any] | None = None) -> list[Row]:
    """Figures of the whole set, then one row a plan; `launch`: the stamp of the launch that most ran in."""
    several = [one for one in ran if one.ranks > 1]
    errors = [100 * abs(one.error) for one in several]
    bias = 100 * math.expm1(statistics.fmean(math.log1p(one.error) for one in several))
    note = f"measured here, {len(several)} plans on {several[0].ranks} ranks"
    rows = [
        Row(name="plans scored", value=len(several), unit="", target=WANTED, note=note),
        Row(name="step time, absolute error: median", value=statistics.median(errors), unit="%", target=STEP, better="lower", note=note),
        Row(name="step time, absolute error: worst", value=max(errors), unit="%", better="lower", note=note),
        Row(name="step time bias", value=abs(bias), unit="%", better="lower",
            note=f"predictions are {'slow' if bias > 0 else 'fast'} on geometric mean"),
        Row(name="exposed communication: plans within 15 % or 1 ms", value=100 * statistics.fmean(one.exposed_holds for one in several), unit="%",
            target=100, note="predicted against the trace, mean over ranks, waiting for a slower rank included"),
        Row(name="exposed communication: absolute error, median", value=1e3 * statistics.median(abs(p - m) for p, m in (o.exposed for o in several)),
            unit="ms", better="lower", note=note),
        *[_phase_row(several, phase) for phase in PHASES], *_memory_rows(several), *_regret_rows(several), *_scaling_rows(ran), *_loss_rows(ran),
    ]  # fmt: skip
    return rows + [_plan_row(one, launch) for one in ran] + _after_rows(several)


def _after_rows(several: list[Ran]) -> list[Row]:
    """What the model says of the same plans after they were seen."""
    later = [found for one in several if (found := one.hindsight) is not None]
    if not later:
        return []
    commits = ", ".join(sorted({one.after["commit"] for one in several if one.after is not None}))
    note = f"the model of commit {commits} on runs that it was mended by: no score"
    errors, exposed = [100 * one.error for one in later], [one.exposed for one in later]
    bias = 100 * math.expm1(statistics.fmean(math.log1p(one.error) for one in later))
    as_slow = [(one, one.after["as_slow"]) for one in several if one.after is not None and "as_slow" in one.after]
    each = "; ".join(f"{one.name} step {one.error:+.1%}, exposed {1e3 * p:.1f}/{1e3 * m:.1f} ms" for one, (p, m) in zip(later, exposed))
    return [Row(name="after the fact: step time, absolute error: median", value=statistics.median(map(abs, errors)), unit="%", better="lower",
                note=note),
            Row(name="after the fact: step time bias", value=abs(bias), unit="%", better="lower",
                note=f"{'slow' if bias > 0 else 'fast'} on geometric mean; no score"),
            Row(name="after the fact: exposed communication, absolute error: median", value=1e3 * statistics.median(abs(p - m) for p, m in exposed),
                unit="ms", better="lower", note=note),
            Row(name="after the fact: exposed communication, plans within 15 % or 1 ms",
                value=100 * statistics.fmean(one.exposed_holds for one in later), unit="%", note=each), *_as_slow_rows(as_slow)]  # fmt: skip


def _as_slow_rows(found: list[tuple[Ran, dict[str, float]]]) -> list[Row]:
    """What is left of the errors where the model is told how slow each main thread was."""
    if not found:
        return []
    note = "; ".join(f"{one.name} step {slow['step_s'] / one.measured - 1:+.1%}, exposed {1e3 * slow['alone_s']:.1f}/{1e3 * one.exposed[1]:.1f} ms"
                     for one, slow in found)
    return [Row(name="after the fact, main threads as slow as they were: step time, absolute error: median", unit="%", better="lower",
                value=statistics.median(100 * abs(slow["step_s"] / one.measured - 1) for one, slow in found), note=f"a diagnosis, no score: {note}"),
            Row(name="after the fact, main threads as slow as they were: exposed communication, absolute error: median", unit="ms",
                value=1e3 * statistics.median(abs(slow["alone_s"] - one.exposed[1]) for one, slow in found), better="lower",
                note="a diagnosis, no score")]  # fmt: skip


def _phase_row(ran: list[Ran], phase: str) -> Row:
    off = [100 * (one.plan.prediction["phases"][phase]["value"] - one.found["device_s"][phase]) / one.measured for one in ran]
    return Row(name=f"phase {phase}: absolute error as share of the step, median", value=statistics.median(map(abs, off)), unit="% of step",
               better="lower", note=f"mean signed {statistics.fmean(off):+.1f} %; by the streams' own events")  # fmt: skip


def _memory_rows(ran: list[Ran]) -> list[Row]:
    errors = [100 * (memory[0] / memory[1] - 1) for one in ran if (memory := one.memory) is not None]
    if not errors:
        return []
    return [Row(name="peak memory: absolute error, median", value=statistics.median(map(abs, errors)), unit="%", target=MEMORY, better="lower",
                note=f"allocated, {len(errors)} plans"),
            Row(name="peak memory: absolute error, worst", value=max(map(abs, errors)), unit="%", better="lower")]  # fmt: skip


def _regret_rows(ran: list[Ran]) -> list[Row]:
    """Of each subject with several plans, what the plan predicted best loses to the best; of `full` also what the planner's pick loses."""
    groups: dict[str, list[Ran]] = defaultdict(list)
    for one in ran:
        groups[space.subject(one.name)].append(one)
    rows = []
    for subject, group in groups.items():
        best = min(group, key=lambda one: one.measured)
        if len(group) < 2:
            continue
        chosen = min(group, key=lambda one: one.predicted)
        rows.append(Row(name=f"{subject}: regret of the plan predicted best", value=100 * (chosen.measured / best.measured - 1), unit="%",
                        target=REGRET, better="lower", note=f"{len(group)} plans; predicted best {chosen.name}, measured best {best.name}"))
        for one in group:
            if one.name in CHOICES:
                rows.append(Row(name=f"{one.name}: slower than the best measured", value=100 * (one.measured / best.measured - 1), unit="%",
                                better="lower", note=f"best {best.name}"))
    return rows


def _scaling_rows(ran: list[Ran]) -> list[Row]:
    """What going from one GPU to several keeps: a step on one with a rank's batch over the step of each plan of the same recipe on all of them. And
    what the FSDP plan of each subject gains with the same global batch."""
    by_name = {one.name: one for one in ran}
    rows = []
    for name, one in by_name.items():
        subject, kind = space.subject(name), name.rsplit("-", 1)[1]
        what = {"local": "scaling ratio 1 -> {}, a rank's batch", "one": "speed-up 1 -> {}, the same global batch"}.get(kind)
        if what is None or one.ranks > 1:
            continue
        several = [o for o in ran if o.ranks > 1 and space.subject(o.name) == subject and _same_recipe(o, one)]
        several = several if kind == "local" else [o for o in several if o.name == f"{subject}-fsdp"]
        if not several:
            continue
        ratios = [(o.name, one.predicted / o.predicted, one.measured / o.measured) for o in several]
        errors = [100 * abs(predicted / measured - 1) for _, predicted, measured in ratios]
        note = "; ".join(f"{n.removeprefix(subject + '-')} predicted {p:.3f}, measured {m:.3f}" for n, p, m in ratios)
        rows.append(Row(name=f"{subject}: {what.format(several[0].ranks)}, absolute error: median", value=statistics.median(errors), unit="%",
                        target=SCALING, better="lower", note=note + _other_lease(one, several[0])))
    return rows


def _same_recipe(several: Ran, one: Ran) -> bool:
    """Whether blocks are computed alike: one micro-batch, formats and policies, true histories dealt as they come."""
    a, b = several.plan, one.plan
    return (a.regions, a.accumulation, a.batching) == (b.regions, b.accumulation, b.batching)


def _other_lease(one: Ran, several: Ran) -> str:
    if same_lease(one, several):
        return ""
    return (f". One GPU ran on another lease ({one.where['date']}, commit {one.where['commit']}, {one.where['environment']['cpu']}), the others on "
            f"{several.where['date']}, commit {several.where['commit']}, {several.where['environment']['cpu']}: hosts and code differ as well")


def loss_difference(one: Ran, alone: Ran) -> float:
    """The largest relative difference of a step's loss."""
    pairs = list(zip(one.found["losses"], alone.found["losses"]))
    return max(abs(a - b) / abs(b) for a, b in pairs)


def _loss_rows(ran: list[Ran]) -> list[Row]:
    alone = {space.subject(one.name): one for one in ran if one.ranks == 1 and one.name.endswith("-one")}
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for one in ran:
        other = alone.get(space.subject(one.name))
        comparable = other is not None and one.ranks > 1 and one.plan.batching in SAME_STEPS and one.precision == other.precision
        if comparable and (one.plan.layout.sparse_replicas == 1):  # replicas of tables average another optimizer's state: another training
            found[one.precision].append((loss_difference(one, other), one.name))
    again = defaultdict(list)
    for one in ran:
        if one.name.endswith("-one-micro") and (other := alone.get(space.subject(one.name))) is not None:
            again[one.precision].append(loss_difference(one, other))
    return [Row(name=f"losses as on one rank, {precision}: largest relative difference", value=max(values)[0], unit="", target=LOSS[precision],
                better="lower", note=f"{len(values)} plans, worst {max(values)[1]}; every step from the first"
                                     + (f"; one rank in two micro-batches differs by {max(again[precision]):.2g}" if again[precision] else ""))
            for precision, values in sorted(found.items())]  # fmt: skip


def _plan_row(one: Ran, launch: dict[str, Any] | None = None) -> Row:
    predicted, measured = one.exposed
    plan = one.plan
    policies = sorted({o.checkpoint for r in plan.regions for o in r.options})
    phases = ", ".join(f"{name} {1e3 * plan.prediction['phases'][name]['value']:.2f}/{1e3 * one.found['device_s'][name]:.2f}" for name in PHASES)
    memory = f"; peak {one.memory[0] / 1e9:.2f}/{one.memory[1] / 1e9:.2f} GB" if one.memory else ""
    sharding = ", ".join(sorted({t.sharding for t in plan.tables})) + (", ids ahead" if plan.input_overlap else "") + (
        f", tables {plan.tables_ahead} blocks ahead" if plan.tables_ahead else "")
    return Row(name=f"plan {one.name}", value=1e3 * one.measured, unit="ms a step", better="lower",
               note=f"predicted {1e3 * one.predicted:.2f} ms ({one.error:+.1%}); {plan.layout.short}, batch {plan.local_batch} x "
                    f"{plan.accumulation}, {plan.batching}, {one.precision}, checkpoint {', '.join(policies)}, {sharding}; "
                    f"predicted/measured ms: exposed in the trace {1e3 * predicted:.2f}/{1e3 * measured:.2f}, {phases}{memory}"
                    + _by_rank(one) + _when(one, launch))  # fmt: skip


def _when(one: Ran, launch: dict[str, Any] | None) -> str:
    """When and where, of a plan that was not in the launch that the file is of."""
    if not launch or same_lease(one, dataclasses.replace(one, where=launch)):
        return ""
    return f"; on another lease, {one.where['date']}, commit {one.where['commit']}, {one.where['environment']['cpu']}"


def _by_rank(one: Ran) -> str:
    """What each rank's main thread spent on forward and backward, and what its trace shows of collectives alone: who was late, and who waited."""
    hosts = [rank["host"] for rank in one.found.get("ranks", [])]
    traces = [trace for trace in one.found.get("traces", []) if trace]
    if one.ranks == 1 or not hosts:
        return ""
    spent = ", ".join(f"{1e3 * host['forward']:.1f} + {1e3 * host['backward']:.1f}" for host in hosts)
    alone = ", ".join(f"{1e3 * trace['exposed_s']:.1f}" for trace in traces)
    return f"; main thread forward + backward by rank {spent} ms" + (f"; exposed by rank {alone} ms" if alone else "")


# --- links ---


def link_rows(work: Path) -> list[Row]:
    """What the calibration saw of collectives, contention and copies; nothing where there was none."""
    rows: list[Row] = []
    if (work / "collectives.jsonl").exists():
        _, samples = read_samples(work / "collectives.jsonl")
        rows += _curve_rows(samples)
    if (work / "beside.json").exists():
        notes = json.loads((work / "beside.json").read_text())
        if (work / "calibration.json").exists():
            rows += _uneven_rows(load_calibration(work / "calibration.json"), notes)
        rows += _beside_rows(notes)
    return rows


def _curve_rows(samples: list[Sample]) -> list[Row]:
    curves: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.features.get("group") and not sample.held_out:
            curves[(sample.op, sample.variant)].append(sample)
    rows = []
    for (kind, variant), points in sorted(curves.items()):
        small, large = (pick(points, key=lambda s: s.features["bytes"]) for pick in (min, max))
        name = kind + (f" by {variant}" if variant else "")
        rate = large.features["bytes"] / large.seconds
        rows.append(Row(name=f"{name}: rate of the largest message", value=rate / 1e9, unit="GB/s",
                        note=f"{large.features['bytes'] / 2**20:g} MiB in {1e3 * large.seconds:.3f} ms; {len(points)} sizes; "
                             f"{small.features['bytes'] / 2**10:g} KiB take {1e6 * small.seconds:.1f} us"))
    return rows


def uneven_split(points: list[list[float]]) -> tuple[list[tuple[float, float, float]], list[tuple[float, float, float]]]:
    """(bytes, heaviest over mean, seconds) of uneven all-to-alls: those to fit and those to hold out, by every other size."""
    sizes = sorted({round(math.log2(num_bytes), 1) for num_bytes, *_ in points})  # ranks' splits are whole numbers
    uneven = [(b, x, s) for b, x, s in points if x > 1.0]
    return tuple([p for p in uneven if sizes.index(round(math.log2(p[0]), 1)) % 2 == part] for part in (0, 1))  # type: ignore[return-value]


def _uneven_rows(calibration: Calibration, notes: dict[str, Any]) -> list[Row]:
    """All-to-alls with uneven splits of sizes that were not fitted, under the fitted weight of what the heaviest rank has more than the average."""
    _, held_out = uneven_split(notes.get("uneven", []))
    if not held_out:
        return []
    net = network(space.scenario("full", "cuda").cluster, calibration)
    errors = [100 * abs(net.cost("all_to_all", b, GroupShape(size=2), max_over_mean=x).seconds / s - 1) for b, x, s in held_out]
    weight = calibration.constants.get("uneven_weight", 1.0)
    return [Row(name="uneven all-to-alls: absolute error, median", value=statistics.median(errors), unit="%", better="lower",
                note=f"{len(errors)} sizes and splits, not fitted; worst {max(errors):.1f} %; weight {weight:.2f}")]


def _beside_rows(notes: dict[str, Any]) -> list[Row]:
    rows = []
    for one in notes["beside"]:
        how = {None: "NCCL's own CTAs", 0: "copy engines"}.get(one["ctas"], f"{one['ctas']} CTAs")
        alone = f"{one['bytes'] / 2**20:g} MiB at {one['bytes'] / one['seconds'] / 1e9:.1f} GB/s alone"
        seen = one.get("measured", one["share"]["seconds"] > contention.NOTHING_SEEN)
        rows.append(Row(name=f"{one['kind']} beside {one['compute']}, {how}: compute lost a second of it",
                        value=one["share"]["seconds"] if seen else None, unit="s", better="lower",
                        note=f"{alone}; beside it takes {one['slowed']:.2f} times as long" if seen else UNSEEN))
    rows += [Row(name=f"host link: {what}", value=rate / 1e9, unit="GB/s") for what, rate in notes["copies"].items()]
    for phase, (fixed, group, shard) in notes.get("exchange_host", {}).items():
        rows.append(Row(name=f"sparse exchange {phase}: host time of a shard", value=1e6 * shard, unit="us", better="lower",
                        note=f"and {1e6 * group:.0f} us a table group, {1e6 * fixed:.0f} us a micro-batch"))
    rows += [Row(name=f"not measured: {name}", value=None, unit="", note=why) for name, why in notes["failed"].items()]
    return rows
