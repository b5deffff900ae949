"""Small random instances of the search, and their exhaustive enumeration."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.model import LayerGroup, Model, Sequence, TableGroup
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
    memory = float(rng.choice([0.12, 0.3, 0.5, 0.8, 1.5, 4.0])) * 1e9 + 1.8e9
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
        name=f"small-{seed}", cluster=cluster, model=model, workload=workload, pins=pins, search=SearchOptions(time_limit=600.0, gap=0.0, top=1)
    )


def splits(count: int, options: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `count` as a sum of `options` counts."""
    if options == 1:
        yield (count,)
        return
    for first in range(count + 1):
        for rest in splits(count - first, options - 1):
            yield (first, *rest)


def enumerate_plans(scenario: ResolvedScenario) -> Iterator[tuple[int, Choice, Priced | None]]:
    """Every candidate with every choice of counts, priced; None where its tables cannot be placed."""
    space = build_space(scenario)
    pricing = Pricing(scenario, space, None)
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


def best_of_all(scenario: ResolvedScenario) -> tuple[float | None, int]:
    """(least simulated seconds of a plan that fits, or None; number of plans)."""
    best, count = None, 0
    for _, _, priced in enumerate_plans(scenario):
        count += 1
        if priced is not None and priced.memory.fits and (best is None or priced.seconds < best):
            best = priced.seconds
    return best, count
