"""Plans embedding tables with TorchRec's own planner, in an environment of its own; `benchmarks.search` starts it.

    python benchmarks/torchrec_peer.py < problem.json > plan.json

The environment: `pip install torch==2.13.0 torchrec==1.8.0`, then `pip uninstall fbgemm_gpu` and `pip install --no-deps fbgemm-gpu-cpu==1.8.0`
(torchrec asks for the CUDA build, which does not load on a machine without CUDA).

problem: {"world_size", "local_world_size", "hbm_bytes", "hbm_bandwidth", "intra_bandwidth", "inter_bandwidth", "batch", "timeout_s",
          "tables": [{"name", "rows", "dim", "ids_per_sample"}]}  with bytes and bytes/s
plan:    {"seconds", "tables": [{"name", "sharding", "shards": [{"rank", "row_begin", "row_end", "col_begin", "col_end"}]}]} or {"seconds", "error"}
"""
from __future__ import annotations

import json
import sys
import time

import torch
import torchrec
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

# TorchRec's Topology counts bandwidths in bytes per millisecond.
_MILLISECOND = 1e-3


def plan(problem: dict) -> dict:
    """Topology, bandwidths, batch and pooling factors are those of the problem; all else are TorchRec's defaults."""
    tables = [torchrec.EmbeddingBagConfig(name=t["name"], num_embeddings=t["rows"], embedding_dim=t["dim"], feature_names=[f"f_{t['name']}"],
                                          pooling=torchrec.PoolingType.SUM) for t in problem["tables"]]
    model = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    topology = Topology(world_size=problem["world_size"], local_world_size=problem["local_world_size"], compute_device="cuda",
                        hbm_cap=int(problem["hbm_bytes"]), hbm_mem_bw=problem["hbm_bandwidth"] * _MILLISECOND,
                        intra_host_bw=problem["intra_bandwidth"] * _MILLISECOND, inter_host_bw=problem["inter_bandwidth"] * _MILLISECOND)
    constraints = {t["name"]: ParameterConstraints(pooling_factors=[float(t["ids_per_sample"])]) for t in problem["tables"]}
    start = time.perf_counter()
    try:
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=problem["batch"], constraints=constraints, debug=False,
                                           timeout_seconds=problem.get("timeout_s"))
        found = planner.plan(model, [torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        return {"seconds": time.perf_counter() - start, "error": str(error)[:2000]}
    seconds = time.perf_counter() - start
    rows = []
    for module in found.plan.values():
        for name, sharding in module.items():
            spec = sharding.sharding_spec
            if spec is None:  # data parallel: whole on every rank
                table = next(t for t in problem["tables"] if t["name"] == name)
                shards = [{"rank": r, "row_begin": 0, "row_end": table["rows"], "col_begin": 0, "col_end": table["dim"]}
                          for r in range(problem["world_size"])]
            else:
                shards = [{"rank": s.placement.rank(), "row_begin": s.shard_offsets[0], "row_end": s.shard_offsets[0] + s.shard_sizes[0],
                           "col_begin": s.shard_offsets[1], "col_end": s.shard_offsets[1] + s.shard_sizes[1]} for s in spec.shards]
            rows.append({"name": name, "sharding": sharding.sharding_type, "shards": shards})
    return {"seconds": seconds, "tables": rows}


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr  # the planner prints its statistics
    answer = plan(json.load(sys.stdin))
    out.write(json.dumps(answer) + "\n")
