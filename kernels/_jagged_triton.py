"""Triton kernels behind `kernels.jagged`. All are bandwidth bound: 16-byte accesses, 64-bit addresses, every grid on axis 0.
Sizes that change with the batch are not specialised on: a new batch never recompiles.

Two shapes of work: a program per chunk of a padded row (the row is known from the program id), and a program per tile of jagged rows,
which finds the batch row of each by binary search in the offsets; these stay in L1/L2, and no map has to be built beforehand.
Shapes: T jagged rows, B batch rows, D numbers a row (trailing dimensions flattened), L `max_len`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._checks import accumulate_dtype
from kernels._launch import cdiv, next_power_of_2, run

CHUNK = 4096  # elements a program moves; 2048 to 16384 measured within 3 % of each other on an H200
WARPS = 4


@triton.jit
def _find_rows(offsets_ptr, positions, num_rows, steps):
    """Largest b in [0, num_rows] with offsets[b] <= position; num_rows means past the end. Callers handle position < offsets[0]."""
    low = tl.zeros_like(positions)
    high = low + num_rows
    for _ in range(steps):  # invariant: the answer is in [low, high]
        middle = (low + high + 1) // 2
        right = tl.load(offsets_ptr + middle).to(positions.dtype) <= positions
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    return low


@triton.jit
def _locate(offsets_ptr, positions, total, num_rows, steps):
    """Row, place in the row and validity of each position of a jagged batch; row is 0 where the position belongs to none."""
    row = _find_rows(offsets_ptr, positions, num_rows, steps)
    inside = (positions < total) & (row < num_rows)
    row = tl.where(inside, row, 0)
    place = positions - tl.load(offsets_ptr + row).to(tl.int64)
    inside = inside & (place >= 0)
    return row, place, inside


@triton.jit(do_not_specialize=["max_len", "chunks"])
def _jagged_to_padded_kernel(
    values_ptr, offsets_ptr, out_ptr, max_len, dim, chunks, padding,
    CHUNK: tl.constexpr, CHECK: tl.constexpr, PADDING_IN_MEMORY: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = pid // chunks
    start = tl.load(offsets_ptr + row).to(tl.int64)
    length = tl.load(offsets_ptr + row + 1).to(tl.int64) - start
    if CHECK:
        tl.device_assert(length <= max_len, "jagged_to_padded: a row is longer than max_len")
    width = tl.cast(max_len, tl.int64) * dim
    begin = tl.cast(pid % chunks, tl.int64) * CHUNK
    lane = tl.arange(0, CHUNK)
    own = tl.minimum(length * dim - begin, CHUNK).to(tl.int32)  # numbers of the chunk that the row has; none or fewer than none: padding alone
    inside = lane < tl.minimum(width - begin, CHUNK).to(tl.int32)
    target = out_ptr + row * width + begin + lane
    if PADDING_IN_MEMORY:
        fill = tl.load(padding + lane * 0)
    else:
        fill = tl.full([CHUNK], padding, tl.float32).to(values_ptr.dtype.element_ty)
    if own > 0:
        data = tl.load(values_ptr + start * dim + begin + lane, mask=lane < own, other=0.0)
        tl.store(target, tl.where(lane < own, data, fill), mask=inside)
    else:
        tl.store(target, fill, mask=inside)


@triton.jit(do_not_specialize=["max_len", "total", "num_rows", "steps"])
def _padded_to_jagged_kernel(
    dense_ptr, offsets_ptr, out_ptr, max_len, total, num_rows, steps, dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr
):
    """Tile of jagged rows: the work follows the values, not the padding, however skewed the lengths are."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, place, inside = _locate(offsets_ptr, position, total, num_rows, steps)
    if CHECK:
        tl.device_assert((place < max_len) | ~inside, "padded_to_jagged: a row is longer than max_len")
    source = row.to(tl.int64) * max_len + place
    for d0 in range(0, dim, BLOCK_D):
        cols = d0 + tl.arange(0, BLOCK_D)
        data = tl.load(dense_ptr + source[:, None] * dim + cols[None, :], mask=inside[:, None] & (cols < dim)[None, :], other=0.0)
        tl.store(out_ptr + position[:, None] * dim + cols[None, :], data, mask=(position < total)[:, None] & (cols < dim)[None, :])


@triton.jit(do_not_specialize=["total", "num_rows", "steps"])
def _concat_kernel(
    parts, part_offsets, offsets_ptr, out_ptr, total, num_rows, steps, dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr
):
    """Tile of output rows: walk the parts of its batch row until the place falls into one."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, place, inside = _locate(offsets_ptr, position, total, num_rows, steps)
    for d0 in range(0, dim, BLOCK_D):
        cols = d0 + tl.arange(0, BLOCK_D)
        data = tl.zeros([ROWS, BLOCK_D], out_ptr.dtype.element_ty)
        left = place
        for p in tl.static_range(PARTS):
            start = tl.load(part_offsets[p] + row).to(tl.int64)
            length = tl.load(part_offsets[p] + row + 1).to(tl.int64) - start
            here = inside & (left >= 0) & (left < length)
            source = parts[p] + (start + left)[:, None] * dim + cols[None, :]
            mask = here[:, None] & (cols < dim)[None, :]
            data = tl.where(mask, tl.load(source, mask=mask, other=0.0), data)
            left -= length
        tl.store(out_ptr + position[:, None] * dim + cols[None, :], data, mask=(position < total)[:, None] & (cols < dim)[None, :])


@triton.jit(do_not_specialize=["total", "num_rows", "steps"])
def _take_kernel(
    values_ptr, offsets_ptr, before, out_offsets_ptr, index_ptr, out_ptr, total, num_rows, steps, dim,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BEFORE: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Tile of output rows laid out by `out_offsets`; the source row begins at `offsets[row]` plus the lengths of the parts before."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, place, inside = _locate(out_offsets_ptr, position, total, num_rows, steps)
    if GATHER:
        row = tl.load(index_ptr + row, mask=inside, other=0).to(tl.int64)
    source = tl.load(offsets_ptr + row, mask=inside, other=0).to(tl.int64) + place
    for p in tl.static_range(BEFORE):
        source += tl.load(before[p] + row + 1, mask=inside, other=0).to(tl.int64)
        source -= tl.load(before[p] + row, mask=inside, other=0).to(tl.int64)
    for d0 in range(0, dim, BLOCK_D):
        cols = d0 + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (cols < dim)[None, :]
        data = tl.load(values_ptr + source[:, None] * dim + cols[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + position[:, None] * dim + cols[None, :], data, mask=(position < total)[:, None] & (cols < dim)[None, :])


@triton.jit(do_not_specialize=["total", "num_rows", "steps"])
def _rowwise_kernel(
    values_ptr, dense_ptr, offsets_ptr, out_ptr, total, num_rows, steps, dim,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, OP: tl.constexpr, MEAN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """OP "add" and "mul" combine jagged rows with their dense row; "copy" repeats the dense row (divided by the length if MEAN)."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, _, inside = _locate(offsets_ptr, position, total, num_rows, steps)
    for d0 in range(0, dim, BLOCK_D):
        cols = d0 + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (cols < dim)[None, :]
        data = tl.load(dense_ptr + row[:, None] * dim + cols[None, :], mask=mask, other=0.0).to(ACC)
        target = position[:, None] * dim + cols[None, :]
        if MEAN:
            length = tl.load(offsets_ptr + row + 1) - tl.load(offsets_ptr + row)
            data = tl.where(mask, data / tl.maximum(length, 1).to(ACC)[:, None], 0.0)
        if OP == "add":
            data += tl.load(values_ptr + target, mask=mask, other=0.0).to(ACC)
        elif OP == "mul":
            data *= tl.load(values_ptr + target, mask=mask, other=0.0).to(ACC)
        tl.store(out_ptr + target, data.to(out_ptr.dtype.element_ty), mask=(position < total)[:, None] & (cols < dim)[None, :])


@triton.jit
def _sum_rows(values_ptr, begin, end, dim, cols, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr):
    """Sum of the entries [begin, end), ROWS at a time, in a fixed order."""
    total = tl.zeros([ROWS, BLOCK_D], ACC)
    for base in range(begin, end, ROWS):
        position = base + tl.arange(0, ROWS)
        mask = (position < end)[:, None] & (cols < dim)[None, :]
        total += tl.load(values_ptr + position[:, None] * dim + cols[None, :], mask=mask, other=0.0).to(ACC)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_rows", "steps", "blocks_d", "blocks"])
def _reduce_kernel(
    values_ptr, offsets_ptr, out_ptr, shares_ptr, num_rows, steps, dim, blocks_d, blocks,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sum one share of a row: SHARE entries from its start, or from a multiple of SHARE behind it; a row of one share is done then.

    The first programs take the rows' first shares, the others the later share that begins in their block of SHARE positions: there is
    at most one, and it belongs to the row of the block's first position. Likewise one row at most of several shares begins in a block.
    """
    pid = tl.program_id(0)
    item = (pid // blocks_d).to(tl.int64)
    cols = (pid % blocks_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    if item < num_rows:
        start = tl.load(offsets_ptr + item).to(tl.int64)
        end = tl.load(offsets_ptr + item + 1).to(tl.int64)
        out = _sum_rows(values_ptr, start, tl.minimum(end, start + SHARE), dim, cols, ROWS, BLOCK_D, ACC)
        if end - start > SHARE:
            tl.store(shares_ptr + (start // SHARE) * dim + cols, out, mask=cols < dim)
        else:
            if MEAN:
                out = out / tl.maximum(end - start, 1).to(ACC)
            tl.store(out_ptr + item * dim + cols, out.to(out_ptr.dtype.element_ty), mask=cols < dim)
    else:
        block = item - num_rows
        row = tl.max(_find_rows(offsets_ptr, tl.zeros([1], tl.int64) + block * SHARE, num_rows, steps), axis=0)
        if row < num_rows:
            start = tl.load(offsets_ptr + row).to(tl.int64)
            end = tl.load(offsets_ptr + row + 1).to(tl.int64)
            begin = start + tl.cdiv(block * SHARE - start, SHARE) * SHARE
            if (start < block * SHARE) & (begin < end):
                out = _sum_rows(values_ptr, begin, tl.minimum(end, begin + SHARE), dim, cols, ROWS, BLOCK_D, ACC)
                tl.store(shares_ptr + (blocks + block) * dim + cols, out, mask=cols < dim)


@triton.jit(do_not_specialize=["blocks_d", "blocks"])
def _reduce_shares_kernel(
    offsets_ptr, out_ptr, shares_ptr, dim, blocks_d, blocks,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, MEAN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rows of several shares: the first one and the later ones, in order."""
    pid = tl.program_id(0)
    row = (pid // blocks_d).to(tl.int64)
    cols = (pid % blocks_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.load(offsets_ptr + row).to(tl.int64)
    length = tl.load(offsets_ptr + row + 1).to(tl.int64) - start
    if length > SHARE:
        out = tl.load(shares_ptr + (start // SHARE) * dim + cols, mask=cols < dim, other=0.0)
        first = blocks + start // SHARE
        out += _sum_rows(shares_ptr, first + 1, first + tl.cdiv(length, SHARE), dim, cols, ROWS, BLOCK_D, ACC)
        if MEAN:
            out = out / length.to(ACC)
        tl.store(out_ptr + row * dim + cols, out.to(out_ptr.dtype.element_ty), mask=cols < dim)


@triton.jit(do_not_specialize=["total", "num_rows", "steps"])
def _gather_grad_kernel(
    grad_ptr, out_offsets_ptr, copies_ptr, copy_start_ptr, offsets_ptr, out_ptr, total, num_rows, steps, dim,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Tile of input rows: add up the gradients of the row's copies, `copies[copy_start[row]:copy_start[row + 1]]`, in that order."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, place, inside = _locate(offsets_ptr, position, total, num_rows, steps)
    first = tl.load(copy_start_ptr + row, mask=inside, other=0)
    count = tl.load(copy_start_ptr + row + 1, mask=inside, other=0) - first
    most = tl.max(count, axis=0)
    for d0 in range(0, dim, BLOCK_D):
        cols = d0 + tl.arange(0, BLOCK_D)
        out = tl.zeros([ROWS, BLOCK_D], ACC)
        for c in range(most):
            here = inside & (c < count)
            copy = tl.load(copies_ptr + first + c, mask=here, other=0)
            source = tl.load(out_offsets_ptr + copy, mask=here, other=0).to(tl.int64) + place
            mask = here[:, None] & (cols < dim)[None, :]
            out += tl.load(grad_ptr + source[:, None] * dim + cols[None, :], mask=mask, other=0.0).to(ACC)
        target = out_ptr + position[:, None] * dim + cols[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(position < total)[:, None] & (cols < dim)[None, :])


# --- launches ------------------------------------------------------------------------------------------------------------------------


def _dim(shape: torch.Size) -> int:
    return shape.numel()


def _steps(num_rows: int) -> int:
    """Halvings that bring [0, num_rows] down to one entry."""
    return num_rows.bit_length()


def _tile(dim: int) -> tuple[int, int]:
    """Rows and columns of a tile of about CHUNK elements: whole rows up to 1,024 numbers."""
    block_d = min(next_power_of_2(max(dim, 1)), 1024)
    return max(1, min(64, CHUNK // block_d)), block_d


def _accumulator(dtype: torch.dtype) -> tl.dtype:
    if not dtype.is_floating_point:
        raise ValueError(f"values: arithmetic on {dtype} is not supported on CUDA, only on floating point")
    return tl.float64 if accumulate_dtype(dtype) == torch.float64 else tl.float32


def _chunk(max_len: int, dim: int) -> int:
    """Elements of a program of the padded kernels: short padded rows take a smaller power of two."""
    return min(CHUNK, max(128, next_power_of_2(max_len * dim)))


def jagged_to_padded(values: Tensor, offsets: Tensor, max_len: int, padding: float, *, check: bool = True) -> Tensor:
    values, offsets = values.contiguous(), offsets.contiguous()
    num_rows, dim = offsets.numel() - 1, _dim(values.shape[1:])
    out = values.new_empty((num_rows, max_len, *values.shape[1:]))
    chunk = _chunk(max_len, dim)
    chunks = cdiv(max_len * dim, chunk)
    padding_arg = padding  # a scalar argument is fp32: wider types take theirs from memory
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        padding_arg = torch.full((1,), padding, dtype=values.dtype, device=values.device)
    if num_rows and max_len == 0:  # nothing to write, but a non-empty row must still be refused
        chunks = 1
    if num_rows * chunks and dim:
        _jagged_to_padded_kernel[(num_rows * chunks,)](
            values, offsets, out, max_len, dim, chunks, padding_arg,
            CHUNK=chunk, CHECK=check, PADDING_IN_MEMORY=padding_arg is not padding, num_warps=WARPS, debug=check, sanitize_overflow=False,
        )  # fmt: skip
    return out


def padded_to_jagged(dense: Tensor, offsets: Tensor, total: int, *, check: bool = True) -> Tensor:
    dense, offsets = dense.contiguous(), offsets.contiguous()
    num_rows, max_len, dim = dense.shape[0], dense.shape[1], _dim(dense.shape[2:])
    out = dense.new_empty((total, *dense.shape[2:]))
    rows, block_d = _tile(dim)
    if total and dim:
        _padded_to_jagged_kernel[(cdiv(total, rows),)](
            dense, offsets, out, max_len, total, num_rows, _steps(num_rows), dim,
            ROWS=rows, BLOCK_D=block_d, CHECK=check, num_warps=WARPS, debug=check, sanitize_overflow=False,
        )  # fmt: skip
    return out


def jagged_concat(values: list[Tensor], part_offsets: list[Tensor], offsets: Tensor, total: int) -> Tensor:
    dim = _dim(values[0].shape[1:])
    out = values[0].new_empty((total, *values[0].shape[1:]))
    rows, block_d = _tile(dim)
    if total and dim:
        num_rows = offsets.numel() - 1
        _concat_kernel[(cdiv(total, rows),)](
            tuple(v.contiguous() for v in values), tuple(o.contiguous() for o in part_offsets), offsets, out, total, num_rows,
            _steps(num_rows), dim, ROWS=rows, BLOCK_D=block_d, PARTS=len(values), num_warps=WARPS,
        )  # fmt: skip
    return out


def _take(values, offsets, before, out_offsets, index, total) -> Tensor:
    values = values.contiguous()
    dim, num_rows = _dim(values.shape[1:]), out_offsets.numel() - 1
    out = values.new_empty((total, *values.shape[1:]))
    rows, block_d = _tile(dim)
    if total and dim:
        _take_kernel[(cdiv(total, rows),)](
            values, offsets.contiguous(), tuple(before), out_offsets.contiguous(), index, out, total, num_rows, _steps(num_rows), dim,
            ROWS=rows, BLOCK_D=block_d, BEFORE=len(before), GATHER=index is not None, num_warps=WARPS,
        )  # fmt: skip
    return out


def jagged_unconcat(values: Tensor, offsets: Tensor, part_offsets: list[Tensor], totals: list[int]) -> list[Tensor]:
    part_offsets = [o.contiguous() for o in part_offsets]
    return [_take(values, offsets, part_offsets[:i], o, None, n) for i, (o, n) in enumerate(zip(part_offsets, totals, strict=True))]


def jagged_gather(values: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, total: int) -> Tensor:
    return _take(values, offsets, [], out_offsets, index.contiguous(), total)


def jagged_gather_grad(grad: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, total: int) -> Tensor:
    grad = grad.contiguous()
    dim, num_rows = _dim(grad.shape[1:]), offsets.numel() - 1
    out = grad.new_empty((total, *grad.shape[1:]))
    by_row, copies = torch.sort(index.long(), stable=True)
    copy_start = torch.searchsorted(by_row, torch.arange(num_rows + 1, device=index.device))
    rows, block_d = _tile(dim)
    if total and dim:
        _gather_grad_kernel[(cdiv(total, rows),)](
            grad, out_offsets.contiguous(), copies, copy_start, offsets.contiguous(), out, total, num_rows, _steps(num_rows), dim,
            ROWS=rows, BLOCK_D=block_d, ACC=_accumulator(grad.dtype), num_warps=WARPS,
        )  # fmt: skip
    return out


def _rowwise(values: Tensor, dense: Tensor, offsets: Tensor, total: int, op: str, mean: bool) -> Tensor:
    dense = dense.contiguous()
    dim, num_rows = _dim(dense.shape[1:]), offsets.numel() - 1
    out = dense.new_empty((total, *dense.shape[1:]))
    rows, block_d = _tile(dim)
    if total and dim:
        run(
            _rowwise_kernel, (cdiv(total, rows),),
            values, dense, offsets.contiguous(), out, total, num_rows, _steps(num_rows), dim,
            ROWS=rows, BLOCK_D=block_d, OP=op, MEAN=mean, ACC=_accumulator(dense.dtype), num_warps=WARPS,
        )  # fmt: skip
    return out


def jagged_elementwise(values: Tensor, offsets: Tensor, dense: Tensor, op: str) -> Tensor:
    return _rowwise(values.contiguous(), dense, offsets, values.shape[0], op, False)


def jagged_broadcast(dense: Tensor, offsets: Tensor, total: int, mean: bool) -> Tensor:
    return _rowwise(dense, dense, offsets, total, "copy", mean)


REDUCE_SHARE = 256  # entries a program sums: long rows are shared among programs


def jagged_reduce(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    values, offsets = values.contiguous(), offsets.contiguous()
    total, dim, num_rows = values.shape[0], _dim(values.shape[1:]), offsets.numel() - 1
    out = values.new_empty((num_rows, *values.shape[1:]))
    block_d = min(next_power_of_2(max(dim, 1)), 128)
    blocks_d = cdiv(dim, block_d)
    if num_rows and dim:
        blocks = cdiv(total, REDUCE_SHARE) if total > REDUCE_SHARE else 0  # without one no row has a second share
        shares = torch.empty((2, blocks, dim), dtype=accumulate_dtype(values.dtype), device=values.device)
        options = dict(SHARE=REDUCE_SHARE, BLOCK_D=block_d, MEAN=mean, ACC=_accumulator(values.dtype), num_warps=WARPS)
        run(
            _reduce_kernel, ((num_rows + blocks) * blocks_d,),
            values, offsets, out, shares, num_rows, _steps(num_rows), dim, blocks_d, blocks, ROWS=max(1, 4096 // block_d), **options
        )
        if blocks:
            run(_reduce_shares_kernel, (num_rows * blocks_d,), offsets, out, shares, dim, blocks_d, blocks, ROWS=8, **options)
    return out
