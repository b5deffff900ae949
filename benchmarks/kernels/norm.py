"""Norms, fused with fp8 quantisation and plain: bytes of input and output, once, per second."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels.common import seconds
from benchmarks.results import Row
from kernels import norm_quant

TRIED = {
    "rowwise": "measured here; tried: 8 to 128 elements a thread, a tile a program, programs over many rows with the next in registers or one to "
    "three in shared memory, the weight read again for every row (half as fast), 8 and 16 numbers of a thread side by side",
    "tensor_delayed": "measured here; tried: as row-wise, and an atomic from every program (2.7 TB/s); zeroing the maximum is a launch of its own",
}
COMPILED = {(65536, 2048): 1.596}  # torch.compile of the same two steps, H200, torch 2.11, 2026-11-29: compiling takes longer than all rows here
PUBLISHED = {(16384, 4096): 3.708, (8192, 8192): 3.771}  # cuDNN RMSNorm forward, bf16 -> bf16, H200 (cudnn-frontend benchmark/norms)
SHAPES = [(262144, 512), (131072, 1024), (16384, 4096), (8192, 8192), (65536, 2048)]
WIDE = (65536, 2048)
VARIANTS = [
    ("rowwise", {}), ("tensor_delayed", {}), ("tensor_dynamic", {}), ("block128", {}), ("mxfp8_1x32", {}), ("mxfp8_32x32", {}),
    ("rowwise", {"hadamard": True}), ("rowwise", {"stochastic_rounding_seed": 1}),
]  # fmt: skip


def _separate(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, then row-wise quantisation, as plain PyTorch."""
    y = torch.nn.functional.rms_norm(x, (x.shape[1],), weight.to(x.dtype), 1e-6).float()
    scale = y.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (y / scale).to(torch.float8_e4m3fn), scale


def measure(done: set[str]) -> Iterator[Row]:
    """Rows that are not in `done`."""
    for rows, dim in SHAPES:
        yield from _case(rows, dim, done)


def _case(rows: int, dim: int, done: set[str]) -> Iterator[Row]:
    x, grad = (torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, scale, rstd = torch.randn(dim, device="cuda"), torch.tensor(0.02, device="cuda"), torch.rand(rows, device="cuda")
    size, shape = rows * dim, f"{rows} x {dim} bf16"
    for scaling, options in VARIANTS if (rows, dim) == WIDE else VARIANTS[:2]:
        name = f"rmsnorm -> fp8 {' '.join([scaling, *options])}, {shape}"
        if name in done:
            continue
        given = scale if scaling == "tensor_delayed" else None
        call = partial(norm_quant.norm_quantize, x, weight, kind="rmsnorm", scaling=scaling, scale=given, **options)
        time, bytes_moved = seconds(call), 3 * size + 8 * rows
        goal = scaling in ("rowwise", "tensor_delayed") and not options
        alone = f"; {bytes_moved / seconds(call, calls=1) / 1e12:.2f} with one call a graph" if goal else ""
        peers = _peers(x, weight) if (scaling, options) == VARIANTS[0] else {}
        yield Row(
            name=name, value=bytes_moved / time / 1e12, unit="TB/s",
            target=3.8 if goal else None, aim=4.1 if goal else None, peers=peers, note=(TRIED[scaling] if goal else "measured here") + alone,
        )  # fmt: skip
    if (name := f"rmsnorm forward, {shape}") not in done:
        time, low = seconds(lambda: norm_quant.rms_norm(x, weight)), weight.bfloat16()
        peer = seconds(lambda: torch.nn.functional.rms_norm(x, (dim,), low, 1e-6))
        yield Row(name=name, value=4 * size / time / 1e12, unit="TB/s", peers={"torch": 4 * size / peer / 1e12})
    if (name := f"rmsnorm backward, {shape}") not in done:
        time = seconds(lambda: norm_quant.norm_backward(grad, x, weight, rstd=rstd, mean=None, kind="rmsnorm"))
        yield Row(name=name, value=6 * size / time / 1e12, unit="TB/s")


def _peers(x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Row-wise quantised norm by others [TB/s], at the fused operator's bytes."""
    peers = {"torch norm + separate quantise": 3 * x.numel() / seconds(lambda: _separate(x, weight)) / 1e12}
    if (shape := tuple(x.shape)) in COMPILED:
        peers["torch.compile (another run)"] = COMPILED[shape]
    if shape in PUBLISHED:
        peers["cuDNN norm alone (published)"] = PUBLISHED[shape]
    return peers
