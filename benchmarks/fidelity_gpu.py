"""Fidelity on a GPU: calibrate, predict, run and compare in one process, no start of Python, CUDA or NCCL for each plan.

    python -m benchmarks.fidelity --device cuda --seed 1 -n 40 --resume                       all stages
    python -m benchmarks.fidelity --device cuda --stage predict --calibration h200.json       where there is no GPU: plans with their predictions
    python -m benchmarks.fidelity --device cuda --stage run --seconds 200 --resume            where there is one: what has no result yet
    python -m benchmarks.fidelity --device cuda --stage report
    python -m benchmarks.fidelity --device cuda --stage refit      the calibration of the same samples under later code; `report` then scores it too

`--residuals` plans, of a seed of their own, give the intervals: they are neither fitted nor scored. Every prediction is written before the
plan runs. Between two plans everything of the last one is dropped, libraries' workspaces with it, and the caching allocator emptied, so that peaks
are a plan's own. Every plan runs twice and up to VISITS times with others between, as far as time allows (`next_visits`), and the median of its
visits counts: the same steps of one process, alone on a leased host, took 22 to 45 ms of its thread's own processor time within ten seconds, and one
plan in fifty, which its device makes, took 41 ms where its neighbours took 34 and 28 (an H200's host, 2026-12-01). A piece of Python before and
after every step says how fast the host was (`runtime.microbench.speed`): a diagnosis, no part of what is scored. `calibrate` and `run` need `runtime`
and `costmodel` only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fidelity_gpu_space as space
from benchmarks import results
from benchmarks.fidelity_report import Run, again_rows, rows, typical
from costmodel import launch
from costmodel.calibration import Calibration, fit
from costmodel.calibration import load as load_calibration
from costmodel.cluster import Cluster
from costmodel.codec import decode, encode
from costmodel.conformal import residuals_of
from costmodel.estimate import estimate
from costmodel.plan import Plan
from costmodel.runresult import PHASES
from costmodel.samples import Environment, Sample, read_samples, write_samples

# Seconds of measured steps that a run aims at, and its bounds [steps].
RUN_SECONDS, MIN_STEPS, MAX_STEPS = 0.6, 8, 100
# Plans that give the intervals, and what is added to the seed for them.
RESIDUALS, RESIDUAL_SEED = 24, 1_000_003
ALLOCATOR, SAMPLES, MEASURED = "PYTORCH_CUDA_ALLOC_CONF", "samples.jsonl", "measured.json"
# Visits of a plan at most, and of one whose host and device need within NEAR times as long as one another before others are visited again; between
# two of them a step is the same within ALIKE, and the host within SAME_SPEED.
VISITS, FIRST_VISITS, NEAR, ALIKE, SAME_SPEED = 5, 3, 2.0, 0.05, 0.15
RUN = "run.json"
RESIDUAL_FILE, REFITTED = "calibration-residuals.json", "calibration-refitted.json"
SCENARIO, CLUSTER = "scenarios/gem-1xh200.yaml", Path(__file__).with_name("fidelity_gpu_cluster.json")


# --- stages ---


def calibrate(work: Path, cluster: Cluster, device, *, seconds: float, later: Sequence[Plan] = ()) -> Calibration:
    """Times the calibration subjects and fits; keeps samples, as they come, and calibration in `work`. The kernels of `later`, the plans that will
    run, are compiled as well, so that no step of theirs waits for a compiler; nothing of them is timed."""
    from runtime.microbench import session

    def keep(environment: Environment, samples: list[Sample]) -> None:
        write_samples(work / SAMPLES, environment, samples)

    keep(*session.calibrate(space.calibration_plans(cluster), device, budget=seconds, later=later, compiled_blocks=False, report=_say, keep=keep))
    return refit(work, cluster)


def refit(work: Path, cluster: Cluster) -> Calibration:
    """The calibration of the samples in `work`, kept there."""
    calibration = fit_samples(work, cluster)
    calibration.save(work / "calibration.json")
    return calibration


def fit_samples(work: Path, cluster: Cluster) -> Calibration:
    """The calibration of the samples in `work`."""
    environment, samples = read_samples(work / SAMPLES)
    return fit(dataclasses.replace(environment, device_name=cluster.device.name), samples, device=cluster.device)


def predict(work: Path, cluster: Cluster, calibration: Calibration, *, seed: int, count: int, residuals: int = RESIDUALS) -> list[Path]:
    """Writes the drawn plans, each with its prediction, unless they are there."""
    paths = []
    for name, plan in drawn(cluster, seed=seed, count=count, residuals=residuals):
        path = work / name / "plan.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            dataclasses.replace(plan, prediction=encode(estimate(plan, calibration))).save(path)
        paths.append(path)
    return paths


def drawn(cluster: Cluster, *, seed: int, count: int, residuals: int = RESIDUALS) -> list[tuple[str, Plan]]:
    """(name, plan) of the residual plans, one of a group, and of `count` plans to score, whole groups."""
    plans = []
    for own_seed, wanted, kind in ((seed + RESIDUAL_SEED, residuals, "residual"), (seed, count, "scored")):
        found: list[tuple[str, Plan]] = []
        group = 0
        while len(found) < wanted:
            for i, plan in enumerate(space.draw_group(cluster, seed=own_seed, group=group)):
                if kind == "scored" or i == group % space.PLANS_PER_GROUP:
                    found.append((f"{kind}-{own_seed}-{group}-{i}", plan))
            group += 1
        plans += found
    return plans


def run(paths: list[Path], device, *, until: float) -> None:
    """Executes plans that have no result until the clock says `until`, then plans again (`next_visits`). A plan that does not end is recorded too, so
    that it is not tried again."""
    from runtime.cores import full_speed

    fastest = full_speed()
    for number, path in enumerate(paths, start=1):
        if (path.parent / RUN).exists():
            continue
        if time.perf_counter() > until:
            _say(f"out of time before {path.parent.name}, {number - 1} of {len(paths)}")
            return
        _visit(path, device, f"{number}/{len(paths)}", fastest=fastest)
    while wanted := next_visits(paths):
        for path in wanted:
            if time.perf_counter() > until:
                _say(f"out of time for more visits: {len(wanted)} plans or fewer are left")
                return
            found = json.loads((path.parent / RUN).read_text())
            _visit(path, device, f"visit {len(found['visits_s']) + 1}", found, fastest=fastest)


def next_visits(paths: list[Path]) -> list[Path]:
    """Plans to run once more, in the order of their need: those that are near, whose host and device are predicted to need within NEAR times as long
    as one another or whose steps the host makes, until they have FIRST_VISITS; those that were visited once; then those that are near and those
    whose visits, or the host's speeds in them, differ, the least visited first, up to VISITS. What was predicted of a step's length has no part in
    it."""
    once: tuple[list[Path], ...] = ([], [])
    more: dict[int, list[Path]] = {}
    for path in paths:
        found = json.loads((path.parent / RUN).read_text()) if (path.parent / RUN).exists() else {"failed": "not run"}
        if "failed" in found or (count := len(found["visits_s"])) >= VISITS:
            continue
        near = _near(Plan.load(path).prediction)
        if count < FIRST_VISITS and near:
            once[0].append(path)
        elif count == 1:
            once[1].append(path)
        elif near or _differ(found["visits_s"], ALIKE) or _differ(found.get("visits_slow", ()), SAME_SPEED):
            more.setdefault(count, []).append(path)
    if once[0]:  # once around before one of them runs again
        counts = {path: len(json.loads((path.parent / RUN).read_text())["visits_s"]) for path in once[0]}
        return [path for path in once[0] if counts[path] == min(counts.values())]
    return once[1] or more.get(min(more, default=0), [])


def _near(prediction: dict[str, Any]) -> bool:
    """Whether host and device are predicted to need within NEAR times as long as one another, or the host makes the step."""
    host, device = prediction.get("host"), prediction.get("device")
    return prediction["maker"] != "device" or (host is not None and device is not None and NEAR * host > device)


def _differ(values: Sequence[float], within: float) -> bool:
    return len(values) > 1 and max(values) > (1.0 + within) * min(values)


def _visit(path: Path, device, what: str, before: dict[str, Any] | None = None, *, fastest: float) -> None:
    """Executes a plan and keeps what was found, with what an earlier visit found."""
    target, plan = path.parent / RUN, Plan.load(path)
    expected = plan.prediction["step_time"]["value"]
    if before is None:
        target.write_text(json.dumps({"failed": "did not end"}) + "\n")
    try:
        found = execute(plan, device, expected=expected, fastest=fastest)
    except Exception as error:  # out of memory, say: recorded, so that it can be counted and is not tried again
        found = {"failed": (str(error).splitlines() or [type(error).__name__])[0]}
        if before is None:
            target.write_text(json.dumps(found) + "\n")
        _empty(device)  # raises where the device does not answer this process any more: another one goes on with --resume
    if before is not None:
        found = before if "failed" in found else merged(before, found)
    target.write_text(json.dumps(found) + "\n")
    if "failed" not in found:
        measured = typical(found["steps_s"])
        _say(f"{what} {path.parent.name}: predicted {expected * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms "
             f"({expected / measured - 1:+.1%}), host {found['visits_slow'][-1]:.2f} times slower, {found['wall_s']:.1f} s")  # fmt: skip


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What two visits found together: the steps of both, phases averaged by visits, the most memory; what each visit found of steps and phases."""
    count, steps = len(before["visits_s"]), [*before["steps_s"], *found["steps_s"]]
    one, other = before["measured"], found["measured"]
    quantile = lambda share: float(np.quantile(steps, share))
    memory = {name: max(value, other["memory_bytes"][name]) if value is not None and other["memory_bytes"][name] is not None else value
              for name, value in one["memory_bytes"].items()}  # fmt: skip
    times = {"median": statistics.median(steps), "mean": statistics.fmean(steps), "p10": quantile(0.1), "p90": quantile(0.9)}
    rate = other["examples_per_second"] * other["step_time_s"]["median"] / times["median"]
    measured = {**other, "examples_per_second": rate, "step_time_s": {**other["step_time_s"], **times}, "memory_bytes": memory,
                "phases_s": {name: (count * one["phases_s"][name] + value) / (count + 1) for name, value in other["phases_s"].items()}}
    phases = {key: {name: [*before[key][name], *values] for name, values in found[key].items()} for key in ("visits_device_s", "visits_host_s")}
    each = {key: [*before[key], *found[key]] for key in ("visits_s", "visits_slow", "pieces_s") if key in before and key in found}
    return {**found, **phases, **each, "measured": measured, "steps_s": steps,
            "full_speed_s": min(one["full_speed_s"] for one in (before, found) if "full_speed_s" in one) if "full_speed_s" in found else None,
            "held_before": max(before["held_before"], found["held_before"])}


def execute(plan: Plan, device, *, expected: float, fastest: float | None = None) -> dict[str, Any]:
    """Trains a few steps of `plan`, whose step is expected to take `expected` seconds, on a host where a piece of Python takes `fastest` seconds at
    full speed (default: as is found now); what the trainer measured, encoded, and besides

    held_before: bytes that the process had allocated before, which are no plan's; steps_s: every measured step; visits_s: the `typical` one of the
    visit; visits_device_s, visits_host_s: the same by phase; pieces_s: seconds of the piece of Python before and after every measured step, which are
    in no step; visits_slow: the host's `typical` slowness in the visit's steps, by them and full_speed_s, which is `fastest`; context_bytes: what the
    device had taken beyond the allocator (None on a CPU); wall_s: of the whole call.
    """
    import torch

    from runtime.cores import full_speed
    from runtime.data import open_source
    from runtime.microbench.gpu import context_bytes
    from runtime.microbench.speed import Probed, slowness
    from runtime.trainer import WARMUP_STEPS, Trainer

    begin = time.perf_counter()
    _empty(device)
    held = 0
    if device.type == "cuda":
        held = torch.cuda.memory_allocated()
    source = open_source(plan.model, plan.workload, seed=plan.seed)
    trainer = Trainer(plan, source, device=device, timer=Probed(device))
    trainer.train(WARMUP_STEPS + max(MIN_STEPS, min(MAX_STEPS, math.ceil(RUN_SECONDS / expected))))
    measured, warmup = trainer.measured()
    assert measured is not None
    steps = [sum(step.values()) for step in trainer.phases[warmup:]]
    pieces, fastest = trainer.timer.pieces[warmup:], fastest or full_speed()
    found = {
        "measured": encode(measured),
        "warmup_steps": warmup,
        "visits_host_s": _typical(trainer.timer.host[warmup:]),
        "visits_device_s": _typical(trainer.phases[warmup:]),
        "visits_s": [typical(steps)],
        "steps_s": steps,
        "pieces_s": pieces,
        "full_speed_s": fastest,
        "visits_slow": [typical(slowness(pieces, fastest).tolist())],
        "final_loss": trainer.losses[-1],
        "context_bytes": context_bytes() if device.type == "cuda" else None,
        "held_before": held,
    }
    del trainer, source
    _empty(device)
    return {**found, "wall_s": time.perf_counter() - begin}


def _typical(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [typical([step[name] for step in steps])] for name in PHASES}


def _empty(device) -> None:
    from runtime.microbench.trained import empty

    empty(device)


def load_runs(paths: list[Path]) -> tuple[list[Run], list[Run], list[str]]:
    """(residual runs, runs to score, failures in words) of the plans that were executed."""
    residual, scored, failed = [], [], []
    for path in paths:
        if not (path.parent / RUN).exists():
            continue
        found = json.loads((path.parent / RUN).read_text())
        if "failed" in found:
            failed.append(f"{path.parent.name}: {found['failed']}")
            continue
        plan = Plan.load(path)
        one = Run(name=path.parent.name, group=path.parent.name.rsplit("-", 1)[0], plan=plan, found=found)
        (residual if one.name.startswith("residual") else scored).append(one)
    return residual, scored, failed


def again(runs: list[Run], calibration: Calibration) -> list[Run]:
    """The runs with what `calibration` and the present code predict: not blind where either is later than the runs."""
    return [dataclasses.replace(one, plan=dataclasses.replace(one.plan, prediction=encode(estimate(one.plan, calibration)))) for one in runs]


def with_residuals(calibration: Calibration, runs: list[Run]) -> Calibration:
    """The calibration with the residuals of `runs` (costmodel.conformal)."""
    found: dict[str, list[float]] = {}
    for one in runs:
        for name, residual in residuals_of(one.pairs(), one.maker, one.plan.prediction["by_source"]).items():
            found.setdefault(name, []).append(residual)
    return dataclasses.replace(calibration, run_residuals={name: tuple(sorted(values)) for name, values in sorted(found.items())})


def report(paths: list[Path], work: Path, calibration: Calibration, *, out: Path, command: str) -> Path:
    """Compares, writes docs/results/fidelity-h200.{json,md} and the calibration with its residuals beside the work folder's own."""
    residual, scored, failed = load_runs(paths)
    if not scored:
        results.refuse(f"{work}: no plan to score has run yet")
    known = with_residuals(calibration, residual)
    known.save(work / RESIDUAL_FILE)
    found = rows(scored, known, load=work / RESIDUAL_FILE)
    if (work / REFITTED).exists():
        found += again_rows(again(scored, load_calibration(work / REFITTED)))
    counts = [len(one.found["visits_s"]) for one in residual + scored]
    often = ", ".join(f"{counts.count(n)} ran {n} time{'s' * (n > 1)}" for n in sorted(set(counts)))
    intro = (f"{len(scored)} plans drawn from: {space.describe()}. Every plan was predicted before it ran; none was used to calibrate. "
             f"Intervals come from {len(residual)} runs that are neither fitted nor scored. Of all these plans {often}, with others between: more "
             f"often those whose host was predicted to need more than 1/{NEAR:g} of what the device needs, and those whose visits differed by more "
             f"than {ALIKE:.0%} or whose host's speeds by more than {SAME_SPEED:.0%}, as far as time allowed. Measured is the median over visits of "
             f"the mean step without the fastest and slowest tenth. "
             f"Error = predicted / measured - 1. Failed: {'; '.join(failed) or 'none'}.")  # fmt: skip
    measured = json.loads((work / MEASURED).read_text()) if (work / MEASURED).exists() else None
    return results.write("fidelity-h200", found, command=command,
                         title="Fidelity of predictions (H200)", intro=intro, out=out, measured=measured)  # fmt: skip


def main(options: argparse.Namespace, work: Path) -> int:
    """The stages that `options.stage` names, in their order."""
    own, stage, begin = cluster(), options.stage, time.perf_counter()
    if options.restarts and stage in ("all", "calibrate", "run"):
        restart_tuned(own)
    calibration_path = options.calibration or work / "calibration.json"
    device = _device() if stage in ("all", "calibrate", "run") else None
    if stage in ("all", "calibrate") and options.calibration is None and not calibration_path.exists():
        if options.resume and (work / SAMPLES).exists():  # of a calibration that did not end
            refit(work, own)
        else:
            later = [plan for _, plan in drawn(own, seed=options.seed, count=options.count, residuals=options.residuals)]
            calibrate(work, own, device, seconds=options.calibration_seconds, later=later)
    if stage in ("all", "predict"):
        known = results.calibration_of(calibration_path, device=own.device.name)
        predict(work, own, known, seed=options.seed, count=options.count, residuals=options.residuals)
    paths = in_turns(of_seed(work, options.seed))
    if stage in ("all", "run"):
        if not (work / MEASURED).exists():
            (work / MEASURED).write_text(json.dumps(results.stamped()) + "\n")
        run(paths, device, until=begin + options.seconds)
    if device is not None:
        from runtime import mesh

        mesh.leave()
    if stage == "refit":
        if not (work / SAMPLES).exists():
            results.refuse(f"{work / SAMPLES}: no such file; --stage calibrate keeps them there")
        fitted = fit_samples(work, own)
        with_residuals(fitted, again(load_runs(paths)[0], fitted)).save(work / REFITTED)
    if stage in ("all", "report"):
        report(paths, work, results.calibration_of(calibration_path, device=own.device.name), out=options.out,
               command=f"python -m benchmarks.fidelity --device cuda --seed {options.seed} -n {options.count}")  # fmt: skip
    return 0


def of_seed(work: Path, seed: int) -> list[Path]:
    """The plans in `work` that `drawn` gives for a seed; another seed's may lie beside them."""
    return [path for path in work.glob("*/plan.json") if int(path.parent.name.split("-")[1]) in (seed, seed + RESIDUAL_SEED)]


def in_turns(paths: Iterable[Path]) -> list[Path]:
    """Plans by seed, group and number, the residual ones spread evenly among those to score: whenever time is over, there are some of both."""
    kinds: dict[str, list[tuple[list[int], Path]]] = {}
    for path in paths:
        kind, *numbers = path.parent.name.split("-")
        kinds.setdefault(kind, []).append(([int(n) for n in numbers], path))
    placed = [((i + 0.5) / len(found), kind, path) for kind, found in kinds.items() for i, (_, path) in enumerate(sorted(found))]
    return [path for *_, path in sorted(placed)]


def cluster() -> Cluster:
    """The cluster of SCENARIO, kept as JSON: a GPU machine may lack what the planner needs to read scenarios (a test holds both equal)."""
    return decode(Cluster, json.loads(CLUSTER.read_text()))


def restart_tuned(own: Cluster) -> None:
    """Starts this process again as training processes are started (`costmodel.launch`), unless it was; returns where it was.

    Besides, an allocator whose segments grow: histories of ever other lengths leave one with fixed segments up to 2.4 times what is allocated.
    """
    wanted = launch.environment(own)
    if ALLOCATOR not in os.environ:
        wanted[ALLOCATOR] = f"expandable_segments:{_segments_grow()}"
    if missing := {name: value for name, value in wanted.items() if name not in os.environ}:
        _say("starting again with " + " ".join(f"{name}={value}" for name, value in missing.items()))
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.fidelity", *sys.argv[1:]], {**os.environ, **missing})


def _segments_grow() -> bool:
    """Whether an allocator with growing segments works here: it needs the driver's virtual memory calls."""
    program = "import torch; x = torch.ones(1 << 28, device='cuda'); y = x + 1; del x; torch.ones(1 << 29, device='cuda').sum().item()"
    tried = subprocess.run([sys.executable, "-c", program], env={**os.environ, ALLOCATOR: "expandable_segments:True"}, capture_output=True)
    return tried.returncode == 0


def _device():
    import torch

    from runtime import mesh

    if not torch.cuda.is_available():
        results.refuse("no CUDA device here; --stage predict and --stage report need none")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    mesh.start(device)
    return device


def _say(text: str) -> None:
    print(text, flush=True)
