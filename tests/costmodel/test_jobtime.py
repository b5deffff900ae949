"""Wall time of a job: against a simulated series of failures, its limits, and the laws that a schedule of checkpoints obeys."""
from __future__ import annotations

import math
import random

import pytest

from costmodel.cluster import Reliability
from costmodel.jobtime import job_time

HOUR = 3600.0


def made(ranks: int = 4096, training: float = 24 * HOUR, bytes_per_rank: float = 60e9, **changes: float):
    known = {"failures_per_device_hour": 2e-5, "restart_seconds": 900.0, "startup_seconds": 300.0, "checkpoint_bandwidth": 2e9}
    return job_time(Reliability(**{**known, **changes}), ranks=ranks, training_seconds=training, bytes_per_rank=bytes_per_rank)


def played(seed: int, *, rate: float, interval: float, stall: float, count: int, restart: float) -> float:
    """Wall seconds of one job: segments of `interval` and a checkpoint, repeated from their beginning after each failure and its restart."""
    random_numbers, wall = random.Random(seed), 0.0
    for _ in range(count):
        left = interval + stall
        while (failed := random_numbers.expovariate(rate)) < left:
            wall += failed
            while (again := random_numbers.expovariate(rate)) < restart:
                wall += again
            wall += restart
        wall += left
    return wall


@pytest.mark.parametrize("ranks", [512, 16384])
def test_the_expectation_is_that_of_jobs_played_out(ranks):
    found = made(ranks=ranks, failures_per_device_hour=1e-4)
    rate = ranks * 1e-4 / HOUR
    jobs = [played(s, rate=rate, interval=found.interval, stall=30.0, count=found.checkpoints, restart=900.0) for s in range(600)]
    mean = sum(jobs) / len(jobs)
    error = math.sqrt(sum((j - mean) ** 2 for j in jobs)) / len(jobs)
    assert found.wall_seconds - found.startup == pytest.approx(mean, abs=4 * error)


def test_the_interval_is_young_and_dalys():
    found = made()
    assert found.interval == pytest.approx(math.sqrt(2 * 30.0 * HOUR / (4096 * 2e-5)), rel=0.05)
    assert found.training == pytest.approx(found.checkpoints * found.interval)
    best = found.wall_seconds
    for factor in (0.5, 2.0):  # no interval far from it is better
        rate, count = 4096 * 2e-5 / HOUR, round(found.checkpoints * factor)
        assert count * math.exp(900 * rate) * math.expm1((found.training / count + 30) * rate) / rate + 300 > best


@pytest.mark.parametrize(("changes", "grows"), [
    ({"failures_per_device_hour": 4e-5}, "lost"), ({"restart_seconds": 1800.0}, "restarting"), ({"startup_seconds": 600.0}, "startup"),
    ({"checkpoint_bandwidth": 1e9}, "checkpointing"), ({"ranks": 8192}, "failures")])
def test_what_makes_a_job_longer(changes, grows):
    assert getattr(made(**changes), grows) > getattr(made(), grows)
    assert made(**changes).effective < made().effective


def test_without_failures_one_checkpoint_and_start_up_remain():
    found = made(failures_per_device_hour=0.0)
    assert (found.lost, found.restarting, found.failures, found.checkpoints) == (0.0, 0.0, 0.0, 1)
    assert found.wall_seconds == found.training + 300.0 + 30.0


def test_a_job_that_never_ends_says_so():
    found = made(ranks=1_000_000, failures_per_device_hour=1.0, bytes_per_rank=1e15)
    assert found.effective == 0.0 and math.isinf(found.wall_seconds)
    with pytest.raises(ValueError, match="training_seconds must be > 0"):
        made(training=0.0)
