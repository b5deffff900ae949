"""Formats below 16 bits on one GPU: kernels, layers, saved activations and whole steps, everything included.

Device time comes from a replayed CUDA graph of forward and backward, all quantisations in it; a second figure launches the same from Python, many
times in a row, and so holds the host's time too. Steps are the trainer's own; their batches are built beforehand, so that no step waits for NumPy.
Every row is guarded: what fails is a row without a value and with the reason.
"""
from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.results import Row
from costmodel.blocks import Block
from costmodel.model import Model
from costmodel.plan import Plan, RegionOption
from costmodel.precision import unfit_block
from costmodel.regions import regions
from costmodel.runresult import PHASES
from kernels.factor import factor_columns, factor_rows
from kernels.norm_quant import Quantized
from kernels.saved import from_mx4, restore_rows, to_mx4
from planner.configure import default_plan
from planner.scenario import load_scenario
from runtime.batch import Batch
from runtime.data import Loader, Source, open_source
from runtime.precision.linear import product, use_low_precision
from runtime.trainer import WARMUP_STEPS, Trainer

ROWS = 16_384
THREADS = 8  # that build batches
GPU = torch.device("cuda", 0)
STILL = 1e-12
# Precision and recipe of a layer, as they are named in plans.
RECIPES: dict[str, tuple[str, tuple]] = {
    "fp8_row": ("fp8_row", ()), "fp8_row, low_weight_gradients": ("fp8_row", ("low_weight_gradients",)),
    "fp8_tensor, low_weight_gradients": ("fp8_tensor", ("low_weight_gradients",)), "fp8_block": ("fp8_block", ()),
}
BOUND_SET = ("fp8_row", "fp8_row, low_weight_gradients")  # recipes that the bound is asked of


def guarded(name: str, unit: str, measure: Callable[[], Iterable[Row] | Row]) -> Iterator[Row]:
    """The rows of `measure`, or one that says why there are none."""
    start = time.perf_counter()
    try:
        found = measure()
        rows = [found] if isinstance(found, Row) else list(found)
    except Exception as error:  # a table with a gap is worth more than none
        traceback.print_exc()
        rows = [Row(name=name, value=None, unit=unit, note=f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.4g}"
        print(f"[{time.perf_counter() - start:.1f} s] {row.name}: {value} {row.unit}; {row.note}", file=sys.stderr, flush=True)
    yield from rows


def device_seconds(run: Callable[[], object], *, repeats: int = 15, rounds: int = 5) -> float:
    """Median device time of `run` in a replayed graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeats / 1e3)
    del kept
    return sorted(times)[rounds // 2]


def eager_seconds(run: Callable[[], object], device: torch.device, *, repeats: int = 30) -> float:
    """Seconds a call, calls issued one after the other without waiting for the device between them."""
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        run()
    synchronise()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronise()
    return (time.perf_counter() - start) / repeats


def training(module: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], tuple]:
    """Forward and backward of `module`, gradients of input and parameters; backward in the calling thread, as the trainer has it."""
    inputs = [x, *module.parameters()]

    def run() -> tuple:
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(module(x), inputs, grad)

    return run


# --- layers ---


class Mlp(nn.Sequential):
    """A transformer's feed-forward: LayerNorm, K -> 4K, GELU, 4K -> K."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def modules(widths: Iterable[int] = (1024, 2048, 4096), *, rows: int = ROWS) -> Iterator[Row]:
    """Layers under every recipe against bf16."""
    for width in widths:
        for kind, make, recipes in (("linear", lambda w=width: nn.Linear(w, w), RECIPES), ("MLP", lambda w=width: Mlp(w), BOUND_SET)):
            yield from guarded(f"{kind} {width}", "x bf16", lambda k=kind, m=make, r=recipes, w=width: _layer(k, m, w, r, rows))


def _layer(kind: str, make: Callable[[], nn.Module], width: int, recipes: Iterable[str], rows: int) -> Iterator[Row]:
    device = GPU
    x, grad = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    plain = make().to(device, torch.bfloat16)
    wide = (device_seconds(training(plain, x, grad)), eager_seconds(training(plain, x, grad), device))
    target = 1.10 if width < 2048 else 1.25
    for recipe in recipes:
        precision, options = RECIPES[recipe]
        low = make().to(device, torch.bfloat16)
        low.load_state_dict(plain.state_dict())
        use_low_precision(low, precision, device=device, options=options)
        run = training(low, x, grad)
        seconds = (device_seconds(run), eager_seconds(run, device))
        note = f"{rows:,} rows, bias; measured here: {wide[0] * 1e6:.0f} us in bf16, {seconds[0] * 1e6:.0f} us in 8 bits"
        bound = target if recipe in BOUND_SET else None
        yield Row(name=f"{kind} {width}, {recipe}: forward and backward with quantisation, device time", value=wide[0] / seconds[0], unit="x bf16",
                  target=bound, note=note + ", replayed graphs")
        yield Row(name=f"{kind} {width}, {recipe}: the same launched from Python", value=wide[1] / seconds[1], unit="x bf16",
                  note=f"measured here: {wide[1] * 1e6:.0f} us in bf16, {seconds[1] * 1e6:.0f} us in 8 bits a call, back to back")


def products(widths: Iterable[int] = (1024, 2048, 4096), *, rows: int = ROWS) -> Iterator[Row]:
    """Products alone, and what accumulation in the tensor cores loses beside what quantisation does."""
    for width in widths:
        yield from guarded(f"product {width}", "x bf16", lambda w=width: _products(w, rows))


def _products(width: int, rows: int) -> Iterator[Row]:
    x, w = (torch.randn(n, width, device=GPU, dtype=torch.bfloat16) for n in (rows, width))
    a, b = (factor_rows(t, "rowwise").quantized for t in (x, w))
    wide = device_seconds(lambda: x @ w.t())
    rates = {}
    for name, fast in (("fast", True), ("promoted", False)):
        rates[name] = device_seconds(lambda f=fast: torch._scaled_mm(a.values, b.values.t(), scale_a=a.scales, scale_b=b.scales.t(),
                                                                     out_dtype=torch.bfloat16, use_fast_accum=f))
    flops = 2 * rows * width * width
    yield Row(name=f"product {rows} x {width} x {width} alone, row-wise fp8", value=wide / rates["fast"], unit="x bf16",
              note=f"measured here: {flops / wide / 1e12:.0f} TFLOPS in bf16, {flops / rates['fast'] / 1e12:.0f} in fp8, "
                   f"{flops / rates['promoted'] / 1e12:.0f} with sums promoted to fp32")
    exact = x.float() @ w.float().t()
    emulated = product(a, b, native=False, dtype=torch.float32)
    native = product(a, b, native=True, dtype=torch.bfloat16).float()
    yield Row(name=f"product {width}: native against emulated", value=((native - emulated).norm() / exact.norm()).item(), unit="relative error",
              better="lower", target=2e-2, note=f"measured here; the quantisation itself: {((emulated - exact).norm() / exact.norm()).item():.2e}, "
              f"bf16 rounding alone: {((emulated.bfloat16().float() - emulated).norm() / exact.norm()).item():.2e}")


def conversions(widths: Iterable[int] = (1024, 4096), *, rows: int = ROWS) -> Iterator[Row]:
    """Rates of the quantisations, bytes read and written over time."""
    for width in widths:
        yield from guarded(f"conversions {width}", "TB/s", lambda w=width: _conversions(w, rows))


def _conversions(width: int, rows: int) -> Iterator[Row]:
    x = torch.randn(rows, width, device=GPU, dtype=torch.bfloat16)
    found = factor_rows(x, "rowwise", columns=True)
    packed, elements = to_mx4(x), x.numel()
    q: Quantized = found.quantized
    cases = {
        "rows": (3.0, lambda: factor_rows(x, "rowwise")), "rows and sums of columns": (3.0, lambda: factor_rows(x, "rowwise", sums=True)),
        "rows, sums and maxima of columns": (3.0, lambda: factor_rows(x, "rowwise", sums=True, columns=True)),
        "columns": (3.0, lambda: factor_columns(x, "rowwise", found.rest)),
        "columns of blocks": (3.0, lambda: factor_columns(x, "block128", found.rest)),
        "tensor": (5.0, lambda: factor_rows(x, "tensor_delayed")),
        "restored rows": (3.0, lambda: restore_rows(q.values, q.scales, torch.bfloat16)),
        "to MX4": (2.53, lambda: to_mx4(x)), "from MX4": (2.53, lambda: from_mx4(*packed, elements, torch.bfloat16)),
        "copy": (4.0, lambda: x.clone()),
    }
    for name, (width_bytes, run) in cases.items():
        seconds = device_seconds(run)
        yield Row(name=f"{rows} x {width}: {name}", value=width_bytes * elements / seconds / 1e12, unit="TB/s",
                  note=f"measured here: {seconds * 1e6:.1f} us, {width_bytes:g} bytes an element")


# --- steps ---


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a few steps of a plan took: medians [s], and bytes."""

    seconds: float
    phases: dict[str, float]
    host: dict[str, float]
    peak: float
    saved: float
    loss: float


class Prepared:
    """A source whose batches of a plan's first `steps` steps are built beforehand. In place of the last one of the warm-up, when all state is there,
    stands the largest of the run: the peak is then that of the run that is predicted."""

    built = True

    def __init__(self, source: Source, plan: Plan, steps: int) -> None:
        self._source = source
        self.num_train, self.num_evaluation, self.origin, self.baselines = source.num_train, source.num_evaluation, source.origin, source.baselines
        loader = Loader.of_plan(plan, source, rank=0)
        run = [samples for step in range(loader.num_steps) for samples in loader.microbatch_samples(step)]
        largest = max(run, key=lambda samples: sum(lengths.sum() for lengths in source.lengths(samples).values()))
        numbers = run[:steps * plan.accumulation]
        dealt = list(numbers)
        dealt[min(WARMUP_STEPS, steps) * plan.accumulation - 1] = largest
        with ThreadPoolExecutor(THREADS) as pool:
            built = list(pool.map(source.build, dealt))
        if torch.cuda.is_available():
            built = [batch.pin() for batch in built]
        self._made = {samples.tobytes(): batch for samples, batch in zip(numbers, built, strict=True)}

    def lengths(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return self._source.lengths(samples)

    def build(self, samples: np.ndarray) -> Batch:
        """Steps that a loader prepares beyond the measured ones get any batch."""
        return self._made.get(samples.tobytes()) or next(iter(self._made.values()))


_sources: dict[tuple, Prepared] = {}


def run_plan(plan: Plan, device: torch.device, *, steps: int) -> Step:
    """Trains `steps` steps of `plan` after the warm-up; plans of one model and batch see the same batches. Learning rates are next to nothing: speed
    does not depend on them, and parameters stay what they were drawn as, however high a model's rates are."""
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, learning_rate=STILL, sparse_learning_rate=STILL), fingerprints={})
    key = (plan.model.name, plan.local_batch, plan.accumulation, steps)
    if key not in _sources:
        _sources[key] = Prepared(open_source(plan.model, plan.workload, seed=plan.seed), plan, WARMUP_STEPS + steps)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(plan, _sources[key], device=device)
    trainer.train(WARMUP_STEPS + steps)
    measured, warmup = trainer.measured()
    assert measured is not None
    memory = measured.memory_bytes
    found = Step(seconds=measured.step_time_s.median, phases=_medians(trainer.phases[warmup:]), host=_medians(trainer.timer.host[warmup:]),
                 peak=memory.peak_allocated or 0.0, saved=memory.saved_activations or 0.0, loss=trainer.losses[-1])
    del trainer
    gc.collect()
    return found


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in PHASES}


def scenario_plan(name: str, *, model: str | None = None, local_batch: int | None = None, change: Callable[[Model], Model] = lambda m: m) -> Plan:
    """The plan that a scenario describes on one GPU with nothing searched; `model`: of another scenario; `change`: made to it."""
    scenario = load_scenario(name, with_variants=False)
    other = scenario if model is None else load_scenario(model, with_variants=False)
    plan, _ = default_plan(dataclasses.replace(scenario, model=change(other.model)))
    return plan if local_batch is None else dataclasses.replace(plan, local_batch=local_batch)


# --- what is compiled beforehand ---

WARM_PARTS = 10


def warm(part: int) -> Iterator[Row]:
    """Runs one of `WARM_PARTS` small models for a few steps, under everything that steps are measured under: processes side by side leave the kernels
    in Triton's cache, which one after the other would take minutes to compile."""
    wide, layer = divmod(part, WARM_PARTS // 2)
    name = "gem-wide-8xh200" if wide else "gem-full-1xh200"

    def small(model: Model) -> Model:
        sequence, interaction = model.sequences[0], layer == WARM_PARTS // 2 - 1
        return dataclasses.replace(
            model, name=f"{model.name}-{part}", tables=tuple(dataclasses.replace(t, rows=min(t.rows, 1000)) for t in model.tables),
            sequences=(dataclasses.replace(sequence, layers=(sequence.layers[0 if interaction else layer],)), *model.sequences[1:]),
            interaction_layers=model.interaction_layers if interaction else (), expert_layers=model.expert_layers if interaction else ())

    base = scenario_plan("gem-full-1xh200", model=name, local_batch=6, change=small)
    plans = [base]
    if wide:
        plans.append(under(base, precision="fp8_row"))
    else:
        plans += [under(base, checkpoint="quantized"), under(base, checkpoint="quantized4")]
    for plan in plans:
        run_plan(plan, GPU, steps=1)
    yield from ()


KEPT_WIDE = ("heads", "summary", "input")


def under(plan: Plan, *, precision: dict[str, str] | str | None = None, checkpoint: dict[str, str] | str | None = None, **fields: Any) -> Plan:
    """The plan with precisions and checkpoint policies by region. A text is meant of every region; a precision then of those whose linear layers can
    have it, but for inputs, summaries and heads."""
    blocks = {r.name: r.block for r in regions(plan.model)}

    def asked(region: str) -> str | None:
        if precision is None or isinstance(precision, dict):
            return (precision or {}).get(region)
        fits = _has_linear(blocks[region]) and unfit_block(blocks[region], precision) is None
        return precision if fits and region.split(".")[-1] not in KEPT_WIDE else None

    def option(region: str, one: RegionOption) -> RegionOption:
        kept = checkpoint.get(region) if isinstance(checkpoint, dict) else checkpoint
        return dataclasses.replace(one, precision=asked(region) or one.precision, checkpoint=kept or one.checkpoint)  # type: ignore[arg-type]

    chosen = tuple(dataclasses.replace(r, options=tuple(option(r.region, o) for o in r.options)) for r in plan.regions)
    return dataclasses.replace(plan, regions=chosen, prediction={}, search={}, **fields)


def _has_linear(block: Block) -> bool:
    return any(name.endswith(".weight") and len(shape) == 2 for name, shape in block.parameters)


def steps(what: str, scenario: str, model: str, *, local_batch: int | None = None, target: float | None = None, measured: int = 10) -> Iterator[Row]:
    """Steps of the model of scenario `model` in bf16 against fp8, weights' gradients in 16 and in 8 bits."""
    base = scenario_plan(scenario, model=model, local_batch=local_batch)
    variants = {"bf16": base, "fp8_row": under(base, precision="fp8_row"),
                "fp8_row, low_weight_gradients": under(base, precision="fp8_row", recipe=("low_weight_gradients",))}
    found: dict[str, Step] = {}

    def one(label: str) -> Row:
        step = found[label] = run_plan(variants[label], GPU, steps=measured)
        ratio = found["bf16"].seconds / step.seconds
        return Row(name=f"{what}: step in {label}", value=ratio, unit="x bf16", target=target if label != "bf16" else None,
                   note=f"measured here: {step.seconds * 1e3:.1f} ms, batch {base.local_batch}, peak {step.peak / 1e9:.1f} GB, loss {step.loss:.4f}; "
                   + ", ".join(f"{k} {v * 1e3:.1f}" for k, v in step.phases.items() if v > 5e-5)
                   + " ms; host " + ", ".join(f"{k} {v * 1e3:.1f}" for k, v in step.host.items() if v > 5e-4))

    for label in variants:
        yield from guarded(f"{what}: step in {label}", "x bf16", lambda n=label: one(n))


def saved(name: str, *, policies: Iterable[str] = ("none", "quantized", "quantized4", "selective", "full"), local_batch: int | None = None,
          measured: int = 10) -> Iterator[Row]:
    """Saved activations in 8 and 4 bits against 16: memory and the step."""
    base = scenario_plan(name, local_batch=local_batch)
    found: dict[str, Step] = {}

    def one(policy: str) -> Iterator[Row]:
        step = found[policy] = run_plan(under(base, checkpoint=policy), GPU, steps=measured)
        plain = found["none"]
        note = (f"measured here: {step.saved / 1e9:.2f} GB saved, peak {step.peak / 1e9:.2f} GB, step {step.seconds * 1e3:.1f} ms; "
                + ", ".join(f"{k} {v * 1e3:.1f}" for k, v in step.phases.items() if v > 5e-5)
                + " ms; host " + ", ".join(f"{k} {v * 1e3:.1f}" for k, v in step.host.items() if v > 5e-4))
        asked = policy in ("quantized", "quantized4")
        yield Row(name=f"{name}, saved activations under {policy}: less activation memory", value=1 - step.saved / plain.saved, unit="share",
                  target=0.4 if asked else None, note=note)
        yield Row(name=f"{name}, saved activations under {policy}: step time", value=step.seconds / plain.seconds - 1, unit="relative",
                  better="lower", target=0.04 if asked else None,
                  note=f"measured here: {step.seconds * 1e3:.1f} against {plain.seconds * 1e3:.1f} ms")

    for policy in policies:
        yield from guarded(f"{name}, saved activations under {policy}", "share", lambda p=policy: one(p))
