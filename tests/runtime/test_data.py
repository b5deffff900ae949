"""Event files, histories, sources and the loader."""

import dataclasses
import json
import threading
import zipfile

import numpy as np
import pandas as pd
import pytest

from costmodel.model import Head, LayerGroup, Model, Sequence, TableGroup
from costmodel.workload import EventSource, Lengths, Workload
from runtime import data, histories, prepare
from runtime.data import HistorySource, Loader, SyntheticSource, evaluation_batches, open_source
from runtime.synthetic import SyntheticStream, Zipf, hashed, uniform

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
LAYERS = (LayerGroup(kind="self_attention", heads=1, head_dim=8),)


def _model(**changes) -> Model:
    tables = (
        TableGroup(name="history_item", rows=200, dim=8, pooling="sequence", sequence="history"),
        TableGroup(name="history_action", rows=3, dim=8, pooling="sequence", sequence="history"),
        TableGroup(name="user", rows=64, dim=8),
        TableGroup(name="item", rows=200, dim=8),
        TableGroup(name="liked", rows=200, dim=8, pooling="mean", ids_per_sample=5),
    )
    base = Model(name="m", dim=8, tables=tables, sequences=(Sequence(name="history", layers=LAYERS),), num_dense_features=4, bottom_hidden=(8,),
                 interaction_hidden=(8,))
    return dataclasses.replace(base, **changes)


def _workload(**source) -> Workload:
    lengths = {"history": Lengths(kind="uniform", maximum=9)}
    return Workload(name="w", lengths=lengths, global_batch=12, source=EventSource(**{"kind": "synthetic", "num_events": 240, **source}))


def _events(count: int = 400, seed: int = 0) -> prepare.Events:
    """Random events; about half share their second with another of the same user."""
    rng = np.random.default_rng(seed)
    order = np.sort(rng.integers(0, 1 + count // 2, count)).astype(np.float64)
    return prepare.Events(user=rng.integers(0, 10, count), item=rng.integers(0, 40, count), liked=rng.random(count) < 0.5, timestamp=order,
                          num_users=10, num_items=40, origin="test")


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "events.parquet"
    prepare.write_parquet(_events(), path)
    return path


# --- files ---


def test_inter_file(tmp_path):
    path = tmp_path / "a.inter"
    path.write_text("timestamp:float\tuser_id:token\titem_id:token\trating:float\tnote:token\n20\tu\tx\t4\t-\n10\tv\ty\t3.5\t-\n\n10\tu\tz\t5\t-\n")
    events = prepare.read_inter(path)
    assert events.timestamp.tolist() == [10, 10, 20] and events.num_users == 2 and events.num_items == 3
    assert sorted(zip(events.timestamp.tolist(), events.liked.tolist())) == [(10, False), (10, True), (20, True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (INTER + "u\tx\t4\t1\nu\tx\tgood\t2\n", r"a\.inter:3: rating 'good' is no number"),
        (INTER + "u\tx\t4\tnan\n", r"a\.inter:2: timestamp 'nan' is no number"),
        (INTER + "u\tx\t4\n", r"a\.inter:2: 3 fields, but the header has 4"),
        (INTER + "\tx\t4\t1\n", r"a\.inter:2: user_id is empty"),
        ("user_id:token\titem_id:token\trating:float\n", r"a\.inter:1: column timestamp:float is missing"),
        (INTER, r"a\.inter: no events"),
        ("", r"a\.inter:1: column user_id:token is missing"),
    ],
)
def test_faults_of_an_inter_file_are_located(tmp_path, text, message):
    path = tmp_path / "a.inter"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        prepare.read_inter(path)


def test_parquet_round_trip(tmp_path):
    events, path = _events(), tmp_path / "e.parquet"
    prepare.write_parquet(events, path)
    again = prepare.read_events(path)
    order = np.lexsort((events.item, events.user, events.timestamp))
    for name in ("user", "item", "liked", "timestamp"):
        assert np.array_equal(getattr(events, name)[order], getattr(again, name))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"user_id": [1], "item_id": [2], "rating": [3.0]}, "column timestamp is missing"),
        ({"user_id": [1], "item_id": [2], "timestamp": [3.0]}, "column rating or liked is needed"),
        ({"user_id": ["a", None], "item_id": [2, 3], "timestamp": [3.0, 4.0], "rating": [1.0, 2.0]}, "row 1: user_id is empty"),
        ({"user_id": [1, 2], "item_id": [2, 3], "timestamp": [3.0, 4.0], "rating": ["4", "x"]}, "row 1: rating 'x' is no number"),
    ],
)
def test_faults_of_a_parquet_file_are_located(tmp_path, frame, message):
    path = tmp_path / "b.parquet"
    pd.DataFrame(frame).to_parquet(path)
    with pytest.raises(ValueError, match=rf"b\.parquet.*{message}"):
        prepare.read_parquet(path)


def test_wrong_files_are_refused(tmp_path):
    (tmp_path / "x.whl").write_text("no zip")
    with pytest.raises(ValueError, match="not a wheel"):
        prepare.read_wheel(tmp_path / "x.whl")
    with zipfile.ZipFile(tmp_path / "y.whl", "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(ValueError, match="pip download --no-deps recbole"):
        prepare.read_wheel(tmp_path / "y.whl")
    (tmp_path / "z.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="not a readable Parquet"):
        prepare.read_events(tmp_path / "z.parquet")
    with pytest.raises(ValueError, match="unknown kind of event file"):
        prepare.read_events(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="no such file"):
        prepare.read_events(tmp_path / "none.inter")


def test_command_prepares_a_wheel(tmp_path, capsys):
    lines = "".join(f"{u}\t{i}\t{1 + (u + i) % 5}\t{100 + u * i}\n" for u in range(8) for i in range(20))
    with zipfile.ZipFile(tmp_path / "r.whl", "w") as archive:
        archive.writestr(prepare.MOVIELENS_MEMBER, INTER + lines)
    out = tmp_path / "state" / "events.parquet"
    assert prepare.main(["movielens", "--wheel", str(tmp_path / "r.whl"), "--out", str(out)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["events"] == 160 and summary["users"] == 8 and summary["train"] == 128 and sum(summary["lengths"]["weights"]) == 160
    assert set(summary["baselines"]) == {"item_mean", "item_mean_user_rate"}
    assert len(prepare.read_events(out)) == 160
    assert prepare.main(["events", "--input", str(tmp_path / "missing.inter"), "--out", str(out)]) == 2
    assert "no such file" in capsys.readouterr().err


# --- histories ---


@pytest.mark.parametrize("cap", [None, 3, 1])
def test_histories_hold_the_strict_past_only(cap):
    events = _events()
    found = histories.build(events, max_history=cap)
    items, actions, offsets = found.sequences(np.arange(len(events)))
    for i in range(len(events)):
        past = [j for j in range(len(events)) if events.user[j] == events.user[i] and events.timestamp[j] < events.timestamp[i]]
        past = past if cap is None else past[-cap:]
        own = slice(offsets[i], offsets[i + 1])
        expected = [(events.timestamp[j], events.item[j], 2 if events.liked[j] else 1) for j in past]
        assert items[own][-1] == events.item[i] and actions[own][-1] == histories.UNKNOWN
        assert len(items[own]) == len(past) + 1 == found.lengths[i]
        if cap is None:  # events of one second have no order among themselves
            assert sorted(zip(items[own][:-1], actions[own][:-1])) == sorted((item, action) for _, item, action in expected)


def test_statistics_know_the_strict_past_only():
    events = _events()
    found = histories.build(events, max_history=5)
    rate = events.liked[: found.num_train].mean()
    for i in range(0, len(events), 17):
        for column, key in enumerate((events.user, events.item)):
            past = (key == key[i]) & (events.timestamp < events.timestamp[i])
            share = (events.liked[past].sum() + histories.SMOOTHING * rate) / (past.sum() + histories.SMOOTHING)
            assert found.statistics[i, column] == pytest.approx(np.log(share / (1 - share)) - np.log(rate / (1 - rate)), abs=1e-5)
            assert found.statistics[i, 2 + column] == pytest.approx(np.log1p(past.sum()) - np.log1p(50), abs=1e-5)


def test_split_is_in_time():
    found = histories.build(_events(), max_history=5)
    assert found.num_train == 320 and len(found) == 400


def test_too_few_events_are_refused():
    one = _events(1)
    with pytest.raises(ValueError, match="too few"):
        histories.build(one, max_history=5)
    with pytest.raises(ValueError, match="max_history"):
        histories.build(_events(), max_history=0)


def test_history_batches_feed_tables_by_name(parquet):
    source = HistorySource(_model(), _workload(max_history=4), parquet, origin="test")
    samples = np.array([399, 5, 200])
    batch = source.build(samples)
    found = histories.build(prepare.read_events(parquet), max_history=4)
    items, actions, offsets = found.sequences(samples)
    assert batch.ids["history_item"].tolist() == items.tolist() and batch.ids["history_action"].tolist() == actions.tolist()
    assert batch.ids["user"].tolist() == found.user[samples].tolist() and batch.ids["item"].tolist() == found.item[samples].tolist()
    for b in range(3):
        own, bag = slice(offsets[b], offsets[b + 1]), slice(*batch.offsets["liked"][b : b + 2].tolist())
        assert batch.ids["liked"][bag].tolist() == items[own][actions[own] == histories.LIKE].tolist()
    assert batch.max_lengths["history"] == np.diff(offsets).max() and batch.dense.shape == (3, 4) and batch.labels.shape == (3, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": (*_model().tables, TableGroup(name="itme", rows=9, dim=8))}, r"table itme .*did you mean 'item'"),
        ({"tables": (*_model().tables[:3], TableGroup(name="item", rows=20, dim=8))}, "table item: 20 rows are too few for 40 values of item"),
        ({"tables": (*_model().tables, TableGroup(name="x_item", rows=90, dim=8, count=2))}, "x_item comes in several copies"),
        ({"num_dense_features": 3}, "4 dense features or none, not 3"),
        ({"heads": (Head(name="a"), Head(name="b"))}, "one label"),
    ],
)
def test_models_that_histories_cannot_feed_are_refused(parquet, changes, message):
    with pytest.raises(ValueError, match=message):
        HistorySource(_model(**changes), _workload(), parquet, origin="test")


def test_sources_by_kind(parquet, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANNER_STATE", str(tmp_path / "state"))
    assert "MovieLens-100K is not at" in open_source(_model(), _workload(kind="movielens"), seed=0).origin
    prepare.write_parquet(_events(), tmp_path / "state" / "data" / "movielens-100k.parquet")
    assert open_source(_model(), _workload(kind="movielens"), seed=0).origin.startswith("MovieLens-100K: 400 events")
    assert open_source(_model(), _workload(kind="parquet", path=str(parquet)), seed=0).num_train == 320
    with pytest.raises(ValueError, match="needs `path`"):
        open_source(_model(), _workload(kind="recbole"), seed=0)
    with pytest.raises(ValueError, match="no such file"):
        open_source(_model(), _workload(kind="parquet", path=str(tmp_path / "no.parquet")), seed=0)


def test_a_folder_of_histories_gives_the_batches_of_its_file_and_is_read_as_samples_ask(parquet, tmp_path, capsys):
    assert prepare.main(["histories", "--input", str(parquet), "--out", str(tmp_path / "folder"), "--max-history", "7"]) == 0
    capsys.readouterr()
    spec = _model()
    paths = parquet, tmp_path / "folder"
    built, mapped = (open_source(spec, _workload(kind="parquet", path=str(path), max_history=7), seed=0) for path in paths)
    assert mapped.baselines == built.baselines and len(mapped._histories) == len(built._histories) and mapped.num_train == built.num_train
    for name in ("past_item", "end", "statistics"):
        assert isinstance(getattr(mapped._histories, name).base, np.memmap)
    loaders = (Loader(s, global_batch=8, world_size=2, rank=1, seed=3, start=16, batching="global") for s in (mapped, built))
    for ours, theirs in zip(*loaders, strict=True):
        assert all(a.equal(b) for a, b in zip(ours[0].tensors(), theirs[0].tensors(), strict=True))
    with pytest.raises(ValueError, match=r"prepared with max_history 7, workload .* has 9"):
        open_source(spec, _workload(kind="parquet", path=str(tmp_path / "folder"), max_history=9), seed=0)
    (tmp_path / "folder" / "end.npy").unlink()
    with pytest.raises(ValueError, match=r"not a folder of `python -m runtime\.prepare histories`"):
        open_source(spec, _workload(kind="parquet", path=str(tmp_path / "folder"), max_history=7), seed=0)


# --- the synthetic stream ---


@pytest.mark.parametrize(("rows", "exponent"), [(1, 1.0), (50, 0.0), (1000, 1.05), (300_000, 0.8), (300_000, 1.0)])
def test_zipf_popularity(rows, exponent):
    u = (np.arange(200_000) + 0.5) / 200_000
    popularity = Zipf(rows, exponent).popularity(u)
    weights = np.arange(1, rows + 1, dtype=float) ** -exponent
    cumulative = np.cumsum(weights) / weights.sum()
    assert popularity.min() >= 0 and popularity.max() < rows
    for rank in sorted({0, min(3, rows - 1), rows // 10, rows // 2, rows - 1}):
        assert (popularity <= rank).mean() == pytest.approx(cumulative[rank], abs=2e-4)


def test_scrambled_ids_are_a_permutation():
    zipf = Zipf(1000, 1.0)
    assert len(np.unique(np.arange(1000) * zipf._multiplier % 1000)) == 1000


def test_hashes_are_uniform_and_independent_of_the_batch():
    u = uniform(hashed(3, np.arange(20_000)[:, None], np.arange(3)[None, :]))
    assert np.abs(np.histogram(u, bins=10, range=(0, 1))[0] / u.size - 0.1).max() < 0.01
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.03
    assert uniform(hashed(3, np.array([77]), 1))[0] == u[77, 1]


def test_a_sample_is_the_same_in_any_batch():
    source = SyntheticSource(_model(), _workload(), seed=5)
    whole, one = source.build(np.arange(30)), source.build(np.array([17]))
    a, b = whole.sequence_offsets["history"][17:19].tolist()
    assert whole.ids["history_item"][a:b].tolist() == one.ids["history_item"].tolist()
    a, b = whole.offsets["liked"][17:19].tolist()
    assert whole.ids["liked"][a:b].tolist() == one.ids["liked"].tolist()
    assert whole.labels[17].tolist() == one.labels[0].tolist() and whole.dense[17].tolist() == one.dense[0].tolist()


def test_table_major_ids_of_several_tables():
    tables = (TableGroup(name="bag", rows=100, dim=4, count=3, ids_per_sample=2.5),
              TableGroup(name="event", rows=50, dim=4, count=2, pooling="sequence", sequence="history"))
    batch = SyntheticSource(_model(tables=tables, num_dense_features=0, bottom_hidden=()), _workload(), seed=0).build(np.arange(400))
    sizes = batch.offsets["bag"].diff()
    assert batch.offsets["bag"].shape == (1201,) and batch.ids["bag"].numel() == batch.offsets["bag"][-1]
    assert set(sizes.tolist()) == {2, 3} and sizes.float().mean().item() == pytest.approx(2.5, abs=0.06)
    events = int(batch.sequence_offsets["history"][-1])
    assert batch.ids["event"].shape == (2 * events,) and not (batch.ids["event"][:events] == batch.ids["event"][events:]).all()
    assert batch.dense is None


def test_lengths_follow_the_workload():
    stream = SyntheticStream(_model(), _workload(), seed=0)
    lengths = stream.lengths("history", np.arange(20_000))
    assert np.abs(np.bincount(lengths, minlength=10)[1:] / 20_000 - 1 / 9).max() < 0.01
    with pytest.raises(ValueError, match="lengths of sequence 'history' are missing"):
        SyntheticStream(_model(), dataclasses.replace(_workload(), lengths={}), seed=0)


def test_labels_can_be_learned_from_ids():
    """The latent effects explain the labels: their own logit beats the base rate by far."""
    model = _model(tables=_model().tables[3:4], sequences=(), num_dense_features=0, bottom_hidden=())
    source = SyntheticSource(model, _workload(), seed=0)
    batch = source.build(np.arange(5000))
    effect = source._stream.effects(model.tables[0], batch.ids["item"].numpy(), 0)
    assert np.corrcoef(effect, batch.labels[:, 0].numpy())[0, 1] > 0.5


# --- the loader ---


def _labels(loader: Loader) -> list[list[float]]:
    return [[x for b in step for x in b.ids["item"].tolist()] for step in loader]


@pytest.mark.parametrize("batching", ["jagged", "base_batch_shuffling", "global", "sorted_buckets"])
def test_ranks_share_the_global_batches_of_one_rank(batching):
    source = SyntheticSource(_model(), _workload(), seed=0)
    common = {"global_batch": 12, "seed": 3, "num_steps": 7, "epochs": 2, "batching": batching}
    alone = _labels(Loader(source, **common))
    ranks = [_labels(Loader(source, **common, world_size=3, rank=r, accumulation=2)) for r in range(3)]
    joined = [sorted(x for rank in ranks for x in rank[s]) for s in range(7)]
    assert joined == [sorted(step) for step in alone]
    if batching == "jagged":  # a rank's run of samples, dealt to its two micro-batches in turn
        dealt = [[x for r in range(3) for i in range(2) for x in step[4 * r:4 * r + 4][i::2]] for step in alone]
        assert [[x for rank in ranks for x in rank[s]] for s in range(7)] == dealt


@pytest.mark.parametrize("batching", ["global", "local", "sorted_buckets"])
def test_the_micro_batches_of_a_step_are_alike_where_samples_are_ordered_by_work(batching):
    source = SyntheticSource(_model(), _workload(num_events=4000), seed=0)
    loader = Loader(source, global_batch=128, world_size=2, rank=0, accumulation=2, batching=batching)
    events = np.array([[int(b.sequence_offsets["history"][-1]) for b in loader.build(step)] for step in range(16)])
    assert abs(events[:, 0].sum() / events[:, 1].sum() - 1) < 0.1


def test_resume_at_a_sample():
    source = SyntheticSource(_model(), _workload(), seed=0)
    whole = _labels(Loader(source, global_batch=12, epochs=2))
    first = Loader(source, global_batch=12, epochs=2)
    steps = iter(first)
    head = [next(steps) for _ in range(13)]
    assert first.position == 13 * 12 and len(first) == 27
    rest = _labels(Loader(source, global_batch=12, epochs=2, start=first.position, prefetch=2))
    assert [[x for b in s for x in b.ids["item"].tolist()] for s in head] + rest == whole


def test_an_epoch_sees_every_sample_once_and_the_next_in_another_order():
    source = SyntheticSource(_model(), _workload(), seed=0)
    loader = Loader(source, global_batch=12, epochs=2)
    epochs = [np.concatenate([loader.samples(s).ravel() for s in range(e * 20, e * 20 + 20)]) for e in range(2)]
    assert all(np.array_equal(np.sort(e), np.arange(240)) for e in epochs) and not np.array_equal(*epochs)


def test_prefetch_gives_the_same_batches_and_passes_errors_on():
    source = SyntheticSource(_model(), _workload(), seed=0)
    assert _labels(Loader(source, global_batch=12)) == _labels(Loader(source, global_batch=12, prefetch=3))

    class Broken(SyntheticSource):
        def build(self, samples):
            raise ValueError("no such sample")

    with pytest.raises(ValueError, match="no such sample"):
        next(iter(Loader(Broken(_model(), _workload(), seed=0), global_batch=12, prefetch=1)))


@pytest.mark.parametrize("batching", ["jagged", "sorted_buckets", "base_batch_shuffling"])
def test_several_threads_build_what_one_does(monkeypatch, batching):
    """Also across the border of a window and of an epoch, where two threads want different shuffles; and none is left behind."""
    monkeypatch.setattr(data, "loader_threads", lambda prefetch: 3)
    source = SyntheticSource(_model(), _workload(), seed=0)
    options = {"global_batch": 12, "epochs": 3, "batching": batching}
    assert _labels(Loader(source, **options, prefetch=5)) == _labels(Loader(source, **options))
    some = iter(Loader(source, **options, prefetch=5))
    next(some)
    some.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("loader")]


def test_a_guided_search_finds_what_a_plain_one_does():
    """Uniforms on, just below and just above the cumulative sums, where a cell of the guide is left."""
    for rows, exponent in ((3, 1.0), (200, 0.8), (100_000, 1.05)):
        zipf = Zipf(rows, exponent)
        edges = zipf._cumulative[zipf._cumulative < zipf._head_share]
        u = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 1), [0.0, 1 - 2.0**-53], np.random.default_rng(0).random(10_000)])
        head = u < zipf._head_share
        assert (zipf.popularity(u)[head] == np.searchsorted(zipf._cumulative, u[head], side="right")).all()


def test_ids_are_hashes_of_their_place():
    """What the vectorised pass makes equals the hash of (table, sample, place) one by one; empty bags included."""
    stream, samples = SyntheticStream(_model(), _workload(), seed=5), np.array([7, 3, 11])
    table = dataclasses.replace(_model().tables[4], count=2)
    sizes = np.array([2, 0, 3, 0, 1, 2])
    expected = [stream._zipf["liked"].ids(uniform(np.atleast_1d(hashed(5, stream._feature["liked"], 1, b // 3, int(samples[b % 3]), place))))[0]
                for b, size in enumerate(sizes) for place in range(size)]
    assert stream.ids(table, samples, sizes).tolist() == expected


def test_evaluation_sees_every_later_event_once(parquet):
    source = HistorySource(_model(), _workload(), parquet, origin="test")
    ranks = [[b for of, b in evaluation_batches(source, batch=9, world_size=3, rank=r, prefetch=r) if of == 2] for r in range(3)]
    assert {len(rank) for rank in ranks} == {2}
    assert sum(b.num_samples for rank in ranks for b in rank) == source.num_evaluation == 80
    together = [x for step in zip(*ranks) for b in step for x in b.ids["item"].tolist()]
    assert together == histories.build(prepare.read_events(parquet), max_history=None).item[320:].tolist()


def test_batches_that_cannot_be_dealt_are_refused():
    source = SyntheticSource(_model(), _workload(), seed=0)
    with pytest.raises(ValueError, match="does not divide over 5 ranks"):
        Loader(source, global_batch=12, world_size=5)
    with pytest.raises(ValueError, match="exceeds the 240 training samples"):
        Loader(source, global_batch=500)
    with pytest.raises(ValueError, match="no multiple of the global batch"):
        Loader(source, global_batch=12, start=5)
