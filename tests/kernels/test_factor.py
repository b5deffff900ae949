"""`kernels.factor` and `kernels.saved`: against quantisations of the matrix and of its transpose; the Triton side bit by bit."""
import os
import subprocess
import sys
from pathlib import Path

import _factor_agreement as agreement
import pytest
import torch

from kernels import factor, saved  # noqa: F401  registers the operators
from kernels.norm_quant import quantize

OPS = torch.ops.planner_kernels


@pytest.mark.parametrize("scaling", factor.SCALINGS)
@pytest.mark.parametrize("num_rows", [0, 1, 37, 128])
def test_directions_are_the_quantised_matrix_and_its_transpose(scaling, num_rows):
    torch.manual_seed(0)
    x = torch.randn(num_rows, 256) * torch.randn(1, 256).exp()
    found = factor.factor_rows(x, scaling, columns=True, sums=True)
    scale = factor.tensor_scale(x) if scaling == "tensor_delayed" else None
    assert torch.equal(found.quantized.dequantize(), quantize(x, scaling=scaling, scale=scale).dequantize())
    torch.testing.assert_close(found.sums, x.sum(0))
    turned = factor.factor_columns(x, scaling, found.rest)
    whole = torch.cat([x, x.new_zeros(factor.padded(num_rows, scaling) - num_rows, 256)]).t().contiguous()
    assert torch.equal(turned.dequantize(), quantize(whole, scaling=scaling, scale=scale).dequantize())
    assert torch.equal(turned.dequantize(), factor.factor_columns(x, scaling).dequantize())  # nothing noted: found again
    if num_rows > 1:
        assert (turned.dequantize()[:, :num_rows].t() - x).norm() < 0.06 * x.norm()


@pytest.mark.parametrize("scaling", factor.SCALINGS)
def test_shapes_under_tracing_are_those_of_the_operators(scaling):
    x = torch.randn(37, 256)
    for columns in (False, True):
        torch.library.opcheck(OPS.factor_rows, (x, scaling, columns, columns), test_utils=("test_schema", "test_faketensor"))
    rest = OPS.factor_rows(x, scaling, True, False)[2]
    torch.library.opcheck(OPS.factor_columns, (x, scaling, rest), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("numel", [0, 31, 64])
def test_formats_of_saved_activations_under_tracing(numel):
    x = torch.randn(numel)
    tests = dict(test_utils=("test_faketensor",))  # the schema's test multiplies inputs, which fp8 cannot
    torch.library.opcheck(OPS.to_mx4, (x,), **tests)
    torch.library.opcheck(OPS.from_mx4, (*OPS.to_mx4(x), numel, torch.bfloat16), **tests)
    values, scales, _, _ = OPS.factor_rows(torch.randn(3, 32), "rowwise", False, False)
    torch.library.opcheck(OPS.restore_rows, (values, scales, torch.bfloat16), **tests)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="'mxfp8_1x32' is not one of rowwise"):
        factor.factor_rows(torch.randn(4, 32), "mxfp8_1x32")
    with pytest.raises(ValueError, match=r"x: expected shape \(M, K\)"):
        factor.factor_columns(torch.randn(4), "rowwise")


def test_interpreted_kernels_agree():
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(here / "_factor_agreement.py")], env=environment, capture_output=True, text=True, timeout=250,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_on_the_device():
    agreement.agree_factor("cuda")
    agreement.agree_saved("cuda")
    agreement.agree_factor("cuda", (torch.bfloat16,), [(1000, 4096), (16, 16384)])
