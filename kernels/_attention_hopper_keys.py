"""Gluon backward kernel for Hopper of the keys' side, dK and dV: built like `_attention_hopper_queries`, where both are described."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels._attention_hopper import M, _activate_both, _copy_in, _kept, _put, _put_zeros, _row_range, _zero_tail
from kernels._attention_hopper_queries import LOG2E
from kernels._hopper_queue import allocate, draw, drawn, fetch, finish, publish, take, zero_unowned

KEYS = gl.constexpr(128)  # keys of a program's block, 64 per consumer


@gluon.jit
def _select_rows(x, start, columns, k_len, shift, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr):
    """Keep the (key, query) pairs that the mask keeps; the others become 0."""
    rows = start + gl.arange(0, M, gl.SliceLayout(0, LAYOUT))
    keep = (columns < k_len)[:, None] & (rows >= 0)[None, :]
    if CAUSAL or WINDOW:
        keep = _kept(keep, rows[None, :] + shift - columns[:, None], window, CAUSAL, WINDOW)
    return gl.where(keep, x, 0.0)


@gluon.jit
def _kv_produce(
    q_desc, do_desc, k_desc, v_desc, dk, dv, offsets, num, records, count, counter, total_k, H, GROUP: gl.constexpr,
    q_head, do_head, k_head, v_head, window,
    k_smem, v_smem, q_smem, do_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, tail, ring, item_ready, item_empty,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    kv_heads = H // GROUP
    step = 0
    done = 0
    items = 0
    total = gl.load(count) * kv_heads
    index = gl.program_id(0)
    record = fetch(records, index, total, kv_heads, WARPS)
    ticket = draw(counter, WARPS)
    while index < total:
        kv_head, first, k_start, k_len, q_start, q_len = publish(record, items, ring, item_ready, item_empty, WARPS)
        items += 1
        index = drawn(ticket, WARPS)
        record = fetch(records, index, total, kv_heads, WARPS)
        ticket = draw(counter, WARPS)
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
    publish(record, items, ring, item_ready, item_empty, WARPS)
    finish(counter, WARPS)
    zero_unowned(dk, offsets, num, total_k, kv_heads, D, WARPS)
    zero_unowned(dv, offsets, num, total_k, kv_heads, D, WARPS)


@gluon.jit
def _kv_help(
    lse, delta, total_q, GROUP: gl.constexpr, window,
    q_smem, do_smem, stats_smem, q_ready, q_empty, do_ready, stats_ready, tail, ring, item_ready, item_empty,
    KIND: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HELPERS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [HELPERS], [0])
    step = 0
    seen = 0
    items = 0
    kv_head, first, _k_start, k_len, q_start, q_len = take(items, ring, item_ready, item_empty, HELPERS)
    while kv_head >= 0:
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
                    mbarrier.arrive(do_ready.index(stage))
                step += 1
        items += 1
        kv_head, first, _k_start, k_len, q_start, q_len = take(items, ring, item_ready, item_empty, HELPERS)


@gluon.jit
def _kv_consume(
    dk, dv, H, GROUP: gl.constexpr, window, scale, dk_scale, inv_divisor,
    k_smem, v_smem, q_smem, do_smem, stats_smem, out_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready,
    ring, item_ready, item_empty,
    HALF: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, LATE: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    dtype: gl.constexpr = q_smem.dtype
    kv_heads = H // GROUP
    step = 0
    done = 0
    items = 0
    no_scores = gl.zeros([M, N], gl.float32, s_layout)
    kv_head, first, k_start, k_len, _q, q_len = take(items, ring, item_ready, item_empty, 4)
    while kv_head >= 0:
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
                for sub in range(GROUP):
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
                        if STAGED:  # neither keys nor values are needed any more
                            mbarrier.arrive(kv_empty.index(slot), pred=(start + N >= high) & (sub == GROUP - 1))
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
                if STAGED:
                    _put(out_smem.index(HALF), dk + base, begin, k_len, kv_heads * D, dk_acc * dk_scale, D)
                    _put(out_smem.index(HALF), dv + base, begin, k_len, kv_heads * D, dv_acc * inv_divisor, D)
                else:
                    _put(k_half, dk + base, begin, k_len, kv_heads * D, dk_acc * dk_scale, D)
                    _put(v_half, dv + base, begin, k_len, kv_heads * D, dv_acc * inv_divisor, D)
                    mbarrier.arrive(kv_empty.index(slot))
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
        items += 1
        kv_head, first, k_start, k_len, _q, q_len = take(items, ring, item_ready, item_empty, 4)


@gluon.jit(do_not_specialize=["num", "total_k", "total_q", "window"])
def hopper_dkdv_kernel(
    q_desc, do_desc, k_desc, v_desc, dk, dv, lse, delta, offsets, num, records, count, counter, total_k, total_q, H, GROUP: gl.constexpr,
    q_head, do_head, k_head, v_head, window, scale, dk_scale, inv_divisor,
    KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, LATE: gl.constexpr, STAGED: gl.constexpr,
    PRODUCERS: gl.constexpr, HELPERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over `records` (blocks of 128 keys) of every K/V head; N queries a step, SLOTS blocks of K and V in flight.

    Zeroes the rows of dK and dV that none of the `num` sequences, whose keys lie at `offsets`, owns.

    LATE: dP is not begun before the weights are there, which takes 32 registers fewer. STAGED: results leave by way of shared memory of their
    own, and K and V are handed back before the block's last two products.
    """
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2 * SLOTS, M, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2 * SLOTS, M, D], v_desc.layout)
    out_smem = k_smem
    if STAGED:
        out_smem = gl.allocate_shared_memory(k_desc.dtype, [2, M, D], k_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, N, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES, N, D], do_desc.layout)
    stats_smem = do_smem
    kv_ready = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring, item_ready, item_empty = allocate(3)
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
            (_kv_consume, (dk, dv, H, GROUP, window, scale, dk_scale, inv_divisor,
                           k_smem, v_smem, q_smem, do_smem, stats_smem, out_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready,
                           ring, item_ready, item_empty,
                           0, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, SLOTS, LATE, STAGED)),
            (_kv_consume, (dk, dv, H, GROUP, window, scale, dk_scale, inv_divisor,
                           k_smem, v_smem, q_smem, do_smem, stats_smem, out_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready,
                           ring, item_ready, item_empty,
                           1, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES, SLOTS, LATE, STAGED)),
            (_kv_produce, (q_desc, do_desc, k_desc, v_desc, dk, dv, offsets, num, records, count, counter, total_k, H, GROUP,
                           q_head, do_head, k_head, v_head, window,
                           k_smem, v_smem, q_smem, do_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, tail,
                           ring, item_ready, item_empty, CAUSAL, WINDOW, N, D, STAGES, SLOTS, PRODUCERS)),
            (_kv_help, (lse, delta, total_q, GROUP, window,
                        q_smem, do_smem, stats_smem, q_ready, q_empty, do_ready, stats_ready, tail, ring, item_ready, item_empty,
                        KIND, CAUSAL, WINDOW, N, D, STAGES, HELPERS)),
        ],
        [4, PRODUCERS, HELPERS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
