"""A level of a pyramid over a history: parallel modules on its newest events (docs/model.md, section 1)."""
from __future__ import annotations

import dataclasses

from costmodel.blocks.attention import BlockAttention, Gdpa, Hstu, SelfAttention
from costmodel.blocks.base import INPUT, BatchShape, Saved, SequenceBlock, activation_dtype
from costmodel.blocks.llama import Llama
from costmodel.codec import suggest
from costmodel.model import LayerGroup
from costmodel.ops import Op, elementwise

BRANCHES: dict[str, type[SequenceBlock]] = {cls.kind: cls for cls in (SelfAttention, Gdpa, BlockAttention, Hstu, Llama)}


class Pyramid(SequenceBlock):
    """`x' = mean over branches of branch(x)`, x the `newest` events of every history, the older ones dropped for good.

    GEM stacks "multiple parallel interaction modules in a pyramid formation" over sequences (engineering.fb.com, 2025-11-10) and gives no formulas:
    levels that drop old events and the mean over branches, which keeps the residual stream's scale, are ours. A level that shortens is one block.
    """

    kind = "pyramid"
    uses = ("newest", "branches")
    needs = ("branches",)

    def __init__(self, group: LayerGroup, dim: int, sequence: str, limit: int | None = None) -> None:
        super().__init__(group, dim, sequence, limit)
        self.branches = tuple(BRANCHES[b.kind](LayerGroup.of_layer(b), dim, sequence, limit) for b in group.branches)

    @classmethod
    def validate(cls, group: LayerGroup) -> None:
        SequenceBlock.validate.__func__(cls, group)
        for branch in group.branches:
            if branch.kind not in BRANCHES:
                raise ValueError(f"layer {group.kind}: unknown branch kind {branch.kind!r}{suggest(branch.kind, BRANCHES)}; known: "
                                 f"{', '.join(BRANCHES)}")
            BRANCHES[branch.kind].validate(LayerGroup.of_layer(branch))
        if group.newest is not None and (group.newest < 1 or group.count > 1):
            raise ValueError(f"layer {group.kind}: newest must be >= 1 on a level of count 1 (levels without newest may follow), got newest "
                             f"{group.newest}, count {group.count}")

    @property
    def parts(self) -> tuple[SequenceBlock, ...]:
        return self.branches

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((f"branches.{i}.{name}", shape) for i, branch in enumerate(self.branches) for name, shape in branch.parameters)

    def causal_excess(self, batch: BatchShape) -> float:
        return sum(branch.causal_excess(batch) for branch in self.branches)

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        tokens, low = self.shape(batch).tokens, activation_dtype(precision)
        ops = [elementwise("cat", (batch.sequences[self.sequence].tokens + tokens) / 2, self.dim, low)] if self.group.newest is not None else []
        for branch in self.branches:
            ops += branch.forward(batch, precision)
        if len(self.branches) > 1:  # the division reads and writes what a copy does
            ops += [elementwise("add", tokens, self.dim, low)] * (len(self.branches) - 1) + [elementwise("cat", tokens, self.dim, low)]
        return tuple(ops)

    def recomputed(self, batch: BatchShape, precision: str, policy: str, forward: tuple[Op, ...] | None = None) -> tuple[Op, ...]:
        """The copy of the newest events precedes what a policy runs again."""
        ops = forward or self.forward(batch, precision)
        return super().recomputed(batch, precision, policy, ops[self.group.newest is not None:])

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        """The branches share their input; of the copy its row numbers stay."""
        rows = self.shape(batch).tokens
        kept = (Saved("newest.rows", rows, INPUT, 8.0),) if self.group.newest is not None else ()
        tensors = (t for branch in self.branches for t in branch.saved_tensors(batch) if t.level != INPUT)
        if any(not isinstance(branch, Llama) for branch in self.branches):  # its norms are not those that keep their input in 8 bits
            tensors = (dataclasses.replace(t, in_8_bits="wide") if isinstance(branch, Llama) else t
                       for branch in self.branches for t in branch.saved_tensors(batch) if t.level != INPUT)
        return (*kept, Saved("input", rows * self.dim, INPUT, rows=rows), *tensors)
