"""Jagged <-> padded, concatenation and per-row operations: share of the copy rate (bytes: what is read and written, once)."""

import torch

from benchmarks.kernels._timing import copy_rate, seconds
from benchmarks.results import Row
from kernels import jagged

PUBLISHED = {"Triton pack_segments, H100 (published)": 90.1}


def _lengths(kind: str, rows: int, max_len: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "uniform":
        return torch.randint(1, max_len + 1, (rows,), generator=generator)
    return torch.exp(torch.randn(rows, generator=generator) + 6.397).clamp(1, max_len).long()  # median 600


def run(*, quick: bool = False) -> list[Row]:
    rate, out = copy_rate(), []
    shapes = [("uniform 1-1024", "uniform", 1152, 1024, 512), ("lognormal(600, 1) <= 8192", "lognormal", 1152, 8192, 512)]
    for label, kind, rows, max_len, dim in shapes[: 1 if quick else 2]:
        offsets = jagged.lengths_to_offsets(_lengths(kind, rows, max_len).cuda())
        total = int(offsets[-1])
        values = torch.randn(total, dim, device="cuda", dtype=torch.bfloat16)
        padded = jagged.jagged_to_padded(values, offsets, max_len=max_len)
        dense = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16)
        nested = torch.nested.nested_tensor_from_jagged(values, offsets)
        calls = {
            "jagged -> padded": (lambda: jagged.jagged_to_padded(values, offsets, max_len=max_len), total + rows * max_len),
            "padded -> jagged": (lambda: jagged.padded_to_jagged(padded, offsets, total=total), 2 * total),
            "jagged concat": (lambda: jagged.jagged_concat([(values, offsets)] * 2), 4 * total),
            "jagged x row vector": (lambda: jagged.jagged_elementwise(values, offsets, dense, op="mul"), 2 * total + rows),
            "jagged mean": (lambda: jagged.jagged_mean(values, offsets), total + rows),
        }
        for name, (call, rows_moved) in calls.items():
            share = 100 * rows_moved * dim * 2 / seconds(call) / rate
            goal = name in ("jagged -> padded", "padded -> jagged")
            peers = dict(PUBLISHED) if goal else {}
            if name == "jagged -> padded":
                time = seconds(lambda: nested.to_padded_tensor(0.0, (rows, max_len, dim)), repeats=5)
                peers["torch nested"] = 100 * rows_moved * dim * 2 / time / rate
            out.append(
                Row(name=f"{name}, {rows} rows {label}, {dim} bf16", value=share, unit="% of copy rate",
                    target=88.0 if goal else None, aim=93.0 if goal else None, peers=peers, note=f"measured here; copy {rate / 1e12:.2f} TB/s")
            )  # fmt: skip
        del nested, padded, values
    return out
