"""Fully sharded 2D on two gloo ranks: what rests, and the peak, against prediction. Started under torchrun by `benchmarks.train`.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.train_tables OUT

OUT gets measured.json: bytes of tables and their state at rest, plain and fully sharded, and the most that they reached in a step.
"""
from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.results import Row
from benchmarks.train_faults import tiny_plan
from costmodel.estimate import estimate
from costmodel.plan import Layout, Plan
from runtime import mesh
from runtime.data import open_source
from runtime.replicas import ReplicaShard
from runtime.trainer import Trainer

REPLICAS = 2


def plans() -> dict[str, Plan]:
    """One sparse group of one rank, two replicas of it."""
    layout = Layout(fsdp=2, sparse_group=1, sparse_replicas=REPLICAS)
    return {name: tiny_plan(dataclasses.replace(layout, fully_sharded_2d=name == "full"), steps=4, rows=60_000) for name in ("plain", "full")}


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    mesh.start(torch.device("cpu"))
    found = {name: measure(plan) for name, plan in plans().items()}
    if torch.distributed.get_rank() == 0:
        (out / "measured.json").write_text(json.dumps(found))
    mesh.leave()


def measure(plan: Plan) -> dict[str, float]:
    """Bytes at rest, and the most seen after any gather or average of a shard in three steps."""
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    storages = trainer.model.embeddings.storages
    most = 0

    def held() -> int:
        return sum(s.weight_bytes + s.state_bytes for s in storages)

    def watched(method):
        def call(self, timer) -> None:
            nonlocal most
            method(self, timer)
            most = max(most, held())
        return call

    gather, average = ReplicaShard.gather, ReplicaShard.average
    ReplicaShard.gather, ReplicaShard.average = watched(gather), watched(average)  # type: ignore[method-assign]
    try:
        trainer.train(3)
    finally:
        ReplicaShard.gather, ReplicaShard.average = gather, average  # type: ignore[method-assign]
    return {"resting": held(), "peak": max(most, held())}


def rows(measured: dict[str, dict[str, float]]) -> Iterator[Row]:
    """What main() found, against `costmodel.memory`."""
    predicted = {name: estimate(plan, None).memory.categories for name, plan in plans().items()}
    expected = predicted["full"]["tables"] + predicted["full"]["table_state"]
    resting, peak = measured["full"]["resting"], measured["full"]["peak"]
    yield Row(name="tables: fully sharded 2D, resting bytes over plain 2D, R = 2", value=resting / measured["plain"]["resting"], unit="ratio",
              target=0.505, better="lower", note=f"measured on 2 gloo ranks: {resting / 1e6:.3f} MB of {measured['plain']['resting'] / 1e6:.3f} MB; "
                                   "odd sizes are padded up")
    yield Row(name="tables: fully sharded 2D, |peak - predicted| / predicted", value=abs(peak / expected - 1) * 100, unit="%", target=5.0,
              better="lower", note=f"tracked tensors of tables and state: {peak / 1e6:.3f} MB, predicted {expected / 1e6:.3f} MB")


if __name__ == "__main__":
    main()
