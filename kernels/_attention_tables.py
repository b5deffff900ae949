"""Gradients of the two bias tables, in a pass of its own that repeats bitwise: no atomics, partial sums in fixed places, added in a fixed order.

With ds_ij the gradient of the biased score, d position[r] sums ds over the pairs at one distance, d time[b] over those of one bucket. Tiles of
M x M pairs whose rows are counted from the end of the keys lie on diagonals, and all tiles of a diagonal, of every sequence and head, have the same
distances at the same places: they add up elementwise in registers, and only the sum of a diagonal is split by distance. Diagonals beyond the
table's reach all belong to its first or last row. Times have no such order: a tile adds each of its buckets by itself, few where times rise.

Scores and their gradients are computed again (two products); heads that share a table row add up before anything else is done. [Measured H200, HSTU,
L <= 2048, H = 4, D = 128] tables shared by heads 11.0 ms of the backward's 27, 7.4 for positions alone; one stage in 128 registers 16.2;
buckets added one by one 11.8; a column a head 26. With float32 atomics into 32 copies of the tables the backward took 108.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels._attention_kernels import LOG2E, _activate_both, _keeps
from kernels._bias_triton import ASSEMBLY, biased, first_time, split_times, time_bucket
from kernels._launch import cdiv, next_power_of_2, run
from kernels._tiles import _kept

PROGRAMS = 2048  # about 16 for each multiprocessor of an H200: diagonals differ in length
MAX_SLOTS = 64
SCRATCH = 1 << 24  # fp32 partial sums of diagonals at most, unless one split of the sequences needs more


@triton.jit
def _aligned_rows(base, rows, length, stride, D: tl.constexpr):
    """`(len(rows), D)`; rows before 0, which those counted from the end of longer keys can be, and past `length` are zero."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=((rows >= 0) & (rows < length))[:, None], other=0.0)


@triton.jit
def _wider(first, last, other_first, other_last):
    return tl.minimum(first, other_first), tl.maximum(last, other_last)


@triton.jit
def _range(bucket, above):
    """The least of the buckets that are not negative (`above` where there is none) and the greatest."""
    least = tl.where(bucket < 0, above, bucket)
    if ASSEMBLY:
        return tl.reduce((tl.ravel(least), tl.ravel(bucket)), 0, _wider)
    return tl.min(least), tl.max(bucket)


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _four_sums(bucket, x, first):
    """Sums of x over the pairs of four buckets, in one pass through shared memory (where compiled: the interpreter adds tuples one by one)."""
    a = tl.where(bucket == first, x, 0.0)
    b = tl.where(bucket == first + 1, x, 0.0)
    c = tl.where(bucket == first + 2, x, 0.0)
    d = tl.where(bucket == first + 3, x, 0.0)
    if ASSEMBLY:
        return tl.reduce((tl.ravel(a), tl.ravel(b), tl.ravel(c), tl.ravel(d)), 0, _add_four)
    return tl.sum(a), tl.sum(b), tl.sum(c), tl.sum(d)


@triton.jit(do_not_specialize=[
    "total_q", "position_rows", "time_rows", "num_sequences", "slots", "splits", "along", "blocks", "window",
])  # fmt: skip
def tables_kernel(
    grad, q, k, v, lse, delta, q_offsets, k_offsets, longest,
    position_table, time_table, q_times, k_times, edges, position_rows, time_rows, SHARE: tl.constexpr,
    diagonals, beyond, histograms,
    g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, total_q, H, GROUP: tl.constexpr,
    num_sequences, slots, splits, along, blocks, window, scale,
    KIND: tl.constexpr, APPROX: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, PRECISION: tl.constexpr,
    BUCKETS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has the diagonals slot, slot + slots, ... (0, 1, -1, 2, ... blocks off the main one) of every `splits / along`-th sequence, of whose
    tiles it takes every `along`-th, for the SHARE heads of one column of the tables."""
    columns_of_table = H // SHARE
    column = tl.program_id(0) % columns_of_table
    slot = tl.program_id(0) // columns_of_table % slots  # programs of the same sequences run together and find them in the L2 cache
    split = tl.program_id(0) // columns_of_table // slots
    out = (split * columns_of_table + column).to(tl.int64)
    place = tl.arange(0, M)
    bins = tl.arange(0, BUCKETS)
    histogram = tl.zeros([BUCKETS], tl.float32)
    above = 0.0
    below = 0.0
    end = tl.load(longest)
    if not CAUSAL:
        end = 2 * end
    if WINDOW:
        end = tl.minimum(end, 2 * (window // M + 2))
    for index in range(slot, end, slots):
        diagonal = index
        if not CAUSAL:
            diagonal = tl.where(index % 2 == 1, (index + 1) // 2, -(index // 2))
        distance = diagonal * M + place[:, None] - place[None, :]
        total = tl.zeros([M, M], tl.float32)
        for sequence in range(split // along, num_sequences, splits // along):
            q_start = tl.load(q_offsets + sequence).to(tl.int64)
            q_len = (tl.load(q_offsets + sequence + 1).to(tl.int64) - q_start).to(tl.int32)
            k_start = tl.load(k_offsets + sequence).to(tl.int64)
            k_len = (tl.load(k_offsets + sequence + 1).to(tl.int64) - k_start).to(tl.int32)
            shift = k_len - q_len
            first_block = (shift + 1073741824) // M - 1073741824 // M  # floor(shift / M), of a shift that may be negative
            low = tl.maximum(first_block - diagonal, 0)
            high = tl.where(q_len > 0, tl.minimum(tl.cdiv(k_len, M), tl.cdiv(k_len, M) - diagonal), 0)
            base = k_start
            if TIME:
                base = first_time(k_times, k_start, k_len)
            for block in range(low + split % along, high, along):
                columns = block * M + place
                rows = (block + diagonal) * M + place - shift
                owned = (rows >= 0) & (rows < q_len)
                keep = owned[:, None] & (columns < k_len)[None, :]
                if CAUSAL or WINDOW:
                    keep = keep & _keeps(distance, window, CAUSAL, WINDOW)
                q_high = place.to(tl.float32)
                q_low = q_high
                k_high = q_high
                k_low = q_high
                if TIME:
                    q_high, q_low = split_times(q_times, q_start, rows, q_len, base)
                    k_high, k_low = split_times(k_times, k_start, columns, k_len, base)
                bias = biased(
                    tl.zeros([M, M], tl.float32), distance, q_high[:, None], q_low[:, None], k_high[None, :], k_low[None, :], edges, column,
                    position_table, position_rows, time_table, time_rows, KIND, POSITION, TIME, LOG2E,
                )  # fmt: skip
                ds = tl.zeros([M, M], tl.float32)
                for sub in tl.range(0, SHARE, num_stages=STAGES):
                    head = column * SHARE + sub
                    q_tile = _aligned_rows(q + q_start * q_stride + head * q_head, rows, q_len, q_stride, D)
                    k_tile = _aligned_rows(k + k_start * k_stride + (head // GROUP) * k_head, columns, k_len, k_stride, D)
                    do_tile = _aligned_rows(grad + q_start * g_stride + head * g_head, rows, q_len, g_stride, D)
                    v_tile = _aligned_rows(v + k_start * v_stride + (head // GROUP) * v_head, columns, k_len, v_stride, D)
                    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale + bias
                    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                    if KIND == "softmax":
                        stats = tl.cast(head, tl.int64) * total_q + q_start + rows
                        row_lse = tl.load(lse + stats, mask=owned, other=float("inf")) * LOG2E
                        row_delta = tl.load(delta + stats, mask=owned, other=0.0)
                        ds += tl.exp2(tl.minimum(s - row_lse[:, None], 0.0)) * (dp - row_delta[:, None])
                    else:
                        _value, slope = _activate_both(s, KIND, APPROX)
                        ds += slope * dp
                ds = tl.where(keep, ds, 0.0)
                total += ds
                if TIME:
                    bucket = time_bucket(q_high[:, None], q_low[:, None], k_high[None, :], k_low[None, :], edges, time_rows)
                    bucket = tl.where(ds != 0.0, bucket, -1)
                    first, last = _range(bucket, BUCKETS)
                    for one in range(first, last + 1, 4):
                        a, b, c, d = _four_sums(bucket, ds, one)
                        histogram += tl.where(bins == one, a, tl.where(bins == one + 1, b, 0.0))
                        histogram += tl.where(bins == one + 2, c, tl.where(bins == one + 3, d, 0.0))
        if POSITION:
            if index < blocks:
                target = diagonals + (out * blocks + diagonal + (0 if CAUSAL else blocks // 2)) * (M * M)
                tl.store(target + place[:, None] * M + place[None, :], total)
            else:
                far = tl.sum(total)
                above += tl.where(diagonal > 0, far, 0.0)
                below += tl.where(diagonal > 0, 0.0, far)
    if POSITION:
        tl.store(beyond + (out * slots + slot) * 2, below)
        tl.store(beyond + (out * slots + slot) * 2 + 1, above)
    if TIME:
        tl.store(histograms + (out * slots + slot) * BUCKETS + bins, histogram)


def table_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, offsets: tuple[Tensor, Tensor], bias: tuple,
    *, bias_arguments: list, strides: list[int], window: int, scale: float, meta: dict, launch: dict | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of the position and the time table, fp32, without the factor 1 / divisor; None for an absent table. `launch` forces stages, warps and
    registers (tuning)."""
    position, time = bias[:2]
    heads, head_dim, num = q.shape[1], q.shape[2], offsets[0].shape[0] - 1
    share = meta["SHARE"]
    columns, m = heads // share, 32 if q.dtype == torch.float32 else 64
    sides = 0 if position is None else cdiv(position.shape[0] // 2 + m - 1, m)  # diagonals on one side that the table tells apart
    blocks = sides if meta["CAUSAL"] else 2 * sides - 1 if sides else 0
    slots = min(max(blocks, 16), MAX_SLOTS)
    splits = max(1, PROGRAMS // (slots * columns))
    if blocks:
        splits = min(splits, max(1, SCRATCH // (columns * blocks * m * m)))
    along = max(1, splits // num)
    splits = splits // along * along
    buckets = 1 if time is None else next_power_of_2(time.shape[0])
    empty = {"dtype": torch.float32, "device": q.device}
    diagonals = torch.zeros((splits, columns, blocks, m, m), **empty)
    beyond = torch.empty((splits, columns, slots, 2), **empty)
    histograms = torch.empty((splits, columns, slots, buckets), **empty)
    run(
        tables_kernel, (slots * splits * columns,),
        grad, q, k, v, lse, delta, *offsets, _longest(offsets, m), *bias_arguments, diagonals, beyond, histograms,
        *strides, q.shape[0], heads, heads // k.shape[1], num, slots, splits, along, blocks, window, scale,
        **{name: value for name, value in meta.items() if name != "SHARE"},
        BUCKETS=buckets, M=m, D=head_dim, **(launch or {"STAGES": 2 if head_dim <= 128 and m == 64 else 1, "num_warps": 8}),
    )  # fmt: skip
    return [
        None if position is None else _by_distance(diagonals.sum(0), beyond.sum((0, 2)), position.shape[0], causal=meta["CAUSAL"]),
        None if time is None else histograms.sum((0, 2))[:, : time.shape[0]].t(),
    ]


def _longest(offsets: tuple[Tensor, Tensor], m: int) -> Tensor:
    """Diagonals on one side, at most, as a number on the device."""

    def measure() -> Tensor:
        return torch.stack([x.diff().max() for x in offsets]).max().add(3 * m - 1).div(m, rounding_mode="floor").int()

    return _kept(offsets[0], ("diagonals", m), measure) if offsets[0] is offsets[1] else measure()


def _by_distance(tiles: Tensor, beyond: Tensor, rows: int, *, causal: bool) -> Tensor:
    """`(rows, columns)`: sums of `(columns, diagonals, M, M)` tiles by distance, and those `(columns, 2)` beyond the table on either side."""
    columns, blocks, m = tiles.shape[:3]
    # tile[a, b] is at distance a - b: with b reversed and rows of 2 M read as rows of 2 M - 1, equal distances stand below each other
    sheared = F.pad(tiles.flip(-1), (0, m)).flatten(-2)[..., : m * (2 * m - 1)].view(columns, blocks, m, 2 * m - 1).sum(-2)
    halves = F.pad(sheared, (1, 0)).view(columns, blocks, 2, m)  # distances -M .. M - 1 of each diagonal; neighbours overlap by M
    line = F.pad(halves[:, :, 0], (0, 0, 0, 1)) + F.pad(halves[:, :, 1], (0, 0, 1, 0))
    reach, zero = rows // 2, m * (1 if causal else blocks // 2 + 1)
    line = F.pad(line.flatten(1), (reach, reach))
    zero += reach
    first = line[:, : zero - reach + 1].sum(1) + beyond[:, 0]
    last = line[:, zero + reach :].sum(1) + beyond[:, 1]
    if rows == 1:
        return (line.sum(1) + beyond.sum(1)).unsqueeze(0)
    return torch.cat([first[:, None], line[:, zero - reach + 1 : zero + reach], last[:, None]], dim=1).t()
