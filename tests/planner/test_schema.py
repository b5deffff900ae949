import json
from pathlib import Path

import jsonschema
import pytest

from planner import catalogue, schema
from planner.files import load

FOLDER = Path(schema.__file__).resolve().parents[1] / "docs" / "schema"
SCHEMAS = schema.schemas()


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_files_are_fresh(name):
    assert (FOLDER / f"{name}.json").read_text() == schema.text(SCHEMAS[name]), "run `python -m planner.schema`"


def test_no_file_is_left_over():
    assert {p.stem for p in FOLDER.glob("*.json")} == set(SCHEMAS)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_they_are_schemas(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize(
    ("kind", "name"), [("scenarios", "scenario"), ("clusters", "cluster"), ("devices", "device"), ("models", "model"), ("workloads", "workload")]
)
def test_bundled_files_are_valid(kind, name):
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    files = catalogue.names(kind)
    assert files
    for file in files:
        assert [e.message for e in validator.iter_errors(load(catalogue.folder(kind) / f"{file}.yaml").data)] == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scenario", {"layot": {}}),
        ("scenario", {"layout": {"fsdp": 0}}),
        ("scenario", {"memory_budget": 80}),
        ("scenario", {"precision": {"*": "bf61"}}),
        ("device", {"memory": 141e9}),
        ("model", {"dim": "wide"}),
        ("workload", {"lengths": {"history": {"kind": "normal", "maximum": 3}}}),
    ],
)
def test_they_refuse_what_the_planner_refuses(name, change):
    folder, file = {"scenario": ("scenarios", "gem-8xh200"), "device": ("devices", "B200"), "model": ("models", "gem-tiny"),
                    "workload": ("workloads", "gem-small")}[name]  # fmt: skip
    good = load(catalogue.folder(folder) / f"{file}.yaml").data
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, **change})


def test_a_plan_and_a_result_are_described(tmp_path):
    from planner.configure import default_plan
    from planner.scenario import load_scenario

    plan, _ = default_plan(load_scenario("quickstart"))
    plan.save(tmp_path / "plan.json")
    body = json.loads((tmp_path / "plan.json").read_text())
    body.pop("content_hash")
    jsonschema.Draft202012Validator(SCHEMAS["plan"]).validate(body)
