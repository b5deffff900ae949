"""`planner validate`: the trainings behind the gates of `planner.gates`, as subprocesses like any run; those of one kind share one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from costmodel import launch
from costmodel.plan import Plan
from costmodel.runresult import RunResult
from planner import gates, runner
from planner.errors import Interrupted, RunFailed, UsageError
from planner.report.console import grid
from planner.run import PLAN_FILE, RESULT_FILE, check_executable, load_plan

load = load_plan
FOLDER = "validation"


def run(directory: Path | str, *, seeds: int, steps: int | None, tolerance: float | None, blame: bool,
        progress: Callable[[str], None]) -> tuple[gates.Validation, Path]:
    """Validates the plan in `directory` and writes the verdict there. Raises UsageError, RunFailed, Interrupted."""
    plan, directory = load_plan(directory)
    check_executable(plan)
    runner.check_runtime()
    with runner.alone(directory):
        folder = directory / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        try:
            found = gates.validate(plan, lambda asked: train(asked, folder, steps, progress), seeds=seeds, tolerance=tolerance or plan.ne_tolerance,
                                   events=trained_events(plan, steps), blame=blame, progress=progress)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return found, gates.save(found, directory)


def trained_events(plan: Plan, steps: int | None) -> int:
    """Samples that one training sees, 0 where only the data says how many."""
    batch, source = plan.local_batch * plan.accumulation * plan.layout.world_size, plan.workload.source
    number = steps or plan.workload.num_steps
    if number is None and source.kind == "synthetic":
        number = plan.workload.epochs * (source.num_events // batch)
    return number * batch if number else 0


def train(asked: Sequence[tuple[Plan, str]], folder: Path, steps: int | None, progress: Callable[[str], None]) -> list[gates.Trained]:
    """(NE of the worst task, median step seconds) of each training, all in one job, each in a folder of its own."""
    folders = [folder / name for _, name in asked]
    for (plan, _), own in zip(asked, folders):
        own.mkdir(parents=True)
        plan.save(own / PLAN_FILE)
    cluster = asked[0][0].cluster
    command = launch.torchrun_command("runtime.trainings", [*map(str, folders), *(["--steps", str(steps)] if steps is not None else [])],
                                      ranks_per_host=cluster.devices_per_host, num_hosts=cluster.num_hosts)
    outcome = runner.follow(command, variables=launch.environment(cluster), log=folder / "run.log",
                            on_event=lambda event: progress(f"{event['folder']} trained") if event["event"] == "trained" else None)
    if outcome.interrupted:
        raise Interrupted("interrupted; no verdict was written")
    return [_read(own, outcome) for own in folders]


def _read(folder: Path, outcome: runner.Outcome) -> gates.Trained:
    result = RunResult.load(folder / RESULT_FILE) if (folder / RESULT_FILE).is_file() else None
    if outcome.returncode or result is None or not result.quality.ne or result.measured is None:
        raise RunFailed(f"{folder.name}: {outcome.reason() or 'no held-out events or no measured step'}\nfull log: {outcome.log}")
    return max(result.quality.ne.values()), result.measured.step_time_s.median


def table(found: gates.Validation):
    """Both gates, in per cent."""
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:+.4%}"

    rows = [[name, gate.verdict, percent(gate.mean), percent(gate.lower), percent(gate.upper), percent(gate.allowed), str(len(gate.differences)),
             str(gate.seeds_needed or "-"), f"{gate.events_needed:,}" if gate.events_needed else "-"]
            for name, gate in (("time", found.time), ("quality (NE)", found.quality))]
    head = f"{found.verdict}" + (f"; to blame: {', '.join(found.blame)}" if found.blame else "")
    columns = [("gate", "left"), ("verdict", "left"), ("mean", "right"), ("lower 95 %", "right"), ("upper 95 %", "right"), ("allowed", "right"),
               ("seeds", "right"), ("needed", "right"), ("events needed", "right")]
    return grid(head, columns, rows)
