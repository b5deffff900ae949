"""The Hopper kernels, emulated on the CPU, against the float64 reference. Run as a process of its own; exit code 1 on error."""

import itertools
import sys

import _gluon_emulator as emulator
import numpy as np
import torch
from _gluon_emulator import Descriptor, DType, Pointer

from kernels._attention_hopper import hopper_forward_kernel
from kernels._attention_hopper_keys import hopper_dkdv_kernel
from kernels._attention_hopper_queries import hopper_dq_kernel
from kernels._attention_hopper_units import CONSUMERS, hopper_units_kernel
from kernels._block_hopper import block_backward_kernel
from kernels.reference import attention_reference, block_attention_reference

BF16, F32, I32 = DType("bfloat16"), DType("float32"), DType("int32")
LOG2E = 1.4426950408889634
PROGRAMS = 2  # so that every program handles several items, and every barrier several phases
D = 64


class Case:
    """Random rows with NaN where no sequence owns them, and what the kernels are told about them."""

    def __init__(self, q_lengths, k_lengths, heads=2, kv_heads=2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.group = heads, heads // kv_heads
        self.q_edges, self.k_edges = (torch.tensor([0, *x]).cumsum(0) + 2 for x in (q_lengths, k_lengths))
        rows = [int(x[-1]) + 70 for x in (self.q_edges, self.k_edges)]
        self.q, self.grad = (torch.randn(rows[0], heads, D, generator=generator) for _ in range(2))
        self.k, self.v = (torch.randn(rows[1], kv_heads, D, generator=generator) for _ in range(2))
        self.own = [torch.zeros(n, dtype=torch.bool) for n in rows]
        for own, edges in zip(self.own, (self.q_edges, self.k_edges), strict=True):
            own[int(edges[0]) : int(edges[-1])] = True
        for x, side in ((self.q, 0), (self.grad, 0), (self.k, 1), (self.v, 1)):
            x[~self.own[side]] = torch.nan

    def reference(self, **options):
        leaves = [x.nan_to_num().double().requires_grad_() for x in (self.q, self.k, self.v)]
        out = attention_reference(*leaves, self.q_edges, self.k_edges, **options)
        gradients = torch.autograd.grad(out, leaves, self.grad.nan_to_num().double()) if out.requires_grad else [torch.zeros_like(x) for x in leaves]
        return out.detach(), gradients

    def edges(self, side):
        """Offsets of the queries (0) or of the keys (1), and the number of sequences."""
        edges = (self.q_edges, self.k_edges)[side]
        return [Pointer(edges.numpy().astype(np.int64), I32), len(edges) - 1]

    def ranked(self, side, block):
        """What `_tiles.ranked_tiles` builds."""
        edges, other = (self.q_edges, self.k_edges)[:: 1 if side == 0 else -1]
        work = self.q_edges.diff() * self.k_edges.diff()
        order = sorted(range(len(work)), key=lambda i: (-int(work[i]), i))
        spans = [tuple(int(x) for x in (edges[i], edges[i + 1] - edges[i], other[i], other[i + 1] - other[i])) for i in order]
        records = [(0, first, *span, 0, 0) for span in spans for first in range(0, span[1], block)]
        return [Pointer(np.array([*itertools.chain(*records)], np.int64), I32), Pointer(np.array([len(records)], np.int64), I32)]


COUNTER = np.zeros(2, np.int64)  # as on the device: of a stream, for all launches


def launch(kernel, arguments, **options):
    emulator.launch(kernel, PROGRAMS, arguments, **options)
    assert not COUNTER.any(), f"the counter was left at {COUNTER}"


def box(x, rows):
    return Descriptor(x.reshape(x.shape[0], -1).numpy(), (rows, D), BF16)


def result(shape, dtype=BF16):
    array = np.full(int(np.prod(shape)), np.nan, np.float32)
    return array, Pointer(array, dtype)


def compare(name, array, truth, own, zeroed=True):
    value = torch.from_numpy(array).view(truth.shape)
    rest = value[~own] == 0 if zeroed else value[~own].isnan()
    assert rest.all(), f"{name}: rows that no sequence owns were {'not zeroed' if zeroed else 'written'}"
    error = float((value[own].double() - truth[own]).norm() / (1 + truth[own].norm()))
    assert error < 1e-5, f"{name}: off by {error}"


def common(kind, causal, window):
    return {"KIND": "gelu" if kind == "gelu_fast" else kind, "APPROX": kind == "gelu_fast", "CAUSAL": causal, "WINDOW": window > 0}


PARTITIONS = {"PRODUCERS": 1, "HELPERS": 2, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "num_warps": 4}


def check_units(case, kind, *, n, stages, tiles, slots, seed):
    softmax, divisor = kind == "softmax", 1.0 if kind == "softmax" else 7.0
    truth, _ = case.reference(kind=kind, causal=False, divisor=divisor, scale=0.2)
    out, out_pointer = result(case.q.shape)
    _, lse_pointer = result((case.heads, case.q.shape[0]), F32)
    arguments = (box(case.q, 64), box(case.k, n), box(case.v, n), out_pointer, lse_pointer,
                 *case.edges(0), *case.ranked(0, CONSUMERS * 64 * tiles), Pointer(COUNTER, I32),
                 case.q.shape[0], case.heads, case.group, D, D, D, 0.2 * (LOG2E if softmax else 1), 1 / divisor)  # fmt: skip
    options = {name: value for name, value in common(kind, False, 0).items() if name in ("KIND", "APPROX")}
    options.update(N=n, D=D, STAGES=stages, SLOTS=slots, TILES=tiles)
    partitions = {name: value for name, value in PARTITIONS.items() if name != "CONSUMER_REGISTERS"}
    launch(hopper_units_kernel, arguments, seed=seed, **options, **partitions)
    compare(f"{kind} forward by units", out, truth, case.own[0])


def check_forward(case, kind, causal, window, seed=0):
    softmax, divisor = kind == "softmax", 1.0 if kind == "softmax" else 7.0
    truth, _ = case.reference(kind=kind, causal=causal, window=window or None, divisor=divisor, scale=0.2)
    out, out_pointer = result(case.q.shape)
    lse, lse_pointer = result((case.heads, case.q.shape[0]), F32)
    arguments = (box(case.q, 64), box(case.k, 64), box(case.v, 64), out_pointer, lse_pointer, *case.edges(0), *case.ranked(0, 128),
                 Pointer(COUNTER, I32), case.q.shape[0], case.heads, case.group, D, D, D, window, 0.2 * (LOG2E if softmax else 1),
                 1 / divisor)  # fmt: skip
    registers = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "num_warps": 4}
    launch(hopper_forward_kernel, arguments, seed=seed, **common(kind, causal, window), DRAWN=seed % 2 == 0, N=64, D=D, STAGES=4, **registers)
    compare(f"{kind} forward", out, truth, case.own[0])
    return out, lse


def check_backward(case, kind, causal, window, *, dq_tiles, kv_tiles, seed):
    softmax, divisor = kind == "softmax", 1.0 if kind == "softmax" else 7.0
    truth, gradients = case.reference(kind=kind, causal=causal, window=window or None, divisor=divisor, scale=0.2)
    _, lse = check_forward(case, kind, causal, window, seed)
    o = truth.float()
    o[~case.own[0]] = torch.nan
    scale = 0.2 * LOG2E if softmax else 0.2
    (dq, dq_p), (dk, dk_p), (dv, dv_p), (_, delta) = (result(x) for x in (case.q.shape, case.k.shape, case.v.shape, (case.heads, case.q.shape[0])))
    sizes = (case.q.shape[0], case.heads, case.group)
    n, stages, slots = dq_tiles
    launch(
        hopper_dq_kernel,
        (box(case.q, 64), box(case.grad, 64), box(o, 64), box(case.k, n), box(case.v, n), dq_p, Pointer(lse, F32), delta, *case.edges(0),
         *case.ranked(0, 128), Pointer(COUNTER, I32), *sizes, D, D, D, D, D, window, scale, 0.2 / divisor),
        seed=seed, **common(kind, causal, window), N=n, D=D, STAGES=stages, SLOTS=slots, HELD=seed % 3, **PARTITIONS,
    )  # fmt: skip
    compare(f"{kind} dQ", dq, gradients[0], case.own[0])
    n, stages, slots = kv_tiles
    launch(
        hopper_dkdv_kernel,
        (box(case.q, n), box(case.grad, n), box(case.k, 64), box(case.v, 64), dk_p, dv_p, Pointer(lse, F32), delta, *case.edges(1),
         *case.ranked(1, 128), Pointer(COUNTER, I32), case.k.shape[0], *sizes, D, D, D, D, window, scale, 0.2 / divisor, 1 / divisor),
        seed=seed, **common(kind, causal, window), N=n, D=D, STAGES=stages, SLOTS=slots, LATE=kind == "silu" or causal or window > 0,
        STAGED=seed % 2 == 1, **PARTITIONS,
    )  # fmt: skip
    compare(f"{kind} dK", dk, gradients[1], case.own[1])
    compare(f"{kind} dV", dv, gradients[2], case.own[1])


def check_block(lengths, causal, slots, seed):
    case = Case(lengths, lengths, seed=seed)
    leaves = [x.nan_to_num().double().requires_grad_() for x in (case.q, case.k, case.v)]
    truth = block_attention_reference(*leaves, case.q_edges, block=64, causal=causal, scale=0.2)
    expected = torch.autograd.grad(truth, leaves, case.grad.nan_to_num().double())
    edges = case.q_edges
    owner = np.full(case.q.shape[0] // 64 + len(lengths), -1, np.int64)
    for b in range(len(lengths)):
        owner[int(edges[b]) // 64 + b :] = b
    results = [result(x.shape) for x in (case.q, case.k, case.v)]
    launch(
        block_backward_kernel,
        (*(box(x, 64) for x in (case.q, case.k, case.v, case.grad)), *(p for _, p in results), case.edges(0)[0], Pointer(owner, I32),
         len(owner) * case.heads, case.heads, D, D, D, D, 0.2 * LOG2E, 0.2),
        seed=seed, CAUSAL=causal, D=D, SLOTS=slots, HELPERS=2, num_warps=4,
    )  # fmt: skip
    for name, (array, _), wanted in zip(("dQ", "dK", "dV"), results, expected, strict=True):
        compare(f"block {name}", array, wanted, case.own[0], zeroed=False)


RAGGED = ([3, 0, 200, 128, 1, 129, 0, 70], [3, 4, 0, 130, 300, 12, 0, 65])  # the last tiles are followed by NaN
LONG = ([300, 70, 260], [90, 350, 130])


def main() -> int:
    ragged, long = Case(*RAGGED, kv_heads=1), Case(*LONG, seed=1)
    check_forward(long, "softmax", False, 0)
    check_forward(ragged, "silu", True, 0)
    check_backward(ragged, "softmax", False, 0, dq_tiles=(64, 4, 1), kv_tiles=(64, 3, 2), seed=3)
    check_backward(long, "silu", True, 0, dq_tiles=(128, 2, 2), kv_tiles=(128, 2, 2), seed=4)
    check_backward(ragged, "softmax", True, 100, dq_tiles=(64, 3, 1), kv_tiles=(64, 2, 1), seed=5)
    check_backward(ragged, "identity", False, 100, dq_tiles=(64, 3, 2), kv_tiles=(64, 4, 1), seed=6)
    for n, stages, tiles, slots in ((64, 6, 2, 6), (64, 3, 3, 4), (128, 3, 2, 3), (64, 2, 4, 5)):
        check_units(long, "softmax", n=n, stages=stages, tiles=tiles, slots=slots, seed=slots)
        check_units(ragged, "gelu_fast", n=n, stages=stages, tiles=tiles, slots=slots, seed=slots)
    for slots in (3, 2):
        check_block([64, 0, 129, 1, 63, 300, 200, 31], slots == 2, slots, slots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
