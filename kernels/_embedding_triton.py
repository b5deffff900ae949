"""Triton kernels behind `kernels.embedding`.

Forward: a program a bag; several table rows are in flight at once. Backward with optimizer, without atomics on data and without a
host synchronisation:

    1. prepare   (key, bag) of every id; ids outside the offsets get a key past all tables
    2. sort      keys, stable (radix sort): equal ids become one run of sorted positions
    3. compact   a list of where runs begin, and each sorted position's gradient row; two launches, as runs are counted first
    4. runs      several runs at a time, one gradient row of each after the other, then the update of their table rows. A run of more than
                 SHORT gradient rows is cut into shares of SHARE rows and listed instead.
    5. shares    the sum of each listed share, several gradient rows at a time
    6. long      listed runs one at a time: the sum of their shares, several at a time, then the update

Work is balanced whatever the skew: no program sums more than SHORT or SHARE gradient rows in turn, and a run of n costs n / SHARE shares
in step 6. Every sum has a fixed order that depends on the run alone, so results repeat bit for bit; the order of the lists does not
matter, since each entry is a different table row.
Shapes: N ids, B bags, R table rows, D numbers a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._jagged_triton import _find_rows, _steps
from kernels._rounding_triton import stochastic_round_bf16

_NO_KEY_32 = 2**31 - 1
_NO_KEY_64 = 2**63 - 1
_MAX_SOURCES = 2**30


# --- forward -------------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _pooled_kernel(
    weight_ptr, ids_ptr, offsets_ptr, out_ptr, num_rows, dim, blocks_d,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr, ACC: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bag = (pid // blocks_d).to(tl.int64)
    cols = (pid % blocks_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.load(offsets_ptr + bag).to(tl.int64)
    end = tl.load(offsets_ptr + bag + 1).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK_D], ACC)
    for base in range(start, end, ROWS):
        position = base + tl.arange(0, ROWS)
        ids = tl.load(ids_ptr + position, mask=position < end, other=0).to(tl.int64)
        if CHECK:
            tl.device_assert((ids >= 0) & (ids < num_rows), "embedding: an id is outside the table")
        mask = (position < end)[:, None] & (cols < dim)[None, :]
        total += tl.load(weight_ptr + ids[:, None] * dim + cols[None, :], mask=mask, other=0.0).to(ACC)
    out = tl.sum(total, axis=0)
    if MEAN:
        out = out / tl.maximum(end - start, 1).to(ACC)
    tl.store(out_ptr + bag * dim + cols, out.to(out_ptr.dtype.element_ty), mask=cols < dim)


@triton.jit(do_not_specialize=["num_ids", "num_rows"])
def _sequence_kernel(
    weight_ptr, ids_ptr, out_ptr, num_ids, num_rows, dim, blocks_d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr
):
    pid = tl.program_id(0)
    position = (pid // blocks_d).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = (pid % blocks_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    ids = tl.load(ids_ptr + position, mask=position < num_ids, other=0).to(tl.int64)
    if CHECK:
        tl.device_assert((ids >= 0) & (ids < num_rows), "embedding: an id is outside the table")
    mask = (position < num_ids)[:, None] & (cols < dim)[None, :]
    data = tl.load(weight_ptr + ids[:, None] * dim + cols[None, :], mask=mask)
    tl.store(out_ptr + position[:, None] * dim + cols[None, :], data, mask=mask)


# --- backward: sorted runs -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_ids", "num_bags", "steps", "num_rows", "no_key"])
def _prepare_kernel(
    ids_ptr, offsets_ptr, keys_ptr, bags_ptr, counts_ptr, num_ids, num_bags, steps, num_rows, no_key,
    BLOCK: tl.constexpr, JAGGED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Sort key and bag of each id, and empty lists."""
    begin = tl.program_id(0) * BLOCK
    position = begin + tl.arange(0, BLOCK)
    inside = position < num_ids
    key = tl.load(ids_ptr + position, mask=inside, other=0).to(tl.int64)
    used = inside
    if JAGGED:
        # bags of the block's first and last position first: between them a few steps are left for each position
        edges = begin + tl.arange(0, 2) * (BLOCK - 1)
        bounds = _find_rows(offsets_ptr, edges, num_bags, steps)
        low = tl.min(bounds, axis=0)
        span = tl.max(bounds, axis=0) - low
        bag = tl.zeros_like(position) + low
        high = bag + span
        while span > 0:
            middle = (bag + high + 1) // 2
            right = tl.load(offsets_ptr + middle).to(tl.int32) <= position
            bag = tl.where(right, middle, bag)
            high = tl.where(right, high, middle - 1)
            span = span // 2
        used = used & (bag < num_bags) & (position >= tl.load(offsets_ptr).to(tl.int32))
        tl.store(bags_ptr + position, bag, mask=inside)
    if CHECK:
        tl.device_assert((key >= 0) & (key < num_rows) | ~used, "embedding: an id is outside the table")
    key = tl.where(used, key, no_key)
    tl.store(keys_ptr + position, key.to(keys_ptr.dtype.element_ty), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr + tl.arange(0, 4), tl.zeros([4], tl.int32))


@triton.jit(do_not_specialize=["num_ids"])
def _count_kernel(keys_ptr, begins_ptr, num_ids, BLOCK: tl.constexpr):
    """Runs that begin in each block of sorted positions; the ids outside the offsets, at the end, count as one."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + position, mask=position < num_ids, other=-1)
    previous = tl.load(keys_ptr + position - 1, mask=(position < num_ids) & (position > 0), other=-1)
    tl.store(begins_ptr + tl.program_id(0), tl.sum((key != previous).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_ids", "no_key"])
def _compact_kernel(
    keys_ptr, order_ptr, bags_ptr, begins_ptr, starts_ptr, sources_ptr, counts_ptr, num_ids, no_key,
    BLOCK: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """Where each run begins, one entry past the last run, how many there are, and the gradient row of each sorted position."""
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    key = tl.load(keys_ptr + position, mask=inside, other=-1)
    previous = tl.load(keys_ptr + position - 1, mask=inside & (position > 0), other=-1)
    source = tl.load(order_ptr + position, mask=inside, other=0)
    if JAGGED:
        source = tl.load(bags_ptr + source, mask=inside, other=0)
    tl.store(sources_ptr + position, source.to(tl.int32), mask=inside)
    before = tl.zeros([1024], tl.int32)
    for base in range(0, block, 1024):
        other = base + tl.arange(0, 1024)
        before += tl.load(begins_ptr + other, mask=other < block, other=0)
    begins = inside & (key != previous)
    run = tl.sum(before, axis=0) + tl.cumsum(begins.to(tl.int32), axis=0)  # of this position, from 1
    tl.store(starts_ptr + run - 1, position.to(tl.int32), mask=begins)
    last = position == num_ids - 1  # of all positions: its run is the last one
    tl.store(counts_ptr + tl.zeros_like(run), tl.where(key == no_key, run - 1, run), mask=last)
    tl.store(starts_ptr + run, position.to(tl.int32) + 1, mask=last)


@triton.jit
def _gradient_rows(grad_ptr, offsets_ptr, source, mask, dim, cols, MEAN: tl.constexpr, ACC: tl.constexpr, POLICY: tl.constexpr):
    """Gradient rows `source (P,)`, zero where masked. They are read again and again: keep them in L2."""
    place = source.to(tl.int64)[:, None] * dim + cols[None, :]
    grads = tl.load(grad_ptr + place, mask=mask[:, None] & (cols < dim)[None, :], other=0.0, eviction_policy=POLICY).to(ACC)
    if MEAN:
        length = tl.load(offsets_ptr + source + 1, mask=mask, other=1) - tl.load(offsets_ptr + source, mask=mask, other=0)
        grads = grads / tl.maximum(length, 1).to(ACC)[:, None]
    return grads


@triton.jit
def _table_rows(weight_ptr, rows, mask, dim, cols, ACC: tl.constexpr):
    """Table rows, which nobody reads again soon: first out of L2."""
    place = rows[:, None] * dim + cols[None, :]
    mask = mask[:, None] & (cols < dim)[None, :]
    return tl.load(weight_ptr + place, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC)


@triton.jit
def _apply(
    weight_ptr, state1_ptr, state2_ptr, rows, mask, grads, old, squares, dim, cols,
    lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Optimizer step of table rows `rows (P,)`: summed gradients `grads (P, D)`, present values `old (P, D)`, adagrad's `squares (P,)`."""
    if DECAY:
        grads += weight_decay * old
    place = rows[:, None] * dim + cols[None, :]
    full = mask[:, None] & (cols < dim)[None, :]
    if OPTIMIZER == "rowwise_adagrad":
        total = squares + tl.sum(tl.where((cols < dim)[None, :], grads * grads, 0.0), axis=1) / dim
        tl.store(state1_ptr + rows, total, mask=mask)
        new = old - (lr / (tl.sqrt(total) + eps))[:, None] * grads
    elif OPTIMIZER == "adagrad":
        total = tl.load(state1_ptr + place, mask=full, other=0.0) + grads * grads
        tl.store(state1_ptr + place, total, mask=full)
        new = old - lr * grads / (tl.sqrt(total) + eps)
    elif OPTIMIZER == "adam":
        momentum = tl.load(state1_ptr + place, mask=full, other=0.0)
        momentum += (1.0 - beta1) * (grads - momentum)
        tl.store(state1_ptr + place, momentum, mask=full)
        variance = tl.load(state2_ptr + place, mask=full, other=0.0)
        variance = beta2 * variance + (1.0 - beta2) * grads * grads
        tl.store(state2_ptr + place, variance, mask=full)
        new = old - lr * (momentum / correction1) / (tl.sqrt(variance / correction2) + eps)
    else:
        new = old - lr * grads
    if ROUND:
        tl.store(weight_ptr + place, stochastic_round_bf16(new, rows, cols, seed), mask=full)
    else:
        tl.store(weight_ptr + place, new.to(weight_ptr.dtype.element_ty), mask=full)


@triton.jit
def _squares(state1_ptr, rows, mask, OPTIMIZER: tl.constexpr, ACC: tl.constexpr):
    """rowwise_adagrad's state of `rows (P,)`; zeros for the others. Loaded early: with the rows, not after them."""
    if OPTIMIZER == "rowwise_adagrad":
        return tl.load(state1_ptr + rows, mask=mask, other=0.0)
    return tl.zeros(rows.shape, ACC)


@triton.jit(do_not_specialize=["programs", "seed"])
def _runs_kernel(
    weight_ptr, state1_ptr, state2_ptr, grad_ptr, keys_ptr, sources_ptr, starts_ptr, offsets_ptr, long_ptr, share_start_ptr, counts_ptr,
    dim: tl.constexpr, lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, programs,
    RUNS: tl.constexpr, UNROLL: tl.constexpr, SHORT: tl.constexpr, SHARE: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr,
    POLICY: tl.constexpr, OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Step 4: RUNS runs at a time; one of more than SHORT gradient rows is listed, with its shares, instead."""
    cols = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, RUNS)
    count = tl.load(counts_ptr)
    for base in range(tl.program_id(0) * RUNS, count, programs * RUNS):
        run = base + lane
        here = run < count
        begin = tl.load(starts_ptr + run, mask=here, other=0)
        length = tl.load(starts_ptr + run + 1, mask=here, other=0) - begin
        short = here & (length <= SHORT)
        key = tl.load(keys_ptr + begin, mask=here, other=0).to(tl.int64)
        old = _table_rows(weight_ptr, key, short, dim, cols, ACC)
        squares = _squares(state1_ptr, key, short, OPTIMIZER, ACC)
        total = tl.zeros([RUNS, BLOCK_D], ACC)
        for first in range(0, tl.max(tl.where(short, length, 0), axis=0), UNROLL):
            for step in tl.static_range(UNROLL):
                used = short & (first + step < length)
                source = tl.load(sources_ptr + begin + first + step, mask=used, other=0)
                total += _gradient_rows(grad_ptr, offsets_ptr, source, used, dim, cols, MEAN, ACC, POLICY)
        _apply(
            weight_ptr, state1_ptr, state2_ptr, key, short, total, old, squares, dim, cols,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip
        if tl.max(tl.where(here, length, 0), axis=0) > SHORT:
            for i in tl.static_range(RUNS):
                size = tl.sum(tl.where(here & (lane == i), length, 0), axis=0)
                if size > SHORT:
                    start = tl.sum(tl.where(lane == i, begin, 0), axis=0)
                    pieces = tl.cdiv(size, SHARE)
                    place = tl.atomic_add(counts_ptr + 1, pieces, sem="relaxed")
                    item = tl.atomic_add(counts_ptr + 2, 1, sem="relaxed")
                    tl.store(long_ptr + 3 * item, start)
                    tl.store(long_ptr + 3 * item + 1, place)
                    tl.store(long_ptr + 3 * item + 2, pieces)
                    for piece in range(0, pieces, 32):
                        which = piece + tl.arange(0, 32)
                        target = share_start_ptr + 2 * (place + which)
                        tl.store(target, start + which * SHARE, mask=which < pieces)
                        tl.store(target + 1, start + tl.minimum((which + 1) * SHARE, size), mask=which < pieces)


@triton.jit(do_not_specialize=["programs"])
def _shares_kernel(
    grad_ptr, sources_ptr, offsets_ptr, shares_ptr, share_start_ptr, counts_ptr, dim: tl.constexpr, programs,
    ITEMS: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr, POLICY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Step 5: sum of each share of a long run, ITEMS gradient rows at a time."""
    cols = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, ITEMS)
    count = tl.load(counts_ptr + 1)
    for share in range(tl.program_id(0), count, programs):
        begin = tl.load(share_start_ptr + 2 * share)
        end = tl.load(share_start_ptr + 2 * share + 1)
        total = tl.zeros([ITEMS, BLOCK_D], ACC)
        source = tl.load(sources_ptr + begin + lane, mask=begin + lane < end, other=0)
        for first in range(begin, end, ITEMS):
            used = first + lane < end
            following = tl.load(sources_ptr + first + ITEMS + lane, mask=first + ITEMS + lane < end, other=0)
            total += _gradient_rows(grad_ptr, offsets_ptr, source, used, dim, cols, MEAN, ACC, POLICY)
            source = following
        tl.store(shares_ptr + tl.cast(share, tl.int64) * dim + cols, tl.sum(total, axis=0), mask=cols < dim)


@triton.jit(do_not_specialize=["programs", "seed"])
def _long_runs_kernel(
    weight_ptr, state1_ptr, state2_ptr, keys_ptr, shares_ptr, long_ptr, counts_ptr,
    dim: tl.constexpr, lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, programs,
    ITEMS: tl.constexpr, BLOCK_D: tl.constexpr,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Step 6: one long run at a time: its shares, ITEMS at a time, then the update."""
    cols = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, ITEMS)
    count = tl.load(counts_ptr + 2)
    for item in range(tl.program_id(0), count, programs):
        key = tl.load(keys_ptr + tl.load(long_ptr + 3 * item)).to(tl.int64)
        place = tl.load(long_ptr + 3 * item + 1).to(tl.int64)
        pieces = tl.load(long_ptr + 3 * item + 2)
        one = tl.full([1], 1, tl.int1)
        row = tl.full([1], 0, tl.int64) + key
        old = _table_rows(weight_ptr, row, one, dim, cols, ACC)
        squares = _squares(state1_ptr, row, one, OPTIMIZER, ACC)
        total = tl.zeros([ITEMS, BLOCK_D], ACC)
        for first in range(0, pieces, ITEMS):
            which = first + lane
            mask = (which < pieces)[:, None] & (cols < dim)[None, :]
            total += tl.load(shares_ptr + (place + which)[:, None] * dim + cols[None, :], mask=mask, other=0.0)
        _apply(
            weight_ptr, state1_ptr, state2_ptr, row, one, tl.sum(total, axis=0)[None, :], old, squares, dim, cols,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip


# --- launches ------------------------------------------------------------------------------------------------------------------------


def _accumulator(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if accumulate_dtype(dtype) == torch.float64 else tl.float32


def embedding_pooled(weight: Tensor, ids: Tensor, offsets: Tensor, mean: bool, *, check: bool = True) -> Tensor:
    weight, ids, offsets = weight.contiguous(), ids.contiguous(), offsets.contiguous()
    num_bags, dim = offsets.numel() - 1, weight.shape[1]
    out = weight.new_empty((num_bags, dim))
    block_d = min(triton.next_power_of_2(max(dim, 1)), 512)
    blocks_d = triton.cdiv(dim, block_d)
    if num_bags and dim:
        _pooled_kernel[(num_bags * blocks_d,)](
            weight, ids, offsets, out, weight.shape[0], dim, blocks_d, ROWS=POOLED_ROWS, BLOCK_D=block_d, MEAN=mean,
            ACC=_accumulator(weight.dtype), CHECK=check, num_warps=max(1, block_d // 128), debug=check, sanitize_overflow=False,
        )  # fmt: skip
    return out


def embedding_sequence(weight: Tensor, ids: Tensor, *, check: bool = True) -> Tensor:
    weight, ids = weight.contiguous(), ids.contiguous()
    num_ids, dim = ids.numel(), weight.shape[1]
    out = weight.new_empty((num_ids, dim))
    block_d = min(triton.next_power_of_2(max(dim, 1)), 512)
    blocks_d, rows = triton.cdiv(dim, block_d), max(1, 4096 // block_d)
    if num_ids and dim:
        _sequence_kernel[(triton.cdiv(num_ids, rows) * blocks_d,)](
            weight, ids, out, num_ids, weight.shape[0], dim, blocks_d, ROWS=rows, BLOCK_D=block_d,
            CHECK=check, num_warps=4, debug=check, sanitize_overflow=False,
        )  # fmt: skip
    return out


POOLED_ROWS = 8  # table rows in flight per program
BLOCK = 512  # positions per program of step 1
COMPACT_BLOCK = 1024  # and of step 3
RUNS, UNROLL = 4, 2  # runs at a time, and gradient rows of each in flight
SHORT, SHARE = 32, 64  # gradient rows of the longest run that step 4 sums by itself, and of a share of a longer one
SHARE_ITEMS, LONG_ITEMS = 8, 32
SHARE_WARPS, LONG_WARPS = 1, 4
GRADIENTS = "evict_last"  # where in L2 gradient rows, read again and again, should stay
PROGRAMS = 2112  # sixteen programs on each of the 132 multiprocessors; what is not needed leaves at once


def embedding_update_(
    weight: Tensor, state1: Tensor | None, state2: Tensor | None, grad_out: Tensor, ids: Tensor, offsets: Tensor | None,
    optimizer: str, mean: bool, lr: float, eps: float, beta1: float, beta2: float, step: int, weight_decay: float, seed: int | None,
    *, check: bool = True,
) -> None:  # fmt: skip
    num_ids, dim = ids.numel(), weight.shape[1]
    if num_ids == 0 or dim == 0:
        return
    if max(grad_out.shape[0], num_ids) > _MAX_SOURCES:
        raise ValueError(f"ids: {num_ids} ids and {grad_out.shape[0]} gradient rows, at most {_MAX_SOURCES} of each in one update")
    grad_out, ids = grad_out.contiguous(), ids.contiguous()
    narrow = weight.shape[0] < _NO_KEY_32
    no_key = _NO_KEY_32 if narrow else _NO_KEY_64
    keys = torch.empty(num_ids, dtype=torch.int32 if narrow else torch.int64, device=ids.device)
    bags = torch.empty(num_ids if offsets is not None else 0, dtype=torch.int32, device=ids.device)
    counts = torch.empty(4, dtype=torch.int32, device=ids.device)
    num_bags = offsets.numel() - 1 if offsets is not None else 0
    offsets = offsets.contiguous() if offsets is not None else None
    _prepare_kernel[(triton.cdiv(num_ids, BLOCK),)](
        ids, offsets, keys, bags, counts, num_ids, num_bags, _steps(num_bags), weight.shape[0], no_key,
        BLOCK=BLOCK, JAGGED=offsets is not None, CHECK=check, num_warps=4, debug=check, sanitize_overflow=False,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    jagged, blocks = offsets is not None, triton.cdiv(num_ids, COMPACT_BLOCK)
    begins = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_ids + 1, dtype=torch.int32, device=ids.device)
    sources = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    _count_kernel[(blocks,)](keys, begins, num_ids, BLOCK=COMPACT_BLOCK, num_warps=4)
    _compact_kernel[(blocks,)](keys, order, bags, begins, starts, sources, counts, num_ids, no_key, BLOCK=COMPACT_BLOCK, JAGGED=jagged, num_warps=4)
    most_long = num_ids // (SHORT + 1)
    most_shares = num_ids // SHARE + most_long
    shares = torch.empty((most_shares, dim), dtype=accumulate_dtype(weight.dtype), device=ids.device)
    share_starts = torch.empty(2 * most_shares, dtype=torch.int32, device=ids.device)
    long = torch.empty(3 * most_long, dtype=torch.int32, device=ids.device)
    scalars = (lr, eps, beta1, beta2, 1.0 - beta1**step, 1.0 - beta2**step, weight_decay, seed or 0)
    options = dict(BLOCK_D=triton.next_power_of_2(dim), ACC=_accumulator(weight.dtype))
    update = dict(OPTIMIZER=optimizer, DECAY=weight_decay != 0.0, ROUND=seed is not None)
    warps = max(1, options["BLOCK_D"] // 128)  # a warp covers 128 columns with 16 bytes a thread, so that rows lie in registers
    programs = min(PROGRAMS, triton.cdiv(num_ids, RUNS))
    _runs_kernel[(programs,)](
        weight, state1, state2, grad_out, keys, sources, starts, offsets, long, share_starts, counts, dim, *scalars, programs,
        RUNS=RUNS, UNROLL=UNROLL, SHORT=SHORT, SHARE=SHARE, MEAN=mean, POLICY=GRADIENTS, **options, **update, num_warps=warps,
    )  # fmt: skip
    if most_long == 0:
        return
    programs = min(PROGRAMS, most_shares)
    _shares_kernel[(programs,)](
        grad_out, sources, offsets, shares, share_starts, counts, dim, programs,
        ITEMS=SHARE_ITEMS, MEAN=mean, POLICY=GRADIENTS, **options, num_warps=max(SHARE_WARPS, warps),
    )  # fmt: skip
    programs = min(PROGRAMS, most_long)
    _long_runs_kernel[(programs,)](
        weight, state1, state2, keys, shares, long, counts, dim, *scalars, programs, ITEMS=LONG_ITEMS, **options, **update,
        num_warps=max(LONG_WARPS, warps),
    )  # fmt: skip


def embedding_dense_grad(grad_out: Tensor, ids: Tensor, offsets: Tensor | None, num_rows: int, mean: bool) -> Tensor:
    """The dense gradient is an SGD step of size -1 on a table of zeros."""
    dtype = accumulate_dtype(grad_out.dtype)
    grad = torch.zeros((num_rows, grad_out.shape[1]), dtype=dtype, device=grad_out.device)
    embedding_update_(grad, None, None, grad_out, ids, offsets, "sgd", mean, -1.0, 0.0, 0.0, 0.0, 1, 0.0, None)
    return grad.to(grad_out.dtype)
