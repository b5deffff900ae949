"""Gluon backward of BlockAttention for Hopper, blocks of 64 rows: bound by memory, so that loads must never wait for arithmetic.

A producer warp streams Q, K, V and dO of a (block, head) by TMA into one of SLOTS slots; two consumer warp groups take blocks in turn
(a barrier `ready` for each of them and slot: a consumer must see every phase of what it waits on, and it skips every other block).
Results leave by way of the inputs' shared memory that they no longer need. A helper partition zeroes foreign rows of a sequence's last
block, which TMA brings along (a neighbour's NaN must not meet our zeros); only V's are masked instead.
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

from kernels._attention_hopper import M, _put, _zero_tail


@gluon.jit
def _locate(offsets, slots, index, total, H):
    """Head, first row of the item's block and how many rows it has (0: an empty slot); harmless past the last item."""
    slot = index // H
    sequence = gl.load(slots + slot, mask=index < total, other=-1)
    known = sequence >= 0
    start = gl.load(offsets + sequence, mask=known, other=0).to(gl.int32)
    end = gl.load(offsets + sequence + 1, mask=known, other=0).to(gl.int32)
    first = start + (slot - start // M - sequence) * M
    return index % H, first, gl.where(known, gl.maximum(gl.minimum(end - first, M), 0), 0)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, do_desc, offsets, slots, total, H, q_head, k_head, v_head, do_head,
    q_smem, k_smem, v_smem, do_smem, ready, empty, tail, SLOTS: gl.constexpr,
):  # fmt: skip
    ordinal = 0
    size: gl.constexpr = q_desc.block_type.nbytes
    head_next, first_next, length_next = _locate(offsets, slots, gl.program_id(0), total, H)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        head, first, length = head_next, first_next, length_next
        head_next, first_next, length_next = _locate(offsets, slots, index + gl.num_programs(0), total, H)
        slot = ordinal % SLOTS
        mbarrier.wait(empty.index(slot), ((ordinal // SLOTS) & 1) ^ 1)
        turn = ordinal % (2 * SLOTS)
        if length == M:
            mbarrier.expect(ready.index(turn), 4 * size)
            tma.async_copy_global_to_shared(q_desc, [first, head * q_head], ready.index(turn), q_smem.index(slot))
            tma.async_copy_global_to_shared(k_desc, [first, head * k_head], ready.index(turn), k_smem.index(slot))
            tma.async_copy_global_to_shared(do_desc, [first, head * do_head], ready.index(turn), do_smem.index(slot))
            tma.async_copy_global_to_shared(v_desc, [first, head * v_head], ready.index(turn), v_smem.index(slot))
        elif length > 0:
            mbarrier.expect(tail.index(slot), 4 * size)
            tma.async_copy_global_to_shared(q_desc, [first, head * q_head], tail.index(slot), q_smem.index(slot))
            tma.async_copy_global_to_shared(k_desc, [first, head * k_head], tail.index(slot), k_smem.index(slot))
            tma.async_copy_global_to_shared(do_desc, [first, head * do_head], tail.index(slot), do_smem.index(slot))
            tma.async_copy_global_to_shared(v_desc, [first, head * v_head], tail.index(slot), v_smem.index(slot))
        else:
            mbarrier.arrive(ready.index(ordinal % (2 * SLOTS)))
        ordinal += 1  # noqa: SIM113 (Gluon knows no enumerate)


@gluon.jit
def _help(offsets, slots, total, H, q_smem, k_smem, do_smem, ready, tail, D: gl.constexpr, SLOTS: gl.constexpr, HELPERS: gl.constexpr):
    ordinal = 0
    seen = 0  # bit s: parity of the tails that went through slot s
    _h, _f, length_next = _locate(offsets, slots, gl.program_id(0), total, H)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        length = length_next
        _h, _f, length_next = _locate(offsets, slots, index + gl.num_programs(0), total, H)
        slot = ordinal % SLOTS
        if (length > 0) & (length < M):
            mbarrier.wait(tail.index(slot), (seen >> slot) & 1)
            seen = seen ^ (1 << slot)
            _zero_tail(q_smem.index(slot), length, M, D, HELPERS)
            _zero_tail(k_smem.index(slot), length, M, D, HELPERS)
            _zero_tail(do_smem.index(slot), length, M, D, HELPERS)
            mbarrier.arrive(ready.index(ordinal % (2 * SLOTS)))
        ordinal += 1  # noqa: SIM113 (Gluon knows no enumerate)


@gluon.jit
def _consume(
    dq, dk, dv, offsets, slots, total, H, scale, dq_scale, q_smem, k_smem, v_smem, do_smem, p_smem, ds_smem, ready, empty,
    PART: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = q_smem.dtype
    ordinal = PART
    stride = 2 * gl.num_programs(0)
    begin = gl.program_id(0) + PART * gl.num_programs(0)
    rows = gl.arange(0, M, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, M, gl.SliceLayout(0, s_layout))
    no_scores = gl.zeros([M, M], gl.float32, s_layout)
    nothing = gl.zeros([M, D], gl.float32, o_layout)
    p_tile = p_smem.index(PART)
    ds_tile = ds_smem.index(PART)
    head_next, first_next, length_next = _locate(offsets, slots, begin, total, H)
    for index in range(begin, total, stride):
        head, first, length = head_next, first_next, length_next
        head_next, first_next, length_next = _locate(offsets, slots, index + stride, total, H)
        slot = ordinal % SLOTS
        mbarrier.wait(ready.index(ordinal % (2 * SLOTS)), (ordinal // (2 * SLOTS)) & 1)
        if length > 0:
            q = q_smem.index(slot)
            k = k_smem.index(slot)
            v = v_smem.index(slot)
            do = do_smem.index(slot)
            s_token = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            dp_token = warpgroup_mma(do, v.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_token]) * scale
            if CAUSAL:
                s = gl.where(rows[:, None] >= columns[None, :], s, -float("inf"))
            if length < M:
                s = gl.where((columns < length)[None, :] & (rows >= 0)[:, None], s, -float("inf"))
            p = gl.exp2(s - gl.max(s, axis=1)[:, None])  # column 0 is always kept, so the maximum is finite
            p = p * (1.0 / gl.sum(p, axis=1))[:, None]
            dp = warpgroup_mma_wait(0, deps=[dp_token])
            if length < M:
                inside = (columns < length)[None, :] & (rows < length)[:, None]
                p = gl.where(inside, p, 0.0)
                dp = gl.where(inside, dp, 0.0)
            ds = (p * (dp - gl.sum(p * dp, axis=1)[:, None])).to(dtype)
            p_tile.store(p.to(dtype))
            ds_tile.store(ds)
            fence_async_shared()
            gl.thread_barrier()
            dv_token = warpgroup_mma(p_tile.permute((1, 0)), do, nothing, use_acc=False, is_async=True)
            dk_token = warpgroup_mma(ds_tile.permute((1, 0)), q, nothing, use_acc=False, is_async=True)
            base = first.to(gl.int64) * (H * D) + head * D
            dv_tile = warpgroup_mma_wait(1, deps=[dv_token])
            _put(v, dv + base, 0, length, H * D, dv_tile, D)
            dk_tile = warpgroup_mma_wait(0, deps=[dk_token])
            dq_token = warpgroup_mma(gl.convert_layout(ds, p_layout), k, nothing, use_acc=False, is_async=True)
            _put(do, dk + base, 0, length, H * D, dk_tile * dq_scale, D)
            dq_tile = warpgroup_mma_wait(0, deps=[dq_token])
            _put(q, dq + base, 0, length, H * D, dq_tile * dq_scale, D)
        mbarrier.arrive(empty.index(slot))
        ordinal += 2


@gluon.jit(do_not_specialize=["total"])
def block_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, dk, dv, offsets, slots, total, H, q_head, k_head, v_head, do_head, scale, dq_scale,
    CAUSAL: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, HELPERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Persistent over `total` items: slots of `_tiles.tile_map` times heads."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, M, D], q_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, M, D], q_desc.layout)
    p_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, M], q_desc.dtype)
    p_smem = gl.allocate_shared_memory(q_desc.dtype, [2, M, M], p_shape)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [2, M, M], p_shape)
    ready = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(ready.index(SLOTS + slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
        mbarrier.init(tail.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dq, dk, dv, offsets, slots, total, H, scale, dq_scale, q_smem, k_smem, v_smem, do_smem, p_smem, ds_smem,
                        ready, empty, 0, CAUSAL, D, SLOTS)),
            (_consume, (dq, dk, dv, offsets, slots, total, H, scale, dq_scale, q_smem, k_smem, v_smem, do_smem, p_smem, ds_smem,
                        ready, empty, 1, CAUSAL, D, SLOTS)),
            (_produce, (q_desc, k_desc, v_desc, do_desc, offsets, slots, total, H, q_head, k_head, v_head, do_head,
                        q_smem, k_smem, v_smem, do_smem, ready, empty, tail, SLOTS)),
            (_help, (offsets, slots, total, H, q_smem, k_smem, do_smem, ready, tail, D, SLOTS, HELPERS)),
        ],
        [4, 1, HELPERS],
        [240, 24, 24],
    )  # fmt: skip
