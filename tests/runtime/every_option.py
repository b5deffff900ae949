"""Every option that is called executable, and those that a scenario pins, one at a time on top of a plain plan, and the launch that trains them.

    PYTHONPATH=.:tests/runtime python -m torch.distributed.run --standalone --nproc-per-node 2 tests/runtime/every_option.py OUT

Rank r writes OUT/rank-r.json: {name of the option: losses}. The assertions are in test_every_option.py.
"""
from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import get_args

import runtime_models as models
import torch

from costmodel.blocks.base import QUANTIZED
from costmodel.model import LayerGroup
from costmodel.plan import Layout, Plan, RecipeOption, RegionOption, RegionPlan, Wire
from costmodel.precision import LOW_PRECISIONS
from costmodel.regions import regions as known_regions
from planner.space import EXECUTABLE
from runtime import mesh, parallelize
from runtime.data import open_source
from runtime.trainer import Trainer

WORLD, STEPS = 2, 4
WHOLE = Layout(fsdp=WORLD, sparse_group=WORLD)
LOSSLESS, NARROW, LOW, OTHER = 1e-5, 2e-3, 5e-2, 0.1
"""Relative tolerances of a loss against one fp32 rank: sums in another order, 16 bits or another optimizer, below 16 bits, other samples."""


# Widths that every format below 16 bits divides into its blocks.
WIDE = models.model((LayerGroup(kind="self_attention", heads=2, head_dim=64, mlp_dim=128),), dim=128)


def low(precision: str, **changes) -> Plan:
    """The sequence's layer below 16 bits, the rest at 16."""
    regions = tuple(RegionPlan(region=r.name, options=(RegionOption(count=r.count, precision=precision if r.name == "history.0" else "bf16"),))
                    for r in known_regions(WIDE))
    return models.plan(WHOLE, model_spec=WIDE, regions=regions, **changes)


def plans() -> dict[str, tuple[Plan, float]]:
    """(plan, tolerance) by option. A transport for GPUs and CUDA graphs, which want one, are not here."""
    found = {}
    for precision in EXECUTABLE["precision"]:
        plan = low(precision) if precision in LOW_PRECISIONS else models.plan(WHOLE, precision=precision)
        found[f"precision {precision}"] = plan, {"fp32": LOSSLESS, "bf16": NARROW}.get(precision, LOW)
    for checkpoint in EXECUTABLE["checkpoint"]:
        narrow = checkpoint in QUANTIZED
        plan = models.plan(WHOLE, checkpoint=checkpoint, precision="bf16" if narrow else "fp32")
        found[f"checkpoint {checkpoint}"] = plan, NARROW if narrow else LOSSLESS
    for sharding in EXECUTABLE["sharding"]:
        found[f"sharding {sharding}"] = models.plan(WHOLE, sharding=sharding), NARROW if sharding == "column_wise" else LOSSLESS  # a state a shard
    for batching in EXECUTABLE["batching"]:
        # other samples in a step, or the same in another order
        found[f"batching {batching}"] = models.plan(WHOLE, batching=batching), OTHER if batching in ("local", "sorted_buckets") else LOSSLESS
    found["execution compile"] = models.plan(WHOLE, execution="compile"), LOSSLESS
    for wire in get_args(Wire):
        found[f"wire {wire}"] = models.plan(WHOLE, wire=wire), LOSSLESS if wire == "fp32" else NARROW
        found[f"wire_gradients {wire}"] = models.plan(WHOLE, wire_gradients=wire), LOSSLESS if wire == "fp32" else NARROW
    for option in get_args(RecipeOption):
        found[f"recipe {option}"] = low("fp8_tensor" if option == "static_scales" else "fp8_row", recipe=(option,)), LOW
    found["gather_dtype fp8"] = models.plan(WHOLE, precision="bf16", gather_dtype="fp8"), LOW
    found["reduce_dtype bf16"] = models.plan(WHOLE, precision="bf16", reduce_dtype="bf16"), NARROW
    for name, layout in {"ddp": Layout(ddp=WORLD, sparse_group=WORLD), "keep": dataclasses.replace(WHOLE, reshard_after_forward=False)}.items():
        found[f"layout {name}"] = models.plan(layout), LOSSLESS
    replicas = Layout(fsdp=WORLD, sparse_group=1, sparse_replicas=WORLD)
    for name, layout in {"plain 2D": replicas, "every other step": dataclasses.replace(replicas, sync_every=2),
                         "fully sharded 2D": dataclasses.replace(replicas, fully_sharded_2d=True)}.items():
        found[f"layout {name}"] = models.plan(layout), NARROW  # Adagrad of replicas is another optimizer
    found["tables_ahead"] = models.plan(dataclasses.replace(replicas, fully_sharded_2d=True), tables_ahead=3), NARROW
    found["moment_scaled"] = models.plan(replicas, moment_scaled=True), NARROW
    found["input_overlap"] = models.plan(WHOLE, input_overlap=True), LOSSLESS
    found["accumulation"] = models.plan(WHOLE, accumulation=2), LOSSLESS
    return found


def train(plan: Plan) -> list[float]:
    torch._dynamo.reset()
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    trainer.train(STEPS)
    return trainer.losses


def main() -> None:
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    parallelize.COMPILER = "aot_eager"  # what compiles is tested there; code for it takes minutes
    mesh.start(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = {name: train(plan) for name, (plan, _) in plans().items()}
    (out / f"rank-{rank}.json").write_text(json.dumps(losses))
    mesh.leave()


if __name__ == "__main__":
    main()
