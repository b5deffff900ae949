"""What batching policies leave of the imbalance between ranks: attention work that the runtime's loader deals, against `costmodel.imbalance`."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.results import Row
from costmodel.cluster import Reliability
from costmodel.imbalance import slowest
from costmodel.model import LayerGroup, Model, Sequence, TableGroup
from costmodel.plan import Batching
from costmodel.workload import EventSource, Lengths, Workload
from runtime import balance
from runtime.data import Loader, SyntheticSource

RANKS, STEPS = 8, 20
LENGTHS = Lengths(kind="lognormal", median=600.0, sigma=1.2, maximum=8192)
TARGETS = {1024: 1.03, 2048: 1.01}


def rows() -> Iterator[Row]:
    """Max over mean attention work of 8 ranks, by local batch, for arrival order and base batch shuffling, and the step's gain."""
    item = TableGroup(name="item", rows=1000, dim=16, pooling="sequence", sequence="history")
    layers = (LayerGroup(kind="self_attention", heads=2, head_dim=64, mlp_dim=256),)
    model = Model(name="balance", dim=128, tables=(item,), sequences=(Sequence(name="history", layers=layers),))
    for batch, target in TARGETS.items():
        found: dict[str, tuple[float, float]] = {}
        for policy in ("jagged", "base_batch_shuffling"):
            found[policy] = dealt(model, policy, batch), predicted(model, policy, batch)
        before, after = found["jagged"], found["base_batch_shuffling"]
        gains = [1.0 - b / a for a, b in zip(before, after)]
        note = f"dealt by the loader, mean of {STEPS} steps of {RANKS} ranks x {batch} histories, lognormal median 600, sigma 1.2, at most 8192"
        yield Row(name=f"balance: max / mean attention work, local batch {batch}, arrival order", value=before[0], unit="ratio", better="lower",
                  note=f"{note}; predicted {before[1]:.4f}")
        yield Row(name=f"balance: max / mean attention work, local batch {batch}, base batch shuffling", value=after[0], unit="ratio", target=target,
                  better="lower", note=f"{note}; predicted {after[1]:.4f}")
        yield Row(name=f"balance: gain of base batch shuffling, measured - predicted, local batch {batch}", value=abs(gains[0] - gains[1]) * 100,
                  unit="points", target=1.5, better="lower", note=f"attention work of the slowest rank: -{gains[0]:.1%}, predicted -{gains[1]:.1%}")


def dealt(model: Model, policy: Batching, batch: int) -> float:
    """What the loader's ranks get."""
    workload = Workload(name="balance", lengths={"history": LENGTHS}, local_batch=batch,
                        source=EventSource(kind="synthetic", num_events=STEPS * RANKS * batch))
    source = SyntheticSource(model, workload, seed=7)
    loader = Loader(source, global_batch=RANKS * batch, world_size=RANKS, batching=policy, seed=7)
    work = balance.attention_pairs(source.lengths(np.arange(source.num_train))["history"])
    return balance.imbalance(work, np.stack([loader.samples(step) for step in range(STEPS)]))


def predicted(model: Model, policy: Batching, batch: int) -> float:
    found = slowest(model, {"history": LENGTHS}, policy=policy, local_batch=batch, ranks=RANKS, devices_per_host=RANKS, reliability=Reliability())
    return found.sequences["history"].pairs
