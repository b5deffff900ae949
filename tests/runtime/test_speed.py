"""How fast the host was: pieces of Python between steps are in no phase, and what is expected is what the same work takes."""
import itertools

import pytest
import torch

from costmodel.hosttime import SLOW_SHARE
from runtime.microbench import speed
from runtime.microbench.speed import Probed, Speeds, expected, slowness
from runtime.phases import PhaseTimer


class Event:
    """Recorded at the time of a clock that all events share, a millisecond later than it was."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self, stream: str) -> None:
        Event.clock += 1.0
        self.at = Event.clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def long_piece() -> float:
    """A piece in which the device stands idle for a second."""
    Event.clock += 1000.0
    return next(long_piece.seconds)


def steps(timer: PhaseTimer) -> list[dict[str, float]]:
    for step in range(4):
        timer.start_step()
        with timer.phase("forward"), timer.phase("exposed_communication"):
            pass
        timer.end_step()
        Event.clock += 7.0  # what the host does between two steps is the next one's
        if step == 2:
            timer.pause()
    return timer.finished(wait=True)


def test_pieces_are_in_no_step_of_a_device_that_waits_for_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    long_piece.seconds = itertools.count(1.0)
    monkeypatch.setattr(speed, "piece", long_piece)
    timer = Probed(torch.device("cuda"))
    found = steps(timer)
    assert timer.pieces == [(2.0, 4.0), (6.0, 8.0), (10.0, 12.0), (14.0, 16.0)] and len(found) == 4  # of two pieces each the second
    for number, phases in enumerate(found):
        assert phases["forward"] == pytest.approx(2e-3) and phases["exposed_communication"] == pytest.approx(1e-3)
        # a step that follows another has what lay between them, the moment before its piece among it
        assert phases["other"] == pytest.approx(2e-3 if number in (0, 3) else 10e-3)
    assert all(sum(step.values()) < 1.0 for step in timer.host)


def test_pieces_are_in_no_step_of_a_cpu(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("runtime.phases.time.perf_counter", lambda: float(next(clock)))
    plain = steps(PhaseTimer(torch.device("cpu")))

    def piece() -> float:
        for _ in range(100):
            next(clock)
        return 1.0

    monkeypatch.setattr(speed, "piece", piece)
    timer = Probed(torch.device("cpu"))
    assert steps(timer) == plain and timer.pieces == [(1.0, 1.0)] * 4
    timer.start_step()
    timer.abandon_step()
    assert len(timer.pieces) == 4


def test_slowness_is_relative_to_full_speed():
    assert slowness([(1.0, 3.0), (1.0, 1.0), (0.5, 0.9)], 1.0).tolist() == [2.0**SLOW_SHARE, 1.0, 1.0]


def test_what_is_expected_is_what_the_same_work_takes():
    """Ten seconds of work at full speed and five at half of it took twenty: a third more than fifteen, half of the time slow."""
    assert expected([10.0, 10.0], [1.0, 2.0]) == pytest.approx(20 / 15)
    assert expected([1.0], [1.0]) == 1.0


def test_a_calibration_keeps_what_its_steps_saw():
    speeds, timer, said = Speeds(fastest=1.0), Probed(torch.device("cpu")), []
    assert not list(speeds.samples())
    twice = 2.0 ** (1.0 / SLOW_SHARE)  # a piece at half the speed
    timer.pieces = [(9.0, 9.0), (1.0, 1.0), (1.0, 1.0), (twice, twice)]
    slow = speeds.of(timer, [{"forward": 1.0, "backward": 1.0}, {"forward": 2.0}, {"forward": 4.0}], 1)
    assert slow == pytest.approx([1.0, 1.0, 2.0])  # the first step is left out
    found = {s.variant: s.seconds for s in speeds.samples(said.append)}
    assert found["slow"] == pytest.approx(8.0 / 6.0) and found["slow:p10"] == 1.0 and found["slow:p90"] == pytest.approx(2.0) and "3 steps" in said[0]
    assert Speeds().fastest > 0.0
