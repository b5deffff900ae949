import pytest

from costmodel.quantity import SOURCES, Quantity, worst


def test_sum_adds_ends_and_takes_the_weakest_source():
    total = Quantity.relative(2.0, 0.1, 0.2, "measured") + Quantity.relative(1.0, 0.5, 1.0, "roofline")
    assert (total.value, total.source) == (3.0, "roofline")
    assert total.low == pytest.approx(1.8 + 0.5)
    assert total.high == pytest.approx(2.4 + 2.0)


def test_scaling_keeps_the_relative_width():
    q = Quantity.relative(2.0, 0.1, 0.2, "interpolated").scaled(3)
    assert (q.value, q.low, q.high) == pytest.approx((6.0, 5.4, 7.2))


def test_refuses_a_value_outside_its_interval_and_a_negative_scale():
    with pytest.raises(ValueError, match="does not hold"):
        Quantity(value=1.0, low=2.0, high=3.0, source="measured")
    with pytest.raises(ValueError, match=">= 0"):
        Quantity.exact(1.0).scaled(-1)


def test_worst_orders_sources():
    assert [worst(SOURCES[:i + 1]) for i in range(len(SOURCES))] == list(SOURCES)
    assert worst(()) == "measured"
