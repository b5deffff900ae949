"""A process that builds batches ahead of the training loop: a thread would take turns with it at the interpreter's lock, and each launch would wait.

The child is forked, has the loader's whole state, computes with NumPy alone and never touches the device. What it builds crosses in memory that both
share, in as many slots as steps may be made ahead; a small header with the sizes crosses a pipe. Tensors are numpy arrays on the way.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import multiprocessing
import pickle
import queue
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from costmodel import launch
from runtime.batch import Batch

Batches = tuple[Batch, ...]
# A slot takes this many times the first step's bytes, and a MiB; a larger step crosses the pipe.
SLOT_FACTOR, SLOT_EXTRA = 1.5, 1 << 20
# Steps that wait for the caller, beside those in slots.
DEPTH = 2
_ALIGNMENT = 64
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """The thresholds of `costmodel.launch.allocator` for this process, where the C library has them: blocks that are freed stay mapped."""
    values = launch.allocator()
    if not values:
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        # mallopt takes an int; at its largest nothing that a batch holds is mapped on its own
        library.mallopt(_M_MMAP_THRESHOLD, min(int(values["MALLOC_MMAP_THRESHOLD_"]), 2**31 - 1))
        library.mallopt(_M_TRIM_THRESHOLD, min(int(values["MALLOC_TRIM_THRESHOLD_"]), 2**31 - 1))


def pack(batches: Batches) -> tuple[bytes, list[memoryview]]:
    """(header, contents): what `unpack` makes the same batches of, tensors on the host."""
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps([b.with_tensors(torch.Tensor.numpy) for b in batches], protocol=5, buffer_callback=buffers.append)
    return header, [buffer.raw() for buffer in buffers]


def unpack(header: bytes, contents: list[memoryview]) -> Batches:
    """The batches, whose tensors are views of `contents`."""
    return tuple(b.with_tensors(torch.from_numpy) for b in pickle.loads(header, buffers=contents))


def num_bytes(contents: list[memoryview]) -> int:
    """Bytes of a slot that holds `contents`, each aligned."""
    return sum(-(-c.nbytes // _ALIGNMENT) * _ALIGNMENT for c in contents)


def store(contents: list[memoryview], slot: memoryview) -> list[int]:
    """Copies contents into a slot; returns their sizes."""
    at = 0
    for one in contents:
        slot[at:at + one.nbytes] = one.cast("B")
        at += -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT
    return [one.nbytes for one in contents]


def load(sizes: list[int], slot: memoryview) -> list[memoryview]:
    """Views of what `store` left in a slot."""
    found, at = [], 0
    for size in sizes:
        found.append(slot[at:at + size])
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found


def built_by_process(build: Callable[[int], Batches], steps: range, *, slots: int) -> Iterator[Batches]:
    """`build(step)` for every step, made up to `slots` steps ahead by a process. The views that a step's batches are hold until the next is asked
    for. Errors of the process surface here."""
    if not len(steps):
        return
    first = build(steps[0])
    size = int(SLOT_FACTOR * num_bytes(pack(first)[1])) + SLOT_EXTRA
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    shared = mmap.mmap(-1, size * slots)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_work, args=(build, steps[1:], shared, size, slots, theirs, ours), name="loader", daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: the child takes none of their locks
        child.start()
    theirs.close()
    view = memoryview(shared)
    try:
        yield first
        for _ in steps[1:]:
            try:
                kind, slot, header, what = ours.recv()
            except (EOFError, ConnectionResetError):
                raise RuntimeError("the process that builds batches died") from None
            if kind == "error":
                raise what
            yield unpack(header, load(what, view[slot * size:(slot + 1) * size]) if kind == "slot" else [memoryview(bytearray(c)) for c in what])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: what it said before is read all the same
                ours.send(slot)
    finally:
        ours.close()
        child.kill()
        child.join()


def callers_device() -> Callable[[], None]:
    """What makes another thread use this one's CUDA device: threads begin at device 0, and one that pins memory there opens a context on a GPU that
    belongs to another rank."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


def drained_by_thread(made: Iterator[Batches], source: Iterator[Batches]) -> Iterator[Batches]:
    """What `made` gives, up to `DEPTH` steps early by a thread, whose errors surface here; at the end that closes `source`."""
    ready: queue.Queue = queue.Queue(maxsize=DEPTH)
    stop = threading.Event()
    use_device = callers_device()

    def put(item: tuple[Batches | None, Exception | None]) -> bool:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def drain() -> None:
        try:
            use_device()
            for batches in made:
                if not put((batches, None)):
                    return
            put((None, None))
        except Exception as error:  # handed to the consumer, who raises it
            put((None, error))
        finally:
            source.close()

    thread = threading.Thread(target=drain, name="loader", daemon=True)
    thread.start()
    try:
        while True:
            batches, error = ready.get()
            if error is not None:
                raise error
            if batches is None:
                return
            yield batches
    finally:
        stop.set()
        thread.join()


def _work(build: Callable[[int], Batches], steps: range, shared: mmap.mmap, size: int, slots: int, pipe: Connection, other: Connection) -> None:
    """The child: builds each step into the next free slot."""
    other.close()
    for number in (signal.SIGINT, signal.SIGTERM):  # of the parent, who ends this process
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # the parent's other threads are not here: an operator that wants them would wait for ever
    keep_freed_memory()
    view, free = memoryview(shared), list(range(slots))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        for step in steps:
            try:
                header, contents = pack(build(step))
            except Exception as error:  # handed to the parent, who raises it
                pipe.send(("error", 0, b"", error))
                return
            while not free or pipe.poll():
                free.append(pipe.recv())
            slot = free.pop(0)
            if num_bytes(contents) <= size:
                pipe.send(("slot", slot, header, store(contents, view[slot * size:(slot + 1) * size])))
            else:
                pipe.send(("pipe", slot, header, [bytes(c) for c in contents]))
        while True:
            pipe.recv()
