"""Formats below 16 bits: `python -m benchmarks.precision [--stage memory wire quality movielens modules] [--events N] [--seeds N] [--resume]`.

    memory    saved activations of a wide block, 8 and 4 bits against 16, tracked bytes
    wire      bytes of rows and gradients by format, packed by the runtime
    quality   gate 2 of two recipes on the synthetic stream, one built to fail
    movielens gate 2 of the mild one on MovieLens-100K
    modules   linear layers forward and backward with their quantisation against bf16; on a CPU small ones, emulated, without a target
"""
from __future__ import annotations

import argparse
import dataclasses
import sys
import time

import torch
from torch import nn

from benchmarks.results import Row, write
from costmodel.model import LayerGroup
from costmodel.plan import Plan
from costmodel.state import movielens_path
from costmodel.wire import LOW_WIRES
from costmodel.workload import Lengths
from planner import gates
from planner.configure import default_plan
from planner.scenario import load_scenario
from runtime.data import open_source
from runtime.memory import StorageTracker, storage_ids
from runtime.model.registry import build_block
from runtime.precision.linear import use_low_precision
from runtime.precision.saved import QUANTIZED_POLICIES, quantize_saved
from runtime.precision.wire import WireFormat
from runtime.trainer import Trainer

CPU = torch.device("cpu")
# The default, and one that a few ten thousand events can resolve.
TOLERANCE, COARSE = 0.0005, 0.0025
# Tables small and rates high enough that 8,192 events bring NE from 1 to 0.86: a model that has not learned hides harm.
ROWS, FASTER = 128, 3.0


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


def recipes(events: int) -> dict[str, Plan]:
    """gem-tiny with small tables on one CPU rank and a synthetic stream of short histories: row-wise fp8 layers, and a recipe built to fail: 4-bit
    saved activations everywhere, tensor-wise layers with 8-bit weights' gradients."""
    base, _ = default_plan(load_scenario("quickstart", with_variants=False))
    cluster = dataclasses.replace(base.cluster, devices_per_host=1)
    load = dataclasses.replace(base.workload, source=dataclasses.replace(base.workload.source, kind="synthetic", num_events=events), num_steps=None,
                               epochs=1, lengths={"history": Lengths(kind="lognormal", median=8.0, sigma=0.5, maximum=16)})
    tables = tuple(dataclasses.replace(t, sharding="table_wise", ranks=(0,)) for t in base.tables)
    load = dataclasses.replace(load, learning_rate=FASTER * load.learning_rate, sparse_learning_rate=FASTER * load.sparse_learning_rate)
    model = dataclasses.replace(base.model, tables=tuple(dataclasses.replace(t, rows=min(t.rows, ROWS)) for t in base.model.tables))
    base = dataclasses.replace(base, cluster=cluster, model=model, workload=load, layout=type(base.layout)(), tables=tables, accumulation=1,
                               batching="jagged", local_batch=256, prediction={}, search={})

    def with_(precision: dict[str, str], checkpoint: dict[str, str], **fields) -> Plan:
        regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(
            o, precision=precision.get(r.region, "bf16"), checkpoint=checkpoint.get(r.region, "none")) for o in r.options)) for r in base.regions)
        return dataclasses.replace(base, regions=regions, **fields)

    low = ("history.0", "interaction")
    everywhere = {r.region: "quantized4" for r in base.regions}
    return {"row-wise fp8": with_(dict.fromkeys(low, "fp8_row"), {}),
            "built to fail": with_(dict.fromkeys(low, "fp8_tensor"), everywhere, recipe=("low_weight_gradients",))}


def quality(events: int, seeds: int) -> list[Row]:
    """Gate 2 in this process: no process group is needed on one rank."""
    found = judge(recipes(events), seeds, events)
    rows = [_verdict_row(f"gate 2, {name}: relative NE over bf16", gate, events, "the synthetic stream") for name, gate in found.items()]
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
    return [_verdict_row("gate 2 on MovieLens, row-wise fp8: relative NE over bf16", gate, events, "MovieLens-100K")]


def judge(plans: dict[str, Plan], seeds: int, events: int) -> dict[str, gates.Gate]:
    """The quality gate of each plan; trainings that two of them share run once."""
    known: dict[tuple, gates.Trained] = {}

    def train(plan: Plan) -> gates.Trained:
        key = (plan.seed, plan.identity())
        if key not in known:
            start = time.perf_counter()
            trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=CPU)
            trainer.train()
            known[key] = max(trainer.evaluate().values()), (time.perf_counter() - start) / max(1, trainer.step)
        return known[key]

    def say(name: str):
        return lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)

    return {name: gates.validate(dataclasses.replace(plan, emulated=("emulated",)), lambda asked: [train(one) for one, _ in asked], seeds=seeds,
                                 tolerance=TOLERANCE, events=events, blame=False, progress=say(name)).quality for name, plan in plans.items()}


def _verdict_row(name: str, gate: gates.Gate, events: int, what: str) -> Row:
    note = (f"{gate.verdict}: 95 % bounds {gate.lower:+.5%} to {gate.upper:+.5%}, allowed {TOLERANCE:.2%}; {len(gate.differences)} seeds x "
            f"{events:,} events of {what} on the CPU; {_still_needed(gate, events)}")
    return Row(name=name, value=gate.mean, unit="ratio", better="lower", note=note)


def _still_needed(gate: gates.Gate, events: int) -> str:
    """Events beyond those used that a verdict at the default tolerance needs, were mean and deviation to stay."""
    used = len(gate.differences) * events
    if gate.verdict != "inconclusive":
        return f"{used:,} events used, 0 more needed"
    return f"{used:,} events used, " + (f"{gate.events_needed - used:,} more would decide" if gate.events_needed else gate.reason)


def modules() -> list[Row]:
    """A linear layer's forward and backward in 8 bits with all its quantisation, bf16's seconds over its own."""
    cuda = torch.cuda.is_available()
    device, rows, widths = (torch.device("cuda"), 16_384, (1024, 2048, 4096)) if cuda else (CPU, 1024, (256, 512))
    found = []
    for width in widths:
        seconds = {precision: _seconds(rows, width, precision, device) for precision in ("bf16", "fp8_row")}
        found.append(Row(name=f"linear {width} x {width}, row-wise fp8 forward and backward with quantisation", unit="x bf16",
                         value=seconds["bf16"] / seconds["fp8_row"], target=(1.10 if width < 2048 else 1.25) if cuda else None,
                         note=f"{rows:,} rows: {seconds['bf16'] * 1e3:.2f} ms in bf16, {seconds['fp8_row'] * 1e3:.2f} ms in 8 bits"
                              + ("" if cuda else ", emulated on the CPU: its speed says nothing of the format")))
    return found


def _seconds(rows: int, width: int, precision: str, device: torch.device) -> float:
    layer = nn.Linear(width, width, device=device, dtype=torch.bfloat16)
    if precision != "bf16":
        use_low_precision(layer, precision, device=device)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad, times = torch.randn_like(x), []
    for _ in range(30):
        start = time.perf_counter()
        layer(x).backward(grad)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[5:])[len(times[5:]) // 2]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.precision")
    parser.add_argument("--stage", nargs="+", choices=("memory", "wire", "quality", "movielens", "modules"), default=["memory", "wire", "quality"])
    parser.add_argument("--events", type=int, default=200_000, help="events of each training")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--resume", action="store_true", help="keep rows of an earlier file")
    options = parser.parse_args(arguments)
    stages = {"memory": memory, "wire": wire, "quality": lambda: quality(options.events, options.seeds),
              "movielens": lambda: movielens(options.events, options.seeds), "modules": modules}
    rows = [row for name in options.stage for row in stages[name]()]
    device = "h200" if torch.cuda.is_available() else "cpu"
    path = write(f"precision-{device}", rows, command="python -m benchmarks.precision " + " ".join(arguments or sys.argv[1:]), resume=options.resume,
                 title="Formats below 16 bits", intro="Speed of these formats is measured on GPUs only; on the CPU they are emulated.")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
