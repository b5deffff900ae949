import json

import pytest

from costmodel.samples import Environment, Sample, read_samples, write_samples

ENVIRONMENT = Environment(device_name="core", device_kind="cpu", allocator={"MALLOC_TRIM_THRESHOLD_": "1"}, source_hashes={"linear": "ab"})
SAMPLES = [
    Sample(op="linear", phase="forward", features={"m": 2, "k": 3, "n": 4}, seconds=1e-5, noise=0.1, repeats=7),
    Sample(op="block:hstu", phase="backward", features={"dim": 64}, seconds=2e-3, active_ranks=2, held_out=True),
    Sample(op="constant:context_bytes", phase="step", features={}, seconds=5e8),
]


def test_round_trip(tmp_path):
    write_samples(tmp_path / "s.jsonl", ENVIRONMENT, SAMPLES)
    assert read_samples(tmp_path / "s.jsonl") == (ENVIRONMENT, SAMPLES)


@pytest.mark.parametrize(("change", "message"), [
    ({"op": "matmul"}, "unknown op kind"),
    ({"seconds": 0}, "seconds must be > 0"),
    ({"seconds": float("nan")}, "seconds: a finite number"),
    ({"features": {"m": 2, "k": 3}}, "features"),
    ({"phase": "step"}, "phase 'step'"),
    ({"secs": 1}, "secs: unknown key"),
    ({"op": "constant:contextbytes"}, "unknown constant"),
])
def test_a_bad_sample_is_refused_with_its_line(tmp_path, change, message):
    path = tmp_path / "s.jsonl"
    write_samples(path, ENVIRONMENT, SAMPLES[:1])
    first, sample = path.read_text().splitlines()
    path.write_text(first + "\n" + json.dumps({**json.loads(sample), **change}) + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_samples(path)
    assert f"{path}:2" in str(error.value)


@pytest.mark.parametrize(("text", "message"), [
    ("", "empty"), ("{", "not JSON"), ('{"op": "linear"}', "device_name: missing"),
    ('{"device_name": "x", "device_kind": "cpu", "schema_version": 99}', "schema_version: 99 is newer"),
])
def test_a_bad_first_line_is_refused(tmp_path, text, message):
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_samples(path)


@pytest.mark.parametrize(("changes", "words"), [
    ({"noise": -0.1}, "noise must be >= 0"), ({"host_seconds": -1.0}, "host_seconds must be >= 0"),
    ({"active_ranks": 0}, "active_ranks must be >= 1"), ({"repeats": 0}, "repeats must be >= 1"),
])  # fmt: skip
def test_figures_that_no_measurement_has(changes, words):
    for op, features in (("linear", {"m": 1.0, "k": 1.0, "n": 1.0}), ("block:mlp", {"samples": 4.0})):
        with pytest.raises(ValueError, match=words):
            Sample(**{"op": op, "phase": "forward", "features": features, "seconds": 1.0, **changes})


def test_a_schema_version_that_is_no_number_is_refused_like_any_other_field(tmp_path):
    (tmp_path / "s.jsonl").write_text('{"device_name": "x", "device_kind": "cpu", "schema_version": "2"}\n')
    with pytest.raises(ValueError, match=r"s\.jsonl:1: schema_version: an integer is needed"):
        read_samples(tmp_path / "s.jsonl")
