"""Truth for the jagged, embedding and norm kernels: one row at a time, in the input's dtype (float64 in tests), plain autograd.

Slow and clear on purpose; nothing here shares code with the kernels, the fp8 formats included (a table of all 256 codes).
"""

import itertools
import math

import torch
from torch import Tensor


def spans(offsets: Tensor) -> list[tuple[int, int]]:
    """(begin, end) of every row."""
    edges = offsets.tolist()
    return list(itertools.pairwise(edges))


def padded_reference(values: Tensor, offsets: Tensor, max_len: int, padding: float) -> Tensor:
    """`(B, max_len, *)` from a jagged batch."""
    rows = []
    for begin, end in spans(offsets):
        fill = values.new_full((max_len - (end - begin), *values.shape[1:]), padding)
        rows.append(torch.cat([values[begin:end], fill]))
    return torch.stack(rows) if rows else values.new_zeros((0, max_len, *values.shape[1:]))


def concat_reference(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Row by row concatenation, without what no row owns."""
    rows = [torch.cat([v[b:e] for (v, _), (b, e) in zip(parts, row, strict=True)]) for row in zip(*[spans(o) for _, o in parts], strict=True)]
    return torch.cat([*rows, parts[0][0][:0]])


def reduce_reference(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    """Row sums or means, zero for an empty row."""
    rows = [values[b:e].sum(0) / (max(e - b, 1) if mean else 1) for b, e in spans(offsets)]
    return torch.stack(rows) if rows else values.new_zeros((0, *values.shape[1:]))


def pooled_reference(weight: Tensor, ids: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    """Embedding bags, one at a time."""
    return reduce_reference(weight[ids], offsets, mean)


def update_reference(
    weight: Tensor, state: list[Tensor], gradient: Tensor, touched: list[int], *, optimizer: str, lr: float, eps: float,
    betas: tuple[float, float] = (0.9, 0.999), step: int = 1, weight_decay: float = 0.0,
) -> None:  # fmt: skip
    """Optimizer step on the `touched` rows in place, given the dense `gradient` of the table."""
    for row in touched:
        g = gradient[row] + weight_decay * weight[row]
        if optimizer == "sgd":
            weight[row] -= lr * g
        elif optimizer == "rowwise_adagrad":
            state[0][row] += g.square().mean()
            weight[row] -= lr * g / (state[0][row].sqrt() + eps)
        elif optimizer == "adagrad":
            state[0][row] += g.square()
            weight[row] -= lr * g / (state[0][row].sqrt() + eps)
        else:
            state[0][row] = betas[0] * state[0][row] + (1 - betas[0]) * g
            state[1][row] = betas[1] * state[1][row] + (1 - betas[1]) * g * g
            weight[row] -= lr * (state[0][row] / (1 - betas[0] ** step)) / ((state[1][row] / (1 - betas[1] ** step)).sqrt() + eps)


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """RMSNorm or LayerNorm from their definitions."""
    if kind == "layernorm":
        x = x - x.mean(1, keepdim=True)
    y = x / (x.square().mean(1, keepdim=True) + eps).sqrt() * weight
    return y if bias is None else y + bias


def e4m3_values() -> list[float]:
    """Value of each of the 128 non-negative e4m3 codes: 4 exponent bits of bias 7, 3 mantissa bits, no infinity, 127 is NaN."""
    table = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        table.append(mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    table[127] = math.nan
    return table


def e4m3_reference(value: float) -> float:
    """Nearest e4m3 number, ties to the even code, saturating at 448."""
    if math.isnan(value):
        return math.nan
    table = e4m3_values()[:127]
    magnitude = min(abs(value), 448.0)
    code = min(range(127), key=lambda c: (abs(table[c] - magnitude), c & 1))
    return math.copysign(table[code], value)


def e8m0_reference(amax: float, rceil: bool) -> int:
    """E8M0 code of a block by its largest magnitude (a finite fp32 number), by exact arithmetic on Python's integers."""
    if amax == 0:
        return 0
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    floor = exponent - 1 - 8
    if rceil and mantissa > 448 / 512:
        floor += 1
    return max(floor + 127, 0)
