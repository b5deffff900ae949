from pathlib import Path

import pytest

from planner import catalogue
from planner.configure import default_plan
from planner.errors import FileError, UsageError
from planner.scenario import Pins, load_scenario

BASE = "cluster: 8xh200\nmodel: gem-small\nworkload: gem-small\n"


@pytest.fixture
def scenario(tmp_path: Path):
    def make(text, **options):
        path = tmp_path / "s.yaml"
        path.write_text(text)
        return load_scenario(path, **options)

    return make


@pytest.mark.parametrize("name", catalogue.names("scenarios"))
def test_every_bundled_scenario_resolves(name):
    loaded = load_scenario(name)
    assert loaded.cluster.num_ranks >= 1
    plan, _ = default_plan(loaded)
    assert plan.layout.world_size == loaded.cluster.num_ranks
    assert len(plan.tables) == sum(t.count for t in loaded.model.tables)
    assert len({v.name for v in loaded.variants}) == len(loaded.variants)


def test_bundled_models_are_what_their_names_promise():
    """A bundled model never changes its meaning; a new one gets a new name."""
    small, hstu, scale = (load_scenario(n, with_variants=False).model for n in ("gem-8xh200", "hstu-ranking", "gem-512xh200"))
    assert (small.dim, sum(t.count for t in small.tables)) == (1024, 40)
    assert {(t.rows, t.dim, t.dtype) for t in small.tables} == {(1_000_000, 128, "fp32")}
    layer = small.sequences[0].layers[0]
    assert (layer.kind, layer.count, layer.heads, layer.head_dim, layer.mlp_dim) == ("self_attention", 4, 8, 128, 4096)
    layer = hstu.sequences[0].layers[0]
    assert (hstu.dim, layer.kind, layer.count, layer.heads, layer.head_dim) == (1024, "hstu", 8, 4, 256)
    assert sum(t.count for t in scale.tables) >= 1500
    assert scale.num_sparse_parameters >= 1e12
    from costmodel.regions import num_dense_parameters

    assert num_dense_parameters(scale) >= 1e9


def test_bundled_workloads():
    small, hstu = (load_scenario(n, with_variants=False).workload for n in ("gem-1xh200", "hstu-ranking"))
    assert (small.local_batch, small.lengths["history"].median, small.lengths["history"].maximum) == (256, 600, 4096)
    assert (hstu.local_batch, hstu.lengths["history"].kind, hstu.lengths["history"].minimum) == (32, "uniform", 1)


def test_the_quickstart_eats_movielens_on_two_ranks():
    quick = load_scenario("quickstart")
    assert quick.cluster.num_ranks == 2
    assert quick.workload.source.kind == "movielens"
    lengths, probability = quick.workload.lengths["history"].pmf()
    assert (lengths.min(), lengths.max()) == (1, 51)
    assert probability[-1] == pytest.approx(0.595, abs=0.001)


def test_clusters_have_the_topology_they_are_named_after():
    large = load_scenario("gem-512xh200", with_variants=False).cluster
    assert (large.num_ranks, large.scope_size("zone")) == (512, 128)
    assert large.tiers[-1].oversubscription > 1
    assert load_scenario("gem-4096xb200", with_variants=False).cluster.num_ranks == 4096


def test_prices_and_reliability_name_their_source():
    for name in catalogue.names("scenarios"):
        cluster = load_scenario(name, with_variants=False).cluster
        assert cluster.price is None or cluster.price.source.startswith("https://")
        assert cluster.reliability.failures_per_device_hour == 0 or cluster.reliability.source


def test_pins_and_exclusions(scenario):
    text = BASE + (
        "memory_budget: 100 GB\nlayout: {fsdp: 8, reshard_after_forward: false}\nprecision: {'history.*': bf16, '*': fp32}\n"
        "checkpoint: {heads: none}\nsharding: {'feature.*': row_wise}\n"
        "exclude: {checkpoint: {'*': [full]}, batching: [padded], layouts: [{ddp: 2}]}\n"
        "search: {time_limit: 3 s, gap: 0.05, top: 2}\ntolerance: 0.2\nseed: 7\n"
    )
    loaded = scenario(text)
    assert loaded.cluster.usable_memory == 1e11
    assert loaded.pins.layout == {"fsdp": 8, "reshard_after_forward": False}
    assert loaded.pins.option("precision", "history.0") == "bf16"
    assert loaded.pins.option("precision", "heads") == "fp32"
    assert loaded.pins.option("sharding", "feature.3") == "row_wise"
    assert loaded.pins.option("sharding", "event.0") is None
    assert loaded.pins.excluded("checkpoint", "bottom") == {"full"}
    assert loaded.pins.exclude.layouts == ({"ddp": 2},)
    assert (loaded.search.time_limit, loaded.search.gap, loaded.search.top) == (3.0, 0.05, 2)
    assert (loaded.tolerance, loaded.seed) == (0.2, 7)


def test_variants_and_vary(scenario):
    text = BASE + (
        "variants:\n  - {name: wide, set: {cluster.tiers.nvlink.bandwidth: 900 GB/s}}\n"
        "  - {name: small, set: {cluster: 1xh200, cluster.device.memory: 80 GB}}\n"
        "vary: {model.dim: [512, 1024], workload.lengths.history.median: [300.0, 600.0]}\n"
    )
    loaded = scenario(text)
    assert [v.name for v in loaded.variants] == [
        "wide", "small", "dim=512, median=300.0", "dim=512, median=600.0", "dim=1024, median=300.0", "dim=1024, median=600.0",
    ]  # fmt: skip
    wide, small, *grid = loaded.variants
    assert wide.cluster.tiers[0].bandwidth == 9e11
    assert loaded.cluster.tiers[0].bandwidth == 4.5e11
    assert (small.cluster.num_ranks, small.cluster.device.memory_bytes) == (1, 8e10)
    assert {(g.model.dim, g.workload.lengths["history"].median) for g in grid} == {(512, 300), (512, 600), (1024, 300), (1024, 600)}
    assert [(c.key, c.before, c.after) for c in wide.changes] == [("cluster.tiers.nvlink.bandwidth", "450 GB/s", "900 GB/s")]
    assert scenario(text, with_variants=False).variants == ()


def test_own_files_and_inline_content(tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.yaml").write_text("name: mine\ndim: 8\ntables: [{name: t, rows: 10, dim: 4}]\n")
    (tmp_path / "lengths.csv").write_text("length,weight\n1,3\n5,1\n")
    text = (
        "cluster:\n  name: c\n  device: H100-SXM\n  num_hosts: 1\n  devices_per_host: 1\n  tiers: []\n"
        "model: {name: m, dim: 8, tables: [{name: t, rows: 9, dim: 4, pooling: sequence, sequence: s}], sequences: [{name: s, layers: []}]}\n"
        "workload: {name: w, local_batch: 4, lengths: {s: {file: lengths.csv}}}\n"
    )
    (tmp_path / "s.yaml").write_text(text)
    loaded = load_scenario(tmp_path / "s.yaml")
    assert loaded.cluster.device.memory_bytes == 8e10
    assert loaded.workload.lengths["s"].mean() == 2.0
    for reference in ("mine", "models/mine.yaml"):
        (tmp_path / "s.yaml").write_text(f"cluster: 1xh200\nmodel: {reference}\nworkload: {{name: w, local_batch: 1, lengths: {{}}}}\n")
        assert load_scenario(tmp_path / "s.yaml").model.name == "mine"


BAD = [
    ("layot: {fsdp: 4}\n", ["s.yaml:4:1: layot: unknown key (did you mean 'layout'?)"]),
    ("layout: {fsdpp: 4}\n", ["s.yaml:4:10: layout.fsdpp: unknown key (did you mean 'fsdp'?)"]),
    ("layout: {fsdp: 0}\n", ["s.yaml:4:10: layout.fsdp:", "greater than or equal to 1"]),
    ("layout: {fsdp: 3}\n", ["s.yaml:4:10: layout.fsdp: 3 does not divide the 8 ranks", "legal: 1, 2, 4, 8"]),
    ("layout: {fsdp: 4, ddp: 4}\n", ["s.yaml:4:10: layout.fsdp", "ddp 4 x fsdp 4 = 16, but cluster 8xh200 has 8 ranks"]),
    ("memory_budget: 80\n", ["s.yaml:4:1: memory_budget: 80 has no unit", "141 GB"]),
    ("memory_budget: 80 GB/s\n", ["s.yaml:4:1: memory_budget", "is in bytes/s"]),
    ("memory_budget: -1 GB\n", ["memory_budget"]),
    ("precision: {histry.0: bf16}\n", ["s.yaml:4:13: precision.histry.0", "(did you mean 'history.0'?)", "regions: history.input"]),
    ("precision: {history.0: bf61}\n", ["s.yaml:4:13: precision.history.0: 'bf61' is none of", "(did you mean 'bf16'?)"]),
    ("exclude: {sharding: {nope: [row_wise]}}\n", ["s.yaml:4:22: exclude.sharding.nope", "no table of model gem-small matches"]),
    ("variants: [{name: x, set: {cluster.tiers.rdma.bandwidth: 5 GB/s}}]\n", ["s.yaml:4:28", "no item 'rdma' in cluster.tiers; items: nvlink"]),
    ("variants: [{name: x, set: {cluster.tiers.nvlink.bandwith: 5 GB/s}}]\n", ["s.yaml:4:28: cluster.tiers.nvlink.bandwith: unknown key (did"]),
    ("variants: [{name: x, set: {cluster.tiers.nvlink.bandwidth: 5 GB}}]\n", ["s.yaml:4:28: cluster.tiers.nvlink.bandwidth", "is in bytes"]),
    ("variants: [{name: x, set: {model.dim: 0}}]\n", ["s.yaml:2:1: model", "dim", "got (0, ", "(in variant 'x')"]),
    ("variants: [{name: x, set: {model: gem-smal}}]\n", ["s.yaml:4:28: model: no model named 'gem-smal' (did you mean 'gem-small'?)"]),
    ("vary: {model.dim: 512}\n", ["s.yaml:4:8: vary.model.dim"]),
    ("tolerance: 0\n", ["s.yaml:4:1: tolerance", "greater than 0"]),
    ("search: {time_limit: 5}\n", ["s.yaml:4:10: search.time_limit: 5 has no unit"]),
    ("local_batch: yes\n", ["s.yaml:4:1: local_batch", "integer"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD, ids=[text.strip()[:40] for text, _ in BAD])
def test_what_is_wrong_is_said_with_its_place(scenario, text, words):
    with pytest.raises(FileError) as caught:
        scenario(BASE + text)
    for word in words:
        assert word in str(caught.value)


def test_unknown_names_are_suggested(scenario):
    with pytest.raises(FileError, match=r"s.yaml:1:1: cluster: no cluster named '8xh20' \(did you mean '8xh200'\?\); bundled:"):
        scenario(BASE.replace("8xh200", "8xh20"))
    with pytest.raises(FileError, match="no such file"):
        scenario(BASE.replace("8xh200", "./8xh200.yaml"))
    with pytest.raises(FileError, match=r"quikstart: no such scenario file \(did you mean 'quickstart'\?\)"):
        load_scenario("quikstart")


def test_a_scenario_must_be_a_mapping_with_its_three_parts(scenario):
    with pytest.raises(FileError, match="a scenario is a mapping"):
        scenario("[1, 2]\n")
    with pytest.raises(FileError, match=r"s.yaml:1:1: workload: missing"):
        scenario("cluster: 8xh200\nmodel: gem-small\n")


def test_lengths_must_name_the_models_sequences(scenario):
    text = "cluster: 8xh200\nmodel: gem-small\nworkload: {name: w, local_batch: 2, lengths: {histroy: {kind: fixed, maximum: 4}}}\n"
    with pytest.raises(FileError) as caught:
        scenario(text)
    assert "no sequence 'histroy' (did you mean 'history'?)" in str(caught.value)
    assert "a sequence 'history', but its lengths are not given" in str(caught.value)


def test_a_damaged_histogram_names_file_and_place(scenario, tmp_path: Path):
    text = "cluster: 8xh200\nmodel: gem-small\nworkload: {name: w, local_batch: 2, lengths: {history: {file: l.csv}}}\n"
    with pytest.raises(FileError, match=r"s.yaml:3:57: workload.lengths.history.file: .*l.csv"):
        scenario(text)
    (tmp_path / "l.csv").write_text("length,weight\nfour,1\n")
    with pytest.raises(FileError, match="columns length,weight"):
        scenario(text)


def test_the_first_matching_glob_counts():
    pins = Pins(precision={"history.0": "fp32", "history.*": "bf16"})
    assert (pins.option("precision", "history.0"), pins.option("precision", "history.1")) == ("fp32", "bf16")


def test_a_default_plan_follows_its_pins(scenario):
    pins = "layout: {ddp: 2, sparse_replicas: 2}\nlocal_batch: 128\naccumulation: 2\nsharding: {'event.*': row_wise}\nprecision: {'*': fp8_row}\n"
    plan, notes = default_plan(scenario(BASE + pins))
    assert plan.layout.short == "ddp2 fsdp4 sparse4x2"
    assert (plan.local_batch, plan.accumulation) == (128, 2)
    assert {t.sharding for t in plan.tables if t.table.startswith("event")} == {"row_wise"}
    assert any("precision fp8_row" in reason for reason in plan.predict_only)
    assert any("checkpoint is not pinned" in note for note in notes)


def test_a_default_plan_refuses_pins_that_contradict(scenario):
    with pytest.raises(UsageError, match=r"s\.yaml:4:1: local_batch: 100 samples x 8 ranks x accumulation any cannot make the global batch of 2048"):
        default_plan(scenario(BASE + "local_batch: 100\n"))
