"""What is captured as CUDA graphs: its inputs in every step are what it was captured with, and nothing of a plan is captured that cannot be."""
import dataclasses
import warnings

import pytest
import runtime_models as models
import torch
from interaction_models import MOE, WUKONG, full_model

from costmodel.execution import refusal
from costmodel.model import LayerGroup
from costmodel.plan import Layout, Plan
from costmodel.regions import over_samples
from runtime import checkpoint
from runtime.data import open_source
from runtime.graphs import OverSamples, sample_inputs
from runtime.trainer import Trainer

MODELS = {
    "plain": models.model(),
    "no dense features": models.model(num_dense_features=0, bottom_hidden=()),
    "Wukong and experts": models.model(interaction_layers=(WUKONG, WUKONG), feature_dim=8, expert_layers=(MOE,)),
    "InterFormer": full_model(),
}


def plan_of(spec, **options) -> Plan:
    plan = models.plan(Layout(), model_spec=spec, execution="cuda_graph", **options)
    device = dataclasses.replace(plan.cluster.device, kind="gpu", peak_flops={"fp32": 1e12, "bf16": 1e13})
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device))


@pytest.fixture
def captured(monkeypatch):
    """Stands in for the capture: (module, sample inputs); a replay refuses inputs that a graph could not be replayed with."""
    found = []

    def make(module, sample):
        found.append((module, sample))
        warnings.warn("The AccumulateGrad node's stream does not match the stream of the node that produced the incoming gradient.", stacklevel=1)

        def replay(*inputs):
            assert [(x.shape, x.dtype, x.requires_grad) for x in inputs] == [(x.shape, x.dtype, x.requires_grad) for x in sample]
            return module(*inputs)

        return replay

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    return found


def trained(plan: Plan) -> Trainer:
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    trainer.train(4)
    return trainer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_step_fits_what_was_captured(captured, name, precision):
    plan = plan_of(MODELS[name], precision=precision)
    found, eager = trained(plan), trained(dataclasses.replace(plan, execution="eager"))
    assert found.losses == eager.losses
    (module, _), = captured
    assert found.model.dense.over_samples.replays == 4
    names = over_samples(plan.model)
    blocks = [parent.get_submodule(key) for n, places in found.model.dense.regions().items() if n in names for parent, key in places]
    own = {p for block in blocks for p in block.parameters()}
    assert own == set(module.parameters()) and len(own) < len(list(found.model.dense.parameters()))
    assert found.evaluate() == eager.evaluate() and found.model.dense.over_samples.replays == 4  # without gradients nothing is replayed


def test_parameters_keep_their_names(captured):
    plan = plan_of(MODELS["Wukong and experts"])
    assert set(trained(plan).model.dense.state_dict()) == set(trained(dataclasses.replace(plan, execution="eager")).model.dense.state_dict())


def test_gradients_reach_all_that_is_captured():
    spec = MODELS["Wukong and experts"]
    plan = plan_of(spec)
    trainer = trained(dataclasses.replace(plan, execution="eager"))
    module = OverSamples(trainer.model.dense)
    sample = sample_inputs(plan, torch.device("cpu"))
    out = module(*sample)
    assert out.shape == (plan.local_batch, len(spec.heads))
    gradients = torch.autograd.grad(out.sum(), [x for x in sample if x.requires_grad] + list(module.parameters()))
    assert all(g is not None for g in gradients)


@pytest.mark.parametrize(("change", "words"), [
    ({"accumulation": 2, "local_batch": 8}, "2 micro-batches"),
    ({"layout": Layout(fsdp=2, sparse_group=2)}, "2 ranks"),
])
def test_refused_plans(change, words):
    plan = plan_of(MODELS["plain"])
    assert refusal(plan) is None
    assert words in refusal(dataclasses.replace(plan, **change))


def test_refused_regions():
    plan = plan_of(MODELS["plain"])

    def under(region: str, **option) -> Plan:
        return dataclasses.replace(plan, regions=tuple(
            dataclasses.replace(r, options=tuple(dataclasses.replace(o, **option) for o in r.options)) if r.region == region else r
            for r in plan.regions))

    assert refusal(under("history.0", checkpoint="full")) is None and refusal(under("history.0", precision="fp8_row")) is None
    assert "heads is under checkpoint policy full" in refusal(under("heads", checkpoint="full"))
    assert "interaction computes in fp8_row" in refusal(under("interaction", precision="fp8_row"))
    assert "quantises" in refusal(dataclasses.replace(under("history.0", checkpoint="quantized"), execution="compile"))
    assert refusal(dataclasses.replace(under("history.0", checkpoint="quantized"), execution="eager")) is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS", "ignore:It seems like you did not set/select the default device")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replays_train_as_eager_blocks_do(precision, tmp_path):
    """Bit for bit, resumed from a checkpoint too, whose parameters are read into where the graph reads them."""
    spec = models.model(layers=(LayerGroup(kind="self_attention", heads=1, head_dim=64, mlp_dim=64),), dim=64, interaction_layers=(WUKONG, WUKONG),
                        feature_dim=8, expert_layers=(MOE,))
    plan, device = plan_of(spec, precision=precision), torch.device("cuda", 0)
    curves = {}
    for execution in ("eager", "cuda_graph"):
        own = dataclasses.replace(plan, execution=execution)
        first = Trainer(own, open_source(own.model, own.workload, seed=own.seed), device=device)
        first.train(4)
        first.save(tmp_path / execution)
        again = Trainer(own, open_source(own.model, own.workload, seed=own.seed + 1), device=device)
        again.resume(checkpoint.latest(tmp_path / execution))
        again.train(8)
        first.train(8)
        curves[execution] = first.losses, again.losses
        if execution == "cuda_graph":
            assert first.model.dense.over_samples.replays == 8
    assert curves["cuda_graph"] == curves["eager"]
