"""Other people's systems: what they launch for a block's ops, and what that moves."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import costmodel
from costmodel.blocks import BatchShape, JaggedShape
from costmodel.blocks.llama import Llama, NextEvent
from costmodel.calibration import load
from costmodel.codec import encode
from costmodel.compute import FLASH_AFTER_HOPPER, FLASH_BEFORE_HOPPER, roofline_seconds
from costmodel.foreign import Sustained
from costmodel.memory import option_memory
from costmodel.model import LayerGroup
from costmodel.ops import BACKWARD, FORWARD, activation, attention, elementwise, layer_norm, linear, op
from costmodel.plan import Plan
from costmodel.regions import Region
from costmodel.systems import System, executed, fused_bytes

PHASES = (FORWARD, BACKWARD)


def block() -> tuple[Llama, BatchShape]:
    group = LayerGroup(kind="llama", count=1, heads=8, head_dim=64, mlp_dim=1024, causal=True, options={"kv_heads": 2})
    return Llama(group, 512, "text"), BatchShape(samples=2.0, sequences={"text": JaggedShape.of_lengths([256, 256])})


def moved(ops, phase, **system) -> float:
    return sum(one.bytes(at) for one, at in executed(ops, phase, System(**system), "llama"))


def test_a_run_is_one_kernel_that_reads_and_writes_what_leaves_it():
    """SwiGLU: two inputs and one output; a residual sum and the norm behind it: two inputs, the sum and the normalised."""
    swiglu = [activation("silu", 100, 64, "bf16"), elementwise("mul", 100, 64, "bf16")]
    assert fused_bytes(swiglu, FORWARD) == 3 * 2 * 6400
    residual = [elementwise("add", 100, 64, "bf16"), layer_norm(100, 64, "bf16")]
    assert fused_bytes(residual, FORWARD) == 4 * 2 * 6400
    alone = [layer_norm(100, 64, "bf16")]
    assert fused_bytes(alone, FORWARD) == alone[0].bytes(FORWARD) and fused_bytes(alone, BACKWARD) == alone[0].bytes(BACKWARD)


@pytest.mark.parametrize("phase", PHASES)
def test_less_is_moved_the_more_is_fused(phase):
    made, batch = block()
    ops = made.forward(batch, "bf16")
    none, norms, compiler = (moved(ops, phase, fusion=fusion) for fusion in ("none", "norms", "compiler"))
    assert none > norms > compiler
    # products stay, whatever is fused; where biases are part of them, backward of a layer is two and nothing else
    products = [one for one in ops if one.kind == "linear"]
    for fusion in ("none", "norms", "compiler"):
        assert [one for one, _ in executed(ops, phase, System(fusion=fusion), "llama") if one.kind == "linear"] == products
    found = [(one, at) for one, at in executed(ops, phase, System(fusion="epilogues"), "llama") if one.kind == "linear"]
    assert len(found) == len(products) * (1 if phase == FORWARD else 2) and {at for _, at in found} == {FORWARD}
    assert sum(one.flops(at) for one, at in found) == sum(one.flops(phase) for one in products)


def test_composed_norms_move_forty_bytes_an_element():
    (found,) = executed([layer_norm(1000, 512, "bf16")], FORWARD, System(), "llama")
    assert found[0].bytes(found[1]) == pytest.approx(40 * 512_000)
    (back,) = executed([layer_norm(1000, 512, "bf16")], BACKWARD, System(), "llama")
    assert back[0].bytes(back[1]) == pytest.approx(104 * 512_000)
    other = executed([layer_norm(1000, 512, "bf16")], BACKWARD, System(), "self_attention")  # a LayerNorm is one kernel of torch's
    assert other == [(layer_norm(1000, 512, "bf16"), BACKWARD)]


def test_epilogues_take_the_activation_behind_a_product_and_no_other():
    ops = [linear(8, 4, 4, "bf16"), activation("relu", 8, 4, "bf16"), linear(8, 4, 4, "bf16"), elementwise("add", 8, 4, "bf16"),
           activation("relu", 8, 4, "bf16")]
    kinds = [one.kind for one, _ in executed(ops, FORWARD, System(fusion="epilogues"), "mlp")]
    assert kinds == ["linear", "linear", "elementwise"]
    assert moved(ops, FORWARD, fusion="epilogues") < moved(ops, FORWARD, fusion="compiler") < moved(ops, FORWARD, fusion="norms")


def test_softmax_attention_is_torch_s_and_no_other_kind():
    shape = {"tokens": 512, "pairs": 65792, "longest": 256, "heads": 8, "head_dim": 64, "dtype": "bf16"}
    for name, variant in (("torch", "flash"), ("cudnn", "cudnn")):
        ((found, at),) = executed([attention("softmax", **shape)], BACKWARD, System(attention=name), "llama")
        assert (found.kind, found.variant, at) == ("sdpa", variant, BACKWARD)
        assert found.flops(at) == attention("softmax", **shape).flops(at) and found.bytes(at) == attention("softmax", **shape).bytes(at)
    for variant in ("hstu", "gdpa_silu", "softmax_window"):
        assert executed([attention(variant, **shape)], FORWARD, System(), "hstu") == [(attention(variant, **shape), FORWARD)]
    assert executed([attention("softmax", **shape)], FORWARD, System(attention="own"), "llama")[0][0].kind == "attention"


_ELEMENTWISE = st.sampled_from(("add", "mul", "cat", "norm", "silu"))


@given(st.lists(_ELEMENTWISE, min_size=1, max_size=8), st.integers(1, 5000), st.sampled_from(PHASES))
def test_fusing_never_moves_more_and_never_less_than_one_pass(names, m, phase):
    run = [layer_norm(m, 64, "bf16") if name == "norm" else activation("silu", m, 64, "bf16") if name == "silu" else elementwise(name, m, 64, "bf16")
           for name in names]
    apart = sum(one.bytes(FORWARD if one.variant == "add" else phase) for one in run)
    assert 2 * 2 * m * 64 <= fused_bytes(run, phase) <= max(apart, 2 * 2 * m * 64)


def test_alternate_keeps_attention_and_every_second_product():
    made, batch = block()
    again = made.recomputed(batch, "bf16", "alternate")
    products = [one for one in again if one.kind == "linear"]
    forward = [one for one in made.forward(batch, "bf16") if one.kind == "linear"]
    assert products == forward[1::2] and not any(one.kind == "attention" for one in again)
    saved = {policy: made.saved_bytes(batch, "bf16", policy) for policy in ("selective", "alternate", "full")}
    dropped = 2 * 512 * (2 * 64 + 512 + 1024)  # key, out, up
    assert saved["selective"] - saved["alternate"] == dropped and saved["alternate"] > saved["full"]


def test_what_a_device_keeps_up_bounds_products_and_distinct_rows(h200):
    kept = Sustained(0.7, 0.9)
    product = linear(8192, 8192, 8192, "bf16")
    assert kept.seconds(0.0, product, FORWARD, h200) == pytest.approx(2 * 8192**3 / (0.7 * h200.peak_flops["bf16"]))
    assert kept.seconds(1.0, product, FORWARD, h200) == 1.0
    rows = op("embedding_lookup", variant="pooled", ids=1e6, unique=2e5, dim=128, rows=1e7, tables=1)
    assert kept.seconds(0.0, rows, FORWARD, h200) == pytest.approx(2e5 * 512 / (0.9 * h200.memory_bandwidth))
    assert kept.seconds(1e-9, layer_norm(8, 8), FORWARD, h200) == 1e-9


def test_a_plan_without_a_system_is_written_as_before(make_plan, tmp_path):
    """And one with a system comes back as it was, but never as one to execute."""
    plan = make_plan()
    assert "system" not in encode(plan) and plan.system is None
    other = dataclasses.replace(plan, system=System(fusion="compiler"), predict_only=("another system's",))
    other.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == other and other.identity() != dataclasses.replace(plan, predict_only=other.predict_only).identity()
    with pytest.raises(ValueError, match="predicted, not executed"):
        dataclasses.replace(other, predict_only=())


def test_a_compiled_loss_reads_logits_once_and_twice_with_their_gradient():
    loss = [linear(64, 8, 1000, "bf16"), op("cross_entropy", m=64, n=1000, dtype="bf16")]
    for phase, each in ((FORWARD, 2), (BACKWARD, 4)):
        found = executed(loss, phase, System(loss="compiled"), "next_event")
        assert found[0] == (loss[0], phase)
        assert found[1][0].bytes(found[1][1]) == pytest.approx(each * 64_000)
        assert executed(loss, phase, System(), "next_event")[1] == (loss[1], phase)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_backward_of_cross_entropy_holds_three_copies_of_the_logits_in_fp32(policy):
    """Log-probabilities, their gradient and the logits'; compiled, the logits and their gradient in 16 bits."""
    made, batch = NextEvent("text", 8, 1000), BatchShape(samples=1.0, sequences={"text": JaggedShape.of_lengths([64])})
    head = Region(name="text.next", count=1, sequence="text", block=made)
    found = option_memory(head, batch, precision="bf16", checkpoint=policy, fsdp=1)
    assert 12 * 64_000 <= found.whole + found.workspace <= 14 * 64_000 + 4 * 64 * 16
    less, workspace = made.compiled_loss_bytes(batch, "bf16")
    assert 4 * 64_000 <= found.whole - less + workspace <= 6 * 64_000 + 4 * 64 * 16


def test_flash_reaches_more_of_an_older_peak_and_less_of_a_newer(h200):
    """Transferred and by roofline; cuDNN's, products and a device of the same kind as measured on are left alone."""
    older = dataclasses.replace(h200, name="older", peak_flops={"fp32": h200.peak_flops["fp32"], "bf16": h200.peak_flops["bf16"]})
    newer = dataclasses.replace(h200, name="newer", peak_flops={**h200.peak_flops, "mxfp8": h200.peak_flops["fp8"]})
    other, known = dataclasses.replace(h200, name="other"), load(Path(costmodel.__file__).parent / "calibrations" / "H200-SXM.json")
    shape = {"tokens": 8192.0, "pairs": 33558528.0, "longest": 8192.0, "heads": 32, "head_dim": 128}
    for phase in PHASES:
        flash = op("sdpa", variant="flash", dtype="bf16", **shape)
        same, before, after = (known.predict(flash, phase, device=device).seconds for device in (other, older, newer))
        assert same == pytest.approx(FLASH_BEFORE_HOPPER * before) and same == pytest.approx(FLASH_AFTER_HOPPER * after)
        assert roofline_seconds(flash, phase, newer) > 2.2 * roofline_seconds(flash, phase, other)
        assert roofline_seconds(flash, phase, other) > 1.8 * roofline_seconds(flash, phase, older)
        for one in (op("sdpa", variant="cudnn", dtype="bf16", **shape), linear(4096, 4096, 4096, "bf16")):
            assert len({known.predict(one, phase, device=device).seconds for device in (other, older, newer)}) == 1
            assert roofline_seconds(one, phase, other) == roofline_seconds(one, phase, older)
