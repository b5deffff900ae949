import dataclasses
import json

import pytest

from costmodel.codec import content_hash
from costmodel.plan import Layout, Plan, TablePlacement


def test_saving_is_byte_identical_and_loading_exact(make_plan, tmp_path):
    plan = make_plan()
    for name in ("a", "b"):
        plan.save(tmp_path / f"{name}.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert Plan.load(tmp_path / "a.json") == plan


def test_identity_is_of_what_is_executed(make_plan):
    plan = make_plan()
    assert dataclasses.replace(plan, prediction={"x": 1}, search={"y": 2}).identity() == plan.identity()
    assert dataclasses.replace(plan, local_batch=65).identity() != plan.identity()


@pytest.mark.parametrize(("change", "message"), [
    (lambda b: b.update(local_batch=65), "content_hash .* does not match .*the file was edited"),
    (lambda b: b.update(schema_version=99), "schema_version 99"),
    (lambda b: b["layout"].update(fspd=2), r"layout.fspd: unknown key \(did you mean 'fsdp'\?\)"),
    (lambda b: b["layout"].update(fsdp=4), "layout: dense ddp 1 x fsdp 4"),
    (lambda b: b["model"].pop("dim"), "model.dim: missing"),
    (lambda b: b["regions"][0]["options"][0].update(checkpoint="some"), r"regions\[0\].options\[0\].checkpoint: 'some' is none of"),
    (lambda b: b.pop("schema_version"), "no schema_version"),
])
def test_an_edited_plan_is_refused(make_plan, tmp_path, change, message):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    with pytest.raises(ValueError, match=message) as error:
        Plan.load(path)
    assert str(path) in str(error.value)


def test_a_plan_of_another_version_is_not_called_edited(make_plan, tmp_path):
    """Its hash fits what it holds; a field that it does not know took its default here."""
    path = tmp_path / "plan.json"
    make_plan().save(path)
    body = json.loads(path.read_text())
    del body["content_hash"], body["input_overlap"]
    path.write_text(json.dumps({**body, "content_hash": content_hash(body)}))
    with pytest.raises(ValueError, match="another version wrote it"):
        Plan.load(path)


def test_a_plan_that_is_not_json_names_the_place(tmp_path):
    (tmp_path / "plan.json").write_text('{"a": 1,\n  oops}')
    with pytest.raises(ValueError, match=r"plan.json:2:3: not JSON"):
        Plan.load(tmp_path / "plan.json")


def test_fingerprints_of_another_cluster_are_refused(make_plan, tmp_path):
    """torchrec #3998: a plan for another topology must never be used silently."""
    plan = make_plan()
    other = dataclasses.replace(plan, fingerprints={**plan.expected_fingerprints(), "cluster": "0" * 16})
    other.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="fingerprint of cluster"):
        Plan.load(tmp_path / "plan.json")


def test_shards_cover_a_table_once():
    rows, dim = 1003, 64
    for sharding, ranks in (("table_wise", (2,)), ("row_wise", ()), ("column_wise", (0, 1, 2, 3)), ("table_row_wise", (0, 1))):
        shards = TablePlacement(table="t", sharding=sharding, ranks=ranks).shards(rows, dim, 4)
        cells = sum((s.row_end - s.row_begin) * (s.col_end - s.col_begin) for s in shards)
        assert cells == rows * dim and all(0 <= s.rank < 4 for s in shards)
    assert len(TablePlacement(table="t", sharding="row_wise").shards(3, dim, 8)) == 3
    assert len(TablePlacement(table="t", sharding="data_parallel").shards(rows, dim, 4)) == 4


def test_two_column_shards_on_one_rank_are_two_shards():
    """torchrec #1388: a rank named twice holds, and pays for, two shards."""
    shards = TablePlacement(table="t", sharding="column_wise", ranks=(0, 0, 1, 1)).shards(10, 256, 2)
    assert [s.rank for s in shards] == [0, 0, 1, 1] and [(s.col_begin, s.col_end) for s in shards[:2]] == [(0, 64), (64, 128)]


def test_bad_placements_are_refused():
    with pytest.raises(ValueError, match="rank 9 is outside its sparse group of 4"):
        TablePlacement(table="t", sharding="table_wise", ranks=(9,)).shards(10, 8, 4)
    with pytest.raises(ValueError, match="dim 10 does not divide into 4"):
        TablePlacement(table="t", sharding="column_wise").shards(10, 10, 4)


def test_layout_short_name():
    assert Layout(ddp=2, fsdp=8, sparse_group=16).short == "ddp2 fsdp8 sparse16x1"
    assert Layout(fsdp=4, ep=2, sparse_group=2, sparse_replicas=2, fully_sharded_2d=True, reshard_after_forward=False).short == (
        "ddp1 fsdp4 ep2 sparse2x2 keep fs2d")
