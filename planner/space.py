"""The search space: every legal layout and job option as columns of arrays, and the options of each region and table group.

Legal layouts (docs/search.md has the reasons):

    world = ddp x fsdp = sparse_group x sparse_replicas
    fsdp, sparse_group   fill hosts or divide one: a group that straddles hosts unevenly would wait for its worst link on every
    collective fsdp                 stays inside a zone: parameters are gathered every layer, the spine is too thin for that
    ep                   divides a host's ranks, fsdp and the experts of every layer: samples travel inside the host; all-gather or all-to-all
    global batch         = local_batch x accumulation x world, exactly

An option that the runtime cannot execute is predict-only and has its reason in `planner.reasons`; it enters only when the scenario
allows it (`search: {predict_only: true}`) or pins it. Whatever stays out is listed with why.
Executions other than eager run, but enter by themselves only where a calibration has timed what they save (`costmodel.execution.unpriced`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import get_args

import numpy as np

from costmodel.blocks.base import QUANTIZED
from costmodel.calibration import Calibration
from costmodel.cluster import Cluster
from costmodel.execution import fits_execution, unpriced
from costmodel.model import TableGroup
from costmodel.plan import Layout, Wire
from costmodel.precision import LOW_PRECISIONS, native, unfit_block
from costmodel.regions import Region, regions
from costmodel.wire import wires
from planner.errors import UsageError
from planner.reasons import ASSUMED, DRIFT, EMULATED, PREDICT_ONLY, UNASKED, UNASKED_WIRE, UNPRICED
from planner.scenario import ResolvedScenario
from planner.sensitivity import risks

PRECISIONS = ("fp32", "bf16", "fp8_row", "fp8_tensor", "fp8_block", "mxfp8")
CHECKPOINTS = ("none", "selective", "full", "quantized", "quantized4")
SHARDINGS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel", "host_cached")
BATCHINGS = ("jagged", "padded", "local", "sorted_buckets", "base_batch_shuffling", "global")
TRANSPORTS = ("nccl", "ncclx", "copy_engine", "gloo")
EXECUTIONS = ("eager", "compile", "cuda_graph")
SYNC_EVERY = (1, 4, 16)
MAX_ACCUMULATION = 64
MIN_COLUMNS = 32
"""Narrowest column shard offered: a row of 32 fp32 values is one 128-byte line; narrower shards read the same lines for less."""

EXECUTABLE = {
    "precision": PRECISIONS,
    "checkpoint": CHECKPOINTS,
    "sharding": SHARDINGS,
    "batching": BATCHINGS,
    "transport": ("nccl", "gloo"),
    "execution": EXECUTIONS,
}
MAX_REPLICATED = 2.0**26
"""Bytes of the largest dense gradient of a table that is offered on every rank: it is all-reduced whole in each step, an exchange moves only rows
that are asked for."""
RISK = {"fp32": 0.0, "bf16": 10.0, "fp8_block": 2000.0, "mxfp8": 2500.0, "fp8_row": 2500.0, "fp8_tensor": 3000.0}
SAVED_RISK = {"quantized": 1000.0, "quantized4": 30_000.0}
"""Numeric risk of a block: 1e6 x noise power over signal power of its output; saved activations in 8 or 4 bits add that of its gradients. [Assumed
where `search.sensitivity` names no file of `planner sensitivity`: the order of what gem-tiny's regions showed before training]"""
HIGH_PRECISION_KINDS = ("sequence_input", "summary", "next_event", "heads")
"""Block kinds that keep 16 bits or more: their inputs are raw embeddings or their outputs are logits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """An option that is out: `what` (e.g. `checkpoint quantized`), `why`, and `kind`: illegal, predict_only, pinned, excluded."""

    what: str
    why: str
    kind: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegionChoice:
    """One way to run a block: number format, checkpoint policy, numeric risk (1e6 x noise over signal of its output)."""

    precision: str
    checkpoint: str
    risk: float

    @property
    def executable(self) -> bool:
        return self.precision in EXECUTABLE["precision"] and self.checkpoint in EXECUTABLE["checkpoint"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableChoice:
    """One way to shard a table over `num_shards` ranks of the group (1 for table_wise and host_cached)."""

    sharding: str
    num_shards: int

    @property
    def name(self) -> str:
        return f"{self.sharding}{self.num_shards}" if self.sharding == "column_wise" else self.sharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Columns of equal length; `batching`, `transport`, `execution` index BATCHINGS, TRANSPORTS, EXECUTIONS."""

    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["ddp"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def take(self, index: np.ndarray) -> Candidates:
        return Candidates(columns={k: v[index] for k, v in self.columns.items()})

    def layout(self, i: int) -> Layout:
        c = self.columns
        return Layout(
            ddp=int(c["ddp"][i]),
            fsdp=int(c["fsdp"][i]),
            ep=int(c["ep"][i]),
            expert_all_to_all=bool(c["expert_all_to_all"][i]),
            sparse_group=int(c["sparse_group"][i]),
            sparse_replicas=int(c["sparse_replicas"][i]),
            fully_sharded_2d=bool(c["fully_sharded_2d"][i]),
            sync_every=int(c["sync_every"][i]),
            reshard_after_forward=bool(c["reshard_after_forward"][i]),
        )

    def options(self, i: int) -> dict[str, object]:
        """The job options of candidate i as fields of Plan."""
        c = self.columns
        return {
            "local_batch": int(c["local_batch"][i]),
            "accumulation": int(c["accumulation"][i]),
            "batching": BATCHINGS[c["batching"][i]],
            "transport": TRANSPORTS[c["transport"][i]],
            "execution": EXECUTIONS[c["execution"][i]],
            "input_overlap": bool(c["input_overlap"][i]),
            "tables_ahead": int(c["tables_ahead"][i]),
        }

    def describe(self, i: int) -> str:
        o = self.options(i)
        sync = f" sync{self['sync_every'][i]}" if self["sync_every"][i] > 1 else ""
        batch = f"batch {o['local_batch']}x{o['accumulation']}"
        overlap = (" overlap" if o["input_overlap"] else "") + (f" ahead{o['tables_ahead']}" if o["tables_ahead"] else "")
        return f"{self.layout(i).short}{sync} {batch} {o['batching']} {o['transport']} {o['execution']}{overlap}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """`candidates`, the choices of each region (by name), and everything that is out with its reason."""

    candidates: Candidates
    regions: dict[str, tuple[RegionChoice, ...]]
    excluded: tuple[Excluded, ...]
    predict_only: bool


def build_space(scenario: ResolvedScenario, calibration: Calibration | None = None) -> Space:
    """Every legal candidate of a scenario. `calibration`: what prices it, for executions are chosen by measured prices only. Raises UsageError when
    pins and exclusions leave nothing, naming them together."""
    log: list[Excluded] = []
    allow = scenario.search.predict_only
    dense, sparse = _dense(scenario, log), _shardable(scenario, _sparse(scenario, log), log, allow)
    batches = _batches(scenario, log)
    jobs = [
        _job_options(scenario, what, known, log, allow, calibration)
        for what, known in (("batching", BATCHINGS), ("transport", TRANSPORTS), ("execution", EXECUTIONS))
    ]
    log += _wires(scenario)
    reshard, overlap = _reshard(scenario, log), _overlap(scenario, log)
    parts = [np.array(part, dtype=np.int64).reshape(len(part), -1) for part in (dense, sparse, reshard, batches, *jobs, overlap)]
    grid = np.meshgrid(*[np.arange(len(p)) for p in parts], indexing="ij")
    table = np.concatenate([p[g.ravel()] for p, g in zip(parts, grid)], axis=1)
    order = (
        "ddp",
        "fsdp",
        "ep",
        "expert_all_to_all",
        "sparse_group",
        "sparse_replicas",
        "fully_sharded_2d",
        "sync_every",
        "tables_ahead",
        "reshard_after_forward",
        "local_batch",
        "accumulation",
        "batching",
        "transport",
        "execution",
        "input_overlap",
    )
    columns = {name: table[:, i] for i, name in enumerate(order)}
    keep = np.ones(len(table), dtype=bool)
    # Without sharded parameters there is nothing to reshard: one of the two is the same job as the other.
    if "reshard_after_forward" not in scenario.pins.layout:
        keep &= ~((columns["fsdp"] == 1) & (columns["reshard_after_forward"] == 0))
    # A group of one rank exchanges no ids ahead of time.
    if scenario.input_overlap is None:
        keep &= ~((columns["sparse_group"] == 1) & (columns["input_overlap"] == 1))
    if scenario.pins.execution is None and not allow:
        keep &= ~((columns["execution"] == EXECUTIONS.index("cuda_graph")) & (columns["accumulation"] > 1))
    for partial in scenario.pins.exclude.layouts:
        match = np.ones(len(table), dtype=bool)
        for key, value in partial.items():
            match &= columns[key] == int(value)
        keep &= ~match
        log.append(Excluded(what=f"layouts {partial}", why=f"excluded by the scenario ({int(match.sum())} candidates)", kind="excluded"))
    if not keep.any():
        raise UsageError(
            f"scenario {scenario.name}: pins and exclusions leave no candidate: layout {scenario.pins.layout}, exclusions "
            f"{[dict(p) for p in scenario.pins.exclude.layouts]}"
        )
    choices = {r.name: _region_choices(scenario, r, log, allow) for r in regions(scenario.model)}
    return Space(
        candidates=Candidates(columns={k: v[keep] for k, v in columns.items()}),
        regions=choices,
        excluded=tuple(dict.fromkeys(log)),
        predict_only=allow,
    )


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _fits_hosts(size: int, per_host: int) -> bool:
    return size % per_host == 0 or per_host % size == 0


def _dense(scenario: ResolvedScenario, log: list[Excluded]) -> list[tuple[int, int, int, int]]:
    """(ddp, fsdp, ep, expert_all_to_all)."""
    cluster, pins = scenario.cluster, scenario.pins.layout
    zone = cluster.scope_size("zone")
    experts = [group.num_experts for group in scenario.model.expert_layers]
    widest = math.gcd(cluster.devices_per_host, *experts) if experts else 1
    found = []
    if widest % pins.get("ep", 1):
        limit = f"hosts of {cluster.devices_per_host} and the {min(experts)} experts of a layer" if experts else "the model, which has no experts"
        raise UsageError(
            f"scenario {scenario.name}: layout.ep {pins['ep']} does not fit {limit}; legal: {', '.join(map(str, divisors(widest)))}"
        )
    for fsdp in divisors(cluster.num_ranks):
        name = f"fsdp {fsdp}"
        if not _fits_hosts(fsdp, cluster.devices_per_host):
            log.append(Excluded(what=name, why=f"does not fill or divide hosts of {cluster.devices_per_host}", kind="illegal"))
        elif fsdp > zone or zone % fsdp:
            why = f"leaves its zone of {zone} ranks" if fsdp > zone and not cluster.zone_hosts else f"does not divide {_zones(cluster)}"
            log.append(Excluded(what=name, why=why, kind="illegal"))
        elif pins.get("fsdp", fsdp) != fsdp or pins.get("ddp", cluster.num_ranks // fsdp) != cluster.num_ranks // fsdp:
            log.append(Excluded(what=name, why="another layout is pinned", kind="pinned"))
        else:
            found += [(cluster.num_ranks // fsdp, fsdp, *way) for way in _expert_ways(math.gcd(widest, fsdp), pins)]
    legal = [f"{fsdp} x {cluster.num_ranks // fsdp}" for fsdp in divisors(zone) if _fits_hosts(fsdp, cluster.devices_per_host)]
    return _or_raise(found, scenario, "fsdp, ddp and ep", [e for e in log if e.what.startswith("fsdp")], legal)


def _expert_ways(widest: int, pins: Mapping[str, object]) -> list[tuple[int, int]]:
    """(ep, expert_all_to_all) up to `widest` ranks; one rank alone exchanges nothing."""
    ways = [(ep, way) for ep in divisors(widest) for way in ((0, 1) if ep > 1 else (0,))]
    return [(ep, way) for ep, way in ways if pins.get("ep", ep) == ep and pins.get("expert_all_to_all", way) == way]


def _zones(cluster: Cluster) -> str:
    """The zones in words."""
    zone = cluster.scope_size("zone")
    if cluster.zone_hosts:
        return f"blocks of {zone} ranks, the largest that fit zones of {', '.join(map(str, cluster.zone_hosts))} hosts"
    return f"zones of {zone} ranks"


def _sparse(scenario: ResolvedScenario, log: list[Excluded]) -> list[tuple[int, int, int, int, int]]:
    """(group, replicas, fully_sharded_2d, sync_every, tables_ahead)."""
    cluster, pins, zone = scenario.cluster, scenario.pins.layout, scenario.cluster.scope_size("zone")
    found, legal = [], []
    for group in divisors(cluster.num_ranks):
        replicas, name = cluster.num_ranks // group, f"sparse_group {group}"
        if not _fits_hosts(group, cluster.devices_per_host):
            log.append(Excluded(what=name, why=f"does not fill or divide hosts of {cluster.devices_per_host}", kind="illegal"))
            continue
        if not _fits_hosts(group, zone):
            log.append(Excluded(what=name, why=f"does not fill or divide {_zones(cluster)}", kind="illegal"))
            continue
        legal.append(f"{group} x {replicas}")
        if pins.get("sparse_group", group) != group or pins.get("sparse_replicas", replicas) != replicas:
            log.append(Excluded(what=name, why="another sparse layout is pinned", kind="pinned"))
            continue
        for full, sync in itertools.product((False, True), SYNC_EVERY):
            if (replicas == 1 and (full or sync > 1)) or (full and sync > 1):
                continue  # one replica has nothing to average or to shard over; fully sharded 2D reduces every step
            if ("fully_sharded_2d" in pins and pins["fully_sharded_2d"] != full) or pins.get("sync_every", sync) != sync:
                continue
            if sync > 1 and "sync_every" not in pins:
                log.append(Excluded(what=f"sync_every {sync}", why=DRIFT, kind="excluded"))
                continue
            found += [(group, replicas, int(full), sync, ahead) for ahead in (_tables_ahead(scenario, full) if replicas > 1 else (0,))]
    if any(row[1] > 1 for row in found):
        if scenario.tables_ahead is not None:
            log.append(Excluded(what=f"tables_ahead other than {scenario.tables_ahead}", why="another one is pinned", kind="pinned"))
        elif cluster.device.kind == "cpu":
            log.append(Excluded(what="tables_ahead above 0", why="collectives of CPU ranks run on the cores that compute", kind="excluded"))
    return _or_raise(
        found,
        scenario,
        "sparse_group, sparse_replicas, fully_sharded_2d and sync_every",
        [e for e in log if e.what.startswith("sparse")],
        legal,
    )


def _tables_ahead(scenario: ResolvedScenario, full: bool) -> tuple[int, ...]:
    """Plain 2D's averages take no memory beside compute; what fully sharded 2D gathers early does: not early, for the second half of backward, for
    all of it. CPU ranks have no other cores to run collectives on."""
    if scenario.tables_ahead is not None:
        return (scenario.tables_ahead,)
    if scenario.cluster.device.kind == "cpu":
        return (0,)
    blocks = sum(r.count for r in regions(scenario.model))
    return (0, -(-blocks // 2), blocks) if full else (1,)


def _shardable(scenario: ResolvedScenario, found: list[tuple[int, int, int, int, int]], log: list[Excluded], allow: bool) -> list:
    """Without the sparse groups in which some table has no sharding left."""
    pins = scenario.pins
    kinds: dict[tuple, TableGroup] = {}
    for table in scenario.model.tables:
        for name in table.names if pins.sharding or pins.exclude.sharding else table.names[:1]:
            key = (table.name, pins.option("sharding", name), pins.excluded("sharding", name))
            kinds.setdefault(key, dataclasses.replace(table, name=name, count=1))
    out: dict[int, str] = {}
    for group in dict.fromkeys(row[0] for row in found):
        try:
            for table in kinds.values():
                table_choices(scenario, table, group, allow=allow)
        except UsageError as error:
            out[group] = str(error).removeprefix(f"scenario {scenario.name}: ")
            log.append(Excluded(what=f"sparse_group {group}", why=out[group], kind="illegal"))
    left = [row for row in found if row[0] not in out]
    if not left:
        alike: dict[str, list[str]] = {}
        for group, why in out.items():
            alike.setdefault(why.replace(f"in a sparse group of {group}", "in sparse groups of {}", 1), []).append(str(group))
        reasons = [why.replace("{}", ", ".join(groups), 1) for why, groups in alike.items()]
        raise UsageError(f"scenario {scenario.name}: no sparse group can hold the tables: " + "; ".join(reasons))
    return left


def _or_raise(found: list, scenario: ResolvedScenario, what: str, why: Iterable[Excluded], legal: Iterable[str]) -> list:
    """`found`; when it is empty UsageError with the pins, the reasons of what they ask for, and the legal values (size x number)."""
    if not found:
        pins, world = scenario.pins.layout, scenario.cluster.num_ranks
        asked = {pins[key] for key in ("fsdp", "sparse_group") if key in pins}
        asked |= {world // pins[key] for key in ("ddp", "sparse_replicas") if key in pins}
        illegal = [e for e in why if e.kind == "illegal"]
        reasons = "; ".join(f"{e.what}: {e.why}" for e in illegal if int(e.what.split()[-1]) in asked)
        raise UsageError(
            f"scenario {scenario.name}: no legal {what} under the pins {dict(pins)} on {world} ranks{' (' + reasons + ')' if reasons else ''}; "
            f"legal: {', '.join(legal)}"
        )
    return found


def _reshard(scenario: ResolvedScenario, log: list[Excluded]) -> list[tuple[int]]:
    pinned = scenario.pins.layout.get("reshard_after_forward")
    if pinned is not None:
        log.append(Excluded(what=f"reshard_after_forward {not pinned}", why="the other one is pinned", kind="pinned"))
        return [(int(pinned),)]
    return [(1,), (0,)]


def _overlap(scenario: ResolvedScenario, log: list[Excluded]) -> list[tuple[int]]:
    pinned = scenario.input_overlap
    if pinned is not None:
        log.append(Excluded(what=f"input_overlap {not pinned}", why="the other one is pinned", kind="pinned"))
        return [(int(pinned),)]
    return [(0,), (1,)]


def _batches(scenario: ResolvedScenario, log: list[Excluded]) -> list[tuple[int, int]]:
    """(local_batch, accumulation) with local_batch x accumulation x world = global batch."""
    world = scenario.cluster.num_ranks
    total = scenario.workload.global_batch_on(world)
    if total % world:
        near = sorted({max(world, total // world * world), (total // world + 1) * world})
        raise UsageError(
            f"scenario {scenario.name}: global batch {total} does not divide over {world} ranks; next legal: {', '.join(map(str, near))}"
        )
    per_rank, pins = total // world, scenario.pins
    found = []
    for accumulation in divisors(per_rank):
        local = per_rank // accumulation
        if pins.local_batch not in (None, local) or pins.accumulation not in (None, accumulation):
            log.append(Excluded(what=f"local_batch {local} x accumulation {accumulation}", why="another batch is pinned", kind="pinned"))
        elif accumulation > MAX_ACCUMULATION and pins.accumulation is None and pins.local_batch is None:
            log.append(Excluded(what=f"accumulation {accumulation}", why=f"more than {MAX_ACCUMULATION} micro-batches a step", kind="illegal"))
        else:
            found.append((local, accumulation))
    if not found:
        raise UsageError(
            f"scenario {scenario.name}: local_batch {pins.local_batch} x accumulation {pins.accumulation} x {world} ranks "
            f"is not the global batch {total}; legal local batches: {', '.join(map(str, divisors(per_rank)))}"
        )
    return found


def _job_options(scenario: ResolvedScenario, what: str, known: tuple[str, ...], log: list[Excluded], allow: bool,
                 calibration: Calibration | None) -> list[tuple[int]]:
    pinned, banned = getattr(scenario.pins, what), getattr(scenario.pins.exclude, what)
    if pinned is not None and pinned not in known:
        raise UsageError(f"scenario {scenario.name}: {what} {pinned!r} is not known; legal: {', '.join(known)}")
    found = []
    for index, name in enumerate(known):
        reason = _reason(what, name, pinned, banned, allow)
        if reason is None and what == "transport" and (name == "gloo") != (scenario.cluster.device.kind == "cpu"):
            reason = Excluded(what=f"{what} {name}", why=f"not for {scenario.cluster.device.kind} ranks", kind="illegal")
        if reason is None and what == "execution" and scenario.cluster.device.kind == "cpu" and index > 0 and pinned is None:
            reason = Excluded(what=f"{what} {name}", why="a CPU rank has no device streams", kind="illegal")
        if reason is None and what == "execution" and pinned is None and not allow:
            reason = _execution_reason(scenario, name, calibration)
        if reason is None and what == "batching" and not scenario.model.sequences and index > 0 and pinned is None:
            reason = Excluded(what=f"{what} {name}", why="the model has no sequences", kind="illegal")
        log.append(reason) if reason else found.append((index,))
    if not found:
        out = [e for e in log if e.what.startswith(what)]
        telling = [e for e in out if e.kind != "pinned"] or out
        raise UsageError(f"scenario {scenario.name}: {what}: every option is out: " + "; ".join(f"{e.what}: {e.why}" for e in telling))
    return found


def _execution_reason(scenario: ResolvedScenario, name: str, calibration: Calibration | None) -> Excluded | None:
    """Why an execution is not for the scenario, or not chosen by itself."""
    if name == "cuda_graph" and scenario.cluster.num_ranks > 1:
        return Excluded(what=f"execution {name}", why="FSDP gathers and frees parameters within a step; graphs are of one rank", kind="illegal")
    if (why := unpriced(scenario.model, name, calibration)) is not None:
        return Excluded(what=f"execution {name}", why=ASSUMED.format(why), kind="predict_only")
    pins = scenario.pins
    for region in regions(scenario.model):
        precision, checkpoint = pins.option("precision", region.name), pins.option("checkpoint", region.name)
        if not fits_execution(scenario.model, name, region.name, precision or "bf16", checkpoint or "none"):
            return Excluded(what=f"execution {name}", why=f"not of region {region.name} in {precision or 'any precision'} under checkpoint "
                            f"{checkpoint or 'none'}, which are pinned", kind="illegal")
    return None


def _reason(what: str, name: str, pinned: str | None, banned: Iterable[str], allow: bool) -> Excluded | None:
    if pinned is not None:
        if name == pinned and name in banned:
            return Excluded(what=f"{what} {name}", why="pinned and excluded at once", kind="excluded")
        return None if name == pinned else Excluded(what=f"{what} {name}", why=f"{pinned} is pinned", kind="pinned")
    if name in banned:
        return Excluded(what=f"{what} {name}", why="excluded by the scenario", kind="excluded")
    if name not in EXECUTABLE[what] and not allow:
        return Excluded(what=f"{what} {name}", why=PREDICT_ONLY[name], kind="predict_only")
    return None


def _region_choices(scenario: ResolvedScenario, region: Region, log: list[Excluded], allow: bool) -> tuple[RegionChoice, ...]:
    device, pins = scenario.cluster.device, scenario.pins
    precisions, policies = [], []
    for name in PRECISIONS:
        pinned = pins.option("precision", region.name)
        reason = _reason("precision", name, pinned, pins.excluded("precision", region.name), allow)
        emulates = name in device.peak_flops or name in LOW_PRECISIONS
        if reason is None and not native(device, name) and not (pinned if name in LOW_PRECISIONS else emulates and (allow or pinned)):
            reason = Excluded(what=f"precision {name}", why=f"{device.name} has no native {name}" + EMULATED * emulates, kind="illegal")
        if reason is None and (unfit := unfit_block(region.block, name)) is not None:
            reason = Excluded(what=f"precision {name} in {region.name}", why=unfit, kind="illegal")
        if reason is None and name in LOW_PRECISIONS and not (pinned or allow or scenario.search.risk_budget is not None):
            reason = Excluded(what=f"precision {name}", why=UNASKED, kind="excluded")
        if reason is None and name in LOW_PRECISIONS and region.kind in HIGH_PRECISION_KINDS and pins.option("precision", region.name) is None:
            reason = Excluded(what=f"precision {name} in {region.name}", why="inputs and last layers keep 16 bits or more", kind="illegal")
        if reason:
            log.append(reason)
        else:
            precisions.append(name)
    for name in CHECKPOINTS:
        reason = _reason("checkpoint", name, pins.option("checkpoint", region.name), pins.excluded("checkpoint", region.name), allow)
        if reason:
            log.append(reason)
        else:
            policies.append(name)
    lossy = [p for p in policies if p in QUANTIZED]
    if lossy and not (pins.option("checkpoint", region.name) or allow or scenario.search.risk_budget is not None):
        log += [Excluded(what=f"checkpoint {p}", why=UNASKED.replace("precision", "checkpoint"), kind="excluded") for p in lossy]
        policies = [p for p in policies if p not in QUANTIZED]
    if not precisions or not policies:
        mine = [e for e in log if e.what.startswith("precision" if not precisions else "checkpoint")]
        mine = [e for e in mine if e.kind != "pinned"] or mine
        raise UsageError(
            f"scenario {scenario.name}: region {region.name} has no "
            f"{'precision' if not precisions else 'checkpoint policy'} left: " + "; ".join(dict.fromkeys(f"{e.what}: {e.why}" for e in mine))
        )
    if "fp32" in precisions and lossy:
        log.append(Excluded(what=f"checkpoint {', '.join(lossy)} under fp32", why="activations are quantised from 16 bits", kind="illegal"))
    measured = risks(scenario.search.sensitivity, scenario.model.name)
    if scenario.search.risk_budget is not None:
        unknown = [name for name in (*precisions, *(p for p in policies if p in QUANTIZED)) if name != "fp32" and (region.name, name) not in measured]
        if unknown:
            log.append(Excluded(what=f"measured risk of {', '.join(unknown)} in {region.name}", kind="assumed",
                                why="assumed figures stand in; `planner sensitivity` measures them"))

    def risk(precision: str, checkpoint: str) -> float:
        return measured.get((region.name, precision), RISK[precision]) + measured.get((region.name, checkpoint), SAVED_RISK.get(checkpoint, 0.0))

    found = tuple(RegionChoice(precision=p, checkpoint=c, risk=risk(p, c)) for p in precisions for c in policies
                  if not (p == "fp32" and c in QUANTIZED))
    if not found:
        raise UsageError(f"scenario {scenario.name}: region {region.name}: {', '.join(policies)} needs a precision of 16 bits or less, not fp32")
    return found


def _wires(scenario: ResolvedScenario) -> list[Excluded]:
    """Formats on the wire that are out: the scenario alone decides them, by pins."""
    found = []
    for what, used in zip(("wire", "wire_gradients"), wires(scenario.model.tables, scenario.pins.wire, scenario.pins.wire_gradients)):
        kind = "pinned" if getattr(scenario.pins, what) else "excluded"
        why = f"{used} is pinned" if kind == "pinned" else f"{used} is the default; {UNASKED_WIRE}"
        found += [Excluded(what=f"{what} {name}", why=why, kind=kind) for name in get_args(Wire) if name != used]
    return found


def training_pins(scenario: ResolvedScenario) -> dict[str, object]:
    """The fields of Plan that only a scenario decides, as they change training: formats on the wire, what layers below 16 bits do besides, and how
    replicas' Adagrad steps."""
    return {name: getattr(scenario.pins, name) for name in ("wire", "wire_gradients", "gather_dtype", "reduce_dtype", "recipe", "moment_scaled")
            } | {"ne_tolerance": scenario.ne_tolerance}


def table_choices(
    scenario: ResolvedScenario, table: TableGroup, group: int, *, allow: bool, log: list[Excluded] | None = None
) -> tuple[TableChoice, ...]:
    """The legal sharding choices of one table of `table` in a sparse group of `group` ranks.

    A pin or exclusion for any table of the group holds for all (identical tables are tied). Column shards are at least
    MIN_COLUMNS wide and at most a group's ranks in number; row shards hold at least one row each.
    """
    log = [] if log is None else log
    pins, name = scenario.pins, table.names[0]
    local = min(group, scenario.cluster.devices_per_host)
    found: list[TableChoice] = []
    for sharding in SHARDINGS:
        pinned = pins.option("sharding", name)
        reason = _reason("sharding", sharding, pinned, pins.excluded("sharding", name), allow)
        if reason is None and group == 1 and sharding != "table_wise" and sharding != pinned and sharding != "host_cached":
            reason = Excluded(what=f"sharding {sharding}", why="a sparse group of one rank holds every table whole", kind="illegal")
        if reason is None and sharding == "table_row_wise" and group <= local and sharding != pinned:
            reason = Excluded(what=f"sharding {sharding}", why="the sparse group is inside one host: the same as row_wise", kind="illegal")
        gradient = 4.0 * table.rows * (table.dim + 1)
        if reason is None and sharding == "data_parallel" and gradient > MAX_REPLICATED and sharding != pinned:
            why = f"{gradient / 2**20:,.0f} MiB of gradients would be all-reduced each step, at most {MAX_REPLICATED / 2**20:.0f} are offered; pin it"
            reason = Excluded(what=f"sharding {sharding} of {table.name}", why=why, kind="excluded")
        if reason is None and sharding in UNPRICED and sharding != pinned:
            reason = Excluded(what=f"sharding {sharding}", why=UNPRICED[sharding], kind="excluded")
        if reason is None and sharding == "host_cached" and not (scenario.cluster.host_memory_bytes and scenario.cluster.device.host_link_bandwidth):
            reason = Excluded(what=f"sharding {sharding}", why="the cluster states no host memory or host link", kind="illegal")
        if reason is None and sharding == "host_cached" and group < scenario.cluster.num_ranks:
            why = f"the runtime does not average tables in host memory; pin layout.sparse_group {scenario.cluster.num_ranks}"
            reason = Excluded(what=f"sharding {sharding} in several replicas", why=why, kind="illegal")
        if reason:
            log.append(reason)
            continue
        if sharding == "column_wise":
            widths = [n for n in divisors(table.dim) if 1 < n <= group and table.dim // n >= MIN_COLUMNS]
            if not widths:
                why = f"{table.dim} columns cannot be cut into 2 or more equal shards of at least {MIN_COLUMNS}, at most one a rank"
                log.append(Excluded(what=f"sharding {sharding}", why=why, kind="illegal"))
            found += [TableChoice(sharding=sharding, num_shards=n) for n in widths]
        else:
            shards = {"table_wise": 1, "host_cached": 1, "table_row_wise": local}.get(sharding, group)
            found.append(TableChoice(sharding=sharding, num_shards=shards))
    if not found:
        telling = [e for e in log if e.what.startswith("sharding") and e.kind != "pinned"]
        pinned = f", {pins.option('sharding', name)} is pinned" if pins.option("sharding", name) else ""
        raise UsageError(
            f"scenario {scenario.name}: table {table.name} has no sharding left in a sparse group of {group}{pinned}: "
            + "; ".join(dict.fromkeys(f"{e.what}: {e.why}" for e in telling))
        )
    return tuple(found)


def predict_only_reasons(
    *, options: dict[str, object], precisions: Iterable[str], checkpoints: Iterable[str], shardings: Iterable[str]
) -> tuple[str, ...]:
    """Why no code here can execute a plan with these options; empty when it can."""
    used = {
        "precision": set(precisions),
        "checkpoint": set(checkpoints),
        "sharding": set(shardings),
        **{what: {options[what]} for what in ("batching", "transport", "execution")},
    }
    return tuple(
        f"{what} {name}: {PREDICT_ONLY[name]}" for what, names in used.items() for name in sorted(map(str, names)) if name not in EXECUTABLE[what]
    )
