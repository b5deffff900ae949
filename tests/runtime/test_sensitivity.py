"""Sensitivity of regions: the reported noise is that of the region's own output, and formats come out in their order."""
import math

import pytest
import runtime_models as models
import torch

from costmodel.plan import Layout
from runtime.precision.sensitivity import measure


@pytest.fixture(scope="module")
def rows():
    spec = models.model((models.LAYERS["self_attention"][2],))
    batches = [models.batch(spec, [4, 0, 7, 1, 3, 12], seed=s) for s in range(2)]
    return {(r["region"], r["recipe"]): r for r in measure(models.plan(Layout(), model_spec=spec), batches)}


def test_formats_come_out_in_their_order(rows):
    found = {recipe: rows["history.0", recipe] for recipe in ("bf16", "fp8_row", "fp8_tensor", "mxfp8")}
    assert found["bf16"]["snr_db"] > 40 > found["fp8_row"]["snr_db"] > 15
    assert found["bf16"]["cosine"] > found["fp8_row"]["cosine"] > 0.8
    for row in found.values():
        assert row["snr_db"] == pytest.approx(-10 * math.log10(row["noise"])) and 0 <= row["underflow"] <= 1


def test_saved_formats_change_gradients_and_no_output(rows):
    plain, eight, four = (rows["history.0", recipe] for recipe in ("bf16", "quantized", "quantized4"))
    assert plain["snr_db"] == eight["snr_db"] == four["snr_db"]
    assert plain["gradient_noise"] < four["gradient_noise"] == four["noise"] and eight["gradient_noise"] < four["gradient_noise"]


def test_what_cannot_run_is_refused_with_its_reason(rows):
    assert "needs multiples of 128" in rows["history.0", "fp8_block"]["refused"] and "noise" not in rows["history.0", "fp8_block"]
    assert "needs multiples of" in rows["heads", "fp8_row"]["refused"]


def test_underflow_counts_what_a_tensor_wise_scale_loses():
    spec = models.model((models.LAYERS["self_attention"][2],))
    batch = models.batch(spec, [4, 6, 7], seed=0)
    torch.manual_seed(0)
    found = {r["recipe"]: r for r in measure(models.plan(Layout(), model_spec=spec), [batch], recipes=("fp8_tensor", "fp8_row"))
             if r["region"] == "history.0"}
    assert found["fp8_row"]["underflow"] <= found["fp8_tensor"]["underflow"] < 0.05
