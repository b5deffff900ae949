"""One function applies a plan to a model, in this order:

    embeddings -> experts -> precision (one rank) -> checkpointing -> compile -> fully_shard (and precision, on more ranks) -> CUDA graphs (one rank)

The FSDP unit is a block: every block of every region is one unit, the root module holds no parameters of its own. With ep > 1 the experts of a block
are a unit of their own, sharded over efsdp = fsdp / ep ranks (`runtime.experts`). Collectives of the
dense part, per micro-batch, units in forward order:

    forward    unit u: all-gather of its parameters (param dtype), then its compute; with `reshard_after_forward` they are freed after it
    backward   unit u, last to first: all-gather again if it was freed; its compute; reduce-scatter of its gradients (reduce_dtype), then with
               ddp > 1 all-reduce of the scattered gradients (same) over the ddp axis. Under accumulation gradients are reduced on the last
               micro-batch only.

On gloo every one of them is issued and waited for by the main thread at that place, so nothing overlaps and the whole wait is
`exposed_communication`. On NCCL all-gathers run on their own stream, one unit ahead in backward, reductions on theirs; the compute stream
waits where FSDP2 needs the result. The part of the wait that the compute stream spends idle is `exposed_communication`: before a unit for
all-gathers. The wait for the last reductions at the end of backward is inside FSDP2 and counts as `backward` on CUDA.

Gradients are averaged over all ranks. The ddp axis is reduced by a hook of ours on FSDP2 over the fsdp axis instead of by its own 2-D mesh: the
mathematics is the same and the wait can be timed.

Precision: `fp32` computes in fp32. `bf16` keeps parameters, gradients' reduction and optimizer in fp32; the block's parameters are cast to
bf16 when gathered, its floating inputs on entry. Below 16 bits linear layers
quantise those copies (`runtime.precision.linear`), the rest is as under bf16. One rank is not wrapped: `runtime.mixed_precision` casts a
block's parameters there.

`batching: padded` computes every history of a micro-batch at the length of the longest (`runtime.model.sequence`); other policies only
choose which rank trains which samples (`runtime.balance`).
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from costmodel.execution import refusal
from costmodel.plan import Plan, RegionOption
from costmodel.precision import LOW_PRECISIONS
from runtime.checkpointing import apply_checkpointing
from runtime.embedding import ShardedEmbeddings
from runtime.experts import spread_experts
from runtime.graphs import capture
from runtime.mesh import Meshes, all_gather_single, reduce_scatter_single, wait
from runtime.mixed_precision import compute_in
from runtime.model import GEM
from runtime.model.experts import ExpertPool
from runtime.phases import PhaseTimer
from runtime.precision.attention import use_fp8_attention
from runtime.precision.gather import ShardFormat
from runtime.precision.linear import use_low_precision
from runtime.precision.saved import QUANTIZED_POLICIES, quantize_saved

PARAM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, **dict.fromkeys(LOW_PRECISIONS, torch.bfloat16)}
COMPILER, MAX_VARIANTS = "inductor", 64
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(slots=True, kw_only=True)
class Parallelized:
    """The dense model, ready to be called, and the sharded tables that feed it."""

    dense: GEM
    embeddings: ShardedEmbeddings
    gathers: tuple[TimedAllGather, ...] = ()

    def set_last_microbatch(self, last: bool) -> None:
        """Whether the next backward reduces gradients."""
        if isinstance(self.dense, FSDPModule):
            self.dense.set_requires_gradient_sync(last)


def parallelize(model: GEM, *, plan: Plan, meshes: Meshes, timer: PhaseTimer) -> Parallelized:
    """Applies `plan` to `model` in place. Raises ValueError for options that are not executable here."""
    embeddings = ShardedEmbeddings(plan.model.tables, plan.tables, meshes, seed=plan.seed, timer=timer,
                                   learning_rate=plan.workload.sparse_learning_rate, sync_every=plan.layout.sync_every,
                                   wire=plan.wire, wire_gradients=plan.wire_gradients, ahead=plan.tables_ahead > 0,
                                   moment_scale=plan.layout.sparse_replicas if plan.moment_scaled else 1)
    if plan.batching == "padded":
        for encoder in model.sequences:
            encoder.pad()
    if plan.layout.ep > 1:
        for pool in expert_pools(model):
            spread_experts(pool, meshes=meshes, timer=timer)
    blocks = block_options(model, plan)
    if (reason := refusal(plan)) is not None:
        raise ValueError(f"execution {plan.execution} is not executable here: {reason}")
    wrapped = needs_fsdp(plan)
    if not wrapped and any(option.precision != "fp32" for _, option in blocks):
        for block, option in blocks:
            if option.precision == "fp32":  # FSDP2 casts the inputs of a unit; what another block left in bf16 must be cast here too
                block.register_forward_pre_hook(_in_fp32)
    for block, option in blocks:
        _transform(block, option, compiled=plan.execution == "compile", cast=not wrapped and option.precision != "fp32")
    gathers = _fully_shard(model, blocks, plan=plan, meshes=meshes, timer=timer) if wrapped else ()
    if plan.execution == "cuda_graph":
        capture(model, plan, meshes.device)
    if embeddings.ahead and plan.layout.fully_sharded_2d:
        _call_in_backward(embeddings.gather_ahead, [block for block, _ in blocks], plan.tables_ahead)
    return Parallelized(dense=model, embeddings=embeddings, gathers=gathers)


def _call_in_backward(call: Callable[[], None], blocks: list[nn.Module], left: int) -> None:
    """`call` is made when backward comes to the block with `left` to go, itself counted (of all of them: to the last one)."""
    def watch(_block: nn.Module, _inputs: tuple, output: object) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _gradient: call())
                return

    blocks[min(left, len(blocks)) - 1].register_forward_hook(watch)


def _in_fp32(_block: nn.Module, inputs: tuple) -> tuple:
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _transform(block: nn.Module, option: RegionOption, *, compiled: bool, cast: bool) -> None:
    """Checkpointing, compilation and, with `cast`, precision of one block. What runs again in backward must find parameters cast as well: eagerly the
    cast is inside the checkpoint; a compiled block keeps what it needs in its graph, and the cast stays outside the compiler."""
    if option.checkpoint in QUANTIZED_POLICIES:
        quantize_saved(block, option.checkpoint, PARAM_DTYPES[option.precision])
    if cast and not compiled:
        compute_in(block, PARAM_DTYPES[option.precision])
    if option.checkpoint not in QUANTIZED_POLICIES:
        apply_checkpointing(block, option.checkpoint, compiled=compiled)
    if compiled:
        compile_block(block)
        if cast:
            compute_in(block, PARAM_DTYPES[option.precision])


def compile_block(block: nn.Module) -> None:
    """In place, for any number of tokens."""
    # one code object serves every kind of block that inherits it, every precision and every width: one entry each
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    block.forward = torch.compile(block.forward, dynamic=True, backend=COMPILER)


def expert_pools(module: nn.Module) -> list[ExpertPool]:
    """Every pool of experts inside `module`."""
    return [m for m in module.modules() if isinstance(m, ExpertPool)]


def needs_fsdp(plan: Plan) -> bool:
    """One rank has nothing to gather or to reduce."""
    return plan.layout.world_size > 1


def block_options(model: GEM, plan: Plan) -> list[tuple[nn.Module, RegionOption]]:
    """Every block in forward order with its option, its linear layers in place for it. Raises ValueError where plan and model do not fit."""
    regions, planned = model.regions(), {r.region: r for r in plan.regions}
    if set(regions) != set(planned) or len(planned) != len(plan.regions):
        raise ValueError(f"regions: the model has {', '.join(regions)}; the plan has {', '.join(r.region for r in plan.regions)}")
    found = []
    for name, blocks in regions.items():
        options = [option for option in planned[name].options for _ in range(option.count)]
        if len(options) != len(blocks):
            raise ValueError(f"region {name}: the plan has options for {len(options)} blocks, the model has {len(blocks)}")
        for (parent, key), option in zip(blocks, options):
            if option.precision not in PARAM_DTYPES:
                raise ValueError(f"region {name}: precision {option.precision!r} is not executable; the runtime has {', '.join(PARAM_DTYPES)}")
            block = parent.get_submodule(key)
            if option.precision in LOW_PRECISIONS:
                device = next(block.parameters()).device
                use_low_precision(block, option.precision, device=device, options=plan.recipe, region=name)
                if "fp8_attention" in plan.recipe:
                    use_fp8_attention(block, device=device, region=name)
            found.append((block, option))
    return found


def _fully_shard(model: GEM, blocks: list[tuple[nn.Module, RegionOption]], *, plan: Plan, meshes: Meshes, timer: PhaseTimer
                 ) -> tuple[TimedAllGather, ...]:
    """Returns every unit's all-gather. Raises ValueError where parameters are to be gathered in 8 bits and no region computes in fewer than 32."""
    if plan.gather_dtype is not None and all(option.precision == "fp32" for _, option in blocks):
        raise ValueError(f"gather_dtype {plan.gather_dtype}: every region computes in fp32, nothing would be gathered in 8 bits; pin precision: bf16")
    formats: dict[nn.Module, ShardFormat] = {}

    def shard(module: nn.Module, over: DeviceMesh, option: RegionOption) -> None:
        own = [p.shape for p in module.parameters() if not isinstance(p, DTensor)]
        if plan.gather_dtype is not None and option.precision != "fp32" and over.size() > 1:
            formats[module] = ShardFormat.of(own, over.size())
        policy = MixedPrecisionPolicy(param_dtype=PARAM_DTYPES[option.precision], reduce_dtype=REDUCE_DTYPES[plan.reduce_dtype])
        fully_shard(module, mesh=over, reshard_after_forward=reshard, mp_policy=policy)

    assert meshes.dense is not None, "fully_shard needs a process group"
    mesh, reshard = meshes.dense["fsdp"], plan.layout.reshard_after_forward
    for block, option in blocks:
        for pool in expert_pools(block) if meshes.experts is not None else ():
            shard(pool, meshes.experts["efsdp"], option)
        shard(block, mesh, option)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    gathers = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            gathers.append(TimedAllGather(timer, formats.get(module)))
            module.set_custom_all_gather(gathers[-1])
            module.set_custom_reduce_scatter(TimedReduceScatter(timer))
            if plan.layout.ddp > 1:
                module.set_all_reduce_hook(ddp_hook(meshes.dense["ddp"].get_group(), timer))
    return tuple(gathers)


def ddp_hook(group: dist.ProcessGroup, timer: PhaseTimer):
    """What averages a unit's reduced gradients over the replicas in `group`."""
    size = group.size()

    def average(gradients: Tensor) -> None:
        if gradients.is_cuda:
            dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=group)
        else:
            wait(dist.all_reduce(gradients, group=group, async_op=True), timer)
            gradients /= size

    return average


class _Allocating:
    def __init__(self, timer: PhaseTimer) -> None:
        self.timer = timer

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TimedAllGather(_Allocating, AllGather):
    """FSDP2's all-gather with its wait timed: at once on the host's backends, where the compute stream waits on CUDA. With a `format` shards are
    packed before they are sent and restored behind the wait. `sent_bytes`: of this rank's shards so far."""

    def __init__(self, timer: PhaseTimer, format: ShardFormat | None = None) -> None:
        super().__init__(timer)
        self.format, self.sent_bytes = format, 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        sent, received = input_tensor, output_tensor
        if self.format is not None:
            sent = self.format.pack(input_tensor)
            received = sent.new_empty(group.size() * sent.numel())
        self.sent_bytes += sent.numel() * sent.element_size()
        work = all_gather_single(received, sent, group=group, async_op=True)
        restore = None if self.format is None else functools.partial(self.format.unpack, received, output_tensor)
        if output_tensor.is_cuda:
            return _TimedWork(work, self.timer, restore)
        wait(work, self.timer)
        if restore is not None:
            restore()
        return None


class TimedReduceScatter(_Allocating, ReduceScatter):
    """FSDP2's reduce-scatter with its wait timed on the host's backends; on CUDA FSDP2's own stream waits."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op, async_op: bool = False) -> dist.Work | None:
        if output_tensor.is_cuda:
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        wait(reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=True), self.timer)
        return None


class _TimedWork(dist.Work):
    """A collective whose `wait` (of the current stream) is timed as exposed communication; `then` runs behind it."""

    def __init__(self, work: dist.Work, timer: PhaseTimer, then: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._work, self._timer, self._then = work, timer, then

    def wait(self, *args) -> bool:
        with self._timer.phase("exposed_communication"):
            self._work.wait(*args)
        if self._then is not None:
            self._then()
        return True
