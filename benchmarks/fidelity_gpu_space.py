"""The declared space of `benchmarks.fidelity --device cuda`: groups of plans for one model and workload on one GPU.

    model     blocks of one kind, width and depth; head dims that the kernels have; Wukong layers over the features of two models in five, behind an
              InterFormer layer in a third of those; 4-24 tables of 100,000 or a million rows
    workload  histories up to 256-2048 events, uniform, lognormal or all equal; 32 thousand to 500 thousand events a batch
    plans     bf16 with each checkpoint policy on 1 or 2 micro-batches or with CUDA graphs, and fp32 where its steps stay below a quarter of a second

A draw is a function of (seed, group). Draws whose loader, one thread that builds synthetic ids, would take longer than the step are drawn
again: they would time NumPy. Calibration subjects come from the same distribution with a seed of their own; no drawn one equals any of them.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from benchmarks.fidelity_space import _plan, _subject
from costmodel.cluster import Cluster
from costmodel.codec import content_hash
from costmodel.lower import model_flops
from costmodel.model import LayerGroup, Model
from costmodel.plan import Plan
from costmodel.workload import Workload

PLANS_PER_GROUP = 5
KINDS = ("self_attention", "hstu", "gdpa", "block_attention")
DIMS = (512, 640, 768, 1024, 1280, 1536, 2048)
HEAD_DIMS = (64, 128)
DEPTHS = (1, 2, 3, 4, 6, 8)
MLP_FACTORS = (0, 2, 4)
NUM_TABLES, TABLE_ROWS, TABLE_DIMS = (4, 12, 24), (100_000, 1_000_000), (64, 128)
MAXIMUM_LENGTHS = (256, 512, 1024, 2048)
LENGTH_KINDS = ("uniform", "lognormal", "fixed")
TOKENS = (32e3, 500e3)
# Wukong layers over the features (0: none), their tokens out of the factorisation machine and out of the compression, rank, hidden width.
INTERACTIONS, INTERACTION_SHARE, FM_TOKENS, FM_RANKS, FM_HIDDEN = (1, 2, 3), 0.4, (16, 32, 64), (16, 32), (512, 1024, 2048)
# An InterFormer layer before the Wukong layers of every third of those models (bf16 alone: its kernels are not calibrated in fp32).
CROSSING_SHARE, CROSSING = 1 / 3, {"activation": "gelu", "divisor": 4.0, "num_queries": 2, "sequence": "history",
                                   "options": {"summary_tokens": 4, "recent": 2}}  # fmt: skip
POLICIES = ("none", "selective", "full")
# Rough seconds of a step, only to keep draws inside the space: FLOP/s of bf16 and fp32, bytes an event, feature and block over bytes/s.
BF16_RATE, FP32_RATE, EVENT_SECONDS, LOADER_SECONDS = 3.0e14, 3.5e13, 150 / 2.5e12, 1.2e-7
STEP_SECONDS, FP32_SECONDS, FP32_SHARE = (8e-3, 0.35), 0.25, 0.4
CALIBRATION_SEED, CALIBRATION_SUBJECTS = 0xCA1B, 48
# A run ends after so many steps.
MOST_STEPS = 40
LOADER_SHARE, SAVED_BYTES = 0.5, 5e10


def calibration_plans(cluster: Cluster) -> list[Plan]:
    """The plans whose shapes a calibration times: subjects of every block kind and head dim in turn, in bf16, one of each on a smaller batch in
    fp32 too. Every kind, head dim and precision comes first, so that a calibration that ends early has them."""
    plans, wide = [], {}
    for i in range(CALIBRATION_SUBJECTS):
        model, workload = _draw_subject(np.random.default_rng([CALIBRATION_SEED, i]), cluster, name=f"calibration-{i}", kind=KINDS[i % len(KINDS)],
                                        head_dim=HEAD_DIMS[i // len(KINDS) % len(HEAD_DIMS)])
        plans.append(_one(model, workload, cluster))
        layer = model.sequences[0].layers[0]
        if (layer.kind, layer.head_dim) not in wide and not has_crossing(model):
            smaller = dataclasses.replace(workload, global_batch=max(4, workload.global_batch // 4))
            wide[layer.kind, layer.head_dim] = _one(model, smaller, cluster, precision="fp32")
    first = len(KINDS)
    fp32 = list(wide.values())
    return plans[:2 * first] + fp32[:first] + plans[2 * first:3 * first] + fp32[first:] + plans[3 * first:]


_calibrated: set[str] = set()


def _is_calibrated(model: Model, workload: Workload, cluster: Cluster) -> bool:
    if not _calibrated:
        _calibrated.update(_subject_hash(p.model, p.workload) for p in calibration_plans(cluster))
    return _subject_hash(model, workload) in _calibrated


def _subject_hash(model: Model, workload: Workload) -> str:
    return content_hash((dataclasses.replace(model, name=""), dataclasses.replace(workload, name="")))


def draw_group(cluster: Cluster, *, seed: int, group: int) -> list[Plan]:
    """The plans of one group: different from each other, of one model, workload and global batch."""
    rng = np.random.default_rng([seed, group])
    model, workload = _draw_subject(rng, cluster, name=f"fidelity-{seed}-{group}", kind=KINDS[int(rng.integers(len(KINDS)))])
    options = [{"checkpoint": policy, "accumulation": micro} for policy in POLICIES for micro in (1, 2)]
    options += [{"checkpoint": policy, "execution": "cuda_graph"} for policy in POLICIES]
    plain = _one(model, workload, cluster)
    wide = not has_crossing(model) and model_flops(plain) / FP32_RATE < FP32_SECONDS and rng.random() < FP32_SHARE
    chosen = [options[i] for i in sorted(rng.choice(len(options), size=PLANS_PER_GROUP - wide, replace=False))]
    plans = [_one(model, workload, cluster, **option) for option in chosen]
    return plans + ([_one(model, workload, cluster, precision="fp32")] if wide else [])


def _draw_subject(rng: np.random.Generator, cluster: Cluster, *, name: str, kind: str, head_dim: int | None = None) -> tuple[Model, Workload]:
    pick = lambda options: options[int(rng.integers(len(options)))]
    while True:
        dim, drawn = pick(DIMS), pick(HEAD_DIMS)
        values = {
            "kind": kind, "dim": dim, "heads": dim // (head_dim or drawn), "depth": pick(DEPTHS), "mlp_factor": pick(MLP_FACTORS),
            "num_tables": pick(NUM_TABLES),
            "rows": pick(TABLE_ROWS), "table_dim": pick(TABLE_DIMS), "maximum": pick(MAXIMUM_LENGTHS), "length_kind": pick(LENGTH_KINDS),
            "global_batch": 2, "dense": int(rng.integers(0, 2)) * 32,
        }  # fmt: skip
        model, workload = _subject(name, values)
        model = dataclasses.replace(model, tables=tuple(t for t in model.tables if t.name != "event_action"))
        if rng.random() < INTERACTION_SHARE:
            model = _with_interactions(model, values["table_dim"], pick(INTERACTIONS), pick(FM_TOKENS), pick(FM_RANKS), pick(FM_HIDDEN))
            if rng.random() < CROSSING_SHARE:
                model = _with_crossing(model)
        tokens = math.exp(rng.uniform(*np.log(TOKENS)))
        batch = 4 * max(4, round(tokens / workload.lengths["history"].mean() / 4))
        workload = dataclasses.replace(workload, global_batch=batch, num_steps=MOST_STEPS)
        plain = _one(model, workload, cluster)
        events = batch * workload.lengths["history"].mean()
        seconds = model_flops(plain) / BF16_RATE + events * dim * values["depth"] * EVENT_SECONDS
        loader = LOADER_SECONDS * (events + batch * (3 * values["num_tables"] + 20))
        saved = 2.0 * events * dim * values["depth"] * (16 + 2 * values["mlp_factor"])
        own = name.startswith("calibration")
        if STEP_SECONDS[0] < seconds < STEP_SECONDS[1] and loader < LOADER_SHARE * seconds and saved < SAVED_BYTES and (
                own or not _is_calibrated(model, workload, cluster)):
            return model, workload


def _with_interactions(model: Model, width: int, count: int, tokens: int, rank: int, hidden: int) -> Model:
    """The model with `count` Wukong layers over its features as tokens of `width`."""
    layer = LayerGroup(kind="wukong", count=count, mlp_dim=hidden, options={
        "num_fm": tokens, "num_linear": tokens, "rank": rank, "mlp_layers": 2, "compressed": 8})  # fmt: skip
    return dataclasses.replace(model, interaction_layers=(layer,), feature_dim=width, bottom_hidden=(32, width) if model.num_dense_features else ())


def _with_crossing(model: Model) -> Model:
    """The model with an InterFormer layer, of the heads of its histories' layers, before its other layers over features."""
    own = model.sequences[0].layers[0]
    layer = LayerGroup(kind="interformer", count=1, heads=own.heads, head_dim=own.head_dim, **CROSSING)  # type: ignore[arg-type]
    return dataclasses.replace(model, interaction_layers=(layer, *model.interaction_layers))


def has_crossing(model: Model) -> bool:
    return any(layer.kind == "interformer" for layer in model.interaction_layers)


def _one(model: Model, workload: Workload, cluster: Cluster, *, precision: str = "bf16", checkpoint: str = "none", accumulation: int = 1,
         execution: str = "eager") -> Plan:
    return _plan(model, workload, cluster, ranks=1, checkpoint=checkpoint, sharding="table_wise", precision=precision, execution=execution,
                 accumulation=accumulation, ddp=False)  # fmt: skip


def describe() -> str:
    """One paragraph for the report."""
    return (f"kinds {', '.join(KINDS)}; dim {DIMS[0]}-{DIMS[-1]}; head dim {HEAD_DIMS}; depth {DEPTHS}; mlp factor {MLP_FACTORS}; "
            f"with probability {INTERACTION_SHARE} {INTERACTIONS} Wukong layers of {FM_TOKENS} + {FM_TOKENS} tokens, rank {FM_RANKS}, "
            f"hidden {FM_HIDDEN}, in a third of those behind an InterFormer layer; tables {NUM_TABLES} of {TABLE_ROWS} rows x {TABLE_DIMS}; "
            f"histories {', '.join(LENGTH_KINDS)} up to {MAXIMUM_LENGTHS} events; "
            f"{TOKENS[0]:.0f}-{TOKENS[1]:.0f} events a batch; "
            f"bf16 with checkpoint {', '.join(POLICIES)} x (accumulation 1, 2, or CUDA graphs), and fp32 (probability {FP32_SHARE}, below "
            f"{FP32_SECONDS} s); eager or graphs (compiled steps are left out: compiling each plan would take longer than all else); one H200")
