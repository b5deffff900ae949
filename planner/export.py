"""A plan in other tools' words: launch scripts, a TorchRec sharding plan, a torchtitan configuration.

    torchrun    launch.sh: this repository's runtime under torchrun, on each host
    slurm       job.sbatch: the same under srun
    torchrec    torchrec_plan.py with torchrec_plan.json: tables, ParameterConstraints and a ShardingPlan that TorchRec loads
    torchtitan  torchtitan.toml: the dense part's parallelism, precision and checkpointing (JobConfig of torchtitan 0.2)

What a target cannot express is listed, in the file's own comments too.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from costmodel import launch
from costmodel.codec import suggest
from costmodel.plan import Plan
from costmodel.regions import regions
from planner.errors import UsageError
from planner.files import write_text

TORCHREC_TESTED, TORCHTITAN_TESTED = "1.8", "0.2.2"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """files: name -> content; not_expressed: what of the plan the target has no words for."""

    target: str
    files: dict[str, str]
    not_expressed: tuple[str, ...]


def export(plan: Plan, target: str, *, plan_file: Path = Path("plan.json")) -> Export:
    """Raises UsageError for an unknown target."""
    if target not in TARGETS:
        raise UsageError(f"--to {target!r} is none of {', '.join(TARGETS)}{suggest(target, TARGETS)}")
    files, missing = TARGETS[target](plan, plan_file)
    return Export(target=target, files=files, not_expressed=tuple(missing))


def save(made: Export, folder: Path) -> list[Path]:
    """Writes the files; scripts become executable."""
    written = []
    for name, content in made.files.items():
        path = folder / name
        write_text(path, content)
        if name.endswith((".sh", ".sbatch")):
            path.chmod(0o755)
        written.append(path)
    return written


def _comment(missing: list[str], what: str) -> str:
    if not missing:
        return f"# Everything of the plan is in {what}.\n"
    return f"# Not expressed in {what}:\n" + "".join(f"#   - {reason}\n" for reason in missing)


# --- this repository's runtime ---

def _variables(plan: Plan) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in launch.environment(plan.cluster).items())


def _refused(plan: Plan) -> list[str]:
    return [f"cannot be executed by this runtime: {reason}" for reason in plan.predict_only]


def _torchrun(plan: Plan, plan_file: Path) -> tuple[dict[str, str], list[str]]:
    missing = _refused(plan)
    cluster = plan.cluster
    arguments = [str(plan_file), "--out", str(plan_file.parent)]
    endpoint = "ENDPOINT" if cluster.num_hosts > 1 else None
    command = shlex.join(launch.torchrun_command("runtime.train", arguments, ranks_per_host=cluster.devices_per_host, num_hosts=cluster.num_hosts,
                                                 rdzv_endpoint=endpoint, python="python"))
    head = f"#!/bin/sh\n# {plan.scenario}: {plan.layout.short}, plan {plan.identity()}.\n{_comment(missing, 'this script')}set -eu\n"
    if endpoint:
        head += f': "${{ENDPOINT:?HOST:PORT of the first host; start this script on each of the {cluster.num_hosts} hosts}}"\n'
        command = command.replace("--rdzv-endpoint ENDPOINT", '--rdzv-endpoint "$ENDPOINT"')
    return {"launch.sh": head + _variables(plan) + f'exec {command} "$@"\n'}, missing


def _slurm(plan: Plan, plan_file: Path) -> tuple[dict[str, str], list[str]]:
    missing = _refused(plan)
    cluster = plan.cluster
    gpu = cluster.device.kind == "gpu"
    lines = [f"#SBATCH --job-name={plan.scenario}", f"#SBATCH --nodes={cluster.num_hosts}", "#SBATCH --ntasks-per-node=1",
             f"#SBATCH --cpus-per-task={cluster.devices_per_host * launch.threads_per_rank(cluster)}", "#SBATCH --exclusive"]
    lines += [f"#SBATCH --gpus-per-node={cluster.devices_per_host}"] if gpu else []
    zone = cluster.hosts_per_zone
    if zone is not None and zone < cluster.num_hosts:
        missing.append(f"zones of {zone} hosts: ask your site for a placement by zone (switches, topology); ranks are numbered host by host")
    first = ["python", "-m", "torch.distributed.run", "--nproc-per-node", str(cluster.devices_per_host), "--nnodes", str(cluster.num_hosts),
             "--rdzv-backend", "c10d"]
    last = ["-m", "runtime.train", str(plan_file), "--out", str(plan_file.parent)]
    meeting = '--rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500"'
    body = "#!/bin/bash\n" + "\n".join(lines) + f"\n# {plan.layout.short}, plan {plan.identity()}.\n" + _comment(missing, "this file") + "set -eu\n"
    body += _variables(plan) + 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexport head\n'
    body += f"srun --kill-on-bad-exit=1 {shlex.join(first)} {meeting} {shlex.join(last)}\n"
    return {"job.sbatch": body}, missing


# --- TorchRec ---

_TORCHREC = '''"""Embedding tables of {scenario} for TorchRec (tried with {version}): collections, constraints and a sharding plan.

{words}
    import torchrec_plan
    pooled, sequence = torchrec_plan.collections("meta")
    constraints = torchrec_plan.constraints()                   # for EmbeddingShardingPlanner(constraints=...)
    plan = torchrec_plan.sharding_plan("cuda")                  # for DistributedModelParallel(plan=...); modules "pooled" and "sequence"

Ranks are places of a sparse group of {group}.
"""
import json
import pathlib

import torch
import torchrec
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

TABLES = json.loads((pathlib.Path(__file__).parent / "torchrec_plan.json").read_text())["tables"]
DTYPES = {{"fp32": torchrec.DataType.FP32, "fp16": torchrec.DataType.FP16, "bf16": torchrec.DataType.BF16}}
LOCAL_SIZE = {local}


def collections(device):
    """(EmbeddingBagCollection or None, EmbeddingCollection or None)."""
    made = []
    for kind, config, collection in (("pooled", torchrec.EmbeddingBagConfig, torchrec.EmbeddingBagCollection),
                                     ("sequence", torchrec.EmbeddingConfig, torchrec.EmbeddingCollection)):
        tables = []
        for t in TABLES:
            if t["kind"] != kind:
                continue
            extra = {{"pooling": torchrec.PoolingType[t["pooling"]]}} if kind == "pooled" else {{}}
            tables.append(config(name=t["name"], num_embeddings=t["rows"], embedding_dim=t["dim"], feature_names=[t["name"]],
                                 data_type=DTYPES[t["dtype"]], **extra))
        made.append(collection(tables=tables, device=torch.device(device)) if tables else None)
    return tuple(made)


def constraints():
    """What TorchRec's own planner may choose: only what the plan chose."""
    return {{t["name"]: ParameterConstraints(sharding_types=[t["sharding"]], compute_kernels=[t["kernel"]], pooling_factors=[t["ids_per_sample"]])
            for t in TABLES}}


def sharding_plan(device="cuda"):
    """The plan itself, every shard where it was placed."""
    modules = {{}}
    for t in TABLES:
        spec = None
        if t["sharding"] != "data_parallel":
            spec = EnumerableShardingSpec([ShardMetadata(
                shard_offsets=[s["row_begin"], s["col_begin"]], shard_sizes=[s["row_end"] - s["row_begin"], s["col_end"] - s["col_begin"]],
                placement=f"rank:{{s['rank']}}/{{device}}" + (f":{{s['rank'] % LOCAL_SIZE}}" if device == "cuda" else "")) for s in t["shards"]])
        modules.setdefault(t["kind"], EmbeddingModuleShardingPlan())[t["name"]] = ParameterSharding(
            sharding_type=t["sharding"], compute_kernel=t["kernel"], ranks=[s["rank"] for s in t["shards"]], sharding_spec=spec)
    return ShardingPlan(plan=modules)
'''


def _torchrec(plan: Plan, _plan_file: Path) -> tuple[dict[str, str], list[str]]:
    layout, missing = plan.layout, []
    tables = {name: table for table in plan.model.tables for name in table.names}
    rows = []
    optimizers = Counter(table.optimizer for table in tables.values())
    for placement in plan.tables:
        table = tables[placement.table]
        sharding = "table_wise" if placement.sharding == "host_cached" else placement.sharding
        kernel = {"host_cached": "fused_uvm_caching", "data_parallel": "dense"}.get(placement.sharding, "fused")
        shards = placement.shards(table.rows, table.dim, layout.sparse_group)
        # a module's name has no dots
        kind = "sequence" if table.pooling == "sequence" else "pooled"
        rows.append({"name": placement.table.replace(".", "_"), "table": placement.table, "kind": kind, "rows": table.rows, "dim": table.dim,
                     "dtype": table.dtype, "pooling": table.pooling.upper(), "ids_per_sample": float(table.ids_per_sample), "sharding": sharding,
                     "kernel": kernel, "shards": [dataclasses.asdict(s) for s in shards]})
    if layout.sparse_replicas > 1:
        how = "fully sharded 2D is not in TorchRec's releases; plain 2D is" if layout.fully_sharded_2d else "use"
        missing.append(f"{layout.sparse_replicas} replicas of the sparse group: {how} DMPCollection(sharding_group_size={layout.sparse_group}, "
                       f"world_size={layout.world_size})")
    missing.append("optimizers: " + ", ".join(f"{n} x {name}" for name, n in optimizers.items()) + "; give them to apply_optimizer_in_backward")
    missing.append(f"the dense part: {layout.ddp} x {layout.fsdp} FSDP, precision and checkpoint policies (see torchtitan), batching {plan.batching}")
    words = "".join(f"Not expressed: {reason}.\n" for reason in missing)
    program = _TORCHREC.format(scenario=plan.scenario, version=TORCHREC_TESTED, words=words, group=layout.sparse_group,
                               local=plan.cluster.devices_per_host)
    body = json.dumps({"plan": plan.identity(), "sparse_group": layout.sparse_group, "sparse_replicas": layout.sparse_replicas, "tables": rows})
    return {"torchrec_plan.py": program, "torchrec_plan.json": body + "\n"}, missing


# --- torchtitan ---

def _torchtitan(plan: Plan, _plan_file: Path) -> tuple[dict[str, str], list[str]]:
    layout, missing = plan.layout, []
    blocks: Counter[tuple[str, str]] = Counter()
    for region in plan.regions:
        for option in region.options:
            blocks[option.precision, option.checkpoint] += option.count
    precision = Counter({p: sum(n for (q, _), n in blocks.items() if q == p) for p, _ in blocks}).most_common(1)[0][0]
    checkpoint = Counter({c: sum(n for (_, d), n in blocks.items() if d == c) for _, c in blocks}).most_common(1)[0][0]
    others = [f"{n} blocks {p} {c}" for (p, c), n in blocks.items() if (p, c) != (precision, checkpoint)]
    if others:
        missing.append(f"options per region: {', '.join(others)}; the file has {precision}, {checkpoint} for all")
    param = {"fp32": "float32"}.get(precision, "bfloat16")
    if precision not in ("fp32", "bf16"):
        missing.append(f"precision {precision}: add torchtitan's quantisation converter for it; matrix products are bf16 in this file")
    mode = checkpoint if checkpoint in ("none", "selective", "full") else "none"
    if mode != checkpoint:
        missing.append(f"checkpoint policy {checkpoint}")
    missing.append(f"the model: register {plan.model.name} in torchtitan under [model] (tables are TorchRec's, see --to torchrec)")
    missing.append(f"jagged histories and the batching policy {plan.batching}: seq_len is only the longest")
    if plan.accumulation > 1:
        missing.append("accumulation: torchtitan derives it from global_batch_size")
    longest = max((spec.maximum for spec in plan.workload.lengths.values()), default=1)
    lines = ["[job]", f'description = "{plan.scenario}: {layout.short}, plan {plan.identity()}"', 'dump_folder = "./outputs"', "", "[model]",
             f'name = "{plan.model.name}"', "", "[optimizer]", 'name = "AdamW"', f"lr = {plan.workload.learning_rate:g}", "", "[training]",
             f"local_batch_size = {plan.local_batch}", f"global_batch_size = {plan.local_batch * plan.accumulation * layout.world_size}",
             f"seq_len = {longest}", f"steps = {plan.workload.num_steps or 10000}", f'mixed_precision_param = "{param}"',
             'mixed_precision_reduce = "float32"', "", "[parallelism]", f"data_parallel_replicate_degree = {layout.ddp}",
             f"data_parallel_shard_degree = {layout.fsdp}", f'fsdp_reshard_after_forward = "{"always" if layout.reshard_after_forward else "never"}"',
             f"expert_parallel_degree = {layout.ep}", "", "[activation_checkpoint]", f'mode = "{mode}"', "", "[compile]",
             f"enable = {str(plan.execution == 'compile').lower()}"]
    if plan.execution == "cuda_graph":
        missing.append("execution cuda_graph")
    if not regions(plan.model):
        missing.append("the model has no dense region")
    head = f"# For torchtitan {TORCHTITAN_TESTED}: --job.config_file torchtitan.toml. From 0.3 on it reads Python configurations instead.\n"
    return {"torchtitan.toml": head + _comment(missing, "torchtitan's configuration") + "\n".join(lines) + "\n"}, missing


TARGETS: dict[str, Callable[[Plan, Path], tuple[dict[str, str], list[str]]]] = {
    "torchrun": _torchrun, "slurm": _slurm, "torchrec": _torchrec, "torchtitan": _torchtitan}
