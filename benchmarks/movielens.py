"""Quality on real histories: the quickstart's model on MovieLens-100K, against two predictors without a model.

    python -m benchmarks.movielens [--seeds 0 1]      trains as `planner run` would, writes docs/results/movielens.{json,md}

Needs the data set that `planner data movielens` prepares.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.fidelity import torchrun
from costmodel.runresult import RunResult
from costmodel.state import movielens_path

TARGET = 0.87
# The first two by their usual definitions; the third: an earlier trial with one history layer on the same split.
PEERS = {"item mean": 0.912, "item mean + user's like-rate": 0.875, "one-layer history model": 0.855}


def main(arguments: list[str] | None = None) -> int:
    from planner.configure import default_plan
    from planner.scenario import load_scenario

    parser = argparse.ArgumentParser(prog="benchmarks.movielens", description=__doc__.split("\n")[0])
    parser.add_argument("--scenario", type=Path, default=Path("scenarios/quickstart.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    if not movielens_path().exists():
        raise SystemExit(f"{movielens_path()} is missing; `planner data movielens` puts it there")
    plan, _ = default_plan(load_scenario(options.scenario))
    found = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="movielens-") as folder:
            own = dataclasses.replace(plan, seed=seed)
            own.save(Path(folder) / "plan.json")
            torchrun(
                "runtime.train",
                [f"{folder}/plan.json", "--out", folder],
                plan.layout.world_size,
                plan.cluster,
                Path(folder) / "run.log",
                timeout=3600,
            )
            found.append(RunResult.load(Path(folder) / "result.json"))
    results.write(
        "movielens",
        rows(found),
        command=f"python -m benchmarks.movielens --seeds {' '.join(map(str, options.seeds))}",
        title="MovieLens-100K: normalized entropy on later events",
        out=options.out,
        intro=f"Model {plan.model.name} of {options.scenario}, {plan.workload.epochs} epoch(s), global batch {plan.workload.global_batch}, "
        f"{plan.layout.world_size} ranks. The first 80 % of all events in time train, the rest is scored; histories hold strictly earlier "
        "events only. Baselines are computed here, on the same events.",
    )
    return 0


def rows(found: list[RunResult]) -> list[results.Row]:
    """NE per seed and on average, and the baselines."""
    entropies = [next(iter(result.quality.ne.values())) for result in found]
    baselines = found[0].quality.baselines
    beaten = max(entropies) < min(baselines.values())
    rows = [
        results.Row(
            name="NE on later events, mean over seeds",
            value=statistics.fmean(entropies),
            unit="NE",
            target=TARGET,
            better="lower",
            peers=PEERS,
            note=f"measured here, {len(found)} seed(s), worst {max(entropies):.4f}; {'below' if beaten else 'NOT below'} both baselines",
        )
    ]
    rows += [results.Row(name=f"baseline {name}", value=value, unit="NE", better="lower", note="computed here") for name, value in baselines.items()]
    rows += (
        [
            results.Row(
                name="training wall time",
                value=statistics.fmean(r.wall_seconds["train"] for r in found),
                unit="s",
                better="lower",
                note=f"measured here; {found[0].steps} steps",
            )
        ]
        if all("train" in r.wall_seconds for r in found)
        else []
    )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
