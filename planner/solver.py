"""Solving a PuLP model with HiGHS, and believing nothing that the solver did not prove.

- PuLP reports `Optimal` whenever HiGHS holds any feasible point, also at a time limit. Status, gap and dual bound are therefore
read from HiGHS itself:
  a limit reached is `feasible` with its gap, never `optimal`.
- An infeasible integer program can leave fractional column values behind. Values leave this module only after every variable's
bounds and integrality
  and every constraint of the model were re-evaluated here, in Python, on the rounded values; else `SolverError`.
- The objective's constant is not passed to HiGHS by PuLP: it is added to the dual bound here.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Literal

import highspy
import pulp

Status = Literal["optimal", "feasible", "infeasible", "no_solution"]

# Absolute plus relative slack of the re-check; HiGHS itself allows 1e-7 on rows scaled by it.
TOLERANCE = 1e-6

_INFEASIBLE = {highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible}


class SolverError(RuntimeError):
    """HiGHS gave an answer that does not hold outside it; a fault of the model or the solver, never of the user's input."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What was proven.

    status: `optimal` (gap within what was asked), `feasible` (a limit was reached, `gap` is true), `infeasible` (proven),
    `no_solution` (a limit was reached before any point was found). `objective`, `bound` (proven lower bound) and `gap` =
    (objective - bound) / |objective| are None where there is none. `values` maps variable names to rounded, re-checked values;
    empty without a solution. `duals` maps constraint names to the multipliers of an LP.
    """

    status: Status
    objective: float | None = None
    bound: float | None = None
    gap: float | None = None
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    duals: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def has_values(self) -> bool:
        return self.status in ("optimal", "feasible")


def solve(problem: pulp.LpProblem, *, time_limit: float | None = None, gap: float = 1e-4, relax: bool = False) -> Solution:
    """Minimises `problem` (sense must be minimise). One thread and a fixed seed, so that equal models give equal solutions.

    `time_limit` [s]; `gap` relative; `relax` drops integrality and returns the LP's duals. Raises SolverError when a returned
    point fails the re-check.
    """
    if problem.sense != pulp.LpMinimize:
        raise ValueError("only minimisation is supported")
    start = time.perf_counter()
    engine = pulp.HiGHS(mip=not relax, msg=False, timeLimit=time_limit, gapRel=gap, threads=1, random_seed=0)
    engine.actualSolve(problem)
    seconds = time.perf_counter() - start
    highs = problem.solverModel
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in _INFEASIBLE:
        return Solution(status="infeasible", seconds=seconds)
    if status == highspy.HighsModelStatus.kModelEmpty:
        values = _rounded(problem, [v.lowBound or 0.0 for v in problem.variables()], relax)
        return _checked(problem, values, bound=None, asked=gap, finished=True, seconds=seconds, relax=relax)
    finished = status == highspy.HighsModelStatus.kOptimal
    if not finished and info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Solution(status="no_solution", bound=_bound(problem, info, relax, None), seconds=seconds)
    columns = list(highs.getSolution().col_value)
    values = _rounded(problem, columns, relax)
    bound = _bound(problem, info, relax, finished)
    solution = _checked(problem, values, bound=bound, asked=gap, finished=finished, seconds=seconds, relax=relax)
    if relax and finished:
        duals = highs.getSolution().row_dual
        solution = dataclasses.replace(solution, duals={name: duals[i] for i, name in enumerate(c.name for c in problem.constraints())})
    return solution


def _bound(problem: pulp.LpProblem, info: highspy.HighsInfo, relax: bool, finished: bool | None) -> float | None:
    constant = problem.objective.constant
    if relax:
        return info.objective_function_value + constant if finished else None
    return info.mip_dual_bound + constant if math.isfinite(info.mip_dual_bound) else None


def _rounded(problem: pulp.LpProblem, columns: list[float], relax: bool) -> dict[str, float]:
    """Integer columns to the nearest integer; one that is further than 1e-5 from an integer is a fractional answer and
    refused."""
    values = {}
    for variable, value in zip(problem.variables(), columns):
        if variable.cat == pulp.LpInteger and not relax:
            nearest = round(value)
            if abs(value - nearest) > 1e-5:
                raise SolverError(f"{problem.name}: integer variable {variable.name} came back as {value!r}")
            value = float(nearest)
        values[variable.name] = value
    return values


def _checked(
    problem: pulp.LpProblem,
    values: dict[str, float],
    *,
    bound: float | None,
    asked: float,
    finished: bool,
    seconds: float,
    relax: bool,
) -> Solution:
    faults = violations(problem, values, relax=relax)
    if faults:
        raise SolverError(f"{problem.name}: the solver's point violates {len(faults)} constraint(s): {'; '.join(faults[:3])}")
    objective = problem.objective.constant + sum(c * values[v.name] for v, c in problem.objective.items())
    bound = objective if bound is None and finished else bound
    gap = None if bound is None else max(0.0, objective - bound) / max(abs(objective), 1e-12)
    # HiGHS stops on its own scaled gap; a little slack keeps `optimal` from flickering at the asked value.
    proven = finished and gap is not None and gap <= asked * (1 + 1e-3) + 1e-9
    return Solution(status="optimal" if proven else "feasible", objective=objective, bound=bound, gap=gap, values=values, seconds=seconds)


def violations(problem: pulp.LpProblem, values: dict[str, float], *, relax: bool = False) -> list[str]:
    """Every bound, integrality and constraint of `problem` that `values` breaks, in words; empty when all hold.

    The tolerance is `TOLERANCE` times the largest term of the constraint (at least 1).
    """
    faults = []
    for variable in problem.variables():
        value = values[variable.name]
        slack = TOLERANCE * max(1.0, abs(value))
        if variable.lowBound is not None and value < variable.lowBound - slack:
            faults.append(f"{variable.name} = {value:.9g} < {variable.lowBound:.9g}")
        if variable.upBound is not None and value > variable.upBound + slack:
            faults.append(f"{variable.name} = {value:.9g} > {variable.upBound:.9g}")
        if variable.cat == pulp.LpInteger and not relax and value != round(value):
            faults.append(f"{variable.name} = {value:.9g} is not an integer")
    for constraint in problem.constraints():
        terms = [c * values[v.name] for v, c in constraint.items()]
        total, right = math.fsum(terms), -constraint.constant
        slack = TOLERANCE * max(1.0, abs(right), max(map(abs, terms), default=0.0))
        over = {pulp.LpConstraintLE: total - right, pulp.LpConstraintGE: right - total, pulp.LpConstraintEQ: abs(total - right)}[constraint.sense]
        if over > slack:
            faults.append(f"{constraint.name} by {over:.6g} (left {total:.9g}, right {right:.9g})")
    return faults
