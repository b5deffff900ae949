"""Gluon forward kernel for Hopper where all keys of a sequence fit shared memory: tiles of 64 query rows are dealt out to three consumers in turn.

As `_attention_hopper`, with these differences. The keys of an item (up to TILES * CONSUMERS tiles of one sequence and head) are loaded once
and stay until its last tile is done. Tiles are numbered through all items of a program and tile n goes to consumer n % CONSUMERS, so that
short sequences leave no consumer without work: while one finishes an item's last tile, the others are at the next item. A helper partition
zeroes foreign values of a sequence's last block of keys. Results leave by way of the queries' shared memory.

A consumer holds its queries in registers, which halves what a product of 64 by 64 reads of shared memory, and waits for each product: the others
compute meanwhile. Blocks that overlap within a consumer made the code of three of them too large for the instruction cache: a quarter of all stalls
waited for instructions [H200].

Inner loops count to a constant and test inside because of Triton's loop-aware CSE (`_attention_hopper_queries`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels._attention_hopper import M, _copy_in, _hand_back, _key_range, _put, _put_zeros, _weigh, _zero_tail
from kernels._hopper_queue import allocate, draw, drawn, fetch, finish, publish, take, zero_unowned

CONSUMERS = gl.constexpr(3)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, out, offsets, num, records, count, counter, total_q, H, GROUP: gl.constexpr, q_head, k_head, v_head,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail, ring, item_ready, item_empty,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    step = 0  # blocks of keys handed over so far
    done = 0  # tiles handed over so far
    items = 0
    total = gl.load(count) * H
    index = gl.program_id(0)
    record = fetch(records, index, total, H, WARPS)
    ticket = draw(counter, WARPS)
    while index < total:
        head, origin, q_start, q_len, k_start, k_len = publish(record, items, ring, item_ready, item_empty, WARPS)
        items += 1
        index = drawn(ticket, WARPS)
        record = fetch(records, index, total, H, WARPS)
        ticket = draw(counter, WARPS)
        low, high, _a, _b = _key_range(origin, q_len, k_len - q_len, k_len, 0, False, False, N)
        for part in range(CONSUMERS * TILES):
            first = origin + part * M
            if (first < q_len) & (high > low):
                slot = done % SLOTS
                mbarrier.wait(q_empty.index(slot), ((done // SLOTS) & 1) ^ 1)
                _copy_in(q_desc, q_start + first, head * q_head, q_ready.index(slot), q_smem.index(slot))
                done += 1
            # after a round of tiles, one for each consumer: once if the keys stay
            last = (part % CONSUMERS == CONSUMERS - 1) | (first + M >= q_len)
            if (first < q_len) & last & ((part < CONSUMERS) | (k_len > STAGES * N)):
                for start in range(low, high, N):
                    stage = step % STAGES
                    phase = (step // STAGES) & 1
                    mbarrier.wait(k_empty.index(stage), phase ^ 1)
                    row = k_start + start
                    _copy_in(k_desc, row, (head // GROUP) * k_head, k_ready.index(stage), k_smem.index(stage))
                    mbarrier.wait(v_empty.index(stage), phase ^ 1)
                    column = (head // GROUP) * v_head
                    if start + N <= k_len:
                        _copy_in(v_desc, row, column, v_ready.index(stage), v_smem.index(stage))
                    else:  # the helper zeroes foreign values and hands the tile over
                        _copy_in(v_desc, row, column, tail.index(stage), v_smem.index(stage))
                    step += 1
    publish(record, items, ring, item_ready, item_empty, WARPS)
    finish(counter, WARPS)
    zero_unowned(out, offsets, num, total_q, H, D, WARPS)


@gluon.jit
def _help(
    v_smem, v_ready, tail, ring, item_ready, item_empty,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, HELPERS: gl.constexpr,
):  # fmt: skip
    step = 0
    seen = 0  # bit s: parity of the tails that went through stage s
    items = 0
    head, origin, _q, q_len, _k, k_len = take(items, ring, item_ready, item_empty, HELPERS)
    while head >= 0:
        blocks = (k_len + N - 1) // N
        start = (blocks - 1) * N
        for tile in range(TILES):
            if (origin + tile * (CONSUMERS * M) < q_len) & (k_len > 0) & ((tile == 0) | (k_len > STAGES * N)):
                step += blocks
                if start + N > k_len:
                    stage = (step - 1) % STAGES
                    mbarrier.wait(tail.index(stage), (seen >> stage) & 1)
                    seen = seen ^ (1 << stage)
                    _zero_tail(v_smem.index(stage), k_len - start, N, D, HELPERS)
                    mbarrier.arrive(v_ready.index(stage))
        items += 1
        head, origin, _q, q_len, _k, k_len = take(items, ring, item_ready, item_empty, HELPERS)


@gluon.jit
def _consume(
    out, lse, total_q, H, scale, inv_divisor,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, ring, item_ready, item_empty,
    PART: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = v_smem.dtype
    step = 0  # blocks of keys of the items before
    done = 0  # tiles of the items before
    items = 0
    empty_scores = gl.zeros([M, N], gl.float32, s_layout)
    head, origin, q_start, q_len, _k, k_len = take(items, ring, item_ready, item_empty, 4)
    while head >= 0:
        low, high, full_low, full_high = _key_range(origin, q_len, k_len - q_len, k_len, 0, False, False, N)
        base = out + q_start.to(gl.int64) * (H * D) + head * D
        stats = lse + head.to(gl.int64) * total_q + q_start
        here = gl.minimum((q_len - origin + M - 1) // M, CONSUMERS * TILES)  # tiles of the item
        if (high > low) & (here > 0):
            mine = (PART + CONSUMERS - done % CONSUMERS) % CONSUMERS  # the first of them that is this consumer's
            resident = k_len <= STAGES * N
            blocks = (high - low + N - 1) // N
            for tile in range(TILES):
                part = mine + tile * CONSUMERS
                if part < here:
                    begin = origin + part * M
                    rows = begin + gl.arange(0, M, gl.SliceLayout(1, s_layout))
                    release = (not resident) | (part + CONSUMERS >= here)  # nothing after this tile needs the keys here
                    slot = (done + part) % SLOTS
                    mbarrier.wait(q_ready.index(slot), ((done + part) // SLOTS) & 1)
                    acc = gl.zeros([M, D], gl.float32, o_layout)
                    m = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
                    norm = gl.zeros([M], gl.float32, gl.SliceLayout(1, s_layout))
                    q_tile = q_smem.index(slot)
                    q = q_tile.load(gl.DotOperandLayout(0, s_layout, 2))
                    block = step
                    for start in range(low, high, N):
                        stage = block % STAGES
                        phase = (block // STAGES) & 1
                        mbarrier.wait(k_ready.index(stage), phase)
                        token = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), empty_scores, use_acc=False, is_async=True)
                        s = warpgroup_mma_wait(0, deps=[token])
                        mbarrier.arrive(k_empty.index(stage), pred=release)
                        p, m, norm, alpha = _weigh(s, m, norm, start, full_low, full_high, rows, k_len, 0, 0, scale,
                                                KIND, APPROX, False, False, N, s_layout)  # fmt: skip
                        if KIND == "softmax":
                            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
                        p = gl.convert_layout(p.to(dtype), p_layout)
                        mbarrier.wait(v_ready.index(stage), phase)
                        out_token = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
                        acc = warpgroup_mma_wait(0, deps=[out_token])
                        mbarrier.arrive(v_empty.index(stage), pred=release)
                        block += 1
                    if KIND == "softmax":
                        factor = 1.0 / gl.where(norm == 0, 1.0, norm)
                        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
                        gl.store(stats + rows, (m * scale + gl.log2(norm)) * 0.6931471805599453, mask=rows < q_len)
                    else:
                        acc = acc * inv_divisor
                    _put(q_tile, base, begin, q_len, H * D, acc, D)
                    mbarrier.arrive(q_empty.index(slot))
                    if not resident:
                        step += blocks
                elif (tile * CONSUMERS < here) & ((tile == 0) | (not resident)):  # nothing to do in this round: only hand the buffers back
                    after = _hand_back(step, low, high, k_ready, k_empty, v_ready, v_empty, N, STAGES)
                    if not resident:
                        step = after
            if resident:
                step += blocks
            done += here
        else:  # rows that keep no column
            for tile in range(TILES):
                begin = origin + (PART + tile * CONSUMERS) * M
                if begin < q_len:
                    if KIND == "softmax":
                        rows = begin + gl.arange(0, M, gl.SliceLayout(1, s_layout))
                        nowhere = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
                        gl.store(stats + rows, nowhere, mask=rows < q_len)
                    _put_zeros(base, begin, q_len, H * D, dtype, D)
        items += 1
        head, origin, q_start, q_len, _k, k_len = take(items, ring, item_ready, item_empty, 4)


@gluon.jit(do_not_specialize=["num", "total_q"])
def hopper_units_kernel(
    q_desc, k_desc, v_desc, out, lse, offsets, num, records, count, counter, total_q, H, GROUP: gl.constexpr,
    q_head, k_head, v_head, scale, inv_divisor, KIND: gl.constexpr, APPROX: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
    PRODUCERS: gl.constexpr, HELPERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over `records` (`_tiles.ranked_tiles`, items of TILES * CONSUMERS * M query rows) of every head; zeroes the rows of `out` that
    none of the `num` sequences owns. Scores scale by `scale` > 0 (base 2 for softmax).

    Up to STAGES * N keys of a sequence stay for an item, more are read again for every CONSUMERS tiles; SLOTS >= CONSUMERS tiles are in flight.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, N, D], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring, item_ready, item_empty = allocate(CONSUMERS + 1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(q_ready.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
        mbarrier.init(tail.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out, lse, total_q, H, scale, inv_divisor,
                    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, ring, item_ready, item_empty,
                    0, KIND, APPROX, N, D, STAGES, TILES, SLOTS)),
            (_consume, (out, lse, total_q, H, scale, inv_divisor,
                    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, ring, item_ready, item_empty,
                    1, KIND, APPROX, N, D, STAGES, TILES, SLOTS)),
            (_consume, (out, lse, total_q, H, scale, inv_divisor,
                    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, ring, item_ready, item_empty,
                    2, KIND, APPROX, N, D, STAGES, TILES, SLOTS)),
            (_produce, (q_desc, k_desc, v_desc, out, offsets, num, records, count, counter, total_q, H, GROUP, q_head, k_head, v_head,
                    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail, ring, item_ready, item_empty,
                    N, D, STAGES, TILES, SLOTS, PRODUCERS)),
            (_help, (v_smem, v_ready, tail, ring, item_ready, item_empty, N, D, STAGES, TILES, HELPERS)),
        ],
        [4, 4, PRODUCERS, HELPERS],
        [160, 160, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
