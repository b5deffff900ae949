"""`planner calibrate`: times what the trainer runs, fits, and keeps the result; and finds the calibration that a prediction should use.

    $PLANNER_STATE/calibrations/DEVICE.json            fitted curves        what predictions read
    $PLANNER_STATE/calibrations/DEVICE.samples.jsonl   measurements         merged with imports and fitted again
    costmodel/calibrations/DEVICE.json                 ships with the planner

The runtime is started as a subprocess, once alone and once on every rank of a host, with the same threads and allocator settings as a run.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import costmodel
from costmodel import launch
from costmodel.calibration import Calibration, fit, with_collectives
from costmodel.calibration import load as load_calibration
from costmodel.calibration_checks import check
from costmodel.cluster import Cluster, Device
from costmodel.samples import Environment, Sample, read_samples, write_samples
from costmodel.state import state_directory
from planner import catalogue, runner
from planner.errors import CalibrationRequired, Interrupted, RunFailed, UsageError

Preset = Literal["quick", "full"]
_BUNDLED = Path(costmodel.__file__).resolve().parent / "calibrations"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The calibration to predict with, or None; `notes` say what a reader should know about it."""

    calibration: Calibration | None
    path: Path | None
    notes: tuple[str, ...] = ()


def calibration_path(device: str) -> Path:
    """Where this user's calibration of a device lies."""
    return state_directory() / "calibrations" / f"{device}.json"


def bundled_path(device: str) -> Path:
    """Where one that ships with the planner would lie."""
    return _BUNDLED / f"{device}.json"


def samples_path(device: str) -> Path:
    """The measurements behind it."""
    return calibration_path(device).with_suffix(".samples.jsonl")


def find(cluster: Cluster, *, path: Path | str | None = None, calibrated_only: bool = False) -> Found:
    """The calibration for a cluster's device: `path`, the user's own, the bundled one, or that of another GPU (marked extrapolated).

    Missing or stale is a note, unless `calibrated_only`: then CalibrationRequired. Raises UsageError for a damaged file, and for a CPU's where a GPU
    is asked for or the other way round.
    """
    device = cluster.device
    where = Path(path) if path is not None else _known(device)
    if where is None:
        note = f"no calibration of {device.name}: times are rooflines with wide intervals; `planner calibrate SCENARIO` measures them"
        return _required(Found(calibration=None, path=None, notes=(note,)), calibrated_only)
    calibration = read(where)
    if (calibration.device.kind == "cpu") != (device.kind == "cpu"):
        kind = calibration.environment.device_kind
        raise UsageError(f"calibration {where}: environment.device_kind: {kind}; nothing of it carries over to {device.name}, a {device.kind}")
    notes, problem = [], False
    if not calibration.matches(device):
        notes.append(
            f"{where.name} was measured on {calibration.environment.device_name}, not on {device.name}: its efficiencies are carried over "
            "and marked extrapolated"
        )
        problem = True
    stale, why = _stale_kinds(calibration, cluster)
    if stale:
        calibration = calibration.with_stale(stale)
        notes.append(f"calibration {where.name} is stale for {', '.join(stale)} ({why}): intervals are wider; `planner calibrate SCENARIO` renews it")
        problem = True
    return _required(Found(calibration=calibration, path=where, notes=tuple(notes)), calibrated_only and problem)


def _required(found: Found, refused: bool) -> Found:
    if refused:
        raise CalibrationRequired("--calibrated-only: " + "; ".join(found.notes))
    return found


def _known(device: Device) -> Path | None:
    for path in (calibration_path(device.name), bundled_path(device.name)):
        if path.is_file():
            return path
    if device.kind == "cpu":
        return None
    # Another GPU's efficiencies are a better guess than the roofline.
    known = [path for name in catalogue.names("devices") for path in (calibration_path(name), bundled_path(name)) if path.is_file()]
    return next((path for path in known if read(path).environment.device_kind != "cpu"), None)


def read(path: Path) -> Calibration:
    """The calibration in a file. Raises UsageError."""
    try:
        return load_calibration(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"calibration {error}; `planner calibrate SCENARIO` makes a new one") from error


def _stale_kinds(calibration: Calibration, cluster: Cluster) -> tuple[list[str], str]:
    """Op kinds whose measurements no longer stand for what a run would do, and why."""
    environment = calibration.environment
    if cluster.device.kind == "cpu" and calibration.matches(cluster.device):
        threads = launch.threads_per_rank(cluster)
        if environment.threads != threads or environment.allocator != launch.allocator():
            return sorted(environment.source_hashes), "runs use other threads or allocator settings"
    # a GPU's runs happen elsewhere, under the torch that was calibrated; this machine's own version says nothing about them
    hashes = source_hashes() if cluster.device.kind == "cpu" else source_hashes(torch=environment.torch)
    return (calibration.stale(hashes), "their sources changed") if hashes else ([], "")


def source_hashes(torch: str = "") -> dict[str, str]:
    """Hash of the sources of each op kind as installed now, under this machine's torch or that version; empty where the runtime is not installed
    beside the planner."""
    command = [sys.executable, "-m", "runtime.hashes", *([torch] if torch else [])]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if answer.returncode != 0:
        if "No module named" in answer.stderr:
            return {}
        raise RunFailed(f"{' '.join(command[1:])} failed: {answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else answer.returncode}")
    return json.loads(answer.stdout)


def is_current(cluster: Cluster) -> bool:
    """Whether this user's calibration of the device exists and is neither foreign nor stale."""
    path = calibration_path(cluster.device.name)
    return path.is_file() and not find(cluster, path=path).notes


def calibrate(
    cluster: Cluster,
    subjects: Iterable[Path],
    *,
    preset: Preset = "quick",
    ranks: tuple[int, ...] | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Path:
    """Measures on this machine and writes the calibration; `subjects` are plan files whose shapes are timed.

    Raises RunFailed when the microbenchmark fails, Interrupted on Ctrl-C; an earlier calibration then stays as it was.
    """
    if cluster.num_hosts > 1:
        raise UsageError(
            f"cluster {cluster.name} has {cluster.num_hosts} hosts; calibrate on one host of it, e.g. with a scenario of one host, "
            "and bring collectives in with --import"
        )
    counts = ranks or ((1,) if cluster.devices_per_host == 1 else (1, cluster.devices_per_host))
    device, samples = cluster.device, []
    environment: Environment | None = None
    with tempfile.TemporaryDirectory(prefix="planner-calibrate-") as folder:
        for number in counts:
            out = Path(folder) / f"samples-{number}.jsonl"
            arguments = ["--out", str(out), "--preset", preset, "--models", *(str(s) for s in subjects)]
            command = launch.torchrun_command("runtime.microbench", arguments, ranks_per_host=number)
            on_event({"event": "stage", "ranks": number})
            outcome = runner.follow(command, variables=launch.environment(cluster), log=_log(device.name, number), on_event=on_event)
            if outcome.interrupted:
                raise Interrupted("interrupted; the earlier calibration, if any, stays")
            if outcome.returncode != 0:
                raise RunFailed(f"the microbenchmark on {number} rank(s) failed: {outcome.reason()}\nfull log: {outcome.log}")
            environment, found = read_samples(out)
            samples += found
    assert environment is not None
    return store(device, environment, samples)


def _log(device: str, ranks: int) -> Path:
    return calibration_path(device).parent / f"{device}.{ranks}.log"


def store(device: Device, environment: Environment, samples: list[Sample]) -> Path:
    """Fits samples of `device` and writes both files. Raises UsageError when they are another kind of device's, RunFailed when they cannot be fitted;
    nothing is written then."""
    kind = "cpu" if environment.device_kind == "cpu" else "gpu"
    if kind != device.kind:
        raise UsageError(f"the samples were measured on a {kind} ({environment.device_name}), {device.name} is a {device.kind}")
    environment = dataclasses.replace(environment, device_name=device.name)
    try:
        calibration = fit(environment, samples, device=device)
        check(calibration)
    except (ValueError, OverflowError) as error:
        raise RunFailed(f"the measurements of {device.name} cannot be fitted: {error}") from error
    path = calibration_path(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_samples(samples_path(device.name), environment, samples)
    calibration.save(path)
    return path


def import_file(file: Path, device: Device, *, collective: str | None = None) -> tuple[Path, int]:
    """Merges measurements from a file into the device's samples and fits again: (calibration file, samples read).

    A `samples.jsonl` replaces what it measures anew; a log of nccl-tests or a CSV file adds collectives. Where no samples of a GPU are kept, as of
    one that cannot be touched, they are added to the calibration that predictions of it use. Raises UsageError naming file and line.
    """
    environment, kept = _existing(device)
    try:
        if file.suffix == ".jsonl":
            environment, found = read_samples(file)
        else:
            from costmodel.comms_import import read_collectives

            found = read_collectives(file, collective=collective)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except (OSError, ValueError) as error:
        text = str(error)
        raise UsageError(text if str(file) in text else f"{file}: {text}") from error
    if environment is None:
        return _with_collectives(file, device, found), len(found)
    new = {_key(s) for s in found}
    try:
        return store(device, environment, [s for s in kept if _key(s) not in new] + found), len(found)
    except RunFailed as error:
        raise UsageError(f"{file}: {error}") from error


def _with_collectives(file: Path, device: Device, found: list[Sample]) -> Path:
    base = _known(device)
    if base is None:
        raise UsageError(
            f"{file}: holds collectives only, and there are no measurements of {device.name} yet to add them to; import or measure "
            "a samples.jsonl first"
        )
    path = calibration_path(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    calibration = with_collectives(read(base), found)
    check(calibration)
    calibration.save(path)
    return path


def _existing(device: Device) -> tuple[Environment | None, list[Sample]]:
    path = samples_path(device.name)
    if not path.is_file():
        return None, []
    try:
        return read_samples(path)
    except ValueError as error:
        raise UsageError(f"{error}; remove the file and calibrate again") from error


def _key(sample: Sample) -> tuple[Any, ...]:
    return (sample.op, sample.variant, sample.phase, sample.dtype, sample.active_ranks, tuple(sorted(sample.features.items())))
