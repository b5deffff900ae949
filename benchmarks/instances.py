"""Small random instances of the search, and their exhaustive enumeration."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from costmodel.calibration import Calibration, fit
from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.compute import roofline_seconds
from costmodel.memory import COMMUNICATOR_BYTES
from costmodel.model import LayerGroup, Model, Sequence, TableGroup
from costmodel.ops import COLLECTIVES, op
from costmodel.samples import Environment, Sample
from costmodel.workload import Lengths, Workload
from planner.ilp import Choice
from planner.placement import PlacementError
from planner.pricing import Priced, Pricing
from planner.scenario import Exclusions, Pins, ResolvedScenario, SearchOptions
from planner.space import build_space


def instance(seed: int) -> ResolvedScenario:
    """Two to eight ranks, two or three regions with a choice, two table groups with a choice, and a memory budget from ample to none."""
    rng = np.random.default_rng(seed)
    hosts, per_host = [(1, 2), (1, 4), (2, 2), (2, 4)][rng.integers(4)]
    memory = float(rng.choice([0.12, 0.3, 0.5, 0.8, 1.5, 4.0])) * 1e9 + 1.0e9 + 3 * COMMUNICATOR_BYTES
    device = Device(
        name="small",
        kind="gpu",
        peak_flops={"fp32": 60e12, "bf16": float(rng.choice([120e12, 900e12]))},
        memory_bytes=80e9,
        memory_bandwidth=3e12,
        num_sms=132,
        host_link_bandwidth=60e9,
        native_formats=("fp32", "bf16"),
    )
    tiers = [LinkTier(name="nvlink", scope="host", bandwidth=float(rng.choice([20e9, 200e9])), latency=3e-6)]
    if hosts > 1:
        tiers.append(LinkTier(name="rdma", scope="cluster", bandwidth=float(rng.choice([2e9, 20e9])), latency=10e-6))
    cluster = Cluster(name="small", device=device, num_hosts=hosts, devices_per_host=per_host, tiers=tuple(tiers), memory_budget=memory)
    dim = int(rng.choice([128, 256, 512]))
    layers = tuple(
        LayerGroup(kind="self_attention", count=int(rng.integers(1, 3)), heads=4, head_dim=dim // 4, mlp_dim=4 * dim)
        for _ in range(int(rng.integers(1, 3)))
    )
    tables = (
        TableGroup(name="event", rows=int(rng.integers(1_000, 800_000)), dim=64, pooling="sequence", sequence="history"),
        TableGroup(
            name="feature",
            rows=int(rng.integers(1_000, 300_000)),
            dim=int(rng.choice([64, 128])),
            count=int(rng.integers(1, 3)),
            ids_per_sample=float(rng.integers(1, 20)),
        ),
    )
    model = Model(name=f"small-{seed}", dim=dim, tables=tables, sequences=(Sequence(name="history", layers=layers),), interaction_hidden=(256,))
    workload = Workload(
        name="small",
        local_batch=int(rng.choice([32, 64, 128])),
        lengths={"history": Lengths(kind="lognormal", median=float(rng.integers(50, 300)), sigma=1.0, maximum=1024)},
    )
    world = cluster.num_ranks
    layout = {"reshard_after_forward": bool(rng.integers(2))} | ({"sparse_group": world} if rng.integers(2) else {"fsdp": min(world, per_host)})
    pins = Pins(
        layout=layout,
        batching="jagged",
        precision={"history.input": "bf16", "history.summary": "bf16", "heads": "bf16", "history.*": "bf16", "interaction": "bf16"},
        checkpoint={"history.input": "none", "history.summary": "none", "heads": "none"},
        exclude=Exclusions(
            checkpoint={"history.1": ("selective",), "interaction": ("selective",)},
            sharding={"event": ("column_wise", "table_row_wise"), "feature": ("table_row_wise",), "*": ("table_row_wise",)},
        ),
    )
    pins = dataclasses.replace(pins, accumulation=int(rng.choice([1, 2])))
    return ResolvedScenario(
        name=f"small-{seed}", cluster=cluster, model=model, workload=workload, pins=pins, search=SearchOptions(time_limit=600.0, gap=0.0, top=1),
        input_overlap=False,
    )


FOCUSES = ("shardings", "precisions", "checkpoints", "jobs")


def broad_instance(seed: int) -> tuple[ResolvedScenario, Calibration | None]:
    """An instance with one part of the space wide open, predict-only options included, and for every other seed an odd calibration."""
    rng, base, focus = np.random.default_rng([seed, 1]), instance(seed), FOCUSES[seed % 4]
    device = dataclasses.replace(
        base.cluster.device, peak_flops={**base.cluster.device.peak_flops, "fp8": 1800e12}, native_formats=("fp32", "bf16", "fp8_row", "fp8_tensor")
    )
    cluster = dataclasses.replace(base.cluster, device=device, host_memory_bytes=64e9)
    layout = {"reshard_after_forward": bool(rng.integers(2)), "fsdp": min(cluster.num_ranks, cluster.devices_per_host)}
    pins = dataclasses.replace(
        base.pins,
        layout=layout,
        transport="nccl",
        execution="eager",
        checkpoint={"*": "none"},
        exclude=Exclusions(sharding={"*": ("column_wise", "table_row_wise", "data_parallel", "host_cached")}),
    )
    model, overlap = base.model, base.input_overlap
    if focus == "shardings":
        pins = dataclasses.replace(pins, exclude=Exclusions())
        if seed % 16 in (4, 8):  # in one group, and some so small that a dense gradient is less than the rows asked for
            tables = tuple(dataclasses.replace(t, rows=int(np.exp(rng.uniform(3.0, 9.0)))) for t in model.tables)
            model = dataclasses.replace(model, tables=tables)
            pins = dataclasses.replace(pins, layout={**layout, "sparse_group": cluster.num_ranks})
    if focus == "precisions":
        pins = dataclasses.replace(pins, layout={**layout, "sparse_group": cluster.num_ranks}, precision={k: "bf16" for k in base.pins.precision
                                                                                                    if k not in ("history.*", "interaction")})
    if focus == "checkpoints":
        pins = dataclasses.replace(pins, layout={**layout, "sparse_group": cluster.num_ranks}, checkpoint={
            "history.input": "none", "history.summary": "none", "heads": "none"})
    if focus == "jobs":
        overlap = None
        closed = rng.permutation(["padded", "local", "sorted_buckets", "base_batch_shuffling", "global"])[:4]
        pins = dataclasses.replace(pins, layout={}, batching=None, transport=None, execution=None, sharding={"event": "table_wise", "*": "row_wise"},
                                   accumulation=None if rng.integers(2) else pins.accumulation, exclude=Exclusions(batching=tuple(map(str, closed))))
    options = dataclasses.replace(base.search, predict_only=True, risk_budget=float(rng.integers(5, 12)) if rng.integers(4) == 0 else None)
    scenario = dataclasses.replace(base, cluster=cluster, model=model, pins=pins, search=options, input_overlap=overlap)
    return scenario, odd_calibration(device, seed) if seed // 4 % 2 else None


def odd_calibration(device: Device, seed: int) -> Calibration:
    """Curves that no roofline has: fixed costs of lookups and updates that a rank with one table pays once, rates that differ by op, collectives
    that bend at some size."""
    rng = np.random.default_rng([seed, 2])
    samples: list[Sample] = []

    def measure(kind: str, phases: tuple[str, ...], grid: dict[str, tuple[float, ...]], fixed: float, slope: float, **keys: str) -> None:
        for phase, values in itertools.product(phases, itertools.product(*grid.values())):
            features = dict(zip(grid, map(float, values)))
            if features.get("unique", 0.0) <= features.get("ids", 0.0):
                seconds = fixed + slope * roofline_seconds(op(kind, **keys, **features), phase, device)
                samples.append(Sample(op=kind, phase=phase, features=features, seconds=seconds, host_seconds=1e-5, **keys))

    once = float(rng.choice([0.0, 5e-5, 3e-4]))
    served = {"ids": (64, 4096, 262144), "unique": (64, 65536), "dim": (32, 128), "rows": (1e4,), "tables": (1,)}
    for variant in ("pooled", "sequence"):
        measure("embedding_lookup", ("forward", "backward"), served, once, rng.uniform(0.5, 2.0), variant=variant)
    measure("embedding_update", ("step",), served, once, rng.uniform(0.5, 2.0), variant="rowwise_adagrad")
    measure("unique", ("forward",), {"ids": served["ids"]}, once / 2, 2.0)
    for dtype in ("bf16", "fp32"):
        measure("linear", ("forward", "backward"), {"m": (64, 4096, 65536), "k": (128, 512), "n": (256, 1024)}, float(rng.choice([0.0, 2e-5])),
                rng.uniform(0.5, 2.0), dtype=dtype)
    for kind in COLLECTIVES:
        bend, steeper = float(rng.choice([1e5, 1e6, 1e7])), float(rng.choice([0.3, 1.0, 3.0]))
        latency, bandwidth = float(rng.choice([5e-6, 5e-5])), float(rng.choice([5e9, 50e9]))
        for group, size in itertools.product((2, 4, 8), (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)):
            seconds = latency + size / bandwidth * (steeper if size > bend else 1.0)
            samples.append(Sample(op=kind, variant="nccl", phase="step", features={"bytes": size, "group": float(group)}, seconds=seconds))
    return fit(Environment(device_name=device.name, device_kind=device.kind), samples, device=device)


def splits(count: int, options: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `count` as a sum of `options` counts."""
    if options == 1:
        yield (count,)
        return
    for first in range(count + 1):
        for rest in splits(count - first, options - 1):
            yield (first, *rest)


def enumerate_plans(scenario: ResolvedScenario, calibration: Calibration | None = None) -> Iterator[tuple[int, Choice, Priced | None]]:
    """Every candidate with every choice of counts within the risk budget, priced; None where its tables cannot be placed."""
    space, budget = build_space(scenario), scenario.search.risk_budget
    pricing = Pricing(scenario, space, calibration)
    for i in range(len(space.candidates)):
        group = int(space.candidates["sparse_group"][i])
        region_ways = [
            [dict(zip(choices, counts)) for counts in splits(pricing.blocks[name], len(choices))] for name, choices in space.regions.items()
        ]
        table_ways = [
            [dict(zip(choices, counts)) for counts in splits(len(tied.tables), len(choices))]
            for tied in pricing.tied
            for choices in [pricing.choices(tied, group)]
        ]
        for regions in itertools.product(*region_ways):
            if budget is not None and sum(c.risk * n for by in regions for c, n in by.items()) > budget + 1e-9:
                continue
            for tables in itertools.product(*table_ways):
                choice = Choice(
                    regions=dict(zip(space.regions, regions)),
                    tables={t.name: c for t, c in zip(pricing.tied, tables)},
                    seconds=0.0,
                    bound=0.0,
                    gap=0.0,
                    optimal=True,
                )
                try:
                    yield i, choice, pricing.price(pricing.plan(i, choice), choice)
                except PlacementError:
                    yield i, choice, None


def best_of_all(scenario: ResolvedScenario, calibration: Calibration | None = None) -> tuple[float | None, int]:
    """(least simulated seconds of a plan that fits, or None; number of plans)."""
    best, count = None, 0
    for _, _, priced in enumerate_plans(scenario, calibration):
        count += 1
        if priced is not None and priced.memory.fits and (best is None or priced.seconds < best):
            best = priced.seconds
    return best, count
