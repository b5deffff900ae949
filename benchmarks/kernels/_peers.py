"""Attention of torch beside ours, in a process of its own: `python -m benchmarks.kernels._peers flex|cudnn` prints a JSON line a shape.

`... flex I N` takes shapes I, I + N, ... only: several at once fill the compiler's cache before the timed run.

FlexAttention runs over the packed batch with a document mask whose blocks are built from the offsets. cuDNN takes nested jagged tensors
if torch lets it, else a padded batch (what it computes for the padding then counts in its time and not in its FLOPs).
"""

import json
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.kernels._timing import eager_seconds

BLOCK = 128  # FlexAttention's sparse tile


def document_mask(q_lengths: Tensor, k_lengths: Tensor, device: str) -> BlockMask:
    """Blocks that a query block's own sequences touch: a contiguous range of key blocks, since both sides are packed in one order."""
    q_edges, k_edges = (torch.cat([torch.zeros(1, dtype=torch.long), x.cumsum(0)]) for x in (q_lengths, k_lengths))
    total_q, total_k = int(q_edges[-1]), int(k_edges[-1])
    first_rows = torch.arange(0, total_q, BLOCK)
    last_rows = (first_rows + BLOCK).clamp(max=total_q) - 1
    first, last = (torch.searchsorted(q_edges, rows, right=True) - 1 for rows in (first_rows, last_rows))
    low = k_edges[first] // BLOCK
    count = ((k_edges[last + 1] + BLOCK - 1) // BLOCK - low).clamp(min=0)
    columns = -(-total_k // BLOCK)
    indices = (low[:, None] + torch.arange(columns)).clamp(max=columns - 1)
    q_owner, k_owner = (torch.repeat_interleave(torch.arange(len(x)), x).to(device) for x in (q_lengths, k_lengths))

    def same_sequence(_batch, _head, row, column):
        return q_owner[row] == k_owner[column]

    return BlockMask.from_kv_blocks(
        count[None, None].int().to(device), indices[None, None].int().to(device),
        BLOCK_SIZE=BLOCK, mask_mod=same_sequence, seq_lengths=(total_q, total_k),
    )  # fmt: skip


def flex(q: Tensor, k: Tensor, v: Tensor, q_lengths: Tensor, k_lengths: Tensor) -> tuple[str, Callable[[], Tensor]]:
    """FlexAttention, compiled."""
    mask = document_mask(q_lengths, k_lengths, q.device.type)
    attend = torch.compile(flex_attention, dynamic=False)
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    return "packed", lambda: attend(*heads_first, block_mask=mask)[0].transpose(0, 1)


def cudnn(q: Tensor, k: Tensor, v: Tensor, q_lengths: Tensor, k_lengths: Tensor) -> tuple[str, Callable[[], Tensor]]:
    """SDPA with the cuDNN backend."""
    edges = [torch.cat([torch.zeros(1, dtype=torch.long), x.cumsum(0)]).to(q.device) for x in (q_lengths, k_lengths)]
    longest = int(q_lengths.max()), int(k_lengths.max())

    def nested(x: Tensor, side: int) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, edges[side], max_seqlen=longest[side]).transpose(1, 2)

    def padded(x: Tensor, side: int) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, edges[side], max_seqlen=longest[side]).to_padded_tensor(0.0).transpose(1, 2)

    def jagged() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(nested(q, 0), nested(k, 1), nested(v, 1)).transpose(1, 2).values()

    try:
        torch.autograd.grad(jagged().sum(), (q, k, v))
        torch.cuda.synchronize()
        return "nested", jagged
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        print(f"cudnn refuses nested tensors: {str(error)[:200]}", file=sys.stderr)
    batch = [padded(x, side).detach().contiguous() for x, side in ((q, 0), (k, 1), (v, 1))]
    keep = (torch.arange(longest[1]) < k_lengths[:, None])[:, None, None, :].to(q.device)
    leaves = [x.requires_grad_() for x in batch]

    def dense() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*leaves, attn_mask=keep)

    dense.inputs = leaves
    return "padded", dense


PEERS = {"flex": flex, "cudnn": cudnn}


def measure(peer: str, first: int = 0, step: int = 1, device: str = "cuda") -> Iterator[dict]:
    """Seconds of forward and backward at every `step`-th softmax shape, or what went wrong there."""
    from benchmarks.kernels import attention

    dense = [x for x in attention.shapes() if x.kind == "softmax" and x.block is None and not x.share and not x.fp8]
    for shape in dense[first::step]:
        q_lengths = shape.q_lengths
        k_lengths = q_lengths if shape.k_lengths is None else shape.k_lengths
        generator = torch.Generator(device).manual_seed(0)
        size = (shape.heads, shape.head_dim)
        q, k, v = (
            torch.randn((int(x.sum()), *size), device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
            for x in (q_lengths, k_lengths, k_lengths)
        )  # fmt: skip
        try:
            form, call = PEERS[peer](q, k, v, q_lengths, k_lengths)
            inputs = getattr(call, "inputs", (q, k, v))
            with torch.no_grad():
                forward = eager_seconds(call, repeats=10)
            out = call()
            grad = torch.randn_like(out)
            backward = eager_seconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), repeats=10)  # noqa: B023 (called at once)
            yield {"shape": shape.name, "form": form, "seconds": [forward, backward]}
        except Exception as error:  # a peer that fails is a note in the table, whatever it raises
            yield {"shape": shape.name, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for row in measure(sys.argv[1], *map(int, sys.argv[2:4])):
        print(json.dumps(row), flush=True)
