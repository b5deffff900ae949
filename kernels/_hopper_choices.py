"""Which of the Hopper kernels run where: what has passed against float64 on the GPU, and was faster there. Never a guess."""

# Up to 256 keys, no mask by position: (head dim, softmax, queries at most 256) -> keys a block, stages, consumers, tiles of each in an item (0: whole
# sequences follow each other), tiles in flight, whether whole tiles leave by TMA (`_attention_hopper_units`).
# [Measured H200, us at L <= 256] tiles of 128 rows 233; (64, 4, 2, 0, 6, False) 226; two tiles an item 229; by TMA 233 to 236; five stages 231 to
# 236, six 259, three 237; three consumers 239 and 296; 32 keys a block 237 to 242. Identity in place of softmax takes 201 of it, gelu_fast 217
# [us at cross] tiles of 128 rows 1,168; 48 tiles an item by TMA 1,038, 24 1,092, 12 1,089; two consumers 1,094 to 1,157
FORWARD = {(128, True, True): (64, 4, 2, 0, 6, False), (128, True, False): (64, 4, 3, 16, 6, True)}
# Slots of the Hopper backward of blocks of 64; 0: Triton's runs. Three slots passed; they were not timed
BLOCK_SLOTS = 0
