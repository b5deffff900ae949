"""Gluon forward kernel for Hopper: one producer warp group feeds two consumer warp groups through TMA and mbarriers.

Why beside the Triton kernel: each consumer owns 64 query rows and overlaps its own products (block j's scores are computed by the
tensor cores while block j - 1 meets the values) and the two consumers drift apart, so one's exponentials hide under the other's
products. The grid is persistent over a ranked tile list: the producer loads the next tile while the consumers finish this one.

TMA copies whole tiles and would bring rows of the next sequence with it. Foreign query rows only reach outputs that are not stored;
foreign keys are masked by selection; foreign values would turn a neighbour's NaN into ours (0 * NaN), so the producer zeroes them in
shared memory before it hands a sequence's last tile over.

Legend: M = 64 rows per consumer, N keys, D head dim.
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

from kernels._hopper_queue import allocate, draw, drawn, fetch, finish, publish, take, zero_unowned

M = gl.constexpr(64)


@gluon.jit
def _tanh_approx(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _activate(x, KIND: gl.constexpr, APPROX: gl.constexpr):
    if KIND == "gelu":
        inner = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
        if APPROX:
            t = _tanh_approx(inner)
        else:
            t = 1.0 - 2.0 * _reciprocal(1.0 + gl.exp2(inner * 2.8853900817779268))
        half = 0.5 * x
        return half + half * t
    elif KIND == "silu":
        if APPROX:
            half = 0.5 * x
            return half + half * _tanh_approx(half)
        return x * _reciprocal(1.0 + gl.exp2(x * -1.4426950408889634))
    elif KIND == "relu":
        return gl.maximum(x, 0.0)
    else:
        return x


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
def _key_range(first, last, shift, k_len, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr):
    """As `_attention_kernels._key_range`: touched columns `[low, high)`, unmasked ones `[full_low, full_high)`."""
    low = 0
    high = k_len
    full_low = 0
    full_high = (k_len // N) * N
    if CAUSAL:
        high = gl.minimum(k_len, gl.maximum(last + shift, 0))
        full_high = gl.minimum(full_high, (gl.maximum(first + shift + 1, 0) // N) * N)
    if WINDOW:
        low = (gl.maximum(first + shift - window + 1, 0) // N) * N
        full_low = gl.cdiv(gl.maximum(last + shift - window, 0), N) * N
        if not CAUSAL:
            high = gl.minimum(k_len, gl.maximum(last + shift + window - 1, 0))
            full_high = gl.minimum(full_high, (gl.maximum(first + shift + window, 0) // N) * N)
    return low, gl.maximum(high, low), full_low, full_high


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
def _from_the_end(first, length, CAUSAL: gl.constexpr):
    """First row of a tile of 2M rows; under a causal mask tiles come from the end, where the work is."""
    if CAUSAL:
        return ((length + 2 * M - 1) // (2 * M) - 1) * (2 * M) - first
    else:
        return first


@gluon.jit
def _zero_tail(tile, length, N: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    """Zero the rows of an `(N, D)` shared tile from `length` on, 16 rows at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))
    for chunk in gl.static_range(N // 16):
        if (chunk + 1) * 16 > length:
            part = tile.slice(chunk * 16, 16)
            value = part.load(layout)
            part.store(gl.where((rows + chunk * 16 < length)[:, None], value, 0.0).to(tile.dtype))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _copy_in(desc, row, column, ready, tile):
    """Start the copy of one tile by TMA; `ready` is told when it is there."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], ready, tile)


@gluon.jit
def _hand_back(step, low, high, k_ready, k_empty, v_ready, v_empty, N: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the blocks of keys of `[low, high)` and give their buffers back unused. Returns the step after them."""
    for _start in range(low, high, N):
        stage = step % STAGES
        mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
        mbarrier.arrive(k_empty.index(stage))
        mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
        mbarrier.arrive(v_empty.index(stage))
        step += 1
    return step


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


@gluon.jit
def _put_zeros(base, begin, length, stride, dtype: gl.constexpr, D: gl.constexpr):
    """Zero the rows `[begin, begin + M)` below `length`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = begin + gl.arange(0, M, gl.SliceLayout(1, layout))
    pointers = base + rows[:, None] * stride + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    gl.store(pointers, gl.zeros([M, D], dtype, layout), mask=(rows < length)[:, None])


@gluon.jit
def _read_tile(records, index, total, H, CAUSAL: gl.constexpr):
    """Head, first row of the 2M-row tile, and the sequence's spans; harmless past the last tile, so that it can be read ahead."""
    real = index < total
    record = records + (index // H) * 8
    first = gl.load(record + 1, mask=real, other=0)
    q_start = gl.load(record + 2, mask=real, other=0)
    q_len = gl.load(record + 3, mask=real, other=0)
    k_start = gl.load(record + 4, mask=real, other=0)
    k_len = gl.load(record + 5, mask=real, other=0)
    return index % H, _from_the_end(first, q_len, CAUSAL), q_start, q_len, k_start, k_len


@gluon.jit
def _produce_tile(
    q_desc, k_desc, v_desc, head, first, q_start, q_len, k_start, k_len, step, done, tails, GROUP: gl.constexpr, q_head, k_head, v_head, window,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Load a tile and its keys. Returns how many blocks of keys, tiles and tails were handed over so far, which was `step`, `done` and `tails`."""
    last = gl.minimum(first + 2 * M, q_len)
    low, high, _a, _b = _key_range(first, last, k_len - q_len, k_len, window, CAUSAL, WINDOW, N)
    if high > low:
        for half in gl.static_range(2):
            slot = 2 * (done & 1) + half
            mbarrier.wait(q_empty.index(slot), ((done >> 1) & 1) ^ 1)
            _copy_in(q_desc, q_start + first + half * M, head * q_head, q_ready.index(slot), q_smem.index(slot))
        done += 1
        for start in range(low, high, N):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _copy_in(k_desc, k_start + start, (head // GROUP) * k_head, k_ready.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            if start + N <= k_len:
                _copy_in(v_desc, k_start + start, (head // GROUP) * v_head, v_ready.index(stage), v_smem.index(stage))
            else:
                _copy_in(v_desc, k_start + start, (head // GROUP) * v_head, tail, v_smem.index(stage))
                mbarrier.wait(tail, tails & 1)
                tails += 1
                _zero_tail(v_smem.index(stage), k_len - start, N, D, WARPS)
                mbarrier.arrive(v_ready.index(stage))
            step += 1
    return step, done, tails


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, out, offsets, num, records, count, counter, total_q, H, GROUP: gl.constexpr, q_head, k_head, v_head, window,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail, ring, item_ready, item_empty,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DRAWN: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    step = 0
    done = 0
    tails = 0
    items = 0
    total = gl.load(count) * H
    index = gl.program_id(0)
    if DRAWN:
        record = fetch(records, index, total, H, WARPS)
        ticket = draw(counter, WARPS)
        while index < total:
            head, first, q_start, q_len, k_start, k_len = publish(record, items, ring, item_ready, item_empty, WARPS)
            items += 1
            index = drawn(ticket, WARPS)
            record = fetch(records, index, total, H, WARPS)
            ticket = draw(counter, WARPS)
            first = _from_the_end(first, q_len, CAUSAL)
            step, done, tails = _produce_tile(
                q_desc, k_desc, v_desc, head, first, q_start, q_len, k_start, k_len, step, done, tails, GROUP, q_head, k_head, v_head, window,
                q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail, CAUSAL, WINDOW, N, D, STAGES, WARPS,
            )  # fmt: skip
        publish(record, items, ring, item_ready, item_empty, WARPS)
        finish(counter, WARPS)
    else:
        for place in range(index, total, gl.num_programs(0)):
            head, first, q_start, q_len, k_start, k_len = _read_tile(records, place, total, H, CAUSAL)
            step, done, tails = _produce_tile(
                q_desc, k_desc, v_desc, head, first, q_start, q_len, k_start, k_len, step, done, tails, GROUP, q_head, k_head, v_head, window,
                q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail, CAUSAL, WINDOW, N, D, STAGES, WARPS,
            )  # fmt: skip
    zero_unowned(out, offsets, num, total_q, H, D, WARPS)


@gluon.jit
def _kept(keep, delta, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """The pairs of `keep` that the masks keep too; `delta`: how far the key lies before the query."""
    if CAUSAL:
        keep = keep & (delta >= 0)
    if WINDOW:
        keep = keep & (delta < window)
        if not CAUSAL:
            keep = keep & (delta > -window)
    return keep


@gluon.jit
def _select(s, start, rows, k_len, shift, window, fill, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    columns = start + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    keep = (columns < k_len)[None, :] & (rows == rows)[:, None]
    if CAUSAL or WINDOW:
        keep = _kept(keep, rows[:, None] + shift - columns[None, :], window, CAUSAL, WINDOW)
    return gl.where(keep, s, fill)


@gluon.jit
def _weigh(s, m, norm, start, full_low, full_high, rows, k_len, shift, window, scale,
           KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, N: gl.constexpr,
           LAYOUT: gl.constexpr):  # fmt: skip
    """Weights of one block of scores, and the factor that softmax applies to what was accumulated before."""
    edge = (start < full_low) | (start + N > full_high)
    if KIND == "softmax":
        if edge:
            s = _select(s, start, rows, k_len, shift, window, -float("inf"), CAUSAL, WINDOW, N, LAYOUT)
        m_next = gl.maximum(m, gl.max(s, axis=1))
        shifted = gl.where(m_next == -float("inf"), 0.0, m_next) * scale
        p = gl.exp2(s * scale - shifted[:, None])
        alpha = gl.exp2(m * scale - shifted)
        return p, m_next, norm * alpha + gl.sum(p, axis=1), alpha
    else:
        p = _activate(s * scale, KIND, APPROX)
        if edge:
            p = _select(p, start, rows, k_len, shift, window, 0.0, CAUSAL, WINDOW, N, LAYOUT)
        return p, m, norm, m


@gluon.jit
def _consume_tile(
    out, lse, head, first, q_start, q_len, k_len, step, done, total_q, H, window, scale, inv_divisor,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    HALF: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half a tile's outputs. Returns how many blocks of keys and tiles were used so far, which was `step` and `done`."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = v_smem.dtype
    last = gl.minimum(first + 2 * M, q_len)
    shift = k_len - q_len
    low, high, full_low, full_high = _key_range(first, last, shift, k_len, window, CAUSAL, WINDOW, N)
    begin = first + HALF * M
    rows = begin + gl.arange(0, M, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([M, D], gl.float32, o_layout)
    m = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    norm = gl.zeros([M], gl.float32, gl.SliceLayout(1, s_layout))
    if high > low:
        slot = 2 * (done & 1) + HALF
        mbarrier.wait(q_ready.index(slot), (done >> 1) & 1)
        if begin < q_len:
            q = q_smem.index(slot)
            empty_scores = gl.zeros([M, N], gl.float32, s_layout)
            stage = step % STAGES
            mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
            token = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), empty_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(k_empty.index(stage))
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
                mbarrier.arrive(k_empty.index(stage))
                p_next, m, norm, alpha = _weigh(s, m, norm, start, full_low, full_high, rows, k_len, shift, window, scale,
                                             KIND, APPROX, CAUSAL, WINDOW, N, s_layout)  # fmt: skip
                acc = warpgroup_mma_wait(0, deps=[out_token])
                mbarrier.arrive(v_empty.index(before))
                if KIND == "softmax":
                    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
                p = gl.convert_layout(p_next.to(dtype), p_layout)
            mbarrier.arrive(q_empty.index(slot))
            mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
            out_token = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[out_token])
            mbarrier.arrive(v_empty.index(stage))
            step += 1
        else:  # no row of this consumer is left: only hand the buffers back
            mbarrier.arrive(q_empty.index(slot))
            step = _hand_back(step, low, high, k_ready, k_empty, v_ready, v_empty, N, STAGES)
        done += 1
    if begin < q_len:
        if KIND == "softmax":
            factor = 1.0 / gl.where(norm == 0, 1.0, norm)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
            stats = lse + head.to(gl.int64) * total_q + q_start
            gl.store(stats + rows, (m * scale + gl.log2(norm)) * 0.6931471805599453, mask=rows < q_len)
        else:
            acc = acc * inv_divisor
        result = gl.convert_layout(acc.to(dtype), store_layout)
        o_rows = begin + gl.arange(0, M, gl.SliceLayout(1, store_layout))
        columns = gl.arange(0, D, gl.SliceLayout(0, store_layout))
        base = out + q_start.to(gl.int64) * (H * D) + head * D
        pointers = base + o_rows[:, None] * (H * D) + columns[None, :]
        gl.store(pointers, result, mask=(o_rows < q_len)[:, None])
    return step, done


@gluon.jit
def _consume(
    out, lse, records, count, total_q, H, window, scale, inv_divisor,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, ring, item_ready, item_empty,
    HALF: gl.constexpr, KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DRAWN: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    done = 0
    if DRAWN:
        items = 0
        head, first, q_start, q_len, _k, k_len = take(items, ring, item_ready, item_empty, 4)
        while head >= 0:
            first = _from_the_end(first, q_len, CAUSAL)
            step, done = _consume_tile(
                out, lse, head, first, q_start, q_len, k_len, step, done, total_q, H, window, scale, inv_divisor,
                q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, HALF, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES,
            )  # fmt: skip
            items += 1
            head, first, q_start, q_len, _k, k_len = take(items, ring, item_ready, item_empty, 4)
    else:
        total = gl.load(count) * H
        # the next tile's numbers are fetched while this one computes
        head_next, first_next, q_start_next, q_len_next, _k, k_len_next = _read_tile(records, gl.program_id(0), total, H, CAUSAL)
        for index in range(gl.program_id(0), total, gl.num_programs(0)):
            head, first, q_start, q_len, k_len = head_next, first_next, q_start_next, q_len_next, k_len_next
            head_next, first_next, q_start_next, q_len_next, _k, k_len_next = _read_tile(records, index + gl.num_programs(0), total, H, CAUSAL)
            step, done = _consume_tile(
                out, lse, head, first, q_start, q_len, k_len, step, done, total_q, H, window, scale, inv_divisor,
                q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, HALF, KIND, APPROX, CAUSAL, WINDOW, N, D, STAGES,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["num", "total_q", "window"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out, lse, offsets, num, records, count, counter, total_q, H, GROUP: gl.constexpr,
    q_head, k_head, v_head, window, scale, inv_divisor,
    KIND: gl.constexpr, APPROX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DRAWN: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over `records` (`_tiles.ranked_tiles`, 2M query rows each) of every head; zeroes the rows of `out` that none of the `num`
    sequences owns. Scores scale by `scale` > 0 (base 2 for softmax). DRAWN: programs draw their tiles, else each has an even share.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [4, M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, N, D], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ring, item_ready, item_empty = tail, tail, tail
    if DRAWN:
        ring, item_ready, item_empty = allocate(2)
    mbarrier.init(tail, count=1)
    for slot in gl.static_range(4):  # two tiles of two halves: the next tile's queries load while this tile's are in use
        mbarrier.init(q_ready.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out, lse, records, count, total_q, H, window, scale, inv_divisor,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, ring, item_ready, item_empty,
                        0, KIND, APPROX, CAUSAL, WINDOW, DRAWN, N, D, STAGES)),
            (_consume, (out, lse, records, count, total_q, H, window, scale, inv_divisor,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, ring, item_ready, item_empty,
                        1, KIND, APPROX, CAUSAL, WINDOW, DRAWN, N, D, STAGES)),
            (_produce, (q_desc, k_desc, v_desc, out, offsets, num, records, count, counter, total_q, H, GROUP, q_head, k_head, v_head, window,
                        q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, tail, ring, item_ready, item_empty,
                        CAUSAL, WINDOW, DRAWN, N, D, STAGES, 4)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
