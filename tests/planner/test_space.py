"""The search space holds every legal candidate once, nothing illegal, and a reason for all that is out."""
import dataclasses
import itertools

import numpy as np
import pytest

from costmodel.model import LayerGroup
from planner.errors import UsageError
from planner.scenario import Exclusions, load_scenario
from planner.space import (
    BATCHINGS,
    CHECKPOINTS,
    EXECUTABLE,
    SYNC_EVERY,
    TRANSPORTS,
    build_space,
    divisors,
    predict_only_reasons,
    table_choices,
)


@pytest.fixture(scope="module")
def big():
    return load_scenario("gem-512xh200", with_variants=False)


def _with(scenario, *, pins: dict | None = None, search: dict | None = None, **fields):
    return dataclasses.replace(scenario, pins=dataclasses.replace(scenario.pins, **(pins or {})),
                               search=dataclasses.replace(scenario.search, **(search or {})), **fields)


def test_divisors():
    for n in (1, 2, 12, 49, 96, 4096):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize("predict_only", [False, True])
def test_candidates_are_the_enumerated_legal_ones(big, predict_only):
    scenario = _with(big, pins={"layout": {}, "local_batch": None, "accumulation": None}, search={"predict_only": predict_only})
    candidates = build_space(scenario).candidates
    world, host, zone = 512, 8, 128
    fsdp = [d for d in divisors(world) if zone % d == 0]
    group = [d for d in divisors(world) if d % host == 0 or host % d == 0]
    sparse = 0
    for g in group:
        for full, sync in itertools.product((False, True), SYNC_EVERY):
            legal = (world // g > 1 or not (full or sync > 1)) and not (full and sync > 1)
            # averaging less often is another mathematics: only when pinned; whole shards are gathered late, for half of backward, or for all of it
            sparse += (3 if full else 1) * (legal and sync == 1)
    per_rank = scenario.workload.global_batch_on(world) // world
    batches = len([a for a in divisors(per_rank) if a <= 64])
    jobs = len(BATCHINGS) * (3 if predict_only else 1) * (3 if predict_only else 1)
    ways = 2 * sparse - 4  # ids sent ahead or not, but for the layouts of one rank a group
    assert len(candidates) == (2 * len(fsdp) - 1) * ways * batches * jobs
    rows = np.stack([candidates.columns[k] for k in sorted(candidates.columns)], axis=1)
    assert len(np.unique(rows, axis=0)) == len(candidates)
    assert (candidates["ddp"] * candidates["fsdp"] == world).all()
    assert (candidates["sparse_group"] * candidates["sparse_replicas"] == world).all()
    assert (candidates["local_batch"] * candidates["accumulation"] * world == scenario.workload.global_batch_on(world)).all()
    layout = candidates.layout(len(candidates) - 1)
    assert layout.world_size == world and candidates.describe(0).startswith("ddp")


def test_every_exclusion_has_a_reason(big):
    space = build_space(_with(big, pins={"layout": {}}))
    assert {e.kind for e in space.excluded} >= {"illegal", "predict_only"}
    assert all(e.what and e.why for e in space.excluded)
    assert any(e.what == "fsdp 256" and "zone of 128" in e.why for e in space.excluded)
    assert any(e.what == "transport ncclx" and e.kind == "predict_only" for e in space.excluded)


def test_pins_narrow_and_contradictions_are_named_together(big):
    pinned = build_space(_with(big, pins={"layout": {"fsdp": 8, "sparse_group": 64}, "batching": "global"})).candidates
    assert set(pinned["fsdp"]) == {8} and set(pinned["sparse_group"]) == {64}
    assert {BATCHINGS[i] for i in pinned["batching"]} == {"global"}
    with pytest.raises(UsageError, match=r"no legal fsdp.*'fsdp': 256.*zone of 128"):
        build_space(_with(big, pins={"layout": {"fsdp": 256}}))
    with pytest.raises(UsageError, match=r"no legal sparse_group.*sync_every.*'fully_sharded_2d': True, 'sync_every': 4"):
        build_space(_with(big, pins={"layout": {"fully_sharded_2d": True, "sync_every": 4}}))
    with pytest.raises(UsageError, match="batching: every option is out: batching global: pinned and excluded at once"):
        build_space(_with(big, pins={"batching": "global", "exclude": Exclusions(batching=("global",))}))
    with pytest.raises(UsageError, match="leave no candidate"):
        build_space(_with(big, pins={"layout": {"fsdp": 8}, "exclude": Exclusions(layouts=({"fsdp": 8},))}))
    with pytest.raises(UsageError, match=r"layout.ep 2 does not fit the model, which has no experts; legal: 1"):
        build_space(_with(big, pins={"layout": {"ep": 2}}))


def test_experts_spread_inside_a_host_and_over_whole_experts(big):
    model = dataclasses.replace(big.model, expert_layers=(LayerGroup(kind="moe", num_experts=12, mlp_dim=64),))
    found = build_space(_with(big, model=model, pins={"layout": {}})).candidates
    ways = set(zip(found["fsdp"].tolist(), found["ep"].tolist(), found["expert_all_to_all"].tolist()))
    assert {(ep, way) for fsdp, ep, way in ways if fsdp == 128} == {(1, 0), (2, 0), (2, 1), (4, 0), (4, 1)}
    assert {ep for fsdp, ep, _ in ways if fsdp == 2} == {1, 2}
    pinned = build_space(_with(big, model=model, pins={"layout": {"ep": 4, "expert_all_to_all": True}})).candidates
    assert set(pinned["ep"]) == {4} and set(pinned["expert_all_to_all"]) == {1} and pinned["fsdp"].min() == 4
    with pytest.raises(UsageError, match=r"layout.ep 8 does not fit hosts of 8 and the 12 experts of a layer; legal: 1, 2, 4"):
        build_space(_with(big, model=model, pins={"layout": {"ep": 8}}))


def test_batches_that_do_not_divide_are_refused_with_the_legal_values(big):
    workload = dataclasses.replace(big.workload, local_batch=None, global_batch=1000)
    with pytest.raises(UsageError, match="global batch 1000 does not divide over 512 ranks; next legal: 512, 1024"):
        build_space(_with(big, workload=workload))
    with pytest.raises(UsageError, match=r"legal local batches: 1, 2, 4, 8"):
        build_space(_with(big, pins={"local_batch": 3, "accumulation": None}))


def test_region_options_respect_pins_formats_and_last_layers(big):
    scenario = _with(big, pins={"precision": {"heads": "fp32"}, "exclude": Exclusions(checkpoint={"*": ("full",)})}, search={"predict_only": True})
    regions = build_space(scenario).regions
    assert {c.precision for c in regions["heads"]} == {"fp32"}
    assert all(c.checkpoint != "full" for choices in regions.values() for c in choices)
    formats = {c.precision for c in regions["clicks.0"]}
    assert "fp8_row" in formats and "mxfp8" not in formats  # Hopper has no MX format
    assert {c.precision for c in regions["clicks.input"]} <= {"fp32", "bf16"}


def test_table_choices_by_group_size(big):
    huge = next(t for t in big.model.tables if t.dim == 256)
    names = lambda group, allow=False: [c.name for c in table_choices(big, huge, group, allow=allow)]
    assert names(1) == ["table_wise"]
    assert names(4) == ["table_wise", "row_wise", "column_wise2", "column_wise4"]
    assert names(64) == ["table_wise", "row_wise", "column_wise2", "column_wise4", "column_wise8", "table_row_wise"]
    for kind, group in (("data_parallel", 64), ("host_cached", 512)):
        pinned = _with(big, pins={"sharding": {huge.names[0]: kind}})
        assert [c.name for c in table_choices(pinned, huge, group, allow=False)] == [kind] and kind not in names(group)
    # host memory of several replicas is not averaged, so only a group of all ranks may use it
    with pytest.raises(UsageError, match=r"pin layout\.sparse_group 512"):
        table_choices(pinned, huge, 64, allow=False)
    pinned = _with(big, pins={"sharding": {huge.names[0]: "row_wise"}})
    assert [c.name for c in table_choices(pinned, huge, 64, allow=False)] == ["row_wise"]
    banned = _with(big, pins={"exclude": Exclusions(sharding={"*": ("table_wise", "row_wise", "column_wise", "table_row_wise")})})
    with pytest.raises(UsageError, match="no sharding left in a sparse group of 8"):
        table_choices(banned, huge, 8, allow=False)


def test_cpu_ranks_talk_gloo_and_gpus_do_not(big):
    local = load_scenario("quickstart", with_variants=False)
    assert {TRANSPORTS[i] for i in build_space(local).candidates["transport"]} == {"gloo"}
    assert {TRANSPORTS[i] for i in build_space(_with(big, search={"predict_only": True})).candidates["transport"]} == {"nccl", "ncclx", "copy_engine"}


def test_predict_only_reasons_name_each_option(big):
    candidates = build_space(_with(big, pins={"layout": {"sync_every": 4}})).candidates
    assert set(candidates["sync_every"]) == {4} and candidates["sparse_replicas"].min() > 1
    options = {**candidates.options(0), "transport": "ncclx"}
    reasons = predict_only_reasons(options=options, precisions=["bf16", "fp8_row"], checkpoints=["none", "quantized"], shardings=["table_wise"])
    assert [r.split(":")[0] for r in reasons] == ["transport ncclx"]
    assert set(EXECUTABLE["checkpoint"]) == set(CHECKPOINTS)
