"""The accounting identity: sums to the step, blames what ended last, names what was planted."""
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import build_plan

from costmodel.accounting import Accounting, Spans, account, padding_shares, simulate_ranks, simulated, task_shares
from costmodel.estimate import estimate
from costmodel.stepgraph import Task


def of(*intervals, end=10.0):
    return account(Spans.of(intervals), 0.0, end, source="test").seconds


def test_device_work_is_first_come_first_served():
    assert of(("compute", 0, 4), ("memory_bound", 2, 6), end=6) == pytest.approx({"compute": 4, "memory_bound": 2})


def test_a_gap_belongs_to_what_ended_last():
    found = of(("compute", 0, 2), ("compute", 5, 10), ("communication:rdma", 1, 5), ("communication:spine", 0, 9), ("host", 0, 5))
    assert found == pytest.approx({"compute": 7, "communication:rdma": 3})


def test_what_is_left_of_a_gap_is_the_hosts_where_it_was_busy_and_else_nobodys():
    found = of(("compute", 0, 2), ("communication:nv", 2, 3), ("host", 3, 6), ("compute", 8, 10))
    assert found == pytest.approx({"compute": 4, "communication:nv": 1, "host": 3, "unattributed": 2})


def test_waits_follow_each_other_backwards():
    found = of(("straggler_wait", 2, 4), ("communication:nv", 4, 5), ("compute", 0, 2), ("compute", 5, 10))
    assert found == pytest.approx({"straggler_wait": 2, "communication:nv": 1, "compute": 7})


def test_nothing_at_all_is_unattributed():
    found = account(Spans.of([]), 0.0, 3.0, source="test")
    assert found.seconds == {"unattributed": 3.0} and found.unattributed == 1.0


names = st.sampled_from(["compute", "memory_bound", "communication:a", "communication:b", "input", "host", "straggler_wait"])
spans = st.lists(st.tuples(names, st.floats(0, 9), st.floats(0, 5)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(spans)
def test_every_instant_belongs_to_exactly_one_category(drawn):
    found = account(Spans.of([(n, s, s + d) for n, s, d in drawn]), 1.0, 9.0, source="test")
    assert sum(found.seconds.values()) == pytest.approx(8.0)
    assert min(found.seconds.values(), default=0.0) >= -1e-9
    covered = np.zeros(8000, dtype=bool)
    grid = 1.0 + (np.arange(8000) + 0.5) * 1e-3
    for n, s, d in drawn:
        if n in ("compute", "memory_bound"):
            covered |= (grid >= s) & (grid < s + d)
    device = found.seconds.get("compute", 0.0) + found.seconds.get("memory_bound", 0.0)
    assert device == pytest.approx(covered.sum() * 1e-3, abs=0.05)


def made(**seconds):
    seconds = {name.replace("__", ":"): value for name, value in seconds.items()}
    return Accounting(step=sum(seconds.values()), seconds=seconds, busy={}, source="test")


@pytest.mark.parametrize(("seconds", "binding"), [
    ({"compute": 8, "memory_bound": 2}, "compute"), ({"compute": 3, "memory_bound": 7}, "hbm_bandwidth"),
    ({"compute": 7, "communication__rdma": 3}, "communication:rdma"), ({"compute": 7, "recompute": 2, "memory_bound": 1}, "hbm_capacity"),
    ({"compute": 8, "straggler_wait": 2}, "load_balance"), ({"compute": 8, "padding": 2}, "load_balance"),
    ({"compute": 8, "synchronisation": 2}, "synchronisation"), ({"compute": 6, "input": 4}, "input"), ({"compute": 6, "host": 4}, "host"),
    ({"compute": 95, "communication__rdma": 5}, "compute"),
])
def test_the_binding_constraint(seconds, binding):
    assert made(**seconds).binding == binding


def test_only_exposed_time_can_be_won():
    found = Accounting(step=10, seconds={"compute": 9, "communication:rdma": 1}, busy={"communication:rdma": 8}, source="test")
    assert found.relief()["communication:rdma"] == 1
    found = Accounting(step=10, seconds={"compute": 6, "communication:rdma": 4}, busy={"communication:rdma": 4}, source="test")
    assert found.relief()["communication:rdma"] == 2


def test_a_task_of_several_categories():
    task = Task(name="history.0", stream="compute", seconds=4.0, phase="forward", compute_bound=3.0)
    assert task_shares(task, 5.0, 0.25) == pytest.approx({"contention": 1.0, "padding": 1.0, "compute": 2.25, "memory_bound": 0.75})
    again = dataclasses.replace(task, name="recompute history.0")
    assert task_shares(again, 4.0, 0.0) == pytest.approx({"recompute": 4.0})


@pytest.fixture(scope="module")
def plan():
    return build_plan()


def test_a_simulated_step_is_the_estimates(plan):
    found = simulated(plan, None)
    assert found.step == pytest.approx(estimate(plan, None).step_time.value)
    assert found.unattributed < 0.01


def test_padding_is_what_the_same_step_has_more(plan):
    padded = dataclasses.replace(plan, batching="padded")
    ranks = simulate_ranks(padded, None)
    shares = padding_shares(padded, ranks.average.graph, None)
    true = sum(t.seconds * (1 - s) for t, s in zip(ranks.average.graph.tasks, shares))
    jagged = sum(t.seconds for t in simulate_ranks(dataclasses.replace(plan, batching="jagged"), None).average.graph.tasks)
    assert true == pytest.approx(jagged, rel=1e-6)
