"""The vectorised bound is the scalar one, and a bound."""
from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from costmodel.batch import COLUMNS, BatchBound
from costmodel.batch_blocks import BlockPrices
from costmodel.calibration import Calibration, fit
from costmodel.cluster import Cluster, Device, LinkTier, Reliability
from costmodel.imbalance import slowest_rank
from costmodel.lower import Factors, Lowered, batch_shape, lower
from costmodel.model import Head, LayerGroup, Model, Sequence, TableGroup
from costmodel.plan import Layout, Plan, RegionOption, RegionPlan, TablePlacement
from costmodel.pricer import pricer
from costmodel.regions import regions
from costmodel.samples import Environment, Sample
from costmodel.simulate import bound, simulate
from costmodel.workload import Lengths, Workload

BATCHINGS = ("jagged", "padded", "local", "sorted_buckets", "base_batch_shuffling", "global")
TRANSPORTS = ("nccl", "ncclx", "copy_engine")
EXECUTIONS = ("eager", "compile", "cuda_graph")
H200 = Device(name="H200-SXM", kind="gpu", peak_flops={"fp32": 67e12, "bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12, num_sms=132,
              host_link_bandwidth=55e9)
CORE = Device(name="core", kind="cpu", peak_flops={"fp32": 1e11, "bf16": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)


def template(device: Device = H200, *, dim: int = 256, precision: str = "bf16", checkpoint: str = "selective", hosts: int = 8, per_host: int = 4,
             speed: float = 1.0, experts: int = 0) -> Plan:
    model = Model(name="m", dim=dim, num_dense_features=16, bottom_hidden=(64,), interaction_hidden=(512, 128), heads=(Head(name="like"),),
                  expert_layers=(LayerGroup(kind="moe", count=2, num_experts=experts, mlp_dim=256),) if experts else (), tables=(
        TableGroup(name="event", rows=50_000, dim=64, count=2, pooling="sequence", sequence="history"),
        TableGroup(name="user", rows=200_000, dim=128, count=5, ids_per_sample=8),
        TableGroup(name="tiny", rows=40, dim=32)),
        sequences=(Sequence(name="history", layers=(LayerGroup(kind="self_attention", count=3, heads=4, head_dim=64, mlp_dim=4 * dim),
                                                    LayerGroup(kind="hstu", count=2, heads=4, head_dim=64, divisor=64.0))),))
    tiers = (LinkTier(name="nvlink", scope="host", bandwidth=450e9 * speed, latency=3e-6),
             LinkTier(name="rdma", scope="zone", bandwidth=50e9 * speed, latency=8e-6),
             LinkTier(name="spine", scope="cluster", bandwidth=50e9 * speed, latency=12e-6, oversubscription=4.0))
    cluster = Cluster(name="c", device=device, num_hosts=hosts, devices_per_host=per_host, hosts_per_zone=max(1, hosts // 2), tiers=tiers,
                      reliability=Reliability(slow_node_probability=0.01, slow_node_factor=1.2, step_jitter=0.01))
    first = regions(model)
    options = tuple(RegionPlan(region=r.name, options=(
        RegionOption(count=r.count, precision=precision, checkpoint=checkpoint),) if r.count == 1 else (
        RegionOption(count=1, precision=precision, checkpoint="none"), RegionOption(count=r.count - 1, precision=precision, checkpoint=checkpoint)))
        for r in first)
    return Plan(scenario="s", cluster=cluster, model=model, layout=Layout(ddp=hosts * per_host, sparse_group=hosts * per_host), local_batch=8,
                workload=Workload(name="w", lengths={"history": Lengths(kind="lognormal", maximum=512, median=90, sigma=1.0)}, global_batch=4096),
                regions=options, tables=tuple(TablePlacement(table=n, sharding="row_wise") for t in model.tables for n in t.names))


def candidates(plan: Plan, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    world = plan.cluster.num_ranks
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    zone = [d for d in divisors if d <= plan.cluster.scope_size("zone")]
    fsdp, group = rng.choice(zone, count), rng.choice(divisors, count)
    replicas = world // group
    most = plan.cluster.devices_per_host if plan.model.expert_layers else 1
    ep = np.array([rng.choice([d for d in divisors if n % d == 0 and d <= most]) for n in fsdp])
    return {
        "ddp": world // fsdp, "fsdp": fsdp, "ep": ep, "expert_all_to_all": (rng.random(count) < 0.5) & (ep > 1),
        "sparse_group": group, "sparse_replicas": replicas,
        "fully_sharded_2d": ((replicas > 1) & (rng.random(count) < 0.4)).astype(np.int64), "sync_every": rng.choice([1, 4], count),
        "reshard_after_forward": rng.integers(0, 2, count), "local_batch": rng.choice([1, 4, 8, 32, 128], count),
        "accumulation": rng.choice([1, 1, 2, 3, 7], count), "batching": rng.integers(0, len(BATCHINGS), count),
        "transport": rng.integers(0, len(TRANSPORTS) if plan.cluster.device.kind == "gpu" else 1, count),
        "execution": rng.integers(0, len(EXECUTIONS) if plan.cluster.device.kind == "gpu" else 1, count)}


def of_slowest(plan: Plan, calibration: Calibration | None = None) -> tuple[Lowered, float]:
    """What a search bounds and simulates: the slowest rank's graph from an idle host, and by how much slow nodes stretch it."""
    slowest = slowest_rank(plan)
    factors = {name: Factors(tokens=f.tokens, pairs=f.pairs) for name, f in slowest.sequences.items()}
    return lower(plan, calibration, factors=factors), slowest.slow_node


def bounds_of(plan: Plan) -> BatchBound:
    return BatchBound(plan, None, batchings=BATCHINGS, transports=TRANSPORTS, executions=EXECUTIONS)


@pytest.mark.parametrize("plan", [
    template(), template(speed=20.0), template(speed=0.05), template(dim=1024, checkpoint="full"),
    template(dim=64, precision="fp32", checkpoint="none"),
    template(hosts=1, per_host=8), template(hosts=1, per_host=1), template(hosts=1, per_host=1, precision="fp32", checkpoint="none"),
    template(hosts=4, per_host=1, speed=0.3), template(CORE, hosts=1, per_host=2, precision="fp32", dim=64),
    template(CORE, hosts=1, per_host=1, dim=64), template(precision="fp8_row", checkpoint="quantized"),
    dataclasses.replace(template(), wire="int4"), dataclasses.replace(template(CORE, hosts=1, per_host=2, dim=64), wire="fp8", wire_gradients="int8"),
    dataclasses.replace(template(), gather_dtype="fp8", reduce_dtype="bf16"), dataclasses.replace(template(experts=4), gather_dtype="fp8"),
    template(experts=4), template(hosts=1, per_host=8, experts=8, checkpoint="full"), template(speed=0.05, experts=4),
    template(CORE, hosts=1, per_host=2, precision="fp32", dim=64, experts=2),
], ids=["base", "fast links", "slow links", "large", "launch-bound", "one host", "one gpu", "one gpu fp32", "one a host", "cpu", "one core", "8 bits",
        "4-bit wire", "8-bit wire on cpu", "8-bit gather", "8-bit gather of experts", "experts",
        "experts on one host", "experts on slow links", "experts on cpu"])
@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_equals_the_scalar_bound_and_is_below_the_simulation(plan, count):
    columns = candidates(plan, count, seed=len(plan.model.name) + plan.cluster.num_hosts)
    batch = bounds_of(plan)
    found = batch.seconds(columns)
    for i in range(len(found)):
        one = batch.plan(columns, i)
        lowered, slow = of_slowest(one)
        assert found[i] == pytest.approx(bound(lowered.graph) * slow, rel=1e-9), (i, one.layout.short, one.accumulation)
        if i % 5 == 0:
            assert found[i] <= simulate(lowered.graph).step_seconds * slow * (1 + 1e-9)


@pytest.mark.parametrize("plan", [template(), template(speed=0.05), template(CORE, hosts=1, per_host=2, precision="fp32", dim=64)],
                         ids=["base", "slow links", "cpu"])
def test_with_overlapped_ids_the_bound_stays_below_the_simulation(plan):
    plan = dataclasses.replace(plan, input_overlap=True)
    columns, batch = candidates(plan, 16, seed=3), bounds_of(plan)
    found, serial = batch.seconds(columns), bounds_of(dataclasses.replace(plan, input_overlap=False)).seconds(columns)
    for i, seconds in enumerate(found):
        lowered, slow = of_slowest(batch.plan(columns, i))
        assert seconds <= min(bound(lowered.graph), simulate(lowered.graph).step_seconds) * slow * (1 + 1e-9), i
        assert seconds <= serial[i] * (1 + 1e-9)


def test_refuses_what_does_not_fit():
    plan = template()
    batch, columns = bounds_of(plan), candidates(plan, 4)
    with pytest.raises(ValueError, match="columns execution are missing"):
        batch.seconds({k: v for k, v in columns.items() if k != "execution"})
    with pytest.raises(ValueError, match="differ in length"):
        batch.seconds({**columns, "ddp": columns["ddp"][:2]})
    with pytest.raises(ValueError, match="needs 64 ranks"):
        batch.seconds({**columns, "ddp": np.full(4, 64), "fsdp": np.ones(4), "sparse_group": np.full(4, 64), "sparse_replicas": np.ones(4)})
    with pytest.raises(ValueError, match="is not ddp x fsdp"):
        batch.seconds({**columns, "sparse_group": columns["sparse_group"] * 2})
    assert set(COLUMNS) == set(columns)


@pytest.mark.slow
def test_speed():
    plan = template()
    batch, columns = bounds_of(plan), candidates(plan, 400_000)
    batch.seconds({k: v[:2000] for k, v in columns.items()})
    begin = time.perf_counter()
    batch.seconds(columns)
    rate = len(columns["ddp"]) / (time.perf_counter() - begin)
    assert rate > 50_000, f"{rate:.0f} candidates/s"  # a loaded test machine; benchmarks.search has the figure


def odd_calibration(plan: Plan) -> Calibration:
    """Linear layers with a large fixed cost."""
    samples = [Sample(op="linear", phase=phase, features={"m": m, "k": 256, "n": 256}, dtype="bf16",
                      seconds=2e-5 + m * 1e-8 * (1 + 0.1 * i), host_seconds=1e-5)
               for i, phase in enumerate(("forward", "backward")) for m in (64, 512, 4096, 32768)]
    return fit(Environment(device_name="H200-SXM", device_kind="gpu"), samples, device=plan.cluster.device)


def test_calibration_changes_nothing_of_the_equality():
    plan = template()
    calibration = odd_calibration(plan)
    batch = BatchBound(plan, calibration, batchings=BATCHINGS, transports=TRANSPORTS, executions=EXECUTIONS)
    columns = candidates(plan, 8, seed=5)
    found = batch.seconds(columns)
    for i in range(8):
        lowered, slow = of_slowest(batch.plan(columns, i), calibration)
        assert found[i] == pytest.approx(bound(lowered.graph) * slow, rel=1e-9)


@pytest.mark.parametrize("calibrated", [False, True])
def test_blocks_of_many_batches_cost_what_each_costs(calibrated):
    groups = (LayerGroup(kind="self_attention", count=1, heads=4, head_dim=16, mlp_dim=64),
              LayerGroup(kind="self_attention", count=1, heads=4, head_dim=16, window=32),
              LayerGroup(kind="gdpa", count=1, heads=2, head_dim=16, mlp_dim=64, divisor=50.0, activation="silu"),
              LayerGroup(kind="block_attention", count=1, heads=2, head_dim=16, mlp_dim=64, block=64),
              LayerGroup(kind="hstu", count=1, heads=4, head_dim=16, divisor=64.0),
              LayerGroup(kind="llama", count=1, heads=2, head_dim=16, mlp_dim=64, options={"kv_heads": 2}))
    plan = template(dim=64)
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, sequences=(Sequence(name="history", layers=groups),)))
    prices = pricer(plan, odd_calibration(plan) if calibrated else None)
    batches = [batch_shape(dataclasses.replace(plan, local_batch=n, batching=policy), {"history": Factors(tokens=1.1, pairs=1.3)})
               for n in (1, 8, 96) for policy in ("jagged", "padded")]
    many = BlockPrices(prices, batches)
    for region in regions(plan.model):
        for precision in ("fp32", "bf16", "fp8_row", "mxfp8"):
            for checkpoint in ("none", "selective", "full", "quantized"):
                again, saved = (f(region.block, precision, checkpoint) for f in (many.recompute, many.saved))
                forward, backward = (many.block(region.block, precision, phase) for phase in ("forward", "backward"))
                for k, batch in enumerate(batches):
                    prices.keep(batch)
                    assert forward[k] == pytest.approx(prices.block(region.block, batch, precision, "forward").seconds, rel=1e-9)
                    assert backward[k] == pytest.approx(prices.block(region.block, batch, precision, "backward").seconds, rel=1e-9)
                    assert again[k] == pytest.approx(prices.recompute(region.block, batch, precision, checkpoint).seconds, rel=1e-9)
                    assert saved[k] == pytest.approx(region.block.saved_bytes(batch, precision, checkpoint), rel=1e-9)
