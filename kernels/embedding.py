"""Embedding lookup over jagged ids, and its backward fused with the optimizer.

    pooled    out[b] = sum over j in row b of weight[ids[j]]            (or the mean; an empty row gives 0)
    sequence  out[j] = weight[ids[j]]

The fused update never forms the gradient of the table. With `r` a row of the table that occurs in `ids`, its gradients are summed first,
duplicates included, in the order in which they occur in `ids`,

    g_r = sum over j with ids[j] = r of grad_out[bag(j)] (/ length of bag(j) for the mean)

and then the optimizer sees the row once:

    sgd              w -= lr * g
    rowwise_adagrad  s += mean(g^2);  w -= lr * g / (sqrt(s) + eps)                     s: one fp32 number a row
    adagrad          s += g^2;        w -= lr * g / (sqrt(s) + eps)                     s: one fp32 number a weight
    adam             m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
                     w -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)          only rows that occur are touched ("lazy")

with weight decay (L2) as `g += weight_decay * w` before. Everything is computed in fp32 (fp64 for fp64 tables), each sum in a fixed
order: the result is the same bit for bit from run to run. bf16 tables can be stored with stochastic rounding (`kernels._rounding`),
without which small updates to large weights vanish. Offsets are (B+1,), as in `kernels.jagged`; ids outside the offsets are ignored.

On the CPU an id outside the table raises ValueError; on CUDA the kernels trap on one (`validate_ids` checks at the cost of waiting).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._autograd import differentiable, direct, register_cuda
from kernels._checks import accumulate_dtype, check_offsets, check_same_device, validate_ids, validate_offsets
from kernels._rounding import stochastic_round_bf16

__all__ = ["embedding_backward_update_", "embedding_pooled", "embedding_sequence", "new_optimizer_state", "validate_ids"]

Mode = Literal["sum", "mean"]
Optimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam"]
OptimizerState = None | Tensor | tuple[Tensor, Tensor]


def _check_lookup(weight: Tensor, ids: Tensor, offsets: Tensor | None, mode: str) -> None:
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight: expected a floating point (R, D) tensor, got {weight.dtype} {tuple(weight.shape)}")
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids: expected a 1-D int32 or int64 tensor, got {ids.dtype} {tuple(ids.shape)}")
    check_same_device(weight.device, ids=ids)
    if offsets is not None:
        check_offsets("offsets", offsets, device=weight.device)
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode: {mode!r} is not 'sum' or 'mean'")


# --- forward -------------------------------------------------------------------------------------------------------------------------


def embedding_pooled(weight: Tensor, ids: Tensor, offsets: Tensor, *, mode: Mode = "sum") -> Tensor:
    """Sum or mean of the table rows of each bag: `weight (R, D)`, `ids (N,)`, `offsets (B+1,)` -> `(B, D)` in the table's dtype.

    Accumulates in fp32 (fp64 for fp64). The gradient with respect to `weight` is dense `(R, D)`: meant for small tables; large ones
    use `embedding_backward_update_` instead of autograd.
    """
    _check_lookup(weight, ids, offsets, mode)
    return _differentiable_pooled(weight, ids, offsets, mode == "mean")


def embedding_sequence(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of the table: `weight (R, D)`, `ids (N,)` -> `(N, D)`. The gradient with respect to `weight` is dense."""
    _check_lookup(weight, ids, None, "sum")
    return _differentiable_sequence(weight, ids)


def _covered(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that belong to a bag, and offsets into them, both int64."""
    first, last = (int(end) for end in offsets[[0, -1]].tolist())
    return ids[first:last].long(), offsets.long() - first


@torch.library.custom_op("planner_kernels::embedding_pooled", mutates_args=(), device_types="cpu")
def _embedding_pooled(weight: Tensor, ids: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    validate_offsets("offsets", offsets, total=ids.shape[0])
    ids, offsets = _covered(ids, offsets)
    validate_ids("ids", ids, num_rows=weight.shape[0])
    num_bags = offsets.numel() - 1
    if ids.numel() == 0 or weight.shape[1] == 0:
        return weight.new_zeros((num_bags, weight.shape[1]))
    if accumulate_dtype(weight.dtype) != weight.dtype:
        weight_or_rows, ids_or_positions = weight[ids].float(), torch.arange(ids.numel())
    else:
        weight_or_rows, ids_or_positions = weight, ids
    out = F.embedding_bag(ids_or_positions, weight_or_rows, offsets, mode="sum", include_last_offset=True)
    if mean:
        out /= offsets.diff().clamp(min=1).unsqueeze(1)
    return out.to(weight.dtype)


@_embedding_pooled.register_fake
def _(weight: Tensor, ids: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    return weight.new_empty((offsets.shape[0] - 1, weight.shape[1]))


@torch.library.custom_op("planner_kernels::embedding_sequence", mutates_args=(), device_types="cpu")
def _embedding_sequence(weight: Tensor, ids: Tensor) -> Tensor:
    validate_ids("ids", ids, num_rows=weight.shape[0])
    return weight[ids]


@_embedding_sequence.register_fake
def _(weight: Tensor, ids: Tensor) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


# --- backward ------------------------------------------------------------------------------------------------------------------------


def _row_gradients(grad_out: Tensor, ids: Tensor, offsets: Tensor | None, mean: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Distinct table rows in `ids`, `(U,)`, and the summed gradient of each, `(U, D)` in `dtype`."""
    scale = None
    if offsets is None:
        ids, source = ids.long(), None
    else:
        ids, offsets = _covered(ids, offsets)
        lengths = offsets.diff()
        source = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)  # bag of each id
        scale = 1.0 / lengths.clamp(min=1).to(dtype) if mean else None
    if ids.numel() == 0:
        return ids, grad_out.new_zeros((0, grad_out.shape[1]), dtype=dtype)
    sorted_ids, order = torch.sort(ids, stable=True)
    rows, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    source = order if source is None else source[order]
    starts = F.pad(counts.cumsum(0), (1, 0))
    grad_out = grad_out.to(dtype)
    if scale is not None:
        grad_out = grad_out * scale.unsqueeze(1)
    return rows, F.embedding_bag(source, grad_out, starts, mode="sum", include_last_offset=True)


@torch.library.custom_op("planner_kernels::embedding_dense_grad", mutates_args=(), device_types="cpu")
def _embedding_dense_grad(grad_out: Tensor, ids: Tensor, offsets: Tensor | None, num_rows: int, mean: bool) -> Tensor:
    rows, row_grads = _row_gradients(grad_out, ids, offsets, mean, accumulate_dtype(grad_out.dtype))
    grad = grad_out.new_zeros((num_rows, grad_out.shape[1]))
    return grad.index_copy_(0, rows, row_grads.to(grad.dtype))


@_embedding_dense_grad.register_fake
def _(grad_out: Tensor, ids: Tensor, offsets: Tensor | None, num_rows: int, mean: bool) -> Tensor:
    return grad_out.new_empty((num_rows, grad_out.shape[1]))


def _pooled_setup(ctx, inputs, output) -> None:
    weight, ids, offsets, mean = inputs
    ctx.save_for_backward(ids, offsets)
    ctx.num_rows, ctx.mean = weight.shape[0], mean


def _pooled_backward(ctx, grad: Tensor):
    ids, offsets = ctx.saved_tensors
    return _plain_grad(grad, ids, offsets, ctx.num_rows, ctx.mean), None, None, None


def _sequence_setup(ctx, inputs, output) -> None:
    weight, ids = inputs
    ctx.save_for_backward(ids)
    ctx.num_rows = weight.shape[0]


def _sequence_backward(ctx, grad: Tensor):
    (ids,) = ctx.saved_tensors
    return _plain_grad(grad, ids, None, ctx.num_rows, False), None


_differentiable_pooled = differentiable(_embedding_pooled, _pooled_backward, setup_context=_pooled_setup)
_plain_grad = direct(_embedding_dense_grad)
_differentiable_sequence = differentiable(_embedding_sequence, _sequence_backward, setup_context=_sequence_setup)


# --- fused update --------------------------------------------------------------------------------------------------------------------


def new_optimizer_state(weight: Tensor, optimizer: Optimizer) -> OptimizerState:
    """Zero state for `embedding_backward_update_`: None (sgd), `(R,)` (rowwise_adagrad), `(R, D)` (adagrad) or two `(R, D)` (adam);
    fp32 unless fp64."""
    dtype = accumulate_dtype(weight.dtype)
    if optimizer == "sgd":
        return None
    if optimizer == "rowwise_adagrad":
        return torch.zeros(weight.shape[0], dtype=dtype, device=weight.device)
    if optimizer == "adagrad":
        return torch.zeros_like(weight, dtype=dtype)
    if optimizer == "adam":
        return (torch.zeros_like(weight, dtype=dtype), torch.zeros_like(weight, dtype=dtype))
    raise ValueError(f"optimizer: {optimizer!r} is not 'sgd', 'rowwise_adagrad', 'adagrad' or 'adam'")


def _state_tensors(weight: Tensor, state: OptimizerState, optimizer: str) -> tuple[Tensor | None, Tensor | None]:
    """Check `state` against `weight` and `optimizer`; return it as two optional tensors."""
    dtype = accumulate_dtype(weight.dtype)
    if optimizer == "sgd":
        if state is not None:
            raise ValueError("state: sgd has none, pass None")
        return None, None
    if optimizer == "rowwise_adagrad":
        tensors, shape = (state,), (weight.shape[0],)
    elif optimizer == "adagrad":
        tensors, shape = (state,), tuple(weight.shape)
    elif optimizer == "adam":
        tensors, shape = state, tuple(weight.shape)
    else:
        raise ValueError(f"optimizer: {optimizer!r} is not 'sgd', 'rowwise_adagrad', 'adagrad' or 'adam'")
    expected = 2 if optimizer == "adam" else 1
    if not isinstance(tensors, tuple | list) or len(tensors) != expected or not all(isinstance(t, Tensor) for t in tensors):
        raise ValueError(f"state: {optimizer} needs {expected} tensor(s) of shape {shape}, got {type(state).__name__}")
    for t in tensors:
        if tuple(t.shape) != shape or t.dtype != dtype or t.device != weight.device or not t.is_contiguous():
            raise ValueError(f"state: expected a contiguous {dtype} {shape} on {weight.device}, got {t.dtype} {tuple(t.shape)} on {t.device}")
    return tensors[0], tensors[1] if expected == 2 else None


def embedding_backward_update_(
    weight: Tensor,
    state: OptimizerState,
    grad_out: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    *,
    optimizer: Optimizer = "rowwise_adagrad",
    lr: float,
    eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999),
    step: int = 1,
    weight_decay: float = 0.0,
    mode: Mode = "sum",
    stochastic_rounding_seed: int | None = None,
) -> None:
    """Apply the gradient of a lookup to the table, in place, without forming the table's gradient (formulas: module docstring).

    weight: `(R, D)` fp32, bf16, fp16 or fp64, contiguous. state: see `new_optimizer_state`; changed in place.
    grad_out: `(B, D)` for a pooled lookup with `offsets (B+1,)`, `(N, D)` for a sequence lookup with `offsets=None`.
    step: number of this update, from 1 (adam's bias correction). stochastic_rounding_seed: for bf16 tables, a number that
    changes from step to step; None rounds to nearest.

    Raises ValueError for wrong shapes, dtypes or devices, for a step below 1, and for a seed on a table that is not bf16.
    """
    _check_lookup(weight, ids, offsets, mode)
    state1, state2 = _state_tensors(weight, state, optimizer)
    check_same_device(weight.device, grad_out=grad_out)
    num_grads = ids.shape[0] if offsets is None else offsets.shape[0] - 1
    if tuple(grad_out.shape) != (num_grads, weight.shape[1]):
        raise ValueError(f"grad_out: expected {(num_grads, weight.shape[1])}, got {tuple(grad_out.shape)}")
    if offsets is None and mode == "mean":
        raise ValueError("mode: a sequence lookup (offsets=None) has no mean")
    if not weight.is_contiguous():
        raise ValueError("weight: must be contiguous, it is updated in place")
    if step < 1:
        raise ValueError(f"step: {step} is below 1")
    if stochastic_rounding_seed is not None and weight.dtype != torch.bfloat16:
        raise ValueError(f"stochastic_rounding_seed: only for bf16 tables, this one is {weight.dtype}")
    _plain_update(
        weight, state1, state2, grad_out.detach(), ids, offsets, optimizer, mode == "mean",
        lr, eps, betas[0], betas[1], step, weight_decay, stochastic_rounding_seed,
    )  # fmt: skip
    torch.autograd.graph.increment_version([t for t in (weight, state1, state2) if t is not None])


@torch.library.custom_op("planner_kernels::embedding_update_", mutates_args=("weight", "state1", "state2"), device_types="cpu")
def _embedding_update(
    weight: Tensor,
    state1: Tensor | None,
    state2: Tensor | None,
    grad_out: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    optimizer: str,
    mean: bool,
    lr: float,
    eps: float,
    beta1: float,
    beta2: float,
    step: int,
    weight_decay: float,
    seed: int | None,
) -> None:
    if offsets is not None:
        validate_offsets("offsets", offsets, total=ids.shape[0])
    rows, grads = _row_gradients(grad_out, ids, offsets, mean, accumulate_dtype(weight.dtype))
    validate_ids("ids", rows, num_rows=weight.shape[0])
    if rows.numel() == 0:
        return
    old = weight[rows].to(grads.dtype)
    if weight_decay:
        grads = grads.add_(old, alpha=weight_decay)
    if optimizer == "rowwise_adagrad":
        assert state1 is not None
        total = state1[rows] + grads.square().mean(1)
        state1[rows] = total
        new = old.addcdiv_(grads, (total.sqrt() + eps).unsqueeze(1), value=-lr)
    elif optimizer == "adagrad":
        assert state1 is not None
        total = state1[rows].addcmul_(grads, grads)
        state1[rows] = total
        new = old.addcdiv_(grads, total.sqrt() + eps, value=-lr)
    elif optimizer == "adam":
        assert state1 is not None and state2 is not None
        momentum = state1[rows].lerp_(grads, 1.0 - beta1)
        variance = state2[rows].mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
        state1[rows], state2[rows] = momentum, variance
        denominator = (variance / (1.0 - beta2**step)).sqrt_().add_(eps)
        new = old.addcdiv_(momentum, denominator, value=-lr / (1.0 - beta1**step))
    else:
        new = old.add_(grads, alpha=-lr)
    if seed is not None:
        weight[rows] = stochastic_round_bf16(new, rows, seed)
    else:
        weight[rows] = new.to(weight.dtype)


@_embedding_update.register_fake
def _(
    weight, state1, state2, grad_out, ids, offsets, optimizer, mean, lr, eps, beta1, beta2, step, weight_decay, seed
) -> None:  # fmt: skip
    return None


_plain_update = direct(_embedding_update)
for _op, _name in (
    (_embedding_pooled, "embedding_pooled"),
    (_embedding_sequence, "embedding_sequence"),
    (_embedding_dense_grad, "embedding_dense_grad"),
    (_embedding_update, "embedding_update_"),
):
    register_cuda(_op, "kernels._embedding_triton", _name)
