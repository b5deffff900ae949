"""A block's seconds on a GPU by what they are spent on: the reference that a block's correction refers to (`costmodel.calibration.Composition`).

    seconds ~ sum_i a_i w_i,  a_i >= 0 with the least relative error

    products    max(FLOPs / peak, bytes / bandwidth) of linear layers
    scores      FLOPs / peak of attention's products, forward and backward apart, x rounds
    weights     SCORE_SECONDS x (scores + HALF_TILE a row) x rounds: softmax or activation of every score, what hangs over the tiles included
    stream      bytes / bandwidth of attention
    memory      bytes / bandwidth of everything else
    rows        ROW_SECONDS x rows of layer norms in backward, whose parameters' gradients are summed over rows
    launches    ops x KERNEL_SECONDS

Rounds: where backward gives whole (history, head) pairs to multiprocessors in turn, longest first, the first of them gets the longest of every round,
so a launch takes sum_k w(k P) instead of (sum of all) / P. The Hopper kernels did so until 2026-12-01; they deal tiles now, and the fit of this
reference to blocks, which only calibrations without attention timed alone use, has to take up the difference.
What is known of a batch is how many histories it has, how long the longest is and tokens x longest / pairs; lengths are taken as
longest x (1 - x)^a, x from 0 to 1, with that quotient.

All blocks of one dtype with attention share a fit, whose a is what each block's own fit stays near: few samples of a kind say what is particular
to it.

Where attention was timed alone at enough shapes, the parts are what the block's ops took alone: `TIMED`, products, attention and the rest; each a
then is near 1, below it where a kernel does several of the ops at once.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from costmodel import compute
from costmodel.cluster import Device
from costmodel.ops import BACKWARD, Op

SHARED = ("products", "stream", "memory", "rows", "launches")
OWN = ("scores", "scores_backward", "weights", "weights_backward")
PARTS = SHARED + OWN
TIMED = ("products", "attention", "rest")
SCORE_SECONDS, HALF_TILE, ROW_SECONDS = 1e-13, 64.0, 1e-8
MULTIPROCESSORS = 132  # of an H100 or H200 [Datasheet https://resources.nvidia.com/en-us-tensor-core]
# Where a fit starts, and how far (in shares of the seconds) what all blocks have in common, then a block's own, may leave it for an error of 1.
_START = {"products": 1.4, "stream": 0.5, "memory": 1.25, "rows": 0.5, "launches": 1.0, "scores": 1.6, "scores_backward": 2.8, "weights": 0.5,
          "weights_backward": 1.0}
_COMMON_STIFFNESS, _OWN_STIFFNESS = 0.05, 0.3
_MOST_SPREAD = 20.0
_TIMED_STIFFNESS = 0.1


def rounds(features: Mapping[str, float]) -> float:
    """Seconds of attention's backward over those of evenly shared work, >= 1; from a block's features (`blocks.measured`)."""
    tokens, pairs, longest = features["tokens"], features["pairs"], features["longest"]
    jobs = features["samples"] * features["heads"] / MULTIPROCESSORS
    even = features["heads"] * tokens * tokens / max(features["samples"], 1.0) / MULTIPROCESSORS
    if features.get("block") or not pairs or 2.0 * longest * longest > even:  # work is split finer
        return 1.0
    quotient, full = tokens * longest / pairs, 2.0 if features.get("causal", 1.0) else 1.0
    spread = min(max((quotient - full) / max(2.0 * full - quotient, 1e-6), 0.0), _MOST_SPREAD)
    starts = np.arange(math.ceil(jobs)) / jobs
    return max(1.0, float(((1.0 - starts) ** (2.0 * spread)).sum()) * (2.0 * spread + 1.0) / jobs)


def timed_work(times: Iterable[tuple[str, float]]) -> np.ndarray:
    """w in the order of TIMED, from (op kind, seconds alone)."""
    found = dict.fromkeys(TIMED, 0.0)
    for kind, seconds in times:
        found["attention" if kind == "attention" else "products" if kind in ("linear", "bmm") else "rest"] += seconds
    return np.array([found[name] for name in TIMED])


def work(timed: Sequence[tuple[Op, str]], features: Mapping[str, float], device: Device) -> np.ndarray:
    """w above in the order of PARTS, of the ops that run, each with the phase it is timed in (`costmodel.gpu.timed_ops`)."""
    found = dict.fromkeys(PARTS, 0.0)
    for one, phase in timed:
        at_peak, at_bandwidth = compute.limits(one, phase, device)
        found["launches"] += one.count * compute.KERNEL_SECONDS
        if one.kind == "attention":
            suffix, shape = "_backward" * (phase == BACKWARD), dict(one.features)
            uneven = rounds(features) if suffix and one.dtype != "fp32" else 1.0
            found["scores" + suffix] += at_peak * uneven
            found["weights" + suffix] += one.count * SCORE_SECONDS * (shape["pairs"] + HALF_TILE * shape["tokens"]) * shape["heads"] * uneven
            found["stream"] += at_bandwidth
        elif one.kind in ("linear", "bmm"):
            found["products"] += max(at_peak, at_bandwidth)
        else:
            found["memory"] += at_bandwidth
            if one.kind == "layer_norm" and phase == BACKWARD:
                found["rows"] += one.count * ROW_SECONDS * one.feature("m")
    return np.array([found[name] for name in PARTS])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A timed block: its group (what is fitted alone), the dtype and attention variant that it shares a fit with, w and seconds."""

    group: str
    dtype: str
    attention: str
    work: np.ndarray
    seconds: float


def fit_timed(work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """a of one group of blocks: `work` (n, 3) in the order of TIMED, seconds (n,)."""
    return _solve(work, seconds, np.ones(len(TIMED)), _TIMED_STIFFNESS)


def fit_shares(measured: Iterable[Measured]) -> dict[str, np.ndarray]:
    """a by group."""
    rows = list(measured)
    common = {dtype: _common([m for m in rows if m.dtype == dtype and m.attention]) for dtype in {m.dtype for m in rows}}
    grouped: dict[str, list[Measured]] = {}
    for m in rows:
        grouped.setdefault(m.group, []).append(m)
    found = {}
    for group, own in grouped.items():
        start = np.array([common[own[0].dtype].get((own[0].attention if name in OWN else "", name), _START[name]) for name in PARTS])
        found[group] = _solve(np.array([m.work for m in own]), np.array([m.seconds for m in own]), start, _OWN_STIFFNESS)
    return found


def _common(rows: list[Measured]) -> dict[tuple[str, str], float]:
    """a of (attention variant or "", part) over all blocks of a dtype that have attention."""
    if not rows:
        return {}
    variants = sorted({m.attention for m in rows})
    columns = [("", name) for name in SHARED] + [(variant, name) for variant in variants for name in OWN]
    matrix = np.array([[m.work[PARTS.index(name)] if variant in ("", m.attention) else 0.0 for variant, name in columns] for m in rows])
    solved = _solve(matrix, np.array([m.seconds for m in rows]), np.array([_START[name] for _, name in columns]), _COMMON_STIFFNESS)
    return dict(zip(columns, map(float, solved)))


def _solve(matrix: np.ndarray, seconds: np.ndarray, start: np.ndarray, stiffness: float) -> np.ndarray:
    """a >= 0 with the least sum of relative errors squared plus (stiffness x what a part's share of the seconds leaves its start by) squared."""
    from scipy.optimize import nnls  # takes longer to import than a prediction takes

    relative = matrix / seconds[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    system = np.vstack([relative / scale, stiffness * np.eye(len(start))])
    return nnls(system, np.concatenate([np.ones(len(seconds)), stiffness * start * scale]))[0] / scale
