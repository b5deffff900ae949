"""How training processes are started. Calibration and runs share it, so that what was measured is what is run.

On a machine's own cores a rank is one core and one thread. glibc hands large blocks back to the kernel at every free, and each step then
pays for the page faults again; with the two thresholds raised, freed blocks stay mapped (measured on two AMD EPYC cores, glibc 2.36: 100 MB
allocated, filled and freed in 7 ms instead of 260 ms).
Both are read when a process starts, so they can only be set from outside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from costmodel.cluster import Cluster

# Threads of a process that drives a GPU [Assumed]: the input pipeline and the launch thread, nothing that computes.
_GPU_RANK_THREADS = 4
_TRIM_THRESHOLD = 1 << 34
# glibc before 2.35 ignores a threshold above 32 MiB altogether (measured on 2.36: 4 GiB is honoured).
_MMAP_THRESHOLD, _MMAP_THRESHOLD_OLD = 1 << 32, 1 << 25


def threads_per_rank(cluster: Cluster) -> int:
    """Compute threads of one rank."""
    return 1 if cluster.device.kind == "cpu" else _GPU_RANK_THREADS


def allocator(glibc: str | None = None) -> dict[str, str]:
    """The allocator tunables, as environment variables; empty where the C library is not glibc. `glibc`: e.g. "2.36" (default: this system's)."""
    version = _glibc() if glibc is None else glibc
    if not version:
        return {}
    major, minor = (int(part) for part in version.split(".")[:2])
    threshold = _MMAP_THRESHOLD if (major, minor) >= (2, 35) else _MMAP_THRESHOLD_OLD
    return {"MALLOC_MMAP_THRESHOLD_": str(threshold), "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD)}


def _glibc() -> str:
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""
    return name.removeprefix("glibc ") if name.startswith("glibc ") else ""


def environment(cluster: Cluster) -> dict[str, str]:
    """Variables that every rank is started with, on top of the caller's."""
    threads = str(threads_per_rank(cluster))
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **allocator()}
    if cluster.num_hosts == 1 and cluster.device.kind == "cpu":
        # A machine's own name need not resolve; ranks of one host meet on the loopback.
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if cluster.num_hosts > 1:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else ranks that are started again read what dead ones wrote
    return variables


def torchrun_command(
    module: str,
    arguments: Sequence[str] = (),
    *,
    ranks_per_host: int,
    num_hosts: int = 1,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    max_restarts: int = 0,
    python: str = sys.executable,
) -> list[str]:
    """`python -m torch.distributed.run ... -m module arguments`; all ranks are started again up to `max_restarts` times when one dies. Raises
    ValueError when several hosts have no rendezvous endpoint."""
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks_per_host)]
    command += ["--max-restarts", str(max_restarts)] if max_restarts else []
    if num_hosts == 1 and rdzv_endpoint is None:
        command.append("--standalone")
    else:
        if rdzv_endpoint is None:
            raise ValueError(f"{num_hosts} hosts need a rendezvous endpoint: `--rdzv-endpoint HOST:PORT`, the same on each of them")
        command += ["--nnodes", str(num_hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", rdzv_endpoint, "--rdzv-id", rdzv_id or "planner"]
        if node_rank is not None:
            command += ["--node-rank", str(node_rank)]
    return [*command, "-m", module, *arguments]
