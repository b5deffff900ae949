"""The share of the cores that other programs use."""

import subprocess
import sys

from benchmarks.load import LoadMeter, wait_until_quiet

BURN = "import time\nend = time.process_time() + 1.0\nwhile time.process_time() < end: pass"


def test_own_children_are_no_others():
    """A child that burns a second is busy time of the machine but not of others; one that is still running is."""
    meter = LoadMeter()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    others = meter.others()
    assert others is None or 0.0 <= others <= 1.0
    running = subprocess.Popen([sys.executable, "-c", BURN.replace("1.0", "60.0")])
    try:
        assert others is None or not wait_until_quiet(0.01, 0.0, window=0.5)
    finally:
        running.kill()
        running.wait()


def test_everything_is_quiet_enough_for_a_limit_of_all_cores():
    assert wait_until_quiet(1.0, 0.0, window=0.05)
