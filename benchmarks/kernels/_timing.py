"""Device time of a call, with the host out of the way."""

import statistics
from collections.abc import Callable

import torch


def seconds(call: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median device time of `call` [s]. The device sleeps while the host queues the calls, so that launch gaps do not count."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(60_000_000)  # about 30 ms
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3


def copy_rate() -> float:
    """Bytes read plus written per second by a large device-to-device copy."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), repeats=10)
