"""Collectives of the trainer's own process group over a grid of sizes, and what FSDP2 does around them.

`bytes` of a sample is the whole message: the gathered result, the full input of a reduction, one rank's whole send buffer of an all-to-all
(costmodel.comms). Every call is issued and waited for as the trainer does. What a rank waits until the others have come is not the collective's.

On CUDA all ranks make the same number of calls behind a small collective that brings their streams together, and every time is the mean over
ranks, so that all of them add the same points: sizes 16 times apart, then those in the middle of where the curve bends most (`adaptive_timings`).
"""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from costmodel.ops import COLLECTIVES
from costmodel.samples import Sample
from runtime.mesh import Meshes, all_gather_single, all_to_all, reduce_scatter_single, wait
from runtime.microbench.timing import CYCLES_PER_SECOND, Run, Timing, summarize
from runtime.optimizer import build_dense_optimizer
from runtime.parallelize import TimedAllGather, TimedReduceScatter, ddp_hook
from runtime.phases import PhaseTimer

QUICK_SIZES = tuple(2**e for e in (6, 10, 13, 16, 18, 20, 22, 23))
FULL_SIZES = tuple(2**e for e in range(6, 29))
# On a GPU: where a curve begins, and how many points are added to it where it bends.
GPU_SIZES, ADDED = tuple(2**e for e in (12, 16, 20, 24, 28, 31)), 6
# All-to-alls of which one rank gets so many times the average.
UNEVEN, UNEVEN_SIZES = (1.0, 1.25, 1.5, 1.75, 1.9), tuple(2**e for e in (18, 20, 22, 24, 26, 28))
# Seconds of one run of calls, about, and runs; what a call takes at most, to choose its number alike on all ranks.
RUN_SECONDS, RUNS, SLOWEST_CALL, SLOWEST_RATE = 4e-3, 3, 6e-5, 1e11
FEWEST_CALLS, MOST_CALLS = 3, 24
PASSES = 3
COMPUTE_SECONDS = 2e-3  # before each call
# Parameters and tensors of the FSDP units to time: norms and heads up to a wide block.
UNITS = ((130, 2), (2_000, 2), (8_000, 4), (16_000, 8), (50_000, 12), (130_000, 12), (500_000, 12))
GPU_UNITS = ((4_000, 2), (130_000, 4), (1_000_000, 4), (4_000_000, 12), (13_000_000, 12), (40_000_000, 16))


def collective_timings(meshes: Meshes, *, sizes: tuple[int, ...], seconds: float) -> Iterator[tuple[str, dict[str, float], Timing]]:
    """(kind, features, timing) for each collective and size; on CUDA `adaptive_timings`. Collective over all ranks, which do the same number of
    repeats."""
    n, device = meshes.world_size, meshes.device
    if device.type == "cuda":
        for kind in COLLECTIVES:
            yield from adaptive_timings(kind, n, device)
        return
    wanted = [(kind, max(n, size // 4 // n * n)) for kind in COLLECTIVES for size in sizes]
    for (kind, elements), timing in _measured_in_turn(wanted, n, device, seconds):
        yield kind, {"bytes": 4.0 * elements, "group": float(n)}, timing


def adaptive_timings(kind: str, n: int, device: torch.device, *, sizes: tuple[int, ...] = GPU_SIZES, added: int = ADDED,
                     timed: Callable[[str, int], Timing] | None = None) -> Iterator[tuple[str, dict[str, float], Timing]]:
    """`sizes`, then `added` more; `timed` (default: `together`) times a number of elements and says the same on all ranks."""
    timed = timed or (lambda kind, elements: together(_issue(kind, elements, n, device).run, 4.0 * elements, device))
    found: dict[int, Timing] = {}

    def add(num_bytes: float) -> tuple[str, dict[str, float], Timing]:
        elements = max(n, round(num_bytes) // 4 // n * n)
        found[4 * elements] = timed(kind, elements)
        return kind, {"bytes": 4.0 * elements, "group": float(n)}, found[4 * elements]

    for size in sizes:
        yield add(size)
    for _ in range(added):
        yield add(bend([(float(size), found[size].seconds) for size in sorted(found)]))


def bend(points: list[tuple[float, float]]) -> float:
    """The size in the (logarithmic) middle of the interval next to which the slope of log seconds over log bytes changes most, times its length."""
    x, y = (np.log([p[i] for p in points]) for i in (0, 1))
    slopes = np.diff(y) / np.diff(x)
    change = np.abs(np.diff(slopes))
    worth = np.maximum(np.concatenate([change, [0.0]]), np.concatenate([[0.0], change])) * np.diff(x)
    widest = int(np.argmax(worth))
    return float(np.exp((x[widest] + x[widest + 1]) / 2))


def uneven_timings(meshes: Meshes, *, sizes: tuple[int, ...] = UNEVEN_SIZES) -> Iterator[tuple[float, float, Timing]]:
    """(bytes, heaviest over mean, timing) of all-to-alls in which every rank sends `bytes` and rank 0 gets more of them than the average; 1.0 is an
    even one. Collective over all ranks of a GPU job."""
    n, device, rank = meshes.world_size, meshes.device, meshes.rank
    for size in sizes:
        for share in UNEVEN:
            elements = size // 4 // n * n
            heavy = round(elements * min(share / n, 1.0 - 1.0 / 64))
            sent = [heavy, *[(elements - heavy) // (n - 1)] * (n - 1)]
            received = [sent[rank]] * n
            source, out = torch.zeros(sum(sent), device=device), torch.empty(sum(received), device=device)
            run = lambda source=source, out=out, sent=sent, received=received: wait(all_to_all(out, source, received, sent, dist.group.WORLD), None)
            yield 4.0 * sum(sent), heavy * n / sum(sent), together(run, 4.0 * sum(sent), device)


def together(run: Callable[[], object], num_bytes: float, device: torch.device) -> Timing:
    """Device seconds of a call of `run`, which is collective and moves about `num_bytes`; the same on all ranks."""
    calls = int(min(MOST_CALLS, max(FEWEST_CALLS, RUN_SECONDS / (SLOWEST_CALL + num_bytes / SLOWEST_RATE))))
    meeting = torch.zeros(1, device=device)
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    host, times, hosts = time.perf_counter() - start, [], []
    for _ in range(RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int((1.5 * host * calls + 2e-4) * CYCLES_PER_SECOND))
        dist.all_reduce(meeting)
        begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        hosts.append((time.perf_counter() - start) / calls)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / calls)
    both = torch.tensor([times, hosts], dtype=torch.float64, device=device)
    dist.all_reduce(both)
    return summarize(*(both / dist.get_world_size()).tolist())


def issue(kind: str, elements: int, n: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Callable[[], dist.Work]:
    """A call that starts a collective of `elements` fp32 numbers, a multiple of the `n` ranks of `group` (default: all), and returns its handle."""
    full, part, group = torch.zeros(elements, device=device), torch.zeros(elements // n, device=device), group or dist.group.WORLD
    out, splits = torch.empty_like(full), [elements // n] * n
    calls = {
        "all_gather": lambda: all_gather_single(out, part, group=group, async_op=True),
        "reduce_scatter": lambda: reduce_scatter_single(part, full, group=group, async_op=True),
        "all_reduce": lambda: dist.all_reduce(full, group=group, async_op=True),
        "all_to_all": lambda: all_to_all(out, full, splits, splits, group),
    }
    return calls[kind]


def _issue(kind: str, elements: int, n: int, device: torch.device) -> Run:
    start = issue(kind, elements, n, device)
    return Run(run=lambda _=None: wait(start(), None))


def _measured_in_turn(wanted: list[tuple[str, int]], n: int, device: torch.device, seconds: float) -> Iterator[tuple[tuple[str, int], Timing]]:
    """Host collectives, `PASSES` times over all of them, so that no one of them bears alone what the machine did for a moment.

    The mean stands for a call, as a step adds calls up: what delays some of them on a shared machine delays the step.
    """
    times: dict[tuple[str, int], list[float]] = {key: [] for key in wanted}
    for _ in range(PASSES):
        for key, found in times.items():
            run = _issue(*key, n, device)
            first = statistics.median(_repeated(run, 3)[1:])
            repeats = torch.tensor([max(3.0, min(10.0, seconds / PASSES / (first + COMPUTE_SECONDS)))])
            dist.all_reduce(repeats, op=dist.ReduceOp.MIN)
            found += _repeated(run, int(repeats))
    for key, found in times.items():
        yield key, dataclasses.replace(summarize(found), seconds=statistics.fmean(found))


def _repeated(run: Run, repeats: int) -> list[float]:
    """Seconds of each call from the arrival of the last rank on, mean over ranks. As in a step every rank computes before it, while the threads of
    the transport sleep and their data leaves the caches; clocks of the ranks of one host agree."""
    square = torch.ones(192, 192)
    begins, ends = torch.zeros(repeats, dtype=torch.float64), torch.zeros(repeats, dtype=torch.float64)
    for i in range(repeats):
        dist.barrier()
        until = time.thread_time() + COMPUTE_SECONDS
        while time.thread_time() < until:
            torch.mm(square, square)
        begins[i] = time.perf_counter()
        run.run(None)
        ends[i] = time.perf_counter()
    dist.all_reduce(begins, op=dist.ReduceOp.MAX)
    took = ends - begins
    dist.all_reduce(took)
    return (took / dist.get_world_size()).clamp(min=1e-7).tolist()


class _GivenGradients(torch.autograd.Function):
    """Passes x on; every parameter gets a gradient made beforehand, so that only FSDP2's own work around the block is timed."""

    @staticmethod
    def forward(ctx, x: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None, *(g.view_as(g) for g in ctx.gradients)


class _Unit(nn.Module):
    """Parameters of a block without its computation."""

    def __init__(self, parameters: int, tensors: int, device: torch.device) -> None:
        super().__init__()
        small = tensors // 2
        each = max(1, (parameters - 16 * small) // max(1, tensors - small) // 16)
        shapes = [(16,) if i < small else (16, each) for i in range(tensors)]
        self.items = nn.ParameterList(nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes)
        self.gradients = [torch.zeros(shape, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None) for shape in shapes]

    def forward(self, x: Tensor) -> Tensor:
        return _GivenGradients.apply(x, self.gradients, *self.items)


class _Unsent(TimedAllGather, TimedReduceScatter):
    """Stands for a unit's collectives where only what FSDP2 does around them is timed: nothing is sent, results hold whatever was there."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *args, **kwargs) -> None:
        return None


# The stream is held back before a step of units for so many times what the host needs for one, so that the host's time is not in the device's.
HELD_FACTOR = 1.5


def unit_timings(meshes: Meshes, *, repeats: int, depth: int = 4) -> Iterator[tuple[str, dict[str, float], Timing]]:
    """(kind, features, timing): `fsdp_gather` and `fsdp_reduce` of one unit without the wait for the collective, and `adamw` on all
    units' shards. On CUDA device seconds are of steps that send nothing, behind a stream held back, host seconds of steps that do send.
    Collective over all ranks.
    """
    assert meshes.dense is not None
    cuda = meshes.device.type == "cuda"
    for parameters, tensors in GPU_UNITS if cuda else UNITS:
        timer = PhaseTimer(meshes.device)
        units = [_Unit(parameters, tensors, meshes.device) for _ in range(depth)]
        count = sum(p.numel() for p in units[0].parameters())
        model = nn.Sequential(*units)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else torch.float32, reduce_dtype=torch.float32)
        for unit in units:
            fully_shard(unit, mesh=meshes.dense["fsdp"], reshard_after_forward=True, mp_policy=policy)
            if meshes.layout.ddp > 1:
                unit.set_all_reduce_hook(ddp_hook(meshes.dense["ddp"].get_group(), timer))
        fully_shard(model, mesh=meshes.dense["fsdp"], reshard_after_forward=True, mp_policy=policy)  # one root, as in the trainer
        x = torch.zeros(1, device=meshes.device, requires_grad=True)
        optimizer = build_dense_optimizer(model.parameters(), lr=1e-3)
        _send(units, timer)
        sending = _unit_steps(model, optimizer, x, timer, repeats)
        timed = sending
        if cuda:
            for unit in units:
                unit.set_custom_all_gather(_Unsent(timer))
                unit.set_custom_reduce_scatter(_Unsent(timer))
            held = HELD_FACTOR * max(sum(host.values()) for _, host in sending)
            timed = _unit_steps(model, optimizer, x, timer, repeats, held=held)
        shares = (("forward", depth), ("backward", depth), ("optimizer", 1))
        forward, backward, update = ([step[name] / share for step, _ in timed] for name, share in shares)
        hosts = [[step[name] / share for _, step in sending] if cuda else None for name, share in shares]
        features = {"parameters": float(count), "tensors": float(tensors)}
        gather, gather_host = statistics.median(forward), statistics.median(hosts[0]) if cuda else 0.0
        yield "fsdp_gather", features, summarize(forward, hosts[0])
        yield "fsdp_reduce", features, summarize([max(b - gather, 1e-7) for b in backward],
                                                 [max(h - gather_host, 1e-7) for h in hosts[1]] if cuda else None)
        local = sum(p.to_local().numel() for p in model.parameters())
        yield "adamw", {"parameters": float(local), "tensors": float(tensors * depth)}, summarize(update, hosts[2])


def unit_hosts(samples: Sequence[Sample]) -> dict[str, float]:
    """Main-thread seconds of `fsdp_gather` and `fsdp_reduce` among the samples of `unit_timings`, and of each tensor (`:tensor`); of AdamW on their
    sharded tensors."""
    found = {}
    for kind in ("fsdp_gather", "fsdp_reduce", "adamw"):
        points = [(s.features["tensors"], s.host_seconds) for s in samples if s.op == kind and s.host_seconds]
        if len({tensors for tensors, _ in points}) > 1:
            tensors, seconds = np.array(points).T
            each, _ = np.polyfit(tensors, seconds, 1)
            each = max(float(each), 0.0)
            fixed = max(float(np.median(seconds - each * tensors)), 0.0)
            found |= {"optimizer@sharded": fixed, "tensor@sharded": each} if kind == "adamw" else {kind: fixed, f"{kind}:tensor": each}
    return found


def _send(units: list, timer: PhaseTimer) -> None:
    for unit in units:
        unit.set_custom_all_gather(TimedAllGather(timer))
        unit.set_custom_reduce_scatter(TimedReduceScatter(timer))


def _unit_steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, timer: PhaseTimer, repeats: int, *, held: float = 0.0
                ) -> list[tuple[dict[str, float], dict[str, float]]]:
    """(seconds, host seconds) by phase of every step but the first two."""
    before, found = len(timer.host), []
    for _ in range(repeats + 2):
        if held:
            torch.cuda.synchronize()
            torch.cuda._sleep(int(held * CYCLES_PER_SECOND))
        timer.pause()
        timer.start_step()
        with timer.phase("forward"):
            y = model(x)
        with timer.phase("backward"):
            y.sum().backward()
        with timer.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        timer.end_step()
        found += timer.finished(wait=True)
    return list(zip(found, timer.host[before:]))[2:]
