"""The training benchmark's own parts: FlexAttention stands where the kernels stand, and models shrink to a test's size with their kinds of layers."""
import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import train_input, train_modes, train_speed
from costmodel.lower import model_flops
from costmodel.plan import Layout
from costmodel.regions import regions
from costmodel.workload import Lengths
from kernels import block_attention, jagged_attention
from planner.space import BATCHINGS
from runtime.data import open_source
from runtime.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": True, "window": 5}])
def test_flex_attention_is_the_kernels_softmax(options):
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 7, 7, 30, 41])
    q, k, v = (torch.randn((41, 2, 16), generator=generator) for _ in range(3))
    flex = train_speed.Flex(torch.device("cpu"))
    expected = jagged_attention(q, k, v, offsets, offsets, max_q=23, max_k=23, **options)
    torch.testing.assert_close(flex.jagged_attention(q, k, v, offsets, offsets, **options), expected, rtol=1e-4, atol=1e-5)


def test_flex_block_attention_is_the_kernel():
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 70, 100])
    q, k, v = (torch.randn((100, 2, 16), generator=generator) for _ in range(3))
    found = train_speed.Flex(torch.device("cpu")).block_attention(q, k, v, offsets, block=32, causal=True)
    torch.testing.assert_close(found, block_attention(q, k, v, offsets, max_len=70, block=32, causal=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", train_speed.SCENARIOS)
def test_tiny_models_keep_every_kind_of_layer(name):
    tiny, whole = train_speed.tiny(name), train_speed.plan_of(name)
    assert {r.kind for r in regions(tiny.model)} == {r.kind for r in regions(whole.model)}
    assert whole.layout.world_size == 1 and whole.cluster.device.name.startswith("H200")
    if name == "gem-full":
        assert train_speed.measure(tiny, torch.device("cpu"), "eager").steps > 0


def test_flops_of_a_batch_are_those_that_the_cost_model_expects_of_even_lengths():
    plan = train_speed.tiny("hstu-ranking")
    even = {name: Lengths(kind="fixed", maximum=spec.maximum) for name, spec in plan.workload.lengths.items()}
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, lengths=even))
    lengths = {name: np.full(plan.local_batch, spec.maximum) for name, spec in even.items()}
    assert train_speed._flops(plan, lengths) == pytest.approx(model_flops(plan), rel=1e-9)


def test_a_loader_of_an_event_file_resumes_and_is_timed(tmp_path):
    rows = {row.name: row for row in train_input.rows(tmp_path, events=40_000, steps=24)}
    assert all(row.value > 0 for row in rows.values()) and len(rows) == 9
    (resumed,) = (row for name, row in rows.items() if "resumes" in name)
    assert resumed.value == resumed.target == 24 - train_input.RESUMED_AT


def test_balance_modes_are_measured_on_equal_batches_and_predicted_each():
    plans = train_modes.plans()
    assert set(plans) == set(BATCHINGS) and len({p.identity() for p in plans.values()}) == len(plans)
    plan = plans["sorted_buckets"]
    trainer = Trainer(dataclasses.replace(plan, layout=Layout(), local_batch=plan.local_batch * plan.layout.world_size, tables=tuple(
        dataclasses.replace(t, sharding="table_wise", ranks=(0,)) for t in plan.tables)), open_source(plan.model, plan.workload, seed=plan.seed),
        device=torch.device("cpu"))
    assert train_modes.work(trainer, 8) == 1.0  # one rank waits for nobody
    measured = {mode: {"seconds": 1.0, "busy": 2.0 if mode == "padded" else 1.0, "work": 1.0, "saved": 1e6} for mode in plans}
    rows = {row.name: row for row in train_modes.rows(measured)}
    assert len(rows) == 3 * len(plans) and rows["modes: padded, step of the slowest rank over that in arrival order"].value == 2.0
    predicted = {mode: float(rows[f"modes: {mode}, max / mean attention work"].note.split("predicted ")[1]) for mode in plans}
    assert predicted["global"] < predicted["base_batch_shuffling"] <= predicted["jagged"]
