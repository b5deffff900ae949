"""Process groups of a layout: a dense mesh (ddp, fsdp) and a sparse mesh (sparse_replicas, sparse_group) over the same ranks.

    dense   rank r: fsdp index r % fsdp, ddp index r // fsdp            FSDP groups are consecutive ranks
    sparse  rank r: place r % sparse_group in group r // sparse_group   sparse groups are consecutive ranks
    expert  rank r: ep index r % ep inside its fsdp group               ep innermost, inside a host

A group of one rank has no process group (None): nothing is ever sent there.
"""
from __future__ import annotations

import dataclasses
import datetime
import gc
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from costmodel.plan import Layout
from runtime.phases import PhaseTimer

# torch 2.13 renamed these; the old names warn there, the new ones do not exist in 2.11
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A collective that hangs longer than this names its rank and ends the job (gloo raises, NCCL's watchdog aborts).
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=float(os.environ.get("PLANNER_COLLECTIVE_TIMEOUT", "300")))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """This rank's place and groups. `dense` (ddp, fsdp) is None without a process group, `experts` (ddp, efsdp, ep) where experts are not spread."""

    layout: Layout
    rank: int
    device: torch.device
    dense: DeviceMesh | None
    sparse_group: dist.ProcessGroup | None
    sparse_replicas: dist.ProcessGroup | None
    experts: DeviceMesh | None = None

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def sparse_rank(self) -> int:
        """This rank's place in its sparse group."""
        return self.rank % self.layout.sparse_group

    @property
    def replica(self) -> int:
        """Which sparse group this rank belongs to."""
        return self.rank // self.layout.sparse_group


def build_meshes(layout: Layout, device: torch.device) -> Meshes:
    """Collective over all ranks. A layout of one rank needs no process group, and any rank of a larger job can build it for itself: `dense` is None
    then."""
    if layout.world_size == 1 and (not dist.is_initialized() or dist.get_world_size() > 1):
        return Meshes(layout=layout, rank=0, device=device, dense=None, sparse_group=None, sparse_replicas=None)
    if not dist.is_initialized() or dist.get_world_size() != layout.world_size:
        have = dist.get_world_size() if dist.is_initialized() else 1
        raise ValueError(f"layout {layout.short} needs {layout.world_size} ranks, this job has {have}")
    dense = _mesh(device, ("ddp", layout.ddp), ("fsdp", layout.fsdp))
    sparse = _mesh(device, ("replica", layout.sparse_replicas), ("group", layout.sparse_group))
    experts = _mesh(device, ("ddp", layout.ddp), ("efsdp", layout.efsdp), ("ep", layout.ep)) if layout.ep > 1 else None
    return Meshes(layout=layout, rank=dist.get_rank(), device=device, dense=dense, experts=experts,
                  sparse_group=sparse.get_group("group") if layout.sparse_group > 1 else None,
                  sparse_replicas=sparse.get_group("replica") if layout.sparse_replicas > 1 else None)


_meshes: dict[tuple, DeviceMesh] = {}


def _mesh(device: torch.device, *axes: tuple[str, int]) -> DeviceMesh:
    """One mesh per shape: a process that trains several plans makes its communicators once."""
    key = (device.type, axes)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device.type, tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
    return _meshes[key]


_background: list[dist.ProcessGroup] = []


def background_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for what other threads send, made at the first call, which is collective; None without a process group."""
    if not dist.is_initialized():
        return None
    if not _background:
        _background.append(dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))
    return _background[0]


def start(device: torch.device) -> None:
    """Join the job that torchrun describes, or make a job of one process without torchrun: gloo on CPU, NCCL on CUDA. `leave` it at the end.

    A CUDA device without an index is this process' current one.
    """
    store, rank, world_size = _store()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=world_size,
                            device_id=indexed(device) if device.type == "cuda" else None)


def indexed(device: torch.device) -> torch.device:
    """`device` with its number: NCCL binds to one GPU, and tensors say which one they are on."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _store() -> tuple[dist.Store, int, int]:
    """Where the ranks find each other, this one's number, and how many there are.

    torchrun's agent keeps its store when it starts ranks again, and they would read addresses of dead ones in it: on one host each start has its own
    part of the store. Several agents count their restarts apart; `costmodel.launch` has them make a new store each time.
    """
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    store, rank, world_size = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store, rank, world_size


def leave(*owners: list) -> None:
    """Leave the job so that no process aborts: barrier, drop what holds groups (the `owners` are emptied), collect, destroy.

    Destroying the groups while modules that registered hooks on them were alive aborted up to a third of the exits here.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    for owner in owners:
        owner.clear()
    _meshes.clear()
    _background.clear()
    gc.collect()
    dist.destroy_process_group()


def wait(work: dist.Work | None, timer: PhaseTimer | None) -> None:
    """Wait for a collective; timed as `exposed_communication`. On gloo the main thread waits, on NCCL the current stream."""
    if work is None:
        return
    if timer is None:
        work.wait()
        return
    with timer.phase("exposed_communication"):
        work.wait()


def all_to_all(output: torch.Tensor, source: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
               group: dist.ProcessGroup) -> dist.Work:
    """Issue `all_to_all_single`; the caller waits."""
    work = dist.all_to_all_single(output, source, list(output_splits), list(input_splits), group=group, async_op=True)
    assert work is not None
    return work
