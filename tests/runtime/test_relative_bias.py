"""HSTU's bias by time and position in the model: blocks against plain products and the cost model, encoders, sources, training."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import runtime_models as models
import torch
from attention_reference import Counted

import costmodel.blocks as costs
import costmodel.calibration
from costmodel.blocks import BatchShape, JaggedShape
from costmodel.blocks.attention import BIAS_SCRATCH
from costmodel.calibration import load
from costmodel.codec import canonical, content_hash, decode, encode
from costmodel.compute import BIAS_FLOPS, bias_seconds, roofline_seconds
from costmodel.memory import input_bytes
from costmodel.model import Layer, LayerGroup, Model
from costmodel.ops import BACKWARD, FORWARD, attention
from costmodel.plan import Layout
from runtime.checkpointing import apply_checkpointing
from runtime.data import open_source
from runtime.memory import StorageTracker, storage_ids
from runtime.microbench.cases import cases
from runtime.microbench.requests import attention_requests
from runtime.model import build_block
from runtime.model.sequence import SequenceEncoder
from runtime.model.times import event_times
from runtime.precision.attention import use_fp8_attention
from runtime.trainer import Trainer

LENGTHS = [30, 0, 17, 3]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
KINDS = [pytest.param(layer, id=layer.kind) for layer in models.TIMED]


def times() -> torch.Tensor:
    return torch.randint(1 << 20, (50,), generator=torch.Generator().manual_seed(0)).sort().values


def test_an_event_is_asked_about_when_the_next_one_happens():
    stamps = torch.tensor([5, 9, 20, 7, 8])
    found = event_times(stamps, torch.tensor([0, 0, 3, 3, 5, 5]))
    assert found.tolist() == [[5, 9, 20, 7, 8], [9, 20, 20, 8, 8]]
    assert event_times(stamps[:0], torch.tensor([0, 0])).shape == (2, 0)
    assert all(row.is_contiguous() and row.data_ptr() % 16 == 0 for row in found)


@pytest.mark.parametrize("layer", KINDS)
def test_parameters(layer):
    module, cost = build_block(32, layer), costs.BLOCKS[layer.kind](layer, 32, "history")
    assert sorted(tuple(p.shape) for p in module.parameters()) == sorted(shape for _, shape in cost.parameters)
    plain = dataclasses.replace(layer, time_buckets=None, relative_positions=None)
    if layer.kind == "hstu":
        more = cost.num_parameters - costs.BLOCKS[layer.kind](plain, 32, "history").num_parameters
        assert more == layer.time_buckets + 1 + 2 * layer.relative_positions - 1


@pytest.mark.parametrize("layer", KINDS)
def test_saved_bytes(layer):
    module, cost = build_block(32, layer), costs.BLOCKS[layer.kind](layer, 32, "history")
    x, both, shape = torch.randn(50, 32, requires_grad=True), event_times(times(), OFFSETS), {"history": JaggedShape.of_lengths(LENGTHS)}
    for policy in ("none", "selective", "full"):
        apply_checkpointing(module, policy)
        with StorageTracker() as tracker:
            out = module(x, OFFSETS, 30, both)
        kept = tracker.alive_bytes(storage_ids([*module.parameters(), OFFSETS, both, x, out])) + x.nbytes + both.nbytes
        assert kept == pytest.approx(cost.saved_bytes(BatchShape(samples=4.0, sequences=shape), "fp32", policy), rel=0.1), policy
        module = build_block(32, layer)


@pytest.mark.parametrize("layer", KINDS)
def test_values_and_gradients(layer, monkeypatch):
    torch.manual_seed(0)
    module, both = build_block(16, layer).double(), event_times(times(), OFFSETS)
    for name, parameter in module.named_parameters():
        if "bias.time" in name or "bias.position" in name:
            torch.nn.init.normal_(parameter)
    x = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    fast = module(x, OFFSETS, 30, both)
    tables = [p for n, p in module.named_parameters() if n.endswith(("bias.time", "bias.position"))]
    own = torch.autograd.grad(fast.sum(), [x, *tables])
    counted = Counted()
    for target in ("runtime.model.self_attention", "runtime.model.hstu"):
        monkeypatch.setattr(f"{target}.gdpa", counted.activated)
    monkeypatch.setattr("runtime.model.self_attention.jagged_attention", counted.softmax)
    plain = module(x, OFFSETS, 30, both)
    torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-9)
    for a, b in zip(own, torch.autograd.grad(plain.sum(), [x, *tables])):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match="needs the times"):
        module(x, OFFSETS, 30) if layer.kind != "pyramid" else module(x, OFFSETS, 30, None)


def encoder(layers=models.TIMED) -> SequenceEncoder:
    torch.manual_seed(1)
    return SequenceEncoder(24, 32, layers)


def test_encoders_pad_and_cut_times_as_events():
    module, events, lengths = encoder(), torch.randn(50, 24), np.array(LENGTHS)
    history, summary = module(events, OFFSETS, 30, lengths, times())
    again = encoder()
    again.load_state_dict(module.state_dict())
    again.pad()
    padded, other = again(events, OFFSETS, 30, lengths, times())
    torch.testing.assert_close(padded.events, history.events)
    torch.testing.assert_close(other, summary)
    for i, start in ((0, 0), (2, 30), (3, 47)):  # each history alone gives the same
        rows = slice(start, start + LENGTHS[i])
        one = module(events[rows], torch.tensor([0, LENGTHS[i]]), LENGTHS[i], lengths[i:i + 1], times()[rows])[1]
        torch.testing.assert_close(one[0], summary[i])
    later = module(events, OFFSETS, 30, lengths, times() * 100)[1]
    assert not torch.allclose(later[0], summary[0])
    shifted = module(events, OFFSETS, 30, lengths, times() + 10**9)[1]
    torch.testing.assert_close(shifted, summary)  # only differences count


def spec(**changes):
    return models.model(models.TIMED, **changes)


def test_sources_give_times_and_batches_count_them():
    assert spec().sequences[0].timed and not models.model().sequences[0].timed
    batch = open_source(spec(), models.workload(), seed=0).build(np.array([5, 9]))
    assert batch.times["history"].dtype == torch.int64
    shape = BatchShape(samples=4.0, sequences={"history": JaggedShape.of_lengths(LENGTHS)})
    plans = [models.plan(Layout(), model_spec=one) for one in (models.model(), spec())]
    assert input_bytes(plans[1], shape) - input_bytes(plans[0], shape) == 8 * 50


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_a_model_with_bias_trains(checkpoint):
    """Tables move, and policies change nothing."""
    losses = {}
    for policy in ("none", checkpoint):
        plan = models.plan(Layout(), model_spec=spec(), checkpoint=policy)
        trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
        before = {n: p.detach().clone() for n, p in trainer.model.dense.named_parameters() if n.endswith(("bias.time", "bias.position"))}
        trainer.train(4)
        losses[policy] = trainer.losses
        assert len(before) == 5 and all(not torch.equal(p, before[n]) for n, p in trainer.model.dense.named_parameters() if n in before)
    assert losses[checkpoint] == losses["none"]


def test_cost_counts_no_flops_and_marks_the_variant():
    shape = BatchShape(samples=4.0, sequences={"history": JaggedShape.of_lengths(LENGTHS)})
    layer = models.TIMED[0]
    with_bias = costs.BLOCKS["hstu"](layer, 32, "history")
    plain = costs.BLOCKS["hstu"](dataclasses.replace(layer, time_buckets=None, relative_positions=None), 32, "history")
    assert with_bias.flops(shape) == plain.flops(shape)
    ours, theirs = (next(op for op in b.forward(shape, "bf16") if op.kind == "attention") for b in (with_bias, plain))
    assert (ours.variant, theirs.variant) == ("hstu_bias", "hstu")
    assert ours.bytes(FORWARD) - theirs.bytes(FORWARD) == 16 * 50
    assert with_bias.workspace_bytes(shape, "bf16") == BIAS_SCRATCH > plain.workspace_bytes(shape, "bf16")


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_without_a_curve_a_bias_costs_time_by_the_score(phase):
    """By the roofline and where the curve of the attention without stands in, of all variants that of the same kind."""
    calibration = load(Path(costmodel.calibration.__file__).parent / "calibrations" / "H200-SXM.json")
    gpu = calibration.device
    ops = [attention(variant, tokens=1e6, pairs=5e8, longest=1024, heads=4, head_dim=128, dtype="bf16") for variant in ("hstu_bias", "hstu")]
    added = bias_seconds(ops[0], phase, gpu)
    assert added == pytest.approx(2e9 * BIAS_FLOPS[phase] / gpu.peak_flops["fp32"]) and bias_seconds(ops[1], phase, gpu) == 0.0
    assert bias_seconds(ops[0], phase, models.cluster(1).device) == 0.0
    slow, fast = (roofline_seconds(one, phase, gpu) for one in ops)
    assert slow - fast == pytest.approx(added, rel=0.02)
    slow, fast = (calibration.predict(one, phase) for one in ops)
    assert slow.seconds - fast.seconds == pytest.approx(added, rel=0.1)
    assert slow.curve == fast.curve and slow.source == "extrapolated"


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_the_microbenchmark_times_it(phase):
    plan = models.plan(Layout(), model_spec=spec())
    found = attention_requests(plan, {"history": np.array(LENGTHS)})
    assert {r.op.variant for r in found} == {"hstu_bias", "softmax_bias", "gdpa_gelu_window_bias", "softmax"}
    for request in found:
        run = cases(request, phase, torch.device("cpu"), 1)[0]
        run.run(run.prepare() if run.prepare is not None else None)


@pytest.mark.parametrize(("layer", "message"), [
    (LayerGroup(kind="hstu", heads=1, head_dim=8, divisor=1.0, time_buckets=1), "time_buckets must be >= 2, got 1"),
    (LayerGroup(kind="hstu", heads=1, head_dim=8, divisor=1.0, relative_positions=0), "relative_positions must be >= 1, got 0"),
    (LayerGroup(kind="block_attention", heads=1, head_dim=8, block=32, time_buckets=8), "time_buckets = 8 has no meaning for this kind"),
    (LayerGroup(kind="pyramid", branches=(Layer(kind="gdpa", heads=1, head_dim=8, divisor=1.0, activation="relu", time_buckets=0),)),
     "time_buckets must be >= 2, got 0"),
])  # fmt: skip
def test_wrong_fields_are_named(layer, message):
    with pytest.raises(ValueError, match=message):
        costs.BLOCKS[layer.kind](layer, 32, "history")


def test_eight_bits_have_no_bias():
    with pytest.raises(ValueError, match="region r: recipe fp8_attention knows no bias"):
        use_fp8_attention(build_block(32, models.TIMED[1]), device=torch.device("cpu"), region="r")


def test_files_round_trip_and_hashes_of_models_without_bias_stay():
    model = spec()
    assert decode(Model, encode(model)) == model
    assert '"relative_positions":9' in canonical(model) and "relative_positions" not in canonical(models.model())
    assert content_hash(model) != content_hash(models.model())
