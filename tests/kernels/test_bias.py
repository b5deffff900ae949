"""Additive bias on the CPU: HSTU's published form, both tables' gradients against float64, ragged lengths, operators, wrong arguments."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import kernels
from kernels._masks import TIME_BUCKETS, time_bucket
from tests.kernels._attention_cases import DIVISOR, KINDS, Case, assert_matches, offsets, relative_error

Q_LENGTHS, K_LENGTHS = [3, 0, 5, 7, 1, 20, 0, 4], [3, 4, 0, 9, 1, 12, 0, 2]


def published_bias(times, position_table, time_table):
    """`(N, N)` bias of one history, as meta-recsys/generative-recommenders computes it for N events (RelativeBucketedTimeAndPositionBasedBias)."""
    n = len(times)
    later = torch.cat([times, times[-1:]])
    difference = later[1:, None] - later[None, :-1]
    bucket = torch.clamp((torch.log(torch.abs(difference).clamp(min=1).double()) / 0.301).long(), min=0, max=len(time_table) - 1)
    row, col = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return position_table[col - row + n - 1] + time_table[bucket]


def test_hstu_is_the_published_one():
    n, heads = 40, 2
    q, k, v = (torch.randn(n, heads, 8, dtype=torch.float64) for _ in range(3))
    position, time = torch.randn(2 * n - 1, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    times = torch.randint(0, 10**6, (n,)).sort().values
    scores = torch.einsum("qhd,khd->hqk", q, k) + published_bias(times, position, time)
    expected = torch.einsum("hqk,khd->qhd", torch.tril(F.silu(scores) / n), v)
    # delta counts from the key to the query, the published index the other way round
    bias = kernels.AttentionBias(
        position_table=position.flip(0)[:, None], time_table=time[:, None], q_times=torch.cat([times[1:], times[-1:]]), k_times=times
    )
    edges = offsets([n])
    out = kernels.gdpa(q, k, v, edges, edges, max_q=n, max_k=n, activation="silu", scale=1.0, divisor=n, causal=True, bias=bias)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_time_buckets_have_exact_edges(sign):
    edges = [math.ceil(math.exp(0.301 * b)) for b in range(56)]
    differences = sorted({max(e + d, 0) for e in edges for d in (-1, 0, 1)} | {0, 1, 2, 3, 2**24 - 1})
    expected = [math.floor(math.log(max(1, d)) / 0.301) for d in differences]
    assert time_bucket(sign * torch.tensor(differences), 1000).tolist() == expected
    assert time_bucket(sign * torch.tensor(differences), 5).max() == 4


def test_every_difference_has_a_bucket():
    differences = torch.cat([2 ** torch.arange(62), torch.tensor([2**63 - 1, 0])])
    buckets = time_bucket(differences, TIME_BUCKETS)
    assert int(buckets.min()) == 0 and int(buckets.max()) == TIME_BUCKETS - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("causal", "columns"), [(True, 1), (False, 4), (True, 4)])
def test_tables_get_their_gradients(kind, causal, columns):
    case = Case.random(Q_LENGTHS, K_LENGTHS)
    assert_matches(case, kind, 1e-12, causal=causal, bias=case.bias(columns=columns, time_rows=40, span=10**5))


def test_one_column_and_one_a_head_together():
    case = Case.random(Q_LENGTHS, K_LENGTHS, kv_heads=2)
    shared, own = case.bias(columns=1), case.bias()
    mixed = kernels.AttentionBias(position_table=own.position_table, time_table=shared.time_table, q_times=own.q_times, k_times=own.k_times)
    assert_matches(case, "silu", 1e-12, causal=True, window=6, bias=mixed)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), max_size=7), st.sampled_from([None, 250]), st.sampled_from(("softmax", "silu")),
    st.booleans(), st.sampled_from([1, 3, 61]), st.sampled_from([1, 20, 129]),
)  # fmt: skip
def test_ragged_lengths(lengths, huge, kind, causal, position_rows, time_rows):
    lengths = lengths if huge is None else [*lengths, huge]
    case = Case.random(lengths, lengths, heads=2)
    bias = case.bias(position_rows=position_rows, time_rows=time_rows, columns=1, span=10**9)
    assert_matches(case, kind, 1e-11, causal=causal, bias=bias)


def test_low_precision_and_repeat_runs():
    case = Case.random([40, 3, 0, 77], [40, 3, 0, 77], dtype=torch.bfloat16, head_dim=16)
    wide = case.bias(columns=1, dtype=torch.float32)
    assert_matches(case, "silu", 2e-2, causal=True, bias=wide)
    tables = [x.detach().bfloat16().requires_grad_() for x in (wide.position_table, wide.time_table)]
    low = kernels.AttentionBias(position_table=tables[0], time_table=tables[1], q_times=wide.q_times, k_times=wide.k_times)
    first, second = (case.gradients(case.run("silu", causal=True, bias=low), *tables) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    own = case.gradients(case.run("silu", causal=True, bias=wide), wide.position_table, wide.time_table)
    for a, b in zip(first[3:], own[3:], strict=True):
        assert a.dtype == torch.bfloat16 and relative_error(a, b) < 2e-2


def test_a_neighbours_times_change_nothing():
    case = Case.random([5, 6], [5, 6])
    bias = case.bias(columns=1, time_rows=40)
    out = case.run("silu", causal=True, bias=bias)
    bias.k_times[7:] += 1000  # the second history's
    bias.q_times[7:] -= 1000
    changed = case.run("silu", causal=True, bias=bias)
    assert torch.equal(out[:7], changed[:7]) and not torch.equal(out[7:], changed[7:])


def test_operator_contract():
    """Schema, fakes, and autograd registration agree with the implementation, forward and backward."""
    case = Case.random([3, 0, 5], [2, 4, 5], dtype=torch.float32)
    bias = case.bias(columns=1, dtype=torch.float32)
    tables = (bias.position_table, bias.time_table, bias.q_times, bias.k_times)
    options = (5, 5, "silu", True, 0, 0.3, DIVISOR)
    arguments = (case.q, case.k, case.v, case.q_offsets, case.k_offsets, *tables)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.planner_kernels.attention_forward.default, (*arguments, *options), test_utils=checks)
    out, lse = torch.ops.planner_kernels.attention_forward(*arguments, *options)
    plain = [x.detach() if x.is_floating_point() else x for x in (case.grad, *arguments[:3], out, lse, *arguments[3:])]
    torch.library.opcheck(torch.ops.planner_kernels.attention_backward.default, (*plain, *options), test_utils=checks[:2])


def test_compiles_without_graph_breaks():
    case = Case.random([3, 0, 5], [3, 0, 5], dtype=torch.float32)
    bias = case.bias(columns=1, dtype=torch.float32)
    leaves = (case.q, bias.position_table, bias.time_table)

    def step(q, position, time):
        own = kernels.AttentionBias(position_table=position * 2, time_table=time, q_times=bias.q_times, k_times=bias.k_times)
        out = kernels.gdpa(q, case.k, case.v, case.q_offsets, case.k_offsets, max_q=5, max_k=5, activation="silu", causal=True, bias=own)
        return (out * case.grad).sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(step(*leaves), leaves), torch.autograd.grad(compiled(*leaves), leaves), strict=True):
        torch.testing.assert_close(a, b)


TIMES = {"q_times": torch.zeros(11, dtype=torch.long), "k_times": torch.zeros(10, dtype=torch.long)}


@pytest.mark.parametrize(("bias", "message"), [
    ({"position_table": torch.zeros(4, 4)}, "bias.position_table: 4 rows"),
    ({"position_table": torch.zeros(5, 3)}, r"bias.position_table: expected \(rows, 4 heads or 1\), got \(5, 3\)"),
    ({"position_table": torch.zeros(5, 4, dtype=torch.long)}, "bias.position_table: dtype torch.int64"),
    ({"position_table": torch.zeros(5, 1, device="meta")}, "bias.position_table: is on meta"),
    ({"time_table": torch.zeros(0, 1)}, "bias.time_table: expected"),
    ({"time_table": torch.zeros(5, 4)}, "bias.q_times"),
    ({"time_table": torch.zeros(5, 1), **TIMES, "q_times": torch.zeros(11)}, "bias.q_times"),
    ({"time_table": torch.zeros(5, 1), **TIMES, "k_times": torch.zeros(9, dtype=torch.long)}, "bias.k_times"),
])  # fmt: skip
def test_wrong_arguments_are_named(bias, message):
    case = Case.random([3, 4], [2, 4], dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        case.run(bias=kernels.AttentionBias(**bias))


def test_triton_kernels_agree_with_the_cpu_path():
    """Interpreted: what runs where there is no GPU."""
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(here / "_bias_interpreted.py")], env=environment, capture_output=True, text=True, timeout=250, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
