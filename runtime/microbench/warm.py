"""Kernels compiled before anything is timed: processes that each run some of the plans' blocks once, and leave what Triton made of them in its cache.

    python -m runtime.microbench.warm PART PARTS PLAN ...     the plans PART, PART + PARTS, ...

One process after another would compile for most of a short calibration; many at once need as many cores.
"""
from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from costmodel import ops
from costmodel.blocks.measured import block_features
from costmodel.plan import Plan
from costmodel.regions import regions

MOST_PROCESSES, TIMEOUT = 12, 100.0
# Histories of the batches that are run: their events are a multiple of 16 once and once not, for which kernels are compiled separately.
_LENGTHS = ((48, 80, 64, 64), (33, 50, 21, 7))
_ROWS = 1000


def compile_ahead(plans: list[Plan]) -> int:
    """Runs the processes for all plans; returns how many there were. What one of them could not do is compiled when it is timed."""
    count = max(1, min(MOST_PROCESSES, len(plans), (os.cpu_count() or 2) // 2))
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        paths = [Path(folder) / f"{i}.json" for i in range(len(plans))]
        for path, plan in zip(paths, plans):
            plan.save(path)
        command = [sys.executable, "-m", "runtime.microbench.warm"]
        children = []
        for i in range(count):
            with (Path(folder) / f"{i}.log").open("w") as log:
                children.append(subprocess.Popen([*command, str(i), str(count), *map(str, paths)], stdout=log, stderr=subprocess.STDOUT))
        until = time.perf_counter() + TIMEOUT
        for i, child in enumerate(children):
            try:
                failed = child.wait(max(0.1, until - time.perf_counter()))
            except subprocess.TimeoutExpired:
                child.kill()
                failed = child.wait()
            if failed:
                sys.stderr.write((Path(folder) / f"{i}.log").read_text(errors="replace")[-2000:])
    return count


def run_blocks(plan: Plan, device: torch.device) -> int:
    """Forward and backward of every block of the plan, and its tables, on small batches; returns how many blocks ran."""
    from runtime.data import open_source
    from runtime.microbench import gpu

    count, precision = 0, gpu.layer_precision(plan)
    for lengths in _LENGTHS:
        longest = {s.name: plan.workload.lengths[s.name].maximum for s in plan.model.sequences}
        batch = gpu.Lengths(samples=len(lengths), lengths={name: np.minimum(lengths, most) for name, most in longest.items()})
        for region in regions(plan.model):
            if block_features(region.block, batch.shape) is None:
                continue
            block = gpu.build_block(plan, region, device, precision=precision, policy="none")
            run = gpu.block_run(plan, region, block, batch, device, precision, ops.BACKWARD)
            run.run(run.prepare())
            count += 1
    small = dataclasses.replace(plan, model=dataclasses.replace(plan.model, tables=tuple(
        dataclasses.replace(t, rows=min(t.rows, _ROWS)) for t in plan.model.tables)))
    source = open_source(small.model, small.workload, seed=0)
    for samples in (4, 7):
        list(gpu.sparse_samples(small, source, samples, device, seconds=0.0))
    return count


def main(arguments: list[str]) -> None:
    part, parts, paths = int(arguments[0]), int(arguments[1]), arguments[2:]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for path in paths[part::parts]:
        run_blocks(Plan.load(path), device)
        if device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
