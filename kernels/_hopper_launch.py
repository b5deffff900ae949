"""Host side of the Hopper kernels: what they accept, TMA descriptors, launches."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from kernels._attention_hopper import hopper_forward_kernel
from kernels._attention_hopper_pair import hopper_dkdv_kernel, hopper_dq_kernel
from kernels._attention_hopper_units import hopper_units_kernel
from kernels._block_hopper import block_backward_kernel
from kernels._launch import Box, run
from kernels._tiles import RANKED, ranked_tiles, tile_map, zero_unowned

LOG2E = 1.4426950408889634
SHORT = 256  # keys at and below which half a block of 128 would be padding on average
# (head dim, softmax with long keys) -> keys per block and stages; 227 KiB of shared memory also hold two tiles of Q and the output's
# staging. [Measured H200, D=128] L <= 1024: softmax 478 TFLOPS with 128 keys, 445 with 64; gelu_fast 412 and 464. Causal silu,
# L <= 2048: 419 and 449. Keys <= 256, softmax: cross 232 and 255, self 139 and 146
FORWARD_TILES = {(64, True): (128, 3), (64, False): (128, 3), (128, True): (128, 2), (128, False): (64, 4)}
# Up to 256 keys, no mask by position: (head dim, softmax, queries at most 256) -> keys a block, stages, consumers, tiles of each in an item, tiles in
# flight, whether whole tiles leave by TMA (`_attention_hopper_units`). [Measured H200, us at L <= 256, two runs] tiles of 128 rows 233, 229;
# (64, 4, 2, 2, 6, False) 229, 224; three consumers 239, 230; by TMA 233; five stages 234, six 269, three 237; 32 keys a block 240; a program with
# whole sequences that follow each other 226, 228; two to eight programs a multiprocessor 225 to 247. Of it identity in place of softmax takes 201.
# [us at cross] tiles of 128 rows 1,168; 48 tiles an item by TMA 1,038, 1,044; 96 1,063, 24 1,092, 1,059; two consumers 1,094, 1,076; two to
# eight programs a multiprocessor 1,071 to 1,159
UNITS = {(128, True, True): (64, 4, 2, 2, 6, False), (128, True, False): (64, 4, 3, 16, 6, True)}
# Backward of blocks of 64: slots, and programs for each multiprocessor, each with an even share. [Measured H200, ms] Triton 1.404; two slots
# 1.394, with eight programs 1.345; three slots 1.110, with eight programs 1.091, with 32 1.064
BLOCK_SLOTS, BLOCK_WAVES = 3, 8
HEAD_DIMS = (64, 128)

# head dim -> keys (dQ) or queries (dK, dV) a step and stages of them, tiles of the other side in flight; softmax's dQ holds O's tile too.
# [Measured H200, D=128, TFLOPS of the products, without O] dQ, L <= 1024: 600 with two tiles, 605 with one. dK and dV: two blocks of keys
# 505 at L <= 1024, 257 at L <= 256, one block and a stage more 543 and 248. O read by the consumers instead of by TMA: dQ 547.
# [us, D=64, L <= 1024] gelu_fast: dQ with 128 keys a step 1,888 (in (64, 6, 2), not checked against float64 yet, 1,674), dK and dV with 128
# queries 3,262 (their registers spill), with 64 1,969; softmax: 1,379 (1,332), 1,666, 1,953; at L <= 256: 218 (186), 234, 220
DQ_TILES = {(64, True): (128, 4, 2), (64, False): (128, 4, 2), (128, True): (64, 4, 1), (128, False): (64, 5, 1)}
# Activations, L <= 1024 [us]: dQ with two tiles 2,718, with one and two stages more 2,658; dK and dV: two blocks of keys 3,460, one and a stage
# more 3,628
DKDV_TILES = {(64, True): (64, 6, 2), (64, False): (128, 4, 2), (128, True): (64, 3, 2), (128, False): (64, 4, 1)}  # (head dim, short or no softmax)
# (kind, whether masked by position) whose dK and dV begin dP late. Under a mask softmax and gelu otherwise spill registers between a step's products
# [ptxas]. [Measured H200, dK and dV, ms] causal silu, L <= 2048: 3.76 late, 4.08 not
LATE = frozenset({("silu", False), *((kind, True) for kind in ("softmax", "gelu", "gelu_fast", "silu", "relu", "identity"))})
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
    tiles, count = ranked_tiles(*offsets, rows, 128, out)
    scale = options.scale * LOG2E if softmax else options.scale
    run(
        hopper_forward_kernel, (num_programs(q.device),),
        descriptor(q, 64), descriptor(k, n), descriptor(v, n), out, lse if softmax else out, *offsets, tiles, count,
        rows, heads, heads // k.shape[1], q.stride(1), k.stride(1), v.stride(1), options.window, scale, 1.0 / options.divisor,
        **meta(q, options), N=n, D=head_dim, STAGES=stages,
        CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24, num_warps=4,
    )  # fmt: skip


def forward_units(q, k, v, out, lse, offsets, options, choice: tuple[int, int, int, int, int, bool]) -> None:
    """As `forward`, without a mask by position, by tiles of 64 rows; `choice`: keys a block n, stages (n * stages keys stay for an item), consumers,
    tiles of each in an item, tiles in flight, whether they leave by TMA."""
    rows, heads, head_dim = q.shape
    softmax = options.kind == "softmax"
    n, stages, consumers, tiles, slots, store = choice
    items, count = ranked_tiles(*offsets, rows, consumers * 64 * tiles, out)
    scale = options.scale * LOG2E if softmax else options.scale
    kind = {name: value for name, value in meta(q, options).items() if name in ("KIND", "APPROX")}
    run(
        hopper_units_kernel, (num_programs(q.device),),
        descriptor(q, 64), descriptor(k, n), descriptor(v, n), descriptor(out, 64), out, lse if softmax else out, *offsets, items, count,
        rows, heads, heads // k.shape[1], q.stride(1), k.stride(1), v.stride(1), scale, 1.0 / options.divisor,
        **kind, N=n, D=head_dim, STAGES=stages, CONSUMERS=consumers, TILES=tiles, SLOTS=slots, STORE=store,
        CONSUMER_REGISTERS=160 if consumers == 3 else 240, **PARTITIONS,
    )  # fmt: skip


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    offsets: tuple[Tensor, Tensor], options, max_q: int,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, rows that no sequence owns included."""
    rows, heads, head_dim = q.shape
    softmax = options.kind == "softmax"
    zero_unowned(offsets[1], dk, dv)
    tiles = ranked_tiles(*offsets, rows, 128, dq)
    same = offsets[0].data_ptr() == offsets[1].data_ptr() and rows == k.shape[0]
    items = tiles if same else ranked_tiles(offsets[1], offsets[0], k.shape[0], 128)
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)  # sum_d dO O of every row: the dQ kernel writes, the other one reads
    o = out if softmax else grad
    scale = options.scale * LOG2E if softmax else options.scale
    sizes = (rows, heads, heads // k.shape[1])
    constants = {**meta(q, options), "D": head_dim, "CONSUMER_REGISTERS": 240, **PARTITIONS}
    n, stages, slots = DQ_TILES[head_dim, softmax]
    run(
        hopper_dq_kernel, (num_programs(q.device),),
        descriptor(q, 64), descriptor(grad, 64), descriptor(o, 64), descriptor(k, n), descriptor(v, n), dq, lse, delta,
        *offsets, *tiles, *sizes, q.stride(1), grad.stride(1), o.stride(1), k.stride(1), v.stride(1), options.window, scale,
        options.scale / options.divisor, N=n, STAGES=stages, SLOTS=slots, **constants,
    )  # fmt: skip
    late = (options.kind, options.causal or options.window > 0) in LATE
    n, stages, slots = DKDV_TILES[head_dim, max_q <= SHORT or not softmax]
    run(
        hopper_dkdv_kernel, (num_programs(q.device),),
        descriptor(q, n), descriptor(grad, n), descriptor(k, 64), descriptor(v, 64), dk, dv, lse, delta,
        *offsets, *items, *sizes, q.stride(1), grad.stride(1), k.stride(1), v.stride(1), options.window, scale,
        options.scale / options.divisor, 1.0 / options.divisor, N=n, STAGES=stages, SLOTS=slots, LATE=late, **constants,
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
