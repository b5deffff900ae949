"""`kernels.jagged` on the CPU against one-row-at-a-time references, and its Triton kernels in the interpreter."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import jagged
from kernels.reference_memory import concat_reference, padded_reference, reduce_reference, spans

OPS = torch.ops.planner_kernels
LENGTHS = st.one_of(
    st.lists(st.integers(0, 9), min_size=0, max_size=12),
    st.builds(lambda n, big, at: [0] * (at % (n + 1)) + [big] + [0] * (n - at % (n + 1)), st.integers(0, 6), st.integers(1, 300), st.integers(0, 6)),
)
SETTINGS = settings(max_examples=12, deadline=None)


def make(lengths, before=0, after=0, shape=(3,), seed=0, dtype=torch.float64):
    """A jagged batch with `before` and `after` rows of values that belong to no row."""
    offsets = jagged.lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)) + before
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(int(offsets[-1]) + after, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return values.requires_grad_(dtype.is_floating_point), offsets


def same_gradients(outputs, references, inputs):
    """Outputs and their gradients for random cotangents equal the references'."""
    torch.testing.assert_close(outputs, references)
    cotangent = torch.randn_like(outputs)
    ours = torch.autograd.grad(outputs, inputs, cotangent, allow_unused=True, retain_graph=True)
    theirs = torch.autograd.grad(references, inputs, cotangent, allow_unused=True, materialize_grads=True, retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@given(LENGTHS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.sampled_from([torch.int32, torch.int64]))
@SETTINGS
def test_padded_both_ways(lengths, before, after, room, index_dtype):
    values, offsets = make(lengths, before, after)
    offsets = offsets.to(index_dtype)
    max_len = max(lengths, default=0) + room
    padded = jagged.jagged_to_padded(values, offsets, max_len=max_len, padding=-7.0)
    if lengths:
        same_gradients(padded, padded_reference(values, offsets, max_len, -7.0), [values])
    assert padded.shape == (len(lengths), max_len, 3)
    back = jagged.padded_to_jagged(padded, offsets, total=values.shape[0])
    inside = slice(int(offsets[0]), int(offsets[-1]))
    assert torch.equal(back[inside], values[inside])
    assert not back[: inside.start].any() and not back[inside.stop :].any()  # written, and zero


@given(LENGTHS, st.integers(0, 2), st.integers(0, 2), st.integers(1, 4))
@SETTINGS
def test_concat_and_split_are_inverse(lengths, before, after, num_parts):
    parts = [make(lengths[i % 2 :] + lengths[: i % 2], before, after, seed=i) for i in range(num_parts)]
    totals = [int(o[-1] - o[0]) for _, o in parts]
    joined, offsets = jagged.jagged_concat(parts, totals=totals)
    same_gradients(joined, concat_reference(parts), [v for v, _ in parts])
    if num_parts == 2:
        first_offsets = parts[0][1] - parts[0][1][0]
        (first, _), (second, second_offsets) = jagged.jagged_split(joined, offsets, first_offsets)
        for got, (values, o) in ((first, parts[0]), (second, parts[1])):
            assert torch.equal(got, values[int(o[0]) : int(o[-1])])
        assert torch.equal(second_offsets, parts[1][1] - parts[1][1][0])


def test_concat_without_totals_ends_in_zeros():
    values, offsets = make([2, 1], before=1, after=2)
    joined, out_offsets = jagged.jagged_concat([(values, offsets), (values, offsets)])
    assert joined.shape[0] == 12 and int(out_offsets[-1]) == 6 and not joined[6:].any()


@given(LENGTHS.filter(bool), st.data())
@SETTINGS
def test_gather_rows_with_repeats(lengths, data):
    values, offsets = make(lengths, before=1, after=2)
    index = torch.tensor(data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8)), dtype=torch.int64)
    picked, out_offsets = jagged.jagged_gather(values, offsets, index)
    rows = spans(offsets)
    reference = torch.cat([values[b:e] for b, e in (rows[i] for i in index.tolist())] + [values[:0]])
    same_gradients(picked, reference, [values])
    assert out_offsets.tolist() == [0, *torch.tensor([rows[i][1] - rows[i][0] for i in index.tolist()], dtype=torch.int64).cumsum(0).tolist()]


@given(LENGTHS, st.integers(0, 2), st.integers(0, 2))
@SETTINGS
def test_rowwise_operations(lengths, before, after):
    values, offsets = make(lengths, before, after)
    dense = torch.randn(len(lengths), 3, dtype=torch.float64, requires_grad=True)
    row = jagged.row_index(offsets, values.shape[0])
    inside = ((row >= 0) & (row < len(lengths))).unsqueeze(1)
    spread = torch.where(inside, torch.cat([dense, dense.new_zeros(1, 3)])[row.clamp(0, len(lengths))], 0.0)
    for op in ("add", "mul"):
        reference = torch.where(inside, values + spread if op == "add" else values * spread, 0.0)
        same_gradients(jagged.jagged_elementwise(values, offsets, dense, op=op), reference, [values, dense])
    same_gradients(jagged.jagged_broadcast(dense, offsets, total=values.shape[0]), spread, [dense])
    if lengths:
        same_gradients(jagged.jagged_sum(values, offsets), reduce_reference(values, offsets, False), [values])
        same_gradients(jagged.jagged_mean(values, offsets), reduce_reference(values, offsets, True), [values])


def test_bf16_rows_are_summed_in_fp32():
    values = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)  # in bf16, 256 + 1 = 256
    assert jagged.jagged_sum(values, torch.tensor([0, 4096])).item() == 4096


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_in_nothing_out(lengths):
    values, offsets = make(lengths)
    assert jagged.jagged_to_padded(values, offsets, max_len=0).shape == (len(lengths), 0, 3)
    assert jagged.padded_to_jagged(torch.zeros(len(lengths), 0, 3), offsets, total=0).shape == (0, 3)
    assert jagged.jagged_mean(values, offsets).tolist() == [[0.0] * 3] * len(lengths)
    assert jagged.jagged_to_padded(torch.zeros(0, 0), offsets, max_len=2).shape == (len(lengths), 2, 0)


def test_operators_keep_their_contract():
    values, offsets = make([2, 0, 3], before=1, after=1)
    dense = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    part = offsets - offsets[:1]
    torch.library.opcheck(OPS.jagged_to_padded, (values, offsets, 4, 0.0))
    opcheck = partial(torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))  # seconds each
    opcheck(OPS.padded_to_jagged, (jagged.jagged_to_padded(values, offsets, max_len=3).detach().requires_grad_(), offsets, 7))
    opcheck(OPS.jagged_concat, ([values, values], [offsets, offsets], part * 2, 10))
    opcheck(OPS.jagged_unconcat, (values, offsets, [part], [5]))
    opcheck(OPS.jagged_gather, (values, offsets, torch.tensor([2, 2]), torch.tensor([0, 3, 6]), 6))
    opcheck(OPS.jagged_elementwise, (values, offsets, dense, "mul"))
    opcheck(OPS.jagged_reduce, (values, offsets, True))
    opcheck(OPS.jagged_broadcast, (dense, offsets, 7, False))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda v, o: jagged.jagged_to_padded(v, o, max_len=1), "offsets: row 0 has length 2 > max_len=1"),  # never cut silently
        (lambda v, o: jagged.padded_to_jagged(torch.zeros(2, 1, 3), o, total=9), "row 0 has length 2"),
        (lambda v, o: jagged.padded_to_jagged(torch.zeros(2, 3, 3), o, total=2), "offsets: ends at 3"),
        (lambda v, o: jagged.jagged_to_padded(v, torch.tensor([0, 2, 1]), max_len=4), "offsets: decreases at row 1"),
        (lambda v, o: jagged.jagged_to_padded(v, torch.tensor([-1, 2]), max_len=4), "offsets: starts at -1"),
        (lambda v, o: jagged.jagged_to_padded(v, torch.tensor([0, 99]), max_len=99), "offsets: ends at 99"),
        (lambda v, o: jagged.jagged_to_padded(v, o.float(), max_len=4), "offsets: expected int32 or int64"),
        (lambda v, o: jagged.jagged_to_padded(v, o.to("meta"), max_len=4), "offsets: on meta"),
        (lambda v, o: jagged.jagged_concat([(v, o), (v, o[:2])]), r"parts\[1\].offsets"),
        (lambda v, o: jagged.jagged_concat([(v, o), (v.float(), o)]), r"parts\[1\].values"),
        (lambda v, o: jagged.jagged_concat([(v, o)], totals=[1]), "totals: sum to 1"),
        (lambda v, o: jagged.jagged_split(v, o, torch.tensor([0, 3, 3])), r"part_offsets\[1\]"),
        (lambda v, o: jagged.jagged_gather(v, o, torch.tensor([2])), "index: values span"),
        (lambda v, o: jagged.jagged_elementwise(v, o, v, op="add"), "dense: expected"),
        (lambda v, o: jagged.jagged_elementwise(v, o, v[:2], op="max"), "op: 'max'"),
    ],
)
def test_wrong_arguments_are_named(call, match):
    values, offsets = make([2, 1])
    with pytest.raises(ValueError, match=match):
        call(values.detach(), offsets)


def test_repeats_are_bitwise_equal():
    values, offsets = make([100, 3, 0, 700], dtype=torch.float32)
    results = {jagged.jagged_mean(values, offsets).detach().numpy().tobytes() for _ in range(3)}
    assert len(results) == 1


def test_traces_under_compile():
    values, offsets = make([2, 0, 3])
    compiled = torch.compile(lambda v, o: jagged.jagged_to_padded(v * 2, o, max_len=4).sum(), backend="aot_eager", fullgraph=True)
    compiled(values, offsets).backward()
    assert torch.equal(values.grad, torch.full_like(values, 2.0))


@pytest.mark.parametrize("family", ["jagged", "embedding", "norm"])
def test_triton_interpreter_agrees(family):
    root = Path(__file__).parents[2]
    script = root / "tests" / "kernels" / "_memory_agreement.py"
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-W", "ignore", str(script), family], env=env, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0 and "agrees" in done.stdout, done.stderr[-3000:]
