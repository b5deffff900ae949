"""Regions: the parts of a model that take one precision and one checkpoint policy each, in forward order.

Names: `<sequence>.input`, `<sequence>.<i>` for layer group i, `<sequence>.summary`, `<sequence>.next` where next events are predicted,
`bottom`, `interaction.<i>` for interaction layer i, `interaction` (its MLP), `experts.<i>` for expert layer i, `heads`. Interaction and expert
layers are one region each, as their shapes differ.
"""
from __future__ import annotations

import dataclasses
import fnmatch

from costmodel.blocks import (
    EXPERT_BLOCKS,
    INTERACTION_BLOCKS,
    SUMMARIES,
    Block,
    Experts,
    Heads,
    Mlp,
    NextEvent,
    SequenceInput,
    Summary,
    block_class,
    known,
)  # fmt: skip
from costmodel.codec import suggest
from costmodel.model import LayerGroup, Model
from costmodel.plan import Layout, RegionOption, RegionPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """`count` identical blocks in a row; `sequence` is empty for a region over samples."""

    name: str
    count: int
    block: Block
    sequence: str = ""

    @property
    def kind(self) -> str:
        return self.block.kind

    @property
    def layer(self) -> bool:
        """Whether it is a layer of a history, which checkpoint policies are for."""
        return bool(self.sequence) and self.name.startswith(f"{self.sequence}.") and self.name.rsplit(".", 1)[1].isdigit()

    @property
    def num_parameters(self) -> int:
        """Parameters of all `count` blocks."""
        return self.count * self.block.num_parameters


_cache: dict[tuple[int, int, bool], tuple[Model, tuple[Region, ...]]] = {}


def regions(model: Model, layout: Layout | None = None) -> tuple[Region, ...]:
    """The regions of `model` in forward order, experts as one rank of `layout` has them (default: whole). Raises ValueError for a layer kind or field
    that no block class knows, and for an ep that does not divide the experts."""
    ep, all_to_all = (layout.ep, layout.expert_all_to_all) if layout is not None else (1, False)
    key = (id(model), ep, all_to_all)  # the model is kept beside its regions, so that its id stays taken
    if key not in _cache:
        if len(_cache) > 256:
            _cache.clear()
        _cache[key] = (model, _build(model) if ep == 1 else _spread(model, ep, all_to_all))
    return _cache[key][1]


def _spread(model: Model, ep: int, all_to_all: bool) -> tuple[Region, ...]:
    if not model.expert_layers:
        raise ValueError(f"model {model.name}: ep {ep} needs expert_layers, the model has none")
    return tuple(dataclasses.replace(r, block=r.block.spread(ep, all_to_all)) if isinstance(r.block, Experts) else r for r in regions(model))


def _build(model: Model) -> tuple[Region, ...]:
    found: list[Region] = []
    for sequence in model.sequences:
        name = sequence.name
        num_tables = sum(t.count for t in model.tables if t.sequence == name)
        found.append(Region(name=f"{name}.input", count=1, sequence=name,
                            block=SequenceInput(name, model.sequence_width(name), num_tables, model.dim, sequence.time_buckets)))
        for i, (group, limit) in enumerate(zip(sequence.layers, sequence.limits)):
            found.append(Region(name=f"{name}.{i}", count=group.count, sequence=name, block=block_class(group)(group, model.dim, name, limit)))
        left, layer = sequence.limits[-1], sequence.summary
        summary = Summary(name, model.dim, left) if layer is None else known(SUMMARIES, layer, "summary")(layer, model.dim, name, left)
        found.append(Region(name=f"{name}.summary", count=1, sequence=name, block=summary))
        if sequence.next_event is not None:
            found.append(Region(name=f"{name}.next", count=1, sequence=name, block=NextEvent(name, model.dim, model.table(sequence.next_event).rows)))
    if model.num_dense_features:
        found.append(Region(name="bottom", count=1, block=Mlp("bottom", model.num_dense_features, model.bottom_hidden, concat=False)))
    width, left = model.interaction_width, {s.name: s.limits[-1] for s in model.sequences}
    for i, group in enumerate(repeated(model.interaction_layers)):
        made = known(INTERACTION_BLOCKS, group, "interaction layer")(group, num_tokens=width // model.feature_dim, feature_dim=model.feature_dim,
                                                                     dim=model.dim, first=not i, limit=left.get(group.sequence))
        found.append(Region(name=f"interaction.{i}", count=1, block=made, sequence=group.sequence or ""))
        width = made.num_outputs * model.feature_dim
    found.append(Region(name="interaction", count=1, block=Mlp("interaction", width, model.interaction_hidden, concat=not model.interaction_layers,
                                                               counts_output=False)))
    for i, group in enumerate(repeated(model.expert_layers)):
        made = known(EXPERT_BLOCKS, group, "expert layer")(group, model.interaction_hidden[-1])
        found.append(Region(name=f"experts.{i}", count=1, block=made))
    found.append(Region(name="heads", count=1, block=Heads(model.interaction_hidden[-1], model.heads)))
    return tuple(found)


def repeated(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """Every block of the groups by itself."""
    return tuple(dataclasses.replace(group, count=1) for group in groups for _ in range(group.count))


def num_reading(model: Model) -> int:
    """Interaction layers up to the last one that reads a history: what comes behind them has no more to do with events."""
    return max((i + 1 for i, layer in enumerate(repeated(model.interaction_layers)) if layer.sequence is not None), default=0)


def over_samples(model: Model) -> frozenset[str]:
    """Names of the regions behind the last one that reads a history; a micro-batch has as many samples as any other, so their shapes never change."""
    reading = num_reading(model)
    named = {f"interaction.{i}" for i in range(reading)} | ({"bottom"} if reading else set())
    return frozenset(r.name for r in regions(model) if not r.sequence and r.name not in named)


def num_dense_parameters(model: Model) -> int:
    """Parameters outside the tables."""
    return sum(r.num_parameters for r in regions(model))


def default_region_plans(model: Model, *, precision: str = "fp32", checkpoint: str = "none") -> tuple[RegionPlan, ...]:
    """One option for all: every block of every region under `precision` and `checkpoint`."""
    return tuple(RegionPlan(region=r.name, options=(RegionOption(count=r.count, precision=precision, checkpoint=checkpoint),))
                 for r in regions(model))


def match_regions(model: Model, pattern: str) -> tuple[Region, ...]:
    """Regions whose name matches a glob (`history.*`); ValueError with a near name when none does."""
    found = tuple(r for r in regions(model) if fnmatch.fnmatchcase(r.name, pattern))
    if not found:
        names = [r.name for r in regions(model)]
        raise ValueError(f"no region matches {pattern!r}{suggest(pattern, names)}; regions: {', '.join(names)}")
    return found
