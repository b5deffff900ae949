"""Intervals from residuals of runs: they hold new runs as often as they say, whatever the cell, and are as wide as its errors."""
import numpy as np
import pytest

from costmodel import conformal
from costmodel.conformal import Intervals, cell, norm, widening

SPREADS = {("step", "host"): 0.08, ("step", "device"): 0.02, ("forward", "host"): 0.10, ("forward", "device"): 0.03, ("input", "device"): 0.2}


def drawn(rng: np.random.Generator, hosts: int, devices: int) -> dict[str, tuple[float, ...]]:
    counts = {"host": hosts, "device": devices}
    return {cell(name, maker): tuple(rng.standard_t(5, counts[maker]) * spread + 0.01) for (name, maker), spread in SPREADS.items()}


@pytest.mark.parametrize(("hosts", "devices"), [(12, 12), (6, 18), (3, 22), (2, 22)])
def test_new_runs_are_held_as_often_as_is_said(hosts, devices):
    rng, hits = np.random.default_rng(0), []
    for _ in range(150):
        made, new = Intervals(drawn(rng, hosts, devices)), drawn(rng, 1, 1)
        for (name, maker) in SPREADS:
            if hosts < conformal.OWN and maker == "host":
                continue
            value, step = 0.03, 0.1
            low, high = made.bounds(name, maker, value, step)
            hits.append(low <= value + norm(value, step) * new[cell(name, maker)][0] <= high)
    assert 0.87 < np.mean(hits) < 0.95


def test_a_cell_is_as_wide_as_its_own_errors_and_a_small_one_as_all_of_its_figure():
    rng = np.random.default_rng(1)
    made = Intervals(drawn(rng, 40, 40))
    width = lambda made, maker: np.subtract(*made.bounds("step", maker, 0.1, 0.1)[::-1])
    assert 2.5 < width(made, "host") / width(made, "device") < 6.0
    low, high = made.bounds("step", "device", 0.1, 0.1, widened=2.0)
    assert high - low == pytest.approx(2.0 * width(made, "device"))
    few = Intervals({"step@host": (0.1, -0.1), "step@device": tuple(rng.normal(0, 0.02, 25))})
    assert width(few, "host") > width(few, "device")


def test_small_cells_widen_no_large_one():
    """Half of the cells have 5 residuals, far from each other as few are: the others hold new runs as often as they say, no more often."""
    rng, hits = np.random.default_rng(2), {"host": [], "device": []}
    names = ("step", "forward", "backward", "sparse", "optimizer")
    for _ in range(200):
        made = Intervals({cell(name, maker): tuple(rng.normal(0.0, 0.02, n)) for name in names for maker, n in (("host", 5), ("device", 22))})
        for name in names:
            for maker, found in hits.items():
                low, high = made.bounds(name, maker, 1.0, 1.0)
                found += [low <= 1.0 + x <= high for x in rng.normal(0.0, 0.02, 4)]
    assert 0.885 < np.mean(hits["device"]) < 0.918 and 0.88 < np.mean(hits["host"]) < 0.96


def test_scores_of_few_and_of_many_are_alike():
    """Normal values by place and spread of n others stray as a normal value does, once they are scores."""
    rng = np.random.default_rng(3)
    shares = []
    for count in (5, 22):
        far = [score for _ in range(1500) for score in conformal._scores(rng.normal(size=count))]
        shares.append(np.mean(np.array(far) < 1.645))
    assert shares == pytest.approx([0.9, 0.9], abs=0.02)


def test_too_few_runs_make_no_interval():
    assert Intervals({}).bounds("step", "host", 1.0, 1.0) is None
    assert Intervals({"step@host": (0.1,) * 4, "step": (0.1,) * 40}).bounds("step", "host", 1.0, 1.0) is None


def test_time_that_nothing_near_was_measured_of_widens():
    assert widening({"measured": 0.6, "interpolated": 0.4}) == 1.0 and widening({"roofline": 1.0}) == 2.0
    assert widening({"interpolated": 0.75, "assumed": 0.25}) == pytest.approx(1.25)
