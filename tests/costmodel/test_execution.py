"""What executions change in a price: launches of the blocks that they concern and, compiled, their kernels; nothing else."""
import dataclasses

import numpy as np
import pytest
from small_plans import H200, build_model, build_plan

from costmodel.blocks.llama import NextEvent
from costmodel.calibration import Calibration, fit
from costmodel.cluster import Reliability
from costmodel.compute import COMPILED_LAUNCH_SHARE, GRAPH_LAUNCH_SECONDS
from costmodel.estimate import estimate
from costmodel.execution import COMPILE_SECONDS, compile_seconds, fits_execution, refusal, unpriced
from costmodel.jobtime import job_time
from costmodel.lower import batch_shape, lower
from costmodel.memory import ALLOCATOR_OVERHEAD, block_memories, graph_bytes
from costmodel.model import LayerGroup
from costmodel.ops import BACKWARD, FORWARD
from costmodel.plan import Layout, Plan
from costmodel.pricer import Pricer, pricer
from costmodel.regions import over_samples, regions
from costmodel.samples import CONSTANT_PREFIX, Environment, Sample

WUKONG = LayerGroup(kind="wukong", count=2, mlp_dim=64, options={"num_fm": 4, "num_linear": 4, "rank": 8, "mlp_layers": 2, "compressed": 2})
EAGER = {"forward:self_attention@bf16+mlp": 1e-3, "backward:self_attention@bf16+mlp": 2e-3, "forward:region@bf16": 1e-4,
         "backward:region@bf16": 2e-4, "forward:wukong@bf16+mlp": 7e-4, "backward:wukong@bf16+mlp": 9e-4, "forward:loss": 3e-4,
         "backward:loss": 4e-4, "lookup": 5e-4, "update": 6e-4, "optimizer": 1e-3, "tensor": 1e-6, "input": 2e-3, "other": 1e-4}  # fmt: skip
GRAPH = {"forward:graph": 1e-4, "backward:graph": 1.5e-4}
KINDS = ("self_attention", "sequence_input", "summary", "wukong", "mlp", "heads")
COMPILE = {f"{name}/{phase}:{kind}": share for phase in (FORWARD, BACKWARD) for kind in KINDS
           for name, share in (("compiled", 0.9), ("compiled_host", 0.5))}


def calibration(*figures: dict[str, float], **constants: float) -> Calibration:
    samples = [Sample(op=f"{CONSTANT_PREFIX}host", variant=name, phase="step", features={}, seconds=value)
               for some in figures for name, value in some.items()]
    samples.append(Sample(op="elementwise", variant="add", phase=FORWARD, features={"m": 1e3, "n": 1e3}, seconds=1e-5))
    made = fit(Environment(device_name=H200.name, device_kind="cuda"), samples, device=H200)
    return dataclasses.replace(made, constants={**made.constants, **constants})


def plan_of(execution: str, **fields) -> Plan:
    model = build_model(layers=(LayerGroup(kind="self_attention", count=3, heads=4, head_dim=64, mlp_dim=1024),))
    model = dataclasses.replace(model, interaction_layers=(WUKONG,), feature_dim=8)
    return dataclasses.replace(build_plan(model=model, device=H200, ranks=1, precision="bf16", **fields), execution=execution)


def host(plan: Plan, known: Calibration | None) -> dict[str, float]:
    """By phase."""
    tasks = lower(plan, known).graph.tasks
    return {phase: sum(t.host_seconds for t in tasks if t.phase == phase) for phase in (FORWARD, BACKWARD, "sparse", "optimizer")}


def device(plan: Plan, known: Calibration | None) -> float:
    return sum(t.seconds for t in lower(plan, known).graph.tasks)


def test_graphs_replace_what_works_on_samples_and_the_loss():
    known, eager, graph = calibration(EAGER, GRAPH), plan_of("eager"), plan_of("cuda_graph")
    before, after = host(eager, known), host(graph, known)
    captured = [r for r in regions(eager.model) if r.name in over_samples(eager.model)]
    assert {r.kind for r in captured} >= {"wukong", "heads", "mlp"} and not any(r.sequence for r in captured)
    for phase, block, layer, loss, replay in ((FORWARD, 1e-4, 7e-4, 3e-4, 1e-4), (BACKWARD, 2e-4, 9e-4, 4e-4, 1.5e-4)):
        saved = sum(r.count * (layer if r.kind == "wukong" else block) for r in captured) + loss - replay
        assert before[phase] - after[phase] == pytest.approx(saved)
    assert all(before[phase] == after[phase] for phase in ("sparse", "optimizer"))
    assert device(eager, known) == device(graph, known)


def test_graphs_that_nobody_timed_are_launched_for_next_to_nothing():
    before, after = host(plan_of("eager"), None), host(plan_of("cuda_graph"), None)
    model = plan_of("eager").model
    batch, names = lower(plan_of("eager"), None).batch, over_samples(model)
    launches = sum(r.count * len(r.block.forward(batch, "bf16")) for r in regions(model) if r.name in names)
    assert launches * GRAPH_LAUNCH_SECONDS < before[FORWARD] - after[FORWARD] and after[FORWARD] > 0
    assert before["optimizer"] == after["optimizer"]


def test_compiled_blocks_take_the_shares_that_were_measured():
    known = calibration(EAGER, **{name: share for name, share in COMPILE.items() if name != "compiled/forward:wukong"})
    before, after = host(plan_of("eager"), known), host(plan_of("compile"), known)
    wukong = 2 * 7e-4
    assert before[FORWARD] - after[FORWARD] == pytest.approx((before[FORWARD] - 3e-4 - wukong) / 2 - (COMPILED_LAUNCH_SHARE - 1) * wukong)
    eager, compiled = ({t.name: t for t in lower(plan_of(e), known).graph.tasks if t.phase == FORWARD} for e in ("eager", "compile"))
    for name, task in eager.items():  # of a kind that nobody timed the kernels are taken for equal; the loss is not compiled
        assert compiled[name].seconds == pytest.approx(task.seconds * (1.0 if name == "loss" or name.startswith("interaction.") else 0.9)), name
    assert unpriced(plan_of("compile").model, "compile", known) == "no calibration has timed compiled blocks of kind wukong"


def test_what_a_calibration_has_timed():
    model, both = plan_of("eager").model, calibration(EAGER, GRAPH, **COMPILE)
    assert all(unpriced(model, execution, both) is None for execution in ("eager", "compile", "cuda_graph"))
    for known in (None, calibration(EAGER)):
        assert unpriced(model, "eager", known) is None
        assert "no calibration has timed" in unpriced(model, "compile", known) and "graphs" in unpriced(model, "cuda_graph", known)


def test_options_that_fit_an_execution():
    model = plan_of("eager").model
    assert all(fits_execution(model, "eager", r.name, "fp8_row", "full") for r in regions(model))
    assert [fits_execution(model, "cuda_graph", name, "bf16", "full") for name in ("history.0", "interaction.0", "heads")] == [True, False, False]
    assert [fits_execution(model, "cuda_graph", "interaction", precision, "none") for precision in ("fp8_row", "fp32")] == [False, True]
    assert not fits_execution(model, "compile", "history.0", "bf16", "full") and fits_execution(model, "compile", "history.0", "bf16", "none")


def test_compiling_is_part_of_the_first_start_up():
    eager, compiled = plan_of("eager"), plan_of("compile")
    assert compile_seconds(eager) == 0.0 and compile_seconds(compiled) == COMPILE_SECONDS * len(regions(compiled.model))
    jobs = [job_time(Reliability(), ranks=1, training_seconds=1e5, bytes_per_rank=1e9, compiling=compile_seconds(p)) for p in (eager, compiled)]
    assert jobs[1].wall_seconds - jobs[0].wall_seconds == pytest.approx(compile_seconds(compiled)) and jobs[1].startup > jobs[0].startup
    assert jobs[1].effective < jobs[0].effective


def test_a_plan_of_several_ranks_is_refused():
    plan = dataclasses.replace(plan_of("cuda_graph"), layout=Layout(fsdp=2, sparse_group=2))
    assert "2 ranks" in refusal(plan) and refusal(dataclasses.replace(plan, execution="eager")) is None


@pytest.mark.parametrize("execution", ["compile", "cuda_graph"])
def test_recomputation_and_batches_are_kept_apart(execution):
    """Prices of one execution do not leak into another's, whatever is asked first."""
    known = calibration(EAGER, GRAPH, **COMPILE)
    one = [host(plan_of(e), known) for e in ("eager", execution, "eager", execution)]
    assert one[0] == one[2] and one[1] == one[3] and one[0] != one[1]
    assert np.isfinite(list(one[1].values())).all()


def test_memory_of_graphs_is_reserved_beside_the_allocator():
    eager, graph = plan_of("eager", local_batch=512), plan_of("cuda_graph", local_batch=512)
    before, after = (estimate(p, None).memory for p in (eager, graph))
    read, pool = graph_bytes(graph, lower(graph, None).batch)
    saved = sum(b.saved for b in block_memories(eager, lower(eager, None).batch) if b.region in over_samples(eager.model))
    assert pool > saved > 0 and read > 0 and graph_bytes(eager, lower(eager, None).batch) == (0.0, 0.0)
    assert after.categories["buffers"] - before.categories["buffers"] == pytest.approx(read + pool)
    assert before.categories["saved_activations"] - after.categories["saved_activations"] == pytest.approx(saved)
    assert after.reserved.value > before.reserved.value - (1 + ALLOCATOR_OVERHEAD) * saved


def test_an_fsdp_unit_costs_what_its_own_parameters_do():
    """Blocks come and go in a process that plans for long, and one may get the identity of another that is gone."""
    plan, prices = build_plan(device=H200, ranks=2, bandwidth=4e11), []
    shared = pricer(plan, None)
    for width in range(64, 64 + 40 * 8, 8):
        block = NextEvent("history", width, 1000)
        prices.append((shared.unit("fsdp_gather", block).bytes, 8.0 * block.num_parameters))
        del block
    assert [found for found, _ in prices] == [own for _, own in prices]


def test_a_block_that_is_gone_leaves_no_cost_to_another():
    """As where the regions of a model are built anew while its batch is still the same."""
    plan, found = build_plan(device=H200, ranks=2, bandwidth=4e11), []
    shared, batch = Pricer(plan, None), batch_shape(plan)
    shared.keep(batch)
    for width in range(64, 64 + 40 * 8, 8):
        block = NextEvent("history", width, 1000)
        for phase in (FORWARD, BACKWARD):
            found.append((shared.block(block, batch, "bf16", phase).flops, sum(one.flops(phase) for one in block.forward(batch, "bf16"))))
        found.append((shared.recompute(block, batch, "bf16", "full").flops, sum(one.flops(FORWARD) for one in block.forward(batch, "bf16"))))
        del block
    assert [made for made, _ in found] == pytest.approx([own for _, own in found])
