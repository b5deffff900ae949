"""The GEM-like model as data: embedding tables, user sequences with layers, an interaction, task heads.

    ids ----> tables (pooled)   ------------------------------------------+
    ids ----> tables (sequence) -> concat -> Linear -> layers -> summary --+--> concat -> interaction -> heads -> logits
    dense features -> bottom MLP -----------------------------------------+

    concat -> interaction layers over tokens of `feature_dim` (Wukong, InterFormer; optional) -> MLP -> expert layers (optional) -> heads

`dim` (D) is the width of every sequence stream and summary. A layer group is `count` identical blocks of one kind; a kind is one class in
`costmodel/blocks/` and one module in `runtime/model/`, whose parameter counts and FLOPs are tested equal. docs/model.md has each block's formula.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from costmodel.codec import LATER

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
Optimizer = Literal["rowwise_adagrad", "adagrad", "sgd", "adam"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableGroup:
    """`count` identical embedding tables of `rows` x `dim`.

    pooling: `sum` or `mean` over `ids_per_sample` ids (the average pooling factor), or `sequence`, one id per event of `sequence`. A sequence
    table's last event is the candidate to be scored. `zipf` is the exponent of the ids' popularity, 0 for uniform. Table i is named `name` when count
    is 1, else `name.i`.
    """

    name: str
    rows: int
    dim: int
    count: int = 1
    pooling: Literal["sum", "mean", "sequence"] = "sum"
    ids_per_sample: float = 1.0
    sequence: str | None = None
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    optimizer: Optimizer = "rowwise_adagrad"
    zipf: float = 1.05

    def __post_init__(self) -> None:
        for key in ("rows", "dim", "count"):
            if getattr(self, key) < 1:
                raise ValueError(f"table {self.name}: {key} must be >= 1, got {getattr(self, key)}")
        if (self.pooling == "sequence") != (self.sequence is not None):
            raise ValueError(f"table {self.name}: `sequence:` names the sequence of a table with `pooling: sequence`, and only of such a table")
        if self.ids_per_sample <= 0 or self.zipf < 0:
            raise ValueError(f"table {self.name}: ids_per_sample must be > 0 and zipf >= 0")

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.name, self.count)

    @property
    def weight_elements(self) -> int:
        return self.rows * self.dim

    @property
    def weight_bytes(self) -> int:
        """Bytes of one table's weights."""
        return self.rows * self.dim * DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of one table's optimizer state: fp32; one value a row for rowwise Adagrad, one a weight for Adagrad, two for Adam."""
        return {"rowwise_adagrad": self.rows * 4, "adagrad": self.weight_elements * 4, "adam": self.weight_elements * 8, "sgd": 0}[self.optimizer]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block of a `kind` (a key of `costmodel.blocks.BLOCKS`).

    Fields that a kind does not use must keep their defaults (checked by the kind's class): `heads`, `head_dim` for attention; `mlp_dim` for blocks
    with a feed-forward part; `window`, `causal` for masks; `divisor`: what HSTU and GDPA divide scores by, fixed, never the batch's maximum;
    `sequence`: the history that an `interformer` block reads; `options`: further sizes of a kind, by the names its class lists.

    HSTU's bias on the scores, of tables that all heads share: `time_buckets` n adds a row of a table `(n + 1, 1)` by the logarithm of the time
    between two events, `relative_positions` P one of a table `(2 P - 1, 1)` by how many events apart they are, P - 1 and more alike.
    """

    kind: str
    heads: int = 0
    head_dim: int = 0
    mlp_dim: int = 0
    causal: bool = True
    window: int | None = None
    divisor: float | None = None
    activation: str | None = None
    block: int | None = None
    num_queries: int | None = None
    num_experts: int | None = None
    sequence: str | None = None
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    time_buckets: int | None = dataclasses.field(default=None, metadata=LATER)
    relative_positions: int | None = dataclasses.field(default=None, metadata=LATER)

    @property
    def biased(self) -> bool:
        """Whether the scores have a bias."""
        return self.time_buckets is not None or self.relative_positions is not None

    @property
    def timed(self) -> bool:
        """Whether the layer reads when events happened."""
        return self.time_buckets is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup(Layer):
    """`count` identical blocks, which take one precision and one checkpoint policy each.

    Of a `pyramid` level: `branches`, the layers that it runs side by side; `newest`: how many of a history's newest events it and everything after it
    see (default: as many as the level before).
    """

    count: int = 1
    newest: int | None = None
    branches: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"layer {self.kind}: count must be >= 1, got {self.count}")

    @property
    def timed(self) -> bool:
        return self.time_buckets is not None or any(branch.timed for branch in self.branches)

    @classmethod
    def of_layer(cls, layer: Layer) -> LayerGroup:
        """One block of `layer`."""
        return cls(**{f.name: getattr(layer, f.name) for f in dataclasses.fields(Layer)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A user history: jagged events of width D through `layers`, then a summary: of the mean and the last event, or by a layer of
    `costmodel.blocks.SUMMARIES`. `time_buckets`: events carry timestamps, and to each is added a learned vector of the time since the newest one, by
    logarithmic buckets.

    `next_event`: one of the sequence's tables; every event then also predicts the id of the event after it, by cross entropy over all rows.
    """

    name: str
    layers: tuple[LayerGroup, ...]
    next_event: str | None = None
    summary: Layer | None = None
    time_buckets: int | None = None

    def __post_init__(self) -> None:
        if self.time_buckets is not None and self.time_buckets < 2:
            raise ValueError(f"sequence {self.name}: time_buckets must be >= 2, got {self.time_buckets}")
        if self.next_event is not None and self.limits[-1] is not None:
            raise ValueError(f"sequence {self.name}: next_event needs all events of a history, but its layers keep the newest {self.limits[-1]}")

    @property
    def timed(self) -> bool:
        """Whether its events carry timestamps, int64 seconds."""
        return self.time_buckets is not None or any(group.timed for group in self.layers)

    @property
    def limits(self) -> tuple[int | None, ...]:
        """The most events of a history that each layer group sees, then what leaves them; None: all."""
        found: list[int | None] = []
        limit: int | None = None
        for group in self.layers:
            limit = min((n for n in (limit, group.newest) if n is not None), default=None)
            found.append(limit)
        return (*found, limit)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One binary task: an MLP with `hidden` widths over the interaction's output, then one logit, trained with BCE."""

    name: str
    hidden: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The whole model. `interaction_layers`: kinds of `costmodel.blocks.INTERACTION_BLOCKS` over the concatenated features as tokens of
    `feature_dim`, before the MLP of `interaction_hidden`; `expert_layers`: kinds of `EXPERT_BLOCKS` over that MLP's output."""

    name: str
    dim: int
    tables: tuple[TableGroup, ...]
    sequences: tuple[Sequence, ...] = ()
    num_dense_features: int = 0
    bottom_hidden: tuple[int, ...] = ()
    interaction_hidden: tuple[int, ...] = (512, 256)
    interaction_layers: tuple[LayerGroup, ...] = ()
    feature_dim: int = 0
    expert_layers: tuple[LayerGroup, ...] = ()
    heads: tuple[Head, ...] = (Head(name="click"),)
    description: str = ""

    def __post_init__(self) -> None:
        widths = (self.dim, *self.bottom_hidden, *self.interaction_hidden, *(w for h in self.heads for w in h.hidden))
        if min(widths) < 1 or self.num_dense_features < 0:
            raise ValueError(f"model {self.name}: dim and every hidden width must be >= 1, num_dense_features >= 0; got {widths} and "
                             f"{self.num_dense_features}")
        if not self.interaction_hidden:
            raise ValueError(f"model {self.name}: interaction_hidden needs at least one width")
        names = [s.name for s in self.sequences]
        for table in self.tables:
            if table.sequence is not None and table.sequence not in names:
                raise ValueError(f"table {table.name}: sequence {table.sequence!r} is not defined (sequences: {', '.join(names) or 'none'})")
        for sequence in self.sequences:
            if not any(t.sequence == sequence.name for t in self.tables):
                raise ValueError(f"sequence {sequence.name}: no table feeds it")
            fed = [t.name for t in self.tables if t.sequence == sequence.name and t.count == 1]
            if sequence.next_event is not None and sequence.next_event not in fed:
                raise ValueError(f"sequence {sequence.name}: next_event {sequence.next_event!r} is none of its single tables "
                                 f"({', '.join(fed) or 'none'})")
        for what, all_names in (("table", [n for t in self.tables for n in t.names]), ("sequence", names), ("head", [h.name for h in self.heads])):
            twice = _duplicates(all_names)
            if twice:
                raise ValueError(f"{what} names must be unique, twice: {', '.join(twice[:5])}")
        if self.interaction_layers and (self.feature_dim < 1 or self.interaction_width % self.feature_dim):
            raise ValueError(f"model {self.name}: interaction_layers need a feature_dim that divides the {self.interaction_width} "
                             f"concatenated features, got {self.feature_dim}")
        for group in self.interaction_layers:
            if group.sequence is not None and group.sequence not in names:
                raise ValueError(f"layer {group.kind}: sequence {group.sequence!r} is not defined (sequences: {', '.join(names) or 'none'})")
        if not self.heads:
            raise ValueError("model: at least one head is needed")
        if self.num_dense_features and not self.bottom_hidden:
            raise ValueError("model: dense features need bottom_hidden widths")

    @property
    def pooled_width(self) -> int:
        """Summed dims of all pooled tables."""
        return sum(t.dim * t.count for t in self.tables if t.pooling != "sequence")

    @property
    def interaction_width(self) -> int:
        """Width of the concatenated features that enter the interaction."""
        bottom = self.bottom_hidden[-1] if self.num_dense_features else 0
        return self.pooled_width + self.dim * len(self.sequences) + bottom

    def sequence_width(self, name: str) -> int:
        """Summed dims of the tables that feed one event of sequence `name`."""
        return sum(t.dim * t.count for t in self.tables if t.sequence == name)

    def table(self, name: str) -> TableGroup:
        """The table group of that name. Raises KeyError."""
        return {t.name: t for t in self.tables}[name]

    @property
    def num_sparse_parameters(self) -> int:
        return sum(t.rows * t.dim * t.count for t in self.tables)


@functools.lru_cache(maxsize=4096)
def _names(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}.{i}" for i in range(count))


def _duplicates(names: list[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({n for n in names if n in seen or seen.add(n)})
