"""Planted constraints: are they named, is the planted amount found again, and how fast are diagnosis, report and record?

    python -m benchmarks.diagnose [--only simulated|ranks|speed|waterfall|viewers] [--resume] [--hta PYTHON] [--torchtitan PYTHON]

Simulated cases change one thing of a scenario and compare the accounting of both steps; the planted amount is the difference of the two step times.
Cases on CPU ranks train with a planted fault (benchmarks/planted.py), are traced, and diagnosed from the trace; the planted amount was timed where
it was planted. Uneven lengths and padding plant no time that could be timed: their amount is what the ranks' own clocks show, said in the note.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks import results
from benchmarks.planted import STEPS, is_planted
from costmodel.accounting import COMMUNICATION, DEVICE, Accounting, simulated
from costmodel.launch import environment
from costmodel.plan import Plan
from costmodel.workload import EventSource, Lengths
from planner import tracesteps
from planner.configure import default_plan
from planner.diagnose import Diagnosis, average, diagnose
from planner.scenario import load_scenario

RANKS = 2
EVENTS = 10_000_000
TRACE_BYTES = 200_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name, the constraint that must be named, the categories in which the planted time must show."""

    name: str
    constraint: str
    categories: tuple[str, ...]
    plan: Callable[[], Plan]
    base: Callable[[], Plan]


def plan_of(scenario: str) -> Plan:
    return default_plan(load_scenario(scenario, with_variants=False))[0]


def _tier(plan: Plan, name: str, factor: float) -> Plan:
    tiers = tuple(dataclasses.replace(t, bandwidth=t.bandwidth / factor) if t.name == name else t for t in plan.cluster.tiers)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, tiers=tiers))


def _device(plan: Plan, **changes) -> Plan:
    device = dataclasses.replace(plan.cluster.device, **changes)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device))


def _checkpointed(plan: Plan) -> Plan:
    regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(o, checkpoint="full") for o in r.options)) for r in plan.regions)
    return dataclasses.replace(plan, regions=regions)


def _even(plan: Plan) -> Plan:
    """Every history as long as the mean; no slow hosts and no jitter: a job whose ranks are alike."""
    lengths = {n: Lengths(kind="fixed", maximum=max(1, round(spec.mean()))) for n, spec in plan.workload.lengths.items()}
    reliability = dataclasses.replace(plan.cluster.reliability, slow_node_probability=0.0, slow_node_factor=1.0, step_jitter=0.0)
    return dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, lengths=lengths),
                               cluster=dataclasses.replace(plan.cluster, reliability=reliability))


def _lengths(plan: Plan, **changes) -> Plan:
    lengths = {n: dataclasses.replace(spec, **changes) for n, spec in plan.workload.lengths.items()}
    return dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, lengths=lengths))


def _slow_hosts(plan: Plan) -> Plan:
    reliability = dataclasses.replace(plan.cluster.reliability, slow_node_probability=0.05, slow_node_factor=1.4)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, reliability=reliability))


def _tiny_on_gpu() -> Plan:
    """A model of 64 channels on an H200: launches take longer than kernels."""
    small, host = plan_of("quickstart"), plan_of("gem-1xh200")
    plan = dataclasses.replace(host, model=small.model, workload=dataclasses.replace(small.workload, global_batch=None, local_batch=64),
                               local_batch=64, regions=small.regions, tables=tuple(dataclasses.replace(t, sharding="table_wise", ranks=(0,))
                                                                                    for t in small.tables))
    return plan


def simulated_cases() -> list[Case]:
    """Each plants one thing in a job that is otherwise healthy."""
    one, eight, zone = (lambda name=name: _even(plan_of(name)) for name in ("gem-1xh200", "gem-8xh200", "gem-512xh200"))
    roomy = Lengths(kind="lognormal", maximum=4096, median=600.0, sigma=1.0)
    uneven = lambda: _lengths(_even(plan_of("gem-8xh200")), kind="lognormal", median=300.0, sigma=1.6, maximum=8192)
    bandwidth = one().cluster.device.memory_bandwidth
    cases = [
        Case(name="narrow NVLink", constraint="communication:nvlink", categories=(COMMUNICATION + "nvlink",), base=eight,
             plan=lambda: _tier(eight(), "nvlink", 60.0)),
        *(Case(name=f"narrow {name}", constraint=f"communication:{name}", categories=(COMMUNICATION,), base=zone,
               plan=lambda name=name: _tier(zone(), name, 12.0)) for name in ("rdma", "spine")),
        Case(name="slow HBM", constraint="hbm_bandwidth", categories=("memory_bound", "compute"), base=one,
             plan=lambda: _device(one(), memory_bandwidth=bandwidth / 12)),
        Case(name="small HBM: all recomputed", constraint="hbm_capacity", categories=("recompute",), base=one, plan=lambda: _checkpointed(one())),
        Case(name="slow copies from the host", constraint="input", categories=("input",), base=one,
             plan=lambda: _device(one(), host_link_bandwidth=0.05e9)),
        Case(name="tiny kernels", constraint="host", categories=("host",), base=lambda: dataclasses.replace(_tiny_on_gpu(), execution="cuda_graph"),
             plan=_tiny_on_gpu),
        Case(name="skewed lengths", constraint="load_balance", categories=("straggler_wait",), plan=lambda: dataclasses.replace(
            uneven(), local_batch=16), base=lambda: dataclasses.replace(uneven(), local_batch=16, batching="global")),
        Case(name="padding", constraint="load_balance", categories=("padding", "straggler_wait"), plan=lambda: dataclasses.replace(
            _lengths(one(), **{f.name: getattr(roomy, f.name) for f in dataclasses.fields(roomy)}), batching="padded"),
            base=lambda: _lengths(one(), **{f.name: getattr(roomy, f.name) for f in dataclasses.fields(roomy)})),
        Case(name="slow hosts", constraint="synchronisation", categories=("synchronisation",), base=zone, plan=lambda: _slow_hosts(zone())),
        Case(name="nothing planted", constraint="compute", categories=(), base=one, plan=one),
    ]
    return cases


def _in(accounting: Accounting, categories: tuple[str, ...]) -> float:
    return sum(v for n, v in accounting.seconds.items() if any(n.startswith(c) if c.endswith(":") else n == c for c in categories))


def run_simulated() -> tuple[list[results.Row], list[tuple[str, bool, float, float | None]]]:
    rows, verdicts = [], []
    for case in simulated_cases():
        found, base = simulated(case.plan(), None), simulated(case.base(), None)
        planted = found.step - base.step
        recovered = None
        if case.categories and planted > 0:
            recovered = (_in(found, case.categories) - _in(base, case.categories)) / planted
        verdicts.append((f"simulated: {case.name}", found.binding == case.constraint, found.unattributed, recovered))
        rows += _case_rows(f"simulated: {case.name}", case.constraint, found, recovered,
                           f"step {base.step * 1e3:.1f} -> {found.step * 1e3:.1f} ms; {_relief(found)}")
    return rows, verdicts


def _relief(found: Accounting) -> str:
    return ", ".join(f"{n} {v / found.step:.1%}" for n, v in list(found.relief().items())[:3])


def _case_rows(name: str, constraint: str, found: Accounting, recovered: float | None, note: str) -> list[results.Row]:
    rows = [results.Row(name=f"{name}: named {constraint}", value=float(found.binding == constraint), unit="", target=1.0,
                        note=f"named {found.binding}; {note}"),
            results.Row(name=f"{name}: unattributed", value=100 * found.unattributed, unit="% of the step", target=3.0, better="lower")]
    if recovered is not None:
        rows.append(results.Row(name=f"{name}: planted amount found", value=100 * abs(recovered - 1), unit="% off", target=10.0, better="lower",
                                note=f"{recovered:.3f} of what was planted"))
    return rows


# --- CPU ranks ---

def rank_plans() -> dict[str, Plan]:
    """Small models on two ranks, each table on every rank's own shard; lengths are fixed unless they are what is planted."""
    plan = plan_of("quickstart")
    fixed = {name: Lengths(kind="fixed", maximum=40) for name in plan.workload.lengths}
    mixed = {name: Lengths(kind="uniform", minimum=1, maximum=200) for name in plan.workload.lengths}
    outliers = {name: Lengths(kind="histogram", minimum=100, maximum=250, values=(100, 250), weights=(0.95, 0.05)) for name in plan.workload.lengths}
    source = EventSource(kind="synthetic", num_events=20_000)

    def with_lengths(lengths: dict[str, Lengths], **changes) -> Plan:
        workload = dataclasses.replace(plan.workload, lengths=lengths, source=source, num_steps=STEPS, global_batch=RANKS * 128)
        made = dataclasses.replace(plan, workload=workload, local_batch=128, transport="gloo", **changes)
        return dataclasses.replace(made, fingerprints=made.expected_fingerprints())
    plans = {name: with_lengths(fixed) for name in ("healthy", "slow_reader", "slow_rank", "tiny_kernels", "slow_link")}
    return plans | {"uneven_lengths": with_lengths(mixed), "padded": with_lengths(outliers, batching="padded")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankCase:
    """A fault on CPU ranks.

    between: the fault makes the first rank wait for the last; what the first one waits more than the last is compared with what the last one needs
    more. Else every rank shows the fault and their mean is taken.
    clock: `planted` was timed where the fault is; `own` is a rank's phase timers without waits; `cpu` is the main thread's processor time, and what
    the trace shows is scaled to it, for other processes lengthen all that a rank does alike.
    """

    constraint: str
    categories: tuple[str, ...]
    between: bool = False
    clock: Literal["planted", "own", "cpu"] = "planted"


WAITS = ("synchronisation", "straggler_wait")
RANK_CASES = {
    "slow_reader": RankCase(constraint="input", categories=("input",)),
    "slow_rank": RankCase(constraint="synchronisation", categories=WAITS, between=True),
    "tiny_kernels": RankCase(constraint="host", categories=("host", "memory_bound"), clock="cpu"),
    "slow_link": RankCase(constraint="communication:loopback", categories=(COMMUNICATION,)),
    "uneven_lengths": RankCase(constraint="load_balance", categories=WAITS, between=True, clock="own"),
    "padded": RankCase(constraint="load_balance", categories=("padding",), clock="cpu")}


def run_ranks(folder: Path) -> tuple[list[results.Row], list[tuple[str, bool, float, float | None]]]:
    plans = folder / "plans"
    plans.mkdir(parents=True, exist_ok=True)
    made = rank_plans()
    for name, plan in made.items():
        plan.save(plans / f"{name}.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m", "benchmarks.planted", str(plans),
               str(folder)]
    subprocess.run(command, env={**os.environ, **environment(next(iter(made.values())).cluster)}, check=True, stdout=sys.stderr)
    rows, verdicts = [], []
    for name in made:
        found = diagnose(folder / name)
        measured = _of_steps(found, is_planted if name in RANK_CASES else lambda step: True)
        if name not in RANK_CASES:
            verdicts.append(("ranks: nothing planted", True, measured.unattributed, None))
            rows.append(results.Row(name="ranks: nothing planted: unattributed", value=100 * measured.unattributed, unit="% of the step", target=3.0,
                                    better="lower", note=f"named {measured.binding}; {_relief(measured)}"))
            continue
        case = RANK_CASES[name]
        amount, recovered, spread = _paired(folder / name, found, case)
        verdicts.append((f"ranks: {name}", measured.binding == case.constraint, measured.unattributed, recovered))
        how = {"planted": "timed where it was planted", "own": "phase timers of the ranks", "cpu": "processor time of the main threads"}[case.clock]
        rows += _case_rows(f"ranks: {name}", case.constraint, measured, recovered,
                           f"{amount * 1e3:.1f} ms planted in a step of {measured.step * 1e3:.1f} ms, {how}; by pair of steps {spread[0]:.2f} to "
                           f"{spread[1]:.2f} of it found; {_relief(measured)}")
    return rows, verdicts


def _of_steps(found: Diagnosis, wanted: Callable[[int], bool]) -> Accounting:
    """What the diagnosis says of these steps only."""
    measured = average([tracesteps.median_rank(ranks).account() for ranks in found.steps if wanted(ranks[0].step)])
    assert measured is not None
    return measured


def _paired(folder: Path, found: Diagnosis, case: RankCase) -> tuple[float, float, tuple[float, float]]:
    """(seconds planted a step, share of them that was found, its smallest and largest over pairs of steps); each pair's healthy step is subtracted
    and the median pair taken."""
    clocks = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(RANKS)]
    by_step = {ranks[0].step: sorted(ranks, key=lambda r: r.rank) for ranks in found.steps}

    def planted(step: int, rank: int) -> float:
        return clocks[rank][case.clock][str(step)]

    def seen(step: int, rank: int) -> float:
        scale = planted(step, rank) / _own(by_step[step][rank]) if case.clock == "cpu" else 1.0
        return scale * _in(by_step[step][rank].account(), case.categories)

    def combined(value: Callable[[int, int], float], step: int, sign: int) -> float:
        changes = [value(step, r) - value(step - 1, r) for r in range(RANKS)]
        return sign * (changes[-1] - changes[0]) if case.between else statistics.mean(changes)
    amounts, shares = [], []
    for step in filter(is_planted, by_step):
        amounts.append(combined(planted, step, 1))
        shares.append(combined(seen, step, -1) / amounts[-1])
    return statistics.median(amounts), statistics.median(shares), (min(shares), max(shares))


def _own(step: tracesteps.RankStep) -> float:
    return step.end - step.begin - sum(end - begin for begin, end in step.waits)


# --- speed ---

def _child(code: str, *arguments: str) -> tuple[float, float, str]:
    """(wall seconds, peak bytes, stdout) of a Python process of its own."""
    # ru_maxrss would count what this process holds: a child begins as its copy
    peak = "next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))"
    program = f"{code}\nprint('peak', int({peak}) * 1024)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    text, _, peak = done.stdout.rpartition("peak ")
    return seconds, float(peak), text


def run_record(folder: Path, events: int = EVENTS) -> list[results.Row]:
    """Events of users whose activity is Pareto distributed, one time stamp each, in Parquet."""
    import pandas as pd

    rng = np.random.default_rng(0)
    user = ((rng.pareto(1.2, events) + 1) * 700).astype(np.int64) % 150_000
    frame = pd.DataFrame({"user_id": user, "item_id": rng.zipf(1.2, events) % 3_000_000, "timestamp": np.arange(events)})
    path, out = folder / "events.parquet", folder / "recorded.yaml"
    frame.to_parquet(path, row_group_size=1 << 20, index=False)
    code = ("import sys\nfrom pathlib import Path\nfrom planner import record\n"
            "record.save(record.record([sys.argv[1]], max_history=4000), Path(sys.argv[2]))")
    seconds, peak, _ = _child(code, str(path), str(out))
    truth = np.minimum(frame.groupby("user_id").cumcount().to_numpy(), 4000) + 1
    rows = np.loadtxt(folder / "recorded-history.csv", delimiter=",", skiprows=1)
    recorded = Lengths(kind="histogram", minimum=1, maximum=4001, values=tuple(rows[:, 0].astype(int).tolist()), weights=tuple(rows[:, 1].tolist()))
    drawn = recorded.sample(np.random.default_rng(1), 500_000)
    counts = [np.cumsum(np.bincount(v, minlength=4002)) / len(v) for v in (truth, drawn)]
    note = f"{events:,} events, {len(np.unique(user)):,} users, own process with imports"
    return [results.Row(name="record: time", value=seconds, unit="s", target=20.0, better="lower", note=note),
            results.Row(name="record: peak memory", value=peak / 2**30, unit="GiB", target=1.0, better="lower", note=note),
            results.Row(name="record: KS of drawn lengths", value=float(np.abs(counts[0] - counts[1]).max()), unit="", target=0.01, better="lower",
                        note="500,000 lengths drawn from the recorded histogram against all source lengths")]


def write_trace(path: Path, size: int) -> dict[str, float]:
    """A GPU trace of at least `size` bytes in the profiler's form; returns the planted seconds by category of the middle step."""
    per_step, ts, correlation = 20_000, 0.0, 0
    planted: dict[str, float] = {}
    with path.open("w") as out:
        out.write('{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8}, "traceEvents": [\n')
        step = 0
        while out.tell() < size:
            begin, lines, planted = ts, [], {"compute": 0.0, "memory_bound": 0.0, "communication:link": 0.0, "host": 0.0}
            for i in range(per_step):
                kind = ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>")[i % 2]
                length, gap = (20.0, 0.0) if i % 2 == 0 else (8.0, 2.0)
                correlation += 1
                lines.append(f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 7, "ts": {ts - 3:.3f}, "dur": 2.5, '
                             f'"args": {{"External id": {correlation}, "cbid": 211, "correlation": {correlation}}}}}')
                lines.append(f'{{"ph": "X", "cat": "kernel", "name": "{kind}", "pid": 0, "tid": 7, "ts": {ts:.3f}, "dur": {length}, "args": '
                             f'{{"External id": {correlation}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {correlation}, '
                             f'"registers per thread": 168, "shared memory": 213120, "blocks per SM": 1.0, "warps per SM": 12.0, '
                             f'"grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 19}}}}')
                planted["compute" if i % 2 == 0 else "memory_bound"] += length * 1e-6
                planted["host"] += gap * 1e-6
                ts += length + gap
                if i % 1000 == 999:  # an all-gather that the device waits for
                    lines.append(f'{{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", '
                                 f'"pid": 0, "tid": 20, "ts": {ts:.3f}, "dur": 3000.0, "args": {{"device": 0, "stream": 20, "Group size": 8}}}}')
                    planted["communication:link"] += 3000e-6
                    ts += 3000.0
            for name, first, last in (("phase:forward", begin + 1, ts - 1), (f"step:{step}", begin, ts)):
                lines.append(f'{{"ph": "X", "cat": "user_annotation", "name": "{name}", "pid": 7, "tid": 7, "ts": {first:.3f}, '
                             f'"dur": {last - first:.3f}}}')
            out.write(",\n".join(lines) + ",\n")
            step += 1
        out.write('{"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}}\n], "traceName": "made.json"}\n')
    return planted


def run_trace(folder: Path) -> list[results.Row]:
    path = folder / "made.json"
    planted = write_trace(path, TRACE_BYTES)
    code = "import json, sys\nfrom planner.diagnose import diagnose, to_json\nprint(json.dumps(to_json(diagnose(sys.argv[1]))))"
    seconds, peak, text = _child(code, str(path))
    measured = json.loads(text)["measured"]
    worst = max(abs(measured["seconds"].get(n, 0.0) / v - 1) for n, v in planted.items())
    note = f"{path.stat().st_size / 1e6:.0f} MB, own process with imports"
    return [results.Row(name="trace: time to diagnose", value=seconds, unit="s", target=60.0, better="lower", note=note),
            results.Row(name="trace: peak memory", value=peak / 2**30, unit="GiB", target=2.0, better="lower", note=note),
            results.Row(name="trace: planted categories found", value=100 * worst, unit="% off, the worst", target=10.0, better="lower",
                        note=", ".join(f"{n} {v * 1e3:.1f} ms" for n, v in planted.items()))]


def run_report(folder: Path) -> list[results.Row]:
    from planner import api

    result, _ = api.search("gem-512xh200", time_limit=5.0)
    api.save_plan(result.plan, folder)
    from planner.report.tables import write_rows

    write_rows(folder / "candidates.parquet", list(result.candidates))
    seconds, _, _ = _child("import sys\nfrom planner.report.page import build\nbuild(sys.argv[1])", str(folder))
    size = (folder / "report.html").stat().st_size
    return [results.Row(name="report of a 512-GPU plan: time", value=seconds, unit="s", target=5.0, better="lower",
                        note="report.html and timeline.json.gz, own process with imports"),
            results.Row(name="report of a 512-GPU plan: size", value=size / 1e6, unit="MB", target=6.0, better="lower",
                        note=f"timeline.json.gz {(folder / 'timeline.json.gz').stat().st_size / 1e3:.0f} kB")]


_HTA = """
import importlib.metadata, json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("HolisticTraceAnalysis", "pandas"))
print(json.dumps({"compute_s": row["compute_time(us)"] * 1e-6, "idle_s": row["idle_time(us)"] * 1e-6, "versions": versions,
                  "overlap": overlap["comp_comm_overlap_pctg"]}))
"""
_TORCHTITAN = """
import json, sys
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(["--job.config_file", sys.argv[1]])
print(json.dumps({"replicate": config.parallelism.data_parallel_replicate_degree, "shard": config.parallelism.data_parallel_shard_degree,
                  "batch": config.training.local_batch_size}))
"""


def run_viewers(folder: Path, hta: str | None, torchtitan: str | None) -> list[results.Row]:
    """What other tools read, in interpreters of their own that have those tools."""
    from costmodel.accounting import simulate_ranks
    from planner.export import TORCHTITAN_TESTED, export, save
    from planner.report import timeline

    plan, rows = _even(plan_of("gem-8xh200")), []
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if hta is not None:
        found = simulated(plan, None)
        path = timeline.write(folder / timeline.FILE, simulate_ranks(plan, None), ())
        answer = _answer([hta, "-c", _HTA, str(path)], clean)
        busy = sum(found.seconds.get(n, 0.0) for n in DEVICE)
        rows.append(results.Row(name="timeline in HTA: compute time against the accounting", value=100 * abs(answer["compute_s"] / busy - 1),
                                unit="% off", target=1.0, better="lower", note=f"{answer['versions']}: compute {answer['compute_s'] * 1e3:.2f} ms, "
                                f"accounting {busy * 1e3:.2f} ms; communication overlapped {answer['overlap']:.1f} %"))
    if torchtitan is not None:
        save(export(plan, "torchtitan"), folder)
        answer = _answer([*torchtitan.split(), "-c", _TORCHTITAN, str(folder / "torchtitan.toml")], dict(os.environ))
        same = answer == {"replicate": plan.layout.ddp, "shard": plan.layout.fsdp, "batch": plan.local_batch}
        rows.append(results.Row(name="export to torchtitan: read by its ConfigManager", value=float(same), unit="", target=1.0,
                                note=f"torchtitan {TORCHTITAN_TESTED}: {answer}"))
    return rows


def _answer(command: list[str], variables: dict[str, str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    return json.loads(done.stdout.strip().splitlines()[-1])


VARIANTS = """
name: waterfall
cluster: 8xh200
model: gem-small
workload: gem-small
search: {time_limit: 3 s, gap: 0.001}
variants:
  - {name: NVLink x2, set: {cluster.tiers.nvlink.bandwidth: 900 GB/s}}
  - {name: shorter histories, set: {workload.lengths.history.median: 300.0}}
  - {name: more memory bandwidth, set: {cluster.device.memory_bandwidth: 9.6 TB/s}}
"""


def run_waterfall(folder: Path) -> list[results.Row]:
    from costmodel.estimate import estimate
    from planner import calibrate
    from planner.scenario import combined
    from planner.waterfall import waterfall

    path = folder / "waterfall.yaml"
    path.write_text(VARIANTS)
    names = [v.name for v in load_scenario(path).variants]
    everything = combined(path, names)
    calibration = calibrate.find(everything.cluster).calibration
    full = estimate(default_plan(everything)[0], calibration).step_time.value
    pinned = waterfall(path, search=False)
    from planner.search import search

    searched = waterfall(path, time_limit=3.0)
    alone = search(everything, calibration=calibration, time_limit=3.0).plan.prediction["step_time"]["value"]
    ends = (pinned.steps[-1].step_time_s, searched.steps[-1].step_time_s)
    assert ends[0] is not None and ends[1] is not None
    return [results.Row(name="waterfall: end against the full change's own estimate", value=100 * abs(ends[0] / full - 1), unit="%", target=1e-6,
                        better="lower", note=f"pinned configuration; {pinned.summary}"),
            results.Row(name="waterfall: end against the full change's own search", value=100 * abs(ends[1] / alone - 1), unit="%", target=1.0,
                        better="lower", note=f"each bar searched for 3 s; {searched.summary}")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.diagnose", description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("simulated", "ranks", "speed", "waterfall", "viewers"), action="append")
    parser.add_argument("--hta", metavar="PYTHON", help="an interpreter with HolisticTraceAnalysis; without it the row is left out")
    parser.add_argument("--torchtitan", metavar="COMMAND", help="a command that starts one with torchtitan; likewise")
    parser.add_argument("--resume", action="store_true", help="keep rows of parts that are not measured now")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    parts = options.only or ["simulated", "ranks", "speed", "waterfall", "viewers"]
    rows: list[results.Row] = []
    with tempfile.TemporaryDirectory(prefix="diagnose-") as name:
        folder = Path(name)
        for part, make in (("simulated", run_simulated), ("ranks", lambda: run_ranks(folder / "ranks"))):
            if part in parts:
                found, verdicts = make()
                planted = [v for v in verdicts if "nothing planted" not in v[0]]
                missed = [n for n, ok, _, _ in planted if not ok]
                rows.append(results.Row(name=f"{part}: planted constraints named", value=float(len(planted) - len(missed)), unit=f"of {len(planted)}",
                                        target=float(len(planted)), note=f"missed: {', '.join(missed)}" if missed else "all"))
                rows += found
        if "speed" in parts:
            rows += run_record(folder) + run_trace(folder) + run_report(folder)
        if "waterfall" in parts:
            rows += run_waterfall(folder)
        if "viewers" in parts:
            rows += run_viewers(folder, options.hta, options.torchtitan)
    path = results.write("diagnose", rows, command="python -m benchmarks.diagnose", title="Diagnosis of planted constraints",
                         intro=__doc__.split("\n\n", 2)[2], resume=options.resume, out=options.out)
    print(path)
    return 0 if all(row.passed is not False for row in rows) else 4


if __name__ == "__main__":
    sys.exit(main())
