"""`kernels._launch` with a kernel that only notes its calls: compiled once a key, then launched directly; the rest is left to Triton."""
from types import SimpleNamespace

import torch

from kernels import _launch


class Kernel:
    __name__ = "kernel"

    def __init__(self, compiled: bool = True) -> None:
        self.calls: list[tuple] = []
        self.launches: list[tuple] = []
        self.compiled = compiled

    def __getitem__(self, grid):
        def call(*args, num_warps):
            self.calls.append((grid, args, num_warps))
            return self if self.compiled else None

        return call

    function, packed_metadata = "function", "metadata"

    def run(self, *args):
        self.launches.append(args)


def test_a_key_is_compiled_once_and_then_launched_with_everything_in_place(monkeypatch):
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "_raw_stream", lambda index: 7)
    kernel, x = Kernel(), torch.zeros(64)
    for grid, rows, constants, key in ((3, 5, (1, True), None), (4, 6, (1, True), None), (4, 6, (2, True), None), (4, 6, (2, True), "other")):
        _launch.launch(kernel, grid, (x, None, rows), constants, num_warps=2, key=key)
    assert kernel.calls == [((3,), (x, None, 5, 1, True), 2), ((4,), (x, None, 6, 2, True), 2), ((4,), (x, None, 6, 2, True), 2)]
    assert kernel.launches == [(4, 1, 1, 7, "function", "metadata", None, None, None, x, None, 6, 1, True)]


def test_pointers_that_are_not_aligned_and_interpreted_kernels_are_left_to_triton(monkeypatch):
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "_raw_stream", lambda index: 7)
    kernel, x = Kernel(), torch.zeros(64)
    _launch.launch(kernel, 1, (x,), (), num_warps=4)
    _launch.launch(kernel, 1, (x[1:],), (), num_warps=4)
    assert len(kernel.calls) == 2 and not kernel.launches
    interpreted = Kernel(compiled=False)
    interpreted.__name__ = "interpreted"
    for _ in range(2):
        _launch.launch(interpreted, 1, (x,), (), num_warps=4)
    assert len(interpreted.calls) == 2


class Signature(Kernel):
    """Of a kernel `(x, y, rows, GROUP: constexpr, scale, KIND: constexpr)`."""

    def __init__(self) -> None:
        super().__init__()
        self.params = [SimpleNamespace(name=n, is_constexpr=n.isupper()) for n in ("x", "y", "rows", "GROUP", "scale", "KIND")]

    def __getitem__(self, grid):
        def call(*args, **meta):
            self.calls.append((grid, args, meta))
            return self

        return call


def test_run_compiles_once_for_what_triton_tells_apart_and_nothing_else(monkeypatch):
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "_raw_stream", lambda index: 7)
    kernel, x = Signature(), torch.zeros(64)

    def run(y=None, rows=5, group=2, scale=0.5, kind="a", num_warps=4):
        before = len(kernel.calls)
        _launch.run(kernel, (3,), x, y, rows, group, scale, num_warps=num_warps, KIND=kind)
        return len(kernel.calls) - before

    assert run() == 1 and run() == 0 and run(rows=7) == 0 and run(scale=2.0) == 0
    assert kernel.launches[-1] == (3, 1, 1, 7, "function", "metadata", None, None, None, x, None, 5, 2, 2.0, "a")
    other = ({"y": x}, {"y": x.double()}, {"rows": 16}, {"rows": 1}, {"rows": 2**40}, {"group": 3}, {"kind": "b"}, {"num_warps": 8})
    assert [run(**change) for change in other] == [1] * len(other)
    assert [run(**change) for change in other] == [0] * len(other)
    assert run(y=x[1:]) == 1 and run(y=x[1:]) == 1  # not aligned: left to Triton each time


def test_a_box_is_made_whole_for_triton_alone(monkeypatch):
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(_launch.Box, "whole", lambda box: "descriptor")
    kernel, x = Signature(), torch.zeros(64, 64)
    boxes = [_launch.Box(x, [64, 64], [64, 1], [rows, 64], None) for rows in (32, 32, 64)]
    for box in boxes:
        _launch.run(kernel, (1,), box, None, 5, 2, 0.5, KIND="a")
    assert [args[0] for _, args, _ in kernel.calls] == ["descriptor"] * 2 and [launch[9] for launch in kernel.launches] == [boxes[1]]
