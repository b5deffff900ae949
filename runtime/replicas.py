"""Fully sharded 2D: at rest every replica of a sparse group keeps 1 / replicas of its table shards and their optimizer state.

    forward    all-gather of the weights over the replicas, lookup, the whole freed
    update     all-gather of weights and state, update from the own group's samples, reduce-scatter of both as means, the whole freed

The mathematics is that of plain 2D averaged at every step. Tensors are gathered into their own storage, which has no bytes in between, so that views
of a table stay valid. Sums are in fp32 for 16-bit weights.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.mesh import all_gather_single, reduce_scatter_single, wait
from runtime.phases import PhaseTimer


class ReplicaShard:
    """One tensor that `size` replicas hold a part of; this one is number `index`. `whole` has bytes between `gather` and `release` only."""

    def __init__(self, tensor: Tensor, *, group: dist.ProcessGroup, index: int, size: int) -> None:
        """Starts from a `tensor` that is the same on every replica. This replica's part is copied, then the bytes of `tensor` are freed: a second
        whole copy beside it would be the most memory that a run ever needs."""
        self._group, self._size = group, size
        count, each = tensor.numel(), -(-tensor.numel() // size)
        self._own = slice(index * each, (index + 1) * each)
        part = tensor.flatten()[self._own]
        self.shard = torch.cat([part, part.new_zeros(each - part.numel())])
        tensor.untyped_storage().resize_(0)
        self._flat = tensor.new_empty(each * size)
        self._num_bytes = self._flat.untyped_storage().nbytes()
        self.whole = self._flat[:count].view(tensor.shape)
        self.release()

    def gather(self, timer: PhaseTimer | None) -> None:
        """Collective over the replicas."""
        self._flat.untyped_storage().resize_(self._num_bytes)
        wait(all_gather_single(self._flat, self.shard, group=self._group, async_op=True), timer)

    def average(self, timer: PhaseTimer | None) -> None:
        """The shard becomes the mean over the replicas of what they have in `whole`. Collective."""
        total = self._flat.float() if self._flat.dtype in (torch.bfloat16, torch.float16) else self._flat
        mean = torch.empty(self.shard.shape, dtype=total.dtype, device=total.device)
        wait(reduce_scatter_single(mean, total, group=self._group, async_op=True), timer)
        self.shard.copy_(mean.div_(self._size))

    def keep(self) -> None:
        """The shard becomes this replica's part of `whole`."""
        self.shard.copy_(self._flat[self._own])

    def release(self) -> None:
        self._flat.untyped_storage().resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self.shard.untyped_storage().nbytes() + self._flat.untyped_storage().nbytes()
