"""Replicas beside compute on one rank, its process group a group of one: what streams and freed storages make of it on a GPU. With more ranks:
test_distributed.py."""
import dataclasses

import pytest
import runtime_models as models
import torch
import torch.distributed as dist

from costmodel.plan import Layout, TablePlacement
from runtime import mesh
from runtime.embedding import ShardedEmbeddings

ROWS, STEPS = 5000, 6
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _trained(device: torch.device, group: dist.ProcessGroup, *, full: bool, ahead: bool, dtype: str) -> list[torch.Tensor]:
    """Tables and states after some steps, a product busy beside each."""
    tables = tuple(dataclasses.replace(t, rows=ROWS, dtype=dtype) for t in models.TABLES)
    placed = tuple(TablePlacement(table=n, sharding="table_wise", ranks=(0,)) for t in tables for n in t.names)
    meshes = mesh.Meshes(layout=Layout(fully_sharded_2d=full), rank=0, device=device, dense=None, sparse_group=None, sparse_replicas=group)
    embeddings = ShardedEmbeddings(tables, placed, meshes, seed=5, learning_rate=0.1, ahead=ahead)
    busy = torch.ones(1024, 1024, device=device)
    for step in range(STEPS):
        batch = models.batch(models.model(tables=tables), [40, 0, 70, 10], seed=step).to(device)
        outs = embeddings.forward(batch)
        loss = sum((o.float() * torch.linspace(0.5, 1.5, o.shape[-1], device=device)).tanh().sum() for o in outs.values())
        embeddings.before_backward()
        embeddings.gather_ahead()
        for _ in range(20 if device.type == "cuda" else 1):
            busy = busy @ busy / 1024
        loss.backward()
        embeddings.backward()
        for _ in range(20 if device.type == "cuda" else 1):
            busy = busy @ busy / 1024
    with embeddings.whole():
        return [t.cpu().clone() for s in embeddings.storages for t in (s.weight, *s.state_tensors())]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_collectives_beside_compute_change_no_bit(kind, dtype, full):
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    mesh.start(device)
    try:
        at_once, beside = (_trained(device, dist.group.WORLD, full=full, ahead=ahead, dtype=dtype) for ahead in (False, True))
        untrained = _trained_not(device, dtype)
    finally:
        mesh.leave()
    assert all(torch.equal(a, b) for a, b in zip(at_once, beside, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(at_once, untrained, strict=True))


def _trained_not(device: torch.device, dtype: str) -> list[torch.Tensor]:
    tables = tuple(dataclasses.replace(t, rows=ROWS, dtype=dtype) for t in models.TABLES)
    placed = tuple(TablePlacement(table=n, sharding="table_wise", ranks=(0,)) for t in tables for n in t.names)
    meshes = mesh.Meshes(layout=Layout(), rank=0, device=device, dense=None, sparse_group=None, sparse_replicas=None)
    embeddings = ShardedEmbeddings(tables, placed, meshes, seed=5, learning_rate=0.1)
    return [t.cpu().clone() for s in embeddings.storages for t in (s.weight, *s.state_tensors())]
