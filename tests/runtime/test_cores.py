"""Cores are timed one by one, and the thread is back where it was."""
import itertools
import os
import threading

import pytest

from runtime import cores


def test_parts_are_neighbours_and_cover_the_host():
    parts = [cores.own_part(range(16), rank, 3) for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == list(range(16)) and all(part == list(range(part[0], part[-1] + 1)) for part in parts)
    assert cores.own_part([4, 5], 1, 3) == [4, 5]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_every_core_is_visited_and_the_thread_is_back_behind():
    before, visited = os.sched_getaffinity(0), []

    def timed():
        (core,) = os.sched_getaffinity(0)
        visited.append(core)
        return 1.0 + core + 0.1 * visited.count(core)

    assert cores.speeds(sorted(before), timed) == {core: 1.1 + core for core in before}  # the shortest of several
    assert set(visited) == before and os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_full_speed_is_that_of_the_fastest_core_and_the_caller_stays_where_it_is():
    before, callers = os.sched_getaffinity(0), []

    def timed():
        here = os.sched_getaffinity(0)
        if threading.current_thread() is threading.main_thread():
            callers.append(here)
            return 5.0
        return 2.0 + min(here)

    assert cores.full_speed(timed) == min(2.0 + min(before), 5.0)
    assert callers == [before] * cores.PIECES


def test_the_spread_is_relative():
    assert cores.spread([1.0, 1.0]) == 0.0 and cores.spread([1.0, 3.0]) == cores.spread([2.0, 6.0]) == 0.5
    assert 0.0 < cores.piece() < 1.0


def test_quiet_cores_are_those_near_the_fastest_and_a_few_at_least():
    seconds = {0: 1.0, 1: 1.9, 2: 1.2, 3: 1.1, 4: 1.0, 5: 2.0, 6: 1.24}
    assert cores.quiet(seconds) == [0, 2, 3, 4, 6]
    assert cores.quiet({core: 1.0 + core for core in range(8)}) == [0, 1, 2, 3]
    assert cores.quiet(dict.fromkeys(range(6), 1.0)) == list(range(6))


class Host:
    """A host of `count` cores, whose pieces take what `slow` says, 1 elsewhere; affinities of one thread, and a clock."""

    def __init__(self, monkeypatch, count: int) -> None:
        self.slow: dict[int, float] = {}
        self.open, self.now, self.surveyed = set(range(count)), 0.0, 0
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(self.open), raising=False)
        monkeypatch.setattr(cores.os, "sched_setaffinity", lambda _, wanted: setattr(self, "open", set(wanted)), raising=False)
        monkeypatch.setattr(cores, "_threads", lambda: [0])

    def timed(self) -> float:
        if len(self.open) == 1:
            self.surveyed += 1
        return self.slow.get(min(self.open), 1.0)

    def quiet(self) -> cores.Quiet:
        return cores.Quiet(self.timed, lambda: self.now)


def test_a_process_keeps_to_quiet_cores_looks_again_where_they_are_slow_and_gives_all_back(monkeypatch):
    host = Host(monkeypatch, 8)
    quiet = host.quiet()
    host.slow = {1: 1.9, 3: 1.9, 6: 1.3}
    quiet.settle()
    assert quiet.kept == [0, 2, 4, 5, 7] and host.open == {0, 2, 4, 5, 7}
    seen = host.surveyed
    host.now = cores.REST + cores.EVERY
    quiet.look()  # its own core is as fast as ever
    assert host.surveyed == seen and host.open == {0, 2, 4, 5, 7}
    host.slow = {0: 2.0, 2: 2.0, 4: 2.0}
    quiet.look()  # too early
    assert host.surveyed == seen
    host.now += cores.EVERY
    quiet.look()
    assert host.surveyed > seen and quiet.kept == [1, 3, 5, 6, 7] == sorted(host.open)
    quiet.leave()
    assert host.open == set(range(8)) and quiet.kept == [1, 3, 5, 6, 7]


def test_few_cores_are_left_as_they_are(monkeypatch):
    host = Host(monkeypatch, cores.LEAST)
    quiet = host.quiet()
    host.slow = {0: 5.0}
    quiet.settle()
    host.now = 100.0
    quiet.look()
    quiet.leave()
    assert host.surveyed == 0 and host.open == set(range(cores.LEAST))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_all_threads_of_the_process_are_kept_and_those_that_start_later():
    before = os.sched_getaffinity(0)
    waiting, ended, found = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=lambda: (waiting.set(), ended.wait(10.0), found.append(os.sched_getaffinity(0))))
    thread.start()
    assert waiting.wait(10.0)
    try:
        cores.keep_to({min(before)})
        later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        later.start()
        later.join()
    finally:
        ended.set()
        thread.join()
        cores.keep_to(before)
    assert found == [{min(before)}] * 2 and os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("ranks", "alone"), [(None, True), ("1", True), ("2", False)])
def test_ranks_that_share_a_host_stay_where_the_system_puts_them(monkeypatch, ranks, alone):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores.alone_on_host() is alone
