"""How wrong predictions are: random plans that no calibration has seen, predicted first, then run, then compared.

    python -m benchmarks.fidelity --device cpu                 calibrates this machine, scores 16 plans, writes docs/results/fidelity-cpu.{json,md}
    python -m benchmarks.fidelity --device cuda --seed 1 -n 40 --resume     one GPU, all plans in one process: benchmarks/fidelity_gpu.py

Stages, each of which can run alone (`--stage`), for a GPU machine may lack what the planner needs: `predict` draws plans and writes each as plan.json
with its prediction inside; `run` executes what has no result yet; `report` compares. `--resume` keeps the work folder and merges into the results.

On a CPU other programs take cores from the ranks. A run during which they used more than `--quiet` of the cores is repeated, up to `--attempts` times
in all, and the attempt that they disturbed least counts, whatever its error.
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
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import results
from benchmarks.fidelity_space import SPACES, Space, calibration_plans, draw_group
from benchmarks.load import LoadMeter, wait_until_quiet
from costmodel import launch
from costmodel.calibration import Calibration, fit
from costmodel.calibration import load as load_calibration
from costmodel.cluster import Cluster
from costmodel.codec import encode
from costmodel.estimate import estimate
from costmodel.plan import Plan
from costmodel.runresult import PHASES, RunResult
from costmodel.samples import read_samples

# Seconds of measured steps that a run aims at, and its bounds [steps].
RUN_SECONDS, MIN_STEPS, MAX_STEPS, WARMUP_STEPS = 4.0, 12, 120, 3
TARGETS = {"cpu": {"median": 15.0, "p90": 35.0}}
# Processor seconds of each launch of a calibration, which times the shapes of several models; `planner calibrate` times those of one.
CALIBRATION_BUDGET = 100.0
RESULT, LOAD = "result.json", "load.json"
MEMORY = ("parameters", "gradients", "optimizer", "tables", "table_state", "saved_activations")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One plan with its prediction (encoded Estimate) and its measurement; others: share of the cores that other programs used meanwhile."""

    name: str
    group: int
    plan: Plan
    prediction: dict
    result: RunResult
    others: float | None = None

    @property
    def measured(self) -> float:
        """Seconds a step, median."""
        assert self.result.measured is not None
        return self.result.measured.step_time_s.median

    @property
    def predicted(self) -> float:
        return self.prediction["step_time"]["value"]

    @property
    def error(self) -> float:
        """Signed, relative: > 0 where the prediction is too slow."""
        return self.predicted / self.measured - 1

    @property
    def covered(self) -> bool:
        return self.prediction["step_time"]["low"] <= self.measured <= self.prediction["step_time"]["high"]


def local_cluster() -> Cluster:
    """This machine."""
    from planner.scenario import load_scenario

    return dataclasses.replace(load_scenario(Path("scenarios/quickstart.yaml")).cluster, memory_budget=None)


def calibrate(space: Space, cluster: Cluster, work: Path, *, preset: str, budget: float | None = None) -> Calibration:
    """Times the calibration plans of the space on 1 rank and on all ranks of the space, and fits. Keeps samples and calibration in `work`."""
    paths, samples, environment = [], [], None
    for plan in calibration_plans(space, cluster):
        paths.append(work / f"{plan.model.name}.plan.json")
        plan.save(paths[-1])
    for ranks in sorted({1, min(max(space.ranks), cluster.num_ranks)}):
        out = work / f"samples-{ranks}.jsonl"
        torchrun(
            "runtime.microbench",
            ["--out", str(out), "--preset", preset, *(["--budget", str(budget)] if budget else []), "--models", *map(str, paths)],
            ranks,
            cluster,
            work / f"calibrate-{ranks}.log",
        )
        environment, found = read_samples(out)
        samples += found
    assert environment is not None
    calibration = fit(dataclasses.replace(environment, device_name=cluster.device.name), samples, device=cluster.device)
    calibration.save(work / "calibration.json")
    return calibration


def torchrun(module: str, arguments: list[str], ranks: int, cluster: Cluster, log: Path, timeout: float = 1200) -> None:
    """Runs a module under torchrun; an interruption here ends the ranks too."""
    command = launch.torchrun_command(module, arguments, ranks_per_host=ranks)
    environment = {**os.environ, **launch.environment(cluster)}
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT) as child:
        try:
            code = child.wait(timeout)
        except BaseException:
            child.terminate()  # torchrun ends its ranks and then itself
            raise
    if code:
        raise SystemExit(f"{module} on {ranks} ranks failed with {code}; last lines of {log}:\n" + "\n".join(log.read_text().splitlines()[-15:]))


def predict(space: Space, cluster: Cluster, calibration: Calibration, work: Path, *, seed: int, count: int) -> list[Path]:
    """Draws `count` plans and writes each with its prediction, before anything is run."""
    paths: list[Path] = []
    group = 0
    while len(paths) < count:
        for i, plan in enumerate(draw_group(space, cluster, seed=seed, group=group)):
            path = work / f"{seed}-{group}-{i}" / "plan.json"
            if len(paths) < count:
                paths.append(path)
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    dataclasses.replace(plan, prediction=encode(estimate(plan, calibration))).save(path)
        group += 1
    return paths


def run(paths: list[Path], cluster: Cluster, *, quiet: float = 1.0, attempts: int = 1, patience: float = 0.0) -> None:
    """Executes every plan that has no result yet, and again those that others have disturbed; before each run up to `patience` seconds are waited
    for them to finish."""
    for attempt in range(attempts):
        for number, path in enumerate(paths, start=1):
            others = _others(path.parent)
            if (path.parent / RESULT).exists() and (others is None or others <= quiet or attempt < _attempted(path.parent)):
                continue
            wait_until_quiet(quiet, patience)
            print(f"{number}/{len(paths)} {_run_once(path, cluster)}", file=sys.stderr, flush=True)


def _run_once(path: Path, cluster: Cluster) -> str:
    """Executes a plan; its result replaces an earlier one that was disturbed more. Returns a line about it."""
    plan, folder = Plan.load(path), path.parent
    predicted = plan.prediction["step_time"]["value"]
    steps = WARMUP_STEPS + max(MIN_STEPS, min(MAX_STEPS, math.ceil(RUN_SECONDS / predicted)))
    meter, start = LoadMeter(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="attempt-", dir=folder) as attempt:
        own = Path(attempt) / path.name
        plan.save(own)
        arguments = [str(own), "--out", attempt, "--steps", str(steps), "--no-eval"]
        torchrun("runtime.train", arguments, plan.layout.world_size, cluster, folder / "run.log")
        others, before = meter.others(), _others(folder)
        result = RunResult.load(Path(attempt) / RESULT)
        kept = before is None or others is None or others < before
        if kept:
            own.replace(path)
            (Path(attempt) / RESULT).replace(folder / RESULT)
    count = _attempted(folder) + 1
    (folder / LOAD).write_text(json.dumps({"others": others if kept else before, "attempts": count}))
    measured = result.measured.step_time_s.median if result.measured else math.nan
    return (
        f"{folder.name}: predicted {predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms ({predicted / measured - 1:+.1%}), "
        f"{time.perf_counter() - start:.0f} s, others used {'?' if others is None else f'{others:.0%}'} of the cores"
    )


def _load(folder: Path) -> dict:
    return json.loads((folder / LOAD).read_text()) if (folder / LOAD).exists() else {}


def _others(folder: Path) -> float | None:
    """Share of the cores that others used during the run that counts."""
    return _load(folder).get("others")


def _attempted(folder: Path) -> int:
    return _load(folder).get("attempts", 0)


def load_scored(paths: list[Path]) -> list[Scored]:
    """Plans with results, in order."""
    found = []
    for path in paths:
        if (path.parent / RESULT).exists():
            plan = Plan.load(path)
            found.append(
                Scored(
                    name=path.parent.name,
                    group=int(path.parent.name.split("-")[1]),
                    plan=plan,
                    prediction=plan.prediction,
                    result=RunResult.load(path.parent / RESULT),
                    others=_others(path.parent),
                )
            )
    return [s for s in found if s.result.measured is not None]


def rows(scored: list[Scored], device: str) -> list[results.Row]:
    """Figures of the whole set, then one row a plan."""
    errors = np.array([abs(s.error) for s in scored]) * 100
    targets = TARGETS[device]
    figures = {"median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9)), "worst": float(errors.max())}
    found = [
        results.Row(
            name=f"step time, absolute error: {key}",
            value=value,
            unit="%",
            target=targets.get(key),
            better="lower",
            note=f"measured here, {len(scored)} plans",
        )
        for key, value in figures.items()
    ]
    bias = 100 * (math.exp(float(np.mean([math.log1p(s.error) for s in scored]))) - 1)
    found.append(
        results.Row(
            name="step time bias",
            value=abs(bias),
            unit="%",
            target=targets.get("bias"),
            better="lower",
            note=f"measured here; predictions are {'slow' if bias > 0 else 'fast'} on geometric mean",
        )
    )
    found.append(results.Row(name="90 % interval: coverage", value=100 * statistics.fmean(s.covered for s in scored), unit="%", note="measured here"))
    found += _ranking(scored) + _phase_rows(scored) + _memory_rows(scored)
    loads = [100 * s.others for s in scored if s.others is not None]
    if loads:
        found.append(
            results.Row(
                name="cores used by other programs during a run, median",
                value=statistics.median(loads),
                unit="%",
                better="lower",
                note=f"measured here, worst {max(loads):.0f} %",
            )
        )
    return found + [_plan_row(s) for s in scored]


def _ranking(scored: list[Scored]) -> list[results.Row]:
    """Kendall's tau over all plans and within groups, regret of the plan predicted best in its group."""
    found = [results.Row(name="rank correlation over all plans (Kendall tau-b)", value=kendall(scored), unit="", note="measured here")]
    groups = [g for g in ([s for s in scored if s.group == k] for k in sorted({s.group for s in scored})) if len(g) >= 3]
    if groups:
        taus = [kendall(g) for g in groups]
        regrets = [100 * (min(g, key=lambda s: s.predicted).measured / min(s.measured for s in g) - 1) for g in groups]
        found += [
            results.Row(
                name="rank correlation within groups, median", value=statistics.median(taus), unit="", note=f"measured here, {len(groups)} groups"
            ),
            results.Row(
                name="regret of the best prediction, median", value=statistics.median(regrets), unit="%", better="lower", note="measured here"
            ),
            results.Row(name="regret of the best prediction, worst", value=max(regrets), unit="%", better="lower", note="measured here"),
        ]
    return found


def kendall(scored: list[Scored]) -> float:
    """tau-b where measured differences below twice the steps' own noise count as ties."""
    agree = differ = ties = 0
    for i, a in enumerate(scored):
        for b in scored[i + 1 :]:
            noise = 2 * math.hypot(_noise(a), _noise(b))
            if abs(a.measured - b.measured) <= noise:
                ties += 1
                continue
            same = (a.measured - b.measured) * (a.predicted - b.predicted)
            agree, differ = agree + (same > 0), differ + (same < 0)
    pairs = agree + differ
    return (agree - differ) / pairs if pairs else 1.0


def _noise(scored: Scored) -> float:
    """Standard error of a run's median step, from its quantiles and number of steps."""
    step = scored.result.measured.step_time_s
    steps = max(1, scored.result.steps - scored.result.first_step - scored.result.warmup_steps)
    return 1.25 * (step.p90 - step.p10) / 2.56 / math.sqrt(steps)


def _phase_rows(scored: list[Scored]) -> list[results.Row]:
    found = []
    for phase in PHASES:
        errors, signed = [], []
        for s in scored:
            off = (s.prediction["phases"][phase]["value"] - s.result.measured.phases_s[phase]) / s.measured
            errors.append(abs(off) * 100)
            signed.append(off * 100)
        found.append(
            results.Row(
                name=f"phase {phase}: absolute error as share of the step, median",
                value=statistics.median(errors),
                unit="% of step",
                better="lower",
                note=f"measured here; mean signed {statistics.fmean(signed):+.1f} %",
            )
        )
    return found


def _memory_rows(scored: list[Scored]) -> list[results.Row]:
    found = []
    for category in MEMORY:
        errors = []
        for s in scored:
            measured = getattr(s.result.measured.memory_bytes, category)
            predicted = s.prediction["memory"]["categories"].get(category)
            if measured and predicted is not None:
                errors.append(100 * abs(predicted / measured - 1))
        if errors:
            found.append(
                results.Row(
                    name=f"memory {category}: absolute error, median",
                    value=statistics.median(errors),
                    unit="%",
                    better="lower",
                    note=f"measured here, worst {max(errors):.1f} %, {len(errors)} plans",
                )
            )
    return found


def _plan_row(scored: Scored) -> results.Row:
    plan, step = scored.plan, scored.result.measured.step_time_s
    group = plan.model.sequences[0].layers[0]
    lengths = plan.workload.lengths["history"]
    options = {o.checkpoint for r in plan.regions for o in r.options}
    what = (
        f"{group.kind} x{group.count} D{plan.model.dim} h{group.heads} mlp{group.mlp_dim}, lengths {lengths.kind} <= {lengths.maximum}, "
        f"batch {plan.local_batch} x {plan.accumulation}, {plan.layout.short}, {plan.tables[0].sharding}, "
        f"checkpoint {'full' if 'full' in options else 'selective' if 'selective' in options else 'none'}, {plan.execution}"
    )
    note = (
        f"predicted {scored.predicted * 1e3:.2f} ms ({scored.error:+.1%}), 90 % interval {scored.prediction['step_time']['low'] * 1e3:.2f}-"
        f"{scored.prediction['step_time']['high'] * 1e3:.2f}; p10-p90 {step.p10 * 1e3:.2f}-{step.p90 * 1e3:.2f} ms; {what}"
    )
    if scored.others is not None:
        note += f"; others used {scored.others:.0%} of the cores"
    return results.Row(name=f"plan {scored.name}", value=scored.measured * 1e3, unit="ms a step", better="lower", note=note)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.fidelity", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", "--count", type=int, default=16, help="plans to score")
    parser.add_argument("--stage", choices=("all", "calibrate", "predict", "run", "refit", "report"), default="all",
                        help="calibrate, refit: cuda only")
    parser.add_argument("--calibration", type=Path, help="use this calibration (default: measure one now)")
    parser.add_argument("--preset", choices=("quick", "full"), default="quick", help="of the calibration")
    parser.add_argument("--budget", type=float, default=CALIBRATION_BUDGET, help="seconds of processor time of each launch of the calibration")
    parser.add_argument("--work", type=Path, help="folder for plans and runs (default: out/fidelity-DEVICE)")
    parser.add_argument("--resume", action="store_true", help="keep what the work folder holds, merge into the result file")
    parser.add_argument("--quiet", type=float, default=0.08, help="share of the cores that others may use during a run")
    parser.add_argument("--attempts", type=int, default=3, help="runs of a plan while others use more")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait before a run for others to finish")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--seconds", type=float, default=400.0, help="cuda: no run starts so long after the start")
    parser.add_argument("--residuals", type=int, default=24, help="cuda: plans that give the intervals")
    parser.add_argument("--calibration-seconds", type=float, default=240.0, help="cuda: of a calibration, about")
    options = parser.parse_args(arguments)
    options.restarts = arguments is None
    work = options.work or Path("out") / f"fidelity-{options.device}"
    if options.stage in ("all", "predict") and not options.resume and work.exists() and any(work.iterdir()):
        results.refuse(f"{work} is not empty; --resume continues there, another --work starts afresh")
    if options.count < 1 or options.residuals < 0:
        parser.error("-n must be >= 1 and --residuals >= 0")
    if options.device == "cpu" and options.stage in ("calibrate", "refit"):
        parser.error(f"--stage {options.stage} is cuda's; on a CPU --stage predict calibrates first")
    work.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda":
        from benchmarks import fidelity_gpu  # another space, and all plans in one process

        return fidelity_gpu.main(options, work)
    space = SPACES[options.device]
    paths_file = work / f"plans-{options.seed}.json"
    if options.stage in ("all", "predict"):
        cluster = local_cluster()
        calibration = _calibration(options, space, cluster, work)
        paths = predict(space, cluster, calibration, work, seed=options.seed, count=options.count)
        paths_file.write_text(json.dumps([str(p.relative_to(work)) for p in paths]))
    if not paths_file.exists():
        results.refuse(f"{paths_file}: no such file; --stage predict draws the plans of a seed")
    paths = [work / p for p in json.loads(paths_file.read_text())]
    if options.stage in ("all", "run"):
        run(paths, Plan.load(paths[0]).cluster, quiet=options.quiet, attempts=options.attempts, patience=options.patience)
    if options.stage in ("all", "report"):
        scored = load_scored(paths)
        if not scored:
            results.refuse(f"{work}: no plan to score has run yet")
        command = f"python -m benchmarks.fidelity --device {options.device} --seed {options.seed} -n {options.count}"
        results.write(
            f"fidelity-{options.device}",
            rows(scored, options.device),
            command=command,
            title=f"Fidelity of predictions ({options.device})",
            intro=f"{len(scored)} plans drawn with seed {options.seed} from: {space.describe()}. Every plan was predicted before it was run; none "
            "was used to calibrate. Error = predicted / measured median step - 1.",
            resume=options.resume,
            out=options.out,
        )
    return 0


def _calibration(options: argparse.Namespace, space: Space, cluster: Cluster, work: Path) -> Calibration:
    if options.calibration is not None:
        return results.calibration_of(options.calibration)
    if (work / "calibration.json").exists():
        return load_calibration(work / "calibration.json")
    return calibrate(space, cluster, work, preset=options.preset, budget=options.budget)


if __name__ == "__main__":
    raise SystemExit(main())
