"""A torch.profiler trace of chosen steps on every rank: DIR/traces/rank-R.json.gz opens in Perfetto, and `planner diagnose` accounts for it.

Annotations: `step:N`, `phase:NAME` as `runtime.phases` has them, `region:NAME` around a block's forward, `recompute` around what checkpointing
runs again. The trace's metadata key `planner` holds what no event shows, see `_Observed`.

The step before the first traced one is observed (the largest and the root mean square activation of each region); its time and that of the
traced steps hold the profiler's own work, so a run's median is what to compare with predictions.
"""
from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from runtime.trainer import Trainer

FOLDER = "traces"


def parse_steps(text: str) -> tuple[int, int]:
    """`5:8` is steps 5, 6 and 7 (from 0). Raises ValueError."""
    first, _, last = text.partition(":")
    try:
        begin, end = int(first), int(last)
    except ValueError:
        raise ValueError(f"trace steps {text!r}: FIRST:END is needed, e.g. 5:8 for steps 5, 6 and 7") from None
    if not 0 <= begin < end:
        raise ValueError(f"trace steps {text!r}: 0 <= FIRST < END is needed")
    return begin, end


@dataclasses.dataclass(slots=True)
class _Observed:
    """What a trace's events do not hold, JSON-ready.

    steps: by step, events of this rank's histories (`events`), events computed (`computed`, padding included), causal pairs of both
    (`pairs`, `computed_pairs`).
    activations: by region, `largest` |x| over the root mean square (`rms`) of its output.
    """

    rank: int
    world_size: int
    plan: str
    batching: str
    steps: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    activations: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


class Tracer:
    """Traces steps [first, end) of a trainer. Attach it once, before training."""

    def __init__(self, trainer: Trainer, folder: Path, *, first: int, end: int) -> None:
        self._trainer, self._first, self._end = trainer, first, end
        meshes = trainer.meshes
        self.path = folder / FOLDER / f"rank-{meshes.rank}.json.gz"
        self._observed = _Observed(rank=meshes.rank, world_size=meshes.world_size, plan=trainer.plan.identity(), batching=trainer.plan.batching)
        self._profile: profile | None = None
        self._open: list[record_function] = []
        self._regions: dict[int, list[record_function]] = {}
        self._wrap_timer()
        trainer.model.dense.register_forward_pre_hook(self._note_batch)
        for name, blocks in _regions(trainer).items():
            for block in blocks:
                block.register_forward_pre_hook(lambda module, args, name=name: self._enter_region(module, name))
                block.register_forward_hook(lambda module, args, output, name=name: self._leave_region(module, name, output))

    @property
    def _tracing(self) -> bool:
        return self._profile is not None

    def _wrap_timer(self) -> None:
        """The trainer's timer goes on as it did; its boundaries are the annotations'."""
        timer = self._trainer.timer
        start, enter, leave, end = timer.start_step, timer.enter, timer.leave, timer.end_step

        def start_step() -> None:
            step = self._trainer.step
            if step == self._first:
                self._start()
            start()
            if self._tracing:
                self._push(f"step:{step}")

        def enter_phase(name: str) -> None:
            enter(name)
            if self._open:
                self._push(f"phase:{name}")

        def leave_phase(name: str) -> None:
            if len(self._open) > 1:
                self._pop()
            leave(name)

        def end_step() -> None:
            if self._open:
                self._pop()
            end()
            if self._tracing and self._trainer.step + 1 >= self._end:
                self.close()

        timer.start_step, timer.enter, timer.leave, timer.end_step = start_step, enter_phase, leave_phase, end_step  # type: ignore[method-assign]

    def _push(self, name: str) -> None:
        mark = record_function(name)
        mark.__enter__()
        self._open.append(mark)

    def _pop(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def _start(self) -> None:
        cuda = self._trainer.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
        self._profile.start()

    def close(self) -> None:
        """Ends a trace in progress and writes it. A run that stops early leaves the steps that it had."""
        if self._profile is None:
            return
        while self._open:
            self._pop()
        running, self._profile = self._profile, None
        running.add_metadata_json("planner", json.dumps(dataclasses.asdict(self._observed)))
        running.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self.path))

    # --- hooks ---

    def _note_batch(self, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not self._tracing:
            return
        batch, padded = arguments[1], self._trainer.plan.batching == "padded"
        noted = self._observed.steps.setdefault(str(self._trainer.step), dict.fromkeys(("events", "computed", "pairs", "computed_pairs"), 0.0))
        for name, offsets in batch.sequence_offsets.items():
            lengths = offsets.diff().double()
            run = torch.full_like(lengths, batch.max_lengths[name]) if padded else lengths
            for kind, counted in (("", lengths), ("computed_", run)):
                noted[kind.rstrip("_") or "events"] += float(counted.sum())
                noted[kind + "pairs"] += float((counted * (counted + 1) / 2).sum())

    def _enter_region(self, module: nn.Module, name: str) -> None:
        if self._tracing:
            mark = record_function(f"region:{name}")
            mark.__enter__()
            self._regions.setdefault(id(module), []).append(mark)

    def _leave_region(self, module: nn.Module, name: str, output: Any) -> None:
        if self._regions.get(id(module)):
            self._regions[id(module)].pop().__exit__(None, None, None)
        elif self._trainer.step == self._first - 1 and isinstance(output, torch.Tensor) and output.numel():
            values = output.detach().float()
            found = {"largest": float(values.abs().max()), "rms": float(values.square().mean().sqrt())}
            kept = self._observed.activations.setdefault(name, found)
            if found["largest"] > kept["largest"]:
                self._observed.activations[name] = found


def _regions(trainer: Trainer) -> dict[str, list[nn.Module]]:
    found = {}
    for name, places in trainer.model.dense.regions().items():
        found[name] = [getattr(parent, at) if not at.isdigit() else parent[int(at)] for parent, at in places]  # type: ignore[index]
    return found
