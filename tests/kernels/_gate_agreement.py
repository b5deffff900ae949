"""The gate's Triton kernels on the CPU through the interpreter, against its CPU path. Run as a process of its own; exit code 1 on error."""

import sys

import _interpreter  # noqa: F401 (must come before any kernel)
import torch

from kernels import _gate_triton, gate


def main() -> int:
    for rows, width, dtype in ((7, 12, torch.float32), (1, 16, torch.float32), (9, 16, torch.bfloat16), (0, 8, torch.float32)):
        generator = torch.Generator().manual_seed(rows)
        u, a, weight, bias, grad = (torch.randn(*shape, generator=generator).to(dtype)
                                    for shape in ((rows, 4 * width), (rows, width), (width,), (width,), (rows, 3 * width)))  # fmt: skip
        u, eps, close = u[:, width:2 * width], 1e-5, {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
        out, mean, rstd = _gate_triton.gated_concat(u, a, weight, bias, eps)
        expected, *_ = gate._gated_concat(u, a, weight, bias, eps)
        torch.testing.assert_close(out, expected, **close)
        if dtype == torch.float32:  # the CPU keeps statistics of bfloat16 rows in bfloat16
            torch.testing.assert_close((mean, rstd), tuple(gate._gated_concat(u, a, weight, bias, eps)[1:]), **close)
        truth = gate._gated_concat_backward(*(x.double() for x in (grad, u, a, weight, bias, mean, rstd)))
        for mine, theirs in zip(_gate_triton.gated_concat_backward(grad, u, a, weight, bias, mean, rstd), truth, strict=True):
            torch.testing.assert_close(mine.double(), theirs, **close)
    return 0


if __name__ == "__main__":
    sys.exit(main())
