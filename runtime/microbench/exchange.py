"""What a sparse group does around its all-to-alls on a GPU: ids made unique, rows looked up for others, rows spread over the batch and their
gradients summed, and the host's own time for every shard, which it handles one by one.

Device seconds of `embedding_lookup` (`rows`: the distinct ones that arrived) and `unique`; the latter is wall time, as the host waits for its size.
"""
from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from costmodel import ops
from costmodel.model import TableGroup
from costmodel.plan import Plan, TablePlacement
from costmodel.samples import Sample
from kernels.embedding import embedding_sequence
from runtime.batch import Batch
from runtime.data import Source
from runtime.embedding import ShardedEmbeddings, expand, table_keys
from runtime.mesh import Meshes
from runtime.microbench.timing import Run, Timing, measure, summarize

# (groups, tables a group) that the host is timed with, and steps.
HOST_TABLES, HOST_STEPS = ((1, 4), (1, 32), (4, 4)), 12


def exchange_samples(plan: Plan, source: Source, samples: int, device: torch.device, *, seconds: float) -> Iterator[Sample]:
    """Ops of every table group on the source's own ids of `samples` samples, on one GPU."""
    batch = source.build(np.random.default_rng(0).integers(0, source.num_train, samples)).to(device)
    for table in plan.model.tables:
        keys, offsets = table_keys(table, batch), batch.offsets.get(table.name)
        ids = float(keys.numel())
        yield _sample("unique", ops.FORWARD, {"ids": ids}, _waited(lambda keys=keys: torch.unique(keys, return_inverse=True)))
        unique, inverse = torch.unique(keys, return_inverse=True)
        weight = torch.randn((table.rows * table.count, table.dim), device=device)
        count, variant = float(unique.numel()), "sequence" if table.sequence is not None else "pooled"
        looked = measure([Run(run=lambda _, w=weight, u=unique: embedding_sequence(w, u))], device=device, seconds=seconds)
        yield _sample("embedding_lookup", ops.FORWARD, {"ids": count, "unique": count, "dim": float(table.dim), "rows": float(weight.shape[0]),
                                                        "tables": 1.0}, looked, variant="sequence")
        values = weight[unique].requires_grad_()
        features = {"ids": ids, "unique": count, "dim": float(table.dim), "rows": count, "tables": float(table.count)}
        spread = lambda values=values, inverse=inverse, offsets=offsets, table=table: expand(values, inverse, offsets, table)
        yield _sample("embedding_lookup", ops.FORWARD, features, measure([Run(run=lambda _, s=spread: s())], device=device, seconds=seconds),
                      variant=variant)
        gradient = torch.ones_like(spread())
        back = Run(prepare=spread, run=lambda out, v=values, g=gradient: torch.autograd.grad(out, v, g))
        yield _sample("embedding_lookup", ops.BACKWARD, features, measure([back], device=device, seconds=seconds), variant=variant)
        del weight, values


def _sample(kind: str, phase: str, features: dict[str, float], timing: Timing, *, variant: str = "") -> Sample:
    return Sample(op=kind, variant=variant, phase=phase, features=features, seconds=timing.seconds, host_seconds=timing.host_seconds,
                  noise=timing.noise, repeats=timing.repeats)


def _waited(call, repeats: int = 6) -> Timing:
    """Wall seconds of a call that waits for the device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return summarize(times[1:])


def host_seconds(meshes: Meshes) -> dict[str, tuple[float, float, float]]:
    """Main-thread seconds of a micro-batch's exchange with hardly any rows, mean over ranks, `forward` and `backward`: (of every exchange, of each
    table group, of each shard of the sparse group). Collective over all ranks."""
    measured = np.array([_host_times(groups, count, meshes) for groups, count in HOST_TABLES])
    shards = np.array([groups * count * meshes.world_size for groups, count in HOST_TABLES], dtype=float)
    parts = np.linalg.solve(np.stack([np.ones(len(shards)), [groups for groups, _ in HOST_TABLES], shards], axis=1), measured)
    fixed, group, shard = np.maximum(parts, 0.0).tolist()
    return {name: (fixed[i], group[i], shard[i]) for i, name in enumerate((ops.FORWARD, ops.BACKWARD))}


def _host_times(groups: int, count: int, meshes: Meshes) -> tuple[float, float]:
    """(forward, backward) with `groups` groups of `count` row-wise tables."""
    tables = tuple(TableGroup(name=f"t{g}", rows=64, dim=8, count=count, pooling="sum", ids_per_sample=1) for g in range(groups))
    placements = tuple(TablePlacement(table=name, sharding="row_wise") for table in tables for name in table.names)
    embeddings = ShardedEmbeddings(tables, placements, meshes, seed=0, learning_rate=0.01)
    batch, times = _batch(tables, meshes.device), []
    for _ in range(HOST_STEPS):
        dist.barrier()
        _wait(meshes)
        begin = time.perf_counter()
        leaves = embeddings.forward(batch)
        _wait(meshes)
        between = time.perf_counter()
        for leaf in leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        embeddings.backward()
        _wait(meshes)
        times.append((between - begin, time.perf_counter() - between))
    mean = torch.tensor(np.median(times[2:], axis=0), dtype=torch.float64, device=meshes.device)
    dist.all_reduce(mean)
    forward, backward = (mean / meshes.world_size).tolist()
    return forward, backward


def _wait(meshes: Meshes) -> None:
    if meshes.device.type == "cuda":
        torch.cuda.synchronize()


def _batch(tables: tuple[TableGroup, ...], device: torch.device, samples: int = 8) -> Batch:
    bags = tables[0].count * samples
    return Batch(ids={t.name: torch.arange(bags) % 64 for t in tables}, offsets={t.name: torch.arange(bags + 1) for t in tables}, sequence_offsets={},
                 max_lengths={}, lengths={}, dense=None, labels=torch.zeros((samples, 1)), num_samples=samples).to(device)
