"""Bound, solve, place, simulate, prune, certify: the best plan of a scenario and the proof of how good it is.

    1  every candidate gets a lower bound of its step time and of its memory (planner.candidates), what cannot fit is closed
    2  the open candidate with the lowest bound is taken: its integer program is solved (planner.ilp), which gives it a higher bound and a solution
    3  the solution is placed and priced by the cost model; where its own bound is above the program's, its critical chain enters the program
    4  else it is simulated: the best so far is the incumbent; the solution is cut off and the candidate goes back with its next bound
    5  the search ends when no open bound is below the incumbent by more than the gap, or at the time limit

Two gaps are reported: the integer program's own at the incumbent, and incumbent against the lowest open bound, which holds for every plan of
the space.
Nothing depends on time unless the limit is reached: equal inputs give byte-identical plans.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from typing import Any, Literal

import numpy as np

from costmodel.calibration import Calibration
from costmodel.codec import encode
from costmodel.estimate import estimate
from costmodel.plan import Plan
from planner.candidates import first_bounds
from planner.errors import NoFeasiblePlan
from planner.ilp import CandidateProgram, Choice
from planner.placement import PlacementError
from planner.pricing import Priced, Pricing
from planner.scenario import ResolvedScenario
from planner.space import Excluded, build_space

MILP_GAP = 1e-4
SAME = 1e-6
"""Bounds nearer than this are equal: the solver's tolerance."""
MAX_ROWS = 5000
MAX_CHAINS = 25
"""Chains that a candidate may add for one solution; its bound stays valid without the next one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How good the plan is proven to be.

    status: `optimal` (no open bound below the incumbent), `within_gap`, or `time_limit`. gap: (incumbent - lowest open bound) / incumbent,
    placement and
    simulation included; milp_gap: the integer program's at the incumbent; asked: the gap at which the search may stop.
    """

    status: Literal["optimal", "within_gap", "time_limit"]
    gap: float
    milp_gap: float
    asked: float
    incumbent: float
    lowest_open: float
    candidates: int
    too_large: int
    solved: int
    simulated: int
    closed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`plan` with its prediction, `runners_up` of other candidates, best first; `candidates` as rows; `ties`: how many runners-up lie inside
    the interval. `kept`: the file that it was kept in by an earlier search (planner.answers)."""

    plan: Plan
    runners_up: tuple[Plan, ...]
    candidates: tuple[dict[str, Any], ...]
    certificate: Certificate
    excluded: tuple[Excluded, ...]
    ties: int
    seconds: float
    kept: str | None = None


@dataclasses.dataclass(slots=True)
class _Open:
    """A candidate whose program was solved: its program, the solution that its bound belongs to, chains since the last simulation."""

    program: CandidateProgram
    choice: Choice
    chains: int = 0


class Search:
    """The state of one search; `run` drives it. Explanations and sizing use its parts."""

    def __init__(self, scenario: ResolvedScenario, calibration: Calibration | None, *, time_limit: float | None, gap: float) -> None:
        self.start = time.perf_counter()
        self.scenario, self.calibration, self.gap = scenario, calibration, gap
        self.deadline = None if time_limit is None else self.start + time_limit
        self.space = build_space(scenario, calibration)
        self.pricing = Pricing(scenario, self.space, calibration)
        first = first_bounds(self.pricing)
        self.first, self.fits = first.seconds, first.reserved <= scenario.cluster.usable_memory
        self.least_memory = first.reserved
        fitting = np.flatnonzero(self.fits)
        self.order = fitting[np.lexsort((fitting, self.first[fitting]))]
        self.next = 0
        self.heap: list[tuple[float, int]] = []
        self.open: dict[int, _Open] = {}
        self.best: dict[int, Priced] = {}
        self.status = np.full(len(self.first), "bounded", dtype=object)
        self.status[~self.fits] = "too large"
        self.bounds = self.first.copy()
        self.infeasible: dict[int, CandidateProgram] = {}
        self.solves = self.simulations = 0
        self.incumbent: Priced | None = None
        self.incumbent_at = -1
        self.timed_out = False
        self.abandoned = np.inf

    # --- the loop ---

    def run(self, *, give_up: bool = False) -> None:
        """Until no open bound is below the incumbent by more than the gap, or the time limit; the first plan is found in any case unless
        `give_up`."""
        while min(self.next_first(), self.heap[0][0] if self.heap else np.inf) < self.threshold():
            if self.late() and (give_up or self.incumbent is not None):
                self.timed_out = True
                return
            self.step()

    def threshold(self) -> float:
        """Bounds at or above this need not be looked at."""
        return np.inf if self.incumbent is None else self.incumbent.seconds * (1.0 - max(self.gap, SAME))

    def late(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def lowest_open(self) -> float:
        """The lowest bound of any candidate that is not closed; infinite when none is."""
        return min(self.next_first(), self.heap[0][0] if self.heap else np.inf, self.abandoned)

    def next_first(self) -> float:
        """The lowest bound of a candidate that was not solved yet."""
        return float(self.first[self.order[self.next]]) if self.next < len(self.order) else np.inf

    def step(self) -> None:
        """One candidate forward: solved for the first time, given a chain, or simulated."""
        if not self.heap or self.next_first() < self.heap[0][0]:
            self.open_next()
            if self.incumbent is None and self.heap:
                # any plan at all: what is far above it need not be looked at, and a time limit finds one
                self.advance(*heapq.heappop(self.heap), whatever=True)
            return
        self.advance(*heapq.heappop(self.heap))

    def open_next(self) -> None:
        """The program of the unsolved candidate with the lowest first bound."""
        i = int(self.order[self.next])
        self.next += 1
        self.resolve(i, self.pricing.program(i), floor=float(self.first[i]), chains=0)

    def advance(self, bound: float, i: int, *, whatever: bool = False) -> None:
        """Prices the solution of an open candidate: a chain for its program where its bound is above, else a simulation (with `whatever` in
        any case)."""
        here = self.open.pop(i)
        try:
            plan = self.pricing.plan(i, here.choice)
        except PlacementError:
            self.leave(i, here, bound)
            return
        priced = self.pricing.price(plan, here.choice)
        if here.chains < MAX_CHAINS:
            chain = self.pricing.chain(priced, here.program)
            if chain.at(here.choice.regions, tables=here.choice.tables) > here.choice.seconds * (1.0 + SAME):
                here.program.cuts.append(chain)
                if whatever:
                    self.record(i, priced)
                self.resolve(i, here.program, floor=bound, chains=here.chains + 1)
                return
        self.record(i, priced)
        self.leave(i, here, bound)

    def record(self, i: int, priced: Priced) -> None:
        """A simulated plan of candidate i, if it fits."""
        if not priced.memory.fits:
            return
        self.simulations += 1
        self.status[i] = "simulated"
        if i not in self.best or priced.seconds < self.best[i].seconds:
            self.best[i] = priced
        if self.incumbent is None or priced.seconds < self.incumbent.seconds:
            self.incumbent, self.incumbent_at = priced, i

    def leave(self, i: int, here: _Open, floor: float) -> None:
        """Cuts the solution off and puts the candidate back."""
        here.program.no_goods.append(here.choice)
        if floor >= self.threshold():
            self.bounds[i] = floor
            heapq.heappush(self.heap, (floor, i))
            self.open[i] = here
            return
        self.resolve(i, here.program, floor=floor, chains=0)

    def resolve(self, i: int, program: CandidateProgram, *, floor: float, chains: int) -> None:
        """Solves a candidate's program and files it under its bound; closes it when nothing is left."""
        limit = None if self.deadline is None else max(0.5, self.deadline - time.perf_counter())
        self.solves += 1
        try:
            choice = program.solve(time_limit=limit, gap=min(MILP_GAP, max(self.gap, SAME)))
        except TimeoutError:
            self.timed_out = True
            self.status[i] = "unsolved"
            self.abandoned = min(self.abandoned, floor)
            return
        if choice is None:
            self.status[i] = self.status[i] if i in self.best else "infeasible"
            self.bounds[i] = np.inf if i not in self.best else floor
            if not program.no_goods and len(self.infeasible) < 200:
                self.infeasible[i] = program
            return
        if self.status[i] == "bounded":
            self.status[i] = "solved"
        self.bounds[i] = max(floor, choice.bound)
        self.open[i] = _Open(program=program, choice=choice, chains=chains)
        heapq.heappush(self.heap, (self.bounds[i], i))

    def fill(self, top: int) -> None:
        """Simulates further candidates, lowest bound first, until `top` of them have a plan; the certificate does not depend on them."""
        tried = 0
        while len(self.best) < top and self.lowest_open() < np.inf and not self.late() and tried < 4 * top:
            waiting = [(b, i) for b, i in self.heap if i not in self.best]
            if waiting and min(waiting)[0] <= self.next_first():
                entry = min(waiting)
                self.heap.remove(entry)
                heapq.heapify(self.heap)
                self.price_runner_up(entry[1])
            elif self.next < len(self.order):
                self.open_next()
            else:
                return
            tried += 1

    def price_runner_up(self, i: int) -> None:
        here = self.open.pop(i)
        try:
            priced = self.pricing.price(self.pricing.plan(i, here.choice), here.choice)
        except PlacementError:
            return
        self.record(i, priced)

    # --- results ---

    def certificate(self, lowest: float) -> Certificate:
        """What is proven, given the lowest open bound when the search stopped."""
        assert self.incumbent is not None
        best = self.incumbent.seconds
        lowest = min(lowest, best)
        gap = max(0.0, 1.0 - lowest / best)
        status = "time_limit" if self.timed_out and gap > self.gap else "optimal" if gap <= SAME else "within_gap"
        closed = int(np.isin(self.status, ("infeasible", "too large")).sum())
        return Certificate(
            status=status,
            gap=gap,
            milp_gap=self.incumbent.choice.gap,
            asked=self.gap,
            incumbent=best,
            lowest_open=lowest,
            candidates=len(self.first),
            too_large=int((~self.fits).sum()),
            solved=self.solves,
            simulated=self.simulations,
            closed=closed,
        )

    def finished(self, priced: Priced, certificate: Certificate) -> Plan:
        """The plan with prediction, fingerprints and certificate (which holds no times, so that equal searches give equal files)."""
        plan = priced.plan
        prints = {**plan.expected_fingerprints(), **({"calibration": self.calibration.fingerprint} if self.calibration is not None else {})}
        return dataclasses.replace(plan, prediction=encode(estimate(plan, self.calibration)), fingerprints=prints, search=encode(certificate))

    def rows(self) -> tuple[dict[str, Any], ...]:
        """The candidates with the lowest bounds and all that were solved, as rows of a table."""
        shown = np.argsort(np.where(self.fits, self.bounds, np.inf), kind="stable")[:MAX_ROWS]
        solved = np.flatnonzero(np.isin(self.status, ("solved", "simulated", "infeasible")))
        rows = []
        for i in [*shown, *np.setdiff1d(solved, shown)]:
            i, layout = int(i), self.space.candidates.layout(int(i))
            best = self.best.get(i)
            rows.append(
                {
                    "candidate": i,
                    **encode(layout),
                    **self.space.candidates.options(i),
                    "status": str(self.status[i]),
                    "bound_s": float(self.bounds[i]) if np.isfinite(self.bounds[i]) else None,
                    "least_memory_bytes": float(self.least_memory[i]),
                    "simulated_s": best.seconds if best else None,
                    "reserved_bytes": best.memory.reserved.value if best else None,
                }
            )
        return tuple(rows)


def search(
    scenario: ResolvedScenario,
    *,
    calibration: Calibration | None = None,
    time_limit: float | None = None,
    gap: float | None = None,
    top: int | None = None,
) -> SearchResult:
    """The best plan of a scenario. `time_limit` [s], `gap` and `top` default to the scenario's.

    Raises NoFeasiblePlan with the least-bad candidate and what would help, UsageError when pins leave nothing.
    """
    options = scenario.search
    top = options.top if top is None else top
    state = Search(
        scenario, calibration, time_limit=options.time_limit if time_limit is None else time_limit, gap=options.gap if gap is None else gap
    )
    state.run()
    if state.incumbent is None:
        from planner.infeasible import report

        raise NoFeasiblePlan(report(state))
    lowest = state.lowest_open()
    state.fill(top)
    certificate = state.certificate(lowest)
    ranked = sorted(state.best.items(), key=lambda item: (item[1].seconds, item[0]))
    ranked = [(state.incumbent_at, state.incumbent)] + [r for r in ranked if r[0] != state.incumbent_at]
    plans = tuple(state.finished(priced, certificate) for _, priced in ranked[:top])
    step = plans[0].prediction["step_time"]
    ties = sum(p.prediction["step_time"]["value"] <= step["high"] for p in plans[1:])
    return SearchResult(
        plan=plans[0],
        runners_up=plans[1:],
        candidates=state.rows(),
        certificate=certificate,
        excluded=state.space.excluded + tuple(dict.fromkeys(state.pricing.table_log)),
        ties=ties,
        seconds=time.perf_counter() - state.start,
    )
