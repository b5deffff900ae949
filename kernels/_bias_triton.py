"""Additive bias inside the attention kernels: a row of the position table by distance, one of the time table by bucket of a time difference.

Buckets (`kernels._masks.time_bucket`) come from fp32 arithmetic on the CPU and here, so that both agree on every pair: a time minus the sequence's
first key time, an int64, is kept as `high * 2**24 + low` in two fp32 numbers, exact where a history spans less than 2**48 units, whose differences
then round as int64 -> fp32 does. log2 is approximate on a GPU: close to an edge the edge itself is compared, elsewhere nothing is loaded for it.
"""

import triton
import triton.language as tl

PER_LOG2 = tl.constexpr(0.6931471805599453 / 0.301)  # buckets an octave
NEAR = tl.constexpr(1e-3)  # of a bucket, within which log2 is not trusted: its error is below 64 * 2**-22 octaves
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no inline assembly

# In assembly, because a load of Triton's own has a layout of its own, from which values go to that of the scores through shared memory, and is made
# asynchronous, through shared memory again. [Compiled for sm_90, 128 x 64 scores, 8 warps] 100 instructions a score with `tl.load` and `tl.log2`.
_ROW = tl.constexpr("""
{
    .reg .u64 address;
    mad.wide.s32 address, $2, 4, $1;
    ld.global.nc.f32 $0, [address];
}
""")
# log2(x) PER_LOG2 rounded down. x is compared with an edge of its bucket: one that is surely above or below it or, close to it, the exact one.
# Constants: PER_LOG2, 1/2, infinity, 0, NEAR. No predicate lives across the load: there are but seven.
_BUCKET = tl.constexpr("""
{
    .reg .pred below, close;
    .reg .u64 address;
    .reg .f32 y, part, edge;
    .reg .s32 bucket;
    lg2.approx.ftz.f32 y, $1;
    fma.rn.f32 y, y, 0f40136150, 0f3F000000;
    cvt.rmi.s32.f32 bucket, y;
    cvt.rn.f32.s32 part, bucket;
    sub.f32 part, y, part;
    sub.f32 part, part, 0f3F000000;
    setp.lt.f32 below, part, 0f00000000;
    selp.f32 edge, 0f7F800000, 0f00000000, below;
    abs.f32 part, part;
    setp.lt.f32 close, part, 0f3A83126F;
    mad.wide.s32 address, bucket, 4, $2;
    @close ld.global.nc.f32 edge, [address];
    setp.lt.f32 below, $1, edge;
    @below sub.s32 bucket, bucket, 1;
    mov.s32 $0, bucket;
}
""")


@triton.jit
def _look_up(table, index):
    """fp32 `table[index]` in the layout of `index`."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(_ROW, "=f,l,r", [table.to(tl.int64), index], dtype=tl.float32, is_pure=True, pack=1)
    return tl.load(table + index)


@triton.jit
def split_times(times, start, rows, length, base):
    """`(high, low)`, fp32 vectors, of `times[start + rows] - base`; rows outside of the sequence give `-base`."""
    t = tl.load(times + start + rows, mask=(rows >= 0) & (rows < length), other=0).to(tl.int64) - base
    return (t >> 24).to(tl.int32).to(tl.float32), (t & 16777215).to(tl.int32).to(tl.float32)


@triton.jit
def first_time(times, start, length):
    """What the sequence's times are counted from, int64."""
    return tl.load(times + start, mask=length > 0, other=0).to(tl.int64)


@triton.jit
def time_bucket(a_high, a_low, b_high, b_low, edges, rows):
    """Row of a time table of `rows` rows for every pair of (broadcast) times."""
    x = tl.maximum(tl.abs((a_high - b_high) * 16777216.0 + (a_low - b_low)), 1.0)
    if ASSEMBLY:
        bucket = tl.inline_asm_elementwise(_BUCKET, "=r,f,l", [x, edges.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)
    else:
        y = tl.log2(x) * PER_LOG2
        nearest = (y + 0.5).to(tl.int32)
        near = tl.abs(y - nearest.to(tl.float32)) < NEAR
        edge = tl.load(edges + nearest, mask=near, other=0.0)
        bucket = tl.where(near, tl.where(x >= edge, nearest, nearest - 1), y.to(tl.int32))
    return tl.minimum(bucket, rows - 1)


@triton.jit
def biased(
    s, distance, a_high, a_low, b_high, b_low, edges, column, position_table, position_rows, time_table, time_rows,
    KIND: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Scores `s` with what column `column` of the fp32 tables, stored as `(columns, rows)`, adds; in base 2 for softmax."""
    if POSITION:
        reach = (position_rows - 1) // 2
        middle = position_table + tl.cast(column, tl.int64) * position_rows + reach
        bias = _look_up(middle, tl.minimum(tl.maximum(distance, -reach), reach))
        s += bias * LOG2E if KIND == "softmax" else bias
    if TIME:
        first = time_table + tl.cast(column, tl.int64) * time_rows
        bias = _look_up(first, time_bucket(a_high, a_low, b_high, b_low, edges, time_rows))
        s += bias * LOG2E if KIND == "softmax" else bias
    return s
