"""Sizing: the answer is that of trying every size, what it cannot meet says by how much, and files say what the screen says."""
from __future__ import annotations

import dataclasses
import json
import re

import pytest

from costmodel.cluster import Cluster, Device, LinkTier
from planner import api
from planner.cli import main
from planner.scenario import load_scenario
from planner.size import Demand, ladder, size, sizes
from tests.planner.test_cli import TINY

FARM = """\
cluster:
  name: farm
  device: {name: made-up, kind: gpu, peak_flops: {fp32: 5 TFLOP/s, bf16: 10 TFLOP/s}, memory: 8 GB, memory_bandwidth: 100 GB/s, num_sms: 10}
  num_hosts: 6
  devices_per_host: 2
  hosts_per_zone: 3
  tiers:
    - {name: link, scope: host, bandwidth: 10 GB/s, latency: 5 us}
    - {name: net, scope: cluster, bandwidth: 2 GB/s, latency: 20 us}
  reliability: {failures_per_device_hour: 1.0e-3, restart: 10 min, source: made up}
  price: {per_device_hour: 2 $/h, source: made up}
model: gem-tiny
workload: {name: w, local_batch: 512, lengths: {history: {kind: fixed, maximum: 32}}, num_steps: 100000}
layout: {reshard_after_forward: true}
batching: jagged
accumulation: 1
precision: {"*": bf16}
checkpoint: {"*": none}
"""


@pytest.fixture(scope="module")
def farm(tmp_path_factory):
    path = tmp_path_factory.mktemp("farm") / "farm.yaml"
    path.write_text(FARM)
    return path


@pytest.fixture(scope="module")
def rates(farm):
    """Examples per second of wall time by size: a demand so high that every legal size is looked at, and none is excluded by its bound."""
    scenario = load_scenario(farm)
    found = {}
    for cluster in sizes(scenario.cluster, 12):
        only = size(dataclasses.replace(scenario, cluster=cluster), Demand(rate=1.0), most=cluster.num_ranks)
        found[cluster.num_ranks] = next(p.net for p in only.points if p.num_devices == cluster.num_ranks)
    return found


def test_legal_sizes():
    device = Device(name="gpu", kind="gpu", peak_flops={"bf16": 1e15}, memory_bytes=141e9, memory_bandwidth=4.8e12)
    tiers = tuple(LinkTier(name=scope, scope=scope, bandwidth=1e9, latency=0.0) for scope in ("host", "zone", "cluster"))
    cluster = Cluster(name="c", device=device, num_hosts=12, devices_per_host=4, hosts_per_zone=3, tiers=tiers, host_memory_bytes=8e9)
    found = sizes(cluster, 48)
    assert [c.num_ranks for c in found] == [1, 2, 4, 8, 12, 24, 36, 48]
    assert [c.hosts_per_zone for c in found] == [None] * 5 + [3] * 3
    assert [c.host_memory_bytes for c in found[:3]] == [2e9, 4e9, 8e9]
    assert [c.num_ranks for c in sizes(cluster, 80)][-2:] == [60, 72]
    uneven = dataclasses.replace(cluster, hosts_per_zone=None, zone_hosts=(2, 4, 6))
    assert [c.num_ranks for c in sizes(uneven, 48)] == [1, 2, 4, 8, 12, 16, 20, 24, 40, 48]
    lonely = dataclasses.replace(cluster, num_hosts=1, hosts_per_zone=None, tiers=tiers[:1])
    assert [c.num_ranks for c in sizes(lonely, 48)] == [1, 2, 4]  # nothing joins two hosts
    assert ladder([1, 2, 4, 8, 12, 24, 36, 48]) == [1, 2, 4, 8, 24, 48]
    assert ladder([1, 2, 4, 8, 12]) == [1, 2, 4, 8, 12]


@pytest.mark.parametrize("share", [0.2, 0.45, 0.6, 0.9, 1.0])
def test_the_fewest_devices_are_those_of_trying_every_size(farm, rates, share):
    asked = share * max(rates.values()) * 0.999
    expected = min(n for n, rate in rates.items() if rate >= asked)
    found = size(farm, Demand(rate=asked))
    assert found.best is not None and found.best.num_devices == expected
    assert found.plan is not None and found.plan.layout.world_size == expected
    assert all(p.net < asked for p in found.points if p.num_devices < expected and p.step_time_s)


def test_figures_agree_with_each_other(farm):
    found = size(farm, Demand(budget=1e9, examples=1e9))
    for p in found.points:
        assert p.job is not None and p.hours is not None and p.examples_per_second is not None
        assert p.hours * 3600 == pytest.approx(1e9 / p.net) and p.dollars == pytest.approx(2 * p.hours * p.num_devices)
        assert p.dollars == pytest.approx(p.dollars_per_billion_examples)
        assert p.job.wall_seconds == pytest.approx(p.job.training / p.effective) and 0 < p.effective < 1
    assert found.best is not None and found.best.num_devices == 1
    larger = [p.effective for p in found.points]
    assert larger == sorted(larger, reverse=True)  # more devices fail more often, and start-up weighs more


def test_a_demand_that_nothing_meets_says_by_how_much_and_what_would_help(farm, capsys):
    best = size(farm, Demand(rate=1.0)).points[-1]
    assert main(["size", str(farm), "--qps", str(1.5 * best.net), "--time-limit", "2"]) == 4
    error = capsys.readouterr().err
    missed = re.search(r"12 x made-up, misses the rate by ([\d.]+)%", error)
    assert missed and 49.9 <= float(missed[1]) <= 60.0, error  # 50.0 by the best plan, a little more by one found in the time given
    assert "each planned again" in error and "24 x made-up, more than the cluster describes" in error and "meets the demand" in error


def test_files_and_json(farm, tmp_path, capsys):
    import pandas as pd

    assert main(["size", str(farm), "--qps", "1", "--deadline", "10000 h", "--json", "--quiet", "-o", str(tmp_path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"]["num_devices"] == 1 and answer["demand"]["examples"] == 100000 * 512 * 12
    frame = pd.read_csv(tmp_path / "size.csv")
    assert list(frame["num_devices"]) == [p["num_devices"] for p in answer["points"]]
    assert list(pd.read_parquet(tmp_path / "size.parquet")["hours"]) == list(frame["hours"])
    picture = (tmp_path / "size.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<circle") == len(answer["points"]) + 1
    assert api.is_plan(tmp_path) and main(["estimate", str(tmp_path), "--quiet"]) == 0


def test_without_a_price_there_are_no_dollars(farm, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "s.yaml"
    path.write_text(TINY)
    assert main(["size", str(path), "--qps", "1", "--quiet"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:2] == ["1", "made-up"] and row.count("-") >= 2 and "$" not in " ".join(row)
    assert main(["size", str(path), "--budget", "1M", "--quiet"]) == 2
    assert "a budget needs a price; cluster.price" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    (["--qps", "fast"], "'fast': a number"), (["--qps", "0"], "rate: a number > 0"), (["--deadline", "3"], "has no unit"),
    (["--budget", "-1"], "budget: a number > 0"), (["--qps", "1", "--device", "H20"], "no device named 'H20'"),
    (["--qps", "nan"], "a number"), (["--deadline", "1e400 h"], "too large"), (["--qps", "1", "--max-gpus", "0"], "--max-gpus"),
])
def test_what_makes_no_sense_is_exit_2(farm, arguments, words, capsys):
    assert main(["size", str(farm), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_no_size_with_a_plan_is_exit_3(farm, tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text(FARM + "memory_budget: 1 GB\n")
    assert main(["size", str(path), "--qps", "1"]) == 3
    error = capsys.readouterr().err
    assert "no size has a plan" in error and "too little memory" in error


def test_a_deadline_needs_examples(farm, tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text(FARM.replace(", num_steps: 100000", ""))
    assert main(["size", str(path), "--deadline", "1 h"]) == 2
    assert "--examples N, or workload.num_steps" in capsys.readouterr().err
