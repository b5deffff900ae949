"""Bytes that a rank holds, by category, from the tensors themselves.

Parameters, gradients and optimizer state are summed over their local tensors. Saved activations are what the forward of one micro-batch, from the
lookup on, leaves alive for backward: every storage that an operator allocated meanwhile and that has not been freed at its end, without
the batch and without gathered parameters.
"""
from __future__ import annotations

import time
import weakref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

COUNTS, PAUSE = 5, 2e-3  # of the bytes that are alive, seconds between them


class StorageTracker(TorchDispatchMode):
    """Remembers, weakly, every storage that operators inside it return and that did not exist before them."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.watch(pytree.tree_leaves(result))
        return result

    def watch(self, values) -> None:
        """Remember the storages of the tensors among `values`, made before or inside."""
        for tensor in values:
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)

    def alive_bytes(self, exclude: set[int]) -> int:
        """Bytes of the storages still alive, without those in `exclude` (see `storage_ids`): the least of a few counts, for a thread of a collective
        that has ended may hold its buffers a moment longer."""
        counts = []
        for _ in range(COUNTS):
            alive = (ref() for key, ref in self._storages.items() if key not in exclude)
            counts.append(sum(storage.nbytes() for storage in alive if storage is not None))
            time.sleep(PAUSE)
        return min(counts)


def storage_ids(tensors) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if not isinstance(t, DTensor)}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_bytes(tensors) -> int:
    return sum(local(t).numel() * local(t).element_size() for t in tensors)


def dense_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Parameters, gradients and optimizer state [bytes]; gradients as large as the parameters that take them."""
    parameters = list(model.parameters())
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor) and v.dim() > 0]
    return {"parameters": num_bytes(parameters), "gradients": num_bytes(p for p in parameters if p.requires_grad),
            "optimizer": num_bytes(state)}
