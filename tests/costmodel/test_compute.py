import dataclasses

import pytest

from costmodel import compute
from costmodel.ops import BACKWARD, FORWARD, STEP, attention, elementwise, linear, op

OPS = [(linear(512, 256, 128, "bf16"), FORWARD), (linear(4, 4096, 4096), BACKWARD), (elementwise("add", 1000, 64), FORWARD),
       (attention("softmax", tokens=1e4, pairs=1e7, longest=2000, heads=4, head_dim=64, dtype="bf16"), FORWARD),
       (op("embedding_lookup", variant="pooled", ids=1e5, unique=1e4, dim=128, rows=1e6, tables=1), FORWARD)]


@pytest.mark.parametrize(("one", "phase"), OPS)
def test_roofline_is_monotone_in_peak_and_bandwidth_and_above_ideal(one, phase, h200):
    base = compute.roofline_seconds(one, phase, h200)
    assert base >= compute.ideal_seconds(one, phase, h200) > 0
    for faster in (dataclasses.replace(h200, memory_bandwidth=2 * h200.memory_bandwidth),
                   dataclasses.replace(h200, peak_flops={k: 2 * v for k, v in h200.peak_flops.items()})):
        assert compute.roofline_seconds(one, phase, faster) <= base
    both = dataclasses.replace(h200, memory_bandwidth=2 * h200.memory_bandwidth, peak_flops={k: 2 * v for k, v in h200.peak_flops.items()})
    assert compute.roofline_seconds(one, phase, both) - compute.KERNEL_SECONDS == pytest.approx((base - compute.KERNEL_SECONDS) / 2)


def test_formats_the_device_lacks_run_at_the_next_wider_peak(h200, core):
    assert compute.peak_flops(h200, "fp8_row") == 1979e12
    assert compute.peak_flops(h200, "fp16") == 989e12
    assert compute.peak_flops(dataclasses.replace(h200, peak_flops={"fp32": 1e12, "bf16": 2e12}), "mxfp8") == 2e12
    assert compute.peak_flops(dataclasses.replace(core, peak_flops={"fp32": 1e12}), "bf16") == 1e12


def test_the_roof_that_limits(h200):
    assert compute.limiting(linear(8192, 8192, 8192, "bf16"), FORWARD, h200) == "compute"
    assert compute.limiting(linear(1, 8192, 8192, "bf16"), FORWARD, h200) == "hbm_bandwidth"


def test_repetitions_add_up(h200):
    one = linear(512, 256, 128)
    assert compute.roofline_seconds(one.times(3), FORWARD, h200) == pytest.approx(3 * compute.roofline_seconds(one, FORWARD, h200))
    batch = op("input", samples=100, events=1000)
    assert compute.roofline_seconds(batch, STEP, h200) > compute.HOST_INPUT_SECONDS


def test_torch_s_attention_without_a_curve_is_as_fast_as_published(h200):
    """FlashAttention-2 333 TFLOPS forward on an H100 of the same peak, and 318 backward by its 2.5 x forward (arXiv 2407.08608); cuDNN is faster."""
    shape = {"tokens": 16384.0, "pairs": 8192.0 * 8193, "longest": 8192.0, "heads": 16.0, "head_dim": 128.0, "dtype": "bf16"}
    flash, cudnn = (op("sdpa", variant=variant, **shape) for variant in ("flash", "cudnn"))
    for phase, published in ((FORWARD, 333e12), (BACKWARD, 318e12 / 1.25)):
        assert flash.flops(phase) / compute.roofline_seconds(flash, phase, h200) == pytest.approx(published, rel=0.06)
        assert compute.roofline_seconds(cudnn, phase, h200) < compute.roofline_seconds(flash, phase, h200)
    assert flash.flops(FORWARD) == attention("softmax", **{**shape, "heads": 16, "head_dim": 128}).flops(FORWARD)
