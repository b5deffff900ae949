"""Host side of the Hopper kernels: what they accept, TMA descriptors, launches."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels._attention_hopper import hopper_forward_kernel
from kernels._attention_hopper_bwd import hopper_backward_kernel
from kernels._tiles import RANKED, longest_first, ranked_tiles

LOG2E = 1.4426950408889634
SHORT = 256  # keys at and below which half a block of 128 would be padding on average
# (head dim, softmax with long keys) -> keys per block and stages; 227 KiB of shared memory also hold two tiles of Q and the output's
# staging. [Measured H200, D=128] L <= 1024: softmax 478 TFLOPS with 128 keys, 445 with 64; gelu_fast 412 and 464. Causal silu,
# L <= 2048: 419 and 449. Keys <= 256, softmax: cross 232 and 255, self 139 and 146
FORWARD_TILES = {(64, True): (128, 3), (64, False): (128, 3), (128, True): (128, 2), (128, False): (64, 4)}
BACKWARD_QUERIES = {64: 128, 128: 64}  # head dim -> queries per step of the backward: what its two score tiles leave of the registers


def fits(tensors: tuple[Tensor, ...], num_sequences: int, bias: tuple, options) -> bool:
    """Whether the warp-specialised kernels take these arguments: a Hopper GPU, what TMA can address, and no bias."""
    q, k = tensors[:2]
    return (
        torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in BACKWARD_QUERIES
        and bias[0] is None
        and bias[1] is None
        and options.scale > 0
        and 0 < num_sequences <= RANKED
        and k.shape[0] > 0
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in tensors)
    )


def num_programs(device: torch.device) -> int:
    """Programs of a persistent launch: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of `(rows, D)` boxes over `(total, H, D)` seen as a matrix; a head starts at column `head * stride(1)`."""
    total, heads, head_dim = x.shape
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, head_dim], dtype)
    return TensorDescriptor(x, [total, (heads - 1) * x.stride(1) + head_dim], [x.stride(0), 1], [rows, head_dim], layout)


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


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offsets: tuple[Tensor, Tensor], options, max_k: int) -> None:
    """Fill `out` and, for softmax, `lse`."""
    rows, heads, head_dim = q.shape
    softmax = options.kind == "softmax"
    n, stages = FORWARD_TILES[head_dim, softmax and max_k > SHORT]
    tiles, count = ranked_tiles(*offsets, rows, 128, out)
    scale = options.scale * LOG2E if softmax else options.scale
    hopper_forward_kernel[(num_programs(q.device),)](
        descriptor(q, 64), descriptor(k, n), descriptor(v, n), out, lse if softmax else out, *offsets, tiles, count,
        rows, heads, heads // k.shape[1], q.stride(1), k.stride(1), v.stride(1), options.window, scale, 1.0 / options.divisor,
        **meta(q, options), N=n, D=head_dim, STAGES=stages,
        CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24, num_warps=4,
    )  # fmt: skip


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    offsets: tuple[Tensor, Tensor], options, *, owner: bool,
) -> None:  # fmt: skip
    """Fill dk and dv, and with `owner` dq too."""
    rows, heads, head_dim = q.shape
    m = BACKWARD_QUERIES[head_dim]
    if owner:
        items, count = longest_first(*offsets), offsets[0].shape[0] - 1
        scratch = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    else:
        items, count = ranked_tiles(offsets[1], offsets[0], k.shape[0], 128)
        scratch = dq
    scale = options.scale * LOG2E if options.kind == "softmax" else options.scale
    hopper_backward_kernel[(num_programs(q.device),)](
        descriptor(q, m), descriptor(grad, m), descriptor(k, 128), descriptor(v, 128), dq, scratch, dk, dv, lse, delta,
        *offsets, items, count, rows, heads, heads // k.shape[1], q.stride(1), grad.stride(1), k.stride(1), v.stride(1),
        options.window, scale, options.scale / options.divisor, 1.0 / options.divisor,
        **meta(q, options), OWNER=owner, M=m, D=head_dim, STAGES=2, CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24, num_warps=4,
    )  # fmt: skip
