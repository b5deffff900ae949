"""Faults that people reported of other planners, tried on the command line: each kind refused, named, or planned right (numbers: their projects').

Those of the cost model alone are in tests/costmodel/test_published_faults.py.
"""
from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from costmodel.plan import Plan
from planner.cli import main

FARM = """\
cluster:
  name: farm
  device: {{name: made-up, kind: gpu, peak_flops: {{fp32: 5 TFLOP/s, bf16: 10 TFLOP/s}}, memory: {memory}, memory_bandwidth: 100 GB/s, num_sms: 10,
           host_link_bandwidth: 10 GB/s}}
  num_hosts: {hosts}
  devices_per_host: {per}
  tiers:
    - {{name: link, scope: host, bandwidth: 10 GB/s, latency: 5 us}}
    - {{name: net, scope: cluster, bandwidth: 2 GB/s, latency: 20 us}}
  host_memory: {ram}
  {zones}
model:
  name: m
  dim: 64
  tables: [{tables}]
  interaction_hidden: [64]
  heads: [{{name: like, hidden: [32]}}]
workload: {{name: w, local_batch: 256, lengths: {{}}, num_steps: 100}}
batching: jagged
accumulation: 1
{rest}
"""


@pytest.fixture
def farm(tmp_path, capsys):
    """`farm(tables, ...)` searches a made-up scenario: (exit code, plan or None, stderr)."""

    def run(tables: str, *arguments: str, hosts=1, per=8, memory="80 GB", ram="512 GB", zones="", rest="", verb="search"):
        path, out = tmp_path / "s.yaml", tmp_path / "out"
        path.write_text(FARM.format(tables=tables, hosts=hosts, per=per, memory=memory, ram=ram, zones=zones, rest=rest))
        code = main([verb, str(path), "--quiet", "-o", str(out), "--time-limit", "5", *arguments])
        written = out / "plan.json"
        return code, Plan.load(written) if written.exists() else None, capsys.readouterr().err

    return run


def _table(rows: int, dim: int = 64, count: int = 1, name: str = "t", **more) -> str:
    extra = "".join(f", {key}: {value}" for key, value in more.items())
    return f"{{name: {name}, rows: {rows}, dim: {dim}, count: {count}{extra}}}"


@pytest.mark.parametrize(("optimizer", "code"), [("adam", 3), ("sgd", 0), ("rowwise_adagrad", 0), ("adamax", 2)])
def test_optimizer_state_of_tables_counts(farm, optimizer, code):
    """torchrec #2652: the state of an optimizer under a new name was counted as 0. 4.77 GiB of weights with two states need 14.3 GiB."""
    found, plan, error = farm(_table(10_000_000, 128, optimizer=optimizer), per=1, rest="memory_budget: 12 GB")
    assert found == code and (plan is None) == (code != 0)
    if code == 3:
        assert "table state 9.537 GiB, tables 4.768 GiB" in error and "(memory_budget; the device has 74.51 GiB)" in error
    if plan is not None:
        assert plan.prediction["memory"]["categories"]["table_state"] == (0 if optimizer == "sgd" else 4 * 10_000_000)


@pytest.mark.parametrize(("pins", "code", "words"), [
    ("{sparse_replicas: 2}", 2, "sparse_group 48: does not fill or divide blocks of 32 ranks, the largest that fit zones of 8, 16 hosts); legal:"),
    ("{sparse_replicas: 3}", 0, ""), ("{fsdp: 48}", 2, "fsdp 48: does not divide blocks of 32 ranks"), ("{fsdp: 32}", 0, "")])
def test_unequal_domains(farm, pins, code, words):
    """torchrec #4768: domains of 8 and 16 hosts, a pod of their gcd that does not divide the sharding group."""
    found, plan, error = farm(_table(1000, count=3), hosts=24, per=4, zones="zone_hosts: [8, 16]", rest=f"layout: {pins}")
    assert found == code and words in error
    if plan is not None:
        assert plan.cluster.scope_size("zone") == 32 and plan.cluster.scope_size("zone") % plan.layout.fsdp == 0


def test_the_group_that_holds_the_tables_is_not_the_job(farm):
    """torchrec #3295: 16 ranks hold a copy of the tables, 128 run the job."""
    code, plan, _ = farm(_table(10_000_000, 128), hosts=8, per=16, rest="layout: {sparse_group: 16}\nsharding: {'*': row_wise}")
    assert code == 0 and plan is not None and plan.layout.short.count("sparse16x8") == 1
    categories = plan.prediction["memory"]["categories"]
    share = 16 * (8 if plan.layout.fully_sharded_2d else 1)
    assert categories["tables"] >= 10_000_000 * 512 / share


def test_two_shards_on_a_rank_are_listed_and_paid_twice(farm):
    """torchrec #1388: column shards named ranks twice."""
    code, plan, _ = farm(_table(1_000_000, 512), per=2, rest="sharding: {'*': column_wise}")
    assert code == 0 and plan is not None
    (table,) = plan.tables
    held = Counter(table.ranks)
    assert sum(held.values()) == len(table.ranks) >= 2
    widest = max(held.values()) * 512 // len(table.ranks)
    assert plan.prediction["memory"]["categories"]["tables"] >= 4 * 1_000_000 * widest


@pytest.mark.parametrize(("ram", "code"), [("512 GB", 0), ("350 GB", 3)])
def test_host_memory_is_a_hosts(farm, ram, code):
    """torchrec #1012: every rank kept within its cap, and one host was given all the tables. 8 of 100 GB on 2 hosts are 4 and 4, or do not fit."""
    pins = "sharding: {'*': host_cached}\nlayout: {fsdp: 16, sparse_group: 16, reshard_after_forward: true}\ntransport: nccl\nexecution: eager\n"
    found, plan, error = farm(_table(195_312_500, 128, 8), hosts=2, ram=ram, rest=pins + "search: {predict_only: true}")
    assert found == code
    if plan is not None:
        assert Counter(t.ranks[0] // 8 for t in plan.tables) == {0: 4, 1: 4}
    else:
        assert "of host memory missing: 326 GiB a host" in error and "1. host memory 326 GiB -> 37" in error


def test_defaults_are_said_and_strict_refuses_them(farm, tmp_path, capsys):
    """torchrec #3743: a planner's own pooling factors and memory, unrelated to the run."""
    code, plan, error = farm(_table(1000), "--strict")
    assert code == 2 and plan is None
    assert "model.tables.t.ids_per_sample: left out, taken as 1" in error and "cluster.reliability: left out" in error and "s.yaml:" in error
    assert main(["estimate", str(tmp_path / "s.yaml")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "defaults taken, which --strict refuses:" in said and "ids_per_sample 1" in said
    text = (tmp_path / "s.yaml").read_text().replace("num_sms: 10", "num_sms: 10, l2: 10 MB")
    text = text.replace("latency: 20 us", "latency: 20 us, oversubscription: 2")
    text = text.replace("host_memory:", "reliability: {failures_per_device_hour: 0.0, restart: 1 min, startup: 1 min, checkpoint_bandwidth: 1 GB/s}\n"
                        "  host_memory:").replace("count: 1", "count: 1, ids_per_sample: 2.0, zipf: 1.0, dtype: fp32, optimizer: sgd")
    (tmp_path / "s.yaml").write_text(text)
    assert main(["estimate", str(tmp_path / "s.yaml"), "--strict"]) == 0
    assert "defaults" not in capsys.readouterr().err


def test_every_table_once_whatever_its_name(farm):
    """torchrec #3652: tables left out silently. Names that are equal once cleaned of odd letters, and names like those of tied tables, stay apart."""
    names = ("a.b/c", "a_b_c", "'x#0'")
    tables = ", ".join(_table(1000, name=n) for n in names) + ", " + _table(100, count=2, name="x")
    code, plan, _ = farm(tables, per=2, rest="sharding: {'x.0': row_wise, 'x#0': column_wise}")
    assert code == 0 and plan is not None
    assert Counter(t.table for t in plan.tables) == dict.fromkeys(["a.b/c", "a_b_c", "x#0", "x.0", "x.1"], 1)
    assert {t.table: t.sharding for t in plan.tables}["x#0"] == "column_wise"


@pytest.mark.parametrize("name", ['""', '" "', r'"a\nb"', r'"\e[31mred"'])
def test_names_that_nobody_can_read_are_refused(farm, name):
    code, plan, error = farm(_table(1000, name=name))
    assert code == 2 and plan is None and "a name needs letters, and no control characters" in error and "s.yaml:" in error


def test_a_name_with_the_letters_of_a_glob_can_be_pinned(farm):
    code, plan, _ = farm(_table(1000, name="'a[b]'"), per=2, rest="sharding: {'a[b]': row_wise}\nlayout: {sparse_group: 2}")
    assert code == 0 and plan is not None and [(t.table, t.sharding) for t in plan.tables] == [("a[b]", "row_wise")]


def test_a_table_larger_than_any_placement(farm):
    """torchrec #1192: the message did not say which table, or that the reservation was too large."""
    code, plan, error = farm(_table(390_625_000, 128), rest="sharding: {'*': table_wise}")
    assert code == 3 and plan is None
    assert "table t: 186.3 GiB; its smallest shard is 186.3 GiB under table_wise in groups of up to 8 ranks, a rank has 74.51 GiB" in error
    assert "without the pin sharding: {'*': 'table_wise'}: step" in error
    way_out = next(line for line in error.splitlines() if "1. memory per rank" in line)
    assert way_out.endswith(" us")  # the plan that just fits; replicas of the table would take seconds to average


def test_no_solution_writes_nothing(farm, tmp_path):
    """pulp #157: fractional values of an infeasible program, taken for a plan."""
    code, plan, error = farm(_table(97_656_250, 128, 3), per=2, rest="memory_budget: 60 GB\nsharding: {'*': table_wise}")
    assert code == 3 and plan is None and not (tmp_path / "out").exists()
    assert "tables 93.13 GiB" in error


def test_groups_in_which_a_table_has_no_sharding_are_out(farm):
    code, plan, _ = farm(_table(1000, count=3), hosts=2, per=4, rest="sharding: {'*': column_wise}")
    assert code == 0 and plan is not None and plan.layout.sparse_group > 1 and {t.sharding for t in plan.tables} == {"column_wise"}
    code, _, error = farm(_table(1000), rest="layout: {sparse_group: 1}\nsharding: {'*': column_wise}")
    assert code == 2 and "column_wise is pinned: sharding column_wise: 64 columns cannot be cut" in error


def test_small_budgets_are_printed_in_units_that_show_them(farm):
    code, _, error = farm(_table(1000), per=2, rest="memory_budget: 3 MB")
    assert code == 3 and "fits into 2.861 MiB per rank" in error and "0.00" not in error


@pytest.mark.parametrize(("rest", "code", "words"), [
    ("precision: {'*': bf16}\nexclude: {precision: {'*': [bf16]}}", 2,
     "region interaction has no precision left: precision bf16: pinned and excluded at once"),
    ("sharding: {'*': row_wise}\nexclude: {sharding: {'*': [row_wise]}}", 2, "row_wise is pinned: sharding row_wise: pinned and excluded at once"),
    ("layout: {fsdp: 8}\nexclude: {layouts: [{fsdp: 8}]}", 2, "layout {'fsdp': 8}, exclusions [{'fsdp': 8}]"),
    ("layout: {fsdp: 8, sparse_group: 8}\nsearch: {risk_budget: 0}\nprecision: {'*': bf16}", 3,
     "keeps the search.risk_budget of 0: the formats that are left take at least 2"),
    ("layout: {sync_every: 4, sparse_replicas: 1}", 2, "pins {'sparse_replicas': 1, 'sync_every': 4} on 8 ranks"),
])
def test_contradictions_are_named_together(farm, rest, code, words):
    found, plan, error = farm(_table(1000), rest=rest)
    assert found == code and plan is None and words in error


@pytest.mark.parametrize(("hosts", "per", "zones", "pins", "words"), [
    (4, 3, "", "{fsdp: 4}", "fsdp 4: does not fill or divide hosts of 3); legal: 1 x 12, 3 x 4, 6 x 2, 12 x 1"),
    (4, 3, "", "{sparse_group: 4}", "sparse_group 4: does not fill or divide hosts of 3); legal: 1 x 12"),
    (12, 2, "hosts_per_zone: 5", "{}", "12 hosts do not divide into zones of 5; legal: [1, 2, 3, 4, 6, 12]"),
    (12, 2, "zone_hosts: [4, 4]", "{}", "zones of [4, 4] add up to 8 hosts, not to 12"),
    (12, 2, "zone_hosts: [0, 12]", "{}", "zone_hosts are whole numbers >= 1"),
    (2, 4, "", "{ddp: 8, fsdp: 8}", "ddp 8 x fsdp 8 = 64, but cluster farm has 8 ranks"),
])
def test_what_does_not_divide_is_refused_with_the_legal_values(farm, hosts, per, zones, pins, words):
    """torchtitan #1184 among others."""
    code, plan, error = farm(_table(1000), hosts=hosts, per=per, zones=zones, rest=f"layout: {pins}")
    assert code == 2 and plan is None and words in error


def test_the_bound_of_memory_is_below_a_plan_that_fits(farm):
    """A model without sequences and with tables far above one device: the overhead of the allocator was taken for a constant."""
    code, plan, _ = farm(_table(10_000_000_000, 128), memory="652 GiB")
    assert code == 0 and plan is not None and plan.layout.sparse_group == 8
    assert plan.prediction["memory"]["fits"]


def test_ranks_of_small_hosts(farm, tmp_path):
    """torchrec #3998: plans named devices that hosts of two do not have, and a kept plan answered for another topology."""
    for zones in ("hosts_per_zone: 4", "hosts_per_zone: 2"):
        code, plan, _ = farm(_table(1000, count=5), hosts=8, per=2, zones=zones)
        assert code == 0 and plan is not None and plan.cluster.scope_size("zone") == 2 * int(zones[-1])
        assert plan.cluster.scope_size("zone") % plan.layout.fsdp == 0
        assert all(r < plan.layout.sparse_group for t in plan.tables for r in t.ranks)
    found = json.loads((tmp_path / "out" / "plan.json").read_text())
    found["cluster"]["hosts_per_zone"] = 4
    Path(tmp_path / "out" / "plan.json").write_text(json.dumps(found))
    assert main(["run", str(tmp_path / "out")]) == 2
