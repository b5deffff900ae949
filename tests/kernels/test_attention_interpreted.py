"""The Triton attention kernels, interpreted on the CPU: the part of the GPU path that runs where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path


def test_triton_kernels_agree_with_the_cpu_path():
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(here / "_attention_interpreted.py")], env=environment, capture_output=True, text=True, timeout=250, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
