"""Gluon backward kernel for Hopper of the queries' side, dQ. With `_attention_hopper_keys`, which does dK and dV: no atomics, no float32 scratch,
each recomputes the scores.

Seven products instead of five, but each kernel is built like the forward: a producer warp streams tiles by TMA, two consumer warp
groups keep their accumulators in registers, nothing is exchanged between them, every result is written once and repeats bitwise.

    dQ kernel, 64 queries a consumer:   S = Q K^T      dP = dO V^T      dQ += dS K
    dK/dV kernel, 64 keys a consumer:   S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

Weights and score gradients are register operands of the products that follow. A helper partition does what would stall the producer:
it zeroes foreign rows of a sequence's last tile (a neighbour's NaN must not meet our zeros) and fetches the row statistics.
Foreign rows matter only where they are summed over: K in the dQ kernel, Q and dO in the dK/dV kernel.

Triton 3.6's loop-aware CSE drops a value carried by a `for` that is used only as a bound of an inner loop (the first iteration's stays): helpers once
waited for tiles that never came. It leaves a `while` alone, as what was compiled shows.

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

from kernels._attention_hopper import M, _activate_both, _copy_in, _from_the_end, _hand_back, _key_range, _put, _put_zeros, _zero_tail
from kernels._attention_hopper import _select as _select_keys
from kernels._hopper_queue import allocate, draw, drawn, fetch, finish, publish, take, zero_unowned

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _dq_produce(
    q_desc, do_desc, o_desc, k_desc, v_desc, dq, offsets, num, records, count, counter, total_q, H, GROUP: gl.constexpr,
    q_head, do_head, o_head, k_head, v_head, window,
    q_smem, do_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail, ring, item_ready, item_empty,
    KIND: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    step = 0
    done = 0
    size: gl.constexpr = q_desc.block_type.nbytes * (3 if KIND == "softmax" else 2)
    items = 0
    total = gl.load(count) * H
    index = gl.program_id(0)
    record = fetch(records, index, total, H, WARPS)
    ticket = draw(counter, WARPS)
    while index < total:
        head, first, q_start, q_len, k_start, k_len = publish(record, items, ring, item_ready, item_empty, WARPS)
        items += 1
        index = drawn(ticket, WARPS)
        record = fetch(records, index, total, H, WARPS)
        ticket = draw(counter, WARPS)
        first = _from_the_end(first, q_len, CAUSAL)
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
    publish(record, items, ring, item_ready, item_empty, WARPS)
    finish(counter, WARPS)
    zero_unowned(dq, offsets, num, total_q, H, D, WARPS)


@gluon.jit
def _dq_help(
    window, k_smem, k_ready, tail, ring, item_ready, item_empty,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HELPERS: gl.constexpr,
):  # fmt: skip
    step = 0
    seen = 0  # bit s: parity of the tails that went through stage s
    items = 0
    head, first, _q, q_len, _k, k_len = take(items, ring, item_ready, item_empty, HELPERS)
    while head >= 0:
        first = _from_the_end(first, q_len, CAUSAL)
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
        items += 1
        head, first, _q, q_len, _k, k_len = take(items, ring, item_ready, item_empty, HELPERS)


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
    dq, lse, delta, total_q, H, window, scale, dq_scale,
    q_smem, do_smem, o_smem, k_smem, v_smem, out_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, ring, item_ready, item_empty,
    HALF: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = k_smem.dtype
    step = 0
    done = 0
    items = 0
    no_scores = gl.zeros([M, N], gl.float32, s_layout)
    head, first, q_start, q_len, _k, k_len = take(items, ring, item_ready, item_empty, 4)
    while head >= 0:
        first = _from_the_end(first, q_len, CAUSAL)
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
                q_left = q
                do_left = do
                if HELD > 0:
                    q_left = q.load(gl.DotOperandLayout(0, s_layout, 2))
                if HELD == 2:
                    do_left = do.load(gl.DotOperandLayout(0, s_layout, 2))
                acc = gl.zeros([M, D], gl.float32, o_layout)
                stage = step % STAGES
                mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
                s_token = warpgroup_mma(q_left, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
                dp_token = warpgroup_mma(do_left, v_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                if KIND == "softmax":
                    row_delta = _row_delta(o_smem.index(slot), do, D, gl.SliceLayout(1, s_layout))
                    gl.store(delta + head.to(gl.int64) * total_q + q_start + rows, row_delta, mask=rows < q_len)
                if HELD == 2:
                    gl.thread_barrier()
                    mbarrier.arrive(q_empty.index(slot))
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
                    s_token = warpgroup_mma(q_left, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                    mbarrier.wait(v_ready.index(stage), phase)
                    dp_token = warpgroup_mma(do_left, v_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
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
                if HELD == 2:
                    _put(out_smem.index(HALF), base, begin, q_len, H * D, acc * dq_scale, D)
                else:
                    _put(q, base, begin, q_len, H * D, acc * dq_scale, D)
                    mbarrier.arrive(q_empty.index(slot))
            else:  # no row of this consumer is left: only hand the buffers back
                step = _hand_back(step, low, high, k_ready, k_empty, v_ready, v_empty, N, STAGES)
                mbarrier.arrive(q_empty.index(slot))
            done += 1
        elif begin < q_len:  # rows that keep no column
            _put_zeros(base, begin, q_len, H * D, dtype, D)
        items += 1
        head, first, q_start, q_len, _k, k_len = take(items, ring, item_ready, item_empty, 4)


@gluon.jit(do_not_specialize=["num", "total_q", "window"])
def hopper_dq_kernel(
    q_desc, do_desc, o_desc, k_desc, v_desc, dq, lse, delta, offsets, num, records, count, counter, total_q, H, GROUP: gl.constexpr,
    q_head, do_head, o_head, k_head, v_head, window, scale, dq_scale,
    KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, HELD: gl.constexpr,
    PRODUCERS: gl.constexpr, HELPERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over `records` (2M query rows each) of every head; SLOTS tiles of Q, dO and O are in flight. Softmax: writes delta too.

    HELD: products take their left operands from registers, 1: Q, 2: Q and dO, whose shared memory then is free for the next tile at once. Zeroes the
    rows of dQ that none of the `num` sequences owns.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * SLOTS, M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * SLOTS, M, D], q_desc.layout)
    o_smem = do_smem
    if KIND == "softmax":
        o_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * SLOTS, M, D], q_desc.layout)
    out_smem = q_smem
    if HELD == 2:
        out_smem = gl.allocate_shared_memory(q_desc.dtype, [2, M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, N, D], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring, item_ready, item_empty = allocate(3)
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
            (_dq_consume, (dq, lse, delta, total_q, H, window, scale, dq_scale,
                           q_smem, do_smem, o_smem, k_smem, v_smem, out_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                           ring, item_ready, item_empty,
                           0, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, SLOTS, HELD)),
            (_dq_consume, (dq, lse, delta, total_q, H, window, scale, dq_scale,
                           q_smem, do_smem, o_smem, k_smem, v_smem, out_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                           ring, item_ready, item_empty,
                           1, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, SLOTS, HELD)),
            (_dq_produce, (q_desc, do_desc, o_desc, k_desc, v_desc, dq, offsets, num, records, count, counter, total_q, H, GROUP,
                           q_head, do_head, o_head, k_head, v_head, window,
                           q_smem, do_smem, o_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail,
                           ring, item_ready, item_empty, KIND, CAUSAL, WINDOW, N, D, STAGES, SLOTS, PRODUCERS)),
            (_dq_help, (window, k_smem, k_ready, tail, ring, item_ready, item_empty, CAUSAL, WINDOW, N, D, STAGES, HELPERS)),
        ],
        [4, PRODUCERS, HELPERS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
