"""Faults that people reported of other planners (shared notes: numbers are the projects' issues), each as a whole kind that must not happen here.

Optimizer state (torchrec #2652) is in test_memory, windows (torchtitan #4300) in test_blocks, topology (astra-sim #207) in test_estimate, NVLS
(nccl-tests #153) in test_comms, calibration columns (vidur #72) in test_calibration.
"""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costmodel.blocks import BLOCKS, EXPERT_BLOCKS, INTERACTION_BLOCKS, BatchShape, JaggedShape
from costmodel.calibration import fit
from costmodel.cluster import Cluster, LinkTier
from costmodel.codec import DecodeError, decode, encode
from costmodel.comms import GroupShape, Network, wire_factor
from costmodel.estimate import estimate
from costmodel.lower import lower
from costmodel.memory import option_memory
from costmodel.model import Layer, LayerGroup, Model, TableGroup
from costmodel.plan import TablePlacement
from costmodel.regions import regions
from costmodel.samples import Environment, Sample
from costmodel.sparse import table_loads


def history(length: int, samples: int = 4) -> BatchShape:
    return BatchShape(samples=samples, sequences={"history": JaggedShape.of_lengths([length] * samples)})


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_an_exchange_is_all_to_alls_of_what_is_asked_for_never_a_gather(make_plan, h200, sharding):
    """autoparallel #462: a redistribution from one split to another was costed through a replicated state."""
    ranks = 8
    plan = make_plan(device=h200, ranks=ranks, sharding=sharding, precision="bf16")
    found = lower(plan, None)
    moved = {t.name: t for t in found.graph.tasks if t.kind == "collective" and not t.region}
    assert set(moved) == {"counts", "ids", "embeddings", "gradients"}
    assert moved["embeddings"].bytes == moved["gradients"].bytes == pytest.approx(4.0 * found.loads.served.mean())
    whole_tables = sum(t.weight_bytes * t.count for t in plan.model.tables)
    outputs = 4.0 * found.loads.served.sum()  # what all ranks receive together, and what a gather would give to each of them
    assert moved["embeddings"].bytes <= outputs / ranks * (1 + 1e-12) < whole_tables * ranks


def test_the_reserve_is_kept_whatever_the_budget(make_plan, make_model, h200):
    """aiconfigurator #1396: a search filled 99.8 % of the card, for the fraction of one path overrode the engine's. 79.2 GB of tensors do not
    fit 80 GB."""
    small = estimate(make_plan(device=dataclasses.replace(h200, memory_bytes=80e9), ranks=1), None).memory
    rows = round((79.2e9 - small.peak.value) / (4 * 128))
    model = make_model()
    model = dataclasses.replace(model, tables=(*model.tables, TableGroup(name="big", rows=rows, dim=128, optimizer="sgd")))
    for budget in (None, 80e9, 200e9):
        plan = make_plan(model=model, device=dataclasses.replace(h200, memory_bytes=80e9), ranks=1)
        plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, memory_budget=budget))
        found = estimate(plan, None).memory
        assert found.peak.value == pytest.approx(79.2e9, rel=0.01) and found.limit == 80e9
        assert found.reserved.value > found.peak.value + 1e9 and not found.fits, budget


def test_parts_kept_in_bf16_cost_bf16(make_model):
    """aiconfigurator #1396: layers kept in bf16 under an fp8 recipe were counted as fp8."""
    for region in regions(make_model()):
        low, high = (option_memory(region, history(50), precision=p, checkpoint="none", fsdp=8) for p in ("bf16", "fp32"))
        eight = option_memory(region, history(50), precision="fp8_row", checkpoint="none", fsdp=8)
        assert low.unsharded == 2.0 * region.block.num_parameters == high.unsharded / 2
        assert eight.unsharded == low.unsharded and eight.sharded == low.sharded == 4.0 * region.block.sharded_elements(8)


@pytest.mark.parametrize("key", ["name", "dim", "tables"])
def test_a_missing_key_is_named_and_never_made_up(make_model, key):
    """aiconfigurator #1201: missing metadata became a made-up 70 GiB."""
    body = encode(make_model())
    del body[key]
    with pytest.raises(DecodeError, match=key):
        decode(Model, body)


LAYERS = {
    "self_attention": LayerGroup(kind="self_attention", heads=2, head_dim=16, mlp_dim=64),
    "gdpa": LayerGroup(kind="gdpa", heads=2, head_dim=16, activation="gelu", divisor=2.0),
    "block_attention": LayerGroup(kind="block_attention", heads=2, head_dim=16, block=32),
    "hstu": LayerGroup(kind="hstu", heads=2, head_dim=16, divisor=2.0),
    "llama": LayerGroup(kind="llama", heads=2, head_dim=16, mlp_dim=64, options={"kv_heads": 1}),
    "mask_net": LayerGroup(kind="mask_net", mlp_dim=64),
    "pyramid": LayerGroup(kind="pyramid", branches=(Layer(kind="self_attention", heads=2, head_dim=16), Layer(kind="hstu", heads=2, head_dim=16,
                                                                                                              divisor=2.0))),
}


@pytest.mark.parametrize("kind", sorted(BLOCKS))
@pytest.mark.parametrize("policy", ["none", "selective", "full", "quantized"])
def test_no_block_keeps_scores(kind, policy):
    """Megatron-LM #1784, #525: memory without flash attention grows with the square of the length. No attention here stores scores, so what is
    saved is proportional to the events."""
    block = BLOCKS[kind](LAYERS[kind], 32, "history")
    assert block.saved_bytes(history(8192), "bf16", policy) == pytest.approx(8 * block.saved_bytes(history(1024), "bf16", policy), rel=1e-12)
    assert block.workspace_bytes(history(8192), "bf16") == pytest.approx(8 * block.workspace_bytes(history(1024), "bf16"), rel=1e-12)


def test_every_expert_keeps_its_activations():
    """Megatron-LM #1784: the estimate knew dense layers only."""
    two, six = (EXPERT_BLOCKS["moe"](LayerGroup(kind="moe", num_experts=n, mlp_dim=64), 32).saved_bytes(history(4), "bf16", "none") for n in (2, 6))
    assert six - two == pytest.approx(4 * 2.0 * 4 * (2 * 64 + 32) + 4 * 2.0 * 4)  # up, GELU, down of four more experts, and their gates
    assert set(INTERACTION_BLOCKS) == {"wukong", "interformer", "dcn_cross"}


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"])
def test_tables_take_their_rows_not_a_rounded_capacity(make_model, make_plan, sharding):
    """recsys-examples #310: 17 million rows took the memory of 33.5 million."""
    rows, ranks = 17_000_000, 8
    model = make_model()
    big = TableGroup(name="big", rows=rows, dim=128)
    plan = make_plan(model=dataclasses.replace(model, tables=(*model.tables, big)), ranks=ranks)
    places = {"table_wise": (3,), "column_wise": (0, 1, 2, 3), "table_row_wise": (0, 1, 2, 3)}
    plan = dataclasses.replace(plan, tables=tuple(
        dataclasses.replace(t, sharding=sharding, ranks=places.get(sharding, ())) if t.table == "big" else t for t in plan.tables))
    loads = table_loads(plan, {"history": 100.0})
    others = sum(t.weight_bytes * t.count for t in model.tables)
    copies = ranks if sharding == "data_parallel" else 1
    assert loads.weights.sum() - others == pytest.approx(copies * rows * 128 * 4, rel=1e-12)
    assert loads.held["big"][2].max() <= -(-rows // 4) or sharding in ("table_wise", "column_wise", "data_parallel")


def test_all_reduce_busbw_is_no_link_bandwidth(h200):
    """nccl-tests #153, #312: 480 GB/s of NVLS all-reduce were fed as link bandwidth. A calibration of all-reduce only lends nothing to
    an all-gather."""
    samples = [Sample(op="all_reduce", variant="nccl", phase="step", features={"bytes": size, "group": 8.0},
                      seconds=1e-5 + size * wire_factor("all_reduce", 8) / 480e9) for size in (2.0**20, 2.0**24, 2.0**28, 2.0**31)]
    samples.append(Sample(op="adamw", phase="step", features={"parameters": 1e6, "tensors": 4.0}, seconds=1e-4, host_seconds=1e-5))
    calibration = fit(Environment(device_name="H200-SXM", device_kind="gpu"), samples, device=h200)
    cluster = Cluster(name="c", device=h200, num_hosts=1, devices_per_host=8, tiers=(
        LinkTier(name="nvlink", scope="host", bandwidth=450e9, latency=3e-6, in_network_reduction=True),))
    net, size = Network(cluster, calibration), 2.0**30

    def busbw(kind: str, ranks: int) -> float:
        return size * wire_factor(kind, ranks) / net.cost(kind, size, GroupShape(size=ranks)).seconds

    assert busbw("all_reduce", 8) == pytest.approx(480e9, rel=0.03)
    assert np.all([busbw(kind, 8) < 400e9 for kind in ("all_gather", "reduce_scatter", "all_to_all")]) and busbw("all_reduce", 4) < 400e9


def test_placements_outside_the_model_are_refused(make_plan):
    plan = make_plan()
    with pytest.raises(ValueError, match="placements without a table: ghost"):
        table_loads(dataclasses.replace(plan, tables=(*plan.tables, TablePlacement(table="ghost", sharding="row_wise"))), {"history": 1.0})
