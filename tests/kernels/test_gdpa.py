"""GDPA on the CPU: every activation against float64, the fixed divisor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from tests.kernels._attention_cases import KINDS, Case, assert_matches, offsets

ACTIVATIONS = KINDS[1:]
Q_LENGTHS, K_LENGTHS = [3, 0, 5, 7, 1, 20, 0, 4], [3, 4, 0, 9, 1, 12, 0, 2]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 4), (False, 4)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_output_and_gradients_equal_the_float64_reference(activation, causal, window, kv_heads):
    case = Case.random(Q_LENGTHS, K_LENGTHS, kv_heads=kv_heads)
    assert_matches(case, activation, 1e-12, causal=causal, window=window)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_low_precision_inputs(dtype, tolerance):
    case = Case.random([40, 3, 0, 77], [40, 3, 5, 77], dtype=dtype, head_dim=16)
    assert_matches(case, "silu", tolerance, causal=True)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8), st.sampled_from(ACTIVATIONS), st.booleans())
def test_ragged_lengths(lengths, activation, causal):
    case = Case.random([a for a, _ in lengths], [b for _, b in lengths], heads=2)
    assert_matches(case, activation, 1e-11, causal=causal)


def test_pooled_and_cross_shapes():
    assert_matches(Case.random([2] * 6, [50, 1, 0, 33, 7, 20]), "gelu", 1e-12)
    assert_matches(Case.random([50, 1, 0, 33], [5, 5, 5, 5]), "gelu", 1e-12)


def test_the_divisor_is_the_callers_and_not_the_batchs():
    lengths = [4, 6]
    case = Case.random(lengths, lengths, spare=0)
    together = case.run("silu")
    alone = kernels.gdpa(
        case.q[:4], case.k[:4], case.v[:4], offsets([4]), offsets([4]), max_q=4, max_k=4, activation="silu", divisor=7.0
    )
    torch.testing.assert_close(together[:4], alone)
    halved = kernels.gdpa(
        case.q, case.k, case.v, case.q_offsets, case.k_offsets, max_q=6, max_k=6, activation="silu", divisor=14.0
    )  # fmt: skip
    torch.testing.assert_close(together, 2 * halved)


@pytest.mark.parametrize(
    ("changes", "message"), [({"activation": "tanh"}, "activation: 'tanh'"), ({"divisor": 0.0}, "divisor: 0.0"), ({"window": -1}, "window")]
)
def test_wrong_arguments_are_named(changes, message):
    case = Case.random([3], [3])
    with pytest.raises(ValueError, match=message):
        kernels.gdpa(case.q, case.k, case.v, case.q_offsets, case.k_offsets, max_q=3, max_k=3, **changes)
