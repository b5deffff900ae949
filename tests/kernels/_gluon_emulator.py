"""Run Gluon kernels on the CPU: import this before any module with Gluon kernels, in a process of its own.

Triton's interpreter does not know Gluon. Here one program's partitions are threads that take turns at random, mbarriers count arrivals and
bytes, TMA copies land at random times, tiles are float32 NumPy arrays. It finds deadlocks, phases that a partition cannot tell apart, arrivals
in excess, shared memory that is overwritten while a product reads it, accesses out of bounds, and wrong results; it knows nothing about
layouts, registers, warps of one partition, or what the compiler makes of the source.
"""

import random
import sys
import threading
import types

import numpy as np

DTYPES = {"float32": (np.float32, 4), "bfloat16": (np.float32, 2), "float16": (np.float32, 2), "int32": (np.int64, 4), "int64": (np.int64, 8)}


class DType:
    def __init__(self, name):
        self.name, (self.numpy, self.size) = name, DTYPES[name]


class Tensor:
    """A NumPy array with the methods of a Gluon tensor; a zero-dimensional one counts and branches."""

    def __init__(self, data):
        self.data = data.data if isinstance(data, Tensor) else np.asarray(data)

    def to(self, dtype):
        return Tensor(self.data.astype(dtype.numpy))

    @property
    def type(self):
        return types.SimpleNamespace(shape=self.data.shape, layout=None)

    def __getitem__(self, key):
        return Tensor(self.data[key])

    def __index__(self):
        return int(self.data)

    def __bool__(self):
        return bool(self.data)


def _operator(name):
    def apply(self, other=None):
        if isinstance(other, Pointer):
            return NotImplemented
        with np.errstate(all="ignore"):
            if name in ("__floordiv__", "__mod__"):  # truncation, as on the device; operands are never negative where it matters
                assert np.all(_raw(other) > 0)
            value = getattr(self.data, name)(*(() if other is None else (_raw(other),)))
        return Tensor(value)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    for _side in ("", "r"):
        setattr(Tensor, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert"):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


def _raw(x):
    return x.data if isinstance(x, Tensor) else np.asarray(x)


class Pointer:
    """Into a flat array; loads and stores outside it are errors, even of values that nobody uses."""

    def __init__(self, array, dtype, offset=0):
        self.array, self.offset = array, offset
        self.dtype = types.SimpleNamespace(element_ty=dtype)

    def __add__(self, other):
        return Pointer(self.array, self.dtype.element_ty, self.offset + _raw(other))

    def places(self, mask):
        offset, mask = np.broadcast_arrays(self.offset, True if mask is None else _raw(mask))
        inside = offset[mask]
        assert not inside.size or (inside.min() >= 0 and inside.max() < self.array.size), "access out of bounds"
        return offset, mask


class Descriptor:
    """Boxes of a row-major `(rows, columns)` matrix; what lies outside reads as zero."""

    def __init__(self, matrix, block, dtype):
        self.matrix, self.block_shape, self.dtype, self.layout = matrix, block, dtype, None
        self.block_type = types.SimpleNamespace(nbytes=block[0] * block[1] * dtype.size)

    def read(self, row, column):
        rows, columns = self.block_shape
        result = np.zeros(self.block_shape, np.float32)
        assert row >= 0 and column >= 0
        part = self.matrix[row : row + rows, column : column + columns]
        result[: part.shape[0], : part.shape[1]] = part
        return result


class Shared:
    def __init__(self, array, dtype, barriers=None):
        self.array, self.dtype, self.barriers = array, dtype, barriers

    def index(self, i):
        assert 0 <= int(i) < len(self.array), "index outside the allocation"
        return Shared(self.array[int(i)], self.dtype, None if self.barriers is None else self.barriers[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.array[start : start + length] if dim == 0 else self.array[:, start : start + length], self.dtype)

    def permute(self, order):
        return Shared(self.array.transpose(order), self.dtype)

    def load(self, layout):
        return Tensor(self.array.copy())

    def store(self, value):
        self.array[...] = _raw(value)


class Barrier:
    def __init__(self):
        self.count = None

    def init(self, count):
        self.count = self.pending = count
        self.phase = self.bytes = 0

    def arrive(self):
        assert self.pending > 0, "an arrival more than the barrier counts"
        self.pending -= 1
        self.turn()

    def turn(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Machine:
    """Partitions of all programs run in threads that hand a baton around at random."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.programs, self.started = 1, []
        self.copies, self.lock = [], threading.Condition()
        self.turn, self.waiting, self.error = None, {}, None

    def run(self):
        """All partitions that programs have started so far, until they end."""
        functions, self.started = self.started, []
        self.waiting = {i: None for i in range(len(functions))}  # partition -> what it waits for (None: ready)
        threads = [threading.Thread(target=self._partition, args=(i, *entry), daemon=True) for i, entry in enumerate(functions)]
        for thread in threads:
            thread.start()
        with self.lock:
            while self.waiting and self.error is None:
                if self.copies and self.random.random() < 0.4:
                    self.land()
                ready = [i for i, condition in self.waiting.items() if condition is None or condition()]
                if not ready:
                    if not self.copies:
                        self.error = AssertionError(f"deadlock: partitions {sorted(self.waiting)} wait for ever")
                        break
                    self.land()
                    continue
                self.turn = self.random.choice(ready)
                self.lock.notify_all()
                self.lock.wait_for(lambda: self.turn is None)
            assert self.error is not None or not self.copies, "copies that nobody waited for"
        if self.error is not None:
            raise self.error

    def _partition(self, me, program, function, arguments):
        self.local.me, self.local.program = me, program
        with self.lock:
            self.lock.wait_for(lambda: self.turn == me)
            try:
                function(*arguments)
            except BaseException as error:  # reported by `run`
                self.error = self.error or error
            del self.waiting[me]
            self.turn = None
            self.lock.notify_all()

    local = threading.local()

    def step(self, condition=None):
        """Give the baton away, and take it back once `condition` holds."""
        me = self.local.me
        self.waiting[me] = condition
        self.turn = None
        self.lock.notify_all()
        self.lock.wait_for(lambda: self.turn == me)
        self.waiting[me] = None

    def land(self):
        descriptor, place, barrier, target = self.copies.pop(self.random.randrange(len(self.copies)))
        target.array[...] = descriptor.read(*place)
        barrier.bytes -= descriptor.block_type.nbytes
        barrier.turn()


MACHINE = Machine(0)


class Product:
    """An asynchronous product: computed when issued, and again when awaited, to see whether its operands stayed as they were."""

    def __init__(self, a, b, acc, use_acc):
        self.operands = [x.array if isinstance(x, Shared) else _raw(x) for x in (a, b)]
        self.acc = _raw(acc) if use_acc else 0.0
        self.value = self.compute()

    def compute(self):
        with np.errstate(all="ignore"):
            return (self.operands[0] @ self.operands[1] + self.acc).astype(np.float32)

    def finish(self):
        assert np.array_equal(self.value, self.compute(), equal_nan=True), "an operand changed while a product read it"
        return Tensor(self.value)


def _wait(bar, phase, pred=True):
    # a partition that looks at a barrier must not be two phases behind: parities would deceive it
    MACHINE.step(lambda: bar.barriers.phase & 1 != int(phase) & 1)


def _expect(bar, size, pred=True):
    bar.barriers.bytes += size
    bar.barriers.arrive()


def _arrive(bar, count=1, pred=True):
    MACHINE.step()
    if pred:
        bar.barriers.arrive()


def _copy(descriptor, place, bar, target):
    MACHINE.copies.append((descriptor, tuple(int(x) for x in place), bar.barriers, target))
    target.array[...] = np.nan  # until it lands, nobody may have read it
    MACHINE.step()


def _mma(a, b, acc, use_acc=True, is_async=False):
    product = Product(a, b, acc, use_acc)
    return product


def _mma_wait(pendings, deps):
    MACHINE.step()
    results = [x.finish() if isinstance(x, Product) else x for x in deps]
    return results[0] if len(results) == 1 else results


def _asm(code, constraints, arguments, **_):
    x = _raw(arguments[0])
    with np.errstate(all="ignore"):
        if code.startswith("tanh"):
            return Tensor(np.tanh(x))
        assert code.startswith("rcp"), code
        return Tensor(1.0 / x)


def _load(pointer, mask=None, other=0):
    offset, inside = pointer.places(mask)
    value = pointer.array[np.where(inside, offset, 0)] if pointer.array.size else np.zeros(offset.shape)
    return Tensor(np.where(inside, value, _raw(other)))


def _store(pointer, value, mask=None):
    offset, inside = pointer.places(mask)
    pointer.array[offset[inside]] = np.broadcast_to(_raw(value), offset.shape)[inside]


def _atomic_add(pointer, value, mask=None, sem=None):
    MACHINE.step()
    offset, inside = pointer.places(mask)
    before = pointer.array[np.where(inside, offset, 0)]
    np.add.at(pointer.array, offset[inside], np.broadcast_to(_raw(value), offset.shape)[inside])
    return Tensor(np.where(inside, before, -(10**9)))  # where the mask is off, anything


def _allocate(dtype, shape, layout):
    if layout == "mbarrier":
        return Shared(np.zeros(shape[0]), dtype, [Barrier() for _ in range(shape[0])] if len(shape) > 1 else Barrier())
    if dtype.numpy is not np.float32:
        return Shared(np.full(shape, -(10**9), dtype.numpy), dtype)
    return Shared(np.full(shape, np.nan, np.float32), dtype)


def _unary(function):
    def apply(*arguments, **options):
        with np.errstate(all="ignore"):
            return Tensor(function(*(_raw(x) for x in arguments), **options))

    return apply


class _Layout:
    def __init__(self, *_, **__):
        pass

    @staticmethod
    def get_default_for(*_, **__):
        return None


def _tensor_range(*bounds):
    for i in range(*(int(b) for b in bounds)):
        yield Tensor(i)


def _install() -> None:
    language = types.ModuleType("triton.experimental.gluon.language")
    for name in DTYPES:
        setattr(language, name, DType(name))
    for name in ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "NVMMASharedLayout", "SwizzledSharedLayout"):
        setattr(language, name, _Layout)
    language.constexpr = lambda value: value
    language.static_range = range
    language.program_id = lambda axis: Tensor(MACHINE.local.program)
    language.num_programs = lambda axis: Tensor(MACHINE.programs)
    language.load, language.store, language.atomic_add = _load, _store, _atomic_add
    language.arange = lambda start, end, layout=None: Tensor(np.arange(start, end))
    language.zeros = lambda shape, dtype, layout=None: Tensor(np.zeros(shape, dtype.numpy))
    language.full = lambda shape, value, dtype, layout=None: Tensor(np.full(shape, value, dtype.numpy))
    language.where, language.maximum, language.minimum = _unary(np.where), _unary(np.maximum), _unary(np.minimum)
    language.exp2, language.log2 = _unary(np.exp2), _unary(np.log2)
    language.max, language.sum = _unary(np.max), _unary(np.sum)
    language.cdiv = lambda a, b: (a + b - 1) // b
    language.convert_layout = lambda x, layout: x
    language.thread_barrier = lambda: None
    language.inline_asm_elementwise = _asm
    language.allocate_shared_memory = _allocate
    language.warp_specialize = lambda functions, warps, registers: MACHINE.started.extend((MACHINE.local.program, *entry) for entry in functions)
    hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.fence_async_shared = lambda: None
    hopper.mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: "mbarrier", init=lambda bar, count: bar.barriers.init(count), wait=_wait, expect=_expect, arrive=_arrive
    )
    hopper.tma = types.SimpleNamespace(async_copy_global_to_shared=_copy)
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = _mma, _mma_wait
    gluon = types.ModuleType("triton.experimental.gluon")
    gluon.jit = lambda function=None, **_: function if function is not None else lambda f: f
    gluon.language = language
    nvidia = types.ModuleType("triton.experimental.gluon.language.nvidia")
    nvidia.hopper = hopper
    for module in (gluon, language, nvidia, hopper):
        sys.modules[module.__name__] = module


_install()


def launch(kernel, programs: int, arguments: tuple, *, seed: int = 0, **constants) -> None:
    """Run all programs of `kernel`, their partitions beside each other."""
    for name, module in sys.modules.items():
        if name.startswith("kernels.") and "_hopper" in name:
            module.range = _tensor_range
    MACHINE.random.seed(seed)
    MACHINE.programs = programs
    for program in range(programs):
        MACHINE.local.program = program
        kernel(*arguments, **constants)
    MACHINE.run()
