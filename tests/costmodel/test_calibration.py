import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from costmodel import compute
from costmodel.blocks.measured import measured_block_ops
from costmodel.calibration import Calibration, fit, load, rounded, score
from costmodel.cluster import Device
from costmodel.ops import BACKWARD, FORWARD, attention, elementwise, linear, op
from costmodel.samples import Environment, Sample

ENVIRONMENT = Environment(device_name="core", device_kind="cpu", source_hashes={"linear": "a1", "attention": "b2"})


def truth(one, phase, device):
    """A plausible machine: 20 us fixed, utilisation that grows with size up to 0.7."""
    flops = max(one.flops(phase), 1.0)
    utilisation = 0.7 * flops / (flops + 2e6)
    return one.count * (2e-5 + max(one.flops(phase) / (1e11 * utilisation), one.bytes(phase) / 6e9))


def make_samples(device, count=90, noise=0.02, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        m, k, n = np.exp(rng.uniform(np.log(32), np.log(2048), 3)).round()
        for one, phase in ((linear(m, k, n), FORWARD), (linear(m, k, n), BACKWARD), (elementwise("mul", m, n), FORWARD)):
            found.append(Sample(op=one.kind, variant=one.variant, phase=phase, features=dict(one.features), noise=noise,
                                seconds=truth(one, phase, device) * math.exp(rng.normal(0, noise)), held_out=i % 6 == 5))
    return found


@pytest.fixture(scope="module")
def device():
    from costmodel.cluster import Device

    return Device(name="core", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)


@pytest.fixture(scope="module")
def calibration(device) -> Calibration:
    return fit(ENVIRONMENT, make_samples(device), device=device)


def test_held_out_points_are_near_and_their_intervals_cover(calibration, device):
    errors = [(error, calibration.predict(s.as_op(), s.phase)) for s, error in score(calibration, make_samples(device))]
    assert len(errors) == 45 and all(t.source == "interpolated" for _, t in errors if t.seconds)
    assert np.median([abs(e) for e, _ in errors]) < 0.05
    assert np.mean([abs(e) <= t.width for e, t in errors]) >= 0.8


def test_a_measured_shape_returns_its_measurement(calibration, device):
    for sample in make_samples(device)[:20]:
        if not sample.held_out:
            time = calibration.predict(sample.as_op(), sample.phase)
            assert (time.seconds, time.source) == (pytest.approx(sample.seconds, rel=1e-7), "measured")


def padding_kernel(one, phase):
    """Seconds of an attention that writes padded scores down and passes over them often: even and ragged histories differ widely."""
    work = 2 + (phase == BACKWARD)
    return 4e-4 + work * (one.flops(FORWARD) / 4e10 + 3 * one.spilled(phase) / 1e10)


def random_attention(rng, ragged):
    tokens, longest = round(math.exp(rng.uniform(5, 9))), round(math.exp(rng.uniform(2.5, 4.8)))
    share = rng.uniform(0.2, 0.6) if ragged else 1.0
    return attention("hstu", tokens=tokens, longest=longest, pairs=round(tokens * longest / 2 * share), heads=int(rng.choice([1, 2, 4])),
                     head_dim=int(rng.choice([12, 16, 24, 48])))


def test_attention_that_spills_scores_is_fitted_for_even_and_ragged_histories_alike(device):
    rng = np.random.default_rng(3)
    timed = [Sample(op="attention", variant="hstu", phase=phase, features=dict(one.features), seconds=padding_kernel(one, phase))
             for one in (random_attention(rng, i % 3 > 0) for i in range(40)) for phase in (FORWARD, BACKWARD)]
    fitted = fit(ENVIRONMENT, timed, device=device)
    assert all(curve.spilled > 1 for curve in fitted.curves)
    for ragged in (False, True):
        errors = [math.log(fitted.predict(one, phase).seconds / padding_kernel(one, phase))
                  for one in (random_attention(rng, ragged) for _ in range(40)) for phase in (FORWARD, BACKWARD)]
        assert abs(np.mean(errors)) < 0.03 and np.quantile(np.abs(errors), 0.9) < 0.12


def test_past_the_grid_utilisation_is_held_and_marked(calibration, device):
    for one in (linear(2**16, 2048, 2048), linear(1, 16, 16)):
        time = calibration.predict(one, FORWARD)
        assert time.source == "extrapolated"
        assert time.width > calibration.predict(linear(300, 300, 300), FORWARD).width
        assert 0.4 < time.seconds / truth(one, FORWARD, device) < 2.5
    assert calibration.predict(linear(2**20, 2048, 2048), FORWARD).seconds == pytest.approx(
        2 * calibration.predict(linear(2**19, 2048, 2048), FORWARD).seconds, rel=1e-3)


def test_a_relative_stands_in_and_says_so_and_nothing_at_all_is_roofline(calibration, device):
    assert calibration.predict(elementwise("add", 500, 64), FORWARD).source == "extrapolated"
    assert calibration.predict(linear(300, 300, 300), FORWARD, active_ranks=2).source == "extrapolated"
    unknown = attention("softmax", tokens=100, pairs=1000, longest=20, heads=2, head_dim=16)
    time = calibration.predict(unknown, FORWARD)
    assert (time.source, time.seconds) == ("roofline", compute.roofline_seconds(unknown, FORWARD, device))


def test_curves_carry_over_to_a_device_with_other_peaks(calibration, device):
    twice = dataclasses.replace(device, name="other", peak_flops={"fp32": 2e11}, memory_bandwidth=2e10)
    here, there = (calibration.predict(linear(2000, 1500, 1500), FORWARD, device=d) for d in (device, twice))
    assert there.source == "extrapolated" and here.seconds / there.seconds == pytest.approx(2, rel=0.1)


def test_products_in_8_bits_that_nobody_timed_are_no_better_than_those_that_somebody_did():
    h200 = Device(name="H200", kind="gpu", peak_flops={"bf16": 989e12, "fp8": 1979e12}, memory_bytes=141e9, memory_bandwidth=4.8e12)
    shapes = (512, 1024, 2048, 4096, 8192, 16384)
    for reached, expected in ((0.9, compute.LOW_UTILISATION), (0.5, 0.5)):
        timed = [Sample(op="linear", phase=FORWARD, features={"m": m, "k": 8192, "n": 8192}, dtype="bf16",
                        seconds=2.0 * m * 8192**2 / (989e12 * reached)) for m in shapes]
        known = fit(dataclasses.replace(ENVIRONMENT, device_kind="cuda", device_name="H200"), timed, device=h200)
        for dtype, peak, share in (("fp8_row", 1979e12, expected), ("bf16", 989e12, reached)):
            one = linear(3000, 8192, 8192, dtype)
            assert one.flops(FORWARD) / known.predict(one, FORWARD).seconds / peak == pytest.approx(share, rel=0.02)


def test_a_calibration_from_before_an_op_was_timed_still_holds():
    """An op that it has no curve of is roofline, and none of its own ops is stale for that, nor any other attention's curve taken for it."""
    path = Path(__file__).resolve().parents[2] / "costmodel" / "calibrations" / "H200-SXM.json"
    known = load(path)
    older = dataclasses.replace(known, curves=tuple(c for c in known.curves if c.op != "sdpa"), environment=dataclasses.replace(
        known.environment, source_hashes={k: v for k, v in known.environment.source_hashes.items() if k != "sdpa"}))
    assert older.stale({**older.environment.source_hashes, "sdpa": "new"}) == []
    one = op("sdpa", variant="flash", dtype="bf16", tokens=16384, pairs=8192 * 8193, longest=8192, heads=16, head_dim=128)
    for phase in (FORWARD, BACKWARD):
        time = older.predict(one, phase)
        assert time.source == "roofline" and time.seconds == compute.roofline_seconds(one, phase, older.device)
    own = attention("softmax", tokens=16384, pairs=8192 * 8193, longest=8192, heads=16, head_dim=128, dtype="bf16")
    assert older.predict(own, FORWARD) == known.predict(own, FORWARD)


def test_repetitions_and_stale_sources(calibration):
    once, thrice = calibration.predict(linear(300, 300, 300), FORWARD), calibration.predict(linear(300, 300, 300).times(3), FORWARD)
    assert thrice.seconds == pytest.approx(3 * once.seconds)
    assert calibration.stale({"linear": "a1", "attention": "b2"}) == []
    assert calibration.stale({"linear": "changed"}) == ["attention", "linear"]
    stale = calibration.with_stale(["linear"]).predict(linear(300, 300, 300), FORWARD)
    assert (stale.seconds, stale.width) == (once.seconds, pytest.approx(2 * once.width))


def test_blocks_correct_the_sum_of_their_ops(device):
    """A block that takes 1.2 x its ops + 60 us is predicted so, between the batches that were measured too."""
    samples = make_samples(device)
    samples += [Sample(op="activation", variant="relu", phase=FORWARD, features={"m": float(m), "n": 160.0}, seconds=1e-5) for m in (50, 500, 2500)]
    bare = fit(ENVIRONMENT, samples, device=device)

    def features(m):
        return {"samples": float(m), "concat": 0.0, "width0": 200.0, "width1": 160.0}

    def whole(m):
        ops = measured_block_ops("mlp", features(m), "fp32")
        return 1.2 * sum(bare.predict(one, FORWARD).seconds for one in ops) + 6e-5

    samples += [Sample(op="block:mlp", phase=FORWARD, features=features(m), seconds=whole(m)) for m in (64, 128, 256, 512, 1024, 2000)]
    found = fit(ENVIRONMENT, samples, device=device).composition("mlp", FORWARD, 2)
    assert found is not None
    for m in (64, 180, 700, 1500):
        total = sum(bare.predict(one, FORWARD).seconds for one in measured_block_ops("mlp", features(m), "fp32"))
        ratio, width, outside = found.ratio(features(m))
        assert ratio * total == pytest.approx(whole(m), rel=0.03) and width < 0.1 and outside == 0
    assert found.ratio(features(8000))[2] > 1


def test_noisy_points_are_smoothed_and_outliers_trusted_less(device):
    rng = np.random.default_rng(1)
    shapes = [(m, k, 256) for m in (64, 128, 256, 512, 1024) for k in (64, 128, 256, 512)]
    clean = {s: truth(linear(*s), FORWARD, device) for s in shapes}
    samples = [Sample(op="linear", phase=FORWARD, features=dict(linear(*s).features), noise=0.15,
                      seconds=clean[s] * math.exp(rng.normal(0, 0.15)) * (4.0 if s == (256, 128, 256) else 1.0)) for s in shapes]
    found = fit(ENVIRONMENT, samples, device=device)
    spike = found.predict(linear(256, 128, 256), FORWARD)
    assert spike.source == "interpolated" and spike.seconds < 1.6 * clean[256, 128, 256]
    errors = [abs(math.log(found.predict(linear(*s), FORWARD).seconds / clean[s])) for s in shapes if s != (256, 128, 256)]
    assert np.median(errors) < 0.12


def test_save_and_load_are_exact_and_fast(calibration, tmp_path):
    path = tmp_path / "c.json"
    calibration.save(path)
    begin = time.process_time()
    again = load(path, device="core")
    assert time.process_time() - begin < 0.05
    assert again.fingerprint == calibration.fingerprint
    assert again.predict(linear(300, 200, 100), FORWARD) == calibration.predict(linear(300, 200, 100), FORWARD)
    first = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == first


def test_fits_have_few_digits_which_no_prediction_shows(device, monkeypatch):
    samples, environment = make_samples(device), Environment(device_name=device.name, device_kind="cpu")
    short = fit(environment, samples, device=device)
    assert rounded(short) == short
    assert all(float(f"{number:.8g}") == number for curve in short.curves for number in curve.weights)
    monkeypatch.setattr("costmodel.calibration.DIGITS", 17)
    exact = fit(environment, samples, device=device)
    assert exact != short
    one = linear(513, 257, 129)
    for phase in ("forward", "backward"):
        assert short.predict(one, phase).seconds == pytest.approx(exact.predict(one, phase).seconds, rel=1e-5)


def _break(body, what):
    curve = body["curves"][0]
    surface = {"points": [[1.0], [2.0]], "mean": 0.0, "lengths": [1.0], "trend": 0.0, "weights": [0.0, 0.0]}
    composition = body["compositions"]["mlp/forward/1"] = {"features": ["m"], "surface": surface, "width": 0.1}
    if what == "column":
        curve["features"] = curve["features"][:-1]
    elif what == "kernel":
        curve["op"] = "lineer"
    elif what == "nan":
        curve["points"][0][0] = None
    elif what == "infinite":
        curve["points"][0][-2] = float("inf")
    elif what == "row":
        curve["points"][0] = curve["points"][0][:-1]
    elif what == "newer":
        body["schema_version"] = 99
    elif what == "text":
        curve["points"][0][0] = "12"
    elif what == "negative":
        curve["points"][0][0] = -5.0
    elif what == "attention":
        curve |= {"op": "attention", "variant": "sofmax", "features": ["tokens", "pairs", "longest", "heads", "head_dim"]}
    elif what in ("phase", "dtype", "variant"):
        curve[what] = "otherwise"
    elif what in ("fixed", "ideal", "width"):
        curve[what] = -1.0
    elif what == "mean":
        curve["mean"] = 1e6
    elif what == "lengths":
        curve["lengths"] = [0.0] * len(curve["lengths"])
    elif what == "twice":
        body["curves"].append(curve)
    elif what == "none":
        body["curves"] = []
    elif what == "device":
        body["environment"]["device_name"] = "another"
    elif what == "kind":
        body["environment"]["device_kind"] = "fpga"
    elif what == "constant":
        body["constants"]["step_overheat/1"] = 1.0
    elif what == "below zero":
        body["constants"]["step_overhead/1"] = -1.0
    elif what == "key":
        body["compositions"]["block/forward"] = composition
    elif what == "weights":
        surface["weights"][0] = float("nan")
    elif what == "shares":
        composition["shares"] = [1.0]
    elif what == "residuals":
        body["run_residuals"]["step@nobody"] = [0.1]
    elif what == "missing":
        del body["environment"]["device_name"]
    return body


@pytest.mark.parametrize(("what", "message"), [
    ("column", r"curves\[0\]\.features: elementwise needs .* missing: n"),
    ("kernel", r"curves\[0\]\.op: unknown kind 'lineer' \(did you mean 'linear'\?\)"),
    ("nan", r"curves\[0\]\.points"), ("infinite", r"curves\[0\]\.points: holds NaN or infinity"), ("row", r"curves\[0\]\.points"),
    ("newer", "schema_version: 99"), ("missing", "environment.device_name: missing"),
    ("text", r"curves\[0\]\.points: rows of 5 numbers are needed, not str"), ("negative", r"curves\[0\]\.points: features, host"),
    ("attention", r"\.variant: 'sofmax' is no kernel's name.*did you mean 'softmax'"), ("phase", r"curves\[0\]\.phase: 'otherwise'"),
    ("dtype", r"curves\[0\]\.dtype: unknown"), ("variant", r"curves\[0\]\.variant: 'otherwise' of elementwise is none of add"),
    ("fixed", r"curves\[0\]\.fixed: a number >= 0"), ("ideal", r"curves\[0\]\.ideal"), ("width", r"curves\[0\]\.width"),
    ("mean", r"curves\[0\]\.mean: a logarithm within"), ("lengths", r"curves\[0\]\.lengths: numbers > 0"),
    ("twice", r"curves\[\d+\]: the same op"), ("none", "curves: none"), ("device", "environment.device_name: 'another', but"),
    ("kind", "environment.device_kind: 'fpga'"), ("constant", r"constants\.step_overheat/1: unknown constant \(did you mean"),
    ("below zero", "constants.step_overhead/1: a number >= 0"), ("key", "compositions.block/forward: a key is"),
    ("weights", r"compositions\..*\.surface\.weights: holds NaN"), ("shares", r"compositions\..*\.shares: 3 or 9"),
    ("residuals", "run_residuals.step@nobody"),
])
def test_a_bad_file_is_refused_naming_the_field(calibration, tmp_path, what, message):
    path = tmp_path / "c.json"
    calibration.save(path)
    path.write_text(json.dumps(_break(json.loads(path.read_text()), what)))
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 200_000, b"null"])
def test_what_is_no_calibration_at_all_is_refused_naming_the_file(tmp_path, content):
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.json:.*(not JSON|not a calibration)"):
        load(tmp_path / "c.json")


def test_another_devices_calibration_is_refused(calibration, tmp_path):
    calibration.save(tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"environment.device_name: measured on 'core', not on 'H200'"):
        load(tmp_path / "c.json", device="H200")
    with pytest.raises(ValueError, match="no op samples"):
        fit(ENVIRONMENT, [])
