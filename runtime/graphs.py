"""CUDA graphs of what a step computes on samples alone (`costmodel.execution`): one launch forward, one backward.

They are captured once, before the first step, by `torch.cuda.make_graphed_callables`; a replay copies its inputs to where the graph reads them.
Parameters are read where they are, so what changes them (the optimizer, a checkpoint that is loaded) does so in place. Gradients of parameters come
to lie where the graph leaves them. A call without gradients or on another number of samples (evaluation) runs eagerly.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from costmodel.plan import Plan
from costmodel.regions import over_samples, regions
from runtime.model import GEM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class OverSamples(nn.Module):
    """The blocks of `GEM.over_samples`, which their model owns, as a module of their own."""

    def __init__(self, model: GEM) -> None:
        super().__init__()
        self.output: Tensor | None = None  # of the last call
        names = over_samples(model.model)
        self.blocks = nn.ModuleList(parent.get_submodule(key) for name, blocks in model.regions().items() if name in names for parent, key in blocks)
        self._call = model.over_samples

    def forward(self, *inputs: Tensor) -> Tensor:
        self.output = None
        self.output = self._call(*inputs)
        return self.output


class Replayed:
    """`call` as graphs: `(B, ...)` inputs like `sample`'s are replayed, others run eagerly."""

    def __init__(self, eager: Callable[..., Tensor], replay: Callable[..., Tensor], sample: tuple[Tensor, ...]) -> None:
        self._eager, self._replay, self._shapes = eager, replay, [x.shape for x in sample]
        self.replays = 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or any(x.shape != shape for x, shape in zip(inputs, self._shapes, strict=True)):
            return self._eager(*inputs)
        self.replays += 1
        return self._replay(*inputs)


def capture(model: GEM, plan: Plan, device: torch.device) -> None:
    """Replaces `model.over_samples` by its graphs, of a plan that `costmodel.execution.refusal` has nothing against."""
    eager, sample, module = model.over_samples, sample_inputs(plan, device), OverSamples(model)
    with warnings.catch_warnings():
        # of gradients that are asked for, which accumulate nowhere: backward is warmed up and captured on streams of its own
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        replay = torch.cuda.make_graphed_callables(module, sample)
    if module.output is not None:
        # what it was made by holds the parameters' gradient accumulators on the stream of the capture, for which every step would wait
        module.output.detach_()
        module.output = None
    model.over_samples = Replayed(eager, replay, sample)  # type: ignore[method-assign]


def sample_inputs(plan: Plan, device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of the shapes and dtypes that reach `GEM.over_samples` in every micro-batch; all but dense features require gradients."""
    model, samples = plan.model, plan.local_batch
    computed = {r.region: DTYPES.get(r.options[-1].precision, torch.bfloat16) for r in plan.regions}
    known = regions(model)
    names = over_samples(model)
    reading = [r for r in known if r.name.startswith("interaction.") and r.name not in names]

    def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

    if reading:
        last = reading[-1]
        return (leaf(samples, last.block.num_outputs, model.feature_dim, dtype=computed[last.name]),)  # type: ignore[attr-defined]
    inputs = [leaf(t.count, samples, t.dim, dtype=torch.float32) for t in model.tables if t.pooling != "sequence"]
    inputs += [leaf(samples, model.dim, dtype=computed[f"{s.name}.summary"]) for s in model.sequences]
    if model.num_dense_features:
        inputs.append(torch.zeros(samples, model.num_dense_features, device=device))
    return tuple(inputs)
