"""Small models, batches and plans that the runtime's tests share."""
from __future__ import annotations

import dataclasses

import numpy as np
import torch

from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.model import Head, Layer, LayerGroup, Model, Sequence, TableGroup
from costmodel.plan import Layout, Plan, TablePlacement
from costmodel.regions import default_region_plans
from costmodel.workload import EventSource, Lengths, Workload
from runtime.batch import Batch

# One or more layer groups for every kind; a kind without an entry fails tests/runtime/test_flops.py.
LAYERS: dict[str, tuple[LayerGroup, ...]] = {
    "self_attention": (
        LayerGroup(kind="self_attention", heads=2, head_dim=16, mlp_dim=48),
        LayerGroup(kind="self_attention", heads=4, head_dim=8, mlp_dim=0),
        LayerGroup(kind="self_attention", heads=2, head_dim=16, mlp_dim=32, causal=False),
        LayerGroup(kind="self_attention", heads=1, head_dim=32, mlp_dim=32, window=3),
        LayerGroup(kind="self_attention", heads=2, head_dim=16, causal=False, relative_positions=5),
    ),
    "gdpa": (
        LayerGroup(kind="gdpa", heads=2, head_dim=16, mlp_dim=48, activation="gelu", divisor=20.0),
        LayerGroup(kind="gdpa", heads=2, head_dim=8, activation="silu", divisor=5.0, causal=False, window=4),
    ),
    "block_attention": (
        LayerGroup(kind="block_attention", heads=2, head_dim=16, mlp_dim=48, block=64),
        LayerGroup(kind="block_attention", heads=2, head_dim=16, block=32, causal=False),
    ),
    "hstu": (
        LayerGroup(kind="hstu", heads=2, head_dim=16, divisor=50.0),
        LayerGroup(kind="hstu", heads=1, head_dim=8, divisor=7.0),
        LayerGroup(kind="hstu", heads=2, head_dim=8, divisor=7.0, relative_positions=12),
    ),
    "llama": (
        LayerGroup(kind="llama", heads=4, head_dim=8, mlp_dim=48, options={"kv_heads": 2}),
        LayerGroup(kind="llama", heads=2, head_dim=16, mlp_dim=32, window=3, options={"kv_heads": 2}),
    ),
    "mask_net": (LayerGroup(kind="mask_net", mlp_dim=48),),
    "pyramid": (
        LayerGroup(kind="pyramid", branches=(Layer(kind="self_attention", heads=2, head_dim=16, mlp_dim=24),
                                             Layer(kind="gdpa", heads=2, head_dim=8, activation="gelu", divisor=20.0, window=4),
                                             Layer(kind="hstu", heads=1, head_dim=16, divisor=50.0))),
        LayerGroup(kind="pyramid", branches=(Layer(kind="block_attention", heads=2, head_dim=16, mlp_dim=48, block=32),)),
    ),
}
# layers that read when events happened
TIMED = (LayerGroup(kind="hstu", heads=2, head_dim=16, divisor=50.0, time_buckets=40, relative_positions=9),
         LayerGroup(kind="self_attention", heads=2, head_dim=16, mlp_dim=24, time_buckets=16),
         LayerGroup(kind="gdpa", heads=2, head_dim=8, activation="gelu", divisor=20.0, causal=True, window=6, time_buckets=128),
         LayerGroup(kind="pyramid", newest=7, branches=(Layer(kind="hstu", heads=2, head_dim=8, divisor=9.0, time_buckets=30),
                                                        Layer(kind="self_attention", heads=1, head_dim=16))))
PMA = Layer(kind="pma", heads=2, head_dim=16, num_queries=3)
# levels that shorten histories
PYRAMID = (LayerGroup(kind="self_attention", heads=2, head_dim=16, mlp_dim=48), dataclasses.replace(LAYERS["pyramid"][0], newest=9),
           LayerGroup(kind="hstu", heads=2, head_dim=16, divisor=50.0), dataclasses.replace(LAYERS["pyramid"][1], newest=4))

TABLES = (
    TableGroup(name="item", rows=300, dim=16, pooling="sequence", sequence="history"),
    TableGroup(name="action", rows=3, dim=8, pooling="sequence", sequence="history", optimizer="sgd"),
    TableGroup(name="user", rows=200, dim=16, optimizer="adam"),
    TableGroup(name="tag", rows=50, dim=8, count=3, ids_per_sample=2.0, pooling="mean"),
)


def model(layers: tuple[LayerGroup, ...] = (LAYERS["self_attention"][0], LAYERS["hstu"][0]), **changes) -> Model:
    values = dict(name="test", dim=32, tables=TABLES, sequences=(Sequence(name="history", layers=layers),), num_dense_features=4,
                  bottom_hidden=(16,), interaction_hidden=(32, 16), heads=(Head(name="click"), Head(name="like", hidden=(8,))))
    return Model(**{**values, **changes})


def workload(**changes) -> Workload:
    values = dict(name="test", lengths={"history": Lengths(kind="lognormal", maximum=20, median=6.0, sigma=0.8)}, global_batch=16,
                  num_steps=20, source=EventSource(kind="synthetic", num_events=640))
    return Workload(**{**values, **changes})


def cluster(num_ranks: int) -> Cluster:
    device = Device(name="cpu", kind="cpu", peak_flops={"fp32": 5e10}, memory_bytes=8e9, memory_bandwidth=1e10)
    return Cluster(name="test", device=device, num_hosts=1, devices_per_host=num_ranks,
                   tiers=(LinkTier(name="memory", scope="host", bandwidth=1e9, latency=1e-4),))


def placements(tables: tuple[TableGroup, ...], group: int, *, sharding: str = "mixed") -> tuple[TablePlacement, ...]:
    """`mixed`: row-wise and table-wise by turns; `every`: with data-parallel and host-cached ones; on one rank table-wise or host-cached."""
    turns = {"mixed": ("row_wise", "table_wise"), "every": ("row_wise", "table_wise", "data_parallel", "host_cached")}.get(sharding, (sharding,))
    placed, turn = [], 0
    for table in tables:
        for name in table.names:
            kind = turns[turn % len(turns)]
            if group == 1 and kind != "host_cached":
                kind = "table_wise"
            placed.append(TablePlacement(table=name, sharding=kind, ranks=(turn % group,) if kind in ("table_wise", "host_cached") else ()))
            turn += 1
    return tuple(placed)


def plan(layout: Layout, *, model_spec: Model | None = None, workload_spec: Workload | None = None, checkpoint: str = "none",
         precision: str = "fp32", accumulation: int = 1, sharding: str = "mixed", **changes) -> Plan:
    spec, load = model_spec or model(), workload_spec or workload()
    values = dict(scenario="test", cluster=cluster(layout.world_size), model=spec, workload=load, layout=layout, accumulation=accumulation,
                  local_batch=load.global_batch_on(layout.world_size) // layout.world_size // accumulation, transport="gloo",
                  regions=default_region_plans(spec, precision=precision, checkpoint=checkpoint),
                  tables=placements(spec.tables, layout.sparse_group, sharding=sharding), seed=1)
    made = Plan(**{**values, **changes})
    return dataclasses.replace(made, fingerprints=made.expected_fingerprints())


def batch(spec: Model, lengths: list[int], *, seed: int = 0) -> Batch:
    """Random ids for histories of the given lengths; bags of 0 to 3 ids."""
    generator = torch.Generator().manual_seed(seed)
    num_samples, num_events = len(lengths), sum(lengths)
    ids, offsets = {}, {}
    for table in spec.tables:
        if table.pooling == "sequence":
            ids[table.name] = torch.randint(table.rows, (table.count * num_events,), generator=generator)
        else:
            sizes = torch.randint(0, 4, (table.count * num_samples,), generator=generator)
            ids[table.name] = torch.randint(table.rows, (int(sizes.sum()),), generator=generator)
            offsets[table.name] = _offsets(sizes)
    edges = _offsets(torch.tensor(lengths))
    return Batch(ids=ids, offsets=offsets, sequence_offsets={s.name: edges for s in spec.sequences},
                 max_lengths={s.name: max(lengths, default=0) for s in spec.sequences},
                 lengths={s.name: np.array(lengths) for s in spec.sequences},
                 times={s.name: torch.randint(1 << 20, (num_events,), generator=generator).sort().values for s in spec.sequences if s.timed},
                 dense=torch.randn((num_samples, spec.num_dense_features), generator=generator) if spec.num_dense_features else None,
                 labels=torch.randint(2, (num_samples, len(spec.heads)), generator=generator).float(), num_samples=num_samples)


def _offsets(sizes: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
