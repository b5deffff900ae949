"""Figures of compiled blocks: here without a GPU, where the compiler runs what it is given as it is."""
import dataclasses

import pytest
import torch

from benchmarks import train_speed
from costmodel.hosttime import PASSES
from costmodel.regions import regions
from runtime import parallelize
from runtime.microbench import compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # dynamo's own
CPU = torch.device("cpu")


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setattr(parallelize, "COMPILER", "eager")
    monkeypatch.setattr(compiled, "SECONDS", 0.001)
    made = train_speed.tiny("hstu-ranking")
    cluster = train_speed.plan_of("hstu-ranking").cluster
    made = dataclasses.replace(made, cluster=cluster, regions=tuple(
        dataclasses.replace(r, options=tuple(dataclasses.replace(o, precision="bf16") for o in r.options)) for r in made.regions))
    yield made
    torch._dynamo.reset()


def test_every_kind_is_compiled_once_and_in_both_directions(plan):
    said = []
    samples = list(compiled.compiled_samples([plan, plan], CPU, until=float("inf"), report=said.append))
    kinds, names = {r.kind for r in regions(plan.model)}, ("compiled", "compiled_host")
    assert {(s.op.split(":")[1], s.variant) for s in samples} == {(name, f"{p}:{k}") for name in names for p in PASSES for k in kinds}
    assert len(samples) == 4 * len(kinds) and all(s.seconds > 0 for s in samples) and len(said) == 2 * len(kinds)
    assert list(compiled.compiled_samples([plan], CPU, until=0.0, report=said.append)) == [] and "out of time" in said[-1]
