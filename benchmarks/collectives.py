"""Collectives against published NCCL measurements: `python -m benchmarks.collectives [--table FILE] [--write-curves]`.

Per system and NCCL build (never mixed): curves are fitted on 2 and 8 GPUs of one host and score the 4-GPU rows, which no curve has seen. The
lower bound is
checked on every row. Groups over hosts are predicted without any curve, from the link's datasheet and NCCL's constants, and listed one by one.

FILE has the columns of benchmarks/published/nccl_hopper_one_host.csv: system, nccl_dir, op_name, num_gpus, time_ms, message_bytes_if_elements_x2.
"""
from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.results import Row, write
from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.comms import GroupShape, Network, bound_seconds
from costmodel.comms_curves import CollectiveCurve, fit_curves, one_host_seconds, save_curves
from costmodel.ops import COLLECTIVES
from costmodel.samples import Sample

PUBLISHED = Path(__file__).parent / "published"
COLUMNS = ("system", "nccl_dir", "op_name", "num_gpus", "time_ms", "message_bytes_if_elements_x2")
NVLINK4 = 450e9  # bytes/s per direction [Datasheet https://www.nvidia.com/en-us/data-center/h200/]
SCORED_ABOVE = 64 * 1024
FITTED, SCORED = (2, 8), 4
# The bundled curves: the newest build that has all four collectives on both systems.
BUNDLED_BUILD, DEVICES = "2.29.2", {"h100_sxm": "H100-SXM", "h200_sxm": "H200-SXM"}


def read_table(path: Path) -> pd.DataFrame:
    """Rows with `build` (system and NCCL build), `kind`, `group`, `bytes`, `seconds`. Raises ValueError naming file and column, with the line of a
    cell that no measurement has."""
    try:
        table = pd.read_csv(path)
    except ValueError as error:  # of pandas and of decoding
        raise ValueError(f"{path}: {error}") from error
    missing = [c for c in COLUMNS if c not in table.columns]
    if missing:
        raise ValueError(f"{path}: missing column {', '.join(missing)}; needed: {', '.join(COLUMNS)}")
    table["kind"] = table["op_name"].replace({"alltoall": "all_to_all"})
    _refuse_first(path, "op_name", table["kind"].isin(COLLECTIVES), table["op_name"], f"one of {', '.join(COLLECTIVES)}")
    for column, name, scale in (("num_gpus", "group", 1), ("message_bytes_if_elements_x2", "bytes", 1.0), ("time_ms", "seconds", 1e-3)):
        figures = pd.to_numeric(table[column], errors="coerce")
        _refuse_first(path, column, (figures > 0) & (figures < np.inf), table[column], "a finite number > 0")
        table[name] = figures * scale
    _refuse_first(path, "num_gpus", (table["group"] >= 2) & (table["group"] % 1 == 0), table["num_gpus"], "an integer >= 2")
    table["build"] = table["system"] + " NCCL " + table["nccl_dir"].astype(str)
    return table


def _refuse_first(path: Path, column: str, legal: pd.Series, cells: pd.Series, needed: str) -> None:
    if not legal.all():
        place = int(legal.to_numpy().argmin())
        raise ValueError(f"{path}:{place + 2}: {column}: {needed} is needed, not {str(cells.iloc[place])!r}")


def samples(rows: pd.DataFrame) -> list[Sample]:
    return [Sample(op=r.kind, variant="nccl", phase="step", features={"bytes": r.bytes, "group": float(r.group)}, seconds=r.seconds)
            for r in rows.itertuples()]


def curves(rows: pd.DataFrame, source: str = "") -> tuple[CollectiveCurve, ...]:
    return fit_curves(samples(rows), link_bandwidth=NVLINK4, in_network_reduction=True, source=source)


def score_one_host(table: pd.DataFrame) -> pd.DataFrame:
    """Relative error of every 4-GPU row from curves of 2 and 8 GPUs of the same build."""
    scored = []
    for _, rows in table.groupby("build"):
        fitted = curves(rows[rows["group"].isin(FITTED)])
        for r in rows[rows["group"] == SCORED].itertuples():
            same = [c for c in fitted if c.collective == r.kind]
            found = one_host_seconds(same, SCORED, r.bytes, NVLINK4, in_network_reduction=True)
            if found is not None:
                scored.append({"build": r.build, "kind": r.kind, "bytes": r.bytes, "seconds": r.seconds, "error": found[0] / r.seconds - 1})
    return pd.DataFrame(scored)


def bound_excess(table: pd.DataFrame) -> float:
    """The largest bound / measured over all rows: a bound holds when this is <= 1."""
    cluster = _cluster(8, 1, NVLINK4, 50e9)
    return max(bound_seconds(r.kind, r.bytes, GroupShape(size=int(r.group)), cluster) / r.seconds for r in table.itertuples())


def _cluster(devices: int, hosts: int, host_bandwidth: float, nic: float, *, sharp: bool = False) -> Cluster:
    device = Device(name="unlisted GPU", kind="gpu", peak_flops={"bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12, num_sms=132)
    return Cluster(name="published", device=device, num_hosts=hosts, devices_per_host=devices, tiers=(
        LinkTier(name="nvlink", scope="host", bandwidth=host_bandwidth, latency=3.4e-6, in_network_reduction=True),
        LinkTier(name="rdma", scope="cluster", bandwidth=nic, latency=14e-6, in_network_reduction=sharp)))


def multi_host_rows(path: Path) -> list[Row]:
    """Every row of the multi-host table that states size and time (or busbw), against the model without curves."""
    rows: list[Row] = []
    errors = []
    for r in pd.read_csv(path).itertuples():
        kind = "all_gather" if "all_gather" in r.collective else "all_reduce"
        if not np.isfinite(r.size_bytes) or "forced" in r.collective:
            continue
        gpus, hosts = int(r.gpus), int(r.nodes)
        factor = (2 if kind == "all_reduce" else 1) * (gpus - 1) / gpus
        seconds = r.time_us * 1e-6 if np.isfinite(r.time_us) else r.size_bytes * factor / (r.busbw_gbs * 1e9)
        cluster = _cluster(gpus // hosts, hosts, NVLINK4 * (2 if "B200" in r.gpu else 1), 50e9, sharp="SHARP" in r.network)
        group = GroupShape(size=gpus)
        predicted = Network(cluster).cost(kind, r.size_bytes, group)
        if r.size_bytes >= 256 * 2**20:
            errors.append(abs(predicted.seconds / seconds - 1))
        note = f"predicted {predicted.seconds * 1e3:.3f} ms ({predicted.algorithm}), published {seconds * 1e3:.3f} ms: {r.source}"
        rows.append(Row(name=f"{kind} {gpus} GPUs {hosts} hosts {r.gpu} {r.size_bytes / 2**20:g} MiB", value=predicted.seconds / seconds - 1,
                        unit="relative error", better="lower", note=note))
        least = bound_seconds(kind, r.size_bytes, group, cluster)
        if least > seconds:
            rows.append(Row(name=f"bound above {rows[-1].name}", value=least / seconds, unit="x", target=1.0,
                            better="lower", note="the bound does not hold"))
    head = Row(name="multi-host >= 256 MiB, no curve: median |error|", value=float(np.median(errors)), unit="relative",
               better="lower", note=f"{len(errors)} published rows, datasheet NIC rate and NCCL constants")
    return [head, *rows]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=PUBLISHED / "nccl_hopper_one_host.csv")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--write-curves", action="store_true", help="also write costmodel/calibrations/nccl-hopper.json from the published table")
    args = parser.parse_args(argv)
    try:
        table = read_table(args.table)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.write_curves:
        _write_curves(table)
    scored = score_one_host(table)
    if scored.empty:
        print(f"{args.table}: no rows of {SCORED} GPUs with {FITTED} GPUs of the same build to fit on", file=sys.stderr)
        return 2
    large = scored[scored["bytes"] > SCORED_ABOVE]
    size = large["error"].abs()
    rows = [
        Row(name="4 GPUs > 64 KiB: median |error|", value=float(size.median()), unit="relative", target=0.08, aim=0.05, better="lower",
            note=f"{len(size)} published rows, curves of 2 and 8 GPUs of the same NCCL build"),
        Row(name="4 GPUs > 64 KiB: p90 |error|", value=float(size.quantile(0.9)), unit="relative", target=0.20, better="lower", note="as above"),
        Row(name="4 GPUs > 64 KiB: worst |error|", value=float(size.max()), unit="relative", better="lower", note="as above"),
        Row(name="4 GPUs > 64 KiB: bias", value=float(large["error"].mean()), unit="relative", better="lower", note="mean signed error"),
        Row(name="4 GPUs >= 16 MiB: median |error|", value=float(large[large["bytes"] >= 2**24]["error"].abs().median()),
            unit="relative", better="lower", note="bandwidth-bound sizes"),
        Row(name="lower bound / measured, worst of all rows", value=bound_excess(table), unit="x", target=1.0, better="lower",
            note=f"{len(table)} rows"),
    ]
    for (build, kind), part in large.groupby(["build", "kind"]):
        rows.append(Row(name=f"{build} {kind}: median |error|", value=float(part["error"].abs().median()), unit="relative", better="lower",
                        note=f"p90 {part['error'].abs().quantile(0.9):.3f}, bias {part['error'].mean():+.3f}, {len(part)} rows"))
    rows += multi_host_rows(PUBLISHED / "nccl_multi_host.csv")
    command = "python -m benchmarks.collectives" + ("" if args.table.parent == PUBLISHED else f" --table {args.table.name}")
    path = write("collectives", rows, command=command, title="Collectives against published measurements", out=args.out,
                 intro=__doc__.split("\n\n")[1])
    for row in rows[:6]:
        print(f"{row.name}: {row.value:.4f}" + ("" if row.passed is None else " ok" if row.passed else " MISSED"))
    print(path)
    return 4 if any(row.passed is False for row in rows) else 0


def _write_curves(table: pd.DataFrame) -> None:
    found: dict[str, tuple[CollectiveCurve, ...]] = defaultdict(tuple)
    for system, device in DEVICES.items():
        rows = table[(table["system"] == system) & (table["nccl_dir"].astype(str) == BUNDLED_BUILD)]
        found[device] = curves(rows, source=f"benchmarks/published/nccl_hopper_one_host.csv, {system}, NCCL {BUNDLED_BUILD}")
    target = Path(__file__).parent.parent / "costmodel" / "calibrations" / "nccl-hopper.json"
    save_curves(target, dict(found))


if __name__ == "__main__":
    sys.exit(main())
