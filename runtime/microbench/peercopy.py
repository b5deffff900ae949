"""An all-gather that holds no SM: every rank reads its peers' parts out of their memory by the copy engines, alone and beside compute.

Buffers that peers can map come from `torch.distributed._symmetric_memory`. `bytes` of a sample is the gathered result, variant `copy_engine` the
transport of that name (`costmodel.contention`). CUDA with peer access only.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.mesh import Meshes
from runtime.microbench.collectives import together
from runtime.microbench.contention import Beside, jagged_attention_call, measure_beside, product_call
from runtime.microbench.timing import Timing

SIZES = tuple(2**e for e in (16, 20, 24, 28, 31))
BESIDE_BYTES = 1 << 30
TRANSPORT = "copy_engine"


class PeerGather:
    """`run()` gathers `elements` fp32 numbers, a multiple of the ranks: this rank's part and, from their buffers, its peers'. Collective to make;
    a run is not: who changes a buffer waits for its readers first."""

    def __init__(self, elements: int, meshes: Meshes) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.rank, self.world_size, part = meshes.rank, meshes.world_size, elements // meshes.world_size
        self.part = symmetric.empty(part, dtype=torch.float32, device=meshes.device)
        self.part.fill_(float(self.rank))
        handle = symmetric.rendezvous(self.part, dist.group.WORLD.group_name)
        self.peers: list[Tensor] = [self.part if r == self.rank else handle.get_buffer(r, (part,), torch.float32) for r in range(self.world_size)]
        self.out = torch.empty(elements, device=meshes.device)
        self.stream = torch.cuda.Stream()

    def run(self) -> None:
        """On the current stream."""
        parts = self.out.chunk(self.world_size)
        for step in range(self.world_size):  # ranks begin with different peers
            peer = (self.rank + step) % self.world_size
            parts[peer].copy_(self.peers[peer], non_blocking=True)

    def start(self) -> Callable[[], object]:
        """On a stream of its own; returns what makes the current stream wait."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.run()
        return lambda: torch.cuda.current_stream().wait_stream(self.stream)

    def check(self) -> bool:
        """Whether every part is its rank's."""
        self.run()
        torch.cuda.synchronize()
        return all(bool((part == float(r)).all()) for r, part in enumerate(self.out.chunk(self.world_size)))


def gather_timings(meshes: Meshes) -> Iterator[tuple[str, dict[str, float], Timing]]:
    """(kind, features, timing) at every size. Raises RuntimeError where a gather is not what it should be."""
    n = meshes.world_size
    for size in SIZES:
        gather = PeerGather(size // 4 // n * n, meshes)
        dist.barrier()
        if not gather.check():
            raise RuntimeError(f"rank {meshes.rank}: an all-gather of {size} bytes by peer copies holds wrong numbers")
        yield "all_gather", {"bytes": float(size), "group": float(n)}, together(gather.run, float(size), meshes.device)


def gather_beside(meshes: Meshes) -> Iterator[Beside]:
    """Beside a matrix product and beside an attention."""
    gather = PeerGather(BESIDE_BYTES // 4 // meshes.world_size * meshes.world_size, meshes)
    dist.barrier()
    for name, compute in (("product", product_call(meshes.device)), ("attention", jagged_attention_call(meshes.device))):
        found = measure_beside(gather.start, compute, meshes.device)
        yield dataclasses.replace(found, kind="all_gather", compute=name, ctas=0, bytes=float(BESIDE_BYTES))
