"""Compiled blocks: the same mathematics, and no graph of its own for a batch of other lengths."""
import pytest
import runtime_models as models
import torch
from interaction_models import full_model

from costmodel.plan import Layout, Plan
from runtime import parallelize
from runtime.data import open_source
from runtime.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # dynamo's and inductor's own


def trained(plan: Plan) -> Trainer:
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    trainer.train(2)
    return trainer


@pytest.fixture
def graphs(monkeypatch):
    """Collects the graphs that the compiler is given; they run as they are."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(parallelize, "COMPILER", backend)
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def check(graphs: list, spec, *, precision: str, checkpoint: str) -> None:
    options = {"model_spec": spec, "precision": precision, "checkpoint": checkpoint}
    compiled, eager = (trained(models.plan(Layout(), execution=execution, **options)) for execution in ("compile", "eager"))
    count = len(graphs)
    for trainer in (compiled, eager):
        trainer.train(6)
    assert 0 < count == len(graphs)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-6 if precision == "fp32" else 2e-3)


@pytest.mark.parametrize(("precision", "checkpoint"), [
    ("bf16", "none"), pytest.param("fp32", "full", marks=pytest.mark.slow), pytest.param("fp32", "selective", marks=pytest.mark.slow)])
def test_compiled_blocks_train_as_eager_ones_do(graphs, precision, checkpoint):
    check(graphs, models.model((models.LAYERS["self_attention"][0],)), precision=precision, checkpoint=checkpoint)


@pytest.mark.slow
def test_every_kind_of_block_compiles(graphs):
    check(graphs, full_model(), precision="fp32", checkpoint="none")


@pytest.mark.slow
def test_inductor_trains_as_eager_blocks_do():
    """The compiler that runs use: sums in another order, nothing else."""
    torch._dynamo.reset()
    spec = models.model((models.LAYERS["hstu"][0],))
    found, expected = (trained(models.plan(Layout(), execution=execution, model_spec=spec)) for execution in ("compile", "eager"))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
