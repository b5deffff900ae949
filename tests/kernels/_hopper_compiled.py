"""Compile the Hopper kernels for sm_90 without a GPU and look for what the compiler gets wrong there. Exit code 1 on error.

Triton 3.6's loop-aware CSE can replace a loop-carried value by the one it has before the loop. Kernels here read the next item of their
persistent loop ahead, so such a value is a load before the loop that the loop's body uses although it has a successor.

A barrier that is initialised and then not used: the compiler gives its memory to other data, and a GPU that takes turns between processes puts the
barrier back over them when the program goes on. Found as NaN in gradients, only while other processes used the GPU [H200].
"""

import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget


class Driver:
    """As much of a driver as compiling takes."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def is_active(self):
        return True


triton.runtime.driver.set_active(Driver())

from kernels import _hopper_launch as launch  # noqa: E402  after the driver
from kernels._attention_cpu import AttentionOptions  # noqa: E402
from kernels._launch import Box  # noqa: E402

compiled = []


def compile_only(kernel, grid, *arguments, **constants) -> None:
    """In place of `kernels._launch.run`: keeps what is compiled."""
    arguments = [x.whole() if type(x) is Box else x for x in arguments]
    compiled.append((kernel.fn.__name__, kernel.warmup(*arguments, grid=grid, **constants)))


def stale_values(text: str) -> list[str]:
    """Uses, inside persistent loops, of numbers that were loaded before the loop (except those that decide how long it runs)."""
    found = []
    lines = [re.sub(r" loc\(.*?\)", "", line) for line in text.splitlines()]
    for begin in (i for i, line in enumerate(lines) if re.search(r"\bpartition\d+\(|\bdefault \{", line)):
        indent = re.match(r"\s*", lines[begin])[0]
        loop = rf"{indent}  (%[\w:]+ = )?scf\.(for %\w+ = %\w+ to (%\w+) step|while )"
        number = next(i for i in range(begin, len(lines)) if re.match(loop, lines[i]))  # a partition's first loop is the persistent one
        end = next(i for i in range(number + 1, len(lines)) if lines[i].startswith(indent + "  }") and "} do {" not in lines[i])
        bound = re.match(loop, lines[number])[3]
        if bound:
            body, decides = lines[number + 1 : end], next((other for other in lines[begin:number] if f"{bound} = " in other), "")
        else:
            turn = next(i for i in range(number, end) if "} do {" in lines[i])
            body, decides = lines[turn + 1 : end], " ".join(lines[number + 1 : turn])
        before = set()
        for other in lines[begin:number]:
            target = re.match(r"\s*(%\w+) = (.*)", other)
            loads = target and re.match(r"(tt\.load|ttg\.local_load) ", target[2])
            if target and (loads or any(re.search(rf"{re.escape(v)}\b", target[2]) for v in before)):
                before.add(target[1])
        before -= set(re.findall(r"%\w+", decides))
        found += [f"{v} in: {line.strip()}" for line in body for v in before if re.search(rf"{re.escape(v)}\b(?!:)", line)]
    return found


def idle_barriers(text: str) -> list[str]:
    """Barriers that no partition uses."""
    lines = [re.sub(r" loc\(.*?\)", "", line) for line in text.splitlines()]
    begin = next(i for i, line in enumerate(lines) if "ttg.warp_specialize(" in line)
    allocation = r"\s*(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)+i64,"
    allocated = [found[1] for line in lines[:begin] if (found := re.match(allocation, line))]
    assert allocated, "no barrier found"
    used = "\n".join(lines[begin:])
    return [f"{name} is initialised and not used" for name in allocated if not re.search(rf"{re.escape(name)}\b", used)]


def options(kind: str, causal: bool, window: int) -> AttentionOptions:
    return AttentionOptions(kind=kind, causal=causal, window=window, scale=0.1, divisor=1.0 if kind == "softmax" else 7.0)


def main() -> int:
    launch.run = compile_only
    launch.num_programs = lambda *_: 132
    launch.ranked_tiles = lambda *_: (torch.zeros(4, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    launch.counter = lambda *_: torch.zeros(4, dtype=torch.int32)
    launch.tile_map = lambda *_: torch.zeros(15, dtype=torch.int32)
    q, k, v, out, grad = (torch.zeros(640, 4, 128, dtype=torch.bfloat16) for _ in range(5))
    edges, lse = (torch.zeros(6, dtype=torch.int32),) * 2, torch.zeros(4, 640)
    for kind, causal, window in (("softmax", True, 100), ("softmax", False, 100), ("silu", True, 0), ("gelu_fast", False, 0), ("gelu", False, 100)):
        chosen = options(kind, causal, window)
        launch.forward(q, k, v, out, lse, edges, chosen, 1024, 1024)
        launch.backward(grad, q, k, v, out, lse, out, out, out, edges, chosen, 1024)
    for choice in launch.UNITS.values():
        launch.forward_units(q, k, v, out, lse, edges, options("softmax", False, 0), choice)
    for causal in (False, True):
        launch.block_backward(grad, q, k, v, out, out, out, edges[0], causal, 0.1, launch.BLOCK_SLOTS)
    wrong = [f"{name}: {use}" for name, kernel in compiled for find in (stale_values, idle_barriers) for use in find(kernel.asm["ttgir"])]
    print(f"{len(compiled)} kernels", *wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
