"""bf16 on one rank: fp32 masters, one cast a block, the roundings of a block held in bf16."""
import copy

import pytest
import torch
from torch import nn

from costmodel.model import LayerGroup
from runtime.checkpointing import apply_checkpointing
from runtime.mixed_precision import compute_in
from runtime.model.registry import build_block

LAYERS = {
    "self_attention": LayerGroup(kind="self_attention", count=1, heads=2, head_dim=16, mlp_dim=64),
    "hstu": LayerGroup(kind="hstu", count=1, heads=2, head_dim=16, divisor=8.0),
}


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", LAYERS)
def test_equals_a_block_held_in_bf16_with_fp32_parameters_and_gradients(kind, policy):
    torch.manual_seed(0)
    block = build_block(32, LAYERS[kind])
    reference = copy.deepcopy(block).to(torch.bfloat16)
    compute_in(block, torch.bfloat16)
    apply_checkpointing(block, policy)
    offsets, x = torch.tensor([0, 5, 12, 20]), torch.randn(20, 32)
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = block(own, offsets, 8), reference(other.bfloat16(), offsets, 8)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    for _ in range(2):  # a second backward adds to the first one's gradients, in fp32
        block(own, offsets, 8).float().square().sum().backward()
    expected.float().square().sum().backward()
    assert torch.equal(own.grad, 2 * other.grad)
    for parameter, held in zip(block.parameters(), reference.parameters()):
        assert isinstance(parameter, nn.Parameter) and parameter.dtype == parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, 2 * held.grad.float())


def test_parameters_are_back_after_a_forward_that_fails():
    block = nn.Linear(4, 4)
    compute_in(block, torch.bfloat16)
    with pytest.raises(RuntimeError):
        block(torch.randn(3, 5))
    assert isinstance(block.weight, nn.Parameter) and block.weight.dtype == torch.float32


def test_a_parameter_that_takes_no_part_gets_no_gradient():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    block = Half()
    compute_in(block, torch.bfloat16)
    block(torch.randn(2, 3)).float().sum().backward()
    assert block.used.weight.grad is not None and block.unused.weight.grad is None
