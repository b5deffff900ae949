"""Triton attention kernels on the CPU through the interpreter, against the CPU path. Run as a process of its own; exit code 1 on error."""

import sys

import _interpreter  # noqa: F401 (must come before any kernel)
import torch

from kernels import _attention_cpu, _attention_triton, _block_triton, _fp8_attention_triton
from kernels._attention_cpu import AttentionOptions
from kernels._attention_triton import Tiles
from kernels._tiles import ranked_tiles
from kernels.block_attention import _cpu_forward, block_edges
from kernels.fp8_attention import fp8_attention_forward

# empty rows, empty keys, length 1, more queries than keys, several tiles; offsets begin above 0 and end below the rows
Q_LENGTHS, K_LENGTHS = [3, 0, 1, 40, 20, 0, 33], [3, 4, 0, 9, 40, 0, 33]
NO_BIAS = (None,) * 4


def _inputs(*, kv_heads: int):
    generator = torch.Generator().manual_seed(0)
    q_offsets, k_offsets = (torch.tensor([0, *lengths]).cumsum(0) + 2 for lengths in (Q_LENGTHS, K_LENGTHS))
    fused = torch.randn(int(q_offsets[-1]) + 3, 2, 48, generator=generator)
    q, grad = fused[:, :, 16:32], fused[:, :, 32:]  # strided views
    k, v = (torch.randn(int(k_offsets[-1]) + 2, kv_heads, 16, generator=generator) for _ in range(2))
    return q, k, v, grad, (q_offsets, k_offsets)


def _compare(name: str, values, truths) -> None:
    for value, truth in zip(values, truths, strict=True):
        if truth is None:
            continue
        error = float((value - truth).abs().nan_to_num(posinf=0.0).max()) / max(float(truth[truth.isfinite()].abs().max()), 1e-6)
        assert error < 1e-4, f"{name}: off by {error}"


def check_attention(kind: str, causal: bool, window: int, path: str, *, split: bool, bias=NO_BIAS) -> None:
    q, k, v, grad, edges = _inputs(kv_heads=2 if path == "few" else 1)
    options = AttentionOptions(kind=kind, causal=causal, window=window, scale=0.3, divisor=1.0 if kind == "softmax" else 7.0)
    tiles = Tiles(m=32, n=32, warps=4, stages=1, split=split)
    out, lse = _attention_triton.forward(q, k, v, edges, bias, options, max_q=40, max_k=40, tiles=tiles)
    true_out, true_lse = _attention_cpu.forward(q, k, v, edges, bias, options)
    rows = slice(2, int(edges[0][-1]))
    _compare(f"{kind} forward", (out, lse[:, rows]), (true_out, true_lse[:, rows] if kind == "softmax" else None))
    gradients = _attention_triton.backward(
        grad, q, k, v, out, lse, edges, bias, options, max_q=40, max_k=40, tiles=tiles, path=path
    )  # fmt: skip
    _compare(f"{kind} backward", gradients, _attention_cpu.backward(grad, q, k, v, true_out, true_lse, edges, bias, options))


def check_blocks() -> None:
    q, k, v, grad, (edges, _) = _inputs(kv_heads=1)
    k, v = (torch.randn(q.shape[0], 1, 16) for _ in range(2))
    blocks = block_edges(edges, 32)
    out, lse = _cpu_forward(q, k, v, blocks, True, 0.3)
    options = AttentionOptions(kind="softmax", causal=True, window=0, scale=0.3, divisor=1.0)
    _compare("block forward", (_block_triton.forward(q, k, v, edges, 32, True, 0.3),), (out,))
    truth = _attention_cpu.backward(grad, q, k, v, out, lse, (blocks, blocks), NO_BIAS, options)[:3]
    _compare("block backward", _block_triton.backward(grad, q, k, v, edges, 32, True, 0.3), truth)


def check_kept_maps() -> None:
    """Sequences with themselves: maps are kept beside the offsets, and made anew when those change."""
    q, _, _, grad, (edges, _) = _inputs(kv_heads=1)
    k, v = (torch.randn(q.shape[0], 1, 16) for _ in range(2))
    options = AttentionOptions(kind="softmax", causal=True, window=0, scale=0.3, divisor=1.0)
    for change in (0, 0, 2):
        edges[-1] += change
        own, tiles = (edges, edges), Tiles(m=32, n=32, warps=4, stages=1, split=False)
        truth = _attention_cpu.backward(grad, q, k, v, *_attention_cpu.forward(q, k, v, own, NO_BIAS, options), own, NO_BIAS, options)
        out, lse = _attention_triton.forward(q, k, v, own, NO_BIAS, options, max_q=44, max_k=44, tiles=tiles)
        found = _attention_triton.backward(grad, q, k, v, out, lse, own, NO_BIAS, options, max_q=44, max_k=44, tiles=tiles, path="split")
        _compare("kept maps", found, truth)
    assert len(edges._maps) == 3  # edges += 0 counts as a change


def check_ranked_tiles() -> None:
    """Records against a loop over sequences; kept for the same two offsets, made anew when either changes or is another."""
    q_lengths, k_lengths = [3, 0, 200, 128, 1, 129, 0, 70], [3, 4, 0, 130, 300, 12, 0, 65]
    q_edges, k_edges = (torch.tensor([0, *x]).cumsum(0).int() + 2 for x in (q_lengths, k_lengths))
    records, count = ranked_tiles(q_edges, k_edges, sum(q_lengths) + 4, 128)
    order = sorted(range(len(q_lengths)), key=lambda i: (-q_lengths[i] * k_lengths[i], i))
    expected = [
        [0, first, int(q_edges[i]), q_lengths[i], int(k_edges[i]), k_lengths[i], 0, 0] for i in order for first in range(0, q_lengths[i], 128)
    ]
    assert records[: int(count)].tolist() == expected
    assert ranked_tiles(q_edges, k_edges, sum(q_lengths) + 4, 128)[0] is records
    for shift in range(1, 4):  # each may get the address of the one before
        other = k_edges + shift
        assert ranked_tiles(q_edges, other, sum(q_lengths) + 4, 128)[0][0, 4] == int(other[order[0]])
        del other
    k_edges[-1] += 1
    assert int(ranked_tiles(q_edges, k_edges, sum(q_lengths) + 4, 128)[0][: int(count), 5].max()) == 300
    assert ranked_tiles(q_edges, k_edges, sum(q_lengths) + 4, 128)[0] is not records


def check_fp8(kind: str, causal: bool) -> None:
    """Quantised queries and keys bit by bit; outputs as near as rounded weights allow (the CPU path does not round them)."""
    q, k, v, _, edges = _inputs(kv_heads=1)
    options = AttentionOptions(kind=kind, causal=causal, window=0, scale=0.3, divisor=1.0 if kind == "softmax" else 7.0)
    out, lse, *quantised = _fp8_attention_triton.forward(q, k, v, edges, options)
    true_out, true_lse, *true_quantised = fp8_attention_forward(q, k, v, *edges, 40, 40, kind, causal, 0.3, options.divisor)
    error = float((out - true_out).norm() / true_out.norm())
    assert error < 0.03, f"fp8 {kind}: off by {error}"
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(quantised, true_quantised, strict=True)), f"fp8 {kind}: other codes or scales"
    if kind == "softmax":
        rows = slice(2, int(edges[0][-1]))
        _compare("fp8 log-sum-exp", (lse[:, rows],), (true_lse[:, rows],))


def main() -> int:
    check_attention("softmax", True, 0, "split", split=True)
    check_attention("silu", False, 20, "split", split=False)
    check_attention("gelu", True, 0, "few", split=True)
    check_attention("relu", True, 15, "split", split=True)
    check_attention("silu", True, 0, "wide", split=False)
    check_attention("softmax", True, 15, "wide", split=True)
    check_attention("gelu", False, 0, "wide", split=True)
    check_blocks()
    check_kept_maps()
    check_ranked_tiles()
    check_fp8("softmax", True)
    check_fp8("silu", False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
