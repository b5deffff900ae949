"""The custom operators behind `jagged_attention` and `gdpa`: checks, fakes, autograd, dispatch by device.

One forward and one backward operator serve softmax and activations (`kind`), because masks, bias, tiles and gradients are shared.
CPU tensors run `kernels._attention_cpu`, CUDA tensors `kernels._attention_triton`. Metadata is checked before the operator, where
torch.compile sees it; contents of the offsets inside it, and only where reading them costs no synchronisation (CPU) or where
PLANNER_CHECK_OFFSETS=1 asks for it.
"""

import math
import os

import torch
from torch import Tensor

from kernels import _attention_cpu
from kernels._autograd import differentiable, direct
from kernels._masks import AttentionBias

KINDS = ("softmax", "gelu", "gelu_fast", "silu", "relu", "identity")
HEAD_DIMS = (16, 32, 64, 128, 256)  # what the CUDA kernels are compiled for; the CPU path takes any


def attend(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *,
    max_q: int, max_k: int, kind: str, causal: bool, window: int | None, scale: float | None, divisor: float,
    bias: AttentionBias | None,
) -> Tensor:  # fmt: skip
    """Check the arguments and run the operator; the public functions document the meaning."""
    check_qkv(q, k, v)
    check_offsets_like("q_offsets", q_offsets, q)
    check_offsets_like("k_offsets", k_offsets, q)
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(f"k_offsets: has shape {tuple(k_offsets.shape)}, q_offsets {tuple(q_offsets.shape)}")
    if kind not in KINDS:
        raise ValueError(f"activation: {kind!r} is not one of {', '.join(KINDS[1:])}")
    if window is not None and window < 1:
        raise ValueError(f"window: {window} must be at least 1, or None for no window")
    if not divisor > 0:
        raise ValueError(f"divisor: {divisor} must be positive")
    tables = _check_bias(bias, q, k)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, _ = _differentiable_attention(
        q, k, v, q_offsets, k_offsets, *tables, max_q, max_k, kind, causal, window or 0, float(scale), float(divisor)
    )  # fmt: skip
    return out


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError naming the argument whose shape, dtype or device does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name}: expected (rows, heads, head_dim), got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, q on {q.device}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: is {x.dtype}, q is {q.dtype}")
        if x.shape[2] != q.shape[2]:
            raise ValueError(f"{name}: head dim {x.shape[2]} differs from q's {q.shape[2]}")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"q: dtype {q.dtype} is not a floating type these kernels compute in")
    if k.shape != v.shape:
        raise ValueError(f"v: shape {tuple(v.shape)} differs from k's {tuple(k.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: {k.shape[1]} heads do not divide q's {q.shape[1]}")
    if q.device.type == "cuda":
        if q.shape[2] not in HEAD_DIMS:
            raise ValueError(f"q: head dim {q.shape[2]} is not one of {HEAD_DIMS} on CUDA")
        if q.dtype == torch.float64:
            raise ValueError("q: float64 runs on the CPU only")


def check_offsets_like(name: str, offsets: Tensor, q: Tensor) -> None:
    """Raise ValueError unless `offsets` is a non-empty integer vector on q's device."""
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name}: expected shape (B + 1,), got {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: dtype {offsets.dtype} is not int32 or int64")
    if offsets.device != q.device:
        raise ValueError(f"{name}: is on {offsets.device}, q on {q.device}")


def check_offsets_content(name: str, offsets: Tensor, rows: int, longest: int, longest_name: str) -> None:
    """Raise ValueError for decreasing offsets, offsets outside the rows, or a sequence above its announced maximum.

    Always done on the CPU. On CUDA it would synchronise, so only under PLANNER_CHECK_OFFSETS=1; unchecked, a CUDA result never
    depends on the announced maximum (it only picks tiles), but offsets that decrease or leave the tensor are undefined behaviour.
    """
    if offsets.is_cuda and os.environ.get("PLANNER_CHECK_OFFSETS") != "1":
        return
    edges = offsets.detach().cpu()
    lengths = edges.diff()
    if (lengths < 0).any():
        at = int((lengths < 0).nonzero()[0])
        raise ValueError(f"{name}: decreases from {int(edges[at])} to {int(edges[at + 1])} at index {at + 1}")
    if int(edges[0]) < 0 or int(edges[-1]) > rows:
        raise ValueError(f"{name}: spans [{int(edges[0])}, {int(edges[-1])}], outside the {rows} rows it indexes")
    if len(lengths) and int(lengths.max()) > longest:
        raise ValueError(f"{longest_name}: {longest} is below the longest sequence, {int(lengths.max())} rows ({name})")


def _check_bias(bias: AttentionBias | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, ...]:
    if bias is None:
        return None, None, None, None
    for name in ("position_table", "time_table"):
        table = getattr(bias, name)
        if table is not None and (table.dim() != 2 or table.shape[1] not in (1, q.shape[1]) or table.shape[0] < 1):
            raise ValueError(f"bias.{name}: expected (rows, {q.shape[1]} heads or 1), got {tuple(table.shape)}")
        if table is not None and not table.is_floating_point():
            raise ValueError(f"bias.{name}: dtype {table.dtype} is not a floating type")
        if table is not None and table.device != q.device:
            raise ValueError(f"bias.{name}: is on {table.device}, q on {q.device}")
    if bias.position_table is not None and bias.position_table.shape[0] % 2 == 0:
        raise ValueError(f"bias.position_table: {bias.position_table.shape[0]} rows; 2P - 1 rows need an odd number")
    if bias.time_table is None:
        return bias.position_table, None, None, None
    for name, rows in (("q_times", q.shape[0]), ("k_times", k.shape[0])):
        times = getattr(bias, name)
        if times is None or times.shape != (rows,) or times.is_floating_point() or times.device != q.device:
            raise ValueError(f"bias.{name}: a time table needs integer times of shape ({rows},) on {q.device}")
    return bias.position_table, bias.time_table, bias.q_times, bias.k_times


@torch.library.custom_op("planner_kernels::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    position_table: Tensor | None, time_table: Tensor | None, q_times: Tensor | None, k_times: Tensor | None,
    max_q: int, max_k: int, kind: str, causal: bool, window: int, scale: float, divisor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output like `q` and the float32 log-sum-exp `(H, total_q)`, which is `(H, 0)` where `kind` needs none."""
    check_offsets_content("q_offsets", q_offsets, q.shape[0], max_q, "max_q")
    check_offsets_content("k_offsets", k_offsets, k.shape[0], max_k, "max_k")
    bias = (position_table, time_table, q_times, k_times)
    options = _attention_cpu.AttentionOptions(kind=kind, causal=causal, window=window, scale=scale, divisor=divisor)
    if q.is_cuda:
        from kernels import _attention_triton  # triton is absent on machines without an accelerator

        return _attention_triton.forward(q, k, v, (q_offsets, k_offsets), bias, options, max_q=max_q, max_k=max_k)
    return _attention_cpu.forward(q, k, v, (q_offsets, k_offsets), bias, options)


@attention_forward.register_fake
def _(
    q, k, v, q_offsets, k_offsets, position_table, time_table, q_times, k_times,
    max_q, max_k, kind, causal, window, scale, divisor,
):  # fmt: skip
    rows = q.shape[0] if kind == "softmax" else 0
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((q.shape[1], rows), dtype=accumulate)


@torch.library.custom_op("planner_kernels::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    position_table: Tensor | None, time_table: Tensor | None, q_times: Tensor | None, k_times: Tensor | None,
    max_q: int, max_k: int, kind: str, causal: bool, window: int, scale: float, divisor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, position table, time table; an absent table's gradient is an empty tensor."""
    bias = (position_table, time_table, q_times, k_times)
    options = _attention_cpu.AttentionOptions(kind=kind, causal=causal, window=window, scale=scale, divisor=divisor)
    arguments = (grad, q, k, v, out, lse, (q_offsets, k_offsets), bias, options)
    if q.is_cuda:
        from kernels import _attention_triton

        dq, dk, dv, *tables = _attention_triton.backward(*arguments, max_q=max_q, max_k=max_k)
    else:
        dq, dk, dv, *tables = _attention_cpu.backward(*arguments)
    return dq, dk, dv, *(lse.new_empty(0) if table is None else table for table in tables)


@attention_backward.register_fake
def _(
    grad, q, k, v, out, lse, q_offsets, k_offsets, position_table, time_table, q_times, k_times,
    max_q, max_k, kind, causal, window, scale, divisor,
):  # fmt: skip
    tables = (lse.new_empty(0) if table is None else table.new_empty(table.shape) for table in (position_table, time_table))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *tables


def _setup_context(ctx, inputs, output):
    q, k, v, q_offsets, k_offsets, position_table, time_table, q_times, k_times, *options = inputs
    out, lse = output
    # activations need neither: their backward recomputes the scores, and there is no row statistic
    saved_out = out if options[2] == "softmax" else None
    ctx.save_for_backward(q, k, v, saved_out, lse, q_offsets, k_offsets, position_table, time_table, q_times, k_times)
    ctx.options = options
    ctx.mark_non_differentiable(lse)


def _backward(ctx, grad, _):
    q, k, v, out, lse, *rest = ctx.saved_tensors
    out = grad if out is None else out
    dq, dk, dv, dposition, dtime = _plain_backward(grad, q, k, v, out, lse, *rest, *ctx.options)
    has_position, has_time = rest[2] is not None, rest[3] is not None
    tables = (dposition if has_position else None, dtime if has_time else None)
    return dq, dk, dv, None, None, *tables, *(None,) * (2 + len(ctx.options))


_plain_backward = direct(attention_backward)
_differentiable_attention = differentiable(attention_forward, _backward, setup_context=_setup_context, costly=True)
