"""Two nodes on the loopback: rendezvous options pass through, the first host keeps the result, and a dead peer is noticed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import main
from planner.ledger import Ledger

pytest.importorskip("torch")

TWO_HOSTS = """\
cluster:
  name: two-hosts
  device: {name: made-up, kind: cpu, peak_flops: {fp32: 50 GFLOP/s}, memory: 4 GB, memory_bandwidth: 10 GB/s, native_formats: [fp32]}
  num_hosts: 2
  devices_per_host: 1
  tiers: [{name: loop, scope: cluster, bandwidth: 1 GB/s, latency: 50 us}]
model: gem-tiny
workload:
  name: w
  global_batch: 32
  lengths: {history: {kind: fixed, maximum: 6}}
  source: {kind: synthetic, num_events: 512}
  num_steps: 6
layout: {fsdp: 2}
"""


def start(folder: Path, book: Path, port: int, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "planner.cli", "run", str(folder), "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", str(rank),
               "--rdzv-id", "two", "--no-eval", "--ledger", str(book)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})


def test_two_nodes_train_together(tmp_path: Path):
    scenario, folder, book = tmp_path / "two.yaml", tmp_path / "out", tmp_path / "l.sqlite"
    scenario.write_text(TWO_HOSTS)
    assert main(["estimate", str(scenario), "--quiet", "-o", str(folder)]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [start(folder, book, port, rank) for rank in (0, 1)]
    answers = [host.communicate(timeout=240) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], answers
    assert "step (median)" in answers[0][0]
    assert "the first host keeps the result" in answers[1][1]
    (entry,) = Ledger(book).entries()
    assert (entry.world_size, entry.status, entry.steps, entry.layout) == (2, "completed", 6, "ddp1 fsdp2 sparse2x1")
    assert sum(entry.measured_phases_s.values()) > 0
