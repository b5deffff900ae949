"""Plans in other tools' words. TorchRec and torchtitan themselves are not installed here: what they read is checked for its structure."""
import ast
import dataclasses
import json
import subprocess
import tomllib

import pytest

from costmodel.plan import Plan
from planner.cli import main
from planner.configure import default_plan
from planner.errors import UsageError
from planner.export import TARGETS, export, save
from planner.scenario import load_scenario
from tests.planner.test_cli import TINY


@pytest.fixture(scope="module")
def large() -> Plan:
    return default_plan(load_scenario("gem-8xh200", with_variants=False))[0]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert main(["estimate", str(tmp_path / "tiny.yaml"), "--quiet", "-o", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def test_the_launch_script_starts_the_runtime_with_its_environment(folder, tmp_path):
    plan = Plan.load(folder / "plan.json")
    path, = save(export(plan, "torchrun", plan_file=folder / "plan.json"), tmp_path)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$OMP_NUM_THREADS $@"\n')
    (tmp_path / "python").chmod(0o755)
    shown = subprocess.run(["sh", str(path), "--steps", "3"], capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert shown.stdout.strip() == (f"1 -m torch.distributed.run --nproc-per-node 2 --standalone -m runtime.train {folder}/plan.json "
                                    f"--out {folder} --steps 3")


def test_several_hosts_need_an_endpoint_and_slurm_finds_it(large):
    cluster = dataclasses.replace(large.cluster, num_hosts=2, hosts_per_zone=1)
    plan = dataclasses.replace(large, cluster=cluster)
    script = export(plan, "torchrun").files["launch.sh"]
    assert '--rdzv-endpoint "$ENDPOINT"' in script and "${ENDPOINT:?" in script
    made = export(plan, "slurm")
    body = made.files["job.sbatch"]
    assert "#SBATCH --nodes=2" in body and "#SBATCH --gpus-per-node=8" in body and '"$head:29500"' in body
    assert any("zones" in reason for reason in made.not_expressed) and "zones of 1 hosts" in body
    assert subprocess.run(["bash", "-n"], input=body, text=True, check=False).returncode == 0


def test_torchrec_gets_every_shard_where_it_was_placed(large):
    made = export(large, "torchrec")
    tree = ast.parse(made.files["torchrec_plan.py"])
    assert {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} == {"collections", "constraints", "sharding_plan"}
    tables = {t["name"]: t for t in json.loads(made.files["torchrec_plan.json"])["tables"]}
    assert {t["table"] for t in tables.values()} == {t.table for t in large.tables}
    assert not any("." in name for name in tables)  # torch modules have no dots in their names
    for table in tables.values():
        area = sum((s["row_end"] - s["row_begin"]) * (s["col_end"] - s["col_begin"]) for s in table["shards"])
        assert area == table["rows"] * table["dim"] and table["kernel"] == "fused"
    assert tables["event_0"]["kind"] == "sequence" and tables["feature_0"]["pooling"] == "SUM"
    assert any("dense part" in reason for reason in made.not_expressed)


def test_torchrec_names_what_it_has_no_words_for(large):
    layout = dataclasses.replace(large.layout, sparse_group=4, sparse_replicas=2)
    placed = tuple(dataclasses.replace(t, ranks=(), sharding="row_wise") for t in large.tables)
    missing = export(dataclasses.replace(large, layout=layout, tables=placed), "torchrec").not_expressed
    assert any("DMPCollection(sharding_group_size=4, world_size=8)" in reason for reason in missing)
    cached = dataclasses.replace(large, tables=(dataclasses.replace(large.tables[0], sharding="host_cached", ranks=(0,)), *large.tables[1:]))
    first = json.loads(export(cached, "torchrec").files["torchrec_plan.json"])["tables"][0]
    assert (first["sharding"], first["kernel"]) == ("table_wise", "fused_uvm_caching")


def test_torchtitan_reads_toml(large):
    regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(o, checkpoint="selective" if r.region == "history.0" else "none")
                                                         for o in r.options)) for r in large.regions)
    made = export(dataclasses.replace(large, regions=regions), "torchtitan")
    body = tomllib.loads(made.files["torchtitan.toml"])
    assert body["parallelism"] == {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 8, "fsdp_reshard_after_forward": "always",
                                   "expert_parallel_degree": 1}
    assert body["training"]["local_batch_size"] == 256 and body["training"]["mixed_precision_param"] == "bfloat16"
    assert any("options per region" in reason for reason in made.not_expressed)
    for reason in made.not_expressed:
        assert reason in made.files["torchtitan.toml"]


def test_predict_only_options_are_said_not_dropped(large):
    plan = dataclasses.replace(large, predict_only=("transport ncclx: NCCLX is not part of PyTorch's releases",))
    made = export(plan, "torchrun")
    assert "cannot be executed by this runtime: transport ncclx" in made.not_expressed[0] and made.not_expressed[0] in made.files["launch.sh"]


def test_the_verb(folder, tmp_path, capsys):
    for target in TARGETS:
        assert main(["export", str(folder), "--to", target, "-o", str(tmp_path / target), "--json", "--quiet"]) == 0
        body = json.loads(capsys.readouterr().out)
        assert body["files"] and all((tmp_path / target) in __import__("pathlib").Path(f).parents for f in body["files"])
    assert main(["export", str(folder), "--to", "torchrune"]) == 2
    assert "did you mean 'torchrun'" in capsys.readouterr().err
    with pytest.raises(UsageError):
        export(Plan.load(folder / "plan.json"), "k8s")
