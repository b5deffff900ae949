"""Jagged attention, GDPA, HSTU and BlockAttention at the shapes of GEM-like models."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernels import common
from benchmarks.kernels._timing import copy_rate
from benchmarks.results import Row
from kernels._attention_ops import attention_backward, attention_forward
from kernels.block_attention import block_backward, block_forward
from kernels.fp8_attention import dequantize_rows, fp8_attention_forward

# processes of their own, FlexAttention's mostly compiling; shapes that did not finish have no peer figure. PEER_SECONDS=0 runs none
PEER_SECONDS = {"flex": 75.0, "cudnn": 40.0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One row pair of the table. `targets` and `aims` are (forward, backward); `peers` maps a name to the same pair."""

    name: str
    q_lengths: Tensor
    k_lengths: Tensor | None = None  # None: self-attention
    kind: str = "softmax"
    causal: bool = False
    head_dim: int = 128
    heads: int = 4
    block: int | None = None
    share: bool = False  # report the share of the copy rate instead of TFLOPS
    targets: tuple = (None, None)
    aims: tuple = (None, None)
    peers: dict = dataclasses.field(default_factory=dict)
    fp8: bool = False  # products in e4m3; the backward includes restoring the quantised inputs
    bias: bool = False  # position and time tables of one column: HSTU's published form, 2 x the longest - 1 rows and 129
    fa2_here: bool = False  # torch's FA2 varlen runs in the same process, on the same tensors
    note: str = ""


def shapes() -> list[Shape]:
    """The shapes, most important first."""
    uniform = common.uniform_lengths
    gdpa_peer = {"triton gdpa (fast gelu)": (354, None)}
    return [
        Shape(
            name="softmax self q<=1024 fill 0.5 B=1152", q_lengths=uniform(1152, 1024, 0.5), fa2_here=True,
            targets=(360, 345), aims=(450, 400), peers={"fa4": (328, 344)},
        ),
        Shape(
            name="softmax self q<=256 fill 0.5 B=1152", q_lengths=uniform(1152, 256, 0.5), fa2_here=True,
            targets=(250, 160), aims=(320, 210), peers={"fa4": (97, 119)},
        ),
        Shape(
            name="softmax self q<=2048 full B=576", q_lengths=uniform(576, 2048, 1.0), fa2_here=True,
            targets=(480, 380), aims=(560, 510), peers={"fa4": (541, 503)},
            note="backward in 7 products without atomics, FA4 in 5; tried: 5 with dQ added by TMA reductions, right but not timed",
        ),
        Shape(
            name="softmax cross q<=2048 kv<=256 fill 0.5 B=1152", q_lengths=uniform(1152, 2048, 0.5),
            k_lengths=uniform(1152, 256, 0.5, seed=1), fa2_here=True,
            targets=(330, 220), aims=(390, 300), peers={"fa4": (117, 154)},
        ),
        Shape(
            name="softmax PMA q<=32 kv<=2048 fill 0.5 B=1152", q_lengths=uniform(1152, 32, 0.5), share=True,
            k_lengths=uniform(1152, 2048, 0.5, seed=1), targets=(0.95, 0.75), aims=(0.98, 0.85), fa2_here=True,
            peers={"triton gdpa": (0.99, None)},
        ),
        Shape(
            name="GDPA gelu_fast self q<=1024 fill 0.5 B=1152", q_lengths=uniform(1152, 1024, 0.5), kind="gelu_fast",
            targets=(420, 330), aims=(480, 420), peers=gdpa_peer, note="no peer's backward runs",
        ),
        Shape(
            name="GDPA gelu (exact tanh) self q<=1024 fill 0.5 B=1152", q_lengths=uniform(1152, 1024, 0.5), kind="gelu",
            note="two special-function instructions an element instead of one",
        ),
        Shape(
            name="HSTU silu causal q<=2048 fill 0.5 B=576", q_lengths=uniform(576, 2048, 0.5), kind="silu", causal=True,
            targets=(380, 260), aims=(480, 380), peers={"triton hstu": (310, None)}, note="no peer's backward runs",
        ),
        Shape(
            name="HSTU silu causal with position and time bias q<=2048 fill 0.5 B=576", q_lengths=uniform(576, 2048, 0.5), kind="silu", causal=True,
            bias=True, note="backward with both tables' gradients; no peer that takes this bias without a matrix of it has a package",
        ),
        Shape(
            name="BlockAttention 64 L<=2048 fill 0.5 B=576", q_lengths=uniform(576, 2048, 0.5), block=64, share=True,
            targets=(0.85, 0.75), aims=(0.92, 0.88),
        ),
        Shape(name="BlockAttention 32 L<=2048 fill 0.5 B=576", q_lengths=uniform(576, 2048, 0.5), block=32, share=True),
        Shape(name="BlockAttention 128 L<=2048 fill 0.5 B=576", q_lengths=uniform(576, 2048, 0.5), block=128, share=True),
        Shape(
            name="softmax self D=64 q<=1024 fill 0.5 B=1152", q_lengths=uniform(1152, 1024, 0.5), head_dim=64, fa2_here=True
        ),
        Shape(
            name="HSTU silu causal D=256 lengths 1-4096 B=128", q_lengths=uniform(128, 4096, 0.5), kind="silu", causal=True, head_dim=256,
        ),
        Shape(
            name="softmax self lengths lognormal(600, 1) <= 8192 B=256", fa2_here=True,
            q_lengths=common.lognormal_lengths(256, 600, 1.0, 8192),
        ),
        Shape(
            name="HSTU silu causal lengths lognormal(600, 1) <= 8192 B=256", kind="silu", causal=True,
            q_lengths=common.lognormal_lengths(256, 600, 1.0, 8192),
        ),
        Shape(name="fp8 softmax self q<=2048 full B=576", q_lengths=uniform(576, 2048, 1.0), fp8=True),
        Shape(name="fp8 GDPA gelu_fast self q<=1024 fill 0.5 B=1152", q_lengths=uniform(1152, 1024, 0.5), kind="gelu_fast", fp8=True),
    ]  # fmt: skip


def measure(done: set[str]) -> Iterator[Row]:
    """Forward and backward row of every shape."""
    missing = [s for s in shapes() if not {f"{s.name} forward", f"{s.name} backward"} <= done]
    limit = float(os.environ.get("PEER_SECONDS", "inf"))
    peers = {}
    if limit > 0 and any(s.fa2_here for s in missing):
        peers = {peer: peer_rows(peer, min(limit, own)) for peer, own in PEER_SECONDS.items()}
    for shape in missing:
        gc.collect()
        torch.cuda.empty_cache()
        names = [f"{shape.name} {direction}" for direction in ("forward", "backward")]
        try:
            yield from _rows(shape, names, peers)
        except (RuntimeError, ValueError, subprocess.SubprocessError) as error:  # one shape's failure costs no other shape's row
            note = f"failed: {type(error).__name__}: {str(error)[:200]}"
            unit = "of copy rate" if shape.share else "TFLOPS"
            for name, target, aim in zip(names, shape.targets, shape.aims, strict=True):
                yield Row(name=name, value=None, unit=unit, target=target, aim=aim, note=note)


def peer_rows(peer: str, limit: float) -> dict[str, dict]:
    """What `benchmarks.kernels._peers` measured within `limit` seconds, by shape."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen([sys.executable, "-m", "benchmarks.kernels._peers", peer], stdout=output)
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.startswith("{") and line.endswith("}")]
    return {row["shape"]: row for row in map(json.loads, lines)}


def _rows(shape: Shape, names: list[str], others: dict[str, dict[str, dict]]) -> Iterator[Row]:
    q_lengths = shape.q_lengths
    k_lengths = q_lengths if shape.k_lengths is None else shape.k_lengths
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(lengths):
        size = (int(lengths.sum()), shape.heads, shape.head_dim)
        return torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, grad = (draw(lengths).requires_grad_() for lengths in (q_lengths, k_lengths, k_lengths, q_lengths))
    q_edges = common.offsets(q_lengths)
    edges = q_edges, q_edges if shape.k_lengths is None else common.offsets(k_lengths)  # a model hands one tensor over for both
    times = [common.seconds(call) for call in directions(shape, q, k, v, grad, edges, (int(q_lengths.max()), int(k_lengths.max())))]
    pairs = float((q_lengths.double() * k_lengths.double()).sum())
    flops = 4 * shape.heads * shape.head_dim * pairs * (0.5 if shape.causal else 1.0)
    statistic = shape.kind == "softmax" and shape.block is None  # the backward reads the output only for softmax's row constant
    amounts = (2 * (2 * q.numel() + 2 * k.numel()), 2 * ((4 if statistic else 3) * q.numel() + 4 * k.numel())) if shape.share else (
        flops, 2.5 * flops
    )  # fmt: skip
    scale = copy_rate() if shape.share else 1e12
    peers = {name: list(pair) for name, pair in shape.peers.items()}
    note = "measured here" + (f"; {shape.note}" if shape.note else "") + ("; other peers: same shape, another run" if peers else "")
    if shape.fa2_here:
        try:
            peers["fa2 varlen (this run)"] = _fa2(shape, q, k, v, grad, edges, q_lengths, k_lengths, amounts, scale)
        except (ImportError, RuntimeError, TypeError) as error:
            note += f"; fa2 varlen did not run: {error}"
    for peer, rows in others.items():
        row = rows.get(shape.name, {"error": "not within its time"} if shape.fa2_here and not shape.share else None)
        if row and "seconds" in row:
            peers[f"{peer} {row['form']} (this run)"] = [amount / time / scale for amount, time in zip(amounts, row["seconds"], strict=True)]
        elif row:
            note += f"; {peer} did not run: {row['error']}"
    for index, name in enumerate(names):
        yield Row(
            name=name, value=amounts[index] / times[index] / scale, unit="of copy rate" if shape.share else "TFLOPS",
            target=shape.targets[index], aim=shape.aims[index], note=f"{note}; {times[index] * 1e3:.3f} ms",
            peers={peer: pair[index] for peer, pair in peers.items() if pair[index] is not None},
        )  # fmt: skip


def directions(shape: Shape, q, k, v, grad, edges, longest: tuple[int, int]) -> tuple[Callable, Callable]:
    """Forward and backward as calls of the operators, which CUDA graphs can capture; the first runs once here."""
    q, k, v, grad = (x.detach() for x in (q, k, v, grad))
    scale = shape.head_dim**-0.5
    if shape.block is not None:
        arguments = (q, k, v, edges[0], longest[0], shape.block, shape.causal, scale)
        return lambda: block_forward(*arguments), lambda: block_backward(grad, *arguments)
    options = (*longest, shape.kind, shape.causal, 0, scale, 1.0 if shape.kind == "softmax" else 1024.0)
    arguments = (q, k, v, *edges, *(_bias(edges[0], q.shape[0], longest[0]) if shape.bias else (None,) * 4), *options)
    if shape.fp8:
        fp8 = (q, k, v, *edges, *longest, shape.kind, shape.causal, *options[-2:])
        out, lse, q8, q_scale, k8, k_scale = fp8_attention_forward(*fp8)

        def backward():
            rounded = (dequantize_rows(q8, q_scale, q.dtype), dequantize_rows(k8, k_scale, k.dtype), v)
            return attention_backward(grad, *rounded, out, lse, *arguments[3:])

        return lambda: fp8_attention_forward(*fp8), backward
    out, lse = attention_forward(*arguments)
    out = out if shape.kind == "softmax" else grad
    return lambda: attention_forward(*arguments), lambda: attention_backward(grad, *arguments[:3], out, lse, *arguments[3:])


def _bias(edges: Tensor, rows: int, longest: int) -> tuple[Tensor, ...]:
    """Tables and times of events that follow each other after an hour on average (exponential)."""
    generator = torch.Generator("cuda").manual_seed(1)
    tables = (0.02 * torch.randn(n, 1, device="cuda", generator=generator) for n in (2 * longest - 1, 129))
    gaps = torch.empty(rows, device="cuda", dtype=torch.float64).exponential_(1 / 3600, generator=generator)
    times = gaps.cumsum(0).long()
    return *tables, times, times


def _both_directions(attend, inputs, grad) -> tuple[float, float]:
    """Seconds of the forward and of the backward alone (autograd runs it over one saved forward): for peers."""
    with torch.no_grad():
        forward = common.seconds(attend)
    out = attend()
    backward = common.seconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), graph=False)
    return forward, backward


def _fa2(shape: Shape, q, k, v, grad, edges, q_lengths, k_lengths, amounts, scale) -> list[float | None]:
    from torch.nn.attention.varlen import varlen_attn

    longest = int(q_lengths.max()), int(k_lengths.max())
    times = _both_directions(lambda: varlen_attn(q, k, v, *edges, *longest), (q, k, v), grad)
    return [amount / time / scale for amount, time in zip(amounts, times, strict=True)]
