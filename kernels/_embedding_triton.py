"""Triton kernels behind `kernels.embedding`.

Forward: a program a bag; several table rows are in flight at once. Backward with optimizer, without atomics on data and without a
host synchronisation:

    1. prepare   (key, gradient row) of every id; ids outside the offsets get a key past all tables
    2. sort      by key, stable (`kernels._embedding_sort`): equal ids become one run of sorted positions
    3. compact   runs listed by length: 1, up to FEW, up to SOME, more; lists of their own for each of some parts of the sorted positions
    4. plan      long runs: where each ends, cut into shares
    5. update    each share is summed by one program, and whoever comes last sums the run's shares and updates its table row; the runs of the other
                 lists are summed and updated, several at a time; one part after the other

Work is balanced whatever the skew: a run of n gradient rows is cut into sqrt(n) shares where n is large, so no program sums more than
that in turn, and runs that are worked on together are of one list. Every sum has a fixed order that depends on the run alone, so results
repeat bit for bit; the order of the lists, which atomics decide, does not matter, since each entry is a different table row.
Parts are for L2: all lists at once, gradients of most tables were in use, and with rows streaming past it was gradient rows that came from memory
again: 482 MB read where rows and gradients are 253 [H200, 8 tables of 5 M rows x 128 fp32, 164 k Zipf ids each, 2026-12-01].
Shapes: N ids, B bags, R table rows, D numbers a row.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._embedding_sort import sort_pairs
from kernels._launch import cdiv, launch, next_power_of_2
from kernels._rounding_triton import stochastic_round_bf16

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


@triton.jit
def _bags(offsets_ptr, positions, num_bags):
    """Largest b in [0, num_bags] with offsets[b] <= position, for few positions: 64 probes at a time, three rounds for 262,143 bags."""
    low = tl.zeros_like(positions)
    span = num_bags + 1
    lane = tl.arange(0, 64)
    while span > 1:
        step = (span + 63) // 64
        probe = low[:, None] + step * lane[None, :]
        mask = (lane * step < span)[None, :] & (probe <= num_bags)
        found = tl.load(offsets_ptr + probe, mask=mask, other=0).to(positions.dtype)
        hits = tl.sum((mask & (found <= positions[:, None])).to(tl.int32), axis=1)
        low += step * tl.maximum(hits - 1, 0)
        span = step
    return low


@triton.jit(do_not_specialize=["num_ids", "num_bags", "num_rows"])
def _prepare_kernel(
    ids_ptr, offsets_ptr, keys_ptr, bags_ptr, counts_ptr, num_ids, num_bags, num_rows,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr, JAGGED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Sort key and gradient row of each id; empty lists."""
    begin = tl.program_id(0) * BLOCK
    position = begin + tl.arange(0, BLOCK)
    inside = position < num_ids
    key = tl.load(ids_ptr + position, mask=inside, other=0).to(tl.int64)
    used = inside
    bag = position
    if JAGGED:
        # bags of the block's first and last position first: between them a few steps are left for each position
        bounds = _bags(offsets_ptr, begin + tl.arange(0, 2) * (BLOCK - 1), num_bags)
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
    if CHECK:
        tl.device_assert((key >= 0) & (key < num_rows) | ~used, "embedding: an id is outside the table")
    key = tl.where(used, key, num_rows)
    tl.store(bags_ptr + position, bag, mask=inside)
    tl.store(keys_ptr + position, key.to(keys_ptr.dtype.element_ty), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr + tl.arange(0, COUNTS), tl.zeros([COUNTS], tl.int32))


@triton.jit
def _same(keys_ptr, position, key, mask, num_ids):
    """Whether the key at `position` is `key`; no key is negative."""
    return tl.load(keys_ptr + position, mask=mask & (position < num_ids), other=-1) == key


@triton.jit
def _append(list_ptr, rows_ptr, place, which: tl.constexpr, packed, mine, entry, key):
    """Add the entries that are `mine` to a list of (entry, table row). place (4,): where this block's begin in each list; packed: 16 bits a list,
    how many stand ahead of each entry in this block."""
    first = tl.sum(tl.where(tl.arange(0, 4) == which, place, 0), axis=0)
    target = first + ((packed >> (16 * which)) & 0xFFFF).to(tl.int32)
    tl.store(list_ptr + target, entry, mask=mine)
    tl.store(rows_ptr + target, key, mask=mine)


@triton.jit(do_not_specialize=["num_ids", "no_key", "length", "most_few", "most_some", "most_many"])
def _compact_kernel(
    keys_ptr, sources_ptr, one_ptr, one_rows_ptr, few_ptr, few_rows_ptr, some_ptr, some_rows_ptr, many_ptr, many_rows_ptr,
    counts_ptr, num_ids, no_key, length, most_few, most_some, most_many, BLOCK: tl.constexpr, FEW: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Runs listed by length: 1 (with its gradient row), up to FEW, up to SOME and more (with where they begin), for each `length` sorted positions.
    The order of a list differs from run to run; its entries are different table rows."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(0) * BLOCK // length
    inside = position < num_ids
    key = tl.load(keys_ptr + position, mask=inside, other=-1)
    source = tl.load(sources_ptr + position, mask=inside, other=0)
    begins = inside & (key != no_key) & ~_same(keys_ptr, position - 1, key, inside & (position > 0), num_ids)
    second = _same(keys_ptr, position + 1, key, begins, num_ids)
    past_few = _same(keys_ptr, position + FEW, key, begins, num_ids)
    past_some = _same(keys_ptr, position + SOME, key, begins, num_ids)
    one = begins & ~second
    few = begins & second & ~past_few
    some = begins & past_few & ~past_some
    many = begins & past_some
    # four counts of up to BLOCK < 2^15 in one number, one trip to memory for the four lists
    packed = one.to(tl.int64) + (few.to(tl.int64) << 16) + (some.to(tl.int64) << 32) + (many.to(tl.int64) << 48)
    which = tl.arange(0, 4)
    number = ((tl.sum(packed, axis=0) >> (16 * which).to(tl.int64)) & 0xFFFF).to(tl.int32)
    place = tl.atomic_add(counts_ptr + 8 * part + which, number, sem="relaxed")
    before = tl.cumsum(packed, axis=0) - packed
    _append(one_ptr + part * length, one_rows_ptr + part * length, place, 0, before, one, source, key)
    _append(few_ptr + part * most_few, few_rows_ptr + part * most_few, place, 1, before, few, position, key)
    _append(some_ptr + part * most_some, some_rows_ptr + part * most_some, place, 2, before, some, position, key)
    _append(many_ptr + part * most_many, many_rows_ptr + part * most_many, place, 3, before, many, position, key)


@triton.jit(do_not_specialize=["num_ids", "programs", "most_many", "most_shares"])
def _plan_kernel(
    keys_ptr, many_ptr, many_rows_ptr, counts_ptr, plan_ptr, arrived_ptr, share_ptr, num_ids, programs, most_many, most_shares,
    RUNS: tl.constexpr, NEAR: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Length, share size and first share of each long run, and which of them each share belongs to.

    A share has about as many gradient rows as its run has shares, but at least SHARE: however long, a run takes no program long.
    """
    part = tl.program_id(0) // programs
    counts_ptr += 8 * part
    count = tl.load(counts_ptr + 3)
    for base in range(tl.program_id(0) % programs * RUNS, count, programs * RUNS):
        known = base + tl.arange(0, RUNS) < count
        item = part * most_many + base + tl.arange(0, RUNS)
        begin = tl.load(many_ptr + item, mask=known, other=0)
        row = tl.load(many_rows_ptr + item, mask=known, other=0)
        # the key `last` after the run's begin is known to be the run's, the one `span` after that not to be: most runs end within NEAR keys
        far = _same(keys_ptr, begin + NEAR, row, known, num_ids)
        last = tl.where(far, NEAR, 0)
        span = tl.where(far, num_ids - begin - NEAR, tl.where(known, NEAR, 1))
        while tl.max(span, axis=0) > 1:
            step = (span + 31) // 32
            probe = last[:, None] + step[:, None] * tl.arange(0, 32)[None, :]
            mask = known[:, None] & (probe < (last + span)[:, None])
            hits = tl.sum(_same(keys_ptr, begin[:, None] + probe, row[:, None], mask, num_ids).to(tl.int32), axis=1)
            end = last + span
            last = tl.where(known, last + step * (hits - 1), 0)
            span = tl.where(known, tl.minimum(step, end - last), 1)
        length = tl.where(known, last + 1, 0)
        size = tl.maximum(tl.sqrt(length.to(tl.float32)).to(tl.int32) // 8 * 8, SHARE)
        pieces = (length + size - 1) // size
        place = tl.atomic_add(counts_ptr + 4, tl.sum(pieces, axis=0), sem="relaxed") + tl.cumsum(pieces, axis=0) - pieces
        place += part * most_shares
        tl.store(arrived_ptr + item, tl.zeros_like(item), mask=known)
        tl.store(plan_ptr + 3 * item, length, mask=known)
        tl.store(plan_ptr + 3 * item + 1, size, mask=known)
        tl.store(plan_ptr + 3 * item + 2, place, mask=known)
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


@triton.jit
def _update_ones(
    weight_ptr, state1_ptr, state2_ptr, grad_ptr, offsets_ptr, one_ptr, one_rows_ptr, counts_ptr,
    lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, turn, programs,
    dim: tl.constexpr, ONE_RUNS: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr, POLICY: tl.constexpr, OPTIMIZER: tl.constexpr,
    DECAY: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """This program's share of the runs of one gradient row."""
    cols = tl.arange(0, BLOCK_D)
    count = tl.load(counts_ptr)
    run = turn * ONE_RUNS + tl.arange(0, ONE_RUNS)
    source = tl.load(one_ptr + run, mask=run < count, other=0)
    row = tl.load(one_rows_ptr + run, mask=run < count, other=0)
    for base in range(turn * ONE_RUNS, count, programs * ONE_RUNS):
        run = base + programs * ONE_RUNS + tl.arange(0, ONE_RUNS)
        next_source = tl.load(one_ptr + run, mask=run < count, other=0)
        next_row = tl.load(one_rows_ptr + run, mask=run < count, other=0)
        known = base + tl.arange(0, ONE_RUNS) < count
        where = row.to(tl.int64)
        old = _table_rows(weight_ptr, where, known, dim, cols, ACC)
        squares = _squares(state1_ptr, where, known, OPTIMIZER, ACC)
        total = _gradient_rows(grad_ptr, offsets_ptr, source, known, dim, cols, MEAN, ACC, POLICY)
        _apply(
            weight_ptr, state1_ptr, state2_ptr, where, known, total, old, squares, dim, cols,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip
        source, row = next_source, next_row


@triton.jit(do_not_specialize=["num_ids", "programs", "most_one", "most_few", "most_some", "most_many", "most_shares", "seed"])
def _update_kernel(
    weight_ptr, state1_ptr, state2_ptr, grad_ptr, keys_ptr, sources_ptr, offsets_ptr,
    one_ptr, one_rows_ptr, few_ptr, few_rows_ptr, some_ptr, some_rows_ptr, many_ptr, many_rows_ptr, counts_ptr, plan_ptr, arrived_ptr, share_ptr,
    sums_ptr, lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, num_ids, programs,
    most_one, most_few, most_some, most_many, most_shares,
    dim: tl.constexpr, ONE_RUNS: tl.constexpr, FEW_RUNS: tl.constexpr, FEW: tl.constexpr, SOME: tl.constexpr, ITEMS: tl.constexpr,
    BLOCK_D: tl.constexpr, MEAN: tl.constexpr, POLICY: tl.constexpr, OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Shares of long runs first, one at a time: whoever finishes a run's last share adds them up and updates the row. Then the other lists, from
    the longest runs to the shortest, with what describes the next runs on its way. A list has runs of like length: no row waits for another's.
    `programs` work on each part of the sorted ids, one part after the other, so that few tables' gradients are in use at a time."""
    part = tl.program_id(0) // programs
    pid = tl.program_id(0) % programs
    counts_ptr += 8 * part
    share_ptr += part * most_shares
    one_ptr += part * most_one
    one_rows_ptr += part * most_one
    few_ptr += part * most_few
    few_rows_ptr += part * most_few
    some_ptr += part * most_some
    some_rows_ptr += part * most_some
    cols = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, ITEMS)
    turn = programs - 1 - pid  # from the last program on: the first ones may have a share more
    early = ((pid ^ (pid >> 7)) & 1) == 0  # whose singles come first: they wait for memory, long runs for L2, and so both are at work at once
    if early:
        _update_ones(
            weight_ptr, state1_ptr, state2_ptr, grad_ptr, offsets_ptr, one_ptr, one_rows_ptr, counts_ptr,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, turn, programs,
            dim, ONE_RUNS, BLOCK_D, MEAN, POLICY, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip
    for share in range(pid, tl.load(counts_ptr + 4), programs):
        item = tl.load(share_ptr + share)  # counts runs over all parts, as `place` counts shares
        number = part * most_shares + share
        begin = tl.load(many_ptr + item)
        length = tl.load(plan_ptr + 3 * item)
        size = tl.load(plan_ptr + 3 * item + 1)
        place = tl.load(plan_ptr + 3 * item + 2)
        end = begin + tl.minimum((number - place + 1) * size, length)
        begin += (number - place) * size
        pieces = (length + size - 1) // size
        total = tl.zeros([ITEMS, BLOCK_D], ACC)
        source = tl.load(sources_ptr + begin + lane, mask=begin + lane < end, other=0)
        for first in range(begin, end, ITEMS):
            following = tl.load(sources_ptr + first + ITEMS + lane, mask=first + ITEMS + lane < end, other=0)
            total += _gradient_rows(grad_ptr, offsets_ptr, source, first + lane < end, dim, cols, MEAN, ACC, POLICY)
            source = following
        tl.store(sums_ptr + tl.cast(number, tl.int64) * dim + cols, tl.sum(total, axis=0), mask=cols < dim)
        tl.debug_barrier()  # all of the program's stores before the count that says so
        if tl.atomic_add(arrived_ptr + item, 1, sem="acq_rel") == pieces - 1:
            row = tl.load(many_rows_ptr + item + tl.zeros([1], tl.int32)).to(tl.int64)
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

    lane = tl.arange(0, SOME)
    count = tl.load(counts_ptr + 2)
    run = turn + tl.zeros([1], tl.int32)
    begin = tl.load(some_ptr + run, mask=run < count, other=0)
    row = tl.load(some_rows_ptr + run, mask=run < count, other=0)
    for index in range(turn, count, programs):
        run = index + programs + tl.zeros([1], tl.int32)
        next_begin = tl.load(some_ptr + run, mask=run < count, other=0)
        next_row = tl.load(some_rows_ptr + run, mask=run < count, other=0)
        known = tl.full([1], 1, tl.int1)
        place = tl.sum(begin, axis=0) + lane
        used = _same(keys_ptr, place, tl.sum(row, axis=0), lane < SOME, num_ids)
        source = tl.load(sources_ptr + place, mask=place < num_ids, other=0)
        where = row.to(tl.int64)
        old = _table_rows(weight_ptr, where, known, dim, cols, ACC)
        squares = _squares(state1_ptr, where, known, OPTIMIZER, ACC)
        total = _gradient_rows(grad_ptr, offsets_ptr, tl.where(used, source, 0), used, dim, cols, MEAN, ACC, POLICY)
        _apply(
            weight_ptr, state1_ptr, state2_ptr, where, known, tl.sum(total, axis=0)[None, :], old, squares, dim, cols,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip
        begin, row = next_begin, next_row

    count = tl.load(counts_ptr + 1)
    run = turn * FEW_RUNS + tl.arange(0, FEW_RUNS)
    begin = tl.load(few_ptr + run, mask=run < count, other=0)
    row = tl.load(few_rows_ptr + run, mask=run < count, other=0)
    for base in range(turn * FEW_RUNS, count, programs * FEW_RUNS):
        run = base + programs * FEW_RUNS + tl.arange(0, FEW_RUNS)
        next_begin = tl.load(few_ptr + run, mask=run < count, other=0)
        next_row = tl.load(few_rows_ptr + run, mask=run < count, other=0)
        known = base + tl.arange(0, FEW_RUNS) < count
        where = row.to(tl.int64)
        old = _table_rows(weight_ptr, where, known, dim, cols, ACC)
        squares = _squares(state1_ptr, where, known, OPTIMIZER, ACC)
        total = tl.zeros([FEW_RUNS, BLOCK_D], ACC)
        for step in tl.static_range(FEW):
            used = _same(keys_ptr, begin + step, row, known, num_ids)
            source = tl.load(sources_ptr + begin + step, mask=known & (begin + step < num_ids), other=0)
            total += _gradient_rows(grad_ptr, offsets_ptr, tl.where(used, source, 0), used, dim, cols, MEAN, ACC, POLICY)
        _apply(
            weight_ptr, state1_ptr, state2_ptr, where, known, total, old, squares, dim, cols,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip
        begin, row = next_begin, next_row

    if not early:
        _update_ones(
            weight_ptr, state1_ptr, state2_ptr, grad_ptr, offsets_ptr, one_ptr, one_rows_ptr, counts_ptr,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, turn, programs,
            dim, ONE_RUNS, BLOCK_D, MEAN, POLICY, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip


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
BLOCK = 512  # positions per program of step 1
COMPACT_BLOCK = 1024  # and of step 3
# Gradients in use at a time, if ids come table by table. Whole update of 8 tables: one part took 40 us more than eight, four 5 to 8 more, sixteen and
# thirty-two as long.
PART_BYTES = 4 << 20
PART_IDS, PARTS = 1 << 15, 32  # ids of a part at least, parts at most
PLAN_PROGRAMS = 1056  # of step 4
PLAN_RUNS, NEAR = 8, 1024  # runs per program of step 4 at a time, and where most of them end
FEW, SOME = 4, 16  # gradient rows of the longest run of the second and of the third list
ONE_RUNS, FEW_RUNS = 8, 4  # runs of the first and of the second list at a time
SHARE = 64  # gradient rows of a longer run's share, at least
SHARE_ITEMS = 8  # gradient rows of a share at a time
PROGRAMS = 3168  # of step 5 for each part, at most: whole update with 1,056 319 to 324 us, with 2,112 319, with 3,168 316
REGISTERS = 128  # a thread of step 5, for 16 warps a multiprocessor: 136 without a limit took 12 us more, 112 4 more
GRADIENTS = "evict_last"  # where in L2 gradient rows, read again and again, should stay


def embedding_update_(
    weight: Tensor, state1: Tensor | None, state2: Tensor | None, grad_out: Tensor, ids: Tensor, offsets: Tensor | None,
    optimizer: str, mean: bool, lr: float, eps: float, beta1: float, beta2: float, step: int, weight_decay: float, seed: int | None,
    *, check: bool = True,
) -> None:  # fmt: skip
    num_ids, (num_rows, dim) = ids.numel(), weight.shape
    if num_ids == 0 or dim == 0:
        return
    if max(grad_out.shape[0], num_ids) > _MAX_SOURCES:
        raise ValueError(f"ids: {num_ids} ids and {grad_out.shape[0]} gradient rows, at most {_MAX_SOURCES} of each in one update")
    grad_out, ids = grad_out.contiguous(), ids.contiguous()
    keys = torch.empty(num_ids, dtype=torch.int32 if num_rows < 2**31 else torch.int64, device=ids.device)
    sources = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    num_bags = offsets.numel() - 1 if offsets is not None else 0
    offsets = offsets.contiguous() if offsets is not None else None
    kinds = (weight.dtype, grad_out.dtype, ids.dtype, offsets.dtype if offsets is not None else None, num_rows >> 31)
    parts = max(1, min(PARTS, num_ids // PART_IDS, cdiv(grad_out.nbytes, PART_BYTES)))
    length = cdiv(cdiv(num_ids, parts), COMPACT_BLOCK) * COMPACT_BLOCK
    counts = torch.empty(8 * PARTS, dtype=torch.int32, device=ids.device)  # of the four lists, then of shares, for each part
    launch(
        _prepare_kernel, cdiv(num_ids, BLOCK), (ids, offsets, keys, sources, counts, num_ids, num_bags, num_rows),
        (BLOCK, 8 * PARTS, offsets is not None, check), num_warps=4, key=kinds, debug=check, sanitize_overflow=False,
    )  # fmt: skip
    keys, sources = sort_pairs(keys, sources, num_rows)
    most = [length, length // 2, cdiv(length, FEW + 1), cdiv(length, SOME + 1)]  # of each part; a run begins in one part and may end in another
    most_shares = length // SHARE + most[3] + math.isqrt(num_ids) + 2 * SHARE
    *entries, plan, arrived, shares = _cut([parts * n for n in (*most, 3 * most[3], most[3], most_shares)], torch.int32, ids.device)
    lists = [part for pair in zip(entries, _cut([parts * n for n in most], keys.dtype, ids.device), strict=True) for part in pair]
    launch(
        _compact_kernel, cdiv(num_ids, COMPACT_BLOCK), (keys, sources, *lists, counts, num_ids, num_rows, *most), (COMPACT_BLOCK, FEW, SOME),
        num_warps=COMPACT_BLOCK // 256, key=kinds,
    )  # fmt: skip
    sums = torch.empty((parts * most_shares, dim), dtype=accumulate_dtype(weight.dtype), device=ids.device)
    programs = max(1, min(cdiv(PLAN_PROGRAMS, parts), cdiv(most[3], PLAN_RUNS)))
    launch(
        _plan_kernel, parts * programs, (keys, *lists[6:], counts, plan, arrived, shares, num_ids, programs, most[3], most_shares),
        (PLAN_RUNS, NEAR, SHARE), num_warps=1, key=kinds,
    )  # fmt: skip
    block_d = next_power_of_2(dim)
    warps = max(1, block_d // 128)  # a warp covers 128 columns with 16 bytes a thread, so that rows lie in registers
    programs = min(PROGRAMS, cdiv(length, ONE_RUNS))
    seed_32 = 0 if seed is None else (seed + 2**31) % 2**32 - 2**31  # only the low 32 bits count
    launch(
        _update_kernel, parts * programs,
        (weight, state1, state2, grad_out, keys, sources, offsets, *lists, counts, plan, arrived, shares, sums,
         lr, eps, beta1, beta2, 1.0 - beta1**step, 1.0 - beta2**step, weight_decay, seed_32, num_ids, programs, *most, most_shares),
        (dim, ONE_RUNS, FEW_RUNS, FEW, SOME, SHARE_ITEMS, block_d, mean, GRADIENTS, optimizer, weight_decay != 0.0, seed is not None,
         _accumulator(weight.dtype)),
        num_warps=warps, key=kinds, maxnreg=REGISTERS if warps <= 16 else None,  # a multiprocessor has 65,536 registers
    )  # fmt: skip


def _cut(sizes: list[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors of at least `sizes` numbers in one allocation, each at a multiple of 256 bytes."""
    unit = 256 // dtype.itemsize
    padded = [-(-max(size, 1) // unit) * unit for size in sizes]
    return list(torch.empty(sum(padded), dtype=dtype, device=device).split(padded))


def embedding_dense_grad(grad_out: Tensor, ids: Tensor, offsets: Tensor | None, num_rows: int, mean: bool) -> Tensor:
    """The dense gradient is an SGD step of size -1 on a table of zeros."""
    dtype = accumulate_dtype(grad_out.dtype)
    grad = torch.zeros((num_rows, grad_out.shape[1]), dtype=dtype, device=grad_out.device)
    embedding_update_(grad, None, None, grad_out, ids, offsets, "sgd", mean, -1.0, 0.0, 0.0, 0.0, 1, 0.0, None)
    return grad.to(grad_out.dtype)
