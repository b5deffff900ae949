"""Kernels compiled before anything is timed: processes that run what a calibration times, once and on small batches, and leave what Triton made of it
in its cache.

    python -m runtime.microbench.warm PLAN ... [-- PLAN ...]

One process after another would compile for most of a short calibration. Work is cut into jobs that share no large kernel, one attention op each, and
processes, one less than there are cores, take the next job when they have done one; they are forks of one that has imported everything and touched no
GPU yet. Plans behind `--` are run later; theirs is compiled too.
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
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from costmodel import ops
from costmodel.blocks.measured import block_features
from costmodel.plan import Plan
from costmodel.regions import regions
from runtime.data import open_source
from runtime.microbench import cases, gpu
from runtime.microbench.requests import Request, attention_requests

TIMEOUT = 100.0
# Histories beside the longest, which are no multiple of 16 together: integers divisible by 16 get kernels of their own.
UNEVEN = (300, 50, 21, 7)
# (history, head) pairs that a small batch of attention has at least: two for each multiprocessor.
PAIRS = 280
# Above so many histories attention has other kernels.
MANY = 4096
SIXTEEN = 16
# Histories that some kernels have tiles of their own for.
SHORT = 256
_ROWS = 1000
# In which order kinds of jobs are done: attention of 16 bits takes longest and is timed first; fp32 is left to the end.
ORDER = ("attention", "tables", "blocks", "fp32")
# What a process says of a job that it has done; bytes of a job's number in the queue; a job that takes so long is named [s].
DONE, _NUMBER, LONG_JOB = "did ", 2, 20.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process compiles at a time: `attention` (of `request`), `tables` or `blocks` of a plan. twin: whether an earlier job differs in the
    longest history or the number of events alone, so that it may need nothing new."""

    what: str
    plan: Plan
    request: Request | None = None
    twin: bool = False

    @property
    def kind(self) -> str:
        """`what`, or `fp32` where that is what it computes in."""
        dtype = self.request.op.dtype if self.request is not None else gpu.layer_precision(self.plan) if self.what == "blocks" else ""
        return "fp32" if dtype == "fp32" else self.what


class Ahead:
    """The processes at work on `plans`."""

    def __init__(self, plans: list[Plan], later: Sequence[Plan] = ()) -> None:
        self._jobs = jobs(plans, later)
        self._said: str | None = None  # all of the log, once it was waited for
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        paths = [Path(self._folder.name) / f"{i}.json" for i in range(len(plans) + len(later))]
        for path, plan in zip(paths, (*plans, *later)):
            plan.save(path)
        self._log = Path(self._folder.name) / "log"
        arguments = [*map(str, paths[:len(plans)]), "--", *map(str, paths[len(plans):])]
        with self._log.open("w") as log:
            self._child = subprocess.Popen([sys.executable, "-m", "runtime.microbench.warm", *arguments], stdout=log, stderr=subprocess.STDOUT,
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
        self._said = self._log.read_text(errors="replace")
        self._folder.cleanup()
        said = "\n".join(line for line in self._said.splitlines() if not line.startswith(DONE))[-4000:]
        return f"{len(self._done())} of {len(self._jobs)} jobs; {said}"

    def _done(self) -> list[Job]:
        said = self._log.read_text(errors="replace") if self._said is None else self._said
        said = said[:said.rfind("\n") + 1]  # no line that is being written
        return [self._jobs[int(line.removeprefix(DONE))] for line in said.splitlines() if line.startswith(DONE)]

    @property
    def compiled(self) -> frozenset[tuple[Hashable, ...]]:
        """`kernels` of the attention that was compiled up to now."""
        return frozenset(kernels(job.request) for job in self._done() if job.request is not None)

    def has(self, plan: Plan) -> bool:
        """Whether the kernels of all attention of the plan's layers were compiled; of an even number of events or another, whichever."""
        known = {key[:-2] for key in self.compiled}
        lengths = {name: np.full(4, lengths.maximum) for name, lengths in plan.workload.lengths.items()}
        return all(kernels(r)[:-2] in known for r in attention_requests(plan, lengths) if cases.executable(r))


def jobs(plans: Sequence[Plan], later: Sequence[Plan] = ()) -> list[Job]:
    """What is to be compiled for a calibration by `plans` and for runs of `later`, in order: attention of 16 bits, tables, blocks, fp32; no two
    jobs of attention need the same kernels."""
    known: set[Hashable] = set()
    found = _attention(((r, plans[0]) for r in gpu.attention_ops(list(plans))), known)
    rng, runs = np.random.default_rng(5), []
    for plan in later:
        lengths = {s.name: plan.workload.lengths[s.name].sample(rng, max(4, plan.local_batch)) for s in plan.model.sequences}
        for request in attention_requests(plan, lengths):
            # one of many steps has a number of events that 16 divides, or not, where histories differ in length
            fixed = len(set(request.lengths)) == 1
            other = dataclasses.replace(request, lengths=_parity(request.lengths, even=not _even(request)))
            runs += [(one, plan) for one in ((request,) if fixed else (request, other)) if cases.executable(one)]
    found += _attention(runs, known) + _others((*plans, *later))
    # twins last: nobody compiles the same at the same time then
    return sorted(found, key=lambda job: (ORDER.index(job.kind), job.twin))


def _attention(wanted: Iterable[tuple[Request, Plan]], known: set) -> list[Job]:
    """A job for each kind of kernels that is not in `known`, where it is kept."""
    found = []
    for request, plan in wanted:
        key = kernels(request)
        if key not in known:
            features = dict(request.op.features)
            alike = dataclasses.replace(request.op, features=tuple((features | {"longest": SHORT + float(features["longest"] > SHORT)}).items()))
            rough = "alike", *kernels(dataclasses.replace(request, op=alike))[:-2]
            found.append(Job(what="attention", plan=plan, request=request, twin=rough in known))
            known |= {key, rough}
    return found


def _others(plans: Sequence[Plan]) -> list[Job]:
    """Tables and blocks, each kind once."""
    found, seen = [], set()
    for plan in plans:
        for what, key in (("tables", tuple(sorted({(t.dim, t.pooling, t.sequence is None, t.optimizer, t.dtype) for t in plan.model.tables}))),
                          ("blocks", (gpu.layer_precision(plan), plan.model.dim, plan.model.feature_dim, *sorted({
                              (g.kind, g.head_dim, bool(g.mlp_dim)) for s in plan.model.sequences for g in s.layers}),
                              *sorted({(g.kind, g.mlp_dim) for g in plan.model.interaction_layers})))):
            if (what, key) not in seen:
                seen.add((what, key))
                found.append(Job(what=what, plan=plan))
    return found


def kernels(request: Request) -> tuple[Hashable, ...]:
    """What the kernels of an attention op depend on."""
    features = dict(request.op.features)
    longest = 1 << (int(features["longest"]) - 1).bit_length()
    options = tuple((name, value) for name, value in request.options if name != "divisor")
    return request.op.variant, request.op.dtype, features["head_dim"], options, longest, features["heads"] % SIXTEEN == 0, _even(request), len(
        request.lengths) > MANY


def _even(request: Request) -> bool:
    return sum(request.lengths) % SIXTEEN == 0


def _parity(lengths: tuple[int, ...], *, even: bool) -> tuple[int, ...]:
    """The histories, one of them changed by a few events so that 16 divides their sum, or not; never the longest one, which comes first."""
    first, *rest = sorted(lengths, reverse=True)
    rest = rest or [SIXTEEN]
    off = (first + sum(rest[:-1])) % SIXTEEN
    fitting = (n for n in range(max(1, min(rest[-1], first) - SIXTEEN), first + 1) if ((off + n) % SIXTEEN == 0) == even)
    return (first, *rest[:-1], next(fitting, rest[-1]))


def shrunk(request: Request) -> Request:
    """The op on fewer histories, the longest among them, that needs the same kernels."""
    features = dict(request.op.features)
    count = max(len(UNEVEN), -(-PAIRS // int(features["heads"])), MANY + 1 if len(request.lengths) > MANY else 0)
    if count >= len(request.lengths):
        return request
    longest, *rest = sorted(request.lengths, reverse=True)
    kept = _parity((longest, *rest[::-1][:count - 1]), even=_even(request))
    return dataclasses.replace(request, lengths=kept, op=dataclasses.replace(request.op, features=tuple(
        (features | {"tokens": float(sum(kept)), "longest": float(max(kept))}).items())))


def run_attention(request: Request, device: torch.device) -> None:
    """Forward and backward of an attention op on a small batch."""
    run = cases.cases(shrunk(request), ops.BACKWARD, device, 1)[0]
    run.run(run.prepare())


def run_blocks(plan: Plan, device: torch.device) -> int:
    """Forward and backward of every block of the plan on two small batches; returns how many ran."""
    count, precision = 0, gpu.layer_precision(plan)
    longest = {s.name: plan.workload.lengths[s.name].maximum for s in plan.model.sequences}
    full = max(longest.values(), default=UNEVEN[0])  # tiles differ with the longest history
    for lengths in ((full, *UNEVEN[1:]), _parity((full, *UNEVEN[1:], *(SIXTEEN,) * (SIXTEEN - len(UNEVEN))), even=True)):
        batch = gpu.Lengths(samples=len(lengths), lengths={name: np.minimum(lengths, most) for name, most in longest.items()})
        for region in regions(plan.model):
            if block_features(region.block, batch.shape) is None:
                continue
            block = gpu.build_block(plan, region, device, precision=precision, policy="none")
            run = gpu.block_run(plan, region, block, batch, device, precision, ops.BACKWARD)
            run.run(run.prepare())
            count += 1
    return count


def run_tables(plan: Plan, device: torch.device) -> int:
    """Lookups and updates of the plan's tables, made small; returns how many were timed."""
    small = dataclasses.replace(plan, model=dataclasses.replace(plan.model, tables=tuple(
        dataclasses.replace(t, rows=min(t.rows, _ROWS)) for t in plan.model.tables)))
    source = open_source(small.model, small.workload, seed=0)
    return sum(len(list(gpu.sparse_samples(small, source, samples, device, seconds=0.0))) for samples in (4, 7))


def run_job(job: Job, device: torch.device) -> None:
    """Does a job."""
    if job.request is not None:
        run_attention(job.request, device)
    elif job.what == "tables":
        run_tables(job.plan, device)
    else:
        run_blocks(job.plan, device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _work(wanted: list[Job], queue: int) -> None:
    """Takes numbers of jobs from a pipe, which several processes read, until it is empty; says which it could not do, and which took long."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    while number := os.read(queue, _NUMBER):
        job, start = wanted[int.from_bytes(number, "little")], time.perf_counter()
        name = f"{job.what} {job.request.op.variant} {job.request.op.dtype}" if job.request is not None else f"{job.what} of {job.plan.model.name}"
        try:
            run_job(job, device)
            print(f"{DONE}{int.from_bytes(number, 'little')}", flush=True)
        except Exception:
            print(f"{name}: {traceback.format_exc(limit=-2)}", flush=True)
        took = time.perf_counter() - start
        if took > LONG_JOB:
            print(f"{name}: {took:.0f} s", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _fork(wanted: list[Job], queue: int, arguments: list[str]) -> int:
    """A process that does `_work`: this one's fork, or where CUDA does not start in a fork, a fresh one."""
    child = os.fork()
    if child:
        return child
    try:
        if torch.cuda.is_available():
            torch.cuda.init()
    except Exception as error:
        print(f"a fork has no CUDA: {error}", flush=True)
        os.execv(sys.executable, [sys.executable, "-m", "runtime.microbench.warm", "--here", str(queue), *arguments])
    try:
        _work(wanted, queue)
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
    queue = None
    if arguments[0] == "--here":
        queue, arguments = int(arguments[1]), arguments[2:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    wanted = jobs([Plan.load(path) for path in arguments[:cut]], [Plan.load(path) for path in arguments[cut + 1:]])
    if queue is not None:
        return _work(wanted, queue)
    start = time.perf_counter()
    torch.set_num_threads(1)  # a fork has no other threads than the one that forked
    _import_kernels()
    queue, filled = os.pipe()
    os.set_inheritable(queue, True)
    os.write(filled, b"".join(number.to_bytes(_NUMBER, "little") for number in range(len(wanted))))  # far fewer than a pipe holds
    os.close(filled)
    children = [_fork(wanted, queue, arguments) for _ in range(min(len(wanted), max(1, (os.cpu_count() or 2) - 1)))]
    for child in children:
        os.waitpid(child, 0)
    print(f"{len(wanted)} jobs in {len(children)} processes: {time.perf_counter() - start:.0f} s", flush=True)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
