"""Which of the Hopper kernels run where: what has passed against float64 on the GPU, and was faster there. Never a guess.

What is not in these tables takes the older kernels. To extend one: `pytest -m gpu tests/kernels/test_attention_gpu.py -k not_yet_default`, which
runs every candidate whatever stands here, then `python -m benchmarks.kernels --only attention`.
"""

# (kind, head dim, causal, window): dQ, then dK and dV (`_attention_hopper_pair`); else one program owns a sequence or a block of keys.
# [Measured H200, TFLOPS, then the older kernels] softmax: L <= 1024 352, 288; L <= 256 169, 118; L = 2048 446, 304; cross 225, 184;
# heads of 64, L <= 1024 343, 273. Left out: softmax, causal and windowed, which passed small tests but whose dK and dV kernel did not end on an
# H200 at InterFormer's self-attention (192 histories of about 900 events, window 256)
BACKWARD = frozenset({
    ("softmax", 128, False, False), ("softmax", 64, False, False), ("gelu_fast", 128, False, False),
})  # fmt: skip
# Up to 256 keys, no mask by position: (head dim, softmax, queries at most 256) -> keys a block, stages, consumers, tiles of each in an item, tiles
# in flight, whether whole tiles leave by TMA (`_attention_hopper_units`).
# @MEASURED@
FORWARD = {(128, True, True): (64, 4, 2, 2, 6, False), (128, True, False): (64, 4, 3, 8, 6, False)}
# Slots of the Hopper backward of blocks of 64; 0: Triton's runs. Three slots passed without a causal mask; they were not timed
BLOCK_SLOTS = 0
