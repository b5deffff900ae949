"""Gluon backward kernels for Hopper without atomics or float32 scratch: one for dQ, one for dK and dV, each recomputing the scores.

Seven products instead of five, but each kernel is built like the forward: a producer warp streams tiles by TMA, two consumer warp
groups keep their accumulators in registers, nothing is exchanged between them, every result is written once and repeats bitwise.

    dQ kernel, 64 queries a consumer:   S = Q K^T      dP = dO V^T      dQ += dS K
    dK/dV kernel, 64 keys a consumer:   S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

Weights and score gradients are register operands of the products that follow. A helper partition does what would stall the producer:
it zeroes foreign rows of a sequence's last tile (a neighbour's NaN must not meet our zeros) and fetches the row statistics.
Foreign rows matter only where they are summed over: K in the dQ kernel, Q and dO in the dK/dV kernel.

Triton 3.6's loop-aware CSE drops a loop-carried value that is used only as a bound of an inner loop (the first iteration's stays). Where a mask by
position bounds the helper's loop, nothing else would use the block's first key and the number of keys, and it once waited for tiles that never
came; hence one use of both that means nothing.

A barrier that is initialised is used, in every variant of a kernel: the compiler gives the memory of an unused one to other data without invalidating
it, and when the GPU comes back to this kernel from another process, the barrier's state lands on those data. The backward before these kernels, whose
barriers of the row statistics lay under the scratch of its results except for softmax, had wrong gradients, NaN among them, in 42 of 300 runs beside
other processes, and never alone [H200]. `tests/kernels/test_hopper_compiled.py` looks for both in what is compiled.
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

from kernels._attention_hopper import M, _activate_both, _copy_in, _hand_back, _kept, _key_range, _put_zeros, _read_tile, _row_range, _zero_tail
from kernels._attention_hopper import _select as _select_keys

KEYS = gl.constexpr(128)  # keys of a program's block in the dK/dV kernel, 64 per consumer
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _select_rows(x, start, columns, k_len, shift, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr):
    """Keep the (key, query) pairs that the mask keeps; the others become 0."""
    rows = start + gl.arange(0, M, gl.SliceLayout(0, LAYOUT))
    keep = (columns < k_len)[:, None] & (rows >= 0)[None, :]
    if CAUSAL or WINDOW:
        keep = _kept(keep, rows[None, :] + shift - columns[:, None], window, CAUSAL, WINDOW)
    return gl.where(keep, x, 0.0)


@gluon.jit
def _put(tile, base, rows, length, stride, x, D: gl.constexpr):
    """Write 64 rows of registers to memory by way of a `(64, D)` shared tile that nobody else uses any more."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    gl.thread_barrier()
    tile.store(x.to(tile.dtype))
    value = tile.load(layout)
    rows = rows + gl.arange(0, M, gl.SliceLayout(1, layout))
    pointers = base + rows[:, None] * stride + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    gl.store(pointers, value, mask=(rows < length)[:, None])
    fence_async_shared()
    gl.thread_barrier()


# ---------------------------------------------------------------- dQ


@gluon.jit
def _dq_produce(
    q_desc, do_desc, o_desc, k_desc, v_desc, q_offsets, k_offsets, tiles, count, H, GROUP: gl.constexpr,
    q_head, do_head, o_head, k_head, v_head, window,
    q_smem, do_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail,
    KIND: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    step = 0
    done = 0
    size: gl.constexpr = q_desc.block_type.nbytes * (3 if KIND == "softmax" else 2)
    total = gl.load(count) * H
    head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next = _read_tile(
        q_offsets, k_offsets, tiles, gl.program_id(0), total, H, CAUSAL
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        head, first, q_start, q_len, k_start, k_len = head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next
        head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next = _read_tile(
            q_offsets, k_offsets, tiles, index + gl.num_programs(0), total, H, CAUSAL
        )
        last = gl.minimum(first + 2 * M, q_len)
        low, high, _a, _b = _key_range(first, last, k_len - q_len, k_len, window, CAUSAL, WINDOW, N)
        if high > low:
            for half in gl.static_range(2):
                slot = 2 * (done % SLOTS) + half
                mbarrier.wait(q_empty.index(slot), ((done // SLOTS) & 1) ^ 1)
                mbarrier.expect(q_ready.index(slot), size)
                row = q_start + first + half * M
                tma.async_copy_global_to_shared(q_desc, [row, head * q_head], q_ready.index(slot), q_smem.index(slot))
                tma.async_copy_global_to_shared(do_desc, [row, head * do_head], q_ready.index(slot), do_smem.index(slot))
                if KIND == "softmax":
                    tma.async_copy_global_to_shared(o_desc, [row, head * o_head], q_ready.index(slot), o_smem.index(slot))
            done += 1
            for start in range(low, high, N):
                stage = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                row = k_start + start
                column = (head // GROUP) * k_head
                if start + N <= k_len:
                    _copy_in(k_desc, row, column, k_ready.index(stage), k_smem.index(stage))
                else:  # the helper zeroes foreign keys and hands the tile over
                    _copy_in(k_desc, row, column, tail.index(stage), k_smem.index(stage))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                _copy_in(v_desc, row, (head // GROUP) * v_head, v_ready.index(stage), v_smem.index(stage))
                step += 1


@gluon.jit
def _dq_help(
    q_offsets, k_offsets, tiles, count, H, window, k_smem, k_ready, tail,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HELPERS: gl.constexpr,
):  # fmt: skip
    step = 0
    seen = 0  # bit s: parity of the tails that went through stage s
    total = gl.load(count) * H
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        _h, first, _q, q_len, _k, k_len = _read_tile(q_offsets, k_offsets, tiles, index, total, H, CAUSAL)
        last = gl.minimum(first + 2 * M, q_len)
        low, high, _a, _b = _key_range(first, last, k_len - q_len, k_len, window, CAUSAL, WINDOW, N)
        blocks = (high - low + N - 1) // N
        step += blocks
        start = low + (blocks - 1) * N
        if (high > low) & (start + N > k_len):
            stage = (step - 1) % STAGES
            mbarrier.wait(tail.index(stage), (seen >> stage) & 1)
            seen = seen ^ (1 << stage)
            _zero_tail(k_smem.index(stage), k_len - start, N, D, HELPERS)
            mbarrier.arrive(k_ready.index(stage))


@gluon.jit
def _dq_scores(s, row_lse, scale, KIND: gl.constexpr, APPROX: gl.constexpr):
    """By what a weight's gradient is multiplied to become the score's: the weight itself for softmax, else the slope."""
    if KIND == "softmax":
        return gl.exp2(s * scale - row_lse[:, None])
    else:
        _p, slope = _activate_both(s * scale, KIND, APPROX)
        return slope


@gluon.jit
def _dq_gradient(slope, dp, row_delta, start, full_low, full_high, rows, k_len, shift, window,
                 KIND: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    if KIND == "softmax":
        dp = dp - row_delta[:, None]
    ds = slope * dp
    if (start < full_low) | (start + N > full_high):
        ds = _select_keys(ds, start, rows, k_len, shift, window, 0.0, CAUSAL, WINDOW, N, LAYOUT)
    return ds


@gluon.jit
def _row_delta(o, do, D: gl.constexpr, LAYOUT: gl.constexpr):
    """sum_d dO O of 64 rows in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    product = o.load(layout).to(gl.float32) * do.load(layout).to(gl.float32)
    return gl.convert_layout(gl.sum(product, axis=1), LAYOUT)


@gluon.jit
def _dq_consume(
    dq, lse, delta, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, dq_scale,
    q_smem, do_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    HALF: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = k_smem.dtype
    step = 0
    done = 0
    total = gl.load(count) * H
    no_scores = gl.zeros([M, N], gl.float32, s_layout)
    head_next, first_next, q_start_next, q_len_next, _k, k_len_next = _read_tile(
        q_offsets, k_offsets, tiles, gl.program_id(0), total, H, CAUSAL
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        head, first, q_start, q_len, k_len = head_next, first_next, q_start_next, q_len_next, k_len_next
        head_next, first_next, q_start_next, q_len_next, _k, k_len_next = _read_tile(
            q_offsets, k_offsets, tiles, index + gl.num_programs(0), total, H, CAUSAL
        )
        last = gl.minimum(first + 2 * M, q_len)
        shift = k_len - q_len
        low, high, full_low, full_high = _key_range(first, last, shift, k_len, window, CAUSAL, WINDOW, N)
        begin = first + HALF * M
        rows = begin + gl.arange(0, M, gl.SliceLayout(1, s_layout))
        base = dq + q_start.to(gl.int64) * (H * D) + head * D
        if high > low:
            slot = 2 * (done % SLOTS) + HALF
            row_lse = gl.zeros([M], gl.float32, gl.SliceLayout(1, s_layout))
            row_delta = row_lse
            if KIND == "softmax":
                stats = head.to(gl.int64) * total_q + q_start
                row_lse = gl.load(lse + stats + rows, mask=rows < q_len, other=float("inf")) * LOG2E
            mbarrier.wait(q_ready.index(slot), (done // SLOTS) & 1)
            if begin < q_len:
                q = q_smem.index(slot)
                do = do_smem.index(slot)
                acc = gl.zeros([M, D], gl.float32, o_layout)
                stage = step % STAGES
                mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
                s_token = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
                dp_token = warpgroup_mma(do, v_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                if KIND == "softmax":
                    row_delta = _row_delta(o_smem.index(slot), do, D, gl.SliceLayout(1, s_layout))
                    gl.store(delta + head.to(gl.int64) * total_q + q_start + rows, row_delta, mask=rows < q_len)
                s = warpgroup_mma_wait(1, deps=[s_token])
                slope = _dq_scores(s, row_lse, scale, KIND, APPROX)
                dp = warpgroup_mma_wait(0, deps=[dp_token])
                mbarrier.arrive(v_empty.index(stage))
                ds = _dq_gradient(slope, dp, row_delta, low, full_low, full_high, rows, k_len, shift, window,
                                  KIND, CAUSAL, WINDOW, N, s_layout)  # fmt: skip
                ds = gl.convert_layout(ds.to(dtype), p_layout)
                for start in range(low + N, high, N):
                    before = stage
                    step += 1
                    stage = step % STAGES
                    phase = (step // STAGES) & 1
                    mbarrier.wait(k_ready.index(stage), phase)
                    s_token = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                    mbarrier.wait(v_ready.index(stage), phase)
                    dp_token = warpgroup_mma(do, v_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                    dq_token = warpgroup_mma(ds, k_smem.index(before), acc, is_async=True)
                    s = warpgroup_mma_wait(2, deps=[s_token])
                    slope = _dq_scores(s, row_lse, scale, KIND, APPROX)
                    dp = warpgroup_mma_wait(1, deps=[dp_token])
                    mbarrier.arrive(v_empty.index(stage))
                    ds_next = _dq_gradient(slope, dp, row_delta, start, full_low, full_high, rows, k_len, shift, window,
                                           KIND, CAUSAL, WINDOW, N, s_layout)  # fmt: skip
                    acc = warpgroup_mma_wait(0, deps=[dq_token])
                    mbarrier.arrive(k_empty.index(before))
                    ds = gl.convert_layout(ds_next.to(dtype), p_layout)
                dq_token = warpgroup_mma(ds, k_smem.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[dq_token])
                mbarrier.arrive(k_empty.index(stage))
                step += 1
                _put(q, base, begin, q_len, H * D, acc * dq_scale, D)
            else:  # no row of this consumer is left: only hand the buffers back
                step = _hand_back(step, low, high, k_ready, k_empty, v_ready, v_empty, N, STAGES)
            mbarrier.arrive(q_empty.index(slot))
            done += 1
        elif begin < q_len:  # rows that keep no column
            _put_zeros(base, begin, q_len, H * D, dtype, D)


@gluon.jit(do_not_specialize=["total_q", "window"])
def hopper_dq_kernel(
    q_desc, do_desc, o_desc, k_desc, v_desc, dq, lse, delta, q_offsets, k_offsets, tiles, count, total_q, H, GROUP: gl.constexpr,
    q_head, do_head, o_head, k_head, v_head, window, scale, dq_scale,
    KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    PRODUCERS: gl.constexpr, HELPERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over `tiles` (2M query rows each) of every head; SLOTS tiles of Q, dO and O are in flight. Softmax: writes delta too."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * SLOTS, M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * SLOTS, M, D], q_desc.layout)
    o_smem = do_smem
    if KIND == "softmax":
        o_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * SLOTS, M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, N, D], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2 * SLOTS):
        mbarrier.init(q_ready.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
        mbarrier.init(tail.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_dq_consume, (dq, lse, delta, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, dq_scale,
                           q_smem, do_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                           0, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, SLOTS)),
            (_dq_consume, (dq, lse, delta, q_offsets, k_offsets, tiles, count, total_q, H, window, scale, dq_scale,
                           q_smem, do_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                           1, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, SLOTS)),
            (_dq_produce, (q_desc, do_desc, o_desc, k_desc, v_desc, q_offsets, k_offsets, tiles, count, H, GROUP,
                           q_head, do_head, o_head, k_head, v_head, window,
                           q_smem, do_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail,
                           KIND, CAUSAL, WINDOW, N, STAGES, SLOTS)),
            (_dq_help, (q_offsets, k_offsets, tiles, count, H, window, k_smem, k_ready, tail, CAUSAL, WINDOW, N, D, STAGES, HELPERS)),
        ],
        [4, PRODUCERS, HELPERS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------- dK and dV


@gluon.jit
def _read_block(q_offsets, k_offsets, items, index, total, kv_heads):
    """K/V head, first key of the block and the sequence's spans; harmless past the last block, so that it can be read ahead."""
    real = index < total
    entry = index // kv_heads
    sequence = gl.load(items + 2 * entry, mask=real, other=0)
    first = gl.load(items + 2 * entry + 1, mask=real, other=0) * KEYS
    q_start = gl.load(q_offsets + sequence).to(gl.int32)
    q_len = gl.load(q_offsets + sequence + 1).to(gl.int32) - q_start
    k_start = gl.load(k_offsets + sequence).to(gl.int32)
    k_len = gl.load(k_offsets + sequence + 1).to(gl.int32) - k_start
    return index % kv_heads, first, q_start, q_len, k_start, k_len


@gluon.jit
def _kv_produce(
    q_desc, do_desc, k_desc, v_desc, q_offsets, k_offsets, items, count, H, GROUP: gl.constexpr, q_head, do_head, k_head, v_head, window,
    k_smem, v_smem, q_smem, do_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, tail,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    kv_heads = H // GROUP
    step = 0
    done = 0
    total = gl.load(count) * kv_heads
    head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next = _read_block(
        q_offsets, k_offsets, items, gl.program_id(0), total, kv_heads
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head, first, q_start, q_len, k_start, k_len = head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next
        head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next = _read_block(
            q_offsets, k_offsets, items, index + gl.num_programs(0), total, kv_heads
        )
        low, high, _a, _b = _row_range(first, gl.minimum(first + KEYS, k_len), k_len - q_len, q_len, window, CAUSAL, WINDOW, N)
        if high > low:
            for half in gl.static_range(2):
                slot = 2 * (done % SLOTS) + half
                mbarrier.wait(kv_empty.index(slot), ((done // SLOTS) & 1) ^ 1)
                mbarrier.expect(kv_ready.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                row = k_start + first + half * M
                tma.async_copy_global_to_shared(k_desc, [row, kv_head * k_head], kv_ready.index(slot), k_smem.index(slot))
                tma.async_copy_global_to_shared(v_desc, [row, kv_head * v_head], kv_ready.index(slot), v_smem.index(slot))
            done += 1
            for sub in range(GROUP):
                head = kv_head * GROUP + sub
                for start in range(low, high, N):
                    stage = step % STAGES
                    mbarrier.wait(q_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                    row = q_start + start
                    if start + N <= q_len:
                        _copy_in(q_desc, row, head * q_head, q_ready.index(stage), q_smem.index(stage))
                        _copy_in(do_desc, row, head * do_head, do_ready.index(stage), do_smem.index(stage))
                    else:
                        mbarrier.expect(tail.index(stage), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
                        tma.async_copy_global_to_shared(q_desc, [row, head * q_head], tail.index(stage), q_smem.index(stage))
                        tma.async_copy_global_to_shared(do_desc, [row, head * do_head], tail.index(stage), do_smem.index(stage))
                    step += 1


@gluon.jit
def _kv_help(
    lse, delta, q_offsets, k_offsets, items, count, total_q, H, GROUP: gl.constexpr, window,
    q_smem, do_smem, stats_smem, q_ready, q_empty, do_ready, stats_ready, tail,
    KIND: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HELPERS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [HELPERS], [0])
    kv_heads = H // GROUP
    step = 0
    seen = 0
    total = gl.load(count) * kv_heads
    head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next = _read_block(
        q_offsets, k_offsets, items, gl.program_id(0), total, kv_heads
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head, first, q_start, q_len, _k_start, k_len = head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next
        head_next, first_next, q_start_next, q_len_next, k_start_next, k_len_next = _read_block(
            q_offsets, k_offsets, items, index + gl.num_programs(0), total, kv_heads
        )
        low, high, _a, _b = _row_range(first, gl.minimum(first + KEYS, k_len), k_len - q_len, q_len, window, CAUSAL, WINDOW, N)
        for sub in range(GROUP):
            head = kv_head * GROUP + sub
            base = head.to(gl.int64) * total_q + q_start
            for start in range(low, high, N):
                stage = step % STAGES
                if KIND == "softmax":
                    rows = start + gl.arange(0, N, layout)
                    row_lse = gl.load(lse + base + rows, mask=rows < q_len, other=float("inf")) * LOG2E
                    row_delta = gl.load(delta + base + rows, mask=rows < q_len, other=0.0)
                    mbarrier.wait(q_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                    stats_smem.index(2 * stage).store(row_lse)
                    stats_smem.index(2 * stage + 1).store(row_delta)
                    gl.thread_barrier()
                    mbarrier.arrive(stats_ready.index(stage))
                if start + N > q_len:
                    mbarrier.wait(tail.index(stage), (seen >> stage) & 1)
                    seen = seen ^ (1 << stage)
                    _zero_tail(q_smem.index(stage), q_len - start, N, D, HELPERS)
                    mbarrier.arrive(q_ready.index(stage))
                    _zero_tail(do_smem.index(stage), q_len - start, N, D, HELPERS)
                    mbarrier.arrive(do_ready.index(stage), pred=(first >= 0) & (k_len >= 0))  # always: see above
                step += 1


@gluon.jit
def _kv_consume(
    dk, dv, q_offsets, k_offsets, items, count, H, GROUP: gl.constexpr, window, scale, dk_scale, inv_divisor,
    k_smem, v_smem, q_smem, do_smem, stats_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready,
    HALF: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    dtype: gl.constexpr = q_smem.dtype
    kv_heads = H // GROUP
    step = 0
    done = 0
    total = gl.load(count) * kv_heads
    no_scores = gl.zeros([M, N], gl.float32, s_layout)
    head_next, first_next, _q, q_len_next, k_start_next, k_len_next = _read_block(
        q_offsets, k_offsets, items, gl.program_id(0), total, kv_heads
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head, first, q_len, k_start, k_len = head_next, first_next, q_len_next, k_start_next, k_len_next
        head_next, first_next, _q, q_len_next, k_start_next, k_len_next = _read_block(
            q_offsets, k_offsets, items, index + gl.num_programs(0), total, kv_heads
        )
        shift = k_len - q_len
        low, high, full_low, full_high = _row_range(
            first, gl.minimum(first + KEYS, k_len), shift, q_len, window, CAUSAL, WINDOW, N
        )
        begin = first + HALF * M
        base = k_start.to(gl.int64) * (kv_heads * D) + kv_head * D
        if high > low:
            slot = 2 * (done % SLOTS) + HALF
            mbarrier.wait(kv_ready.index(slot), (done // SLOTS) & 1)
            done += 1
            k_half = k_smem.index(slot)
            v_half = v_smem.index(slot)
            if begin < k_len:
                columns = begin + gl.arange(0, M, gl.SliceLayout(1, s_layout))
                dk_acc = gl.zeros([M, D], gl.float32, kv_layout)
                dv_acc = gl.zeros([M, D], gl.float32, kv_layout)
                for _sub in range(GROUP):
                    for start in range(low, high, N):
                        stage = step % STAGES
                        phase = (step // STAGES) & 1
                        q = q_smem.index(stage)
                        do = do_smem.index(stage)
                        mbarrier.wait(q_ready.index(stage), phase)
                        s_token = warpgroup_mma(k_half, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                        if LATE:
                            s = warpgroup_mma_wait(0, deps=[s_token]) * scale
                        else:
                            mbarrier.wait(do_ready.index(stage), phase)
                            dp_token = warpgroup_mma(v_half, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                            s = warpgroup_mma_wait(1, deps=[s_token]) * scale
                        edge = (start < full_low) | (start + N > full_high)
                        if KIND == "softmax":
                            mbarrier.wait(stats_ready.index(stage), phase)
                            row_lse = stats_smem.index(2 * stage).load(gl.SliceLayout(0, s_layout))
                            p = gl.exp2(s - row_lse[None, :])
                            if CAUSAL or WINDOW:  # noqa: SIM102 (decided when compiling; edge at run time)
                                if edge:
                                    p = _select_rows(p, start, columns, k_len, shift, window, CAUSAL, WINDOW, N, s_layout)
                            slope = p
                        else:
                            p, slope = _activate_both(s, KIND, APPROX)
                            if CAUSAL or WINDOW:  # noqa: SIM102
                                if edge:
                                    p = _select_rows(p, start, columns, k_len, shift, window, CAUSAL, WINDOW, N, s_layout)
                                    slope = _select_rows(slope, start, columns, k_len, shift, window, CAUSAL, WINDOW, N, s_layout)
                        weights = gl.convert_layout(p.to(dtype), p_layout)
                        if LATE:
                            mbarrier.wait(do_ready.index(stage), phase)
                            dp_token = warpgroup_mma(v_half, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                            dv_token = warpgroup_mma(weights, do, dv_acc, is_async=True)
                            dp = warpgroup_mma_wait(1, deps=[dp_token])
                        else:
                            dp = warpgroup_mma_wait(0, deps=[dp_token])
                            dv_token = warpgroup_mma(weights, do, dv_acc, is_async=True)
                        if KIND == "softmax":
                            row_delta = stats_smem.index(2 * stage + 1).load(gl.SliceLayout(0, s_layout))
                            ds = (slope * (dp - row_delta[None, :])).to(dtype)
                        else:
                            ds = (slope * dp).to(dtype)
                        dk_token = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk_acc, is_async=True)
                        dv_acc = warpgroup_mma_wait(1, deps=[dv_token])
                        dk_acc = warpgroup_mma_wait(0, deps=[dk_token])
                        mbarrier.arrive(q_empty.index(stage))
                        step += 1
                _put(k_half, dk + base, begin, k_len, kv_heads * D, dk_acc * dk_scale, D)
                _put(v_half, dv + base, begin, k_len, kv_heads * D, dv_acc * inv_divisor, D)
            else:  # no key of this consumer is left
                for _sub in range(GROUP):
                    for _start in range(low, high, N):
                        stage = step % STAGES
                        phase = (step // STAGES) & 1
                        mbarrier.wait(q_ready.index(stage), phase)
                        mbarrier.wait(do_ready.index(stage), phase)
                        if KIND == "softmax":
                            mbarrier.wait(stats_ready.index(stage), phase)
                        mbarrier.arrive(q_empty.index(stage))
                        step += 1
            mbarrier.arrive(kv_empty.index(slot))
        elif begin < k_len:  # keys that no query keeps
            _put_zeros(dk + base, begin, k_len, kv_heads * D, dtype, D)
            _put_zeros(dv + base, begin, k_len, kv_heads * D, dtype, D)


@gluon.jit(do_not_specialize=["total_q", "window"])
def hopper_dkdv_kernel(
    q_desc, do_desc, k_desc, v_desc, dk, dv, lse, delta, q_offsets, k_offsets, items, count, total_q, H, GROUP: gl.constexpr,
    q_head, do_head, k_head, v_head, window, scale, dk_scale, inv_divisor,
    KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, LATE: gl.constexpr,
    PRODUCERS: gl.constexpr, HELPERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over `items` (blocks of 128 keys) of every K/V head; N queries a step, SLOTS blocks of K and V in flight.

    LATE: dP is not begun before the weights are there, which takes 32 registers fewer.
    """
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2 * SLOTS, M, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2 * SLOTS, M, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, N, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES, N, D], do_desc.layout)
    stats_smem = do_smem
    kv_ready = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stats_ready = tail
    if KIND == "softmax":
        stats_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        stats_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2 * SLOTS):
        mbarrier.init(kv_ready.index(slot), count=1)
        mbarrier.init(kv_empty.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2)
        mbarrier.init(do_ready.index(stage), count=1)
        if KIND == "softmax":
            mbarrier.init(stats_ready.index(stage), count=1)
        mbarrier.init(tail.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_kv_consume, (dk, dv, q_offsets, k_offsets, items, count, H, GROUP, window, scale, dk_scale, inv_divisor,
                           k_smem, v_smem, q_smem, do_smem, stats_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready,
                           0, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, SLOTS, LATE)),
            (_kv_consume, (dk, dv, q_offsets, k_offsets, items, count, H, GROUP, window, scale, dk_scale, inv_divisor,
                           k_smem, v_smem, q_smem, do_smem, stats_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready,
                           1, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, SLOTS, LATE)),
            (_kv_produce, (q_desc, do_desc, k_desc, v_desc, q_offsets, k_offsets, items, count, H, GROUP,
                           q_head, do_head, k_head, v_head, window,
                           k_smem, v_smem, q_smem, do_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, tail,
                           CAUSAL, WINDOW, N, STAGES, SLOTS)),
            (_kv_help, (lse, delta, q_offsets, k_offsets, items, count, total_q, H, GROUP, window,
                        q_smem, do_smem, stats_smem, q_ready, q_empty, do_ready, stats_ready, tail,
                        KIND, CAUSAL, WINDOW, N, D, STAGES, HELPERS)),
        ],
        [4, PRODUCERS, HELPERS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
