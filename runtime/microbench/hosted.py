"""What the main thread spends on each part of a step (`costmodel.hosttime`), from short runs of the trainer itself.

Few runs have it all: one model with every kind of layer of the plans, some of each under every checkpoint policy, on batches so small that nothing
waits for the device. Marks on the tensors between blocks cut each step's main-thread time into blocks: forward from the output of one block to that
of the next, backward from the gradient of one block's output to that of the one before. So everything counts that the interpreter does in a step, no
launch is timed out of its place. All figures are those of a host at full speed (`runtime.microbench.speed`). Such runs differ in precision, in
micro-batches, in parameter tensors, and in whether what computes on samples alone is a CUDA graph. Their histories are all of one length: what a
library does anew where they are not is timed by itself, for blocks of one step share it (`new_products`; of a run's blocks all but the first show
nothing of it).
"""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from costmodel.hosttime import PASSES, layer_name
from costmodel.model import LayerGroup
from costmodel.ops import BACKWARD, FORWARD
from costmodel.plan import Plan, RegionOption, RegionPlan
from costmodel.regions import over_samples, regions
from costmodel.samples import Sample
from costmodel.workload import Lengths
from runtime.data import open_source
from runtime.microbench.gpu import POLICIES, Report, constant, layer_precision
from runtime.microbench.speed import Probed, Speeds, slowness, warm_piece
from runtime.microbench.trained import empty
from runtime.trainer import WARMUP_STEPS, Trainer

# Steps that are timed; histories, events of a history and rows of a table; layers of a kind and policy.
STEPS, SAMPLES, LENGTH, ROWS, EACH = 16, 4, 264, 1000, 2
OVERTIME = 12.0
# Of the runs' rests that is taken: in some the report waits for the device.
REST_QUANTILE = 0.25
# Width and most rows of a layer on ever other numbers of rows, and of how many.
PRODUCT_WIDTH, PRODUCT_ROWS, PRODUCT_PAIRS = 1024, 8192, 24
# A feed-forward part over the model's width, where layers have one.
FACTOR = 2
# (what, moment): `start:<phase>`, `end:<phase>`, or `<pass>:<number of a block in forward order>`.
Mark = tuple[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A block of a run: its name (`costmodel.hosttime.layer_name`), parameter tensors, whether it is captured."""

    name: str
    tensors: int
    captured: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A run: its blocks in forward order, median main-thread seconds of each by (direction, micro-batch), of what is beside blocks likewise, and by
    phase of a step, all at the host's full speed; micro-batches, table groups, parameter tensors; slow: how much slower than that it was."""

    parts: tuple[Part, ...]
    blocks: Mapping[tuple[str, int], Sequence[float]]
    beside: Mapping[tuple[str, int], float]
    phases: Mapping[str, float]
    micro: int
    groups: int
    tensors: int
    slow: float = 1.0


class Marks(Probed):
    """A timer that keeps the moments of a step at which blocks begin and end on the main thread, one list a step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.steps: list[list[Mark]] = []

    def start_step(self) -> None:
        super().start_step()
        self.steps.append([])

    def enter(self, name: str) -> None:
        super().enter(name)
        self.mark(f"start:{name}")

    def leave(self, name: str) -> None:
        self.mark(f"end:{name}")
        super().leave(name)

    def mark(self, what: str) -> None:
        if self.steps:
            self.steps[-1].append((what, time.perf_counter()))

    def watch(self, blocks: Sequence[nn.Module]) -> None:
        """Marks the end of each block's forward and the beginning of its backward."""
        for number, block in enumerate(blocks):
            block.register_forward_hook(self._hook(f"{FORWARD}:{number}", f"{BACKWARD}:{number}"))

    def _hook(self, forward: str, backward: str):
        def arrived(_gradient: torch.Tensor) -> None:
            self.mark(backward)

        def ended(_module: nn.Module, _inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if first.requires_grad:
                first.register_hook(arrived)
            self.mark(forward)

        return ended


def host_samples(plans: Sequence[Plan], device: torch.device, *, until: float, speeds: Speeds, report: Report = lambda _: None) -> Iterator[Sample]:
    """Constants `host` from runs of the designs, in turns until the clock says `until`; each once if that takes no more than OVERTIME longer. The
    speeds of the host are added to `speeds`."""
    runs: list[Spent] = []
    wanted = designs(plans)
    for number, plan in enumerate([*wanted, *wanted]):
        if runs and time.perf_counter() > until + (OVERTIME if number < len(wanted) else 0.0):
            report(f"out of time for the host before run {number + 1}")
            break
        try:
            runs.append(spent(plan, device, speeds))
        except Exception as error:  # one design costs no other
            report(f"host: {plan.model.name}: {(str(error).splitlines() or [''])[0][:200]}")
    for name, value in {**solved(runs, report), **(new_products(device, speeds.fastest, report) if runs else {})}.items():
        yield constant("host", value, name)


def spent(plan: Plan, device: torch.device, speeds: Speeds) -> Spent:
    """Runs a plan for a few steps."""
    empty(device)
    timer = Marks(device)
    trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=device, timer=timer)
    parts = blocks(plan)
    found = trainer.model.dense.regions()
    timer.watch([parent.get_submodule(name) for region in regions(plan.model) for parent, name in found[region.name]])
    trainer.train(WARMUP_STEPS + STEPS)
    timer.finished(wait=True)
    slow = speeds.of(timer, timer.host[WARMUP_STEPS:], WARMUP_STEPS)
    host = [{name: seconds / by for name, seconds in step.items()} for step, by in zip(timer.host[WARMUP_STEPS:], slow)]
    cut = [({key: seconds / by for key, seconds in own.items()}, {key: seconds / by for key, seconds in rest.items()})
           for (own, rest), by in zip((steps_by_block(marks, len(parts)) for marks in timer.steps[WARMUP_STEPS:]), slow)]
    return Spent(
        parts=parts, micro=plan.accumulation, groups=len(plan.model.tables), tensors=sum(1 for _ in trainer.model.dense.parameters()),
        phases={name: statistics.median(step[name] for step in host) for name in host[0]},
        blocks={key: np.median([own[key] for own, _ in cut], axis=0).tolist() for key in cut[0][0]},
        beside={key: statistics.median(rest[key] for _, rest in cut) for key in cut[0][1]}, slow=float(slow.mean()))


def steps_by_block(marks: Sequence[Mark], count: int) -> tuple[dict[tuple[str, int], np.ndarray], dict[tuple[str, int], float]]:
    """Of one step: seconds of every block by (direction, micro-batch), and what is left of forward and backward beside them. A block that is not
    marked (a captured one runs with the others of its graph) has none."""
    own: dict[tuple[str, int], np.ndarray] = {}
    beside: dict[tuple[str, int], float] = {}
    micro = {phase: -1 for phase in PASSES}
    key, last, open_block = None, 0.0, -1
    for what, now in marks:
        name, _, phase = what.partition(":")
        if name == "start" and phase in PASSES:
            micro[phase] += 1
            key, last, open_block = (phase, micro[phase]), now, -1
            own[key], beside[key] = np.zeros(count), 0.0
        elif name == "end" and key is not None and phase == key[0]:
            if phase == BACKWARD and open_block >= 0:
                own[key][open_block] += now - last
            else:
                beside[key] += now - last
            key = None
        elif key is not None and name == key[0]:
            number = int(phase)
            if name == FORWARD:  # since the last block's end: this one
                own[key][number] += now - last
            elif open_block >= 0:  # since its output's gradient came: that one
                own[key][open_block] += now - last
            else:
                beside[key] += now - last
            last, open_block = now, number
    return own, beside


def blocks(plan: Plan) -> tuple[Part, ...]:
    """The plan's blocks in forward order."""
    options = {r.region: r.options for r in plan.regions}
    captured = over_samples(plan.model) if plan.execution == "cuda_graph" else frozenset()
    found = []
    for region in regions(plan.model):
        for option in options[region.name]:
            part = Part(name=layer_name(region.block, option.precision, option.checkpoint), tensors=region.block.num_tensors,
                        captured=region.name in captured)
            found += [part] * option.count
    return tuple(found)


def solved(runs: Sequence[Spent], report: Report = lambda _: None) -> dict[str, float]:
    """Seconds of every part: medians over blocks and runs; of what only the difference of two runs shows, least squares."""
    if not runs:
        return {}
    figures: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        graph = any(p.captured for p in run.parts)
        for phase in PASSES:
            for part, seconds in zip(run.parts, run.blocks[phase, 0]):
                if not part.captured:
                    figures[f"{phase}:{part.name}"].append(seconds)
            captured = sum(s for part, s in zip(run.parts, run.blocks[phase, 0]) if part.captured)
            figures[f"{phase}:{'graph' if graph else 'loss'}"].append(run.beside[phase, 0] + captured)
        for later in range(1, run.micro):
            added = [(b - a) / part.tensors for part, a, b in zip(run.parts, run.blocks[BACKWARD, 0], run.blocks[BACKWARD, later]) if part.tensors]
            figures["accumulate"].append(max(0.0, statistics.median(added)))
    found = {name: statistics.median(values) for name, values in figures.items()}
    found |= _least([({"lookup": r.micro * r.groups, "update": r.groups}, r.phases["sparse"]) for r in runs], "sparse", report)
    found |= _least([({"optimizer": 1, "tensor": r.tensors}, r.phases["optimizer"]) for r in runs], "optimizer", report)
    found |= _least([({"input": r.micro}, r.phases["input"]) for r in runs], "input", report)
    found["other"] = float(np.quantile([r.phases["other"] for r in runs], REST_QUANTILE))
    slow = statistics.fmean(run.slow for run in runs)
    report(f"host: {slow:.2f} times slower than at full speed, by run " + " ".join(f"{run.slow:.2f}" for run in runs))
    report("host at full speed: " + ", ".join(f"{name} {1e6 * value:.0f}" for name, value in sorted(found.items())) + " us")
    return found


def new_products(device: torch.device, fastest: float, report: Report = lambda _: None) -> dict[str, float]:
    """`forward:product` and `backward:product`: what a linear layer's product takes longer on a number of rows that the library has not met than on
    the one that it just had, the median of pairs, at full speed, at which a piece of Python takes `fastest` seconds."""
    layer = nn.Linear(PRODUCT_WIDTH, PRODUCT_WIDTH, device=device, dtype=torch.bfloat16)
    x = torch.ones(PRODUCT_ROWS, PRODUCT_WIDTH, device=device, dtype=torch.bfloat16)

    def both(rows: int) -> tuple[float, float]:
        part = x[:rows].clone().requires_grad_()
        if device.type == "cuda":
            torch.cuda.synchronize()
        before, begin = warm_piece(), time.perf_counter()
        out = layer(part)
        middle = time.perf_counter()
        with torch.autograd.set_multithreading_enabled(False):
            out.backward(x[:rows])
        end = time.perf_counter()
        slow = float(slowness([(before, warm_piece())], fastest)[0])
        return (middle - begin) / slow, (end - middle) / slow

    both(PRODUCT_ROWS)  # which sets the library up
    # fewer rows, for which the allocator has room already
    pairs = [(both(PRODUCT_ROWS), both(PRODUCT_ROWS - 1 - i)) for i in range(PRODUCT_PAIRS)]
    # a backward has two products
    found = {f"{phase}:product": max(0.0, statistics.median(new[i] - known[i] for known, new in pairs)) / (1 + i) for i, phase in enumerate(PASSES)}
    report("host: " + ", ".join(f"{name} {1e6 * value:.0f}" for name, value in found.items()) + " us more on new rows")
    return found


def _least(rows: Sequence[tuple[Mapping[str, int], float]], what: str, report: Report) -> dict[str, float]:
    """Non-negative values of the names with sum(count x value) = seconds, by relative least squares, then again without the runs that something else
    disturbed. Of several solutions the one that spreads evenly."""
    from scipy.optimize import nnls

    names = sorted({name for counts, _ in rows for name in counts})
    matrix = np.array([[counts.get(name, 0) for name in names] for counts, _ in rows], dtype=np.float64)
    seconds = np.array([max(value, 1e-9) for _, value in rows])
    relative, typical = matrix / seconds[:, None], float(np.median(seconds))
    weights = np.ones(len(rows))
    for _ in range(3):
        system = np.vstack([relative * weights[:, None], np.eye(len(names)) * 1e-3 / typical])
        values = nnls(system, np.concatenate([weights, np.zeros(len(names))]))[0]
        off = np.abs(relative @ values - 1.0)
        weights = 1.0 / np.maximum(1.0, off / max(2.0 * float(np.median(off)), 0.01))
    report(f"host: {what}: off by {float(np.median(off)):.1%} in the median, {float(off.max()):.1%} at most")
    return dict(zip(names, map(float, values)))


# --- what is run ---


def designs(plans: Sequence[Plan]) -> list[Plan]:
    """Small plans of the layers of `plans`: all kinds of 16 bits together under every policy, on one micro-batch, on two, with CUDA graphs; the kinds
    of every other precision together; few layers alone, whose optimizer has few tensors."""
    by_precision: dict[str, list[Plan]] = defaultdict(list)
    for plan in plans:
        if any(s.layers for s in plan.model.sequences):
            by_precision[layer_precision(plan)].append(plan)
    found, last = [], []
    for precision, own in by_precision.items():
        base = max(own, key=lambda p: len({layer.kind for layer in p.model.interaction_layers}))
        if precision == "bf16":
            found += [mixed(base, own), mixed(base, own, micro=2), few(own[0])]
            last.append(mixed(base, own, execution="cuda_graph"))
        else:
            found.append(mixed(base, own, policies=("none",)))
    return found + last


def mixed(base: Plan, plans: Sequence[Plan], *, policies: Sequence[str] = POLICIES, micro: int = 1, execution: str = "eager") -> Plan:
    """`base` with EACH layers of every kind of layer in `plans`, with and without a feed-forward part, under each of `policies`, in the width of
    `base`."""
    kinds: dict[tuple[str, bool], LayerGroup] = {}
    for plan in plans:
        for group in (g for s in plan.model.sequences for g in s.layers):
            kinds.setdefault((group.kind, bool(group.mlp_dim)), group)
    dim, policies = base.model.dim, policies if execution == "eager" else ("none",)
    groups = []
    for group in kinds.values():
        heads = max(1, dim // group.head_dim) if group.head_dim else 0
        groups.append(dataclasses.replace(group, count=EACH * len(policies), heads=heads, mlp_dim=FACTOR * dim if group.mlp_dim else 0))
    first = base.model.sequences[0].name
    model = dataclasses.replace(base.model, sequences=tuple(
        dataclasses.replace(s, layers=tuple(groups) if s.name == first else s.layers) for s in base.model.sequences))
    return small(dataclasses.replace(base, model=model), policies=policies, micro=micro, execution=execution)


def few(plan: Plan) -> Plan:
    """One layer a group, and no layers over features but those that the plan has."""
    model = dataclasses.replace(plan.model, sequences=tuple(
        dataclasses.replace(s, layers=tuple(dataclasses.replace(g, count=1) for g in s.layers)) for s in plan.model.sequences))
    return small(dataclasses.replace(plan, model=model), policies=("none",))


def small(plan: Plan, *, policies: Sequence[str], micro: int = 1, execution: str = "eager") -> Plan:
    """The plan on `micro` batches of a few short histories of one length, and tables of few rows, the layers of every group under `policies` in equal
    parts."""
    precision = layer_precision(plan)
    model = dataclasses.replace(plan.model, tables=tuple(dataclasses.replace(t, rows=min(t.rows, ROWS)) for t in plan.model.tables))
    lengths = {s.name: Lengths(kind="fixed", maximum=min(LENGTH, plan.workload.lengths[s.name].maximum)) for s in plan.model.sequences}
    workload = dataclasses.replace(plan.workload, lengths=lengths, global_batch=micro * SAMPLES, local_batch=None)
    known = {r.region: r.options[0].precision for r in plan.regions}
    options = []
    for region in regions(model):
        own = policies if region.layer else ("none",)
        given = known.get(region.name, precision)
        options.append(RegionPlan(region=region.name, options=tuple(
            RegionOption(count=region.count // len(own), precision=given, checkpoint=policy) for policy in own)))  # type: ignore[arg-type]
    return dataclasses.replace(plan, model=model, workload=workload, local_batch=SAMPLES, accumulation=micro, regions=tuple(options), fingerprints={},
                               execution=execution)  # type: ignore[arg-type]

