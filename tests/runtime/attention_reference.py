"""Attention of one sequence at a time out of plain matrix products, for FLOP counts and values.

`Counted` collects what FlopCounterMode counts too much: it sees whole L x L products, a causal kernel executes the kept pairs only.
"""
from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import AttentionBias

ACTIVATIONS = {"silu": F.silu, "relu": torch.relu, "identity": lambda x: x, "gelu": lambda x: F.gelu(x, approximate="tanh")}


@dataclasses.dataclass
class Counted:
    """Forward FLOPs of matrix products outside the masks."""

    excess: float = 0.0

    def softmax(self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, max_q: int, max_k: int, causal: bool = False,
                window: int | None = None, scale: float | None = None, bias: AttentionBias | None = None) -> Tensor:
        return self._attend(q, k, v, q_offsets, k_offsets, causal, window, scale, None, 1.0, None, bias)

    def activated(self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, max_q: int, max_k: int,
                  activation: str = "gelu", scale: float | None = None, divisor: float = 1.0, causal: bool = False,
                  window: int | None = None, bias: AttentionBias | None = None) -> Tensor:
        return self._attend(q, k, v, q_offsets, k_offsets, causal, window, scale, ACTIVATIONS[activation], divisor, None, bias)

    def blocks(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, max_len: int, block: int = 64, causal: bool = False,
               scale: float | None = None) -> Tensor:
        return self._attend(q, k, v, offsets, offsets, causal, None, scale, None, 1.0, block)

    def _attend(self, q, k, v, q_offsets, k_offsets, causal, window, scale, activation, divisor, block, bias=None) -> Tensor:
        outs = []
        for i in range(len(q_offsets) - 1):
            rows, columns = slice(q_offsets[i], q_offsets[i + 1]), slice(k_offsets[i], k_offsets[i + 1])
            qi, ki, vi = q[rows].transpose(0, 1), k[columns].transpose(0, 1), v[columns].transpose(0, 1)
            if qi.shape[1] == 0 or ki.shape[1] == 0:
                outs.append(q.new_zeros(q[rows].shape))
                continue
            keep = kept(qi.shape[1], ki.shape[1], causal=causal, window=window, block=block)
            scores = (qi @ ki.transpose(1, 2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
            if bias is not None:
                scores = scores + added(bias, rows, columns)
            if activation is None:
                weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
            else:
                weights = activation(scores).masked_fill(~keep, 0.0) / divisor
            outs.append((weights @ vi).transpose(0, 1))
            self.excess += 4.0 * q.shape[1] * q.shape[2] * float((~keep).sum())
        return torch.cat(outs)


def added(bias: AttentionBias, rows: slice, columns: slice) -> Tensor:
    """`(num_q, num_k)`: HSTU's bias, from tables of one column."""
    num_q, num_k = rows.stop - rows.start, columns.stop - columns.start
    distance = torch.arange(num_q).unsqueeze(1) + num_k - num_q - torch.arange(num_k).unsqueeze(0)
    total = torch.zeros(num_q, num_k)
    if bias.position_table is not None:
        reach = len(bias.position_table) // 2
        total = total + bias.position_table[distance.clamp(-reach, reach) + reach, 0]
    if bias.time_table is not None:
        passed = (bias.q_times[rows].unsqueeze(1) - bias.k_times[columns].unsqueeze(0)).abs().clamp(min=1).double()
        total = total + bias.time_table[(passed.log() / 0.301).long().clamp(max=len(bias.time_table) - 1), 0]
    return total


def kept(num_q: int, num_k: int, *, causal: bool, window: int | None, block: int | None = None) -> Tensor:
    """`(num_q, num_k)`: the pairs that a mask keeps, rows and columns aligned at their ends."""
    row, column = torch.arange(num_q).unsqueeze(1) + num_k - num_q, torch.arange(num_k).unsqueeze(0)
    keep = torch.ones(num_q, num_k, dtype=torch.bool)
    if causal:
        keep &= column <= row
    if window is not None:
        keep &= (row - column < window) & (column - row < window)
    if block is not None:
        keep &= row // block == column // block
    return keep
