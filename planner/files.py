"""YAML files with positions: read, overlay, validate, convert. Every fault carries file:line:column and the dotted path.

A `Document` is plain data plus the position of every key and item. Documents nest (a scenario takes in its cluster's file) and can be overridden key
by key (`set: {cluster.tiers.rdma.bandwidth: 100 GB/s}`) without losing where each value came from. `check` turns a document into a `FileModel`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pydantic
from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.comments import CommentedMap, CommentedSeq, CommentedSet

from costmodel.codec import suggest
from planner.errors import Fault, FileError, Position, UsageError

Path_ = tuple[str | int, ...]
M = TypeVar("M", bound=pydantic.BaseModel)
# Far above any real file (a histogram of 10,000 lengths is 20,000 values); aliases of aliases reach billions in ten lines.
_MOST_NODES = 200_000
_CORE_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge"))
# Characters of a wrong value that an error repeats.
_SHOWN = 80


@dataclasses.dataclass(slots=True, kw_only=True)
class Document:
    """Plain data (dicts, lists, scalars) and where each path of it was written."""

    data: Any
    positions: dict[Path_, Position]
    file: Path

    def where(self, path: Path_) -> Position | None:
        """The position of `path`, or of its nearest parent."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.positions:
                return self.positions[path[:end]]
        return None

    def fault(self, path: Path_, message: str) -> Fault:
        return Fault(position=self.where(path), path=dotted(path, self.data), message=message)

    def get(self, path: Path_) -> Any:
        node = self.data
        for key in path:
            node = node[key]
        return node

    def graft(self, path: Path_, other: Document) -> None:
        """Replaces what is at `path` by another document's content; positions below it are the other file's."""
        for old in [p for p in self.positions if p[: len(path)] == path and len(p) > len(path)]:
            del self.positions[old]
        self.positions.update({path + p: position for p, position in other.positions.items() if p})
        if path:
            self.get(path[:-1])[path[-1]] = other.data
        else:
            self.data = other.data

    def at(self, path: Path_) -> Document:
        """The part at `path` as a document of its own."""
        inside = {p[len(path) :]: position for p, position in self.positions.items() if p[: len(path)] == path}
        return Document(data=self.get(path), positions=inside, file=self.file)

    def copy(self) -> Document:
        return Document(data=_copy(self.data), positions=dict(self.positions), file=self.file)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


def dotted(path: Path_, data: Any = None) -> str:
    """`("tiers", 0, "bandwidth")` as `tiers[0].bandwidth`, or `tiers.rdma.bandwidth` where the item has a name."""
    text, node = "", data
    for key in path:
        node = _child(node, key)
        if isinstance(key, int) and isinstance(node, dict) and isinstance(node.get("name"), str):
            text += f".{node['name']}"
        else:
            text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.lstrip(".")


def _child(node: Any, key: str | int) -> Any:
    try:
        return node[key]
    except (KeyError, IndexError, TypeError):
        return None


def load(path: Path | str) -> Document:
    """Reads a YAML file. Raises FileError: missing, unreadable, not YAML, a key twice, empty."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise FileError([Fault(position=None, path="", message=f"{path}: no such file{suggest(path.name, near)}")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileError([Fault(position=None, path="", message=f"{path}: cannot be read ({error})")]) from error
    return loads(text, path)


def loads(text: str, path: Path | str) -> Document:
    """Parses YAML text that came from `path`."""
    path = Path(path)
    try:
        root = YAML(typ="rt").load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        position = Position(file=path, line=mark.line + 1 if mark else 1, column=mark.column + 1 if mark else 1)
        problem = str(getattr(error, "problem", None) or error).strip().splitlines()[0]
        raise FileError([Fault(position=position, path="", message=f"not YAML: {problem}")]) from error
    except (ValueError, TypeError, RecursionError) as error:  # a tag that does not fit its value, a number of thousands of digits, endless nesting
        words = str(error).splitlines()[0][:_SHOWN] if str(error) else type(error).__name__
        raise FileError([Fault(position=Position(file=path, line=1, column=1), path="", message=f"not YAML: {words}")]) from error
    if root is None:
        raise FileError([Fault(position=Position(file=path, line=1, column=1), path="", message="the file is empty")])
    reader = _Reader(file=path, positions={(): Position(file=path, line=1, column=1)})
    return Document(data=reader.plain(root, ()), positions=reader.positions, file=path)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Reader:
    """Turns what the YAML parser gives into plain data. Raises FileError for what a plain file does not hold: tags, keys that are not text,
    endless aliases, whole numbers beyond 64 bits."""

    file: Path
    positions: dict[Path_, Position]
    nodes: int = 0
    open: set[int] = dataclasses.field(default_factory=set)

    def plain(self, node: Any, at: Path_) -> Any:
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            self.refuse(at[:1], f"more than {_MOST_NODES:,} values, aliases counted where they are used")
        tag = getattr(getattr(node, "tag", None), "value", None)
        if (tag and str(tag) not in _CORE_TAGS) or isinstance(node, (bytes, CommentedSet)):
            self.refuse(at, f"YAML tags (`{tag or '!!binary'}`) are not read; write plain text, numbers, lists and mappings")
        if not isinstance(node, (CommentedMap, CommentedSeq)):
            return self.scalar(node, at)
        if id(node) in self.open:
            self.refuse(at, "an alias inside what it names")
        self.open.add(id(node))
        if isinstance(node, CommentedMap):
            value: Any = {self.key(node, key, at): self.plain(item, (*at, str(key))) for key, item in node.items()}
        else:
            value = [self.plain(item, self.place(node, index, (*at, index))) for index, item in enumerate(node)]
        self.open.discard(id(node))
        return value

    def key(self, node: Any, key: Any, at: Path_) -> str:
        path = self.place(node, key, (*at, str(key)))
        if not isinstance(key, str):
            shown = "null" if key is None else str(key)
            self.refuse(path, f"a key must be text, not {shown[:_SHOWN]}" + (f'; write "{shown}"' if isinstance(key, (int, float)) else ""))
        return str(key)

    def place(self, node: Any, key: Any, path: Path_) -> Path_:
        found = node.lc.data.get(key) if node.lc.data else None
        if found:
            self.positions[path] = Position(file=self.file, line=found[0] + 1, column=found[1] + 1)
        return path

    def scalar(self, node: Any, at: Path_) -> Any:
        if node is None or isinstance(node, bool):
            return node
        if isinstance(node, int) and abs(node) >= 2**63:
            self.refuse(at, "a whole number beyond 64 bits")
        for kind in (int, float, str):
            if isinstance(node, kind):
                return kind(node)
        if isinstance(node, (datetime.date, datetime.datetime)):
            return node.isoformat()
        return self.refuse(at, f"a {type(node).__name__} is neither text nor a number")

    def refuse(self, at: Path_, message: str) -> NoReturn:
        where = next(self.positions[at[:end]] for end in range(len(at), -1, -1) if at[:end] in self.positions)
        raise FileError([Fault(position=where, path=dotted(at), message=message)])


def locate(document: Document, key: str, origin: Path_) -> Path_:
    """The path that a dotted key means; items of lists are named by index or by their `name`. The last part need not exist yet.

    Raises FileError at `origin` (where the key is written in the document) when a part on the way does not exist.
    """
    path: Path_ = ()
    node = document.data
    parts = key.split(".")
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(node, list):
            index = _index(node, part)
            if index is None:
                names = [str(item.get("name")) if isinstance(item, dict) and "name" in item else str(i) for i, item in enumerate(node)]
                raise FileError(
                    [
                        Fault(
                            position=document.where(origin),
                            path=key,
                            message=f"no item {part!r} in {dotted(path, document.data)}{suggest(part, names)}; items: {', '.join(names)}",
                        )
                    ]
                )
            path, node = (*path, index), node[index]
        elif isinstance(node, dict):
            # A mapping with a default (e.g. `reliability`) that the file left out is made on the way; a misspelt one is caught by `check`.
            if not last and node.get(part) is None:
                node[part] = {}
            path, node = (*path, part), node.get(part)
        else:
            raise FileError(
                [Fault(position=document.where(origin), path=key, message=f"{dotted(path, document.data)} is {node!r}, it has no {part!r}")]
            )
    return path


def _index(items: list[Any], part: str) -> int | None:
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("name") == part:
            return index
    return int(part) if part.isdigit() and int(part) < len(items) else None


def check(model: type[M], document: Document, path: Path_ = ()) -> M:
    """Validates `document` (at `path`) against a pydantic model. Raises FileError with every fault."""
    try:
        return model.model_validate(document.get(path))
    except pydantic.ValidationError as error:
        raise FileError([_fault(document, model, path, e) for e in error.errors()]) from error


def _fault(document: Document, model: type[pydantic.BaseModel], base: Path_, error: Any) -> Fault:
    loc = _existing(document, base, error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    message = error["msg"]
    if kind == "extra_forbidden":
        known = _fields(model, error["loc"][:-1])
        message = f"unknown key{suggest(str(error['loc'][-1]), known)}" + (f"; known: {', '.join(sorted(known))}" if known else "")
    elif kind == "too_short":
        message = f"at least {context['min_length']} value is needed"
    elif kind == "missing":
        message = "missing"
    elif kind in ("value_error", "assertion_error"):
        message = str(context.get("error", message))
    elif kind == "literal_error":
        options = [o.strip("'") for o in context["expected"].replace(" or ", ", ").split(", ")]
        message = f"{_shown(error['input'])} is none of {', '.join(options)}{suggest(str(error['input']), options)}"
    else:
        words = message.split(" or instance of")[0].replace("dictionary", "mapping").replace("tuple", "list")
        message = f"{words[0].lower()}{words[1:]}, not {_shown(error['input'])}"
    return document.fault(loc, message)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _existing(document: Document, base: Path_, loc: tuple[Any, ...]) -> Path_:
    """Drops what pydantic adds to a location (names of union members) and keeps a missing last key."""
    path, node = base, document.get(base)
    for number, key in enumerate(loc):
        if (isinstance(node, dict) and key in node) or (isinstance(node, list) and isinstance(key, int) and key < len(node)):
            path, node = (*path, key), node[key]
        elif number == len(loc) - 1 and isinstance(node, dict):
            path = (*path, key)
    return path


def _fields(model: Any, loc: tuple[Any, ...]) -> list[str]:
    """Keys that the model at `loc` knows, following fields by name or alias."""
    import typing

    for key in loc:
        if isinstance(key, int):
            continue
        if isinstance(model, type) and issubclass(model, pydantic.BaseModel):
            field = next((f for n, f in model.model_fields.items() if key in (n, f.alias)), None)
            model = field.annotation if field else model
        stack, found = [model], None
        while stack:
            hint = stack.pop()
            if isinstance(hint, type) and issubclass(hint, pydantic.BaseModel):
                found = found or hint
            stack.extend(typing.get_args(hint))
        model = found or model
    if isinstance(model, type) and issubclass(model, pydantic.BaseModel):
        return [f.alias or n for n, f in model.model_fields.items()]
    return []


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A temporary file in the target's folder that takes the target's place when the block ends well, and vanishes otherwise."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path | str) -> None:
    """Raises UsageError when no file could be made in or below `path`, before anything is computed for it; makes nothing."""
    path = Path(path)
    nearest = next((p for p in (path, *path.absolute().parents) if p.exists()), Path("/"))
    if not nearest.is_dir():
        raise UsageError(f"{path}: {nearest} is no folder")
    if not os.access(nearest, os.W_OK | os.X_OK) or os.statvfs(nearest).f_flag & os.ST_RDONLY:
        raise UsageError(f"{path}: {nearest} cannot be written to")


def write_text(path: Path | str, text: str) -> None:
    """Writes through a temporary file; a reader never sees half of it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
