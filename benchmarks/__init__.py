"""Benchmarks: `python -m benchmarks.NAME` measures and writes `docs/results/NAME.{json,md}`."""
