"""Triton kernels behind `kernels.embedding`.

Forward: a program a bag; several table rows are in flight at once. Backward with optimizer, without atomics on data and without a
host synchronisation:

    1. prepare   (key, bag) of every id; ids outside the offsets get a key past all tables
    2. sort      keys, stable (radix sort): equal ids become one run of sorted positions; then per sorted position one word with its
                 gradient row and whether its run begins or ends there, which spares step 3 a chain of three dependent loads
    3. runs      a program per tile of P sorted positions: gradient rows and table rows all in flight at once, a segmented scan adds the
                 gradients up, and every run inside the tile updates its table row. A run that comes in from the tile before leaves
                 its sum as the tile's `lead` share; one that goes on into the next leaves a `trail` share and enters a list.
    4. crossing  listed runs that end in the next tile, several at a time: trail + lead, then the update
    5. long      listed runs over more tiles, one at a time, many shares at once, then the update

Work is balanced whatever the skew: step 3 gives every program P gradient rows, and a run of n costs n / P shares in step 5.
Every sum has a fixed order that depends on the sorted positions alone, so results repeat bit for bit; the order of the lists does not
matter, since each entry is a different table row. Measured on an H200 (8 x 5 M x 128 fp32, 1.3 M ids): prepare 16 us, sort 95, mark 13,
runs 304, crossing 17, long 172. Step 3 issues about 100 instructions a gradient row, because every position, and not only the third of
them that ends a run, goes through the scan and the masked update; that, not bytes, is what it waits for.
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
_SOURCE = tl.constexpr(2**30 - 1)
_BEGINS = tl.constexpr(2**30)
_ENDS = tl.constexpr(-(2**31))


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
        tl.store(counts_ptr + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit(do_not_specialize=["num_ids", "no_key"])
def _mark_kernel(keys_ptr, order_ptr, bags_ptr, words_ptr, num_ids, no_key, BLOCK: tl.constexpr, JAGGED: tl.constexpr):
    """One word per sorted position: gradient row, bit 30 where a run begins, bit 31 (the sign) where it ends."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    key = tl.load(keys_ptr + position, mask=inside, other=no_key)
    previous = tl.load(keys_ptr + position - 1, mask=inside & (position > 0), other=-1)
    following = tl.load(keys_ptr + position + 1, mask=position + 1 < num_ids, other=no_key)
    source = tl.load(order_ptr + position, mask=inside, other=0)
    if JAGGED:
        source = tl.load(bags_ptr + source, mask=inside, other=0)
    word = source.to(tl.int32) | tl.where(key != previous, _BEGINS, 0) | tl.where(key != following, _ENDS, 0)
    tl.store(words_ptr + position, word, mask=inside)


@triton.jit
def _gradient_rows(grad_ptr, offsets_ptr, source, mask, dim, cols, MEAN: tl.constexpr, ACC: tl.constexpr):
    """Gradient rows `source (P,)`, zero where masked. They are read again and again: keep them in L2."""
    place = source.to(tl.int64)[:, None] * dim + cols[None, :]
    grads = tl.load(grad_ptr + place, mask=mask[:, None] & (cols < dim)[None, :], other=0.0, eviction_policy="evict_last").to(ACC)
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
def _segment_add(value_a, head_a, value_b, head_b):
    return tl.where(head_b != 0, value_b, value_a + value_b), head_a | head_b


@triton.jit
def _squares(state1_ptr, rows, mask, OPTIMIZER: tl.constexpr, ACC: tl.constexpr):
    """rowwise_adagrad's state of `rows (P,)`; zeros for the others. Loaded early: with the rows, not after them."""
    if OPTIMIZER == "rowwise_adagrad":
        return tl.load(state1_ptr + rows, mask=mask, other=0.0)
    return tl.zeros(rows.shape, ACC)


@triton.jit(do_not_specialize=["num_ids", "tiles", "no_key", "seed"])
def _runs_kernel(
    weight_ptr, state1_ptr, state2_ptr, grad_ptr, keys_ptr, words_ptr, offsets_ptr, lead_ptr, trail_ptr, lists_ptr, counts_ptr,
    num_ids, tiles, no_key, dim, lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed,
    P: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Step 3: tile of P sorted positions."""
    tile = tl.program_id(0)
    begin = tile * P
    lane = tl.arange(0, P)
    position = begin + lane
    cols = tl.arange(0, BLOCK_D)
    key = tl.load(keys_ptr + position, mask=position < num_ids, other=no_key).to(tl.int64)
    word = tl.load(words_ptr + position, mask=position < num_ids, other=-1)
    before = tl.load(keys_ptr + begin - 1, mask=begin > 0, other=-1).to(tl.int64)
    last = tl.load(keys_ptr + begin + P - 1, mask=begin + P - 1 < num_ids, other=no_key).to(tl.int64)
    following = tl.load(keys_ptr + begin + P, mask=begin + P < num_ids, other=no_key).to(tl.int64)
    beyond = tl.load(keys_ptr + begin + 2 * P, mask=begin + 2 * P < num_ids, other=no_key).to(tl.int64)
    used = key != no_key
    incoming = used & (key == before)
    ends = used & (word < 0)
    whole = ends & ~incoming  # the last position of a run that lies inside this tile
    grads = _gradient_rows(grad_ptr, offsets_ptr, word & _SOURCE, used, dim, cols, MEAN, ACC)
    old = _table_rows(weight_ptr, key, whole, dim, cols, ACC)
    squares = _squares(state1_ptr, key, whole, OPTIMIZER, ACC)

    # Adding 0 * old makes the sums need the table rows: without it ptxas moves their loads behind the scan, one more latency in turn.
    # Only the row itself can see it: its gradient becomes NaN where the row already holds Inf or NaN.
    grads = tl.fma(old, 0.0, grads)
    begins = (word & _BEGINS) != 0
    sums, _ = tl.associative_scan((grads, tl.broadcast_to(begins.to(tl.int32)[:, None], [P, BLOCK_D])), 0, _segment_add)
    _apply(
        weight_ptr, state1_ptr, state2_ptr, key, whole, sums, old, squares, dim, cols,
        lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
    )  # fmt: skip

    target = tl.cast(tile, tl.int64) * dim + cols
    if (tl.load(keys_ptr + begin).to(tl.int64) == before) & (before != no_key):
        share = tl.sum(tl.where((incoming & (ends | (lane == P - 1)))[:, None], sums, 0.0), axis=0)
        tl.store(lead_ptr + target, share, mask=cols < dim)
    if (last == following) & (last != before) & (last != no_key):
        share = tl.sum(tl.where((lane == P - 1)[:, None], sums, 0.0), axis=0)
        tl.store(trail_ptr + target, share, mask=cols < dim)
        kind = (beyond == last).to(tl.int32)  # 0: ends in the next tile, 1: goes on
        tl.store(lists_ptr + kind * tiles + tl.atomic_add(counts_ptr + kind, 1, sem="relaxed"), tile)


@triton.jit(do_not_specialize=["num_ids", "tiles", "no_key", "seed", "programs"])
def _crossing_kernel(
    weight_ptr, state1_ptr, state2_ptr, grad_ptr, keys_ptr, words_ptr, offsets_ptr, lead_ptr, trail_ptr, lists_ptr, counts_ptr,
    num_ids, tiles, no_key, dim, lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, programs,
    P: tl.constexpr, ITEMS: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Step 4: ITEMS listed runs at a time, each of which ends in the tile after its own."""
    cols = tl.arange(0, BLOCK_D)
    count = tl.load(counts_ptr)
    for base in range(tl.program_id(0) * ITEMS, count, programs * ITEMS):
        item = base + tl.arange(0, ITEMS)
        here = item < count
        owner = tl.load(lists_ptr + item, mask=here, other=0)
        key = tl.load(keys_ptr + owner * P + P - 1, mask=here, other=0).to(tl.int64)
        mask = here[:, None] & (cols < dim)[None, :]
        place = tl.cast(owner, tl.int64)[:, None] * dim + cols[None, :]
        trail = tl.load(trail_ptr + place, mask=mask, other=0.0)
        lead = tl.load(lead_ptr + place + dim, mask=mask, other=0.0)
        old = _table_rows(weight_ptr, key, here, dim, cols, ACC)
        squares = _squares(state1_ptr, key, here, OPTIMIZER, ACC)
        _apply(
            weight_ptr, state1_ptr, state2_ptr, key, here, trail + lead, old, squares, dim, cols,
            lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, OPTIMIZER, DECAY, ROUND, ACC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_ids", "tiles", "no_key", "seed", "programs"])
def _long_runs_kernel(
    weight_ptr, state1_ptr, state2_ptr, grad_ptr, keys_ptr, words_ptr, offsets_ptr, lead_ptr, trail_ptr, lists_ptr, counts_ptr,
    num_ids, tiles, no_key, dim, lr, eps, beta1, beta2, correction1, correction2, weight_decay, seed, programs,
    P: tl.constexpr, ITEMS: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr,
    OPTIMIZER: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Step 5: one listed run at a time, ITEMS shares at a time."""
    cols = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, ITEMS)
    count = tl.load(counts_ptr + 1)
    for item in range(tl.program_id(0), count, programs):
        owner = tl.load(lists_ptr + tiles + item)
        key = tl.load(keys_ptr + owner * P + P - 1).to(tl.int64)
        one = tl.full([1], 1, tl.int1)
        row = tl.full([1], 0, tl.int64) + key
        old = _table_rows(weight_ptr, row, one, dim, cols, ACC)
        squares = _squares(state1_ptr, row, one, OPTIMIZER, ACC)
        total = tl.load(trail_ptr + tl.cast(owner, tl.int64) * dim + cols, mask=cols < dim, other=0.0)
        first = owner + 1
        more = ITEMS
        while more == ITEMS:  # until a block of tiles is not wholly inside the run
            begin = (first + lane) * P
            inside = (begin < num_ids) & (tl.load(keys_ptr + begin, mask=begin < num_ids, other=no_key).to(tl.int64) == key)
            # the tiles of a run are consecutive: with their number as the mask, and not each tile's key, the loads below depend on
            # one value and are all in flight; otherwise the compiler chains them key, share, key, share (188 us instead of 30)
            more = tl.sum(inside.to(tl.int32), axis=0)
            place = tl.cast(first + lane, tl.int64)[:, None] * dim + cols[None, :]
            total += tl.sum(tl.load(lead_ptr + place, mask=(lane < more)[:, None] & (cols < dim)[None, :], other=0.0), axis=0)
            first += ITEMS
        _apply(
            weight_ptr, state1_ptr, state2_ptr, row, one, total[None, :], old, squares, dim, cols,
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
BLOCK = 512  # positions per program of steps 1 and 2
TILE = {"sgd": 8, "rowwise_adagrad": 8, "adagrad": 8, "adam": 8}  # sorted positions per program (P); 16 took 10 % longer on an H200
CROSSING_ITEMS = 8
LONG_ITEMS = 64
LONG_WARPS = 8
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
    counts = torch.empty(2, dtype=torch.int32, device=ids.device)
    num_bags = offsets.numel() - 1 if offsets is not None else 0
    offsets = offsets.contiguous() if offsets is not None else None
    _prepare_kernel[(triton.cdiv(num_ids, BLOCK),)](
        ids, offsets, keys, bags, counts, num_ids, num_bags, _steps(num_bags), weight.shape[0], no_key,
        BLOCK=BLOCK, JAGGED=offsets is not None, CHECK=check, num_warps=4, debug=check, sanitize_overflow=False,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    words = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    _mark_kernel[(triton.cdiv(num_ids, BLOCK),)](
        keys, order, bags, words, num_ids, no_key, BLOCK=BLOCK, JAGGED=offsets is not None, num_warps=4
    )
    tile = TILE[optimizer]
    tiles = triton.cdiv(num_ids, tile)
    block_d = triton.next_power_of_2(dim)
    lead, trail = torch.empty((2, tiles, dim), dtype=accumulate_dtype(weight.dtype), device=ids.device)
    lists = torch.empty((2, tiles), dtype=torch.int32, device=ids.device)
    arguments = (
        weight, state1, state2, grad_out, keys, words, offsets, lead, trail, lists, counts, num_ids, tiles, no_key, dim,
        lr, eps, beta1, beta2, 1.0 - beta1**step, 1.0 - beta2**step, weight_decay, seed or 0,
    )  # fmt: skip
    options = dict(
        P=tile, BLOCK_D=block_d, MEAN=mean, OPTIMIZER=optimizer,
        DECAY=weight_decay != 0.0, ROUND=seed is not None, ACC=_accumulator(weight.dtype),
    )  # fmt: skip
    warps = max(1, block_d // 128)  # a warp covers 128 columns with 16 bytes a thread, so that rows lie in registers
    _runs_kernel[(tiles,)](*arguments, **options, num_warps=warps)
    programs = min(PROGRAMS, tiles)
    _crossing_kernel[(programs,)](*arguments, programs, ITEMS=CROSSING_ITEMS, **options, num_warps=warps)
    _long_runs_kernel[(programs,)](*arguments, programs, ITEMS=LONG_ITEMS, **options, num_warps=max(LONG_WARPS, warps))


def embedding_dense_grad(grad_out: Tensor, ids: Tensor, offsets: Tensor | None, num_rows: int, mean: bool) -> Tensor:
    """The dense gradient is an SGD step of size -1 on a table of zeros."""
    dtype = accumulate_dtype(grad_out.dtype)
    grad = torch.zeros((num_rows, grad_out.shape[1]), dtype=dtype, device=grad_out.device)
    embedding_update_(grad, None, None, grad_out, ids, offsets, "sgd", mean, -1.0, 0.0, 0.0, 0.0, 1, 0.0, None)
    return grad.to(grad_out.dtype)
