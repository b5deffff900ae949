"""JSON Schemas of the files that people and programs write: `python -m planner.schema` renews docs/schema, a test keeps it fresh.

An editor with a YAML language server checks and completes a scenario that begins with
`# yaml-language-server: $schema=../docs/schema/scenario.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pydantic

from costmodel.plan import Plan
from costmodel.runresult import RunResult
from planner.files import write_text
from planner.scenario import ScenarioFile
from planner.spec import ClusterFile, DeviceFile, ModelFile, WorkloadFile

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = {"type": "string", "description": "the name of a bundled file, or a path"}
_HISTOGRAM = {
    "type": "object",
    "properties": {"file": {"type": "string", "description": "a CSV file with the columns length,weight"}},
    "required": ["file"],
    "additionalProperties": False,
}


def schemas() -> dict[str, dict[str, Any]]:
    """File name (without suffix) -> schema."""
    made = {
        "scenario": ScenarioFile.model_json_schema(),
        "cluster": ClusterFile.model_json_schema(),
        "device": DeviceFile.model_json_schema(),
        "model": ModelFile.model_json_schema(),
        "workload": WorkloadFile.model_json_schema(),
        "plan": pydantic.TypeAdapter(Plan).json_schema(),
        "result": pydantic.TypeAdapter(RunResult).json_schema(),
    }
    scenario = made["scenario"]
    for slot in ("cluster", "model", "workload"):
        scenario["properties"][slot] = {"anyOf": [_REFERENCE, scenario["properties"][slot]]}
    for schema in made.values():
        for definition in [schema, *schema.get("$defs", {}).values()]:
            _allow_references(definition)
    return {name: {"$schema": _DIALECT, **_unwrapped(schema)} for name, schema in made.items()}


def _unwrapped(node: Any) -> Any:
    """Descriptions come from docstrings; where a docstring breaks its lines is no part of a schema."""
    if isinstance(node, dict):
        return {
            key: " ".join(value.split()) if key == "description" and isinstance(value, str) else _unwrapped(value) for key, value in node.items()
        }
    return [_unwrapped(item) for item in node] if isinstance(node, list) else node


def _allow_references(definition: dict[str, Any]) -> None:
    """A cluster may name its device, a workload may keep its lengths in a file."""
    properties = definition.get("properties", {})
    if definition.get("title") == "Cluster" and "anyOf" not in properties["device"] and "host_memory" in properties:
        properties["device"] = {"anyOf": [_REFERENCE, properties["device"]]}
    if definition.get("title") == "Workload" and "source" in properties:
        lengths = properties["lengths"]
        if "anyOf" not in lengths["additionalProperties"]:
            lengths["additionalProperties"] = {"anyOf": [lengths["additionalProperties"], _HISTOGRAM]}


def write(folder: Path | str = "docs/schema") -> list[Path]:
    """Writes every schema to `folder`."""
    paths = []
    for name, schema in schemas().items():
        path = Path(folder) / f"{name}.json"
        write_text(path, text(schema))
        paths.append(path)
    return paths


def text(schema: dict[str, Any]) -> str:
    """A schema as it stands in its file."""
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    for written in write(*sys.argv[1:2]):
        print(written)
