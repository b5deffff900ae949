"""The microbenchmark: times the operations that a training step runs, through the trainer's own modules, optimizers and collectives.

    python -m torch.distributed.run --standalone --nproc-per-node N -m runtime.microbench --out samples.jsonl --models PLAN ...

`requests` says what to time (the plans' own shapes and points spread around them), `cases` how to run each op kind, `timing` how a run is
timed, `collectives`, `fsdp` and `blocks` what involves more than one op. All ranks run the same requests at the same time, for they share caches
and memory bandwidth; `active_ranks` of the samples is the number of ranks.
"""
