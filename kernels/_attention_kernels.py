"""Triton kernels of jagged attention: forward, the fused backward for few queries, and the split backward (dK and dV, then dQ).

Legend: M query rows of a tile, N key rows, D head dim. Scores are kept in base 2 for softmax (`exp2` is one instruction), so
`scale` arrives multiplied by log2(e) there. Tensors are `(rows, heads, D)` with unit stride in D; row indices are 64-bit.

Loads are zero-filled past the end of a sequence, never with a neighbour's rows, so that a NaN or infinity stays in its own
sequence. Zero rows are mostly harmless without a mask: a zero key scores 0, and every activation maps 0 to 0 (without bias);
in the backward a zero dO, V or K annihilates the product. Only softmax's normaliser needs the mask, and causal, window and bias.
"""

import triton
import triton.language as tl

from kernels._bias_triton import biased, first_time, split_times

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh_approx(x):
    """tanh in one instruction of the special function unit; relative error 2**-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x, APPROX: tl.constexpr):
    if APPROX:
        return 0.5 + 0.5 * _tanh_approx(0.5 * x)
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def _tanh(x, APPROX: tl.constexpr):
    if APPROX:
        return _tanh_approx(x)
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def _activate(x, KIND: tl.constexpr, APPROX: tl.constexpr):
    if KIND == "gelu":
        half = 0.5 * x
        return half + half * _tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x), APPROX)
    if KIND == "silu":
        return x * _sigmoid(x, APPROX)
    if KIND == "relu":
        return tl.maximum(x, 0.0)
    return x


@triton.jit
def _activate_both(x, KIND: tl.constexpr, APPROX: tl.constexpr):
    """The activation and its derivative, sharing the transcendental."""
    if KIND == "gelu":
        square = x * x
        t = _tanh(x * (0.7978845608028654 + 0.035677408136300125 * square), APPROX)
        half = 0.5 + 0.5 * t
        slope = 0.5 * x * (1.0 - t * t) * (0.7978845608028654 + 0.1070322244089004 * square)
        return x * half, half + slope
    if KIND == "silu":
        s = _sigmoid(x, APPROX)
        value = x * s
        return value, s + value - value * s
    if KIND == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _keeps(delta, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    keep = delta >= 0 if CAUSAL else delta == delta
    if WINDOW:
        keep = keep & (delta < window)
        if not CAUSAL:
            keep = keep & (delta > -window)
    return keep


@triton.jit
def _load_rows(base, rows, length, stride, D: tl.constexpr, MASK: tl.constexpr):
    """`(len(rows), D)` from a pointer to the sequence's first row; rows at or past `length` are zero."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    if MASK:
        return tl.load(pointers, mask=(rows < length)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def _forward_block(
    q, acc, m, norm, k_base, v_base, start, rows, k_len, shift, k_start, q_high, q_low, base, window,
    position_table, position_rows, time_table, time_rows, k_times, edges, column, scale, k_stride, v_stride,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One step over N keys. EDGE: the block may cross the end of the keys or the border of the mask."""
    columns = start + tl.arange(0, N)
    k = _load_rows(k_base, columns, k_len, k_stride, D, EDGE)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if POSITION or TIME or (EDGE and (CAUSAL or WINDOW)):
        delta = rows[:, None] + shift - columns[None, :]
        k_high = q_high
        k_low = q_low
        if TIME:
            k_high, k_low = split_times(k_times, k_start, columns, k_len, base)
        s = biased(
            s, delta, q_high[:, None], q_low[:, None], k_high[None, :], k_low[None, :], edges, column,
            position_table, position_rows, time_table, time_rows, KIND, POSITION, TIME, LOG2E,
        )  # fmt: skip
    v = _load_rows(v_base, columns, k_len, v_stride, D, EDGE)
    if KIND == "softmax":
        if EDGE:
            keep = (columns < k_len)[None, :]
            if CAUSAL or WINDOW:
                keep = keep & _keeps(delta, window, CAUSAL, WINDOW)
            s = tl.where(keep, s, -float("inf"))
        m_next = tl.maximum(m, tl.max(s, axis=1))
        m_safe = tl.where(m_next == -float("inf"), 0.0, m_next) if EDGE else m_next
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        norm = norm * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        m = m_next
    else:
        p = _activate(s, KIND, APPROX)
        if EDGE and (CAUSAL or WINDOW):
            keep = _keeps(delta, window, CAUSAL, WINDOW)
            if not CAUSAL:  # where a row of the sequence keeps no column past the keys
                keep = keep & (columns < k_len)[None, :]
            p = tl.where(keep, p, 0.0)
        elif EDGE and (POSITION or TIME):
            p = tl.where((columns < k_len)[None, :], p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m, norm


@triton.jit
def _key_range(first, last, shift, k_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """Columns `[low, high)` that rows `[first, last)` touch and `[full_low, full_high)` that all of them keep; block-aligned low ends."""
    low = 0
    high = k_len
    full_low = 0
    full_high = (k_len // N) * N
    if CAUSAL:
        high = tl.minimum(k_len, tl.maximum(last + shift, 0))
        full_high = tl.minimum(full_high, (tl.maximum(first + shift + 1, 0) // N) * N)
    if WINDOW:
        low = (tl.maximum(first + shift - window + 1, 0) // N) * N
        full_low = tl.cdiv(tl.maximum(last + shift - window, 0), N) * N
        if not CAUSAL:
            high = tl.minimum(k_len, tl.maximum(last + shift + window - 1, 0))
            full_high = tl.minimum(full_high, (tl.maximum(first + shift + window, 0) // N) * N)
        full_low = tl.minimum(tl.maximum(full_low, low), tl.maximum(high, low))
    full_high = tl.maximum(full_high, full_low)
    return low, high, full_low, full_high


@triton.jit(do_not_specialize=["total_q", "window", "position_rows", "time_rows"])
def attention_forward_kernel(
    q, k, v, out, lse, q_offsets, k_offsets, slots,
    position_table, time_table, q_times, k_times, edges, position_rows, time_rows, SHARE: tl.constexpr,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, total_q, H, GROUP: tl.constexpr, window, scale, inv_divisor,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns M query rows of one head. SPLIT: run the keys that need no mask in a loop of their own."""
    head = tl.program_id(0) % H
    slot = tl.program_id(0) // H
    sequence = tl.load(slots + slot)
    if sequence < 0:
        return
    q_start = tl.load(q_offsets + sequence).to(tl.int64)
    q_len = (tl.load(q_offsets + sequence + 1).to(tl.int64) - q_start).to(tl.int32)
    k_start = tl.load(k_offsets + sequence).to(tl.int64)
    k_len = (tl.load(k_offsets + sequence + 1).to(tl.int64) - k_start).to(tl.int32)
    tile = slot - (q_start // M).to(tl.int32) - sequence
    if tile * M >= q_len:
        return
    if CAUSAL:
        tile = tl.cdiv(q_len, M) - 1 - tile  # the rows with most keys first: the last wave is then short
    first = tile * M
    rows = first + tl.arange(0, M)
    shift = k_len - q_len
    q_tile = _load_rows(q + q_start * q_stride + head * q_head, rows, q_len, q_stride, D, True)
    k_base = k + k_start * k_stride + (head // GROUP) * k_head
    v_base = v + k_start * v_stride + (head // GROUP) * v_head
    base = k_start
    q_high = rows.to(tl.float32)
    q_low = q_high
    if TIME:
        base = first_time(k_times, k_start, k_len)
        q_high, q_low = split_times(q_times, q_start, rows, q_len, base)

    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], -float("inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    last = tl.minimum(first + M, q_len)
    low, high, full_low, full_high = _key_range(first, last, shift, k_len, window, CAUSAL, WINDOW, N)
    if not SPLIT:
        full_low = high
        full_high = high
    if WINDOW or not SPLIT:
        for start in tl.range(low, tl.minimum(full_low, high), N, num_stages=STAGES):
            acc, m, norm = _forward_block(
                q_tile, acc, m, norm, k_base, v_base, start, rows, k_len, shift, k_start, q_high, q_low, base, window,
                position_table, position_rows, time_table, time_rows, k_times, edges, head // SHARE, scale, k_stride, v_stride,
                KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, True, PRECISION, N, D,
            )  # fmt: skip
    if SPLIT:
        for start in tl.range(full_low, full_high, N, num_stages=STAGES):
            acc, m, norm = _forward_block(
                q_tile, acc, m, norm, k_base, v_base, start, rows, k_len, shift, k_start, q_high, q_low, base, window,
                position_table, position_rows, time_table, time_rows, k_times, edges, head // SHARE, scale, k_stride, v_stride,
                KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, False, PRECISION, N, D,
            )  # fmt: skip
        for start in tl.range(full_high, high, N, num_stages=STAGES if CAUSAL or WINDOW else 1):
            acc, m, norm = _forward_block(
                q_tile, acc, m, norm, k_base, v_base, start, rows, k_len, shift, k_start, q_high, q_low, base, window,
                position_table, position_rows, time_table, time_rows, k_times, edges, head // SHARE, scale, k_stride, v_stride,
                KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, True, PRECISION, N, D,
            )  # fmt: skip

    if KIND == "softmax":
        acc = acc / tl.where(norm == 0, 1.0, norm)[:, None]
        tl.store(lse + tl.cast(head, tl.int64) * total_q + q_start + rows, (m + tl.log2(norm)) / LOG2E, mask=rows < q_len)
    else:
        acc = acc * inv_divisor
    o_rows = (q_start + rows)[:, None] * (H * D) + head * D + tl.arange(0, D)[None, :]
    tl.store(out + o_rows, acc.to(out.dtype.element_ty), mask=(rows < q_len)[:, None])


@triton.jit(do_not_specialize=["rows"])
def softmax_delta_kernel(grad, out, delta, rows, g_stride, g_head, o_stride, o_head, HEADS: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """`delta[h, i] = sum_d grad[i, h, d] * out[i, h, d]`, the softmax backward's row constant."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    column = tl.arange(0, D)[None, :]
    inside = (row < rows)[:, None]
    for head in tl.static_range(HEADS):
        g = tl.load(grad + row[:, None] * g_stride + head * g_head + column, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(out + row[:, None] * o_stride + head * o_head + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(delta + head * tl.cast(rows, tl.int64) + row, tl.sum(g * o, axis=1), mask=row < rows)


@triton.jit
def _backward_tile(
    k, v, q, do, rows, columns, q_len, shift, q_start, row_stats, lse, delta, q_times, k_high, k_low, base,
    position_table, position_rows, time_table, time_rows, edges, column, window, scale,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`(weights^T, dscores^T)`, each `(N, M)`, for N keys and M queries; without the factors scale and 1 / divisor."""
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    masked: tl.constexpr = EDGE and (CAUSAL or WINDOW)
    if POSITION or TIME or masked:
        distance = rows[None, :] + shift - columns[:, None]
    if POSITION or TIME:
        q_high = k_high
        q_low = k_low
        if TIME:
            q_high, q_low = split_times(q_times, q_start, rows, q_len, base)
        s = biased(
            s, distance, q_high[None, :], q_low[None, :], k_high[:, None], k_low[:, None], edges, column,
            position_table, position_rows, time_table, time_rows, KIND, POSITION, TIME, LOG2E,
        )  # fmt: skip
    if KIND == "softmax":
        row_lse = tl.load(lse + row_stats + rows, mask=rows < q_len, other=float("inf")) * LOG2E
        row_delta = tl.load(delta + row_stats + rows, mask=rows < q_len, other=0.0)
        # a probability is at most 1: the bound keeps zero-filled keys finite, and they then meet only zero operands
        p = tl.exp2(tl.minimum(s - row_lse[None, :], 0.0))
        if masked:
            p = tl.where(_keeps(distance, window, CAUSAL, WINDOW), p, 0.0)
        ds = p * (dp - row_delta[None, :])
    else:
        p, slope = _activate_both(s, KIND, APPROX)
        if masked:
            keep = _keeps(distance, window, CAUSAL, WINDOW)
            p = tl.where(keep, p, 0.0)
            slope = tl.where(keep, slope, 0.0)
        ds = slope * dp
    return p, ds


@triton.jit
def _row_range(first, last, shift, q_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr):
    """Rows `[low, high)` that keep some column of `[first, last)`, and `[full_low, full_high)` that keep all; tile-aligned low ends."""
    low = 0
    high = q_len
    full_low = 0
    full_high = (q_len // M) * M
    if CAUSAL:
        low = (tl.maximum(first - shift, 0) // M) * M
        full_low = tl.cdiv(tl.maximum(last - 1 - shift, 0), M) * M
    if WINDOW:
        high = tl.minimum(high, tl.maximum(last - 1 + window - shift, 0))
        full_high = tl.minimum(full_high, (tl.maximum(first + window - shift, 0) // M) * M)
        if not CAUSAL:
            low = (tl.maximum(first - window + 1 - shift, 0) // M) * M
            full_low = tl.cdiv(tl.maximum(last - window - shift, 0), M) * M
    low = tl.minimum(low, high)
    full_low = tl.minimum(tl.maximum(full_low, low), tl.maximum(high, low))
    full_high = tl.maximum(full_high, full_low)
    return low, high, full_low, full_high


@triton.jit
def _store_rows(base, rows, length, stride, x, D: tl.constexpr):
    pointers = base + rows.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(rows < length)[:, None])


@triton.jit
def _keys_step(
    k, v, dk, dv, start, q_base, do_base, columns, q_len, shift, q_start, row_stats, lse, delta, q_times, k_high, k_low, base,
    position_table, position_rows, time_table, time_rows, edges, column, window, scale, q_stride, do_stride,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr,
    TIME: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    rows = start + tl.arange(0, M)
    q = _load_rows(q_base, rows, q_len, q_stride, D, EDGE)
    do = _load_rows(do_base, rows, q_len, do_stride, D, EDGE)
    p, ds = _backward_tile(
        k, v, q, do, rows, columns, q_len, shift, q_start, row_stats, lse, delta, q_times, k_high, k_low, base,
        position_table, position_rows, time_table, time_rows, edges, column, window, scale,
        KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, EDGE, PRECISION,
    )  # fmt: skip
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = ds.to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["total_q", "window", "position_rows", "time_rows"])
def keys_kernel(
    grad, q, k, v, lse, delta, dk, dv, q_offsets, k_offsets, slots,
    position_table, time_table, q_times, k_times, edges, position_rows, time_rows, SHARE: tl.constexpr,
    g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, total_q, H, GROUP: tl.constexpr,
    window, scale, dq_scale, inv_divisor,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of N keys and one K/V head, over the queries of all heads that share it."""
    kv_heads = H // GROUP
    kv_head = tl.program_id(0) % kv_heads
    slot = tl.program_id(0) // kv_heads
    sequence = tl.load(slots + slot)
    if sequence < 0:
        return
    q_start = tl.load(q_offsets + sequence).to(tl.int64)
    q_len = (tl.load(q_offsets + sequence + 1).to(tl.int64) - q_start).to(tl.int32)
    k_start = tl.load(k_offsets + sequence).to(tl.int64)
    k_len = (tl.load(k_offsets + sequence + 1).to(tl.int64) - k_start).to(tl.int32)
    shift = k_len - q_len
    first = (slot - (k_start // N).to(tl.int32) - sequence) * N
    if first >= k_len:
        return
    k_base = k + k_start * k_stride + kv_head * k_head
    v_base = v + k_start * v_stride + kv_head * v_head
    out_base = k_start * (kv_heads * D) + kv_head * D

    columns = first + tl.arange(0, N)
    k_tile = _load_rows(k_base, columns, k_len, k_stride, D, True)
    v_tile = _load_rows(v_base, columns, k_len, v_stride, D, True)
    base = k_start
    k_high = columns.to(tl.float32)
    k_low = k_high
    if TIME:
        base = first_time(k_times, k_start, k_len)
        k_high, k_low = split_times(k_times, k_start, columns, k_len, base)
    dk_acc = tl.zeros([N, D], tl.float32)
    dv_acc = tl.zeros([N, D], tl.float32)
    last = tl.minimum(first + N, k_len)
    low, high, full_low, full_high = _row_range(first, last, shift, q_len, window, CAUSAL, WINDOW, M)
    if not SPLIT:
        full_low = high
        full_high = high
    for sub in tl.static_range(GROUP):
        head = kv_head * GROUP + sub
        q_base = q + q_start * q_stride + head * q_head
        do_base = grad + q_start * g_stride + head * g_head
        row_stats = tl.cast(head, tl.int64) * total_q + q_start
        if CAUSAL or WINDOW or not SPLIT:
            for start in tl.range(low, tl.minimum(full_low, high), M, num_stages=STAGES):
                dk_acc, dv_acc = _keys_step(
                    k_tile, v_tile, dk_acc, dv_acc, start, q_base, do_base, columns, q_len, shift, q_start, row_stats, lse, delta,
                    q_times, k_high, k_low, base, position_table, position_rows, time_table, time_rows, edges, head // SHARE,
                    window, scale, q_stride, g_stride,
                    KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, True, PRECISION, M, D,
                )  # fmt: skip
        if SPLIT:
            for start in tl.range(full_low, full_high, M, num_stages=STAGES):
                dk_acc, dv_acc = _keys_step(
                    k_tile, v_tile, dk_acc, dv_acc, start, q_base, do_base, columns, q_len, shift, q_start, row_stats, lse, delta,
                    q_times, k_high, k_low, base, position_table, position_rows, time_table, time_rows, edges, head // SHARE,
                    window, scale, q_stride, g_stride,
                    KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, False, PRECISION, M, D,
                )  # fmt: skip
            for start in tl.range(full_high, high, M, num_stages=STAGES if WINDOW else 1):
                dk_acc, dv_acc = _keys_step(
                    k_tile, v_tile, dk_acc, dv_acc, start, q_base, do_base, columns, q_len, shift, q_start, row_stats, lse, delta,
                    q_times, k_high, k_low, base, position_table, position_rows, time_table, time_rows, edges, head // SHARE,
                    window, scale, q_stride, g_stride,
                    KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, True, PRECISION, M, D,
                )  # fmt: skip
    _store_rows(dk + out_base, columns, k_len, kv_heads * D, dk_acc * dq_scale, D)
    _store_rows(dv + out_base, columns, k_len, kv_heads * D, dv_acc * inv_divisor, D)


@triton.jit(do_not_specialize=["total_q", "window", "position_rows", "time_rows"])
def few_queries_kernel(
    grad, q, k, v, lse, delta, dq, dk, dv, q_offsets, k_offsets, order,
    position_table, time_table, q_times, k_times, edges, position_rows, time_rows, SHARE: tl.constexpr,
    g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, total_q, H,
    window, scale, dq_scale, inv_divisor,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of one (sequence, head) whose queries fit one tile: keys pass once, dQ stays in registers (transposed).

    Longer queries than M take further passes that add to dK and dV; correct, but what `keys_kernel` is for. H = Hkv only.
    """
    head = tl.program_id(0) % H
    sequence = tl.load(order + tl.program_id(0) // H)
    q_start = tl.load(q_offsets + sequence).to(tl.int64)
    q_len = (tl.load(q_offsets + sequence + 1).to(tl.int64) - q_start).to(tl.int32)
    k_start = tl.load(k_offsets + sequence).to(tl.int64)
    k_len = (tl.load(k_offsets + sequence + 1).to(tl.int64) - k_start).to(tl.int32)
    shift = k_len - q_len
    row_stats = tl.cast(head, tl.int64) * total_q + q_start
    q_base = q + q_start * q_stride + head * q_head
    do_base = grad + q_start * g_stride + head * g_head
    k_base = k + k_start * k_stride + head * k_head
    v_base = v + k_start * v_stride + head * v_head
    out_base = k_start * (H * D) + head * D
    base = k_start
    if TIME:
        base = first_time(k_times, k_start, k_len)
    for start in range(0, tl.maximum(q_len, 1), M):
        rows = start + tl.arange(0, M)
        q_tile = _load_rows(q_base, rows, q_len, q_stride, D, True)
        do_tile = _load_rows(do_base, rows, q_len, g_stride, D, True)
        dq_acc = tl.zeros([D, M], tl.float32)
        for first in tl.range(0, k_len, N, num_stages=STAGES):
            columns = first + tl.arange(0, N)
            k_tile = _load_rows(k_base, columns, k_len, k_stride, D, True)
            v_tile = _load_rows(v_base, columns, k_len, v_stride, D, True)
            k_high = columns.to(tl.float32)
            k_low = k_high
            if TIME:
                k_high, k_low = split_times(k_times, k_start, columns, k_len, base)
            p, ds = _backward_tile(
                k_tile, v_tile, q_tile, do_tile, rows, columns, q_len, shift, q_start, row_stats, lse, delta, q_times, k_high, k_low, base,
                position_table, position_rows, time_table, time_rows, edges, head // SHARE, window, scale,
                KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, True, PRECISION,
            )  # fmt: skip
            ds = ds.to(q_tile.dtype)
            dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, input_precision=PRECISION) * inv_divisor
            dk_tile = tl.dot(ds, q_tile, input_precision=PRECISION) * dq_scale
            dq_acc = tl.dot(tl.trans(k_tile), ds, dq_acc, input_precision=PRECISION)
            if start > 0:
                dv_tile += _load_rows(dv + out_base, columns, k_len, H * D, D, True).to(tl.float32)
                dk_tile += _load_rows(dk + out_base, columns, k_len, H * D, D, True).to(tl.float32)
            _store_rows(dv + out_base, columns, k_len, H * D, dv_tile, D)
            _store_rows(dk + out_base, columns, k_len, H * D, dk_tile, D)
        _store_rows(dq + q_start * (H * D) + head * D, rows, q_len, H * D, tl.trans(dq_acc) * dq_scale, D)
        tl.debug_barrier()  # a further pass reads the dK and dV that other threads of this program wrote


@triton.jit
def _dq_step(
    q, do, dq, start, k_base, v_base, rows, k_len, shift, k_start, q_high, q_low, base, row_lse, row_delta, k_times,
    position_table, position_rows, time_table, time_rows, edges, column, window, scale, k_stride, v_stride,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr,
    TIME: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    columns = start + tl.arange(0, N)
    k = _load_rows(k_base, columns, k_len, k_stride, D, EDGE)
    v = _load_rows(v_base, columns, k_len, v_stride, D, EDGE)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    masked: tl.constexpr = EDGE and (CAUSAL or WINDOW)
    if POSITION or TIME or masked:
        distance = rows[:, None] + shift - columns[None, :]
    if POSITION or TIME:
        k_high = q_high
        k_low = q_low
        if TIME:
            k_high, k_low = split_times(k_times, k_start, columns, k_len, base)
        s = biased(
            s, distance, q_high[:, None], q_low[:, None], k_high[None, :], k_low[None, :], edges, column,
            position_table, position_rows, time_table, time_rows, KIND, POSITION, TIME, LOG2E,
        )  # fmt: skip
    if KIND == "softmax":
        ds = tl.exp2(tl.minimum(s - row_lse[:, None], 0.0)) * (dp - row_delta[:, None])
    else:
        _value, slope = _activate_both(s, KIND, APPROX)
        ds = slope * dp
    if masked:
        ds = tl.where(_keeps(distance, window, CAUSAL, WINDOW), ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["total_q", "window", "position_rows", "time_rows"])
def queries_kernel(
    grad, q, k, v, lse, delta, dq, q_offsets, k_offsets, slots,
    position_table, time_table, q_times, k_times, edges, position_rows, time_rows, SHARE: tl.constexpr,
    g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, total_q, H, GROUP: tl.constexpr,
    window, scale, dq_scale,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of M rows of one head: the forward's loop with the score gradient in the place of the weights. SPLIT as in the forward."""
    head = tl.program_id(0) % H
    slot = tl.program_id(0) // H
    sequence = tl.load(slots + slot)
    if sequence < 0:
        return
    q_start = tl.load(q_offsets + sequence).to(tl.int64)
    q_len = (tl.load(q_offsets + sequence + 1).to(tl.int64) - q_start).to(tl.int32)
    k_start = tl.load(k_offsets + sequence).to(tl.int64)
    k_len = (tl.load(k_offsets + sequence + 1).to(tl.int64) - k_start).to(tl.int32)
    tile = slot - (q_start // M).to(tl.int32) - sequence
    if tile * M >= q_len:
        return
    if CAUSAL:
        tile = tl.cdiv(q_len, M) - 1 - tile
    first = tile * M
    rows = first + tl.arange(0, M)
    shift = k_len - q_len
    q_tile = _load_rows(q + q_start * q_stride + head * q_head, rows, q_len, q_stride, D, True)
    do_tile = _load_rows(grad + q_start * g_stride + head * g_head, rows, q_len, g_stride, D, True)
    k_base = k + k_start * k_stride + (head // GROUP) * k_head
    v_base = v + k_start * v_stride + (head // GROUP) * v_head
    base = k_start
    q_high = rows.to(tl.float32)
    q_low = q_high
    if TIME:
        base = first_time(k_times, k_start, k_len)
        q_high, q_low = split_times(q_times, q_start, rows, q_len, base)
    row_lse = rows.to(tl.float32)
    row_delta = row_lse
    if KIND == "softmax":
        row_stats = tl.cast(head, tl.int64) * total_q + q_start
        row_lse = tl.load(lse + row_stats + rows, mask=rows < q_len, other=float("inf")) * LOG2E
        row_delta = tl.load(delta + row_stats + rows, mask=rows < q_len, other=0.0)
    dq_acc = tl.zeros([M, D], tl.float32)
    last = tl.minimum(first + M, q_len)
    low, high, full_low, full_high = _key_range(first, last, shift, k_len, window, CAUSAL, WINDOW, N)
    if not SPLIT:
        full_low = high
        full_high = high
    if WINDOW or not SPLIT:
        for start in tl.range(low, tl.minimum(full_low, high), N, num_stages=STAGES):
            dq_acc = _dq_step(
                q_tile, do_tile, dq_acc, start, k_base, v_base, rows, k_len, shift, k_start, q_high, q_low, base, row_lse, row_delta,
                k_times, position_table, position_rows, time_table, time_rows, edges, head // SHARE, window, scale, k_stride, v_stride,
                KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, True, PRECISION, N, D,
            )  # fmt: skip
    if SPLIT:
        for start in tl.range(full_low, full_high, N, num_stages=STAGES):
            dq_acc = _dq_step(
                q_tile, do_tile, dq_acc, start, k_base, v_base, rows, k_len, shift, k_start, q_high, q_low, base, row_lse, row_delta,
                k_times, position_table, position_rows, time_table, time_rows, edges, head // SHARE, window, scale, k_stride, v_stride,
                KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, False, PRECISION, N, D,
            )  # fmt: skip
        for start in tl.range(full_high, high, N, num_stages=STAGES if CAUSAL or WINDOW else 1):
            dq_acc = _dq_step(
                q_tile, do_tile, dq_acc, start, k_base, v_base, rows, k_len, shift, k_start, q_high, q_low, base, row_lse, row_delta,
                k_times, position_table, position_rows, time_table, time_rows, edges, head // SHARE, window, scale, k_stride, v_stride,
                KIND, APPROX, CAUSAL, WINDOW, POSITION, TIME, True, PRECISION, N, D,
            )  # fmt: skip
    _store_rows(dq + q_start * (H * D) + head * D, rows, q_len, H * D, dq_acc * dq_scale, D)
