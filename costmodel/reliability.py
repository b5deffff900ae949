"""What failures and checkpoints take from training.

W seconds of steps, a stall of c seconds for a checkpoint after every t seconds of steps, failures at rate f (per second of wall time), R seconds
from a failure to training again. A failure falls anywhere in an interval, so half of it is done again:

    wall = S + W (1 + c / t) + F (R + t / 2)       F = f x wall failures, S the start-up
    t*   = sqrt(2 c / f)                           the interval that makes it least (Young 1974, Daly 2006, first order: t* << 1 / f)

Effective training time is W / wall.
"""
from __future__ import annotations

import math


def failure_rate(failures_per_device_hour: float, devices: int) -> float:
    """Failures a second of a job that any device's failure stops."""
    return failures_per_device_hour * devices / 3600.0


def young_daly_interval(checkpoint_seconds: float, failures_per_second: float) -> float:
    """Seconds of steps between two checkpoints; infinite where nothing fails. Raises ValueError for negative arguments."""
    if checkpoint_seconds < 0 or failures_per_second < 0:
        raise ValueError("checkpoint_seconds and failures_per_second must be >= 0")
    return math.sqrt(2.0 * checkpoint_seconds / failures_per_second) if failures_per_second else math.inf


def wall_seconds(train: float, *, startup: float, checkpoint: float, interval: float, failures: float, restart: float) -> float:
    """Expected wall time [s] of `train` seconds of steps that meet `failures` failures. `checkpoint`: seconds that training stands still for one,
    `interval`: seconds of steps between two, `restart`: seconds from a failure to the first step after it."""
    return startup + train * (1.0 + checkpoint / interval) + failures * (restart + interval / 2.0)


def effective_training_time(train: float, *, startup: float, checkpoint: float, interval: float, failures_per_second: float, restart: float) -> float:
    """Share of the wall time that goes to steps that count, in (0, 1]. Raises ValueError where failures come faster than they are recovered from."""
    slowed = 1.0 - failures_per_second * (restart + interval / 2.0)
    if slowed <= 0:
        raise ValueError(f"a failure every {1 / failures_per_second:.3g} s costs {restart + interval / 2:.3g} s: nothing is trained; "
                         "checkpoint more often or use fewer devices")
    wall = (startup + train * (1.0 + checkpoint / interval)) / slowed
    return train / wall
