"""What a region loses below 16 bits, on real batches: `python -m runtime.precision.sensitivity PLAN --out FILE [--batches N] [--recipes ...]`.

For each region and recipe the model runs once in fp32 and once with that region alone under the recipe, with the same parameters and batches:

    snr_db         output of the region's last block: 10 log10(|y|^2 / |y' - y|^2)
    cosine         of the gradients of all the region's parameters, as one vector
    saturation     share of quantised inputs and weights of its linear layers at the format's largest magnitude, beyond the one a scale
                   maps there
    underflow      share of them that are not zero and become zero
    noise          |y' - y|^2 / |y|^2: the unit of the numeric-risk budget, a block's contribution to it

`quantized` and `quantized4` (under bf16) change no output, so their noise is that of the region's gradients. Parameters are those of a model before
training.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from costmodel.plan import Plan
from costmodel.precision import LOW_PRECISIONS
from kernels import _fp8
from runtime.batch import Batch
from runtime.data import Loader, open_source
from runtime.loss import model_loss
from runtime.mesh import build_meshes
from runtime.model import GEM
from runtime.parallelize import Parallelized, parallelize
from runtime.phases import PhaseTimer
from runtime.precision.linear import SCALINGS, LowPrecisionLinear, quantize_factor
from runtime.precision.saved import QUANTIZED_POLICIES

RECIPES = ("bf16", *LOW_PRECISIONS, *QUANTIZED_POLICIES)


@dataclasses.dataclass(slots=True)
class _Seen:
    """What one run of the model leaves of a region: outputs and parameter gradients, and counts of its quantised factors."""

    outputs: list[Tensor]
    gradients: Tensor
    elements: int = 0
    saturated: int = 0
    vanished: int = 0


def measure(plan: Plan, batches: Sequence[Batch], *, recipes: Sequence[str] = RECIPES) -> list[dict[str, object]]:
    """One row per region and recipe: the figures of the module docstring, or `refused` with the reason."""
    plan = one_rank(plan)
    rows: list[dict[str, object]] = []
    for region in [r.region for r in plan.regions]:
        exact = _run(plan, region, batches)
        for recipe in recipes:
            try:
                found = _run(_with(plan, region, recipe), region, batches)
            except ValueError as error:
                rows.append({"region": region, "recipe": recipe, "refused": str(error)})
                continue
            rows.append({"region": region, "recipe": recipe, **_compare(exact, found, recipe)})
    return rows


def one_rank(plan: Plan) -> Plan:
    """The plan's model on one rank, everything in fp32 and kept."""
    regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(o, precision="fp32", checkpoint="none") for o in r.options))
                    for r in plan.regions)
    tables = tuple(dataclasses.replace(t, sharding="table_wise", ranks=(0,)) for t in plan.tables)
    return dataclasses.replace(plan, regions=regions, tables=tables, layout=type(plan.layout)(), accumulation=1, execution="eager", wire=None,
                               wire_gradients=None, batching="jagged")


def _with(plan: Plan, region: str, recipe: str) -> Plan:
    change = {"precision": "bf16", "checkpoint": recipe} if recipe in QUANTIZED_POLICIES else {"precision": recipe}
    return dataclasses.replace(plan, regions=tuple(
        dataclasses.replace(r, options=tuple(dataclasses.replace(o, **change) for o in r.options)) if r.region == region else r
        for r in plan.regions))


def _run(plan: Plan, region: str, batches: Sequence[Batch]) -> _Seen:
    device = torch.device("cpu")
    torch.manual_seed(plan.seed)
    model = GEM(plan.model)
    job: Parallelized = parallelize(model, plan=plan, meshes=build_meshes(plan.layout, device), timer=PhaseTimer(device))
    blocks = [parent.get_submodule(key) for parent, key in model.regions()[region]]
    seen = _Seen(outputs=[], gradients=torch.zeros(0))
    hooks = [blocks[-1].register_forward_hook(lambda module, inputs, output: seen.outputs.append(_first(output).detach().float()))]
    for layer in (m for b in blocks for m in b.modules() if isinstance(m, LowPrecisionLinear)):
        hooks.append(layer.register_forward_pre_hook(lambda module, inputs: _count(module, inputs[0], seen)))
    for batch in batches:
        loss = model_loss(job.dense(job.embeddings.forward(batch), batch), batch.labels) / batch.num_samples
        loss.backward()
        job.embeddings.discard()
    seen.gradients = torch.cat([p.grad.flatten() for b in blocks for p in b.parameters() if p.grad is not None])
    for hook in hooks:
        hook.remove()
    return seen


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A block that returns several tensors is judged by the last one, the sequence that later blocks read."""
    return output[-1] if isinstance(output, tuple) else output


def _count(layer: LowPrecisionLinear, x: Tensor, seen: _Seen) -> None:
    scalings = SCALINGS[layer.recipe.precision]
    for factor, scaling in ((x.detach().reshape(-1, layer.in_features), scalings[0]), (layer.weight.detach(), scalings[1])):
        values = quantize_factor(factor, scaling).values.float().abs()
        seen.elements += factor.numel()
        seen.saturated += max(0, int((values == _fp8.E4M3_MAX).sum()) - _num_scales(factor, scaling))
        seen.vanished += int(((values == 0) & (factor != 0)).sum())


def _num_scales(x: Tensor, scaling: str) -> int:
    """Scales that map one element each to the largest magnitude, which is no saturation."""
    rows, width = x.shape
    return {"tensor_delayed": 1, "rowwise": rows, "block128": rows * (width // 128)}.get(scaling, 0)


def _compare(exact: _Seen, found: _Seen, recipe: str) -> dict[str, float]:
    signal = sum(float(y.square().sum()) for y in exact.outputs)
    noise = sum(float((a - b).square().sum()) for a, b in zip(exact.outputs, found.outputs))
    a, b = exact.gradients.double(), found.gradients.double()
    cosine = float(torch.dot(a, b) / (a.norm() * b.norm()).clamp(min=1e-300))
    gradient_noise = float((a - b).square().sum() / a.square().sum().clamp(min=1e-300))
    ratio = gradient_noise if recipe in QUANTIZED_POLICIES else noise / max(signal, 1e-300)
    return {"snr_db": min(200.0, -10 * math.log10(max(noise / max(signal, 1e-300), 1e-20))), "cosine": cosine, "noise": ratio,
            "gradient_noise": gradient_noise, "saturation": found.saturated / max(1, found.elements),
            "underflow": found.vanished / max(1, found.elements)}


def main(arguments: list[str] | None = None) -> int:
    """Measures PLAN and writes the rows; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runtime.precision.sensitivity", description="Noise of regions below 16 bits on real batches.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--samples", type=int, default=256, help="samples of a batch at most")
    options = parser.parse_args(arguments)
    try:
        plan = one_rank(Plan.load(options.plan))
        samples = min(options.samples, plan.local_batch)
        source = open_source(plan.model, plan.workload, seed=plan.seed)
        loader = Loader(source, global_batch=samples, seed=plan.seed)
        batches = [loader.build(step)[0] for step in range(options.batches)]
        rows = measure(plan, batches)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    body = {"schema_version": 1, "model": plan.model.name, "workload": plan.workload.name, "origin": source.origin, "samples": samples * len(batches),
            "torch": torch.__version__, "rows": rows}
    options.out.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
