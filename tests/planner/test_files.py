import errno
from pathlib import Path

import pytest

from planner.errors import FileError, UsageError
from planner.files import check, dotted, load, loads, locate, replacing, write_text
from planner.spec import ClusterFile, DeviceFile, ModelFile, WorkloadFile

DEVICE = """\
name: x
kind: gpu
peak_flops: {bf16: 989 TFLOP/s}
memory: 141 GB
memory_bandwidth: 4.8 TB/s
"""


def faults(text, model):
    with pytest.raises(FileError) as caught:
        check(model, loads(text, "f.yaml"))
    return [str(f) for f in caught.value.faults]


def test_a_device_reads_in_si_units():
    device = check(DeviceFile, loads(DEVICE, "f.yaml")).build()
    assert device.memory_bytes == 1.41e11
    assert device.peak_flops == {"bf16": 9.89e14}


def test_every_fault_is_reported_with_its_place():
    text = DEVICE.replace("141 GB", "141 GBs").replace("memory_bandwidth", "memory_bandwith").replace("989 TFLOP/s", "67")
    found = faults(text, DeviceFile)
    assert len(found) == 4
    assert any(f.startswith("f.yaml:3:14: peak_flops.bf16: 67 has no unit") for f in found)
    assert any(f.startswith("f.yaml:4:1: memory: unknown unit 'GBs'") for f in found)
    assert any(f.startswith("f.yaml:5:1: memory_bandwith: unknown key (did you mean 'memory_bandwidth'?)") for f in found)
    assert any("memory_bandwidth: missing" in f for f in found)


def test_a_fault_of_the_value_object_has_a_place():
    text = "name: m\ndim: 8\ntables:\n  - {name: t, rows: 0, dim: 4}\n"
    assert faults(text, ModelFile) == ["f.yaml:4:5: tables.t: table t: rows must be >= 1, got 0"]


def test_nested_kinds_name_the_item():
    text = "name: m\ndim: 8\ntables:\n  - {name: t, rows: 5, dim: 4, pooling: summ}\n  - {name: u, rows: 1.5, dim: 4}\n"
    assert faults(text, ModelFile) == [
        "f.yaml:4:32: tables.t.pooling: 'summ' is none of sum, mean, sequence (did you mean 'sum'?)",
        "f.yaml:5:15: tables.u.rows: input should be a valid integer, not 1.5",
    ]


@pytest.mark.parametrize(
    ("text", "place"), [("a: [1\nb: 2\n", "f.yaml:2"), ("a: 1\na: 2\n", "f.yaml:2:1"), ("", "f.yaml:1:1"), ("a:\n\t- 1\n", "f.yaml:2")]
)
def test_what_is_not_yaml_has_a_place(text, place):
    with pytest.raises(FileError, match=place):
        loads(text, "f.yaml")


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path):
    (tmp_path / "quickstart.yaml").write_text("a: 1")
    with pytest.raises(FileError, match=r"no such file \(did you mean 'quickstart.yaml'\?\)"):
        load(tmp_path / "quikstart.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="cannot be read"):
        load(tmp_path / "bad.yaml")


def test_locate_finds_items_by_name_and_index():
    document = loads("tiers:\n  - {name: a, bandwidth: 1}\n  - {name: b}\n", "f.yaml")
    assert locate(document, "tiers.b.bandwidth", ()) == ("tiers", 1, "bandwidth")
    assert locate(document, "tiers.0.bandwidth", ()) == ("tiers", 0, "bandwidth")
    assert dotted(("tiers", 1, "bandwidth"), document.data) == "tiers.b.bandwidth"
    with pytest.raises(FileError, match=r"no item 'c' in tiers; items: a, b"):
        locate(document, "tiers.c.bandwidth", ())
    with pytest.raises(FileError, match="it has no 'deeper'"):
        locate(document, "tiers.a.bandwidth.deeper", ())


def test_a_grafted_part_keeps_its_own_file():
    outer, inner = loads("device: X\nname: c\n", "outer.yaml"), loads("name: X\nbad: 1\n", "inner.yaml")
    outer.graft(("device",), inner)
    assert str(outer.where(("device", "bad"))) == "inner.yaml:2:1"
    assert str(outer.where(("name",))) == "outer.yaml:2:1"
    assert str(outer.where(("device",))) == "outer.yaml:1:1"


@pytest.mark.parametrize("cls", [DeviceFile, ClusterFile, ModelFile, WorkloadFile])
def test_every_field_of_a_noun_can_be_written(cls):
    import dataclasses

    assert set(cls.model_fields) == {f.name for f in dataclasses.fields(cls.target)}


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path):
    path = tmp_path / "folder" / "a.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_user(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_text(tmp_path / "file" / "a.txt", "x")


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path: Path):
    path = tmp_path / "folder" / "a.txt"
    write_text(path, "old")
    with pytest.raises(OSError) as caught, replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(path)
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"] and path.read_text() == "old"
