"""Where samples are taken."""
from __future__ import annotations

import datetime
import os
import platform

import torch

from costmodel import launch
from costmodel.samples import Environment
from runtime.hashes import source_hashes


def environment(device: torch.device) -> Environment:
    """Where these samples are taken."""
    allocator = {name: os.environ[name] for name in launch.allocator() if name in os.environ}
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    return Environment(
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        device_kind=device.type, threads=torch.get_num_threads(), allocator=allocator, torch=torch.__version__, triton=triton_version,
        python=platform.python_version(), date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        commit=os.environ.get("PLANNER_COMMIT", ""), source_hashes=source_hashes())
