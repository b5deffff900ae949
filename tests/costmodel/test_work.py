"""Blocks by what their seconds are spent on: the fit finds what made the samples, few samples of a kind suffice, uneven work takes its rounds."""
import dataclasses
import math

import numpy as np
import pytest

from costmodel.blocks.measured import measured_block_ops
from costmodel.calibration import WELL_KNOWN, fit
from costmodel.cluster import Device
from costmodel.gpu import timed_ops
from costmodel.krige import MINIMUM_POINTS
from costmodel.ops import BACKWARD, FORWARD
from costmodel.samples import Environment, Sample
from costmodel.work import HALF_TILE, MULTIPROCESSORS, PARTS, TIMED, Measured, fit_shares, rounds, work

H200 = Device(name="H200-SXM", kind="gpu", peak_flops={"fp32": 67e12, "bf16": 989e12}, memory_bytes=141e9, memory_bandwidth=4.8e12)
TRUE = dict(zip(PARTS, (1.5, 0.4, 1.4, 0.7, 1.5, 1.8, 3.1, 0.6, 1.2)))


def features(rng: np.random.Generator, kind: str) -> dict[str, float]:
    heads, head_dim, samples, length = rng.choice([4, 8, 12]), rng.choice([64, 128]), int(rng.integers(64, 900)), int(rng.integers(100, 900))
    found = {"heads": heads, "head_dim": head_dim, "dim": heads * head_dim, "samples": samples, "tokens": samples * length, "causal": 1.0,
             "longest": length, "pairs": samples * length * (length + 1) / 2}
    return {k: float(v) for k, v in found.items()} | ({"divisor": 512.0} if kind == "hstu" else {"mlp_dim": float(4 * heads * head_dim)})


def seconds(kind: str, values: dict[str, float], phase: str) -> float:
    return float(work(timed_ops(measured_block_ops(kind, values, "bf16"), phase, "", ()), values, H200) @ np.array(list(TRUE.values())))


def measured(kind: str, values: dict[str, float], phase: str) -> Measured:
    ops = timed_ops(measured_block_ops(kind, values, "bf16"), phase, "", ())
    return Measured(group=f"{kind}/{phase}", dtype="bf16", attention=kind, work=work(ops, values, H200), seconds=seconds(kind, values, phase))


def test_the_fit_finds_seconds_of_shapes_that_it_has_not_seen():
    rng = np.random.default_rng(0)
    rows = [measured(kind, features(rng, kind), phase) for kind in ("self_attention", "hstu") for _ in range(12) for phase in (FORWARD, BACKWARD)]
    shares = fit_shares(rows)
    for kind in ("self_attention", "hstu"):
        for phase in (FORWARD, BACKWARD):
            new = measured(kind, features(rng, kind), phase)
            assert new.work @ shares[new.group] == pytest.approx(new.seconds, rel=0.03)


def test_two_samples_of_a_kind_lean_on_what_others_have_in_common():
    rng = np.random.default_rng(1)
    many = [measured("hstu", features(rng, "hstu"), phase) for _ in range(12) for phase in (FORWARD, BACKWARD)]
    few = [measured("self_attention", features(rng, "self_attention"), FORWARD) for _ in range(2)]
    new = [measured("self_attention", features(rng, "self_attention"), FORWARD) for _ in range(20)]
    errors = [np.mean([abs(math.log(float(n.work @ fit_shares(rows)[n.group]) / n.seconds)) for n in new]) for rows in ([*many, *few], few)]
    assert errors[0] < errors[1] and errors[0] < 0.05


def test_even_histories_take_whole_rounds():
    even = {"samples": 24.0, "heads": 12.0, "head_dim": 128.0, "tokens": 24 * 2048.0, "longest": 2048.0, "pairs": 24 * 2048 * 2049 / 2, "causal": 1.0}
    jobs = 24 * 12 / MULTIPROCESSORS
    assert rounds(even) == pytest.approx(math.ceil(jobs) / jobs, rel=1e-3)


def test_few_or_very_uneven_histories_are_split_finer():
    few = {"samples": 4.0, "heads": 4.0, "head_dim": 128.0, "tokens": 4 * 2048.0, "longest": 2048.0, "pairs": 4 * 2048 * 2049 / 2, "causal": 1.0}
    assert rounds(few) == 1.0
    assert rounds({**few, "samples": 4000.0, "tokens": 4e6, "pairs": 2e9, "block": 64.0}) == 1.0


def test_uneven_histories_take_longer_than_even_work_and_less_with_more_of_them():
    def uniform(samples: float) -> dict[str, float]:
        return {"samples": samples, "heads": 16.0, "tokens": samples * 256.5, "longest": 512.0, "pairs": samples * 512 * 513 / 6, "causal": 1.0}

    found = [rounds(uniform(n)) for n in (100.0, 300.0, 3000.0)]
    assert found[0] > found[1] > found[2] >= 1.0 and found[0] > 1.08
    exact = sum((1 - k * MULTIPROCESSORS / 1600) ** 2 for k in range(math.ceil(1600 / MULTIPROCESSORS))) / (1600 / MULTIPROCESSORS / 3)
    assert found[0] == pytest.approx(exact, rel=0.02)


def test_a_calibration_of_a_gpu_predicts_blocks_from_their_work_and_one_of_a_host_does_not():
    rng = np.random.default_rng(2)
    samples = [Sample(op="block:hstu", phase=phase, features=values, dtype="bf16", seconds=seconds("hstu", values, phase), host_seconds=1e-3)
               for values in (features(rng, "hstu") for _ in range(MINIMUM_POINTS + 4)) for phase in (FORWARD, BACKWARD)]
    samples.append(Sample(op="layer_norm", phase=FORWARD, features={"m": 1e5, "n": 512.0}, dtype="bf16", seconds=1e-4))
    environment = Environment(device_name="H200-SXM", device_kind="cuda")
    known = fit(environment, samples, device=H200)
    composition = known.composition("hstu@bf16", BACKWARD, 1)
    values = features(rng, "hstu")
    ops = timed_ops(measured_block_ops("hstu", values, "bf16"), BACKWARD, "", ())
    reference = float(work(ops, values, H200) @ np.array(composition.shares))
    assert reference * composition.ratio(values)[0] == pytest.approx(seconds("hstu", values, BACKWARD), rel=0.04)
    on_host = fit(dataclasses.replace(environment, device_kind="cpu"), samples, device=dataclasses.replace(H200, kind="cpu"))
    assert all(not c.shares for c in on_host.compositions.values()) and on_host.compositions


def test_what_hangs_over_tiles_counts_as_scores():
    values = features(np.random.default_rng(3), "hstu")
    ops = timed_ops(measured_block_ops("hstu", values, "bf16"), FORWARD, "", ())
    found = dict(zip(PARTS, work(ops, values, H200)))
    assert found["weights"] == pytest.approx(1e-13 * (values["pairs"] + HALF_TILE * values["tokens"]) * values["heads"])
    assert found["scores_backward"] == found["weights_backward"] == found["rows"] == 0.0


@pytest.mark.parametrize("points, known", [(WELL_KNOWN, True), (WELL_KNOWN - 1, False)])
def test_a_block_is_the_sum_of_its_ops_where_its_attention_was_timed_alone(points, known):
    """Then the correction of a few samples at some shapes holds at others, where attention has another share."""
    rng = np.random.default_rng(4)

    def alone(one, phase: str) -> float:
        return (2.0 * one.bytes(phase) / 4.8e12 + 3.0 * one.flops(phase) / 989e12) / one.count + 3e-6

    shapes = [features(rng, "hstu") for _ in range(points)]
    ops = {(one, phase) for values in shapes for phase in (FORWARD, BACKWARD)
           for one, phase in timed_ops(measured_block_ops("hstu", values, "bf16"), phase, "", ())}
    samples = [Sample(op=one.kind, variant=one.variant, phase=phase, features=dict(one.features), dtype=one.dtype, seconds=alone(one, phase))
               for one, phase in ops]
    for values in shapes[:5]:
        timed = timed_ops(measured_block_ops("hstu", values, "bf16"), BACKWARD, "", ())
        samples.append(Sample(op="block:hstu", phase=BACKWARD, features=values, dtype="bf16",
                              seconds=1.1 * sum(one.count * alone(one, phase) for one, phase in timed)))
    fitted = fit(Environment(device_name="H200-SXM", device_kind="cuda"), samples, device=H200)
    composition = fitted.composition("hstu@bf16", BACKWARD, 1)
    assert len(composition.shares) == len(TIMED if known else PARTS)
    if known:
        assert composition.shares == pytest.approx([1.1, 1.1, 1.1], rel=0.05)
        assert composition.ratio(features(rng, "hstu"))[0] == pytest.approx(1.0, rel=0.02)
