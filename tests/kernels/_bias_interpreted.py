"""The attention kernels' additive bias through Triton's interpreter, against the CPU path. Run as a process of its own; exit code 1 on error."""

import sys

import _attention_interpreted as attention  # the interpreter comes with it, before any kernel
import torch
import triton
import triton.language as tl

from kernels import _attention_tables
from kernels._bias_triton import split_times, time_bucket
from kernels._masks import TIME_BUCKETS, edges_on
from kernels._masks import time_bucket as expected_bucket


@triton.jit
def _bucket_kernel(a, b, edges, out, num, rows, M: tl.constexpr):
    place = tl.program_id(0) * M + tl.arange(0, M)
    base = tl.load(b).to(tl.int64)
    a_high, a_low = split_times(a, 0, place, num, base)
    b_high, b_low = split_times(b, 0, place, num, base)
    tl.store(out + place, time_bucket(a_high, a_low, b_high, b_low, edges, rows), mask=place < num)


def check_buckets() -> None:
    """Every bucket's edge, from both sides, at offsets that fp32 alone could not hold."""
    edges = edges_on(torch.device("cpu"))
    around = torch.cat([edges[edges < 2**46].double().floor().long() + i for i in (-1, 0, 1)])
    differences = torch.cat([around, -around, torch.tensor([0, 1, 2**24, 2**24 + 1, 2**45 + 3])])
    for base in (0, 1_764_547_200, -(2**45)):
        b = torch.full_like(differences, base)
        b[1:] += torch.arange(len(b) - 1) % 7
        a, out = b + differences, torch.empty(len(b), dtype=torch.int32)
        _bucket_kernel[(triton.cdiv(len(b), 64),)](a, b, edges, out, len(b), TIME_BUCKETS, M=64)
        assert torch.equal(out.long(), expected_bucket(a - b, TIME_BUCKETS)), f"buckets from {base}"


def tables(position_rows: int, time_rows: int, columns: int, heads: int = 2):
    """Two tables (0 rows: none) and times of every size, falling ones too."""
    generator = torch.Generator().manual_seed(position_rows + time_rows)
    q, k, *_ = attention._inputs(kv_heads=1)
    times = tuple((2 ** (40 * torch.rand(x.shape[0], generator=generator, dtype=torch.float64))).long() for x in (q, k))
    made = (torch.randn(rows, columns, generator=generator) if rows else None for rows in (position_rows, time_rows))
    return *made, *(times if time_rows else (None, None))


def check_spread() -> None:
    """Few programs, many, and more than sequences: the same sums."""
    bias = tables(9, 60, 1)
    for programs, slots, scratch in ((1, 1, 1 << 20), (40, 3, 1 << 20), (40, 1, 1)):
        _attention_tables.PROGRAMS, _attention_tables.MAX_SLOTS, _attention_tables.SCRATCH = programs, slots, scratch
        attention.check_attention("silu", True, 0, "split", split=False, bias=bias)


def main() -> int:
    check_buckets()
    _attention_tables.PROGRAMS, _attention_tables.MAX_SLOTS = 16, 2
    attention.check_attention("silu", True, 0, "split", split=False, bias=tables(161, 129, 1))
    attention.check_attention("softmax", False, 0, "split", split=True, bias=tables(161, 129, 2))
    attention.check_attention("softmax", True, 15, "split", split=True, bias=tables(9, 5, 2))
    attention.check_attention("gelu", False, 20, "split", split=False, bias=tables(1, 40, 1))
    attention.check_attention("silu", False, 0, "few", split=True, bias=tables(65, 129, 1))
    attention.check_attention("relu", True, 0, "split", split=True, bias=tables(0, 129, 2))
    attention.check_attention("identity", False, 0, "split", split=True, bias=tables(3, 0, 1))
    mixed = tables(9, 60, 2)
    attention.check_attention("silu", True, 0, "split", split=False, bias=(mixed[0], mixed[1][:, :1], *mixed[2:]))
    check_spread()
    return 0


if __name__ == "__main__":
    sys.exit(main())
