"""fp8 attention on the CPU: distance to float64, gradients of the quantised function, isolation, wrong arguments."""

import pytest
import torch

import kernels
from kernels.fp8_attention import dequantize_rows, quantize_rows, round_values
from kernels.reference import attention_reference
from tests.kernels._attention_cases import KINDS, Case, offsets, relative_error

Q_LENGTHS, K_LENGTHS = [3, 0, 5, 70, 1, 20, 0, 130], [3, 4, 0, 90, 1, 12, 0, 130]
FP8 = 0.06  # e4m3 keeps three bits of mantissa: 2^-4 an element, less once summed


def _run(case: Case, kind: str, **options):
    divisor = 1.0 if kind == "softmax" else 7.0
    maxima = {"max_q": case.max_q, "max_k": case.max_k}
    out = kernels.fp8_attention(case.q, case.k, case.v, case.q_offsets, case.k_offsets, kind=kind, divisor=divisor, **maxima, **options)
    return out, divisor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_output_is_near_the_truth_and_gradients_are_those_of_the_rounded_inputs(kind, causal, kv_heads):
    case = Case.random(Q_LENGTHS, K_LENGTHS, kv_heads=kv_heads, head_dim=32, dtype=torch.float32)
    out, divisor = _run(case, kind, causal=causal)
    options = {"kind": kind, "divisor": divisor, "causal": causal}
    edges = case.q_offsets, case.k_offsets
    truth = attention_reference(case.q.double(), case.k.double(), case.v.double(), *edges, **options)
    assert 1e-3 < relative_error(out, truth) < FP8, "nothing below 1e-3 was rounded to e4m3"
    rounded = [dequantize_rows(*quantize_rows(x.detach()), torch.float32).requires_grad_() for x in (case.q, case.k)]
    exact = attention_reference(*(x.double() for x in (*rounded, round_values(case.v.detach(), case.k_offsets))), *edges, **options)
    assert relative_error(out, exact) < 1e-5
    straight = attention_reference(*(x.double() for x in (*rounded, case.v)), *edges, **options)
    expected = torch.autograd.grad(straight, (*rounded, case.v), case.grad.double())
    # softmax's row constant comes from the output of the rounded values
    for value, wanted in zip(case.gradients(out), expected, strict=True):
        assert relative_error(value, wanted) < (FP8 if kind == "softmax" else 1e-5)


def test_scales_of_rows_and_of_blocks_of_keys():
    x = torch.randn(6, 2, 16) * torch.tensor([1e-30, 1e-3, 1.0, 1e3, 1e30, 0.0])[:, None, None]
    values, scale = quantize_rows(x)
    assert scale.shape == (2, 6) and (dequantize_rows(values, scale, torch.float32) - x).norm(dim=-1).le(0.04 * x.norm(dim=-1)).all()
    v = torch.ones(130, 1, 4)
    v[1::2] = 0.3
    v[64] = 1e6  # only its own block loses precision
    rounded = round_values(v, offsets([130]))
    torch.testing.assert_close(rounded[:64], v[:64], rtol=0.07, atol=0)
    torch.testing.assert_close(rounded[128:], v[128:], rtol=0.07, atol=0)
    assert not rounded[65:128:2].any(), "0.3 is below half a step of a scale set by 1e6"


def test_a_neighbours_nan_and_unowned_rows_stay_out():
    clean, dirty = (Case.random([4, 5, 6], [4, 5, 6], head_dim=16, dtype=torch.float32, spare=2) for _ in range(2))
    with torch.no_grad():
        for x in (dirty.q, dirty.k, dirty.v):
            x[:2] = x[-2:] = torch.nan
            x[6:11] = torch.nan
    a, b = _run(clean, "softmax")[0], _run(dirty, "softmax")[0]
    for rows in (slice(0, 6), slice(11, None)):
        assert torch.equal(a[rows], b[rows])
    assert b[6:11].isnan().all() and not b[:2].any()


@pytest.mark.parametrize("lengths", [[], [0, 0], [1]])
def test_empty_batches(lengths):
    case = Case.random(lengths, lengths, head_dim=16, dtype=torch.float32)
    out, _ = _run(case, "softmax")
    assert out.shape == case.q.shape and all(torch.isfinite(x).all() for x in (out, *case.gradients(out)))


def test_shapes_under_the_fake_tensor_mode():
    case = Case.random([4], [4], head_dim=16, dtype=torch.bfloat16)
    arguments = (case.q.detach(), case.k.detach(), case.v.detach(), case.q_offsets, case.k_offsets, 4, 4, "silu", True, 0.25, 7.0)
    torch.library.opcheck(torch.ops.planner_kernels.fp8_attention_forward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("changes", "message"), [({"kind": "tanh"}, "kind: 'tanh'"), ({"divisor": 0.0}, "divisor: 0.0"), ({"max_k": 2}, "max_k: 2")]
)
def test_wrong_arguments_are_named(changes, message):
    case = Case.random([3], [3], dtype=torch.float32)
    arguments = {"max_q": 3, "max_k": 3, **changes}
    with pytest.raises(ValueError, match=message):
        kernels.fp8_attention(case.q, case.k, case.v, case.q_offsets, case.k_offsets, **arguments)
    with pytest.raises(ValueError, match=r"q: torch\.float64"):
        kernels.fp8_attention(*(x.double() for x in (case.q, case.k, case.v)), case.q_offsets, case.k_offsets, max_q=3, max_k=3)
