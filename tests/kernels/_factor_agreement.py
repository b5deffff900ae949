"""Agreement of the two ways of a factor's quantisation with the CPU operators, bit by bit, on any device; a script interprets the kernels."""

if __name__ == "__main__":
    import _interpreter  # noqa: F401  before anything that imports Triton

import torch
from _memory_agreement import to

from kernels import factor, saved  # noqa: F401  registers the operators

OPS = torch.ops.planner_kernels
SHAPES = [(5, 128), (130, 256), (37, 96)]


def matrix(num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes that differ by rows and columns, with zeros, Inf, NaN and tiny values."""
    torch.manual_seed(0)
    x = (torch.randn(num_rows, dim) * torch.randn(num_rows, 1).exp() * torch.randn(1, dim).exp()).to(dtype)
    x[0, 0], x[1], x[:, 9] = 0, 0, 0
    if num_rows > 4:
        x[2, 3], x[3, 5] = float("inf"), float("nan")
        x[4] *= 1e-30
    return x


def agree_factor(device, dtypes=(torch.bfloat16, torch.float32), shapes=SHAPES):
    """Every scaling, direction and extra of every shape."""
    from kernels import _factor_triton as triton_side

    for num_rows, dim in shapes:
        for dtype in dtypes:
            x = matrix(num_rows, dim, dtype)
            for scaling in factor.SCALINGS:
                if dim % factor.MULTIPLES[scaling]:
                    continue
                for columns, sums in ((False, False), (True, True), (True, False), (False, True)):
                    want = OPS.factor_rows(x, scaling, columns, sums)
                    got = triton_side.factor_rows(to(device, x), scaling, columns, sums)
                    for a, b in zip(want[:3], got[:3], strict=True):
                        _same(a, b, (scaling, columns, sums))
                    torch.testing.assert_close(got[3].cpu(), want[3], rtol=1e-4, atol=1e-3, equal_nan=True)
                for rest in (OPS.factor_rows(x, scaling, True, False)[2], None):
                    want, got = OPS.factor_columns(x, scaling, rest), triton_side.factor_columns(to(device, x), scaling, to(device, rest))
                    for a, b in zip(want, got, strict=True):
                        _same(a, b, (scaling, "columns"))


def agree_saved(device, dtypes=(torch.bfloat16, torch.float32), shapes=SHAPES):
    """Rows restored, MX4 both ways; the last row is long, lengths are no whole blocks."""
    from kernels import _saved_triton as triton_side

    for num_rows, dim in shapes:
        for dtype in dtypes:
            x = matrix(num_rows, dim, dtype)
            values, scales = OPS.factor_rows(x, "rowwise", False, False)[:2]
            _same(OPS.restore_rows(values, scales, dtype), triton_side.restore_rows(to(device, values), to(device, scales), dtype), ("rows", dtype))
            calm, grad = torch.randn(num_rows, dim).mul(3).to(dtype), torch.randn(num_rows, dim).to(dtype)
            whole, parts = triton_side.gelu_rows(to(device, calm), True), OPS.factor_rows(calm, "rowwise", False, False)
            for a, b in zip(OPS.factor_rows(whole[0].cpu(), "rowwise", False, False)[:2], whole[1:], strict=True):
                _same(a, b, ("GELU's output", dtype))
            want, got = OPS.gelu_rows(calm, False), triton_side.gelu_rows(to(device, calm), False)
            _same(parts[0], got[1], ("GELU's input", dtype))
            for a, b in zip(want[1:], got[1:], strict=True):
                _same(a, b, ("GELU's input", dtype))
            close = dict(rtol=1e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[0].cpu(), want[0], **close)
            for name, last in (("gelu_restore", dtype), ("gelu_gradient", grad)):
                expected = getattr(OPS, name)(*want[1:], last)
                torch.testing.assert_close(getattr(triton_side, name)(*got[1:], to(device, last)).cpu(), expected, **close)
            once, twice = grad.clone(), to(device, grad).clone()
            outs = OPS.gelu_again(*want[1:], once), triton_side.gelu_again(*got[1:], twice)
            for a, b in zip((outs[0], once), (outs[1], twice), strict=True):
                torch.testing.assert_close(b.cpu(), a, **close)
            weight, bias = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
            whole = triton_side.norm_rows(*(to(device, t) for t in (calm, weight, bias)), 1e-5, "output")
            for a, b in zip(OPS.factor_rows(whole[0].cpu(), "rowwise", False, False)[:2], whole[1:3], strict=True):
                _same(a, b, ("norm's output", dtype))
            for keep in ("input", "nothing"):
                want = OPS.norm_rows(calm, weight, bias, 1e-5, keep)
                got = triton_side.norm_rows(*(to(device, t) for t in (calm, weight, bias)), 1e-5, keep)
                for a, b in zip(want[1:3], got[1:3], strict=True):
                    _same(a, b, ("norm's input", dtype, keep))
                for a, b in zip((want[0], *want[3:]), (got[0], *got[3:]), strict=True):
                    torch.testing.assert_close(b.cpu(), a, **close)
            rows = OPS.norm_rows(calm, weight, bias, 1e-5, "input")[1:]
            torch.testing.assert_close(
                triton_side.norm_restore(*(to(device, t) for t in (*rows[:2], weight, bias, *rows[2:])), dtype).cpu(),
                OPS.norm_restore(*rows[:2], weight, bias, *rows[2:], dtype), **close)
            want = OPS.norm_gradient(*rows[:2], grad, weight, *rows[2:])
            got = triton_side.norm_gradient(*(to(device, t) for t in (*rows[:2], grad, weight, *rows[2:])))
            for a, b in zip(want, got, strict=True):
                torch.testing.assert_close(b.cpu(), a, rtol=2e-2, atol=2e-2)
            for part in (x, x.flatten()[:-5], x[:2, :32]):
                want, got = OPS.to_mx4(part), triton_side.to_mx4(to(device, part))
                for a, b in zip(want, got, strict=True):
                    _same(a, b, ("to MX4", dtype))
                numel = part.numel()
                _same(OPS.from_mx4(*want, numel, dtype), triton_side.from_mx4(*got, numel, dtype), ("from MX4", dtype))


def _same(want: torch.Tensor, got: torch.Tensor, what: tuple) -> None:
    want, got = (t.cpu().float().nan_to_num(9e9) for t in (want, got))
    assert torch.equal(want, got), f"{what}: {int((want != got).sum())} of {want.numel()} differ"


if __name__ == "__main__":
    agree_factor("cpu", (torch.bfloat16,), SHAPES[1:])
    agree_saved("cpu", (torch.bfloat16, torch.float32), SHAPES[1:])
    print("agrees")
