"""The attention kernels on a CUDA device: every path against float64, isolation, repeatability, large grids and tensors."""

import pytest
import torch

import kernels
from kernels.reference import attention_reference, block_attention_reference
from tests.kernels._attention_cases import DIVISOR, KINDS, Case, assert_matches, offsets, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = 8e-3  # bfloat16 operands; float32 accumulation adds nothing visible
RAGGED = torch.randint(0, 600, (60,), generator=torch.Generator().manual_seed(3)).tolist()  # many items for every program of a persistent kernel
Q_LENGTHS, K_LENGTHS = [3, 0, 200, 128, 1, 129, 0, 64, 511], [3, 4, 0, 130, 300, 12, 0, 64, 257]


def _case(q_lengths=None, k_lengths=None, **options):
    options = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64, "offsets_dtype": torch.int32, **options}
    q_lengths = Q_LENGTHS if q_lengths is None else q_lengths
    return Case.random(q_lengths, (K_LENGTHS if q_lengths is Q_LENGTHS else q_lengths) if k_lengths is None else k_lengths, **options)


# every kind, every mask and both head dims of the Hopper kernels; not every combination, of which each compiles three kernels
MASKED = [
    *(("softmax", causal, window, 128) for causal in (False, True) for window in (None, 100)),
    ("softmax", True, 100, 64), ("gelu", False, None, 64), ("gelu", False, 100, 128), ("gelu_fast", False, None, 128),
    ("silu", True, None, 128), ("silu", True, 100, 64), ("relu", True, None, 64), ("identity", False, 100, 128),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "causal", "window", "head_dim"), MASKED)
def test_every_kind_and_mask(kind, causal, window, head_dim):
    assert_matches(_case(head_dim=head_dim), kind, BF16, causal=causal, window=window)


@pytest.mark.parametrize("head_dim", [16, 32, 256])
@pytest.mark.parametrize("kind", ["softmax", "silu"])
def test_other_head_dims(head_dim, kind):
    assert_matches(_case(head_dim=head_dim), kind, BF16, causal=True)


@pytest.mark.parametrize("kind", ["softmax", "gelu"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(kind, kv_heads):
    assert_matches(_case(kv_heads=kv_heads), kind, BF16)


@pytest.mark.parametrize(("kind", "causal", "lengths", "columns", "head_dim"), [
    ("silu", True, None, 1, 128), ("softmax", True, None, 4, 64), ("gelu", False, None, 1, 64), ("silu", True, [60, 0, 33, 1], 1, 128),
    ("silu", True, None, 1, 256), ("softmax", False, None, 1, 32),
])  # fmt: skip
def test_bias_tables(kind, causal, lengths, columns, head_dim):
    """Against float64, of one column and of one a head, for long and for few queries; the tables' gradients too repeat bit by bit."""
    case = _case(lengths, head_dim=head_dim)
    bias = case.bias(position_rows=301, time_rows=129, columns=columns, span=2**40, dtype=torch.float32)
    assert_matches(case, kind, 2e-2, causal=causal, bias=bias)
    first, second = (case.gradients(case.run(kind, causal=causal, bias=bias), bias.position_table, bias.time_table) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bias_buckets_are_those_of_the_cpu():
    """With nothing but the time table, the identity, and values of 1: sums over table rows are exact, so that one wrong bucket shows."""
    times = (2 ** (40 * torch.rand(1000, dtype=torch.float64))).long().cuda()
    zeros, ones = torch.zeros(1000, 1, 64, device="cuda"), torch.ones(1000, 1, 64, device="cuda")
    table = torch.arange(129.0, device="cuda")[:, None]
    edges = offsets([400, 0, 600], device="cuda")
    for device in ("cuda", "cpu"):
        bias = kernels.AttentionBias(time_table=table.to(device), q_times=times.to(device), k_times=times.to(device))
        rest = [x.to(device) for x in (zeros, zeros, ones, edges, edges)]
        out = kernels.gdpa(*rest, max_q=600, max_k=600, activation="identity", causal=True, bias=bias)
        if device == "cuda":
            kept = out
    assert torch.equal(kept.cpu(), out)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_other_dtypes(dtype, tolerance):
    assert_matches(_case(dtype=dtype), "softmax", tolerance, causal=True)


@pytest.mark.parametrize(("q_max", "k_max"), [(32, 600), (600, 256), (600, 40), (64, 64)])
def test_pooled_and_cross(q_max, k_max):
    generator = torch.Generator().manual_seed(0)
    q_lengths, k_lengths = (torch.randint(0, top + 1, (300,), generator=generator).tolist() for top in (q_max, k_max))
    for kind in ("softmax", "gelu_fast"):
        assert_matches(_case(q_lengths, k_lengths, head_dim=128), kind, BF16)


@pytest.mark.parametrize("kind", ["softmax", "silu"])
def test_nan_of_a_neighbour_or_of_unowned_rows_stays_out(kind):
    clean, dirty = _case(spare=3), _case(spare=3)
    start, end = int(dirty.q_offsets[3]), int(dirty.q_offsets[4])
    k_start, k_end = int(dirty.k_offsets[3]), int(dirty.k_offsets[4])
    own = [torch.ones(x.shape[0], dtype=torch.bool, device="cuda") for x in (dirty.q, dirty.k)]
    own[0][start:end] = False
    own[1][k_start:k_end] = False
    with torch.no_grad():
        for x, a, b in ((dirty.q, start, end), (dirty.grad, start, end), (dirty.k, k_start, k_end), (dirty.v, k_start, k_end)):
            x[a:b] = torch.nan
            x[:3] = torch.nan
            x[-3:] = torch.nan
    expected, got = clean.run(kind), dirty.run(kind)
    pairs = zip((expected, *clean.gradients(expected)), (got, *dirty.gradients(got)), (0, 0, 1, 1), strict=True)
    for a, b, side in pairs:
        assert torch.equal(a[own[side]], b[own[side]])
        assert not b[:3].any() and not b[-3:].any()


@pytest.mark.parametrize("kind", ["softmax", "gelu_fast"])
def test_repeat_runs_are_bitwise_equal(kind):
    case = _case(head_dim=128)
    first, second = case.run(kind), case.run(kind)
    assert torch.equal(first, second)
    for a, b in zip(case.gradients(first), case.gradients(second), strict=True):
        assert torch.equal(a, b)


def test_strided_views_equal_packed_tensors():
    fused = torch.randn(600, 4, 3 * 64, device="cuda", dtype=torch.bfloat16)
    edges = offsets([100, 0, 300, 200], device="cuda", dtype=torch.int32)
    views = [x.detach().requires_grad_() for x in fused.split(64, dim=-1)]
    packed = [x.detach().contiguous().requires_grad_() for x in views]
    grad = torch.randn(600, 4, 128, device="cuda", dtype=torch.bfloat16)[:, :, 64:]
    for tensors in (views, packed):
        out = kernels.jagged_attention(*tensors, edges, edges, max_q=300, max_k=300, causal=True)
        gradients = torch.autograd.grad(out, tensors, grad)
        if tensors is views:
            kept = (out, *gradients)
    for a, b in zip(kept, (out, *gradients), strict=True):
        assert torch.equal(a, b)


def test_more_than_65535_sequence_heads():
    case = _case([3] * 20_000, heads=4, head_dim=64)
    assert_matches_sample(case)


@pytest.mark.parametrize(("kind", "causal", "window", "head_dim"), MASKED)
def test_backward_with_the_tiles_of_long_and_short_sequences_repeats_bitwise(kind, causal, window, head_dim):
    for lengths in ((Q_LENGTHS, K_LENGTHS), (RAGGED, RAGGED)):
        case = _case(*lengths, head_dim=head_dim, kv_heads=2)
        truth = case.reference(kind, causal=causal, window=window)
        expected = case.gradients(truth)
        options = _options(kind, causal, window, head_dim)
        arguments = [x.detach() for x in (case.q, case.k, case.v)]
        offsets_of, none = (case.q_offsets, case.k_offsets), (None,) * 4
        out, lse = _attention_triton().forward(*arguments, offsets_of, none, options, max_q=case.max_q, max_k=case.max_k)
        out = out if kind == "softmax" else case.grad
        runs = [
            _attention_triton().backward(
                case.grad, *arguments, out, lse, offsets_of, none, options, max_q=longest, max_k=case.max_k, path="hopper"
            )[:3]
            for longest in (100, 600, 600)
        ]  # fmt: skip
        for run in runs:
            assert max(relative_error(a[2:-2], b[2:-2]) for a, b in zip(run, expected, strict=True)) < BF16
        assert all(torch.equal(a, b) for a, b in zip(*runs[1:], strict=True))


UNITS = [(64, 4, 16, 6), (64, 4, 2, 6), (64, 5, 4, 4), (64, 2, 8, 4)]


@pytest.mark.parametrize("tiles", UNITS)
@pytest.mark.parametrize("kind", ["softmax", "gelu_fast"])
def test_forward_by_units(kind, tiles):
    from kernels import _hopper_launch

    short = [x % 257 for x in RAGGED]
    for lengths in ((short, short), (RAGGED, short), (RAGGED, [x % 120 for x in RAGGED])):
        case = _case(*lengths, head_dim=128, kv_heads=2)
        out = torch.empty_like(case.q)
        lse = torch.empty((4, case.q.shape[0] if kind == "softmax" else 0), device="cuda")
        inputs = [x.detach() for x in (case.q, case.k, case.v)]
        _hopper_launch.forward_units(*inputs, out, lse, (case.q_offsets, case.k_offsets), _options(kind, False, None, 128), tiles)
        assert relative_error(out, case.reference(kind)) < BF16
        if kind == "softmax":
            _, expected = _attention_triton().forward(
                *inputs, (case.q_offsets, case.k_offsets), (None,) * 4, _options(kind, False, None, 128), max_q=600, max_k=256, hopper=False
            )
            own = slice(int(case.q_offsets[0]), int(case.q_offsets[-1]))
            torch.testing.assert_close(lse[:, own], expected[:, own], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_of_64_with_their_own_backward(causal, head_dim):
    """Heads that are not grouped: the Gluon kernel, over many items a program."""
    case = _case(RAGGED, head_dim=head_dim)
    double = (x.double() for x in (case.q, case.k, case.v))
    expected = case.gradients(block_attention_reference(*double, case.q_offsets, block=64, causal=causal))
    out = kernels.block_attention(case.q, case.k, case.v, case.q_offsets, max_len=case.max_q, block=64, causal=causal)
    for a, b in zip(case.gradients(out), expected, strict=True):
        assert relative_error(a, b) < BF16


def _attention_triton():
    from kernels import _attention_triton

    return _attention_triton


def _options(kind, causal, window, head_dim):
    from kernels._attention_cpu import AttentionOptions

    return AttentionOptions(kind=kind, causal=causal, window=window or 0, scale=head_dim**-0.5, divisor=1.0 if kind == "softmax" else DIVISOR)


def test_every_kind_is_among_them():
    assert {kind for kind, *_ in MASKED} == set(KINDS)


def assert_matches_sample(case: Case) -> None:
    """Against dense attention over equal lengths, which is quick for many sequences."""
    own = case.q[2:-2], case.k[2:-2], case.v[2:-2]
    q, k, v = (x.double().view(-1, 3, *x.shape[1:]).transpose(1, 2) for x in own)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(own[0].shape)
    out = case.run()
    assert relative_error(out[2:-2], truth) < BF16


def test_more_than_2_31_elements():
    """Past int32 the last sequences must still read their own rows."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of device memory")
    count, length, heads, head_dim = 4200, 1024, 4, 128
    assert count * length * heads * head_dim > 2**31
    q = torch.randn(count * length, heads, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    edges = offsets([length] * count, device="cuda", dtype=torch.int32)
    out = kernels.jagged_attention(q, q, q, edges, edges, max_q=length, max_k=length)
    (gradient,) = torch.autograd.grad(out, q, q.detach())
    rows = slice((count - 1) * length, count * length)
    tail = q.detach()[rows].requires_grad_()
    one = offsets([length], device="cuda", dtype=torch.int32)
    expected = kernels.jagged_attention(tail, tail, tail, one, one, max_q=length, max_k=length)
    (expected_gradient,) = torch.autograd.grad(expected, tail, tail.detach())
    assert relative_error(out[rows], expected) < 1e-3
    assert relative_error(gradient[rows], expected_gradient) < BF16


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_block_attention(block, causal):
    case = _case([block, 0, 2 * block + 1, 1, block - 1], heads=4, kv_heads=2, head_dim=128)
    out = kernels.block_attention(case.q, case.k, case.v, case.q_offsets, max_len=case.max_q, block=block, causal=causal)
    double = (x.double() for x in (case.q, case.k, case.v))
    truth = block_attention_reference(*double, case.q_offsets, block=block, causal=causal)
    assert relative_error(out, truth) < BF16
    for value, expected in zip(case.gradients(out), case.gradients(truth), strict=True):
        assert relative_error(value, expected) < BF16


@pytest.mark.parametrize("kind", ["softmax", "gelu_fast"])
@pytest.mark.parametrize(("causal", "head_dim", "kv_heads"), [(False, 128, 4), (True, 64, 2)])
def test_fp8_attention(kind, causal, head_dim, kv_heads):
    case = _case(head_dim=head_dim, kv_heads=kv_heads, spare=3)
    with torch.no_grad():
        for x in (case.q, case.k, case.v):
            x[:3] = x[-3:] = torch.nan
    maxima = {"max_q": case.max_q, "max_k": case.max_k}
    options = {"kind": kind, "causal": causal, "divisor": 1.0 if kind == "softmax" else 7.0}
    out = kernels.fp8_attention(case.q, case.k, case.v, case.q_offsets, case.k_offsets, **maxima, **options)
    double = (x.nan_to_num().double() for x in (case.q, case.k, case.v))
    truth = attention_reference(*double, case.q_offsets, case.k_offsets, **options)
    assert relative_error(out, truth) < 0.06
    own = [slice(int(x[0]), int(x[-1])) for x in (case.q_offsets, case.k_offsets, case.k_offsets)]
    for value, expected, rows in zip(case.gradients(out), case.gradients(truth), own, strict=True):
        assert relative_error(value[rows], expected[rows]) < 0.08


@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [0, 5, 0]])
def test_empty_batches_and_rows(lengths):
    case = _case(lengths)
    out = case.run()
    assert torch.isfinite(out).all() and not out[:2].any()
    for gradient in case.gradients(out):
        assert torch.isfinite(gradient).all()


def test_a_new_batch_compiles_nothing():
    from kernels._attention_triton import kernel
    from kernels._hopper_launch import hopper_dkdv_kernel, hopper_dq_kernel, hopper_forward_kernel

    hopper = (hopper_forward_kernel, hopper_dq_kernel, hopper_dkdv_kernel)
    watched = (*hopper, kernel.attention_forward_kernel, kernel.keys_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for function in watched for cache in function.device_caches.values())

    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        lengths = torch.randint(1, 1000, (50,), generator=generator).tolist()
        case = _case([*lengths, 1000], head_dim=128)
        out = case.run(causal=True)
        case.gradients(out)
        if step == 2:  # sizes that are multiples of 16 and such that are not have both been seen
            before = compiled()
    assert compiled() == before
