"""Compute beside a collective: seconds that a matrix product or a jagged attention loses to each second of a collective that runs meanwhile.

    share = (seconds of compute beside the collective - seconds of it alone) / seconds of the collective alone

The compute is repeated until it outlasts the collective twice over, so that the whole collective is covered. On CUDA both are timed by events on the
compute stream, the collective on its own stream; on a host by the clock, the transport's threads taking what they take from the rank's core.
"""
from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from costmodel.ops import COLLECTIVES
from kernels import jagged_attention
from runtime.mesh import Meshes, wait
from runtime.microbench.collectives import issue
from runtime.microbench.timing import Timing, summarize

# Of the collective's message [bytes]: long against latency, short against memory.
MESSAGE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 23}
# Sides of the square product, and (histories, events, heads, width) of the attention.
PRODUCT = {"cuda": 4096, "cpu": 192}
ATTENTION = {"cuda": (64, 1024, 4, 128), "cpu": (8, 32, 2, 16)}
REPEATS = 7
MOST = 0.95


def contention(meshes: Meshes, *, repeats: int = REPEATS, kinds: tuple[str, ...] = COLLECTIVES) -> Iterator[tuple[str, str, Timing]]:
    """(collective, compute beside it, share in [0, 0.95]), the share as a Timing's seconds. Collective over all ranks."""
    device, n = meshes.device, meshes.world_size
    elements = MESSAGE_BYTES[device.type] // 4 // n * n
    for name, compute in (("product", _product(device)), ("attention", _attention(device))):
        for kind in kinds:
            start = issue(kind, elements, n, device)
            compute()
            taken = _agreed(statistics.median(_timed(functools.partial(_whole, start), device) for _ in range(3)), device)
            once = _agreed(statistics.median(_timed(compute, device) for _ in range(5)), device)
            count = max(1, math.ceil(2 * taken / once))
            shares = [_share(start, compute, count, taken, device) for _ in range(repeats)]
            yield kind, name, summarize(shares)


def _share(start: Callable[[], dist.Work], compute: Callable[[], object], count: int, taken: float, device: torch.device) -> float:
    def many() -> None:
        for _ in range(count):
            compute()

    alone = _timed(many, device)
    dist.barrier()
    work: list[dist.Work] = []
    beside = _timed(many, device, before=lambda: work.append(start()))
    wait(work[0], None)
    return min(MOST, max(0.0, _agreed(beside - alone, device) / taken))


def _whole(start: Callable[[], dist.Work]) -> None:
    wait(start(), None)


def _timed(call: Callable[[], object], device: torch.device, *, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of `call` on the compute stream; `before` is issued just ahead of it."""
    if device.type != "cuda":
        before()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


def _agreed(seconds: float, device: torch.device) -> float:
    """The mean over ranks, so that all repeat alike."""
    total = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _product(device: torch.device) -> Callable[[], object]:
    dtype, side = torch.bfloat16 if device.type == "cuda" else torch.float32, PRODUCT[device.type]
    x, y = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return lambda: torch.mm(x, y)


def _attention(device: torch.device) -> Callable[[], object]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    histories, events, heads, width = ATTENTION[device.type]
    q, k, v = (torch.randn(histories * events, heads, width, device=device).to(dtype) for _ in range(3))
    offsets = torch.arange(0, histories * events + 1, events, device=device)
    return lambda: jagged_attention(q, k, v, offsets, offsets, causal=True, window=None, max_q=events, max_k=events)
