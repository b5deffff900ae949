"""What was tried for rows whose target is missed, by row: appended to their notes when they are written, and by `--report`."""

TRIED = {
    "softmax self q<=256 fill 0.5 B=1152 forward": "tried [us, with the 9 of the work map]: tiles of 128 rows 233; tiles of 64 dealt out to two "
    "consumers, keys staying, 224 to 229, to three 230 to 239; whole tiles by TMA 233; three, five, six stages 237, 234, 269; 32 and 128 keys a "
    "block 240, 266; programs with whole sequences in a row 226; two to eight programs a multiprocessor 225 to 247. Of it identity in place of "
    "softmax takes 201, gelu_fast 217; memory alone would 134, the products of whole tiles about 100; 11 % of the multiprocessors' time is idle",
    "softmax cross q<=2048 kv<=256 fill 0.5 B=1152 forward": "tried [ms]: keys not kept 1.17; kept for 12, 24, 48 and 96 tiles of 64 rows that "
    "leave by TMA 1.09, 1.06, 1.04, 1.06; two consumers instead of three 1.08; two to eight programs a multiprocessor 1.07 to 1.16; 128 keys a "
    "block 1.26; 15 % of the multiprocessors' time is idle",
    "softmax self q<=1024 fill 0.5 B=1152 backward": "352 the day before on another H200 with the same inner loops; tried [TFLOPS of the products]: "
    "dQ with one tile in flight 605, with two 600, O read by the consumers 547; dK and dV with a block of keys and a stage more 543, two blocks 505",
    "softmax cross q<=2048 kv<=256 fill 0.5 B=1152 backward": "225 the day before on another H200 with the same inner loops",
    "GDPA gelu_fast self q<=1024 fill 0.5 B=1152 backward": "341 the day before on another H200; tried [ms]: dQ with two tiles in flight 2.75, with "
    "one and four stages 2.81, five 2.79; dK and dV with two blocks of keys 3.76, one and four stages 3.74, five 3.83; one program a sequence "
    "7.49 in all, a program a block of keys and Triton's dQ 7.34",
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
    return f"{note}; {text}" if text and passed is False and text not in note else note
