"""`kernels.embedding` on the CPU against autograd and the optimizers' formulas, row by row."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import embedding
from kernels._rounding import stochastic_round_bf16
from kernels.jagged import lengths_to_offsets
from kernels.reference_memory import pooled_reference, update_reference

OPS = torch.ops.planner_kernels
SETTINGS = settings(max_examples=12, deadline=None)
BAGS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def make(lengths, num_rows=5, dim=3, before=0, after=0, dtype=torch.float64):
    """Table, ids with many duplicates, and offsets that leave `before` and `after` ids to no bag."""
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)) + before
    ids = torch.randint(0, num_rows, (int(offsets[-1]) + after,))
    return torch.randn(num_rows, dim, dtype=torch.float64).to(dtype), ids, offsets


@given(BAGS, st.integers(0, 2), st.integers(0, 2), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
@SETTINGS
def test_pooled_and_its_dense_gradient(lengths, before, after, mean, index_dtype):
    weight, ids, offsets = make(lengths, before=before, after=after)
    ids, offsets = ids.to(index_dtype), offsets.to(index_dtype)
    weight.requires_grad_()
    out = embedding.embedding_pooled(weight, ids, offsets, mode="mean" if mean else "sum")
    reference = pooled_reference(weight, ids, offsets, mean)
    torch.testing.assert_close(out, reference)
    cotangent = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(o, weight, cotangent)[0] for o in (out, reference))
    torch.testing.assert_close(ours, theirs)


def test_empty_bags_in_the_middle_and_at_the_end():
    weight, ids, offsets = make([2, 0, 1, 0])
    out = embedding.embedding_pooled(weight, ids, offsets, mode="mean")
    assert not out[1].any() and not out[3].any() and torch.equal(out[2], weight[ids[2]])


def test_sequence_and_its_dense_gradient():
    weight, ids, _ = make([9])
    weight.requires_grad_()
    out = embedding.embedding_sequence(weight, ids)
    assert torch.equal(out, weight[ids])
    cotangent = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(o, weight, cotangent)[0] for o in (out, weight[ids]))
    torch.testing.assert_close(ours, theirs)


@given(
    BAGS, st.sampled_from(["sgd", "rowwise_adagrad", "adagrad", "adam"]), st.sampled_from(["sum", "mean", "sequence"]), st.sampled_from([0.0, 0.1])
)
@SETTINGS
def test_fused_update_is_autograd_then_optimizer(lengths, optimizer, mode, weight_decay):
    weight, ids, offsets = make(lengths, before=1, after=2)
    expected, state = weight.clone(), embedding.new_optimizer_state(weight, optimizer)
    tensors = [] if state is None else list(state) if isinstance(state, tuple) else [state]
    expected_state = [t.clone() for t in tensors]
    for step in (1, 2):
        leaf = expected.clone().requires_grad_()
        out = leaf[ids] if mode == "sequence" else pooled_reference(leaf, ids, offsets, mode == "mean")
        grad_out = torch.randn_like(out)
        (gradient,) = torch.autograd.grad(out, leaf, grad_out)
        used = ids if mode == "sequence" else ids[int(offsets[0]) : int(offsets[-1])]
        options = dict(optimizer=optimizer, lr=0.1, eps=1e-3, step=step, weight_decay=weight_decay)
        update_reference(expected, expected_state, gradient, sorted(set(used.tolist())), **options)
        bags = None if mode == "sequence" else offsets
        options["mode"] = "sum" if mode == "sequence" else mode
        assert embedding.embedding_backward_update_(weight, state, grad_out, ids, bags, **options) is None
    torch.testing.assert_close(weight, expected)
    for ours, theirs in zip(tensors, expected_state, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_duplicates_meet_the_optimizer_once():
    weight, state = torch.zeros(2, 1), torch.zeros(2)
    embedding.embedding_backward_update_(weight, state, torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1]), None, lr=1.0, eps=0.0)
    assert state.tolist() == [0.0, 9.0]  # (1 + 2)^2, not 1 + 4
    assert weight.tolist() == [[0.0], [-1.0]]


def test_bf16_table_rounds_without_bias_and_by_seed():
    dim = 4096
    lr = 2.0**-12  # a tenth of bf16's step at 1 would always round back to 1
    results = []
    for seed in range(8):
        weight = torch.ones(1, dim, dtype=torch.bfloat16)
        embedding.embedding_backward_update_(
            weight, None, torch.ones(1, dim), torch.tensor([0]), None, optimizer="sgd", lr=lr, stochastic_rounding_seed=seed
        )
        results.append(weight.float())
    assert not torch.equal(results[0], results[1])
    mean = torch.stack(results).mean().item()
    step = 2.0**-8  # below 1
    deviation = (lr / step * (1 - lr / step)) ** 0.5 * step / (8 * dim) ** 0.5
    assert abs(mean - (1 - lr)) < 5 * deviation
    nearest = torch.ones(1, dim, dtype=torch.bfloat16)
    embedding.embedding_backward_update_(nearest, None, torch.ones(1, dim), torch.tensor([0]), None, optimizer="sgd", lr=lr)
    assert torch.equal(nearest, torch.ones_like(nearest))


def test_stochastic_rounding_leaves_representable_and_special_numbers_alone():
    x = torch.tensor([[0.0, -0.0, 1.5, -2.0, 2.0**-133, float("inf"), -float("inf"), float("nan")]])
    rounded = stochastic_round_bf16(x, torch.tensor([3]), 1).float()
    assert torch.equal(rounded.nan_to_num(9.0), x.nan_to_num(9.0)) and rounded[0, 7].isnan()


def test_update_repeats_bitwise():
    weight, ids, offsets = make([50] * 40, num_rows=7, dim=20, dtype=torch.float32)
    grad, results = torch.randn(40, 20), set()
    for _ in range(3):
        table, state = weight.clone(), embedding.new_optimizer_state(weight, "rowwise_adagrad")
        embedding.embedding_backward_update_(table, state, grad, ids, offsets, lr=0.1)
        results.add(table.numpy().tobytes() + state.numpy().tobytes())
    assert len(results) == 1


def test_no_ids_change_nothing():
    weight, ids, offsets = make([0, 0])
    before = weight.clone()
    embedding.embedding_backward_update_(weight, None, torch.randn(2, 3).double(), ids, offsets, optimizer="sgd", lr=1.0)
    assert torch.equal(weight, before)
    assert not embedding.embedding_pooled(weight, ids, offsets).any()


def test_operators_keep_their_contract():
    opcheck = partial(torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    weight, ids, offsets = make([2, 0, 3])
    leaf = weight.clone().requires_grad_()
    opcheck(OPS.embedding_pooled, (leaf, ids, offsets, True))
    opcheck(OPS.embedding_sequence, (leaf, ids))
    opcheck(OPS.embedding_dense_grad, (torch.randn(3, 3).double(), ids, offsets, 5, False))
    grad = torch.randn(3, 3).double()
    state = torch.zeros(5).double()
    opcheck(OPS.embedding_update_, (weight, state, None, grad, ids, offsets, "rowwise_adagrad", False, 0.1, 1e-8, 0.9, 0.99, 1, 0.0, None))


W, G = torch.zeros(4, 3), torch.zeros(2, 3)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(weight=W.int()), "weight: expected a floating point"),
        (dict(ids=torch.tensor([0.5, 1.0])), "ids: expected a 1-D int32 or int64"),
        (dict(ids=torch.tensor([0, 4])), r"ids: values span \[0, 4\]"),
        (dict(ids=torch.tensor([-1, 2])), r"ids: values span \[-1, 2\]"),
        (dict(offsets=torch.tensor([0, 2, 1])), "offsets: decreases"),
        (dict(offsets=torch.tensor([0, 1, 3])), "offsets: ends at 3"),
        (dict(grad_out=G[:1]), "grad_out: expected"),
        (dict(grad_out=G.to("meta")), "grad_out: on meta"),
        (dict(state=None), "state: rowwise_adagrad needs 1"),
        (dict(state=torch.zeros(3)), "state: expected a contiguous"),
        (dict(optimizer="lion"), "optimizer: 'lion'"),
        (dict(mode="max"), "mode: 'max'"),
        (dict(offsets=None, mode="mean"), "mode: a sequence lookup"),
        (dict(step=0), "step: 0"),
        (dict(stochastic_rounding_seed=1), "stochastic_rounding_seed: only for bf16"),
        (dict(weight=torch.zeros(3, 4).T), "weight: must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(change, match):
    arguments = dict(weight=W.clone(), state=torch.zeros(4), grad_out=G, ids=torch.tensor([0, 1]), offsets=torch.tensor([0, 1, 2]))
    arguments |= change
    positional = [arguments.pop(k) for k in ("weight", "state", "grad_out", "ids", "offsets")]
    with pytest.raises(ValueError, match=match):
        embedding.embedding_backward_update_(*positional, lr=0.1, **arguments)
