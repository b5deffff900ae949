"""How each op kind is run: the call that the trainer makes, on data of the requested shape.

`cases(request, phase, device, copies)` gives `copies` runs on data of their own. Forward runs build the autograd graph, as training does;
backward runs are prepared by a forward and then differentiate it alone, gradients freshly allocated as after `zero_grad()`.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from costmodel import ops
from costmodel.blocks.attention import BIAS, BIASED, GDPA_ACTIVATIONS
from costmodel.model import Layer, TableGroup
from costmodel.precision import LOW_PRECISIONS, unfit
from kernels import block_attention, factor, gdpa, jagged_attention
from kernels.embedding import embedding_pooled, embedding_sequence, new_optimizer_state
from kernels.jagged import jagged_mean
from runtime.loss import task_loss
from runtime.microbench.requests import Request
from runtime.microbench.timing import Run
from runtime.model.interformer import even_offsets
from runtime.model.norm import LayerNorm
from runtime.model.sequence import last_event
from runtime.model.times import RelativeBias, event_times
from runtime.optimizer import build_dense_optimizer
from runtime.precision.linear import SCALINGS, product, runs_natively
from runtime.shards import Storage
from runtime.synthetic import Zipf
from runtime.tables import DTYPES, StoredTable

# (inputs to differentiate, forward)
Differentiable = tuple[list[Tensor], Callable[[], Tensor]]
PARAM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NOISE: dict[str, Tensor] = {}
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


def executable(request: Request) -> bool:
    """Whether the runtime has this op (formats without a kernel here, and shapes that a format cannot have, are not timed)."""
    if request.op.kind == "linear" and request.op.dtype in LOW_PRECISIONS:
        features = dict(request.op.features)
        return SCALINGS[request.op.dtype][0] in factor.SCALINGS and unfit(request.op.dtype, features["k"], features["n"]) is None
    return request.op.kind in _BUILDERS and request.op.dtype in PARAM_DTYPES


def cases(request: Request, phase: str, device: torch.device, copies: int) -> list[Run]:
    """`copies` runs of `request` in `phase`."""
    return [_BUILDERS[request.op.kind](request, phase, device) for _ in range(copies)]


def footprint(request: Request) -> float:
    """Bytes that one run touches, to size the rotation."""
    return request.op.bytes(ops.FORWARD)


def _differentiate(inputs: Sequence[Tensor], forward: Callable[[], Tensor], phase: str) -> Run:
    if phase != ops.BACKWARD:
        return Run(run=lambda _: forward())
    out = forward()
    gradient = noise(*out.shape, device=out.device).to(out.dtype)
    return Run(prepare=forward, run=lambda out: torch.autograd.grad(out, inputs, gradient))


def _differentiable(build: Callable[[Request, torch.device], Differentiable]) -> Callable[[Request, str, torch.device], Run]:
    def make(request: Request, phase: str, device: torch.device) -> Run:
        inputs, forward = build(request, device)
        return _differentiate(inputs, forward, phase)

    return make


def _random(request: Request, device: torch.device, *shape: int) -> Tensor:
    return noise(*shape, device=device).to(PARAM_DTYPES[request.op.dtype]).requires_grad_()


def noise(*shape: int, device: torch.device) -> Tensor:
    """Normal numbers that repeat after a million: drawing them anew would take longer than timing them."""
    key = str(device)
    if key not in _NOISE:
        _NOISE[key] = torch.randn(1 << 20, device=device)
    count = math.prod(shape)
    base = _NOISE[key]
    return (base.repeat(-(-count // base.numel()))[:count] if count > base.numel() else base[:count].clone()).view(shape)


def _sizes(request: Request, *names: str) -> list[int]:
    features = dict(request.op.features)
    return [int(features[name]) for name in names]


def _linear(request: Request, device: torch.device) -> Differentiable:
    m, k, n = _sizes(request, "m", "k", "n")
    module = nn.Linear(k, n, device=device, dtype=PARAM_DTYPES[request.op.dtype])
    x = _random(request, device, m, k)
    return [x, module.weight, module.bias], lambda: module(x)


def _linear_case(request: Request, phase: str, device: torch.device) -> Run:
    """A layer; below 16 bits the product of quantised factors alone, whose quantisations are ops of their own (costmodel.precision)."""
    if request.op.dtype not in LOW_PRECISIONS:
        return _differentiable(_linear)(request, phase, device)
    m, k, n = _sizes(request, "m", "k", "n")
    scaling, native = SCALINGS[request.op.dtype][0], runs_natively(request.op.dtype, device)
    x, w = (factor.factor_rows(noise(rows, k, device=device).bfloat16(), scaling).quantized for rows in (m, n))
    return Run(run=lambda _: product(x, w, native=native, dtype=torch.bfloat16))


def _bmm(request: Request, device: torch.device) -> Differentiable:
    b, m, k, n = _sizes(request, "b", "m", "k", "n")
    x, y = _random(request, device, b, m, k), _random(request, device, b, k, n)
    return [x, y], lambda: torch.bmm(x, y)


def _layer_norm(request: Request, device: torch.device) -> Differentiable:
    m, n = _sizes(request, "m", "n")
    module, x = LayerNorm(n, device=device, dtype=PARAM_DTYPES[request.op.dtype]), _random(request, device, m, n)
    return [x, module.weight, module.bias], lambda: module(x)


def _activation(request: Request, device: torch.device) -> Differentiable:
    x = _random(request, device, *_sizes(request, "m", "n"))
    function = _ACTIVATIONS[request.op.variant]
    return [x], lambda: function(x)


def _elementwise(request: Request, phase: str, device: torch.device) -> Run:
    m, n = _sizes(request, "m", "n")
    if request.op.variant == "cat":
        a, b = _random(request, device, m, n - n // 2), _random(request, device, m, max(1, n // 2))
        return _differentiate([a, b], lambda: torch.cat([a, b], dim=1), phase)
    a, b = _random(request, device, m, n), _random(request, device, m, n)
    if request.op.variant == "mul":
        return _differentiate([a, b], lambda: a * b, phase)
    if phase == ops.BACKWARD:
        # an add passes its gradient on; what costs is summing the two gradients of a residual stream, which autograd does in place
        first, second = a.detach(), b.detach()
        return Run(run=lambda _: first.add_(second))
    return _differentiate([a, b], lambda: a + b, phase)


def _cast(request: Request, device: torch.device) -> Differentiable:
    x = noise(*_sizes(request, "m", "n"), device=device).requires_grad_()
    return [x], lambda: x.to(PARAM_DTYPES[request.op.dtype])


def _quantize(request: Request, _phase: str, device: torch.device) -> Run:
    """To 8 bits with a scale a row, as a linear layer's factors are."""
    x = noise(*_sizes(request, "m", "n"), device=device).to(PARAM_DTYPES[request.op.dtype])
    return Run(run=lambda _: factor.factor_rows(x, "rowwise"))


def _attention(request: Request, device: torch.device) -> Differentiable:
    """The kernel of the op's variant on the request's histories; across (`queries`, `keys` per sample) or within them."""
    heads, head_dim, longest = _sizes(request, "heads", "head_dim", "longest")
    options = dict(request.options)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(request.lengths)])).to(device)
    parts, ends, longests = _attention_inputs(request, device, offsets, heads, head_dim)
    causal, divisor = bool(options.get("causal", 1.0)), options.get("divisor", float(longest))
    plain = request.op.variant.removesuffix(BIASED)
    window = int(options["window"]) if plain.endswith("_window") else None
    masks = {"causal": causal, "window": window, "max_q": longests[0], "max_k": longests[1]}
    bias, tables = None, []
    if plain != request.op.variant:
        layer = Layer(kind="hstu", **{k: int(options[k]) for k in BIAS if k in options})
        module = RelativeBias(layer).to(device, parts[0].dtype)
        bias, tables = module(event_times(_hourly(len(parts[0]), device), offsets)), list(module.parameters())
    variant = plain.removesuffix("_window").removesuffix("_queries").removesuffix("_context")
    activation = "silu" if variant == "hstu" else variant.removeprefix("gdpa_")
    if variant not in ("softmax", "block", "hstu") and activation not in GDPA_ACTIVATIONS:
        raise ValueError(f"attention variant {request.op.variant!r} has no case here")

    def forward() -> Tensor:
        q, k, v = parts[0].unbind(1) if len(parts) == 1 else (parts[0], *parts[1].unbind(1))
        if variant == "block":
            return block_attention(q, k, v, offsets, max_len=longest, block=int(options["block"]), causal=causal)
        if variant == "softmax":
            return jagged_attention(q, k, v, *ends, **masks, bias=bias)
        return gdpa(q, k, v, *ends, activation=activation, divisor=divisor, **masks, bias=bias)

    return [*parts, *tables], forward


def _sdpa(request: Request, device: torch.device) -> Differentiable:
    """Dense causal batches as a language model hands them to torch: heads next to width in memory, then transposed."""
    tokens, longest, heads, head_dim = _sizes(request, "tokens", "longest", "heads", "head_dim")
    q, k, v = (_random(request, device, tokens // longest, longest, heads, head_dim) for _ in range(3))

    def forward() -> Tensor:
        with sdpa_kernel(_BACKENDS[request.op.variant]):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)

    return [q, k, v], forward


def _hourly(num: int, device: torch.device) -> Tensor:
    """Int64 seconds of events an hour apart on average (exponential)."""
    gaps = torch.empty(num, dtype=torch.float64).exponential_(1 / 3600, generator=torch.Generator().manual_seed(0))
    return gaps.cumsum(0).long().to(device)


def _attention_inputs(request: Request, device: torch.device, offsets: Tensor, heads: int,
                      head_dim: int) -> tuple[list[Tensor], tuple[Tensor, Tensor], tuple[int, int]]:
    """([qkv] or [q, kv], (query offsets, key offsets), (longest queries, longest keys))."""
    options, tokens, longest = dict(request.options), sum(request.lengths), max(request.lengths)
    across = int(options.get("queries", options.get("keys", 0.0)))
    if not across:
        return [_random(request, device, tokens, 3, heads, head_dim)], (offsets, offsets), (longest, longest)
    other, rows = even_offsets(offsets, across), across * len(request.lengths)
    if "queries" in options:
        parts = [_random(request, device, rows, heads, head_dim), _random(request, device, tokens, 2, heads, head_dim)]
        return parts, (other, offsets), (across, longest)
    parts = [_random(request, device, tokens, heads, head_dim), _random(request, device, rows, 2, heads, head_dim)]
    return parts, (offsets, other), (longest, across)


def _segment_mean(request: Request, device: torch.device) -> Differentiable:
    m, n, segments = _sizes(request, "m", "n", "segments")
    cuts = np.sort(np.random.default_rng(0).integers(0, m + 1, segments - 1))
    offsets = torch.from_numpy(np.concatenate([[0], cuts, [m]])).to(device)
    x = _random(request, device, m, n)
    return [x], lambda: torch.cat([jagged_mean(x, offsets), last_event(x, offsets)], dim=1)


def _bce(request: Request, device: torch.device) -> Differentiable:
    (m,) = _sizes(request, "m")
    logits, labels = torch.randn(m, 1, device=device, requires_grad=True), torch.rand(m, 1, device=device).round_()
    return [logits], lambda: task_loss(logits, labels) / m


def _cross_entropy(request: Request, device: torch.device) -> Differentiable:
    m, n = _sizes(request, "m", "n")
    logits, targets = _random(request, device, m, n), torch.randint(n, (m,), device=device)
    return [logits], lambda: torch.nn.functional.cross_entropy(logits.float(), targets)


def _ids(request: Request, device: torch.device) -> Tensor:
    """`ids` numbers below `rows`, Zipf-distributed; where `unique` is given, about that many different ones (uniform over that many rows)."""
    features, options = dict(request.op.features), dict(request.options)
    rng = np.random.default_rng(1)
    count, rows = int(features["ids"]), int(features.get("rows", options.get("rows", 2)))
    unique = int(features["unique"]) if "unique" in features else None
    if unique is None:
        ids = Zipf(rows, options.get("zipf", 1.0)).ids(rng.random(count))
    else:
        pool = rng.choice(rows, size=unique, replace=False) if rows < 50_000_000 else rng.integers(0, rows, unique)
        ids = np.concatenate([pool, pool[Zipf(unique, options.get("zipf", 1.0)).popularity(rng.random(count - unique))]])
        rng.shuffle(ids)
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def _bag_offsets(request: Request, device: torch.device) -> Tensor:
    (ids,) = _sizes(request, "ids")
    bags = max(1, min(ids, int(dict(request.options).get("bags", ids))))
    return torch.from_numpy(np.round(np.linspace(0, ids, bags + 1)).astype(np.int64)).to(device)


def _embedding_lookup(request: Request, phase: str, device: torch.device) -> Run:
    rows, dim = _sizes(request, "rows", "dim")
    pooled = request.op.variant == "pooled"
    ids, offsets = _ids(request, device), _bag_offsets(request, device)
    if phase == ops.BACKWARD:  # rows that were received are leaves; their gradients are sums over a batch's ids
        ids = torch.unique(ids, return_inverse=True)[1]
        weight = noise(int(ids.max()) + 1, dim, device=device).to(DTYPES[request.op.dtype]).requires_grad_()
    else:
        weight = noise(rows, dim, device=device).to(DTYPES[request.op.dtype])
    forward = (lambda: embedding_pooled(weight, ids, offsets, mode="sum")) if pooled else (lambda: embedding_sequence(weight, ids))
    return _differentiate([weight], forward, phase)


def _embedding_update(request: Request, _phase: str, device: torch.device) -> Run:
    rows, dim, count = _sizes(request, "rows", "dim", "ids")
    table = TableGroup(name="timed", rows=rows, dim=dim, dtype=request.op.dtype, optimizer=request.op.variant)  # type: ignore[arg-type]
    weight = noise(rows, dim, device=device).to(DTYPES[table.dtype])
    stored = StoredTable(spec=Storage(index=0, group="timed", rank=0, width=dim, num_rows=rows), table=table, shards=(), weight=weight,
                         state=new_optimizer_state(weight, table.optimizer), seed=0)
    ids, gradient = _ids(request, device), noise(count, dim, device=device).to(DTYPES[table.dtype])
    return Run(run=lambda _: stored.update(gradient, ids, None, lr=0.01))


def _unique(request: Request, _phase: str, device: torch.device) -> Run:
    ids = _ids(request, device)
    return Run(run=lambda _: torch.unique(ids, return_inverse=True))


def _adamw(request: Request, _phase: str, device: torch.device) -> Run:
    total, tensors = _sizes(request, "parameters", "tensors")
    # half of a model's tensors are biases and norms
    small = tensors // 2
    each = max(1, (total - 16 * small) // max(1, tensors - small))
    parameters = [nn.Parameter(torch.randn(16 if i < small else each, device=device)) for i in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = build_dense_optimizer(parameters, lr=1e-3)
    return Run(run=lambda _: optimizer.step())


_BUILDERS: dict[str, Callable[[Request, str, torch.device], Run]] = {
    "bmm": _differentiable(_bmm),
    "linear": _linear_case, "layer_norm": _differentiable(_layer_norm), "activation": _differentiable(_activation),
    "elementwise": _elementwise, "cast": _differentiable(_cast), "quantize": _quantize, "attention": _differentiable(_attention),
    "sdpa": _differentiable(_sdpa),
    "segment_mean": _differentiable(_segment_mean), "bce": _differentiable(_bce), "cross_entropy": _differentiable(_cross_entropy),
    "embedding_lookup": _embedding_lookup, "embedding_update": _embedding_update, "unique": _unique, "adamw": _adamw,
}
