import dataclasses
from pathlib import Path

import pytest

from costmodel.model import Model
from planner import catalogue
from planner.files import check, load
from planner.scenario import load_scenario
from planner.search import Search
from planner.spec import ClusterFile, DeviceFile, ModelFile, WorkloadFile


@pytest.mark.parametrize("name", catalogue.names("devices"))
def test_devices_are_datasheet_facts_with_their_address(name):
    device = check(DeviceFile, load(catalogue.folder("devices") / f"{name}.yaml")).build()
    assert device.name == name
    assert device.sources and all(s.startswith("https://") for s in device.sources)
    assert device.memory_bandwidth > 1e12 and device.num_sms > 100
    assert device.peak_flops["bf16"] > device.peak_flops["fp32"]


def test_the_four_devices():
    assert set(catalogue.names("devices")) >= {"A100-SXM-80GB", "B200", "H100-SXM", "H200-SXM"}


def test_models_carry_the_name_of_their_file():
    for name in catalogue.names("models"):
        assert check(ModelFile, load(catalogue.folder("models") / f"{name}.yaml")).build().name == name


def test_workloads_carry_the_name_of_their_file():
    for name in catalogue.names("workloads"):
        document = load(catalogue.folder("workloads") / f"{name}.yaml")
        for spec in document.data["lengths"].values():
            if "file" in spec:  # read where a scenario is resolved
                assert (catalogue.folder("workloads") / spec.pop("file")).is_file()
                spec.update(kind="fixed", maximum=1)
        assert check(WorkloadFile, document).build().name == name


def test_clusters_carry_the_name_of_their_file():
    for name in catalogue.names("clusters"):
        document = load(catalogue.folder("clusters") / f"{name}.yaml")
        assert document.data["name"] == name
        document.data["device"] = load(catalogue.folder("devices") / "H200-SXM.yaml").data
        assert check(ClusterFile, document).build().name == name


def test_a_users_own_file_goes_before_the_bundled_one(tmp_path: Path):
    (tmp_path / "models").mkdir()
    own = tmp_path / "models" / "gem-small.yaml"
    own.write_text("name: gem-small\n")
    assert catalogue.find("models", "gem-small", tmp_path / "s.yaml") == own
    assert catalogue.find("models", "gem-tiny", tmp_path / "s.yaml") == catalogue.folder("models") / "gem-tiny.yaml"


def test_a_scenario_is_found_by_path_or_name(tmp_path: Path):
    assert catalogue.scenario_path("quickstart") == catalogue.folder("scenarios") / "quickstart.yaml"
    own = tmp_path / "quickstart.yaml"
    own.write_text("a: 1")
    assert catalogue.scenario_path(str(own)) == own
    with pytest.raises(ValueError, match="no such scenario file"):
        catalogue.scenario_path(str(tmp_path / "gone.yaml"))


def _kinds(model: Model) -> set[str]:
    """Kinds of layers, those inside pyramids' levels too."""
    layers = [g for s in model.sequences for g in s.layers] + [*model.interaction_layers, *model.expert_layers]
    return {g.kind for layer in layers for g in (layer, *layer.branches)}


def test_the_bundled_gem_models_have_what_they_are_made_for():
    files = [catalogue.folder("models") / f"{name}.yaml" for name in ("gem-full", "gem-wide", "gem-trillion")]
    full, wide, trillion = (check(ModelFile, load(file)).build() for file in files)
    assert _kinds(full) == {"self_attention", "gdpa", "hstu", "block_attention", "wukong", "interformer", "moe"}
    assert (full.dim, wide.dim) == (1024, 2048) and _kinds(wide) == _kinds(full)
    assert _kinds(trillion) >= _kinds(full) | {"pyramid"}
    assert sum(t.count for t in trillion.tables) == 1536 and trillion.num_sparse_parameters == pytest.approx(2.6e12, rel=0.02)


@pytest.mark.slow
def test_the_largest_one_is_planned_on_4096_devices():
    scenario = load_scenario("gem-trillion-4096xb200", with_variants=False)
    scenario = dataclasses.replace(scenario, search=dataclasses.replace(scenario.search, time_limit=20.0))
    state = Search(scenario, None, time_limit=20.0, gap=0.02)
    state.run()
    plan = state.incumbent.plan
    assert plan.layout.world_size == 4096 and state.incumbent.memory.fits and not plan.predict_only
    assert sum(len(t.names) for t in plan.model.tables) == len(plan.tables) == 1536
