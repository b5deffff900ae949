"""How a plan's kernels are launched, and which plans can have it.

    eager        one launch after the other from Python
    compile      every block through the compiler by itself
    cuda_graph   what works on samples alone (`costmodel.regions.over_samples`) is one graph forward and one backward, as its shapes never change;
                 layers of histories, whose shapes differ from batch to batch, stay eager
"""
from __future__ import annotations

from costmodel.blocks.base import QUANTIZED
from costmodel.calibration import Calibration
from costmodel.hosttime import PASSES, HostTimes
from costmodel.model import Model
from costmodel.plan import Plan
from costmodel.precision import LOW_PRECISIONS
from costmodel.regions import over_samples, regions

# From a block to its compiled kernels, both directions [Measured: H200's host, torch 2.11, 2026-12-01: 1.6 to 14 s over ten blocks, median 4.9, other
# compilers beside them; a model of 9 regions, three of them alike, 33 s].
COMPILE_SECONDS = 4.0


def compile_seconds(plan: Plan) -> float:
    """What the compiler adds to the first start-up: each region is one graph a number format."""
    return COMPILE_SECONDS * sum(len({o.precision for o in r.options}) for r in plan.regions) if plan.execution == "compile" else 0.0


def refusal(plan: Plan) -> str | None:
    """Why the plan's blocks cannot be launched as `plan.execution` says; None where they can."""
    if plan.execution == "compile":
        quantized = [r.region for r in plan.regions if any(o.checkpoint in QUANTIZED for o in r.options)]
        if quantized:
            return f"checkpoint policy of region {quantized[0]} quantises what is saved, which the compiler does not do; use execution eager"
    if plan.execution != "cuda_graph":
        return None
    if plan.cluster.device.kind != "gpu":
        return "a CPU has no CUDA graphs"
    if plan.layout.world_size > 1:
        return f"FSDP gathers and frees parameters within the step of {plan.layout.world_size} ranks; graphs are of one rank"
    if plan.accumulation > 1:
        return (f"a graph's gradients have one place, which the next of {plan.accumulation} micro-batches would overwrite before they are added up; "
                "use accumulation 1")
    captured = over_samples(plan.model)
    for region in plan.regions:
        for option in region.options if region.region in captured else ():
            if option.precision in LOW_PRECISIONS:
                return f"region {region.region} computes in {option.precision}, whose scales are state of their own; graphs are of 16 bits or more"
            if option.checkpoint != "none":
                return f"region {region.region} is under checkpoint policy {option.checkpoint}; what a graph keeps is never freed, use none"
    return None


def fits_execution(model: Model, execution: str, region: str, precision: str, checkpoint: str) -> bool:
    """Whether a region under these options is launched so: captured ones keep everything in 16 bits or more, and compiled ones, which could do
    otherwise, were timed that way."""
    if execution == "cuda_graph" and region in over_samples(model):
        return checkpoint == "none" and precision not in LOW_PRECISIONS
    return execution != "compile" or checkpoint == "none"


def unpriced(model: Model, execution: str, calibration: Calibration | None) -> str | None:
    """Why what an execution saves is assumed, not measured; None where a calibration has its figures for every region that it concerns."""
    if execution == "eager":
        return None
    host = HostTimes(calibration.constants if calibration is not None and calibration.device.kind == "gpu" else {})
    if execution == "cuda_graph":
        return None if all(host.get(f"{phase}:graph") is not None for phase in PASSES) else "no calibration has timed the launch of a step's graphs"
    missing = sorted({r.kind for r in regions(model) if any(compiled_share(calibration, r.kind, phase) is None for phase in PASSES)})
    return f"no calibration has timed compiled blocks of kind {', '.join(missing)}" if missing else None


def compiled_share(calibration: Calibration | None, kind: str, phase: str) -> tuple[float, float] | None:
    """(device time, main-thread time) of a compiled block over those of an eager one, in bf16; None where nobody has timed it."""
    constants = calibration.constants if calibration is not None else {}
    device, host = (constants.get(f"{name}/{phase}:{kind}") for name in ("compiled", "compiled_host"))
    return None if device is None or host is None else (device, host)
