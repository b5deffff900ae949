"""Jagged, embedding and norm kernels on a GPU: agreement with the CPU, sizes past 2^31 elements and 65,535 programs, repeats."""

import subprocess
import sys

import _memory_agreement as agreement
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_movement_agrees_with_the_cpu(dtype):
    agreement.agree_jagged("cuda", (dtype,))


@pytest.mark.parametrize("case", agreement.EMBEDDING_CASES[2:], ids=lambda case: f"{len(case[0])}-bags-of-{case[3]}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_embedding_agrees_with_the_cpu(dtype, case):
    agreement.agree_embedding("cuda", (dtype,), [case])


@pytest.mark.parametrize("shape", agreement.NORM_SHAPES[1:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norms_agree_with_the_cpu(dtype, shape):
    agreement.agree_norm("cuda", (dtype,), [shape])


def test_embedding_in_fp64():
    agreement.agree_embedding("cuda", (torch.float64,), agreement.EMBEDDING_CASES[3:4])


def test_movement_past_2_to_31_elements():
    from kernels import jagged

    rows, length, dim = 70_001, 250, 128  # 2.24e9 elements, more rows than 65,535
    lengths = torch.full((rows,), length, device="cuda")
    lengths[::7] = 0
    offsets = jagged.lengths_to_offsets(lengths)
    total = int(offsets[-1])
    assert rows * length * dim > 2**31
    values = torch.arange(total, device="cuda").bitwise_and(255).to(torch.uint8).unsqueeze(1).expand(total, dim).contiguous()
    padded = jagged.jagged_to_padded(values, offsets, max_len=length)
    for row in (0, 1, 6, 7, rows - 2, rows - 1):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        assert torch.equal(padded[row, : end - begin], values[begin:end]) and not padded[row, end - begin :].any()
    assert torch.equal(jagged.padded_to_jagged(padded, offsets, total=total), values)
    del padded
    joined, _ = jagged.jagged_concat([(values, offsets), (values, offsets)])
    begin = 2 * int(offsets[rows - 1])
    assert torch.equal(joined[begin + length :], values[int(offsets[rows - 1]) :]) and joined.numel() > 2**31


def test_table_past_2_to_31_elements():
    from kernels import embedding

    num_rows, dim = 20_000_000, 128  # 2.56e9 elements
    weight = torch.zeros(num_rows, dim, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([num_rows - 1, 5, num_rows - 1, 2**24 + 3], device="cuda")
    offsets = torch.tensor([0, 2, 4], device="cuda")
    state = embedding.new_optimizer_state(weight, "rowwise_adagrad")
    grad = torch.ones(2, dim, device="cuda")
    embedding.embedding_backward_update_(weight, state, grad, ids, offsets, lr=1.0, eps=0.0)
    assert state.nonzero().flatten().tolist() == [5, 2**24 + 3, num_rows - 1] and state[num_rows - 1] == 4
    out = embedding.embedding_pooled(weight, ids, offsets)
    assert torch.equal(out, torch.full_like(out, -2.0))
    assert torch.equal(embedding.embedding_sequence(weight, ids), torch.full((4, dim), -1.0, device="cuda", dtype=torch.bfloat16))


def test_embedding_in_parts():
    agreement.agree_parts("cuda")


@pytest.mark.parametrize("num, limit", [(1, 1), (4095, 511), (4097, 3), (1_310_720, 40_000_000), (2_000_000, 2**31 - 2), (200_000, 2**33)], ids=str)
def test_sort_of_updates_is_stable(num, limit):
    from kernels._embedding_sort import sort_pairs

    keys = torch.randint(0, limit + 1, (num,), device="cuda").to(torch.int32 if limit < 2**31 else torch.int64)
    keys[::3] = limit
    values = torch.randint(0, 2**31 - 1, (num,), device="cuda", dtype=torch.int32)
    want, order = torch.sort(keys, stable=True)
    ours, along = sort_pairs(keys.clone(), values.clone(), limit)
    assert torch.equal(ours, want) and torch.equal(along, values[order])


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 8.0])  # every id the last row, most near it, all alike, two fifths the first
def test_skewed_update_repeats_bitwise_and_is_exact(power):
    from kernels import embedding

    ids = (torch.rand(300_000, device="cuda") ** power * 1000).long().clamp_(max=999)
    offsets = torch.arange(0, 300_001, 10, device="cuda")
    grad = torch.randn(30_000, 96, device="cuda")
    dense = torch.zeros(1000, 96, device="cuda", dtype=torch.float64)
    dense.index_add_(0, ids, grad.double().repeat_interleave(10, dim=0))
    tables = []
    for _ in range(3):
        table = torch.zeros(1000, 96, device="cuda")
        embedding.embedding_backward_update_(table, None, grad, ids, offsets, optimizer="sgd", lr=-1.0)
        tables.append(table)
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    assert (tables[0].double() - dense).norm() / dense.norm() < 1e-6


def test_norm_gradients_repeat_bitwise():
    from kernels import norm_quant

    x, weight = torch.randn(131_072, 128, device="cuda", dtype=torch.bfloat16), torch.randn(128, device="cuda", requires_grad=True)
    grads = {norm_quant.rms_norm(x, weight).float().sum().backward() or weight.grad.cpu().numpy().tobytes() for _ in range(1)}
    for _ in range(2):
        weight.grad = None
        norm_quant.rms_norm(x, weight).float().sum().backward()
        grads.add(weight.grad.cpu().numpy().tobytes())
    assert len(grads) == 1
    reference = torch.nn.functional.rms_norm(x.double(), (128,), None, 1e-6).sum(0)
    assert (weight.grad.double() - reference).norm() / reference.norm() < 1e-2


TOO_LONG = """
import torch
from kernels.jagged import jagged_to_padded
jagged_to_padded(torch.ones(5, 4, device="cuda"), torch.tensor([0, 5], device="cuda"), max_len=3)
torch.cuda.synchronize()
"""


def test_a_row_that_does_not_fit_traps():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TOO_LONG], capture_output=True, text=True)
    assert done.returncode != 0 and "longer than max_len" in done.stderr + done.stdout
