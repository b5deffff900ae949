"""Normalized entropy against plain sums."""

import math

import numpy as np
import pytest

from runtime.quality import NormalizedEntropy, normalized_entropy


def _plain(p, y):
    rate = sum(y) / len(y)
    own = sum(-math.log(a) if b else -math.log(1 - a) for a, b in zip(p, y)) / len(y)
    return own / (-rate * math.log(rate) - (1 - rate) * math.log(1 - rate))


def test_equals_a_plain_computation():
    rng = np.random.default_rng(0)
    p, y = rng.uniform(0.01, 0.99, 500), rng.random(500) < 0.3
    assert normalized_entropy(p, y) == pytest.approx(_plain(p, y), rel=1e-12)


def test_base_rate_scores_one_and_perfect_predictions_near_zero():
    y = np.array([1, 0, 0, 1, 0])
    assert normalized_entropy(np.full(5, 0.4), y) == pytest.approx(1.0, rel=1e-12)
    assert normalized_entropy(y.astype(float), y) < 1e-5


def test_parts_add_up_to_the_whole():
    rng = np.random.default_rng(1)
    logits, y = rng.normal(size=301), (rng.random(301) < 0.5).astype(np.float64)
    whole, parts, total = NormalizedEntropy(), [NormalizedEntropy() for _ in range(3)], NormalizedEntropy()
    whole.update(logits, y)
    for part, a, b in zip(parts, np.array_split(logits, 3), np.array_split(y, 3)):
        part.update(a, b)
        total.add(part.sums())
    assert total.value() == pytest.approx(whole.value(), rel=1e-12)


def test_large_logits_do_not_overflow():
    entropy = NormalizedEntropy()
    entropy.update(np.array([1e4, -1e4, 1e4]), np.array([1.0, 0.0, 0.0]))
    assert entropy.entropy == pytest.approx(1e4)


@pytest.mark.parametrize("labels", [[0, 0], [1, 1], []])
def test_one_kind_of_label_is_refused(labels):
    with pytest.raises(ValueError, match="both kinds"):
        normalized_entropy(np.full(len(labels), 0.5), np.array(labels))
