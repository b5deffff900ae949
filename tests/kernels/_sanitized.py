"""One small run of every kernel on a GPU, for compute-sanitizer: `compute-sanitizer --tool memcheck python tests/kernels/_sanitized.py [PART ...]`.

Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor is an allocation of its own and an access past its end is seen.
"""

import sys
import time

import torch

import kernels
from kernels import embedding, jagged, norm_quant

LENGTHS = [3, 0, 200, 128, 1, 129, 0, 64, 255]


def edges(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def attention() -> None:
    """Every kernel that `jagged_attention` and `gdpa` choose here, forward and backward."""
    cases = [
        ("softmax", 128, {}, LENGTHS, LENGTHS), ("softmax", 128, {"causal": True, "window": 70}, LENGTHS, LENGTHS),
        ("softmax", 64, {}, [600, 20], [300, 400]), ("gelu_fast", 128, {}, LENGTHS, LENGTHS), ("silu", 128, {"causal": True}, LENGTHS, LENGTHS),
        ("silu", 128, {"causal": True, "bias": 1}, LENGTHS, LENGTHS), ("softmax", 64, {"bias": 2}, [5, 30], [400, 300]),
        ("softmax", 128, {}, [5, 30], [400, 300]), ("softmax", 256, {"causal": True}, [70, 40], [70, 40]), ("relu", 32, {}, [70, 40], [70, 40]),
    ]  # fmt: skip
    for kind, head_dim, masks, q_lengths, k_lengths in cases:
        q, k, v = (
            torch.randn(sum(n), 2, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (q_lengths, k_lengths, k_lengths)
        )
        maxima, tables = {"max_q": max(q_lengths), "max_k": max(k_lengths)}, ()
        if "bias" in masks:
            tables = tuple(torch.randn(rows, masks["bias"], device="cuda", requires_grad=True) for rows in (101, 129))
            times = (torch.randint(0, 2**40, (sum(n),), device="cuda") for n in (q_lengths, k_lengths))
            names = ("position_table", "time_table", "q_times", "k_times")
            masks = {**masks, "bias": kernels.AttentionBias(**dict(zip(names, (*tables, *times), strict=True)))}
        if kind == "softmax":
            out = kernels.jagged_attention(q, k, v, edges(q_lengths), edges(k_lengths), **maxima, **masks)
        else:
            out = kernels.gdpa(q, k, v, edges(q_lengths), edges(k_lengths), **maxima, **masks, activation=kind, divisor=7.0)
        torch.autograd.grad(out, (q, k, v, *tables), torch.randn_like(out))
        assert torch.isfinite(out).all(), kind


def blocks() -> None:
    for block in (32, 64, 128):
        q, k, v = (torch.randn(sum(LENGTHS), 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = kernels.block_attention(q, k, v, edges(LENGTHS), max_len=max(LENGTHS), block=block)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    q, k, v = (torch.randn(sum(LENGTHS), 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = kernels.fp8_attention(q, k, v, edges(LENGTHS), edges(LENGTHS), max_q=max(LENGTHS), max_k=max(LENGTHS))
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def memory() -> None:
    """Embeddings, movement and norms."""
    weight = torch.randn(50, 96, device="cuda")
    ids = (torch.rand(sum(LENGTHS), device="cuda") ** 3 * 50).long()
    state = embedding.new_optimizer_state(weight, "rowwise_adagrad")
    grad = torch.randn(len(LENGTHS), 96, device="cuda")
    embedding.embedding_backward_update_(weight, state, grad, ids, edges(LENGTHS), lr=0.1)
    embedding.embedding_pooled(weight, ids, edges(LENGTHS))
    values = torch.randn(sum(LENGTHS), 40, device="cuda")
    padded = jagged.jagged_to_padded(values, edges(LENGTHS), max_len=max(LENGTHS))
    assert torch.equal(jagged.padded_to_jagged(padded, edges(LENGTHS), total=sum(LENGTHS)), values)
    jagged.jagged_concat([(values, edges(LENGTHS))] * 2)
    jagged.jagged_mean(values, edges(LENGTHS))
    for dim in (96, 512, 2048, 4096, 8192):
        x, scale = torch.randn(700, dim, device="cuda", dtype=torch.bfloat16), torch.tensor(0.02, device="cuda")
        for scaling in ("rowwise", "tensor_delayed", "mxfp8_1x32", "mxfp8_32x32"):
            given = scale if scaling == "tensor_delayed" else None
            norm_quant.norm_quantize(x, torch.randn(dim, device="cuda"), kind="rmsnorm", scaling=scaling, scale=given)
        rstd = torch.rand(700, device="cuda")
        norm_quant.norm_backward(torch.randn_like(x), x, torch.randn(dim, device="cuda"), rstd=rstd, mean=None, kind="rmsnorm")


def main(parts: list[str]) -> int:
    for part in parts or ["memory", "attention", "blocks"]:
        start = time.monotonic()
        {"memory": memory, "attention": attention, "blocks": blocks}[part]()
        torch.cuda.synchronize()
        print(f"{part} ran in {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
