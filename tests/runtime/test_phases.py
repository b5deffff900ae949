"""Phases on a device, whose events are recorded again once a step has been read."""
import itertools

import pytest
import torch

from runtime.phases import PhaseTimer


class Event:
    """Recorded at the next whole millisecond of a clock that all events share."""

    clock = itertools.count()
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: str) -> None:
        assert stream == "stream"
        self.at = next(Event.clock)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return float(end.at - self.at)


def test_events_of_steps_that_were_read_serve_again_and_steps_stay_whole(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    timer, found = PhaseTimer(torch.device("cuda")), []
    for step in range(6):
        timer.start_step()
        with timer.phase("forward"), timer.phase("exposed_communication"):
            pass
        timer.end_step()
        if step == 3:
            timer.pause()
        if step != 1:  # read two at once
            found += timer.finished()
    assert len(found) == 6 and Event.made <= 12
    for phases in found:
        assert phases["exposed_communication"] == pytest.approx(1e-3) and phases["forward"] == pytest.approx(2e-3)
        assert phases["other"] == pytest.approx(2e-3)
