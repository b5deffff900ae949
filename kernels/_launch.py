"""Launches without what Triton's Python does on every call.

`kernel[grid](...)` inspects each argument, builds a key of strings and compares every global that the kernel reads: about 0.1 ms of host time on
the machine of the H200 results, where an operator of PyTorch takes 5 us. With `launch` the caller gives the key, so a repeated launch is one look-up
and the driver's own call; `run` makes that key of the arguments, as far as Triton looks at them: dtypes, integers that are 1, multiples of 16 or
beyond 32 bits, the values of constexprs.
"""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

DIRECT = True  # False: every launch through Triton
_compiled: dict[tuple, tuple] = {}
_constexprs: dict[int, tuple[int, ...]] = {}  # of a kernel: places of its constexprs
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def cdiv(a: int, b: int) -> int:
    """Rounded up. Triton's own costs 5 us of host time, as its `next_power_of_2`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below `n` >= 1."""
    return 1 << (n - 1).bit_length()


def place(device: torch.device) -> tuple[int, int | None]:
    """The current stream of a device and, while it is captured, the number of the capture; 0 and None for a CPU."""
    if device.type != "cuda":
        return 0, None
    stream = _raw_stream(device.index)
    return stream, _capture(stream) if torch.cuda.is_current_stream_capturing() else None


def _capture(stream: int) -> int:
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo failed with {error}")
    return number.value


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def launch(kernel: Any, grid: int, args: tuple, constants: tuple, *, num_warps: int, key: Hashable = None, **options: Any) -> None:
    """`kernel[(grid,)](*args, *constants)`. args: the first is a tensor on the current device. constants: the values of the constexprs, which end the
    signature. key: whatever else a compiled kernel depends on: dtypes that `constants` do not tell, integers that are specialised, whether one needs
    64 bits. options: of the compiler."""
    index = args[0].device.index
    known = (id(kernel), index, num_warps, constants, key, *options.items())  # kernels are modules' globals: they stay
    found = _compiled.get(known)
    # a pointer off 16 bytes needs another kernel: left to Triton
    if found is None or not DIRECT or any([a.data_ptr() & 15 for a in args if isinstance(a, Tensor)]):
        made = kernel[(grid,)](*args, *constants, num_warps=num_warps, **options)
        if made is not None and not any(a.data_ptr() & 15 for a in args if isinstance(a, Tensor)):  # None: interpreted
            _compiled[known] = _entry(made)
        return
    call, fixed = found
    call(grid, 1, 1, _raw_stream(index), *fixed, *args, *constants)


def _entry(made: Any) -> tuple[Any, tuple]:
    """(what launches a compiled kernel, its arguments between the stream and the kernel's own). A kernel that needs no scratch memory goes past the
    Python that would allocate it."""
    launcher, end = made.run, (made.packed_metadata, None, None, None)
    if getattr(launcher, "global_scratch_size", None) == 0 and getattr(launcher, "profile_scratch_size", None) == 0:
        return launcher.launch, (made.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *end)
    return launcher, (made.function, *end)


class Box:
    """A TMA descriptor as `run` takes it: what Triton's launcher reads of its own `TensorDescriptor`, which checks itself each time it is made."""

    __slots__ = ("base", "block_shape", "kind", "layout", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self.base, self.shape, self.strides, self.block_shape, self.layout, self.padding = base, shape, strides, block_shape, layout, "zero"
        self.kind = (base.dtype, *block_shape)

    def whole(self) -> Any:
        """The same as Triton's own."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape, self.layout)


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """`kernel[grid](*args, **meta)`. args: tensors on the current device, `Box`es, numbers, None, the first a tensor or a box. meta: the rest of the
    signature, constexprs all, and options of the compiler."""
    base = args[0].base if type(args[0]) is Box else args[0]
    places = _constexprs.get(id(kernel))
    if places is None:
        places = _constexprs[id(kernel)] = tuple(i for i, p in enumerate(getattr(kernel, "params", ())) if p.is_constexpr)
    seen = [
        a.dtype if isinstance(a, Tensor)
        else (a & 15 == 0) + 2 * (a == 1) + 4 * (not -0x80000000 <= a <= 0x7FFFFFFF) if type(a) is int
        else a.kind if type(a) is Box else "float" if isinstance(a, float) else a
        for a in args
    ]  # fmt: skip
    aligned = not any([a.data_ptr() & 15 for a in args if isinstance(a, Tensor)])
    seen += [args[i] for i in places if i < len(args)]
    known = (id(kernel), base.device.index, *meta.items(), *seen)
    found = _compiled.get(known) if DIRECT and aligned else None
    if found is None:
        made = kernel[grid](*(a.whole() if type(a) is Box else a for a in args), **meta)
        rest = [p.name for p in getattr(kernel, "params", ())][len(args):]
        if made is not None and aligned and meta.keys() >= set(rest):  # None: interpreted
            _compiled[known] = *_entry(made), rest
        return
    call, fixed, rest = found
    call(*grid, *(1,) * (3 - len(grid)), _raw_stream(base.device.index), *fixed, *args, *[meta[n] for n in rest])
