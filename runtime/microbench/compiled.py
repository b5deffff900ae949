"""What the compiler makes of a block (`costmodel.execution`), on one GPU: constants `compiled` and `compiled_host`, seconds of the device and of the
main thread over those of the same block uncompiled, both timed in turns."""
from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from costmodel.hosttime import PASSES
from costmodel.plan import Plan
from costmodel.regions import Region, regions
from costmodel.samples import Sample
from runtime.microbench import gpu
from runtime.microbench.gpu import Report, constant
from runtime.microbench.timing import measure
from runtime.mixed_precision import compute_in
from runtime.parallelize import PARAM_DTYPES, compile_block

# Rounds in which an eager and a compiled block take turns, seconds each.
ROUNDS, SECONDS = 3, 0.02


def compiled_samples(plans: Sequence[Plan], device: torch.device, *, until: float, report: Report = lambda _: None) -> Iterator[Sample]:
    """One block of each kind of region in bf16, of the first plan that has it, until the clock says `until`."""
    wanted: dict[str, tuple[Plan, Region]] = {}
    for plan in plans:
        if gpu.layer_precision(plan) == "bf16":
            for region in regions(plan.model):
                wanted.setdefault(region.kind, (plan, region))
    for number, (kind, (plan, region)) in enumerate(wanted.items()):
        if time.perf_counter() > until:
            report(f"out of time for compiled blocks before kind {number + 1}/{len(wanted)}")
            return
        yield from gpu.attempted(_compiled(plan, region, device, report), f"compiled {kind}", report)


def _compiled(plan: Plan, region: Region, device: torch.device, report: Report) -> Iterator[Sample]:
    batch, begin = gpu.batches(plan, np.random.default_rng(7))[0], time.perf_counter()
    blocks = [block_for(plan, region, device, compiled=compiled) for compiled in (False, True)]
    for phase in PASSES:
        runs = [gpu.block_run(plan, region, block, batch, device, "bf16", phase) for block in blocks]
        for run in runs:
            run.run(run.prepare())
        took = time.perf_counter() - begin
        rounds = [[measure([run], device=device, seconds=SECONDS) for run in runs] for _ in range(ROUNDS)]
        device_ratio = statistics.median(c.seconds / e.seconds for e, c in rounds)
        hosts = [(e.host_seconds, c.host_seconds) for e, c in rounds if e.host_seconds and c.host_seconds]
        host_ratio = min(c for _, c in hosts) / min(e for e, _ in hosts) if hosts else 1.0
        report(f"compiled {region.kind} {phase}: device {device_ratio:.3f}, host {host_ratio:.2f} of eager; ready after {took:.1f} s")
        yield constant("compiled", device_ratio, f"{phase}:{region.kind}")
        yield constant("compiled_host", host_ratio, f"{phase}:{region.kind}")


def block_for(plan: Plan, region: Region, device: torch.device, *, compiled: bool) -> nn.Module:
    """A block of the region in bf16, as the trainer runs it."""
    if not compiled:
        return gpu.build_block(plan, region, device, precision="bf16", policy="none")
    block = gpu.build_block(plan, region, device, precision="fp32", policy="none")
    compile_block(block)
    compute_in(block, PARAM_DTYPES["bf16"])
    return block
