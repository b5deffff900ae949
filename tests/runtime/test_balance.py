"""Batching policies: what every one keeps, and how well each balances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.workload import Lengths
from runtime import balance

POLICIES = ("padded", "jagged", "sorted_buckets", "local", "base_batch_shuffling", "global")
LOGNORMAL = Lengths(kind="lognormal", median=600, sigma=1.0, maximum=8192)


def _imbalance(policy: str, batch: int, ranks: int = 8, windows: int = 24) -> float:
    """Attention work, max over mean, `batch` samples a rank."""
    rng = np.random.default_rng(7)
    steps = balance.window_steps(policy)
    found = []
    for _ in range(max(1, windows // steps)):
        work = balance.attention_pairs(LOGNORMAL.sample(rng, steps * ranks * batch))
        found.append(balance.imbalance(work, balance.arrange(policy, work, steps=steps, ranks=ranks)))
    return float(np.mean(found))


@settings(max_examples=40, deadline=None)
@given(policy=st.sampled_from(POLICIES), steps=st.integers(1, 4), ranks=st.integers(1, 5), size=st.integers(1, 200), seed=st.integers(0, 10))
def test_every_sample_once_and_ranks_equally_many(policy, steps, ranks, size, seed):
    work = np.random.default_rng(seed).integers(0, 1000, steps * ranks * size).astype(float)
    places = balance.arrange(policy, work, steps=steps, ranks=ranks, seed=seed)
    assert places.shape == (steps, ranks, size)
    assert np.array_equal(np.sort(places.ravel()), np.arange(len(work)))


@pytest.mark.parametrize("policy", ["padded", "jagged", "base_batch_shuffling", "global"])
def test_global_batches_keep_their_samples(policy):
    work = np.random.default_rng(0).random(3 * 4 * 256)
    places = balance.arrange(policy, work, steps=3, ranks=4)
    for step in range(3):
        assert np.array_equal(np.sort(places[step].ravel()), np.arange(step * 1024, (step + 1) * 1024))


def test_local_moves_nothing_between_ranks():
    work = np.random.default_rng(0).random(8 * 3 * 16)
    places = balance.arrange("local", work, steps=8, ranks=3)
    for rank in range(3):
        assert set((places[:, rank] // 16 % 3).ravel()) == {rank}


def test_base_batch_shuffling_moves_whole_sub_batches():
    work = np.random.default_rng(0).random(4 * 512)
    places = balance.arrange("base_batch_shuffling", work, steps=1, ranks=4).reshape(-1, balance.SUB_BATCH)
    assert all(np.array_equal(sub, np.arange(sub[0], sub[0] + 128)) and sub[0] % 128 == 0 for sub in places)


def test_sub_batches_divide_the_batch():
    assert [balance.sub_batch_size(n) for n in (1, 96, 128, 200, 1024)] == [1, 96, 128, 100, 128]


def test_base_batch_shuffling_meets_its_bars():
    assert _imbalance("jagged", 1024) >= 1.10
    assert _imbalance("base_batch_shuffling", 1024) <= 1.03
    assert _imbalance("base_batch_shuffling", 2048) <= 1.01


def test_the_more_may_move_the_better_the_balance():
    jagged, local, shuffled, everywhere = (_imbalance(p, 512) for p in ("jagged", "local", "base_batch_shuffling", "global"))
    assert jagged > local > everywhere
    assert jagged > shuffled > everywhere


def test_sorted_buckets_have_like_lengths():
    lengths = LOGNORMAL.sample(np.random.default_rng(0), 8 * 2 * 128)
    places = balance.arrange("sorted_buckets", lengths.astype(float), steps=8, ranks=2)
    spread = lengths[places].reshape(8, -1).std(axis=1).mean()
    assert spread < 0.5 * lengths.std()


def test_uneven_numbers_are_refused():
    with pytest.raises(ValueError, match="do not divide"):
        balance.arrange("jagged", np.ones(10), steps=1, ranks=3)
    with pytest.raises(ValueError, match="unknown batching policy"):
        balance.arrange("fair", np.ones(10), steps=1, ranks=2)
