import pytest

from costmodel.ops import BACKWARD, FORWARD, KINDS, STEP, attention, elementwise, linear, op


def test_matrix_products_count_two_per_multiply_add_and_twice_that_backward():
    assert linear(3, 5, 7).flops(FORWARD) == 2 * 3 * 5 * 7
    assert linear(3, 5, 7).flops(BACKWARD) == 4 * 3 * 5 * 7
    one = attention("softmax", tokens=10, pairs=55, longest=10, heads=2, head_dim=8)
    assert one.flops(FORWARD) == 4 * 55 * 2 * 8


def test_bytes_follow_the_dtype_and_count():
    assert linear(3, 5, 7, "bf16").bytes(FORWARD) * 2 == linear(3, 5, 7).bytes(FORWARD)
    assert linear(3, 5, 7, "fp8_row").bytes(FORWARD) * 4 == linear(3, 5, 7).bytes(FORWARD)
    assert linear(3, 5, 7).times(4).flops(FORWARD) == 4 * linear(3, 5, 7).flops(FORWARD)


def test_update_bytes_grow_with_optimizer_state():
    def update(variant):
        return op("embedding_update", variant=variant, ids=100, unique=50, dim=16, rows=1000, tables=1).bytes(STEP)

    assert update("sgd") < update("rowwise_adagrad") < update("adagrad") < update("adam")
    assert update("rowwise_adagrad") - update("sgd") == 8 * 50


@pytest.mark.parametrize(("kind", "kwargs", "message"), [
    ("linaer", {}, "unknown op kind"),
    ("linear", {"m": 1, "k": 2}, "features"),
    ("linear", {"m": 1, "k": 2, "n": 3, "x": 1}, "features"),
    ("linear", {"m": 1, "k": -2, "n": 3}, "k must be"),
    ("linear", {"m": 1, "k": float("nan"), "n": 3}, "k must be"),
    ("activation", {"m": 1, "n": 2, "variant": "swish"}, "variant 'swish'"),
    ("embedding_update", {"ids": 1, "unique": 1, "dim": 1, "rows": 1, "tables": 1, "variant": "adamax"}, "adamax"),
    ("linear", {"m": 1, "k": 2, "n": 3, "dtype": "int3"}, "unknown dtype"),
])
def test_refuses_what_is_not_an_op(kind, kwargs, message):
    with pytest.raises(ValueError, match=message):
        op(kind, **kwargs)


def test_every_kind_has_finite_costs_in_every_phase():
    for kind, spec in KINDS.items():
        for variant in spec.variants or ("",):
            one = op(kind, variant=variant, **dict.fromkeys(spec.features, 3.0))
            for phase in spec.phases:
                assert one.flops(phase) >= 0 and one.bytes(phase) >= 0


def test_ops_are_hashable_and_equal_by_content():
    assert elementwise("add", 2, 3) == elementwise("add", 2.0, 3.0)
    assert len({elementwise("add", 2, 3), elementwise("add", 2, 3), elementwise("mul", 2, 3)}) == 2
