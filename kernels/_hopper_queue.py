"""How the programs of a persistent Hopper kernel share their items: each takes the next one when it has room for it.

Multiprocessors do not progress alike, so an even share each leaves some idle at the end. The first item of a program is its number; the later
ones it draws from a counter in memory. Items stand by falling work, so the last ones to be drawn are the shortest.

The producer of a program draws, an item ahead of the one whose record it fetches, itself one ahead of the one it loads tiles of, so that it waits
for neither. It writes records to a ring in shared memory, from where the other partitions read them. A record is eight numbers: the head (-1: no
more items), the first row of the item's tiles, the sequence's first row and its length, the same of the other side, and two that mean nothing.

The counter is two numbers, zero between launches: how many items were drawn, and how many programs have drawn their last; the last of those zeroes
both (`_hopper_launch.counter`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

RING = gl.constexpr(4)  # records in flight


@gluon.jit
def allocate(READERS: gl.constexpr):
    """The ring, its `ready` and its `empty` barriers."""
    ring = gl.allocate_shared_memory(gl.int32, [RING, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(RING):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return ring, ready, empty


@gluon.jit
def draw(counter, WARPS: gl.constexpr):
    """Ask for the next number; `drawn` waits for it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lanes = gl.arange(0, 32 * WARPS, layout)
    # one address a lane: for the same one ptxas adds up the lanes first and gives each its part, for which it waits at once
    return gl.atomic_add(counter + lanes, gl.full([32 * WARPS], 1, gl.int32, layout), mask=lanes == 0, sem="relaxed")


@gluon.jit
def drawn(ticket, WARPS: gl.constexpr):
    """The item of a `draw`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.num_programs(0) + gl.sum(gl.where(gl.arange(0, 32 * WARPS, layout) == 0, ticket, 0), 0)


@gluon.jit
def fetch(records, index, total, heads, WARPS: gl.constexpr):
    """The record of an item, a number a lane; past the last item the one that says so."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place = gl.arange(0, 8, layout)
    real = index < total
    record = gl.load(records + (index // heads) * 8 + place, mask=(place > 0) & real, other=0)
    return gl.where(place == 0, gl.where(real, index % heads, -1), record)


@gluon.jit
def _fields(record, WARPS: gl.constexpr):
    """The first six numbers of a record that every thread holds whole."""
    place = gl.arange(0, 8, gl.BlockedLayout([8], [32], [WARPS], [0]))
    head = gl.sum(gl.where(place == 0, record, 0), 0)
    first = gl.sum(gl.where(place == 1, record, 0), 0)
    start = gl.sum(gl.where(place == 2, record, 0), 0)
    length = gl.sum(gl.where(place == 3, record, 0), 0)
    other_start = gl.sum(gl.where(place == 4, record, 0), 0)
    other_length = gl.sum(gl.where(place == 5, record, 0), 0)
    return head, first, start, length, other_start, other_length


@gluon.jit
def publish(record, ordinal, ring, ready, empty, WARPS: gl.constexpr):
    """Hand the record of the program's item `ordinal` to the others, and return its numbers."""
    slot = ordinal % RING
    mbarrier.wait(empty.index(slot), ((ordinal // RING) & 1) ^ 1)
    ring.index(slot).store(record)
    gl.thread_barrier()
    mbarrier.arrive(ready.index(slot))
    return _fields(ring.index(slot).load(gl.BlockedLayout([8], [32], [WARPS], [0])), WARPS)


@gluon.jit
def take(ordinal, ring, ready, empty, WARPS: gl.constexpr):
    """Wait for the record of the program's item `ordinal`, and return its numbers."""
    slot = ordinal % RING
    mbarrier.wait(ready.index(slot), (ordinal // RING) & 1)
    record = ring.index(slot).load(gl.BlockedLayout([8], [32], [WARPS], [0]))
    gl.thread_barrier()
    mbarrier.arrive(empty.index(slot))
    return _fields(record, WARPS)


@gluon.jit
def finish(counter, WARPS: gl.constexpr):
    """This program draws no more; the last one to say so leaves the counter as it was found."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lanes = gl.arange(0, 32 * WARPS, layout)
    one = gl.full([32 * WARPS], 1, gl.int32, layout)
    before = gl.atomic_add(counter + 1 + lanes, one, mask=lanes == 0, sem="acq_rel")
    last = gl.sum(gl.where(lanes == 0, before, 0), 0) == gl.num_programs(0) - 1
    gl.store(counter + lanes, one * 0, mask=(lanes < 2) & last)


@gluon.jit
def zero_unowned(out, offsets, num, rows, heads, D: gl.constexpr, WARPS: gl.constexpr):
    """Zero the rows of a `(rows, heads, D)` tensor outside `[offsets[0], offsets[num])`, shared among the programs; usually there are none."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    begin = gl.load(offsets).to(gl.int32)
    end = gl.load(offsets + num).to(gl.int32)
    columns = gl.arange(0, D, layout)
    for index in range(gl.program_id(0), (begin + rows - end) * heads, gl.num_programs(0)):
        row = index // heads
        row = gl.where(row < begin, row, end + row - begin)
        place = row.to(gl.int64) * heads + index % heads
        gl.store(out + place * D + columns, gl.zeros([D], out.dtype.element_ty, layout))
