"""Building batches, as the loader's consumer pays for it on the host: the plan's own source under each batching policy, at several batch sizes.

A step builds its batch once, after everything else has gone through the caches: a buffer larger than a core's share of them is written before each
build. Policies that arrange a window of steps at once are timed over a window, as every step pays its share.
"""
from __future__ import annotations

import statistics
import time
from typing import get_args

import torch

from costmodel.plan import Batching, Plan
from runtime.balance import LOOKAHEAD, window_steps
from runtime.data import Loader, Source, open_source
from runtime.microbench.timing import Timing, evict, summarize

# Padded batches are built as jagged ones; the model pads. Where a thread builds ahead of the device the policy is of no account.
POLICIES = {"cpu": tuple(policy for policy in get_args(Batching) if policy != "padded"), "cuda": ("jagged",)}


def input_timings(plan: Plan, *, device: torch.device, ranks: int = 1,
                  source: Source | None = None) -> list[tuple[str, dict[str, float], Timing]]:
    """(policy, features of `input`, timing) for the plan's local batch and powers of two around it on the first of `ranks` ranks."""
    source = source or open_source(plan.model, plan.workload, seed=plan.seed)
    found = []
    for policy in POLICIES[device.type]:
        for samples in sorted({max(1, int(plan.local_batch * 2.0**e)) for e in (-3, -2, -1, 0, 1)}):
            if 2 * LOOKAHEAD * samples * ranks > source.num_train:
                continue
            loader = Loader(source, global_batch=samples * ranks, world_size=ranks, seed=plan.seed, batching=policy)
            loader.build(0)  # shuffles the epoch
            times, events = [], []
            for step in range(LOOKAHEAD, 2 * LOOKAHEAD):
                evict()
                start = time.thread_time()
                batches = [batch.to(device) for batch in loader.build(step)]
                times.append(time.thread_time() - start)
                events += [float(ids[-1]) for batch in batches for ids in batch.sequence_offsets.values()]
            arranging = statistics.fmean(times) - statistics.median(times) if window_steps(policy) > 1 else 0.0
            features = {"samples": float(samples), "events": float(round(sum(events) / LOOKAHEAD))}
            found.append((policy, features, summarize([t + arranging for t in times])))
    return found
