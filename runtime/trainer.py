"""The training loop. It executes a plan's step and measures it; how the step is distributed is `runtime.parallelize`'s affair.

One step, phase by phase (every `wait` inside is `exposed_communication`; what is not listed is `other`):

    input      the step's micro-batches from the loader, copied to the device
    per micro-batch (with `input_overlap` the ids of the next one are exchanged meanwhile, and a step's batches are taken during the step before):
      sparse     ids exchanged, rows looked up and exchanged (runtime.embedding)
      forward    dense model and loss; FSDP all-gathers (runtime.parallelize)
      backward   dense backward; FSDP all-gathers and reductions
      sparse     row gradients exchanged; on the last micro-batch the fused update of the tables
    optimizer  AdamW on this rank's shards, gradients dropped
    other      the step's report: an all-reduce of (loss, stop), issued here and waited for at the end of the NEXT step

The report is late by one step so that no step waits for the slowest rank or, on CUDA, for the device. All ranks read the same
report, so they stop at the same step whichever rank caught the signal, and a loss that is not finite ends the run on all of them.
"""
from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from costmodel.codec import content_hash
from costmodel.plan import Plan
from costmodel.runresult import PHASES, Measured, MeasuredMemory, StepTime
from runtime import checkpoint, memory
from runtime.batch import Batch
from runtime.data import Loader, Source, evaluation_batches
from runtime.embedding import Distribution
from runtime.loss import model_loss
from runtime.mesh import Meshes, build_meshes, wait
from runtime.metrics import Metrics
from runtime.model import GEM
from runtime.optimizer import build_dense_optimizer
from runtime.parallelize import Parallelized, parallelize
from runtime.phases import PhaseTimer
from runtime.quality import NormalizedEntropy

WARMUP_STEPS = 3
PREFETCH = 6  # steps whose batches are built ahead on a GPU's host
TRACKED_STEP = 1  # whose saved activations are counted; the first step also allocates what lives for the whole run


class NonFiniteLoss(RuntimeError):
    """The loss of `step` (from 0) is NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the loss of step {step} is {loss}; parameters are not usable any more, resume from a checkpoint with a lower "
                         "learning rate or another precision")
        self.step = step


class StepReport:
    """Sums (loss, stop) over ranks, one step late."""

    def __init__(self, meshes: Meshes, timer: PhaseTimer) -> None:
        self._meshes, self._timer = meshes, timer
        self._pending: tuple[int, Tensor, dist.Work | None] | None = None
        self._cuda = meshes.device.type == "cuda"
        if self._cuda:
            # read through pinned memory behind a stream of its own: reading the device tensor would wait for the step enqueued since
            self._stream, self._arrived = torch.cuda.Stream(), torch.cuda.Event()
            self._landing = torch.empty(2, pin_memory=True)

    def post(self, step: int, loss: Tensor, *, stop: bool) -> None:
        """loss: 0-dim, this rank's share of the global mean loss."""
        value = torch.stack([loss.detach().float(), torch.full_like(loss, float(stop), dtype=torch.float32)])
        work = dist.all_reduce(value, async_op=True) if self._meshes.world_size > 1 else None
        if self._cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                if work is not None:
                    work.wait()
                self._landing.copy_(value, non_blocking=True)
                self._arrived.record()
            value.record_stream(self._stream)
            value, work = self._landing, None
        self._pending = (step, value, work)

    def collect(self) -> tuple[int, float, bool] | None:
        """(step, global mean loss, stop asked) of the step posted last, or None."""
        if self._pending is None:
            return None
        step, value, work = self._pending
        self._pending = None
        wait(work, self._timer)
        if self._cuda:
            self._arrived.synchronize()
        loss, stop = value.tolist()
        return step, loss, stop > 0


class Trainer:
    """A plan set up on this rank. `losses[i]`: mean loss of step i over the global batch.

    timer: a PhaseTimer that watches more. stop: asked after every step; a true answer on any rank ends training on all ranks at the same step.
    """

    def __init__(self, plan: Plan, source: Source, *, device: torch.device, metrics: Metrics | None = None,
                 stop: Callable[[], bool] = lambda: False, timer: PhaseTimer | None = None) -> None:
        self.plan, self.source, self.device, self._stop = plan, source, device, stop
        self.metrics = metrics or Metrics(None, resume=False, progress=False)
        self.meshes = build_meshes(plan.layout, device)
        self.timer = timer or PhaseTimer(device)
        torch.manual_seed(plan.seed)
        with device:
            model = GEM(plan.model)
        self.model: Parallelized = parallelize(model, plan=plan, meshes=self.meshes, timer=self.timer)
        self.optimizer = build_dense_optimizer(model.parameters(), lr=plan.workload.learning_rate, weight_decay=plan.workload.weight_decay)
        self.loader = self._loader(0)
        self.step = 0
        self.losses: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.saved_activations: int | None = None
        self.interrupted = False
        self.checkpoint_seconds: list[float] = []
        self._saving: checkpoint.Saving | None = None
        self._taken: list[Batch] = []
        self._distribution: Distribution | None = None

    def _loader(self, start: int) -> Loader:
        return Loader.of_plan(self.plan, self.source, rank=self.meshes.rank, start=start, prefetch=self._prefetch, pin=self._prefetch > 0)

    @property
    def _prefetch(self) -> int:
        return PREFETCH if self.device.type == "cuda" else 0

    @property
    def checkpoint_bytes(self) -> float:
        """Of this rank's part."""
        return float(sum(v for k, v in self._memory().items() if v and k in ("parameters", "optimizer", "tables", "table_state")))

    @property
    def samples_per_rank(self) -> int:
        """A rank's samples of one optimizer step, the divisor of its loss sum; the global mean is the mean over ranks."""
        return self.plan.local_batch * self.plan.accumulation

    # --- training ---

    def train(self, num_steps: int | None = None, *, checkpoint_every: int | None = None, root: Path | None = None) -> None:
        """Trains up to optimizer step `num_steps` of the whole training (default: what the workload says).

        Every `checkpoint_every` steps a checkpoint is written under `root`, outside the timed steps. Returns early with `interrupted`
        set where a stop was asked. Raises NonFiniteLoss.
        """
        total = self.loader.num_steps if num_steps is None else min(num_steps, self.loader.num_steps)
        report = StepReport(self.meshes, self.timer)
        batches = iter(self.loader)
        gc.freeze()  # what lives for the whole run is not walked again and again by the collector, in whatever step it falls
        try:
            while self.step < total and not self.interrupted:
                self._step(batches, report, total)
                if checkpoint_every and self.step % checkpoint_every == 0 and self.step < total and not self.interrupted:
                    self._read_report(report, total)
                    self.save(root, wait=False)
                    self.timer.pause()
            self._read_report(report, total)
            self.model.embeddings.settle()
        finally:
            gc.unfreeze()
            self.timer.abandon_step()
            if self._taken:  # by a step that then did not run
                self.loader.position -= self.loader.global_batch
                self._taken, self._distribution = [], None
            batches.close() if hasattr(batches, "close") else None

    def _step(self, batches: Iterator[tuple[Batch, ...]], report: StepReport, total: int) -> None:
        timer = self.timer
        timer.start_step()
        microbatches, self._taken = self._taken or self._take(batches), []
        track, losses = len(self.phases) == TRACKED_STEP, []
        for i, batch in enumerate(microbatches):
            following, last = microbatches[i + 1:i + 2], i + 1 == len(microbatches)
            if last and self.plan.input_overlap and self.step + 1 < total:
                following = self._taken = self._take(batches)
            losses.append(self._microbatch(batch, following[0] if following else None, last=last, track=track and i == 0))
        with timer.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._read_report(report, total)
        report.post(self.step, torch.stack(losses).sum() / self.meshes.world_size, stop=self._stop())
        timer.end_step()
        self.step += 1
        self.phases += timer.finished()

    def _take(self, batches: Iterator[tuple[Batch, ...]]) -> list[Batch]:
        """A step's micro-batches, on the device."""
        stream = self.model.embeddings.stream if self.plan.input_overlap else None
        with self.timer.phase("input"), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            return [b.to(self.device, non_blocking=True) for b in next(batches)]

    def _microbatch(self, batch: Batch, following: Batch | None, *, last: bool, track: bool) -> Tensor:
        """Forward and backward; returns this rank's share of its mean loss, detached. `following`: the next micro-batch."""
        timer, model = self.timer, self.model
        model.set_last_microbatch(last)
        tracker = memory.StorageTracker() if track else None
        if tracker is not None:
            tracker.__enter__()
            if self._distribution is not None:  # of this micro-batch, made during the last one: it keeps every id's place until backward
                tracker.watch(place for _, place in self._distribution.keys.values())
        with timer.phase("sparse"):
            leaves, self._distribution = model.embeddings.forward(batch, self._distribution), None
            if self.plan.input_overlap and following is not None:
                self._distribution = model.embeddings.distribute(following)
        with timer.phase("forward"):
            loss = model_loss(model.dense(leaves, batch), batch.labels) / self.samples_per_rank
        if tracker is not None:
            tracker.__exit__(None, None, None)
            under_way = self._distribution.tensors() if self._distribution is not None else []
            gathered = memory.storage_ids((*model.dense.parameters(), *batch.tensors(), *under_way))
            self.saved_activations = tracker.alive_bytes(gathered)
        with timer.phase("sparse"):
            model.embeddings.send(self._distribution)
            model.embeddings.before_backward(last_microbatch=last)
        # in this thread: one that waits at the interpreter's lock between two Python functions takes a fifth of a small step [Measured: H200 host]
        with timer.phase("backward"), torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        with timer.phase("sparse"):
            model.embeddings.backward(last_microbatch=last)
        return loss.detach()

    def _read_report(self, report: StepReport, total: int) -> None:
        found = report.collect()
        if found is None:
            return
        step, loss, stop = found
        if not math.isfinite(loss):
            raise NonFiniteLoss(step, loss)
        self.losses.append(loss)
        if self.phases:
            self.metrics.step(step, total, loss, self.phases[-1])
        self.interrupted = stop

    # --- evaluation ---

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Normalized entropy of every task on the held-out events; the same on every rank."""
        heads = self.plan.model.heads
        entropies = [NormalizedEntropy() for _ in heads]
        batches = evaluation_batches(self.source, batch=self.plan.local_batch, world_size=self.meshes.world_size, rank=self.meshes.rank,
                                     prefetch=self._prefetch)
        for done, (of, batch) in enumerate(batches):
            self.metrics.working("evaluating", done=done, of=of)
            batch = batch.to(self.device)
            output = self.model.dense(self.model.embeddings.forward(batch), batch)
            logits = (output[0] if isinstance(output, tuple) else output).float().cpu().numpy()
            self.model.embeddings.discard()
            labels = batch.labels.cpu().numpy()
            for i, entropy in enumerate(entropies):
                entropy.update(logits[:, i], labels[:, i])
        sums = torch.tensor([e.sums() for e in entropies], dtype=torch.float64, device=self.device)
        if self.meshes.world_size > 1:
            dist.all_reduce(sums)
        return {head.name: NormalizedEntropy(*row).value() for head, row in zip(heads, sums.tolist())}

    # --- checkpoints ---

    def save(self, root: Path, *, wait: bool = True) -> None:
        """A checkpoint of the state between two steps; without `wait` it is written while training goes on. Collective."""
        lap = wall_clock()
        self.settle()
        progress = checkpoint.Progress(step=self.step, position=self.step * self.loader.global_batch, model=content_hash(self.plan.model),
                                       losses=tuple(self.losses))
        self._saving = checkpoint.save(root, progress, model=self.model.dense, optimizer=self.optimizer, embeddings=self.model.embeddings)
        if wait:
            self.settle()
        self.checkpoint_seconds.append(lap())

    def settle(self) -> None:
        """Wait for the checkpoint that is being written. Collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of this plan or of another plan for the same model and global batch. Collective."""
        progress = checkpoint.load(path, model=self.model.dense, optimizer=self.optimizer, embeddings=self.model.embeddings,
                                   fingerprint=content_hash(self.plan.model))
        self.step, self.losses = progress.step, list(progress.losses)
        self.loader = self._loader(progress.position)

    # --- measurements ---

    def measured(self) -> tuple[Measured | None, int]:
        """Timings of the steps after the warm-up, over all ranks, and how many steps the warm-up had. Collective."""
        self.phases += self.timer.finished(wait=True)
        warmup = min(WARMUP_STEPS, len(self.phases) - 1) if self.phases else 0
        own = np.array([[p[name] for name in PHASES] for p in self.phases[warmup:]])
        sizes = self._memory()
        everyone: list = [(own, sizes)]
        if self.meshes.world_size > 1:
            everyone = [None] * self.meshes.world_size
            dist.all_gather_object(everyone, (own, sizes))
        if not len(own):
            return None, warmup
        phases = np.mean([p for p, _ in everyone], axis=0)
        steps = phases.sum(axis=1)
        largest = {key: _largest([s[key] for _, s in everyone]) for key in sizes}
        return Measured(
            step_time_s=StepTime(median=float(np.median(steps)), mean=float(steps.mean()), p10=float(np.percentile(steps, 10)),
                                 p90=float(np.percentile(steps, 90))),
            phases_s=dict(zip(PHASES, phases.mean(axis=0).tolist())), memory_bytes=MeasuredMemory(**largest),
            examples_per_second=self.loader.global_batch / float(statistics.median(steps.tolist()))), warmup

    def _memory(self) -> dict[str, float | None]:
        stored = self.model.embeddings.storages
        sizes = {**memory.dense_bytes(self.model.dense, self.optimizer), "tables": sum(s.weight_bytes for s in stored),
                 "table_state": sum(s.state_bytes for s in stored), "saved_activations": self.saved_activations,
                 "peak_allocated": None, "reserved": None}
        if self.device.type == "cuda":
            sizes["peak_allocated"], sizes["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return sizes


def _largest(values: list[float | None]) -> float | None:
    known = [float(v) for v in values if v is not None]
    return max(known) if known else None


def wall_clock() -> Callable[[], float]:
    """Seconds since the last call."""
    last = time.perf_counter()

    def lap() -> float:
        nonlocal last
        now = time.perf_counter()
        last, spent = now, now - last
        return spent

    return lap


__all__ = ["NonFiniteLoss", "Trainer", "wall_clock"]
