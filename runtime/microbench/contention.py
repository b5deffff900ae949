"""Compute beside a collective: seconds that a matrix product or a jagged attention loses to each second of a collective that runs meanwhile.

    share = (seconds of compute beside the collective - seconds of it alone) / seconds of the collective alone

The compute is repeated until it outlasts the collective twice over, so that the whole collective is covered. On CUDA both are timed by events on the
compute stream, the collective on its own stream; on a host by the clock, the transport's threads taking what they take from the rank's core.
Compute that the host launches more slowly than it runs has pauses of its own and loses nothing that could be seen: then the share is no measurement
(`launched`).

The collective slows down too: `slowed` is its time beside compute over its time alone. NCCL holds as many SMs as it has CTAs; `by_ctas` makes a
process group of each number and measures both, fewer SMs against a longer collective.
"""
from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from costmodel.ops import COLLECTIVES
from kernels import jagged_attention
from runtime.mesh import Meshes
from runtime.microbench.collectives import issue
from runtime.microbench.timing import Timing, summarize

# Of the collective's message [bytes]: long against latency, short against memory.
MESSAGE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 23}
# Sides of the square product, and (histories, events, heads, width) of the attention: on a GPU each takes longer than the host does to launch it, or
# nothing would be lost to a collective beside it.
PRODUCT = {"cuda": 4096, "cpu": 192}
ATTENTION = {"cuda": (256, 1024, 8, 128), "cpu": (8, 32, 2, 16)}
REPEATS = 7
MOST = 0.95
# Seconds lost to one of a collective that are none: what a timing is never below.
NOTHING = 1e-6
# Launches of the compute over its seconds from which on the device may have waited for them.
LAUNCH_BOUND = 0.9
# CTAs of a communicator, and the message that is short enough for one of them.
CTAS, CTA_BYTES, CTA_KINDS = (1, 2, 4, 8, 16, 32), 1 << 28, ("all_gather", "reduce_scatter", "all_reduce")
HOST_COPY_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A collective of `bytes` beside compute. `ctas`: of its communicator, None for NCCL's own choice. `seconds`: of the collective alone; `share`:
    what compute loses to a second of it; `slowed`: its time beside compute over that alone; `launched`: whether the host launched the compute faster
    than it ran, without which the share means nothing."""

    kind: str
    compute: str
    ctas: int | None
    bytes: float
    seconds: float
    share: Timing
    slowed: float
    launched: bool = True

    @property
    def measured(self) -> bool:
        """Whether the share is a measurement. What holds SMs takes something: nothing lost was nothing seen."""
        return self.launched and (self.ctas == 0 or self.share.seconds > NOTHING)


def contention(meshes: Meshes, *, repeats: int = REPEATS, kinds: tuple[str, ...] = COLLECTIVES) -> Iterator[tuple[str, str, Timing]]:
    """(collective, compute beside it, share in [0, 0.95]), the share as a Timing's seconds. Collective over all ranks."""
    for found in beside_compute(meshes, repeats=repeats, kinds=kinds):
        if found.measured:
            yield found.kind, found.compute, found.share


def beside_compute(meshes: Meshes, *, repeats: int = REPEATS, kinds: tuple[str, ...] = COLLECTIVES, ctas: int | None = None,
                   num_bytes: int | None = None) -> Iterator[Beside]:
    """Each collective beside a matrix product and beside an attention; with `ctas` on a process group of its own with so many. Collective."""
    device, n = meshes.device, meshes.world_size
    elements = (num_bytes or MESSAGE_BYTES[device.type]) // 4 // n * n
    group = None if ctas is None else limited_group(ctas)
    for name, compute in (("product", product_call(device)), ("attention", jagged_attention_call(device))):
        for kind in kinds:
            start = issue(kind, elements, n, device, group)
            yield dataclasses.replace(measure_beside(lambda start=start: start().wait, compute, device, repeats=repeats), kind=kind, compute=name,
                                      ctas=ctas, bytes=4.0 * elements)
    if group is not None:
        dist.destroy_process_group(group)


def by_ctas(meshes: Meshes, *, repeats: int = 3) -> Iterator[Beside]:
    """`beside_compute` for every number of `CTAS`, on NCCL."""
    for ctas in CTAS:
        yield from beside_compute(meshes, repeats=repeats, kinds=CTA_KINDS, ctas=ctas, num_bytes=CTA_BYTES)


def limited_group(ctas: int) -> dist.ProcessGroup:
    """All ranks, on a communicator of at most `ctas` CTAs. Collective."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = ctas
    return dist.new_group(backend="nccl", pg_options=options)


def measure_beside(start: Callable[[], Callable[[], object]], compute: Callable[[], object], device: torch.device, *,
                   repeats: int = REPEATS) -> Beside:
    """`start` begins something beside the compute stream and returns what makes a stream wait for it; kind, compute and bytes are the caller's to
    fill in. Collective."""
    compute()
    taken = _agreed(statistics.median(_timed(lambda: start()(), device) for _ in range(3)), device)
    once = _agreed(statistics.median(_timed(compute, device) for _ in range(5)), device)
    count = max(1, math.ceil(2 * taken / once))
    pairs = [_share(start, compute, count, taken, device) for _ in range(repeats)]
    launching = _agreed(_launching(compute, count, device), device)
    return Beside(kind="", compute="", ctas=None, bytes=0.0, seconds=taken, share=summarize([share for share, _ in pairs]),
                  slowed=statistics.median(slowed for _, slowed in pairs), launched=launching < LAUNCH_BOUND * once * count)


def _launching(compute: Callable[[], object], count: int, device: torch.device) -> float:
    """Main-thread seconds of so many launches; on a host launching is running, and none."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        compute()
    return time.perf_counter() - begin


def _share(start: Callable[[], Callable[[], object]], compute: Callable[[], object], count: int, taken: float, device: torch.device
           ) -> tuple[float, float]:
    """(share, slowed) of one try."""
    def many() -> None:
        for _ in range(count):
            compute()

    alone = _timed(many, device)
    dist.barrier()
    work: list[Callable[[], object]] = []
    if device.type != "cuda":
        began = time.perf_counter()
        beside = _timed(many, device, before=lambda: work.append(start()))
        work[0]()
        lasted = time.perf_counter() - began
    else:
        first, last, aside = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), torch.cuda.Stream()

        def begin() -> None:
            first.record()
            work.append(start())
            with torch.cuda.stream(aside):
                work[0]()
                last.record()

        beside = _timed(many, device, before=begin)
        lasted = first.elapsed_time(last) * 1e-3
    return min(MOST, max(0.0, _agreed(beside - alone, device) / taken)), _agreed(lasted, device) / taken


def host_copies(meshes: Meshes, *, repeats: int = 5) -> Iterator[tuple[str, float]]:
    """(what, bytes/s) of copies from pinned memory alone and beside an all-gather, and of the all-gather alone and beside them. CUDA, collective."""
    device, n = meshes.device, meshes.world_size
    host = torch.empty(HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    landed, elements = torch.empty_like(host, device=device), MESSAGE_BYTES["cuda"] // 4 // n * n
    start, stream = issue("all_gather", elements, n, device), torch.cuda.Stream()

    def copy() -> Callable[[], object]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            landed.copy_(host, non_blocking=True)
        return lambda: torch.cuda.current_stream().wait_stream(stream)

    copied = _agreed(statistics.median(_timed(lambda: copy()(), device) for _ in range(repeats)), device)
    gathered = _agreed(statistics.median(_timed(lambda: start().wait(), device) for _ in range(repeats)), device)
    yield "copy alone", HOST_COPY_BYTES / copied
    yield "all_gather alone", 4 * elements / gathered
    count = max(1, math.ceil(2 * copied / gathered))

    def gathers() -> None:
        for _ in range(count):
            start().wait()

    several = _agreed(statistics.median(_timed(gathers, device) for _ in range(repeats)), device)
    found = [_both(copy, gathers, device) for _ in range(repeats)]
    yield "copy beside all_gather", HOST_COPY_BYTES / _agreed(statistics.median(c for c, _ in found), device)
    lost = _agreed(statistics.median(g for _, g in found), device) - several
    yield "all_gather beside copy", 4 * elements / (gathered * (1 + max(lost, 0.0) / copied))


def _both(copy: Callable[[], Callable[[], object]], gathers: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds of a copy and of the gathers, begun together."""
    first, last, aside = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), torch.cuda.Stream()

    def begin() -> None:
        first.record()
        done = copy()
        with torch.cuda.stream(aside):
            done()
            last.record()

    spent = _timed(gathers, device, before=begin)
    return first.elapsed_time(last) * 1e-3, spent


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


def product_call(device: torch.device) -> Callable[[], object]:
    dtype, side = torch.bfloat16 if device.type == "cuda" else torch.float32, PRODUCT[device.type]
    x, y = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return lambda: torch.mm(x, y)


def jagged_attention_call(device: torch.device) -> Callable[[], object]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    histories, events, heads, width = ATTENTION[device.type]
    q, k, v = (torch.randn(histories * events, heads, width, device=device).to(dtype) for _ in range(3))
    offsets = torch.arange(0, histories * events + 1, events, device=device)
    return lambda: jagged_attention(q, k, v, offsets, offsets, causal=True, window=None, max_q=events, max_k=events)
