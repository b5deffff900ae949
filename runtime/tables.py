"""The weights and optimizer state that one rank holds: initial values, lookups and fused updates of its storages.

Initial values depend on (seed, table, row) only, never on the sharding: a table is drawn in runs of `CHUNK_ROWS` rows, each from its own
generator, and a shard keeps its part.

A host-cached table and its state are in (pinned) host memory. A lookup fetches the distinct rows that are asked for; an update fetches them with
their state, updates them on the device and writes them back. On the CPU the same copies are made.
"""
from __future__ import annotations

import dataclasses
import hashlib
import math

import torch
import torch.distributed as dist
from torch import Tensor

from costmodel.model import TableGroup
from kernels.embedding import OptimizerState, embedding_backward_update_, embedding_sequence, new_optimizer_state
from runtime.replicas import ReplicaShard
from runtime.shards import PlacedShard, ShardLayout, Storage

CHUNK_ROWS = 16384
INITIAL_STD = 0.02
EPS = 1e-8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(slots=True, kw_only=True)
class StoredTable:
    """A storage with its data. `steps` counts updates (Adam's bias correction, the seed of stochastic rounding).

    Fully sharded over replicas (`shard_over`), `weight` and `state` have bytes between `gather` and `release` only. `device`: where rows are looked
    up and updated; `cached_bytes`: the most that was fetched there at once from host memory.
    """

    spec: Storage
    table: TableGroup
    shards: tuple[PlacedShard, ...]
    weight: Tensor
    state: OptimizerState
    seed: int
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    steps: int = 0
    cached_bytes: int = 0
    weight_shard: ReplicaShard | None = None
    state_shards: tuple[ReplicaShard, ...] = ()

    def shard_over(self, group: dist.ProcessGroup, *, index: int, size: int) -> None:
        """From now on keep 1 / size of weight and state (`runtime.replicas`)."""
        options = {"group": group, "index": index, "size": size}
        self.weight_shard = ReplicaShard(self.weight, **options)
        self.state_shards = tuple(ReplicaShard(t, **options) for t in self.state_tensors())
        self.weight = self.weight_shard.whole
        if self.state is not None:
            whole = tuple(s.whole for s in self.state_shards)
            self.state = whole if isinstance(self.state, tuple) else whole[0]

    @property
    def replica_shards(self) -> tuple[ReplicaShard, ...]:
        return () if self.weight_shard is None else (self.weight_shard, *self.state_shards)

    def lookup(self, rows: Tensor) -> Tensor:
        """Rows of the weight at `rows` `(N,)`: `(N, width)` on `device`."""
        if not self.spec.host:
            return embedding_sequence(self.weight, rows)
        distinct, inverse = torch.unique(rows, return_inverse=True)
        (weight,) = self._fetch(distinct.cpu(), self.weight)
        return embedding_sequence(weight, inverse)

    def update(self, grad: Tensor, rows: Tensor, offsets: Tensor | None, *, lr: float, mode: str = "sum", moment_scale: float = 1.0) -> None:
        """Fused optimizer step on `rows`, in place; formulas in `kernels.embedding`. bf16 weights are rounded stochastically. moment_scale c:
        Adagrad, row-wise or not, steps by lr * g / (sqrt(s / c) + eps)."""
        self.steps += 1
        rounding = (self.seed * 1_000_003 + self.steps) if self.weight.dtype == torch.bfloat16 else None
        # lr g / (sqrt(s / c) + eps) = (lr sqrt(c)) g / (sqrt(s) + eps sqrt(c))
        root = math.sqrt(moment_scale) if self.table.optimizer in ("rowwise_adagrad", "adagrad") else 1.0
        options = {"optimizer": self.table.optimizer, "lr": lr * root, "eps": EPS * root, "step": self.steps, "mode": mode,
                   "stochastic_rounding_seed": rounding}
        if not self.spec.host:
            embedding_backward_update_(self.weight, self.state, grad, rows, offsets, **options)
            return
        distinct, inverse = torch.unique(rows, return_inverse=True)
        at = distinct.cpu()
        weight, *states = self._fetch(at, self.weight, *self.state_tensors())
        state = tuple(states) if isinstance(self.state, tuple) else states[0] if states else None
        embedding_backward_update_(weight, state, grad, inverse, offsets, **options)
        for whole, part in zip((self.weight, *self.state_tensors()), (weight, *states)):
            whole.index_copy_(0, at, part.to(whole.device))

    def _fetch(self, at: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Rows `at` (on the host) of tensors in host memory, on `device`."""
        found = []
        for tensor in tensors:
            rows = torch.empty((len(at), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=self.device.type == "cuda")
            found.append(torch.index_select(tensor, 0, at, out=rows).to(self.device, non_blocking=True))
        self.cached_bytes = max(self.cached_bytes, sum(t.numel() * t.element_size() for t in found))
        return found

    def state_tensors(self) -> tuple[Tensor, ...]:
        if self.state is None:
            return ()
        return self.state if isinstance(self.state, tuple) else (self.state,)

    @property
    def weight_bytes(self) -> int:
        """Bytes held on the device now; of a host-cached table the most that was fetched, with its state."""
        if self.spec.host:
            return self.cached_bytes
        return self.weight_shard.num_bytes if self.weight_shard is not None else self.weight.numel() * self.weight.element_size()

    @property
    def state_bytes(self) -> int:
        """Bytes held on the device now."""
        if self.spec.host:
            return 0
        if self.weight_shard is not None:
            return sum(s.num_bytes for s in self.state_shards)
        return sum(t.numel() * t.element_size() for t in self.state_tensors())

    @property
    def host_bytes(self) -> int:
        """Bytes of weight and state in host memory."""
        return sum(t.numel() * t.element_size() for t in (self.weight, *self.state_tensors())) if self.spec.host else 0


def build_storages(layout: ShardLayout, tables: tuple[TableGroup, ...], rank: int, *, device: torch.device, seed: int) -> list[StoredTable]:
    """The storages of the rank at place `rank` of its sparse group, initialised."""
    by_name = {t.name: t for t in tables}
    stored = []
    for spec in layout.storages:
        if spec.rank != rank:
            continue
        table = by_name[spec.group]
        shards = tuple(s for s in (*layout.wire, *layout.replicated) if s.storage == spec.index)
        weight = torch.empty((spec.num_rows, spec.width), dtype=DTYPES[table.dtype], device="cpu" if spec.host else device)
        for shard in shards:
            fill_shard(weight[shard.base:shard.base + shard.num_rows], shard, table, seed=seed)
        state = new_optimizer_state(weight, table.optimizer)
        if spec.host and device.type == "cuda":
            weight = weight.pin_memory()
            state = tuple(t.pin_memory() for t in state) if isinstance(state, tuple) else state.pin_memory() if state is not None else None
        stored.append(StoredTable(spec=spec, table=table, shards=shards, weight=weight, state=state, seed=seed, device=device))
    return stored


def fill_shard(out: Tensor, shard: PlacedShard, table: TableGroup, *, seed: int) -> None:
    """Initial values of a shard, N(0, INITIAL_STD^2), in place."""
    generator = torch.Generator(device=out.device)
    end = shard.row_begin + shard.num_rows
    for chunk in range(shard.row_begin // CHUNK_ROWS, -(-end // CHUNK_ROWS)):
        first = chunk * CHUNK_ROWS
        rows = min(CHUNK_ROWS, table.rows - first)
        digest = hashlib.sha256(f"{seed}/{shard.table}/{chunk}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty((rows, table.dim), device=out.device).normal_(0.0, INITIAL_STD, generator=generator)
        a, b = max(first, shard.row_begin), min(first + rows, end)
        out[a - shard.row_begin:b - shard.row_begin] = values[a - first:b - first, shard.col_begin:shard.col_end].to(out.dtype)
