"""Embedding update after the sort, by lists of runs of like length: a candidate for `_embedding_triton`, whose `LISTS` turns it on.

There a program takes any runs that follow each other, and those of one gradient row wait for longer ones beside them. Here

    compact   each sorted position's gradient row, and runs listed by length: 1, up to FEW, up to SOME, more; no scan over the blocks
    plan      long runs: where each ends, cut into shares
    update    shares of the long runs as there; then the runs of the other lists, several of one list at a time

Every sum has a fixed order that depends on the run alone, so results repeat bit for bit; the order of the lists, which atomics decide, does not
matter, since each entry is a different table row. Interpreted on the CPU and compiled for sm_90; no GPU has run it yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._embedding_triton import _accumulator, _apply, _gradient_rows, _squares, _table_rows
from kernels._launch import cdiv, launch, next_power_of_2

COMPACT_BLOCK = 1024  # positions per program that lists runs
PLAN_RUNS, PLAN_PROGRAMS = 32, 528  # runs per program of the plan at a time
FEW, SOME = 4, 16  # gradient rows of the longest run of the second and of the third list
ONE_RUNS, FEW_RUNS = 4, 2  # runs of the first and of the second list at a time
SHARE = 64  # gradient rows of a longer run's share, at least
SHARE_ITEMS = 8  # gradient rows of a share at a time
PROGRAMS = 28  # of the update on each multiprocessor, if its registers hold them
GRADIENTS = "evict_last"  # where in L2 gradient rows, read again and again, should stay


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

    turn = programs - 1 - pid  # from the last program on: the first ones may have had a share more
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


def update_by_lists(
    weight: Tensor, state1: Tensor | None, state2: Tensor | None, grad_out: Tensor, keys: Tensor, order: Tensor, bags: Tensor,
    offsets: Tensor | None, no_key: int, scalars: tuple, seed: int, optimizer: str, mean: bool, decay: bool, rounded: bool, kinds: tuple,
) -> None:  # fmt: skip
    """Sum the gradient rows of every run of `keys` (sorted; `order` is where each was) and update its table row.

    bags: of each id where there are offsets. scalars: what the optimizer takes. kinds: key of the launches.
    """
    num_ids, dim = keys.numel(), weight.shape[1]
    counts = torch.zeros(8, dtype=torch.int32, device=keys.device)  # of the four lists, then of shares
    most = [num_ids, num_ids // 2, num_ids // (FEW + 1), num_ids // (SOME + 1)]
    most_shares = num_ids // SHARE + most[3]
    sources, *entries, plan, arrived, shares = _cut([num_ids, *most, 3 * most[3], most[3], most_shares], torch.int32, keys.device)
    lists = [part for pair in zip(entries, _cut(most, keys.dtype, keys.device), strict=True) for part in pair]  # entries and table rows of each
    launch(
        _compact_kernel, cdiv(num_ids, COMPACT_BLOCK), (keys, order, bags, sources, *lists, counts, num_ids, no_key),
        (COMPACT_BLOCK, offsets is not None, FEW, SOME), num_warps=COMPACT_BLOCK // 256, key=kinds,
    )  # fmt: skip
    sums = torch.empty((most_shares, dim), dtype=accumulate_dtype(weight.dtype), device=keys.device)
    programs = max(1, min(PLAN_PROGRAMS, cdiv(most[3], PLAN_RUNS)))
    launch(
        _plan_kernel, programs, (keys, *lists[6:], counts, plan, arrived, shares, num_ids, programs), (PLAN_RUNS, SHARE), num_warps=4, key=kinds
    )
    block_d = next_power_of_2(dim)
    programs = min(PROGRAMS * _num_sms(keys.device), cdiv(num_ids, ONE_RUNS))
    launch(
        _update_kernel, programs,
        (weight, state1, state2, grad_out, keys, sources, offsets, *lists, counts, plan, arrived, shares, sums, *scalars, seed, num_ids, programs),
        (dim, ONE_RUNS, FEW_RUNS, FEW, SOME, SHARE_ITEMS, block_d, mean, GRADIENTS, optimizer, decay, rounded, _accumulator(weight.dtype)),
        num_warps=max(1, block_d // 128), key=kinds,  # a warp covers 128 columns with 16 bytes a thread, so that rows lie in registers
    )  # fmt: skip


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _cut(sizes: list[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors of at least `sizes` numbers in one allocation, each at a multiple of 256 bytes."""
    unit = 256 // dtype.itemsize
    padded = [-(-max(size, 1) // unit) * unit for size in sizes]
    return list(torch.empty(sum(padded), dtype=dtype, device=device).split(padded))
