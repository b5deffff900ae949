"""A sparse group whose owners pool: what a system does that sends bags instead of rows (HugeCTR, torchrec); the runtime does not.

Every id goes to its owner, who sends one row a bag back, and gets that row's gradient; sizes are known beforehand, so the host reads none. Of the
update

    bytes = 8 ids + w bags dim + (2 e + state) distinct dim        w bytes of a gradient on the wire, e of the tables

gradients are read once a bag: there are few bags, and what reads them again finds them in the cache. Where gradients of distinct rows are written
down first (`System.table_update`), they cost 2 w distinct dim more. It is as fast as distinct rows of that width are looked up. Ids are sorted a step
ahead, beside dense compute, and cost nothing here.

With `System.by_host` what a host has of a table lies on all of its GPUs in rows. What one of them sums up of a bag goes to the GPU of the host that
has the place in it that the bag's GPU has in its own, and sums of the whole host cross to others: bytes between hosts are those inside over the GPUs
of a host. Gradients go the other way.

With `System.overlap` `embeddings` ids cross a step ahead, pooled rows beside the bottom MLP, and their gradients beside its backward:

    lookup -> rows cross | bottom MLP -> interaction -> ... -> interaction backward -> gradients cross | bottom MLP backward -> update

and where every rank holds all dense parameters their gradients are reduced as one message behind those of the rows, beside the update; those of
tables on every rank are part of it.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from costmodel.comms import GroupShape
from costmodel.ops import BACKWARD, FORWARD, STEP, Op, dtype_bytes, op
from costmodel.pricer import Cost
from costmodel.wire import wires

if TYPE_CHECKING:
    from costmodel.plan import Plan
    from costmodel.pricer import Pricer
    from costmodel.sparse import GroupWork, TableLoads

# The region that needs nothing of the tables.
BOTTOM = "bottom"


class PooledTasks:
    """Mixed into `costmodel.lower`'s builder, whose members it uses."""

    plan: Plan
    pricer: Pricer
    loads: TableLoads
    work: Sequence[GroupWork]
    last: int | None
    arrived: int | None
    returned: int | None

    @property
    def beside_bottom(self) -> bool:
        """Whether pooled rows cross while the bottom MLP is computed."""
        return self.plan.system is not None and self.plan.system.overlap == "embeddings" and self.plan.exchange == "pooled"

    @property
    def most_rows(self) -> int:
        """The rank that has most to do: rows are read by the lookup, distinct ones read and written by the update, and their state as well."""
        found = sum(held[0] + 4.0 * held[3] for held in self.loads.held.values())
        return int(found.argmax()) if len(self.loads.served) else 0

    @property
    def reduces_together(self) -> bool:
        """Whether all dense gradients are one message behind backward."""
        return self.beside_bottom and self.plan.layout.fsdp == 1 and self.plan.layout.ddp > 1

    def reduce_together(self) -> int | None:
        elements = sum(unit.region.block.num_parameters for unit in self.units) + self.loads.replicated
        return self.collective("all-reduce gradients", "all_reduce", dtype_bytes(self.plan.reduce_dtype) * elements, self.groups["ddp"],
                               deps=(self.last, self.returned))

    def before_tables(self, region: str) -> bool:
        return self.beside_bottom and region == BOTTOM

    def pooled_forward(self, group: GroupShape) -> None:
        """Lookup by the owners, and what crosses."""
        ids = 8.0 * sum(w.ids for w in self.work if w.asked)
        if not self.beside_bottom:
            self.collective("ids", "all_to_all", ids, group, deps=(), waits=True)
        served = [op("embedding_lookup", variant="sequence" if w.table.pooling == "sequence" else "pooled", ids=w.served_rows,
                     unique=w.distinct_served, dim=w.served_width, rows=w.storage_rows, tables=1, dtype=w.table.dtype)
                  for w in self.work if w.served_rows]
        self.compute("lookup", self.pricer.ops(served, FORWARD), "sparse")
        self.arrived = self.exchanged("embeddings", FORWARD, waits=not self.beside_bottom)
        if self.beside_bottom:  # those of the next step
            self.collective("ids", "all_to_all", ids, group, deps=(self.last,), apart=True)

    def return_gradients(self) -> None:
        """Gradients of pooled rows cross as soon as there are any."""
        self.returned = self.exchanged("gradients", BACKWARD, waits=False)

    def exchanged(self, name: str, phase: str, *, waits: bool) -> int | None:
        """Pooled rows to whose bags they are, or their gradients back: the end of it."""
        layout, per_host = self.plan.layout, self.plan.cluster.devices_per_host
        num_bytes, after = self.wire_bytes[phase == BACKWARD], self.last
        if self.plan.system is None or not self.plan.system.by_host or layout.sparse_group <= per_host:
            return self.collective(name, "all_to_all", num_bytes, self.groups["sparse_group"], deps=(after,), waits=waits, max_over_mean=self.skewed)
        inside, outside = GroupShape(size=per_host), GroupShape(size=layout.sparse_group // per_host, stride=per_host)
        steps = [(f"{name} in hosts", num_bytes, inside), (name, num_bytes / per_host, outside)]
        for step, part, members in steps if phase == FORWARD else steps[::-1]:
            after = self.collective(step, "all_to_all", part, members, deps=(after,), waits=waits, max_over_mean=self.skewed)
        return after

    def pooled_update(self) -> Cost:
        """See the module."""
        separate = self.plan.system is not None and self.plan.system.table_update == "separate"
        wire = dtype_bytes(wires(self.plan.model.tables, self.plan.wire, self.plan.wire_gradients)[1])
        bags = float(self.plan.local_batch * self.plan.layout.sparse_group)
        found: list[Op] = []
        for w in self.work:
            if not w.served_rows:
                continue
            ids, each = w.served_rows * self.plan.accumulation, 8.0 + dtype_bytes(w.table.dtype) * w.served_width
            whole = op("embedding_update", variant=w.table.optimizer, ids=ids, unique=w.distinct_served, dim=w.served_width, rows=w.storage_rows,
                       tables=1, dtype=w.table.dtype).bytes(STEP)
            num_bytes = whole - 4.0 * ids * w.served_width + wire * min(ids, bags * w.table.count * self.plan.accumulation) * w.served_width
            num_bytes += 2.0 * wire * w.distinct_served * w.served_width if separate else 0.0
            rows = num_bytes / each  # each of them another one
            found.append(op("embedding_lookup", variant="pooled", ids=rows, unique=rows, dim=w.served_width, rows=max(w.storage_rows, rows), tables=1,
                            dtype=w.table.dtype))
        return self.pricer.ops(found, FORWARD)
