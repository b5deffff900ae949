"""Collectives of the trainer's own process group over a grid of sizes, and what FSDP2 does around them.

`bytes` of a sample is the whole message: the gathered result, the full input of a reduction, one rank's whole send buffer of an all-to-all
(costmodel.comms). Every call is issued and waited for as the trainer does. What a rank waits until the others have come is not the collective's.
"""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from costmodel.ops import COLLECTIVES
from runtime.mesh import Meshes, all_gather_single, all_to_all, reduce_scatter_single, wait
from runtime.microbench.timing import Run, Timing, measure, summarize
from runtime.optimizer import build_dense_optimizer
from runtime.parallelize import TimedAllGather, TimedReduceScatter
from runtime.phases import PhaseTimer

QUICK_SIZES = tuple(2**e for e in (6, 10, 13, 16, 18, 20, 22, 23))
FULL_SIZES = tuple(2**e for e in range(6, 29))
PASSES = 3
COMPUTE_SECONDS = 2e-3  # before each call
# Parameters and tensors of the FSDP units to time: norms and heads up to a wide block.
UNITS = ((130, 2), (2_000, 2), (8_000, 4), (16_000, 8), (50_000, 12), (130_000, 12), (500_000, 12))


def collective_timings(meshes: Meshes, *, sizes: tuple[int, ...], seconds: float) -> Iterator[tuple[str, dict[str, float], Timing]]:
    """(kind, features, timing) for each collective and size. Collective over all ranks, which do the same number of repeats."""
    n, device = meshes.world_size, meshes.device
    wanted = [(kind, max(n, size // 4 // n * n)) for kind in COLLECTIVES for size in sizes]
    if device.type == "cuda":
        timings = ((key, measure([_issue(*key, n, device)] * 4, device=device, seconds=seconds)) for key in wanted)
    else:
        timings = _measured_in_turn(wanted, n, device, seconds)
    for (kind, elements), timing in timings:
        yield kind, {"bytes": 4.0 * elements, "group": float(n)}, timing


def issue(kind: str, elements: int, n: int, device: torch.device) -> Callable[[], dist.Work]:
    """A call that starts a collective of `elements` fp32 numbers, a multiple of the `n` ranks, and returns its handle."""
    full, part, group = torch.zeros(elements, device=device), torch.zeros(elements // n, device=device), dist.group.WORLD
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
    return Run(run=lambda _: wait(start(), None))


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
        self.gradients = [torch.zeros(shape, device=device) for shape in shapes]

    def forward(self, x: Tensor) -> Tensor:
        return _GivenGradients.apply(x, self.gradients, *self.items)


def unit_timings(meshes: Meshes, *, repeats: int, depth: int = 4) -> Iterator[tuple[str, dict[str, float], Timing]]:
    """(kind, features, timing): `fsdp_gather` and `fsdp_reduce` of one unit without the wait for the collective, and `adamw` on all
    units' shards. Collective over all ranks.
    """
    assert meshes.dense is not None
    for parameters, tensors in UNITS:
        timer = PhaseTimer(meshes.device)
        units = [_Unit(parameters, tensors, meshes.device) for _ in range(depth)]
        count = sum(p.numel() for p in units[0].parameters())
        model = nn.Sequential(*units)
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        for unit in units:
            fully_shard(unit, mesh=meshes.dense["fsdp"], reshard_after_forward=True, mp_policy=policy)
            unit.set_custom_all_gather(TimedAllGather(timer))
            unit.set_custom_reduce_scatter(TimedReduceScatter(timer))
        x = torch.zeros(1, device=meshes.device, requires_grad=True)
        optimizer = build_dense_optimizer(model.parameters(), lr=1e-3)
        forward, backward, update = [], [], []
        for step in range(repeats + 2):
            timer.start_step()
            with timer.phase("forward"):
                y = model(x)
            with timer.phase("backward"):
                y.sum().backward()
            with timer.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            timer.end_step()
            (spent,) = timer.finished(wait=True)
            if step >= 2:
                forward.append(spent["forward"] / depth)
                backward.append(spent["backward"] / depth)
                update.append(spent["optimizer"])
        features = {"parameters": float(count), "tensors": float(tensors)}
        gather = statistics.median(forward)
        yield "fsdp_gather", features, summarize(forward)
        yield "fsdp_reduce", features, summarize([max(b - gather, 1e-7) for b in backward])
        local = sum(p.to_local().numel() for p in model.parameters())
        yield "adamw", {"parameters": float(local), "tensors": float(tensors * depth)}, summarize(update)
