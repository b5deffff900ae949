"""12 random executable plans over 2, 4 and 8 ranks train as one rank does, one launch per world size; the slow tests draw 12 on each."""
from __future__ import annotations

import json

import pytest
import random_plans
import runtime_models as models
import torch
from conftest import torchrun

from costmodel.plan import Layout
from planner.space import EXECUTABLE, predict_only_reasons


@pytest.fixture(scope="module")
def single() -> dict[str, list[float]]:
    """The curve of one rank by batching policy; the others consume samples in the order of `jagged`."""
    torch.set_num_threads(1)
    return {policy: random_plans.train(models.plan(Layout(), model_spec=random_plans.model(), batching=policy))
            for policy in ("jagged", "sorted_buckets")}


@pytest.mark.parametrize("count", [random_plans.NUM_PLANS, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", random_plans.WORLDS)
def test_random_plans_train_as_one_rank(world, count, single, tmp_path):
    done = torchrun(world, "tests/runtime/random_plans.py", str(tmp_path), str(count), timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    plans = random_plans.draw(world, count)
    for rank in range(world):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        twins = iter(found["twins"])
        for plan, losses in zip(plans, found["plans"], strict=True):
            expected = next(twins) if plan.batching == "local" else single.get(plan.batching, single["jagged"])
            assert losses == pytest.approx(expected, rel=1e-5), (plan.layout.short, plan.batching, plan.accumulation)


def test_the_plans_cover_what_is_called_executable():
    plans = [plan for world in random_plans.WORLDS for plan in random_plans.draw(world)]
    assert {p.batching for p in plans} == set(EXECUTABLE["batching"])
    assert {t.sharding for p in plans for t in p.tables} == set(EXECUTABLE["sharding"])
    assert {o.checkpoint for p in plans for r in p.regions for o in r.options} == set(random_plans.LOSSLESS)
    assert {p.layout.fully_sharded_2d for p in plans} == {p.layout.reshard_after_forward for p in plans} == {True, False}
    assert {(p.layout.ep, p.layout.expert_all_to_all) for p in plans} == {(1, False), (2, False), (2, True), (4, False), (4, True)}
    assert {p.layout.sparse_replicas > 1 for p in plans} == {p.layout.ddp > 1 for p in plans} == {True, False}
    assert {(p.input_overlap, p.layout.sparse_group > 1) for p in plans} >= {(True, True), (False, True)}
    replicated = [p for p in plans if p.layout.sparse_replicas > 1]
    assert {(p.layout.fully_sharded_2d, p.tables_ahead > 0) for p in replicated} >= {(True, True), (False, True), (False, False)}
    for plan in plans:
        options = {"batching": plan.batching, "transport": plan.transport, "execution": plan.execution}
        assert not predict_only_reasons(options=options, precisions={"fp32"}, shardings={t.sharding for t in plan.tables},
                                        checkpoints={o.checkpoint for r in plan.regions for o in r.options})
