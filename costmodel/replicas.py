"""Tasks of collectives over the replicas of a sparse group (runtime/replicas.py), a part of the lowering.

    plain 2D            all-reduce of weights and state every `sync_every` steps
    fully sharded 2D    all-gather of the whole weights before each lookup, of weights and state before the update, reduce-scatter of both behind it

One after the other, the step waiting for each. With `Plan.tables_ahead` beside compute, at the same sizes:

    plain 2D            weights behind the update, beside AdamW, up to the end of the step (where the next one looks up); state beside the next
                        forward
    fully sharded 2D    the gather for the update begins when backward has so many blocks to go (of an earlier micro-batch: that of weights, for the
                        next lookup); behind the update weights are scattered, beside AdamW up to the end of the step, and gathered again at once,
                        which is at the beginning of the next step; state beside the next forward

A step of a run is shown: what the one before left running is at its beginning, so that the host, which is ahead in a run, launches meanwhile.
16-bit weights travel as fp32 where they are averaged.
"""
from __future__ import annotations

from collections.abc import Callable

from costmodel.comms import GroupShape
from costmodel.model import DTYPE_BYTES
from costmodel.plan import Plan
from costmodel.pricer import NO_COST
from costmodel.sparse import TableLoads


class ReplicaTasks:
    """Mixed into `costmodel.lower`'s builder, which has `collective` and `compute`."""

    plan: Plan
    loads: TableLoads
    groups: dict[str, GroupShape]
    gpu: bool
    last: int | None
    collective: Callable[..., int | None]
    compute: Callable[..., int]
    states: int | None = None
    gathered: int | None = None
    averaging: int | None = None

    @property
    def ahead(self) -> bool:
        return self.plan.tables_ahead > 0 and self.plan.layout.sparse_replicas > 1

    @property
    def fully_sharded(self) -> bool:
        return self.plan.layout.fully_sharded_2d and self.plan.layout.sparse_replicas > 1

    def over_replicas(self, name: str, kind: str, num_bytes: float, *, deps: tuple[int | None, ...] = (), apart: bool = False) -> int | None:
        share = 1.0 if self.fully_sharded else 1.0 / self.plan.layout.sync_every
        return self.collective(name, kind, num_bytes, self.groups["sparse_replicas"], deps=deps, waits=not apart, apart=apart, share=share)

    @property
    def averaged(self) -> tuple[float, float]:
        """Bytes on their way to a mean: of weights, with state where they are not on their way apart, and of state. The step waits for the rank that
        holds most, which need not be the one that serves most."""
        weights = self.loads.weights + sum(self.loads.held[t.name][2] * t.dim * 2.0 for t in self.plan.model.tables if DTYPE_BYTES[t.dtype] < 4)
        if not self.ahead:
            return float((weights + self.loads.state).max()), 0.0
        return float(weights.max()), float(self.loads.state.max())

    def left_running(self) -> None:
        """At the beginning of a step: the gather for its lookup, and means of state, which the one before left running."""
        if self.ahead and self.fully_sharded:
            self.gathered = self.over_replicas("tables gather next", "all_gather", float(self.loads.weights.max()), apart=True)
        if self.ahead and self.averaged[1]:
            name, kind = ("tables scatter state", "reduce_scatter") if self.fully_sharded else ("tables average state", "all_reduce")
            self.states = self.over_replicas(name, kind, self.averaged[1], apart=True)

    def gather_replicas(self, name: str) -> None:
        """The whole shard is there, for the update with its optimizer state."""
        if not self.fully_sharded:
            return
        if self.ahead:
            if self.gathered is not None:
                self.compute("tables wait", NO_COST, "sparse", deps=(self.gathered,))
                self.gathered = None
            return
        self.over_replicas(name, "all_gather", float(self.loads.weights.max()) + (float(self.loads.state.max()) if "backward" in name else 0.0))

    def before_backward(self) -> None:
        if self.states is not None:
            self.compute("state wait", NO_COST, "sparse", deps=(self.states,))
            self.states = None

    def gather_ahead(self, blocks_left: int, blocks: int, *, last: bool) -> None:
        """Inside backward, before the block with `blocks_left` to go, itself counted, of all `blocks`."""
        if self.ahead and self.fully_sharded and blocks_left == min(self.plan.tables_ahead, blocks):
            num_bytes = float(self.loads.weights.max()) + (float(self.loads.state.max()) if last else 0.0)
            name = "tables gather update" if last else "tables gather lookup"
            self.gathered = self.over_replicas(name, "all_gather", num_bytes, deps=(self.last,), apart=True)

    def average_replicas(self) -> None:
        """Behind the update."""
        weights, _ = self.averaged
        if not self.ahead:
            name, kind = ("tables scatter", "reduce_scatter") if self.fully_sharded else ("tables average", "all_reduce")
            self.over_replicas(name, kind, weights)
            return
        if not self.fully_sharded:
            self.averaging = self.over_replicas("tables average weights", "all_reduce", weights, deps=(self.last,), apart=True)
            return
        # on the host's backends the main thread waits for the mean, behind which it has it gathered
        self.averaging = self.over_replicas("tables scatter weights", "reduce_scatter", weights, deps=(self.last,), apart=self.gpu)

    def end_step(self) -> None:
        """The next step's first lookup, or the gather for it, waits here."""
        if self.averaging is not None:
            self.compute("tables wait", NO_COST, "sparse", deps=(self.averaging,))
            self.averaging = None


__all__ = ["ReplicaTasks"]
