"""Rows of published measurements: the CSV schema of docs/published.md, read strictly.

A row that breaks the schema is a fault of the file (`TableError` names every one with its line and column). A row that is well-formed but asks for
something that the model language, a layout or a plan does not have is no fault: `predict` lists it as not expressible.
"""
from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from costmodel.codec import suggest

KINDS = ("step", "kernel")
PHASES = ("forward", "backward", "step")


class TableError(ValueError):
    """All faults of one file, a line each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row. SI inside: bytes, bytes/s, FLOP/s, seconds, watts; None where the cell is empty."""

    where: str
    id: str
    kind: str
    source: str
    device: str
    note: str = ""
    # what differs from the named device's datasheet
    memory_bytes: float | None = None
    memory_bandwidth: float | None = None
    peak_flops: float | None = None
    power: float | None = None
    # a step
    model: str = ""
    gpus: int | None = None
    hosts: int = 1
    local_batch: int | None = None
    accumulation: int = 1
    sequence_length: int | None = None
    layout: tuple[tuple[str, str], ...] = ()
    precision: tuple[tuple[str, str], ...] = ()
    checkpoint: tuple[tuple[str, str], ...] = ()
    execution: str = "eager"
    exchange: str = "rows"
    wire: str = ""
    reduce: str = "fp32"
    attention: str = "torch"
    fusion: str = ""
    loss: str = "eager"
    optimizer: str = "adamw"
    overlap: str = "none"
    table_update: str = "fused"
    link_bandwidth: float | None = None
    nic_bandwidth: float | None = None
    step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    samples_per_second: float | None = None
    peak_memory: float | None = None
    # a kernel
    op: str = ""
    variant: str = ""
    phase: str = ""
    dtype: str = ""
    features: tuple[tuple[str, str], ...] = ()
    kernel_seconds: float | None = None

    @property
    def configuration(self) -> tuple:
        """All that a prediction depends on: rows of one configuration are measurements of one point."""
        skipped = ("where", "id", "source", "note", "step_seconds", "tokens_per_second_per_gpu", "samples_per_second", "peak_memory",
                   "kernel_seconds")
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped)

    @property
    def seconds(self) -> float:
        """The measured time of the step or kernel [s]."""
        if self.kind == "kernel":
            assert self.kernel_seconds is not None
            return self.kernel_seconds
        if self.step_seconds is not None:
            return self.step_seconds
        assert self.local_batch is not None and self.gpus is not None
        samples = self.local_batch * self.accumulation
        if self.samples_per_second is not None:
            return samples * self.gpus / self.samples_per_second
        assert self.tokens_per_second_per_gpu is not None and self.sequence_length is not None
        return samples * self.sequence_length / self.tokens_per_second_per_gpu


def _number(scale: float = 1.0) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value <= 0:
            raise ValueError("a finite number > 0 is needed")
        return value * scale
    return parse


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("an integer >= 1 is needed")
    return value


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """`a=1 b=2` -> pairs; a text without `=` stands for everything: `*`."""
    parts = text.split()
    if len(parts) == 1 and "=" not in parts[0]:
        return (("*", parts[0]),)
    found = [tuple(part.split("=", 1)) for part in parts]
    if any(len(p) != 2 or not p[0] or not p[1] for p in found):
        raise ValueError("`name=value` separated by spaces is needed")
    if len({p[0] for p in found}) < len(found):
        raise ValueError("a name is given twice")
    return tuple((p[0], p[1]) for p in found)


def _one_of(*legal: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in legal:
            raise ValueError(f"one of {', '.join(legal)} is needed{suggest(text, legal)}")
        return text
    return parse


# column -> (field, parser); the unit stands in the column's name, as it does where data leaves a program
COLUMNS: dict[str, tuple[str, Callable]] = {
    "id": ("id", str), "kind": ("kind", _one_of(*KINDS)), "source": ("source", str), "note": ("note", str), "device": ("device", str),
    "memory_gb": ("memory_bytes", _number(1e9)), "memory_bandwidth_tb_s": ("memory_bandwidth", _number(1e12)),
    "peak_bf16_tflop_s": ("peak_flops", _number(1e12)), "power_w": ("power", _number()),
    "model": ("model", str), "gpus": ("gpus", _count), "hosts": ("hosts", _count), "local_batch": ("local_batch", _count),
    "accumulation": ("accumulation", _count), "sequence_length": ("sequence_length", _count), "layout": ("layout", _pairs),
    "precision": ("precision", _pairs), "checkpoint": ("checkpoint", _pairs), "execution": ("execution", str), "exchange": ("exchange", str),
    "wire": ("wire", str), "reduce": ("reduce", str), "attention": ("attention", str), "fusion": ("fusion", str), "loss": ("loss", str),
    "optimizer": ("optimizer", str), "overlap": ("overlap", str), "table_update": ("table_update", str),
    "link_gb_s": ("link_bandwidth", _number(1e9)), "nic_gb_s": ("nic_bandwidth", _number(1e9)),
    "step_ms": ("step_seconds", _number(1e-3)), "tokens_per_s_per_gpu": ("tokens_per_second_per_gpu", _number()),
    "samples_per_s": ("samples_per_second", _number()), "peak_memory_gib": ("peak_memory", _number(2.0**30)),
    "op": ("op", str), "variant": ("variant", str), "phase": ("phase", _one_of(*PHASES)), "dtype": ("dtype", str), "features": ("features", _pairs),
    "kernel_ms": ("kernel_seconds", _number(1e-3)),
}
_ALWAYS = ("id", "kind", "device", "source")
_NEEDED = {"step": ("model", "gpus", "local_batch"), "kernel": ("op", "phase", "dtype", "features", "kernel_ms")}
_MEASURED = ("step_ms", "tokens_per_s_per_gpu", "samples_per_s")
_COMMON = (*_ALWAYS, "note", "memory_gb", "memory_bandwidth_tb_s", "peak_bf16_tflop_s", "power_w")
_KERNEL = ("op", "variant", "phase", "dtype", "features", "kernel_ms")


def read(path: Path) -> list[Published]:
    """The rows of a file. Raises TableError with all its faults, OSError where it cannot be read."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            header, lines = list(reader.fieldnames or ()), [(reader.line_num, line) for line in reader]
        except csv.Error as error:
            raise TableError([f"{path}:{reader.line_num}: not CSV ({error})"]) from error
        except UnicodeDecodeError as error:
            raise TableError([f"{path}:{_undecodable(path)}: not UTF-8 ({error.reason})"]) from error
    faults = [f"{path}:1: column {name!r} is not part of the schema{suggest(name, COLUMNS)}" for name in header if name not in COLUMNS]
    faults += [f"{path}:1: column {name!r} is there twice" for name in sorted({n for n in header if header.count(n) > 1})]
    faults += [f"{path}:1: column {name!r} is missing" for name in _ALWAYS if name not in header]
    if faults:
        raise TableError(faults)
    if not lines:
        raise TableError([f"{path}: no rows"])
    rows, seen = [], {}
    for number, line in lines:
        found = _row(f"{path}:{number}", line, faults)
        if found is None:
            continue
        if found.id in seen:
            faults.append(f"{found.where}: id: {found.id!r} is taken by line {seen[found.id]}")
        seen[found.id] = number
        rows.append(found)
    if faults:
        raise TableError(faults)
    return rows


def _undecodable(path: Path) -> int:
    """The line of the first byte that is no UTF-8."""
    body = path.read_bytes()
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return body[:error.start].count(b"\n") + 1
    return 1


def _row(where: str, line: dict, faults: list[str]) -> Published | None:
    if None in line or None in line.values():
        faults.append(f"{where}: more or fewer cells than the header has")
        return None
    cells = {name: text.strip() for name, text in line.items() if text.strip()}
    values, before = {}, len(faults)
    for name, text in cells.items():
        field, parse = COLUMNS[name]
        try:
            values[field] = parse(text)
        except ValueError as error:
            faults.append(f"{where}: {name}: {text!r}: {error}")
    kind = cells.get("kind", "")
    for name in (*_ALWAYS, *_NEEDED.get(kind, ())):
        if name not in cells:
            faults.append(f"{where}: {name}: missing" + (f"; a {kind} row needs it" if kind in KINDS else ""))
    if kind == "step":
        measured = [name for name in _MEASURED if name in cells]
        if len(measured) != 1:
            faults.append(f"{where}: exactly one of {', '.join(_MEASURED)} is needed, got {', '.join(measured) or 'none'}")
        if "tokens_per_s_per_gpu" in cells and "sequence_length" not in cells:
            faults.append(f"{where}: sequence_length: missing; tokens_per_s_per_gpu needs it")
        if {"gpus", "hosts"} <= set(values) and values["gpus"] % values["hosts"]:
            faults.append(f"{where}: hosts: {values['gpus']} GPUs do not divide over {values['hosts']} hosts")
        other = [name for name in cells if name in _KERNEL]
    else:
        other = [name for name in cells if name not in (*_COMMON, *_KERNEL)]
    if kind in KINDS and other:
        faults.append(f"{where}: {', '.join(other)}: no meaning in a {kind} row")
    return Published(where=where, **values) if len(faults) == before else None
