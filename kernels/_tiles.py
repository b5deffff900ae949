"""Work maps of jagged kernels, built on the device by one small launch each, without a host synchronisation.

Tile slots. A sequence of rows `[o_b, o_{b+1})` owns the slots from `o_b // BM + b` up to the next sequence's first slot. That is never
fewer than its `ceil(length / BM)` tiles, so the number of slots, `total // BM + B`, is known on the host and no prefix sum is
needed; a slot past its sequence's tiles is empty and its program returns at once.

Maps are kept beside the offsets that they are made of: the layers of a step, and their backward, ask for the same ones.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import cdiv, next_power_of_2, place, run

SEARCH = 256  # slots per program of the map kernel: one warp-wide binary search each, about 3 us in all
RANKED = 4096  # above so many sequences the longest one is small beside the whole, and ranking (quadratic) would cost more than it saves


def _kept(offsets: Tensor, key: tuple, make: Callable[[], Any], other: Tensor | None = None) -> Any:
    """What `make` makes of `offsets` (and `other` offsets) alone, made once for these: kept as an attribute, gone when they are or when they change.

    Once a stream, which nothing else orders behind the launch that made it, and once a capture: a graph makes its own, of what the offsets are
    when it is replayed.
    """
    other = offsets if other is None else other
    if offsets.is_inference() or other.is_inference():  # whose changes are not counted
        return make()
    maps = offsets.__dict__.setdefault("_maps", {})
    key = (*key, offsets._version, id(other), other._version, *place(offsets.device))
    kept = maps.get(key)
    if kept is None or kept[0]() is not other:  # another tensor may live where the first one did
        kept = maps[key] = (weakref.ref(other), make())
    return kept[1]


def tile_map(offsets: Tensor, rows: int, block: int, out: Tensor | None = None) -> Tensor:
    """`(rows // block + B,)` int32: the sequence that owns each slot, -1 before the first. Zeroes `out`'s rows no sequence owns."""
    if out is not None:
        return _tile_map(offsets, rows, block, out)
    return _kept(offsets, ("slots", rows, block), lambda: _tile_map(offsets, rows, block, None))


def _tile_map(offsets: Tensor, rows: int, block: int, out: Tensor | None) -> Tensor:
    num_slots = rows // block + offsets.shape[0] - 1
    slots = torch.empty(num_slots, dtype=torch.int32, device=offsets.device)
    width = 0 if out is None else out.shape[1] * out.shape[2]
    grid = (max(cdiv(num_slots, SEARCH), 1),)
    run(
        _map_kernel, grid,
        offsets, slots, slots if out is None else out, num_slots, offsets.shape[0] - 1, rows,
        block, width, next_power_of_2(max(width, 1)), SEARCH, num_warps=4,
    )  # fmt: skip
    return slots


def zero_unowned(offsets: Tensor, *tensors: Tensor) -> None:
    """Zero the rows of one to three contiguous `(rows, H, D)` tensors outside `[offsets[0], offsets[-1])`; usually there are none."""
    first, second, third = (*tensors, *(tensors[-1],) * (3 - len(tensors)))
    widths = [x.shape[1] * x.shape[2] for x in (first, second, third)]
    run(
        _zero_kernel, (16,), offsets, first, second, third, offsets.shape[0] - 1, first.shape[0], *widths,
        COUNT=len(tensors), WIDTH=next_power_of_2(max(*widths, 1)), num_warps=4,
    )  # fmt: skip


def longest_first(q_offsets: Tensor, k_offsets: Tensor) -> Tensor:
    """`(B,)` int32: sequences by falling Lq * Lk, ties by index, so that the programs that take longest start first."""
    return _kept(q_offsets, ("longest",), lambda: _longest_first(q_offsets, k_offsets), k_offsets)


def _longest_first(q_offsets: Tensor, k_offsets: Tensor) -> Tensor:
    num = q_offsets.shape[0] - 1
    order = torch.empty(num, dtype=torch.int32, device=q_offsets.device)
    if num > RANKED:
        return torch.arange(num, dtype=torch.int32, device=q_offsets.device)
    run(_rank_kernel, (cdiv(num, 32),), q_offsets, k_offsets, order, num, 32, 256, num_warps=4)
    return order


@triton.jit
def _zero_rows(out, first, last, rows, width, WIDTH: tl.constexpr):
    """Programs share the rows `[0, first)` and `[last, rows)` between them."""
    columns = tl.arange(0, WIDTH)
    zeros = tl.zeros([WIDTH], dtype=out.dtype.element_ty)
    missing = first + rows - last
    for index in range(tl.program_id(0), missing, tl.num_programs(0)):
        row = tl.where(index < first, index, last + index - first).to(tl.int64)
        tl.store(out + row * width + columns, zeros, mask=columns < width)


@triton.jit(do_not_specialize=["num", "rows"])
def _zero_kernel(
    offsets, out, second, third, num, rows, width, second_width, third_width, COUNT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    begin, end = tl.load(offsets).to(tl.int32), tl.load(offsets + num).to(tl.int32)
    _zero_rows(out, begin, end, rows, width, WIDTH)
    if COUNT > 1:
        _zero_rows(second, begin, end, rows, second_width, WIDTH)
    if COUNT > 2:
        _zero_rows(third, begin, end, rows, third_width, WIDTH)


@triton.jit(do_not_specialize=["num_slots", "num", "rows"])
def _map_kernel(offsets, slots, out, num_slots, num, rows, BLOCK: tl.constexpr, width, WIDTH: tl.constexpr, SEARCH: tl.constexpr):
    slot = tl.program_id(0) * SEARCH + tl.arange(0, SEARCH)
    low = tl.full([SEARCH], -1, tl.int32)  # the last sequence known to begin at or before the slot
    high = low + 1 + num
    span = num + 1
    while span > 0:
        middle = (low + high) // 2
        inside = (middle >= 0) & (middle < num)
        begin = tl.load(offsets + middle, mask=inside, other=0).to(tl.int32) // BLOCK + middle
        before = inside & (begin <= slot)
        low = tl.where(before, middle, low)
        high = tl.where(inside & (begin > slot), middle, high)
        span = span // 2
    tl.store(slots + slot, low, mask=slot < num_slots)
    if width > 0:
        _zero_rows(out, tl.load(offsets).to(tl.int32), tl.load(offsets + num).to(tl.int32), rows, width, WIDTH)


@triton.jit(do_not_specialize=["num"])
def _rank_kernel(q_offsets, k_offsets, order, num, BLOCK: tl.constexpr, STEP: tl.constexpr):
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    work = _work(q_offsets, k_offsets, mine, num)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num, STEP):
        other = start + tl.arange(0, STEP)
        theirs = _work(q_offsets, k_offsets, other, num)
        ahead = (theirs[None, :] > work[:, None]) | ((theirs[None, :] == work[:, None]) & (other[None, :] < mine[:, None]))
        rank += tl.sum((ahead & (other[None, :] < num)).to(tl.int32), axis=1)
    tl.store(order + rank, mine, mask=mine < num)


@triton.jit
def _work(q_offsets, k_offsets, index, num):
    inside = index < num
    q_len = tl.load(q_offsets + index + 1, mask=inside, other=0) - tl.load(q_offsets + index, mask=inside, other=0)
    k_len = tl.load(k_offsets + index + 1, mask=inside, other=0) - tl.load(k_offsets + index, mask=inside, other=0)
    return q_len.to(tl.int64) * k_len.to(tl.int64)


def ranked_tiles(q_offsets: Tensor, k_offsets: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor]:
    """Exact tile list for persistent kernels: `(capacity, 8)` int32 records and their `(1,)` count, kept beside the offsets.

    A record: nothing, the tile's first row within its sequence, the sequence's first row and its length, its first key and the number of its keys,
    twice nothing. Sequences stand by falling Lq * Lk, so that what is handed out last takes least. Up to `RANKED` sequences.
    """
    return _kept(q_offsets, ("ranked", rows, block), lambda: _ranked_tiles(q_offsets, k_offsets, rows, block), k_offsets)


def _ranked_tiles(q_offsets: Tensor, k_offsets: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor]:
    num = q_offsets.shape[0] - 1
    records = torch.empty((rows // block + num, 8), dtype=torch.int32, device=q_offsets.device)
    count = torch.empty(1, dtype=torch.int32, device=q_offsets.device)
    run(_ranked_tiles_kernel, (cdiv(num, 16),), q_offsets, k_offsets, records, count, num, block, 16, 256, num_warps=4)
    return records, count


@triton.jit(do_not_specialize=["num"])
def _ranked_tiles_kernel(q_offsets, k_offsets, records, count, num, TILE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    work = _work(q_offsets, k_offsets, mine, num)
    base = tl.zeros([BLOCK], tl.int32)  # tiles of the sequences that stand before mine
    for start in range(0, num, STEP):
        other = start + tl.arange(0, STEP)
        theirs = _work(q_offsets, k_offsets, other, num)
        ahead = (theirs[None, :] > work[:, None]) | ((theirs[None, :] == work[:, None]) & (other[None, :] < mine[:, None]))
        base += tl.sum(tl.where(ahead & (other[None, :] < num), _num_tiles(q_offsets, other, num, TILE)[None, :], 0), axis=1)
    own = _num_tiles(q_offsets, mine, num, TILE)
    q_start, q_end = _span(q_offsets, mine, num)
    k_start, k_end = _span(k_offsets, mine, num)
    place = tl.arange(0, 8)[None, :]
    record = tl.where(place == 2, q_start[:, None], tl.where(place == 3, (q_end - q_start)[:, None], 0))
    record = tl.where(place == 4, k_start[:, None], tl.where(place == 5, (k_end - k_start)[:, None], record))
    for tile in range(0, tl.max(own, axis=0)):
        target = records + 8 * (base + tile)[:, None] + place
        tl.store(target, tl.where(place == 1, tile * TILE, record), mask=(tile < own)[:, None])
    if tl.program_id(0) == 0:
        total = tl.zeros([STEP], tl.int32)
        for start in range(0, num, STEP):
            total += _num_tiles(q_offsets, start + tl.arange(0, STEP), num, TILE)
        tl.store(count, tl.sum(total, axis=0))


@triton.jit
def _span(offsets, index, num):
    inside = index < num
    return tl.load(offsets + index, mask=inside, other=0).to(tl.int32), tl.load(offsets + index + 1, mask=inside, other=0).to(tl.int32)


@triton.jit
def _num_tiles(offsets, index, num, TILE: tl.constexpr):
    inside = index < num
    begin = tl.load(offsets + index, mask=inside, other=0)
    return tl.cdiv(tl.load(offsets + index + 1, mask=inside, other=0) - begin, TILE).to(tl.int32)
