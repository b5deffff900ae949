"""What collectives take from compute."""
from __future__ import annotations

import pytest

from costmodel.cluster import Device
from costmodel.contention import RATE_FLOOR, TRANSPORTS, compute_share, serving, transport, waiting_share
from costmodel.ops import COLLECTIVES

H200 = Device(name="H200-SXM", kind="gpu", peak_flops={"bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12, num_sms=132)
CORE = Device(name="core", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_share_is_a_share_and_grows_with_bytes(kind, name):
    chosen = serving(name, kind, one_host=True)
    shares = [compute_share(kind, num_bytes, 1e-3, H200, chosen) for num_bytes in (0.0, 1e6, 1e9, 1e13)]
    assert shares == sorted(shares) and shares[0] >= 0.0 and shares[-1] <= 1.0 - RATE_FLOOR


def test_sms_and_bandwidth_both_count():
    # 24 of 132 SMs, and 2 x 1.2 GB in a millisecond of 4.8 TB/s: half the bandwidth
    assert compute_share("all_gather", 0.0, 1e-3, H200, transport("nccl")) == pytest.approx(24 / 132)
    assert compute_share("all_gather", 1.2e9, 1e-3, H200, transport("nccl")) == pytest.approx(1 - (1 - 24 / 132) * 0.5)
    assert compute_share("all_gather", 1.2e9, 1e-3, H200, transport("copy_engine")) == pytest.approx(0.5)


def test_a_share_of_nothing_is_no_measurement_where_sms_are_held():
    formula, nothing = compute_share("all_gather", 1e9, 1e-3, H200, transport("nccl")), {"collective_share/nccl/all_gather": 1e-9}
    assert compute_share("all_gather", 1e9, 1e-3, H200, transport("nccl"), nothing) == formula > 0.1
    assert compute_share("all_gather", 1e9, 1e-3, H200, transport("copy_engine"), {"collective_share/copy_engine/all_gather": 0.0}) == 0.0


def test_who_waits_inside_a_collective_holds_its_sms_alone():
    assert waiting_share("all_gather", H200, transport("nccl")) == pytest.approx(24 / 132)
    assert waiting_share("all_gather", H200, transport("copy_engine")) == waiting_share("all_gather", CORE, transport("gloo")) == 0.0


def test_cpu_ranks_share_their_core():
    assert compute_share("all_gather", 1e9, 1e-3, CORE, transport("gloo")) == transport("gloo").cpu_share
    assert compute_share("all_gather", 1e9, 1e-3, CORE, transport("gloo"), {"collective_share/gloo/all_gather": 2.0}) == 1.0 - RATE_FLOOR


def test_what_a_transport_lacks_runs_on_its_fallback():
    assert serving("ncclx", "all_gather", one_host=False).name == "ncclx"
    assert serving("ncclx", "reduce_scatter", one_host=True).name == "nccl"
    assert serving("copy_engine", "all_to_all", one_host=True).name == "copy_engine"
    assert serving("copy_engine", "all_to_all", one_host=False).name == "nccl"
    assert [name for name, t in TRANSPORTS.items() if t.executable] == ["nccl", "gloo"]
    with pytest.raises(ValueError, match="did you mean 'gloo'"):
        transport("glo")
