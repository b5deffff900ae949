"""The GPU stages of `benchmarks.precision`, run on the CPU: every row comes out, a failure becomes a row."""
import pytest
import torch

from benchmarks import precision_gpu as gpu
from benchmarks.precision_gate import recipes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(gpu, "GPU", CPU)
    monkeypatch.setattr(gpu, "device_seconds", lambda run: gpu.eager_seconds(run, CPU, repeats=1))


def test_layers_under_every_recipe():
    rows = list(gpu.modules([128], rows=32))
    assert all(row.value for row in rows), [row.note for row in rows]
    assert len(rows) == 2 * (len(gpu.RECIPES) + len(gpu.BOUND_SET)) and sum(row.target is not None for row in rows) == 4
    assert all(row.value for row in gpu.conversions([128], rows=32))


def test_steps_and_saved_activations_of_a_plan(monkeypatch):
    base = gpu.under(recipes(512, 16)["row-wise fp8"], precision=dict.fromkeys(("history.0", "interaction"), "bf16"))
    monkeypatch.setattr(gpu, "scenario_plan", lambda *names, **options: base)
    rows = list(gpu.saved("tiny", measured=2))
    assert all(row.value is not None for row in rows), [row.note for row in rows]
    less = {row.name.split("under ")[1].split(":")[0]: row.value for row in rows if "less" in row.name}
    assert less["quantized4"] > less["quantized"] > 0.3 and less["none"] == 0
    rows = list(gpu.steps("tiny", "", "", measured=2))
    assert len(rows) == 3 and all(row.value for row in rows), [row.note for row in rows]


def test_a_precision_is_given_to_regions_that_can_have_it():
    plan = gpu.scenario_plan("gem-full-1xh200", model="gem-wide-8xh200")
    low = {r.region for r in gpu.under(plan, precision="fp8_row").regions if r.options[0].precision == "fp8_row"}
    assert {"history.0", "interaction.1", "experts.0"} <= low and not low & {"history.input", "history.summary", "heads"}


def test_kernels_are_compiled_by_small_models_of_one_layer_each(monkeypatch):
    ran = []
    monkeypatch.setattr(gpu, "run_plan", lambda plan, device, *, steps: ran.append(plan))
    for part in range(gpu.WARM_PARTS):
        list(gpu.warm(part))
    assert {len(p.model.sequences[0].layers) for p in ran} == {1} and max(t.rows for p in ran for t in p.model.tables) == 1000
    assert {p.model.sequences[0].layers[0].kind for p in ran} == {"block_attention", "gdpa", "hstu", "self_attention"}
    assert any(p.model.interaction_layers for p in ran) and {p.model.dim for p in ran} == {1024, 2048}
    assert any(o.precision == "fp8_row" for p in ran for r in p.regions for o in r.options)


def test_a_failure_is_a_row_with_the_reason():
    def broken():
        yield gpu.Row(name="a", value=1.0, unit="s")
        raise RuntimeError("out of memory\nmore")

    assert [(row.name, row.value, row.note) for row in gpu.guarded("b", "s", broken)] == [("b", None, "failed: RuntimeError: out of memory")]
