"""Additive bias inside the attention kernels: a row of the position table by distance, one of the time table by bucket of a time difference.

Buckets (`kernels._masks.time_bucket`) come from fp32 arithmetic on the CPU and here, so that both agree on every pair: a time minus the sequence's
first key time, an int64, is kept as `high * 2**24 + low` in two fp32 numbers, exact where a history spans less than 2**48 units, whose differences
then round as int64 -> fp32 does. log2 is approximate on a GPU: close to an edge the edge itself is compared, elsewhere nothing is loaded for it.
"""

import triton
import triton.language as tl

PER_LOG2 = tl.constexpr(0.6931471805599453 / 0.301)  # buckets an octave
NEAR = tl.constexpr(1e-3)  # of a bucket, within which log2 is not trusted: its error is below 64 * 2**-22 octaves


@triton.jit
def split_times(times, start, rows, length, base):
    """`(high, low)`, fp32 vectors, of `times[start + rows] - base`; rows outside of the sequence give `-base`."""
    t = tl.load(times + start + rows, mask=(rows >= 0) & (rows < length), other=0).to(tl.int64) - base
    high = t >> 24
    return high.to(tl.float32), (t - (high << 24)).to(tl.float32)


@triton.jit
def first_time(times, start, length):
    """What the sequence's times are counted from, int64."""
    return tl.load(times + start, mask=length > 0, other=0).to(tl.int64)


@triton.jit
def time_bucket(a_high, a_low, b_high, b_low, edges, rows):
    """Row of a time table of `rows` rows for every pair of (broadcast) times."""
    x = tl.maximum(tl.abs((a_high - b_high) * 16777216.0 + (a_low - b_low)), 1.0)
    y = tl.log2(x) * PER_LOG2
    nearest = (y + 0.5).to(tl.int32)
    near = tl.abs(y - nearest.to(tl.float32)) < NEAR
    edge = tl.load(edges + nearest, mask=near, other=0.0)
    bucket = tl.where(near, tl.where(x >= edge, nearest, nearest - 1), y.to(tl.int32))
    return tl.minimum(bucket, rows - 1)


@triton.jit
def position_row(distance, rows):
    """Row of a position table of `rows` = 2P - 1 rows."""
    reach = (rows - 1) // 2
    return tl.minimum(tl.maximum(distance, -reach), reach) + reach


@triton.jit
def biased(
    s, distance, a_high, a_low, b_high, b_low, edges, head, position_table, position_rows, time_table, time_rows, heads,
    KIND: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Scores `s` with what the tables `(rows, heads)` add, in base 2 for softmax."""
    if POSITION:
        bias = tl.load(position_table + position_row(distance, position_rows) * heads + head).to(tl.float32)
        s += bias * LOG2E if KIND == "softmax" else bias
    if TIME:
        bias = tl.load(time_table + time_bucket(a_high, a_low, b_high, b_low, edges, time_rows) * heads + head).to(tl.float32)
        s += bias * LOG2E if KIND == "softmax" else bias
    return s
