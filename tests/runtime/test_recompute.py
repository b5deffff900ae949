"""Blocks that run again in backward, against the same blocks that keep everything."""
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from costmodel.model import Layer, LayerGroup
from runtime.checkpointing import _saved_operators, apply_checkpointing
from runtime.memory import StorageTracker, storage_ids
from runtime.mixed_precision import compute_in
from runtime.model.registry import build_block

OFFSETS = torch.tensor(np.cumsum([0, 5, 0, 17, 1]))
LAYERS = {
    "softmax": LayerGroup(kind="self_attention", heads=2, head_dim=8, mlp_dim=24, causal=True),
    "gdpa": LayerGroup(kind="gdpa", heads=2, head_dim=8, activation="silu", divisor=10.0),
    "block": LayerGroup(kind="block_attention", heads=2, head_dim=8, mlp_dim=24, block=64),
    "hstu": LayerGroup(kind="hstu", heads=2, head_dim=8, divisor=10.0, causal=True),
    "llama": LayerGroup(kind="llama", heads=2, head_dim=8, mlp_dim=24, options={"kv_heads": 1}, causal=True),
    "mask_net": LayerGroup(kind="mask_net", mlp_dim=24),
    "pyramid": LayerGroup(kind="pyramid", branches=(
        Layer(kind="gdpa", heads=2, head_dim=8, mlp_dim=24, activation="gelu", divisor=1.0), Layer(kind="hstu", heads=2, head_dim=8, divisor=10.0))),
}


def block_of(name: str, *, bf16: bool = False):
    torch.manual_seed(3)
    block = build_block(16, LAYERS[name])
    if bf16:
        compute_in(block, torch.bfloat16)
    return block


def results(block, *, twice: bool = False):
    torch.manual_seed(4)
    x = torch.randn(int(OFFSETS[-1]), 16, requires_grad=True)
    parameters = list(block.parameters())
    with StorageTracker() as tracker:
        out = block(x, OFFSETS, 17)
    kept = tracker.alive_bytes(storage_ids([out]))
    for _ in range(1 + twice):
        gradients = torch.autograd.grad(out.float().square().sum(), [x, *parameters], retain_graph=twice)
    return out, gradients, kept


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_a_block_that_keeps_everything_bit_for_bit(name, policy, bf16):
    plain, again = block_of(name, bf16=bf16), block_of(name, bf16=bf16)
    apply_checkpointing(again, policy)
    (out, expected, everything), (again_out, gradients, kept) = results(plain), results(again)
    assert torch.equal(out, again_out)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
    assert kept < everything


@pytest.mark.parametrize("name", LAYERS)
def test_selective_keeps_what_a_policy_over_operators_keeps(name):
    theirs, ours = block_of(name), block_of(name)
    saved = _saved_operators()

    def contexts():
        return create_selective_checkpoint_contexts(
            lambda _c, op, *_a, **_k: CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE)

    inner = theirs.forward
    theirs.forward = lambda *args: checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    apply_checkpointing(ours, "selective")
    (_, expected, reference), (_, gradients, kept) = results(theirs), results(ours)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
    assert kept == pytest.approx(reference, rel=0.02)


def test_products_and_attention_run_once_under_selective(monkeypatch):
    calls = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr("runtime.recompute.F.linear", lambda *args: calls.append(args[1].shape) or linear(*args))
    block = block_of("softmax")
    apply_checkpointing(block, "selective")
    results(block)
    assert len(calls) == 4


def test_a_second_backward_is_refused():
    block = block_of("gdpa")
    apply_checkpointing(block, "full")
    with pytest.raises(RuntimeError, match="runs once"):
        results(block, twice=True)
