"""concat(SiLU(u), a, SiLU(u) * LayerNorm(a)) in one operator: against the operators that it stands for, and their gradients."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kernels.gate import gated_concat


def inputs(rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    fused = torch.randn(rows, 4 * width, generator=generator, dtype=torch.float64).to(dtype)
    u = fused[:, :width]  # a strided view, as the model's
    a, weight, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((rows, width), (width,), (width,)))
    return [x.detach().requires_grad_() for x in (u, a, weight, bias)]


def separate(u, a, weight, bias):
    silu = F.silu(u)
    return torch.cat([silu, a, silu * F.layer_norm(a, a.shape[1:], weight, bias)], dim=1)


@pytest.mark.parametrize(("rows", "width"), [(7, 16), (1, 5), (0, 8)])
def test_equals_the_operators_it_stands_for(rows, width):
    own, other = inputs(rows, width, torch.float64), inputs(rows, width, torch.float64)
    out, expected = gated_concat(*own), separate(*other)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out.backward(grad), expected.backward(grad)
    for mine, theirs in zip(own, other):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_rounds_to_16_bits_where_they_do():
    own = inputs(9, 32, torch.bfloat16)
    assert torch.equal(gated_concat(*own), separate(*own))


def test_gradients_against_differences():
    assert torch.autograd.gradcheck(lambda *x: gated_concat(*x), inputs(3, 4, torch.float64))


def test_traces_and_keeps_two_matrices_only():
    u, a, weight, bias = inputs(6, 8, torch.float32)
    torch.library.opcheck(torch.ops.planner_kernels.gated_concat.default, (u, a, weight, bias, 1e-5))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_concat(u, a, weight, bias)
    assert sum(t.numel() for t in kept if t.dim() == 2) == u.numel() + a.numel()


@pytest.mark.parametrize(("change", "message"), [(lambda x: [x[0][:2], *x[1:]], "shape of a"), (lambda x: [*x[:3], x[3][:2]], "bias"),
                                                 (lambda x: [x[0].double(), *x[1:]], "dtype")])
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        gated_concat(*change(inputs(4, 8, torch.float32)))


def test_interpreted_kernels_agree():
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here.parents[1]}{os.pathsep}{here}"}
    script = str(here / "_gate_agreement.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "width"), [(5000, 1024), (1001, 896), (3, 32)])
def test_on_the_device(rows, width):
    own = [x.detach().cuda().requires_grad_() for x in inputs(rows, width, torch.bfloat16)]
    truth = [x.detach().cpu().double().requires_grad_() for x in own]
    out, expected = gated_concat(*own), separate(*truth)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).bfloat16()
    out.backward(grad.cuda()), expected.backward(grad.double())
    for mine, theirs in zip((out, *(x.grad for x in own)), (expected, *(x.grad for x in truth))):
        mine, theirs = mine.detach().cpu().double(), theirs.detach()
        assert float((mine - theirs).abs().max()) <= 0.01 * float(theirs.abs().max())
