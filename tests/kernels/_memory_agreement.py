"""Agreement of the Triton functions with the CPU operators, on any device: the GPU's tests call it, and so does Triton's interpreter.

As a script: `python tests/kernels/_memory_agreement.py jagged|embedding|norm` interprets the kernels on the CPU.
"""

import sys

if __name__ == "__main__":
    import _interpreter  # noqa: F401  before anything that imports Triton

import torch

from kernels import jagged  # noqa: F401  registers the operators
from kernels.embedding import _state_tensors, new_optimizer_state
from kernels.jagged import lengths_to_offsets

OPS = torch.ops.planner_kernels
#        lengths, rows before the first offset, rows after the last, trailing shape
JAGGED_CASES = [
    ([3, 0, 5, 1, 0], 0, 0, (4,)),
    ([0, 0], 1, 2, (3,)),
    ([], 0, 3, (5,)),
    ([7], 2, 1, (2, 3)),
    ([40, 0, 1, 100], 0, 0, (33,)),
    ([300, 0, 7, 257, 256, 1100, 1, 30], 5, 3, (9,)),  # rows of several shares, next to each other
]
#        lengths, before, after, D, R, skewed ids
EMBEDDING_CASES = [
    ([3, 0, 5, 1, 0], 0, 0, 4, 6, False),
    ([0, 0], 1, 2, 3, 4, False),
    ([7], 2, 1, 33, 3, False),
    ([40, 0, 1, 100, 0], 3, 3, 20, 50, True),
    ([400, 30], 0, 0, 16, 3, True),
]
NORM_SHAPES = [(5, 128), (37, 96), (70, 256), (3, 384)]


def to(device, value):
    """`value` with its tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [to(device, v) for v in value] if isinstance(value, list) else value


def agree(name, module, device, *args, exact=True, close=1e-5):
    """Run operator and Triton function of the same name on equal inputs and compare; return the operator's results."""
    expected = getattr(OPS, name)(*args)
    actual = getattr(module, name)(*[to(device, a) for a in args])
    both = zip(expected, actual, strict=True) if isinstance(expected, list | tuple) else [(expected, actual)]
    for want, got in both:
        if exact:
            want, got = (t.cpu().float().nan_to_num(9e9) for t in (want, got))
            assert torch.equal(want, got), f"{name}: {int((want != got).sum())} of {want.numel()} differ"
        else:
            torch.testing.assert_close(got.cpu(), want, rtol=close, atol=close)
    return expected


def agree_jagged(device, dtypes=(torch.float32, torch.bfloat16, torch.float64, torch.int64), cases=JAGGED_CASES):
    from kernels import _jagged_triton as triton_side

    torch.manual_seed(0)
    for lengths, before, after, shape in cases:
        lengths = torch.tensor(lengths, dtype=torch.int64)
        offsets = (lengths_to_offsets(lengths) + before).int()
        total, rows = int(offsets[-1]) + after, len(lengths)
        longest = int(lengths.max()) if rows else 4
        values, dense = torch.randn(total, *shape), torch.randn(rows, *shape)
        start = offsets - offsets[:1]
        for dtype in dtypes:
            cast = (values * 9).to(dtype)
            padded = agree("jagged_to_padded", triton_side, device, cast, offsets, longest + 1, -2.5 if dtype.is_floating_point else -2.0)
            agree("padded_to_jagged", triton_side, device, padded, offsets, total)
        joined = agree("jagged_concat", triton_side, device, [values, values * 2], [offsets, offsets], start * 2, 2 * total)
        agree("jagged_unconcat", triton_side, device, joined, start * 2, [start, start], [total, total])
        if rows:
            index = torch.randint(0, rows, (7,))
            picked = lengths_to_offsets(lengths[index])
            grad = agree("jagged_gather", triton_side, device, values, offsets, index, picked, int(picked[-1]) + 1)
            agree("jagged_gather_grad", triton_side, device, grad, offsets, index, picked, total, exact=False)
        for op in ("add", "mul"):
            agree("jagged_elementwise", triton_side, device, values, offsets, dense, op)
        for mean in (False, True):
            agree("jagged_reduce", triton_side, device, values, offsets, mean, exact=False, close=1e-4)  # sums of over 1,000 numbers near 0
            agree("jagged_broadcast", triton_side, device, dense, offsets, total, mean, exact=False)


def agree_embedding(device, dtypes=(torch.float32, torch.float64, torch.bfloat16), cases=EMBEDDING_CASES):
    from kernels import _embedding_triton as triton_side

    torch.manual_seed(0)
    for lengths, before, after, dim, num_rows, skewed in cases:
        offsets = lengths_to_offsets(torch.tensor(lengths)) + before
        ids = torch.randint(0, num_rows, (int(offsets[-1]) + after,))
        ids = (ids * torch.rand(len(ids)) ** 2).long() if skewed else ids
        for dtype in dtypes:
            weight = torch.randn(num_rows, dim).to(dtype)
            close = 1e-2 if dtype == torch.bfloat16 else 1e-5
            agree("embedding_sequence", triton_side, device, weight, ids)
            for mean in (False, True):
                agree("embedding_pooled", triton_side, device, weight, ids, offsets, mean, exact=False, close=close)
            for optimizer, mean, bags in (
                ("rowwise_adagrad", False, offsets),
                ("rowwise_adagrad", True, offsets),
                ("adagrad", False, offsets),
                ("adam", False, offsets),
                ("sgd", False, None),
            ):
                seed = 5 if dtype == torch.bfloat16 and optimizer != "adam" else None
                _agree_update(triton_side, device, weight, ids, bags, optimizer, mean, seed)


def agree_parts(device):
    """Updates of several parts: every id once, one hot id among others at the table's end, one id alone, whose run begins in the first part."""
    from kernels import _embedding_triton as triton_side

    sizes = {"PART_IDS": 256, "PART_BYTES": 1, "COMPACT_BLOCK": 256, "PROGRAMS": 8, "PLAN_PROGRAMS": 4}
    before = {name: getattr(triton_side, name) for name in sizes}
    try:
        for name, size in sizes.items():
            setattr(triton_side, name, size)
        hot = torch.randint(0, 70, (600,))
        for ids, num_rows in ((torch.randperm(700), 700), (torch.where(torch.rand(600) < 0.7, 69, hot), 70), (torch.full((600,), 2), 3)):
            offsets = torch.arange(0, len(ids) + 1, 20)
            _agree_update(triton_side, device, torch.randn(num_rows, 3), ids, offsets, "rowwise_adagrad", False, None)
    finally:
        for name, size in before.items():
            setattr(triton_side, name, size)


def _agree_update(triton_side, device, weight, ids, offsets, optimizer, mean, seed):
    rows = len(ids) if offsets is None else offsets.numel() - 1
    grad = torch.randn(rows, weight.shape[1], dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32)
    args = (grad, ids, offsets, optimizer, mean, 0.1, 1e-3, 0.9, 0.99, 3, 0.01, seed)
    state = _state_tensors(weight, new_optimizer_state(weight, optimizer), optimizer)
    cpu = [None if t is None else t.clone() for t in (weight, *state)]
    gpu = [None if t is None else t.clone().to(device) for t in (weight, *state)]
    OPS.embedding_update_(*cpu, *args)
    triton_side.embedding_update_(*gpu, *[to(device, a) for a in args])
    for want, got in zip(cpu, gpu, strict=True):
        if want is not None:
            loose = want.dtype == torch.bfloat16  # sums in another order may round to the other neighbour
            torch.testing.assert_close(got.cpu(), want, rtol=1e-2 if loose else 1e-4, atol=1e-2 if loose else 1e-4)


def agree_norm(device, dtypes=(torch.float32, torch.bfloat16), shapes=NORM_SHAPES):
    from kernels import _norm_triton as triton_side

    torch.manual_seed(0)
    for num_rows, dim in shapes:
        weight, bias = torch.randn(dim), torch.randn(dim)
        for dtype in dtypes:
            x = (torch.randn(num_rows, dim) * torch.randn(num_rows, 1).exp()).to(dtype)
            _agree_plain_norm(triton_side, device, x, weight, bias)
            x[0, 0], x[1], x[2, 3] = 0, 0, float("inf")
            if num_rows > 4:
                x[3, 5] = float("nan")
                x[4] *= 1e-38 if dtype == torch.float32 else 1e-30  # the interpreter misreads subnormal bf16
            for scaling in ("rowwise", "block128", "tensor_delayed", "tensor_dynamic", "mxfp8_1x32", "mxfp8_32x32"):
                if scaling == "block128" and dim % 128:
                    continue
                scale = torch.tensor(0.01) if scaling == "tensor_delayed" else None
                for rceil, hadamard, seed in ((True, None, None), (False, None, 11), (True, 7, None), (True, 7, 11)):
                    options = (scaling, scale, rceil, hadamard, seed)
                    agree("norm_quantize", triton_side, device, x, None, None, "none", 0.0, *options)  # bit by bit
                    _agree_fused(triton_side, device, x[:2], weight, bias, options)


def _agree_plain_norm(triton_side, device, x, weight, bias):
    close = dict(rtol=1e-2, atol=2e-2) if x.dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    for layernorm in (False, True):
        args = (x, weight, bias if layernorm else None, 1e-6, layernorm)
        want = OPS.norm_forward(*args)
        got = triton_side.norm_forward(*[to(device, a) for a in args])
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b.cpu(), a, **close)
        args = (torch.randn_like(x), x, weight, want[1], want[2], layernorm)
        for a, b in list(zip(OPS.norm_backward(*args), triton_side.norm_backward(*[to(device, a) for a in args]), strict=True))[: 2 + layernorm]:
            torch.testing.assert_close(b.cpu(), a, **close)


def _agree_fused(triton_side, device, x, weight, bias, options):
    """Normalised values differ in the last bit, so a few may round to the neighbouring fp8 number."""
    args = (x, weight, bias, "layernorm", 1e-6, *options)
    want, got = OPS.norm_quantize(*args), triton_side.norm_quantize(*[to(device, a) for a in args])
    different = want[0].float() != got[0].cpu().float()
    assert different.float().mean() < 0.02, (options, int(different.sum()))


if __name__ == "__main__":
    if sys.argv[1] == "jagged":
        agree_jagged("cpu", (torch.bfloat16, torch.int64), [*JAGGED_CASES[:4], JAGGED_CASES[5]])
    elif sys.argv[1] == "embedding":  # the interpreter takes milliseconds an operation: the richest cases only
        agree_embedding("cpu", cases=[([40, 0, 1, 90, 0], 3, 3, 5, 3, True)], dtypes=(torch.float32,))
        agree_parts("cpu")
    else:
        agree_norm("cpu", (torch.float32,), [(5, 128)])
    print("agrees")
