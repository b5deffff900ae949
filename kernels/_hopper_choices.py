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
# (head dim, softmax, keys at most 256, mask of causality or window) -> keys a block, stages, consumers, tiles an item (`_attention_hopper_items`).
# [Measured H200, ms at L <= 256 and at cross] without items 0.236, 1.174; (64, 5, 2, 2) 0.234, 1.162; (64, 4, 3, 3) 0.243, 1.100
FORWARD = {(128, True, True, False): (64, 4, 3, 3)}
# Slots of the Hopper backward of blocks of 64; 0: Triton's runs. Three slots passed without a causal mask; they were not timed
BLOCK_SLOTS = 0
