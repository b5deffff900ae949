"""`samples.jsonl`: what the microbenchmark measured. The first line is the environment, every other line one sample.

A file is checked as it is read: an unknown or missing key, a NaN, an op kind or feature that `costmodel.ops` does not know is refused with the line.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from costmodel.codec import DecodeError, decode, encode
from costmodel.ops import KINDS, Op, op

SCHEMA_VERSION = 1
# Measured with all their ops at once, against the sum of which they are compared: `block:<kind>`, features as the block's own.
BLOCK_PREFIX = "block:"
# Not ops: single figures of the device.  launch_seconds: host time to launch one eager op; context_bytes: memory held beside the allocator's in
# a process that has trained in 16 bits (kernels of fp32 that spill hold more, for good);
# allocator_overhead: reserved / allocated - 1 at the peak; memory_bandwidth [bytes/s], peak_flops (variant = dtype) [FLOP/s]: the best seen.
# host_copy_bandwidth [bytes/s]: pinned memory to the device; host (variant = what): main-thread seconds of a part of a step in the trainer,
# at full speed, and by how much the host is slower than that (`slow`; costmodel.hosttime);
# in_step (variant = phase): seconds of forward or backward within a step over those of its blocks timed alone, at the share of the peak FLOP/s
# `utilisation`; its logarithm grows by `slope` with that share; variant `host`: main-thread seconds of steps that the host makes, of whole batches,
# over the sum of their parts (costmodel.hosttime);
# compiled, compiled_host (variant = phase:kind): device and main-thread seconds of a compiled block over those of an eager one;
# library_bytes: workspaces that libraries allocate and keep; workspace (variant = kind@dtype[:policy]): bytes that backward of a block has beside
# what its forward saved, over the formula's (costmodel.memory.backward_bytes).
# link_bandwidth [bytes/s]: of the host tier that the collectives ran on; collective_share (variant = transport/kind): compute seconds lost beside
# one second of that collective; uneven_weight: of what the heaviest rank of an all-to-all has more than the average, the share that counts as
# bytes of an even one (costmodel.comms_curves).
# Of host ranks (variant = ranks): processor_share: of a core that a rank had while it was timed; peer_wait: seconds
# that a rank waits for others to arrive at collectives over its seconds of compute, work being even.
CONSTANT_PREFIX = "constant:"
CONSTANTS = ("launch_seconds", "graph_launch_seconds", "context_bytes", "allocator_overhead", "memory_bandwidth", "peak_flops", "step_overhead",
             "link_bandwidth", "collective_share", "uneven_weight", "host_copy_bandwidth", "host", "in_step", "library_bytes",
             "processor_share", "peer_wait", "workspace", "compiled", "compiled_host")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where samples were taken. `allocator`: the environment variables that change timing; `source_hashes`: op kind to hash of the sources timed."""

    device_name: str
    device_kind: str
    threads: int = 1
    allocator: dict[str, str] = dataclasses.field(default_factory=dict)
    torch: str = ""
    triton: str = ""
    python: str = ""
    date: str = ""
    commit: str = ""
    source_hashes: dict[str, str] = dataclasses.field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed op.

    seconds: median time of one execution (device time on a GPU, wall time on a CPU); host_seconds: launch time on the host (GPU only);
    noise: median absolute deviation / median; active_ranks: ranks that ran the same op at the same time on this host; held_out: kept from the fit.
    `op` is a kind of `costmodel.ops.KINDS`, or `block:<kind>`, or `constant:<name>` with the figure in `seconds`.
    """

    op: str
    variant: str = ""
    phase: str
    features: dict[str, float]
    dtype: str = "fp32"
    seconds: float
    host_seconds: float | None = None
    noise: float = 0.0
    repeats: int = 1
    active_ranks: int = 1
    held_out: bool = False

    def __post_init__(self) -> None:
        if self.op.startswith(CONSTANT_PREFIX):
            if self.op.removeprefix(CONSTANT_PREFIX) not in CONSTANTS:
                raise ValueError(f"op {self.op!r}: unknown constant; known: {', '.join(CONSTANTS)}")
            return
        if not self.seconds > 0:
            raise ValueError(f"op {self.op}: seconds must be > 0, got {self.seconds}")
        for name, least in (("noise", 0.0), ("host_seconds", 0.0), ("active_ranks", 1), ("repeats", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"op {self.op}: {name} must be >= {least:g}, got {value}")
        if self.op.startswith(BLOCK_PREFIX):
            return
        self.as_op()
        if self.phase not in KINDS[self.op].phases:
            raise ValueError(f"op {self.op}: phase {self.phase!r} is none of {', '.join(KINDS[self.op].phases)}")

    def as_op(self) -> Op:
        """The op that was timed; ValueError names what does not fit its kind."""
        return op(self.op, variant=self.variant, dtype=self.dtype, **self.features)


def write_samples(path: Path | str, environment: Environment, samples: Iterable[Sample]) -> None:
    """Writes through a temporary file."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    lines = [json.dumps(encode(environment), allow_nan=False)] + [json.dumps(encode(s), allow_nan=False) for s in samples]
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(path)


def read_samples(path: Path | str) -> tuple[Environment, list[Sample]]:
    """Raises ValueError naming file, line and field: not JSON, no environment, a newer schema, an unknown, missing, NaN or impossible value."""
    path = Path(path)
    lines = [(i, line) for i, line in enumerate(path.read_text().splitlines(), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{path}: empty; the first line holds the environment")
    values = [(i, _json(path, i, line)) for i, line in lines]
    first = values[0][1]
    if not isinstance(first, dict) or "device_name" not in first:
        raise ValueError(f"{path}:1: device_name: missing; the first line holds the environment")
    version = first.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ValueError(f"{path}:1: schema_version: {version} is newer than {SCHEMA_VERSION}, which this version reads")
    try:
        environment = decode(Environment, first)
    except DecodeError as error:
        raise ValueError(f"{path}:1: {error}") from error
    samples = []
    for i, value in values[1:]:
        try:
            samples.append(decode(Sample, value))
        except DecodeError as error:
            raise ValueError(f"{path}:{i}: {error}") from error
    return environment, samples


def _json(path: Path, number: int, line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}:{error.colno}: not JSON ({error.msg})") from error
