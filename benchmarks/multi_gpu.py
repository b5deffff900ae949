"""Several GPUs of one host: time their links, predict plans of every layout, run them, score the predictions.

    python -m benchmarks.multi_gpu --work W --resume --total 520        everything, also in several calls: each goes on where the last one ended
    python -m benchmarks.multi_gpu --work W --stage predict             before it, where there is no GPU
    python -m benchmarks.multi_gpu --work W --stage run --ranks 1       what is of one GPU, where there is only one

In order, each only if W lacks it:

    predict   every plan with its prediction (W/NAME/plan.json), among them the planner's first and second choice, from --calibration, or from
              W/samples.jsonl (one GPU's, of `benchmarks.fidelity --stage calibrate`), else from the calibration that this repository has
    warm      kernels compiled in processes of their own, side by side and before anything is timed
    run       one launch of torchrun (`benchmarks.multi_gpu_ranks`): links (W/collectives.jsonl, W/beside.json), with W/samples.jsonl the predictions
              anew, plans of all GPUs, fp32 last, plans of one GPU, copies and contention by CTAs; a plan that fails or hangs is recorded, and the
              launch goes on behind it
    report    docs/results/multi-gpu.{md,json}, losses against one GPU's and scaling among it; --total leaves time for it

A plan that has a result keeps its prediction; `--stage after` writes beside it what the model of now would say, for the report, as no score. With
--parts one launch does other parts; `calibrate` and `fit` are of their own for that.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import multi_gpu_report, results
from benchmarks import multi_gpu_space as space
from benchmarks.multi_gpu_space import PARTS, WARMING
from costmodel import comms_curves, launch, peers
from costmodel.calibration import Calibration, fit
from costmodel.calibration import load as load_calibration
from costmodel.cluster import Cluster
from costmodel.codec import encode
from costmodel.comms import calibrated_curves
from costmodel.estimate import estimate
from costmodel.gpu import launches
from costmodel.imbalance import slowest_rank
from costmodel.lower import Factors, lower
from costmodel.plan import Plan
from costmodel.samples import CONSTANT_PREFIX, Environment, Sample, read_samples
from runtime.microbench.collectives import unit_hosts

RANKS = 2
# NVLink multicast stays off: a program that uses it can put GPUs out of service that others share.
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
COLLECTIVE_TIMEOUT = 45.0
# Seconds that a launch needs beside the time that it is given; the least with which one is begun.
STARTING, LEAST = 25.0, 20.0
SEARCH_SECONDS = 20.0
# Parts of a launch (`multi_gpu_ranks`).
CALIBRATION, RUNS = ("ops", "collectives", "links"), ("plans", "alone")
LOG, MODULE = "ranks.log", "benchmarks.multi_gpu_ranks"
# Seconds that compiling may take, that a whole call takes at most, and those that it leaves for the report.
WARM_SECONDS, TOTAL, REPORTING = 100.0, 520.0, 15.0
# The calibration of two such GPUs that predicts where nothing else is given.
KNOWN = Path(__file__).parents[1] / "costmodel/calibrations/h200-nvlink.json"


def calibrate(work: Path, device: str, cluster: Cluster, *, seconds: float, parts: tuple[str, ...] = CALIBRATION,
              extra: tuple[str, ...] = ()) -> None:
    """One launch; the parts are those of `multi_gpu_ranks`."""
    code = start(parts, work, device, cluster, until=time.time() + seconds, extra=extra)
    if not (work / "collectives.jsonl").exists():
        raise SystemExit(f"the calibration failed with {code}; see {work / LOG}")


def refit(work: Path, cluster: Cluster) -> Calibration:
    """One calibration of all samples in `work`: those of one GPU, the ranks' own shapes, the collectives. Of a shape measured twice, the later."""
    environment: Environment | None = None
    found: dict[tuple, Sample] = {}
    units: list[Sample] = []
    for path in [work / "samples.jsonl", *sorted(work.glob("ops-*.jsonl")), work / "collectives.jsonl"]:
        if path.exists():
            own, samples = read_samples(path)
            environment = environment or own
            units = samples if path.name == "collectives.jsonl" and environment.device_kind == "cuda" else units
            for i, s in enumerate(samples):
                key = (s.op, s.variant, s.phase, s.dtype, s.active_ranks, tuple(sorted(s.features.items())), s.held_out)
                found[(*key, path.name, i) if not s.features else key] = s  # constants are collected, their median counts
    kind = f"{CONSTANT_PREFIX}host"
    for name, seconds in unit_hosts(units).items():  # which an older launch has not made of its units
        if not any(s.op == kind and s.variant == name for s in found.values()):
            found[(kind, name)] = Sample(op=kind, variant=name, phase="step", features={}, seconds=seconds)
    if environment is None:
        raise SystemExit(f"{work}: no samples; --stage calibrate first, or --calibration FILE")
    calibration = fit(dataclasses.replace(environment, device_name=cluster.device.name), found.values(), device=cluster.device)
    weight = uneven_weight(work, calibration, cluster)
    if weight is not None:
        calibration = dataclasses.replace(calibration, constants={**calibration.constants, "uneven_weight": weight})
    calibration.save(work / "calibration.json")
    return calibration


def uneven_weight(work: Path, calibration: Calibration, cluster: Cluster) -> float | None:
    """From every other timed share of uneven all-to-alls; the rest is kept for the report."""
    notes = json.loads((work / "beside.json").read_text()) if (work / "beside.json").exists() else {}
    curve = next((c for c in calibrated_curves(calibration, cluster) if c.collective == "all_to_all" and c.group == RANKS), None)
    fitted, _ = multi_gpu_report.uneven_split(notes.get("uneven", []))
    return comms_curves.uneven_weight(curve, fitted) if curve is not None else None


def without_loader(calibration: Calibration) -> Calibration:
    """For steps whose batches were built beforehand: the loader's thread has nothing to do."""
    return dataclasses.replace(calibration, curves=tuple(c for c in calibration.curves if c.op != "input"))


def predict(work: Path, device: str, calibration: Calibration, *, search_seconds: float = SEARCH_SECONDS, seed: int | None = None) -> list[str]:
    """Writes every plan that has no result with its prediction, plans.json (their names, most wanted first), and W/warm, the plans of `warm`."""
    made = space.plans(device, RANKS, seed)
    known = without_loader(calibration)
    for name, plan in (made | choices(device, known, seconds=search_seconds, seed=seed)).items():
        write(work / name, plan, known, calibration.fingerprint)
    _save_numbered(work / "warm", space.warm_plans(device, seed))
    names = list(made)
    at = names.index("full-ddp")
    names[at:at] = multi_gpu_report.CHOICES
    (work / "plans.json").write_text(json.dumps(names) + "\n")
    return names


def write(folder: Path, plan: Plan, known: Calibration, fingerprint: str) -> None:
    """The plan with what `known` predicts of it, unless it has a result; fingerprint: of the whole calibration."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "run.json").exists():
        return
    ran = _as_run(plan)
    prints = {**plan.expected_fingerprints(), "calibration": fingerprint}
    dataclasses.replace(plan, prediction=encode(estimate(ran, known)), fingerprints=prints).save(folder / "plan.json")


def predict_again(work: Path) -> None:
    """Fits what `work` holds by now and predicts its plans anew, before they run."""
    calibration = refit(work, cluster_of(work, "cuda"))
    known = without_loader(calibration)
    for path in sorted(work.glob("*/plan.json")):
        write(path.parent, Plan.load(path), known, calibration.fingerprint)


def predict_after(work: Path, calibration: Calibration) -> None:
    """What the model of now says of plans that have run, beside what was predicted of them: W/NAME/after.json, which is no score. `as_slow`: of two
    ranks, what it says where their main threads are as slow as they were."""
    known = without_loader(calibration)
    for path in sorted(work.glob("*/run.json")):
        plan, found = _as_run(space.recorded(path.parent)), json.loads(path.read_text())
        body = {"prediction": encode(estimate(plan, known)), "calibration": calibration.fingerprint, "commit": results.commit()}
        if plan.layout.world_size == 2 and plan.cluster.device.kind == "gpu" and "ranks" in found:
            body["as_slow"] = _as_slow(plan, known, found["ranks"])
        (path.parent / "after.json").write_text(json.dumps(body) + "\n")


def _as_slow(plan: Plan, calibration: Calibration, ranks: list[dict]) -> dict[str, float]:
    """Step and seconds of collectives alone where each rank's launches take so many times their predicted seconds as forward and backward did; mean
    of either rank having more to do."""
    slowest = slowest_rank(plan)
    factors = {name: Factors(tokens=f.tokens, pairs=f.pairs) for name, f in slowest.sequences.items()}
    slow, phases = lower(plan, calibration, factors=factors), ("forward", "backward")
    made = launches(slow.graph)
    hosts = [sum(rank["host"][p] for p in phases) / sum(made[p] for p in phases) for rank in ranks]
    steps = [peers.step_of(plan, calibration, slow, factors, hosts=(a, b)) for a, b in (hosts, hosts[::-1])]
    return {"step_s": statistics.fmean(step.seconds for step in steps), "alone_s": statistics.fmean(step.mean.alone for step in steps)}


def _as_run(plan: Plan) -> Plan:
    """On the batches that a run repeats."""
    return dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, num_steps=space.BATCHES))


def choices(device: str, calibration: Calibration, *, seconds: float, seed: int | None = None) -> dict[str, Plan]:
    """The planner's first choice for `full` and the next one of another layout or options, in the formats that both devices have."""
    from planner.search import search

    asked = dataclasses.replace(space.scenario("full", device, RANKS), workload=space.subject_workload("full", device, RANKS, seed))
    formats = tuple(f for f in ("fp8_row", "fp8_tensor", "fp8_block", "mxfp8", *(("bf16",) if device == "cpu" else ())))
    pins = dataclasses.replace(asked.pins, exclude=dataclasses.replace(asked.pins.exclude, precision={"*": formats}))
    found = search(dataclasses.replace(asked, pins=pins), calibration=calibration, time_limit=seconds, top=2)
    if not found.runners_up:  # the time limit was over: the best plan without what the best plan has most of
        without = dataclasses.replace(pins.exclude, layouts=(*pins.exclude.layouts, {"fsdp": found.plan.layout.fsdp, "ep": found.plan.layout.ep}))
        found = dataclasses.replace(found, runners_up=(search(dataclasses.replace(asked, pins=dataclasses.replace(pins, exclude=without)),
                                                              calibration=calibration, time_limit=seconds, top=1).plan,))
    return {name: dataclasses.replace(plan, seed=seed or 0) for name, plan in zip(multi_gpu_report.CHOICES, (found.plan, found.runners_up[0]))}


def warm(work: Path, device: str, *, seconds: float = WARM_SECONDS, ranks: int = RANKS) -> threading.Thread:
    """Begins to compile the kernels of the plans, in processes of their own; plans wait until the file `warming` of theirs is gone. Returns who waits
    for them and leaves W/warmed."""
    if not (work / "warm").exists():
        _save_numbered(work / "warm", space.warm_plans(device))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))).split(",")
    children: dict[str, list[subprocess.Popen]] = {}
    for i, path in enumerate(sorted((work / "warm").glob("*.json"))):
        command = [sys.executable, "-m", MODULE, "--device", device, "--warm", str(path)]
        variables = {**os.environ, **SAFE, "CUDA_VISIBLE_DEVICES": visible[i % len(visible)]}
        mark = f"{WARMING}-{Plan.load(path).regions[0].options[0].precision}"
        (work / mark).touch()
        children.setdefault(mark, []).append(subprocess.Popen(command, env=variables))
    until, begin = time.time() + seconds, time.time()

    def wait() -> None:
        for mark, group in sorted(children.items()):
            for child in group:
                try:
                    child.wait(max(0.1, until - time.time()))
                except subprocess.TimeoutExpired:
                    child.kill()
            (work / mark).unlink(missing_ok=True)
            print(f"{mark}: after {time.time() - begin:.1f} s: {[child.poll() for child in group]}", flush=True)
        (work / "warmed").touch()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def _save_numbered(folder: Path, plans: Iterable[Plan]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, plan in enumerate(plans):
        plan.save(folder / f"{i}.json")


def cluster_of(work: Path, device: str) -> Cluster:
    """The cluster of the plans in `work`, or of the scenario where there are none yet."""
    found = next(iter(sorted(work.glob("*/plan.json"))), None)
    return space.recorded(found.parent).cluster if found is not None else space.scenario("full", device, RANKS).cluster


def run(work: Path, device: str, cluster: Cluster, *, seconds: float, parts: tuple[str, ...] = RUNS,
        extra: tuple[str, ...] = (), ranks: int = RANKS) -> None:
    """Launches on `ranks` GPUs until every plan has a result or the time is over; a launch after a failed plan continues behind it."""
    until = time.time() + seconds
    while time.time() + (LEAST if device == "cuda" else 0.0) < until:
        before = len(list(work.glob("*/run.json")))
        code = start(parts, work, device, cluster, until=until, extra=extra, ranks=ranks)
        if code == 0 or len(list(work.glob("*/run.json"))) + len(list(work.glob("*/started"))) == before:
            return
        parts = tuple(part for part in parts if part in RUNS)


def start(parts: tuple[str, ...], work: Path, device: str, cluster: Cluster, *, until: float, extra: tuple[str, ...] = (), ranks: int = RANKS) -> int:
    """torchrun on all ranks; its output goes to W/ranks.log and here."""
    if "ops" in parts:
        _save_numbered(work / "subjects", space.calibration_plans(device))
    arguments = [*parts, "--work", str(work), "--device", device, "--until", str(until), *extra]
    command = launch.torchrun_command(MODULE, arguments, ranks_per_host=ranks)
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **launch.environment(cluster), **SAFE,
                 "PLANNER_COLLECTIVE_TIMEOUT": str(COLLECTIVE_TIMEOUT if device == "cuda" else 120)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (work / LOG).open("a") as log, subprocess.Popen(command, env=variables, **pipes) as child:
        watch = threading.Timer(until + STARTING - time.time(), child.terminate)  # torchrun ends its ranks and then itself
        watch.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                log.write(line)
                log.flush()
                print(line, end="", flush=True)
            return child.wait()
        except BaseException:
            child.terminate()
            raise
        finally:
            watch.cancel()


def everything(work: Path, device: str, *, total: float, given: Path | None, seed: int | None, search_seconds: float, note: str, out: Path,
               extra: tuple[str, ...] = ()) -> None:
    """All of it within `total` seconds, what W lacks."""
    until = time.time() + total
    left = lambda: until - time.time() - REPORTING
    if not (work / "plans.json").exists():
        if device == "cpu" and given is None and not (work / "collectives.jsonl").exists():
            calibrate(work, device, cluster_of(work, device), seconds=left(), extra=extra)
        measured = given is None and ((work / "samples.jsonl").exists() or device == "cpu")
        predict(work, device, refit(work, cluster_of(work, device)) if measured else load_calibration(given or KNOWN),
                search_seconds=search_seconds, seed=seed)
    if not (work / "warmed").exists() and device == "cuda":
        warm(work, device, seconds=min(WARM_SECONDS, left())).join()
    if parts := wanted(work, device):
        run(work, device, cluster_of(work, device), seconds=left(), parts=parts, extra=extra)
    print(multi_gpu_report.report(work, device, out=out, note=note))


def wanted(work: Path, device: str) -> tuple[str, ...]:
    """The parts of a launch that W lacks."""
    notes = json.loads((work / "beside.json").read_text()) if (work / "beside.json").exists() else {}
    linked, some = (work / "collectives.jsonl").exists(), any(work.glob("*/run.json"))
    again = ("predict",) if (work / "samples.jsonl").exists() and not some else ()
    waiting = any(not (work / name / "run.json").exists() for name in json.loads((work / "plans.json").read_text()))
    copied = notes.get("copies") or "copies" in notes.get("failed", {}) or device == "cpu"
    return (*(() if linked else ("collectives",)), *again, *(RUNS if waiting else ()), *(() if copied else ("links",)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.multi_gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--stage", choices=("all", "warm", "calibrate", "fit", "predict", "after", "run", "report"), default="all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="of the launch of calibrate or run (default: all of the stage)")
    parser.add_argument("--op-seconds", type=float, help="of a launch's part `ops`")
    parser.add_argument("--seed", type=int, help="predict plans on workloads that it draws (default: those that were looked at)")
    parser.add_argument("--steps", type=int, help="measured steps of a plan (default: about a second of them)")
    parser.add_argument("--plan-seconds", type=float, help="that a plan may take before the launch is begun anew behind it")
    parser.add_argument("--warm", action="store_true", help="compile the kernels first, side by side; --stage warm does nothing else")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: the same on gloo with models of a test's size")
    parser.add_argument("--work", type=Path, help="folder for samples, plans and runs (default: out/multi-gpu-DEVICE)")
    parser.add_argument("--calibration", type=Path, help="predict with this one (default: what W's samples give)")
    parser.add_argument("--resume", action="store_true", help="keep what the work folder holds")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each launch: nothing new begins after so long")
    parser.add_argument("--search-seconds", type=float, default=SEARCH_SECONDS, help="of each search for the planner's choices")
    parser.add_argument("--total", type=float, default=TOTAL, help="seconds of the whole call, where no stage is named")
    parser.add_argument("--ranks", type=int, default=RANKS, help="1: of stage run what is of one GPU")
    parser.add_argument("--note", default="", help="sentence for the report")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    work, stage, device = options.work or Path("out") / f"multi-gpu-{options.device}", options.stage, options.device
    if stage == "all" and not options.resume and work.exists() and any(work.iterdir()):
        raise SystemExit(f"{work} is not empty; --resume continues there, another --work starts afresh")
    work.mkdir(parents=True, exist_ok=True)
    cluster = cluster_of(work, device)
    passed = {"--op-seconds": options.op_seconds, "--steps": options.steps, "--plan-seconds": options.plan_seconds}
    extra = tuple(word for name, value in passed.items() if value is not None for word in (name, str(value)))
    if stage == "all":
        everything(work, device, total=options.total, given=options.calibration, seed=options.seed, search_seconds=options.search_seconds,
                   note=options.note, out=options.out, extra=extra)
        return 0
    if options.warm or stage == "warm":
        warm(work, device, ranks=options.ranks)
    if stage == "calibrate":
        calibrate(work, device, cluster, seconds=options.seconds, parts=tuple(options.parts or CALIBRATION), extra=extra)
    if stage in ("fit", "predict", "after"):
        calibration = load_calibration(options.calibration) if options.calibration is not None else refit(work, cluster)
    if stage == "after":
        predict_after(work, calibration)
    if stage == "predict":
        predict(work, device, calibration, search_seconds=options.search_seconds, seed=options.seed)
    if stage == "run":
        run(work, device, cluster, seconds=options.seconds, parts=tuple(options.parts or (RUNS if options.ranks > 1 else RUNS[1:])), extra=extra,
            ranks=options.ranks)
    if stage == "report":
        print(multi_gpu_report.report(work, device, out=options.out, note=options.note))
    return 0


if __name__ == "__main__":
    sys.exit(main())
