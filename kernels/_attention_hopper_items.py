"""Gluon forward kernel for Hopper over items of several query tiles: keys that fit shared memory are loaded once an item.

As `_attention_hopper`, with three differences. Short keys (as many as the stages hold) stay in shared memory for all tiles of an item. A helper
partition zeroes foreign values of a sequence's last tile, so that the producer is already loading the next item. Results leave by way of
the queries' shared memory, which leaves room for one more stage.

Triton 3.6's loop-aware CSE drops a loop-carried value that is used only as a bound of an inner loop (the first iteration's stays), so inner
loops count to a constant and test inside.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels._attention_hopper import M, _key_range, _weigh, _zero_tail
from kernels._attention_hopper_pair import _put


@gluon.jit
def _read_item(q_offsets, k_offsets, tiles, index, total, H, CAUSAL: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr):
    """Head, first row of the item's first tile, and the sequence's spans; harmless past the last item, so that it can be read ahead."""
    real = index < total
    head = index % H
    entry = index // H
    sequence = gl.load(tiles + 2 * entry, mask=real, other=0)
    item = gl.load(tiles + 2 * entry + 1, mask=real, other=0)
    q_start = gl.load(q_offsets + sequence).to(gl.int32)
    q_len = gl.load(q_offsets + sequence + 1).to(gl.int32) - q_start
    k_start = gl.load(k_offsets + sequence).to(gl.int32)
    k_len = gl.load(k_offsets + sequence + 1).to(gl.int32) - k_start
    if CAUSAL:
        item = (q_len + ROWS * TILES - 1) // (ROWS * TILES) - 1 - item
    return head, item * (ROWS * TILES), q_start, q_len, k_start, k_len


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_offsets, k_offsets, tiles, count, H, GROUP: gl.constexpr, q_head, k_head, v_head, window,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * M
    step = 0  # blocks of keys handed over so far
    done = 0  # tiles handed over so far
    total = gl.load(count) * H
    head_next, origin_next, q_start_next, q_len_next, k_start_next, k_len_next = _read_item(
        q_offsets, k_offsets, tiles, gl.program_id(0), total, H, CAUSAL, ROWS, TILES
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        head, origin, q_start, q_len, k_start, k_len = head_next, origin_next, q_start_next, q_len_next, k_start_next, k_len_next
        head_next, origin_next, q_start_next, q_len_next, k_start_next, k_len_next = _read_item(
            q_offsets, k_offsets, tiles, index + gl.num_programs(0), total, H, CAUSAL, ROWS, TILES
        )
        resident = (k_len <= STAGES * N) & (q_len > (ROWS if TILES > 1 else 2147483647))
        for tile in range(TILES):
            first = origin + tile * ROWS
            last = gl.minimum(first + ROWS, q_len)
            low, high, _a, _b = _key_range(first, last, k_len - q_len, k_len, window, CAUSAL, WINDOW, N)
            if (first < q_len) & (high > low):
                for part in gl.static_range(CONSUMERS):
                    slot = CONSUMERS * (done & 1) + part
                    mbarrier.wait(q_empty.index(slot), ((done >> 1) & 1) ^ 1)
                    mbarrier.expect(q_ready.index(slot), q_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(
                        q_desc, [q_start + first + part * M, head * q_head], q_ready.index(slot), q_smem.index(slot)
                    )
                done += 1
                if (tile == 0) | (not resident):
                    for start in range(low, high, N):
                        stage = step % STAGES
                        phase = (step // STAGES) & 1
                        mbarrier.wait(k_empty.index(stage), phase ^ 1)
                        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
                        row = k_start + start
                        tma.async_copy_global_to_shared(
                            k_desc, [row, (head // GROUP) * k_head], k_ready.index(stage), k_smem.index(stage)
                        )
                        mbarrier.wait(v_empty.index(stage), phase ^ 1)
                        column = (head // GROUP) * v_head
                        if start + N <= k_len:
                            mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
                            tma.async_copy_global_to_shared(v_desc, [row, column], v_ready.index(stage), v_smem.index(stage))
                        else:  # the helper zeroes foreign values and hands the tile over
                            mbarrier.expect(tail.index(stage), v_desc.block_type.nbytes)
                            tma.async_copy_global_to_shared(v_desc, [row, column], tail.index(stage), v_smem.index(stage))
                        step += 1


@gluon.jit
def _help(
    q_offsets, k_offsets, tiles, count, H, window, v_smem, v_ready, tail,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, TILES: gl.constexpr, HELPERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * M
    step = 0
    seen = 0  # bit s: parity of the tails that went through stage s
    total = gl.load(count) * H
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        _h, origin, _q, q_len, _k, k_len = _read_item(q_offsets, k_offsets, tiles, index, total, H, CAUSAL, ROWS, TILES)
        resident = (k_len <= STAGES * N) & (q_len > (ROWS if TILES > 1 else 2147483647))
        for tile in range(TILES):
            first = origin + tile * ROWS
            last = gl.minimum(first + ROWS, q_len)
            low, high, _a, _b = _key_range(first, last, k_len - q_len, k_len, window, CAUSAL, WINDOW, N)
            if (first >= q_len) | (resident & (tile > 0)):
                high = low
            blocks = (high - low + N - 1) // N
            step += blocks
            start = low + (blocks - 1) * N
            if (high > low) & (start + N > k_len):
                stage = (step - 1) % STAGES
                mbarrier.wait(tail.index(stage), (seen >> stage) & 1)
                seen = seen ^ (1 << stage)
                _zero_tail(v_smem.index(stage), k_len - start, N, D, HELPERS)
                mbarrier.arrive(v_ready.index(stage))


@gluon.jit
def _consume(
    out, lse, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, inv_divisor,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    PART: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = CONSUMERS * M
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = v_smem.dtype
    step = 0
    done = 0
    total = gl.load(count) * H
    empty_scores = gl.zeros([M, N], gl.float32, s_layout)
    # the next item's numbers are fetched while this one computes: two dependent reads would cost about a microsecond an item
    head_next, origin_next, q_start_next, q_len_next, _k, k_len_next = _read_item(
        q_offsets, k_offsets, tiles, gl.program_id(0), total, H, CAUSAL, ROWS, TILES
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        head, origin, q_start, q_len, k_len = head_next, origin_next, q_start_next, q_len_next, k_len_next
        head_next, origin_next, q_start_next, q_len_next, _k, k_len_next = _read_item(
            q_offsets, k_offsets, tiles, index + gl.num_programs(0), total, H, CAUSAL, ROWS, TILES
        )
        shift = k_len - q_len
        resident = (k_len <= STAGES * N) & (q_len > (ROWS if TILES > 1 else 2147483647))
        base = out + q_start.to(gl.int64) * (H * D) + head * D
        for tile in range(TILES):
            first = origin + tile * ROWS
            last = gl.minimum(first + ROWS, q_len)
            low, high, full_low, full_high = _key_range(first, last, shift, k_len, window, CAUSAL, WINDOW, N)
            begin = first + PART * M
            rows = begin + gl.arange(0, M, gl.SliceLayout(1, s_layout))
            if (first < q_len) & (high > low):
                release = (not resident) | (tile == TILES - 1) | (first + ROWS >= q_len)  # resident keys serve the item's other tiles too
                step_before = step
                slot = CONSUMERS * (done & 1) + PART
                mbarrier.wait(q_ready.index(slot), (done >> 1) & 1)
                if begin < q_len:
                    acc = gl.zeros([M, D], gl.float32, o_layout)
                    m = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
                    norm = gl.zeros([M], gl.float32, gl.SliceLayout(1, s_layout))
                    q = q_smem.index(slot)
                    stage = step % STAGES
                    mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
                    token = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), empty_scores, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(0, deps=[token])
                    mbarrier.arrive(k_empty.index(stage), pred=release)
                    p, m, norm, alpha = _weigh(s, m, norm, low, full_low, full_high, rows, k_len, shift, window, scale,
                                            KIND, APPROX, CAUSAL, WINDOW, N, s_layout)  # fmt: skip
                    p = gl.convert_layout(p.to(dtype), p_layout)
                    for start in range(low + N, high, N):
                        before = stage
                        before_phase = (step // STAGES) & 1
                        step += 1
                        stage = step % STAGES
                        mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
                        token = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), empty_scores, use_acc=False, is_async=True)
                        mbarrier.wait(v_ready.index(before), before_phase)
                        out_token = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
                        s = warpgroup_mma_wait(1, deps=[token])
                        mbarrier.arrive(k_empty.index(stage), pred=release)
                        p_next, m, norm, alpha = _weigh(s, m, norm, start, full_low, full_high, rows, k_len, shift, window, scale,
                                                     KIND, APPROX, CAUSAL, WINDOW, N, s_layout)  # fmt: skip
                        acc = warpgroup_mma_wait(0, deps=[out_token])
                        mbarrier.arrive(v_empty.index(before), pred=release)
                        if KIND == "softmax":
                            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
                        p = gl.convert_layout(p_next.to(dtype), p_layout)
                    mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
                    out_token = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[out_token])
                    mbarrier.arrive(v_empty.index(stage), pred=release)
                    step += 1
                    if KIND == "softmax":
                        factor = 1.0 / gl.where(norm == 0, 1.0, norm)
                        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
                        stats = lse + head.to(gl.int64) * total_q + q_start
                        gl.store(stats + rows, (m * scale + gl.log2(norm)) * 0.6931471805599453, mask=rows < q_len)
                    else:
                        acc = acc * inv_divisor
                    _put(q, base, begin, q_len, H * D, acc, D)
                else:  # no row of this consumer is left: only hand the buffers back
                    for _start in range(low, high, N):
                        stage = step % STAGES
                        mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
                        mbarrier.arrive(k_empty.index(stage), pred=release)
                        mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
                        mbarrier.arrive(v_empty.index(stage), pred=release)
                        step += 1
                mbarrier.arrive(q_empty.index(slot))
                done += 1
                if not release:
                    step = step_before
            elif begin < q_len:  # rows that keep no column
                if KIND == "softmax":
                    nowhere = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
                    gl.store(lse + head.to(gl.int64) * total_q + q_start + rows, nowhere, mask=rows < q_len)
                layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
                bare = begin + gl.arange(0, M, gl.SliceLayout(1, layout))
                pointers = base + bare[:, None] * (H * D) + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
                gl.store(pointers, gl.zeros([M, D], dtype, layout), mask=(bare < q_len)[:, None])


@gluon.jit(do_not_specialize=["total_q", "window"])
def hopper_items_kernel(
    q_desc, k_desc, v_desc, out, lse, q_offsets, k_offsets, tiles, count, total_q, H, GROUP: gl.constexpr,
    q_head, k_head, v_head, window, scale, inv_divisor,
    KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TILES: gl.constexpr,
    PRODUCERS: gl.constexpr, HELPERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over `tiles` (items of TILES tiles of CONSUMERS * M query rows) of every head. Scores scale by `scale` > 0 (base 2 for softmax).

    With TILES > 1 (no causal mask, no window) keys that fit the stages are loaded once for all tiles of an item.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, N, D], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2 * CONSUMERS):  # two tiles: the next tile's queries load while this tile's are in use
        mbarrier.init(q_ready.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
        mbarrier.init(tail.index(stage), count=1)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (out, lse, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, inv_divisor,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                        0, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, CONSUMERS, TILES)),
                (_consume, (out, lse, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, inv_divisor,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                        1, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, CONSUMERS, TILES)),
                (_produce, (q_desc, k_desc, v_desc, q_offsets, k_offsets, tiles, count, H, GROUP, q_head, k_head, v_head, window,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail,
                        CAUSAL, WINDOW, N, STAGES, CONSUMERS, TILES)),
                (_help, (q_offsets, k_offsets, tiles, count, H, window, v_smem, v_ready, tail,
                     CAUSAL, WINDOW, N, D, STAGES, CONSUMERS, TILES, HELPERS)),
            ],
            [4, PRODUCERS, HELPERS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (out, lse, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, inv_divisor,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                        0, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, CONSUMERS, TILES)),
                (_consume, (out, lse, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, inv_divisor,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                        1, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, CONSUMERS, TILES)),
                (_consume, (out, lse, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, inv_divisor,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                        2, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, CONSUMERS, TILES)),
                (_produce, (q_desc, k_desc, v_desc, q_offsets, k_offsets, tiles, count, H, GROUP, q_head, k_head, v_head, window,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail,
                        CAUSAL, WINDOW, N, STAGES, CONSUMERS, TILES)),
                (_help, (q_offsets, k_offsets, tiles, count, H, window, v_smem, v_ready, tail,
                     CAUSAL, WINDOW, N, D, STAGES, CONSUMERS, TILES, HELPERS)),
            ],
            [4, 4, PRODUCERS, HELPERS],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
