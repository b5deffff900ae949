import dataclasses
from collections import Counter

import pytest

from costmodel.estimate import estimate
from costmodel.lower import batch_shape, lower, model_flops
from costmodel.plan import RegionOption, RegionPlan
from costmodel.regions import regions
from costmodel.simulate import bound, simulate
from costmodel.stepgraph import COMPUTE


def count(plan, name, calibration=None):
    return sum(t.name == name for t in lower(plan, calibration).graph.tasks)


def test_one_fp32_rank_has_no_collectives_and_no_unit_work(make_plan):
    tasks = lower(make_plan(ranks=1), None).graph.tasks
    assert {t.stream for t in tasks} == {COMPUTE}
    assert not any(t.name.startswith(("gather", "reduce", "unshard", "ids")) for t in tasks)


def test_every_block_is_gathered_twice_and_reduced_once(make_plan):
    plan = make_plan()
    assert count(plan, "gather history.0") == 4 and count(plan, "reduce history.0") == 2
    kept = make_plan(layout={"reshard_after_forward": False})
    assert count(kept, "gather history.0") == 2


def test_accumulation_reduces_and_updates_once(make_plan):
    plan = make_plan(accumulation=3)
    assert count(plan, "gather history.0") == 12 and count(plan, "reduce history.0") == 2
    assert count(plan, "update") == 1 and count(plan, "gradients") == 3 and count(plan, "adamw") == 1


def test_recompute_follows_the_policy(make_plan):
    assert count(make_plan(), "recompute history.0") == 0
    assert count(make_plan(checkpoint="full"), "recompute history.0") == 2
    plan = make_plan()
    mixed = dataclasses.replace(plan, regions=tuple(
        RegionPlan(region="history.0", options=(RegionOption(count=1), RegionOption(count=1, checkpoint="full"))) if r.region == "history.0" else r
        for r in plan.regions))
    assert count(mixed, "recompute history.0") == 1


def test_a_cpu_step_is_one_chain(make_plan):
    tasks = lower(make_plan(), None).graph.tasks
    for i, task in enumerate(tasks[1:], start=1):
        assert i - 1 in task.deps, task.name


def test_gpu_gathers_run_beside_the_block_before(make_plan, h200):
    tasks = lower(make_plan(device=h200, ranks=8, fsdp=4, precision="bf16"), None).graph.tasks
    gathers = [i for i, t in enumerate(tasks) if t.name == "gather history.0"]
    unit_before = max(i for i, t in enumerate(tasks[:gathers[1]]) if t.name == "history.0")
    assert unit_before not in tasks[gathers[1]].deps
    assert any(t.name.startswith("all-reduce") for t in tasks), "ddp 2 reduces over replicas"


def test_model_flops_are_of_true_lengths(make_plan):
    """No padding, no recompute, causal half: the convention, whatever the plan executes."""
    plan = make_plan(ranks=1)
    base = model_flops(plan)
    assert model_flops(dataclasses.replace(plan, batching="padded")) == base
    assert model_flops(make_plan(ranks=1, checkpoint="full")) == pytest.approx(base)
    assert model_flops(make_plan(ranks=1, accumulation=2)) == pytest.approx(2 * base)
    executed = sum(t.flops for t in lower(plan, None).graph.tasks)
    assert base < executed < 1.02 * base


def test_padding_executes_the_longest_everywhere(make_plan):
    plan = make_plan(ranks=1)
    padded = batch_shape(dataclasses.replace(plan, batching="padded")).sequences["history"]
    assert padded.tokens == pytest.approx(64 * padded.longest) and padded.tokens > 1.5 * batch_shape(plan).sequences["history"].tokens


def test_plans_that_do_not_fit_are_refused(make_plan):
    plan = make_plan()
    with pytest.raises(ValueError, match="options cover 3 of 2 blocks"):
        lower(dataclasses.replace(plan, regions=tuple(
            RegionPlan(region=r.region, options=(RegionOption(count=3),)) if r.region == "history.0" else r for r in plan.regions)), None)
    with pytest.raises(ValueError, match="plan regions"):
        lower(dataclasses.replace(plan, regions=plan.regions[1:]), None)
    with pytest.raises(ValueError, match=r"without a placement: user.0"):
        lower(dataclasses.replace(plan, tables=tuple(t for t in plan.tables if t.table != "user.0")), None)
    with pytest.raises(ValueError, match="placed twice: liked"):
        lower(dataclasses.replace(plan, tables=(*plan.tables, plan.tables[-1])), None)
    with pytest.raises(ValueError, match=r"lengths.history: missing"):
        lower(dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, lengths={})), None)
    with pytest.raises(ValueError, match="needs 2 ranks"):
        lower(dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, devices_per_host=1)), None)


def test_replicas_are_averaged_every_so_many_steps(make_plan, h200):
    layout = {"sparse_group": 4, "sparse_replicas": 2}
    every, fourth = (lower(make_plan(device=h200, ranks=8, layout={**layout, "sync_every": n}), None).graph.tasks for n in (1, 4))
    one, four = (next(t for t in tasks if t.name == "tables average") for tasks in (every, fourth))
    assert four.seconds == pytest.approx(one.seconds / 4) and one.bytes == 4 * four.bytes
    gathered = make_plan(device=h200, ranks=8, layout={**layout, "fully_sharded_2d": True})
    assert count(gathered, "tables gather forward") == count(gathered, "tables gather backward") == count(gathered, "tables scatter") == 1


def _beside(graph, name):
    """Seconds of task `name` during which compute runs."""
    timeline = simulate(graph)
    spans = {i: (a, b) for i, a, b in timeline.spans}
    of = [spans[i] for i, t in enumerate(graph.tasks) if t.name == name]
    busy = [spans[i] for i, t in enumerate(graph.tasks) if t.stream == COMPUTE]
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in of for c, d in busy)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("gpu", [False, True])
def test_replicas_beside_compute_shorten_the_step_and_move_as_much(make_plan, h200, gpu, accumulation, full):
    layout = {"sparse_group": 4, "sparse_replicas": 2, "fully_sharded_2d": full}
    serial = make_plan(ranks=8, layout=layout, accumulation=accumulation, **({"device": h200} if gpu else {}))
    blocks = len([1 for r in regions(serial.model) for _ in range(r.count)])
    moved, steps = {}, {}
    for ahead in (0, 1, blocks, 10 * blocks):
        graph = lower(dataclasses.replace(serial, tables_ahead=ahead), None).graph
        moved[ahead] = sum(t.bytes for t in graph.tasks if t.name.startswith("tables "))
        steps[ahead] = simulate(graph).step_seconds
        assert bound(graph) <= steps[ahead] * (1 + 1e-9)
        if ahead and full:
            assert _beside(graph, "tables gather update") > 0
            assert len([t for t in graph.tasks if t.name == "tables gather lookup"]) == accumulation - 1
        if ahead:
            assert _beside(graph, "tables scatter state" if full else "tables average state") > 0
    assert all(size == pytest.approx(moved[0]) for size in moved.values())
    assert max(steps[1], steps[blocks]) < steps[0] and steps[10 * blocks] == steps[blocks]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("gpu", [False, True])
def test_overlapped_ids_shorten_the_step_and_keep_the_work(make_plan, h200, gpu, accumulation):
    serial = make_plan(ranks=8, sharding="row_wise", accumulation=accumulation, **({"device": h200} if gpu else {}))
    overlapped = dataclasses.replace(serial, input_overlap=True)
    graphs = [lower(plan, None).graph for plan in (serial, overlapped)]
    counted = [Counter(t.name for t in g.tasks if t.seconds > 0) for g in graphs]
    assert counted[0] == counted[1]
    steps = [simulate(g).step_seconds for g in graphs]
    assert steps[1] < steps[0]
    (ids, *_) = (t for t in graphs[1].tasks if t.name == "ids")
    assert not any(graphs[1].tasks[d].name == "spread" for d in ids.deps)


def test_ids_of_the_next_micro_batch_take_memory(make_plan):
    serial = make_plan(ranks=8)
    inputs = [estimate(dataclasses.replace(serial, input_overlap=overlap), None).memory.categories["input"] for overlap in (False, True)]
    assert 1.5 * inputs[0] <= inputs[1] <= 2.6 * inputs[0]
