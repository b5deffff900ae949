"""Batch: one rank's samples of one step, as the model eats them.

Shape legend: B samples, T events of a sequence, C tables of a table group. Ids are table-major: a pooled group's ids come as
table 0's samples, then table 1's, so that bag `c * B + b` lies at `offsets[c * B + b] : offsets[c * B + b + 1]`; a sequence
group's ids are `(C * T,)`, table 0's events first.
"""
from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tensors of `num_samples` (B) samples.

    ids: table group name -> int64 ids, table-major. offsets: pooled group name -> `(C * B + 1,)` int64 bag boundaries.
    sequence_offsets: sequence name -> `(B + 1,)` int64 event boundaries. max_lengths: sequence name -> longest history of this
    batch, a host int (asking a device tensor for it would synchronise). lengths: sequence name -> `(B,)` events of each history, on the host for
    the same reason. times: sequence name -> `(T,)` int64 seconds, for those whose model asks for it. dense: `(B, num_dense_features)` fp32 or None.
    labels: `(B, num_heads)` fp32 in [0, 1].
    """

    ids: dict[str, Tensor]
    offsets: dict[str, Tensor]
    sequence_offsets: dict[str, Tensor]
    max_lengths: dict[str, int]
    lengths: dict[str, np.ndarray]
    dense: Tensor | None
    labels: Tensor
    num_samples: int
    times: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        dense = () if self.dense is None else (self.dense,)
        return (*self.ids.values(), *self.offsets.values(), *self.sequence_offsets.values(), *self.times.values(), *dense, self.labels)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors: what a host-to-device copy moves."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch on `device`; asynchronous where the host side is pinned and `non_blocking` is set."""
        return self.with_tensors(lambda t: t.to(device, non_blocking=non_blocking))

    def with_lengths(self) -> Batch:
        """The same batch with a copy of its lengths, which then outlive the memory that they were made in."""
        return dataclasses.replace(self, lengths={k: v.copy() for k, v in self.lengths.items()})

    def pin(self) -> Batch:
        """The same batch in page-locked host memory (needs a CUDA device)."""
        return self.with_tensors(Tensor.pin_memory)

    def with_tensors(self, f) -> Batch:
        """The same batch with `f` of every tensor."""
        return dataclasses.replace(
            self, ids={k: f(t) for k, t in self.ids.items()}, offsets={k: f(t) for k, t in self.offsets.items()},
            sequence_offsets={k: f(t) for k, t in self.sequence_offsets.items()}, times={k: f(t) for k, t in self.times.items()},
            dense=None if self.dense is None else f(self.dense), labels=f(self.labels))
