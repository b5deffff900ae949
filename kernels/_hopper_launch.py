"""Host side of the Hopper kernels: what they accept, TMA descriptors, launches."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from kernels._attention_hopper import hopper_forward_kernel
from kernels._attention_hopper_keys import hopper_dkdv_kernel
from kernels._attention_hopper_queries import hopper_dq_kernel
from kernels._attention_hopper_units import CONSUMERS, hopper_units_kernel
from kernels._block_hopper import block_backward_kernel
from kernels._launch import Box, place, run
from kernels._tiles import RANKED, ranked_tiles, tile_map

LOG2E = 1.4426950408889634
SHORT = 256  # keys at and below which half a block of 128 would be padding on average
# (head dim, softmax with long keys) -> keys per block and stages; 227 KiB of shared memory also hold two tiles of Q and the output's
# staging. [Measured H200, D=128] L <= 1024: softmax 478 TFLOPS with 128 keys, 445 with 64; gelu_fast 412 and 464. Causal silu,
# L <= 2048: 419 and 449. Keys <= 256, softmax: cross 232 and 255, self 139 and 146.
# Programs draw their tiles where a mask or short rows make shares uneven. [Measured H200, us, drawn and in even shares] causal silu, L <= 2048: 1,768
# and 1,867; D=64, L <= 1024: 1,225 and 1,270; but L <= 1024 softmax 1,794 and 1,757, gelu_fast 2,053 and 1,971; L = 2048 9,043 and 8,962
FORWARD_TILES = {(64, True): (128, 3), (64, False): (128, 3), (128, True): (128, 2), (128, False): (64, 4)}
# Up to 256 keys, no mask by position: (head dim, softmax, queries at most 256) -> keys a block, stages, tiles of each consumer in an item, tiles in
# flight (`_attention_hopper_units`). [Measured H200, us at L <= 256] 192; one tile each 203; two consumers whose blocks overlap 202, in five stages
# 204, whole tiles by TMA 202, without overlap 208, with queries in shared memory 214; items in even shares, numbers from memory, the map built on
# every forward 235. Before that, of 229: tiles of 128 rows 231; three stages 237; 32 and 128 keys a block 240, 266; programs with whole sequences
# that follow each other 226; two to eight programs a multiprocessor 225 to 247.
# [us at cross] 1,014; whole tiles by TMA 1,021, four tiles each 1,020, queries in shared memory 1,066; with overlapping blocks 1,173, two consumers
# 1,061 to 1,106; these in even shares 1,080
UNITS = {(128, True, True): (64, 4, 2, 6), (128, True, False): (64, 4, 16, 6)}
# Backward of blocks of 64: slots, and programs for each multiprocessor, each with an even share. [Measured H200, ms] Triton 1.404; two slots
# 1.394, with eight programs 1.345; three slots 1.110, with eight programs 1.091, with 32 1.064
BLOCK_SLOTS, BLOCK_WAVES = 3, 8
HEAD_DIMS = (64, 128)
RESERVE = 4096  # counters of captured launches that are made at once, 16 bytes each, as pointers should be aligned

# head dim -> keys (dQ) or queries (dK, dV) a step and stages of them, tiles of the other side in flight; softmax's dQ holds O's tile too; then what
# stands in registers (dQ) or whether results have shared memory of their own (dK, dV): see the kernels.
# [Measured H200, us of the whole backward, D=128] softmax at L <= 1024: items in even shares 6,027, drawn 5,871, with Q held 5,807, or with Q and
# dO held, in three stages, 5,712, or with dK and dV staged 5,689; even shares and all of it, in another run, 6,126 and 5,611. The same at cross:
# 3,688, 3,518, 3,459, 3,214, 3,458; 3,795 and 3,248. At L <= 256: 742, 691, 683, 673, 700; all but the staged one 730 and 664. gelu_fast at L <=
# 1024: 6,586, 6,352, 6,212, Q and dO in four stages 6,548, staged 6,468. Causal silu at L <= 2048, Q held or not: 6,215 and 6,115, the fastest of
# each 5,506, 5,738.
# Before items were drawn [TFLOPS of the products, without O]: dQ, L <= 1024: 600 with two tiles, 605 with one; dK and dV: two blocks of keys
# 505 at L <= 1024, 257 at L <= 256, one block and a stage more 543 and 248. O read by the consumers instead of by TMA: dQ 547.
# [us, D=64, L <= 1024] gelu_fast: dQ with 128 keys a step 1,888 (in (64, 6, 2), not checked against float64 yet, 1,674), dK and dV with 128
# queries 3,262 (their registers spill), with 64 1,969; softmax: 1,379 (1,332), 1,666, 1,953; at L <= 256: 218 (186), 234, 220
DQ_TILES = {(64, True): (128, 4, 2, 0), (64, False): (128, 4, 2, 0), (128, True): (64, 3, 1, 2), (128, False): (64, 5, 1, 1)}  # (head dim, softmax)
# (head dim, kind; "softmax" with more than 256 queries, else "short"). [Measured H200, us of the whole backward at D=128] gelu_fast at L <= 1024:
# staged and late 6,245, two blocks of keys late 6,339, not late 6,286. Causal silu at L <= 2048: staged 6,146, two blocks 6,215
DKDV_TILES = {
    (64, "softmax"): (128, 4, 2, False), **{(64, kind): (64, 6, 2, False) for kind in ("short", "gelu", "gelu_fast", "silu", "relu", "identity")},
    **{(128, kind): (64, 4, 1, True) for kind in ("softmax", "gelu_fast", "silu")},
    **{(128, kind): (64, 3, 2, False) for kind in ("short", "gelu", "relu", "identity")},
}  # fmt: skip
# (kind, whether masked by position) whose dK and dV begin dP late. Under a mask softmax and gelu otherwise spill registers between a step's products
# [ptxas]. [Measured H200, dK and dV, ms] causal silu, L <= 2048: 3.76 late, 4.08 not; the whole backward, L <= 1024: gelu 8.54 late, 6.88 not
LATE = frozenset({("silu", False), ("gelu_fast", False)} | {(kind, True) for kind in ("softmax", "gelu", "gelu_fast", "silu", "relu", "identity")})
# two of a program's warp groups compute; beside them a warp that loads, and two that zero tails and fetch statistics
PARTITIONS = {"PRODUCERS": 1, "HELPERS": 2, "PRODUCER_REGISTERS": 24, "num_warps": 4}


def fits(tensors: tuple[Tensor, ...], num_sequences: int, bias: tuple, options) -> bool:
    """Whether the warp-specialised kernels take these arguments: a Hopper GPU, what TMA can address, and no bias."""
    q, k = tensors[:2]
    return (
        _is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in HEAD_DIMS
        and bias[0] is None
        and bias[1] is None
        and options.scale > 0
        and 0 < num_sequences <= RANKED
        and k.shape[0] > 0
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in tensors)
    )


@functools.cache
def num_programs(device: torch.device, waves: int = 1) -> int:
    """Programs of a persistent launch: `waves` for each multiprocessor, one of which runs there at a time."""
    return waves * torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[tuple, Tensor] = {}  # (device, stream) -> zeros
_reserves: dict[torch.device, list[Tensor]] = {}  # `(RESERVE, 4)` zeros each, which graphs go on using
_taken: dict[torch.device, int] = {}  # rows of them


def counter(device: torch.device) -> Tensor:
    """The int32 zeros by which the programs of a launch on the current stream share their items (`_hopper_queue`), which leave them zero.

    Launches of a stream follow each other and share theirs. Each launch that is captured has its own, since graphs may run beside each other: out of
    a reserve that was zeroed before, else zeroed by the graph itself.
    """
    stream, capture = place(device)
    reserves, taken = _reserves.setdefault(device, []), _taken.get(device, 0)
    if capture is None:
        found = _counters.get((device, stream))
        if found is None:
            found = _counters[device, stream] = torch.zeros(4, dtype=torch.int32, device=device)
        if taken >= len(reserves) * RESERVE - RESERVE // 2:
            reserves.append(torch.zeros((RESERVE, 4), dtype=torch.int32, device=device))
            torch.cuda.current_stream(device).synchronize()  # graphs may run on any other one
        return found
    if taken == len(reserves) * RESERVE:
        return torch.zeros(4, dtype=torch.int32, device=device)
    _taken[device] = taken + 1
    return reserves[taken // RESERVE][taken % RESERVE]


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def descriptor(x: Tensor, rows: int) -> Box:
    """TMA descriptor of `(rows, D)` boxes over `(total, H, D)` seen as a matrix; a head starts at column `head * stride(1)`."""
    total, heads, head_dim = x.shape
    row, head, _ = x.stride()
    return Box(x, [total, (heads - 1) * head + head_dim], [row, 1], [rows, head_dim], _layout(x.dtype, rows, head_dim))


@functools.cache
def _layout(dtype: torch.dtype, rows: int, head_dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, head_dim], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def meta(q: Tensor, options) -> dict:
    """Compile-time options shared by forward and backward.

    SiLU uses the approximate tanh too when its weights are rounded to bfloat16 anyway (2**-9 against the approximation's 2**-11).
    """
    return {
        "KIND": "gelu" if options.kind == "gelu_fast" else options.kind,
        "APPROX": options.kind == "gelu_fast" or (options.kind == "silu" and q.dtype == torch.bfloat16),
        "CAUSAL": options.causal,
        "WINDOW": options.window > 0,
    }


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offsets: tuple[Tensor, Tensor], options, max_q: int, max_k: int) -> None:
    """Fill `out` and, for softmax, `lse`."""
    rows, heads, head_dim = q.shape
    softmax = options.kind == "softmax"
    choice = UNITS.get((head_dim, softmax, max_q <= SHORT))
    if choice is not None and max_k <= SHORT and not options.causal and not options.window:
        forward_units(q, k, v, out, lse, offsets, options, choice)
        return
    n, stages = FORWARD_TILES[head_dim, softmax and max_k > SHORT]
    scale = options.scale * LOG2E if softmax else options.scale
    run(
        hopper_forward_kernel, (num_programs(q.device),),
        descriptor(q, 64), descriptor(k, n), descriptor(v, n), out, lse if softmax else out,
        offsets[0], offsets[0].shape[0] - 1, *ranked_tiles(*offsets, rows, 128), counter(q.device), rows, heads, heads // k.shape[1],
        q.stride(1), k.stride(1), v.stride(1), options.window, scale, 1.0 / options.divisor,
        **meta(q, options), DRAWN=head_dim == 64 or options.causal or options.window > 0, N=n, D=head_dim, STAGES=stages,
        CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24, num_warps=4,
    )  # fmt: skip


def forward_units(q, k, v, out, lse, offsets, options, choice: tuple[int, int, int, int]) -> None:
    """As `forward`, without a mask by position, by tiles of 64 rows; `choice`: keys a block n, stages (n * stages keys stay for an item), tiles of
    each consumer in an item, tiles in flight."""
    rows, heads, head_dim = q.shape
    softmax = options.kind == "softmax"
    n, stages, tiles, slots = choice
    scale = options.scale * LOG2E if softmax else options.scale
    kind = {name: value for name, value in meta(q, options).items() if name in ("KIND", "APPROX")}
    run(
        hopper_units_kernel, (num_programs(q.device),),
        descriptor(q, 64), descriptor(k, n), descriptor(v, n), out, lse if softmax else out,
        offsets[0], offsets[0].shape[0] - 1, *ranked_tiles(*offsets, rows, CONSUMERS.value * 64 * tiles), counter(q.device),
        rows, heads, heads // k.shape[1], q.stride(1), k.stride(1), v.stride(1), scale, 1.0 / options.divisor,
        **kind, N=n, D=head_dim, STAGES=stages, TILES=tiles, SLOTS=slots, **PARTITIONS,
    )  # fmt: skip


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    offsets: tuple[Tensor, Tensor], options, max_q: int,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, rows that no sequence owns included."""
    rows, heads, head_dim = q.shape
    softmax = options.kind == "softmax"
    num = offsets[0].shape[0] - 1
    tiles = ranked_tiles(*offsets, rows, 128)
    same = offsets[0].data_ptr() == offsets[1].data_ptr() and rows == k.shape[0]
    items = tiles if same else ranked_tiles(offsets[1], offsets[0], k.shape[0], 128)
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)  # sum_d dO O of every row: the dQ kernel writes, the other one reads
    o = out if softmax else grad
    scale = options.scale * LOG2E if softmax else options.scale
    sizes = (rows, heads, heads // k.shape[1])
    free = counter(q.device)
    constants = {**meta(q, options), "D": head_dim, "CONSUMER_REGISTERS": 240, **PARTITIONS}
    n, stages, slots, held = DQ_TILES[head_dim, softmax]
    run(
        hopper_dq_kernel, (num_programs(q.device),),
        descriptor(q, 64), descriptor(grad, 64), descriptor(o, 64), descriptor(k, n), descriptor(v, n), dq, lse, delta,
        offsets[0], num, *tiles, free, *sizes, q.stride(1), grad.stride(1), o.stride(1), k.stride(1), v.stride(1), options.window, scale,
        options.scale / options.divisor, N=n, STAGES=stages, SLOTS=slots, HELD=held, **constants,
    )  # fmt: skip
    late = (options.kind, options.causal or options.window > 0) in LATE
    n, stages, slots, staged = DKDV_TILES[head_dim, "short" if softmax and max_q <= SHORT else options.kind]
    run(
        hopper_dkdv_kernel, (num_programs(q.device),),
        descriptor(q, n), descriptor(grad, n), descriptor(k, 64), descriptor(v, 64), dk, dv, lse, delta,
        offsets[1], num, *items, free, k.shape[0], *sizes, q.stride(1), grad.stride(1), k.stride(1), v.stride(1), options.window, scale,
        options.scale / options.divisor, 1.0 / options.divisor, N=n, STAGES=stages, SLOTS=slots, LATE=late, STAGED=staged, **constants,
    )  # fmt: skip


def block_backward(grad, q, k, v, dq, dk, dv, offsets: Tensor, causal: bool, scale: float, slots: int = BLOCK_SLOTS) -> None:
    """Fill dq, dk and dv of blocks of 64 rows."""
    heads, head_dim = q.shape[1:]
    owners = tile_map(offsets, q.shape[0], 64)
    run(
        block_backward_kernel, (num_programs(q.device, BLOCK_WAVES),),
        descriptor(q, 64), descriptor(k, 64), descriptor(v, 64), descriptor(grad, 64), dq, dk, dv, offsets, owners,
        owners.shape[0] * heads, heads, q.stride(1), k.stride(1), v.stride(1), grad.stride(1), scale * LOG2E, scale,
        CAUSAL=causal, D=head_dim, SLOTS=slots, HELPERS=2, num_warps=4,
    )  # fmt: skip


def block_fits(tensors: tuple[Tensor, ...], block: int) -> bool:
    """Whether `block_backward` takes these arguments: a Hopper GPU, blocks of 64, ungrouped heads, what TMA can address."""
    q, k = tensors[:2]
    return (
        _is_hopper(q.device)
        and block == 64
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in HEAD_DIMS
        and q.shape[1] == k.shape[1]
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in tensors)
    )
