import numpy as np
import pytest

from costmodel.workload import Lengths, Workload

SPECS = [
    Lengths(kind="fixed", maximum=7), Lengths(kind="uniform", minimum=2, maximum=9), Lengths(kind="lognormal", maximum=300, median=40, sigma=1.0),
    Lengths(kind="histogram", maximum=50, values=(3, 50, 3), weights=(1.0, 1.0, 2.0)),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
def test_moments_are_those_of_the_samples(spec):
    lengths, p = spec.pmf()
    assert p.sum() == pytest.approx(1) and (np.diff(lengths) > 0).all()
    drawn = spec.sample(np.random.default_rng(0), 40_000)
    assert drawn.min() >= spec.minimum and drawn.max() <= spec.maximum
    assert spec.mean() == pytest.approx(drawn.mean(), rel=0.02)
    assert spec.moment(2) == pytest.approx((drawn.astype(float) ** 2).mean(), rel=0.04)
    window = 5
    assert spec.windowed(window) == pytest.approx(np.mean([np.minimum(np.arange(1, n + 1), window).sum() for n in drawn[:5000]]), rel=0.05)


def test_values():
    assert Lengths(kind="uniform", minimum=2, maximum=4).mean() == 3
    assert SPECS[3].mean() == pytest.approx((3 * 3 + 50) / 4)
    median = Lengths(kind="lognormal", maximum=10_000, median=600, sigma=1.0)
    lengths, p = median.pmf()
    assert lengths[np.searchsorted(np.cumsum(p), 0.5)] == pytest.approx(600, rel=0.01)


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"kind": "fixed", "maximum": 3, "minimum": 5}, "minimum <= maximum"),
    ({"kind": "lognormal", "maximum": 3}, "median > 0"),
    ({"kind": "histogram", "maximum": 3}, "as many weights"),
    ({"kind": "histogram", "maximum": 3, "values": (1,), "weights": (0.0,)}, "not all 0"),
    ({"kind": "histogram", "maximum": 3, "values": (9,), "weights": (1.0,)}, "must lie in"),
])
def test_impossible_lengths_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Lengths(**kwargs)


def test_exactly_one_batch():
    with pytest.raises(ValueError, match="exactly one"):
        Workload(name="w", lengths={})
    with pytest.raises(ValueError, match="exactly one"):
        Workload(name="w", lengths={}, local_batch=3, global_batch=6)
    with pytest.raises(ValueError, match="local_batch must be >= 1"):
        Workload(name="w", lengths={}, local_batch=0)
    assert Workload(name="w", lengths={}, local_batch=3).global_batch_on(8) == 24
    assert Workload(name="w", lengths={}, global_batch=24).global_batch_on(8) == 24
