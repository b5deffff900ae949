"""`python -m benchmarks.kernels`: what the kernels reach on this GPU, beside targets and peers -> docs/results/kernels-h200.{md,json}.

Every module of this package that defines `measure(done)` is a family. `measure` yields `benchmarks.results.Row`s one by one and skips
names in `done`, so that a run stopped by its time limit loses one row at most and `--resume` goes on from there.
"""
