"""What a step on one GPU is made of, timed as the trainer runs it: constants of the device, whole blocks under every precision and checkpoint
policy, table groups, the optimizer, single ops, batches built by the loader. `runtime.microbench.session` makes a calibration of them.

Device time comes from events behind a held-back stream, host time from the same calls (`timing`). A block is the trainer's own module, fed with
tensors of the dtypes that reach it in the model: tables hand fp32 in, blocks hand their own dtype on. Its sample has the policy as variant; a
backward under `selective` or `full` includes what runs again.
"""
from __future__ import annotations

import dataclasses
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from costmodel import ops
from costmodel.blocks import BatchShape, JaggedShape
from costmodel.blocks.measured import block_features
from costmodel.gpu import block_key
from costmodel.memory import backward_bytes
from costmodel.model import TableGroup
from costmodel.ops import KINDS
from costmodel.plan import Plan, RegionOption
from costmodel.precision import LOW_PRECISIONS
from costmodel.regions import Region, regions
from costmodel.samples import BLOCK_PREFIX, CONSTANT_PREFIX, Sample
from costmodel.sparse import expected_unique, skew
from runtime import worker
from runtime.batch import Batch
from runtime.checkpointing import apply_checkpointing
from runtime.data import Source, open_source
from runtime.embedding import Lookup, ShardedEmbeddings
from runtime.mesh import Meshes
from runtime.microbench import cases
from runtime.microbench.cases import noise
from runtime.microbench.requests import Request, across, attention_requests, requests
from runtime.microbench.timing import Run, Timing, measure
from runtime.mixed_precision import compute_in
from runtime.model import GEM
from runtime.optimizer import build_dense_optimizer
from runtime.parallelize import PARAM_DTYPES
from runtime.precision.linear import use_low_precision

POLICIES = ("none", "selective", "full")
# A subject's batch is timed whole and in this part.
SMALLER = 3
# By how much batches are smaller whose attention is timed in fp32.
WIDE_SMALLER = 9
# How many attention ops of 16 bits are timed for one of fp32.
WIDE_TURN = 3
COPIES = 2
# Plans that are timed whole; of the others the layers alone.
WHOLE_PLANS = 9
# Timed with the blocks.
_TIMED_ABOVE = frozenset({"embedding_lookup", "embedding_update", "adamw", "unique"})
# Points a turn of what steps spend most on.
TURNS = {("linear", "bf16"): 12, ("linear", "fp32"): 3, ("bmm", "bf16"): 2, ("attention", "bf16"): 4}
Report = Callable[[str], None]


def sample(kind: str, phase: str, features: dict[str, float], timing: Timing, *, variant: str = "", dtype: str = "fp32",
           held_out: bool = False) -> Sample:
    return Sample(op=kind, variant=variant, phase=phase, features=features, dtype=dtype, seconds=timing.seconds, host_seconds=timing.host_seconds,
                  noise=timing.noise, repeats=timing.repeats, held_out=held_out)


def constant(name: str, value: float, variant: str = "") -> Sample:
    return Sample(op=CONSTANT_PREFIX + name, variant=variant, phase=ops.STEP, features={}, seconds=value)


# --- constants ---


def constant_samples(device: torch.device) -> Iterator[Sample]:
    """Launch times, rates of a large copy and of large products, host-to-device rate, bytes that libraries keep (costmodel.samples)."""
    yield constant("library_bytes", _library_bytes(device))
    yield from _launch_constants(device)
    source, target = torch.randn(2**29, device=device), torch.empty(2**29, device=device)
    copied = measure([Run(run=lambda _: target.copy_(source))], device=device, seconds=0.1)
    yield constant("memory_bandwidth", 2 * source.numel() * 4 / copied.seconds)
    for dtype, size in (("bf16", 8192), ("fp32", 4096)):
        a, b = (torch.randn(size, size, device=device, dtype=PARAM_DTYPES[dtype]) for _ in range(2))
        product = measure([Run(run=lambda _, a=a, b=b: a @ b)], device=device, seconds=0.1)
        yield constant("peak_flops", 2 * size**3 / product.seconds, dtype)
    host = torch.empty(2**26, dtype=torch.uint8).pin_memory()
    landed = torch.empty_like(host, device=device)
    moved = measure([Run(run=lambda _: landed.copy_(host, non_blocking=True))], device=device, seconds=0.1)
    yield constant("host_copy_bandwidth", host.numel() / moved.seconds)


def _library_bytes(device: torch.device) -> float:
    """What products in forward and backward leave allocated once all tensors are gone: workspaces of two threads."""
    before = torch.cuda.memory_allocated()
    for dtype in PARAM_DTYPES.values():
        layer = nn.Linear(1024, 1024, device=device, dtype=dtype)
        layer(torch.randn(512, 1024, device=device, dtype=dtype)).sum().backward()
    del layer
    gc.collect()
    torch.cuda.synchronize()
    return float(torch.cuda.memory_allocated() - before)


def _launch_constants(device: torch.device) -> list[Sample]:
    small = torch.randn(16, device=device)
    eager = _host_seconds(lambda: small.add_(1.0), 1000)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(100):
            small.add_(1.0)
    return [constant("launch_seconds", eager), constant("graph_launch_seconds", _host_seconds(graph.replay, 20) / 100)]


def _host_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = (time.perf_counter() - start) / repeats
    torch.cuda.synchronize()
    return spent


def context_bytes() -> float:
    """What the device holds beyond the caching allocator: context, modules, communicators."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


# --- blocks ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A batch of `samples`, with the lengths of every history."""

    samples: int
    lengths: dict[str, np.ndarray]

    @property
    def shape(self) -> BatchShape:
        return BatchShape(samples=float(self.samples), sequences={k: JaggedShape.of_lengths(v) for k, v in self.lengths.items()})


def batches(plan: Plan, rng: np.random.Generator) -> list[Lengths]:
    """The plan's batch and a smaller one."""
    sizes = sorted({plan.local_batch, max(4, plan.local_batch // SMALLER)}, reverse=True)
    return [Lengths(samples=n, lengths={s.name: plan.workload.lengths[s.name].sample(rng, n) for s in plan.model.sequences}) for n in sizes]


def block_samples(plan: Plan, batch: Lengths, device: torch.device, *, precision: str, policies: tuple[str, ...], seconds: float,
                  layers_only: bool = False) -> Iterator[Sample]:
    """Forward and backward of one block of every region; policies other than `none` for the layers of histories."""
    for region in regions(plan.model):
        features = block_features(region.block, batch.shape)
        if features is None:  # priced as the sum of its ops
            continue
        layer = region.layer
        if layers_only and not layer:
            continue
        for policy in policies if layer else ("none",):
            block = build_block(plan, region, device, precision=precision, policy=policy)
            for phase in (ops.FORWARD, ops.BACKWARD):
                if policy != "none" and phase == ops.FORWARD:  # the same kernels
                    continue
                run = block_run(plan, region, block, batch, device, precision, phase)
                timing = measure([run], device=device, seconds=seconds)
                yield sample(BLOCK_PREFIX + region.block.kind, phase, features, timing, variant="" if policy == "none" else policy, dtype=precision)
            if layer and device.type == "cuda":
                formula = backward_bytes(region.block, batch.shape, precision, policy)
                yield constant("workspace", _workspace(run, block) / formula, block_key(region.block.kind, precision, policy))


def _workspace(run: Run, block: nn.Module) -> float:
    """Bytes that a backward has beside what forward saved and the gradient that it is given, without gradients of parameters."""
    state = run.prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, gradient = torch.cuda.memory_allocated(), state.numel() * state.element_size()
    run.run(state)
    peak = torch.cuda.max_memory_allocated()
    return float(peak - before + gradient - sum(p.numel() * p.element_size() for p in block.parameters()))


def layer_precision(plan: Plan) -> str:
    """What a plan to calibrate by computes in: that of its first layer, since inputs of histories keep 16 bits where layers have 8."""
    return next((r for r in plan.regions if r.region.split(".")[-1].isdigit()), plan.regions[0]).options[0].precision


def build_block(plan: Plan, region: Region, device: torch.device, *, precision: str, policy: str) -> nn.Module:
    with device:
        model = GEM(dataclasses.replace(plan.model, sequences=tuple(
            dataclasses.replace(s, layers=tuple(dataclasses.replace(g, count=1) for g in s.layers)) for s in plan.model.sequences)))
    parent, name = model.regions()[region.name][0]
    block = parent.get_submodule(name)
    option = RegionOption(count=1, precision=precision, checkpoint=policy)  # type: ignore[arg-type]
    if precision in LOW_PRECISIONS:
        use_low_precision(block, precision, device=device, options=plan.recipe, region=region.name)
    if option.precision != "fp32":
        compute_in(block, PARAM_DTYPES[option.precision])
    apply_checkpointing(block, option.checkpoint)
    return block


def block_run(plan: Plan, region: Region, block: nn.Module, batch: Lengths, device: torch.device, precision: str, phase: str) -> Run:
    inputs, forward = _fed(plan, region, block, batch, device, PARAM_DTYPES[precision])
    differentiated = [*inputs, *block.parameters()]
    if phase == ops.FORWARD:
        return Run(run=lambda _: forward())
    out = forward()
    gradient = noise(*out.shape, device=device).to(out.dtype)
    return Run(prepare=forward, run=lambda out: torch.autograd.grad(out, differentiated, gradient))


def _fed(plan: Plan, region: Region, block: nn.Module, batch: Lengths, device: torch.device,
         dtype: torch.dtype) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """(inputs to differentiate, the call that `runtime.model.GEM.forward` makes of this region, what it does to the inputs included)."""
    model, samples = plan.model, batch.samples

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return noise(*shape, device=device).to(dtype).requires_grad_()

    first = region.name == ("interaction.0" if model.interaction_layers else "interaction")
    history: tuple[Tensor, Tensor, int] | tuple[()] = ()
    if region.sequence:
        lengths = np.minimum(batch.lengths[region.sequence], region.block.limit or np.inf).astype(np.int64)
        tokens, longest = int(lengths.sum()), int(lengths.max())
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(device)
        if region.name == f"{region.sequence}.input":
            leaves = [leaf(t.count, tokens, t.dim) for t in model.tables if t.sequence == region.sequence]

            def enter() -> Tensor:
                if len(leaves) == 1:
                    return block(leaves[0].transpose(0, 1).flatten(1))
                return block(torch.cat([p for stacked in leaves for p in stacked.unbind(0)], dim=1))

            return leaves, enter
        x = leaf(tokens, model.dim, dtype=dtype)
        if not region.name.startswith("interaction."):
            return [x], lambda: block(x, offsets, longest)
        history = (x, offsets, longest)
    if region.name == "bottom":
        dense = noise(samples, model.num_dense_features, device=device)
        return [], lambda: block(dense)
    if first:
        leaves = [leaf(t.count, samples, t.dim) for t in model.tables if t.sequence is None]
        others = [leaf(samples, model.dim, dtype=dtype) for _ in model.sequences]
        others += [leaf(samples, model.bottom_hidden[-1], dtype=dtype)] if model.num_dense_features else []

        def interact() -> Tensor:
            features = [stacked.transpose(0, 1) for stacked in leaves] + others
            x = torch.cat([f.to(features[-1].dtype).flatten(1) for f in features], dim=1)
            return tokens_of(block(x.unflatten(1, (-1, model.feature_dim)) if model.interaction_layers else x, *history))

        return [*leaves, *others, *history[:1]], interact
    if region.name.startswith("interaction."):
        features = leaf(samples, region.block.num_tokens, model.feature_dim, dtype=dtype)
        return [features, *history[:1]], lambda: tokens_of(block(features, *history))
    width = region.block.widths[0] if region.name == "interaction" else model.interaction_hidden[-1]
    x = leaf(samples, width, dtype=dtype)
    return [x], lambda: block(x)


def tokens_of(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The feature tokens that an interaction layer hands on, without a history's events."""
    return out[0] if isinstance(out, tuple) else out


# --- tables, optimizer, input ---


def sparse_samples(plan: Plan, source: Source, samples: int, device: torch.device, *, seconds: float) -> Iterator[Sample]:
    """Lookup and fused update of every table group, by the trainer's own class on the source's own ids."""
    drawn = [source.build(np.random.default_rng(i).integers(0, source.num_train, samples)).to(device) for i in range(COPIES)]
    for table in plan.model.tables:
        yield from _table_samples(plan, table, drawn, device, seconds)


def _table_samples(plan: Plan, table: TableGroup, drawn: list[Batch], device: torch.device, seconds: float) -> Iterator[Sample]:
    meshes = Meshes(layout=plan.layout, rank=0, device=device, dense=None, sparse_group=None, sparse_replicas=None)
    placements = tuple(p for p in plan.tables if p.table in table.names)
    tables = ShardedEmbeddings((table,), placements, meshes, seed=0, learning_rate=0.01)
    ids = float(drawn[0].ids[table.name].numel())
    unique = table.count * expected_unique(table.rows, skew(table, table.name, plan.workload), ids / table.count)
    common = {"ids": ids, "unique": float(round(unique)), "dim": float(table.dim), "rows": float(table.rows * table.count)}
    variant = "sequence" if table.sequence is not None else "pooled"
    looked = measure([Run(run=lambda _, b=b: tables.forward(b)) for b in drawn], device=device, seconds=seconds)
    yield sample("embedding_lookup", ops.FORWARD, {**common, "tables": float(table.count)}, looked, variant=variant, dtype=table.dtype)

    def prepare(batch: Batch) -> list[Lookup]:
        for leaf in tables.forward(batch).values():
            leaf.grad = torch.empty_like(leaf).normal_()
        return tables._lookups

    def update(lookups: list[Lookup]) -> None:
        tables._lookups = lookups
        tables.backward()

    updated = measure([Run(prepare=lambda b=b: prepare(b), run=update) for b in drawn], device=device, seconds=seconds)
    yield sample("embedding_update", ops.STEP, {**common, "tables": 1.0}, updated, variant=table.optimizer, dtype=table.dtype)


def optimizer_sample(plan: Plan, device: torch.device, *, seconds: float) -> Sample:
    """AdamW on the whole dense model, gradients dropped after it and so given anew before every call."""
    with device:
        model = GEM(plan.model)
    parameters = list(model.parameters())
    optimizer = build_dense_optimizer(parameters, lr=1e-3)
    gradients = [torch.zeros_like(p) for p in parameters]

    def step(_state: object) -> None:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    features = {"parameters": float(sum(p.numel() for p in parameters)), "tensors": float(len(parameters))}
    return sample("adamw", ops.STEP, features, measure([Run(run=step)], device=device, seconds=seconds))


def input_sample(plan: Plan, source: Source, samples: int, *, seconds: float) -> Sample:
    """A batch built and handed over, as the loader's process does it. `events`: ids of all tables."""
    drawn = [np.random.default_rng(i).integers(0, source.num_train, samples) for i in range(4)]
    first = source.build(drawn[0])
    slot = memoryview(bytearray(2 * worker.num_bytes(worker.pack((first,))[1]) + worker.SLOT_EXTRA))

    def build(samples: np.ndarray) -> None:
        worker.store(worker.pack((source.build(samples),))[1], slot)

    ids = sum(t.numel() for t in first.ids.values())
    timing = measure([Run(run=lambda _, d=d: build(d)) for d in drawn], device=torch.device("cpu"), seconds=seconds)
    return sample("input", ops.STEP, {"samples": float(samples), "events": float(ids)}, timing, variant="jagged")


# --- ops ---


def op_requests(plans: list[Plan], *, points: float, kinds: frozenset[str] | None = None, but: frozenset[str] = frozenset()) -> list[Request]:
    """Single ops of the plans' own shapes and around them, of `kinds` (None: all) without `but`; tables and optimizer are timed above."""
    wanted = [r for r in requests(plans, points=points, gpu=True)
              if cases.executable(r) and r.op.kind not in (*but, *_TIMED_ABOVE) and (kinds is None or r.op.kind in kinds)]
    return in_turns(wanted, np.random.default_rng(11))


def attention_ops(plans: list[Plan]) -> list[Request]:
    """Attention of the plans' layers on histories of their own: in a batch of their size, then in a smaller one; and, one to WIDE_TURN of those, in
    fp32, whose kernels are slow, in one smaller yet."""
    rng = np.random.default_rng(13)
    turns: tuple[list[Request], ...] = ([], [], [])
    for plan in plans:
        bf16 = layer_precision(plan) != "fp32"
        for turn, (divisor, own) in zip(turns, ((1, bf16), (SMALLER, bf16), (WIDE_SMALLER, False))):
            samples = max(4, plan.local_batch // (divisor if own else WIDE_SMALLER))
            lengths = {s.name: plan.workload.lengths[s.name].sample(rng, samples) for s in plan.model.sequences}
            found = attention_requests(plan, lengths)
            if not own:
                found = [dataclasses.replace(r, op=dataclasses.replace(r.op, dtype="fp32")) for r in found if not across(r)]
            turn += [r for r in found if cases.executable(r)]
    own, smaller, wide = turns
    narrow = [r for r in (*own, *smaller) if r.op.dtype != "fp32"]
    wide = [r for r in (*own, *smaller) if r.op.dtype == "fp32"] + wide
    mixed = [r for i in range(0, max(len(narrow), 1), WIDE_TURN) for r in (*narrow[i:i + WIDE_TURN], *wide[i // WIDE_TURN:i // WIDE_TURN + 1])]
    return list({r.op: r for r in (*mixed, *wide)}.values())


def op_samples(plans: list[Plan], device: torch.device, *, points: float, seconds: float, until: float,
               report: Report = lambda _: None) -> Iterator[Sample]:
    """Single ops of the plans' own shapes and around them until the clock says `until`."""
    for request in op_requests(plans, points=points):
        if time.perf_counter() > until:
            return
        yield from attempted(timed_op(request, device, seconds), str(request.op), report)


def timed_op(request: Request, device: torch.device, seconds: float, *, host: bool = True) -> Iterator[Sample]:
    """`host`: whether the host is free, so that its time to launch the op says something."""
    copies = 1 if request.op.bytes(ops.FORWARD) > 6e7 else COPIES
    for phase in KINDS[request.op.kind].phases:
        timing = measure(cases.cases(request, phase, device, copies), device=device, seconds=seconds)
        yield sample(request.op.kind, phase, dict(request.op.features), timing if host else dataclasses.replace(timing, host_seconds=None),
                     variant=request.op.variant, dtype=request.op.dtype, held_out=request.held_out)


def in_turns(wanted: list[Request], rng: np.random.Generator) -> list[Request]:
    """Op kinds take turns, those that depend on most features with more points a turn, each kind's points in random order, large ones likelier first:
    whenever the clock stops, every kind has points from all over its range."""
    queues: dict[tuple[str, str, str], list[Request]] = defaultdict(list)
    for request in wanted:
        queues[request.op.kind, request.op.variant, request.op.dtype].append(request)
    for queue in queues.values():
        keys = rng.exponential(size=len(queue)) / np.sqrt([1.0 + r.op.bytes(ops.FORWARD) for r in queue])
        queue[:] = [queue[i] for i in np.argsort(keys)]
    found: list[Request] = []
    while len(found) < len(wanted):
        for (kind, _, dtype), queue in queues.items():
            count = TURNS.get((kind, dtype), 1)
            found += queue[:count]
            del queue[:count]
    return found


def attempted(samples: Iterator[Sample], what: str, report: Report) -> list[Sample]:
    """The samples up to the first that cannot be taken (too little memory, a kernel that refuses a shape): one failure costs no calibration."""
    found: list[Sample] = []
    try:
        for one in samples:
            found.append(one)
    except Exception as error:
        report(f"{what}: the rest cannot be timed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    return found


def plan_samples(plan: Plan, device: torch.device, rng: np.random.Generator, seconds: float, *, layers_only: bool = False) -> Iterator[Sample]:
    """Blocks, tables, loader and optimizer of one plan, or its layers alone; in fp32, whose steps are long, at the plan's own batch only."""
    source = open_source(plan.model, plan.workload, seed=plan.seed)
    precision = layer_precision(plan)
    for i, batch in enumerate(batches(plan, rng)[:1 if precision == "fp32" else None]):
        yield from block_samples(plan, batch, device, precision=precision, policies=POLICIES if precision == "bf16" else ("none",), seconds=seconds,
                                 layers_only=layers_only or i > 0 or precision in LOW_PRECISIONS)
        if precision == "bf16" and not layers_only:
            yield from sparse_samples(plan, source, batch.samples, device, seconds=seconds)
            yield input_sample(plan, source, batch.samples, seconds=2 * seconds)
    if not layers_only:
        yield optimizer_sample(plan, device, seconds=seconds)


def device_samples(plans: list[Plan], device: torch.device, *, until: float, seconds: float = 0.03,
                   report: Report = lambda _: None) -> Iterator[Sample]:
    """Blocks, tables, loader and optimizer of the plans in order, of the first WHOLE_PLANS whole, until the clock says `until`."""
    begin, rng, count = time.perf_counter(), np.random.default_rng(7), 0
    for number, plan in enumerate(plans):
        if time.perf_counter() > until:
            report(f"out of time for blocks before plan {number + 1}/{len(plans)}")
            break
        found = attempted(plan_samples(plan, device, rng, seconds, layers_only=number >= WHOLE_PLANS), f"plan {number + 1}", report)
        yield from found
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        count += len(found)
        report(f"plan {number + 1}/{len(plans)}: {count} samples, {time.perf_counter() - begin:.1f} s")
