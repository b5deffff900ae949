"""Ragged inputs and comparisons shared by the attention tests."""

import dataclasses

import torch
from torch import Tensor

import kernels
from kernels.reference import attention_reference

KINDS = ("softmax", "gelu", "gelu_fast", "silu", "relu", "identity")
DIVISOR = 7.0


def offsets(lengths, *, start: int = 0, device: str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths], dtype=dtype, device=device).cumsum(0).to(dtype) + start


@dataclasses.dataclass
class Case:
    """Fresh random q, k, v (leaves), offsets that leave `spare` rows unowned at both ends, and a gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    grad: Tensor
    max_q: int
    max_k: int

    @classmethod
    def random(
        cls, q_lengths, k_lengths, *, heads=4, kv_heads=None, head_dim=8, dtype=torch.float64, device="cpu", spare=2, seed=0,
        offsets_dtype=torch.int64,
    ):  # fmt: skip
        generator = torch.Generator(device).manual_seed(seed)
        kv_heads = kv_heads or heads

        def draw(rows, num_heads):
            return torch.randn(rows + 2 * spare, num_heads, head_dim, dtype=dtype, device=device, generator=generator)

        total_q, total_k = sum(q_lengths), sum(k_lengths)
        q, k, v = draw(total_q, heads), draw(total_k, kv_heads), draw(total_k, kv_heads)
        return cls(
            q=q.requires_grad_(), k=k.requires_grad_(), v=v.requires_grad_(), grad=draw(total_q, heads),
            q_offsets=offsets(q_lengths, start=spare, device=device, dtype=offsets_dtype),
            k_offsets=offsets(k_lengths, start=spare, device=device, dtype=offsets_dtype),
            max_q=max(q_lengths, default=0), max_k=max(k_lengths, default=0),
        )  # fmt: skip

    def bias(self, *, position_rows=9, time_rows=5, columns=None, span=60, dtype=torch.float64):
        """Random tables (of `columns`, by default a column a head) and times from 0 to `span`, in any order."""

        def table(rows):
            return torch.randn(rows, columns or self.q.shape[1], dtype=dtype, device=self.q.device, requires_grad=True)

        def times(x):
            return torch.randint(0, span, (x.shape[0],), device=x.device)

        return kernels.AttentionBias(
            position_table=table(position_rows), time_table=table(time_rows), q_times=times(self.q), k_times=times(self.k)
        )

    def run(self, kind="softmax", **options) -> Tensor:
        arguments = (self.q, self.k, self.v, self.q_offsets, self.k_offsets)
        maxima = {"max_q": self.max_q, "max_k": self.max_k}
        if kind == "softmax":
            return kernels.jagged_attention(*arguments, **maxima, **options)
        return kernels.gdpa(*arguments, **maxima, activation=kind, divisor=DIVISOR, **options)

    def reference(self, kind="softmax", **options) -> Tensor:
        """Truth in float64 with gradients to the same leaves."""
        double = (x.double() for x in (self.q, self.k, self.v))
        divisor = 1.0 if kind == "softmax" else DIVISOR
        return attention_reference(*double, self.q_offsets, self.k_offsets, kind=kind, divisor=divisor, **options)

    def gradients(self, out: Tensor, *more: Tensor):
        return torch.autograd.grad(out, (self.q, self.k, self.v, *more), self.grad.to(out.dtype))


def relative_error(value: Tensor, truth: Tensor) -> float:
    """`|value - truth| / |truth|`; NaN never passes a comparison."""

    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).norm() / truth.norm().clamp_min(1e-300))


def assert_matches(case: Case, kind: str, tolerance: float, **options) -> None:
    """Output and every gradient against the reference; `1 +` because a gradient can vanish up to rounding (one kept column)."""
    bias = options.get("bias")
    tables = () if bias is None else (bias.position_table, bias.time_table)
    out, truth = case.run(kind, **options), case.reference(kind, **options)
    _assert_close("out", out, truth, tolerance)
    gradients = case.gradients(out, *tables)
    # with nothing to attend to, the reference is a constant and every gradient must be zero
    expected = case.gradients(truth, *tables) if truth.requires_grad else [torch.zeros_like(x) for x in gradients]
    for name, value, true_value in zip(("q", "k", "v", "position", "time"), gradients, expected, strict=False):
        _assert_close(f"gradient of {name}", value, true_value, tolerance)


def _assert_close(name: str, value: Tensor, truth: Tensor, tolerance: float) -> None:
    value, truth = value.detach().double(), truth.detach().double()
    error = float((value - truth).norm())
    assert error <= tolerance * (1 + float(truth.norm())), f"{name}: off by {error}"
