"""The microbenchmark: what it asks for, that every op kind runs, and that its samples can be fitted."""

import dataclasses
import math

import pytest
import runtime_models as models
import torch
from conftest import torchrun
from interaction_models import full_model

from costmodel import calibration, ops
from costmodel.blocks.measured import measured_block_ops
from costmodel.model import LayerGroup, Sequence
from costmodel.plan import Layout
from costmodel.regions import default_region_plans
from costmodel.samples import BLOCK_PREFIX, Sample, read_samples
from runtime.microbench import blocks, cases, steps, timing
from runtime.microbench.__main__ import main
from runtime.microbench.collectives import unit_hosts
from runtime.microbench.requests import HELD_OUT_EVERY, Request, library_attention, requests

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As in a calibration; several threads on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _plan():
    """The runtime tests' model with one block of each kind."""
    plan = models.plan(Layout())
    layers = (LayerGroup(kind="self_attention", heads=2, head_dim=8, mlp_dim=16), LayerGroup(kind="hstu", heads=2, head_dim=8, divisor=8.0))
    model = dataclasses.replace(plan.model, sequences=tuple(Sequence(name=s.name, layers=layers) for s in plan.model.sequences))
    return dataclasses.replace(plan, model=model, regions=default_region_plans(model), fingerprints={})


@pytest.fixture(scope="module")
def wanted() -> list[Request]:
    return requests([_plan()], points=0.3)


def test_requests_hold_the_plans_own_shapes_and_keep_some_back(wanted):
    plan = _plan()
    linears = [r for r in wanted if r.op.kind == "linear"]
    assert any(r.op.feature("n") == 3 * 16 and r.op.feature("k") == plan.model.dim and not r.held_out for r in linears)
    held_out = [r for r in wanted if r.held_out]
    assert held_out and len(held_out) < len(wanted) / HELD_OUT_EVERY
    assert len({r.op for r in wanted}) == len(wanted)
    assert {"softmax", "hstu"} == {r.op.variant for r in wanted if r.op.kind == "attention"}


def test_points_kept_back_are_of_no_one_kind_of_histories():
    kept = [r.lengths for r in requests([_plan()]) if r.held_out and r.op.kind == "attention" and len(r.lengths) > 1]
    even = [len(set(lengths)) == 1 for lengths in kept]
    assert any(even) and not all(even)


def test_requested_shapes_can_exist(wanted):
    for request in wanted:
        features = dict(request.op.features)
        if "unique" in features:
            assert 1 <= features["unique"] <= min(features["ids"], features["rows"])
        if request.op.kind == "attention":
            assert features["tokens"] == sum(request.lengths) and features["longest"] == max(request.lengths)
            assert features["pairs"] == sum(n * (n + 1) / 2 for n in request.lengths)


def test_every_kind_runs_in_all_its_phases(wanted):
    every = models.plan(Layout(), model_spec=full_model())
    following = Sequence(name="history", layers=(models.LAYERS["self_attention"][0],), next_event="item")
    predicting = models.plan(Layout(), model_spec=models.model(sequences=(following,)))
    seen = set()
    eight_bits = models.plan(Layout(), precision="fp8_row")
    for request in [*wanted, *requests([every, predicting, eight_bits], points=0.02)]:
        key = (request.op.kind, request.op.variant)
        if key in seen or not cases.executable(request):
            continue
        seen.add(key)
        for phase in ops.KINDS[request.op.kind].phases:
            (run,) = cases.cases(request, phase, CPU, 1)
            run.run(run.prepare())
    expected = set(ops.KINDS) - set(ops.COLLECTIVES) - {"input", "fsdp_gather", "fsdp_reduce", "sdpa"}
    assert {kind for kind, _ in seen} == expected
    variants = {variant for kind, variant in seen if kind == "attention"}
    assert variants == {"softmax", "hstu", "hstu_bias", "gdpa_gelu", "gdpa_gelu_window", "block", "softmax_queries", "gdpa_gelu_context"}


def test_torch_s_own_attention_is_timed_at_shapes_of_dense_batches():
    """Few and short enough for every calibration; on a CPU, which has one of the backends, a small one runs in both phases."""
    found = library_attention()
    assert len({r.op for r in found}) == len(found) <= 16 and {r.op.variant for r in found} == {"flash", "cudnn"}
    for request in found:
        features = dict(request.op.features)
        length = features["longest"]
        assert features["tokens"] == sum(request.lengths) and features["pairs"] == sum(n * (n + 1) / 2 for n in request.lengths)
        assert features["head_dim"] in (64, 128) and set(request.lengths) == {length} and cases.executable(request)
        assert request.op.bytes(ops.BACKWARD) < 2e9 and request.op.flops(ops.FORWARD) < 3e12
    small = ops.op("sdpa", variant="flash", dtype="bf16", tokens=24, pairs=2 * 12 * 13 / 2, longest=12, heads=2, head_dim=16)
    for phase, shapes in ((ops.FORWARD, (2, 2, 12, 16)), (ops.BACKWARD, (2, 12, 2, 16))):
        (run,) = cases.cases(Request(op=small, lengths=(12, 12)), phase, CPU, 1)
        made = run.run(run.prepare())
        assert [tuple(t.shape) for t in (made if phase == ops.BACKWARD else [made])] == [shapes] * (3 if phase == ops.BACKWARD else 1)


def test_attention_across_is_timed_at_the_rows_it_counts():
    found = [r for r in requests([models.plan(Layout(), model_spec=full_model())], points=0.1) if r.op.variant.endswith(("_queries", "_context"))]
    assert len({r.op.variant for r in found}) == 2
    for request in found:
        other = dict(request.options).get("queries", dict(request.options).get("keys"))
        features = dict(request.op.features)
        assert features["tokens"] == (sum(request.lengths) + other * len(request.lengths)) / 2
        assert features["pairs"] == sum(request.lengths) * other


def test_backward_leaves_the_forward_out():
    request = Request(op=ops.linear(64, 8, 8))
    (run,) = cases.cases(request, ops.BACKWARD, CPU, 1)
    out = run.prepare()
    gradients = run.run(out)
    assert out.shape == (64, 8) and [tuple(g.shape) for g in gradients] == [(64, 8), (8, 8), (8,)]


def test_embedding_ids_have_the_requested_number_of_rows():
    op = ops.op("embedding_update", variant="sgd", ids=5000, unique=300, dim=8, rows=1000, tables=1)
    assert len(cases._ids(Request(op=op), CPU).unique()) == 300


def test_timing_is_the_median_of_single_calls():
    found = timing.summarize([1.0, 5.0, 1.2, 1.1, 0.9])
    assert found.seconds == 1.1 and found.noise == pytest.approx(0.1 / 1.1) and found.repeats == 5
    state = []
    timed = timing.measure([timing.Run(prepare=lambda: 7, run=state.append)], device=CPU, seconds=0.0)
    assert timed.repeats >= timing.MIN_REPEATS and set(state) == {7}


def test_blocks_are_described_so_that_their_ops_come_back():
    for request in blocks.block_requests([_plan()]):
        found = measured_block_ops(request.kind, dict(request.features), request.dtype)
        assert sum(one.flops(ops.FORWARD) for one in found) > 0
        for phase in (ops.FORWARD, ops.BACKWARD):
            (run,) = blocks.block_runs(request, phase, CPU, 1)
            run.run(run.prepare())


def test_one_rank_writes_samples_that_fit(tmp_path, capsys):
    plan, out = tmp_path / "plan.json", tmp_path / "samples.jsonl"
    _plan().save(plan)
    assert main(["--out", str(out), "--models", str(plan), "--budget", "5"]) == 0
    environment, samples = read_samples(out)
    assert environment.device_kind == "cpu" and environment.threads == 1 and environment.source_hashes
    fitted = calibration.fit(environment, samples)
    assert {c.op for c in fitted.curves} >= {"linear", "attention", "layer_norm", "input", "adamw", "embedding_update"}
    assert fitted.constants["step_overhead/1"] > 0 and 0 < fitted.constants["processor_share/1"] <= 1 and all(s.active_ranks == 1 for s in samples)
    assert any(s.op.startswith(BLOCK_PREFIX) for s in samples) and '"event": "done"' in capsys.readouterr().out


def test_peers_are_waited_for_until_the_last_has_come():
    first = [[(0.0, 3.0), (10.0, 11.0)], [(20.0, 20.5)]]
    second = [[(2.0, 3.5), (9.0, 11.5)], [(25.0, 25.5)]]  # the last one is waited for only at once: what was sent before needs no meeting
    assert steps.peer_wait([first, second], [6.0, 4.0]) == pytest.approx((2.0 + 1.0 + 0.5) / 10.0)


def test_the_share_of_a_processor_is_that_of_long_calls():
    found = timing.ProcessorShare()
    assert found.share is None
    found.add(1e-5, 1.0)
    assert found.share is None
    found.add(0.3, 0.4)
    found.add(0.3, 0.35)
    assert found.share == pytest.approx(0.8)


def test_a_missing_plan_is_a_usage_error(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "s.jsonl"), "--models", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_two_ranks_time_collectives_and_units(tmp_path):
    plan, out = tmp_path / "plan.json", tmp_path / "samples.jsonl"
    _plan().save(plan)
    done = torchrun(2, "-m", "runtime.microbench", "--out", str(out), "--models", str(plan), "--budget", "0.1")
    assert done.returncode == 0, done.stderr[-3000:]
    _, samples = read_samples(out)
    by_kind = {kind: [s for s in samples if s.op == kind] for kind in {s.op for s in samples}}
    assert set(ops.COLLECTIVES) | {"fsdp_gather", "fsdp_reduce", "adamw", "input"} <= set(by_kind)
    assert all(s.active_ranks == 2 and math.isfinite(s.seconds) for s in samples)
    sizes = sorted((s.features["bytes"], s.seconds) for s in by_kind["all_reduce"])
    assert sizes[-1][1] > sizes[0][1]


def test_the_hosts_time_of_a_unit_by_its_tensors():
    points = [Sample(op=kind, phase="step", features={"parameters": 1e6, "tensors": tensors}, seconds=1e-5, host_seconds=1e-3 + slope * tensors)
              for kind, slope in (("fsdp_gather", 2e-5), ("fsdp_reduce", 0.0), ("adamw", 3e-5)) for tensors in (2.0, 4.0, 12.0)]
    found = unit_hosts(points)
    expected = {"fsdp_gather": 1e-3, "fsdp_gather:tensor": 2e-5, "fsdp_reduce": 1e-3, "fsdp_reduce:tensor": 0.0, "optimizer@sharded": 1e-3,
                "tensor@sharded": 3e-5}
    assert found == pytest.approx(expected, abs=1e-9)
    assert unit_hosts(points[:1]) == {}
