"""`planner run`: executes a plan, compares what was predicted with what was measured, and keeps both."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from costmodel import launch
from costmodel.cluster import Cluster
from costmodel.plan import Plan
from costmodel.runresult import PHASES, RunResult
from planner import runner
from planner.errors import Interrupted, RunFailed, TargetMissed, UsageError
from planner.files import check_writable
from planner.ledger import Entry, Ledger, save_entry

PLAN_FILE, RESULT_FILE, LOG_FILE = "plan.json", "result.json", "run.log"
Event = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """How several hosts find each other; passed to torchrun as it is."""

    endpoint: str | None = None
    node_rank: int | None = None
    id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: the plan, what was measured, and the ledger's row. `entry` is None on hosts other than the first."""

    plan: Plan
    directory: Path
    result: RunResult | None
    entry: Entry | None
    ledger: Path | None


def load_plan(reference: Path | str) -> tuple[Plan, Path]:
    """A plan and its folder, from `DIR` or `DIR/plan.json`. Raises UsageError."""
    path = Path(reference)
    path = path / PLAN_FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"{path}: no such file; `planner search SCENARIO -o {path.parent}` writes one")
    try:
        return Plan.load(path), path.parent
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def check_executable(plan: Plan, *, rendezvous: Rendezvous = Rendezvous()) -> None:
    """Raises UsageError with the reason when this plan cannot be run here."""
    if plan.predict_only:
        raise UsageError("this plan can be predicted, not executed:\n" + "\n".join(f"  - {reason}" for reason in plan.predict_only))
    cluster = plan.cluster
    if plan.layout.world_size != cluster.num_ranks:
        raise UsageError(
            f"layout {plan.layout.short} is for {plan.layout.world_size} ranks, cluster {cluster.name} has {cluster.num_ranks}; search again"
        )
    if cluster.num_hosts > 1 and rendezvous.endpoint is None:
        raise UsageError(
            f"cluster {cluster.name} has {cluster.num_hosts} hosts: start this command on each of them with the same --rdzv-endpoint HOST:PORT"
        )
    check_device(cluster, "the plan")


def check_device(cluster: Cluster, what: str) -> None:
    """Raises UsageError when this machine is not a host of the cluster: too few GPUs, or another processor."""
    from planner import machine

    if cluster.device.kind == "gpu":
        found = machine.gpus()
        if len(found) < cluster.devices_per_host:
            seen = f"{len(found)} ({', '.join(sorted(set(found)))})" if found else "none"
            raise UsageError(f"{what} needs {cluster.devices_per_host} {cluster.device.name} on this host; NVIDIA GPUs found: {seen}")
    elif cluster.device.name.startswith(machine.PREFIX) and cluster.device.name != machine.device_name():
        raise UsageError(f"{what} was made for {cluster.device.name}, this machine is {machine.device_name()}; search again here")


def command(
    plan: Plan,
    directory: Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    evaluate: bool = True,
    trace: str | None = None,
    checkpoint: bool = True,
    checkpoint_every: int | None = None,
    max_restarts: int = 0,
    rendezvous: Rendezvous = Rendezvous(),
) -> list[str]:
    """The torchrun command line of a plan."""
    arguments = [str(directory / PLAN_FILE), "--out", str(directory)]
    arguments += ["--steps", str(steps)] if steps is not None else []
    arguments += ["--resume"] if resume else []
    arguments += [] if evaluate else ["--no-eval"]
    arguments += [] if checkpoint else ["--no-checkpoint"]
    arguments += ["--trace-steps", trace] if trace is not None else []
    arguments += ["--checkpoint-every", str(checkpoint_every)] if checkpoint_every is not None else []
    return launch.torchrun_command(
        "runtime.train",
        arguments,
        ranks_per_host=plan.cluster.devices_per_host,
        num_hosts=plan.cluster.num_hosts,
        node_rank=rendezvous.node_rank,
        rdzv_endpoint=rendezvous.endpoint,
        rdzv_id=rendezvous.id,
        max_restarts=max_restarts,
    )


def execute(
    directory: Path | str,
    *,
    steps: int | None = None,
    resume: bool = False,
    evaluate: bool = True,
    trace: str | None = None,
    checkpoint: bool = True,
    checkpoint_every: int | None = None,
    max_restarts: int = 0,
    rendezvous: Rendezvous = Rendezvous(),
    ledger: Ledger | None = None,
    on_event: Event = lambda event: None,
) -> Run:
    """Runs the plan in `directory` to its end and appends the ledger's row. `trace`: steps FIRST:END to trace on every rank. `checkpoint`: whether
    one is written at the end; `checkpoint_every`: steps between others; `max_restarts`: how often torchrun may start the ranks again, from the newest
    of them.

    Raises UsageError (the plan does not fit, the folder is in use or cannot be written to, restarts without checkpoints),
    RunFailed (a worker died; what was measured is kept), LedgerError (the row stays in the folder).
    """
    plan, directory = load_plan(directory)
    check_executable(plan, rendezvous=rendezvous)
    if max_restarts and checkpoint_every is None:
        raise UsageError("--max-restarts without --checkpoint-every K would begin again at the first step; docs/runtime.md says how K is chosen")
    if checkpoint_every is not None and not checkpoint:
        raise UsageError("--checkpoint-every with --no-checkpoint: give one of them")
    runner.check_runtime()
    ledger = ledger or Ledger()
    ledger.check()
    check_writable(directory)
    with runner.alone(directory) if rendezvous.node_rank in (None, 0) else contextlib.nullcontext():
        return _execute(
            plan,
            directory,
            command(plan, directory, steps=steps, resume=resume, evaluate=evaluate, trace=trace, checkpoint=checkpoint,
                    checkpoint_every=checkpoint_every, max_restarts=max_restarts, rendezvous=rendezvous),
            rendezvous=rendezvous,
            ledger=ledger,
            on_event=on_event,
        )


def _execute(plan: Plan, directory: Path, words: list[str], *, rendezvous: Rendezvous, ledger: Ledger, on_event: Event) -> Run:
    first_host = rendezvous.node_rank in (None, 0)
    result_path = directory / RESULT_FILE
    if first_host:
        result_path.unlink(missing_ok=True)
    outcome = runner.follow(
        words,
        variables=launch.environment(plan.cluster),
        log=directory / _log_name(rendezvous),
        on_event=on_event,
    )
    result = _result(result_path, plan) if first_host else None
    run = Run(plan=plan, directory=directory, result=result, entry=None, ledger=None)
    if result is not None:
        run = _recorded(run, result, ledger)
    if outcome.interrupted:
        kept = "; continue with --resume" if result is not None else f"; no result was written, see {outcome.log}"
        raise Interrupted(f"interrupted{kept}")
    if outcome.returncode != 0 or (first_host and (result is None or result.status != "completed")):
        reason = (result.message if result and result.message else "") or outcome.reason()
        raise RunFailed(f"the run failed (exit code {outcome.returncode}): {reason}\nfull log: {outcome.log}")
    return run


def _log_name(rendezvous: Rendezvous) -> str:
    return LOG_FILE if rendezvous.node_rank in (None, 0) else f"run.{rendezvous.node_rank}.log"


def _result(path: Path, plan: Plan) -> RunResult | None:
    if not path.is_file():
        return None
    try:
        result = RunResult.load(path)
    except ValueError as error:
        raise RunFailed(str(error)) from error
    if result.plan_identity != plan.identity():
        raise RunFailed(f"{path}: measured for plan {result.plan_identity}, not for {plan.identity()}")
    return result


def _recorded(run: Run, result: RunResult, ledger: Ledger) -> Run:
    entry = make_entry(run.plan, result, run.directory)
    save_entry(entry, run.directory)
    ledger.append(entry)
    return dataclasses.replace(run, entry=entry, ledger=ledger.path)


def make_entry(plan: Plan, result: RunResult, directory: Path) -> Entry:
    """The ledger's row of one run."""
    prediction, measured = plan.prediction, result.measured
    step = prediction.get("step_time", {})
    predicted, median = step.get("value"), measured.step_time_s.median if measured else None
    memory = prediction.get("memory", {})
    return Entry(
        time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        scenario=plan.scenario,
        plan_identity=plan.identity(),
        calibration=plan.fingerprints.get("calibration", ""),
        cluster=plan.cluster.name,
        device=plan.cluster.device.name,
        model=plan.model.name,
        workload=plan.workload.name,
        world_size=result.world_size,
        layout=plan.layout.short,
        local_batch=plan.local_batch,
        accumulation=plan.accumulation,
        status=result.status,
        steps=result.steps,
        predicted_step_s=predicted,
        predicted_low_s=step.get("low"),
        predicted_high_s=step.get("high"),
        measured_step_s=median,
        measured_p10_s=measured.step_time_s.p10 if measured else None,
        measured_p90_s=measured.step_time_s.p90 if measured else None,
        error=median / predicted - 1 if median is not None and predicted else None,
        examples_per_second=measured.examples_per_second if measured else None,
        final_loss=result.quality.final_loss,
        predicted_phases_s={phase: q["value"] for phase, q in prediction.get("phases", {}).items()},
        measured_phases_s=dict(measured.phases_s) if measured else {},
        predicted_memory_bytes={**memory.get("categories", {}), **{k: memory[k]["value"] for k in ("peak", "reserved") if memory.get(k)}},
        measured_memory_bytes=_measured_memory(measured),
        quality={**{f"ne.{k}": v for k, v in result.quality.ne.items()}, **{f"baseline.{k}": v for k, v in result.quality.baselines.items()}},
        predicted_sources=dict(prediction.get("by_source", {})),
        environment=result.environment,
        directory=str(directory),
    )


def _measured_memory(measured: Any) -> dict[str, float]:
    if measured is None:
        return {}
    values = {f.name: getattr(measured.memory_bytes, f.name) for f in dataclasses.fields(measured.memory_bytes)}
    values["peak"] = values.pop("peak_allocated")
    return {name: value for name, value in values.items() if value is not None}


def check_error(entry: Entry, max_error: float | None) -> None:
    """Raises TargetMissed when the step time was further from its prediction than `max_error`."""
    if max_error is None:
        return
    if entry.error is None:
        raise TargetMissed("no error to compare with --max-error: a predicted and a measured step time are both needed")
    if abs(entry.error) > max_error:
        raise TargetMissed(
            f"step time: measured {entry.measured_step_s:.4g} s is {entry.error:+.1%} off the predicted {entry.predicted_step_s:.4g} s; "
            f"--max-error allows {max_error:.1%}"
        )


def comparison(entry: Entry) -> dict[str, Any]:
    """Predicted against measured, JSON-ready: step, phases, memory, each with its error."""

    def pair(predicted: float | None, measured: float | None) -> dict[str, float | None]:
        error = measured / predicted - 1 if predicted and measured is not None else None
        return {"predicted": predicted, "measured": measured, "error": error}

    memory = [k for k in entry.predicted_memory_bytes if k in entry.measured_memory_bytes]
    return {
        "step_time_s": {**pair(entry.predicted_step_s, entry.measured_step_s), "low": entry.predicted_low_s, "high": entry.predicted_high_s},
        "phases_s": {p: pair(entry.predicted_phases_s.get(p), entry.measured_phases_s.get(p)) for p in PHASES},
        "memory_bytes": {k: pair(entry.predicted_memory_bytes[k], entry.measured_memory_bytes[k]) for k in memory},
    }
