import dataclasses
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.codec import DecodeError, canonical, content_hash, decode, encode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    kind: Literal["left", "right"] = "left"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    ratio: float = 0.5
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (1, "a")
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    flag: bool = False

    def __post_init__(self):
        if self.ratio > 1:
            raise ValueError(f"ratio {self.ratio} is above 1")


outers = st.builds(
    Outer, name=st.text(max_size=5), ratio=st.floats(0, 1), inner=st.none() | st.builds(Inner, size=st.integers()), flag=st.booleans(),
    many=st.lists(st.builds(Inner, size=st.integers(), kind=st.sampled_from(["left", "right"])), max_size=3).map(tuple),
    pair=st.tuples(st.integers(), st.text(max_size=3)),
    table=st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=3))


@settings(max_examples=40, deadline=None)
@given(outers)
def test_round_trip_and_equal_hashes(value):
    again = decode(Outer, encode(value))
    assert again == value and content_hash(again) == content_hash(value)


@pytest.mark.parametrize(("body", "path", "message"), [
    ({}, "name", "missing"),
    ({"name": "x", "nmae": 1}, "nmae", "did you mean 'name'"),
    ({"name": "x", "inner": {"size": 1.5}}, "inner.size", "an integer is needed"),
    ({"name": "x", "inner": {"size": True}}, "inner.size", "an integer is needed"),
    ({"name": "x", "many": [{"size": 1}, {"size": 2, "kind": "up"}]}, "many[1].kind", "'up' is none of"),
    ({"name": "x", "many": 3}, "many", "a list is needed"),
    ({"name": "x", "pair": [1]}, "pair", "2 values are needed"),
    ({"name": "x", "table": {"a": "b"}}, "table.a", "a number is needed"),
    ({"name": "x", "ratio": float("nan")}, "ratio", "finite"),
    ({"name": "x", "ratio": 2}, "", "above 1"),
    ([], "", "a mapping is needed"),
])
def test_faults_are_named_by_their_path(body, path, message):
    with pytest.raises(DecodeError, match=message) as error:
        decode(Outer, body)
    assert error.value.path == path


def test_whole_floats_and_key_order_do_not_change_the_hash():
    assert canonical({"b": 600.0, "a": [1]}) == canonical({"a": [1.0], "b": 600}) == '{"a":[1],"b":600}'
    with pytest.raises(ValueError):
        canonical({"a": float("nan")})
