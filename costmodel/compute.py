"""Time of one op without a curve: the roofline with documented default efficiencies.

    t = max(FLOPs / (peak u_c), bytes / (bandwidth u_m))

A calibrated op is its utilisation curve times the same roofline (`costmodel.calibration`), so that a curve carries over to other peaks.
"""
from __future__ import annotations

from costmodel.cluster import Device
from costmodel.ops import KINDS, Op

# Utilisation of an op that nobody measured [Assumed: large shapes on Hopper reach 60-75 % of dense peak in GEMM, 40-60 % in jagged attention, and
# 70-90 % of bandwidth in streaming ops (facts: published H100 tables); the middle of the lower half]. The interval below spans what was seen.
DEFAULT_COMPUTE_UTILISATION = {"linear": 0.60, "bmm": 0.40, "attention": 0.40}
DEFAULT_MEMORY_UTILISATION = 0.65
RANDOM_ROWS_UTILISATION = 0.45
RANDOM_KINDS = ("embedding_lookup", "embedding_update")
ROOFLINE_BELOW, ROOFLINE_ABOVE = 0.35, 0.75
# Host time to launch one eager op [Measured: shared kernel notes, about 15 us on a Hopper host]; one replayed graph launches everything at once.
EAGER_LAUNCH_SECONDS = 15e-6
GRAPH_LAUNCH_SECONDS = 0.3e-6
# A compiled region fuses elementwise ops and skips most of the dispatcher [Assumed].
COMPILED_LAUNCH_SHARE = 0.4
# Host work of building a batch in Python and NumPy [Assumed: bytes/s of jagged ids assembled].
HOST_INPUT_BANDWIDTH = 0.5e9
HOST_INPUT_SECONDS = 1e-3


def peak_flops(device: Device, dtype: str) -> float:
    """Dense peak for `dtype` [FLOP/s]. A format the device lacks runs at the next wider one that it has."""
    family = "fp8" if dtype.startswith(("fp8", "mxfp8")) else dtype
    for name in {"fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16")}.get(family, ()):
        if name in device.peak_flops:
            return device.peak_flops[name]
    # fp32 matrix products run on tensor cores as tf32 only where asked for; the runtime keeps the default, true fp32
    return device.peak_flops.get("fp32") or min(device.peak_flops.values())


def limits(op: Op, phase: str, device: Device) -> tuple[float, float]:
    """(seconds at peak FLOP/s, seconds at full bandwidth) of all repetitions."""
    dtype = op.dtype if KINDS[op.kind].matrix else "fp32"
    return op.flops(phase) / peak_flops(device, dtype), op.bytes(phase) / device.memory_bandwidth


def ideal_seconds(op: Op, phase: str, device: Device) -> float:
    """max of both limits at utilisation 1: what no implementation beats (unless the data is in cache)."""
    return max(limits(op, phase, device))


def roofline_seconds(op: Op, phase: str, device: Device) -> float:
    """The uncalibrated estimate of all repetitions, default utilisations applied."""
    if op.kind == "input":
        return op.count * HOST_INPUT_SECONDS + op.bytes(phase) / HOST_INPUT_BANDWIDTH
    compute, memory = limits(op, phase, device)
    streaming = RANDOM_ROWS_UTILISATION if op.kind in RANDOM_KINDS else DEFAULT_MEMORY_UTILISATION
    return max(compute / DEFAULT_COMPUTE_UTILISATION.get(op.kind, 1.0), memory / streaming)


def limiting(op: Op, phase: str, device: Device) -> str:
    """`compute` or `hbm_bandwidth`."""
    compute, memory = limits(op, phase, device)
    return "compute" if compute >= memory else "hbm_bandwidth"
