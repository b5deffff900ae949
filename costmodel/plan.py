"""Plan: everything the runtime needs to execute one training job, and what was predicted for it. `plan.json` is this, whole.

The plan embeds the resolved cluster, model and workload, so that the runtime reads one file and no YAML. Region names come from
`costmodel.regions.regions(model)`; table names from `TableGroup.names`.
"""
from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from costmodel.cluster import Cluster
from costmodel.codec import LATER, DecodeError, canonical, content_hash, decode, encode
from costmodel.model import Model
from costmodel.systems import System
from costmodel.workload import Workload

SCHEMA_VERSION = 1
Precision = Literal["fp32", "bf16", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8"]
Checkpoint = Literal["none", "selective", "full", "quantized", "quantized4"]
RecipeOption = Literal["low_weight_gradients", "stochastic_rounding", "hadamard", "outliers", "static_scales", "fp8_attention"]
Wire = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
Sharding = Literal["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel", "host_cached"]
Batching = Literal["padded", "jagged", "sorted_buckets", "local", "base_batch_shuffling", "global"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The five dimensions. Dense: world = ddp x fsdp. Experts: fsdp = efsdp x ep, ep innermost. Sparse: world = sparse_group x sparse_replicas.

    Rank r has fsdp index r % fsdp and ddp index r // fsdp; its sparse group is made of ranks of equal r // sparse_group. With `fully_sharded_2d` each
    replica keeps 1 / sparse_replicas of its shard at rest; plain 2D averages weights and state every `sync_every` steps. With ep > 1 rank r holds the
    experts of place r % ep; samples reach them by all-gather and reduce-scatter over ep, or with `expert_all_to_all` by all-to-all both ways.
    """

    ddp: int = 1
    fsdp: int = 1
    ep: int = 1
    expert_all_to_all: bool = False
    sparse_group: int = 1
    sparse_replicas: int = 1
    fully_sharded_2d: bool = False
    sync_every: int = 1
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        for key in ("ddp", "fsdp", "ep", "sparse_group", "sparse_replicas", "sync_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be >= 1, got {getattr(self, key)}")
        if self.ddp * self.fsdp != self.sparse_group * self.sparse_replicas:
            raise ValueError(f"dense ddp {self.ddp} x fsdp {self.fsdp} = {self.ddp * self.fsdp} ranks, but sparse group {self.sparse_group} x "
                             f"replicas {self.sparse_replicas} = {self.sparse_group * self.sparse_replicas}")
        if self.fsdp % self.ep:
            raise ValueError(f"ep {self.ep} must divide fsdp {self.fsdp}")
        if self.expert_all_to_all and self.ep == 1:
            raise ValueError("expert_all_to_all needs ep > 1, got ep 1")

    @property
    def world_size(self) -> int:
        return self.ddp * self.fsdp

    @property
    def efsdp(self) -> int:
        """Ranks that share the parameters of one expert."""
        return self.fsdp // self.ep

    @property
    def short(self) -> str:
        """E.g. `ddp2 fsdp8 sparse16x1`; `ep2` exchanges by all-gather, `ep2a` by all-to-all."""
        experts = f" ep{self.ep}" + ("a" if self.expert_all_to_all else "") if self.ep > 1 else ""
        text = f"ddp{self.ddp} fsdp{self.fsdp}{experts} sparse{self.sparse_group}x{self.sparse_replicas}"
        return text + ("" if self.reshard_after_forward else " keep") + (" fs2d" if self.fully_sharded_2d else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegionOption:
    """`count` blocks of a region under one precision and checkpoint policy, in order from the first block. `alternate` is other systems'
    (costmodel/blocks/base.py), not the runtime's."""

    count: int
    precision: Precision = "fp32"
    checkpoint: Checkpoint | Literal["alternate"] = "none"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    region: str
    options: tuple[RegionOption, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TablePlacement:
    """Where a table lives inside a sparse group (every replica group is the same).

    `ranks`: positions in the group, in shard order; row_wise splits rows into ceil(rows / n) runs over them, column_wise splits the dim evenly,
    table_wise and host_cached name one rank, data_parallel every rank. An empty tuple means all ranks of the group in order. A rank may appear
    twice; it then holds, and pays for, two shards.
    """

    table: str
    sharding: Sharding
    ranks: tuple[int, ...] = ()

    def shards(self, rows: int, dim: int, group: int) -> tuple[Shard, ...]:
        """The shards of a `rows` x `dim` table over a group of `group` ranks; empty shards (row-wise with more ranks than rows) are left out."""
        ranks = self.ranks or tuple(range(group))
        if max(ranks) >= group or min(ranks) < 0:
            raise ValueError(f"table {self.table}: rank {max(ranks)} is outside its sparse group of {group}")
        if self.sharding in ("table_wise", "host_cached"):
            return (Shard(rank=ranks[0], row_begin=0, row_end=rows, col_begin=0, col_end=dim),)
        if self.sharding == "data_parallel":
            return tuple(Shard(rank=r, row_begin=0, row_end=rows, col_begin=0, col_end=dim) for r in ranks)
        n = len(ranks)
        if self.sharding == "column_wise":
            if dim % n:
                raise ValueError(f"table {self.table}: dim {dim} does not divide into {n} column shards")
            width = dim // n
            return tuple(Shard(rank=r, row_begin=0, row_end=rows, col_begin=i * width, col_end=(i + 1) * width) for i, r in enumerate(ranks))
        step = -(-rows // n)
        cuts = [(r, min(i * step, rows), min((i + 1) * step, rows)) for i, r in enumerate(ranks)]
        return tuple(Shard(rank=r, row_begin=a, row_end=b, col_begin=0, col_end=dim) for r, a, b in cuts if b > a)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rows [row_begin, row_end) and columns [col_begin, col_end) of a table on `rank` (position in the sparse group)."""

    rank: int
    row_begin: int
    row_end: int
    col_begin: int
    col_end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One executable (or predict-only) training job. `fingerprints`: content hashes of cluster, model, workload and calibration.

    `prediction` is an encoded `costmodel.estimate.Estimate`; `predict_only` lists reasons why no code here can execute the plan (empty: executable);
    `search` holds the certificate (status, gaps) where a search made it. `exchange`: what a rank is sent of pooled tables, distinct `rows` (the
    runtime) or bags `pooled` by their owner, one row a bag and row-wise shard (HugeCTR, torchrec); `wire`: number format of what is sent (default:
    the tables'), `wire_gradients`: of what comes back (default: as `wire`, bf16 where that is below 16 bits; `costmodel.wire`). `gather_dtype`:
    what FSDP gathers parameters of regions below fp32 in (default: 16 bits), `reduce_dtype`: what it reduces gradients in. `recipe`: what
    layers below 16 bits do besides (`runtime.precision.linear`). `emulated`: number formats that the device has not, whose numbers are exact and
    whose speed says nothing. `ne_tolerance`: relative NE that `planner validate` allows the plan over itself in 16 bits.
    `input_overlap`: the ids of the next micro-batch are exchanged while this one is computed, instead of when they are needed.
    `tables_ahead`: with several replicas of a sparse group, 0: their collectives are waited for where they are issued; n > 0: they run beside
    compute, and fully sharded 2D gathers whole shards for the update when backward has n blocks to go. `moment_scaled`: tables' Adagrad divides its
    sums of squares by the number of sparse replicas before the root. `system`: whose the step is, where it is not the runtime's (predict-only).
    """

    schema_version: int = SCHEMA_VERSION
    scenario: str
    cluster: Cluster
    model: Model
    workload: Workload
    layout: Layout
    local_batch: int
    accumulation: int = 1
    batching: Batching = "jagged"
    transport: str = "nccl"
    execution: Literal["eager", "compile", "cuda_graph"] = "eager"
    exchange: Literal["rows", "pooled"] = "rows"
    input_overlap: bool = False
    tables_ahead: int = 0
    moment_scaled: bool = False
    wire: Wire | None = None
    wire_gradients: Wire | None = None
    gather_dtype: Literal["fp8"] | None = None
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    recipe: tuple[RecipeOption, ...] = ()
    regions: tuple[RegionPlan, ...]
    tables: tuple[TablePlacement, ...]
    seed: int = 0
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    prediction: dict[str, Any] = dataclasses.field(default_factory=dict)
    search: dict[str, Any] = dataclasses.field(default_factory=dict)
    predict_only: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    ne_tolerance: float = 0.0005
    system: System | None = dataclasses.field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if self.system is not None and not self.predict_only:
            raise ValueError("system: a step of another system can be predicted, not executed; predict_only must give a reason")

    def identity(self) -> str:
        """Content hash of what is executed (not of predictions or certificates)."""
        body = encode(self)
        for key in ("prediction", "search", "fingerprints", "emulated", "ne_tolerance"):
            body.pop(key)
        return content_hash(body)

    def expected_fingerprints(self) -> dict[str, str]:
        return {"cluster": content_hash(self.cluster), "model": content_hash(self.model), "workload": content_hash(self.workload)}

    def save(self, path: Path | str) -> None:
        """Writes through a temporary file; byte-identical for equal plans."""
        path = Path(path)
        temporary = path.with_suffix(".tmp")
        body = {**encode(self), "content_hash": content_hash(self)}
        temporary.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Raises ValueError naming the file and the fault: not JSON, another schema, an unknown or missing key, a wrong content hash."""
        path = Path(path)
        try:
            body = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg})") from error
        if not isinstance(body, dict) or "schema_version" not in body:
            raise ValueError(f"{path}: not a plan (no schema_version)")
        if body["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"{path}: schema_version {body['schema_version']} is not {SCHEMA_VERSION}; search again with this version")
        claimed = body.pop("content_hash", None)
        try:
            plan = decode(cls, body)
        except DecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        if claimed != content_hash(plan):
            cause = "another version wrote it, whose defaults differ" if claimed == content_hash(body) else "the file was edited"
            raise ValueError(f"{path}: content_hash {claimed} does not match the content ({content_hash(plan)}); {cause}, search again")
        for name, value in plan.expected_fingerprints().items():
            if name in plan.fingerprints and plan.fingerprints[name] != value:
                raise ValueError(f"{path}: fingerprint of {name} is {plan.fingerprints[name]}, but the plan holds {value}")
        return plan


__all__ = ["SCHEMA_VERSION", "Batching", "Checkpoint", "Layout", "Plan", "Precision", "RecipeOption", "RegionOption", "RegionPlan", "Shard",
           "Sharding", "TablePlacement", "Wire", "canonical"]
