"""Frozen dataclasses to and from plain JSON values, strictly, and the content hash of the result.

`decode` refuses unknown and missing keys and values of the wrong type with the dotted path of the fault, so that every file that crosses from the
planner to the runtime (plan.json, calibration, samples) is checked by one mechanism.
"""
from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")
_SCALARS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


class DecodeError(ValueError):
    """A value that does not fit its dataclass; `path` is dotted, e.g. `layout.fsdp`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path or 'document'}: {message}")
        self.path = path
        self.message = message


# Metadata of a field that came later: None is left out, so that the hashes in files and checkpoints of before still hold.
LATER = {"later": True}


def encode(value: Any) -> Any:
    """Dataclasses to dicts, tuples to lists; the field order is that of the class, None fields are kept, those with the metadata `LATER` are not."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if not f.metadata or _told(f, getattr(value, f.name))}
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    return value


def _told(field: dataclasses.Field, value: Any) -> bool:
    return not (field.metadata.get("later") and value is None)


def canonical(value: Any) -> str:
    """One text per content: sorted keys, no spaces, whole floats as integers (600 and 600.0 are one content). NaN and infinities are refused."""
    return json.dumps(_whole(encode(value)), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {k: _whole(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_whole(v) for v in value]
    return value


def content_hash(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of `canonical(value)`."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def decode(cls: type[T], value: Any, path: str = "") -> T:
    """Builds `cls` (a dataclass) from a plain dict. Raises DecodeError naming the dotted path."""
    return _decode(cls, value, path)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(hint, value, path)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise DecodeError(path, f"{value!r} is none of {', '.join(map(repr, typing.get_args(hint)))}{suggest(str(value), typing.get_args(hint))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise DecodeError(path, f"a list is needed, not {value!r}")
        args = typing.get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
        if len(args) != len(value):
            raise DecodeError(path, f"{len(args)} values are needed, not {len(value)}")
        return tuple(_decode(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value)))
    if origin is dict:
        if not isinstance(value, dict):
            raise DecodeError(path, f"a mapping is needed, not {value!r}")
        _, item = typing.get_args(hint)
        return {str(k): _decode(item, v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, value, path)
    return _decode_scalar(hint, value, path)


def _decode_union(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint)
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, value, path)
        except DecodeError as error:
            errors.append(error)
    raise errors[-1]


def _decode_dataclass(cls: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value) and isinstance(value, cls):
        return value
    if not isinstance(value, dict):
        raise DecodeError(path, f"a mapping is needed, not {value!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = _hints(cls)
    for key in value:
        if key not in fields:
            raise DecodeError(f"{path}.{key}".lstrip("."), f"unknown key{suggest(str(key), fields)}")
    for name, f in fields.items():
        if name not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{path}.{name}".lstrip("."), "missing")
    try:
        return cls(**{k: _decode(hints[k], v, f"{path}.{k}".lstrip(".")) for k, v in value.items()})
    except DecodeError:
        raise
    except ValueError as error:
        raise DecodeError(path, str(error)) from error


def _decode_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise DecodeError(path, f"a finite number is needed, not {value!r}")
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    if hint in (int, float, str, bool):
        raise DecodeError(path, f"{_SCALARS[hint]} is needed, not {value!r}")
    raise TypeError(f"{path}: cannot decode into {hint!r}")


def suggest(word: str, known: Any) -> str:
    """` (did you mean 'x'?)` when a known word is near, else an empty string."""
    near = difflib.get_close_matches(word, [str(k) for k in known], n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
