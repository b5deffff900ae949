import dataclasses
import subprocess
import sys

import pytest

from costmodel import launch
from costmodel.cluster import Cluster, Device, LinkTier

CPU = Device(name="core", kind="cpu", peak_flops={"fp32": 1e10}, memory_bytes=1e9, memory_bandwidth=1e10)
GPU = dataclasses.replace(CPU, name="gpu", kind="gpu")
LOOP = (LinkTier(name="loopback", scope="cluster", bandwidth=1e9, latency=1e-4),)


def cluster(device, hosts=1, devices=2):
    return Cluster(name="c", device=device, num_hosts=hosts, devices_per_host=devices, tiers=LOOP)


def test_a_cpu_rank_is_one_thread():
    assert launch.threads_per_rank(cluster(CPU)) == 1
    assert launch.environment(cluster(CPU))["OMP_NUM_THREADS"] == "1"


def test_allocator_thresholds_fit_the_library():
    assert launch.allocator("2.36")["MALLOC_MMAP_THRESHOLD_"] == str(2**32)
    assert launch.allocator("2.31")["MALLOC_MMAP_THRESHOLD_"] == str(2**25)
    assert launch.allocator("2.31")["MALLOC_TRIM_THRESHOLD_"] == launch.allocator("2.36")["MALLOC_TRIM_THRESHOLD_"]
    assert launch.allocator("") == {}


@pytest.mark.skipif(not launch.allocator(), reason="not glibc")
def test_freed_blocks_stay_mapped_in_a_process_started_so():
    program = (
        "import ctypes, resource\n"
        "c = ctypes.CDLL(None); c.malloc.restype = ctypes.c_void_p; c.free.argtypes = [ctypes.c_void_p]; c.malloc.argtypes = [ctypes.c_size_t]\n"
        "def touch():\n"
        "    p = c.malloc(20 << 20); ctypes.memset(p, 1, 20 << 20); c.free(p)\n"
        "touch(); touch()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(4): touch()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    faults = int(
        subprocess.run([sys.executable, "-c", program], env=launch.environment(cluster(CPU)), capture_output=True, text=True, check=True).stdout
    )
    assert faults < 100  # 4 x 20 MiB are 20,480 pages


def test_one_host_is_standalone():
    command = launch.torchrun_command("runtime.train", ["plan.json"], ranks_per_host=2)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert "--standalone" in command
    assert command[-3:] == ["-m", "runtime.train", "plan.json"]


def test_several_hosts_pass_the_rendezvous_through():
    command = launch.torchrun_command("m", ranks_per_host=1, num_hosts=2, node_rank=1, rdzv_endpoint="127.0.0.1:2000", rdzv_id="job")
    text = " ".join(command)
    assert "--nnodes 2" in text and "--rdzv-endpoint 127.0.0.1:2000" in text and "--node-rank 1" in text and "--rdzv-id job" in text
    assert "--standalone" not in text
    with pytest.raises(ValueError, match="rdzv-endpoint"):
        launch.torchrun_command("m", ranks_per_host=1, num_hosts=2)


def test_the_loopback_is_only_forced_inside_one_host(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert launch.environment(cluster(CPU))["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in launch.environment(cluster(CPU, hosts=2, devices=1))
    assert "GLOO_SOCKET_IFNAME" not in launch.environment(cluster(GPU))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert launch.environment(cluster(CPU))["GLOO_SOCKET_IFNAME"] == "eth7"
