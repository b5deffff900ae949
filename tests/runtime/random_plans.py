"""Random executable plans of one small model, and the launch that trains them.

    PYTHONPATH=.:tests/runtime python -m torch.distributed.run --standalone --nproc-per-node N tests/runtime/random_plans.py OUT COUNT

Rank r writes OUT/rank-r.json: losses of every plan, and of the plain twins of those whose global batches depend on the number of ranks (`local`).
Tables train with SGD, for which averaging replicas at every step is the update with the global mean gradient: every other plan must give the curve of
one rank that batches in the same order.
"""
from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from pathlib import Path

import runtime_models as models
import torch
from interaction_models import INTERFORMER, MOE, WUKONG, full_model

from costmodel.blocks.base import QUANTIZED
from costmodel.model import Model
from costmodel.plan import Layout, Plan, RegionOption, RegionPlan, TablePlacement
from costmodel.regions import regions
from planner.space import EXECUTABLE
from runtime import mesh
from runtime.data import open_source
from runtime.trainer import Trainer

LOSSLESS = tuple(policy for policy in EXECUTABLE["checkpoint"] if policy not in QUANTIZED)  # the others state a tolerance (test_precision_saved)
WORLDS, NUM_PLANS, NUM_STEPS = (2, 4, 8), 4, 4
WAYS = ((1, False), (2, False), (4, True), (2, True), (4, False))  # of spreading experts: (ep, by all-to-all)


def model() -> Model:
    return full_model(interaction_layers=(INTERFORMER, WUKONG), expert_layers=(dataclasses.replace(MOE, num_experts=4),),
                      tables=tuple(dataclasses.replace(t, optimizer="sgd") for t in models.TABLES))


def layouts(world: int) -> list[Layout]:
    """Every layout of `world` ranks."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    return [Layout(ddp=world // fsdp, fsdp=fsdp, ep=ep, expert_all_to_all=way, sparse_group=group, sparse_replicas=world // group,
                   reshard_after_forward=reshard, fully_sharded_2d=full)
            for fsdp in divisors for ep, way in WAYS if fsdp % ep == 0
            for group in divisors for reshard in (True, False) for full in (False, True) if not full or group < world]


def placements(rng: random.Random, layout: Layout) -> tuple[TablePlacement, ...]:
    found, group = [], layout.sparse_group
    known = [s for s in EXECUTABLE["sharding"] if s != "host_cached" or layout.sparse_replicas == 1]
    for table in model().tables:
        for name in table.names:
            sharding = rng.choice(known) if group > 1 else "table_wise"
            one, every = (rng.randrange(group),), tuple(rng.sample(range(group), group))
            ranks = {"table_wise": one, "host_cached": one, "column_wise": every}.get(sharding, ())
            found.append(TablePlacement(table=name, sharding=sharding, ranks=ranks))
    return tuple(found)


def draw(world: int, count: int = NUM_PLANS, *, seed: int = 10) -> list[Plan]:
    """`count` plans: batching policies, ways of experts and accumulation by turns that go on over world sizes, layouts without repetition, the rest
    at random."""
    rng, spec, batchings, plans = random.Random(seed + world), model(), EXECUTABLE["batching"], []
    left, first = layouts(world), WORLDS.index(world) * count
    for i in range(first, first + count):
        ways = [way for way in WAYS if way[0] <= world]
        own = [one for one in left if (one.ep, one.expert_all_to_all) == ways[i % len(ways)]]
        layout = rng.choice(own or left)
        left.remove(layout)
        policies = tuple(RegionPlan(region=r.name, options=tuple(RegionOption(count=1, checkpoint=rng.choice(LOSSLESS))
                                                                 for _ in range(r.count))) for r in regions(spec))
        plans.append(models.plan(layout, model_spec=spec, accumulation=1 + i % 2, input_overlap=i % 3 == 0,
                                 tables_ahead=(99, 0, 1, 99, 1)[i % 5], batching=batchings[i % len(batchings)],
                                 regions=policies, tables=placements(rng, layout)))
    return plans


def train(plan: Plan) -> list[float]:
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    trainer.train(NUM_STEPS)
    return trainer.losses


def plain(plan: Plan) -> Plan:
    """The same batches on one replica of table-wise tables, nothing sharded, nothing recomputed."""
    world = plan.layout.world_size
    return models.plan(Layout(ddp=world, sparse_group=world), model_spec=plan.model, accumulation=plan.accumulation, batching=plan.batching,
                       sharding="table_wise")


def main() -> None:
    out, world, rank = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    mesh.start(torch.device("cpu"))
    plans = draw(world, int(sys.argv[2]))
    twins = [plain(plan) for plan in plans if plan.batching == "local"]
    (out / f"rank-{rank}.json").write_text(json.dumps({"plans": [train(p) for p in plans], "twins": [train(p) for p in twins]}))
    mesh.leave()


if __name__ == "__main__":
    main()
