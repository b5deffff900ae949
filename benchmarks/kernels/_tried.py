"""What was tried for rows whose target is missed, by row: appended to their notes when they are written, and by `--report`."""

BEGINNING = 12  # of a text, by which an earlier one is known
TRIED = {
    "softmax self q<=256 fill 0.5 B=1152 forward": "tried [us]: three consumers that hold their queries and wait for each product 192, in items "
    "of one tile each 203; two of them 208; two whose blocks overlap 202, with queries in shared memory 214; all in even shares 235; before "
    "that tiles of 128 rows, three, five, six stages, 32 and 128 keys a block, two to eight programs a multiprocessor: no faster than 226. "
    "Memory alone would take 134",
    "softmax cross q<=2048 kv<=256 fill 0.5 B=1152 forward": "tried [ms]: three consumers that hold their queries and wait for each product "
    "1.01, in items of 12 tiles instead of 48 or leaving by TMA 1.02, with queries in shared memory 1.07; whose blocks overlap, so that a "
    "quarter of the stalls waits for instructions, 1.17; two consumers 1.06 to 1.11; even shares 1.08 to 1.11 on the same two machines; "
    "half a block for last blocks of up to 32 keys, 5,840 instead of 4,616 instructions, 295 TFLOPS against 330 in turns. Memory alone would take "
    "0.56. These very kernels gave 330.3, 330.7 and 329.9, and 330.5 and 328.9, on two other H200 the same day",
    "softmax self q<=1024 fill 0.5 B=1152 backward": "tried [ms]: even shares 6.13; drawn, operands of dQ in registers, results of dK and dV by "
    "memory of their own 5.61; each of the three alone is in `kernels/_hopper_launch.py`",
    "softmax cross q<=2048 kv<=256 fill 0.5 B=1152 backward": "tried [ms]: even shares 3.80; drawn, operands of dQ in registers, results of dK "
    "and dV by memory of their own 3.25; each of the three alone is in `kernels/_hopper_launch.py`",
    "GDPA gelu_fast self q<=1024 fill 0.5 B=1152 backward": "tried [ms]: even shares 6.59 and 6.66; drawn with Q in registers 6.29, with dP "
    "late too 6.34, dK and dV by memory of their own too 6.24; with dO in registers too 6.55, keys in registers too 6.72; before that dQ and dK "
    "and dV with other stages, one program a sequence 7.49, a program a block of keys and Triton's dQ 7.34. These very kernels gave 334.5, 331.6 "
    "and 328.6, and 323.6 and 328.5, on two other H200 the same day",
    "rmsnorm -> fp8 rowwise, 262144 x 512 bf16": "with 32 elements a thread; with 64, as now, 4.22 in a sweep of the same day, ten calls a graph",
    "embedding backward + rowwise-adagrad, 8 tables x 5000000 x 128 fp32, batch 8192, pooling 20, Zipf 1.05": "by kernel [us]: keys 13, sort 82 "
    "(three passes: counts 3, offsets 3, pairs to their places 22), lists 17, long runs 6, update 201; before, with torch's sort (105) "
    "and all lists at once 396: runs of one gradient row last in all programs 412, first in all 394, runs of 8 and 16 at a time 421 to "
    "471. With parts, whole update: sort by tiles of 1,024 pairs in registers and counts by atomics, one to four warps, 448 to 467 (54 to 60 a pass: "
    "two pairs of a digit side by side are not a sector); one part 492, four 457, eight 452, sixteen 449, thirty-two 452; rows stored evict_first "
    "and gradients without evict_last as long; 4 and 16 runs of one row at a time 5 and 50 slower, two runs of four 5, 80 and 96 registers 40 and 2",
}


def tried(name: str, passed: bool | None, note: str) -> str:
    """The note of a row, with what was tried if it misses its target."""
    text = TRIED.get(name)
    if text is None:
        return note
    note = note.partition(f"; {text[:BEGINNING]}")[0]  # without an earlier text
    return f"{note}; {text}" if passed is False else note
