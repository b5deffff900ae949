"""Mixture of experts over the interaction's output `(B, W)` (docs/model.md, section 1)."""
from __future__ import annotations

from costmodel.blocks.base import (
    CHEAP,
    DROPPED,
    INPUT,
    MATRIX,
    QUANTIZED,
    BatchShape,
    LayerBlock,
    Saved,
    activation_dtype,
    linear_parameters,
    norm_parameters,
    norm_saved,
    split_elements,
)  # fmt: skip
from costmodel.model import LayerGroup
from costmodel.ops import BACKWARD, Op, activation, dtype_bytes, elementwise, layer_norm, linear

Parameters = tuple[tuple[str, tuple[int, ...]], ...]


class Experts(LayerBlock):
    """`num_experts` experts W -> `mlp_dim` -> W, each applied to the whole batch, mixed by a softmax gate (engineering.fb.com 2026-08-03, whose
    experts see the full batch: nothing is routed, so there is no capacity and no load-balance loss).

    With `ep` ranks to a group a rank holds `num_experts / ep` of them and computes these for the samples of the whole group: what it needs are the
    group's normed samples with their gates, what it returns is its experts' part of every sample. By all-gather and reduce-scatter, or with
    `all_to_all` by one all-to-all each way; forward and backward wait for two collectives each.
    """

    kind = "moe"
    uses = ("mlp_dim", "num_experts")
    needs = ("mlp_dim", "num_experts")
    keeps_16_bits = ("gate",)

    def __init__(self, group: LayerGroup, dim: int, ep: int = 1, all_to_all: bool = False) -> None:
        self.validate(group)
        if group.num_experts % ep:
            raise ValueError(f"layer {group.kind}: ep {ep} does not divide its {group.num_experts} experts")
        self.group, self.dim, self.ep, self.all_to_all = group, dim, ep, all_to_all

    def spread(self, ep: int, all_to_all: bool) -> Experts:
        """The part of one of `ep` ranks."""
        return Experts(self.group, self.dim, ep, all_to_all)

    @property
    def own(self) -> int:
        """Experts on a rank."""
        return self.group.num_experts // self.ep

    @property
    def common_parameters(self) -> Parameters:
        return (*norm_parameters("norm", self.dim), *linear_parameters("gate", self.dim, self.group.num_experts))

    @property
    def expert_parameters(self) -> Parameters:
        return tuple(p for e in range(self.own) for name, sizes in (("up", (self.dim, self.group.mlp_dim)), ("down", (self.group.mlp_dim, self.dim)))
                     for p in linear_parameters(f"experts.{e}.{name}", *sizes))

    @property
    def parameters(self) -> Parameters:
        return self.common_parameters + self.expert_parameters

    def sharded_elements(self, ranks: int) -> int:
        return sum(elements for _, _, elements in self.shards(ranks))

    def shards(self, fsdp: int) -> tuple[tuple[str, int, int], ...]:
        if self.ep == 1:
            return (("fsdp", fsdp, split_elements(self.parameters, fsdp)),)
        return (("fsdp", fsdp, split_elements(self.common_parameters, fsdp)),
                ("efsdp", fsdp // self.ep, split_elements(self.expert_parameters, fsdp // self.ep)))

    @property
    def payload(self) -> int:
        """Numbers of a sample on its way to a rank: all gates when every rank gets the same, else those of that rank's experts."""
        return self.dim + (self.own if self.all_to_all else self.group.num_experts)

    def exchanges(self, batch: BatchShape, precision: str, phase: str, policy: str) -> tuple[tuple[str, float], ...]:
        if self.ep == 1:
            return ()
        rows = dtype_bytes(activation_dtype(precision)) * self.ep * batch.samples
        there, back = ("all_to_all", "all_to_all") if self.all_to_all else ("all_gather", "reduce_scatter")
        if phase != BACKWARD:
            return (there, rows * self.payload), (back, rows * self.dim)
        # a policy that recomputes sends the samples again; what came back is not needed
        again = () if policy in ("none", *QUANTIZED) else ((there, rows * self.payload),)
        return (*again, (there, rows * self.dim), (back, rows * self.payload))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        rows, low, dim, inner, count = batch.samples, activation_dtype(precision), self.dim, self.group.mlp_dim, self.group.num_experts
        everyone = self.ep * rows
        expert = (linear(everyone, dim, inner, precision), activation("gelu", everyone, inner, low), linear(everyone, inner, dim, precision),
                  elementwise("mul", everyone, dim, low))
        packed: tuple[Op, ...] = ()
        if self.ep > 1:
            packed = (elementwise("cat", everyone if self.all_to_all else rows, self.payload, low),)
            packed += (elementwise("add", everyone, dim, low),) * self.all_to_all
        return (layer_norm(rows, dim, low), linear(rows, dim, count, low), activation("sigmoid", rows, count, low), *packed,
                *expert * self.own, *(elementwise("add", everyone, dim, low),) * (self.own - 1), elementwise("add", rows, dim, low))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, dim, inner, count = batch.samples, self.dim, self.group.mlp_dim, self.group.num_experts
        everyone = self.ep * rows
        arrived = (Saved("arrived", everyone * self.payload, CHEAP, rows=everyone),) if self.ep > 1 else ()
        return (
            *norm_saved("norm", rows, dim, INPUT),
            Saved("normed", rows * dim, CHEAP, rows=rows),
            Saved("gate", rows * count, CHEAP, rows=rows),
            Saved("gate.linear", rows * count, DROPPED, rows=rows),
            *arrived,
            *(saved for e in range(self.own) for saved in (
                Saved(f"experts.{e}.up", everyone * inner, MATRIX, rows=everyone), Saved(f"experts.{e}.gelu", everyone * inner, CHEAP, rows=everyone),
                Saved(f"experts.{e}.down", everyone * dim, MATRIX, rows=everyone))),
        )

    def workspace_bytes(self, batch: BatchShape, precision: str) -> float:
        if self.ep == 1:
            return super().workspace_bytes(batch, precision)
        buffers = 2 * dtype_bytes(activation_dtype(precision)) * self.ep * batch.samples * self.payload
        return max(super().workspace_bytes(batch, precision), buffers)
