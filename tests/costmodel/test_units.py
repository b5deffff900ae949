import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.units import EXAMPLES, UNITS, parse, show, show_count, show_gib


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("4.8 TB/s", "bytes/s", 4.8e12),
        ("400 Gb/s", "bytes/s", 5e10),
        ("400Gbit/s", "bytes/s", 5e10),
        ("141 GB", "bytes", 1.41e11),
        ("141 GiB", "bytes", 141 * 2**30),
        ("1_000 MB", "bytes", 1e9),
        ("5 us", "seconds", 5e-6),
        ("100 µs", "seconds", 1e-4),
        ("989 TFLOP/s", "FLOP/s", 9.89e14),
        ("2.5 $/h", "$/h", 2.5),
        ("24 $/day", "$/h", 1.0),
        ("0.7 kW", "watts", 700.0),
        (0, "bytes", 0.0),
        (".5 s", "seconds", 0.5),
        ("1e3 B", "bytes", 1000.0),
    ],
)
def test_parse(text, kind, value):
    assert parse(text, kind) == pytest.approx(value, rel=1e-12)


def test_decimal_and_binary_prefixes_differ():
    assert parse("1 GB", "bytes") == 1e9
    assert parse("1 GiB", "bytes") == 2**30


def test_written_powers_of_ten_are_exact():
    assert parse("100 us", "seconds") == 1e-4


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (80, "bytes", ["80", "no unit", "141 GB"]),
        ("80", "bytes", ["no unit"]),
        ("80 GB/s", "bytes", ["bytes/s", "141 GB"]),
        ("80 gb", "bytes", ["unknown unit 'gb'", "'GB'"]),
        ("80 furlongs", "bytes", ["unknown unit 'furlongs'"]),
        ("lots", "bytes", ["'lots'", "is needed"]),
        (True, "bytes", ["True"]),
        (None, "seconds", ["None", "5 us"]),
        ([1], "seconds", ["[1]"]),
        ("nan s", "seconds", ["nan"]),
        ("5 Gb", "bytes", ["unknown unit"]),
    ],
)
def test_what_is_no_quantity_says_what_is(text, kind, words):
    with pytest.raises(ValueError) as caught:
        parse(text, kind)
    for word in words:
        assert word in str(caught.value)


def test_every_example_reads():
    for kind, example in EXAMPLES.items():
        assert parse(example.split(" (")[0], kind) > 0


@given(st.floats(min_value=1e-9, max_value=1e20), st.sampled_from(sorted(UNITS)))
def test_what_is_shown_reads_back_to_four_digits(value, kind):
    assert parse(show(value, kind), kind) == pytest.approx(value, rel=1e-3, abs=5e-10)


def test_show():
    assert show(1.41e11, "bytes") == "141 GB"
    assert show(4.8e12, "bytes/s") == "4.8 TB/s"
    assert show(0.01234, "seconds") == "12.34 ms"
    assert show(0, "bytes") == "0 B"
    assert show(999.97e9, "bytes") == "1 TB"
    assert show_gib(2**30) == "1 GiB"
    assert show_gib(0) == "0 B"
    assert show_count(2.6e12) == "2.6 T"
    assert show_count(512) == "512"
    assert not math.isnan(parse(show(1e-12, "seconds"), "seconds"))
