"""What every block of the model tells the cost model: parameters, ops, saved activations.

Checkpoint policies, as the runtime executes them:

    none       everything that autograd saves stays until backward
    selective  the block's input and the outputs of matrix ops (linear, attention) stay; norms, activations and elementwise ops run again
    alternate  as selective, but every second product of linear layers runs again too (torchtitan's selective policy by ops; not in the runtime)
    full       only the block's input stays; the whole forward runs again
    quantized  as none, but every saved tensor of the activation dtype is stored in 8 bits with an fp32 scale per row, quantised in forward and
               restored in backward; of a block with LayerNorms over events only the inputs of norms and of GELU are, inputs of linear layers
               behind those are computed again, and the rest stays in 16 bits. `quantized4`: all in 4 bits with an 8-bit scale per 32 elements (MX4)

A saved tensor has a level: INPUT stays under every policy, MATRIX under none and selective, CHEAP under none only, DROPPED only under selective (a
matrix op's output that backward itself does not need, kept because the policy is by op). A tensor that two ops save is counted once; a block counts
its input, never its output (the consumer counts that).
"""
from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Container, Iterable, Mapping
from typing import Literal

import numpy as np

from costmodel.codec import suggest
from costmodel.model import LayerGroup
from costmodel.ops import FORWARD, Op, dtype_bytes, op
from costmodel.workload import Lengths

INPUT, MATRIX, CHEAP, DROPPED = "input", "matrix", "cheap", "dropped"
_KEPT = {
    "none": (INPUT, MATRIX, CHEAP),
    "selective": (INPUT, MATRIX, DROPPED),
    "alternate": (INPUT, MATRIX, DROPPED),
    "full": (INPUT,),
    "quantized": (INPUT, MATRIX, CHEAP),
    "quantized4": (INPUT, MATRIX, CHEAP),
}
MATRIX_OPS = ("linear", "bmm", "attention")
FP32_BYTES = 4.0
MX4_BYTES = 0.5 + 1 / 32
QUANTIZED = ("quantized", "quantized4")
_LAYER_FIELDS = ("heads", "head_dim", "mlp_dim", "causal", "window", "divisor", "activation", "block", "num_queries", "num_experts",
                 "options", "sequence", "newest", "branches", "time_buckets", "relative_positions")
_LAYER_DEFAULTS = {f.name: f.default if f.default is not dataclasses.MISSING else {} for f in dataclasses.fields(LayerGroup)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JaggedShape:
    """A jagged batch by its histogram: `weights[i]` histories of `lengths[i]` events, and the longest history of the batch.

    `token_factor` and `pair_factor` carry what the slowest rank has over the average (>= 1): they scale `tokens` and `pairs`.
    """

    lengths: np.ndarray
    weights: np.ndarray
    longest: float
    token_factor: float = 1.0
    pair_factor: float = 1.0

    @classmethod
    def of_lengths(cls, lengths: object) -> JaggedShape:
        """From the lengths of a real batch, `(B,)` integers."""
        values, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
        return cls(lengths=values, weights=counts.astype(np.float64), longest=float(values.max(initial=0)))

    @classmethod
    def expected(cls, lengths: Lengths, samples: float) -> JaggedShape:
        """The expected batch of `samples` histories; `longest` is the expected maximum of that many draws."""
        values, p = lengths.pmf()
        return cls(lengths=values, weights=p * samples, longest=expected_longest(lengths, float(samples)))

    @functools.cached_property
    def samples(self) -> float:
        return float(self.weights.sum())

    @functools.cached_property
    def tokens(self) -> float:
        return self.token_factor * float(self.weights @ self.lengths)

    @functools.cached_property
    def varied(self) -> bool:
        """Whether histories differ in length, so that batches differ in events."""
        return len(self.lengths) > 1 and int(np.count_nonzero(self.weights)) > 1

    def padded(self) -> JaggedShape:
        """Every history as long as the longest."""
        return dataclasses.replace(self, lengths=np.array([self.longest]), weights=np.array([self.samples]))

    def newest(self, limit: int | None) -> JaggedShape:
        """The newest `limit` events of every history (None: all). What the slowest rank has over the average shrinks as the regression of what is
        kept on the whole says: long histories no longer differ."""
        if limit is None or self.lengths.max(initial=0) <= limit:
            return self
        if limit not in self._newest:
            kept = np.minimum(self.lengths, limit)
            factors = (self.token_factor, self.lengths, kept), (self.pair_factor, _square(self.lengths, True), _square(kept, True))
            tokens, pairs = (1.0 + (factor - 1.0) * self._regression(whole, part) for factor, whole, part in factors)
            self._newest[limit] = dataclasses.replace(self, lengths=kept, longest=min(self.longest, float(limit)), token_factor=tokens,
                                                      pair_factor=pairs)
        return self._newest[limit]

    @functools.cached_property
    def _newest(self) -> dict[int, JaggedShape]:
        return {}

    def _regression(self, whole: np.ndarray, part: np.ndarray) -> float:
        """Relative growth of the mean of `part` with that of `whole`, by histories; 1 where they are all alike."""
        p = self.weights / self.samples
        mean, kept = float(p @ whole), float(p @ part)
        centred = p * (whole - mean)
        variance = float(centred @ whole)
        return float(centred @ part) / variance * mean / kept if variance > 1e-9 * mean * mean and kept > 0 else 1.0

    def scaled(self, tokens: float, pairs: float) -> JaggedShape:
        """The slowest rank's shape, with its factors over the average."""
        return dataclasses.replace(self, token_factor=self.token_factor * tokens, pair_factor=self.pair_factor * pairs)

    def pairs(self, *, causal: bool, window: int | None = None, block: int | None = None) -> float:
        """Executed (query, key) pairs of self-attention summed over the batch.

        causal: L (L + 1) / 2; with a window w each row sees at most w columns; without causal, |row - column| < w. block b: full attention inside
        aligned runs of b events, or its causal half.
        """
        length = self.lengths.astype(np.float64)
        if block is not None:
            whole, rest = np.floor(length / block), length % block
            each = whole * _square(float(block), causal) + _square(rest, causal)
        elif window is None:
            each = _square(length, causal)
        else:
            inside = np.minimum(length, window)
            causal_pairs = inside * (inside + 1) / 2 + (length - inside) * window
            each = causal_pairs if causal else 2 * causal_pairs - length
        return self.pair_factor * float(self.weights @ each)


def _square(length, causal: bool):
    return length * (length + 1) / 2 if causal else length * length


@functools.lru_cache(maxsize=1024)
def expected_longest(lengths: Lengths, samples: float) -> float:
    """E[max of `samples` lengths] = sum over l of P(max >= l)."""
    values, p = lengths.pmf()
    cumulative = np.cumsum(p)
    top = cumulative ** max(samples, 1.0)
    return float(np.dot(np.diff(top, prepend=0.0), values))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchShape:
    """What one micro-batch of one rank looks like: samples and the jagged shape of every sequence."""

    samples: float
    sequences: Mapping[str, JaggedShape]

    @classmethod
    def expected(cls, lengths: Mapping[str, Lengths], samples: float) -> BatchShape:
        return cls(samples=samples, sequences={name: JaggedShape.expected(spec, samples) for name, spec in lengths.items()})


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps: elements, level, and bytes an element (None: the activation dtype's). `rows` share a scale if quantised.
    `in_8_bits`: what the policy `quantized` does with it; `again` in the pass that restores a stored one, `made` in one of its own."""

    name: str
    elements: float
    level: str
    bytes_each: float | None = None
    rows: float = 0.0
    in_8_bits: Literal["stored", "again", "made", "wide"] = "stored"


def activation_dtype(precision: str) -> str:
    """The dtype of activations under a plan's precision: fp32 stays, everything lower computes norms and activations in bf16."""
    return "fp32" if precision == "fp32" else "bf16"


class Block(abc.ABC):
    """One block of a region. Subclasses are immutable after construction and state the source of their formulas. `keeps_16_bits`: linear layers that
    no precision below 16 bits touches; `limit`: the most events of a history that it sees."""

    kind: str
    keeps_16_bits: tuple[str, ...] = ()
    limit: int | None = None

    @property
    @abc.abstractmethod
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) of every parameter, as the runtime's module has them."""

    @abc.abstractmethod
    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        """The ops of one block's forward in order; the same ops run in phase `backward`."""

    @abc.abstractmethod
    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        """Every tensor that a policy may keep."""

    @property
    def parts(self) -> tuple[Block, ...]:
        """The blocks that this one runs: itself, or its branches."""
        return (self,)

    @functools.cached_property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)

    @functools.cached_property
    def num_tensors(self) -> int:
        return len(self.parameters)

    def sharded_elements(self, ranks: int) -> int:
        """Elements on the fullest of `ranks` ranks when every parameter `(d0, ...)` is split on d0, padded: ceil(d0 / ranks) rows each."""
        if ranks not in self._sharded:
            self._sharded[ranks] = split_elements(self.parameters, ranks)
        return self._sharded[ranks]

    def shards(self, fsdp: int) -> tuple[tuple[str, int, int], ...]:
        """(axis, ranks, elements on the fullest rank) of every group that parameters are split over."""
        return (("fsdp", fsdp, self.sharded_elements(fsdp)),)

    def exchanges(self, batch: BatchShape, precision: str, phase: str, policy: str) -> tuple[tuple[str, float], ...]:
        """(collective, bytes) over the ranks of an expert group that a phase waits for; none unless its experts are spread."""
        return ()

    @functools.cached_property
    def _sharded(self) -> dict[int, int]:
        return {}

    def flops(self, batch: BatchShape, phase: str = FORWARD) -> float:
        """Executed FLOPs of one block."""
        return sum(op.flops(phase) for op in self.forward(batch))

    def causal_excess(self, batch: BatchShape) -> float:
        """Forward FLOPs executed above the convention, which counts causal attention as half the square: the diagonal's half."""
        return 0.0

    def workspace_bytes(self, batch: BatchShape, precision: str) -> float:
        """Bytes of the tensors that only live around the largest matrix product: its input, its output and the gradient of each."""
        return max((2 * dtype_bytes(activation_dtype(precision)) * (f["m"] * (f["k"] + f["n"]))
                    for f in (dict(op.features) for op in self.forward(batch, precision) if op.kind == "linear")), default=0.0)

    def recomputed(self, batch: BatchShape, precision: str, policy: str, forward: tuple[Op, ...] | None = None) -> tuple[Op, ...]:
        """Ops that run again before this block's backward, or that quantise what is saved; `forward`: the block's ops where they are known."""
        if policy == "none":
            return ()
        if policy in QUANTIZED:  # written once in forward, read once in backward
            low = activation_dtype(precision)
            stored = [t for t in self.saved_tensors(batch) if t.level in _KEPT[policy] and t.bytes_each is None and np.any(t.rows)]
            if policy == "quantized4" or all(t.in_8_bits == "stored" for t in stored):
                return tuple(op("quantize", m=t.rows, n=t.elements / t.rows, dtype=low, count=2) for t in stored)
            # passes of norms and of GELU move 3 bytes an element more than without, as a quantisation does
            return tuple(op("quantize", m=t.rows, n=t.elements / t.rows, dtype=low) for t in stored if t.in_8_bits in ("stored", "made"))
        if policy not in _KEPT:
            raise ValueError(f"unknown checkpoint policy {policy!r}{suggest(policy, _KEPT)}")
        if policy == "alternate":
            return tuple(op for op, again in _alternating(forward or self.forward(batch, precision)) if again)
        return tuple(op for op in forward or self.forward(batch, precision) if policy == "full" or op.kind not in MATRIX_OPS)

    def saved_bytes(self, batch: BatchShape, precision: str, policy: str) -> float:
        """Bytes that one block keeps from forward to backward under `policy`."""
        if policy not in _KEPT:
            raise ValueError(f"unknown checkpoint policy {policy!r}{suggest(policy, _KEPT)}")
        each = dtype_bytes(activation_dtype(precision))
        total, products = 0.0, 0
        for tensor in self.saved_tensors(batch):
            if tensor.level not in _KEPT[policy]:
                continue
            if policy == "alternate" and tensor.level in (MATRIX, DROPPED) and not tensor.name.startswith("attention"):
                products += 1
                if products % 2 == 0:
                    continue
            if tensor.bytes_each is not None:
                total += tensor.elements * tensor.bytes_each
            elif policy == "quantized4" and np.any(tensor.rows):
                total += MX4_BYTES * tensor.elements
            elif policy == "quantized" and np.any(tensor.rows) and tensor.in_8_bits != "wide":
                total += tensor.elements + FP32_BYTES * tensor.rows if tensor.in_8_bits == "stored" else 0.0
            else:
                total += tensor.elements * each
        return total

    def restored_bytes(self, batch: BatchShape, precision: str, policy: str) -> float:
        """Bytes that backward of one block has again beside what `policy` kept: all that a recomputation drops; of quantised tensors, which are
        restored one by one, the largest."""
        if policy not in QUANTIZED:
            return max(0.0, self.saved_bytes(batch, precision, "none") - self.saved_bytes(batch, precision, policy))
        each = dtype_bytes(activation_dtype(precision))
        return max((each * t.elements for t in self.saved_tensors(batch) if t.level in _KEPT[policy] and t.bytes_each is None and np.any(t.rows)
                    and (policy == "quantized4" or t.in_8_bits != "wide")), default=0.0)


def _alternating(forward: Iterable[Op]) -> list[tuple[Op, bool]]:
    """(op, whether it runs again) under the policy `alternate`."""
    found, products = [], 0
    for one in forward:
        products += one.kind == "linear"
        found.append((one, one.kind not in MATRIX_OPS or (one.kind == "linear" and products % 2 == 0)))
    return found


class LayerBlock(Block):
    """A block that a LayerGroup describes. `uses` and `needs`: LayerGroup fields read, and those that must be set; `options`: the keys of its
    `options`, all needed, positive integers."""

    uses: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    group: LayerGroup

    @classmethod
    def validate(cls, group: LayerGroup) -> None:
        """Raises ValueError naming the field: unset though needed, or set though this kind does not use it."""
        for name in cls.needs:
            if not getattr(group, name):
                raise ValueError(f"layer {group.kind}: {name} must be given and > 0")
        for name in _LAYER_FIELDS:
            value = getattr(group, name)
            if name not in cls.uses and value != _LAYER_DEFAULTS[name]:
                raise ValueError(f"layer {group.kind}: {name} = {value!r} has no meaning for this kind; it uses {', '.join(cls.uses)}")
            if name in cls.uses and isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"layer {group.kind}: {name} must be >= 0, got {value}")
        if group.window is not None and group.window < 1:
            raise ValueError(f"layer {group.kind}: window must be >= 1, got {group.window}")
        if group.time_buckets is not None and group.time_buckets < 2:
            raise ValueError(f"layer {group.kind}: time_buckets must be >= 2, got {group.time_buckets}")
        if group.relative_positions is not None and group.relative_positions < 1:
            raise ValueError(f"layer {group.kind}: relative_positions must be >= 1, got {group.relative_positions}")
        if cls.options and set(group.options) != set(cls.options):
            raise ValueError(f"layer {group.kind}: options {', '.join(cls.options)} are needed, got {', '.join(group.options) or 'none'}")
        for name, value in group.options.items():
            if value < 1 or value != int(value):
                raise ValueError(f"layer {group.kind}: options.{name} must be an integer >= 1, got {value}")

    def option(self, name: str) -> int:
        return int(self.group.options[name])

    @property
    def width(self) -> int:
        """H d, the width of all heads."""
        return self.group.heads * self.group.head_dim


class SequenceBlock(LayerBlock):
    """A block of a sequence's layer group: `(T, D)` to `(T, D)`; of every history it sees the newest `limit` events."""

    def __init__(self, group: LayerGroup, dim: int, sequence: str, limit: int | None = None) -> None:
        self.validate(group)
        self.group, self.dim, self.sequence, self.limit = group, dim, sequence, limit

    def shape(self, batch: BatchShape) -> JaggedShape:
        return batch.sequences[self.sequence].newest(self.limit)

    def causal_excess(self, batch: BatchShape) -> float:
        return 2.0 * self.shape(batch).tokens * self.width if self.group.causal else 0.0


def split_elements(parameters: tuple[tuple[str, tuple[int, ...]], ...], ranks: int) -> int:
    """Elements on the fullest of `ranks` ranks: ceil(d0 / ranks) rows of each `(d0, ...)`."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for _, shape in parameters)


def parameter(name: str, *shape: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ((name, shape),)


def norm_parameters(name: str, width: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ((f"{name}.weight", (width,)), (f"{name}.bias", (width,)))


def linear_parameters(name: str, inputs: int, outputs: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ((f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,)))


def kept_in_8_bits(tensors: Iterable[Saved], *, stored: Container[str], again: Container[str], made: Container[str] = ()) -> tuple[Saved, ...]:
    """The tensors of a block with LayerNorms over events as `quantized` treats them, by name; those not named stay in 16 bits."""
    def treated(name: str) -> str:
        return "stored" if name in stored else "again" if name in again else "made" if name in made else "wide"

    return tuple([Saved(t.name, t.elements, t.level, t.bytes_each, t.rows, treated(t.name)) for t in tensors])  # type: ignore[arg-type]


def norm_saved(name: str, rows: float, width: float, level: str) -> tuple[Saved, ...]:
    """A LayerNorm keeps its input (at `level`), and mean and rstd in fp32."""
    return (Saved(f"{name}.input", rows * width, level, rows=rows), Saved(f"{name}.statistics", 2 * rows, CHEAP, FP32_BYTES))
