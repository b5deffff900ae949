"""Local MFU of one device on whole models, with two peers beside it: histories padded to the longest, and the same model on compiled FlexAttention.

A device trains a few steps of each variant in one process, all on the same batches: each execution (eager, compiled blocks, CUDA graphs), and the
peers with eager blocks, so that each differs from `eager` in one thing. MFU is that of the fastest execution: the measured steps' FLOPs (their own
lengths, causal half, nothing recomputed) over their seconds and the dense peak of the format. FlexAttention knows softmax only: pointwise layers run
it as a softmax of the same shape, so that variant is timed, not trained to any use.

On a GPU every variant's kernels are compiled first, by processes of their own at once (`python -m benchmarks.train_speed MODEL VARIANT`).
"""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.results import Row
from costmodel.blocks import BatchShape, JaggedShape
from costmodel.estimate import estimate
from costmodel.model import Model
from costmodel.plan import Layout, Plan, TablePlacement
from costmodel.regions import default_region_plans, regions
from costmodel.runresult import Measured
from costmodel.workload import EventSource, Workload
from planner.configure import default_plan
from planner.scenario import load_scenario
from runtime import mesh
from runtime.data import open_source
from runtime.parallelize import MAX_VARIANTS
from runtime.trainer import WARMUP_STEPS, Trainer

SCENARIOS = {"hstu-ranking": ("hstu-ranking", 32, 0.35), "gem-full": ("gem-full-1xh200", 64, 0.30)}
AIM, PEERS = 0.45, {"HSTU, 302.6 TFLOPS a GPU on H100, jagged, another distribution": 0.306}
OVER = {"padded": 2.0, "flex": 1.3}
EXECUTIONS = ("eager", "compile", "cuda_graph")
# gem-full's loss leaves the neighbourhood of its start within three steps at its own 1e-3 without a warm-up; the step takes as long at any rate
LEARNING_RATE = 1e-5
STEPS = {"cuda": 23, "cpu": 6}
EVERYTHING = 1 << 30  # a window that leaves nothing out
# Samples of a batch that is trained to compile kernels: those of several models fit on a device together.
WARM_BATCH, WARM_STEPS = 4, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """Steps of a variant: what the trainer measured, their seconds, and their FLOPs by design.md's convention."""

    measured: Measured
    seconds: float
    flops: float
    steps: int


def plan_of(name: str, *, batch: int | None = None, precision: str = "bf16") -> Plan:
    """A model of `SCENARIOS` on one H200, histories jagged, activations kept."""
    scenario, local_batch, _ = SCENARIOS[name]
    host, given = (default_plan(load_scenario(s, with_variants=False))[0] for s in ("gem-1xh200", scenario))
    return _alone(host, given.model, given.workload, batch or local_batch, precision)


def tiny(name: str) -> Plan:
    """The same kinds of layers at the width of a test, on a CPU core."""
    plan, cpu = plan_of(name), default_plan(load_scenario("quickstart", with_variants=False))[0]
    heads = {"heads": 2, "head_dim": 16}
    sequences = tuple(dataclasses.replace(s, layers=tuple(dataclasses.replace(g, count=1, mlp_dim=min(g.mlp_dim, 64), **heads) for g in s.layers))
                      for s in plan.model.sequences)
    layers = tuple(dataclasses.replace(g, mlp_dim=min(g.mlp_dim, 64), **(heads if g.heads else {})) for g in plan.model.interaction_layers)
    model = dataclasses.replace(plan.model, dim=32, sequences=sequences, interaction_layers=layers, bottom_hidden=(32,), interaction_hidden=(32,),
                                feature_dim=16 if plan.model.feature_dim else plan.model.feature_dim,
                                expert_layers=tuple(dataclasses.replace(g, mlp_dim=64) for g in plan.model.expert_layers),
                                heads=tuple(dataclasses.replace(h, hidden=(8,)) for h in plan.model.heads),
                                tables=tuple(dataclasses.replace(t, rows=1000, dim=16) for t in plan.model.tables))
    lengths = {n: dataclasses.replace(spec, maximum=64, **({"median": 20.0} if spec.median else {})) for n, spec in plan.workload.lengths.items()}
    one = dataclasses.replace(cpu, cluster=dataclasses.replace(cpu.cluster, devices_per_host=1))
    return _alone(one, model, dataclasses.replace(plan.workload, lengths=lengths), 8, "fp32")


def _alone(host: Plan, model: Model, workload: Workload, batch: int, precision: str) -> Plan:
    placed = tuple(TablePlacement(table=n, sharding="table_wise", ranks=(0,)) for t in model.tables for n in t.names)
    load = dataclasses.replace(workload, global_batch=None, local_batch=batch, source=EventSource(kind="synthetic", num_events=64 * batch),
                               learning_rate=LEARNING_RATE)
    made = dataclasses.replace(host, scenario=model.name, model=model, workload=load, layout=Layout(), local_batch=batch, accumulation=1,
                               batching="jagged", regions=default_region_plans(model, precision=precision), tables=placed, prediction={}, search={},
                               predict_only=())
    return dataclasses.replace(made, fingerprints=made.expected_fingerprints())


def rows(device: torch.device, *, seconds: float = 180.0, compiled: bool = False, models: Sequence[str] = tuple(SCENARIOS),
         peers: Sequence[str] = tuple(OVER), warmed: bool = False) -> Iterator[list[Row]]:
    """Figures of every one of `models` beside `peers` that fits into `seconds`, after each variant all that are known of its model; a variant that
    cannot run is a row that says why. `compiled`: the other executions too, which take minutes. `warmed`: kernels were compiled before."""
    until = time.monotonic() + seconds
    if device.type == "cuda" and not warmed:
        warm([(name, variant) for variant in ("eager", *peers) for name in models], until=time.monotonic() + seconds / 2)
    started = not torch.distributed.is_initialized()
    if started:
        mesh.start(device)
    device = mesh.indexed(device)
    on_gpu = device.type == "cuda"
    others = [e for e in EXECUTIONS[1:] if on_gpu or e != "cuda_graph"] if compiled else []
    plans = {name: plan_of(name) if on_gpu else tiny(name) for name in models}
    found: dict[str, dict[str, Timed]] = {name: {} for name in models}
    for variant in ("eager", *peers, *others):
        for name in models:
            missing = Row(name=f"speed: {name}, {variant}", value=None, unit="s", better="lower", note=f"not run: {seconds:.0f} s were over")
            try:
                if time.monotonic() < until:
                    found[name][variant] = measure(plans[name], device, variant)
                    yield list(_rows_of(name, plans[name], found[name], SCENARIOS[name][2] if on_gpu else None))
                    continue
            except Exception as error:  # of a compiler, of memory: the others are measured all the same
                missing = dataclasses.replace(missing, note=f"cannot run: {(str(error).splitlines() or [type(error).__name__])[0][:160]}")
            yield [missing]
    if started:
        mesh.leave()


def _rows_of(name: str, plan: Plan, found: dict[str, Timed], target: float | None) -> Iterator[Row]:
    on_gpu = target is not None
    peak = plan.cluster.device.peak_flops["bf16" if on_gpu else "fp32"]
    each = {variant: one.seconds / one.steps for variant, one in found.items()}
    own = [v for v in EXECUTIONS if v in found]
    if own:
        best = min(own, key=lambda v: each[v])
        one = found[best]
        yield Row(name=f"speed: {name}, local MFU", value=one.flops / (one.seconds * peak), unit="share", target=target,
                  aim=AIM if on_gpu else None, peers=PEERS if on_gpu and name == "hstu-ranking" else {},
                  note=f"measured here, {best} blocks, batch {plan.local_batch}, {one.steps} steps of {one.flops / one.steps / 1e12:.4g} TFLOP, mean "
                       f"{', '.join(f'{v} {each[v] * 1e3:.1f} ms' for v in own)}; over {peak / 1e12:.4g} TFLOP/s of {plan.cluster.device.name}")
    if "eager" not in found:
        return
    eager = found["eager"].measured
    yield Row(name=f"speed: {name}, waiting for batches", value=eager.phases_s["input"] / eager.step_time_s.mean, unit="share",
              better="lower", note=f"measured, eager: {_phases(eager)}")
    for variant, least in OVER.items():
        if variant in found:
            yield Row(name=f"speed: {name}, times faster than {variant}", value=each[variant] / each["eager"], unit="x",
                      target=least if on_gpu else None,
                      note=f"measured in one process on the same {found[variant].steps} batches, eager blocks: {each[variant] * 1e3:.1f} ms a step "
                           f"against {each['eager'] * 1e3:.1f} ms (medians {_median(found[variant])} and {_median(found['eager'])} ms)")
    if (reached := eager.memory_bytes.peak_allocated) is not None:
        predicted = estimate(plan, None).memory.peak.value
        yield Row(name=f"speed: {name}, predicted over measured peak memory", value=predicted / reached, unit="ratio",
                  note=f"predicted {predicted / 1e9:.2f} GB without a calibration, reached {reached / 1e9:.2f} GB")


def _median(one: Timed) -> str:
    return f"{one.measured.step_time_s.median * 1e3:.1f}"


def _phases(one: Measured) -> str:
    return ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in one.phases_s.items() if seconds >= 5e-5)


def measure(plan: Plan, device: torch.device, variant: str, *, num_steps: int | None = None) -> Timed:
    """A few steps of a variant (one of `EXECUTIONS` or of `OVER`), those of the warm-up left out."""
    plan = dataclasses.replace(plan, batching="padded") if variant == "padded" else plan
    plan = dataclasses.replace(plan, execution=variant) if variant in EXECUTIONS else plan  # type: ignore[arg-type]
    trainer = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        with flex_attention_everywhere(device) if variant == "flex" else contextlib.nullcontext():
            trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=device)
            trainer.train(num_steps or STEPS[device.type])
            measured, warmup = trainer.measured()
        assert measured is not None
        flops = [_flops(plan, trainer.source.lengths(samples))
                 for step in range(warmup, len(trainer.phases)) for samples in trainer.loader.microbatch_samples(step)]
        spent = [sum(phases.values()) for phases in trainer.phases[warmup:]]
        return Timed(measured, sum(spent), sum(flops), len(spent))
    finally:
        del trainer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _flops(plan: Plan, lengths: dict[str, np.ndarray]) -> float:
    """Of a step on histories of `lengths`, as `costmodel.lower.model_flops` has them of an expected batch."""
    samples = len(next(iter(lengths.values()))) if lengths else plan.local_batch
    batch = BatchShape(samples=float(samples), sequences={name: JaggedShape.of_lengths(found) for name, found in lengths.items()})
    return 3.0 * sum(r.count * (r.block.flops(batch) - r.block.causal_excess(batch)) for r in regions(plan.model))


def warm(wanted: list[tuple[str, str]], *, until: float) -> None:
    """Compiles the kernels of (model, variant), all at once, until the clock says so: compilers keep what they made where the next process looks."""
    running = [subprocess.Popen([sys.executable, "-m", "benchmarks.train_speed", name, variant], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
               for name, variant in wanted]
    for child in running:
        try:
            child.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()


def _warm_one(name: str, variant: str) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    mesh.start(device)
    measure(plan_of(name, batch=WARM_BATCH) if on_gpu else tiny(name), device, variant, num_steps=WARMUP_STEPS + WARM_STEPS)
    mesh.leave()


@contextlib.contextmanager
def flex_attention_everywhere(device: torch.device) -> Iterator[None]:
    """Inside, the model's attention calls go to FlexAttention over documents, compiled, its block masks made once a batch and mask."""
    import runtime.trainer
    from runtime.model import hstu, interformer, self_attention

    attend = Flex(device)
    patched = [(module, name, getattr(module, name)) for module in (self_attention, hstu, interformer)
               for name in ("jagged_attention", "gdpa", "block_attention") if hasattr(module, name)]
    for module, name, _ in patched:
        setattr(module, name, getattr(attend, name))
    patched.append((runtime.trainer, "TRACKED_STEP", runtime.trainer.TRACKED_STEP))
    runtime.trainer.TRACKED_STEP = -1  # no compiled FlexAttention under the mode that counts saved activations
    try:
        yield
    finally:
        for module, name, original in patched:
            setattr(module, name, original)


class Flex:
    """The kernels' signatures on `torch.nn.attention.flex_attention`."""

    def __init__(self, device: torch.device) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = device.type == "cuda"
        # one code object serves every mask, width and format of a model: past the limit it would run uncompiled and fill the memory with scores
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
        self._attention = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
        self._create = torch.compile(create_block_mask, dynamic=True) if compiled else create_block_mask
        self._masks: dict[tuple, tuple] = {}

    def jagged_attention(self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, causal: bool = False,
                         window: int | None = None, **_: object) -> Tensor:
        return self._run(q, k, v, q_offsets, k_offsets, causal, window, None)

    def gdpa(self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, causal: bool = False, window: int | None = None,
             **_: object) -> Tensor:
        return self._run(q, k, v, q_offsets, k_offsets, causal, window, None)

    def block_attention(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, block: int = 64, causal: bool = False, **_: object) -> Tensor:
        return self._run(q, k, v, offsets, offsets, causal, None, block)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, causal: bool, window: int | None,
             block: int | None) -> Tensor:
        mask = self._mask(q_offsets, k_offsets, len(q), len(k), causal, window, block)
        q_1HTd, k_1HTd, v_1HTd = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return self._attention(q_1HTd, k_1HTd, v_1HTd, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).squeeze(0).transpose(0, 1)

    def _mask(self, q_offsets: Tensor, k_offsets: Tensor, num_q: int, num_k: int, causal: bool, window: int | None, block: int | None):
        key = (q_offsets.data_ptr(), k_offsets.data_ptr(), num_q, num_k, causal, window, block)
        if key not in self._masks:
            if len(self._masks) > 16:
                self._masks.clear()
            q_document, q_place = _places(q_offsets, num_q)
            k_document, k_place = _places(k_offsets, num_k)
            # bottom-right aligned: the last query sees the last key
            row = q_place + (k_offsets.diff() - q_offsets.diff())[q_document]
            # what a row sees is a run of its document's keys; bounds in tensors make one compiled kernel serve every mask, and it has no division
            first, last = row - (window or EVERYTHING) + 1, row if causal else row + (window or EVERYTHING) - 1
            if block is not None:
                first, last = torch.maximum(first, row // block * block), torch.minimum(last, (row // block + 1) * block - 1)

            def kept(_batch, _head, i: Tensor, j: Tensor) -> Tensor:
                return (q_document[i] == k_document[j]) & (k_place[j] >= first[i]) & (k_place[j] <= last[i])

            # offsets are kept, so that their address is not used again
            self._masks[key] = self._create(kept, None, None, num_q, num_k, device=q_offsets.device), q_offsets, k_offsets
        return self._masks[key][0]


def _places(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(document, place in it) of `count` rows."""
    rows = torch.arange(count, device=offsets.device)
    document = torch.searchsorted(offsets, rows, right=True) - 1
    return document, rows - offsets[document]


if __name__ == "__main__":
    _warm_one(*sys.argv[1:])
