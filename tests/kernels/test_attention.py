"""Jagged softmax attention on the CPU: truth, ragged lengths, isolation of sequences, operators, wrong arguments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import _attention_cpu
from tests.kernels._attention_cases import Case, assert_matches, offsets, relative_error

Q_LENGTHS, K_LENGTHS = [3, 0, 5, 7, 1, 20, 0, 4], [3, 4, 0, 9, 1, 12, 0, 2]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_output_and_gradients_equal_the_float64_reference(causal, window, kv_heads):
    case = Case.random(Q_LENGTHS, K_LENGTHS, kv_heads=kv_heads)
    assert_matches(case, "softmax", 1e-12, causal=causal, window=window, scale=0.3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_low_precision_inputs_accumulate_in_float32(dtype, tolerance):
    case = Case.random([40, 3, 0, 77], [40, 3, 5, 77], dtype=dtype, head_dim=16)
    assert case.run().dtype == dtype
    assert_matches(case, "softmax", tolerance, causal=True)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8), st.booleans(), st.sampled_from([None, 1, 5]))
def test_ragged_lengths(lengths, causal, window):
    case = Case.random([a for a, _ in lengths], [b for _, b in lengths], heads=2)
    assert_matches(case, "softmax", 1e-11, causal=causal, window=window)


@pytest.mark.parametrize(
    "lengths", [[], [0, 0, 0], [1], [1] * 50, [17] * 9, [300, 1, 0, 2], list(range(60))], ids=lambda x: f"{len(x)}x{max(x, default=0)}"
)
def test_extreme_batches(lengths):
    assert_matches(Case.random(lengths, lengths), "softmax", 1e-11)


def test_rows_without_a_column_are_zero_and_so_are_their_gradients():
    # causal is aligned to the end of the keys: of 5 queries against 2 keys the first three see nothing
    case = Case.random([5], [2], spare=0)
    out = case.run(causal=True)
    assert not out[:3].any() and out[3:].all()
    assert not case.gradients(out)[0][:3].any()
    # and keys that nobody asks for get exactly zero
    keys_only = Case.random([0, 3], [4, 3], spare=0)
    _, dk, dv = keys_only.gradients(keys_only.run())
    assert not dk[:4].any() and not dv[:4].any()


def test_rows_that_no_sequence_owns_are_zero_and_never_read():
    case = Case.random([4, 6], [3, 5], spare=3)
    with torch.no_grad():
        for x in (case.q, case.k, case.v, case.grad):
            x[:3] = torch.nan
            x[-3:] = torch.nan
    out = case.run()
    for x in (out, *case.gradients(out)):
        assert torch.isfinite(x).all() and not x[:3].any() and not x[-3:].any()


def test_a_neighbours_nan_stays_in_its_sequence():
    lengths = [5, 7, 6, 8]  # similar lengths share a bucket, so that padding would let a neighbour in
    clean, dirty = Case.random(lengths, lengths, spare=0), Case.random(lengths, lengths, spare=0)
    with torch.no_grad():
        for x in (dirty.q, dirty.k, dirty.v, dirty.grad):
            x[5:12] = torch.nan
    own = torch.ones(26, dtype=torch.bool)
    own[5:12] = False
    expected, got = clean.run(), dirty.run()
    for a, b in zip((expected, *clean.gradients(expected)), (got, *dirty.gradients(got)), strict=True):
        torch.testing.assert_close(a[own], b[own])


def test_a_sequence_does_not_depend_on_its_batch_mates():
    case = Case.random([9, 30, 2], [9, 30, 2], spare=0)
    out = case.run(causal=True)
    alone = kernels.jagged_attention(
        *(x[9:39] for x in (case.q, case.k, case.v)), offsets([30]), offsets([30]), max_q=30, max_k=30, causal=True
    )
    torch.testing.assert_close(out[9:39], alone)


def test_views_of_a_fused_projection():
    fused = torch.randn(30, 4, 3 * 8, dtype=torch.float64, requires_grad=True)
    edges = offsets([10, 0, 20])
    out = kernels.jagged_attention(*fused.split(8, dim=-1), edges, edges, max_q=20, max_k=20)
    packed = kernels.jagged_attention(*(x.contiguous() for x in fused.split(8, dim=-1)), edges, edges, max_q=20, max_k=20)
    torch.testing.assert_close(out, packed)
    grad = torch.randn(30, 4, 16, dtype=torch.float64)[:, :, 8:]  # strided as well
    torch.testing.assert_close(torch.autograd.grad(out, fused, grad), torch.autograd.grad(packed, fused, grad))


def test_int32_offsets_and_repeat_runs_are_bitwise_equal():
    case = Case.random(Q_LENGTHS, K_LENGTHS, dtype=torch.float32)
    short = Case.random(Q_LENGTHS, K_LENGTHS, dtype=torch.float32, offsets_dtype=torch.int32)
    first, second = case.run(), short.run()
    for a, b in zip((first, *case.gradients(first)), (second, *short.gradients(second)), strict=True):
        assert torch.equal(a, b)


def test_buckets_hold_every_sequence_once_and_pad_little():
    lengths = torch.randint(0, 512, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    edges = offsets(lengths)
    x = torch.empty(int(edges[-1]), 4, 16)
    plan = _attention_cpu._plan(x, x, (edges, edges))
    rows = torch.cat([bucket.q.rows for bucket in plan]).sort().values
    assert torch.equal(rows, torch.arange(int(edges[-1])))
    padded = sum(bucket.q.lengths.numel() * bucket.q.length * bucket.k.length for bucket in plan)
    assert padded < 1.1 * sum(n * n for n in lengths)
    assert len(plan) < 3000


def test_operator_contract():
    """Schema, fake, and autograd registration agree with the implementation."""
    case = Case.random([3, 0, 5], [2, 4, 5], dtype=torch.float32)
    arguments = (case.q, case.k, case.v, case.q_offsets, case.k_offsets, None, None, None, None, 5, 5, "softmax", True, 0, 0.3, 1.0)
    torch.library.opcheck(
        torch.ops.planner_kernels.attention_forward.default, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )  # fmt: skip


def test_compiles_without_graph_breaks():
    case = Case.random([3, 0, 5], [2, 4, 5], dtype=torch.float32)

    def step(q, k, v):
        out = kernels.jagged_attention(q * 2, k, v, case.q_offsets, case.k_offsets, max_q=5, max_k=5, causal=True)
        return (out * case.grad).sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(step(case.q, case.k, case.v), (case.q, case.k, case.v))
    got = torch.autograd.grad(compiled(case.q, case.k, case.v), (case.q, case.k, case.v))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


def _call(**changes):
    case = Case.random([3, 4], [2, 4], dtype=torch.float32)
    arguments = {"q": case.q, "k": case.k, "v": case.v, "q_offsets": case.q_offsets, "k_offsets": case.k_offsets, "max_q": 4, "max_k": 4}
    return kernels.jagged_attention(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(5, 8)}, "q: expected"),
        ({"k": torch.zeros(10, 4, 9)}, "k: head dim"),
        ({"k": torch.zeros(10, 3, 8), "v": torch.zeros(10, 3, 8)}, "k: 3 heads"),
        ({"v": torch.zeros(11, 4, 8)}, "v: shape"),
        ({"v": torch.zeros(10, 4, 8, dtype=torch.float64)}, "v: is torch.float64"),
        ({"q_offsets": torch.tensor([0.0, 3.0, 7.0])}, "q_offsets: dtype"),
        ({"q_offsets": torch.tensor([[0, 3, 7]])}, "q_offsets: expected shape"),
        ({"q_offsets": torch.tensor([0, 4, 3])}, "q_offsets: decreases from 4 to 3 at index 2"),
        ({"q_offsets": torch.tensor([0, 3, 99])}, "q_offsets: spans"),
        ({"k_offsets": torch.tensor([0, 3])}, "k_offsets: has shape"),
        ({"max_q": 3}, "max_q: 3 is below the longest sequence, 4"),
        ({"window": 0}, "window: 0"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_relative_error_refuses_nan():
    assert not relative_error(torch.tensor([torch.nan]), torch.ones(1)) < 1
