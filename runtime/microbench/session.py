"""A calibration of one GPU: what is timed when, within a budget of seconds."""
from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from costmodel.calibration import doubtful, fit
from costmodel.cluster import Device
from costmodel.plan import Layout, Plan, TablePlacement
from costmodel.samples import CONSTANT_PREFIX, Environment, Sample
from runtime.microbench import compiled, gpu, hosted, trained, warm
from runtime.microbench.environment import environment
from runtime.microbench.requests import Request, library_attention
from runtime.microbench.speed import Speeds

# Of the budget: what may be waited for compilers, what products and the like have at least, then attention, then blocks until short runs of the
# trainer for the host begin, and what is left behind those for runs of whole batches. Compilers of a bare machine take a hundred seconds of 16 cores.
COMPILE_SHARE, PLAIN_SHARE, ATTENTION_SHARE, HOST_SHARE, WHOLE_SHARE = 0.42, 0.16, 0.12, 0.15, 0.17
# Of the budget, within the last of these: runs of whole batches so small that the host makes their steps.
HOST_RUNS_SHARE = 0.06
# How many of those, under which policies four at a time, and how long before the end none begins [s].
WHOLE_RUNS, POLICIES, LAST = 12, ("full", "none"), 2.0
# What compiled blocks get of a budget of so many seconds or more: the compiler needs 4 to 14 s a kind (H200's host, 2026-12-01).
COMPILED_SHARE, COMPILED_ABOVE = 0.25, 360.0
# Seconds an attention op.
ATTENTION_SECONDS = 0.008
# Of the budget and in seconds, what torch's own attention gets at most, before blocks and runs use the budget up; behind the step that shows what the
# process takes, for libraries that a step has no use for stay in the device's memory.
LIBRARY_SHARE, LIBRARY_SECONDS = 0.03, 6.0
# Plans whose single ops are timed, spread points against those of a quick calibration, seconds an op, kinds that need nothing compiled.
OPS_PLANS, OP_POINTS, PLAIN_POINTS, PLAIN_SECONDS = 8, 0.5, 0.1, 0.012
PLAIN_KINDS = frozenset({"linear", "bmm", "layer_norm", "activation", "elementwise", "cast", "bce", "cross_entropy"})
# Ops that stand in blocks without attention and need a kernel compiled, and how many of them are timed behind attention.
POOLED_KINDS, POOLED_OPS = frozenset({"segment_mean"}), 30
KEPT_EVERY = 15.0
# Of the budget, for ops that took longer than their neighbours, timed while compilers' processes used the device too: in the calibration of
# 2026-12-01 04:28 one in ten was off its neighbours by 13 % (products forward) to 32 % (large ones backward). A time that is shorter by more than so
# much was disturbed.
AGAIN_SHARE, SHORTER = 0.09, 0.97


def alone(plan: Plan) -> Plan:
    """The plan's model and batch on one rank, which holds every table."""
    names = [name for table in plan.model.tables for name in table.names]
    return dataclasses.replace(plan, layout=Layout(), accumulation=1, fingerprints={}, predict_only=(),
                               tables=tuple(TablePlacement(table=name, sharding="table_wise", ranks=(0,)) for name in names))


def calibrate(plans: list[Plan], device: torch.device, *, budget: float, later: Sequence[Plan] = (), compiled_blocks: bool = True,
              report: gpu.Report = lambda _: None,
              keep: Callable[[Environment, list[Sample]], None] = lambda *_: None) -> tuple[Environment, list[Sample]]:
    """Samples of all that the plans' steps are made of, within about `budget` seconds; the host's constants are at its full speed, what it was on
    average is one of its own. `keep` is called with what there is every KEPT_EVERY seconds. later: plans whose kernels are compiled too, and nothing
    else of theirs is seen; compiled_blocks: whether blocks under the compiler are timed, where the budget has room.

    While kernels are compiled the ops that need none are timed, and attention as it is ready, but that of fp32 behind a first step of the trainer,
    which shows what the process takes without kernels that spill; then blocks and tables, which nothing else stands for; then short runs of the
    trainer for the host and the allocator; then more ops while there is time.
    """
    begin, on_gpu = time.perf_counter(), device.type == "cuda"
    end = begin + budget
    plans = [alone(plan) for plan in plans]
    own, speeds = _Kept(environment(device), keep), Speeds()
    if on_gpu:
        ahead = warm.Ahead([*plans, *hosted.designs(plans)], [alone(plan) for plan in later])
        own.add(gpu.attempted(gpu.constant_samples(device), "constants", report))
        # the plans' own shapes: products of other widths say little about theirs
        wanted = gpu.op_requests(plans, points=PLAIN_POINTS, kinds=PLAIN_KINDS)
        timed_ops: list[Request] = []  # while others may have been at work on the device
        attention = [(warm.kernels(request), request) for request in gpu.attention_ops(plans)]
        while wanted and time.perf_counter() < begin + (COMPILE_SHARE if ahead.running else PLAIN_SHARE) * budget:
            own.add(gpu.attempted(gpu.timed_op(wanted[0], device, PLAIN_SECONDS, host=False), str(wanted[0].op), report))
            timed_ops.append(wanted.pop(0))
            known = ahead.compiled
            ready = next((i for i, (kernels, request) in enumerate(attention) if kernels in known and request.op.dtype != "fp32"), None)
            if ready is not None:
                timed_ops.append(attention.pop(ready)[1])
                own.add(gpu.attempted(gpu.timed_op(timed_ops[-1], device, ATTENTION_SECONDS, host=False), str(timed_ops[-1].op), report))
        said = ahead.wait(begin + COMPILE_SHARE * budget - time.perf_counter())
        report(f"kernels compiled ahead: {time.perf_counter() - begin:.0f} s, {len(own.samples)} samples meanwhile, "
               f"{gpu.context_bytes() / 1e9:.2f} GB beside the allocator's; {said}")
    compiling = COMPILED_SHARE * budget if on_gpu and compiled_blocks and budget >= COMPILED_ABOVE else 0.0
    whole = end - WHOLE_SHARE * budget - compiling
    if on_gpu:
        # what was not compiled in time would be compiled now, one kernel after another: last
        known = ahead.compiled
        attention.sort(key=lambda one: (one[0] not in known, one[1].op.dtype == "fp32"))
        order = sorted(plans, key=lambda plan: not ahead.has(plan))
        first = next((plan for plan in order if gpu.layer_precision(plan) != "fp32"), order[0])
        for number, (_, request) in enumerate(attention):
            if first is not None and request.op.dtype == "fp32":
                own.add(gpu.attempted(trained.context_sample(first, device), "context", report))
                first = None
            if time.perf_counter() > begin + (COMPILE_SHARE + ATTENTION_SHARE) * budget:
                report(f"out of time for attention before op {number + 1}/{len(attention)} of those that were left")
                break
            own.add(gpu.attempted(gpu.timed_op(request, device, ATTENTION_SECONDS, host=False), str(request.op), report))
        if first is not None:
            own.add(gpu.attempted(trained.context_sample(first, device), "context", report))
        for request in gpu.op_requests(plans, points=PLAIN_POINTS, kinds=POOLED_KINDS)[:POOLED_OPS]:
            own.add(gpu.attempted(gpu.timed_op(request, device, ATTENTION_SECONDS, host=False), str(request.op), report))
        report(f"{len(own.samples)} samples with attention alone, {time.perf_counter() - begin:.0f} s")
        own.library(device, until=time.perf_counter() + min(LIBRARY_SECONDS, LIBRARY_SHARE * budget), report=report)
        asked = {_shape(request.op.kind, request.op.variant, request.op.dtype, dict(request.op.features)): request for request in timed_ops}
        own.again(asked, plans[0].cluster.device, device, until=time.perf_counter() + AGAIN_SHARE * budget, report=report)
    for found in gpu.device_samples(order if on_gpu else plans, device, until=whole - HOST_SHARE * budget, report=report):
        own.add([found])
    own.add(gpu.attempted(hosted.host_samples(plans, device, until=whole, speeds=speeds, report=report), "host", report))
    report(f"{len(own.samples)} samples with those of the host, {time.perf_counter() - begin:.0f} s")
    if on_gpu:
        datasheet = plans[0].cluster.device
        known = fit(dataclasses.replace(own.environment, device_name=datasheet.name), own.samples, device=datasheet)
        # of those whose blocks were timed, so that a run shows what steps add; under the policy that keeps little the allocator's slack weighs most
        timed = [trained.under(plan, POLICIES[i // 4 % 2]) for i, plan in enumerate(p for p in order if gpu.layer_precision(p) == "bf16")]
        until = time.perf_counter() + HOST_RUNS_SHARE * budget
        own.add(gpu.attempted(trained.host_samples(known, timed, device, speeds=speeds, until=until, report=report), "host in whole steps", report))
        until = end - compiling - LAST
        own.add(gpu.attempted(trained.whole_samples(known, timed[:WHOLE_RUNS], device, speeds=speeds, until=until, report=report), "whole", report))
    own.add(list(speeds.samples(report)))
    if compiling:
        own.add(gpu.attempted(compiled.compiled_samples(plans, device, until=end - LAST, report=report), "compiled", report))
    for request in gpu.op_requests(plans[:OPS_PLANS], points=OP_POINTS, but=PLAIN_KINDS if on_gpu else frozenset()):
        if time.perf_counter() > end:
            break
        own.add(gpu.attempted(gpu.timed_op(request, device, PLAIN_SECONDS), str(request.op), report))
    if on_gpu:
        held = gpu.context_bytes()
        report(f"the device holds {held / 1e9:.2f} GB beside the allocator's at the end")
        if not any(s.op == f"{CONSTANT_PREFIX}context_bytes" for s in own.samples):  # no step could be trained
            own.add([gpu.constant("context_bytes", held)])
    report(f"{len(own.samples)} samples, {time.perf_counter() - begin:.0f} s")
    return own.environment, own.samples


def _shape(kind: str, variant: str, dtype: str, features: Mapping[str, float]) -> Hashable:
    return kind, variant, dtype, tuple(sorted((name, float(value)) for name, value in features.items()))


class _Kept:
    """Samples as they come, handed to `keep` every so often."""

    def __init__(self, environment: Environment, keep: Callable[[Environment, list[Sample]], None]) -> None:
        self.environment, self.samples, self._keep, self._kept = environment, [], keep, time.perf_counter()

    def add(self, samples: list[Sample]) -> None:
        self.samples += samples
        if time.perf_counter() > self._kept + KEPT_EVERY:
            self._keep(self.environment, self.samples)
            self._kept = time.perf_counter()

    def library(self, device: torch.device, *, until: float, report: gpu.Report) -> None:
        """Times torch's own attention until the clock says `until`."""
        asked = library_attention()
        for number, request in enumerate(asked):
            if time.perf_counter() > until:
                report(f"out of time for torch's attention before op {number + 1}/{len(asked)}")
                return
            self.add(gpu.attempted(gpu.timed_op(request, device, ATTENTION_SECONDS, host=False), str(request.op), report))

    def again(self, asked: Mapping[Hashable, Request], datasheet: Device, device: torch.device, *, until: float, report: gpu.Report) -> None:
        """Times once more what took longer than its neighbours, of the ops `asked` for, until the clock says `until`; the shorter time counts."""
        shapes = [_shape(s.op, s.variant, s.dtype, s.features) for s in doubtful(self.samples, datasheet)]
        shapes = [shape for shape in dict.fromkeys(shapes) if shape in asked]
        places: dict[Hashable, list[int]] = defaultdict(list)
        for i, old in enumerate(self.samples):
            places[_shape(old.op, old.variant, old.dtype, old.features)].append(i)
        shorter = count = 0
        for shape in shapes:
            if time.perf_counter() > until:
                break
            count += 1
            for new in gpu.attempted(gpu.timed_op(asked[shape], device, PLAIN_SECONDS, host=False), str(asked[shape].op), report):
                for i in places[shape]:
                    if (old := self.samples[i]).phase == new.phase and new.seconds < old.seconds:
                        shorter += new.seconds < SHORTER * old.seconds
                        self.samples[i] = new
        report(f"{len(shapes)} ops took longer than their neighbours, {count} of them timed again, {shorter} phases of theirs in less time")
