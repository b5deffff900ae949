"""What the slowest of R ranks carries over the average: history lengths, batching policy, id skew, slow nodes.

A rank's work is C = sum over its B samples of c(L), c(L) the FLOPs of a history of L events (all blocks of its sequence). A step lasts as long as its
slowest rank, so costs are taken there:

    E[max over R ranks of C]    from the distribution of the sum: by FFT for few samples, else a shifted gamma with its mean, variance and skewness
    events and pairs there      m_T + cov(T, C) / var(C) (E[max C] - E[C])       regression, so that the parts add up to E[max C]

Policies as `runtime/balance.py` arranges them:

    jagged                  B samples in arrival order
    padded                  each history as long as the longest of the rank's batch: E[max of R B lengths] / E[max of B lengths]
    local                   a rank's own samples of 8 steps dealt to its 8 batches: what is left is the rank's sum over the window, and the
                            deal's residue
    sorted_buckets          8 steps sorted by pairs, cut into steps, dealt singly
    base_batch_shuffling    sub-batches of at most 128, heaviest beside lightest
    global                  single samples dealt, heaviest to the lightest rank

A deal is played out: with seeded draws where chance matters, else once with the order statistics at their quantiles.

Slow nodes: every device's time is 1 + jitter x normal; a share p of hosts is f times slower; the expected slowest of H hosts with d devices has

    P(max <= x) = ((1 - p) Phi((x - 1) / jitter)^d + p Phi((x - f) / jitter)^d)^H
"""
from __future__ import annotations

import dataclasses
import functools

import numpy as np
from scipy import special

from costmodel.blocks import BatchShape, JaggedShape
from costmodel.cluster import Reliability
from costmodel.model import Model
from costmodel.plan import Batching, Plan
from costmodel.regions import regions
from costmodel.sparse import _popularity, expected_unique
from costmodel.workload import Lengths

SUB_BATCH = 128  # a reader's unit in base batch shuffling [runtime/balance.py]
LOOKAHEAD = 8  # steps that `sorted_buckets` and `local` look ahead [runtime/balance.py]
# From this many samples on a shifted gamma is within 2 % of the exact sum, of squares over 4,096 ranks too [Fitted:
# tests/costmodel/test_imbalance.py].
GAMMA_FROM = 48
_GRID_CELLS = 1 << 15
# Deals of fewer samples a rank are played with chance; above it their order statistics hardly vary.
_PLAYED_BELOW = 32
_DRAWS = 1 << 16
_HANDS = 256


# --- expected maxima ---

@functools.lru_cache(maxsize=4096)
def standard_maximum(ranks: int, skewness: float = 0.0) -> float:
    """E[max of `ranks`] independent draws from a distribution with mean 0, variance 1 and this skewness (normal, or shifted gamma)."""
    if ranks <= 1:
        return 0.0
    nodes, weights = _unit_nodes()
    # v = u^R is uniform for the maximum's probability u; its upper tail 1 - u = -expm1(log(v) / R) keeps its digits
    log_u = np.log(nodes) / ranks
    lower, upper = np.exp(log_u), -np.expm1(log_u)
    if abs(skewness) < 1e-3:
        quantiles = -special.ndtri(upper)
    else:
        shape = 4.0 / skewness ** 2
        if skewness > 0:
            quantiles = (special.gammainccinv(shape, upper) - shape) / np.sqrt(shape)
        else:
            quantiles = -(special.gammaincinv(shape, upper) - shape) / np.sqrt(shape)
    assert lower.shape == quantiles.shape
    return float(weights @ quantiles)


@functools.cache
def _unit_nodes() -> tuple[np.ndarray, np.ndarray]:
    """Nodes in (0, 1) that crowd both ends, with weights: Gauss-Legendre through a smooth step, as quantiles grow like logarithms there."""
    x, w = _gauss_legendre(256)
    x, w = (x + 1) / 2, w / 2
    return x ** 3 * (10 - 15 * x + 6 * x ** 2), w * 30 * x ** 2 * (1 - x) ** 2


def _gauss_legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights in (-1, 1) by Newton's method: NumPy's own solves an eigenvalue problem, which takes most of a first estimate."""
    x = np.cos(np.pi * (np.arange(count, 0, -1) - 0.25) / (count + 0.5))
    slope = np.ones(count)
    for _ in range(6):
        before, value = np.ones(count), x
        for n in range(2, count + 1):
            before, value = value, ((2 * n - 1) * x * value - (n - 1) * before) / n
        slope = count * (x * value - before) / (x * x - 1)
        x = x - value / slope
    return x, 2 / ((1 - x * x) * slope * slope)


def expected_maximum(values: np.ndarray, p: np.ndarray, samples: int, ranks: int) -> float:
    """E[max over `ranks` of the sum of `samples` independent draws] of `values` with probabilities `p`, both `(n,)`."""
    if ranks <= 1 or np.ptp(values) == 0:
        return samples * float(values @ p)
    if samples == 1:
        order = np.argsort(values)
        top = np.cumsum(p[order]) ** ranks
        return float(np.diff(top, prepend=0.0) @ values[order])
    if samples < GAMMA_FROM:
        return _lattice_maximum(values, p, samples, ranks)
    mean, variance, third = central_moments(values, p)
    skewness = third / variance ** 1.5 / samples ** 0.5
    most = samples * float(values.max())
    return min(samples * mean + (samples * variance) ** 0.5 * standard_maximum(ranks, round(skewness, 3)), most)


def central_moments(values: np.ndarray, p: np.ndarray) -> tuple[float, float, float]:
    """Mean, variance and third central moment."""
    mean = float(values @ p)
    centred = values - mean
    return mean, float(centred ** 2 @ p), float(centred ** 3 @ p)


def _lattice_maximum(values: np.ndarray, p: np.ndarray, samples: int, ranks: int) -> float:
    """Exact up to a grid: each value's mass is split over its two neighbouring cells (which keeps the mean), the sum's distribution is a
    power of the FFT."""
    cells = max(64, _GRID_CELLS // samples)
    low, step = float(values.min()), float(np.ptp(values)) / (cells - 1)
    place = (values - low) / step
    cell = np.minimum(place.astype(np.int64), cells - 2)
    share = place - cell
    single = np.bincount(cell, p * (1 - share), cells) + np.bincount(cell + 1, p * share, cells)
    length = 1 << int(samples * (cells - 1)).bit_length()
    total = np.fft.irfft(_power(np.fft.rfft(single, length), samples), length)
    top = _power(np.minimum(np.cumsum(np.maximum(total, 0.0)), 1.0), ranks)
    # E[X] = sum of P(X >= k) over k >= 1
    return samples * low + step * (length - 1 - float(top[:-1].sum()) / float(top[-1]))


def _power(base: np.ndarray, exponent: int) -> np.ndarray:
    """`base ** exponent` for exponent >= 1 by squaring: NumPy calls the C library once an element, which takes 20 times as long."""
    found, square = None, base
    while exponent:
        if exponent & 1:
            found = square if found is None else found * square
        exponent >>= 1
        if exponent:
            square = square * square
    assert found is not None
    return found


# --- lengths and policies ---

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFactors:
    """The slowest rank's events and pairs over the average of what the policy computes (padding included in both)."""

    tokens: float
    pairs: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """sequences: factors by sequence. slow_node: the slowest device's time over the nominal. padding: events computed over true events by
    sequence."""

    sequences: dict[str, RankFactors]
    slow_node: float
    padding: dict[str, float]

    def report(self) -> dict[str, float]:
        """Flat, for tables: `history.tokens`, `history.pairs`, `history.padding`, `slow_node`."""
        flat = {"slow_node": self.slow_node}
        for name, factor in self.sequences.items():
            flat |= {f"{name}.tokens": factor.tokens, f"{name}.pairs": factor.pairs, f"{name}.padding": self.padding[name]}
        return flat


def slowest_rank(plan: Plan) -> Slowest:
    """The slowest rank of a plan. Raises ValueError when the workload has no lengths for a sequence."""
    for sequence in plan.model.sequences:
        if sequence.name not in plan.workload.lengths:
            raise ValueError(f"workload {plan.workload.name}: lengths.{sequence.name}: missing; the model has that sequence")
    return slowest(plan.model, plan.workload.lengths, policy=plan.batching, local_batch=plan.local_batch, ranks=plan.layout.world_size,
                   devices_per_host=plan.cluster.devices_per_host, reliability=plan.cluster.reliability)


def slowest(model: Model, lengths: dict[str, Lengths], *, policy: Batching, local_batch: int, ranks: int, devices_per_host: int,
            reliability: Reliability) -> Slowest:
    """As `slowest_rank`, from its parts."""
    names = tuple(s.name for s in model.sequences)
    works = {name: work_curve(model, name, lengths[name]) if ranks > 1 else np.zeros(0) for name in names}  # one rank is its own average
    factors = _rank_factors(works, lengths, policy, local_batch, ranks)
    padding = {name: padding_factor(lengths[name], policy, local_batch) for name in names}
    return Slowest(sequences=factors, padding=padding, slow_node=slow_node_factor(reliability, ranks, min(devices_per_host, ranks)))


_works: dict[tuple[int, str, Lengths], tuple[Model, np.ndarray]] = {}


def work_curve(model: Model, sequence: str, lengths: Lengths) -> np.ndarray:
    """FLOPs of one history at every length of `lengths.pmf()`, `(n,)`: exact at up to 33 lengths, FLOPs per event interpolated between."""
    key = (id(model), sequence, lengths)
    if key not in _works:
        if len(_works) > 64:
            _works.clear()
        values, _ = lengths.pmf()
        knots = np.unique(np.round(np.geomspace(max(1, values.min()), max(1, values.max()), 33)).astype(np.int64))
        blocks = [(r.count, r.block) for r in regions(model) if r.sequence == sequence]
        shapes = [BatchShape(samples=1.0, sequences={sequence: JaggedShape.of_lengths([n])}) for n in knots]
        each = np.array([sum(count * block.flops(shape) for count, block in blocks) / n for shape, n in zip(shapes, knots)])
        _works[key] = (model, values * np.interp(values, knots, each))
    return _works[key][1]


def _rank_factors(works: dict[str, np.ndarray], lengths: dict[str, Lengths], policy: Batching, batch: int, ranks: int) -> dict[str, RankFactors]:
    if ranks == 1 or not works:
        return {name: RankFactors(tokens=1.0, pairs=1.0) for name in works}
    if policy == "padded":
        return {name: _padded(lengths[name], batch, ranks) for name in works}
    if policy in ("jagged", "local") and len(works) > 1:
        return _regressed(works, lengths, policy, batch, ranks)
    return {name: _one_sequence(_Frozen(work), lengths[name], policy, batch, ranks) for name, work in works.items()}


def _pairs(length: np.ndarray) -> np.ndarray:
    length = length.astype(np.float64)
    return length * (length + 1) / 2


@functools.lru_cache(maxsize=1024)
def _padded(lengths: Lengths, batch: int, ranks: int) -> RankFactors:
    own, all_ranks = _top(lengths, batch), _top(lengths, batch * ranks)
    values, _ = lengths.pmf()
    nominal = float(own @ values)
    pairs = nominal * (nominal + 1) / 2
    return RankFactors(tokens=float(all_ranks @ values) / nominal if nominal else 1.0,
                       pairs=float(all_ranks @ _pairs(values)) / pairs if pairs else 1.0)


def _top(lengths: Lengths, samples: int) -> np.ndarray:
    """Probabilities of the longest of `samples` histories, over the lengths of the pmf."""
    _, p = lengths.pmf()
    return np.diff(np.cumsum(p) ** samples, prepend=0.0)


def padding_factor(lengths: Lengths, policy: Batching, batch: int) -> float:
    """Events computed over true events on an average rank: 1 unless histories are padded to the longest of the rank's batch."""
    values, _ = lengths.pmf()
    mean = lengths.mean()
    return float(_top(lengths, batch) @ values) / mean if policy == "padded" and mean > 0 else 1.0


class _Frozen:
    """An array as a cache key by identity; work curves are made once."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self.array is other.array


@functools.lru_cache(maxsize=4096)
def _one_sequence(frozen: _Frozen, lengths: Lengths, policy: Batching, batch: int, ranks: int) -> RankFactors:
    """One sequence's factors under a policy that computes true lengths."""
    work, (values, p) = frozen.array, lengths.pmf()
    mean, variance, third = central_moments(work, p)
    if variance == 0:
        return RankFactors(tokens=1.0, pairs=1.0)
    if policy == "jagged" or (policy == "base_batch_shuffling" and sub_batch_size(batch) == batch):
        if batch == 1:
            top = np.diff(np.cumsum(p) ** ranks, prepend=0.0)
            pairs = _nonlinear(work, values)
            return RankFactors(tokens=float(top @ values) / lengths.mean(), pairs=float(top @ pairs) / float(p @ pairs))
        return _at_excess(work, lengths, batch, variance, expected_maximum(work, p, batch, ranks) - batch * mean)
    if policy == "local" and batch >= _PLAYED_BELOW:
        # over a window of S steps the rank's mean batch varies S times less; the deal within the rank leaves next to nothing
        spread = batch * variance / LOOKAHEAD
        skewness = batch * third / LOOKAHEAD ** 2 / spread ** 1.5
        return _at_excess(work, lengths, batch, variance, spread ** 0.5 * standard_maximum(ranks, round(skewness, 3)))
    if policy == "base_batch_shuffling":
        return _shuffled(work, lengths, batch, ranks)
    return _played(work, lengths, policy, batch, ranks)


def _regressed(works: dict[str, np.ndarray], lengths: dict[str, Lengths], policy: Batching, batch: int, ranks: int) -> dict[str, RankFactors]:
    """`jagged` and `local` with several sequences, whose lengths are independent: the slowest rank by their summed work."""
    moments = [central_moments(work, lengths[name].pmf()[1]) for name, work in works.items()]
    variance = sum(v for _, v, _ in moments)
    if variance == 0:
        return {name: RankFactors(tokens=1.0, pairs=1.0) for name in works}
    count = batch * (LOOKAHEAD if policy == "local" else 1)
    skewness = sum(t for *_, t in moments) / variance ** 1.5 / count ** 0.5
    excess = (batch * variance / (LOOKAHEAD if policy == "local" else 1)) ** 0.5 * standard_maximum(ranks, round(skewness, 3))
    return {name: _at_excess(work, lengths[name], batch, variance, excess) for name, work in works.items()}


def _nonlinear(work: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The part of the work that is not linear in events: it stands for pairs, whatever the masks."""
    positive = values > 0
    linear = float((work[positive] / values[positive]).min()) if positive.any() else 0.0
    part = work - values * linear
    return part if float(np.ptp(part)) > 1e-9 * float(np.ptp(work)) else _pairs(values)


def _at_excess(work: np.ndarray, lengths: Lengths, batch: int, variance: float, excess: float) -> RankFactors:
    """Factors of events and pairs where the rank's work is `excess` above its mean."""
    values, p = lengths.pmf()
    centred = work - work @ p
    factors = []
    for part in (values.astype(np.float64), _nonlinear(work, values)):
        mean = float(part @ p)
        factors.append(1.0 + float(centred * part @ p) / variance * max(excess, 0.0) / (batch * mean) if mean > 0 else 1.0)
    return RankFactors(tokens=max(1.0, factors[0]), pairs=max(1.0, factors[1]))


# --- deals ---

def _deal(pairs: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Deals cards in rounds, the heaviest of a round to the lightest hand, as runtime/balance.py does; `pairs` `(plays, rounds, hands)` descending,
    others `(kinds, plays, rounds, hands)`: what the same cards weigh otherwise. Totals `(kinds, plays, hands)`."""
    plays, rounds, hands = pairs.shape
    total, carried = np.zeros((plays, hands)), np.zeros((len(others), plays, hands))
    rows = np.arange(plays)[:, None]
    for i in range(rounds):
        order = np.argsort(total, axis=1, kind="stable")
        total[rows, order] += pairs[:, i]
        carried[:, rows, order] += others[:, :, i]
    return carried


def _slowest_of(carried: np.ndarray) -> RankFactors:
    """From totals `(work, events, pairs)` x plays x hands: sums at the slowest hand over sums of means, as step times add up."""
    slowest = carried[0].argmax(axis=-1)
    at = np.take_along_axis(carried, slowest[None, ..., None], axis=-1)[..., 0]
    factors = at.sum(axis=1) / carried.mean(axis=-1).sum(axis=1)
    return RankFactors(tokens=float(factors[1]), pairs=float(factors[2]))


def _played(work: np.ndarray, lengths: Lengths, policy: Batching, batch: int, ranks: int) -> RankFactors:
    """`local`, `sorted_buckets` and `global`: the arrangement played with seeded draws; many cards stand at their quantiles, without chance."""
    values, p = lengths.pmf()
    steps = 1 if policy == "global" else LOOKAHEAD
    kinds = np.stack([work, values.astype(np.float64), _nonlinear(work, values)])
    if policy == "local":
        # a play is one rank's window; ranks are drawn apart and meet in steps
        plays = ranks * max(1, _DRAWS // (ranks * steps * batch))
        cards = _draws(p, plays, steps * batch).reshape(plays, batch, steps)
        carried = _deal(_pairs(values)[cards], kinds[:, cards])
        return _slowest_of(carried.reshape(len(kinds), -1, ranks, steps).swapaxes(2, 3).reshape(len(kinds), -1, ranks))
    if steps * batch * ranks > _DRAWS or batch >= _PLAYED_BELOW:
        hands = int(min(ranks, _HANDS, max(2, _DRAWS // (batch * steps))))
        cards = _quantile_places(p, steps * batch * hands)[None, ::-1]
    else:
        hands = ranks
        cards = _draws(p, max(1, _DRAWS // (steps * batch * ranks)), steps * batch * ranks)
    if policy == "sorted_buckets":
        buckets = cards.reshape(-1, batch, hands)
        return _slowest_of(kinds[:, buckets].sum(axis=2))
    cards = cards.reshape(-1, batch, hands)
    return _slowest_of(_deal(_pairs(values)[cards], kinds[:, cards]))


def _draws(p: np.ndarray, plays: int, count: int) -> np.ndarray:
    """Seeded places in the pmf, `(plays, count)`, descending in each play."""
    return np.minimum(np.searchsorted(np.cumsum(p), _uniform(plays, count)), len(p) - 1)


@functools.lru_cache(maxsize=16)
def _uniform(plays: int, count: int) -> np.ndarray:
    """Seeded uniform numbers, descending in each play: sorted once for all sequences, and looked up in order."""
    return np.sort(np.random.default_rng(20240229).random((plays, count)), axis=1)[:, ::-1].copy()


def _quantile_places(p: np.ndarray, count: int) -> np.ndarray:
    """Places in the pmf of `count` order statistics, at the middles of their shares."""
    cumulative = np.cumsum(p)
    return np.minimum(np.searchsorted(cumulative, (np.arange(count) + 0.5) / count * cumulative[-1]), len(p) - 1)


def sub_batch_size(local_batch: int) -> int:
    """The largest divisor of a rank's batch that is at most 128."""
    return max(d for d in range(1, min(SUB_BATCH, local_batch) + 1) if local_batch % d == 0)


def _shuffled(work: np.ndarray, lengths: Lengths, batch: int, ranks: int) -> RankFactors:
    """Base batch shuffling, played with seeded sub-batches: their pairs are shifted gamma, work, events and nonlinear work follow them with
    the spread
    that regression leaves."""
    values, p = lengths.pmf()
    size = sub_batch_size(batch)
    pairs_of = _pairs(values)
    kinds = np.stack([work, values.astype(np.float64), _nonlinear(work, values)])
    mean, variance, third = central_moments(pairs_of, p)
    rounds = batch // size
    plays = max(1, _DRAWS // (4 * rounds * ranks))
    rng = np.random.default_rng(20240229)
    skewness = third / variance ** 1.5 / size ** 0.5
    shape = 4.0 / max(abs(skewness), 1e-3) ** 2
    standard = np.sort((rng.gamma(shape, size=(plays, rounds * ranks)) - shape) / shape ** 0.5 * (1 if skewness >= 0 else -1), axis=1)[:, ::-1]
    # sums by einsum: BLAS starts threads for arrays of this size, which wait for one another where cores are busy
    means = np.einsum("kn,n->k", kinds, p)
    slope = np.einsum("kn,n->k", kinds, p * (pairs_of - mean)) / variance
    left = kinds - means[:, None] - slope[:, None] * (pairs_of - mean)
    covariance = np.einsum("kn,ln->kl", left * p, left)
    scale = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
    vectors, singular, _ = np.linalg.svd(covariance / np.outer(scale, scale))
    noise = scale[:, None] * np.einsum("kl,ln->kn", vectors * np.sqrt(singular), rng.standard_normal((len(kinds), standard.size)))
    cards = size * mean + (size * variance) ** 0.5 * standard
    others = (size * means)[:, None, None] + slope[:, None, None] * (cards - size * mean)
    others += size ** 0.5 * noise.reshape(len(kinds), *standard.shape)
    return _slowest_of(_deal(cards.reshape(plays, rounds, ranks), others.reshape(len(kinds), plays, rounds, ranks)))


# --- ids and nodes ---

def unique_ratio(rows: int, zipf: float, ids: float) -> float:
    """Expected distinct rows over ids drawn, in (0, 1]."""
    return expected_unique(rows, zipf, ids) / ids if ids > 0 else 1.0


@functools.lru_cache(maxsize=65536)
def hot_shard_factor(rows: int, zipf: float, ids: float, ranks: int, shards: int) -> float:
    """The fullest of `shards` row-wise shards over the average, by rows served, when each of `ranks` ranks asks for the distinct of its `ids` ids.

    Rows lie at random on shards (ids are scrambled): row k is asked for by c_k = ranks (1 - (1 - p_k)^ids) ranks, a shard's sum has variance
    (1 / s) (1 - 1 / s) sum c_k^2, and its skewness from the third moment.
    """
    if shards <= 1 or ids <= 0:
        return 1.0
    p, counts = _popularity(rows, zipf)
    asked = ranks * -np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-12)))
    share = 1.0 / shards
    mean = share * float(counts @ asked)
    variance = share * (1 - share) * float(counts @ asked ** 2)
    third = share * (1 - share) * (1 - 2 * share) * float(counts @ asked ** 3)
    return 1.0 + variance ** 0.5 * standard_maximum(shards, round(third / variance ** 1.5, 3)) / mean


@functools.lru_cache(maxsize=1024)
def slow_node_factor(reliability: Reliability, ranks: int, devices_per_host: int) -> float:
    """E[slowest of `ranks` devices] over the nominal time, >= 1."""
    p, factor, jitter = reliability.slow_node_probability, reliability.slow_node_factor, reliability.step_jitter
    hosts = max(1, -(-ranks // devices_per_host))
    if jitter == 0:
        return 1.0 + (max(factor, 1.0) - 1.0) * float(-np.expm1(hosts * np.log1p(-p))) if p < 1 else max(factor, 1.0)
    top = max(factor, 1.0) + 12 * jitter
    x = np.linspace(1 - 12 * jitter, top, 4001)
    inside = (1 - p) * special.ndtr((x - 1) / jitter) ** devices_per_host + p * special.ndtr((x - factor) / jitter) ** devices_per_host
    return max(1.0, float(top - np.trapezoid(inside ** hosts, x))) if ranks > 1 else 1.0 + p * (factor - 1.0)
