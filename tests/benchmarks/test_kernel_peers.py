"""Peers of the attention kernels: the document mask they are given is the one ours use, and a peer that fails costs no row."""

import sys
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.kernels import _tried, attention
from benchmarks.kernels._peers import document_mask
from kernels.reference import attention_reference


@pytest.mark.parametrize("k_lengths", [[3, 200, 0, 130, 64], [100, 20, 5, 300, 1]])
def test_the_document_mask_keeps_every_sequence_to_itself(k_lengths):
    q_lengths, k_lengths = torch.tensor([3, 200, 0, 130, 64]), torch.tensor(k_lengths)
    q = torch.randn(int(q_lengths.sum()), 2, 16)
    k, v = (torch.randn(int(k_lengths.sum()), 2, 16) for _ in range(2))
    mask = document_mask(q_lengths, k_lengths, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled, which is what a test on the CPU wants
        out = flex_attention(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), block_mask=mask)[0].transpose(0, 1)
    edges = [torch.cat([torch.zeros(1, dtype=torch.long), x.cumsum(0)]) for x in (q_lengths, k_lengths)]
    torch.testing.assert_close(out.double(), attention_reference(q.double(), k.double(), v.double(), *edges), rtol=1e-4, atol=1e-5)


def test_rows_of_a_peer_that_is_stopped_or_fails_are_kept(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho noise\necho '{\"shape\": \"a\", \"seconds\": [1, 2]}'\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert attention.peer_rows("flex", 3.0) == {"a": {"shape": "a", "seconds": [1, 2]}}
    program.write_text("#!/bin/sh\nexit 3\n")
    assert attention.peer_rows("flex", 3.0) == {}


@pytest.mark.parametrize("options", [{}, {"kind": "gelu_fast", "causal": True}, {"block": 32}, {"fp8": True}, {"kind": "silu", "fp8": True}])
def test_what_is_timed_are_the_operators_of_both_directions(options):
    lengths = torch.tensor([40, 0, 7])
    shape = attention.Shape(name="tiny", q_lengths=lengths, head_dim=16, heads=2, **options)
    q, k, v, grad = (torch.randn(47, 2, 16) for _ in range(4))
    edges = torch.tensor([0, 40, 40, 47])
    forward, backward = attention.directions(shape, q, k, v, grad, (edges, edges), (40, 40))
    out = forward()
    out = out if isinstance(out, torch.Tensor) else out[0]
    gradients = backward()[:3]
    assert out.shape == q.shape and [x.shape for x in gradients] == [q.shape] * 3
    assert all(x.isfinite().all() and x.any() for x in (out, *gradients))


def test_what_was_tried_stands_once_beside_a_missed_row(monkeypatch):
    monkeypatch.setitem(_tried.TRIED, "row", "tried [us]: one thing 5")
    first = _tried.tried("row", False, "measured here")
    assert first == "measured here; tried [us]: one thing 5"
    monkeypatch.setitem(_tried.TRIED, "row", "tried [us]: one thing 5, another 4")
    assert _tried.tried("row", False, first) == "measured here; tried [us]: one thing 5, another 4"
    assert _tried.tried("row", True, first) == "measured here" and _tried.tried("other", False, "x") == "x"
