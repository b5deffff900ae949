"""`benchmarks.multi_gpu_ranks` with plans that go wrong on rank 1: those named `*-raises` raise in their second step, those named `*-hangs` sleep."""
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks import multi_gpu_ranks
from benchmarks.multi_gpu_guard import Guard
from runtime.trainer import Trainer

begin, step, current = Guard.begin, Trainer._step, [""]


def noted(self: Guard, folder: Path) -> None:
    current[0] = folder.name
    begin(self, folder)


def faulty(self: Trainer, *args) -> None:
    if dist.is_initialized() and dist.get_rank() == 1 and self.step == 1:
        if current[0].endswith("-raises"):
            raise RuntimeError("out of memory, say")
        if current[0].endswith("-hangs"):
            time.sleep(600)
    step(self, *args)


if __name__ == "__main__":
    assert "RANK" in os.environ
    Guard.begin, Trainer._step = noted, faulty
    sys.exit(multi_gpu_ranks.main())
