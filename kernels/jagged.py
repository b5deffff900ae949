"""Movement of jagged (ragged) batches: to and from padded, concatenation, split, selection, broadcast and per-row reduction.

A jagged batch of B rows is a pair `values (T, *)`, `offsets (B+1,)` (int32 or int64): row `b` is `values[offsets[b]:offsets[b+1]]`.
Offsets never decrease. They may start above 0 and end below T: rows of `values` outside them belong to no row, are never read, and get
a zero gradient; outputs that have room beyond their offsets are zero there.

Every function is a `torch.library` operator with a fake (shape) implementation and a gradient, so it traces under `torch.compile`.
On CUDA it is one Triton launch without a host synchronisation; therefore sizes that depend on data (`max_len`, `total`) are arguments.
On the CPU it is vectorised PyTorch. Every result is deterministic: nothing is accumulated with atomics.

Wrong shapes, dtypes or devices raise ValueError everywhere. Wrong values in offsets (decreasing, past the values, a row longer than
`max_len`) raise ValueError on the CPU; on CUDA, call `validate_offsets` to have them checked (it waits for the device). Without it a row
longer than `max_len` is never cut silently: the CUDA kernel traps, which ends the process' CUDA context.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._autograd import differentiable, direct, register_cuda
from kernels._checks import accumulate_dtype, check_offsets, check_same_device, validate_ids, validate_offsets

__all__ = [
    "jagged_broadcast",
    "jagged_concat",
    "jagged_elementwise",
    "jagged_gather",
    "jagged_mean",
    "jagged_split",
    "jagged_sum",
    "jagged_to_padded",
    "lengths_to_offsets",
    "padded_to_jagged",
    "row_index",
    "validate_offsets",
]

Jagged = tuple[Tensor, Tensor]


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Exclusive prefix sum of `lengths (B,)` with the total at the end: `(B+1,)`, int64."""
    return F.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def row_index(offsets: Tensor, total: int) -> Tensor:
    """Row of each of the `total` positions, `(total,)` int64; -1 before the first offset, B at and beyond the last."""
    positions = torch.arange(total, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, positions, right=True) - 1


def _positions(offsets: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """For every position covered by `offsets`: (position, its row, its place inside the row), int64 each."""
    first, last = (int(end) for end in offsets[[0, -1]].tolist())
    position = torch.arange(first, min(last, total), device=offsets.device)
    row = torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff().long())
    return position, row, position - offsets[:-1].long()[row]


# --- padded <-> jagged ---------------------------------------------------------------------------------------------------------------


def jagged_to_padded(values: Tensor, offsets: Tensor, *, max_len: int, padding: float = 0.0) -> Tensor:
    """Spread `values (T, *)` into `(B, max_len, *)`; places past a row's end hold `padding`.

    Raises ValueError (CPU) or traps (CUDA) if a row is longer than `max_len`.
    """
    check_offsets("offsets", offsets, device=values.device)
    if max_len < 0:
        raise ValueError(f"max_len: {max_len} is negative")
    return torch.ops.planner_kernels.jagged_to_padded(values, offsets, max_len, float(padding))


@torch.library.custom_op("planner_kernels::jagged_to_padded", mutates_args=(), device_types="cpu")
def _jagged_to_padded(values: Tensor, offsets: Tensor, max_len: int, padding: float) -> Tensor:
    validate_offsets("offsets", offsets, total=values.shape[0], max_len=max_len)
    num_rows = offsets.numel() - 1
    out = values.new_full((num_rows * max_len, *values.shape[1:]), padding)
    position, row, place = _positions(offsets, values.shape[0])
    out[row * max_len + place] = values[position]
    return out.view(num_rows, max_len, *values.shape[1:])


@_jagged_to_padded.register_fake
def _(values: Tensor, offsets: Tensor, max_len: int, padding: float) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, max_len, *values.shape[1:]))


def padded_to_jagged(dense: Tensor, offsets: Tensor, *, total: int) -> Tensor:
    """Collect the valid places of `dense (B, max_len, *)` into `(total, *)`: the inverse of `jagged_to_padded`.

    `total` is the number of rows to return (at least `offsets[-1]`); rows outside the offsets are zero.
    """
    check_offsets("offsets", offsets, device=dense.device)
    if dense.dim() < 2 or dense.shape[0] != offsets.shape[0] - 1:
        raise ValueError(f"dense: shape {tuple(dense.shape)} does not start with ({offsets.shape[0] - 1}, max_len)")
    if total < 0:
        raise ValueError(f"total: {total} is negative")
    return torch.ops.planner_kernels.padded_to_jagged(dense, offsets, total)


@torch.library.custom_op("planner_kernels::padded_to_jagged", mutates_args=(), device_types="cpu")
def _padded_to_jagged(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    validate_offsets("offsets", offsets, total=total, max_len=dense.shape[1])
    out = dense.new_zeros((total, *dense.shape[2:]))
    position, row, place = _positions(offsets, total)
    out[position] = dense[row, place]
    return out


@_padded_to_jagged.register_fake
def _(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    return dense.new_empty((total, *dense.shape[2:]))


def _to_padded_setup(ctx, inputs, output) -> None:
    values, offsets, _, _ = inputs
    ctx.save_for_backward(offsets)
    ctx.total = values.shape[0]


def _to_padded_backward(ctx, grad: Tensor):
    (offsets,) = ctx.saved_tensors
    return torch.ops.planner_kernels.padded_to_jagged(grad, offsets, ctx.total), None, None, None


def _from_padded_setup(ctx, inputs, output) -> None:
    dense, offsets, _ = inputs
    ctx.save_for_backward(offsets)
    ctx.max_len = dense.shape[1]


def _from_padded_backward(ctx, grad: Tensor):
    (offsets,) = ctx.saved_tensors
    return torch.ops.planner_kernels.jagged_to_padded(grad, offsets, ctx.max_len, 0.0), None, None


_jagged_to_padded.register_autograd(_to_padded_backward, setup_context=_to_padded_setup)
_padded_to_jagged.register_autograd(_from_padded_backward, setup_context=_from_padded_setup)


# --- concatenation and split ---------------------------------------------------------------------------------------------------------


def jagged_concat(parts: Sequence[Jagged], *, totals: Sequence[int] | None = None) -> Jagged:
    """Concatenate jagged batches row by row: row `b` of the result is row `b` of every part, one after the other.

    parts: pairs `(values (T_i, *), offsets (B+1,))` with equal B and equal trailing shape.
    totals: valid rows `offsets_i[-1] - offsets_i[0]` of each part, known on the host; default: all `T_i` (if a part's offsets do not
        cover its values, the result then ends in rows of zeros).
    Returns `(values (sum(totals), *), offsets (B+1,))`.
    """
    if not parts:
        raise ValueError("parts: nothing to concatenate")
    first = parts[0][0]
    for i, (values, offsets) in enumerate(parts):
        check_offsets(f"parts[{i}].offsets", offsets, device=first.device)
        check_same_device(first.device, **{f"parts[{i}].values": values})
        if offsets.shape != parts[0][1].shape:
            raise ValueError(f"parts[{i}].offsets: {offsets.shape[0] - 1} rows, part 0 has {parts[0][1].shape[0] - 1}")
        if values.shape[1:] != first.shape[1:] or values.dtype != first.dtype:
            raise ValueError(f"parts[{i}].values: {values.dtype} {tuple(values.shape)} does not match {first.dtype} {tuple(first.shape)}")
    if totals is not None and len(totals) != len(parts):
        raise ValueError(f"totals: {len(totals)} entries for {len(parts)} parts")
    out_offsets = sum((o - o[:1] for _, o in parts[1:]), parts[0][1] - parts[0][1][:1])
    total = sum(totals) if totals is not None else sum(values.shape[0] for values, _ in parts)
    values = torch.ops.planner_kernels.jagged_concat([v for v, _ in parts], [o for _, o in parts], out_offsets, total)
    return values, out_offsets


def jagged_split(values: Tensor, offsets: Tensor, first_offsets: Tensor, *, totals: tuple[int, int] | None = None) -> tuple[Jagged, Jagged]:
    """Split every row in two: the first `diff(first_offsets)[b]` entries of row `b`, and the rest. The inverse of `jagged_concat`.

    first_offsets: `(B+1,)`, starting at 0: offsets of the first result, each row no longer than the row of `offsets`.
    totals: rows of the two results. Default: read from the offsets, which on CUDA waits for the device.
    """
    check_offsets("offsets", offsets, device=values.device)
    check_offsets("first_offsets", first_offsets, device=values.device)
    if first_offsets.shape != offsets.shape:
        raise ValueError(f"first_offsets: {first_offsets.shape[0] - 1} rows, offsets has {offsets.shape[0] - 1}")
    second_offsets = offsets - offsets[:1] - first_offsets
    if totals is None:
        totals = (int(first_offsets[-1]), int(second_offsets[-1]))
    part_offsets = [first_offsets, second_offsets]
    first, second = torch.ops.planner_kernels.jagged_unconcat(values, offsets, part_offsets, list(totals))
    return (first, first_offsets), (second, second_offsets)


def part_starts(offsets: Tensor, part_offsets: Sequence[Tensor]) -> list[Tensor]:
    """Where each part's rows begin inside the concatenated rows that `offsets` describes: one `(B,)` tensor per part."""
    starts = [offsets[:-1]]
    for o in part_offsets[:-1]:
        starts.append(starts[-1] + o.diff())
    return starts


@torch.library.custom_op("planner_kernels::jagged_concat", mutates_args=(), device_types="cpu")
def _jagged_concat(values: Sequence[Tensor], part_offsets: Sequence[Tensor], offsets: Tensor, total: int) -> Tensor:
    for i, (v, o) in enumerate(zip(values, part_offsets, strict=True)):
        validate_offsets(f"parts[{i}].offsets", o, total=v.shape[0])
    if int(offsets[-1]) > total:
        raise ValueError(f"totals: sum to {total}, but the offsets hold {int(offsets[-1])} rows")
    out = values[0].new_zeros((total, *values[0].shape[1:]))
    for v, o, start in zip(values, part_offsets, part_starts(offsets, part_offsets), strict=True):
        position, row, place = _positions(o, v.shape[0])
        out[start[row] + place] = v[position]
    return out


@_jagged_concat.register_fake
def _(values: Sequence[Tensor], part_offsets: Sequence[Tensor], offsets: Tensor, total: int) -> Tensor:
    return values[0].new_empty((total, *values[0].shape[1:]))


@torch.library.custom_op("planner_kernels::jagged_unconcat", mutates_args=(), device_types="cpu")
def _jagged_unconcat(values: Tensor, offsets: Tensor, part_offsets: Sequence[Tensor], totals: Sequence[int]) -> list[Tensor]:
    """Undo a concatenation: part `i` as `(totals[i], *)`, placed by `part_offsets[i]`, zero outside them."""
    validate_offsets("offsets", offsets, total=values.shape[0])
    left = offsets.diff()
    outs = []
    for i, (o, total, start) in enumerate(zip(part_offsets, totals, part_starts(offsets, part_offsets), strict=True)):
        validate_offsets(f"part_offsets[{i}]", o, total=total)
        left = left - o.diff()
        position, row, place = _positions(o, total)
        out = values.new_zeros((total, *values.shape[1:]))
        out[position] = values[start[row] + place]
        outs.append(out)
    return outs


@_jagged_unconcat.register_fake
def _(values: Tensor, offsets: Tensor, part_offsets: Sequence[Tensor], totals: Sequence[int]) -> list[Tensor]:
    return [values.new_empty((total, *values.shape[1:])) for total in totals]


def _concat_setup(ctx, inputs, output) -> None:
    values, part_offsets, offsets, _ = inputs
    ctx.save_for_backward(offsets, *part_offsets)
    ctx.totals = [v.shape[0] for v in values]


def _concat_backward(ctx, grad: Tensor):
    offsets, *part_offsets = ctx.saved_tensors
    grads = torch.ops.planner_kernels.jagged_unconcat(grad, offsets, part_offsets, ctx.totals)
    return grads, [None] * len(part_offsets), None, None


def _unconcat_setup(ctx, inputs, output) -> None:
    values, offsets, part_offsets, _ = inputs
    ctx.save_for_backward(offsets, *part_offsets)
    ctx.total = values.shape[0]


def _unconcat_backward(ctx, grads: list[Tensor]):
    offsets, *part_offsets = ctx.saved_tensors
    grad = torch.ops.planner_kernels.jagged_concat(grads, part_offsets, offsets, ctx.total)
    return grad, None, [None] * len(part_offsets), None


_jagged_concat.register_autograd(_concat_backward, setup_context=_concat_setup)
_jagged_unconcat.register_autograd(_unconcat_backward, setup_context=_unconcat_setup)


# --- selection of rows ---------------------------------------------------------------------------------------------------------------


def jagged_gather(values: Tensor, offsets: Tensor, index: Tensor, *, total: int | None = None) -> Jagged:
    """Select whole rows: row `k` of the result is row `index[k]` of the input. Rows may repeat or be left out.

    index: `(K,)` int32 or int64 in `[0, B)`. total: rows of values in the result; default: read from the offsets, which on CUDA waits
    for the device. Returns `(values (total, *), offsets (K+1,))`.
    """
    check_offsets("offsets", offsets, device=values.device)
    check_same_device(values.device, index=index)
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index: expected a 1-D int32 or int64 tensor, got {index.dtype} {tuple(index.shape)}")
    if index.device.type == "cpu" and not torch.compiler.is_compiling():
        validate_ids("index", index, num_rows=offsets.shape[0] - 1)
    out_offsets = lengths_to_offsets(offsets.diff()[index])
    if total is None:
        total = int(out_offsets[-1])
    return torch.ops.planner_kernels.jagged_gather(values, offsets, index, out_offsets, total), out_offsets


@torch.library.custom_op("planner_kernels::jagged_gather", mutates_args=(), device_types="cpu")
def _jagged_gather(values: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, total: int) -> Tensor:
    validate_offsets("offsets", offsets, total=values.shape[0])
    validate_offsets("total", out_offsets, total=total)
    out = values.new_zeros((total, *values.shape[1:]))
    position, row, place = _positions(out_offsets, total)
    out[position] = values[offsets[:-1].long()[index.long()[row]] + place]
    return out


@_jagged_gather.register_fake
def _(values: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, total: int) -> Tensor:
    return values.new_empty((total, *values.shape[1:]))


@torch.library.custom_op("planner_kernels::jagged_gather_grad", mutates_args=(), device_types="cpu")
def _jagged_gather_grad(grad: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, total: int) -> Tensor:
    """Sum the gradients of all copies of a row, in the order of `index`, in fp32 (fp64 for fp64)."""
    position, row, place = _positions(out_offsets, grad.shape[0])
    out = grad.new_zeros((total, *grad.shape[1:]), dtype=accumulate_dtype(grad.dtype))
    out.index_add_(0, offsets[:-1].long()[index.long()[row]] + place, grad[position].to(out.dtype))
    return out.to(grad.dtype)


@_jagged_gather_grad.register_fake
def _(grad: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, total: int) -> Tensor:
    return grad.new_empty((total, *grad.shape[1:]))


def _gather_setup(ctx, inputs, output) -> None:
    values, offsets, index, out_offsets, _ = inputs
    ctx.save_for_backward(offsets, index, out_offsets)
    ctx.total = values.shape[0]


def _gather_backward(ctx, grad: Tensor):
    return torch.ops.planner_kernels.jagged_gather_grad(grad, *ctx.saved_tensors, ctx.total), None, None, None, None


_jagged_gather.register_autograd(_gather_backward, setup_context=_gather_setup)


# --- per-row broadcast and reduction -------------------------------------------------------------------------------------------------


def jagged_elementwise(values: Tensor, offsets: Tensor, dense: Tensor, *, op: Literal["add", "mul"]) -> Tensor:
    """Add `dense (B, *)` to, or multiply it into, every entry of the jagged row it belongs to: `(T, *)`.

    Entries outside the offsets come back as zero.
    """
    check_offsets("offsets", offsets, device=values.device)
    check_same_device(values.device, dense=dense)
    if op not in ("add", "mul"):
        raise ValueError(f"op: {op!r} is not 'add' or 'mul'")
    if dense.shape != (offsets.shape[0] - 1, *values.shape[1:]) or dense.dtype != values.dtype:
        raise ValueError(f"dense: expected {values.dtype} {(offsets.shape[0] - 1, *values.shape[1:])}, got {dense.dtype} {tuple(dense.shape)}")
    return torch.ops.planner_kernels.jagged_elementwise(values, offsets, dense, op)


@torch.library.custom_op("planner_kernels::jagged_elementwise", mutates_args=(), device_types="cpu")
def _jagged_elementwise(values: Tensor, offsets: Tensor, dense: Tensor, op: str) -> Tensor:
    validate_offsets("offsets", offsets, total=values.shape[0])
    position, row, _ = _positions(offsets, values.shape[0])
    covered, per_row = values[position], dense[row]
    out = torch.zeros_like(values, memory_format=torch.contiguous_format)
    out[position] = covered + per_row if op == "add" else covered * per_row
    return out


@_jagged_elementwise.register_fake
def _(values: Tensor, offsets: Tensor, dense: Tensor, op: str) -> Tensor:
    return values.new_empty(values.shape)


def _elementwise_setup(ctx, inputs, output) -> None:
    values, offsets, dense, op = inputs
    ctx.op = op
    ctx.save_for_backward(offsets, *((values, dense) if op == "mul" else ()))


def _elementwise_backward(ctx, grad: Tensor):
    offsets, *factors = ctx.saved_tensors
    if ctx.op == "add":
        (grad_values,) = torch.ops.planner_kernels.jagged_unconcat(grad, offsets, [offsets], [grad.shape[0]])  # zero outside the offsets
        return grad_values, None, torch.ops.planner_kernels.jagged_reduce(grad, offsets, False), None
    values, dense = factors
    grad_values = torch.ops.planner_kernels.jagged_elementwise(grad, offsets, dense, "mul")
    return grad_values, None, torch.ops.planner_kernels.jagged_reduce(grad * values, offsets, False), None


_jagged_elementwise.register_autograd(_elementwise_backward, setup_context=_elementwise_setup)


def jagged_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each row: `(T, *)` -> `(B, *)`, accumulated in fp32 (fp64 for fp64); an empty row gives 0."""
    check_offsets("offsets", offsets, device=values.device)
    return _differentiable_reduce(values, offsets, False)


def jagged_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean of each row: `(T, *)` -> `(B, *)`, accumulated in fp32 (fp64 for fp64); an empty row gives 0."""
    check_offsets("offsets", offsets, device=values.device)
    return _differentiable_reduce(values, offsets, True)


def jagged_broadcast(dense: Tensor, offsets: Tensor, *, total: int) -> Tensor:
    """Repeat `dense (B, *)` over the entries of its jagged row: `(total, *)`, zero outside the offsets."""
    check_offsets("offsets", offsets, device=dense.device)
    if dense.dim() < 1 or dense.shape[0] != offsets.shape[0] - 1:
        raise ValueError(f"dense: {tuple(dense.shape)} does not start with {offsets.shape[0] - 1} rows")
    return torch.ops.planner_kernels.jagged_broadcast(dense, offsets, total, False)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Row sums on the CPU without a loop and without a copy of `values`: `(T, D)` -> `(B, D)` in the accumulation dtype.

    `embedding_bag` over the identity is the one CPU segment sum in PyTorch that is both vectorised and threaded over rows.
    """
    first, last = (int(end) for end in offsets[[0, -1]].tolist())
    num_rows = offsets.numel() - 1
    dtype = accumulate_dtype(values.dtype)
    if num_rows == 0 or first == last or values.shape[1] == 0:
        return values.new_zeros((num_rows, values.shape[1]), dtype=dtype)
    position = torch.arange(first, last)
    return F.embedding_bag(position, values.to(dtype), (offsets - first).long(), mode="sum", include_last_offset=True)


@torch.library.custom_op("planner_kernels::jagged_reduce", mutates_args=(), device_types="cpu")
def _jagged_reduce(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    validate_offsets("offsets", offsets, total=values.shape[0])
    out = segment_sum(values.reshape(values.shape[0], values.shape[1:].numel()), offsets)
    if mean:
        out /= offsets.diff().clamp(min=1).unsqueeze(1)
    return out.to(values.dtype).view(offsets.numel() - 1, *values.shape[1:])


@_jagged_reduce.register_fake
def _(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, *values.shape[1:]))


@torch.library.custom_op("planner_kernels::jagged_broadcast", mutates_args=(), device_types="cpu")
def _jagged_broadcast(dense: Tensor, offsets: Tensor, total: int, mean: bool) -> Tensor:
    """Repeat each row over its entries, divided by the row's length if `mean`: the gradient of `jagged_reduce`."""
    validate_offsets("offsets", offsets, total=total)
    position, row, _ = _positions(offsets, total)
    if mean:
        length = offsets.diff().clamp(min=1).view(-1, *[1] * (dense.dim() - 1))
        dense = (dense.to(accumulate_dtype(dense.dtype)) / length).to(dense.dtype)
    out = dense.new_zeros((total, *dense.shape[1:]))
    out[position] = dense[row]
    return out


@_jagged_broadcast.register_fake
def _(dense: Tensor, offsets: Tensor, total: int, mean: bool) -> Tensor:
    return dense.new_empty((total, *dense.shape[1:]))


def _reduce_setup(ctx, inputs, output) -> None:
    values, offsets, mean = inputs
    ctx.save_for_backward(offsets)
    ctx.mean, ctx.total = mean, values.shape[0]


def _reduce_backward(ctx, grad: Tensor):
    (offsets,) = ctx.saved_tensors
    return _plain_broadcast(grad, offsets, ctx.total, ctx.mean), None, None


def _broadcast_setup(ctx, inputs, output) -> None:
    _, offsets, _, mean = inputs
    ctx.save_for_backward(offsets)
    ctx.mean = mean


def _broadcast_backward(ctx, grad: Tensor):
    (offsets,) = ctx.saved_tensors
    return torch.ops.planner_kernels.jagged_reduce(grad, offsets, ctx.mean), None, None, None


_plain_broadcast = direct(_jagged_broadcast)
_differentiable_reduce = differentiable(_jagged_reduce, _reduce_backward, setup_context=_reduce_setup)
_jagged_broadcast.register_autograd(_broadcast_backward, setup_context=_broadcast_setup)


for _op, _name in (
    (_jagged_to_padded, "jagged_to_padded"),
    (_padded_to_jagged, "padded_to_jagged"),
    (_jagged_concat, "jagged_concat"),
    (_jagged_unconcat, "jagged_unconcat"),
    (_jagged_gather, "jagged_gather"),
    (_jagged_gather_grad, "jagged_gather_grad"),
    (_jagged_elementwise, "jagged_elementwise"),
    (_jagged_reduce, "jagged_reduce"),
    (_jagged_broadcast, "jagged_broadcast"),
):
    register_cuda(_op, "kernels._jagged_triton", _name)
