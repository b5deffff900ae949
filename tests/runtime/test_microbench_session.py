"""A GPU's calibration as a whole, on this machine's CPU: what comes when, what is kept, how the host is fitted, kernels compiled ahead."""
import dataclasses
import functools
import math
import os
import time

import numpy as np
import pytest
import torch

from benchmarks.fidelity_gpu_space import _one
from benchmarks.fidelity_space import _subject
from costmodel.calibration import doubtful, fit
from costmodel.cluster import Cluster, Device
from costmodel.estimate import estimate
from costmodel.hosttime import SLOW_SHARE
from costmodel.ops import op
from costmodel.plan import Layout, Plan
from costmodel.regions import regions
from costmodel.samples import Environment, Sample
from runtime.microbench import hosted, session, trained, warm
from runtime.microbench.speed import Probed, Speeds

CPU = torch.device("cpu")
H200 = Device(name="H200-SXM", kind="gpu", peak_flops={"fp32": 67e12, "bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12)


def drawn(kind: str = "hstu", **options) -> Plan:
    model, workload = _subject("tiny", {
        "kind": kind, "dim": 32, "heads": 2, "depth": 2, "mlp_factor": 2, "num_tables": 3, "rows": 100, "table_dim": 16, "maximum": 20,
        "length_kind": "uniform", "global_batch": 8, "dense": 4,
    })  # fmt: skip
    return _one(model, workload, Cluster(name="one", device=H200, num_hosts=1, devices_per_host=1, tiers=()), **options)


def test_a_calibration_keeps_what_it_has_and_predicts(monkeypatch):
    monkeypatch.setattr(session, "KEPT_EVERY", 0.0)
    monkeypatch.setattr(trained, "STEPS", 2)
    monkeypatch.setattr(hosted, "STEPS", 2)
    monkeypatch.setattr(hosted, "SAMPLES", 2)
    monkeypatch.setattr(hosted, "LENGTH", 12)
    here = session.environment(CPU)
    monkeypatch.setattr(session, "environment", lambda device: dataclasses.replace(here, device_kind="cuda"))
    monkeypatch.setattr(session.gpu, "op_requests", lambda *_, **__: [])
    said, kept = [], []
    found, samples = session.calibrate([drawn(), drawn(precision="fp32")], CPU, budget=300.0, report=said.append,
                                       keep=lambda _, some: kept.append(len(some)))  # fmt: skip
    assert kept == sorted(kept) and len(kept) > 5 and kept[-1] <= len(samples)
    constants = {s.op for s in samples if s.op.startswith("constant:")}
    assert "constant:host" in constants and any("selective" in line for line in said)
    known = fit(found, samples, device=H200)
    assert known.constants["host/forward:hstu@bf16"] > 0 and estimate(drawn(), known).step_time.value > 0


def test_a_gpu_s_calibration_times_attention_as_it_is_compiled(monkeypatch):
    """Every part of it, as on a GPU, by this machine's CPU: what is compiled ahead is timed while the rest is, what is not is timed at the end."""
    here, said = session.environment(CPU), []
    monkeypatch.setattr(session, "environment", lambda device: dataclasses.replace(here, device_kind="cuda"))
    for module, name in ((session.gpu, "timed_op"), (session.gpu, "device_samples"), (hosted, "host_samples"), (trained, "host_samples"),
                         (trained, "whole_samples"), (trained, "context_sample")):  # fmt: skip
        place = 2 if module is trained and name != "context_sample" else 1
        monkeypatch.setattr(module, name, functools.partial(
            lambda own, place, *given, **named: own(*(CPU if i == place else one for i, one in enumerate(given)), **named),
            getattr(module, name), place))
    monkeypatch.setattr(session.gpu, "constant_samples", lambda device: [])
    # a kernel of fp32 makes the context larger for good, as in a calibration of 2026-12-01
    wide, own_timed = [], session.gpu.timed_op

    def timed_op(request, *given, **named):
        if request.op.dtype == "fp32" and request.op.kind == "attention":
            wide.append(request)
        return own_timed(request, *given, **named)

    monkeypatch.setattr(session.gpu, "timed_op", timed_op)
    for module in (session.gpu, trained):
        monkeypatch.setattr(module, "context_bytes", lambda: 5e9 if wide else 1e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 11.0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10.0)
    for module, name, value in ((trained, "STEPS", 2), (trained, "HOST_STEPS", 4), (hosted, "STEPS", 2), (hosted, "SAMPLES", 2),
                                (hosted, "LENGTH", 12), (session, "OP_POINTS", 0.0), (session, "PLAIN_POINTS", 0.0),
                                (session, "PLAIN_SECONDS", 0.0)):  # fmt: skip
        monkeypatch.setattr(module, name, value)

    small = [dataclasses.replace(r, op=op("sdpa", variant=r.op.variant, dtype="bf16", tokens=8 * n, pairs=4 * n * (n + 1), longest=n, heads=2,
                                          head_dim=16), lengths=(n,) * 8) for n, r in enumerate(session.library_attention(), start=8)]
    monkeypatch.setattr(session, "library_attention", lambda: [r for r in small if r.op.variant == "flash"])

    class Half:
        """Half of the kinds of kernels are compiled from the start on, no more ever are."""

        def __init__(self, plans, later):
            assert [plan.model.name for plan in later] == ["tiny"] and len(plans) > 3
            keys = sorted({warm.kernels(request) for request in session.gpu.attention_ops(plans)}, key=repr)
            self.compiled, self.running = frozenset(keys[::2]), True

        def wait(self, seconds):
            self.running = False
            return "half"

        def has(self, plan):
            return plan.workload.lengths["history"].maximum == 20

    monkeypatch.setattr(session.warm, "Ahead", Half)
    plans = [drawn(), drawn("gdpa"), drawn("self_attention"), drawn(precision="fp32")]
    found, samples = session.calibrate(plans, torch.device("cuda"), budget=36.0, later=[drawn("block_attention")], report=said.append)
    timed = [s for s in samples if s.op == "attention"]
    assert len({(s.variant, s.dtype) for s in timed}) == 6  # three kinds in two precisions
    assert not any("cannot be timed" in line or "Error" in line for line in said), said
    constants = {(s.op.removeprefix("constant:"), s.variant) for s in samples if s.op.startswith("constant:")}
    assert {("host", "forward:product"), ("allocator_overhead", ""), ("context_bytes", ""), ("step_overhead", "")} <= constants
    known = fit(found, samples, device=H200)
    dense = [s for s in samples if s.op == "sdpa"]
    assert {s.phase for s in dense} == {"forward", "backward"} and known.curve("sdpa", "flash", "backward", "bf16", 1) is not None
    # behind the step that shows what the process takes, ahead of blocks and the trainer's runs
    place = [s.op for s in samples].index
    assert place("constant:context_bytes") < place("sdpa") < place("constant:host")
    assert known.constants["context_bytes"] == 1e9 and wide and any("5.00 GB" in line for line in said)
    # the host's figures are those of full speed, what it was on average is one of its own
    assert 1.0 <= known.constants["host/slow:p10"] <= known.constants["host/slow:p90"] and known.constants["host/slow"] >= 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_is_as_large_as_a_step_leaves_it(monkeypatch, fails):
    """After one step; where none can be trained nothing is known of it, which is said."""
    trainings, said = [], []

    def short_run(plan, device, steps):
        trainings.append((plan, steps))
        if fails:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(trained, "short_run", short_run)
    monkeypatch.setattr(trained, "context_bytes", lambda: 1e9)
    found = session.gpu.attempted(trained.context_sample(drawn(), CPU), "context", said.append)
    assert [(s.op, s.seconds) for s in found] == ([] if fails else [("constant:context_bytes", 1e9)])
    assert trainings == [(drawn(), 1)] and any("out of memory" in line for line in said) == fails


def test_what_took_longer_than_its_neighbours_is_timed_again(monkeypatch):
    """An op that something disturbed is; one that is as long as before stays, and so does one that nobody asked for."""
    made = lambda m, seconds, phase="forward": Sample(op="linear", phase=phase, features={"m": float(m), "k": 64.0, "n": 64.0}, dtype="bf16",
                                                       seconds=seconds, noise=1e-3)  # fmt: skip
    sizes = [1000 * 2 ** (i / 8) for i in range(40)]
    true = {m: 1e-5 + 1e-9 * m for m in sizes}
    disturbed = {sizes[8]: 1.4, sizes[20]: 1.3, sizes[31]: 1.2}
    kept = session._Kept(session.environment(CPU), lambda *_: None)
    kept.samples = [made(m, disturbed.get(m, 1.0) * seconds) for m, seconds in true.items()]
    assert [s.features["m"] for s in doubtful(kept.samples, H200)][:3] == [*disturbed]
    requests = {m: session.Request(op=made(m, 1.0).as_op()) for m in sizes if m != sizes[31]}
    asked = {session._shape("linear", "", "bf16", dict(r.op.features)): r for r in requests.values()}
    again, said = [], []

    def timed(request, device, seconds, *, host):
        m = dict(request.op.features)["m"]
        again.append(m)
        yield made(m, (1.3 if m == sizes[20] else 0.999) * true[m])
        yield made(m, 1e-9, "backward")

    monkeypatch.setattr(session.gpu, "timed_op", timed)
    kept.again(asked, H200, CPU, until=math.inf, report=said.append)
    found = {s.features["m"]: s.seconds / true[s.features["m"]] for s in kept.samples}
    assert again[:2] == [sizes[8], sizes[20]] and found[sizes[8]] == pytest.approx(0.999) and found[sizes[20]] == pytest.approx(1.3)
    assert found[sizes[31]] == pytest.approx(1.2) and found[sizes[0]] == pytest.approx(1.0) and len(kept.samples) == len(sizes)
    assert said[-1].endswith("1 phases of theirs in less time")
    before = len(again)
    kept.again(asked, H200, CPU, until=0.0, report=said.append)
    assert len(again) == before


def ran(phases: list[dict[str, float]], slow: float = 1.0):
    """A trainer after steps of these phases, on a host `slow` times slower than where a piece takes a second."""
    timer = Probed(CPU)
    timer.pieces = [(slow ** (1.0 / SLOW_SHARE),) * 2] * len(phases)
    return type("Ran", (), {"phases": phases, "timer": timer})()


class _Task:
    phase, flops = "backward", 1e14

    def __init__(self, name: str, host_seconds: float) -> None:
        self.name, self.host_seconds = name, host_seconds


def test_moments_of_a_step_become_seconds_of_blocks():
    """Two micro-batches of two blocks: forward counts since the block before, backward since the gradient came; the loss is beside them."""
    marks = []
    for start in (0.0, 100.0):
        marks += [("start:forward", start), ("forward:0", start + 1), ("forward:1", start + 3), ("end:forward", start + 7),
                  ("start:backward", start + 10), ("backward:1", start + 12), ("backward:0", start + 17), ("end:backward", start + 18 + start / 50),
                  ("start:sparse", start + 30), ("end:sparse", start + 31)]  # fmt: skip
    own, beside = hosted.steps_by_block(marks, 2)
    assert {key: found.tolist() for key, found in own.items()} == {
        ("forward", 0): [1.0, 2.0], ("forward", 1): [1.0, 2.0], ("backward", 0): [1.0, 5.0], ("backward", 1): [3.0, 5.0]}
    assert beside == {("forward", 0): 4.0, ("forward", 1): 4.0, ("backward", 0): 2.0, ("backward", 1): 2.0}


def _ran(parts, cost, *, micro=1, added=0.0, slower=1.0) -> hosted.Spent:
    """A run whose blocks take what `cost` says by direction and name, gradients added up `added` a tensor."""
    seconds = {(phase, m): [slower * (cost(phase, p.name) + m * added * p.tensors * (phase == "backward")) for p in parts]
               for phase in ("forward", "backward") for m in range(micro)}
    return hosted.Spent(parts=parts, blocks=seconds, beside=dict.fromkeys(seconds, 7e-4), micro=micro, groups=3, tensors=10 * len(parts), phases={
        "sparse": 9e-4 * micro + 6e-4, "optimizer": 1e-4 + 2e-5 * len(parts), "input": 1e-4 * micro, "other": 5e-5})


def test_what_runs_spend_is_told_apart():
    cost = lambda phase, name: 1e-4 * (1 + len(name)) * (2 if phase == "backward" else 1)
    even = tuple(hosted.Part(name=name, tensors=4, captured=False) for name in ("hstu@bf16", "hstu@bf16:full", "region@bf16"))
    graph = (even[0], hosted.Part(name="region@bf16", tensors=4, captured=True))
    said = []
    found = hosted.solved([_ran(even, cost), _ran(even, cost, slower=3.0), _ran(even, cost, micro=2, added=1e-5),
                           _ran(graph, lambda phase, name: 0.0 if "region" in name else cost(phase, name))], said.append)
    for phase in ("forward", "backward"):
        for name in ("hstu@bf16", "hstu@bf16:full", "region@bf16"):
            assert found[f"{phase}:{name}"] == pytest.approx(cost(phase, name)), name  # the slow run does not count
        assert found[f"{phase}:loss"] == found[f"{phase}:graph"] == pytest.approx(7e-4)
    assert found["accumulate"] == pytest.approx(1e-5) and found["other"] == pytest.approx(5e-5)
    assert found["lookup"] == pytest.approx(3e-4, rel=0.01) and found["update"] == pytest.approx(2e-4, rel=0.02)
    assert found["tensor"] == pytest.approx(2e-6, rel=0.05) and any("sparse" in line and "at most" in line for line in said)


def test_products_on_rows_that_were_not_met_before_are_told_from_others(monkeypatch):
    """A linear layer that stops for a while on each new number of rows, twice as long where two products of a backward do."""
    class Slow(torch.nn.Linear):
        def forward(self, x):
            if len(x) not in met:
                time.sleep(2e-2)
            out = super().forward(x)
            out.register_hook(functools.partial(self.wait, len(x)))
            return out

        def wait(self, rows, _gradient):
            time.sleep(0.0 if rows in met else 6e-2)
            met.add(rows)

    met = set()
    for name, value in (("PRODUCT_WIDTH", 8), ("PRODUCT_ROWS", 32), ("PRODUCT_PAIRS", 5)):
        monkeypatch.setattr(hosted, name, value)
    monkeypatch.setattr(hosted.nn, "Linear", Slow)
    found = hosted.new_products(CPU, 1.0)
    assert found["forward:product"] == pytest.approx(2e-2, rel=0.3) and found["backward:product"] == pytest.approx(3e-2, rel=0.3)


def test_figures_are_those_of_full_speed():
    """Of runs at full speed and at half of it, whose steps' own slowness was taken out of them before."""
    part = hosted.Part(name="hstu@bf16", tensors=4, captured=False)
    run, said = _ran((part,), lambda phase, name: 1e-3), []
    found = hosted.solved([run, dataclasses.replace(run, slow=2.0)], said.append)
    assert found["forward:hstu@bf16"] == pytest.approx(1e-3) and found["other"] == pytest.approx(5e-5)
    assert any("1.50 times slower" in line for line in said)


def test_designs_leave_the_device_nothing_to_do_and_hold_every_kind_under_every_policy():
    found = hosted.designs([drawn(), drawn("gdpa"), drawn(precision="fp32"), drawn("self_attention")])
    names = [{part.name for part in hosted.blocks(plan)} for plan in found]
    for kind in ("hstu@bf16", "gdpa@bf16{}+mlp", "self_attention@bf16{}+mlp"):
        for policy in ("", ":selective", ":full"):
            name = kind.format(policy) if "{}" in kind else kind + policy
            assert {name} <= names[0] & names[1], name
    assert [p.accumulation for p in found] == [1, 2, 1, 1, 1] and [p.execution for p in found].index("cuda_graph") == 4
    assert any(part.captured for part in hosted.blocks(found[4])) and not any(part.captured for plan in found[:4] for part in hosted.blocks(plan))
    assert "hstu@fp32" in names[3]
    assert all(p.local_batch * p.workload.lengths["history"].maximum <= hosted.SAMPLES * hosted.LENGTH for p in found)
    assert all(p.fingerprints == {} and {r.region for r in p.regions} == {r.name for r in regions(p.model)} for p in found)


def test_blocks_of_a_run_fill_its_passes(monkeypatch):
    monkeypatch.setattr(hosted, "STEPS", 2)
    monkeypatch.setattr(hosted, "LENGTH", 12)
    found = hosted.spent(hosted.mixed(drawn(), [drawn()], micro=2), CPU, speeds := Speeds())
    assert found.slow >= 1.0 and {s.variant for s in speeds.samples()} == {"slow", "slow:p10", "slow:p50", "slow:p90"}
    for phase in ("forward", "backward"):
        whole = sum(sum(found.blocks[phase, m]) + found.beside[phase, m] for m in range(2))
        assert whole == pytest.approx(found.phases[phase], rel=0.3) and all(s > 0 for s in found.blocks[phase, 0])
    assert len(found.parts) == len(found.blocks["forward", 0]) == 3 * hosted.EACH + 5


@pytest.mark.parametrize("slower", [1.08, 3.0])
def test_steps_that_the_device_makes_show_what_they_make_of_blocks(monkeypatch, slower):
    """Not those that wait for the host, and no more than can be."""
    made = {"forward": 0.5, "backward": 1.0, "other": 1e-5}
    plans = [dataclasses.replace(drawn(), seed=i) for i in range(4)]

    def run(plan, device, steps):
        return ran([{**made, "backward": slower * made["backward"]}] * steps)

    monkeypatch.setattr(trained, "short_run", run)
    monkeypatch.setattr(trained, "estimate", lambda plan, calibration: type("Made", (), {"phases": {
        name: type("Quantity", (), {"value": value})() for name, value in made.items()}})())  # fmt: skip
    monkeypatch.setattr(trained, "lower", lambda plan, calibration: type("Lowered", (), {"graph": type("Graph", (), {
        "tasks": [_Task("adamw", 100.0 if plan.seed == 3 else 1e-3)]})})())  # fmt: skip
    for name, value in (("max_memory_reserved", 11.0), ("max_memory_allocated", 10.0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    said = []
    found = [(s.op.removeprefix("constant:"), s.variant, s.seconds)
             for s in trained.whole_samples(None, plans, CPU, speeds=Speeds(1.0), report=said.append)]  # fmt: skip
    assert found.count(("step_overhead", "", 1e-5)) == 4 and "the host makes its steps" in said[3]
    rest = dict(((name, variant), value) for name, variant, value in found)
    assert rest["allocator_overhead", ""] == pytest.approx(trained.LEAST_SLACK) and rest["in_step", "forward"] == pytest.approx(1.0)
    assert rest["in_step", "backward"] == pytest.approx(min(slower, trained.IN_STEP[1]))
    few = trained.whole_samples(None, plans[:2], CPU, speeds=Speeds(1.0))
    assert not any(s.op == "constant:in_step" for s in few)


def test_steps_that_the_host_makes_show_what_they_make_of_its_parts(monkeypatch):
    """Of batches so small that the device waits; steps of one run that something stopped for a while do not count, nor one run in five. Runs at half
    the host's speed say the same as those at full speed, and the speed that is expected is told by itself."""
    seconds = {"input": 1e-4, "other": 1e-4, "optimizer": 1e-5, "tensor": 1e-6, "lookup": 1e-4, "update": 1e-4, "forward:loss": 1e-4,
               "backward:loss": 1e-4}  # fmt: skip
    for phase in ("forward", "backward"):
        seconds |= {f"{phase}:{name}": 1e-3 for name in ("region@bf16", "hstu@bf16", "hstu@bf16:full", "hstu@bf16:selective")}
    samples = [Sample(op="constant:host", variant=name, phase="step", features={}, seconds=value) for name, value in seconds.items()]
    samples += [Sample(op="linear", phase=p, features={"m": m, "k": 32.0, "n": 32.0}, dtype="bf16", seconds=1e-8 * m, host_seconds=1e-6)
                for p in ("forward", "backward") for m in (100.0, 1e5)]  # fmt: skip
    known = fit(Environment(device_name=H200.name, device_kind="cuda"), samples, device=H200)
    large = drawn()
    large = dataclasses.replace(large, local_batch=200_000, workload=dataclasses.replace(large.workload, global_batch=200_000, local_batch=None))
    assert estimate(large, known).maker == "device"
    wanted = trained.host_made(large, known)
    assert wanted is not None and trained.FEWEST_SAMPLES < wanted.local_batch < large.local_batch and estimate(wanted, known).maker == "host"
    took = iter(((1.2, 1.0), (1.2, 2.0), (3.0, 1.0), (1.1, 2.0), (1.3, 2.0)))

    def run(plan, device, steps):
        ratio, slow = next(took)
        each = slow * ratio * estimate(plan, known).step_time.value
        return ran([{"forward": each}] * (steps - 1) + [{"forward": 40 * each}], slow)

    monkeypatch.setattr(trained, "short_run", run)
    speeds = Speeds(1.0)
    (found,) = trained.host_samples(known, [large] * 5, CPU, speeds=speeds)
    assert (found.op, found.variant, found.seconds) == ("constant:in_step", "host", pytest.approx(1.2))
    after = fit(Environment(device_name=H200.name, device_kind="cuda"), [*samples, found], device=H200)
    assert estimate(wanted, after).step_time.value == pytest.approx(1.2 * estimate(wanted, known).step_time.value, rel=1e-6)
    slow = {s.variant: s.seconds for s in speeds.samples()}
    assert slow["slow:p10"] == 1.0 and slow["slow:p90"] == pytest.approx(2.0) and 1.2 < slow["slow"] < 1.5
    after = fit(Environment(device_name=H200.name, device_kind="cuda"), [*samples, found, *speeds.samples()], device=H200)
    assert estimate(wanted, after).step_time.value == pytest.approx(slow["slow"] * 1.2 * estimate(wanted, known).step_time.value, rel=1e-6)


def test_what_steps_add_grows_with_the_share_of_the_peak():
    """Runs that lose more the nearer they come to the peak, one of them disturbed; runs that gain there; too few."""
    shares = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    rows = [(phase, u + 0.05 * (phase == "backward"), (1.02 if phase == "forward" else 1.05) * math.exp(0.2 * (u - 0.3)))
            for u in shares for phase in ("forward", "backward")]  # fmt: skip
    found = trained.in_step([*rows, ("forward", 0.3, 1.6)])
    assert found["slope"] == pytest.approx(0.2, abs=0.05) and found["utilisation"] == pytest.approx(0.37, abs=0.02)
    assert found["backward"] / found["forward"] == pytest.approx(1.02, abs=0.01)
    falling = trained.in_step([(phase, u, 1.05 - 0.2 * (u - 0.35)) for phase, u, _ in rows])
    assert falling["slope"] == 0.0 and falling["forward"] == pytest.approx(1.05, abs=0.02)
    assert trained.in_step(rows[:4]) == {}


def test_what_needs_the_same_kernels_is_compiled_once():
    plans = [drawn(), drawn("gdpa"), drawn(precision="fp32"), drawn()]
    found = warm.jobs(plans)
    attention = [job.request for job in found if job.request is not None]
    assert len({warm.kernels(r) for r in attention}) == len(attention) < len(warm.gpu.attention_ops(plans))
    assert {warm.kernels(r) for r in attention} == {warm.kernels(r) for r in warm.gpu.attention_ops(plans)}
    assert [job.twin for job in found if job.kind == "attention"] == sorted(job.twin for job in found if job.kind == "attention")
    kinds = [job.kind for job in found]
    assert kinds == sorted(kinds, key=warm.ORDER.index) and [kinds.count(what) for what in ("tables", "blocks")] == [1, 2]
    assert found[-1].request is None or found[-1].request.op.dtype == "fp32"
    later = warm.jobs(plans, [drawn("block_attention"), drawn()])
    assert {job.request.op.variant for job in later if job.request and job not in found} >= {"block"} and all(job in later for job in found)


def test_a_small_batch_needs_the_kernels_of_the_large_one():
    """As long a history, as many heads, a number of events that 16 divides or not."""
    plan = drawn()
    lengths = {"history": np.random.default_rng(0).integers(1, 21, 400)}
    for parity in (True, False):
        (request,) = warm.attention_requests(plan, {"history": np.array(warm._parity(tuple(lengths["history"]), even=parity))})
        small = warm.shrunk(request)
        assert len(small.lengths) == warm.PAIRS // 2 < len(request.lengths) and max(small.lengths) == max(request.lengths)
        assert warm.kernels(small) == warm.kernels(request) and (sum(small.lengths) % 16 == 0) == parity
        warm.run_attention(request, CPU)


def test_kernels_are_compiled_by_running_every_block_and_table():
    assert warm.run_blocks(drawn(), CPU) == 2 * 6  # input, layer, summary, bottom, interaction and heads on batches of two kinds
    assert warm.run_tables(drawn(), CPU) == 2 * 8  # lookups and updates of four table groups


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_compile_ahead_and_say_what_they_could_not(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    begin = time.perf_counter()
    ahead = warm.Ahead([drawn(), drawn("gdpa", precision="fp32")])
    assert ahead.running
    said = ahead.wait(120)
    count = len(warm.jobs([drawn(), drawn("gdpa", precision="fp32")]))
    assert f"{count} of {count} jobs" in said and f"{count} jobs in" in said and "Traceback" not in said, said
    assert ahead.has(drawn()) and not ahead.has(drawn("block_attention"))
    assert ahead.compiled == {warm.kernels(r) for r in warm.gpu.attention_ops([drawn(), drawn("gdpa", precision="fp32")])}
    assert time.perf_counter() - begin < 120 and not ahead.running


def test_a_compiler_that_takes_too_long_is_ended():
    ahead = warm.Ahead([drawn()])
    ahead.wait(0.2)
    assert not ahead.running


def test_a_plan_of_many_ranks_is_timed_on_one():
    many = dataclasses.replace(drawn(), layout=Layout(fsdp=8, sparse_group=8), tables=tuple(
        dataclasses.replace(p, sharding="row_wise", ranks=()) for p in drawn().tables))
    found = session.alone(many)
    assert found.layout.world_size == 1 and {(p.sharding, p.ranks) for p in found.tables} == {("table_wise", (0,))}
    assert found.local_batch == drawn().local_batch
