"""What to time: the ops that the given plans lower to at their own and neighbouring batch sizes, and points spread around them.

Each op kind gets its own shapes first, then a low-discrepancy sequence in the logarithm of the box around them, every sixth point of which is held
out of the fit. Kinds take turns, so that a time budget that runs out leaves every kind with its most wanted points.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from scipy.stats import qmc

from costmodel import ops
from costmodel.blocks import BatchShape, Block, JaggedShape
from costmodel.blocks.attention import BIAS
from costmodel.model import TableGroup
from costmodel.ops import KINDS, Op, op
from costmodel.plan import Plan
from costmodel.precision import LOW_PRECISIONS, MULTIPLES, parts
from costmodel.regions import regions
from costmodel.sparse import expected_unique, skew
from costmodel.workload import Lengths

# Every n-th spread point is kept from the fit, to score it; no multiple of the three kinds of histories, or all of one kind would be.
HELD_OUT_EVERY = 7
# Points that a kind gets in a turn: what takes most of a step, in most dimensions, is timed at most shapes.
POINTS_PER_TURN = {"attention": 3, "linear": 2}
# Spread points by kind, quick preset; full has three times as many.
SPREAD_POINTS = {"linear": 44, "attention": 56, "bmm": 14,
                 "layer_norm": 14, "activation": 14, "elementwise": 14, "segment_mean": 14, "embedding_lookup": 24,
                 "embedding_update": 24, "unique": 12, "adamw": 14, "bce": 8, "cast": 14, "quantize": 14, "input": 14}
# How far the box reaches below and above the plans' own shapes.
BELOW, ABOVE = 4.0, 2.0
# A point above this is too long to repeat within a quick calibration [FLOP and bytes at a CPU core's rates, about 0.1 s].
CPU_MAX_FLOPS, CPU_MAX_BYTES = 4e9, 5e8
GPU_MAX_FLOPS, GPU_MAX_FP32_FLOPS, GPU_MAX_BYTES = 3e12, 3e11, 8e9
# (histories, length, heads, width of a head) at which torch's own attention is timed, of either backend: 2 GFLOP to 2 TFLOP.
DENSE = ((8, 2048, 16, 128), (16, 1024, 16, 128), (2, 8192, 16, 128), (32, 512, 16, 128), (1, 2048, 16, 128), (8, 2048, 32, 64), (2, 8192, 32, 64),
         (1, 32768, 8, 128))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An op to time. `lengths`: the histories behind an attention op. `block`: options that features do not hold (window, divisor)."""

    op: Op
    held_out: bool = False
    lengths: tuple[int, ...] = ()
    options: tuple[tuple[str, float], ...] = ()


def requests(plans: list[Plan], *, points: float = 1.0, seed: int = 0, gpu: bool = False) -> list[Request]:
    """Requests in the order of their worth, kinds taking turns. `points` scales the number of spread points."""
    rng = np.random.default_rng(seed)
    own = [request for plan in plans for request in _own(plan, rng)]
    grouped: dict[tuple[str, str, str], list[Request]] = defaultdict(list)
    for request in own:
        grouped[(request.op.kind, request.op.variant, request.op.dtype)].append(request)
    queues = []
    for key in sorted(grouped):
        first = _distinct(grouped[key])
        count = round(points * SPREAD_POINTS.get(key[0], 12))
        spread = _attention_spread(first, count, rng, gpu) if key[0] == "attention" else _spread(first, count, seed)
        wanted, turn = _fitting(_distinct([*first, *spread]), gpu), POINTS_PER_TURN.get(key[0], 1)
        queues.append([wanted[i : i + turn] for i in range(0, len(wanted), turn)])
    return [r for turn in itertools.zip_longest(*queues, fillvalue=[]) for some in turn for r in some]


def batch_sizes(plan: Plan) -> tuple[int, ...]:
    """Local batches to time: the plan's own, half, a quarter and twice it."""
    return tuple(sorted({max(1, plan.local_batch // 4), max(1, plan.local_batch // 2), plan.local_batch, plan.local_batch * 2}, reverse=True))


def _own(plan: Plan, rng: np.random.Generator) -> list[Request]:
    """Every op of a plan's step, at each batch size."""
    found = []
    precisions = {r.region: r.options[0].precision for r in plan.regions}
    for samples in batch_sizes(plan):
        lengths = {s.name: plan.workload.lengths[s.name].sample(rng, samples) for s in plan.model.sequences}
        shapes = {name: JaggedShape.of_lengths(values) for name, values in lengths.items()}
        batch = BatchShape(samples=float(samples), sequences=shapes)
        for region in regions(plan.model):
            for one in region.block.forward(batch, precisions[region.name]):
                if one.kind == "linear" and one.dtype in LOW_PRECISIONS:
                    found += [Request(op=_single(part)) for phase in (ops.FORWARD, ops.BACKWARD) for part in parts(
                        one, phase, plan.cluster.device, low_weight_gradients="low_weight_gradients" in plan.recipe)]
                elif one.kind == "embedding_lookup":  # time buckets, a few rows that all events share
                    found.append(Request(op=_single(one), options=(("bags", float(samples)), ("zipf", 0.0))))
                elif one.kind != "attention":
                    found.append(Request(op=_single(one)))
        found += attention_requests(plan, lengths)
        events = sum(shape.tokens for shape in shapes.values())
        found += [Request(op=op("bce", m=samples * len(plan.model.heads))), Request(op=op("input", samples=samples, events=events))]
        found += [r for table in plan.model.tables for r in _table(plan, table, samples, shapes)]
    sizes = {(r.block.num_parameters, r.block.num_tensors) for r in regions(plan.model)}
    total = (sum(r.num_parameters for r in regions(plan.model)), sum(r.count * r.block.num_tensors for r in regions(plan.model)))
    return found + [Request(op=op("adamw", parameters=p, tensors=t)) for p, t in sorted({*sizes, total}, reverse=True)]


def attention_requests(plan: Plan, lengths: Mapping[str, np.ndarray]) -> list[Request]:
    """Every attention op of the plan's blocks on histories of `lengths` by sequence."""
    found = []
    precisions = {r.region: r.options[0].precision for r in plan.regions}
    shapes = {name: JaggedShape.of_lengths(values) for name, values in lengths.items()}
    samples = max((len(values) for values in lengths.values()), default=0)
    batch = BatchShape(samples=float(samples), sequences=shapes)
    for region in regions(plan.model):
        for block in region.block.parts:
            for one in block.forward(batch, precisions[region.name]):
                if one.kind == "attention":
                    options = [("causal", float(block.group.causal))]
                    options += [(k, float(getattr(block.group, k))) for k in ("window", "divisor", "block", *BIAS) if getattr(block.group, k)]
                    options += _partners(block, one)
                    seen = np.minimum(lengths[region.sequence], block.limit or np.inf).astype(np.int64)
                    found.append(Request(op=_single(one), lengths=tuple(seen.tolist()), options=tuple(options)))
    return found


def library_attention() -> list[Request]:
    """Torch's own attention, which says nothing of the runtime's steps and much of those of other systems: dense causal batches in 16 bits by both
    backends, taking turns."""
    return [Request(op=op("sdpa", variant=variant, dtype="bf16", tokens=samples * length, pairs=samples * length * (length + 1) / 2, longest=length,
                          heads=heads, head_dim=width), lengths=(length,) * samples)
            for samples, length, heads, width in DENSE for variant in ("flash", "cudnn")]


def across(request: Request) -> bool:
    """Whether an attention op's queries or keys are no history."""
    return not {"queries", "keys"}.isdisjoint(dict(request.options))


def _partners(block: Block, one: Op) -> list[tuple[str, float]]:
    """How many queries or keys a sample has besides its history, where attention is across."""
    if one.variant.endswith("_queries"):
        return [("queries", float(block.num_read)), ("causal", 0.0)]
    if one.variant.endswith("_context"):
        return [("keys", float(block.option("summary_tokens"))), ("causal", 0.0)]
    return []


def _table(plan: Plan, table: TableGroup, samples: int, shapes: dict[str, JaggedShape]) -> list[Request]:
    ids = shapes[table.sequence].tokens if table.sequence is not None else float(round(samples * table.ids_per_sample))
    if ids < 1:
        return []
    variant = "sequence" if table.sequence is not None else "pooled"
    zipf = skew(table, table.name, plan.workload)
    unique = round(expected_unique(table.rows, zipf, ids))
    common = {"ids": ids * table.count, "unique": float(unique * table.count), "dim": table.dim, "dtype": table.dtype}
    options = (("bags", float(samples)), ("zipf", zipf))
    rows = table.rows * table.count
    lookup = {"variant": variant, "tables": table.count, **common}
    return [
        Request(op=op("embedding_lookup", rows=rows, **lookup), options=options),
        Request(op=op("embedding_lookup", rows=unique * table.count, **lookup), options=options),
        Request(op=op("embedding_update", variant=table.optimizer, rows=rows, tables=1, **common), options=options),
        Request(op=op("unique", ids=ids * table.count), options=(("zipf", zipf), ("rows", float(rows)))),
    ]


def _single(one: Op) -> Op:
    return dataclasses.replace(one, count=1)


def _distinct(found: list[Request]) -> list[Request]:
    return list({r.op: r for r in reversed(found)}.values())[::-1]


def _fitting(found: list[Request], gpu: bool) -> list[Request]:
    flops, num_bytes = (GPU_MAX_FLOPS, GPU_MAX_BYTES) if gpu else (CPU_MAX_FLOPS, CPU_MAX_BYTES)
    most = {"fp32": GPU_MAX_FP32_FLOPS} if gpu else {}
    return [r for r in found if r.op.flops(ops.FORWARD) <= most.get(r.op.dtype, flops) and r.op.bytes(ops.FORWARD) <= num_bytes]


def _spread(own: list[Request], count: int, seed: int) -> list[Request]:
    """`count` points, log-uniform in the box around the kind's own shapes."""
    kind, template = own[0].op.kind, own[0]
    names = KINDS[kind].features
    values = np.array([[dict(r.op.features)[n] for n in names] for r in own])
    low = np.log(np.maximum(values.min(axis=0) / BELOW, 1.0))
    high = np.log(np.maximum(values.max(axis=0) * ABOVE, 1.0))
    points = np.exp(qmc.Halton(len(names), seed=seed).random(count) * (high - low) + low)
    found = []
    for i, point in enumerate(points):
        features = _legal(kind, dict(zip(names, np.round(point).tolist())), MULTIPLES.get(template.op.dtype, 8))
        one = op(kind, variant=template.op.variant, dtype=template.op.dtype, **features)
        options = dict(own[i % len(own)].options)
        if "bags" in options:
            options["bags"] = max(1.0, round(features["ids"] / max(1.0, dict(template.op.features)["ids"] / dict(template.options)["bags"])))
        found.append(Request(op=one, held_out=i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1, options=tuple(options.items())))
    return found


def _legal(kind: str, features: dict[str, float], multiple: int = 8) -> dict[str, float]:
    """Shapes that can exist: fewer unique rows than ids and rows, widths in multiples, as many parameters as tensors."""
    for name in ("k", "n", "dim"):
        if name in features and kind != "bce":
            widened = max(float(multiple), multiple * round(features[name] / multiple))
            features[name] = widened if features[name] > 8 or multiple > 8 else max(1.0, features[name])
    if "unique" in features:
        features["tables"] = 1.0
        features["rows"] = max(2.0, features["rows"])
        features["unique"] = max(1.0, min(features["unique"], features["ids"], features["rows"]))
    if "tensors" in features:
        features["tensors"] = max(2.0, min(features["tensors"], features["parameters"] / 16))
    if "segments" in features:
        features["segments"] = max(1.0, min(features["segments"], features["m"]))
    if kind == "input":
        features["events"] = max(features["events"], features["samples"])
    return features


def _attention_spread(own: list[Request], count: int, rng: np.random.Generator, gpu: bool) -> list[Request]:
    """Other batches, lengths, heads and head widths around the plans' own; on a GPU their own widths, each of which has kernels to be compiled."""
    found = []
    base = [dict(r.op.features) for r in own]
    longest = max(f["longest"] for f in base)
    most = max(len(r.lengths) for r in own)
    for i in range(count):
        template, features = own[i % len(own)], base[i % len(base)]
        samples = max(1, int(most * 2.0 ** rng.uniform(-4, 0.5)))
        maximum = max(2, int(longest * 2.0 ** rng.uniform(-3, 1)))
        kind = ("uniform", "lognormal", "fixed")[i % 3]
        shape = {"median": max(1.0, maximum / 3), "sigma": 0.8} if kind == "lognormal" else {}
        lengths = Lengths(kind=kind, maximum=maximum, **shape).sample(rng, samples)
        heads = max(1, int(features["heads"] * 2.0 ** rng.integers(-1, 2)))
        head_dim = int(features["head_dim"]) if gpu else max(8, int(features["head_dim"] * 2.0 ** rng.integers(-1, 2)))
        options = dict(template.options)
        one = op("attention", variant=template.op.variant, dtype=template.op.dtype, tokens=attention_rows(lengths, options),
                 longest=float(lengths.max()), pairs=executed_pairs(lengths, options), heads=heads, head_dim=head_dim)
        found.append(Request(op=one, held_out=i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1, lengths=tuple(lengths.tolist()), options=template.options))
    return found


def attention_rows(lengths: np.ndarray, options: dict[str, float]) -> float:
    """The `tokens` of an attention op: the mean number of query and key rows."""
    across = options.get("queries", options.get("keys"))
    return float(lengths.sum()) if across is None else (float(lengths.sum()) + across * len(lengths)) / 2


def executed_pairs(lengths: np.ndarray, options: dict[str, float]) -> float:
    """(query, key) pairs of one head: causal or full, inside a window or blocks where there are."""
    across = options.get("queries", options.get("keys"))
    if across is not None:
        return float(lengths.sum()) * across
    window, block = (int(options[name]) if options.get(name) else None for name in ("window", "block"))
    return JaggedShape.of_lengths(lengths).pairs(causal=bool(options.get("causal", 1.0)), window=window, block=block)
