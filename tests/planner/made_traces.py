"""Traces in the profiler's form, written by hand: what happened is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAIN = 11


def event(name: str, category: str, start: float, end: float, *, tid: int = MAIN, **arguments: Any) -> dict[str, Any]:
    """A complete event from `start` to `end` [ms]."""
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start * 1e3, "dur": (end - start) * 1e3, "args": arguments}


def cpu_rank(rank: int, *, sleeps: float = 0.0, plan: str = "", events: float = 100.0, steps: int = 2) -> dict[str, Any]:
    """A rank of 100 ms a step, and `sleeps` [ms] more on rank 1, for which rank 0 waits: input 10, forward 40 (30 in a product), wait 10,
    backward 40 (20 in an add)."""
    body, length = [], 100.0 + sleeps
    for step in range(steps):
        at = step * length
        late = sleeps if rank == 1 else 0.0
        begin = at + 50 + late
        body += [event(f"step:{step}", "user_annotation", at, at + length), event("phase:input", "user_annotation", at, at + 10),
                 event("phase:forward", "user_annotation", at + 10, begin), event("region:history.0", "user_annotation", at + 10, at + 45),
                 event("aten::mm", "cpu_op", at + 12, at + 42),
                 event("phase:exposed_communication", "user_annotation", begin, at + 60 + sleeps),
                 event("phase:backward", "user_annotation", at + 60 + sleeps, at + length),
                 event("aten::add", "cpu_op", at + 70 + sleeps, at + 90 + sleeps)]
    work = {str(s): {"events": events, "computed": events, "pairs": events, "computed_pairs": events} for s in range(steps)}
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2},
            "planner": {"rank": rank, "world_size": 2, "plan": plan, "batching": "jagged", "steps": work,
                        "activations": {"history.0": {"largest": 8.0 + rank, "rms": 1.0}}},
            "host_name": "one", "traceEvents": body, "traceName": "made"}


def gpu_rank() -> dict[str, Any]:
    """100 ms: forward 0-60 with a GEMM 5-40 and its all-gather 40-55 exposed, recompute 60-70, an add 70-90, then nothing (host in backward)."""
    body = [event("step:0", "user_annotation", 0, 100), event("phase:forward", "user_annotation", 0, 58),
            event("phase:backward", "user_annotation", 58, 96), event("recompute", "user_annotation", 58, 64, tid=12),
            event("cudaLaunchKernel", "cuda_runtime", 59, 60, tid=12, correlation=7),
            event("sm90_xmma_gemm_bf16", "kernel", 5, 40, tid=7, stream=7, correlation=5),
            event("ncclDevKernel_AllGather_RING_LL", "kernel", 30, 55, tid=20, stream=20, **{"Group size": 2, "Process Group Ranks": "[0, 1]"}),
            event("sm90_xmma_gemm_bf16", "kernel", 60, 70, tid=7, stream=7, correlation=7),
            event("vectorized_elementwise_kernel", "kernel", 70, 90, tid=7, stream=7, correlation=8)]
    return {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": body}


def write(folder: Path, *bodies: dict[str, Any], zipped: bool = True) -> list[Path]:
    """Each body as a rank's trace of the folder of a run."""
    paths = []
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    for number, body in enumerate(bodies):
        path = folder / "traces" / f"rank-{number}.json{'.gz' if zipped else ''}"
        text = json.dumps(body, indent=1).encode()
        path.write_bytes(gzip.compress(text) if zipped else text)
        paths.append(path)
    return paths
