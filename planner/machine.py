"""This machine as a device: a rank is one core with its share of the memory.

    peak FLOP/s (fp32) = clock x lanes of the widest fused multiply-add x 2 units x 2          [detected: /proc/cpuinfo, /sys cpufreq]
    memory bandwidth   = best of a few copies of an array that no cache holds, read + write    [measured once, kept in the state directory]

Both only anchor the roofline; a calibration (`planner calibrate`) fits what is reached of them. The name holds the processor's, so that a
calibration of another machine is never taken for this one's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from costmodel.state import state_directory
from planner.errors import Position
from planner.files import Document, write_text

PREFIX = "cpu-core-"
_COPY_BYTES = 64_000_000


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {k.strip(): v.strip() for k, v in (line.split(":", 1) for line in lines if ":" in line)}


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    import platform

    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> float:
    """Physical memory [bytes], or the container's limit where lower."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return min(total, float(limit)) if limit != "max" else total
    except (OSError, ValueError):
        return total


def _clock(info: dict[str, str]) -> float:
    """Cycles a second: the highest that the kernel names, else twice-counted BogoMIPS (the nominal clock), else what is running now."""
    try:
        return float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        pass
    for key, factor in (("bogomips", 0.5e6), ("BogoMIPS", 0.5e6), ("cpu MHz", 1e6)):
        if re.fullmatch(r"[\d.]+", info.get(key, "")) and float(info[key]) > 500:
            return float(info[key]) * factor
    return 2e9


def _lanes(flags: str) -> int:
    words = flags.split()
    return 16 if "avx512f" in words else 8 if "avx2" in words else 4


def peak_flops() -> dict[str, float]:
    """Dense peak of one core per number format [FLOP/s]; bf16 has no wider arithmetic here unless the processor has AMX or AVX512-BF16."""
    info = _cpuinfo()
    flags = info.get("flags", info.get("Features", ""))
    fp32 = _clock(info) * _lanes(flags) * 2 * 2
    bf16 = fp32 * (16 if "amx_bf16" in flags else 2 if "avx512_bf16" in flags else 1)
    return {"fp32": fp32, "bf16": bf16}


def _measure_bandwidth() -> float:
    import numpy as np

    source = np.ones(_COPY_BYTES // 8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return float(f"{2 * _COPY_BYTES / best:.2g}")


def memory_bandwidth() -> float:
    """Bytes/s of one core, measured on the first call on this machine and kept, so that equal searches give equal plans."""
    path = state_directory() / "machine.json"
    try:
        known = json.loads(path.read_text())
        if known["cpu"] == cpu_name() and known["memory_bandwidth"] > 0:
            return float(known["memory_bandwidth"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    measured = _measure_bandwidth()
    with contextlib.suppress(ValueError):  # A read-only state directory costs a new measurement next time, nothing else.
        write_text(path, json.dumps({"cpu": cpu_name(), "memory_bandwidth": measured}) + "\n")
    return measured


def device_name() -> str:
    """E.g. `cpu-core-amd-epyc`."""
    return PREFIX + re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", cpu_name().lower())).strip("-")


def device_document() -> Document:
    """This machine's core in the form of a device file."""
    peaks = peak_flops()
    data: dict[str, Any] = {
        "name": device_name(),
        "kind": "cpu",
        "peak_flops": {k: f"{v / 1e9:.4g} GFLOP/s" for k, v in peaks.items()},
        "memory": f"{int(memory_bytes() / num_cores())} B",
        "memory_bandwidth": f"{memory_bandwidth() / 1e9:.4g} GB/s",
        "native_formats": ["fp32"] + (["bf16"] if peaks["bf16"] > peaks["fp32"] else []),
        "sources": ["detected: clock x FMA lanes x 2 x 2 of /proc/cpuinfo; copy bandwidth measured once"],
    }
    file = Path("detected")
    return Document(data=data, positions={(): Position(file=file, line=1, column=1)}, file=file)


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs that `nvidia-smi` sees, in order."""
    import subprocess

    try:
        answer = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
