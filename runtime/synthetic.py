"""A synthetic stream: ids, histories and labels that a model can learn, with the lengths and id skew that a scenario states.

Every number of sample s is a hash of (seed, s, feature, place), so that a sample is the same whoever builds it: any rank, any
batch, after any restart. Popularity k of a table of n rows has probability k^-a / sum j^-a (Zipf); ids are an affine scramble
of popularities, as hashed ids are, so that hot rows spread over row-wise shards.

Labels: logit = mean over tables of a latent effect of each id seen + a match between the candidate (a history's last event) and
the mean of its past, then one Bernoulli draw per head. Both can be learned from the ids alone.
"""
from __future__ import annotations

import math

import numpy as np

from costmodel.model import Model, TableGroup
from costmodel.workload import Lengths, Workload

# Popularities drawn from their exact cumulative sums; the tail beyond follows the integral, whose error there is below 1e-5
# relative.
EXACT_HEAD = 1 << 16
_EFFECT, _MATCH = 2.0, 2.0  # how strongly ids and the match move a label, in log-odds
_LONGEST_GAP = math.log(2 * 86400)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hashed(seed: int, *keys: np.ndarray | int) -> np.ndarray:
    """Uniform uint64 out of integers, arrays broadcast against each other (the finaliser of SplitMix64 after each key)."""
    state = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    with np.errstate(over="ignore"):
        for key in keys:
            state = _mix(state + _GOLDEN * (np.asarray(key).astype(np.uint64) + np.uint64(1)))
    return state


def hashed_places(states: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`hashed(..., place)` of every place 0.. of groups of `sizes` `(G,)`, where `states` `(G,)` are the hashes without it: one pass an id, not one
    a key."""
    starts = (np.cumsum(sizes) - sizes).astype(np.uint64)
    x = np.repeat(states - _GOLDEN * starts, sizes)
    x += _GOLDEN * np.arange(1, len(x) + 1, dtype=np.uint64)
    return _mix(x)


def _mix(x: np.ndarray) -> np.ndarray:
    """In place where `x` is an array that nobody else has."""
    if not isinstance(x, np.ndarray):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
    shifted = np.right_shift(x, np.uint64(30))
    for factor, shift in ((np.uint64(0xBF58476D1CE4E5B9), np.uint64(27)), (np.uint64(0x94D049BB133111EB), np.uint64(31))):
        x ^= shifted
        x *= factor
        np.right_shift(x, shift, out=shifted)
    x ^= shifted
    return x


def uniform(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from the top 53 bits."""
    u = (bits >> np.uint64(11)).astype(np.float64)
    u *= 2.0**-53
    return u


class Zipf:
    """Ids of a table of `rows` rows whose popularity k has probability proportional to `k ** -exponent`."""

    def __init__(self, rows: int, exponent: float) -> None:
        self.rows, self.exponent = rows, exponent
        head = min(rows, EXACT_HEAD)
        cumulative = np.cumsum(np.arange(1, head + 1, dtype=np.float64) ** -exponent)
        # Sum over (head, rows] as an integral between half-integers: the midpoint rule, exact to second order.
        self._low, self._high = head + 0.5, rows + 0.5
        tail = self._integral(self._low, self._high) if rows > head else 0.0
        self._head_share = cumulative[-1] / (cumulative[-1] + tail)
        self._cumulative = cumulative / (cumulative[-1] + tail)
        # where a search for a number of each cell begins and ends: most numbers fall into a cell inside one popularity, and need none
        self._cells = 4 << head.bit_length()
        self._guide = np.searchsorted(self._cumulative, np.arange(self._cells + 1) / self._cells, side="right").astype(np.int32)
        self._multiplier = _coprime(rows)

    def _integral(self, a: float, b: float) -> float:
        if abs(self.exponent - 1) < 1e-9:
            return math.log(b / a)
        return (b ** (1 - self.exponent) - a ** (1 - self.exponent)) / (1 - self.exponent)

    def popularity(self, u: np.ndarray) -> np.ndarray:
        """Popularity ranks 0.. (0 is the hottest) of uniforms `u` in [0, 1), int64."""
        cell = (u * self._cells).astype(np.int64)
        rank = self._guide[cell].astype(np.int64)
        open_ = np.flatnonzero(self._guide[cell + 1] != rank)
        rank[open_] = np.searchsorted(self._cumulative, u[open_], side="right")
        beyond = u >= self._head_share
        if self.rows > len(self._cumulative) and beyond.any():
            share = (u[beyond] - self._head_share) / (1 - self._head_share)
            power = 1 - self.exponent
            if abs(power) < 1e-9:
                x = self._low * (self._high / self._low) ** share
            else:
                x = (self._low**power + share * (self._high**power - self._low**power)) ** (1 / power)
            rank[beyond] = np.floor(x + 0.5).astype(np.int64) - 1
        return np.minimum(rank, self.rows - 1)

    def ids(self, u: np.ndarray) -> np.ndarray:
        """Row ids, int64: popularity scrambled by `k * multiplier mod rows`."""
        ids = self.popularity(u)
        ids *= self._multiplier
        ids %= self.rows
        return ids


def _coprime(rows: int) -> int:
    """A multiplier near the golden section of `rows` and coprime to it, small enough that products stay below 2^63."""
    if rows > 3_000_000_000:
        raise ValueError(f"a synthetic table may have at most 3e9 rows, got {rows}")
    multiplier = max(1, int(rows * 0.6180339887))
    while math.gcd(multiplier, rows) != 1:
        multiplier += 1
    return multiplier


class SyntheticStream:
    """Samples of `model` under `workload`: lengths and ids of any sample numbers, built on demand."""

    def __init__(self, model: Model, workload: Workload, *, seed: int) -> None:
        self._model, self._seed = model, seed
        self._feature = {name: i for i, name in enumerate([t.name for t in model.tables] + [s.name for s in model.sequences])}
        self._zipf = {t.name: Zipf(t.rows, workload.zipf.get(t.name, t.zipf)) for t in model.tables}
        for sequence in model.sequences:
            if sequence.name not in workload.lengths:
                raise ValueError(f"workload {workload.name}: lengths of sequence {sequence.name!r} are missing")
        self._lengths = {s.name: _cumulative(workload.lengths[s.name]) for s in model.sequences}

    def lengths(self, sequence: str, samples: np.ndarray) -> np.ndarray:
        """Events of each sample's history, `(B,)` int64."""
        values, cumulative = self._lengths[sequence]
        u = uniform(hashed(self._seed, self._feature[sequence], samples))
        return values[np.minimum(np.searchsorted(cumulative, u, side="right"), len(values) - 1)]

    def bag_sizes(self, table: TableGroup, samples: np.ndarray) -> np.ndarray:
        """Ids of each bag, `(count * B,)`: the mean's floor, plus one with the probability of its fraction."""
        whole = int(table.ids_per_sample)
        fraction = table.ids_per_sample - whole
        if not fraction:
            return np.full(table.count * len(samples), whole, dtype=np.int64)
        u = uniform(hashed(self._seed, self._feature[table.name], 2, np.arange(table.count)[:, None], samples[None, :]))
        return whole + (u < fraction).astype(np.int64).ravel()

    def ids(self, table: TableGroup, samples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Table-major ids of bags or histories of `sizes` `(count * B,)`."""
        bags = hashed(self._seed, self._feature[table.name], 1, np.arange(table.count)[:, None], samples[None, :]).ravel()
        return self._zipf[table.name].ids(uniform(hashed_places(bags, sizes)))

    def times(self, sequence: str, samples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Int64 seconds of every event of histories of `sizes` `(B,)`, since the first one: gaps log-uniform from a second to two days."""
        bits = hashed_places(hashed(self._seed, self._feature[sequence], 4, samples), sizes)
        passed = np.cumsum(np.exp(_LONGEST_GAP * uniform(bits)).astype(np.int64))
        starts = np.cumsum(sizes) - sizes
        known = sizes > 0
        return passed - np.repeat(passed[starts[known]], sizes[known])

    def dense(self, samples: np.ndarray) -> np.ndarray:
        """`(B, num_dense_features)` fp32 of unit variance."""
        bits = hashed(self._seed, 1 << 20, samples[:, None], np.arange(self._model.num_dense_features)[None, :])
        return ((uniform(bits) - 0.5) * math.sqrt(12)).astype(np.float32)

    def effects(self, table: TableGroup, ids: np.ndarray, aspect: int) -> np.ndarray:
        """A latent number of each id, uniform with unit variance: what a model may learn about it."""
        return (uniform(hashed(self._seed, self._feature[table.name], 3, aspect, ids)) - 0.5) * math.sqrt(12)

    def labels(self, samples: np.ndarray, pooled: dict[str, tuple[np.ndarray, np.ndarray]],
               histories: dict[str, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """`(B, num_heads)` fp32 draws. `pooled` and `histories`: table group name -> (ids, sizes) of its first table."""
        tables = {t.name: t for t in self._model.tables}
        logits = np.zeros((len(self._model.heads), len(samples)))
        for name, (ids, sizes) in pooled.items():
            for head in range(len(logits)):
                logits[head] += _EFFECT / math.sqrt(len(pooled)) * _means(self.effects(tables[name], ids, head), sizes)
        for name, (ids, sizes) in histories.items():
            effect = self.effects(tables[name], ids, len(logits))
            last = np.cumsum(sizes) - 1
            candidate = np.where(sizes > 0, effect[np.maximum(last, 0)], 0.0) if len(effect) else np.zeros(len(sizes))
            past = np.tanh(_means(effect, sizes) * np.sqrt(np.maximum(sizes, 1)))
            logits += _MATCH / math.sqrt(len(histories)) * candidate * past
        u = uniform(hashed(self._seed, 1 << 21, np.arange(len(logits))[:, None], samples[None, :]))
        return (u < 1 / (1 + np.exp(-logits))).T.astype(np.float32)


def _cumulative(lengths: Lengths) -> tuple[np.ndarray, np.ndarray]:
    values, p = lengths.pmf()
    return values, np.cumsum(p)


def _means(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Mean over each bag, 0 for an empty one."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.cumsum(sizes)
    return (sums[ends] - sums[ends - sizes]) / np.maximum(sizes, 1)
