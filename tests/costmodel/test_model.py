import dataclasses

import pytest

from costmodel.model import Head, LayerGroup, Model, Sequence, TableGroup


def test_widths_and_names(make_model):
    model = make_model()
    assert model.pooled_width == 3 * 32 + 32 and model.sequence_width("history") == 64
    assert model.interaction_width == 128 + 64 + 32
    assert model.tables[2].names == ("user.0", "user.1", "user.2") and model.tables[3].names == ("liked",)
    assert model.num_sparse_parameters == 1700 * 48 + 8 * 16 + 3 * 1000 * 32 + 1700 * 32


@pytest.mark.parametrize(("optimizer", "dtype", "weight", "state"), [
    ("rowwise_adagrad", "fp32", 4e5, 4e3), ("adagrad", "fp32", 4e5, 4e5), ("adam", "bf16", 2e5, 8e5), ("sgd", "fp16", 2e5, 0)])
def test_table_bytes(optimizer, dtype, weight, state):
    table = TableGroup(name="t", rows=1000, dim=100, optimizer=optimizer, dtype=dtype)
    assert (table.weight_bytes, table.state_bytes) == (weight, state)


@pytest.mark.parametrize(("build", "message"), [
    (lambda: TableGroup(name="t", rows=0, dim=8), "rows must be >= 1"),
    (lambda: TableGroup(name="t", rows=5, dim=8, pooling="sequence"), "names the sequence"),
    (lambda: TableGroup(name="t", rows=5, dim=8, sequence="s"), "names the sequence"),
    (lambda: TableGroup(name="t", rows=5, dim=8, zipf=-1.0), "zipf >= 0"),
    (lambda: LayerGroup(kind="x", count=0), "count must be >= 1"),
    (lambda: Model(name="m", dim=8, tables=(TableGroup(name="t", rows=5, dim=8), TableGroup(name="t", rows=5, dim=8))), "unique, twice: t"),
    (lambda: Model(name="m", dim=8, tables=(TableGroup(name="t.1", rows=5, dim=8), TableGroup(name="t", rows=5, dim=8, count=2))), "twice: t.1"),
    (lambda: Model(name="m", dim=8, tables=(), sequences=(Sequence(name="s", layers=()),)), "no table feeds it"),
    (lambda: Model(name="m", dim=8, tables=(TableGroup(name="t", rows=5, dim=8, pooling="sequence", sequence="s"),)), "'s' is not defined"),
    (lambda: Model(name="m", dim=8, tables=(), heads=()), "at least one head"),
    (lambda: Model(name="m", dim=8, tables=(), heads=(Head(name="a"), Head(name="a"))), "head names must be unique"),
    (lambda: Model(name="m", dim=8, tables=(), num_dense_features=3), "bottom_hidden"),
])
def test_faults_name_the_part(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_many_tables_are_checked_quickly(make_model):
    model = make_model()
    wide = dataclasses.replace(model, tables=(*model.tables, TableGroup(name="many", rows=10, dim=8, count=5000)))
    assert len(wide.tables[-1].names) == 5000
