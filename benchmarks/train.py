"""Training that is killed, unbalanced, sharded and measured: what the runtime promises of long jobs.

    python -m benchmarks.train [--device cpu|cuda] [--only STAGE ...] [--resume] [--seconds S] [--models MODEL ...]

On the CPU (docs/results/train-cpu): `balance`, `modes`, `input`, `tables`, `soak`, `saving`, `hung`, `exits`, and `speed` at tiny size. On a GPU
(docs/results/train-h200) `speed` alone, within `--seconds`. Rows are written as soon as a stage is done; `--resume` keeps those of stages that are
not asked for.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import results
from benchmarks.results import Row

CPU_STAGES = ("balance", "modes", "input", "tables", "soak", "saving", "hung", "exits", "speed")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.train", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=CPU_STAGES, help="stages (default: all of the device)")
    parser.add_argument("--resume", action="store_true", help="keep rows of an earlier call")
    parser.add_argument("--seconds", type=float, default=180.0, help="of the speed stage")
    parser.add_argument("--models", nargs="+", help="of the speed stage (default: all of benchmarks.train_speed.SCENARIOS)")
    parser.add_argument("--peers", nargs="+", help="of the speed stage (default: all of benchmarks.train_speed.OVER)")
    parser.add_argument("--warmed", action="store_true", help="of the speed stage: kernels were compiled before, `python -m benchmarks.train_speed`")
    parser.add_argument("--compiled", action="store_true", help="of the speed stage: compiled blocks and CUDA graphs too; takes minutes")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    stages = options.only or (CPU_STAGES if options.device == "cpu" else ("speed",))
    if options.device == "cuda" and set(stages) != {"speed"}:
        parser.error("on a GPU there is the speed stage only")
    name, written = "train-cpu" if options.device == "cpu" else "train-h200", options.resume
    for stage in stages:
        with tempfile.TemporaryDirectory(prefix="train-", ignore_cleanup_errors=True) as folder:
            for found in _stage(stage, Path(folder), options):
                for row in found:
                    sys.stderr.write(f"{row.name}: {row.value} {row.unit} ({row.note})\n")
                results.write(name, found, command=f"python -m benchmarks.train --device {options.device}", title=f"Training: {name}", resume=written,
                              out=options.out, intro="Jobs under torchrun on this machine's cores, with other programs beside them; a step's time "
                              "there says little." if options.device == "cpu" else "")
                written = True
    return 0


def _stage(stage: str, work: Path, options: argparse.Namespace) -> Iterable[list[Row]]:
    """Rows as they are known, to be written at once."""
    from benchmarks import train_balance, train_faults, train_input

    simple: dict[str, Callable[[Path], Iterable[Row]]] = {
        "balance": lambda _: train_balance.rows(), "input": train_input.rows, "tables": _tables, "modes": _modes, "soak": train_faults.soak,
        "saving": train_faults.kills_while_saving, "hung": train_faults.hung, "exits": train_faults.exits}
    if stage in simple:
        return [list(simple[stage](work))]
    import torch

    from benchmarks import train_speed

    return train_speed.rows(torch.device(options.device), seconds=options.seconds, compiled=options.compiled, warmed=options.warmed,
                            models=options.models or tuple(train_speed.SCENARIOS), peers=options.peers or tuple(train_speed.OVER))


def _tables(work: Path) -> Iterable[Row]:
    from benchmarks import train_tables
    from benchmarks.fidelity import torchrun

    plan = train_tables.plans()["full"]
    torchrun("benchmarks.train_tables", [str(work)], plan.layout.world_size, plan.cluster, work / "log", timeout=600)
    return train_tables.rows(json.loads((work / "measured.json").read_text()))


def _modes(work: Path) -> Iterable[Row]:
    from benchmarks import train_modes
    from benchmarks.fidelity import torchrun

    cluster = next(iter(train_modes.plans().values())).cluster
    torchrun("benchmarks.train_modes", [str(work)], train_modes.RANKS, cluster, work / "log", timeout=900)
    return train_modes.rows(json.loads((work / "measured.json").read_text()))


if __name__ == "__main__":
    raise SystemExit(main())
