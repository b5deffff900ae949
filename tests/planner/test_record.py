"""Recording: exact lengths whatever the chunks, merging, files that scenarios read, and wrong input."""
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import ks_2samp

from costmodel.sparse import expected_unique
from planner import record
from planner.cli import main
from planner.errors import UsageError
from planner.scenario import load_scenario


def events(count=5000, users=40, seed=0, distinct_times=False):
    rng = np.random.default_rng(seed)
    times = np.arange(count) if distinct_times else np.sort(rng.integers(0, count // 3, count))
    return pd.DataFrame({"user_id": rng.zipf(1.5, count) % users, "item_id": rng.integers(0, 500, count), "timestamp": times})


def true_lengths(frame, cap=None):
    """Strictly earlier events of the same user, and the event itself, counted one by one."""
    found = []
    seen: dict[int, list[float]] = {}
    for user, time in zip(frame["user_id"], frame["timestamp"]):
        before = sum(t < time for t in seen.setdefault(user, []))
        seen[user].append(time)
        found.append((before if cap is None else min(before, cap)) + 1)
    return np.array(found)


def counts(lengths):
    values, weights = np.unique(lengths, return_counts=True)
    return {str(v): w for v, w in zip(values.tolist(), weights.tolist())}


@pytest.mark.parametrize("chunk", [1 << 20, 7, 1])
def test_lengths_are_exact_over_chunks_and_ties(tmp_path, monkeypatch, chunk):
    frame = events(600)
    frame.to_parquet(tmp_path / "e.parquet")
    monkeypatch.setattr(record, "CHUNK", chunk)
    assert record.record([tmp_path / "e.parquet"]).lengths["history"] == counts(true_lengths(frame))


@pytest.mark.parametrize("suffix", ["csv", "inter", "parquet"])
def test_events_in_any_order_and_form(tmp_path, suffix):
    frame = events(800)
    shuffled = frame.sample(frac=1.0, random_state=1)
    path = tmp_path / f"e.{suffix}"
    if suffix == "parquet":
        shuffled.to_parquet(path)
    else:
        named = shuffled.rename(columns={c: f"{c}:token" for c in shuffled}) if suffix == "inter" else shuffled
        named.to_csv(path, index=False, sep="," if suffix == "csv" else "\t")
    made = record.record([path], max_history=20)
    assert made.lengths["history"] == counts(true_lengths(frame, cap=20)) and made.events == 800


def test_the_file_is_a_workload_and_drawn_lengths_match(tmp_path):
    frame = events(6_000, users=300)
    frame.to_parquet(tmp_path / "e.parquet")
    made = record.record([tmp_path / "e.parquet"])
    record.save(made, tmp_path / "recorded.yaml", global_batch=64)
    (tmp_path / "s.yaml").write_text("cluster: local\nmodel: gem-tiny\nworkload: ./recorded.yaml\n")
    workload = load_scenario(tmp_path / "s.yaml").workload
    assert workload.global_batch == 64 and workload.source.kind == "parquet"
    drawn = workload.lengths["history"].sample(np.random.default_rng(0), 200_000)
    assert ks_2samp(drawn, true_lengths(frame)).statistic < 0.01


def test_many_values_are_reduced_without_moving_the_distribution():
    lengths = np.random.default_rng(0).lognormal(7, 1.5, 200_000).astype(np.int64) + 1
    made = record.Recording(lengths={})
    made.add_lengths("history", lengths)
    rows = np.array([[float(v) for v in line.split(",")] for line in record._csv(made.lengths["history"]).splitlines()[1:]])
    assert len(rows) <= 1024
    drawn = np.random.default_rng(1).choice(rows[:, 0], 200_000, p=rows[:, 1] / rows[:, 1].sum())
    assert ks_2samp(drawn, lengths).statistic < 0.01


def test_halves_merge_to_the_whole(tmp_path):
    parts = [events(4000, seed=s) for s in (1, 2)]
    for i, part in enumerate(parts):
        part.to_parquet(tmp_path / f"{i}.parquet")
        record.save(record.record([tmp_path / f"{i}.parquet"]), tmp_path / f"{i}.yaml")
    merged = record.record([tmp_path / "0.yaml", tmp_path / "1.yaml"])
    both = record.record([tmp_path / "0.parquet", tmp_path / "1.parquet"])
    assert merged.lengths == both.lengths and merged.ids["item"].hashes == both.ids["item"].hashes and merged.samples == 8000
    assert merged.ids["item"].distinct == both.ids["item"].distinct


def test_id_skew_and_distinct_ids_are_found_again(tmp_path):
    rng = np.random.default_rng(0)
    rows, exponent = 20_000, 0.9
    p = np.arange(1, rows + 1) ** -exponent
    ids = rng.choice(rows, 400_000, p=p / p.sum())
    statistics = record.IdStatistics()
    for part in np.array_split(ids, 4):
        statistics.add(part)
    assert statistics.rows == pytest.approx(len(np.unique(ids)), rel=0.05)
    assert statistics.zipf() == pytest.approx(exponent, abs=0.05)
    assert statistics.unique_ratio()["4096"] == pytest.approx(expected_unique(rows, exponent, 4096) / 4096, rel=0.05)


def test_samples_with_list_columns(tmp_path):
    table = pa.table({"clicks": [[1, 2, 3], [], None, [4] * 9], "views": [[1], [2, 2], [], [5] * 100]})
    pq.write_table(table, tmp_path / "samples.parquet")
    made = record.record([tmp_path / "samples.parquet"])
    assert made.samples == 4 and made.lengths["clicks"] == {"0": 2, "3": 1, "9": 1}
    assert sum(made.shapes["clicks x views"].values()) == 4 and made.shapes["clicks x views"]["4,7"] == 1
    assert record.summary(made)["pooling"]["clicks"] == 3.0


@pytest.mark.parametrize(("name", "content", "words"), [
    ("e.csv", "user_id,item_id\n1,2\n", "column timestamp is missing"), ("e.csv", "", "not a readable table"),
    ("e.csv", "user_id,item_id,timestamp\n", "no history"), ("e.csv", "user_id,item_id,timestamp\n1,,3\n", "must not be empty"),
    ("e.csv", "user_id,item_id,timestamp\n1,2,3\n1,2,zz\n", "e.csv:3: timestamp 'zz' is not a number"),
    ("e.csv", "user_id,item_id,timestamp\n1,2,soon\n", "e.csv:2: timestamp 'soon' is not a number"), ("e.parquet", "hello", "not a readable Parquet"),
    ("e.txt", "x", "unknown kind"), ("w.yaml", "name: w\n", "only a workload that `planner record` wrote"),
])
def test_wrong_input_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=words):
        record.record([tmp_path / name])


def test_the_verb_writes_skew_for_a_models_tables(tmp_path, capsys):
    events(70_000, users=5000, distinct_times=True).to_parquet(tmp_path / "e.parquet")
    out = tmp_path / "w.yaml"
    assert main(["record", str(tmp_path / "e.parquet"), "-o", str(out), "--model", "gem-tiny", "--json", "--quiet"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["events"] == 70_000 and body["ids"]["item"]["zipf"] < 0.2
    assert "history_item" in out.read_text()
    (tmp_path / "s.yaml").write_text("cluster: local\nmodel: gem-tiny\nworkload: ./w.yaml\n")
    assert set(load_scenario(tmp_path / "s.yaml").workload.zipf) >= {"item", "history_item"}


def test_a_run_gives_its_lengths_and_what_its_traces_saw(tmp_path, capsys):
    from tests.planner.made_traces import cpu_rank, write
    from tests.planner.test_cli import TINY

    (tmp_path / "tiny.yaml").write_text(TINY)
    assert main(["estimate", str(tmp_path / "tiny.yaml"), "--quiet", "-o", str(tmp_path / "out")]) == 0
    write(tmp_path / "out", cpu_rank(0, events=100), cpu_rank(1, events=300))
    found = record.summary(record.record([tmp_path / "out"]))
    assert found["rank_load"]["events"] == 1.5 and found["activation_outliers"] == {"history.0": 9.0}
    assert found["lengths"]["history"]["max"] == 8 and "synthetic" in found["notes"][0]
