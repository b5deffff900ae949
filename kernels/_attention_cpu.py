"""CPU path of jagged attention, softmax and activations alike: padded batched products over buckets of similar lengths.

Sequences are sorted by length and neighbours share a bucket while padding them to a common length costs less than one more
bucket does. Inside a bucket: gather, PyTorch's fused CPU attention where it can express the case (softmax without window, bias or
grouped heads), else two (forward) or five (backward) batched products, scatter. Nothing is padded to the batch's maximum and no
Python runs per sequence. float32 and bfloat16 inputs compute in float32, float64 in float64.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels._masks import mask_keeps, position_bucket, time_bucket

# [Measured, 2 cores] a bucket's fixed cost (some 20 small PyTorch calls) equals that of so many score elements.
BUCKET_COST = 40_000
# [Measured, 2 cores] scores of one chunk, so that they stay in the last-level cache between the products that use them.
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Everything but the tensors: `kind` is "softmax" or an activation's name, `window` 0 when there is none."""

    kind: str
    causal: bool
    window: int
    scale: float
    divisor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where the rows of one side (queries, or keys and values) of a bucket come from: `n` sequences padded to `length`."""

    lengths: Tensor  # (n,)
    length: int
    gather: Tensor  # (n * length,) source row; padding repeats the sequence's own last row, so nothing of a neighbour leaks in
    kept: Tensor | None  # positions of the real rows in the padded order, None if all are
    rows: Tensor  # source row of every real row, in the order of `kept`

    def pad(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`(total, H, D)` -> `(n, length, H, D)`."""
        return x.index_select(0, self.gather).to(dtype).view(-1, self.length, *x.shape[1:])

    def scatter(self, padded: Tensor, out: Tensor) -> None:
        """Write the real rows of `(n, length, H, D)` into `out` `(total, H, D)`."""
        flat = padded.reshape(-1, *out.shape[1:])
        flat = flat if self.kept is None else flat.index_select(0, self.kept)
        out.index_copy_(0, self.rows, flat.to(out.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    q: Side
    k: Side


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], bias: tuple, options: AttentionOptions):
    """Output `(total_q, H, D)` and, for softmax, the log-sum-exp `(H, total_q)` of every row (-inf where nothing is kept)."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    softmax = options.kind == "softmax"
    lse = torch.full((q.shape[0], q.shape[1], 1) if softmax else (0, q.shape[1], 1), -math.inf, dtype=_accumulate(q))
    for bucket in _plan(q, k, offsets):
        if _fused_fits(q, k, bucket, bias, options):
            _fused_forward(bucket, q, k, v, out, lse, options)
            continue
        heads = _Heads(q, k, bucket)
        scores, keep = heads.scores(q, k, bias, options)
        if softmax:
            row_lse = torch.logsumexp(scores, dim=-1, keepdim=True)
            weights = torch.exp_(scores.sub_(row_lse.clamp_min(torch.finfo(scores.dtype).min)))
            bucket.q.scatter(heads.rows_first(row_lse), lse)
        else:
            weights = _masked(_activate(scores, options.kind), keep).div_(options.divisor)
        bucket.q.scatter(heads.rows_first(heads.matmul(weights, heads.kv(v))), out)
    return out, lse[:, :, 0].t().contiguous()


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    offsets: tuple[Tensor, Tensor], bias: tuple, options: AttentionOptions,
):  # fmt: skip
    """Gradients of q, k, v and of the two bias tables (None where there is no table). `lse` is what `forward` returned."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tables = [None if table is None else torch.zeros(table.shape, dtype=_accumulate(q)) for table in bias[:2]]
    for bucket in _plan(q, k, offsets):
        if _fused_fits(q, k, bucket, bias, options):
            _fused_backward(bucket, grad, q, k, v, out, lse, (dq, dk, dv), options)
            continue
        heads = _Heads(q, k, bucket)
        scores, keep = heads.scores(q, k, bias, options)
        dout, values = heads.q(grad), heads.kv(v)
        dweights = heads.matmul(dout, values.transpose(1, 2))
        if options.kind == "softmax":
            row_lse = heads.q(lse.t().unsqueeze(-1)).view(*scores.shape[:-1], 1)
            weights = torch.exp_(scores.sub_(row_lse.clamp_min(torch.finfo(scores.dtype).min)))
            delta = (dout * heads.q(out)).sum(-1, keepdim=True).view(*scores.shape[:-1], 1)
            dscores = dweights.view_as(scores).sub_(delta).mul_(weights)
        else:
            dscores = _masked(_activate_backward(dweights.view_as(scores), scores, options.kind), keep).div_(options.divisor)
            weights = _masked(_activate(scores, options.kind), keep).div_(options.divisor)
        heads.table_gradients(dscores, bias, tables)
        bucket.k.scatter(heads.keys_first(heads.matmul(weights, dout, transpose=True)), dv)
        dscores.mul_(options.scale)
        bucket.k.scatter(heads.keys_first(heads.matmul(dscores, heads.q(q), transpose=True)), dk)
        bucket.q.scatter(heads.rows_first(heads.matmul(dscores, heads.kv(k))), dq)
    return dq, dk, dv, *(None if d is None else d.to(table.dtype) for d, table in zip(tables, bias[:2], strict=True))


def _fused_fits(q: Tensor, k: Tensor, bucket: Bucket, bias: tuple, options: AttentionOptions) -> bool:
    """Whether PyTorch's fused CPU attention does this bucket: its backward cannot have rows without a column."""
    plain = options.kind == "softmax" and options.window <= 0 and bias[0] is None and bias[1] is None
    return plain and q.shape[1] == k.shape[1] and not (options.causal and bool((bucket.q.lengths > bucket.k.lengths).any()))


def _fused_mask(bucket: Bucket, options: AttentionOptions, dtype: torch.dtype) -> Tensor | None:
    """Additive mask `(n, 1, Lq or 1, Lk)`; padded queries keep columns too, their gradient is zeroed instead."""
    if bucket.k.kept is None and not options.causal:
        return None
    keep = (torch.arange(bucket.k.length) < bucket.k.lengths[:, None])[:, None, None, :]
    if options.causal:
        keep = keep & mask_keeps(_delta(bucket), causal=True, window=0)[:, None]
    return torch.zeros(keep.shape, dtype=dtype).masked_fill_(~keep, -math.inf)


def _fused_forward(bucket: Bucket, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions) -> None:
    dtype = _accumulate(q)
    mask = _fused_mask(bucket, options, dtype)
    padded = (side.pad(x, dtype).transpose(1, 2) for side, x in ((bucket.q, q), (bucket.k, k), (bucket.k, v)))
    result, row_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *padded, 0.0, False, attn_mask=mask, scale=options.scale
    )  # fmt: skip
    bucket.q.scatter(result.transpose(1, 2), out)
    bucket.q.scatter(row_lse.transpose(1, 2).unsqueeze(-1), lse)


def _fused_backward(bucket: Bucket, grad, q, k, v, out, lse, into: tuple[Tensor, Tensor, Tensor], options) -> None:
    dtype = _accumulate(q)
    mask = _fused_mask(bucket, options, dtype)
    dout = bucket.q.pad(grad, dtype)
    if bucket.q.kept is not None:  # a padded row repeats a real one: it must not count twice in dK and dV
        real = torch.arange(bucket.q.length) < bucket.q.lengths[:, None]
        dout.masked_fill_(~real[:, :, None, None], 0.0)
    tensors = (side.pad(x, dtype).transpose(1, 2) for side, x in ((bucket.q, q), (bucket.k, k), (bucket.k, v), (bucket.q, out)))
    row_lse = bucket.q.pad(lse.t().unsqueeze(-1), dtype).squeeze(-1).transpose(1, 2).contiguous()
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout.transpose(1, 2), *tensors, row_lse, 0.0, False, attn_mask=mask, scale=options.scale
    )  # fmt: skip
    for side, gradient, target in zip((bucket.q, bucket.k, bucket.k), gradients, into, strict=True):
        side.scatter(gradient.transpose(1, 2), target)


def _delta(bucket: Bucket) -> Tensor:
    """`(n, Lq, Lk)`: row + (Lk - Lq) - col of every padded pair."""
    rows = torch.arange(bucket.q.length)[None, :] + (bucket.k.lengths - bucket.q.lengths)[:, None]
    return rows[:, :, None] - torch.arange(bucket.k.length)


class _Heads:
    """Layouts of one bucket: G heads share a K/V head, so queries `(n * Hkv, G * Lq, D)` meet keys `(n * Hkv, Lk, D)`."""

    def __init__(self, q: Tensor, k: Tensor, bucket: Bucket):
        self.bucket, self.dtype = bucket, _accumulate(q)
        self.n, self.num_kv, self.group = bucket.q.lengths.numel(), k.shape[1], q.shape[1] // k.shape[1]

    def q(self, x: Tensor) -> Tensor:
        padded = self.bucket.q.pad(x, self.dtype).view(self.n, self.bucket.q.length, self.num_kv, self.group, -1)
        return padded.permute(0, 2, 3, 1, 4).reshape(self.n * self.num_kv, self.group * self.bucket.q.length, -1)

    def kv(self, x: Tensor) -> Tensor:
        padded = self.bucket.k.pad(x, self.dtype)
        return padded.transpose(1, 2).reshape(self.n * self.num_kv, self.bucket.k.length, -1)

    def rows_first(self, x: Tensor) -> Tensor:
        """`(n * Hkv, G * Lq, D)` -> `(n, Lq, H, D)`."""
        folded = x.view(self.n, self.num_kv * self.group, self.bucket.q.length, x.shape[-1])
        return folded.transpose(1, 2)

    def keys_first(self, x: Tensor) -> Tensor:
        """`(n * Hkv, Lk, D)` -> `(n, Lk, Hkv, D)`."""
        return x.view(self.n, self.num_kv, self.bucket.k.length, -1).transpose(1, 2)

    def matmul(self, weights: Tensor, x: Tensor, *, transpose: bool = False) -> Tensor:
        """Batched product with scores-shaped or already folded `weights`; `transpose` multiplies by their transpose."""
        folded = weights.reshape(self.n * self.num_kv, -1, weights.shape[-1])
        return torch.bmm(folded.transpose(1, 2) if transpose else folded, x)

    def scores(self, q: Tensor, k: Tensor, bias: tuple, options: AttentionOptions) -> tuple[Tensor, Tensor | None]:
        """Scaled, biased scores `(n, Hkv * G, Lq, Lk)` and the mask of kept pairs (None if all are); -inf outside for softmax."""
        bucket = self.bucket
        product = self.matmul(self.q(q).mul_(options.scale), self.kv(k).transpose(1, 2))
        scores = product.view(self.n, self.num_kv * self.group, bucket.q.length, bucket.k.length)
        for table, index in self.bias_rows(bias):
            scores += table.to(scores.dtype)[index].permute(0, 3, 1, 2)
        keep = self.keep(options)
        if keep is not None and options.kind == "softmax":
            scores.masked_fill_(~keep, -math.inf)
        return scores, keep

    def keep(self, options: AttentionOptions) -> Tensor | None:
        """`(n or 1, 1, Lq, Lk)`; padded rows may keep anything, nothing reads them back and their gradient arrives as a copy."""
        bucket = self.bucket
        if bucket.q.kept is None and bucket.k.kept is None and not options.causal and options.window <= 0:
            return None
        real = (torch.arange(bucket.k.length) < bucket.k.lengths[:, None])[:, None, None, :]
        if bucket.q.kept is not None:  # a padded row repeats a real one: it must not count twice in dK, dV and the tables
            real = real & (torch.arange(bucket.q.length) < bucket.q.lengths[:, None])[:, None, :, None]
        if not options.causal and options.window <= 0:
            return real
        return real & mask_keeps(_delta(self.bucket), causal=options.causal, window=options.window)[:, None]

    def bias_rows(self, bias: tuple) -> list[tuple[Tensor, Tensor]]:
        """Pairs of (table, its row for every `(n, Lq, Lk)`)."""
        position_table, time_table, q_times, k_times = bias
        found = []
        if position_table is not None:
            found.append((position_table, position_bucket(_delta(self.bucket), position_table.shape[0])))
        if time_table is not None:
            rows = q_times.index_select(0, self.bucket.q.gather).long().view(self.n, -1, 1)
            columns = k_times.index_select(0, self.bucket.k.gather).long().view(self.n, 1, -1)
            found.append((time_table, time_bucket(rows - columns, time_table.shape[0])))
        return found

    def table_gradients(self, dscores: Tensor, bias: tuple, tables: list) -> None:
        found = self.bias_rows(bias)
        for into, (_, index) in zip([t for t in tables if t is not None], found, strict=True):
            shared = into.shape[1] < dscores.shape[1]
            by_head = (dscores.sum(1, keepdim=True) if shared else dscores).permute(0, 2, 3, 1).reshape(-1, into.shape[1])
            into.index_add_(0, index.reshape(-1), by_head)


def _accumulate(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _masked(weights: Tensor, keep: Tensor | None) -> Tensor:
    return weights if keep is None else weights.masked_fill_(~keep, 0.0)


def _activate(scores: Tensor, kind: str) -> Tensor:
    if kind in ("gelu", "gelu_fast"):
        return F.gelu(scores, approximate="tanh")
    return {"silu": F.silu, "relu": F.relu, "identity": torch.clone}[kind](scores)


def _activate_backward(grad: Tensor, scores: Tensor, kind: str) -> Tensor:
    if kind in ("gelu", "gelu_fast"):
        return torch.ops.aten.gelu_backward(grad, scores, approximate="tanh")
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad, scores)
    return grad * (scores > 0) if kind == "relu" else grad


def _plan(q: Tensor, k: Tensor, offsets: tuple[Tensor, Tensor]) -> tuple[Bucket, ...]:
    q_bytes, k_bytes = (x.detach().long().contiguous().numpy().tobytes() for x in offsets)
    return _buckets(q_bytes, k_bytes, q.shape[1])


@functools.lru_cache(maxsize=32)  # every layer of a step, forward and backward, asks for the same few offsets
def _buckets(q_bytes: bytes, k_bytes: bytes, num_heads: int) -> tuple[Bucket, ...]:
    q_offsets, k_offsets = np.frombuffer(q_bytes, np.int64), np.frombuffer(k_bytes, np.int64)
    q_len, k_len = np.diff(q_offsets), np.diff(k_offsets)
    live = np.flatnonzero((q_len > 0) & (k_len > 0))
    order = live[np.lexsort((q_len[live], k_len[live]))]
    runs = _runs(q_len[order], k_len[order], num_heads)
    buckets = []
    for begin, end in itertools.pairwise(runs):
        members = order[begin:end]
        widest = int(q_len[members].max()) * int(k_len[members].max()) * num_heads
        step = max(1, CHUNK_ELEMENTS // widest)
        for at in range(0, len(members), step):
            some = members[at : at + step]
            buckets.append(Bucket(q=_side(q_offsets[some], q_len[some]), k=_side(k_offsets[some], k_len[some])))
    return tuple(buckets)


def _runs(q_len: np.ndarray, k_len: np.ndarray, num_heads: int) -> list[int]:
    """Edges of the buckets in the sorted order: equal lengths first, then neighbours while padding is cheaper than a bucket."""
    if len(q_len) == 0:
        return [0]
    edges = [0, *(np.flatnonzero((np.diff(q_len) != 0) | (np.diff(k_len) != 0)) + 1).tolist(), len(q_len)]
    runs, current = [0], None
    for begin, end in itertools.pairwise(edges):
        n, q_max, k_max = end - begin, int(q_len[begin]), int(k_len[begin])
        alone = n * q_max * k_max * num_heads
        if current is not None:
            count, high_q, high_k, cost = current
            joined = (count + n, max(high_q, q_max), max(high_k, k_max))
            joined_cost = joined[0] * joined[1] * joined[2] * num_heads
            if joined_cost - cost - alone <= BUCKET_COST:
                current = (*joined, joined_cost)
                continue
            runs.append(begin)
        current = (n, q_max, k_max, alone)
    return [*runs, len(q_len)]


def _side(starts: np.ndarray, lengths: np.ndarray) -> Side:
    length = int(lengths.max())
    column = np.arange(length)
    gather = starts[:, None] + np.minimum(column, lengths[:, None] - 1)
    real = column < lengths[:, None]
    kept = None if real.all() else torch.from_numpy(np.flatnonzero(real))
    flat = gather.reshape(-1)
    return Side(
        lengths=torch.from_numpy(lengths.copy()),
        length=length,
        gather=torch.from_numpy(flat.copy()),
        kept=kept,
        rows=torch.from_numpy(flat.copy() if kept is None else gather[real]),
    )
