"""What a user may write: pydantic models of the device, cluster, model and workload files, made from the cost model's dataclasses.

A file's keys are the dataclass's fields, so a new field of a noun can be written in files at once. Fields with a unit are written as quantities
(`memory: 141 GB`) under the name in `_QUANTITIES`; each becomes an SI float exactly once, here.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import pydantic

from costmodel import units
from costmodel.cluster import Cluster, Device, LinkTier, Price, Reliability
from costmodel.model import Model, TableGroup
from costmodel.workload import Workload

# dataclass field -> (key in files, kind of quantity)
_QUANTITIES: dict[type, dict[str, tuple[str, units.Kind]]] = {
    Device: {
        "peak_flops": ("peak_flops", "FLOP/s"),
        "memory_bytes": ("memory", "bytes"),
        "memory_bandwidth": ("memory_bandwidth", "bytes/s"),
        "l2_bytes": ("l2", "bytes"),
        "host_link_bandwidth": ("host_link_bandwidth", "bytes/s"),
        "power": ("power", "watts"),
    },
    LinkTier: {"bandwidth": ("bandwidth", "bytes/s"), "latency": ("latency", "seconds")},
    Reliability: {
        "restart_seconds": ("restart", "seconds"),
        "startup_seconds": ("startup", "seconds"),
        "checkpoint_bandwidth": ("checkpoint_bandwidth", "bytes/s"),
    },
    Price: {"dollars_per_device_hour": ("per_device_hour", "$/h")},
    Cluster: {"host_memory_bytes": ("host_memory", "bytes"), "memory_budget": ("memory_budget", "bytes")},
}
FIGURES: dict[type, tuple[str, ...]] = {
    Device: ("num_sms", "l2_bytes", "host_link_bandwidth"),
    LinkTier: ("oversubscription",),
    Cluster: ("reliability",),
    Reliability: ("failures_per_device_hour", "restart_seconds", "startup_seconds", "checkpoint_bandwidth"),
    TableGroup: ("ids_per_sample", "zipf", "dtype", "optimizer"),
}
"""Fields whose defaults are facts about somebody's job or machine: a prediction that rests on one says so, and `--strict` refuses it."""
# NaN and infinity are YAML numbers, but no quantity of a model or a machine.
Number = Annotated[float, pydantic.Strict(), pydantic.AllowInfNan(False)]
_STRICT = {int: pydantic.StrictInt, float: Number, str: pydantic.StrictStr, bool: pydantic.StrictBool}


class FileModel(pydantic.BaseModel):
    """A part of a user's file; unknown keys are errors. `build` makes the value object `target`, whose own checks become faults of the file."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, populate_by_name=False)
    target: ClassVar[type]

    @pydantic.model_validator(mode="after")
    def _builds(self) -> FileModel:
        self.build()
        return self

    def build(self) -> Any:
        return self.target(**{name: _built(getattr(self, name)) for name in type(self).model_fields})


def _built(value: Any) -> Any:
    if isinstance(value, FileModel):
        return value.build()
    if isinstance(value, tuple):
        return tuple(_built(v) for v in value)
    if isinstance(value, dict):
        return {k: _built(v) for k, v in value.items()}
    return value


def quantity(kind: units.Kind) -> Any:
    """An annotated float that is written with its unit."""
    schema = {
        "anyOf": [{"type": "string", "pattern": r"^\s*[+-]?[0-9_.]+([eE][+-]?[0-9]+)?\s*\S+\s*$", "examples": [units.EXAMPLES[kind]]}, {"const": 0}],
        "description": f"a quantity in {kind}",
    }
    return Annotated[float, pydantic.BeforeValidator(lambda value: _not_negative(value, kind)), pydantic.WithJsonSchema(schema)]


def _not_negative(value: Any, kind: units.Kind) -> float:
    parsed = units.parse(value, kind)
    if parsed < 0:
        raise ValueError(f"{value!r} is negative; a quantity >= 0 is needed")
    return parsed


@functools.cache
def file_model(cls: type) -> type[FileModel]:
    """The pydantic model of a frozen dataclass of the cost model."""
    hints = typing.get_type_hints(cls)
    quantities = _QUANTITIES.get(cls, {})
    definitions: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key, kind = quantities.get(field.name, (field.name, None))
        hint = _file_hint(hints[field.name], quantity(kind) if kind else None)
        options: dict[str, Any] = {"alias": key} if key != field.name else {}
        if field.default is not dataclasses.MISSING:
            default = field.default
            options["default"] = file_model(type(default)).model_construct(**_attributes(default)) if dataclasses.is_dataclass(default) else default
        elif field.default_factory is not dataclasses.MISSING:
            options["default_factory"] = field.default_factory
        definitions[field.name] = (hint, pydantic.Field(**options))
    made = pydantic.create_model(cls.__name__, __base__=FileModel, __doc__=cls.__doc__, **definitions)
    made.target = cls
    return made


def defaults(part: FileModel, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, value) of every field of `FIGURES` in a file that was left out and took its default; what a part does not use is not asked for."""
    for name, field in type(part).model_fields.items():
        value, path = getattr(part, name), (*at, field.alias or name)
        if name not in part.model_fields_set:
            if name in FIGURES.get(part.target, ()) and not _unused(part, name):
                yield path, value
        elif isinstance(value, FileModel):
            yield from defaults(value, path)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, FileModel):
                    yield from defaults(item, (*path, index))


def _unused(part: FileModel, name: str) -> bool:
    if part.target is TableGroup:
        return name == "ids_per_sample" and getattr(part, "pooling", None) == "sequence"  # one id an event
    if part.target is LinkTier:
        return getattr(part, "scope", None) == "host"
    return part.target is Device and getattr(part, "kind", None) == "cpu"


def _attributes(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _file_hint(hint: Any, unit: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_file_hint(a, unit) for a in args)]  # noqa: UP007
    if origin is tuple:
        return tuple[tuple(a if a is Ellipsis else _file_hint(a, unit) for a in args)]
    if origin is dict:
        return dict[str, _file_hint(args[1], unit)]
    if dataclasses.is_dataclass(hint):
        return file_model(typing.cast(type, hint))
    if hint is float and unit is not None:
        return unit
    return _STRICT.get(hint, hint)


DeviceFile, ClusterFile, ModelFile, WorkloadFile = (file_model(c) for c in (Device, Cluster, Model, Workload))
