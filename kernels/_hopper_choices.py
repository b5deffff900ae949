"""Which of the Hopper kernels run where: written from a check against float64 and a timing on the GPU, never by a guess."""

BACKWARD: dict[int, str] = {}  # head dim -> "pair": dQ, then dK and dV; without an entry one program owns a sequence or a block of keys
# (head dim, softmax, keys at most 256, mask of causality or window) -> keys a block, stages, consumers, tiles an item of `_attention_hopper_items`
FORWARD: dict[tuple[int, bool, bool, bool], tuple[int, int, int, int]] = {}
BLOCK_SLOTS = 0  # slots of the Hopper backward of blocks of 64; 0: Triton's runs
