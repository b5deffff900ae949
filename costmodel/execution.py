"""How a plan's kernels are launched, and which plans can have it.

    eager        one launch after the other from Python
    compile      every block through the compiler by itself
    cuda_graph   what works on samples alone (`costmodel.regions.over_samples`) is one graph forward and one backward, as its shapes never change;
                 layers of histories, whose shapes differ from batch to batch, stay eager
"""
from __future__ import annotations

from costmodel.blocks.base import QUANTIZED
from costmodel.plan import Plan
from costmodel.precision import LOW_PRECISIONS
from costmodel.regions import over_samples


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
