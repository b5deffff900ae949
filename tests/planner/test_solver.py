"""The solver's answers hold outside the solver, and its status is never better than the truth."""
import itertools
import random

import pulp
import pytest

from planner.solver import SolverError, _checked, solve, violations


def _knapsack(seed: int, items: int = 12) -> tuple[pulp.LpProblem, list[float], list[float], float]:
    rng = random.Random(seed)
    value, weight = [rng.uniform(1, 9) for _ in range(items)], [rng.uniform(1, 9) for _ in range(items)]
    problem = pulp.LpProblem("knapsack", pulp.LpMinimize)
    take = [problem.add_variable(f"take_{i}", cat="Binary") for i in range(items)]
    problem += -pulp.lpSum(v * t for v, t in zip(value, take)) + 100
    problem += pulp.lpSum(w * t for w, t in zip(weight, take)) <= 20, "capacity"
    return problem, value, weight, 20.0


@pytest.mark.parametrize("seed", range(8))
def test_equals_enumeration(seed):
    problem, value, weight, capacity = _knapsack(seed)
    best = max(sum(itertools.compress(value, bits)) for bits in itertools.product((0, 1), repeat=len(value))
               if sum(itertools.compress(weight, bits)) <= capacity)
    solution = solve(problem, gap=0.0)
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(100 - best, rel=1e-9)
    assert solution.bound <= solution.objective + 1e-9 and solution.gap <= 1e-9
    assert not violations(problem, solution.values)


def _balance(items: int, ranks: int) -> pulp.LpProblem:
    rng = random.Random(1)
    problem = pulp.LpProblem("balance", pulp.LpMinimize)
    worst = problem.add_variable("worst", 0)
    where = [[problem.add_variable(f"x_{i}_{r}", cat="Binary") for r in range(ranks)] for i in range(items)]
    weight = [rng.random() for _ in range(items)]
    problem += worst
    for row in where:
        problem += pulp.lpSum(row) == 1
    for r in range(ranks):
        problem += pulp.lpSum(w * row[r] for w, row in zip(weight, where)) <= worst
    return problem


def test_a_timeout_is_feasible_with_its_true_gap_never_optimal():
    solution = solve(_balance(400, 11), time_limit=0.5, gap=0.0)
    assert solution.status in ("feasible", "no_solution")
    if solution.status == "feasible":
        assert solution.gap > 0 and solution.bound < solution.objective
        assert solution.gap == pytest.approx((solution.objective - solution.bound) / solution.objective)


def test_infeasible_integers_never_come_back_as_fractions():
    # three tables of 50 on two ranks of 60, whole tables only: half of one on each rank is what a relaxation would say
    problem = pulp.LpProblem("tables", pulp.LpMinimize)
    place = [[problem.add_variable(f"t{t}_{r}", cat="Binary") for r in range(2)] for t in range(3)]
    problem += pulp.lpSum(place[0])
    for row in place:
        problem += pulp.lpSum(row) == 1
    for r in range(2):
        problem += pulp.lpSum(50 * row[r] for row in place) <= 60
    solution = solve(problem)
    assert solution.status == "infeasible" and not solution.has_values
    assert solution.values == {} and solution.objective is None
    relaxed = solve(problem, relax=True)
    assert relaxed.status == "infeasible"  # 150 does not fit into 120 either


def test_a_point_that_breaks_a_constraint_is_refused():
    problem, *_ = _knapsack(0)
    everything = {v.name: 1.0 for v in problem.variables()}
    assert any("capacity" in fault for fault in violations(problem, everything))
    half = {v.name: 0.5 for v in problem.variables()}
    assert sum("not an integer" in fault for fault in violations(problem, half)) == len(half)
    assert violations(problem, {**everything, "take_0": 2.0})[0].startswith("take_0 = 2 >")
    with pytest.raises(SolverError, match="capacity"):
        _checked(problem, everything, bound=None, asked=0.0, finished=True, seconds=0.0, relax=False)


def test_duals_of_the_relaxation_price_a_unit_more_of_a_constraint():
    problem, *_ = _knapsack(3)
    here = solve(problem, relax=True)
    problem.get_constraint_by_name("capacity").changeRHS(20.5)
    more = solve(problem, relax=True)
    assert here.duals["capacity"] * 0.5 == pytest.approx(more.objective - here.objective, rel=1e-6)


def test_two_runs_give_the_same_values():
    first, second = (solve(_balance(30, 4), gap=0.01).values for _ in range(2))
    assert first == second


def test_only_minimisation():
    with pytest.raises(ValueError, match="minimisation"):
        solve(pulp.LpProblem("up", pulp.LpMaximize))
