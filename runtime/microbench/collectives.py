"""Collectives of the trainer's own process group over a grid of sizes, and what FSDP2 does around them.

`bytes` of a sample is the whole message: the gathered result, the full input of a reduction, one rank's whole send buffer of an all-to-all
(costmodel.comms). Every call is issued and waited for as the trainer does; a barrier before each run lets all ranks start together.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

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

QUICK_SIZES = tuple(2**e for e in (6, 10, 12, 14, 16, 18, 20, 21, 22, 23))
FULL_SIZES = tuple(2**e for e in range(6, 29))
# Parameters and tensors of the FSDP units to time: norms and heads up to a wide block.
UNITS = ((130, 2), (2_000, 2), (8_000, 4), (16_000, 8), (50_000, 12), (130_000, 12), (500_000, 12))


def collective_timings(meshes: Meshes, *, sizes: tuple[int, ...], seconds: float) -> Iterator[tuple[str, dict[str, float], Timing]]:
    """(kind, features, timing) for each collective and size. Collective over all ranks, which do the same number of repeats."""
    group, n, device = dist.group.WORLD, meshes.world_size, meshes.device
    for kind in COLLECTIVES:
        for size in sizes:
            elements = max(n, size // 4 // n * n)
            full, part = torch.zeros(elements, device=device), torch.zeros(elements // n, device=device)
            run = _issue(kind, full, part, n, group)
            yield kind, {"bytes": 4.0 * elements, "group": float(n)}, _measure_together(run, seconds, device)


def _issue(kind: str, full: Tensor, part: Tensor, n: int, group) -> Run:
    out, splits = torch.empty_like(full), [full.numel() // n] * n
    calls = {
        "all_gather": lambda: all_gather_single(out, part, group=group, async_op=True),
        "reduce_scatter": lambda: reduce_scatter_single(part, full, group=group, async_op=True),
        "all_reduce": lambda: dist.all_reduce(full, group=group, async_op=True),
        "all_to_all": lambda: all_to_all(out, full, splits, splits, group),
    }
    return Run(run=lambda _: wait(calls[kind](), None))


def _measure_together(run: Run, seconds: float, device: torch.device) -> Timing:
    """All ranks repeat equally often: the number is agreed on after the first calls."""
    if device.type == "cuda":
        first = measure([run], device=device, seconds=0.0)
    else:
        run.run(None)
        first = _repeated(run, 5)
    repeats = torch.tensor([max(5.0, min(60.0, seconds / max(first.seconds, 1e-6)))], device=device)
    dist.all_reduce(repeats, op=dist.ReduceOp.MIN)
    return _repeated(run, int(repeats)) if device.type == "cpu" else measure([run] * 4, device=device, seconds=seconds)


def _repeated(run: Run, repeats: int) -> Timing:
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        run.run(None)
        times.append(time.perf_counter() - start)
    return summarize(times)


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
