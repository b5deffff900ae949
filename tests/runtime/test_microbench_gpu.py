"""The GPU microbenchmark's cases on this machine's CPU: every sample can be fitted, and what is timed does what the trainer does."""
import dataclasses
import time

import numpy as np
import pytest
import torch

from benchmarks.fidelity_gpu_space import _one, _with_crossing, _with_interactions
from benchmarks.fidelity_space import _subject
from costmodel.blocks.measured import measured_block_ops
from costmodel.cluster import Cluster, Device
from costmodel.ops import linear
from costmodel.plan import Plan
from costmodel.regions import regions
from runtime.data import open_source
from runtime.microbench import cases, gpu
from runtime.microbench.requests import Request, requests

CPU = torch.device("cpu")
H200 = Device(name="H200-SXM", kind="gpu", peak_flops={"fp32": 67e12, "bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12)


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, workload = _subject("tiny", {
        "kind": "hstu", "dim": 32, "heads": 2, "depth": 2, "mlp_factor": 2, "num_tables": 3, "rows": 100, "table_dim": 16, "maximum": 20,
        "length_kind": "uniform", "global_batch": 8, "dense": 4,
    })  # fmt: skip
    return _one(model, workload, Cluster(name="one", device=H200, num_hosts=1, devices_per_host=1, tiers=()))


def test_every_region_is_timed_in_both_directions_and_layers_under_every_policy(plan):
    (batch, _) = gpu.batches(plan, np.random.default_rng(0))
    samples = list(gpu.block_samples(plan, batch, CPU, precision="bf16", policies=gpu.POLICIES, seconds=0.0))
    assert {(s.op, s.variant, s.phase) for s in samples} == {
        (f"block:{kind}", "", phase) for kind in ("sequence_input", "hstu", "summary", "mlp", "heads") for phase in ("forward", "backward")
    } | {("block:hstu", "selective", "backward"), ("block:hstu", "full", "backward")}
    for sample in samples:
        assert measured_block_ops(sample.op.removeprefix("block:"), sample.features, sample.dtype)
    few = gpu.block_samples(plan, batch, CPU, precision="bf16", policies=("none",), seconds=0.0, layers_only=True)
    assert {(s.op, s.phase) for s in few} == {("block:hstu", "forward"), ("block:hstu", "backward")}


def test_layers_over_features_are_timed_as_the_ops_that_they_are_priced_by(plan):
    model = _with_interactions(plan.model, 16, 2, 4, 3, 24)
    crossed = _one(model, plan.workload, plan.cluster)
    (batch, _) = gpu.batches(crossed, np.random.default_rng(0))
    samples = [s for s in gpu.block_samples(crossed, batch, CPU, precision="bf16", policies=gpu.POLICIES, seconds=0.0) if s.op == "block:wukong"]
    assert [(s.phase, s.variant, s.features["first"]) for s in samples] == [
        ("forward", "", 1.0), ("backward", "", 1.0), ("forward", "", 0.0), ("backward", "", 0.0)]  # fmt: skip
    own = [r.block for r in regions(model) if r.kind == "wukong"]
    for block, sample in zip(own, samples[::2]):
        assert measured_block_ops("wukong", sample.features, "bf16") == block.forward(batch.shape, "bf16")


def test_layers_between_features_and_histories_are_timed_with_both(plan):
    crossed = _one(_with_crossing(_with_interactions(plan.model, 16, 1, 4, 3, 24)), plan.workload, plan.cluster)
    (batch, _) = gpu.batches(crossed, np.random.default_rng(0))
    samples = [s for s in gpu.block_samples(crossed, batch, CPU, precision="bf16", policies=("none",), seconds=0.0) if s.op == "block:interformer"]
    assert [(s.phase, s.variant, s.features["first"]) for s in samples] == [("forward", "", 1.0), ("backward", "", 1.0)]
    block = next(r.block for r in regions(crossed.model) if r.kind == "interformer")
    assert measured_block_ops("interformer", samples[0].features, "bf16") == block.forward(batch.shape, "bf16")


def test_a_smaller_batch_is_timed_too(plan):
    assert [b.samples for b in gpu.batches(dataclasses.replace(plan, local_batch=30), np.random.default_rng(0))] == [30, 10]


def test_each_timed_update_changes_the_table(plan, monkeypatch):
    updates = []
    monkeypatch.setattr(gpu.ShardedEmbeddings, "_update", lambda self: updates.append([len(p) for p in self._pending.values()]) or [
        p.clear() for p in self._pending.values()])  # fmt: skip
    source = open_source(plan.model, plan.workload, seed=0)
    samples = list(gpu.sparse_samples(plan, source, 8, CPU, seconds=0.0))
    assert {(s.op, s.variant) for s in samples} == {("embedding_lookup", "sequence"), ("embedding_lookup", "pooled"),
                                                    ("embedding_update", "rowwise_adagrad")}  # fmt: skip
    assert updates and all(found == [1] for found in updates)
    for sample in samples:
        sample.as_op()
        assert sample.features["unique"] <= sample.features["ids"]


def test_what_cannot_be_timed_is_said_and_costs_nothing_else():
    def taken():
        yield gpu.constant("context_bytes", 1.0)
        raise torch.OutOfMemoryError("no room\nfor this")

    said = []
    assert [s.seconds for s in gpu.attempted(taken(), "plan 3", said.append)] == [1.0]
    assert said == ["plan 3: the rest cannot be timed: OutOfMemoryError: no room"]


def test_ops_stop_with_the_clock(plan):
    assert not list(gpu.op_samples([plan], CPU, points=0.1, seconds=0.0, until=time.perf_counter()))


def test_every_timed_optimizer_step_has_gradients(plan, monkeypatch):
    given = []
    build = gpu.build_dense_optimizer

    def watched(parameters, **options):
        parameters = list(parameters)
        optimizer = build(parameters, **options)
        optimizer.register_step_pre_hook(lambda *_: given.append(sum(p.grad is not None for p in parameters)))
        return optimizer

    monkeypatch.setattr(gpu, "build_dense_optimizer", watched)
    features = gpu.optimizer_sample(plan, CPU, seconds=0.0).features
    assert given and set(given) == {features["tensors"]}


def test_later_plans_are_timed_by_their_layers_and_fp32_at_one_batch(plan, monkeypatch):
    monkeypatch.setattr(gpu, "WHOLE_PLANS", 1)
    large = dataclasses.replace(plan, local_batch=12)
    said = []
    found = list(gpu.device_samples([large, large], CPU, until=time.perf_counter() + 60, seconds=0.0, report=said.append))
    assert len(said) == 2 and {s.op for s in found} >= {"block:hstu", "input", "adamw", "embedding_update"}
    (whole, layers) = found[: len(found) - 8], found[-8:]  # two batches under none, selective and full
    assert {s.op for s in layers} == {"block:hstu"} and sum(s.op == "block:hstu" for s in whole) == 8
    wide = dataclasses.replace(large, regions=tuple(dataclasses.replace(r, options=tuple(
        dataclasses.replace(o, precision="fp32") for o in r.options)) for r in plan.regions))
    assert len(list(gpu.plan_samples(wide, CPU, np.random.default_rng(0), 0.0, layers_only=True))) == 2


def test_every_kind_has_its_turn_and_nothing_is_lost(plan):
    wanted = requests([plan], points=0.2, gpu=True)
    found = gpu.in_turns(wanted, np.random.default_rng(0))
    assert sorted(map(repr, found)) == sorted(map(repr, wanted)) and found != wanted
    kinds = {(r.op.kind, r.op.variant, r.op.dtype) for r in wanted}
    first = found[:sum(gpu.TURNS.get((kind, dtype), 1) for kind, _, dtype in kinds)]
    assert {(r.op.kind, r.op.variant, r.op.dtype) for r in first} == kinds


def test_blocks_and_products_below_16_bits_are_timed_as_such(plan):
    device = dataclasses.replace(H200, native_formats=("bf16", "fp8_row"), peak_flops={**H200.peak_flops, "fp8": 1979e12})
    low = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device), recipe=("low_weight_gradients",), regions=tuple(
        dataclasses.replace(r, options=tuple(dataclasses.replace(o, precision="fp8_row") for o in r.options)) if r.region == "history.0" else r
        for r in plan.regions))
    assert gpu.layer_precision(low) == "fp8_row" and gpu.layer_precision(plan) == "bf16"
    samples = list(gpu.plan_samples(low, CPU, np.random.default_rng(0), 0.0))
    assert {s.dtype for s in samples if s.op == "block:hstu"} == {"fp8_row"}
    products = [r for r in requests([low], points=0.3, gpu=True) if r.op.kind == "linear" and r.op.dtype == "fp8_row"]
    assert len(products) > 10
    for request in products:
        m, k, n = (int(v) for _, v in request.op.features)
        assert cases.executable(request) and not k % 16 and not n % 16
        if m * k * n < 1e7:
            assert cases.cases(request, "forward", CPU, 1)[0].run(None).shape == (m, n)


def test_attention_is_timed_at_every_plan_in_two_batches_and_in_fp32(plan):
    other = dataclasses.replace(plan, local_batch=2 * plan.local_batch)
    found = gpu.attention_ops([plan, other])
    assert {r.op.variant for r in found} == {"hstu"} and {r.op.dtype for r in found} == {"bf16", "fp32"}
    assert len(found[0].lengths) == plan.local_batch and found[0].op.feature("tokens") == sum(found[0].lengths)
    assert len({r.op for r in found}) == len(found) and max(len(r.lengths) for r in found if r.op.dtype == "fp32") < plan.local_batch
    timed = list(gpu.timed_op(found[0], CPU, 0.0, host=False))
    assert [s.phase for s in timed] == ["forward", "backward"] and all(s.host_seconds is None and s.seconds > 0 for s in timed)


def test_large_ops_come_first_in_the_turn_of_their_kind():
    """Not always: every kind's range is to be covered whenever the clock stops."""
    wanted = [Request(op=linear(float(m), 64, 64, "bf16")) for m in (10, 10**7)] * 40
    places = [i for i, r in enumerate(gpu.in_turns(wanted, np.random.default_rng(0))) if r.op.feature("m") > 100]
    assert len(places) == 40 and np.mean(places) < 25
