"""Norms, fused with fp8 quantisation and plain: bytes of input and output, once, per second."""

import torch

from benchmarks.kernels._timing import seconds
from benchmarks.results import Row
from kernels import norm_quant

PUBLISHED = {(16384, 4096): 3.708, (8192, 8192): 3.771}  # cuDNN RMSNorm forward, bf16 -> bf16, H200 (cudnn-frontend benchmark/norms)
SHAPES = [(262144, 512), (131072, 1024), (65536, 2048), (16384, 4096), (32768, 4096), (8192, 8192)]


def _separate(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, then row-wise quantisation, as plain PyTorch."""
    y = torch.nn.functional.rms_norm(x, (x.shape[1],), weight.to(x.dtype), 1e-6).float()
    scale = y.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (y / scale).to(torch.float8_e4m3fn), scale


def run(*, quick: bool = False) -> list[Row]:
    out = []
    for rows, dim in SHAPES[2:4] if quick else SHAPES:
        x, grad = (torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight, scale = torch.randn(dim, device="cuda"), torch.tensor(0.02, device="cuda")
        rstd = torch.rand(rows, device="cuda")
        size, shape = rows * dim, f"{rows} x {dim} bf16"
        variants = [("rowwise", {}), ("tensor_delayed", {}), ("block128", {}), ("mxfp8_1x32", {}), ("mxfp8_32x32", {})]
        if not quick:
            variants += [("rowwise", {"hadamard": True}), ("rowwise", {"stochastic_rounding_seed": 1})]
        for scaling, options in variants:
            given = scale if scaling == "tensor_delayed" else None
            time = seconds(lambda: norm_quant.norm_quantize(x, weight, kind="rmsnorm", scaling=scaling, scale=given, **options))
            goal = scaling in ("rowwise", "tensor_delayed") and not options
            peers = {}
            if scaling == "rowwise" and not options:
                peers["torch norm + separate quantise"] = 3 * size / seconds(lambda: _separate(x, weight), repeats=5) / 1e12
                if (rows, dim) == (65536, 2048):
                    compiled = torch.compile(_separate)
                    peers["torch.compile"] = 3 * size / seconds(lambda: compiled(x, weight)) / 1e12
                if (rows, dim) in PUBLISHED:
                    peers["cuDNN norm alone (published)"] = PUBLISHED[rows, dim]
            out.append(
                Row(name=f"rmsnorm -> fp8 {' '.join([scaling, *options])}, {shape}", value=(3 * size + 8 * rows) / time / 1e12, unit="TB/s",
                    target=3.8 if goal else None, aim=4.1 if goal else None, peers=peers)
            )  # fmt: skip
        time = seconds(lambda: norm_quant.rms_norm(x, weight))
        peers = {"torch": 4 * size / seconds(lambda: torch.nn.functional.rms_norm(x, (dim,), weight.bfloat16(), 1e-6)) / 1e12}
        out.append(Row(name=f"rmsnorm forward, {shape}", value=4 * size / time / 1e12, unit="TB/s", peers=peers))
        time = seconds(lambda: norm_quant.norm_backward(grad, x, weight, rstd=rstd, mean=None, kind="rmsnorm"))
        out.append(Row(name=f"rmsnorm backward, {shape}", value=6 * size / time / 1e12, unit="TB/s"))
    return out
