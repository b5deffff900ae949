"""Jagged <-> padded, concatenation and per-row operations: share of the copy rate (bytes: what is read and written, once)."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels._timing import copy_rate, eager_seconds
from benchmarks.kernels.common import lognormal_lengths, offsets, seconds, uniform_lengths
from benchmarks.results import Row
from kernels import jagged

PUBLISHED = {"Triton pack_segments, H100 (published)": 90.1}


ROWS, DIM = 1152, 512


def measure(done: set[str]) -> Iterator[Row]:
    """Rows that are not in `done`."""
    rate = copy_rate()
    cases = [
        ("uniform 1-1024", 1024, uniform_lengths(ROWS, 1024, 0.5)),
        ("lognormal(600, 1) <= 8192", 8192, lognormal_lengths(ROWS, 600, 1.0, 8192)),
    ]
    for label, max_len, lengths in cases:
        yield from _case(label, max_len, lengths, rate, done)


def _case(label: str, max_len: int, lengths: torch.Tensor, rate: float, done: set[str]) -> Iterator[Row]:
    bounds = offsets(lengths)
    total = int(bounds[-1])
    values = torch.randn(total, DIM, device="cuda", dtype=torch.bfloat16)
    padded = jagged.jagged_to_padded(values, bounds, max_len=max_len)
    dense = torch.randn(ROWS, DIM, device="cuda", dtype=torch.bfloat16)
    calls = {
        "jagged -> padded": (lambda: jagged.jagged_to_padded(values, bounds, max_len=max_len), total + ROWS * max_len),
        "padded -> jagged": (lambda: jagged.padded_to_jagged(padded, bounds, total=total), 2 * total),
        "jagged concat": (lambda: jagged.jagged_concat([(values, bounds)] * 2), 4 * total),
        "jagged x row vector": (lambda: jagged.jagged_elementwise(values, bounds, dense, op="mul"), 2 * total + ROWS),
        "jagged mean": (lambda: jagged.jagged_mean(values, bounds), total + ROWS),
    }
    for name, (call, rows_moved) in calls.items():
        title = f"{name}, {ROWS} rows {label}, {DIM} bf16"
        if title in done:
            continue
        ideal = rows_moved * DIM * 2 / rate
        share = 100 * ideal / seconds(call)
        goal = name in ("jagged -> padded", "padded -> jagged")
        peers = dict(PUBLISHED) if goal else {}
        if name == "jagged -> padded" and ROWS * max_len * DIM < 2**31:  # torch refuses more elements
            nested = torch.nested.nested_tensor_from_jagged(values, bounds.long())
            peers["torch nested"] = 100 * ideal / eager_seconds(partial(nested.to_padded_tensor, 0.0, (ROWS, max_len, DIM)))
        tried = "; tried: chunks of 1,024 to 16,384 elements, 1 to 8 warps, programs over many chunks, streaming loads and stores" if goal else ""
        yield Row(
            name=title, value=share, unit="% of copy rate", target=88.0 if goal else None, aim=93.0 if goal else None,
            peers=peers, note=f"measured here; copy {rate / 1e12:.2f} TB/s{tried}",
        )  # fmt: skip
