"""`kernels._launch` with a kernel that only notes its calls: compiled once a key, then launched directly; the rest is left to Triton."""
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
