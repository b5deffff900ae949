"""Wall time of a whole job: what start-up, checkpoints, failures and lost work add to training.

With M the mean time between failures of the whole job, R the time from a failure to training again, C what one checkpoint stalls training and T the
seconds of training:

    M         = 1 / (ranks x failures per device-second)
    interval  = sqrt(2 C M), rounded so that n intervals make up T                             [Young 1974, Daly 2006: first order]
    C         = bytes that a rank writes / its bandwidth to storage
    wall      = start-up + n M e^(R/M) (e^((T/n + C)/M) - 1)                                   [Daly 2006, exact for exponential failures]
    working   = n M (e^((T/n + C)/M) - 1): T, n checkpoints, and work that a failure undid
    restarts  = working (e^(R/M) - 1), for a failure may also strike a restart
    effective = T / wall
"""
from __future__ import annotations

import dataclasses
import math

from costmodel.cluster import Reliability
from costmodel.memory import Memory

# Where a rank's state rests; what else it holds is made again.
STATE = ("parameters", "optimizer", "tables", "table_state")
# Beyond this many mean times between failures an interval is never finished, and its expected seconds leave floating point.
HOPELESS = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """Expected seconds of a job by what they go to, `interval` [s of training] between `checkpoints`, expected `failures`.

    `wall_seconds` is their sum; `effective` the share of it that trains.
    """

    training: float
    startup: float
    checkpointing: float
    lost: float
    restarting: float
    interval: float
    checkpoints: int
    failures: float

    @property
    def wall_seconds(self) -> float:
        return self.training + self.startup + self.checkpointing + self.lost + self.restarting

    @property
    def effective(self) -> float:
        return self.training / self.wall_seconds if self.wall_seconds > 0 and math.isfinite(self.wall_seconds) else 0.0


def state_bytes(memory: Memory) -> float:
    """Bytes that a rank writes in a checkpoint: its parameters, optimizer, tables and their state."""
    return sum(memory.categories.get(name, 0.0) for name in STATE)


def job_time(reliability: Reliability, *, ranks: int, training_seconds: float, bytes_per_rank: float, compiling: float = 0.0) -> JobTime:
    """Expected wall time of `training_seconds` of steps on `ranks` devices that each write `bytes_per_rank` in a checkpoint. `compiling`: seconds of
    the first start-up beside the cluster's (`costmodel.execution.compile_seconds`); a restart finds what was compiled.

    Where failures come faster than a checkpoint can be written the job never ends: lost is infinite and effective 0. Raises ValueError for
    training_seconds <= 0.
    """
    if training_seconds <= 0:
        raise ValueError(f"training_seconds must be > 0, got {training_seconds:g}")
    rate = ranks * reliability.failures_per_device_hour / 3600.0
    stall = bytes_per_rank / reliability.checkpoint_bandwidth
    best = math.sqrt(2.0 * stall / rate) if rate > 0 and stall > 0 else training_seconds
    count = max(1, round(training_seconds / best))
    interval, checkpointing = training_seconds / count, count * stall
    known = {"training": training_seconds, "startup": reliability.startup_seconds + compiling, "checkpointing": checkpointing, "interval": interval,
             "checkpoints": count}
    attempt = (interval + stall) * rate
    if attempt > HOPELESS or reliability.restart_seconds * rate > HOPELESS:
        return JobTime(**known, lost=math.inf, restarting=math.inf, failures=math.inf)
    if rate == 0:
        return JobTime(**known, lost=0.0, restarting=0.0, failures=0.0)
    working = count * math.expm1(attempt) / rate
    restarting = working * math.expm1(reliability.restart_seconds * rate)
    return JobTime(**known, lost=max(0.0, working - training_seconds - checkpointing), restarting=restarting,
                   failures=(working + restarting) * rate)
