"""Whole blocks, forward and backward: against the sum of their ops they show what autograd, Python and caches add between ops."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from costmodel import ops
from costmodel.blocks import BatchShape, Heads, JaggedShape, Mlp, SequenceInput, Summary
from costmodel.blocks.interaction import InteractionBlock
from costmodel.blocks.measured import block_features
from costmodel.plan import Plan
from costmodel.regions import Region, regions
from runtime.microbench.cases import PARAM_DTYPES, noise
from runtime.microbench.requests import batch_sizes
from runtime.microbench.timing import Run
from runtime.model.mlp import MLP
from runtime.model.mlp import Heads as HeadsModule
from runtime.model.registry import build_block
from runtime.model.sequence import Summary as SummaryModule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """A region's block at a batch of histories `lengths` (of one sequence; empty for blocks over samples)."""

    region: Region
    kind: str
    samples: int
    lengths: tuple[int, ...]
    features: tuple[tuple[str, float], ...]
    dtype: str
    plan: Plan


def block_requests(plans: list[Plan], *, seed: int = 0) -> list[BlockRequest]:
    """Every different block of the plans at each batch size, large ones first."""
    rng = np.random.default_rng(seed)
    found: dict[tuple, BlockRequest] = {}
    for plan in plans:
        precision = {r.region: r.options[0].precision for r in plan.regions}
        for samples in batch_sizes(plan):
            lengths = {s.name: plan.workload.lengths[s.name].sample(rng, samples) for s in plan.model.sequences}
            batch = BatchShape(samples=float(samples), sequences={k: JaggedShape.of_lengths(v) for k, v in lengths.items()})
            for region in regions(plan.model):
                if precision[region.name] not in PARAM_DTYPES or (isinstance(region.block, Heads) and len({h.hidden for h in plan.model.heads}) > 1):
                    continue
                described = block_features(region.block, batch)
                if described is None or isinstance(region.block, InteractionBlock):  # priced as the sum of its ops
                    continue
                features = tuple(described.items())
                own = tuple(np.minimum(lengths[region.sequence], region.block.limit or np.inf).astype(np.int64).tolist()) if region.sequence else ()
                request = BlockRequest(region=region, kind=region.block.kind, samples=samples, lengths=own, features=features,
                                       dtype=precision[region.name], plan=plan)
                found.setdefault((region.block.kind, features, precision[region.name]), request)
    return list(found.values())


def block_runs(request: BlockRequest, phase: str, device: torch.device, copies: int) -> list[Run]:
    """`copies` runs of a block's forward or backward."""
    return [_run(request, phase, device) for _ in range(copies)]


def _run(request: BlockRequest, phase: str, device: torch.device) -> Run:
    module, inputs, forward = _built(request, device)
    differentiated = [*inputs, *module.parameters()]
    if phase == ops.FORWARD:
        return Run(run=lambda _: forward())
    out = forward()
    gradient = noise(*out.shape, device=device).to(out.dtype)
    return Run(prepare=forward, run=lambda out: torch.autograd.grad(out, differentiated, gradient))


def _built(request: BlockRequest, device: torch.device) -> tuple[nn.Module, list[Tensor], Callable[[], Tensor]]:
    """(module, inputs, forward) of the module that the trainer would call."""
    block, dtype, tokens = request.region.block, PARAM_DTYPES[request.dtype], sum(request.lengths)
    model = request.plan.model

    def random(*shape: int) -> Tensor:
        return noise(*shape, device=device).to(dtype).requires_grad_()

    if isinstance(block, SequenceInput):
        module = nn.Linear(block.width, model.dim)
        parts = [random(tokens, t.dim) for t in model.tables if t.sequence == block.sequence for _ in range(t.count)]
        module.to(device, dtype)
        return module, parts, lambda: module(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
    if isinstance(block, Mlp | Heads):
        return _dense(request, device, random)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(request.lengths)])).to(device)
    longest, x = max(request.lengths), random(tokens, model.dim)
    if isinstance(block, Summary):
        summary = SummaryModule(model.dim).to(device, dtype)
        return summary, [x], lambda: summary(x, offsets, longest)
    layer = build_block(model.dim, block.group).to(device, dtype)
    return layer, [x], lambda: layer(x, offsets, longest)


def _dense(request: BlockRequest, device: torch.device, random: Callable[..., Tensor]) -> tuple[nn.Module, list[Tensor], Callable[[], Tensor]]:
    block, model, dtype, samples = request.region.block, request.plan.model, PARAM_DTYPES[request.dtype], request.samples
    if isinstance(block, Heads):
        heads, x = HeadsModule(block.width, [h.hidden for h in block.heads]).to(device, dtype), random(samples, block.width)
        return heads, [x], lambda: heads(x)
    assert isinstance(block, Mlp)
    module = MLP(block.widths[0], block.widths[1:]).to(device, dtype)
    if not block.concat:
        x = random(samples, block.widths[0])
        return module, [x], lambda: module(x)
    parts = [random(samples, t.dim) for t in model.tables if t.sequence is None for _ in range(t.count)]
    parts += [random(samples, model.dim) for _ in model.sequences]
    parts += [random(samples, model.bottom_hidden[-1])] if model.num_dense_features else []
    return module, parts, lambda: module(torch.cat(parts, dim=1))
