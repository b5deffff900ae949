"""Replicas of a sparse group: means over them, and fully sharded 2D, whose replicas keep 1 / replicas of their table shards and state at rest.

    forward    all-gather of the weights over the replicas, lookup, the whole freed
    update     all-gather of weights and state, update from the own group's samples, reduce-scatter of both as means, the whole freed

The mathematics is that of plain 2D averaged at every step. Tensors are gathered into their own storage, which has no bytes in between, so that views
of a table stay valid. Sums are in fp32 for 16-bit weights, `CHUNK` elements at a time.

What runs beside compute (`Plan.tables_ahead`): gathers are begun before they are needed (`ReplicaShard.begin`); means are followed up on a stream
of their own on CUDA, on the host's backends where somebody needs them (`Beside`).
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.mesh import all_gather_single, reduce_scatter_single, wait
from runtime.phases import PhaseTimer

# Elements of a 16-bit tensor that are in fp32 at once on their way.
CHUNK = 1 << 24
_NARROW = (torch.bfloat16, torch.float16)


class ReplicaShard:
    """One tensor that `size` replicas hold a part of; this one is number `index`. `whole` has bytes between `begin` or `gather` and `release` only,
    and values behind `gather`."""

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
        self._work: dist.Work | None = None
        self._begun = True
        self.release()

    def allocate(self) -> None:
        """Give `whole` its bytes."""
        self._flat.untyped_storage().resize_(self._num_bytes)

    def begin(self) -> None:
        """All-gather of the shards; `gather` waits for it. Nothing where it was begun already. Collective over the replicas."""
        if not self._begun:
            self.allocate()
            self._work = all_gather_single(self._flat, self.shard, group=self._group, async_op=True)
            self._begun = True

    def gather(self, timer: PhaseTimer | None) -> None:
        """`whole` has every replica's shard behind this. Collective over the replicas."""
        self.begin()
        work, self._work = self._work, None
        wait(work, timer)

    def averages(self) -> Iterator[tuple[dist.Work, Callable[[], None]]]:
        """(a collective under way, what to do behind it) of the steps that make the shard the mean over the replicas of what they have in `whole`;
        `whole` is then none of theirs: `release` it or `begin` again. A step is issued when it is asked for. Collective."""
        each, narrow = self.shard.numel(), self._flat.dtype in _NARROW
        parts, at_once = self._flat.view(self._size, each), max(1, CHUNK // self._size if narrow else each)
        for first in range(0, each, at_once):
            shard, total = self.shard[first:first + at_once], self._flat
            if narrow:
                total = parts[:, first:first + at_once].float().flatten()
            mean = torch.empty(shard.shape, dtype=total.dtype, device=total.device) if narrow else shard
            work = reduce_scatter_single(mean, total, group=self._group, async_op=True)
            yield work, functools.partial(_divide_into, shard, mean, self._size)
        self._begun = False

    def average(self, timer: PhaseTimer | None) -> None:
        """All of `averages`, waited for one after the other."""
        for work, then in self.averages():
            wait(work, timer)
            then()

    def drop(self, timer: PhaseTimer | None) -> None:
        """`release`, behind a gather that may be under way."""
        if self._begun:
            self.gather(timer)
        self.release()

    def keep(self) -> None:
        """The shard becomes this replica's part of `whole`."""
        self.shard.copy_(self._flat[self._own])

    def release(self) -> None:
        """Not while a gather is under way."""
        assert self._work is None, "a shard whose gather was not waited for"
        self._begun = False
        self._flat.untyped_storage().resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self.shard.untyped_storage().nbytes() + self._flat.untyped_storage().nbytes()


def means(tensor: Tensor, group: dist.ProcessGroup, size: int) -> Iterator[tuple[dist.Work, Callable[[], None]]]:
    """As `ReplicaShard.averages`, of a contiguous tensor that every replica has whole: it becomes their mean."""
    flat, narrow = tensor.view(-1), tensor.dtype in _NARROW
    for first in range(0, flat.numel(), CHUNK if narrow else max(flat.numel(), 1)):
        part = flat[first:first + CHUNK] if narrow else flat
        total = part.float() if narrow else part
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        yield work, functools.partial(_divide_into, part, total, size)


def _divide_into(target: Tensor, total: Tensor, size: int) -> None:
    total.div_(size)
    if total is not target:
        target.copy_(total)


class Beside:
    """Means that run beside compute. On CUDA a stream of their own follows them up; on the host's backends their threads run the last collective of
    each `run`, and `advance` or `join` does what comes behind it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._left: list[tuple[dist.Work, Callable[[], None]]] = []

    def run(self, steps: Iterator[tuple[dist.Work, Callable[[], None]]], then: Callable[[], None] = lambda: None) -> None:
        """Begin `steps` behind what is enqueued now, and `then` behind them. Where there is no stream only the last step may be under way."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for work, follow in steps:
                    work.wait()
                    follow()
                then()
            return
        before: tuple[dist.Work, Callable[[], None]] | None = None
        for step in steps:
            if before is not None:
                before[0].wait()
                before[1]()
            before = step
        if before is None:
            then()
            return
        work, follow = before

        def behind() -> None:
            follow()
            then()

        self._left.append((work, behind))

    def advance(self, timer: PhaseTimer | None) -> None:
        """Where there is no stream, wait and do what comes behind."""
        left, self._left = self._left, []
        for work, then in left:
            wait(work, timer)
            then()

    def join(self, timer: PhaseTimer | None) -> None:
        """All of it is done for what the caller does next."""
        self.advance(timer)
        if self._stream is not None:
            with timer.phase("exposed_communication") if timer is not None else contextlib.nullcontext():
                torch.cuda.current_stream().wait_stream(self._stream)
