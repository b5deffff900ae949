"""The bundled models of other people's measurements: their published sizes, and training of both at reduced size."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import runtime_models as models
from conftest import ROOT
from ruamel.yaml import YAML

from costmodel.estimate import estimate
from costmodel.model import LayerGroup, Model, Sequence
from costmodel.plan import Layout
from costmodel.regions import num_dense_parameters
from costmodel.runresult import RunResult
from costmodel.workload import EventSource, Lengths, Workload
from planner.spec import ModelFile
from runtime import train


def bundled(name: str) -> Model:
    return ModelFile.model_validate(YAML(typ="safe").load((ROOT / "scenarios" / "models" / f"{name}.yaml").read_text())).build()


def reduced(name: str) -> tuple[Model, Workload]:
    """The bundled model with every width cut down; kinds, tables and their order stay."""
    spec = bundled(name)
    if name == "dlrm-dcnv2":
        tables = tuple(dataclasses.replace(t, rows=min(t.rows, 50), dim=8, ids_per_sample=min(t.ids_per_sample, 3)) for t in spec.tables)
        small = dataclasses.replace(spec, dim=8, tables=tables,
                                    bottom_hidden=(16, 8), feature_dim=8, interaction_hidden=(16, 8),
                                    interaction_layers=(LayerGroup(kind="dcn_cross", options={"layers": 3, "rank": 4}),))
        return small, Workload(name="small", lengths={}, global_batch=16, source=EventSource(num_events=1000), sparse_learning_rate=0.05)
    block = dataclasses.replace(spec.sequences[0].layers[0], count=2, heads=4, head_dim=8, mlp_dim=32, options={"kv_heads": 2})
    small = dataclasses.replace(spec, dim=16, tables=(dataclasses.replace(spec.tables[0], rows=40, dim=16),),
                                sequences=(Sequence(name="text", layers=(block,), next_event="token"),))
    return small, Workload(name="small", lengths={"text": Lengths(kind="fixed", minimum=12, maximum=12)}, global_batch=8, learning_rate=1e-2,
                           source=EventSource(num_events=600))


@pytest.mark.parametrize(("name", "dense", "above"), [("llama3-8b", 8_030_261_248 - 128_256 * 4096, 0.007), ("dlrm-dcnv2", 16_044_545, 0.0)])
def test_published_size(name, dense, above):
    """Llama 3 8B has 8,030,261,248 parameters, its embedding is a table here; the parts that every model has add at most 0.7 %."""
    assert dense <= num_dense_parameters(bundled(name)) <= dense * (1 + above)


def test_dlrm_tables():
    spec = bundled("dlrm-dcnv2")
    assert len(spec.tables) == 26 and sum(t.rows for t in spec.tables) == 204_184_588 and sum(t.ids_per_sample for t in spec.tables) == 214
    assert spec.interaction_width == 27 * 128 and {t.optimizer for t in spec.tables} == {"adagrad"}


@pytest.mark.parametrize("name", ["dlrm-dcnv2", "llama3-8b"])
def test_trains_at_reduced_size(tmp_path, name):
    """A plan for one rank runs; of a language model the loss of the predicted tokens is part of the training loss."""
    spec, load = reduced(name)
    plan = models.plan(Layout(), model_spec=spec, workload_spec=load)
    assert estimate(plan, None).step_time.value > 0
    plan.save(tmp_path / "plan.json")
    assert train.main([str(tmp_path / "plan.json"), "--out", str(tmp_path / "out"), "--steps", "30"]) == 0
    found = RunResult.load(tmp_path / "out" / "result.json")
    assert found.status == "completed" and found.steps == 30
    first, last = np.mean(found.losses[:5]), np.mean(found.losses[-5:])
    assert last < first
    if name == "llama3-8b":
        assert first > 3.0, "the cross entropy over 40 tokens, ln 40 = 3.7, is missing from the loss"
