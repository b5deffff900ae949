import shutil

from runtime.hashes import ROOT, source_hashes


def test_the_training_loop_makes_no_timing_stale_and_the_loss_makes_its_own(tmp_path):
    """A change of the loop made the committed H200's calibration stale for `bce`, and --calibrated-only refused every plan on it."""
    for folder in ("runtime", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    known = source_hashes(tmp_path)
    assert known == source_hashes()
    with (tmp_path / "runtime" / "trainer.py").open("a") as file:
        file.write("# later\n")
    assert source_hashes(tmp_path) == known
    with (tmp_path / "runtime" / "loss.py").open("a") as file:
        file.write("# later\n")
    assert {kind for kind, value in source_hashes(tmp_path).items() if value != known[kind]} == {"bce"}
