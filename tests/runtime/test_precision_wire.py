"""Rows on the wire: bytes, values, and training between two ranks."""
import math

import pytest
import runtime_models as models
import torch

from costmodel.lower import batch_shape
from costmodel.plan import Layout
from costmodel.sparse import table_loads
from costmodel.wire import LOW_WIRES, row_bytes, wire_bytes, wires
from runtime.precision.wire import WireFormat

STEPS = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4, "int8": 1 / 254, "int4": 1 / 14}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("width", [1, 7, 32])
def test_rows_come_back_within_the_formats_step_in_the_counted_bytes(name, width):
    torch.manual_seed(0)
    rows = torch.randn(50, width) * torch.logspace(-3, 3, 50).unsqueeze(1)
    rows[3] = 0.0
    wire = WireFormat(name)
    flat = wire.pack(rows)
    assert flat.numel() * flat.element_size() == 50 * row_bytes(name, width)
    back = wire.unpack(flat, width).float()
    assert ((back - rows).abs().amax(1) <= STEPS[name] * rows.abs().amax(1) * (1 + 1e-5)).all()
    assert wire.unpack(wire.pack(rows[:0]), width).shape == (0, width)


@pytest.mark.parametrize("name", LOW_WIRES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_row_that_is_not_finite_says_so(name, bad):
    rows = torch.ones(3, 8)
    rows[1, 2] = bad
    back = WireFormat(name).unpack(WireFormat(name).pack(rows), 8)
    assert back[1].isnan().any() and torch.allclose(back[::2], rows[::2])


def test_defaults():
    assert wires(models.TABLES, None, None) == ("fp32", "fp32")
    assert wires(models.TABLES, "int4", None) == ("int4", "bf16") and wires(models.TABLES, "fp8", "fp8") == ("fp8", "fp8")


def modelled(rows: str, gradients: str) -> tuple[float, float]:
    plan = models.plan(Layout(fsdp=2, sparse_group=2), sharding="row_wise", wire=rows, wire_gradients=gradients)
    return wire_bytes(plan, table_loads(plan, {n: s.tokens for n, s in batch_shape(plan).sequences.items()}))


@pytest.mark.parametrize(("name", "gradients"), [("fp8", "bf16"), ("int8", "bf16"), ("int4", "bf16"), ("fp8", "fp8"), ("bf16", "bf16")])
def test_two_ranks_train_with_it_and_send_what_the_cost_model_counts(checks_on_2, name, gradients):
    """The runtime's bytes of six steps; against fp32 they fall as the cost model says."""
    found = [rank["check_wires"][f"{name}/{gradients}"] for rank in checks_on_2]
    exact = checks_on_2[0]["check_wires"]["fp32/fp32"]
    assert found[0]["losses"] == found[1]["losses"] != exact["losses"]
    assert found[0]["losses"] == pytest.approx(exact["losses"], rel={"int4": 0.05}.get(name, 0.01))
    expected, wide = (modelled(*pair) for pair in ((name, gradients), ("fp32", "fp32")))
    for what, predicted, predicted_wide in zip(("embeddings", "gradients"), expected, wide):
        assert found[0]["sent"][what] / exact["sent"][what] == pytest.approx(predicted / predicted_wide, rel=0.02)
        assert exact["sent"][what] / 6 == pytest.approx(predicted_wide, rel=0.15)  # six small batches against the expected one
        # rows do not depend on the format: what is sent follows from widths alone
        of = {"embeddings": name, "gradients": gradients}[what]
        assert [f["sent"][what] for f in found] == [sum(row_bytes(of, int(w)) * n for w, n in f["rows"][what].items()) for f in found]
