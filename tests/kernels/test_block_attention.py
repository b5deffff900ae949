"""BlockAttention on the CPU: truth, block edges, independence of blocks, wrong arguments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels.block_attention import block_edges
from kernels.reference import block_attention_reference
from tests.kernels._attention_cases import Case, offsets


def _check(lengths, block, *, causal=False, kv_heads=2, tolerance=1e-11):
    case = Case.random(lengths, lengths, heads=4, kv_heads=kv_heads)
    out = kernels.block_attention(case.q, case.k, case.v, case.q_offsets, max_len=case.max_q, block=block, causal=causal)
    truth = block_attention_reference(case.q, case.k, case.v, case.q_offsets, block=block, causal=causal)
    torch.testing.assert_close(out, truth, rtol=tolerance, atol=tolerance)
    if not truth.requires_grad:  # no rows at all: the reference is a constant
        assert not any(x.any() for x in case.gradients(out))
        return
    for value, expected in zip(case.gradients(out), case.gradients(truth), strict=True):
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradients_equal_the_float64_reference(block, causal):
    _check([block, 0, 2 * block + 1, 1, block - 1], block, causal=causal)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=5), st.booleans())
def test_ragged_lengths(lengths, causal):
    _check(lengths, 32, causal=causal)


def test_blocks_begin_at_each_sequences_first_row():
    assert block_edges(offsets([70, 0, 32, 5]), 32).tolist() == [0, 32, 64, 70, 102, 107]


def test_blocks_do_not_see_each_other():
    case = Case.random([64], [64], spare=0)
    out = kernels.block_attention(case.q, case.k, case.v, case.q_offsets, max_len=64, block=32)
    with torch.no_grad():
        case.k[32:] = torch.nan
        case.v[32:] = torch.nan
    again = kernels.block_attention(case.q, case.k, case.v, case.q_offsets, max_len=64, block=32)
    torch.testing.assert_close(out[:32], again[:32])


@pytest.mark.parametrize(("changes", "message"), [({"block": 48}, "block: 48"), ({"max_len": 2}, "max_len: 2 is below")])
def test_wrong_arguments_are_named(changes, message):
    case = Case.random([3], [3])
    with pytest.raises(ValueError, match=message):
        kernels.block_attention(case.q, case.k, case.v, case.q_offsets, **{"max_len": 3, "block": 32, **changes})
