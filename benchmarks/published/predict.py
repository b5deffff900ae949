"""A published row as a plan or an op, and what the cost model says of it: datasheet, nearest calibration, nothing fitted to the rows.

A device that draws less power than its datasheet's reaches less of its matrix peak. Dynamic power goes with clock x voltage^2: the clock with the
cube root of power where voltage follows it, with power itself where voltage is at its floor, and part of power goes into neither (`POWER_EXPONENT`).
"""
from __future__ import annotations

import dataclasses
import fnmatch
import math
from pathlib import Path

from benchmarks.published.placing import COMM_SHARE, ROOM, placed
from benchmarks.published.table import Published
from costmodel.blocks.attention import ATTENTION_VARIANTS
from costmodel.calibration import MINIMUM_WIDTH, Calibration
from costmodel.calibration import load as load_calibration
from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.codec import suggest
from costmodel.compute import roofline_seconds
from costmodel.estimate import estimate
from costmodel.foreign import Sustained
from costmodel.hosttime import PREFIX
from costmodel.lower import lower
from costmodel.memory import reserving
from costmodel.model import Model
from costmodel.ops import COLLECTIVES, KINDS, op
from costmodel.plan import Layout, Plan, RegionOption, RegionPlan, TablePlacement
from costmodel.regions import Region, regions
from costmodel.sparse import ids_per_table, state_bytes
from costmodel.stepgraph import COMPUTE
from costmodel.systems import ATTENTIONS, FUSIONS, LOSSES, OPTIMIZER_BYTES, OVERLAPS, TABLE_UPDATES, System
from costmodel.workload import Lengths, Workload
from planner import catalogue
from planner.files import check, load
from planner.spec import DeviceFile, ModelFile

CALIBRATIONS = Path(__file__).resolve().parents[2] / "costmodel" / "calibrations"
# NVLink per GPU and direction [Datasheet: https://www.nvidia.com/en-us/data-center/h200/ and dgx-b200], latencies as in scenarios/clusters.
NVLINK = {"A100-SXM-80GB": 300e9, "H100-SXM": 450e9, "H200-SXM": 450e9, "B200": 900e9}
LINK_LATENCY, NIC_LATENCY = 3e-6, 8e-6
# |log error| at 90 % of what another library's kernel takes on another device, by utilisations carried over [Measured: the kernel rows of
# benchmarks/published, 26 products and 154 of attention: 0.36 and 0.32]. Everything in a step is that library's and that device's, so that errors of
# its kernels go together and do not average out. Of datasheets alone: that of one roofline.
CARRIED_OVER = 0.35
# [Measured: benchmarks/published/fbgemm_500w.csv, 585 TFLOPS of an H100 at 500 W at 8192^3, and 714 and 739 of H200s at 700 W in the calibrations:
# 0.59 and 0.70; halfway from there to the cube root, for the libraries differ in age].
POWER_EXPONENT = 0.5
_LAYOUT = ("ddp", "fsdp", "sparse_group", "sparse_replicas", "fully_sharded_2d", "sync_every", "reshard_after_forward")


class NotExpressible(ValueError):
    """Why a well-formed row cannot be predicted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """seconds, its 90 % interval; what the allocator reserves (a step); FLOPs and bytes of one rank, for the baselines; source of the figure."""

    seconds: float
    low: float
    high: float
    source: str
    flops: float
    num_bytes: float
    reserved: float | None = None
    limiting: str = ""


def device_of(row: Published) -> Device:
    """The catalogue's device with what the row says differs. Raises NotExpressible for a device that is not in the catalogue."""
    known = catalogue.names("devices")
    if row.device not in known:
        raise NotExpressible(f"device {row.device!r} is not in the catalogue{suggest(row.device, known)}; known: {', '.join(known)}")
    device = check(DeviceFile, load(catalogue.folder("devices") / f"{row.device}.yaml")).build()
    peaks = device.peak_flops
    if row.peak_flops is not None:
        scale = row.peak_flops / peaks["bf16"]
        peaks = {name: peak * scale for name, peak in peaks.items()}
    elif row.power is not None and device.power:
        scale = min(1.0, row.power / device.power) ** POWER_EXPONENT
        peaks = {name: peak * scale for name, peak in peaks.items()}
    changed = (row.memory_bytes, row.memory_bandwidth, row.peak_flops, row.power) != (None, None, None, None)
    return dataclasses.replace(device, name=f"{device.name} (as published)" if changed else device.name, peak_flops=peaks,
                               memory_bytes=row.memory_bytes or device.memory_bytes, power=row.power or device.power,
                               memory_bandwidth=row.memory_bandwidth or device.memory_bandwidth)


def calibrations(folder: Path = CALIBRATIONS) -> list[Calibration]:
    """The committed calibrations of GPUs."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if path.stem.startswith("nccl-"):  # curves of collectives, which every estimate reads
            continue
        calibration = load_calibration(path)
        if calibration.environment.device_kind != "cpu":
            found.append(calibration)
    return found


def elsewhere(calibration: Calibration, *, replayed: bool) -> Calibration:
    """What of a calibration says something of another system: everything but its loader and the residuals of its own runs, and, where a step is
    `replayed` whole as one CUDA graph, but its host's launches."""
    curves, constants = tuple(c for c in calibration.curves if c.op != "input"), calibration.constants
    if replayed:
        curves = tuple(dataclasses.replace(c, points=[[*row[:-2], 0.0, row[-1]] for row in c.points]) for c in curves)
        constants = {name: value for name, value in constants.items() if not name.startswith(PREFIX)} | {"launch_seconds": 0.0}
    return dataclasses.replace(calibration, curves=curves, constants=constants, run_residuals={})


def nearest(device: Device, known: list[Calibration]) -> Calibration | None:
    """The calibration whose device has the nearest peak and bandwidth (sum of log ratios); None where there is none."""
    def distance(calibration: Calibration) -> float:
        other = calibration.device
        return (abs(math.log(other.memory_bandwidth / device.memory_bandwidth))
                + abs(math.log(other.peak_flops["bf16"] / device.peak_flops["bf16"])))
    return min(known, key=distance, default=None)


def predict(row: Published, known: list[Calibration]) -> Predicted:
    """Raises NotExpressible with the reason."""
    device = device_of(row)
    calibration = nearest(device, known)
    return _kernel(row, device, calibration) if row.kind == "kernel" else _step(row, device, calibration)


# --- kernels ---

def _kernel(row: Published, device: Device, calibration: Calibration | None) -> Predicted:
    if row.op not in KINDS:
        raise NotExpressible(f"op {row.op!r} is not one of the cost model{suggest(row.op, KINDS)}; known: {', '.join(KINDS)}")
    if row.op in COLLECTIVES:
        raise NotExpressible(f"{row.op} is a collective: `python -m benchmarks.collectives` reads tables of those")
    if row.op == "attention" and row.variant not in ATTENTION_VARIANTS:
        raise NotExpressible(f"attention needs a variant{suggest(row.variant, ATTENTION_VARIANTS)}; known: {', '.join(ATTENTION_VARIANTS)}")
    if row.phase not in KINDS[row.op].phases:
        raise NotExpressible(f"op {row.op} has no phase {row.phase}; it has {', '.join(KINDS[row.op].phases)}")
    try:
        features = {name: float(value) for name, value in row.features}
        one = op(row.op, variant=row.variant, dtype=row.dtype, **features)
    except ValueError as error:
        raise NotExpressible(str(error)) from error
    if zero := [name for name, value in features.items() if value == 0]:
        raise NotExpressible(f"op {row.op}: {', '.join(zero)} must be > 0")
    flops, num_bytes = one.flops(row.phase), one.bytes(row.phase)
    if calibration is None:
        seconds, width = roofline_seconds(one, row.phase, device), MINIMUM_WIDTH["roofline"]
        return Predicted(seconds=seconds, low=seconds * math.exp(-width), high=seconds * math.exp(width), source="roofline", flops=flops,
                         num_bytes=num_bytes)
    time = calibration.predict(one, row.phase, device=device)
    seconds, width = Sustained.of(calibration).seconds(time.seconds, one, row.phase, device), max(time.width, CARRIED_OVER)
    return Predicted(seconds=seconds, low=seconds * math.exp(-width), high=seconds * math.exp(width), source=time.source, flops=flops,
                     num_bytes=num_bytes)


# --- steps ---

def _step(row: Published, device: Device, calibration: Calibration | None) -> Predicted:
    plan = plan_of(row, device)
    if calibration is not None:
        calibration = elsewhere(calibration, replayed=row.execution == "cuda_graph")
    found = estimate(plan, calibration)
    graph = lower(plan, calibration).graph
    step, width = found.step_time, MINIMUM_WIDTH["roofline"] if calibration is None else CARRIED_OVER
    return Predicted(seconds=step.value, low=min(step.low, step.value * math.exp(-width)), high=max(step.high, step.value * math.exp(width)),
                     source=step.source, flops=found.flops_per_rank, limiting=found.limiting,
                     num_bytes=sum(t.bytes for t in graph.tasks if t.stream == COMPUTE),
                     reserved=reserving(plan, calibration)[1] * found.memory.peak.value)


def plan_of(row: Published, device: Device) -> Plan:
    """The row's plan. Raises NotExpressible."""
    assert row.gpus is not None and row.local_batch is not None
    names = catalogue.names("models")
    if row.model not in names:
        raise NotExpressible(f"model {row.model!r} is not bundled{suggest(row.model, names)}; known: {', '.join(names)}")
    model = check(ModelFile, load(catalogue.folder("models") / f"{row.model}.yaml")).build()
    if model.sequences and row.sequence_length is None:
        raise NotExpressible(f"model {row.model} has sequences, sequence_length is not given")
    lengths = {s.name: Lengths(kind="fixed", minimum=row.sequence_length or 1, maximum=row.sequence_length or 1) for s in model.sequences}
    for what, pairs in (("precision", row.precision), ("checkpoint", row.checkpoint)):
        _check_patterns(what, pairs, [region.name for region in regions(model)])
    workload = Workload(name="published", lengths=lengths, local_batch=row.local_batch * row.accumulation)
    layout, placing = _layout(row)
    cluster = _cluster(row, device)
    try:
        plan = Plan(scenario=row.id, cluster=cluster, model=model, workload=workload, layout=layout, local_batch=row.local_batch,
                    accumulation=row.accumulation, execution=_legal(row, "execution", ("eager", "compile", "cuda_graph")),
                    exchange=_legal(row, "exchange", ("rows", "pooled", "pooled_by_host")).removesuffix("_by_host"),
                    wire=_legal(row, "wire", ("", "fp32", "bf16", "fp16")) or None,
                    reduce_dtype=_legal(row, "reduce", ("fp32", "bf16")), system=_system(row),
                    regions=tuple(_options(row, region) for region in regions(model)), tables=_tables(model, row, cluster, layout, placing),
                    predict_only=("a published configuration",))
    except NotExpressible:
        raise
    except ValueError as error:
        raise NotExpressible(str(error)) from error
    return plan


def _legal(row: Published, name: str, legal: tuple[str, ...]):
    value = getattr(row, name)
    if value not in legal:
        raise NotExpressible(f"{name} {value!r}{suggest(value, legal)}; known: {', '.join(legal)}")
    return value


def _system(row: Published) -> System:
    """Whose step it is. What is fused goes with the execution where the row does not say: a compiler fuses, and so do systems that capture a step."""
    fusion = _legal(row, "fusion", FUSIONS) if row.fusion else "none" if row.execution == "eager" else "compiler"
    return System(fusion=fusion, by_host=row.exchange == "pooled_by_host", loss=_legal(row, "loss", LOSSES),
                  attention=_legal(row, "attention", ATTENTIONS), optimizer=_legal(row, "optimizer", tuple(OPTIMIZER_BYTES)),
                  overlap=_legal(row, "overlap", OVERLAPS), table_update=_legal(row, "table_update", TABLE_UPDATES))


def _layout(row: Published) -> tuple[Layout, str]:
    """(layout, how tables are placed). Axes that a plan lacks are not expressible unless they are 1."""
    values: dict[str, int] = {}
    placing = "row_wise"
    for name, value in row.layout:
        if name == "tables":
            placing = value
        elif name in _LAYOUT:
            values[name] = _integer(name, value)
        elif _integer(name, value) != 1:
            raise NotExpressible(f"layout {name}={value}: a plan has {', '.join(_LAYOUT)}")
    world = row.gpus or 1
    if "fsdp" not in values:
        values["fsdp"] = world // values.setdefault("ddp", 1)
    values.setdefault("ddp", world // values["fsdp"])
    values.setdefault("sparse_group", max(1, world // values.get("sparse_replicas", 1)))
    values.setdefault("sparse_replicas", max(1, world // values["sparse_group"]))
    booleans = {name: bool(values[name]) for name in ("fully_sharded_2d", "reshard_after_forward") if name in values}
    try:
        layout = Layout(**{**values, **booleans})
    except ValueError as error:
        raise NotExpressible(f"layout: {error}") from error
    if layout.world_size != world:
        raise NotExpressible(f"layout {layout.short} is for {layout.world_size} ranks, the row has {world} GPUs")
    return layout, placing


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise NotExpressible(f"layout {name}={value}: an integer is needed") from error


def _cluster(row: Published, device: Device) -> Cluster:
    assert row.gpus is not None
    per_host = row.gpus // row.hosts
    tiers = []
    if per_host > 1:
        bandwidth = row.link_bandwidth or NVLINK.get(row.device)
        if bandwidth is None:
            raise NotExpressible(f"link_gb_s is not given, and the link of {row.device} is not known")
        tiers.append(LinkTier(name="link", scope="host", bandwidth=bandwidth, latency=LINK_LATENCY))
    if row.hosts > 1:
        if row.nic_bandwidth is None:
            raise NotExpressible(f"{row.hosts} hosts, nic_gb_s is not given")
        tiers.append(LinkTier(name="rdma", scope="cluster", bandwidth=row.nic_bandwidth, latency=NIC_LATENCY))
    return Cluster(name=f"{row.hosts}x{per_host} {device.name}", device=device, num_hosts=row.hosts, devices_per_host=per_host, tiers=tuple(tiers))


def _options(row: Published, region: Region) -> RegionPlan:
    """The region's precision and checkpoint policies: the last pattern that matches its name. `full:0.5+selective:0.5` shares the blocks out."""
    precision = _matching(row.precision, region.name, "bf16")
    written = _matching(row.checkpoint, region.name, "none")
    shares = [(part.partition(":")[0], part.partition(":")[2] or "1") for part in written.split("+")]
    for what, value, legal in (("precision", precision, ("fp32", "bf16", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8")),
                               *(("checkpoint", name, ("none", "selective", "alternate", "full", "quantized")) for name, _ in shares)):
        if value not in legal:
            raise NotExpressible(f"{what} {value!r}{suggest(value, legal)}; known: {', '.join(legal)}")
    try:
        weights = [float(share) for _, share in shares]
    except ValueError as error:
        raise NotExpressible(f"checkpoint {written!r}: shares must be numbers") from error
    if min(weights) <= 0 or abs(sum(weights) - 1.0) > 1e-6:
        raise NotExpressible(f"checkpoint {written!r}: shares must be > 0 and sum to 1")
    options, left = [], region.count
    for i, (name, _) in enumerate(shares):
        count = left if i == len(shares) - 1 else min(left, round(region.count * weights[i]))
        left -= count
        if count:
            options.append(RegionOption(count=count, precision=precision, checkpoint=name))  # type: ignore[arg-type]
    return RegionPlan(region=region.name, options=tuple(options))


def _check_patterns(what: str, pairs: tuple[tuple[str, str], ...], names: list[str]) -> None:
    for pattern, _ in pairs:
        if not fnmatch.filter(names, pattern):
            raise NotExpressible(f"{what} {pattern!r} is the name of no region{suggest(pattern, names)}; known: {', '.join(names)}")


def _matching(pairs: tuple[tuple[str, str], ...], name: str, default: str) -> str:
    for pattern, value in pairs:
        if fnmatch.fnmatchcase(name, pattern):
            default = value
    return default


def _tables(model: Model, row: Published, cluster: Cluster, layout: Layout, placing: str) -> tuple[TablePlacement, ...]:
    """`row_wise`: every table over all ranks; `auto`: `benchmarks.published.placing`."""
    if placing == "row_wise" or layout.sparse_group == 1:
        return tuple(TablePlacement(table=n, sharding="row_wise") for t in model.tables for n in t.names)
    if placing != "auto":
        raise NotExpressible(f"layout tables={placing}: row_wise or auto is needed")
    length = float(row.sequence_length or 1)
    groups = {name: table for table in model.tables for name in table.names}
    ids = {name: ids_per_table(table, 1.0, {s.name: length for s in model.sequences}) for name, table in groups.items()}
    sizes = {name: table.weight_bytes + state_bytes(table, table.rows, table.dim) for name, table in groups.items()}
    by_host = row.exchange == "pooled_by_host" and cluster.num_hosts > 1
    parts = cluster.num_hosts if by_host else layout.sparse_group
    found = placed(ids, sizes, parts, crossing=COMM_SHARE * cluster.device.memory_bandwidth / cluster.tiers[-1].bandwidth,
                   room=ROOM * cluster.device.memory_bytes * layout.sparse_group / parts)
    if by_host:  # every GPU of a host has rows of what the host has
        each = cluster.devices_per_host
        found = {name: tuple(host * each + gpu for host in hosts for gpu in range(each)) for name, hosts in found.items()}
    return tuple(TablePlacement(table=name, sharding="row_wise" if len(ranks) > 1 else "table_wise" if ranks else "data_parallel", ranks=ranks)
                 for name, ranks in found.items())
