"""The op kinds: what a block lowers to, what the microbenchmark times, what the calibration holds a curve of.

FLOPs: 2 per multiply-add of matrix products; backward = 2 x forward (design convention; a fused attention backward that recomputes scores executes
2.5 x, which its utilisation absorbs). Norms, activations and copies count 0 FLOPs and live by their bytes. Bytes: the least that must cross memory
once, `e` = bytes of the dtype:

    linear            2mkn FLOPs;   e (mk + kn + mn)           backward 2 x both (dX and dW products)
    bmm               2bmkn FLOPs;  e b (mk + kn + mn)         backward 2 x both      b products `(m, k) @ (k, n)`
    attention         4 pairs H d;  e 4 T H d                  backward 2 x FLOPs, e 8 T H d (q k v o do in, dq dk dv out)
                      T: where queries and keys differ in number, the mean of both counts; a variant that ends in _bias reads 16 T more of times
    sdpa              as attention: torch's scaled_dot_product_attention of dense causal batches, by the backend that it runs (variant)
    layer_norm        0;            e 2mn                      backward e 3mn
    activation        0;            e 2mn                      backward e 3mn
    elementwise       0;            add, mul e 3mn; cat e 2mn  backward add 0, mul e 5mn, cat e 2mn
    segment_mean      0;            e (m + s) n                backward e (m + s) n      mean and last event of every segment
    bce               0;            12m                        backward 12m              logits, labels, weights in fp32
    cross_entropy     0;            (e + 12) mn                backward the same         logits as fp32, log-probabilities kept in fp32
    unique            0;            32 ids                     ids sorted and made unique, inverse kept
    embedding_lookup  0;            8 ids + e 2 ids dim        pooled: 8 ids + e ids dim, its sums are few; backward the first
    embedding_update  0;            8 ids + 4 ids dim + 2 e unique dim + state
    fsdp_gather       0;            8 parameters               one FSDP unit's copies and bookkeeping around an all-gather, its wait left out
    fsdp_reduce       0;            8 parameters               the same around its gradients' reduce-scatter
    adamw             0;            28 parameters: p, m, v read and written, gradient read, fp32
    cast              0;            (source + target bytes) mn between fp32 and the dtype
    quantize          0;            (e + 1) mn + 4m            to 8 bits with a scale a row
    input             0;            8 (samples + events)       host work: a batch built and copied
    collectives       0;            bytes, the whole message   time comes from `costmodel.comms`
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from costmodel.model import DTYPE_BYTES

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
Features = Mapping[str, float]
Formula = Callable[[Features, str, float, str], float]
_INFINITY = float("inf")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpKind:
    """`features` an op of this kind carries, in order; `phases` it runs in; `variants` allowed (empty tuple: any); cost formulas.

    A formula takes (features, variant, bytes of the dtype, phase). `matrix`: runs on matrix units, so its roofline peak is the dtype's own.
    `spilled`: bytes of what an implementation that does not fuse writes down between its products (attention: scores, padded to the longest
    history); a fit finds how much of it a device pays for. `coordinates`: what times are interpolated over, by default the features themselves.
    """

    features: tuple[str, ...]
    phases: tuple[str, ...]
    variants: tuple[str, ...]
    flops: Formula
    bytes: Formula
    matrix: bool = False
    spilled: Formula | None = None
    coordinates: Callable[[Features], tuple[float, ...]] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op with its shape, `count` times in a row. `features` are sorted (name, value) pairs, so that an op is hashable; build with `op(...)`.

    dtype is that of activations: fp32, bf16, fp16 or fp8 formats named as in plans (`fp8_row`, ...).
    """

    kind: str
    variant: str = ""
    features: tuple[tuple[str, float], ...]
    dtype: str = "fp32"
    count: int = 1

    def feature(self, name: str) -> float:
        return dict(self.features)[name]

    def flops(self, phase: str) -> float:
        """FLOPs of all `count` repetitions."""
        return self.count * KINDS[self.kind].flops(dict(self.features), self.variant, dtype_bytes(self.dtype), phase)

    def bytes(self, phase: str) -> float:
        """Least bytes to and from memory of all `count` repetitions."""
        return self.count * KINDS[self.kind].bytes(dict(self.features), self.variant, dtype_bytes(self.dtype), phase)

    def flops_and_bytes(self, phase: str) -> tuple[float, float]:
        """Both of the above."""
        spec, values, each = KINDS[self.kind], dict(self.features), dtype_bytes(self.dtype)
        return self.count * spec.flops(values, self.variant, each, phase), self.count * spec.bytes(values, self.variant, each, phase)

    def spilled(self, phase: str) -> float:
        """Bytes of what is written down between products where nothing is fused, of all `count` repetitions; 0 for most kinds."""
        formula = KINDS[self.kind].spilled
        return 0.0 if formula is None else self.count * formula(dict(self.features), self.variant, dtype_bytes(self.dtype), phase)

    def times(self, count: int) -> Op:
        """This op `count` times as often."""
        return dataclasses.replace(self, count=self.count * count)


def dtype_bytes(dtype: str) -> float:
    """Bytes an element: 4, 2, or 1 for the 8-bit formats (scales are counted where they are stored)."""
    found = DTYPE_BYTES.get(dtype)
    if found is not None:
        return float(found)
    if dtype.startswith(("fp8", "mxfp8")):
        return 1.0
    raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}, fp8_*, mxfp8")


def op(kind: str, *, variant: str = "", dtype: str = "fp32", count: int = 1, **features: float) -> Op:
    """An op after checks: the kind is known, its features are exactly those of the kind, finite and >= 0. Features may be arrays (costmodel.batch);
    such an op has no hash."""
    spec = KINDS.get(kind)
    if spec is None:
        raise ValueError(f"unknown op kind {kind!r}; known: {', '.join(KINDS)}")
    if len(features) != len(spec.features) or not all([name in features for name in spec.features]):
        raise ValueError(f"op {kind}: features {sorted(spec.features)} are needed, got {sorted(features)}")
    if spec.variants and variant not in spec.variants:
        raise ValueError(f"op {kind}: variant {variant!r} is none of {', '.join(spec.variants)}")
    values = []
    for name in spec.features:
        value = features[name]
        if isinstance(value, np.ndarray):
            legal = ((value >= 0) & (value < _INFINITY)).all()
        else:
            value = float(value)
            legal = 0 <= value < _INFINITY
        if not legal:
            raise ValueError(f"op {kind}: {name} must be finite and >= 0, got {value}")
        values.append((name, value))
    values = tuple(values)
    dtype_bytes(dtype)
    return Op(kind=kind, variant=variant, features=values, dtype=dtype, count=count)


def coordinates(kind: str, values: tuple[float, ...]) -> tuple[float, ...]:
    """What a kind's times are interpolated over, of its features' values in order."""
    spec = KINDS[kind]
    return values if spec.coordinates is None else spec.coordinates(dict(zip(spec.features, values)))


def linear(m: float, k: float, n: float, dtype: str = "fp32", count: int = 1) -> Op:
    """`(m, k) @ (k, n)` with bias."""
    return op("linear", m=m, k=k, n=n, dtype=dtype, count=count)


def bmm(b: float, m: float, k: float, n: float, dtype: str = "fp32", count: int = 1) -> Op:
    """`b` products `(m, k) @ (k, n)`."""
    return op("bmm", b=b, m=m, k=k, n=n, dtype=dtype, count=count)


def layer_norm(m: float, n: float, dtype: str = "fp32", count: int = 1) -> Op:
    return op("layer_norm", m=m, n=n, dtype=dtype, count=count)


def activation(variant: str, m: float, n: float, dtype: str = "fp32", count: int = 1) -> Op:
    """relu, gelu, silu, sigmoid or tanh of `(m, n)`."""
    return op("activation", variant=variant, m=m, n=n, dtype=dtype, count=count)


def elementwise(variant: str, m: float, n: float, dtype: str = "fp32", count: int = 1) -> Op:
    """`add` or `mul` of two `(m, n)`, or `cat` into `(m, n)`."""
    return op("elementwise", variant=variant, m=m, n=n, dtype=dtype, count=count)


def attention(variant: str, *, tokens: float, pairs: float, longest: float, heads: int, head_dim: int, dtype: str = "fp32", count: int = 1) -> Op:
    """Jagged attention of `tokens` queries; `pairs` = executed (query, key) pairs of one head, `longest` the longest sequence."""
    return op("attention", variant=variant, tokens=tokens, pairs=pairs, longest=longest, heads=heads, head_dim=head_dim, dtype=dtype, count=count)


def _zero(_f: Features, _v: str, _e: float, _p: str) -> float:
    return 0.0


def _back(forward: float, backward: float) -> Formula:
    """`e x forward (or backward) x m n`."""
    return lambda f, v, e, p: e * f["m"] * f["n"] * (backward if p == BACKWARD else forward)


def _elementwise_bytes(f: Features, variant: str, e: float, phase: str) -> float:
    passes = {"add": (3, 0), "mul": (3, 5), "cat": (2, 2)}[variant][phase == BACKWARD]
    return e * f["m"] * f["n"] * passes


def _update_bytes(f: Features, variant: str, e: float, _phase: str) -> float:
    weights = f["unique"] * f["dim"]
    state = {"rowwise_adagrad": 8.0 * f["unique"], "adagrad": 8.0 * weights, "adam": 16.0 * weights, "sgd": 0.0}[variant]
    return 8 * f["ids"] + 4 * f["ids"] * f["dim"] + 2 * e * f["unique"] * f["dim"] + state


def _attention_coordinates(f: Features) -> tuple[float, ...]:
    """Scores, longest history, how ragged histories are (1 or 2 where all are equally long), heads, width of a head."""
    return (f["pairs"] * f["heads"], f["longest"], f["tokens"] * f["longest"] / max(f["pairs"], 1.0), f["heads"], f["head_dim"])


_BOTH, _ROW, _EMBEDDING = (FORWARD, BACKWARD), ("m", "n"), ("ids", "unique", "dim", "rows", "tables")
_COLLECTIVE = OpKind(features=("bytes", "group"), phases=(STEP,), variants=(), flops=_zero, bytes=lambda f, v, e, p: f["bytes"])

KINDS: dict[str, OpKind] = {
    "linear": OpKind(features=("m", "k", "n"), phases=_BOTH, variants=(), matrix=True,
                     flops=lambda f, v, e, p: 2 * f["m"] * f["k"] * f["n"] * (1 + (p == BACKWARD)),
                     bytes=lambda f, v, e, p: e * (f["m"] * f["k"] + f["k"] * f["n"] + f["m"] * f["n"]) * (1 + (p == BACKWARD))),
    "bmm": OpKind(features=("b", "m", "k", "n"), phases=_BOTH, variants=(), matrix=True,
                  flops=lambda f, v, e, p: 2 * f["b"] * f["m"] * f["k"] * f["n"] * (1 + (p == BACKWARD)),
                  bytes=lambda f, v, e, p: e * f["b"] * (f["m"] * f["k"] + f["k"] * f["n"] + f["m"] * f["n"]) * (1 + (p == BACKWARD))),
    "attention": OpKind(features=("tokens", "pairs", "longest", "heads", "head_dim"), phases=_BOTH, variants=(), matrix=True,
                        flops=lambda f, v, e, p: 4 * f["pairs"] * f["heads"] * f["head_dim"] * (1 + (p == BACKWARD)),
                        bytes=lambda f, v, e, p: f["tokens"] * (e * f["heads"] * f["head_dim"] * (8 if p == BACKWARD else 4)
                                                                + 16 * v.endswith("_bias")),
                        spilled=lambda f, v, e, p: e * f["tokens"] * f["longest"] * f["heads"], coordinates=_attention_coordinates),
    "sdpa": OpKind(features=("tokens", "pairs", "longest", "heads", "head_dim"), phases=_BOTH, variants=("flash", "cudnn"), matrix=True,
                   flops=lambda f, v, e, p: 4 * f["pairs"] * f["heads"] * f["head_dim"] * (1 + (p == BACKWARD)),
                   bytes=lambda f, v, e, p: f["tokens"] * e * f["heads"] * f["head_dim"] * (8 if p == BACKWARD else 4),
                   coordinates=_attention_coordinates),
    "layer_norm": OpKind(features=_ROW, phases=_BOTH, variants=("",), flops=_zero, bytes=_back(2, 3)),
    "activation": OpKind(features=_ROW, phases=_BOTH, variants=("relu", "gelu", "silu", "sigmoid", "tanh"), flops=_zero, bytes=_back(2, 3)),
    "elementwise": OpKind(features=_ROW, phases=_BOTH, variants=("add", "mul", "cat"), flops=_zero, bytes=_elementwise_bytes),
    "segment_mean": OpKind(features=("m", "n", "segments"), phases=_BOTH, variants=("",), flops=_zero,
                           bytes=lambda f, v, e, p: e * (f["m"] + f["segments"]) * f["n"]),
    "bce": OpKind(features=("m",), phases=_BOTH, variants=("",), flops=_zero, bytes=lambda f, v, e, p: 12 * f["m"]),
    "cross_entropy": OpKind(features=_ROW, phases=_BOTH, variants=("",), flops=_zero, bytes=lambda f, v, e, p: (e + 12) * f["m"] * f["n"]),
    "cast": OpKind(features=_ROW, phases=_BOTH, variants=("",), flops=_zero, bytes=lambda f, v, e, p: (4 + e) * f["m"] * f["n"]),
    "quantize": OpKind(features=_ROW, phases=(FORWARD,), variants=("",), flops=_zero,
                       bytes=lambda f, v, e, p: (e + 1) * f["m"] * f["n"] + 4 * f["m"]),
    "unique": OpKind(features=("ids",), phases=(FORWARD,), variants=("",), flops=_zero, bytes=lambda f, v, e, p: 32 * f["ids"]),
    "fsdp_gather": OpKind(features=("parameters", "tensors"), phases=(STEP,), variants=("",), flops=_zero,
                          bytes=lambda f, v, e, p: 8 * f["parameters"]),
    "fsdp_reduce": OpKind(features=("parameters", "tensors"), phases=(STEP,), variants=("",), flops=_zero,
                          bytes=lambda f, v, e, p: 8 * f["parameters"]),
    "embedding_lookup": OpKind(features=_EMBEDDING, phases=_BOTH, variants=("pooled", "sequence"), flops=_zero,
                               bytes=lambda f, v, e, p: 8 * f["ids"] + (2 - (v == "pooled" and p == FORWARD)) * e * f["ids"] * f["dim"]),
    "embedding_update": OpKind(features=_EMBEDDING, phases=(STEP,), variants=("rowwise_adagrad", "adagrad", "sgd", "adam"), flops=_zero,
                               bytes=_update_bytes),
    "adamw": OpKind(features=("parameters", "tensors"), phases=(STEP,), variants=("",), flops=_zero, bytes=lambda f, v, e, p: 28 * f["parameters"]),
    "input": OpKind(features=("samples", "events"), phases=(STEP,), variants=(), flops=_zero,
                    bytes=lambda f, v, e, p: 8 * (f["samples"] + f["events"])),
    **{kind: _COLLECTIVE for kind in COLLECTIVES},
}
