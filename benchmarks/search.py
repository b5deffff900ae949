"""Speed and proof of the search: `python -m benchmarks.search` writes docs/results/search.{json,md} and the growth plot.

Parts can be run one by one (`--only scale placement ...`) and merge into the file. `--torchrec PYTHON` names the interpreter of an environment with
TorchRec (see benchmarks/torchrec_peer.py); without it that comparison is left out.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.instances import best_of_all, broad_instance, instance
from benchmarks.results import Row, write
from planner.placement import Group
from planner.scenario import ResolvedScenario, load_scenario
from planner.tables import ShardingOption, TablesPlan, plan_tables

DCNV2 = Path(__file__).parent / "data" / "dcnv2_tables.csv"
# Reading one fp32 row at random and writing it: 0.85, 1.70, 3.38 TB/s (read + write) at 64, 128, 256 columns of index_select [Measured: H200]
ROW_BYTES_PER_SECOND = {64: 0.85e12, 128: 1.70e12, 256: 3.38e12}
PEER_SECONDS = 200
"""Limit of TorchRec's planner; `PEER_START` is what its imports and model may take beside."""
PEER_START = 40
LINK = {"host": 450e9, "network": 50e9}


# --- scenarios ---


def run_scenario(name: str, predict_only: bool, gap: float | None) -> dict:
    """One search in a process of its own: wall and CPU seconds, peak memory, certificate."""
    code = "import json,sys,benchmarks.search as b; print(json.dumps(b.timed_search(*json.loads(sys.argv[1]))))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps([name, predict_only, gap])], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def timed_search(name: str, predict_only: bool, gap: float | None) -> dict:
    """Runs in a child: the search itself, after imports and files."""
    from planner.search import search

    scenario = load_scenario(name, with_variants=False)
    scenario = dataclasses.replace(scenario, search=dataclasses.replace(scenario.search, predict_only=predict_only))
    wall, cpu = time.perf_counter(), time.process_time()
    result = search(scenario, time_limit=120.0, gap=gap)
    certificate = result.certificate
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "gap": certificate.gap,
        "milp_gap": certificate.milp_gap,
        "candidates": certificate.candidates,
        "status": certificate.status,
        "solved": certificate.solved,
        "simulated": certificate.simulated,
    }


def scale() -> Iterator[Row]:
    """The bundled scenarios."""
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    for name, predict_only, gap, limit, aim in (
        ("gem-4096xb200", True, 0.01, 10.0, 3.0),
        ("gem-512xh200", False, None, 4.0, None),
        ("quickstart", False, None, 1.0, None),
    ):
        found = run_scenario(name, predict_only, gap)
        note = (
            f"measured here, {load}; {found['candidates']:,} candidates, {found['solved']} programs, {found['simulated']} simulated, "
            f"{found['status']}"
        )
        yield Row(name=f"{name}: search", value=found["wall"], unit="s", target=limit, aim=aim, better="lower", note=note)
        yield Row(name=f"{name}: search, CPU time", value=found["cpu"], unit="s", better="lower", note=note)
        yield Row(name=f"{name}: peak memory", value=found["gib"], unit="GiB", target=1.0, better="lower", note="measured here")
        yield Row(
            name=f"{name}: incumbent over lowest open bound",
            value=100 * found["gap"],
            unit="%",
            target=3.0,
            aim=1.0,
            better="lower",
            note="measured here; certified, placement and simulation included",
        )
        yield Row(
            name=f"{name}: gap of the integer program", value=100 * found["milp_gap"], unit="%", target=0.1, better="lower", note="read from HiGHS"
        )
        if predict_only:
            yield Row(name=f"{name}: candidates", value=found["candidates"], unit="", target=100_000, note="counted")


def bounds() -> Iterator[Row]:
    """Candidates bounded per second, tables of prices included."""
    from planner.candidates import first_bounds
    from planner.pricing import Pricing
    from planner.space import build_space

    scenario = load_scenario("gem-4096xb200", with_variants=False)
    scenario = dataclasses.replace(scenario, search=dataclasses.replace(scenario.search, predict_only=True))
    space = build_space(scenario)
    wall, cpu = time.perf_counter(), time.process_time()
    first_bounds(Pricing(scenario, space, None))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peers = {"Calculon": 105.0, "SimuMax": 40.0}
    note = (
        f"measured here, load {os.getloadavg()[0]:.1f}; {len(space.candidates):,} candidates in {wall:.2f} s, {cpu:.2f} s CPU; peers: published facts"
    )
    yield Row(name="candidates bounded", value=len(space.candidates) / wall, unit="1/s", target=200_000, aim=1_000_000, peers=peers, note=note)
    yield Row(name="candidates bounded per CPU second", value=len(space.candidates) / cpu, unit="1/s", note=note)


def exhaustive(count: int, minutes: float, most: int = 1500) -> Iterator[Row]:
    """Small instances against the enumeration of every plan's simulated time: `count` of them, or as many as `minutes` allow. Half have one part of
    the space wide open, and half of those are calibrated."""
    from planner.search import Search

    equal = feasible = plans = seed = done = calibrated = 0
    unequal: list[str] = []
    start = time.perf_counter()
    while done < count and time.perf_counter() - start < 60 * minutes:
        broad, number = done % 2 == 1, seed
        scenario, calibration = broad_instance(number) if broad else (instance(number), None)
        seed += 1
        if _num_plans(scenario) > most:
            continue
        best, enumerated = best_of_all(scenario, calibration)
        state = Search(scenario, calibration, time_limit=None, gap=0.0)
        state.run()
        got = state.incumbent.seconds if state.incumbent is not None else None
        same = (best is None and got is None) or (best is not None and got is not None and abs(best - got) <= 2e-6 * best)
        if not same:
            unequal.append(f"{'broad ' if broad else ''}{number}")
            print(f"instance {unequal[-1]}: enumerated {best}, found {got}", file=sys.stderr)
        equal += same
        feasible += best is not None
        calibrated += calibration is not None
        plans += enumerated
        done += 1
        if done % 10 == 0:
            print(f"{done} instances in {time.perf_counter() - start:.0f} s, {equal} equal", file=sys.stderr)
    yield Row(
        name="equal to exhaustive enumeration of simulated time",
        value=float(equal),
        unit="instances",
        target=float(count),
        note=f"of {done} random small instances, {feasible} of them feasible, {calibrated} calibrated oddly; {plans:,} plans simulated"
        + (f"; not equal: instances {', '.join(unequal)}" if unequal else ""),
    )


def _num_plans(scenario: ResolvedScenario) -> int:
    from planner.pricing import Pricing
    from planner.space import build_space

    space = build_space(scenario)
    pricing = Pricing(scenario, space, None)
    blocks = math.prod(math.comb(pricing.blocks[n] + len(c) - 1, len(c) - 1) for n, c in space.regions.items())
    groups, candidates = np.unique(space.candidates["sparse_group"], return_counts=True)
    return sum(
        int(number) * blocks * math.prod(math.comb(len(t.tables) + k - 1, k - 1) for t in pricing.tied for k in [len(pricing.choices(t, int(g)))])
        for g, number in zip(groups, candidates)
    )


# --- tables alone ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Tables (name, rows, dim, ids per sample) on `ranks` ranks of `per_host`, `batch` samples each."""

    name: str
    tables: tuple[tuple[str, int, int, float], ...]
    ranks: int
    per_host: int = 8
    batch: int = 1024
    memory: float = 80e9


def row_seconds(width: int) -> float:
    """One row of `width` fp32 values read at random and written: as long as 64 columns take at least, for narrow rows read whole lines too."""
    widths = sorted(ROW_BYTES_PER_SECOND)
    return max(8 * w / ROW_BYTES_PER_SECOND[w] * (width / w if w == widths[-1] and width > w else 1.0) for w in widths if w <= max(width, widths[0]))


def shard_seconds(problem: Problem, ids: float, rows: int, row_share: float, width: int, replicated: bool) -> float:
    """The one formula: rows that a shard serves for all ranks, read, and sent over the slowest link; the update reads and writes them again.
    A replicated table
    serves its own rank and all-reduces its gradient."""
    link = LINK["host"] if problem.ranks <= problem.per_host else LINK["network"]
    if replicated:
        return 3 * problem.batch * ids * row_seconds(width) + 2 * rows * width * 4 / link
    served = problem.ranks * problem.batch * ids * row_share
    return 3 * served * row_seconds(width) + 2 * served * width * 4 * (problem.ranks - 1) / problem.ranks / link


def table_options(problem: Problem, rows: int, dim: int, ids: float) -> list[ShardingOption]:
    def option(name: str, shards: int, share: float, width: int, spread: str = "ranks", replicated: bool = False) -> ShardingOption:
        memory = rows * (1.0 if replicated else share) * (width * 4 + 4)
        return ShardingOption(
            name=name, num_shards=shards, seconds=shard_seconds(problem, ids, rows, share, width, replicated), memory=memory, spread=spread
        )

    found = [option("table_wise", 1, 1.0, dim), option("data_parallel", problem.ranks, 1.0, dim, "all", True)]
    found += [option(f"column_wise{n}", n, 1.0, dim // n) for n in (2, 4) if dim % n == 0 and dim // n >= 32 and n <= problem.ranks]
    if rows >= problem.ranks:
        found.append(option("row_wise", problem.ranks, 1 / problem.ranks, dim, "all"))
    if problem.ranks > problem.per_host and rows >= problem.per_host:
        found.append(option("table_row_wise", problem.per_host, 1 / problem.per_host, dim, "host"))
    return found


def problems() -> list[Problem]:
    with DCNV2.open(newline="") as stream:
        dcn = tuple((r["item"], int(r["rows"]), int(r["dim"]), float(r["multi_hot"])) for r in csv.DictReader(stream))
    rng = np.random.default_rng(0)
    many = tuple(
        (f"t{k}", int(rng.lognormal(12.5, 1.5)) + 10, int(rng.choice([64, 128, 256])), float(np.ceil(rng.lognormal(1.0, 1.0)))) for k in range(1000)
    )
    return [
        Problem(name="26 DCNv2 tables on 8 ranks", tables=dcn, ranks=8),
        Problem(name="26 DCNv2 tables on 64 ranks", tables=dcn, ranks=64),
        Problem(name="1,000 tables on 256 ranks", tables=many, ranks=256),
    ]


def ours(problem: Problem) -> tuple[TablesPlan, float]:
    start = time.perf_counter()
    options = [table_options(problem, rows, dim, ids) for _, rows, dim, ids in problem.tables]
    plan = plan_tables(options, Group(num_ranks=problem.ranks, ranks_per_host=problem.per_host, memory_cap=problem.memory))
    return plan, time.perf_counter() - start


def rescored(problem: Problem, answer: dict) -> float:
    """The heaviest rank of TorchRec's plan under the one formula [s]."""
    loads = np.zeros(problem.ranks)
    by_name = {name: (rows, dim, ids) for name, rows, dim, ids in problem.tables}
    for table in answer["tables"]:
        rows, _, ids = by_name[table["name"]]
        for s in table["shards"]:
            share, width = (s["row_end"] - s["row_begin"]) / rows, s["col_end"] - s["col_begin"]
            if share > 0:
                loads[s["rank"]] += shard_seconds(problem, ids, rows, share, width, table["sharding"] == "data_parallel")
    return float(loads.max())


def peer_answer(torchrec: str, request: dict) -> dict:
    """What TorchRec's planner says, or {"seconds", "error"}; its own limit holds between proposals only, so the process gets one too."""
    command = [torchrec, str(Path(__file__).parent / "torchrec_peer.py")]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=PEER_SECONDS + PEER_START)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PEER_SECONDS} s", "seconds": None}
    if done.returncode != 0 or not done.stdout:
        return {"error": f"failed after {time.perf_counter() - start:.1f} s: {done.stderr[-200:]}", "seconds": None}
    answer = json.loads(done.stdout)
    if "error" in answer:
        answer["error"] = f"no plan (limit {PEER_SECONDS} s): {answer['error'][:200]}"
    return answer


def placement(torchrec: str | None) -> Iterator[Row]:
    """Sharding and placement of tables alone, and TorchRec's planner on the same tables under the same formula."""
    for problem in problems():
        cpu = time.process_time()
        plan, seconds = ours(problem)
        note = f"measured here, {time.process_time() - cpu:.3g} s CPU, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        excess = float(plan.placement.excess.max())
        yield Row(name=f"{problem.name}: time", value=seconds, unit="s", target=3.0, better="lower", note=note)
        yield Row(name=f"{problem.name}: heaviest rank over max(mean, largest shard)", value=100 * excess, unit="%", target=2.0, better="lower")
        yield Row(
            name=f"{problem.name}: heaviest rank over the bound of any sharding",
            value=100 * (plan.heaviest / plan.bound - 1),
            unit="%",
            better="lower",
        )
        if torchrec is None:
            continue
        request = {
            "world_size": problem.ranks,
            "local_world_size": problem.per_host,
            "hbm_bytes": problem.memory,
            "hbm_bandwidth": 4.8e12,
            "intra_bandwidth": LINK["host"],
            "inter_bandwidth": LINK["network"],
            "batch": problem.batch,
            "timeout_s": PEER_SECONDS,
            "tables": [{"name": n, "rows": r, "dim": d, "ids_per_sample": i} for n, r, d, i in problem.tables],
        }
        answer = peer_answer(torchrec, request)
        if "error" in answer:
            yield Row(name=f"{problem.name}: TorchRec's planner", value=answer["seconds"], unit="s", better="lower", note=answer["error"])
            yield Row(name=f"{problem.name}: sparse time of the plan", value=1e3 * plan.heaviest, unit="ms", better="lower",
                      note=f"no plan of TorchRec's to compare with; search here took {seconds:.3f} s")
            if answer["seconds"] is None and answer["error"].startswith("no answer"):
                yield Row(name=f"{problem.name}: speed-up over TorchRec's planner", value=PEER_SECONDS / seconds, unit="x",
                          target=20.0 if len(problem.tables) == 1000 else None,
                          note=f"at least: TorchRec gave no answer within {PEER_SECONDS} s, here {seconds:.3f} s, same machine")
            continue
        theirs = rescored(problem, answer)
        yield Row(
            name=f"{problem.name}: sparse time of the plan",
            value=1e3 * plan.heaviest,
            unit="ms",
            better="lower",
            target=1e3 * theirs,
            peers={"TorchRec 1.8.0": 1e3 * theirs},
            note=f"both plans rescored by one formula that charges narrow rows; TorchRec's: {1e3 * theirs:.4g} ms",
        )
        yield Row(
            name=f"{problem.name}: speed-up over TorchRec's planner",
            value=answer["seconds"] / seconds,
            unit="x",
            target=20.0 if len(problem.tables) == 1000 else None,
            note=f"TorchRec {answer['seconds']:.1f} s, here {seconds:.3f} s, same machine",
        )


# --- growth ---


def growth(out: Path) -> Iterator[Row]:
    """Search time against ranks, tables and regions; with a plot."""
    from planner.search import search

    base = load_scenario("gem-512xh200", with_variants=False)
    series: dict[str, list[tuple[int, float]]] = {"GPUs": [], "tables": [], "regions": []}

    def run(kind: str, size: int, scenario: ResolvedScenario) -> Row:
        start = time.perf_counter()
        result = search(scenario, time_limit=60.0, gap=0.03, top=1)
        seconds = time.perf_counter() - start
        series[kind].append((size, seconds))
        certificate = result.certificate
        return Row(
            name=f"growth: {size:,} {kind}",
            value=seconds,
            unit="s",
            better="lower",
            note=f"gap {100 * certificate.gap:.2f} %, {certificate.candidates:,} candidates, {certificate.status}",
        )

    small = load_scenario("gem-8xh200", with_variants=False)
    for hosts in (1, 8, 64, 512, 4096, 8192):
        cluster = dataclasses.replace(base.cluster, num_hosts=hosts, hosts_per_zone=min(16, hosts))
        yield run("GPUs", hosts * 8, dataclasses.replace(small, cluster=cluster))
    for count in (10, 100, 1000, 10_000):
        tables = tuple(
            dataclasses.replace(t, count=max(1, count - 4) if t.pooling != "sequence" else t.count, rows=100_000) for t in small.model.tables
        )
        yield run("tables", count, dataclasses.replace(small, model=dataclasses.replace(small.model, name=f"tables-{count}", tables=tables)))
    for count in (1, 8, 32, 64):
        layer = dataclasses.replace(small.model.sequences[0].layers[0], count=1)
        sequence = dataclasses.replace(small.model.sequences[0], layers=(layer,) * count)
        model = dataclasses.replace(small.model, name=f"regions-{count}", sequences=(sequence,))
        yield run("regions", count + 4, dataclasses.replace(small, model=model))
    _plot(series, out / "search-growth.svg")


def _plot(series: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """One panel a series, both axes logarithmic, as SVG."""
    wide, high, left, top = 260.0, 170.0, 50.0, 24.0
    parts = []
    for k, (kind, points) in enumerate(series.items()):
        xs, ys = ([math.log10(v) for v in values] for values in zip(*points))
        x0, x1 = math.floor(min(xs)), math.ceil(max(xs))
        y0, y1 = math.floor(min(ys)), max(math.ceil(max(ys)), math.floor(min(ys)) + 1)
        begin = k * (wide + left + 20) + left
        at = [(begin + wide * (x - x0) / max(1, x1 - x0), top + high * (y1 - y) / (y1 - y0)) for x, y in zip(xs, ys)]
        for power in range(x0, x1 + 1):
            x = begin + wide * (power - x0) / max(1, x1 - x0)
            parts.append(f'<path d="M{x:.1f} {top}v{high}" class="grid"/>')
            parts.append(f'<text x="{x:.1f}" y="{top + high + 14}" class="mid">{10.0**power:,.0f}</text>')
        for power in range(y0, y1 + 1):
            y = top + high * (y1 - power) / (y1 - y0)
            parts.append(f'<path d="M{begin:.1f} {y:.1f}h{wide}" class="grid"/>')
            parts.append(f'<text x="{begin - 4:.1f}" y="{y + 4:.1f}" class="end">{10.0**power:g} s</text>')
        parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{n:,} {kind}: {s:.3g} s</title></circle>' for (x, y), (n, s) in zip(at, points)]
        parts.append(f'<text x="{begin + wide / 2:.1f}" y="{top - 8}" class="mid">search time against {kind}</text>')
    width, height = len(series) * (wide + left + 20), top + high + 24
    style = (
        "svg{background:#fff;font-family:system-ui,sans-serif}text{font-size:11px}.mid{text-anchor:middle}.end{text-anchor:end}"
        ".grid{stroke:#d5dae0;fill:none}polyline{fill:none;stroke:#2f6fb7;stroke-width:1.5}circle{fill:#2f6fb7}"
    )
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"><style>{style}</style>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=("scale", "bounds", "exhaustive", "placement", "growth"))
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of the exhaustive part")
    parser.add_argument("--torchrec", metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    parts = {
        "scale": scale,
        "bounds": bounds,
        "exhaustive": lambda: exhaustive(arguments.instances, arguments.minutes),
        "placement": lambda: placement(arguments.torchrec),
        "growth": lambda: growth(arguments.out),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in arguments.only or parts:
        for row in parts[name]():
            print(f"{row.name}: {row.value if row.value is None else f'{row.value:.5g}'} {row.unit}", file=sys.stderr)
            rows.append(row)
    write(
        "search",
        rows,
        command=f"python -m benchmarks.search {' '.join(sys.argv[1:])}".strip(),
        title="Search",
        resume=bool(arguments.only),
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
