"""Sharded embedding tables: lookup, exchange, and the optimizer fused into backward on the rank that owns the row.

One rank of a sparse group without host-cached tables: ids -> `kernels.embedding` on the storage; the gradient of the output goes straight into the
fused update. Else, one rank exchanging nothing, per micro-batch and in this order (s = a phase's work, each `wait` is `exposed_communication`):

    forward    s: keys of every group sorted and made unique; rows counted per shard
               all-to-all of the counts, wait; all-to-all of row numbers (int64), wait
               s: one lookup per storage on the owner
               all-to-all of rows (wire format), wait
               s: rows spread over the batch: pooled, or one an event -> the model's inputs, which are leaves of its graph
    backward   s: gradients of the inputs summed per unique row
               all-to-all of row gradients (wire format), wait
               s: on the last micro-batch of a step: one fused update per storage over all micro-batches

With `input_overlap` the ids of the next micro-batch are on their way meanwhile (`distribute`, `send`): made unique behind this one's lookup, their
counts cross during its forward and the row numbers from there on; the next `forward` waits for those alone. On CUDA a stream of its own does it, so
that reading the counts waits for nothing else.

Gradients are those of the mean loss over the sparse group's samples. With several replicas of the group (plain 2D) every replica updates its
own copy from its own samples; every `sync_every` steps weights and optimizer state are averaged over the replicas, which for SGD at
`sync_every = 1` is the update with the global mean gradient. Adagrad then averages an accumulator of per-group squares, which grows faster than that
of the global mean gradient, up to R times with R replicas: `moment_scale` c = R divides it before the root (moment-scaled Adagrad, arXiv 2508.03854).
With fully sharded 2D a replica keeps its part of the copy only and gathers it around lookup and update (`runtime.replicas`).

With `ahead` (`Plan.tables_ahead`) collectives over the replicas run beside compute, and every number stays the same: the whole shards for the update
are gathered while backward runs (`gather_ahead`, which the model's blocks call), those for the next lookup as soon as the update's mean is there;
means are waited for where they are needed, those of weights by the next lookup, those of states behind the next forward.

A data-parallel table is whole on every rank: its rows are looked up where they are asked for; on the last micro-batch its gradient, dense and with
the number of times that a row occurred, is all-reduced over the sparse group, and every rank makes the same update of the rows that occurred
anywhere. A host-cached table goes the way of a table-wise one; its owner fetches the rows (`runtime.tables`). Its replicas are not averaged.

Column-wise shards keep a row-wise Adagrad state each, over their own columns, as torchrec does; table-wise and row-wise equal an unsharded table.

Shape legend: N ids, U unique keys, C tables of a group, B samples, T events.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from costmodel.model import TableGroup
from costmodel.plan import TablePlacement, Wire
from costmodel.wire import wires
from kernels.embedding import embedding_pooled, embedding_sequence
from runtime.batch import Batch
from runtime.mesh import Meshes, all_to_all, wait
from runtime.phases import PhaseTimer
from runtime.precision.wire import WireFormat
from runtime.replicas import Beside, ReplicaShard, means
from runtime.shards import PlacedShard, place
from runtime.tables import DTYPES, StoredTable, build_storages


@dataclasses.dataclass(slots=True, kw_only=True)
class Lookup:
    """What backward needs of one table group's forward. `leaf`: the model's input; `rows`: `(N,)` local, or positions into `unique`.

    `unique` `(U, dim)` is the leaf of the small graph unique -> output, `output` its end; both None on a group of one rank.
    """

    table: TableGroup
    leaf: Tensor
    rows: Tensor
    offsets: Tensor | None
    unique: Tensor | None = None
    output: Tensor | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Exchange:
    """Splits of one micro-batch, on the host: rows this rank asks of each wire shard, and rows each rank asks of this rank's shards. `own`: of its
    copies of data-parallel tables (shard, first unique position, row numbers)."""

    begins: list[int]
    counts: list[int]
    asked: list[list[int]]
    received_rows: Tensor
    own: list[tuple[PlacedShard, int, Tensor]]


@dataclasses.dataclass(slots=True, kw_only=True)
class Distribution:
    """Ids of one micro-batch on their way to the owners. keys: by table group (distinct keys `(U,)`, each id's place among them `(N,)`); `rows`: row
    numbers in wire order. `work`: the collective in flight, of the counts, then of the row numbers."""

    keys: dict[str, tuple[Tensor, Tensor]]
    begins: list[int]
    counts: list[int]
    rows: Tensor
    own: list[tuple[PlacedShard, int, Tensor]]
    sent: bool = False
    asked: Tensor | None = None
    asked_of: list[list[int]] = dataclasses.field(default_factory=list)
    received: Tensor | None = None
    work: dist.Work | None = None

    def tensors(self) -> list[Tensor]:
        found = [t for pair in self.keys.values() for t in pair] + [rows for *_, rows in self.own]
        return found + [t for t in (self.rows, self.asked, self.received) if t is not None]


class ShardedEmbeddings:
    """This rank's part of all tables. `forward` hands leaves to the model; after the model's backward, `backward` does the rest.

    placements: one per table. ahead: replicas' collectives run beside compute. moment_scale: see `StoredTable.update`. wire, wire_gradients: number
    formats of rows and of their gradients between ranks (`costmodel.wire`). `sent_bytes`: of both, what this rank has sent, its own part included.
    """

    def __init__(self, tables: tuple[TableGroup, ...], placements: tuple[TablePlacement, ...], meshes: Meshes, *, seed: int,
                 learning_rate: float, sync_every: int = 1, timer: PhaseTimer | None = None,
                 wire: Wire | None = None, wire_gradients: Wire | None = None, ahead: bool = False, moment_scale: float = 1.0) -> None:
        self.tables, self.meshes, self.timer = tables, meshes, timer
        self.learning_rate, self.sync_every = learning_rate, sync_every
        self.group_size = meshes.layout.sparse_group
        self.stream = torch.cuda.Stream() if meshes.device.type == "cuda" else None
        self.layout = place(tables, placements, self.group_size)
        self.storages = build_storages(self.layout, tables, meshes.sparse_rank, device=meshes.device, seed=seed)
        if meshes.sparse_replicas is not None and meshes.layout.fully_sharded_2d:
            if sync_every != 1:
                raise ValueError(f"fully_sharded_2d averages at every step; sync_every {sync_every} is not executable with it")
            for stored in self.storages:
                stored.shard_over(meshes.sparse_replicas, index=meshes.replica, size=meshes.layout.sparse_replicas)
        if meshes.layout.sparse_replicas > 1 and any(s.host for s in self.layout.storages):
            names = sorted({s.group for s in self.layout.storages if s.host})
            raise ValueError(f"table group {names[0]}: host_cached tables are not averaged over {meshes.layout.sparse_replicas} sparse replicas; "
                             "use one replica or another sharding")
        self._sends = self.group_size > 1 and bool(self.layout.wire)
        self._direct = self.group_size == 1 and not any(s.host for s in self.layout.storages)
        self._exchanged = [s for s in self.storages if not s.spec.replicated]
        self._by_index = {s.spec.index: s for s in self.storages}
        self._replicated_gradients = {s.spec.index: torch.zeros((s.spec.num_rows, s.spec.width + 1), device=meshes.device)
                                      for s in self.storages if s.spec.replicated}
        self.wire, self.wire_gradients = (WireFormat(name) for name in wires(tables, wire, wire_gradients))
        self.sent_bytes = {"embeddings": 0, "gradients": 0}
        self.num_steps, self.moment_scale = 0, moment_scale
        self.ahead = ahead and meshes.sparse_replicas is not None
        self._weights_beside, self._states_beside = (Beside(meshes.device), Beside(meshes.device)) if self.ahead else (None, None)
        self._last_microbatch = True
        self._pending: dict[int, list[tuple[Tensor, Tensor, Tensor | None]]] = {s.spec.index: [] for s in self.storages}
        self._lookups: list[Lookup] = []
        self._exchange: Exchange | None = None
        mine = [s for s in self.layout.replicated if s.rank == meshes.sparse_rank]
        self._places = {t.name: (*self.layout.of_group(t.name), *(s for s in mine if s.group == t.name)) for t in tables}
        self._boundaries = {name: torch.tensor([[s.key_begin, s.key_end] for s in shards], device=meshes.device)
                            for name, shards in self._places.items()}
        self._wire_per_rank = [sum(s.rank == r for s in self.layout.wire) for r in range(self.group_size)]

    # --- forward ---

    def forward(self, batch: Batch, distribution: Distribution | None = None) -> dict[str, Tensor]:
        """Table group name -> `(C, B, dim)` for pooled groups, `(C, T, dim)` for sequence groups; leaves that require gradients. `distribution`: what
        `distribute` made of the same batch."""
        self._join(batch, distribution)
        if self._weights_beside is not None:
            self._weights_beside.join(self.timer)
        weights = [s.weight_shard for s in self.storages if s.weight_shard is not None]
        for shard in weights:
            shard.gather(self.timer)
        if self._direct:
            self._lookups = [self._local_lookup(t, batch) for t in self.tables]
        else:
            self._lookups = self._exchanged_lookup(batch, distribution or self._distribute(batch))
        for shard in weights:
            shard.release()
        return {lookup.table.name: lookup.leaf for lookup in self._lookups}

    def distribute(self, batch: Batch) -> Distribution | None:
        """Begin to exchange the ids of a later micro-batch; `send` it once, then give it to `forward`. None where nothing is exchanged."""
        if self._direct:
            return None
        with self._beside():
            return self._distribute(batch)

    def send(self, distribution: Distribution | None) -> None:
        """Behind the counts, the row numbers."""
        if distribution is not None:
            with self._beside():
                self._send(distribution)

    def _join(self, batch: Batch, distribution: Distribution | None) -> None:
        """What was made on the stream of ids is there for the current one, and kept for as long as that needs it."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream()
        current.wait_stream(self.stream)
        for tensor in (*batch.tensors(), *(distribution.tensors() if distribution is not None else ())):
            tensor.record_stream(current)

    def _beside(self) -> contextlib.AbstractContextManager:
        """The stream on which ids are distributed; on the CPU there is none."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _local_lookup(self, table: TableGroup, batch: Batch) -> Lookup:
        (stored,) = (s for s in self.storages if s.table.name == table.name)
        rows, offsets = table_keys(table, batch), batch.offsets.get(table.name)
        with torch.no_grad():
            output = expand(stored.weight, rows, offsets, table)
        return Lookup(table=table, leaf=_leaf(output, table), rows=rows, offsets=offsets)

    def _distribute(self, batch: Batch) -> Distribution:
        begins, counts, sent, own, keys = {}, {}, {}, [], {}
        for table in self.tables:
            keys[table.name] = torch.unique(table_keys(table, batch), return_inverse=True)
            unique = keys[table.name][0]
            edges = torch.searchsorted(unique, self._boundaries[table.name]).tolist()
            for shard, (first, last) in zip(self._places[table.name], edges):
                begins[shard], counts[shard] = first, last - first
                sent[shard] = unique[first:last] - (shard.key_begin - shard.base)
                if shard.storage in self._replicated_gradients:
                    own.append((shard, first, sent[shard]))
        wire, device = self.layout.wire, self.meshes.device
        rows = torch.cat([sent[s] for s in wire]) if wire else torch.empty(0, dtype=torch.int64, device=device)
        made = Distribution(keys=keys, begins=[begins[s] for s in wire], counts=[counts[s] for s in wire], rows=rows, own=own)
        if self._sends:
            mine = self._wire_per_rank[self.meshes.sparse_rank]
            made.asked = torch.empty(self.group_size * mine, dtype=torch.int64, device=device)
            known = torch.tensor(made.counts, dtype=torch.int64, device=device)
            made.work = all_to_all(made.asked, known, [mine] * self.group_size, self._wire_per_rank, self.meshes.sparse_group)
        return made

    def _send(self, made: Distribution) -> None:
        """Every rank has learned how many rows of its shards each rank wants; now which."""
        made.sent = True
        if not self._sends:
            made.asked_of, made.received = [made.counts] * self.group_size, made.rows
            return
        wait(made.work, self.timer)
        made.asked_of = made.asked.view(self.group_size, self._wire_per_rank[self.meshes.sparse_rank]).tolist()
        made.received = torch.empty(sum(map(sum, made.asked_of)), dtype=torch.int64, device=self.meshes.device)
        made.work = all_to_all(made.received, made.rows, [sum(a) for a in made.asked_of], self._sums_by_rank(made.counts), self.meshes.sparse_group)

    def _exchanged_lookup(self, batch: Batch, made: Distribution) -> list[Lookup]:
        if not made.sent:
            self._send(made)
        wait(made.work, self.timer)
        self._exchange = Exchange(begins=made.begins, counts=made.counts, asked=made.asked_of, received_rows=made.received, own=made.own)
        lookups = []
        for table in self.tables:
            unique, inverse = made.keys[table.name]
            values = torch.empty((unique.numel(), table.dim), dtype=DTYPES[table.dtype], device=self.meshes.device)
            lookups.append(Lookup(table=table, leaf=values, rows=inverse, offsets=batch.offsets.get(table.name), unique=values))
        self._exchange_values({lookup.table.name: lookup.unique for lookup in lookups})
        for lookup in lookups:
            lookup.unique.requires_grad_()
            lookup.output = expand(lookup.unique, lookup.rows, lookup.offsets, lookup.table)
            lookup.leaf = _leaf(lookup.output.detach(), lookup.table)
        return lookups

    def _swap(self, source: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """All-to-all of elements in the wire's format: `sent[r]` of `source` go to rank r, `received[r]` come from it."""
        if not self._sends:
            return source
        found = torch.empty(sum(received), dtype=source.dtype, device=self.meshes.device)
        wait(all_to_all(found, source, received, sent, self.meshes.sparse_group), self.timer)
        return found

    def _exchange_values(self, unique: dict[str, Tensor]) -> None:
        """Owners look rows up and send them; `unique` is filled in place."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.group_size)]
        for stored, pieces in zip(self._exchanged, self._rows_by_storage()):
            values, units = self.wire.pack(stored.lookup(torch.cat(pieces))), self.wire.units(stored.spec.width)
            for source, piece in enumerate(values.split([p.numel() * units for p in pieces])):
                outgoing[source].append(piece)
        source = torch.cat([piece for pieces in outgoing for piece in pieces] or [self._empty(self.wire)])
        self.sent_bytes["embeddings"] += source.numel() * source.element_size()
        for shard, first, piece in self._pieces(self._swap(source, self._asking_units(self.wire), self._asked_units(self.wire))):
            unique[shard.group][first:first + piece.shape[0], shard.col_begin:shard.col_end] = piece
        for shard, first, rows in self._exchange.own:
            unique[shard.group][first:first + len(rows)] = self._by_index[shard.storage].lookup(rows)

    # --- backward ---

    def before_backward(self, *, last_microbatch: bool = True) -> None:
        """Call it between a micro-batch's forward and its backward: what the step before left running over the replicas ends here."""
        self._last_microbatch = last_microbatch
        if self._states_beside is not None:
            self._states_beside.join(self.timer)
            for shard in self._state_shards():
                shard.release()

    def gather_ahead(self) -> None:
        """Fully sharded 2D: begin to gather what comes behind the backward that runs: whole shards for the update, weights for another micro-batch.
        Nothing where that is under way or not to be done early. Collective over the replicas."""
        if self.ahead:
            for stored in self.storages:
                for shard in stored.replica_shards if self._last_microbatch else stored.replica_shards[:1]:
                    shard.begin()

    def settle(self) -> None:
        """Nothing runs over the replicas behind this, and nothing is gathered. Collective over the replicas."""
        if self._weights_beside is not None and self._states_beside is not None:
            self._weights_beside.join(self.timer)
            self._states_beside.join(self.timer)
            for stored in self.storages:
                for shard in stored.replica_shards:
                    shard.drop(self.timer)

    def backward(self, *, last_microbatch: bool = True) -> None:
        """From the gradients of the leaves to updated tables. Without `last_microbatch` gradients are kept for the step's update."""
        if self._direct:
            for lookup in self._lookups:
                (stored,) = (s for s in self.storages if s.table.name == lookup.table.name)
                self._pending[stored.spec.index].append((_leaf_grad(lookup), lookup.rows, lookup.offsets))
        elif self._lookups:
            self._exchange_gradients()
        self.discard()
        if last_microbatch:
            self._update()

    def discard(self) -> None:
        """Forget a forward that no backward follows (evaluation)."""
        self._lookups, self._exchange = [], None

    def _exchange_gradients(self) -> None:
        exchange, grads = self._exchange, {}
        assert exchange is not None
        torch.autograd.backward([k.output for k in self._lookups], [_leaf_grad(k) for k in self._lookups])
        for lookup in self._lookups:
            grads[lookup.table.name] = lookup.unique.grad.div_(self.group_size)
        for shard, first, rows in exchange.own:
            total, grad = self._replicated_gradients[shard.storage], grads[shard.group][first:first + len(rows)]
            total.index_add_(0, rows, torch.cat([grad.float(), grad.new_ones((len(rows), 1), dtype=torch.float32)], dim=1))
        wire = self.wire_gradients
        pieces = [wire.pack(grads[s.group][first:first + count, s.col_begin:s.col_end])
                  for s, first, count in zip(self.layout.wire, exchange.begins, exchange.counts)]
        source = torch.cat(pieces or [self._empty(wire)])
        self.sent_bytes["gradients"] += source.numel() * source.element_size()
        received = self._swap(source, self._asked_units(wire), self._asking_units(wire))
        by_source, position = [], 0
        for counts in self._counts_by_storage():
            row = []
            for stored, count in zip(self._exchanged, counts):
                size = count * wire.units(stored.spec.width)
                row.append(wire.unpack(received[position:position + size], stored.spec.width))
                position += size
            by_source.append(row)
        for i, (stored, rows) in enumerate(zip(self._exchanged, self._rows_by_storage())):
            grad = torch.cat([row[i] for row in by_source]).to(stored.weight.dtype)
            self._pending[stored.spec.index].append((grad, torch.cat(rows), None))

    def _update(self) -> None:
        for stored in self.storages:
            for shard in stored.replica_shards:
                shard.gather(self.timer)
            pending = self._reduced(stored) if stored.spec.replicated else self._pending[stored.spec.index]
            self._pending[stored.spec.index] = []
            if pending:
                grad, rows, offsets = _join(pending)
                mode = "mean" if offsets is not None and stored.table.pooling == "mean" else "sum"
                stored.update(grad, rows, offsets, lr=self.learning_rate, mode=mode, moment_scale=self.moment_scale)
            if stored.weight_shard is not None and self._weights_beside is not None:
                # the next lookup needs it: gathered again at once
                self._weights_beside.run(stored.weight_shard.averages(), stored.weight_shard.begin)
                continue
            for shard in stored.replica_shards:
                shard.average(self.timer)
                shard.release()
        self.num_steps += 1
        if self.meshes.layout.fully_sharded_2d and self._states_beside is not None and self._weights_beside is not None:
            self._weights_beside.advance(self.timer)
            for shard in self._state_shards():
                self._states_beside.run(shard.averages())
        elif self.meshes.sparse_replicas is not None and not self.meshes.layout.fully_sharded_2d and self.num_steps % self.sync_every == 0:
            self._average_replicas()

    @property
    def replicas_differ(self) -> bool:
        """Whether steps were made since the replicas' last average."""
        layout = self.meshes.layout
        return layout.sparse_replicas > 1 and not layout.fully_sharded_2d and self.num_steps % self.sync_every != 0

    def _state_shards(self) -> list[ReplicaShard]:
        return [shard for stored in self.storages for shard in stored.state_shards]

    def _reduced(self, stored: StoredTable) -> list[tuple[Tensor, Tensor, None]]:
        """The step's gradient of a data-parallel storage over the sparse group: rows that occurred on any rank. Collective."""
        total = self._replicated_gradients[stored.spec.index]
        wait(dist.all_reduce(total, group=self.meshes.sparse_group, async_op=True), self.timer)
        rows = total[:, -1].nonzero().flatten()
        grad = total[rows, :-1].to(stored.weight.dtype)
        total.zero_()
        return [(grad, rows, None)] if len(rows) else []

    @contextlib.contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        """Weights and states whole inside; with `write`, what is written there (the same on every replica) stays. Collective over the replicas."""
        self.settle()
        shards = [shard for stored in self.storages for shard in stored.replica_shards]
        for shard in shards:
            shard.gather(None)
        yield
        for shard in shards:
            if write:
                shard.keep()
            shard.release()

    def _average_replicas(self) -> None:
        """Weights and optimizer state become the mean over the replicas of this rank's shards."""
        group, replicas = self.meshes.sparse_replicas, self.meshes.layout.sparse_replicas
        assert group is not None
        weights, states = [s.weight for s in self.storages], [t for s in self.storages for t in s.state_tensors()]
        for beside, tensors in ((self._weights_beside, weights), (self._states_beside, states)):
            for tensor in tensors:
                if beside is not None:
                    beside.run(means(tensor, group, replicas))
                    continue
                for work, then in means(tensor, group, replicas):
                    wait(work, self.timer)
                    then()

    # --- host-side splits ---

    def _sums_by_rank(self, per_shard: list[int]) -> list[int]:
        sums, position = [], 0
        for n in self._wire_per_rank:
            sums.append(sum(per_shard[position:position + n]))
            position += n
        return sums

    def _asking_units(self, wire: WireFormat) -> list[int]:
        """Elements of the wire's dtype that this rank gets from each rank."""
        return self._sums_by_rank([count * wire.units(s.width) for s, count in zip(self.layout.wire, self._exchange.counts)])

    def _asked_units(self, wire: WireFormat) -> list[int]:
        """Elements of the wire's dtype that each rank gets from this rank."""
        mine = [s for s in self.layout.wire if s.rank == self.meshes.sparse_rank]
        return [sum(count * wire.units(s.width) for s, count in zip(mine, counts)) for counts in self._exchange.asked]

    def _counts_by_storage(self) -> list[list[int]]:
        """`[source][storage]`: rows that `source` asked of each of this rank's storages."""
        mine = [s.storage for s in self.layout.wire if s.rank == self.meshes.sparse_rank]
        return [[sum(c for c, index in zip(counts, mine) if index == s.spec.index) for s in self._exchanged] for counts in self._exchange.asked]

    def _rows_by_storage(self) -> list[list[Tensor]]:
        """`[storage][source]`: the received row numbers."""
        flat = [count for counts in self._counts_by_storage() for count in counts]
        pieces = self._exchange.received_rows.split(flat) if flat else ()
        n = len(self._exchanged)
        return [[pieces[source * n + i] for source in range(self.group_size)] for i in range(n)]

    def _pieces(self, received: Tensor):
        """(shard, first unique position, `(count, width)`) of a buffer in wire order."""
        position = 0
        for shard, first, count in zip(self.layout.wire, self._exchange.begins, self._exchange.counts):
            size = count * self.wire.units(shard.width)
            yield shard, first, self.wire.unpack(received[position:position + size], shard.width)
            position += size

    def _empty(self, wire: WireFormat) -> Tensor:
        return torch.empty(0, dtype=wire.dtype, device=self.meshes.device)


def table_keys(table: TableGroup, batch: Batch) -> Tensor:
    """Keys of a table group's ids, `(N,)`: `c * rows + id`."""
    ids = batch.ids[table.name]
    if table.count == 1:
        return ids
    first = _first_keys(table.count, table.rows, ids.device)
    if table.pooling == "sequence":
        return (ids.view(table.count, -1) + first.unsqueeze(1)).flatten()
    ends = batch.offsets[table.name][::batch.num_samples] if batch.num_samples else batch.offsets[table.name].new_zeros(table.count + 1)
    return ids + torch.repeat_interleave(first, ends.diff(), output_size=ids.numel())


@functools.cache
def _first_keys(count: int, rows: int, device: torch.device) -> Tensor:
    """The key of each table's row 0, `(count,)`."""
    return torch.arange(count, device=device) * rows


def expand(rows: Tensor, index: Tensor, offsets: Tensor | None, table: TableGroup) -> Tensor:
    """Rows of a weight at `index` `(N,)`: `(N, dim)` for a sequence table, pooled over `offsets` to `(C B, dim)` otherwise."""
    if table.pooling == "sequence":
        return embedding_sequence(rows, index)
    return embedding_pooled(rows, index, offsets, mode=table.pooling)


def _leaf(output: Tensor, table: TableGroup) -> Tensor:
    return output.view(table.count, -1, table.dim).requires_grad_()


def _leaf_grad(lookup: Lookup) -> Tensor:
    grad = lookup.leaf.grad
    if grad is None:
        raise RuntimeError(f"table group {lookup.table.name}: the model's backward left no gradient")
    return grad.view(-1, lookup.table.dim)


def _join(pending: list[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The (gradient, rows, offsets) of several micro-batches as those of one."""
    if len(pending) == 1:
        return pending[0]
    grad, rows = torch.cat([g for g, _, _ in pending]), torch.cat([r for _, r, _ in pending])
    if pending[0][2] is None:
        return grad, rows, None
    ends = [torch.zeros(1, dtype=torch.int64, device=rows.device)]
    for _, _, offsets in pending:
        ends.append(offsets[1:] - offsets[0] + ends[-1][-1])
    return grad, rows, torch.cat(ends)
