"""Kernels compiled before anything is timed: processes that each run some of the plans' blocks once, and leave what Triton made of them in its cache.

    python -m runtime.microbench.warm PLAN ...

One process after another would compile for most of a short calibration. Plans whose layers need the same large kernels (kind, head dim, dtype) go to
one process, so that nothing is compiled twice; the processes are forks of one that has imported everything and touched no GPU yet.
"""
from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from costmodel import ops
from costmodel.blocks.attention import BIASED
from costmodel.blocks.measured import block_features
from costmodel.plan import Plan
from costmodel.regions import regions
from runtime.data import open_source
from runtime.microbench import cases, gpu
from runtime.microbench.requests import across, attention_requests

TIMEOUT = 100.0
# Even histories, as many as give each multiprocessor two (history, head) pairs, then uneven ones whose events are no multiple of 16: integers
# divisible by 16 get kernels of their own. Then a few of the plan's longest.
EVEN, PAIRS, UNEVEN, FULL = 272, 280, (300, 50, 21, 7), 4
_ROWS = 1000
SIXTEEN = 16.0
# Plans of longer histories are compiled by processes of their own.
LONG = 512


class Ahead:
    """The processes at work on `plans`."""

    def __init__(self, plans: list[Plan]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        paths = [Path(self._folder.name) / f"{i}.json" for i in range(len(plans))]
        for path, plan in zip(paths, plans):
            plan.save(path)
        self._log = Path(self._folder.name) / "log"
        with self._log.open("w") as log:
            self._child = subprocess.Popen([sys.executable, "-m", "runtime.microbench.warm", *map(str, paths)], stdout=log, stderr=subprocess.STDOUT,
                                           start_new_session=True)

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def wait(self, seconds: float = TIMEOUT) -> str:
        """Waits so long, ends what still runs, and says what failed; what could not be compiled ahead is compiled when it is timed."""
        try:
            self._child.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        said = self._log.read_text(errors="replace")[-1500:]
        self._folder.cleanup()
        return said


def grouped(plans: list[Plan]) -> list[list[Plan]]:
    """Plans by what their layers' large kernels depend on."""
    found: dict[tuple, list[Plan]] = {}
    for plan in plans:
        layers = [layer for s in plan.model.sequences for layer in s.layers]
        long = max((lengths.maximum for lengths in plan.workload.lengths.values()), default=0) > LONG
        found.setdefault((gpu.layer_precision(plan), long, *sorted({(layer.kind, layer.head_dim) for layer in layers})), []).append(plan)
    return list(found.values())


def run_blocks(plan: Plan, device: torch.device, *, layers_only: bool = False) -> int:
    """Forward and backward of every block of the plan, or of its layers, on small batches; returns how many blocks ran."""
    count, precision = 0, gpu.layer_precision(plan)
    heads = max((layer.heads for s in plan.model.sequences for layer in s.layers), default=1)
    longest = {s.name: plan.workload.lengths[s.name].maximum for s in plan.model.sequences}
    full = max(longest.values(), default=EVEN)  # tiles differ with the longest history
    for lengths in ([EVEN] * -(-PAIRS // heads), UNEVEN, [full] * FULL, (full, *UNEVEN[1:])):
        batch = gpu.Lengths(samples=len(lengths), lengths={name: np.minimum(lengths, most) for name, most in longest.items()})
        for region in regions(plan.model):
            if block_features(region.block, batch.shape) is None or (layers_only and not region.layer):
                continue
            block = gpu.build_block(plan, region, device, precision=precision, policy="none")
            run = gpu.block_run(plan, region, block, batch, device, precision, ops.BACKWARD)
            run.run(run.prepare())
            count += 1
        for request in attention_requests(plan, batch.lengths):
            # of layers over features or with a bias, which are timed op by op
            if (across(request) or request.op.variant.endswith(BIASED)) and cases.executable(request):
                run = cases.cases(request, ops.BACKWARD, device, 1)[0]
                run.run(run.prepare())
                count += 1
    return count


def run_wide(plan: Plan, device: torch.device) -> int:
    """Attention of the plan's layers in fp32, on 16 heads, a multiple of which has kernels of its own, and on others; returns how often it ran."""
    count, long = 0, max((lengths.maximum for lengths in plan.workload.lengths.values()), default=EVEN)
    for lengths in (UNEVEN, [long] * FULL):
        batch = {s.name: np.minimum(lengths, plan.workload.lengths[s.name].maximum) for s in plan.model.sequences}
        for request in attention_requests(plan, batch):
            values = dict(request.op.features)
            for heads in () if across(request) else (SIXTEEN, SIXTEEN - 1.0):
                one = dataclasses.replace(request.op, dtype="fp32", features=tuple((values | {"heads": heads}).items()))
                run = cases.cases(dataclasses.replace(request, op=one), ops.BACKWARD, device, 1)[0]
                run.run(run.prepare())
                count += 1
    return count


def run_tables(plan: Plan, device: torch.device) -> int:
    """Lookups and updates of the plan's tables, made small; returns how many were timed."""
    small = dataclasses.replace(plan, model=dataclasses.replace(plan.model, tables=tuple(
        dataclasses.replace(t, rows=min(t.rows, _ROWS)) for t in plan.model.tables)))
    source = open_source(small.model, small.workload, seed=0)
    return sum(len(list(gpu.sparse_samples(small, source, samples, device, seconds=0.0))) for samples in (4, 7))


def _work(what: str, paths: list[str]) -> None:
    """Runs `blocks`, `tables` or `wide` (fp32 attention) of the plans and says which it could not."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    start = time.perf_counter()
    for number, path in enumerate(paths):
        plan = Plan.load(path)
        try:
            if what == "blocks":
                run_blocks(plan, device, layers_only=number > 0 and not plan.model.interaction_layers)  # the rest of a plan compiles within a second
            elif what == "wide":
                run_wide(plan, device)
            else:
                run_tables(plan, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception:
            print(f"{what} of {plan.model.name}: {traceback.format_exc(limit=-2)}", flush=True)
    print(f"{what} of {len(paths)} plans: {time.perf_counter() - start:.0f} s", flush=True)


def _fork(what: str, paths: list[str]) -> int:
    """A process that does `_work`: this one's fork, or where CUDA does not start in a fork, a fresh one."""
    child = os.fork()
    if child:
        return child
    try:
        if torch.cuda.is_available():
            torch.cuda.init()
    except Exception as error:
        print(f"a fork has no CUDA: {error}", flush=True)
        os.execv(sys.executable, [sys.executable, "-m", "runtime.microbench.warm", "--here", what, *paths])
    try:
        _work(what, paths)
    finally:
        sys.stdout.flush()
        os._exit(0)


def _import_kernels() -> None:
    """Once for all forks."""
    for name in ("_attention_triton", "_hopper_launch", "_block_triton", "_embedding_triton", "_jagged_triton"):
        try:
            importlib.import_module(f"kernels.{name}")
        except ImportError as error:
            print(f"kernels.{name}: {error}", flush=True)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--here":
        return _work(arguments[1], arguments[2:])
    torch.set_num_threads(1)  # a fork has no other threads than the one that forked
    _import_kernels()
    plans = {path: Plan.load(path) for path in arguments}
    dims = {tuple(sorted({(t.dim, t.pooling) for t in plan.model.tables})): path for path, plan in reversed(plans.items())}
    paths = {id(plan): path for path, plan in plans.items()}
    jobs = [("tables", list(dims.values()))] + [("blocks", [paths[id(plan)] for plan in group]) for group in grouped(list(plans.values()))]
    kinds = {tuple(sorted({(g.kind, g.head_dim) for s in plan.model.sequences for g in s.layers})): path for path, plan in plans.items()}
    jobs += [("wide", [path]) for path in kinds.values()]
    for child in [_fork(*job) for job in jobs]:
        os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
