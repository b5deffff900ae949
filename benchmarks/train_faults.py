"""Jobs that are killed, stopped and started again; `benchmarks.train` asks for the rows. Everything runs on CPU ranks under torchrun.

A job is followed by its progress lines; ranks are found among torchrun's children by their RANK.
"""
from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import Row
from costmodel import launch
from costmodel.cluster import Cluster, Device, LinkTier, Reliability
from costmodel.jobtime import job_time
from costmodel.model import Head, LayerGroup, Model, Sequence, TableGroup
from costmodel.plan import Layout, Plan, TablePlacement
from costmodel.regions import default_region_plans
from costmodel.runresult import RunResult
from costmodel.workload import EventSource, Lengths, Workload

STEPS, EVERY, RANKS = 1000, 50, 4


def tiny_plan(layout: Layout, *, steps: int, dim: int = 32, rows: int = 500, batch: int = 16) -> Plan:
    """A model of one HSTU layer whose step takes milliseconds on a core."""
    tables = (TableGroup(name="item", rows=rows, dim=16, pooling="sequence", sequence="history"), TableGroup(name="tag", rows=rows, dim=16, count=2))
    history = Sequence(name="history", layers=(LayerGroup(kind="hstu", heads=2, head_dim=8, divisor=20.0),))
    model = Model(name="tiny", dim=dim, tables=tables, num_dense_features=4, bottom_hidden=(16,), interaction_hidden=(32,),
                  heads=(Head(name="like"),), sequences=(history,))
    workload = Workload(name="tiny", lengths={"history": Lengths(kind="lognormal", maximum=16, median=5.0, sigma=0.7)}, global_batch=batch,
                        num_steps=steps, source=EventSource(kind="synthetic", num_events=max(16 * batch, 1600)))
    device = Device(name="cpu", kind="cpu", peak_flops={"fp32": 5e10}, memory_bytes=8e9, memory_bandwidth=1e10)
    cluster = Cluster(name="cpu", device=device, num_hosts=1, devices_per_host=layout.world_size,
                      tiers=(LinkTier(name="memory", scope="host", bandwidth=1e9, latency=1e-4),))
    names = [name for table in tables for name in table.names]
    sharding = "row_wise" if layout.sparse_group > 1 else "table_wise"
    placed = tuple(TablePlacement(table=n, sharding=sharding, ranks=() if layout.sparse_group > 1 else (0,)) for n in names)
    made = Plan(scenario="faults", cluster=cluster, model=model, workload=workload, layout=layout, local_batch=batch // layout.world_size,
                transport="gloo", regions=default_region_plans(model), tables=placed, seed=3)
    return dataclasses.replace(made, fingerprints=made.expected_fingerprints())


class Job:
    """A plan under torchrun. Iterating gives its events; `pids` its ranks' process ids by rank; `finish` its exit code and what it said."""

    def __init__(self, plan: Plan, out: Path, *arguments: str, max_restarts: int = 0, variables: dict[str, str] | None = None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        plan.save(out / "plan.json")
        self.out, self.world = out, plan.layout.world_size
        command = launch.torchrun_command("runtime.train", [str(out / "plan.json"), "--out", str(out), "--no-eval", *arguments],
                                          ranks_per_host=self.world, max_restarts=max_restarts)
        self._errors = (out / "stderr.log").open("w+")
        self.began = time.time()
        self.process = subprocess.Popen(command, env={**os.environ, **launch.environment(plan.cluster), **(variables or {})}, text=True,
                                        stdout=subprocess.PIPE, stderr=self._errors)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def pids(self) -> dict[int, int]:
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                rank = re.search(rb"(?:^|\0)RANK=(\d+)", (entry / "environ").read_bytes()) if parent == self.process.pid else None
            except OSError:
                continue
            if rank:
                found[int(rank[1])] = int(entry.name)
        return found

    def strike(self, rank: int, number: signal.Signals = signal.SIGKILL) -> bool:
        pid = self.pids().get(rank)
        if pid is None:
            return False
        os.kill(pid, number)
        return True

    def finish(self, timeout: float = 600) -> tuple[int, str]:
        try:
            self.process.communicate(timeout=timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        with self._errors:
            self._errors.seek(0)
            return self.process.returncode, self._errors.read()


def losses(out: Path) -> list[float]:
    """By step, every step once."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines))), "metrics.jsonl misses or repeats a step"
    return [line["loss"] for line in lines]


def attempts(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "attempts.jsonl").read_text().splitlines()]


def soak(work: Path, *, steps: int = STEPS, every: int = EVERY, ranks: int = RANKS, seed: int = 0) -> list[Row]:
    """The same job undisturbed and with one rank killed twice."""
    plan = tiny_plan(Layout(ddp=ranks // 2, fsdp=2, sparse_group=ranks), steps=steps)
    calm = Job(plan, work / "calm", "--checkpoint-every", str(every))
    code, err = calm.finish(1800)
    assert code == 0, err[-2000:]
    struck = Job(plan, work / "struck", "--checkpoint-every", str(every), max_restarts=4)
    rng = random.Random(seed)
    moments = [rng.randint(steps // 4, steps // 2), rng.randint(steps * 6 // 10, steps * 9 // 10)]
    for event in struck:
        if moments and event["event"] == "step" and event["step"] >= moments[0]:
            struck.strike(2 % ranks)
            del moments[0]
    code, err = struck.finish(1800)
    assert code == 0, err[-2000:]
    a, b, tries = losses(calm.out), losses(struck.out), attempts(struck.out)
    repeated = [t["lost_steps"] for t in tries[1:]]
    assert len(repeated) == 2, f"{len(repeated)} restarts after two kills"
    note = f"measured here, {steps} steps on {ranks} CPU ranks, one rank killed twice, a checkpoint every {every} steps"
    rows = [Row(name="faults: steps whose loss differs from the undisturbed run", value=sum(x != y for x, y in zip(a, b)) + abs(len(a) - len(b)),
                unit="steps", target=0, better="lower", note=f"{note}; final losses {a[-1]!r} and {b[-1]!r}"),
            Row(name="faults: most steps repeated after a kill", value=max(repeated), unit="steps", target=2 * every, better="lower",
                note=f"{note}; repeated {repeated}: the interval, and one more where the newest checkpoint was still being written")]
    return rows + effective(RunResult.load(calm.out / "result.json"), RunResult.load(struck.out / "result.json"), steps=steps, every=every)


def effective(calm: RunResult, struck: RunResult, *, steps: int, every: int) -> list[Row]:
    """Effective training time of the struck job against what the undisturbed one's start-up, step and checkpoint stall say of two failures: each
    costs a start-up and half an interval. The interval proposed is that of `costmodel.jobtime` at this rate of failures."""
    wall, total = calm.wall_seconds, sum(struck.wall_seconds.values())
    step, stall = wall["train"] / steps, wall["checkpoint"] / max(1, steps // every)
    predicted = wall["train"] / (sum(wall.values()) + 2 * (wall["startup"] + step * every / 2))
    measured = struck.wall_seconds["train"] / total
    known = Reliability(failures_per_device_hour=2 * 3600 / total, restart_seconds=wall["startup"], startup_seconds=wall["startup"],
                        checkpoint_bandwidth=1.0)
    proposed = job_time(known, ranks=1, training_seconds=wall["train"], bytes_per_rank=stall).interval / step
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in struck.wall_seconds.items())
    return [Row(name="faults: effective training time, measured over predicted", value=measured / predicted, unit="ratio",
                note=f"measured {measured:.3f}, predicted {predicted:.3f} from the undisturbed run; {parts}"),
            Row(name="faults: checkpoint interval by Young and Daly", value=proposed, unit="steps",
                note=f"a checkpoint stalls {stall * 1e3:.1f} ms, a failure every {total / 2:.0f} s; the job used {every}")]


def kills_while_saving(work: Path, *, kills: int = 10, seed: int = 1) -> list[Row]:
    """A job that does little but save loses a random rank at a random moment of a save, `kills` times."""
    plan = tiny_plan(Layout(fsdp=2, sparse_group=2), steps=60, rows=40_000)
    job = Job(plan, work / "saving", "--checkpoint-every", "2", max_restarts=kills + 2)
    rng, struck, resumed, caught, since = random.Random(seed), 0, 0, 0, 0
    checkpoints = work / "saving" / "checkpoint"
    for event in job:
        if event["event"] == "resume":
            resumed, since = resumed + 1, event["step"]
        if event["event"] == "step" and struck < kills and event["step"] >= since + 3 and resumed == struck:
            deadline = time.monotonic() + 20
            while not (saving := [*checkpoints.glob("*.tmp")]) and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(rng.uniform(0.0, 0.06))
            caught += bool([*checkpoints.glob("*.tmp")])
            struck += bool(saving) and job.strike(rng.randrange(2))
    code, err = job.finish(1800)
    calm = Job(plan, work / "saving-calm")
    assert calm.finish(600)[0] == 0
    same = code == 0 and losses(job.out) == losses(calm.out)
    return [Row(name="faults: kills while saving after which training went on", value=resumed if same else 0, unit="kills", target=kills,
                note=f"measured here, {struck} kills of a random rank, {caught} of them with a checkpoint half written; "
                     f"{'the 60 losses equal the undisturbed ones' if same else f'the job ended with code {code}: {err[-200:]!r}'}")]


def hung(work: Path, *, timeout: float = 6.0) -> list[Row]:
    """One rank is stopped (SIGSTOP) in the middle of training."""
    plan = tiny_plan(Layout(fsdp=2, sparse_group=2), steps=100_000)
    job = Job(plan, work / "hung", variables={"PLANNER_COLLECTIVE_TIMEOUT": str(timeout)})
    for event in job:
        if event["event"] == "step":
            stopped = job.pids()[1]
            os.kill(stopped, signal.SIGSTOP)
            break
    result, deadline = work / "hung" / "result.json", time.monotonic() + timeout + 60
    since = time.monotonic()
    while not result.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    took = time.monotonic() - since
    os.kill(stopped, signal.SIGKILL)
    job.finish()
    message = RunResult.load(result).message if result.exists() else ""
    named = "rank 0" in message and "exposed_communication" in message and "no word from rank 1" in message
    return [Row(name="faults: a hung collective names who waits, the phase and the silent rank", value=float(named), unit="yes = 1", target=1,
                note=f"measured here, after {took:.1f} s with a limit of {timeout:.0f} s: {message}")]


def exits(work: Path, *, count: int = 50) -> list[Row]:
    """Whole jobs of two ranks, one after the other."""
    plan, clean, faults = tiny_plan(Layout(ddp=2, sparse_group=2), steps=3), 0, []
    for i in range(count):
        with tempfile.TemporaryDirectory(dir=work) as folder:
            code, err = Job(plan, Path(folder)).finish()
        clean += code == 0 and not err.strip()
        faults += [f"run {i}: code {code}, {err.strip()[-100:]}"] if code or err.strip() else []
    return [Row(name="faults: clean torchrun exits", value=clean, unit="jobs", target=count,
                note=f"measured here, {count} jobs of 2 gloo ranks in one row, code 0 and nothing on stderr" + "".join(f"; {f}" for f in faults[:2]))]
