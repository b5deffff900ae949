"""Gluon backward kernel for Hopper: all gradients of one (sequence, K/V head) in one program, five products, no atomics across programs.

Two consumer warp groups keep dK and dV of 64 keys each in registers while a producer streams Q and dO past them. Per step, with the
scores transposed (keys x queries) so that both weights and score gradients are register operands of the products that follow:

    S^T = K Q^T      dP^T = V dO^T      dV += P^T dO      dK += dS^T Q      dQ = dS K

dQ needs the keys of both consumers: they exchange dS^T through shared memory and then split dQ's columns (D = 128) or rows (D = 64).
dQ of a tile is complete after its last block of keys. Until then it lives in float32 scratch that only this program touches: the
first block stores, later ones add with fire-and-forget reductions (the same thread to the same address, so the order is fixed and the
result repeats bitwise), the last one adds what is there and writes the result. A sequence of at most 128 keys needs no scratch.

Tails: the producer zeroes foreign rows in shared memory (see `_attention_hopper`), after which zeros annihilate everything they meet.
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

from kernels._attention_hopper import _key_range, _reciprocal, _tanh_approx, _zero_tail

N = gl.constexpr(128)  # keys of a program's block, 64 per consumer


@gluon.jit
def _activate_both(x, KIND: gl.constexpr, APPROX: gl.constexpr):
    """The activation and its derivative, sharing the transcendental."""
    if KIND == "gelu":
        square = x * x
        inner = x * (0.7978845608028654 + 0.035677408136300125 * square)
        if APPROX:
            t = _tanh_approx(inner)
        else:
            t = 1.0 - 2.0 * _reciprocal(1.0 + gl.exp2(inner * 2.8853900817779268))
        half = 0.5 + 0.5 * t
        slope = (0.5 * x) * (1.0 - t * t) * (0.7978845608028654 + 0.1070322244089004 * square)
        return x * half, half + slope
    elif KIND == "silu":
        if APPROX:
            s = 0.5 + 0.5 * _tanh_approx(0.5 * x)
        else:
            s = _reciprocal(1.0 + gl.exp2(x * -1.4426950408889634))
        value = x * s
        return value, s + value - value * s
    elif KIND == "relu":
        return gl.maximum(x, 0.0), gl.where(x > 0, 1.0, 0.0)
    else:
        return x, gl.full(x.type.shape, 1.0, gl.float32, x.type.layout)


@gluon.jit
def _row_range(first, last, shift, q_len, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, M: gl.constexpr):
    """As `_attention_kernels._row_range`: touched rows `[low, high)`, rows that keep every column `[full_low, full_high)`."""
    low = 0
    high = q_len
    full_low = 0
    full_high = q_len
    if CAUSAL:
        low = (gl.maximum(first - shift, 0) // M) * M
        full_low = gl.maximum(last - 1 - shift, 0)
    if WINDOW:
        high = gl.minimum(high, gl.maximum(last - 1 + window - shift, 0))
        full_high = gl.minimum(full_high, gl.maximum(first + window - shift, 0))
        if not CAUSAL:
            low = (gl.maximum(first - window + 1 - shift, 0) // M) * M
            full_low = gl.maximum(last - window - shift, 0)
    return gl.minimum(low, high), high, full_low, full_high


@gluon.jit
def _read_item(q_offsets, k_offsets, items, index, kv_heads, OWNER: gl.constexpr):
    """K/V head, spans of the sequence, and the range of keys of the program's blocks."""
    kv_head = index % kv_heads
    entry = index // kv_heads
    if OWNER:
        sequence = gl.load(items + entry)
    else:
        sequence = gl.load(items + 2 * entry)
    q_start = gl.load(q_offsets + sequence).to(gl.int32)
    q_len = gl.load(q_offsets + sequence + 1).to(gl.int32) - q_start
    k_start = gl.load(k_offsets + sequence).to(gl.int32)
    k_len = gl.load(k_offsets + sequence + 1).to(gl.int32) - k_start
    begin = 0
    end = k_len
    if not OWNER:
        begin = gl.load(items + 2 * entry + 1) * N
        end = gl.minimum(begin + N, k_len)
    return kv_head, q_start, q_len, k_start, k_len, begin, end


@gluon.jit
def _load_tile(desc, row, column, length, ready, tail, tails, tile, ROWS: gl.constexpr, D: gl.constexpr):
    """Start one TMA load that signals `ready`; a tile of fewer than ROWS own rows is awaited here and its foreign rows zeroed."""
    if length >= ROWS:
        mbarrier.expect(ready, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [row, column], ready, tile)
    else:
        mbarrier.expect(tail, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [row, column], tail, tile)
        mbarrier.wait(tail, tails & 1)
        tails += 1
        _zero_tail(tile, length, ROWS, D, 4)
        mbarrier.arrive(ready)
    return tails


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, lse, delta, q_offsets, k_offsets, items, count, total_q, H, GROUP: gl.constexpr,
    q_head, do_head, k_head, v_head, window,
    k_smem, v_smem, q_smem, do_smem, stats_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready, tail,
    KIND: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, OWNER: gl.constexpr,
    M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    stats_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    kv_heads = H // GROUP
    step = 0  # query tiles handed over so far
    block = 0  # key blocks handed over so far
    tails = 0
    for index in range(gl.program_id(0), count * kv_heads if OWNER else gl.load(count) * kv_heads, gl.num_programs(0)):
        kv_head, q_start, q_len, k_start, k_len, begin, end = _read_item(q_offsets, k_offsets, items, index, kv_heads, OWNER)
        for first in range(begin, end, N):
            low, high, _a, _b = _row_range(first, gl.minimum(first + N, k_len), k_len - q_len, q_len, window, CAUSAL, WINDOW, M)
            if high > low:
                mbarrier.wait(kv_empty.index(0), (block & 1) ^ 1)
                tails = _load_tile(
                    k_desc, k_start + first, kv_head * k_head, k_len - first, kv_ready.index(0), tail, tails, k_smem, N, D
                )
                mbarrier.wait(kv_empty.index(1), (block & 1) ^ 1)
                tails = _load_tile(
                    v_desc, k_start + first, kv_head * v_head, k_len - first, kv_ready.index(1), tail, tails, v_smem, N, D
                )
                block += 1
                for sub in range(GROUP):
                    head = kv_head * GROUP + sub
                    for start in range(low, high, M):
                        stage = step % STAGES
                        mbarrier.wait(q_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                        tails = _load_tile(
                            q_desc, q_start + start, head * q_head, q_len - start, q_ready.index(stage), tail, tails,
                            q_smem.index(stage), M, D,
                        )  # fmt: skip
                        tails = _load_tile(
                            do_desc, q_start + start, head * do_head, q_len - start, do_ready.index(stage), tail, tails,
                            do_smem.index(stage), M, D,
                        )  # fmt: skip
                        if KIND == "softmax":
                            rows = start + gl.arange(0, M, stats_layout)
                            base = head.to(gl.int64) * total_q + q_start
                            row_lse = gl.load(lse + base + rows, mask=rows < q_len, other=float("inf"))
                            row_delta = gl.load(delta + base + rows, mask=rows < q_len, other=0.0)
                            stats_smem.index(2 * stage).store(row_lse * 1.4426950408889634)
                            stats_smem.index(2 * stage + 1).store(row_delta)
                            mbarrier.arrive(stats_ready.index(stage))
                        step += 1


@gluon.jit
def _put_dq(
    dq, dq_out, dq_scratch, start, first, q_start, q_len, k_len, shift, head, H, window, dq_scale,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, M: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store, add or finish a tile's dQ, by whether this is the first, a middle or the last block of keys that the tile meets."""
    row_part: gl.constexpr = HALF * 64 if D == 64 else 0
    column_part: gl.constexpr = 0 if D == 64 else HALF * 64
    rows = start + row_part + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = column_part + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    low, high, _a, _b = _key_range(start, start + M, shift, k_len, window, CAUSAL, WINDOW, N)
    base = q_start.to(gl.int64) * (H * D) + head * D
    places = rows[:, None] * (H * D) + columns[None, :]
    inside = (rows < q_len)[:, None] & (columns >= 0)[None, :]
    dq = dq * dq_scale
    if first + N >= high:
        if first > low:
            dq += gl.load(dq_scratch + base + places, mask=inside, other=0.0)
        gl.store(dq_out + base + places, dq.to(dq_out.dtype.element_ty), mask=inside)
    elif first > low:
        gl.atomic_add(dq_scratch + base + places, dq, mask=inside, sem="relaxed")
    else:
        gl.store(dq_scratch + base + places, dq, mask=inside)


@gluon.jit
def _store_rows(base, rows, length, stride, x, D: gl.constexpr, LAYOUT: gl.constexpr):
    x = gl.convert_layout(x.to(base.dtype.element_ty), LAYOUT)
    pointers = base + rows[:, None] * stride + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(pointers, x, mask=(rows < length)[:, None])


@gluon.jit
def _consume(
    dq_out, dq_scratch, dk, dv, q_offsets, k_offsets, items, count, H, GROUP: gl.constexpr, window, scale, dq_scale, inv_divisor,
    k_smem, v_smem, q_smem, do_smem, stats_smem, ds_smem, kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready, ds_ready,
    HALF: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, OWNER: gl.constexpr,
    M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_smem.dtype
    kv_heads = H // GROUP
    step = 0
    block = 0
    no_scores = gl.zeros([64, M], gl.float32, s_layout)
    no_dq = gl.zeros([64, 64], gl.float32, dq_layout)
    for index in range(gl.program_id(0), count * kv_heads if OWNER else gl.load(count) * kv_heads, gl.num_programs(0)):
        kv_head, q_start, q_len, k_start, k_len, begin, end = _read_item(q_offsets, k_offsets, items, index, kv_heads, OWNER)
        shift = k_len - q_len
        for first in range(begin, end, N):
            last = gl.minimum(first + N, k_len)
            low, high, full_low, full_high = _row_range(first, last, shift, q_len, window, CAUSAL, WINDOW, M)
            columns = first + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
            dk_acc = gl.zeros([64, D], gl.float32, kv_layout)
            dv_acc = gl.zeros([64, D], gl.float32, kv_layout)
            if high > low:
                k_half = k_smem.slice(HALF * 64, 64)
                v_half = v_smem.slice(HALF * 64, 64)
                mbarrier.wait(kv_ready.index(0), block & 1)
                mbarrier.wait(kv_ready.index(1), block & 1)
                block += 1
                for sub in range(GROUP):
                    head = kv_head * GROUP + sub
                    for start in range(low, high, M):
                        stage = step % STAGES
                        phase = (step // STAGES) & 1
                        q = q_smem.index(stage)
                        do = do_smem.index(stage)
                        mbarrier.wait(q_ready.index(stage), phase)
                        s_token = warpgroup_mma(k_half, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                        mbarrier.wait(do_ready.index(stage), phase)
                        dp_token = warpgroup_mma(v_half, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                        s = warpgroup_mma_wait(1, deps=[s_token]) * scale
                        edge = (start < full_low) | (start + M > full_high)
                        if KIND == "softmax":
                            edge = edge | (first + N > k_len)
                            mbarrier.wait(stats_ready.index(stage), phase)
                            row_lse = stats_smem.index(2 * stage).load(gl.SliceLayout(0, s_layout))
                            p = gl.exp2(s - row_lse[None, :])
                            if edge:
                                p = _select(p, start, columns, k_len, shift, window, CAUSAL, WINDOW, M, s_layout)
                            slope = p
                        else:
                            p, slope = _activate_both(s, KIND, APPROX)
                            if CAUSAL or WINDOW:  # noqa: SIM102 (decided when compiling; edge at run time)
                                if edge:
                                    p = _select(p, start, columns, k_len, shift, window, CAUSAL, WINDOW, M, s_layout)
                                    slope = _select(slope, start, columns, k_len, shift, window, CAUSAL, WINDOW, M, s_layout)
                        weights = gl.convert_layout(p.to(dtype), p_layout)
                        dp = warpgroup_mma_wait(0, deps=[dp_token])
                        dv_token = warpgroup_mma(weights, do, dv_acc, is_async=True)
                        if KIND == "softmax":
                            row_delta = stats_smem.index(2 * stage + 1).load(gl.SliceLayout(0, s_layout))
                            ds = (p * (dp - row_delta[None, :])).to(dtype)
                        else:
                            ds = (slope * dp).to(dtype)
                        if OWNER:
                            ds_buffer = ds_smem.index(step & 1)
                            ds_buffer.slice(HALF * 64, 64).store(ds)
                            fence_async_shared()
                            mbarrier.arrive(ds_ready.index(step & 1))
                        dk_token = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk_acc, is_async=True)
                        if OWNER:
                            mbarrier.wait(ds_ready.index(step & 1), (step >> 1) & 1)
                            ds_all = ds_buffer.permute((1, 0))
                            if D == 64:
                                dq_token = warpgroup_mma(ds_all.slice(HALF * 64, 64), k_smem, no_dq, use_acc=False, is_async=True)
                            else:
                                dq_token = warpgroup_mma(
                                    ds_all, k_smem.slice(HALF * 64, 64, dim=1), no_dq, use_acc=False, is_async=True
                                )
                            dv_acc = warpgroup_mma_wait(2, deps=[dv_token])
                            dk_acc = warpgroup_mma_wait(1, deps=[dk_token])
                            mbarrier.arrive(q_empty.index(stage))
                            dq = warpgroup_mma_wait(0, deps=[dq_token])
                            _put_dq(
                                dq, dq_out, dq_scratch, start, first, q_start, q_len, k_len, shift, head, H, window, dq_scale,
                                HALF, CAUSAL, WINDOW, M, D, dq_layout,
                            )  # fmt: skip
                        else:
                            dv_acc = warpgroup_mma_wait(1, deps=[dv_token])
                            dk_acc = warpgroup_mma_wait(0, deps=[dk_token])
                            mbarrier.arrive(q_empty.index(stage))
                        step += 1
                mbarrier.arrive(kv_empty.index(0))
                mbarrier.arrive(kv_empty.index(1))
            rows = first + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, store_layout))
            base = k_start.to(gl.int64) * (kv_heads * D) + kv_head * D
            _store_rows(dk + base, rows, k_len, kv_heads * D, dk_acc * dq_scale, D, store_layout)
            _store_rows(dv + base, rows, k_len, kv_heads * D, dv_acc * inv_divisor, D, store_layout)
        if OWNER:  # rows that keep no column were never visited
            unseen = gl.where(k_len == 0, q_len, 0)
            if CAUSAL:
                unseen = gl.maximum(unseen, gl.maximum(-shift, 0) // M * M)
            elif WINDOW:
                unseen = gl.maximum(unseen, gl.maximum(1 - shift - window, 0) // M * M)
            unseen = gl.minimum(unseen, q_len)
            for sub in range(GROUP):
                base = q_start.to(gl.int64) * (H * D) + (kv_head * GROUP + sub) * D
                for start in range(HALF * 64, unseen, 128):
                    rows = start + gl.arange(0, 64, gl.SliceLayout(1, store_layout))
                    nothing = gl.zeros([64, D], gl.float32, store_layout)
                    _store_rows(dq_out + base, rows, unseen, H * D, nothing, D, store_layout)


@gluon.jit
def _select(x, start, columns, k_len, shift, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr):
    """Keep the (key, query) pairs that the mask keeps; the others become 0."""
    rows = start + gl.arange(0, M, gl.SliceLayout(0, LAYOUT))
    keep = (columns < k_len)[:, None] & (rows >= 0)[None, :]
    if CAUSAL or WINDOW:
        delta = rows[None, :] + shift - columns[:, None]
        if CAUSAL:
            keep = keep & (delta >= 0)
        if WINDOW:
            keep = keep & (delta < window)
            if not CAUSAL:
                keep = keep & (delta > -window)
    return gl.where(keep, x, 0.0)


@gluon.jit(do_not_specialize=["total_q", "window", "count"])
def hopper_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, dq, dq_scratch, dk, dv, lse, delta, q_offsets, k_offsets, items, count, total_q, H,
    GROUP: gl.constexpr, q_head, do_head, k_head, v_head, window, scale, dq_scale, inv_divisor,
    KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, OWNER: gl.constexpr,
    M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """OWNER: `items` are `count` sequences, every gradient. Otherwise a ranked list of key blocks (its length at `count`): dK, dV."""
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [N, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [STAGES, M, D], do_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [2, N, M], ds_layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stats_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(tail, count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_ready.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
        mbarrier.init(ds_ready.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(stats_ready.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dq, dq_scratch, dk, dv, q_offsets, k_offsets, items, count, H, GROUP, window, scale, dq_scale, inv_divisor,
                        k_smem, v_smem, q_smem, do_smem, stats_smem, ds_smem,
                        kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready, ds_ready,
                        0, KIND, APPROX, CAUSAL, WINDOW, OWNER, M, D, STAGES)),
            (_consume, (dq, dq_scratch, dk, dv, q_offsets, k_offsets, items, count, H, GROUP, window, scale, dq_scale, inv_divisor,
                        k_smem, v_smem, q_smem, do_smem, stats_smem, ds_smem,
                        kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready, ds_ready,
                        1, KIND, APPROX, CAUSAL, WINDOW, OWNER, M, D, STAGES)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, lse, delta, q_offsets, k_offsets, items, count, total_q, H, GROUP,
                        q_head, do_head, k_head, v_head, window,
                        k_smem, v_smem, q_smem, do_smem, stats_smem,
                        kv_ready, kv_empty, q_ready, q_empty, do_ready, stats_ready, tail,
                        KIND, CAUSAL, WINDOW, OWNER, M, D, STAGES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
