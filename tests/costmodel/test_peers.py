"""Steps of ranks that wait for one another: who waits for whom, and what several steps behind one another take."""
import pytest

from costmodel import peers
from costmodel.calibration import Calibration
from costmodel.hosttime import HostTimes
from costmodel.imbalance import standard_maximum
from costmodel.lower import lower
from costmodel.regions import regions
from costmodel.samples import Environment
from costmodel.simulate import simulate
from costmodel.stepgraph import StepGraph, Task

QUIET = HostTimes({})


def step(*, compute: float, launch: float, reads: bool = False) -> StepGraph:
    """A block, a collective that the next block waits for, the end; with `reads` the host looks at the first block's result."""
    tasks = [Task(name="input wait", stream="compute", seconds=0.0, phase="input"),
             Task(name="block", stream="compute", seconds=compute, host_seconds=launch, phase="forward", deps=(0,))]
    if reads:
        tasks.append(Task(name="splits", stream="host", seconds=0.0, deps=(1,), phase="sparse", kind="host"))
    tasks += [Task(name="reduce", stream="tier:nvlink", seconds=0.5, deps=(1,), kind="collective", phase="exposed_communication"),
              Task(name="update", stream="compute", seconds=1.0, host_seconds=launch, deps=(len(tasks),), phase="optimizer"),
              Task(name="step overhead", stream="compute", seconds=0.0, deps=(len(tasks) + 1,), phase="other")]
    return StepGraph(tasks=tuple(tasks))


def test_equal_ranks_take_what_the_slower_of_device_and_host_takes():
    device = peers.meeting(step(compute=3.0, launch=0.1), step(compute=3.0, launch=0.1), ranks=2, host=QUIET)
    assert device.seconds == pytest.approx(4.5) and device.mean.alone == pytest.approx(0.5)
    host = peers.meeting(step(compute=0.1, launch=4.0), step(compute=0.1, launch=4.0), ranks=2, host=QUIET)
    assert host.seconds == pytest.approx(8.0) and host.launch == 8.0
    assert sum(host.mean.phases.values()) == pytest.approx(8.0)


def test_a_host_that_reads_loses_its_lead():
    found = peers.meeting(step(compute=3.0, launch=2.0, reads=True), step(compute=3.0, launch=2.0, reads=True), ranks=2, host=QUIET)
    # the second launch begins when the first block has ended, the next step's first launch at once behind it
    assert found.seconds == pytest.approx(simulate(step(compute=3.0, launch=2.0, reads=True)).step_seconds - 1.0, rel=0.2)
    assert found.seconds > peers.meeting(step(compute=3.0, launch=2.0), step(compute=3.0, launch=2.0), ranks=2, host=QUIET).seconds


def test_the_slowest_host_makes_the_step_and_the_other_rank_waits():
    spread = HostTimes({"host/spread": 0.2})
    slow = peers.meeting(step(compute=0.1, launch=4.0), step(compute=0.1, launch=4.0), ranks=2, host=spread)
    assert slow.seconds == pytest.approx(8.0 * (1 + 0.2 * standard_maximum(2)), rel=1e-6)
    quiet = peers.meeting(step(compute=0.1, launch=4.0), step(compute=0.1, launch=4.0), ranks=2, host=QUIET)
    assert slow.mean.alone > quiet.mean.alone + 0.5


def test_main_thread_work_beside_the_tasks_counts():
    host = HostTimes({"host/input": 0.5, "host/other": 0.7})
    found = peers.meeting(step(compute=0.1, launch=2.0), step(compute=0.1, launch=2.0), ranks=2, host=host)
    assert found.seconds == pytest.approx(4.0 + 1.2)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("compute", "launch"), [(3.0, 0.1), (0.1, 3.0), (1.0, 1.0)])
def test_no_step_is_shorter_than_a_stream(compute, launch, reads):
    graph = step(compute=compute, launch=launch, reads=reads)
    found = peers.meeting(graph, graph, ranks=4, host=QUIET)
    assert peers.least(graph, QUIET) <= found.seconds * (1 + 1e-12)


def test_the_rest_carries_what_the_slowest_does_not():
    assert peers.rest(1.2, 2) == pytest.approx(0.8) and peers.rest(1.2, 5) == pytest.approx(0.95) and peers.rest(1.0, 1) == 1.0
    slow, other = step(compute=3.0, launch=0.1), step(compute=1.0, launch=0.1)
    found = peers.meeting(slow, other, ranks=2, host=QUIET)
    assert found.seconds == pytest.approx(4.5)
    assert found.mean.alone == pytest.approx((0.5 + 2.5) / 2)  # the other one waits inside the collective


def test_the_optimizer_of_sharded_tensors_has_its_own_time_on_the_host(make_plan, h200):
    constants = {"host/optimizer": 1e-4, "host/tensor": 1e-6, "host/optimizer@sharded": 7e-4, "host/tensor@sharded": 3e-5}
    known = Calibration(environment=Environment(device_name=h200.name, device_kind="cuda"), device=h200, curves=(), constants=constants)
    for ranks, fixed, each in ((1, 1e-4, 1e-6), (2, 7e-4, 3e-5)):
        plan = make_plan(device=h200, ranks=ranks)
        (task,) = (t for t in lower(plan, known).graph.tasks if t.name == "adamw")
        assert task.host_seconds == pytest.approx(fixed + each * sum(r.count * r.block.num_tensors for r in regions(plan.model)))
