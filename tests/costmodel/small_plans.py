"""A small plan to vary: two CPU ranks or eight H200s, a history of two blocks, three pooled tables."""
from __future__ import annotations

from costmodel.cluster import Cluster, Device, LinkTier
from costmodel.model import Head, LayerGroup, Model, Sequence, TableGroup
from costmodel.plan import Layout, Plan, TablePlacement
from costmodel.regions import default_region_plans
from costmodel.workload import Lengths, Workload

CPU = Device(name="core", kind="cpu", peak_flops={"fp32": 1e11, "bf16": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)
H200 = Device(name="H200-SXM", kind="gpu", peak_flops={"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}, memory_bytes=141e9,
              memory_bandwidth=4.8e12, num_sms=132, l2_bytes=50e6, host_link_bandwidth=55e9)
LAYERS = (LayerGroup(kind="self_attention", count=2, heads=2, head_dim=32, mlp_dim=256), LayerGroup(kind="hstu", heads=2, head_dim=32, divisor=50.0))
TABLES = (
    TableGroup(name="event_item", rows=1700, dim=48, pooling="sequence", sequence="history", zipf=0.8),
    TableGroup(name="event_action", rows=8, dim=16, pooling="sequence", sequence="history", zipf=0.5),
    TableGroup(name="user", rows=1000, dim=32, count=3),
    TableGroup(name="liked", rows=1700, dim=32, pooling="mean", ids_per_sample=20, zipf=0.8),
)
LENGTHS = Lengths(kind="lognormal", maximum=50, median=20, sigma=0.8)


def build_model(layers: tuple[LayerGroup, ...] = LAYERS, tables: tuple[TableGroup, ...] = TABLES, **fields) -> Model:
    return Model(name="small", dim=64, tables=tables, sequences=(Sequence(name="history", layers=layers),), num_dense_features=4, bottom_hidden=(32,),
                 interaction_hidden=(128, 64), heads=(Head(name="like", hidden=(32,)),), **fields)


def build_plan(*, model: Model | None = None, device: Device = CPU, ranks: int = 2, fsdp: int | None = None, local_batch: int = 64,
               accumulation: int = 1,
               precision: str = "fp32", checkpoint: str = "none", sharding: str = "row_wise", bandwidth: float = 2e9, lengths: Lengths = LENGTHS,
               layout: dict | None = None, **fields) -> Plan:
    model = model or build_model()
    tier = LinkTier(name="link", scope="host", bandwidth=bandwidth, latency=1e-4 if device.kind == "cpu" else 3e-6)
    cluster = Cluster(name="test", device=device, num_hosts=1, devices_per_host=ranks, tiers=(tier,))
    fsdp = fsdp or ranks
    names = [n for t in model.tables for n in t.names]
    placed = tuple(TablePlacement(table=n, sharding=sharding, ranks=(i % ranks,) if sharding == "table_wise" else ()) for i, n in enumerate(names))
    return Plan(scenario="test", cluster=cluster, model=model, local_batch=local_batch, accumulation=accumulation, tables=placed,
                workload=Workload(name="test", lengths={s.name: lengths for s in model.sequences}, global_batch=local_batch * ranks * accumulation),
                layout=Layout(**{"ddp": ranks // fsdp, "fsdp": fsdp, "sparse_group": ranks, **(layout or {})}),
                regions=default_region_plans(model, precision=precision, checkpoint=checkpoint), **fields)
