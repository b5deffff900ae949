"""Timing and inputs shared by the kernel families."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

CALLS, GRAPH_SECONDS = 10, 2e-3  # most calls in a timed graph, and how long it should be


def seconds(function: Callable[[], object], *, graph: bool = True, calls: int = CALLS, window: float = 0.1, repeats: int = 40) -> float:
    """Median seconds of one call over about `window` seconds; the first call compiles. Inputs should exceed the 60 MB L2 cache.

    With `graph` it replays a CUDA graph, which keeps host launch time out: of up to `calls` calls that follow each other, because a graph's own
    begin and end take 2 to 3 us [Measured H200: a norm takes 53.0 us in a graph of its own, 50.5 in one of ten]. Without (autograd cannot be
    captured apart from its forward) the calls queue up, and host time hides only behind kernels that are longer than it.
    """
    function()
    torch.cuda.synchronize()
    call = function
    calls = max(1, min(calls, int(GRAPH_SECONDS / max(_timed(function), 1e-6)))) if graph else 1
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(calls):
                kept = function()  # noqa: F841 (its memory must outlive the replays)
        call = captured.replay
    call()
    torch.cuda.synchronize()
    first = _timed(call)
    return statistics.median(_timed_many(call, max(3, min(repeats, int(window / max(first, 1e-6)))))) / calls


def _timed(function: Callable[[], object]) -> float:
    return _timed_many(function, 1)[0]


def _timed_many(function: Callable[[], object], count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def uniform_lengths(count: int, longest: int, fill: float, *, seed: int = 0) -> Tensor:
    """`count` lengths on the host: all `longest` for fill 1, uniform in [1, longest] for fill 0.5."""
    if fill == 1.0:
        return torch.full((count,), longest)
    return torch.randint(1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed))


def lognormal_lengths(count: int, median: float, sigma: float, longest: int, *, seed: int = 0) -> Tensor:
    """Heavy-tailed lengths on the host, rounded, clipped to [1, longest]."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return (median * torch.exp(sigma * normal)).round().long().clamp(1, longest)


def offsets(lengths: Tensor) -> Tensor:
    """`(B + 1,)` int32 on the GPU."""
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to("cuda", torch.int32)
