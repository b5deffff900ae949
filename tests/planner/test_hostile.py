"""Files as a hostile or unlucky user writes them: one message with its place, exit 2, never a traceback, never minutes of work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from planner.cli import main

SCENARIO = """\
cluster:
  name: pair
  device: {name: made-up, kind: cpu, peak_flops: {fp32: 50 GFLOP/s}, memory: 4 GB, memory_bandwidth: 10 GB/s, native_formats: [fp32]}
  num_hosts: 1
  devices_per_host: 2
  tiers: [{name: loop, scope: host, bandwidth: 1 GB/s, latency: 50 us}]
model: gem-tiny
workload: {name: w, global_batch: 64, lengths: {history: {kind: fixed, maximum: 8}}, num_steps: 4}
"""
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n" for before, name in zip("abcdef", "bcdefg")
)


def _refused(path: Path, text: str, verb: str, capsys) -> str:
    path.write_text(text, encoding="utf-8")
    assert main([verb, str(path)]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and "should not happen" not in captured.err
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "1:1: the file is empty"),
        ("# nothing\n", "1:1: the file is empty"),
        ("- a\n- b\n", "1:1: a scenario is a mapping"),
        ("cluster:\tlocal\n", "1:9: not YAML"),
        (SCENARIO + "model: gem-tiny\n", "9:1: not YAML: found duplicate key"),
        (SCENARIO + "---\nname: x\n", "9:1: not YAML"),
        (SCENARIO + "name: *nowhere\n", "undefined alias"),
        (SCENARIO + "name: !!python/object/apply:os.system ['true']\n", "YAML tags"),
        (SCENARIO + "name: !!binary aGVsbG8=\n", "YAML tags"),
        (SCENARIO + "seed: !!int abc\n", "not YAML: invalid literal"),
        (SCENARIO + "3: x\n", '9:1: 3: a key must be text, not 3; write "3"'),
        (SCENARIO + "null: x\n", "9:1: None: a key must be text, not null"),
        (SCENARIO + "[a, b]: x\n", "9:1"),
        (SCENARIO + f"seed: {'9' * 30}\n", "9:1: seed: a whole number beyond 64 bits"),
        (SCENARIO + f"seed: {'9' * 5000}\n", "not YAML"),
        (SCENARIO + "seed: -1\n", "9:1: seed: input should be greater than or equal to 0"),
        (SCENARIO + "tolerance: .inf\n", "9:1: tolerance: input should be a finite number"),
        (SCENARIO + "tolerance: .nan\n", "9:1: tolerance"),
        (SCENARIO + "memory_budget: 1e400 GB\n", "9:1: memory_budget: '1e400 GB' is too large"),
        (SCENARIO + "memory_budget: ９ GB\n", "9:1: memory_budget: a quantity in bytes"),
        (SCENARIO + "memory_budget: 5 GB\n", "9:1: memory_budget: 5 GB is more than the 4 GB of a made-up"),
        (SCENARIO + "search: {time_limit: 0 s}\n", "9:10: search.time_limit: must be > 0"),
        (SCENARIO + "search: [1]\n", "9:1: search: input should be a valid mapping, not [1]"),
        (SCENARIO + "transport: ncl\n", "'ncl' is none of nccl, ncclx, copy_engine, gloo (did you mean 'nccl'?)"),
        (SCENARIO + "exclude: {execution: [eagr]}\n", "9:23: exclude.execution[0]"),
        (SCENARIO + "local_batch: '32'\n", "9:1: local_batch: input should be a valid integer, not '32'"),
        (SCENARIO + "accumulation: 3\n", "9:1: accumulation"),
        (SCENARIO + "layout: {dp: 8, cp: 8}\n", "9:10: layout.dp: unknown key (did you mean 'ddp'?)"),
        (SCENARIO + "layout: {ddp: 2, fsdp: 2}\n", "= 4, but cluster pair has 2 ranks"),
        (SCENARIO + f"description: [{'x, ' * 500}]\n", "..."),
        (SCENARIO.replace("made-up", "../../elsewhere"), "cluster.device.name: '../../elsewhere': it names files"),
        (SCENARIO.replace("num_hosts: 1", "num_hosts: 2"), "cluster.tiers: the tiers join 2 of the 4 ranks"),
        (SCENARIO.replace("num_hosts: 1", "num_hosts: 1000000000000"), "cluster.num_hosts: 2,000,000,000,000 ranks"),
        (SCENARIO.replace("global_batch: 64", "global_batch: 63"), "workload.global_batch: 63 samples do not divide over 2 ranks; nearest: 62, 64"),
        (SCENARIO.replace("global_batch: 64", f"global_batch: {2**62}"), "workload.global_batch"),
        (SCENARIO.replace("num_steps: 4", "epochs: 0"), "epochs must be >= 1, got 0"),
        (SCENARIO.replace("num_steps: 4", "learning_rate: -1.0"), "learning_rate must be >= 0"),
        (SCENARIO.replace("num_steps: 4", "source: {kind: parquet}"), "workload.source: source: kind parquet needs `path`"),
        (SCENARIO.replace("kind: fixed, maximum: 8", "file: nowhere.csv"), "workload.lengths.history.file"),
        (SCENARIO.replace("tiers: [", "tiers: [{name: loop, scope: host, bandwidth: 1 GB/s, latency: 1 us}, "), "tier names must be unique"),
        (SCENARIO.replace("num_hosts: 1", "num_hosts: 1\n  reliability: {slow_node_probability: 3.0}"), "slow_node_probability"),
        (SCENARIO.replace("num_hosts: 1", "num_hosts: 1\n  price: {per_device_hour: 2 $/h}"), "cluster.price.source: missing"),
    ],
)
def test_a_file_like_this_is_exit_2(text, words, tmp_path, capsys):
    assert words in _refused(tmp_path / "s.yaml", text, "estimate", capsys)


def test_aliases_of_aliases_end_soon(tmp_path, capsys):
    begin = time.process_time()
    assert "values, aliases counted where they are used" in _refused(tmp_path / "s.yaml", BOMB, "estimate", capsys)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("name", ["Übung-模型 🚀", "a b", "../../x", "a.b/c"])
def test_odd_names_are_names(name, tmp_path, capsys):
    (tmp_path / "s.yaml").write_text(SCENARIO + f"name: '{name}'\n", encoding="utf-8")
    assert main(["estimate", str(tmp_path / "s.yaml"), "--quiet", "-o", str(tmp_path / "out")]) == 0
    assert main(["estimate", str(tmp_path / "out"), "--quiet"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["plan.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("variants: [{name: x, set: {memory_budget: 1 GB}}, {name: x, set: {memory_budget: 2 GB}}]", "two variants are named 'x'"),
        ("variants: [{name: x, set: {name: y}}]", "a variant cannot set name"),
        ("variants: [{name: x, set: {model.dmi: 3}}]", "model.dmi: unknown key (did you mean 'dim'?)"),
        ("variants: [{name: x, set: {memory_budget: 1}}]", "1 has no unit"),
        ("variants: [{name: x, set: {cluster.tiers.rdma.bandwidth: 1 GB/s}}]", "no item 'rdma' in cluster.tiers"),
        ("vary: {accumulation: []}", "vary.accumulation: at least 1 value is needed"),
        (f"vary: {{seed: {list(range(40))}, workload.num_steps: {list(range(1, 41))}}}", "1,600 variants; at most 1000"),
    ],
)
def test_variants_that_make_no_sense(changes, words, tmp_path, capsys):
    assert words in _refused(tmp_path / "s.yaml", SCENARIO + changes + "\n", "whatif", capsys)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("{kind: self_atention, heads: 2, head_dim: 32}", "unknown layer kind 'self_atention' (did you mean 'self_attention'?)"),
        ("{kind: self_attention, heads: 2}", "head_dim must be given"),
        ("{kind: self_attention, heads: 2, head_dim: 32, count: 1000000}", "blocks; at most 10,000"),
    ],
)
def test_layers_that_make_no_sense(model, words, tmp_path, capsys):
    described = (
        "model: {name: m, dim: 64, tables: [{name: t, rows: 100, dim: 64, pooling: sequence, sequence: history}], "
        f"sequences: [{{name: history, layers: [{model}]}}], interaction_hidden: [64], heads: [{{name: like, hidden: [32]}}]}}"
    )
    err = _refused(tmp_path / "s.yaml", SCENARIO.replace("model: gem-tiny", described), "estimate", capsys)
    assert words in err and "s.yaml:7:" in err


def test_what_is_excluded_is_not_estimated(tmp_path, capsys):
    import json

    (tmp_path / "s.yaml").write_text(SCENARIO + "exclude: {checkpoint: {'*': [none]}}\n")
    assert main(["estimate", str(tmp_path / "s.yaml"), "--json", "--quiet"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert {o["checkpoint"] for r in plan["regions"] for o in r["options"]} == {"selective"}
    (tmp_path / "s.yaml").write_text(SCENARIO + "precision: {'*': fp32}\nexclude: {precision: {'*': [fp32]}}\n")
    assert main(["estimate", str(tmp_path / "s.yaml")]) == 2
    assert "pinned and excluded at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate", ""], "an argument is empty"),
        (["run", ""], "an argument is empty"),
        (["estimate", "a" * 5000], "too long"),
        (["estimate", "{folder}/notes.txt"], "a scenario is a mapping"),
        (["run", "{folder}"], "no such file; `planner search SCENARIO -o"),
        (["run", "{folder}/notes.txt"], "notes.txt:1:1: not JSON"),
        (["search", "quickstart", "-o", "{folder}/notes.txt"], "notes.txt is no folder"),
        (["search", "quickstart", "-o", "{folder}/notes.txt/deeper"], "notes.txt is no folder"),
        (["search", "quickstart", "-o", "/proc/nowhere"], "/proc"),
        (["search", "quickstart", "--time-limit", "nan"], "--time-limit"),
        (["estimate", "quickstart", "--calibration", "{folder}"], "calibration"),
        (["estimate", "quickstart", "--calibration", "{folder}/nowhere.json"], "no such file"),
        (["ledger", "--ledger", "{folder}"], "the ledger cannot be opened"),
        (["ledger", "--ledger", "{folder}/notes.txt"], "not a usable ledger"),
        (["ledger", "--export", "{folder}/rows.txt"], ".csv or .parquet"),
        (["ledger", "--add", "{folder}"], "not the folder of a finished run"),
        (["data", "movielens", "--wheel", "{folder}/notes.txt"], "a wheel (.whl) of recbole is needed"),
        (["calibrate", "gem-1xh200"], "the calibration needs 1 H200-SXM on this host"),
        (["calibrate", "gem-512xh200"], "calibrate on one host of it"),
    ],
)
def test_odd_paths_and_values_are_exit_2_and_nothing_is_written(arguments, words, tmp_path, capsys, monkeypatch):
    from planner import machine

    monkeypatch.setattr(machine, "gpus", lambda: [])
    (tmp_path / "notes.txt").write_text("not a plan, not a ledger, " * 100)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert main([word.replace("{folder}", str(tmp_path)) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_pipe_that_closes_is_no_error(tmp_path):
    import subprocess
    import sys

    (tmp_path / "s.yaml").write_text(SCENARIO)
    command = [sys.executable, "-m", "planner.cli", "estimate", str(tmp_path / "s.yaml"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert "Traceback" not in err and "Exception" not in err
    assert process.returncode == 0, err
