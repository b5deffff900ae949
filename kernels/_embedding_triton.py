"""Triton kernels behind `kernels.embedding`.

Forward: a program a bag; several table rows are in flight at once. Backward with optimizer, without atomics on data and without a
host synchronisation:

    1. prepare   (key, bag) of every id; ids outside the offsets get a key past all tables
    2. sort      keys, stable (radix sort): equal ids become one run of sorted positions
    3. compact   each sorted position's gradient row, and runs listed by length: 1, up to FEW, up to SOME, more
    4. plan      long runs: where each ends, cut into shares
    5. update    each share is summed by one program, and whoever comes last sums the run's shares and updates its table row; then the runs of
                 the other lists are summed and updated, several at a time

Work is balanced whatever the skew: a run of n gradient rows is cut into sqrt(n) shares where n is large, so no program sums more than
that in turn, and runs that are worked on together are of one list. Every sum has a fixed order that depends on the run alone, so results
repeat bit for bit; the order of the lists, which atomics decide, does not matter, since each entry is a different table row.
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
    ids_ptr, offsets_ptr, keys_ptr, bags_ptr, counts_ptr, num_ids, num_bags, steps, num_rows, no_key,
    BLOCK: tl.constexpr, JAGGED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Sort key and bag of each id; empty lists."""
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
        tl.store(counts_ptr + tl.arange(0, 8), tl.zeros([8], tl.int32))


@triton.jit
def _same(keys_ptr, position, key, mask, num_ids):
    """Whether the key at `position` is `key`; no key is negative."""
    return tl.load(keys_ptr + position, mask=mask & (position < num_ids), other=-1) == key


@triton.jit
def _append(list_ptr, rows_ptr, count_ptr, mine, number, before, entry, key):
    """Add the entries that are `mine`, `number` in all, of which `before` stand ahead of each in this block, to a list of (entry, table row)."""
    place = tl.atomic_add(count_ptr, number, sem="relaxed") + before
    tl.store(list_ptr + place, entry, mask=mine)
    tl.store(rows_ptr + place, key, mask=mine)


@triton.jit(do_not_specialize=["num_ids", "no_key"])
def _compact_kernel(
    keys_ptr, order_ptr, bags_ptr, sources_ptr, one_ptr, one_rows_ptr, few_ptr, few_rows_ptr, some_ptr, some_rows_ptr, many_ptr, many_rows_ptr,
    counts_ptr, num_ids, no_key, BLOCK: tl.constexpr, JAGGED: tl.constexpr, FEW: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Gradient row of each sorted position, and runs listed by length: 1 (with its gradient row), up to FEW, up to SOME and more (with where they
    begin). The order of a list differs from run to run; its entries are different table rows."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    key = tl.load(keys_ptr + position, mask=inside, other=-1)
    begins = inside & (key != no_key) & ~_same(keys_ptr, position - 1, key, inside & (position > 0), num_ids)
    source = tl.load(order_ptr + position, mask=inside, other=0)
    if JAGGED:
        source = tl.load(bags_ptr + source, mask=inside, other=0)
    source = source.to(tl.int32)
    tl.store(sources_ptr + position, source, mask=inside)
    second = _same(keys_ptr, position + 1, key, begins, num_ids)
    past_few = _same(keys_ptr, position + FEW, key, begins, num_ids)
    past_some = _same(keys_ptr, position + SOME, key, begins, num_ids)
    one = begins & ~second
    few = begins & second & ~past_few
    some = begins & past_few & ~past_some
    many = begins & past_some
    # four counts of up to BLOCK < 2^15 in one number
    packed = one.to(tl.int64) + (few.to(tl.int64) << 16) + (some.to(tl.int64) << 32) + (many.to(tl.int64) << 48)
    before = tl.cumsum(packed, axis=0) - packed
    number = tl.sum(packed, axis=0)
    begin = position.to(tl.int32)
    _append(one_ptr, one_rows_ptr, counts_ptr, one, (number & 0xFFFF).to(tl.int32), (before & 0xFFFF).to(tl.int32), source, key)
    _append(few_ptr, few_rows_ptr, counts_ptr + 1, few, ((number >> 16) & 0xFFFF).to(tl.int32), ((before >> 16) & 0xFFFF).to(tl.int32), begin, key)
    _append(some_ptr, some_rows_ptr, counts_ptr + 2, some, ((number >> 32) & 0xFFFF).to(tl.int32), ((before >> 32) & 0xFFFF).to(tl.int32), begin, key)
    _append(many_ptr, many_rows_ptr, counts_ptr + 3, many, ((number >> 48) & 0xFFFF).to(tl.int32), ((before >> 48) & 0xFFFF).to(tl.int32), begin, key)


@triton.jit(do_not_specialize=["num_ids", "programs"])
def _plan_kernel(
    keys_ptr, many_ptr, many_rows_ptr, counts_ptr, plan_ptr, arrived_ptr, share_ptr, num_ids, programs, RUNS: tl.constexpr, SHARE: tl.constexpr
):
    """Length, share size and first share of each long run, and which of them each share belongs to.

    A share has about as many gradient rows as its run has shares, but at least SHARE: however long, a run takes no program long.
    """
    count = tl.load(counts_ptr + 3)
    for base in range(tl.program_id(0) * RUNS, count, programs * RUNS):
        item = base + tl.arange(0, RUNS)
        known = item < count
        begin = tl.load(many_ptr + item, mask=known, other=0)
        row = tl.load(many_rows_ptr + item, mask=known, other=0)
        last = tl.zeros([RUNS], tl.int32)  # the key so far after the run's begin is known to be the run's
        span = tl.where(known, num_ids - begin, 1)  # the key so far after that one is not
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


@triton.jit(do_not_specialize=["num_ids", "programs", "seed"])
def _update_kernel(
    weight_ptr, state1_ptr, state2_ptr, grad_ptr, keys_ptr, sources_ptr, offsets_ptr,
    one_ptr, one_rows_ptr, few_ptr, few_rows_ptr, some_ptr, some_rows_ptr, many_ptr, many_rows_ptr, counts_ptr, plan_ptr, arrived_ptr, share_ptr,
    sums_ptr, lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, num_ids, programs,
    dim: tl.constexpr, ONE_RUNS: tl.constexpr, FEW_RUNS: tl.constexpr, FEW: tl.constexpr, SOME: tl.constexpr, ITEMS: tl.constexpr,
    BLOCK_D: tl.constexpr, MEAN: tl.constexpr, POLICY: tl.constexpr, OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Shares of long runs first, one at a time: whoever finishes a run's last share adds them up and updates the row. Then the other lists, from
    the longest runs to the shortest, with what describes the next runs on its way. A list has runs of like length: no row waits for another's."""
    pid = tl.program_id(0)
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
        item = tl.load(share_ptr + share)
        begin = tl.load(many_ptr + item)
        length = tl.load(plan_ptr + 3 * item)
        size = tl.load(plan_ptr + 3 * item + 1)
        place = tl.load(plan_ptr + 3 * item + 2)
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
PLAN_RUNS, PLAN_PROGRAMS = 32, 528  # runs per program of step 4 at a time
FEW, SOME = 4, 16  # gradient rows of the longest run of the second and of the third list
ONE_RUNS, FEW_RUNS = 8, 4  # runs of the first and of the second list at a time
SHARE = 64  # gradient rows of a longer run's share, at least
SHARE_ITEMS = 8  # gradient rows of a share at a time
PROGRAMS = 28  # of step 5 on each multiprocessor, if its registers hold them
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
    counts = torch.empty(8, dtype=torch.int32, device=ids.device)  # of the four lists, then of shares
    num_bags = offsets.numel() - 1 if offsets is not None else 0
    offsets = offsets.contiguous() if offsets is not None else None
    kinds = (weight.dtype, grad_out.dtype, ids.dtype, offsets.dtype if offsets is not None else None, weight.shape[0] >> 31)
    launch(
        _prepare_kernel, cdiv(num_ids, BLOCK),
        (ids, offsets, keys, bags, counts, num_ids, num_bags, _steps(num_bags), weight.shape[0], no_key),
        (BLOCK, offsets is not None, check), num_warps=4, key=kinds, debug=check, sanitize_overflow=False,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    most = [num_ids, num_ids // 2, num_ids // (FEW + 1), num_ids // (SOME + 1)]
    most_shares = num_ids // SHARE + most[3]
    sources, *entries, plan, arrived, shares = _cut([num_ids, *most, 3 * most[3], most[3], most_shares], torch.int32, ids.device)
    lists = [part for pair in zip(entries, _cut(most, keys.dtype, ids.device), strict=True) for part in pair]  # entries and table rows of each
    launch(
        _compact_kernel, cdiv(num_ids, COMPACT_BLOCK), (keys, order, bags, sources, *lists, counts, num_ids, no_key),
        (COMPACT_BLOCK, offsets is not None, FEW, SOME), num_warps=COMPACT_BLOCK // 256, key=kinds,
    )  # fmt: skip
    sums = torch.empty((most_shares, dim), dtype=accumulate_dtype(weight.dtype), device=ids.device)
    programs = max(1, min(PLAN_PROGRAMS, cdiv(most[3], PLAN_RUNS)))
    launch(
        _plan_kernel, programs, (keys, *lists[6:], counts, plan, arrived, shares, num_ids, programs), (PLAN_RUNS, SHARE), num_warps=4, key=kinds
    )
    block_d = next_power_of_2(dim)
    programs = min(PROGRAMS * _num_sms(ids.device), cdiv(num_ids, ONE_RUNS))
    seed_32 = 0 if seed is None else (seed + 2**31) % 2**32 - 2**31  # only the low 32 bits count
    launch(
        _update_kernel, programs,
        (weight, state1, state2, grad_out, keys, sources, offsets, *lists, counts, plan, arrived, shares, sums,
         lr, eps, beta1, beta2, 1.0 - beta1**step, 1.0 - beta2**step, weight_decay, seed_32, num_ids, programs),
        (dim, ONE_RUNS, FEW_RUNS, FEW, SOME, SHARE_ITEMS, block_d, mean, GRADIENTS, optimizer, weight_decay != 0.0, seed is not None,
         _accumulator(weight.dtype)),
        num_warps=max(1, block_d // 128), key=kinds,  # a warp covers 128 columns with 16 bytes a thread, so that rows lie in registers
    )  # fmt: skip


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
