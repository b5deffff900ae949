"""Device memory of one rank by category and by phase; the peak and the phase that makes it.

Every parameter `(d0, ...)` is sharded on d0 over the fsdp group, padded: ceil(d0 / fsdp) rows on the first rank. With ep > 1 a rank has 1 / ep of the
experts, sharded over fsdp / ep ranks.

    parameters             4 bytes x sharded elements (fp32 masters)
    gradients              the same, from a region's backward to the optimizer (all the time with accumulation)
    optimizer              8 bytes x sharded elements (AdamW: two fp32 moments)
    tables, table_state    the fullest rank's shards; rowwise Adagrad 4 bytes a row, Adam 8 bytes a weight, SGD none; an unknown one is an
                           error. Plain 2D: every replica holds its shard whole. Fully sharded 2D: 1 / replicas of it at rest, and the
                           whole shard of the tables in flight from the gather to the lookup and the update; with `tables_ahead` also while
                           backward has so many blocks to go, weights from the update to the next lookup, and state to the next backward.
                           Host-cached: the rows fetched at once, on the device; the table and its state in host memory
    saved_activations      per region and checkpoint policy (costmodel/blocks/base.py), of one micro-batch, and what the tables keep for
                           backward: their outputs; with an exchange also the unique rows and every id's place among them
    unsharded_parameters   gathered parameters (fsdp > 1) or copies (below fp32) in their compute dtype; two neighbouring blocks when resharded
                           after forward, else, and on one rank, all of them from their forward to their backward; plus the unsharded
                           gradient of one block
    input                  `INPUT_BATCHES` batches in the pipeline: int64 ids and offsets, fp32 dense features and labels; with `input_overlap` one
                           more, its distinct ids and every id's place among them
    buffers                rows and gradients on the wire; on a GPU also the libraries' workspaces, and what communicators take beside the allocator
                           and of CUDA graphs inputs with their gradients; what else a graph needs is its own and only reserved
    overhead               CUDA context and the allocator's slack: from the calibration, else assumed

    forward end = parameters + optimizer + tables + table_state + input + buffers + all saved + unsharded
    backward i  = the same - saved of the blocks behind i + recomputed saved of i + its workspace + gradients so far
    optimizer   = parameters + gradients + optimizer + tables + table_state + input
    sparse      = fully sharded 2D: what rests, the whole shard in flight, and what its lookups leave before it is released, or the gradients
                  that are there at the update
    reserved    = allocated x (1 + allocator slack) + context + communicators + graphs;  a plan fits when reserved <= limit

On a GPU all that depends on a micro-batch is that of the largest one, where the workload says how many steps there are: of the most events that one
is expected to have (`costmodel.imbalance.expected_maximum` over steps, micro-batches and ranks). What backward of a block needs beside what is saved
is the formula times the ratio that the calibration measured (`workspace/<kind>@<dtype>[:<policy>]`). Under a policy that it did not, what runs again
is there whole and the rest is as without the policy: for the bf16 policies that it did, that is 1 % less to 13 % more than they took, where the
formula alone makes 20 to 44 % more [Measured: H200, 2026-12-01]. A head over a vocabulary has
log-probabilities, their gradient and the logits' in fp32 when backward begins; under a system that compiles its loss, logits and their gradient in
the activation dtype.

On a CPU there is no caching allocator and no context: allocated = reserved, tracked tensors only.
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from costmodel.blocks import BatchShape, Block, activation_dtype
from costmodel.blocks.llama import NextEvent
from costmodel.calibration import Calibration
from costmodel.gpu import block_key
from costmodel.imbalance import expected_maximum
from costmodel.model import DTYPE_BYTES
from costmodel.ops import dtype_bytes
from costmodel.plan import Layout, Plan
from costmodel.quantity import Quantity, Source
from costmodel.regions import Region, over_samples, regions
from costmodel.sparse import TableLoads, expected_unique, ids_per_table
from costmodel.workload import Lengths

CATEGORIES = ("parameters", "gradients", "optimizer", "tables", "table_state", "saved_activations", "unsharded_parameters", "input",
              "buffers", "overhead")
# Batches alive at once: the one computed and the one prefetched.
INPUT_BATCHES = 2
# Device memory held by the CUDA context, cuBLAS and Triton modules [Assumed where not measured].
CONTEXT_BYTES = 0.9e9
# Slack of the caching allocator over the peak that tensors need [Assumed where not measured].
ALLOCATOR_OVERHEAD = 0.08
# Buffers of one NCCL communicator, beside the allocator: one more took 0.41 GB [Measured: two H200, NCCL of torch 2.11, 2026-11-30]; dense, sparse
# group and replicas have one each.
COMMUNICATOR_BYTES = 0.41e9
# Workspaces that cuBLAS keeps for the forward and for the backward thread [Assumed where not measured: 32 MiB each on Hopper].
LIBRARY_BYTES = 67e6
# The same of the streams on which CUDA graphs are captured, forward and backward, warm-up and capture: peaks of three models, from 0.5 to 20 GB, all
# rose by 0.13 to 0.14 GB [Measured: H200, 2026-12-01].
GRAPH_LIBRARY_BYTES = 134e6
_INTERVAL: dict[Source, float] = {"measured": 0.03, "interpolated": 0.05, "extrapolated": 0.10, "roofline": 0.10, "assumed": 0.15}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per rank. categories: the most that each category reaches (not all at once); peak: allocated, with its phase; reserved: what the
    device must give, context included; limit: what the rank may use. host: bytes of tables in the memory of the fullest host, which must fit too
    where the cluster states its size."""

    categories: dict[str, float]
    peak: Quantity
    reserved: Quantity
    peak_phase: str
    limit: float
    fits: bool
    host: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """One block under its option: bytes kept until backward, the same with what its backward has again of what was dropped, workspace of its
    backward, unsharded parameters, sharded parameters (fp32 masters)."""

    region: str
    saved: float
    whole: float
    workspace: float
    unsharded: float
    sharded: float


def option_memory(region: Region, batch: BatchShape, *, precision: str, checkpoint: str, fsdp: int, calibration: Calibration | None = None,
                  captured: bool = False) -> BlockMemory:
    """What one block of `region` takes under (precision, checkpoint); `captured`: beside the graph that it is part of."""
    block = region.block
    if captured:
        return BlockMemory(region=region.name, saved=0.0, whole=0.0, workspace=0.0, unsharded=0.0, sharded=4.0 * block.sharded_elements(fsdp))
    low = dtype_bytes(activation_dtype(precision))
    saved = block.saved_bytes(batch, precision, checkpoint)
    restored, workspace = block.restored_bytes(batch, precision, checkpoint), block.workspace_bytes(batch, precision)
    whole = saved + restored
    unsharded = low * block.num_parameters if fsdp > 1 or precision != "fp32" else 0.0
    measured = {} if calibration is None else calibration.constants
    ratio = measured.get(f"workspace/{block_key(block.kind, precision, checkpoint)}")
    if ratio is not None:  # of all that backward has beside what is saved, parameters and their gradients
        workspace = ratio * (restored + workspace) - max(0.0, whole - saved)
    else:  # a policy that was not measured: what runs again is there whole, and its backward works as without the policy
        workspace *= measured.get(f"workspace/{block_key(block.kind, precision, 'none')}", 1.0)
    return BlockMemory(region=region.name, saved=saved, whole=whole, workspace=workspace, unsharded=unsharded,
                       sharded=4.0 * block.sharded_elements(fsdp))


def backward_bytes(block: Block, batch: BatchShape, precision: str, checkpoint: str) -> float:
    """By the formula: bytes of activations that a block's backward has beside those that its forward saved."""
    return block.restored_bytes(batch, precision, checkpoint) + block.workspace_bytes(batch, precision)


@functools.lru_cache(maxsize=4096)
def _largest_factor(lengths: Lengths, samples: int, count: int) -> float:
    values, p = lengths.pmf()
    return expected_maximum(values.astype(float), p, samples, count) / (samples * float(values @ p))


def largest_batch(plan: Plan, batch: BatchShape) -> BatchShape:
    """The micro-batch of the most events in a run of so many steps, of `batch` for one rank; padded batches are all alike."""
    if plan.cluster.device.kind != "gpu" or plan.batching == "padded" or plan.workload.num_steps is None:
        return batch
    count = plan.workload.num_steps * plan.accumulation * plan.layout.world_size
    shapes = {}
    for name, shape in batch.sequences.items():
        factor = max(1.0, _largest_factor(plan.workload.lengths[name], plan.local_batch, count) / shape.token_factor)
        shapes[name] = shape.scaled(factor, factor)
    return dataclasses.replace(batch, sequences=shapes)


def block_memories(plan: Plan, batch: BatchShape, calibration: Calibration | None = None) -> list[BlockMemory]:
    """Every block of the model in forward order under the plan's options. Raises ValueError where options and blocks do not match."""
    options = {r.region: r.options for r in plan.regions}
    known, graphs = regions(plan.model, plan.layout), captured_regions(plan)
    if set(options) != {r.name for r in known}:
        raise ValueError(f"plan regions {sorted(options)} are not the model's {sorted(r.name for r in known)}")
    blocks: list[BlockMemory] = []
    for region in known:
        if sum(o.count for o in options[region.name]) != region.count:
            raise ValueError(f"region {region.name}: options cover {sum(o.count for o in options[region.name])} of {region.count} blocks")
        for option in options[region.name]:
            one = option_memory(region, batch, precision=option.precision, checkpoint=option.checkpoint, fsdp=plan.layout.fsdp,
                                calibration=calibration, captured=region.name in graphs)
            if plan.system is not None and plan.system.loss == "compiled" and isinstance(region.block, NextEvent):
                less, workspace = region.block.compiled_loss_bytes(batch, option.precision)
                kept = less if option.checkpoint == "none" else 0.0
                one = dataclasses.replace(one, saved=one.saved - kept, whole=one.whole - less, workspace=workspace)
            blocks += [one] * option.count
    return blocks


def captured_regions(plan: Plan) -> frozenset[str]:
    """Regions that are part of CUDA graphs."""
    return over_samples(plan.model) if plan.execution == "cuda_graph" and plan.cluster.device.kind == "gpu" else frozenset()


def graph_bytes(plan: Plan, batch: BatchShape, calibration: Calibration | None = None) -> tuple[float, float]:
    """(allocated: inputs of the graphs with their gradients, and libraries' workspaces; what graphs reserve beside: all that is saved, copies of
    parameters, the largest workspace)."""
    names = captured_regions(plan)
    if not names:
        return 0.0, 0.0
    known, options = {r.name: r for r in regions(plan.model, plan.layout)}, {r.region: r.options[0] for r in plan.regions}
    blocks = [option_memory(known[name], batch, precision=options[name].precision, checkpoint=options[name].checkpoint, fsdp=plan.layout.fsdp,
                            calibration=calibration) for name in sorted(names)]
    pool = sum(b.saved + b.unsharded for b in blocks) + max(max(0.0, b.whole - b.saved) + b.workspace + b.unsharded for b in blocks)
    reading = [r for r in known.values() if r.name.startswith("interaction.") and r.name not in names]
    if reading:
        inputs = 2.0 * batch.samples * reading[-1].block.num_outputs * plan.model.feature_dim  # type: ignore[attr-defined]
    else:
        pooled = sum(t.count * t.dim for t in plan.model.tables if t.pooling != "sequence")
        inputs = batch.samples * (4.0 * (pooled + plan.model.num_dense_features) + 2.0 * plan.model.dim * len(plan.model.sequences))
    return 2.0 * inputs + GRAPH_LIBRARY_BYTES, pool


def memory(plan: Plan, batch: BatchShape, loads: TableLoads, calibration: Calibration | None) -> Memory:
    """Memory of the fullest rank; formulas in the module docstring."""
    batch = largest_batch(plan, batch)
    blocks = block_memories(plan, batch, calibration)
    parameters = sum(b.sharded for b in blocks)
    cached = loads.weights if loads.fetched is None else loads.weights + loads.fetched.max(axis=0)
    tables, state = float(cached.max(initial=0.0)), float(loads.state.max(initial=0.0))
    in_flight, early = 0.0, (0.0, 0.0)
    if plan.layout.fully_sharded_2d and plan.layout.sparse_replicas > 1:
        in_flight = tables + state
        early = (state, in_flight) if plan.tables_ahead else early
        tables, state = tables / plan.layout.sparse_replicas, state / plan.layout.sparse_replicas
    inputs = INPUT_BATCHES * input_bytes(plan, batch) + (distributed_bytes(plan, batch) if plan.input_overlap else 0.0)
    gpu = plan.cluster.device.kind == "gpu"
    read, graphs = graph_bytes(plan, batch, calibration)
    buffers = exchange_bytes(plan, loads) + (_library_bytes(calibration) if gpu else 0.0) + read
    resting = parameters + 2 * parameters + tables + state + inputs + buffers
    embeddings = embedding_bytes(plan, batch)
    dense, phase = _dense_peak(blocks, embeddings, plan, early)
    sparse = in_flight + max(parameters, embeddings) if in_flight else parameters
    peaks = {phase: resting + dense, "optimizer": resting + parameters + early[1], "sparse": resting + sparse}
    peak_phase = max(peaks, key=lambda name: peaks[name])
    peak = peaks[peak_phase]
    context, each = reserving(plan, calibration)
    source = _overhead_source(calibration) if gpu else "interpolated"
    width = _INTERVAL[source]
    outside = communicator_bytes(plan) + graphs
    reserved = context + each * peak + outside
    overhead = reserved - peak - outside
    limit, host = plan.cluster.usable_memory, host_bytes(plan, loads)
    categories = {
        "parameters": parameters, "gradients": parameters, "optimizer": 2 * parameters, "tables": tables + in_flight, "table_state": state,
        "saved_activations": sum(b.saved for b in blocks) + embeddings, "unsharded_parameters": _unsharded(blocks, plan), "input": inputs,
        "buffers": buffers + outside, "overhead": overhead,
    }
    return Memory(categories=categories, peak=Quantity.relative(peak, width, width, source), peak_phase=peak_phase, limit=limit,
                  reserved=Quantity.relative(reserved, width, width, source), host=host,
                  fits=reserved <= limit and host <= (plan.cluster.host_memory_bytes or math.inf))


def host_bytes(plan: Plan, loads: TableLoads) -> float:
    """Tables and states in the memory of the fullest host; the ranks of a host are consecutive, and groups smaller than a host are alike."""
    group, each = len(loads.host_weights), plan.cluster.devices_per_host
    if group <= each:
        return float(loads.host_weights.sum()) * max(1, min(each, plan.layout.world_size) // max(group, 1))
    return float(max(loads.host_weights[i:i + each].sum() for i in range(0, group, each)))


def keeps_unsharded(layout: Layout) -> bool:
    """Whether parameters as they are computed with stay from forward to backward: where the layout says so, and on one rank, whose copies autograd
    keeps."""
    return not layout.reshard_after_forward or layout.world_size == 1


def _unsharded(blocks: list[BlockMemory], plan: Plan) -> float:
    """The most unsharded parameters at once, and one block's unsharded gradient."""
    if keeps_unsharded(plan.layout):
        return sum(b.unsharded for b in blocks) + max(b.unsharded for b in blocks)
    pairs = [a.unsharded + b.unsharded for a, b in itertools.pairwise(blocks)]
    return max(pairs, default=blocks[0].unsharded) + max(b.unsharded for b in blocks)


def _dense_peak(blocks: list[BlockMemory], embeddings: float, plan: Plan, early: tuple[float, float] = (0.0, 0.0)) -> tuple[float, str]:
    """(bytes over the resting ones, phase) of the largest moment from the end of forward through backward. early: bytes of whole shards that are
    there in forward, and in backward from `tables_ahead` blocks before its end."""
    keep = keeps_unsharded(plan.layout)
    gradients = sum(b.sharded for b in blocks) if plan.accumulation > 1 else 0.0
    saved, unsharded = sum(b.saved for b in blocks) + embeddings, sum(b.unsharded for b in blocks) if keep else 0.0
    best, phase = saved + unsharded + gradients + early[0], "forward"
    for i in range(len(blocks) - 1, -1, -1):
        block = blocks[i]
        gathered = unsharded if keep else block.unsharded + (blocks[i - 1].unsharded if i else 0.0)
        here = saved + max(0.0, block.whole - block.saved) + block.workspace + gathered + block.unsharded + gradients
        here += early[1] if i < plan.tables_ahead else 0.0
        if here > best:
            best, phase = here, "backward"
        saved -= block.saved
        unsharded -= block.unsharded if keep else 0.0
        gradients += block.sharded if plan.accumulation == 1 else 0.0
    return best, phase


def input_bytes(plan: Plan, batch: BatchShape) -> float:
    """One batch: int64 ids, offsets and times, fp32 dense features and labels."""
    tokens = {name: shape.tokens for name, shape in batch.sequences.items()}
    ids = sum(t.count * ids_per_table(t, batch.samples, tokens) for t in plan.model.tables)
    times = sum(tokens[s.name] for s in plan.model.sequences if s.timed)
    pooled = sum(t.count for t in plan.model.tables if t.sequence is None)
    offsets = batch.samples * (pooled + len(tokens))
    return 8.0 * (ids + times + offsets) + 4.0 * batch.samples * (plan.model.num_dense_features + len(plan.model.heads))


def distributed_bytes(plan: Plan, batch: BatchShape) -> float:
    """The micro-batch whose ids are under way while another one is computed."""
    tokens = {name: shape.tokens for name, shape in batch.sequences.items()}
    ids = [(t, ids_per_table(t, batch.samples, tokens)) for t in plan.model.tables]
    return input_bytes(plan, batch) + 8.0 * sum(t.count * (n + expected_unique(t.rows, t.zipf, n)) for t, n in ids)


def embedding_bytes(plan: Plan, batch: BatchShape) -> float:
    """What the lookups of one micro-batch keep until their backward."""
    tokens = {name: shape.tokens for name, shape in batch.sequences.items()}
    exchanged, total = (plan.layout.sparse_group > 1 and plan.exchange == "rows") or any(p.sharding == "host_cached" for p in plan.tables), 0.0
    for table in plan.model.tables:
        ids = ids_per_table(table, batch.samples, tokens)
        width = table.dim * DTYPE_BYTES[table.dtype]
        outputs = ids if table.sequence is not None else batch.samples
        total += table.count * outputs * width
        if exchanged:
            total += table.count * (8.0 * ids + width * expected_unique(table.rows, table.zipf, ids))
    return total


def exchange_bytes(plan: Plan, loads: TableLoads) -> float:
    """Rows sent and received, and their gradients' twin, of the fullest rank, and data-parallel tables' gradients; nothing is exchanged in a group of
    one."""
    if plan.layout.sparse_group == 1:
        return 0.0
    return 4.0 * float(loads.served.max(initial=0.0)) + 4.0 * float(loads.served.mean()) + 4.0 * loads.replicated


def _library_bytes(calibration: Calibration | None) -> float:
    return calibration.constants.get("library_bytes", LIBRARY_BYTES) if calibration is not None else LIBRARY_BYTES


def communicators(layout: Layout) -> int:
    """Process groups of more than one rank; without expert parallelism the experts use fsdp's."""
    experts = (layout.ep, layout.efsdp) if layout.ep > 1 else ()
    return sum(n > 1 for n in (layout.fsdp, layout.ddp, layout.sparse_group, layout.sparse_replicas, *experts))


def communicator_bytes(plan: Plan) -> float:
    """What a plan's communicators take of the device."""
    return COMMUNICATOR_BYTES * communicators(plan.layout) if plan.cluster.device.kind == "gpu" else 0.0


def reserving(plan: Plan, calibration: Calibration | None) -> tuple[float, float]:
    """(bytes reserved whatever is allocated, bytes reserved per allocated byte): reserved = the first + the second x peak + communicators."""
    if plan.cluster.device.kind != "gpu":
        return 0.0, 1.0
    constants = calibration.constants if calibration is not None else {}
    return constants.get("context_bytes", CONTEXT_BYTES), 1.0 + constants.get("allocator_overhead", ALLOCATOR_OVERHEAD)


def _overhead_source(calibration: Calibration | None) -> Source:
    constants = calibration.constants if calibration is not None else {}
    return "interpolated" if {"context_bytes", "allocator_overhead"} <= set(constants) else "assumed"
