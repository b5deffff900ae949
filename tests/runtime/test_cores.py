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
