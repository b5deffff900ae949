"""Triton kernels behind `kernels.embedding`.

Forward: a program a bag; several table rows are in flight at once. Backward with optimizer, without atomics on data and without a
host synchronisation:

    1. prepare   (key, bag) of every id; ids outside the offsets get a key past all tables
    2. sort      keys, stable (radix sort): equal ids become one run of sorted positions
    3. compact   a list of runs (where each begins, its table row) and each sorted position's gradient row
    4. plan      runs of more than SHORT gradient rows are listed and cut into shares
    5. update    each share is summed by one program, and whoever comes last sums the run's shares and updates its table row; then short
                 runs are summed and updated, several at a time

Work is balanced whatever the skew: a run of n gradient rows is cut into sqrt(n) shares where n is large, so no program sums more than
that in turn. Every sum has a fixed order that depends on the run alone, so results repeat bit for bit; the order of the lists does not
matter, since each entry is a different table row. Measured on an H200 (8 x 5 M x 128 fp32, 1.3 M ids): prepare 15 us, sort 106, the rest 320, most
of which goes into 430,000 scattered rows read and written. Two runs at a time are the best of 1, 2 and 4.
Shapes: N ids, B bags, R table rows, D numbers a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._jagged_triton import _find_rows, _steps
from kernels._launch import cdiv, launch, next_power_of_2
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
    ids_ptr, offsets_ptr, keys_ptr, bags_ptr, counts_ptr, published_ptr, num_ids, num_bags, steps, num_rows, no_key,
    BLOCK: tl.constexpr, JAGGED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Sort key and bag of each id; empty lists, and nothing published by the blocks of step 3."""
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
    tl.store(published_ptr + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["num_ids", "no_key"])
def _compact_kernel(
    keys_ptr, order_ptr, bags_ptr, published_ptr, starts_ptr, rows_ptr, firsts_ptr, sources_ptr, counts_ptr, num_ids, no_key,
    BLOCK: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """Where each run begins, one entry past the last run, its table row and first gradient row, how many runs there are, and the gradient
    row of each sorted position. The ids outside the offsets, at the end, are one run that is not counted.

    Every program publishes how many runs begin in its block (plus one: 0 is "not yet") and then waits for those before it, as in a
    scan with look-back: programs start in order, and none waits before it has published.
    """
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    key = tl.load(keys_ptr + position, mask=inside, other=-1)
    previous = tl.load(keys_ptr + position - 1, mask=inside & (position > 0), other=-1)
    begins = inside & (key != previous)
    run = tl.cumsum(begins.to(tl.int32), axis=0) - 1
    tl.atomic_xchg(published_ptr + block, tl.sum(begins.to(tl.int32), axis=0) + 1, sem="relaxed")
    source = tl.load(order_ptr + position, mask=inside, other=0)
    if JAGGED:
        source = tl.load(bags_ptr + source, mask=inside, other=0)
    source = source.to(tl.int32)
    tl.store(sources_ptr + position, source, mask=inside)
    for base in range(0, block, 1024):
        other = base + tl.arange(0, 1024)
        seen = tl.zeros([1024], tl.int32)
        waiting = 1
        while waiting > 0:
            seen = tl.load(published_ptr + other, mask=other < block, other=1, volatile=True)
            waiting = tl.sum((seen == 0).to(tl.int32), axis=0)
        run += tl.sum(seen - 1, axis=0)
    tl.store(starts_ptr + run, position.to(tl.int32), mask=begins)
    tl.store(rows_ptr + run, key, mask=begins)
    tl.store(firsts_ptr + run, source, mask=begins)
    last = position == num_ids - 1  # of all positions: its run is the last one
    tl.store(counts_ptr + tl.zeros_like(run), tl.where(key == no_key, run, run + 1), mask=last)
    tl.store(starts_ptr + run + 1, position.to(tl.int32) + 1, mask=last)


@triton.jit(do_not_specialize=["programs"])
def _plan_kernel(
    starts_ptr, rows_ptr, counts_ptr, long_ptr, arrived_ptr, share_ptr, programs, RUNS: tl.constexpr, SHORT: tl.constexpr, SHARE: tl.constexpr
):
    """List the runs of more than SHORT gradient rows, and which of them each share belongs to.

    A share has about as many gradient rows as its run has shares, but at least SHARE: however long, a run takes no program long.
    """
    count = tl.load(counts_ptr)
    for base in range(tl.program_id(0) * RUNS, count, programs * RUNS):
        run = base + tl.arange(0, RUNS)
        begin = tl.load(starts_ptr + run, mask=run < count, other=0)
        length = tl.load(starts_ptr + run + 1, mask=run < count, other=0) - begin
        long = length > SHORT
        found = tl.sum(long.to(tl.int32), axis=0)
        if found > 0:
            size = tl.maximum(tl.sqrt(length.to(tl.float32)).to(tl.int32) // 8 * 8, SHARE)
            pieces = tl.where(long, (length + size - 1) // size, 0)
            item = tl.atomic_add(counts_ptr + 2, found, sem="relaxed") + tl.cumsum(long.to(tl.int32), axis=0) - 1
            place = tl.atomic_add(counts_ptr + 1, tl.sum(pieces, axis=0), sem="relaxed") + tl.cumsum(pieces, axis=0) - pieces
            row = tl.load(rows_ptr + run, mask=long, other=0)
            tl.store(arrived_ptr + item, tl.zeros_like(item), mask=long)
            tl.store(long_ptr + 6 * item, begin, mask=long)
            tl.store(long_ptr + 6 * item + 1, length, mask=long)
            tl.store(long_ptr + 6 * item + 2, size, mask=long)
            tl.store(long_ptr + 6 * item + 3, place, mask=long)
            tl.store(long_ptr + 6 * item + 4, row.to(tl.int32), mask=long)
            tl.store(long_ptr + 6 * item + 5, (row.to(tl.int64) >> 32).to(tl.int32), mask=long)
            for piece in range(tl.max(pieces, axis=0)):
                tl.store(share_ptr + place + piece, item, mask=piece < pieces)


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
def _update_kernel(
    weight_ptr, state1_ptr, state2_ptr, grad_ptr, sources_ptr, starts_ptr, rows_ptr, firsts_ptr, offsets_ptr,
    counts_ptr, long_ptr, arrived_ptr, share_ptr, sums_ptr,
    lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, programs,
    dim: tl.constexpr, RUNS: tl.constexpr, UNROLL: tl.constexpr, ITEMS: tl.constexpr, SHORT: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr,
    POLICY: tl.constexpr, OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Shares of long runs first, one at a time: whoever finishes a run's last share adds them up and updates the row. Then short runs, RUNS at a
    time, with what describes the next ones on its way."""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, ITEMS)
    for share in range(pid, tl.load(counts_ptr + 1), programs):
        item = tl.load(share_ptr + share)
        begin = tl.load(long_ptr + 6 * item)
        length = tl.load(long_ptr + 6 * item + 1)
        size = tl.load(long_ptr + 6 * item + 2)
        place = tl.load(long_ptr + 6 * item + 3)
        end = begin + tl.minimum((share - place + 1) * size, length)
        begin += (share - place) * size
        pieces = (length + size - 1) // size
        total = tl.zeros([ITEMS, BLOCK_D], ACC)
        source = tl.load(sources_ptr + begin + lane, mask=begin + lane < end, other=0)
        for first in range(begin, end, ITEMS):
            following = tl.load(sources_ptr + first + ITEMS + lane, mask=first + ITEMS + lane < end, other=0)
            total += _gradient_rows(grad_ptr, offsets_ptr, source, first + lane < end, dim, cols, MEAN, ACC, POLICY)
            source = following
        tl.store(sums_ptr + tl.cast(share, tl.int64) * dim + cols, tl.sum(total, axis=0), mask=cols < dim)
        tl.debug_barrier()  # all of the program's stores before the count that says so
        if tl.atomic_add(arrived_ptr + item, 1, sem="acq_rel") == pieces - 1:
            low = tl.load(long_ptr + 6 * item + 4).to(tl.int64) & 0xFFFFFFFF
            row = tl.zeros([1], tl.int64) + (low | (tl.load(long_ptr + 6 * item + 5).to(tl.int64) << 32))
            one = tl.full([1], 1, tl.int1)
            old = _table_rows(weight_ptr, row, one, dim, cols, ACC)
            squares = _squares(state1_ptr, row, one, OPTIMIZER, ACC)
            total = tl.zeros([ITEMS, BLOCK_D], ACC)
            for first in range(0, pieces, ITEMS):
                target = tl.cast(place + first + lane, tl.int64)[:, None] * dim + cols[None, :]
                mask = (first + lane < pieces)[:, None] & (cols < dim)[None, :]
                total += tl.load(sums_ptr + target, mask=mask, other=0.0, cache_modifier=".cg")
            _apply(
                weight_ptr, state1_ptr, state2_ptr, row, one, tl.sum(total, axis=0)[None, :], old, squares, dim, cols,
                lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
            )  # fmt: skip

    count = tl.load(counts_ptr)
    run = (programs - 1 - pid) * RUNS + tl.arange(0, RUNS)  # from the last program on: the first ones may have had a share more
    begin = tl.load(starts_ptr + run, mask=run < count, other=0)
    end = tl.load(starts_ptr + run + 1, mask=run < count, other=0)
    row = tl.load(rows_ptr + run, mask=run < count, other=0)
    source = tl.load(firsts_ptr + run, mask=run < count, other=0)
    for base in range((programs - 1 - pid) * RUNS, count, programs * RUNS):
        run = base + programs * RUNS + tl.arange(0, RUNS)
        next_begin = tl.load(starts_ptr + run, mask=run < count, other=0)
        next_end = tl.load(starts_ptr + run + 1, mask=run < count, other=0)
        next_row = tl.load(rows_ptr + run, mask=run < count, other=0)
        next_source = tl.load(firsts_ptr + run, mask=run < count, other=0)
        length = end - begin
        short = (length > 0) & (length <= SHORT)
        length = tl.where(short, length, 0)
        row = row.to(tl.int64)
        old = _table_rows(weight_ptr, row, short, dim, cols, ACC)
        squares = _squares(state1_ptr, row, short, OPTIMIZER, ACC)
        total = _gradient_rows(grad_ptr, offsets_ptr, source, short, dim, cols, MEAN, ACC, POLICY)
        for first in range(1, tl.max(length, axis=0), UNROLL):
            for step in tl.static_range(UNROLL):
                used = first + step < length
                source = tl.load(sources_ptr + begin + first + step, mask=used, other=0)
                total += _gradient_rows(grad_ptr, offsets_ptr, source, used, dim, cols, MEAN, ACC, POLICY)
        _apply(
            weight_ptr, state1_ptr, state2_ptr, row, short, total, old, squares, dim, cols,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip
        begin, end, row, source = next_begin, next_end, next_row, next_source


# --- launches ------------------------------------------------------------------------------------------------------------------------


def _accumulator(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if accumulate_dtype(dtype) == torch.float64 else tl.float32


def embedding_pooled(weight: Tensor, ids: Tensor, offsets: Tensor, mean: bool, *, check: bool = True) -> Tensor:
    weight, ids, offsets = weight.contiguous(), ids.contiguous(), offsets.contiguous()
    num_bags, dim = offsets.numel() - 1, weight.shape[1]
    out = weight.new_empty((num_bags, dim))
    block_d = min(next_power_of_2(max(dim, 1)), 512)
    blocks_d = cdiv(dim, block_d)
    if num_bags and dim:
        launch(
            _pooled_kernel, num_bags * blocks_d, (weight, ids, offsets, out, weight.shape[0], dim, blocks_d),
            (POOLED_ROWS, block_d, mean, _accumulator(weight.dtype), check), num_warps=max(1, block_d // 128),
            key=(weight.dtype, ids.dtype, offsets.dtype, dim, weight.shape[0] >> 31), debug=check, sanitize_overflow=False,
        )  # fmt: skip
    return out


def embedding_sequence(weight: Tensor, ids: Tensor, *, check: bool = True) -> Tensor:
    weight, ids = weight.contiguous(), ids.contiguous()
    num_ids, dim = ids.numel(), weight.shape[1]
    out = weight.new_empty((num_ids, dim))
    block_d = min(next_power_of_2(max(dim, 1)), 512)
    blocks_d, rows = cdiv(dim, block_d), max(1, 4096 // block_d)
    if num_ids and dim:
        launch(
            _sequence_kernel, cdiv(num_ids, rows) * blocks_d, (weight, ids, out, num_ids, weight.shape[0], dim, blocks_d),
            (rows, block_d, check), num_warps=4, key=(weight.dtype, ids.dtype, dim, num_ids >> 31, weight.shape[0] >> 31),
            debug=check, sanitize_overflow=False,
        )  # fmt: skip
    return out


POOLED_ROWS = 8  # table rows in flight per program
LISTS = False  # the update by lists of runs of like length, which no GPU has run yet
BLOCK = 512  # positions per program of step 1
COMPACT_BLOCK = 1024  # and of step 3; four times as many for more than 2^23 ids, as every program reads the counts of all before it
PLAN_RUNS, PLAN_PROGRAMS = 1024, 528  # runs per program of step 4 at a time
RUNS, UNROLL = 2, 2  # short runs at a time, and gradient rows of each in flight
SHORT, SHARE = 16, 64  # gradient rows of the longest short run, and at least of a share of a longer one
SHARE_ITEMS = 8  # gradient rows of a share at a time
PROGRAMS = 3696  # of step 5: 28 on each of the 132 multiprocessors, as many as their registers hold
GRADIENTS = "evict_last"  # where in L2 gradient rows, read again and again, should stay


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
    published = torch.empty(cdiv(num_ids, BLOCK), dtype=torch.int32, device=ids.device)
    kinds = (weight.dtype, grad_out.dtype, ids.dtype, offsets.dtype if offsets is not None else None, weight.shape[0] >> 31)
    launch(
        _prepare_kernel, cdiv(num_ids, BLOCK),
        (ids, offsets, keys, bags, counts, published, num_ids, num_bags, _steps(num_bags), weight.shape[0], no_key),
        (BLOCK, offsets is not None, check), num_warps=4, key=kinds, debug=check, sanitize_overflow=False,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    seed_32 = 0 if seed is None else (seed + 2**31) % 2**32 - 2**31  # only the low 32 bits count
    scalars = (lr, eps, beta1, beta2, 1.0 - beta1**step, 1.0 - beta2**step, weight_decay)
    if LISTS:
        from kernels._embedding_lists import update_by_lists

        update_by_lists(
            weight, state1, state2, grad_out, keys, order, bags, offsets, no_key, scalars, seed_32, optimizer, mean, weight_decay != 0.0,
            seed is not None, kinds,
        )  # fmt: skip
        return
    starts, firsts, sources = (torch.empty(num_ids + 1, dtype=torch.int32, device=ids.device) for _ in range(3))
    rows = torch.empty_like(keys)
    block = COMPACT_BLOCK if num_ids <= 2**23 else 4 * COMPACT_BLOCK
    launch(
        _compact_kernel, cdiv(num_ids, block), (keys, order, bags, published, starts, rows, firsts, sources, counts, num_ids, no_key),
        (block, offsets is not None), num_warps=block // 256, key=kinds,
    )  # fmt: skip
    most_long = num_ids // (SHORT + 1) + 1
    most_shares = num_ids // SHARE + most_long
    long, arrived, shares = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in (6 * most_long, most_long, most_shares))
    sums = torch.empty((most_shares, dim), dtype=accumulate_dtype(weight.dtype), device=ids.device)
    programs = min(PLAN_PROGRAMS, cdiv(num_ids, PLAN_RUNS))
    launch(_plan_kernel, programs, (starts, rows, counts, long, arrived, shares, programs), (PLAN_RUNS, SHORT, SHARE), num_warps=4, key=kinds)
    block_d = next_power_of_2(dim)
    programs = min(PROGRAMS, cdiv(num_ids, RUNS))
    launch(
        _update_kernel, programs,
        (weight, state1, state2, grad_out, sources, starts, rows, firsts, offsets, counts, long, arrived, shares, sums,
         *scalars, seed_32, programs),
        (dim, RUNS, UNROLL, SHARE_ITEMS, SHORT, block_d, mean, GRADIENTS, optimizer, weight_decay != 0.0, seed is not None,
         _accumulator(weight.dtype)),
        num_warps=max(1, block_d // 128), key=kinds,  # a warp covers 128 columns with 16 bytes a thread, so that rows lie in registers
    )  # fmt: skip


def embedding_dense_grad(grad_out: Tensor, ids: Tensor, offsets: Tensor | None, num_rows: int, mean: bool) -> Tensor:
    """The dense gradient is an SGD step of size -1 on a table of zeros."""
    dtype = accumulate_dtype(grad_out.dtype)
    grad = torch.zeros((num_rows, grad_out.shape[1]), dtype=dtype, device=grad_out.device)
    embedding_update_(grad, None, None, grad_out, ids, offsets, "sgd", mean, -1.0, 0.0, 0.0, 0.0, 1, 0.0, None)
    return grad.to(grad_out.dtype)
