"""What Triton makes of the Hopper kernels, compiled for sm_90 where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_hopper_kernels_carry_their_values_and_use_every_barrier(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(HERE / "_hopper_compiled.py")], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
