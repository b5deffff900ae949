"""Scenario files: a cluster, a model, a workload, and what is already decided.

    cluster: 8xh200                     # a bundled name, a path, or the content itself
    model: gem-small
    workload: gem-small
    memory_budget: 100 GB               # per rank; default: the device's memory
    layout: {fsdp: 8}                   # pins; anything not pinned is searched
    local_batch: 256
    precision: {"history.*": bf16}      # region name or glob -> number format
    checkpoint: {"heads": none}         # region name or glob -> policy
    sharding: {"user*": row_wise}       # table name or glob -> sharding type
    exclude: {checkpoint: {"*": [full]}, batching: [padded]}
    search: {time_limit: 20 s, gap: 0.01, top: 5}
    tolerance: 0.35                     # `run` warns when the step is further from its prediction than this share
    variants:
      - {name: faster NICs, set: {cluster.tiers.rdma.bandwidth: 100 GB/s}}
    vary: {model.dim: [512, 1024]}      # cartesian product, in addition to `variants`

A dotted key reaches into the cluster, model and workload files too; items of lists are named by index or `name`.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from costmodel.cluster import Cluster
from costmodel.codec import suggest
from costmodel.model import Model
from costmodel.plan import Batching, Checkpoint, Precision, RecipeOption, Sharding, Wire
from costmodel.units import show
from costmodel.workload import Workload
from planner import catalogue
from planner.errors import Fault, FileError
from planner.files import Document, Path_, check, dotted, load, locate
from planner.spec import ClusterFile, FileModel, ModelFile, Number, WorkloadFile, defaults, quantity

_DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_SLOTS = {"cluster": "clusters", "model": "models", "workload": "workloads"}
Count = pydantic.StrictInt
Transport = Literal["nccl", "ncclx", "copy_engine", "gloo"]
Execution = Literal["eager", "compile", "cuda_graph"]
# Beyond these a typing error is likelier than a job, and figures would take minutes.
_MOST_VARIANTS, _MOST_BLOCKS, _MOST_RANKS, _MOST_SAMPLES = 1000, 10_000, 2**20, 2**32
# Keys of a scenario that a variant cannot set: they say what is compared, not what is planned.
_NOT_VARIED = ("name", "description", "variants", "vary")


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class LayoutPins(_Part):
    """Fields of a layout that are fixed; see `costmodel.plan.Layout`."""

    ddp: Count | None = pydantic.Field(default=None, ge=1)
    fsdp: Count | None = pydantic.Field(default=None, ge=1)
    ep: Count | None = pydantic.Field(default=None, ge=1)
    expert_all_to_all: pydantic.StrictBool | None = None
    sparse_group: Count | None = pydantic.Field(default=None, ge=1)
    sparse_replicas: Count | None = pydantic.Field(default=None, ge=1)
    fully_sharded_2d: pydantic.StrictBool | None = None
    sync_every: Count | None = pydantic.Field(default=None, ge=1)
    reshard_after_forward: pydantic.StrictBool | None = None


class ExcludeFile(_Part):
    """Options that the search may not use: per region or table glob, and for the whole job."""

    precision: dict[str, tuple[Precision, ...]] = {}
    checkpoint: dict[str, tuple[Checkpoint, ...]] = {}
    sharding: dict[str, tuple[Sharding, ...]] = {}
    batching: tuple[Batching, ...] = ()
    transport: tuple[Transport, ...] = ()
    execution: tuple[Execution, ...] = ()
    layouts: tuple[LayoutPins, ...] = ()


class SearchFile(_Part):
    time_limit: quantity("seconds") = 20.0  # type: ignore[valid-type]
    gap: Number = pydantic.Field(default=0.01, ge=0, lt=1)
    top: Count = pydantic.Field(default=5, ge=1)
    predict_only: pydantic.StrictBool = False
    risk_budget: Number | None = pydantic.Field(default=None, ge=0)
    sensitivity: pydantic.StrictStr | None = None


class VariantFile(_Part):
    name: pydantic.StrictStr
    set: dict[str, Any]


class ScenarioFile(_Part):
    """A scenario; module docstring of `planner.scenario` shows one."""

    name: pydantic.StrictStr | None = None
    description: pydantic.StrictStr = ""
    cluster: ClusterFile
    model: ModelFile
    workload: WorkloadFile
    memory_budget: quantity("bytes") | None = None  # type: ignore[valid-type]
    layout: LayoutPins = LayoutPins()
    local_batch: Count | None = pydantic.Field(default=None, ge=1)
    accumulation: Count | None = pydantic.Field(default=None, ge=1)
    batching: Batching | None = None
    transport: Transport | None = None
    execution: Execution | None = None
    precision: dict[str, Precision] = {}
    checkpoint: dict[str, Checkpoint] = {}
    sharding: dict[str, Sharding] = {}
    wire: Wire | None = None
    wire_gradients: Wire | None = None
    gather_dtype: Literal["fp8"] | None = None
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    recipe: tuple[RecipeOption, ...] = ()
    moment_scaled: bool = False
    exclude: ExcludeFile = ExcludeFile()
    search: SearchFile = SearchFile()
    tolerance: Number = pydantic.Field(default=0.35, gt=0)
    ne_tolerance: Number = pydantic.Field(default=0.0005, gt=0)
    seed: Count = pydantic.Field(default=0, ge=0)
    input_overlap: bool | None = None
    tables_ahead: Count | None = pydantic.Field(default=None, ge=0)
    variants: tuple[VariantFile, ...] = ()
    vary: dict[str, Annotated[tuple[Any, ...], pydantic.Field(min_length=1)]] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exclusions:
    """Options that may not be used. Globs over region or table names -> options; `layouts` are partial layouts (field -> value)."""

    precision: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    checkpoint: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    sharding: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    batching: tuple[str, ...] = ()
    transport: tuple[str, ...] = ()
    execution: tuple[str, ...] = ()
    layouts: tuple[dict[str, int | bool], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What the scenario has decided already. `layout`: fields of Layout; the globs map names to one option, the first that matches counts."""

    layout: dict[str, int | bool] = dataclasses.field(default_factory=dict)
    local_batch: int | None = None
    accumulation: int | None = None
    batching: str | None = None
    transport: str | None = None
    execution: str | None = None
    precision: dict[str, str] = dataclasses.field(default_factory=dict)
    checkpoint: dict[str, str] = dataclasses.field(default_factory=dict)
    sharding: dict[str, str] = dataclasses.field(default_factory=dict)
    wire: str | None = None
    wire_gradients: str | None = None
    gather_dtype: str | None = None
    reduce_dtype: str = "fp32"
    moment_scaled: bool = False
    recipe: tuple[str, ...] = ()
    exclude: Exclusions = Exclusions()

    def option(self, what: Literal["precision", "checkpoint", "sharding"], name: str) -> str | None:
        """The pinned option of a region or table, or None."""
        return next((option for glob, option in getattr(self, what).items() if _matches(name, glob)), None)

    def excluded(self, what: Literal["precision", "checkpoint", "sharding"], name: str) -> frozenset[str]:
        """All options that are excluded for a region or table."""
        globs = getattr(self.exclude, what)
        return frozenset(o for glob, options in globs.items() if _matches(name, glob) for o in options)


def _matches(name: str, glob: str) -> bool:
    """Whether a glob, or a name that has a glob's letters in it, means `name`."""
    return name == glob or fnmatch.fnmatchcase(name, glob)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """`time_limit` [s], `gap`: relative gap at which the search may stop, `top`: plans to keep.

    `predict_only` admits options that no code here can execute (the plan says so and `run` refuses it). `risk_budget`: numeric risk that all
    blocks together may take (`planner.space.RISK`); None: no limit, and nothing below 16 bits unless pinned. `sensitivity`: the file of `planner
    sensitivity` whose figures the budget uses.
    """

    time_limit: float = 20.0
    gap: float = 0.01
    top: int = 5
    predict_only: bool = False
    risk_budget: float | None = None
    sensitivity: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One dotted key that a variant sets, and its value before, as written."""

    key: str
    before: Any
    after: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A figure that a file left out: where it would be written, its dotted path, and the value taken (`planner.spec.FIGURES`)."""

    where: str
    path: str
    value: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScenario:
    """A scenario in value objects. `variants` are whole scenarios of their own with `changes` against this one; `defaults`: figures that
    its files left out."""

    name: str
    cluster: Cluster
    model: Model
    workload: Workload
    pins: Pins = Pins()
    search: SearchOptions = SearchOptions()
    tolerance: float = 0.35
    ne_tolerance: float = 0.0005
    seed: int = 0
    input_overlap: bool | None = None
    tables_ahead: int | None = None
    path: Path | None = None
    description: str = ""
    changes: tuple[Change, ...] = ()
    variants: tuple[ResolvedScenario, ...] = ()
    defaults: tuple[LeftOut, ...] = ()


def load_scenario(reference: Path | str, *, with_variants: bool = True) -> ResolvedScenario:
    """Reads, resolves and checks a scenario. Raises FileError with file:line:column, dotted path and what is wrong."""
    try:
        path = catalogue.scenario_path(str(reference))
    except ValueError as error:
        raise FileError([Fault(position=None, path="", message=str(error))]) from error
    document = load(path)
    if not isinstance(document.data, dict):
        raise FileError([document.fault((), "a scenario is a mapping with `cluster`, `model` and `workload`")])
    base = _resolve(document, ())
    if not with_variants:
        return base
    variants = []
    for name, sets in _variants(document):
        try:
            variants.append(dataclasses.replace(_resolve(document, sets), name=name))
        except FileError as error:
            raise FileError([dataclasses.replace(f, message=f"{f.message} (in variant {name!r})") for f in error.faults]) from error
    return dataclasses.replace(base, variants=tuple(variants))


def combined(reference: Path | str, names: Sequence[str]) -> ResolvedScenario:
    """The scenario with several of its variants applied together; where two set one key, the later of `names` counts."""
    document = load(catalogue.scenario_path(str(reference)))
    known = dict(_variants(document))
    sets = {key: (key, value, origin) for name in names for key, value, origin in known[name]}
    return dataclasses.replace(_resolve(document, tuple(sets.values())), name=" + ".join(names) or _resolve(document, ()).name)


def _variants(document: Document) -> list[tuple[str, tuple[tuple[str, Any, Path_], ...]]]:
    """(name, ((dotted key, value, where it is written), ...)) of each item of `variants` and of the product in `vary`."""
    found: list[tuple[str, tuple[tuple[str, Any, Path_], ...]]] = []
    faults: list[Fault] = []
    for index, variant in enumerate(document.data.get("variants") or ()):
        found.append((variant["name"], tuple((key, value, ("variants", index, "set", key)) for key, value in variant["set"].items())))
    vary = document.data.get("vary") or {}
    if vary:
        for values in itertools.product(*vary.values()):
            sets = tuple((key, value, ("vary", key)) for key, value in zip(vary, values))
            found.append((", ".join(f"{key.rsplit('.', 1)[-1]}={_text(value)}" for key, value, _ in sets), sets))
    seen: set[str] = set()
    for name, sets in found:
        if name in seen:
            faults.append(document.fault(sets[0][2][:2] if sets else ("variants",), f"two variants are named {name!r}"))
        seen.add(name)
        faults += [document.fault(origin, f"a variant cannot set {key}") for key, _, origin in sets if key.split(".")[0] in _NOT_VARIED]
    if len(found) > _MOST_VARIANTS:
        faults.append(document.fault(("vary",), f"{len(found):,} variants; at most {_MOST_VARIANTS} are compared at once"))
    if faults:
        raise FileError(faults)
    return found


def _text(value: Any) -> str:
    return str(value.get("name", value)) if isinstance(value, dict) else str(value)


def _resolve(document: Document, sets: tuple[tuple[str, Any, Path_], ...]) -> ResolvedScenario:
    source = document.copy()
    changes = []
    for key, value, origin in sorted(sets, key=lambda s: s[0].count(".")):
        _expand_on_the_way(source, key)
        target = locate(source, key, origin)
        changes.append(Change(key=key, before=_previous(source, target), after=value))
        source.get(target[:-1])[target[-1]] = value
        place = source.where(origin)
        for old in [p for p in source.positions if p[: len(target)] == target]:
            del source.positions[old]
        if place:
            source.positions[target] = place
    for slot in _SLOTS:
        _expand(source, (slot,), _SLOTS[slot])
    _expand_cluster(source)
    _expand_lengths(source)
    parsed = check(ScenarioFile, source)
    scenario = _convert(parsed, source, tuple(changes))
    _cross_check(scenario, source)
    return scenario


def _previous(document: Document, path: Path_) -> Any:
    parent = document.get(path[:-1])
    if isinstance(parent, list):
        return parent[path[-1]]  # type: ignore[index]
    return parent.get(path[-1]) if isinstance(parent, dict) else None


def _expand_on_the_way(document: Document, key: str) -> None:
    parts = key.split(".")
    if parts[0] in _SLOTS and len(parts) > 1:
        _expand(document, (parts[0],), _SLOTS[parts[0]])
        if parts[0] == "cluster" and parts[1] == "device" and len(parts) > 2:
            _expand_cluster(document)


def _expand(document: Document, path: Path_, kind: str) -> None:
    """Puts the content of the file that a string at `path` names in its place."""
    parent = document.get(path[:-1])
    reference = parent.get(path[-1]) if isinstance(parent, dict) else None
    if not isinstance(reference, str):
        return
    place = document.where(path)
    try:
        file = catalogue.find(kind, reference, place.file if place else document.file)
    except ValueError as error:
        raise FileError([document.fault(path, str(error))]) from error
    document.graft(path, load(file))


def _expand_cluster(document: Document) -> None:
    cluster = document.data.get("cluster")
    if isinstance(cluster, dict) and cluster.get("device") == "detected":
        from planner.machine import device_document

        document.graft(("cluster", "device"), device_document())
    elif isinstance(cluster, dict):
        _expand(document, ("cluster", "device"), "devices")


def _expand_lengths(document: Document) -> None:
    """`lengths: {history: {file: lengths.csv}}`: a CSV with the columns `length,weight` becomes a histogram."""
    workload = document.data.get("workload")
    lengths = workload.get("lengths") if isinstance(workload, dict) else None
    for name, spec in (lengths or {}).items() if isinstance(lengths, dict) else ():
        if isinstance(spec, dict) and "file" in spec:
            path = ("workload", "lengths", name, "file")
            place = document.where(path)
            file = (place.file if place else document.file).parent / str(spec["file"])
            spec.update(_read_histogram(file, document, path))
            del spec["file"]


def _read_histogram(file: Path, document: Document, path: Path_) -> dict[str, Any]:
    import csv

    try:
        with file.open(newline="") as stream:
            rows = [(int(row["length"]), float(row["weight"])) for row in csv.DictReader(stream)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise FileError([document.fault(path, f"{file}: a CSV file with the columns length,weight is needed ({error})")]) from error
    if not rows:
        raise FileError([document.fault(path, f"{file}: no rows")])
    values, weights = [r[0] for r in rows], [r[1] for r in rows]
    return {"kind": "histogram", "minimum": min(values), "maximum": max(values), "values": values, "weights": weights}


def _convert(parsed: ScenarioFile, document: Document, changes: tuple[Change, ...]) -> ResolvedScenario:
    cluster: Cluster = parsed.cluster.build()
    for key, value in (("memory_budget", parsed.memory_budget), ("search.time_limit", parsed.search.time_limit)):
        if value == 0:
            raise FileError([document.fault(tuple(key.split(".")), "must be > 0")])
    if parsed.memory_budget is not None:
        cluster = dataclasses.replace(cluster, memory_budget=parsed.memory_budget)
    if cluster.memory_budget is not None and cluster.memory_budget > cluster.device.memory_bytes:
        where: Path_ = ("memory_budget",) if parsed.memory_budget is not None else ("cluster", "memory_budget")
        have, asked = show(cluster.device.memory_bytes, "bytes"), show(cluster.memory_budget, "bytes")
        raise FileError([document.fault(where, f"{asked} is more than the {have} of a {cluster.device.name}; without a budget all of it is used")])
    exclude = Exclusions(
        **{
            **{name: getattr(parsed.exclude, name) for name in ExcludeFile.model_fields},
            "layouts": tuple(part.model_dump(exclude_none=True) for part in parsed.exclude.layouts),
        }
    )
    pins = Pins(
        layout=parsed.layout.model_dump(exclude_none=True),
        exclude=exclude,
        **{
            name: getattr(parsed, name)
            for name in ("local_batch", "accumulation", "batching", "transport", "execution", "precision", "checkpoint", "sharding", "wire",
                         "wire_gradients", "gather_dtype", "reduce_dtype", "recipe", "moment_scaled")
        },
    )
    left_out = [((slot, *path), value) for slot in _SLOTS for path, value in defaults(getattr(parsed, slot))]
    search = SearchOptions(**{name: getattr(parsed.search, name) for name in SearchFile.model_fields})
    if parsed.search.sensitivity is not None:
        search = dataclasses.replace(search, sensitivity=document.file.parent / parsed.search.sensitivity)
    return ResolvedScenario(
        name=parsed.name or document.file.stem,
        description=parsed.description,
        cluster=cluster,
        model=parsed.model.build(),
        workload=parsed.workload.build(),
        pins=pins,
        search=search,
        tolerance=parsed.tolerance,
        ne_tolerance=parsed.ne_tolerance,
        seed=parsed.seed,
        input_overlap=parsed.input_overlap,
        tables_ahead=parsed.tables_ahead,
        path=document.file,
        changes=changes,
        defaults=tuple(
            LeftOut(where=str(document.where(path) or ""), path=dotted(path, document.data), value=_default(value)) for path, value in left_out
        ),
    )


def _default(value: Any) -> str:
    return "no failures and no slow hosts" if isinstance(value, FileModel) else f"{value:g}" if isinstance(value, float) else str(value)


def defaults_taken(scenario: ResolvedScenario, *, strict: bool = False) -> str:
    """One line about the figures that were left out, counted by field; empty when there are none. Raises FileError with all of them when `strict`."""
    if strict and scenario.defaults:
        shown = [f"{d.where}: {d.path}: left out, taken as {d.value}" for d in scenario.defaults]
        raise FileError([Fault(position=None, path="", message=text) for text in shown])
    counts = collections.Counter((d.path.rsplit(".", 1)[-1], d.value) for d in scenario.defaults)
    words = [f"{name} {value}" + (f" ({n} times)" if n > 1 else "") for (name, value), n in counts.items()]
    return f"defaults taken, which --strict refuses: {', '.join(words)}" if words else ""


def _cross_check(scenario: ResolvedScenario, document: Document) -> None:
    """What only the parts together can show: pins that match nothing, lengths of unknown sequences, layouts that do not fit the cluster."""
    faults: list[Fault] = []
    sequences = [s.name for s in scenario.model.sequences]
    for name in scenario.workload.lengths:
        if name not in sequences:
            faults.append(
                document.fault(
                    ("workload", "lengths", name),
                    f"model {scenario.model.name} has no sequence {name!r}{suggest(name, sequences)}; sequences: {', '.join(sequences) or 'none'}",
                )
            )
    for name in sequences:
        if name not in scenario.workload.lengths:
            faults.append(
                document.fault(("workload", "lengths", name), f"model {scenario.model.name} has a sequence {name!r}, but its lengths are not given")
            )
    tables = [n for group in scenario.model.tables for n in group.names]
    groups = [group.name for group in scenario.model.tables]
    for name in scenario.workload.zipf:
        if name not in tables and name not in groups:
            faults.append(document.fault(("workload", "zipf", name), f"model {scenario.model.name} has no table {name!r}{suggest(name, groups)}"))
    if not _DEVICE_NAME.fullmatch(scenario.cluster.device.name):
        faults.append(
            document.fault(("cluster", "device", "name"), f"{scenario.cluster.device.name!r}: it names files; letters, digits and `._+-` are allowed")
        )
    named = [("tables", groups), ("sequences", sequences), ("heads", [h.name for h in scenario.model.heads])]
    for what, names in named:
        for index, name in enumerate(names):
            if not name.strip() or not name.isprintable():
                faults.append(document.fault(("model", what, index), f"{name!r}: a name needs letters, and no control characters"))
    faults += _pin_faults(scenario, document, tables)
    faults += _layout_faults(scenario, document)
    if faults:
        raise FileError(faults)


def _pin_faults(scenario: ResolvedScenario, document: Document, tables: list[str]) -> list[Fault]:
    from costmodel.regions import regions

    try:
        known = regions(scenario.model)
    except ValueError as error:  # what a block says of its own numbers
        return [document.fault(("model",), str(error))]
    blocks = sum(r.count for r in known)
    if blocks > _MOST_BLOCKS:
        return [document.fault(("model",), f"{blocks:,} blocks; at most {_MOST_BLOCKS:,} are planned")]
    region_names = [r.name for r in known]
    faults = []
    for what, names, kind in (("precision", region_names, "region"), ("checkpoint", region_names, "region"), ("sharding", tables, "table")):
        for prefix, globs in (((what,), getattr(scenario.pins, what)), (("exclude", what), getattr(scenario.pins.exclude, what))):
            for glob in globs:
                if not any(_matches(name, glob) for name in names):
                    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                    faults.append(
                        document.fault(
                            (*prefix, glob), f"no {kind} of model {scenario.model.name} matches {glob!r}{suggest(glob, names)}; {kind}s: {shown}"
                        )
                    )
    return faults


def _layout_faults(scenario: ResolvedScenario, document: Document) -> list[Fault]:
    world, pins, faults = scenario.cluster.num_ranks, scenario.pins.layout, []
    if world > _MOST_RANKS:
        return [document.fault(("cluster", "num_hosts"), f"{world:,} ranks; at most {_MOST_RANKS:,} are planned")]
    reach = max((scenario.cluster.scope_size(tier.scope) for tier in scenario.cluster.tiers), default=1)
    if reach < world:
        faults.append(document.fault(("cluster", "tiers"), f"the tiers join {reach} of the {world} ranks; a tier of scope cluster joins all"))
    divisors = _divisors(world)
    for key in ("ddp", "fsdp", "sparse_group", "sparse_replicas", "ep"):
        value = pins.get(key, 1)
        if world % value:
            faults.append(
                document.fault(
                    ("layout", key),
                    f"{value} does not divide the {world} ranks of cluster {scenario.cluster.name}; legal: {', '.join(map(str, divisors))}",
                )
            )
    for first, second, what in (("ddp", "fsdp", "dense"), ("sparse_group", "sparse_replicas", "sparse")):
        if first in pins and second in pins and pins[first] * pins[second] != world:
            faults.append(
                document.fault(
                    ("layout", second),
                    f"{what}: {first} {pins[first]} x {second} {pins[second]} = {pins[first] * pins[second]}, "
                    f"but cluster {scenario.cluster.name} has {world} ranks",
                )
            )
    return faults + _batch_faults(scenario, document)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _batch_faults(scenario: ResolvedScenario, document: Document) -> list[Fault]:
    """Pinned micro-batches that cannot make up the global batch."""
    world, pins = scenario.cluster.num_ranks, scenario.pins
    total = scenario.workload.global_batch_on(world)
    if total > _MOST_SAMPLES:
        return [document.fault(("workload", "global_batch"), f"{total:,} samples a step; at most {_MOST_SAMPLES:,} are planned")]
    if total % world:
        near = sorted({max(world, total // world * world), (total // world + 1) * world})
        message = f"{total} samples do not divide over {world} ranks; nearest: {', '.join(map(str, near))}"
        return [document.fault(("workload", "global_batch"), message)]
    per_rank = total // world
    made = (pins.local_batch or 1) * (pins.accumulation or 1)
    if per_rank % made == 0 and (made == per_rank or pins.local_batch is None or pins.accumulation is None):
        return []
    name = "local_batch" if pins.local_batch is not None else "accumulation"
    legal = _divisors(per_rank)
    return [
        document.fault(
            (name,),
            f"{pins.local_batch or 'any'} samples x {world} ranks x accumulation {pins.accumulation or 'any'} cannot make the global batch "
            f"of {total}; legal {name}: {', '.join(map(str, legal))}",
        )
    ]


__all__ = [
    "Change",
    "Exclusions",
    "Pins",
    "ResolvedScenario",
    "ScenarioFile",
    "SearchOptions",
    "combined",
    "defaults_taken",
    "dotted",
    "load_scenario",
]
