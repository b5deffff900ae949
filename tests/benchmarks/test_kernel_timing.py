"""The copy rate that shares of bandwidth divide by must not come out low unnoticed."""

import itertools

import pytest

from benchmarks.kernels._timing import best_rate


def test_a_low_round_is_measured_again():
    values = itertools.chain([2.8e12] * 5, itertools.repeat(4.3e12))
    assert best_rate(lambda: next(values), 3.5e12) == 4.3e12


def test_the_best_of_the_rounds_counts_and_no_more_are_run_than_needed():
    values = iter([4.1e12, 4.3e12, 4.2e12, 4.0e12, 3.9e12])
    assert best_rate(lambda: next(values), 3.5e12) == 4.3e12


def test_a_rate_that_stays_low_is_said():
    with pytest.warns(UserWarning, match=r"2\.80 TB/s"):
        assert best_rate(lambda: 2.8e12, 3.5e12) == 2.8e12
