"""Where the points of a collective's curve are put."""
import math

import pytest
import torch

from runtime.microbench.collectives import GPU_SIZES, adaptive_timings, bend
from runtime.microbench.timing import Timing


def test_a_point_is_added_where_the_curve_bends():
    latency, rate = 1e-5, 1e11
    sizes = [2.0**e for e in range(12, 32, 3)]
    knee = bend([(s, latency + s / rate) for s in sizes])
    assert latency * rate / 8 < knee < 8 * latency * rate
    assert math.log2(knee) % 3 == pytest.approx(1.5)


def test_points_are_added_to_the_sizes_given_and_close_in_on_the_knee():
    latency, rate, n = 2e-5, 3e11, 2
    timed = lambda kind, elements: Timing(seconds=latency + 4 * elements / rate, noise=0.0, repeats=1)
    found = list(adaptive_timings("all_gather", n, torch.device("cpu"), added=4, timed=timed))
    sizes = [features["bytes"] for _, features, _ in found]
    assert sizes[:len(GPU_SIZES)] == list(GPU_SIZES) and len(set(sizes)) == len(GPU_SIZES) + 4
    assert all(size % (4 * n) == 0 for size in sizes)
    added = sizes[len(GPU_SIZES):]
    assert all(2.0**16 < size < 2.0**28 for size in added)
