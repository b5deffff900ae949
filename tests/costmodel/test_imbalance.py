"""Imbalance against Monte Carlo of the very arrangements that the runtime makes, and against exact sums."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import imbalance
from costmodel.cluster import Reliability
from costmodel.model import LayerGroup, Model, Sequence, TableGroup
from costmodel.workload import Lengths
from runtime import balance

LOGNORMAL = Lengths(kind="lognormal", maximum=4096, median=600, sigma=1.0)
UNIFORM = Lengths(kind="uniform", minimum=1, maximum=1000)
NO_TROUBLE = Reliability()


def model(*kinds: LayerGroup, sequences: int = 1) -> Model:
    names = [f"history{i}" if i else "history" for i in range(sequences)]
    return Model(name="test", dim=64, sequences=tuple(Sequence(name=n, layers=kinds) for n in names),
                 tables=tuple(TableGroup(name=f"ids_{n}", rows=1000, dim=64, pooling="sequence", sequence=n) for n in names))


ATTENTION = LayerGroup(kind="self_attention", count=2, heads=4, head_dim=16, mlp_dim=256)
SMALL = model(ATTENTION)


def factors(lengths: Lengths, policy: str, batch: int, ranks: int, which: Model | None = None):
    which = which or SMALL
    return imbalance.slowest(which, {s.name: lengths for s in which.sequences}, policy=policy, local_batch=batch, ranks=ranks, devices_per_host=8,
                             reliability=NO_TROUBLE)


def summed(found: imbalance.RankFactors, lengths: Lengths = LOGNORMAL) -> float:
    """Work over the mean: events and pairs summed up as the cost model does."""
    values, p = lengths.pmf()
    work = imbalance.work_curve(SMALL, "history", lengths)
    nonlinear = imbalance._nonlinear(work, values)
    return float(found.tokens * ((work - nonlinear) @ p) + found.pairs * (nonlinear @ p)) / float(work @ p)


def played(lengths: Lengths, policy: str, batch: int, ranks: int, work: np.ndarray, draws: int = 80_000) -> tuple[float, float]:
    """(slowest rank's work over the mean, the standard error of that), by the runtime's own arrangement."""
    rng = np.random.default_rng(7)
    values, p = lengths.pmf()
    steps = balance.window_steps(policy)
    top, mean = [], []
    for _ in range(min(2000, max(8, draws // (batch * ranks * steps)))):
        places = rng.choice(len(values), size=batch * ranks * steps, p=p)
        arranged = balance.arrange(policy, balance.attention_pairs(values[places]), steps=steps, ranks=ranks, seed=3)
        sums = work[places][arranged].sum(axis=-1)
        top.append(sums.max(axis=-1).sum())
        mean.append(sums.mean(axis=-1).sum())
    return float(np.sum(top) / np.sum(mean)), float(np.std(np.array(top) / np.mean(mean)) / len(top) ** 0.5)


def test_constants_are_the_runtimes():
    assert (imbalance.SUB_BATCH, imbalance.LOOKAHEAD) == (balance.SUB_BATCH, balance.LOOKAHEAD)
    assert all(imbalance.sub_batch_size(b) == balance.sub_batch_size(b) for b in (1, 7, 96, 128, 130, 1024))


@pytest.mark.parametrize("lengths", [LOGNORMAL, UNIFORM], ids=["lognormal", "uniform"])
@pytest.mark.parametrize(("policy", "batch", "ranks"), [
    ("jagged", 1, 8), ("jagged", 6, 8), ("jagged", 64, 8), ("local", 64, 8), ("sorted_buckets", 64, 8), ("base_batch_shuffling", 256, 8),
    ("global", 64, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("jagged", 256, 2), ("jagged", 256, 64), ("local", 4, 8), ("sorted_buckets", 4, 8), ("base_batch_shuffling", 64, 8),
        ("base_batch_shuffling", 1024, 8), ("global", 4, 8))),
])
def test_slowest_rank_against_the_runtimes_arrangement(lengths, policy, batch, ranks):
    which = SMALL
    work = imbalance.work_curve(which, "history", lengths)
    found = factors(lengths, policy, batch, ranks, which).sequences["history"]
    measured, error = played(lengths, policy, batch, ranks, work)
    assert summed(found, lengths) == pytest.approx(measured, rel=0.015, abs=3 * error)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4096), st.sampled_from(["jagged", "padded", "local", "base_batch_shuffling"]))
def test_more_ranks_wait_longer_and_bigger_batches_less(batch, ranks, policy):
    few, many = (summed(factors(LOGNORMAL, policy, batch, r).sequences["history"]) for r in (ranks, 2 * ranks))
    slack = 1.03 if policy != "padded" else 1.0 + 1e-9
    assert 1.0 - 1e-9 <= few <= many * slack
    if policy == "jagged":
        assert summed(factors(LOGNORMAL, policy, 4 * batch, ranks).sequences["history"]) <= few * 1.001


@pytest.mark.parametrize("ranks", [2, 64, 4096])
@pytest.mark.parametrize("samples", [imbalance.GAMMA_FROM, 256])
def test_shifted_gamma_is_the_exact_sum(samples, ranks):
    values, p = LOGNORMAL.pmf()
    work = values.astype(float) ** 2
    exact = imbalance._lattice_maximum(work, p, samples, ranks)
    assert imbalance.expected_maximum(work, p, samples, ranks) == pytest.approx(exact, rel=0.02)


def test_normal_maximum_is_the_known_one():
    # E[max of n standard normals]: 0.5642 (2), 1.4236 (8), 2.5076 (100)  [H. L. Harter, Biometrika 48, 1961]
    assert [round(imbalance.standard_maximum(n), 4) for n in (1, 2, 8, 100)] == [0.0, 0.5642, 1.4236, 2.5076]


def test_padding_and_its_slowest_rank():
    values, p = UNIFORM.pmf()
    rng = np.random.default_rng(0)
    batches = rng.choice(values, size=(4000, 4, 16), p=p).max(axis=-1)
    found = factors(UNIFORM, "padded", 16, 4)
    assert found.padding["history"] == pytest.approx(batches.mean() / UNIFORM.mean(), rel=0.01)
    assert found.sequences["history"].tokens == pytest.approx(batches.max(axis=1).mean() / batches.mean(), rel=0.01)
    assert factors(UNIFORM, "jagged", 16, 4).padding["history"] == 1.0


def test_two_sequences_share_the_slowest_rank():
    two = factors(LOGNORMAL, "jagged", 64, 8, model(ATTENTION, sequences=2))
    one = factors(LOGNORMAL, "jagged", 64, 8)
    for name in ("history", "history1"):
        assert 1.0 < two.sequences[name].pairs < one.sequences["history"].pairs


def test_one_rank_and_fixed_lengths_have_no_imbalance():
    assert factors(LOGNORMAL, "jagged", 8, 1).report() == {"slow_node": 1.0, "history.tokens": 1.0, "history.pairs": 1.0, "history.padding": 1.0}
    fixed = Lengths(kind="fixed", maximum=128)
    for policy in ("jagged", "padded", "local", "sorted_buckets", "base_batch_shuffling", "global"):
        assert factors(fixed, policy, 8, 16).sequences["history"] == imbalance.RankFactors(tokens=1.0, pairs=1.0)


def test_window_makes_work_linear_so_that_events_decide():
    window = LayerGroup(kind="self_attention", heads=4, head_dim=16, mlp_dim=256, window=8)
    work = imbalance.work_curve(model(window), "history", LOGNORMAL)
    values, _ = LOGNORMAL.pmf()
    assert work[-1] / values[-1] == pytest.approx(work[len(values) // 2] / values[len(values) // 2], rel=0.02)


def test_missing_lengths_are_named():
    with pytest.raises(KeyError):
        imbalance.slowest(model(ATTENTION), {}, policy="jagged", local_batch=1, ranks=2, devices_per_host=1, reliability=NO_TROUBLE)


@pytest.mark.parametrize(("rows", "zipf", "ids"), [(1000, 0.0, 500), (50_000, 1.05, 20_000), (50_000, 1.4, 100), (10, 1.0, 1000)])
def test_unique_ids_are_the_exact_expectation(rows, zipf, ids):
    p = np.arange(1, rows + 1) ** -zipf
    p /= p.sum()
    assert imbalance.unique_ratio(rows, zipf, ids) * ids == pytest.approx(np.sum(1 - (1 - p) ** ids), rel=2e-3)


def test_hot_shard_against_random_placement():
    rows, zipf, ids, ranks, shards = 20_000, 1.2, 2000, 8, 8
    p = np.arange(1, rows + 1) ** -zipf
    asked = ranks * (1 - (1 - p / p.sum()) ** ids)
    rng = np.random.default_rng(0)
    tops = [np.bincount(rng.integers(0, shards, rows), asked, shards).max() / (asked.sum() / shards) for _ in range(400)]
    assert imbalance.hot_shard_factor(rows, zipf, ids, ranks, shards) == pytest.approx(np.mean(tops), rel=0.01)
    assert imbalance.hot_shard_factor(rows, zipf, ids, ranks, 1) == 1.0


def test_slow_nodes_against_monte_carlo():
    reliability = Reliability(slow_node_probability=0.01, slow_node_factor=1.1, step_jitter=0.02)
    rng = np.random.default_rng(0)
    hosts = np.where(rng.random((4000, 64)) < 0.01, 1.1, 1.0)
    devices = hosts[:, :, None] + 0.02 * rng.standard_normal((4000, 64, 8))
    assert imbalance.slow_node_factor(reliability, 512, 8) == pytest.approx(devices.max(axis=(1, 2)).mean(), rel=0.002)
    assert imbalance.slow_node_factor(Reliability(slow_node_probability=0.5, slow_node_factor=2.0), 2, 1) == pytest.approx(1.75)
    assert imbalance.slow_node_factor(Reliability(), 4096, 8) == 1.0
