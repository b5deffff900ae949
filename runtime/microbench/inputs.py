"""Building batches, as the loader's consumer pays for it on the host: the plan's own source, at several batch sizes."""
from __future__ import annotations

import numpy as np
import torch

from costmodel.plan import Plan
from runtime.data import Source, open_source
from runtime.microbench.timing import Run, Timing, measure


def input_timings(plan: Plan, *, device: torch.device, seconds: float, source: Source | None = None) -> list[tuple[dict[str, float], Timing]]:
    """(features of `input`, timing) for the plan's local batch and powers of two around it, `seconds` each."""
    source = source or open_source(plan.model, plan.workload, seed=plan.seed)
    rng = np.random.default_rng(0)
    found = []
    for samples in sorted({max(1, int(plan.local_batch * 2.0**e)) for e in (-3, -2, -1, 0, 1)}):
        if samples > source.num_train:
            continue
        drawn = [rng.choice(source.num_train, size=samples, replace=False) for _ in range(8)]
        events = float(np.mean([sum(v.sum() for v in source.lengths(d).values()) for d in drawn]))
        runs = [Run(run=lambda _, d=d: source.build(d).to(device)) for d in drawn]
        found.append(({"samples": float(samples), "events": round(events)}, measure(runs, device=torch.device("cpu"), seconds=seconds)))
    return found
