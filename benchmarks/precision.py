"""Formats below 16 bits: `python -m benchmarks.precision [--stage ...] [--events N] [--seeds N] [--resume]`.

    memory       saved activations of a wide block, 8 and 4 bits against 16, tracked bytes
    wire         bytes of rows by format, and of a block's FSDP all-gather in 8 bits, packed by the runtime
    quality      gate 2 of two recipes on the synthetic stream, one built to fail; on CUDA where there is a device (benchmarks.precision_gate)
    movielens    gate 2 of the mild one on MovieLens-100K
    modules      layers forward and backward with their quantisation against bf16; on a CPU small ones, emulated, without a target
    products     products alone, native against emulated               (these and what follows: benchmarks.precision_gpu)
    conversions  rates of quantisations
    wide         steps of gem-wide in bf16 against fp8
    narrow       the same of a model that is too narrow for it to pay
    saved        saved activations of gem-full in 8 and 4 bits: memory and step
    predict, run the planner's own choices, predicted and then run (benchmarks.precision_choice)
    warm         one of ten processes that compile what the three above run

Each row is written as soon as it is known.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from benchmarks import precision_choice as choice
from benchmarks import precision_gate as gate
from benchmarks import precision_gpu as gpu
from benchmarks.results import Row, write
from costmodel.model import LayerGroup
from costmodel.wire import LOW_WIRES
from runtime.memory import StorageTracker, storage_ids
from runtime.model.registry import build_block
from runtime.precision.gather import ShardFormat
from runtime.precision.linear import use_low_precision
from runtime.precision.saved import QUANTIZED_POLICIES, quantize_saved
from runtime.precision.wire import WireFormat

CPU = torch.device("cpu")
FULL, WIDE, NARROW = "gem-full-1xh200", ("gem-full-1xh200", "gem-wide-8xh200"), ("gem-full-1xh200", "hstu-ranking")
WIDE_BATCH = 160


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
    """Rows of width 128, and a block of gem-wide as 8 ranks gather it, scales included."""
    rows = torch.randn(4096, 128)
    wide = WireFormat("bf16").pack(rows)
    found = [Row(name=f"rows of width 128 in {name}, bytes over bf16", value=flat.numel() * flat.element_size() / (2 * wide.numel()), unit="ratio",
                 better="lower", note="counted in the packed tensor, scales included")
             for name in LOW_WIRES for flat in [WireFormat(name).pack(rows)]]
    with torch.device("meta"):
        shapes = [p.shape for p in build_block(2048, LayerGroup(kind="self_attention", heads=16, head_dim=128, mlp_dim=8192)).parameters()]
    form = ShardFormat.of(shapes, 8)
    shard = torch.randn(sum(rows * max(1, width) for rows, width in form.pieces), dtype=torch.bfloat16)
    sent = form.pack(shard).numel()
    note = f"counted: {sent:,} of {2 * shard.numel():,} bytes that a rank of 8 sends, scales and 16-bit vectors included"
    return [*found, Row(name="FSDP all-gather of a block of gem-wide in 8 bits, bytes over bf16", value=sent / (2 * shard.numel()), unit="ratio",
                        target=0.51, better="lower", note=note)]


def modules(widths: list[int]) -> Iterable[Row]:
    """Linear layers' forward and backward with all their quantisation; on a CPU small ones, emulated, without a target."""
    if torch.cuda.is_available():
        return gpu.modules(widths)
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
        "memory": memory, "wire": wire, "quality": lambda: gate.quality(options.events, options.seeds, go=options.go, local_batch=options.batch,
                                        workers=options.workers, seconds=options.seconds),
        "movielens": lambda: gate.movielens(options.events, options.seeds), "modules": lambda: modules(options.widths),
        "products": lambda: gpu.products(options.widths), "conversions": lambda: gpu.conversions(options.widths),
        "wide": lambda: gpu.steps("gem-wide", *WIDE, local_batch=options.batch or WIDE_BATCH, measured=options.steps, target=1.10),
        "narrow": lambda: gpu.steps("narrow", *NARROW, local_batch=options.batch, measured=options.steps),
        "saved": lambda: gpu.saved(FULL, local_batch=options.batch, measured=options.steps), "warm": lambda: gpu.warm(options.part),
        "predict": lambda: choice.predict(options.work, options.calibration) or (), "run": lambda: choice.run(options.work, steps=options.steps)}
    parser.add_argument("--stage", nargs="+", choices=tuple(stages), default=["memory", "wire", "quality"])
    parser.add_argument("--events", type=int, default=200_000, help="events of each training")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096], help="of layers")
    parser.add_argument("--batch", type=int, help="samples of a step")
    parser.add_argument("--part", type=int, default=0, help=f"of {gpu.WARM_PARTS} of stage warm")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a plan")
    parser.add_argument("--workers", type=int, help="seeds of stage quality that train side by side")
    parser.add_argument("--seconds", type=float, help="after which stage quality decides on the seeds that are done")
    parser.add_argument("--go", type=Path, help="a file that trainings of stage quality wait for once they are prepared")
    parser.add_argument("--after", type=Path, help="a file to wait for before anything is measured")
    parser.add_argument("--work", type=Path, default=Path("out/precision"), help="plans of stages predict and run")
    parser.add_argument("--calibration", type=Path, help="file of a calibration, for stage predict")
    parser.add_argument("--resume", action="store_true", help="keep rows of an earlier file")
    parser.add_argument("--out", default="docs/results")
    options = parser.parse_args(arguments)
    while options.after is not None and not options.after.exists():
        time.sleep(0.1)
    device, resume = "h200" if torch.cuda.is_available() else "cpu", options.resume
    for name in options.stage:
        for row in stages[name]():
            write(f"precision-{device}", [row], command="python -m benchmarks.precision " + " ".join(arguments or sys.argv[1:]), resume=resume,
                  title="Formats below 16 bits", intro="Speed of these formats is measured on GPUs only; on the CPU they are emulated.",
                  out=options.out)
            resume = True
    return 0


if __name__ == "__main__":
    sys.exit(main())
