"""The embedding update's sort: `torch.sort` elsewhere than on a GPU, and its CUDA kernels emulated on the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels import _embedding_sort as sorting

# pairs, largest key, share of pairs that have it: one pass and several, tiles that are full and not, all keys equal, one hot key
CASES = [
    (1, 1, 0.0), (5, 3, 0.5), (4095, 511, 0.0), (4096, 512, 0.1), (4097, 7, 1.0), (9000, 2**18 - 1, 0.7), (9001, 40_000_000, 0.3),
    (4100, 2**31 - 2, 0.1), (140_000, 600, 0.2),
]  # fmt: skip


def pairs(num, limit, hot):
    keys = torch.randint(0, limit + 1, (num,))
    keys[torch.rand(num) < hot] = limit
    return keys.int(), torch.randint(0, 2**31 - 1, (num,), dtype=torch.int32)


def expected(keys, values):
    order = sorted(range(len(keys)), key=keys.tolist().__getitem__)  # Python's is stable
    return keys[order], values[order]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equal_keys_keep_their_order(dtype):
    keys, values = pairs(3000, 20, 0.2)
    for ours, theirs in zip(sorting.sort_pairs(keys.to(dtype), values, 20), expected(keys.to(dtype), values), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """What launches a kernel in the emulator."""
    folder = tmp_path_factory.mktemp("sort")
    (folder / "sort.cu").write_text(sorting.SOURCE)
    emulator = Path(__file__).with_name("_cuda_emulator.cpp")
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f'-DSOURCE="{folder}/sort.cu"']
    subprocess.run(["g++", *options, "-o", folder / "sort.so", emulator], check=True)
    library = ctypes.CDLL(str(folder / "sort.so"))
    return lambda name, grid, block, *numbers: library.start(name.encode(), grid, *block, (ctypes.c_uint64 * len(numbers))(*numbers))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("num, limit, hot", CASES)
def test_kernels_sort_stably(start, num, limit, hot):
    keys, values = pairs(num, limit, hot)
    want = expected(keys, values)
    for ours, theirs in zip(sorting.passes(start, keys.clone(), values.clone(), limit), want, strict=True):
        assert torch.equal(ours, theirs)
