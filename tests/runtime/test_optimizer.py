"""The dense optimizer against PyTorch's own."""
import copy

import pytest
import torch

from runtime.optimizer import build_dense_optimizer


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), ())]


def step(optimizer, given: list[torch.nn.Parameter], number: int, missing: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for i, parameter in enumerate(given):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if i == missing else gradient
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in given)


@pytest.mark.parametrize("missing", [None, 1])
def test_steps_are_those_of_pytorch_also_behind_a_state_that_was_loaded_and_a_missing_gradient(missing):
    ours, theirs = parameters(), parameters()
    options = {"lr": 0.01, "weight_decay": 0.1}
    own, reference = build_dense_optimizer(ours, **options), torch.optim.AdamW(theirs, fused=True, **options)
    for number in range(8):
        for optimizer, given in ((own, ours), (reference, theirs)):
            step(optimizer, given, number, missing if number == 3 else None)
            if number == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if number == 6:
                optimizer.param_groups[0]["lr"] = 0.5
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    states = [o.state_dict()["state"] for o in (own, reference)]
    assert all(torch.equal(states[0][i][k], states[1][i][k]) for i in states[0] for k in states[0][i])
