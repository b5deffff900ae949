"""Time of one op without a curve: a roofline with documented default efficiencies.

    GPU    t = sqrt((FLOPs / (peak u_c))^2 + (bytes / (bandwidth u_m))^2) + t_0        an op near the ridge pays for both roofs in part
    host   t = max(FLOPs / (peak u_c), bytes / (bandwidth u_m))

A calibrated op is its utilisation curve times the ideal roofline (`costmodel.calibration`), so that a curve carries over to other peaks.
"""
from __future__ import annotations

import numpy as np

from costmodel.cluster import Device
from costmodel.ops import BACKWARD, FORWARD, KINDS, Op

# Utilisation of an op on a GPU that nobody measured [Measured: one H200, 2026-11-29, torch 2.11. bf16 GEMM 670-720 of 989 TFLOPS at 4096^3 and
# 8192^3, 595-650 at M = 32k-65k, fp8 1,230-1,360 of 1,979. docs/results/kernels-h200.md: jagged self-attention forward 449-621, backward 247-305 by
# 2.5 x forward; norms 3.0-4.1 of 4.8 TB/s; fused embedding update 1.8 TB/s by the bytes of `ops.KINDS`. index_select of 512-byte rows 1.7 TB/s]
COMPUTE_UTILISATION = {"linear": 0.70, "bmm": 0.40, "attention": 0.50}
ATTENTION_BACKWARD_UTILISATION = 0.22
# The same of torch's scaled_dot_product_attention by backend, causal, FLOPs of backward 2 x forward [Published: arXiv 2407.08608, H100 SXM, heads of
# 128, 8,192 events: FlashAttention-2 333 TFLOPS forward and 318 backward by 2.5 x forward, cuDNN 529 and 518; docs/results/kernels-h200.md: 348 and
# 297 of FlashAttention-2 on one H200, full histories of 2,048].
SDPA_UTILISATION = {("flash", FORWARD): 0.33, ("flash", BACKWARD): 0.26, ("cudnn", FORWARD): 0.53, ("cudnn", BACKWARD): 0.42}
# FlashAttention-2 is written for Ampere and takes none of what Hopper brought: of an A100's peak it reaches so many times the share that it reaches
# of an H100's [Published: arXiv 2307.08691, section 4.1: at best 73 % forward and 63 % backward of an A100's 312 TFLOPS, 335 of an H100's 989]. On a
# B200 it is no faster than on an H100 [Published: heads of 128, 8,192 events, forward: 362 of 2,250 TFLOPS, meta-pytorch/tritonbench#171; 370 of 989,
# arXiv 2407.08608].
FLASH_BEFORE_HOPPER, FLASH_AFTER_HOPPER = 1.94, 0.43
# A bias on attention's scores, HSTU's two tables and in backward their gradients: the time of so many fp32 FLOPs a score, whatever the heads' width,
# on top of the attention without [Measured: one H200, 2026-12-01, causal SiLU, 1.59e9 scores: forward 6.12 ms with the bias, 1.71 without; backward
# 26.6, its three passes one by one, and 6.62].
BIAS_FLOPS = {FORWARD: 185.0, BACKWARD: 840.0}
MEMORY_UTILISATION = {"embedding_lookup": 0.45, "embedding_update": 0.38}
DEFAULT_MEMORY_UTILISATION = 0.80
# Of the peak, with a scale per 128 elements, whose sums leave the tensor cores on the way [Measured: H200, torch 2.11,
# docs/results/precision-h200.md: layers of 2048 and 4096 in such blocks spend on products what bf16 does, with scales by rows half of it].
BLOCK_SCALED_SHARE = 0.5
# Of the peak at most, of a product in 8 bits that nobody timed in them and that borrows the utilisation of 16 bits, which can be more [Measured:
# H200, torch 2.11, docs/results/precision-h200.md: products of 16,384 rows with 2,048 and 4,096 squared reach 1,451 and 1,450 of 1,979 TFLOPS].
LOW_UTILISATION = 0.735
# Shortest kernel [Assumed: launch, ramp-up and tail of a grid on Hopper].
KERNEL_SECONDS = 3e-6
# The same of a host's core [Assumed: the middle of the lower half of what large shapes reach].
HOST_COMPUTE_UTILISATION = {"linear": 0.60, "bmm": 0.40, "attention": 0.40}
HOST_MEMORY_UTILISATION = {"embedding_lookup": 0.45, "embedding_update": 0.45}
HOST_DEFAULT_MEMORY_UTILISATION = 0.65
# Host time to launch one eager op [Measured: shared kernel notes, about 15 us on a Hopper host]; one replayed graph launches everything at once.
EAGER_LAUNCH_SECONDS = 15e-6
GRAPH_LAUNCH_SECONDS = 0.3e-6
# Main-thread time of a compiled block over an eager one's, both directions: what guards and the compiler's wrappers cost, the fused launches do not
# save, for eager operators are called without the dispatcher [Measured: one H200, torch 2.11, 2026-12-01: 0.79-1.48 over ten blocks, median 1.11].
COMPILED_LAUNCH_SHARE = 1.1
# Host work of building a batch in Python and NumPy [Assumed: bytes/s of jagged ids assembled].
HOST_INPUT_BANDWIDTH = 0.5e9
HOST_INPUT_SECONDS = 1e-3


_WIDER = {"fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16")}


def peak_flops(device: Device, dtype: str) -> float:
    """Dense peak for `dtype` [FLOP/s]. A format the device lacks runs at the next wider one that it has."""
    if dtype == "fp8_block":
        return peak_flops(device, "fp8") * (BLOCK_SCALED_SHARE if "fp8" in device.peak_flops else 1.0)
    family = "fp8" if dtype.startswith(("fp8", "mxfp8")) else dtype
    for name in _WIDER.get(family, ()):
        if name in device.peak_flops:
            return device.peak_flops[name]
    # fp32 matrix products run on tensor cores as tf32 only where asked for; the runtime keeps the default, true fp32
    return device.peak_flops.get("fp32") or min(device.peak_flops.values())


def limits(op: Op, phase: str, device: Device) -> tuple[float, float]:
    """(seconds at peak FLOP/s, seconds at full bandwidth) of all repetitions."""
    flops, num_bytes = op.flops_and_bytes(phase)
    return flops / peak_flops(device, op.dtype if KINDS[op.kind].matrix else "fp32"), num_bytes / device.memory_bandwidth


def ideal_seconds(op: Op, phase: str, device: Device) -> float:
    """max of both limits at utilisation 1: what no implementation beats (unless the data is in cache)."""
    return max(limits(op, phase, device))


def roofline_seconds(op: Op, phase: str, device: Device) -> float:
    """The uncalibrated estimate of all repetitions."""
    if op.kind == "input":
        return op.count * HOST_INPUT_SECONDS + op.bytes(phase) / HOST_INPUT_BANDWIDTH
    return float(roofline(op, phase, device))


def roofline(op: Op, phase: str, device: Device) -> np.ndarray:
    """`roofline_seconds` of an op that the device runs; its features may be arrays."""
    at_peak, at_bandwidth = limits(op, phase, device)
    if device.kind == "cpu":
        reached = HOST_MEMORY_UTILISATION.get(op.kind, HOST_DEFAULT_MEMORY_UTILISATION)
        return np.maximum(at_peak / HOST_COMPUTE_UTILISATION.get(op.kind, 1.0), at_bandwidth / reached)
    if op.kind == "sdpa":
        matrix = SDPA_UTILISATION[op.variant, phase] * flash_share(op, device)
    else:
        matrix = ATTENTION_BACKWARD_UTILISATION if op.kind == "attention" and phase == BACKWARD else COMPUTE_UTILISATION.get(op.kind, 1.0)
    memory = MEMORY_UTILISATION.get(op.kind, DEFAULT_MEMORY_UTILISATION)
    return np.hypot(at_peak / matrix, at_bandwidth / memory) + op.count * KERNEL_SECONDS + bias_seconds(op, phase, device)


def flash_share(op: Op, device: Device) -> float:
    """Utilisation of torch's flash backend over what it is on Hopper; 1 for other ops. A device without 8-bit products is older, one whose 8-bit
    products take scales of blocks newer."""
    if op.kind != "sdpa" or op.variant != "flash" or device.kind != "gpu":
        return 1.0
    if "fp8" not in device.peak_flops:
        return FLASH_BEFORE_HOPPER
    return FLASH_AFTER_HOPPER if "mxfp8" in device.peak_flops else 1.0


def bias_seconds(op: Op, phase: str, device: Device) -> float | np.ndarray:
    """What a bias on its scores costs an attention on a GPU, all repetitions [s]; 0 for other ops."""
    if op.kind != "attention" or not op.variant.endswith("_bias") or device.kind == "cpu":
        return 0.0
    return op.count * op.feature("pairs") * op.feature("heads") * BIAS_FLOPS[phase] / peak_flops(device, "fp32")


def limiting(op: Op, phase: str, device: Device) -> str:
    """`compute` or `hbm_bandwidth`."""
    compute, memory = limits(op, phase, device)
    return "compute" if compute >= memory else "hbm_bandwidth"
