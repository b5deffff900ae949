"""Formats below 16 bits: `python -m benchmarks.precision [--stage ...] [--events N] [--seeds N] [--resume]`.

    memory       saved activations of a wide block, 8 and 4 bits against 16, tracked bytes
    wire         bytes of rows and gradients by format, packed by the runtime
    quality      gate 2 of two recipes on the synthetic stream, one built to fail; on CUDA where there is a device
    movielens    gate 2 of the mild one on MovieLens-100K
    modules      layers forward and backward with their quantisation against bf16; on a CPU small ones, emulated, without a target
    products     products alone, native against emulated               (these and what follows: benchmarks.precision_gpu)
    conversions  rates of quantisations
    wide         steps of gem-wide in bf16 against fp8
    narrow       the same of a model that is too narrow for it to pay
    saved        saved activations of gem-full in 8 and 4 bits: memory and step

Rows are written as each stage ends.
"""
from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import nn

from benchmarks import precision_gpu as gpu
from benchmarks.results import Row, write
from costmodel.model import LayerGroup
from costmodel.plan import Plan
from costmodel.state import movielens_path
from costmodel.wire import LOW_WIRES
from costmodel.workload import Lengths
from planner import gates
from planner.configure import default_plan
from planner.scenario import load_scenario
from runtime.batch import Batch
from runtime.data import Loader, Source, open_source
from runtime.kept import Builders, KeptSource, all_samples
from runtime.memory import StorageTracker, storage_ids
from runtime.model.registry import build_block
from runtime.precision.linear import use_low_precision
from runtime.precision.saved import QUANTIZED_POLICIES, quantize_saved
from runtime.precision.wire import WireFormat
from runtime.trainer import Trainer

CPU = torch.device("cpu")
FULL, WIDE, NARROW = "gem-full-1xh200", ("gem-full-1xh200", "gem-wide-8xh200"), ("gem-full-1xh200", "hstu-ranking")
WIDE_BATCH = 160
# The default, and one that a few ten thousand events can resolve.
TOLERANCE, COARSE = 0.0005, 0.0025
# Samples a step by device: on a GPU the host's launches are what a small model's step takes, whatever the batch.
BATCHES = {"cpu": 256, "cuda": 16_384}
# Tables small and rates high enough that 8,192 events bring NE from 1 to 0.86: a model that has not learned hides harm.
ROWS, BAG, FASTER = 128, 4, 3.0


def memory() -> list[Row]:
    """A transformer block of width 512 on 2,000 events in bf16."""
    layer = LayerGroup(kind="self_attention", heads=8, head_dim=64, mlp_dim=2048)
    offsets, sizes = torch.tensor([0, 500, 1200, 2000]), {}
    for policy in ("none", *QUANTIZED_POLICIES):
        torch.manual_seed(0)
        block = build_block(512, layer).to(torch.bfloat16)
        if policy != "none":
            quantize_saved(block, policy, torch.bfloat16)
        x = torch.randn(2000, 512, dtype=torch.bfloat16, requires_grad=True)
        with StorageTracker() as tracker:
            out = block(x * 1.0, offsets, 800)
        sizes[policy] = tracker.alive_bytes(storage_ids([out, *block.parameters()]))
    return [Row(name=f"saved activations under {policy}: less memory", value=1 - sizes[policy] / sizes["none"], unit="share", target=0.4,
                note=f"measured here, tracked tensors on the CPU: {sizes[policy]:,} of {sizes['none']:,} bytes") for policy in QUANTIZED_POLICIES]


def wire() -> list[Row]:
    """Rows of width 128, scales included."""
    rows = torch.randn(4096, 128)
    wide = WireFormat("bf16").pack(rows)
    return [Row(name=f"rows of width 128 in {name}, bytes over bf16", value=flat.numel() * flat.element_size() / (2 * wide.numel()), unit="ratio",
                better="lower", note="counted in the packed tensor, scales included")
            for name in LOW_WIRES for flat in [WireFormat(name).pack(rows)]]


def recipes(events: int, local_batch: int = BATCHES["cpu"]) -> dict[str, Plan]:
    """gem-tiny with small tables on one rank and a synthetic stream of short histories: row-wise fp8 layers, and a recipe built to fail: 4-bit
    saved activations everywhere, tensor-wise layers with 8-bit weights' gradients."""
    base, _ = default_plan(load_scenario("quickstart", with_variants=False))
    cluster = dataclasses.replace(base.cluster, devices_per_host=1)
    load = dataclasses.replace(base.workload, source=dataclasses.replace(base.workload.source, kind="synthetic", num_events=events), num_steps=None,
                               epochs=1, lengths={"history": Lengths(kind="lognormal", median=8.0, sigma=0.5, maximum=16)})
    tables = tuple(dataclasses.replace(t, sharding="table_wise", ranks=(0,)) for t in base.tables)
    load = dataclasses.replace(load, learning_rate=FASTER * load.learning_rate, sparse_learning_rate=FASTER * load.sparse_learning_rate)
    model = dataclasses.replace(base.model, tables=tuple(
        dataclasses.replace(t, rows=min(t.rows, ROWS), ids_per_sample=min(t.ids_per_sample, BAG)) for t in base.model.tables))
    base = dataclasses.replace(base, cluster=cluster, model=model, workload=load, layout=type(base.layout)(), tables=tables, accumulation=1,
                               batching="jagged", local_batch=local_batch, prediction={}, search={})

    def with_(precision: dict[str, str], checkpoint: dict[str, str], **fields) -> Plan:
        regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(
            o, precision=precision.get(r.region, "bf16"), checkpoint=checkpoint.get(r.region, "none")) for o in r.options)) for r in base.regions)
        return dataclasses.replace(base, regions=regions, **fields)

    low = ("history.0", "interaction")
    everywhere = {r.region: "quantized4" for r in base.regions}
    return {"row-wise fp8": with_(dict.fromkeys(low, "fp8_row"), {}),
            "built to fail": with_(dict.fromkeys(low, "fp8_tensor"), everywhere, recipe=("low_weight_gradients",))}


def quality(events: int, seeds: int) -> list[Row]:
    """Gate 2 in this process: no process group is needed on one rank. Batches of a seed are built once, by all cores."""
    device = "cuda" if torch.cuda.device_count() else "cpu"
    plans, start = recipes(events, BATCHES[device]), time.perf_counter()
    one = plans["row-wise fp8"]
    builders = Builders({seed: open_source(one.model, one.workload, seed=seed) for seed in range(one.seed, one.seed + seeds)})
    try:
        found = judge(plans, seeds, events, device=torch.device(device), builders=builders)
    finally:
        builders.close()
    print(f"gate 2: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    rows = [_verdict_row(f"gate 2, {name}: relative NE over bf16", gate, events, "the synthetic stream", device) for name, gate in found.items()]
    for allowed in (TOLERANCE, COARSE):
        verdicts = {name: gates.decide(gate.differences, allowed).verdict for name, gate in found.items()}
        decided = sum(v != "inconclusive" for v in verdicts.values())
        what = ", ".join(f"{name}: {v}" for name, v in verdicts.items())
        rows.append(Row(name=f"gate 2: recipes with a verdict at {allowed:.2%}", value=decided, unit="of 2", target=2, note=f"measured here; {what}"))
    return [*rows,
            Row(name="gate 2: events trained a recipe", value=events * seeds, unit="events", target=20e6, note="measured here, " + "; ".join(
                f"{name}: {_still_needed(gate, events)}" for name, gate in found.items()))]


def movielens(events: int, seeds: int) -> list[Row]:
    """Gate 2 of the mild recipe on MovieLens-100K, the first `events` of each seed's order, all held-out events."""
    if not movielens_path().exists():
        print("movielens: not prepared; `planner data movielens`, then again", file=sys.stderr)
        return []
    plan = recipes(events)["row-wise fp8"]
    base, _ = default_plan(load_scenario("quickstart", with_variants=False))
    load = dataclasses.replace(base.workload, num_steps=events // plan.local_batch)
    gate = judge({"MovieLens": dataclasses.replace(plan, model=base.model, workload=load)}, seeds, events)["MovieLens"]
    return [_verdict_row("gate 2 on MovieLens, row-wise fp8: relative NE over bf16", gate, events, "MovieLens-100K", "cpu")]


def judge(plans: dict[str, Plan], seeds: int, events: int, *, device: torch.device = CPU, builders: Builders | None = None) -> dict[str, gates.Gate]:
    """The quality gate of each plan; trainings that two of them share run once, batches that two trainings share are built once."""
    known: dict[tuple, gates.Trained] = {}
    sources: dict[int, KeptSource] = {}
    started: dict[int, Iterator[Batch]] = {}

    def source(plan: Plan) -> KeptSource:
        if plan.seed not in sources:
            kept = sources[plan.seed] = KeptSource(open_source(plan.model, plan.workload, seed=plan.seed))
            for samples, batch in zip(samples_of(plan, kept), started.get(plan.seed, ())):
                kept.keep(samples, batch)
        return sources[plan.seed]

    def samples_of(plan: Plan, source: Source) -> list[np.ndarray]:
        return list(all_samples(Loader.of_plan(plan, source, rank=0), source, batch=plan.local_batch))

    def train(plan: Plan) -> gates.Trained:
        key = (plan.seed, plan.identity())
        if key not in known:
            begin = time.perf_counter()
            batches = source(plan)
            ready = time.perf_counter()
            trainer = Trainer(plan, batches, device=device)
            trainer.train()
            trained = time.perf_counter()
            known[key] = max(trainer.evaluate().values()), (trained - ready) / max(1, trainer.step)
            print(f"  seed {plan.seed}: NE {known[key][0]:.5f}; batches {ready - begin:.1f} s, {trainer.step} steps {trained - ready:.1f} s, "
                  f"evaluation {time.perf_counter() - trained:.1f} s", file=sys.stderr, flush=True)
        return known[key]

    if builders is not None:
        first = next(iter(plans.values()))
        for seed in range(first.seed, first.seed + seeds):
            plan = dataclasses.replace(first, seed=seed)
            started[seed] = builders.build(seed, samples_of(plan, open_source(plan.model, plan.workload, seed=seed)))

    def say(name: str):
        return lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)

    return {name: gates.validate(dataclasses.replace(plan, emulated=("emulated",)), lambda asked: [train(one) for one, _ in asked], seeds=seeds,
                                 tolerance=TOLERANCE, events=events, blame=False, progress=say(name)).quality for name, plan in plans.items()}


def _verdict_row(name: str, gate: gates.Gate, events: int, what: str, device: str) -> Row:
    note = (f"{gate.verdict}: 95 % bounds {gate.lower:+.5%} to {gate.upper:+.5%}, allowed {TOLERANCE:.2%}; {len(gate.differences)} seeds x "
            f"{events:,} events of {what}, on {device}; {_still_needed(gate, events)}")
    return Row(name=name, value=gate.mean, unit="ratio", better="lower", note=note)


def _still_needed(gate: gates.Gate, events: int) -> str:
    """Events beyond those used that a verdict at the default tolerance needs, were mean and deviation to stay."""
    used = len(gate.differences) * events
    if gate.verdict != "inconclusive":
        return f"{used:,} events used, 0 more needed"
    return f"{used:,} events used, " + (f"{gate.events_needed - used:,} more would decide" if gate.events_needed else gate.reason)


def modules(widths: list[int]) -> list[Row]:
    """Linear layers' forward and backward with all their quantisation; on a CPU small ones, emulated, without a target."""
    if torch.cuda.is_available():
        return list(gpu.modules(widths))
    found, rows = [], 1024
    for width in (256, 512):
        seconds = {}
        for precision in ("bf16", "fp8_row"):
            layer = nn.Linear(width, width, dtype=torch.bfloat16)
            if precision != "bf16":
                use_low_precision(layer, precision, device=CPU)
            x = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True)
            seconds[precision] = gpu.eager_seconds(gpu.training(layer, x, torch.randn(rows, width, dtype=torch.bfloat16)), CPU)
        found.append(Row(name=f"linear {width} x {width}, row-wise fp8 forward and backward with quantisation", unit="x bf16",
                         value=seconds["bf16"] / seconds["fp8_row"], note=f"{rows:,} rows: {seconds['bf16'] * 1e3:.2f} ms in bf16, "
                         f"{seconds['fp8_row'] * 1e3:.2f} ms in 8 bits, emulated on the CPU: its speed says nothing of the format"))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.precision")
    stages: dict[str, Callable[[], Iterable[Row]]] = {
        "memory": memory, "wire": wire, "quality": lambda: quality(options.events, options.seeds),
        "movielens": lambda: movielens(options.events, options.seeds), "modules": lambda: modules(options.widths),
        "products": lambda: gpu.products(options.widths), "conversions": lambda: gpu.conversions(options.widths),
        "wide": lambda: gpu.steps("gem-wide", *WIDE, local_batch=options.batch or WIDE_BATCH, measured=options.steps, target=1.10),
        "narrow": lambda: gpu.steps("narrow", *NARROW, local_batch=options.batch, measured=options.steps),
        "saved": lambda: gpu.saved(FULL, local_batch=options.batch, measured=options.steps)}
    parser.add_argument("--stage", nargs="+", choices=tuple(stages), default=["memory", "wire", "quality"])
    parser.add_argument("--events", type=int, default=200_000, help="events of each training")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096], help="of layers")
    parser.add_argument("--batch", type=int, help="samples of a step")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a plan")
    parser.add_argument("--resume", action="store_true", help="keep rows of an earlier file")
    parser.add_argument("--out", default="docs/results")
    options = parser.parse_args(arguments)
    resume = options.resume
    for name in options.stage:
        rows = list(stages[name]())
        device = "h200" if torch.cuda.is_available() else "cpu"
        path = write(f"precision-{device}", rows, command="python -m benchmarks.precision " + " ".join(arguments or sys.argv[1:]), resume=resume,
                     title="Formats below 16 bits", intro="Speed of these formats is measured on GPUs only; on the CPU they are emulated.",
                     out=options.out)
        resume = True
        print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
