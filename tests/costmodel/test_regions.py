import pytest

from costmodel.model import LayerGroup
from costmodel.regions import default_region_plans, match_regions, num_dense_parameters, regions


def test_regions_are_named_in_forward_order(make_model):
    model = make_model()
    assert [(r.name, r.count) for r in regions(model)] == [
        ("history.input", 1), ("history.0", 2), ("history.1", 1), ("history.summary", 1), ("bottom", 1), ("interaction", 1), ("heads", 1)]
    assert num_dense_parameters(model) == sum(r.count * r.block.num_parameters for r in regions(model))
    assert regions(model) is regions(model)


def test_default_plans_cover_every_block(make_model):
    plans = default_region_plans(make_model(), precision="bf16", checkpoint="full")
    assert [p.options[0].count for p in plans] == [1, 2, 1, 1, 1, 1, 1]
    assert {(p.options[0].precision, p.options[0].checkpoint) for p in plans} == {("bf16", "full")}


def test_globs_name_regions_and_unknown_ones_suggest(make_model):
    assert [r.name for r in match_regions(make_model(), "history.[0-9]")] == ["history.0", "history.1"]
    with pytest.raises(ValueError, match="did you mean 'interaction'"):
        match_regions(make_model(), "interactoin")


def test_unknown_kinds_are_refused(make_model):
    with pytest.raises(ValueError, match="unknown layer kind 'rnn'"):
        regions(make_model(layers=(LayerGroup(kind="rnn"),)))
