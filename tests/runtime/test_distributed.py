"""Several ranks give what one gives. The checks run in tests/runtime/ranks.py, one launch per world size."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import ranks
import runtime_models as models
import torch
from interaction_models import full_model

from costmodel.plan import Layout
from costmodel.regions import num_dense_parameters, regions
from runtime.data import open_source
from runtime.trainer import Trainer

LAYOUTS = ("fsdp", "keep_unsharded", "ddp", "accumulate", "selective", "full")


@pytest.fixture(scope="module")
def single() -> Iterator[Trainer]:
    """20 steps of the same plan on one rank, in this process, on one thread as ranks have: Adam turns rounding of tiny gradients into steps."""
    plan = models.plan(Layout())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
        trainer.train(20)
        yield trainer
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_one(checks_on_2, single, name):
    for rank in checks_on_2:
        found = rank["check_curves"][name]["losses"]
        assert len(found) == (20 if name in ranks.LONG else 8)
        assert found == pytest.approx(single.losses[:len(found)], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, "hybrid"])
def test_four_ranks_train_as_one(checks_on_4, single, name):
    for rank in checks_on_4:
        found = rank["check_curves"][name]["losses"]
        assert found == pytest.approx(single.losses[:len(found)], rel=1e-5)


@pytest.mark.parametrize("name", ["fsdp", "accumulate"])
def test_overlapped_ids_give_bitwise_the_serial_curve(checks_on_2, name):
    for rank in checks_on_2:
        found, serial = (rank["check_curves"][key] for key in (f"{name}_overlapped", name))
        assert found["losses"] == serial["losses"][:len(found["losses"])] and len(found["losses"]) == 8
        assert found["saved_activations"] == pytest.approx(serial["saved_activations"], rel=5e-3)  # counts in flight


def test_evaluation_does_not_depend_on_the_ranks(checks_on_2, single):
    expected = single.evaluate()
    for rank in checks_on_2:
        assert rank["check_curves"]["fsdp"]["ne"] == pytest.approx(expected, rel=1e-4)


def test_phases_sum_to_the_step(checks_on_2):
    found = checks_on_2[0]["check_curves"]["fsdp"]
    assert sum(found["phases_mean"].values()) == pytest.approx(found["step"], rel=1e-6)
    assert all(seconds >= 0 for step in found["phases"] for seconds in step.values())
    for phase in ("input", "sparse", "forward", "backward", "exposed_communication", "optimizer"):
        assert found["phases_mean"][phase] > 0, phase


def test_memory_follows_the_layout(checks_on_2):
    curves, spec = checks_on_2[0]["check_curves"], models.model()
    whole = 4 * num_dense_parameters(spec)
    assert curves["ddp"]["parameters"] == whole
    assert whole / 2 <= curves["fsdp"]["parameters"] <= 0.52 * whole  # odd first dimensions are padded up
    tables = 4 * sum(t.rows * t.dim * t.count for t in spec.tables)
    assert tables / 2 <= curves["keep_unsharded"]["tables"] <= 0.52 * tables
    saved = {name: curves[name]["saved_activations"] for name in ("fsdp", "selective", "full")}
    assert saved["full"] < saved["selective"] < saved["fsdp"]


def test_bf16_keeps_fp32_masters_and_the_curve(checks_on_2, single):
    found = checks_on_2[0]["check_bf16"]
    assert found["dtypes"] == ["torch.float32"]
    assert found["losses"] == pytest.approx(single.losses, rel=2e-2)
    assert found["losses"] != pytest.approx(single.losses, rel=1e-6)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "mixed", "table_row_wise", "column_wise", "data_parallel", "host_cached", "every"])
def test_sharded_tables_equal_unsharded_row_for_row(checks_on_2, sharding):
    for rank in checks_on_2:
        found = rank["check_tables"][sharding]
        assert found["difference"] < 1e-5 < found["moved"]


def test_plain_2d_equals_its_emulation(checks_on_2):
    for rank in checks_on_2:
        assert rank["check_replicas"]["difference"] < 1e-5


@pytest.mark.slow
def test_plain_2d_equals_its_emulation_on_four(checks_on_4):
    for rank in checks_on_4:
        assert rank["check_replicas"]["difference"] < 1e-5
        assert all(found["difference"] < 1e-5 for found in rank["check_tables"].values())


def test_fully_sharded_2d_equals_its_emulation_and_keeps_its_part(checks_on_2):
    for rank in checks_on_2:
        found = rank["check_fully_sharded"]
        assert found["difference"] < 1e-5
        assert found["whole"] / 2 <= found["resting"] <= 1.02 * found["whole"] / 2 < found["gathered"]
        assert found["resumed"] == found["losses"] and len(found["losses"]) == 6


@pytest.mark.slow
def test_fully_sharded_2d_on_four(checks_on_4):
    # odd rows make one rank's part a few bytes smaller than another's
    assert sum(rank["check_fully_sharded"]["resting"] for rank in checks_on_4) >= checks_on_4[0]["check_fully_sharded"]["whole"]
    for rank in checks_on_4:
        found = rank["check_fully_sharded"]
        assert found["difference"] < 1e-5
        assert found["resting"] <= 1.02 * found["whole"] / 4
        assert found["resumed"] == found["losses"] and len(found["losses"]) == 6


def _beside_compute(ranks: list[dict], num_blocks: int) -> None:
    for rank in ranks:
        for name, found in rank["check_replicas_beside_compute"].items():
            assert all(losses == found["losses"][0] for losses in found["losses"]) and found["same"], name
            assert all(losses == found["losses"][0] for losses in found["resumed"]), name
            micros = 14 if "two" in name else 7
            of_step = [[num_blocks * i for i in range(micros)], [num_blocks * i + num_blocks - 1 for i in range(micros)]]
            early = {"0": [], "1": of_step[1], "99": of_step[0]} if "full" in name else {"0": [], "99": []}
            assert found["begun"] == {ahead: early[ahead] for ahead in found["begun"]} and len(found["begun"]) > 1, name
        plain, scaled = (rank["check_replicas_beside_compute"][name]["losses"][0] for name in ("plain", "plain, scaled moments"))
        assert plain[0] == scaled[0] and plain[1:] != scaled[1:]
        assert rank["check_fully_sharded"]["same"]
        assert rank["check_fully_sharded"]["resting_ahead"] == rank["check_fully_sharded"]["resting"] < rank["check_fully_sharded"]["prefetched"]


def test_replicas_collectives_beside_compute_change_no_bit(checks_on_2):
    _beside_compute(checks_on_2, len([b for r in regions(models.model()) for b in range(r.count)]))


@pytest.mark.slow
def test_replicas_collectives_beside_compute_change_no_bit_on_four(checks_on_4):
    _beside_compute(checks_on_4, len([b for r in regions(models.model()) for b in range(r.count)]))


def test_every_kind_of_layer_trains_as_on_one_rank(checks_on_2):
    plan = models.plan(Layout(), model_spec=full_model())
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=torch.device("cpu"))
    trainer.train(8)
    for rank in checks_on_2:
        for policy, found in rank["check_all_layers"].items():
            assert found["losses"] == pytest.approx(trainer.losses, rel=1e-5), policy


def _same_as_whole_experts(found: list[dict], single: Trainer, world: int) -> None:
    expected = single.evaluate()
    for rank in found:
        checks = rank["check_experts"]
        for name, one in checks.items():
            assert one["losses"] == pytest.approx(single.losses[:len(one["losses"])], rel=1e-5), name
        for name, layout in ranks.expert_layouts(world).items():
            assert len(checks[name]["losses"]) == 20 and checks[name]["ne"] == pytest.approx(expected, rel=1e-4)
            elements = sum(r.count * r.block.sharded_elements(layout.fsdp) for r in regions(single.plan.model, layout))
            assert checks[name]["parameters"] == 4 * elements


@pytest.fixture(scope="module")
def whole_experts() -> Trainer:
    torch.set_num_threads(1)
    return ranks.train(ranks.expert_plan(Layout()))


def test_spread_experts_train_as_whole_ones(checks_on_2, whole_experts):
    _same_as_whole_experts(checks_on_2, whole_experts, 2)
    for rank in checks_on_2:
        assert rank["check_experts"]["same"]["losses"] == rank["check_experts"]["all_gather"]["losses"][:6]


@pytest.mark.slow
def test_spread_experts_on_four(checks_on_4, whole_experts):
    _same_as_whole_experts(checks_on_4, whole_experts, 4)


def test_resume_is_bitwise(checks_on_2):
    for rank in checks_on_2:
        found = rank["check_resume"]
        assert len(found["whole"]) == 6
        assert found["same"] == found["whole"]


def test_resume_on_another_plan_keeps_the_curve(checks_on_2):
    for rank in checks_on_2:
        found = rank["check_resume"]
        for name in ("other", "every", "back"):
            assert found[name] == pytest.approx(found["whole"], rel=1e-5), name


def test_data_parallel_copies_stay_equal_and_host_tables_leave_the_device(checks_on_2):
    whole = 4 * sum(t.rows * t.dim * t.count for t in models.TABLES)
    found = [rank["check_tables"] for rank in checks_on_2]
    assert found[0]["data_parallel"]["copies"] == found[1]["data_parallel"]["copies"] != 0
    assert [f["data_parallel"]["device"] for f in found] == [whole, whole]
    assert sum(f["host_cached"]["host"] for f in found) > whole
    for f in found:
        assert f["host_cached"]["state"] == 0 and 0 < f["host_cached"]["device"] < f["host_cached"]["host"]


def test_the_checks_cover_every_layout():
    assert set(ranks.layouts(2)) == {*LAYOUTS, "fsdp_overlapped", "accumulate_overlapped"}


def test_what_collectives_take_from_compute_beside_them_is_a_share(checks_on_2):
    """The same on every rank; two ranks on as many cores leave gloo's threads something to take."""
    first, second = (rank["check_contention"] for rank in checks_on_2)
    shares = {name: share for name, share in first.items() if name != "host"}
    kinds = {f"{kind}/{beside}" for kind in ("all_gather", "all_to_all") for beside in ("product", "attention")}
    assert first == second and shares and set(shares) <= kinds  # what could not be seen is no figure
    assert all(0.0 <= share <= 0.95 for share in shares.values()) and any(share > 1e-6 for share in shares.values())
    assert set(first["host"]) == {"forward", "backward"} and all(0.0 < sum(parts) < 1.0 for parts in first["host"].values())
