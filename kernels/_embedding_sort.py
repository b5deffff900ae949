"""Stable sort of the embedding update's (table row, gradient row) pairs by the few bits that row numbers have.

A pass over each digit of `DIGIT` bits from the lowest up, on tiles of `TILE` pairs:

    count     counts[tile, digit], how many pairs of a tile have a digit
    offsets   before[tile, digit] = sum of counts[< tile, digit], totals[digit] = sum of counts[:, digit]
    scatter   a pair's place = sum of totals[< digit] + before[tile, digit] + how many pairs ahead of it in its tile have its digit

Equal digits keep their order in each pass, so the sort is stable and repeats bit for bit. `torch.sort` goes over all 32 bits in four passes and gives
8-byte positions, by which the gradient rows are then gathered: 105 us and 7 for 1.3 M pairs of 26 bits; three passes here take 82 [H200, 2026-12-01].
CUDA and not Triton, because ranks need counters in shared memory that a warp addresses at will: tiles of 1,024 pairs sorted in registers, as Triton
can, took 54 us a pass. NVRTC, which PyTorch comes with, compiles it.
"""

import ctypes
import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels._launch import cdiv

DIGIT = 9  # bits: three passes for up to 2^27 rows, counters of a tile in 8 KB
THREADS, TILE = 256, 4096  # pairs, 16 a thread: about 8 of a digit's side by side, a sector of memory

SOURCE = f"""
#define BINS {1 << DIGIT}
#define THREADS {THREADS}
#define TILE {TILE}
""" + r"""
#define WARPS (THREADS / 32)
#define ITEMS (TILE / THREADS)
#define ALL 0xffffffffu

extern "C" __global__ void __launch_bounds__(THREADS) count(const int* keys, int* counts, int num, int shift) {
    __shared__ int bins[BINS];
    for (int d = threadIdx.x; d < BINS; d += THREADS) bins[d] = 0;
    __syncthreads();
    int begin = blockIdx.x * TILE + threadIdx.x;
    int key[ITEMS];
    #pragma unroll
    for (int j = 0; j < ITEMS; j++) key[j] = begin + j * THREADS < num ? keys[begin + j * THREADS] : -1;
    #pragma unroll
    for (int j = 0; j < ITEMS; j++) if (key[j] >= 0) atomicAdd(&bins[(key[j] >> shift) & (BINS - 1)], 1);
    __syncthreads();
    for (int d = threadIdx.x; d < BINS; d += THREADS) counts[(long long)blockIdx.x * BINS + d] = bins[d];
}

/* 32 x 32 threads for 32 digits: each thread sums every 32nd part of the tiles; `counts` become sums of the tiles before */
extern "C" __global__ void __launch_bounds__(1024) offsets(int* counts, int* totals, int tiles) {
    __shared__ int parts[32][33];
    int digit = blockIdx.x * 32 + threadIdx.x, size = (tiles + 31) / 32;
    int begin = threadIdx.y * size, end = min(begin + size, tiles), sum = 0;
    #pragma unroll 4
    for (int t = begin; t < end; t++) sum += counts[(long long)t * BINS + digit];
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0) {
        int before = 0;
        for (int r = 0; r < 32; r++) { int part = parts[r][threadIdx.x]; parts[r][threadIdx.x] = before; before += part; }
        totals[digit] = before;
    }
    __syncthreads();
    int before = parts[threadIdx.y][threadIdx.x];
    #pragma unroll 4
    for (int t = begin; t < end; t++) {
        int own = counts[(long long)t * BINS + digit];
        counts[(long long)t * BINS + digit] = before;
        before += own;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) scatter(
    const int* keys, const int* values, int* out_keys, int* out_values, const int* before, const int* totals, int num, int shift
) {
    __shared__ unsigned short ahead[WARPS][BINS];  /* pairs of a digit: in this warp so far, then in the warps before */
    __shared__ int place[BINS], tile_keys[TILE], tile_values[TILE];
    __shared__ long long sums[WARPS];
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, tile = blockIdx.x * TILE;
    int first = tile + warp * 32 * ITEMS + lane;
    int key[ITEMS], value[ITEMS], rank[ITEMS];
    #pragma unroll
    for (int j = 0; j < ITEMS; j++) key[j] = first + 32 * j < num ? keys[first + 32 * j] : -1;
    for (int d = lane; d < BINS; d += 32) ahead[warp][d] = 0;
    __syncwarp();
    #pragma unroll
    for (int j = 0; j < ITEMS; j++) {  /* in the order of the pairs */
        int digit = key[j] < 0 ? BINS : (key[j] >> shift) & (BINS - 1);
        unsigned same = __match_any_sync(ALL, digit);
        int earlier = __popc(same & ((1u << lane) - 1)), known = 0;
        if (digit < BINS) known = ahead[warp][digit];
        __syncwarp();
        if (digit < BINS && earlier == 0) ahead[warp][digit] = known + __popc(same);
        __syncwarp();
        rank[j] = known + earlier;
    }
    #pragma unroll
    for (int j = 0; j < ITEMS; j++) value[j] = first + 32 * j < num ? values[first + 32 * j] : 0;
    __syncthreads();
    /* two neighbouring digits a thread: sums over the warps, then over the digits before, of the tile (upper half) and of all tiles (lower) */
    int own[2], total[2];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        int digit = 2 * thread + i;
        own[i] = 0;
        for (int w = 0; w < WARPS; w++) { int n = ahead[w][digit]; ahead[w][digit] = own[i]; own[i] += n; }
        total[i] = totals[digit];
    }
    long long pair = ((long long)(own[0] + own[1]) << 32) + total[0] + total[1], sum = pair;
    for (int step = 1; step < 32; step *= 2) {
        long long lower = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += lower;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += sums[w];
    sum -= pair;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        int digit = 2 * thread + i, in_tile = (int)(sum >> 32);
        for (int w = 0; w < WARPS; w++) ahead[w][digit] += in_tile;
        place[digit] = (int)sum + before[(long long)blockIdx.x * BINS + digit] - in_tile;
        sum += ((long long)own[i] << 32) + total[i];
    }
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < ITEMS; j++) if (key[j] >= 0) {
        int at = ahead[warp][(key[j] >> shift) & (BINS - 1)] + rank[j];
        tile_keys[at] = key[j];
        tile_values[at] = value[j];
    }
    __syncthreads();
    int count = min(TILE, num - tile);
    #pragma unroll 4
    for (int at = thread; at < count; at += THREADS) {
        int now = tile_keys[at], to = place[(now >> shift) & (BINS - 1)] + at;
        out_keys[to] = now;
        out_values[to] = tile_values[at];
    }
}
"""


Start = Callable[..., None]  # (kernel, grid, block, *arguments), each argument a pointer or a number


def sort_pairs(keys: Tensor, values: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """`keys (N,)`, integers in [0, limit], ascending, and `values (N,)` int32 along with them; equal keys in the order they come in.

    By the kernels above for int32 keys on an NVIDIA GPU, which then use `keys` and `values` up; by `torch.sort` elsewhere, for int64 keys and, with
    a warning, where NVRTC is not found.
    """
    if keys.is_cuda and keys.dtype == torch.int32 and torch.version.cuda and _nvrtc() is not None:
        return passes(_starter(keys.device.index), keys, values, limit)
    keys, order = torch.sort(keys, stable=True)
    return keys, values[order]


def passes(start: Start, keys: Tensor, values: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """`sort_pairs` by kernels that `start` launches."""
    num, tiles, bins = keys.numel(), cdiv(keys.numel(), TILE), 1 << DIGIT
    counts = torch.empty((tiles + 1) * bins, dtype=torch.int32, device=keys.device)  # and the totals behind them
    before, totals = counts.data_ptr(), counts.data_ptr() + 4 * tiles * bins
    now, following = (keys, values), (torch.empty_like(keys), torch.empty_like(values))
    for shift in range(0, limit.bit_length(), DIGIT):
        start("count", tiles, (THREADS, 1), now[0].data_ptr(), before, num, shift)
        start("offsets", bins // 32, (32, 32), before, totals, tiles)
        start("scatter", tiles, (THREADS, 1), *[t.data_ptr() for t in (*now, *following)], before, totals, num, shift)
        now, following = following, now
    return now


def _starter(index: int) -> Start:
    """Launches on the current stream of the GPU `index`, which is the current one."""
    stream, driver, kernels = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index)), _driver(), _kernels(index)

    def start(name: str, grid: int, block: tuple[int, int], *arguments: int) -> None:
        slots = (ctypes.c_uint64 * len(arguments))(*arguments)  # of a number a kernel reads the low 4 bytes
        first = ctypes.addressof(slots)
        places = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
        _checked(driver.cuLaunchKernel(kernels[name], grid, 1, 1, *block, 1, 0, stream, places, None))

    return start


def _checked(error: int) -> None:
    if error:
        raise RuntimeError(f"sort of an embedding update: the CUDA driver or NVRTC returned error {error}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """PyTorch's own NVRTC, beside it where wheels put it or where the loader finds it."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    for path in Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"):
        for part in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(part))  # else it looks for them in the loader's folders alone
        return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL(name)
    except OSError:
        warnings.warn(f"{name} not found: embedding updates sort by torch.sort, which takes longer", stacklevel=2)
        return None


@functools.cache
def _kernels(index: int) -> dict[str, ctypes.c_void_p]:
    """The kernels, compiled for the GPU `index`."""
    nvrtc = _nvrtc()
    assert nvrtc is not None
    major, minor = torch.cuda.get_device_capability(index)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _checked(nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"sort.cu", 0, None, None))
    _checked(nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{major}{minor}".encode())))
    _checked(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    binary = ctypes.create_string_buffer(size.value)
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    _checked(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    module, functions = ctypes.c_void_p(), {name: ctypes.c_void_p() for name in ("count", "offsets", "scatter")}
    _checked(_driver().cuModuleLoadData(ctypes.byref(module), binary))
    for name, function in functions.items():
        _checked(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return functions
