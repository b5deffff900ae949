import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.blocks import BLOCKS, BatchShape, Heads, JaggedShape, Mlp, SequenceInput, Summary, block_class
from costmodel.blocks.base import expected_longest
from costmodel.blocks.measured import block_features, measured_block_ops
from costmodel.model import Head, Layer, LayerGroup
from costmodel.workload import Lengths

GROUPS = {
    "self_attention": LayerGroup(kind="self_attention", heads=2, head_dim=16, mlp_dim=64),
    "gdpa": LayerGroup(kind="gdpa", heads=2, head_dim=16, mlp_dim=64, divisor=50.0, activation="silu"),
    "block_attention": LayerGroup(kind="block_attention", heads=2, head_dim=16, mlp_dim=64, block=64),
    "hstu": LayerGroup(kind="hstu", heads=2, head_dim=16, divisor=50.0),
    "llama": LayerGroup(kind="llama", heads=2, head_dim=16, mlp_dim=64, options={"kv_heads": 2}),
    "mask_net": LayerGroup(kind="mask_net", mlp_dim=64),
    "pyramid": LayerGroup(kind="pyramid", branches=(Layer(kind="self_attention", heads=2, head_dim=16, mlp_dim=64),
                                                    Layer(kind="hstu", heads=2, head_dim=16, divisor=50.0))),
}


def batch(lengths) -> BatchShape:
    return BatchShape(samples=len(lengths), sequences={"history": JaggedShape.of_lengths(lengths)})


def brute_pairs(lengths, causal, window, block):
    total = 0
    for length in lengths:
        i, j = np.mgrid[:length, :length]
        keep = np.ones((length, length), bool)
        if causal:
            keep &= i >= j
        if window is not None:
            keep &= abs(i - j) < window
        if block is not None:
            keep &= i // block == j // block
        total += keep.sum()
    return total


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), causal=st.booleans(),
       mask=st.one_of(st.none(), st.tuples(st.sampled_from(["window", "block"]), st.integers(1, 50))))
def test_pairs_equal_counting_them(lengths, causal, mask):
    kwargs = {mask[0]: mask[1]} if mask else {}
    window, block = kwargs.get("window"), kwargs.get("block")
    assert JaggedShape.of_lengths(lengths).pairs(causal=causal, **kwargs) == pytest.approx(brute_pairs(lengths, causal, window, block))


def test_pairs_are_of_true_lengths_not_of_the_longest_squared():
    """torchtitan #4300: a window of 128 at 8192 events costs 128 a row, and a jagged batch the sum of its own squares."""
    long = JaggedShape.of_lengths([8192])
    assert long.pairs(causal=True, window=128) == pytest.approx(128 * 129 / 2 + (8192 - 128) * 128)
    jagged = JaggedShape.of_lengths([8000, 64, 64, 64])
    assert jagged.pairs(causal=False) == 8000**2 + 3 * 64**2
    assert jagged.padded().pairs(causal=False) == 4 * 8000**2


def test_expected_shape_agrees_with_sampled_batches():
    spec = Lengths(kind="lognormal", maximum=200, median=40, sigma=1.0)
    rng = np.random.default_rng(0)
    drawn = [JaggedShape.of_lengths(spec.sample(rng, 32)) for _ in range(400)]
    shape = JaggedShape.expected(spec, 32)
    assert shape.tokens == pytest.approx(np.mean([d.tokens for d in drawn]), rel=0.03)
    assert shape.pairs(causal=True) == pytest.approx(np.mean([d.pairs(causal=True) for d in drawn]), rel=0.05)
    assert shape.longest == pytest.approx(np.mean([d.longest for d in drawn]), rel=0.02)
    assert expected_longest(spec, 1) == pytest.approx(spec.mean())


def test_the_slowest_ranks_factors_scale_tokens_and_pairs():
    shape = JaggedShape.of_lengths([10, 20])
    slow = shape.scaled(tokens=1.5, pairs=2.0)
    assert (slow.tokens, slow.pairs(causal=False)) == (45.0, 2 * shape.pairs(causal=False))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), limit=st.integers(1, 50))
def test_newest_events_of_a_shape(lengths, limit):
    """As many events and pairs as the cut lengths have; what the slowest rank has over the average never grows above the whole's."""
    shape = JaggedShape.of_lengths(lengths)
    cut, plain = shape.newest(limit), JaggedShape.of_lengths(np.minimum(lengths, limit))
    assert (cut.tokens, cut.longest) == (plain.tokens, plain.longest) and cut.pairs(causal=True, window=3) == plain.pairs(causal=True, window=3)
    slow = shape.scaled(tokens=1.5, pairs=2.0).newest(limit)
    assert 1.0 - 1e-9 <= slow.token_factor <= 1.5 + 1e-9 and 1.0 - 1e-9 <= slow.pair_factor <= 2.0 + 1e-9
    assert slow.newest(limit) is slow and shape.newest(None) is shape


def test_all_histories_at_the_limit_leave_no_imbalance():
    slow = JaggedShape.of_lengths([10, 20, 30]).scaled(tokens=1.5, pairs=2.0)
    assert slow.newest(10).token_factor == pytest.approx(1.0) and slow.newest(30).token_factor == 1.5


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_checkpoint_policies_trade_memory_for_recompute(kind):
    block = block_class(GROUPS[kind])(GROUPS[kind], 32, "history")
    shape = batch([30, 12, 7])
    saved = {p: block.saved_bytes(shape, "fp32", p) for p in ("none", "selective", "full", "quantized")}
    again = {p: sum(op.flops("forward") for op in block.recomputed(shape, "fp32", p)) for p in saved}
    assert saved["full"] < saved["selective"] < saved["none"] and saved["full"] == 49 * 32 * 4
    wide = block.saved_bytes(shape, "bf16", "none")
    assert block.saved_bytes(shape, "bf16", "quantized4") < block.saved_bytes(shape, "bf16", "quantized") < 0.62 * wide
    assert again["none"] == again["quantized"] == again["selective"] == 0.0
    assert again["full"] == block.flops(shape)
    assert block.recomputed(shape, "fp32", "selective")
    assert wide < 0.6 * saved["none"]


def test_self_attention_counts():
    """Formulas of docs/model.md by hand: D 32, 2 heads x 16, MLP 64, lengths 3 and 2."""
    block = block_class(GROUPS["self_attention"])(GROUPS["self_attention"], 32, "history")
    assert block.num_parameters == 2 * (32 + 32) + (32 * 96 + 96) + (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32)
    tokens, pairs = 5, 6 + 3
    assert block.flops(batch([3, 2])) == 2 * tokens * 32 * (96 + 32 + 64 + 64) + 4 * pairs * 32
    # the convention counts L^2 / 2
    assert block.flops(batch([3, 2])) - block.causal_excess(batch([3, 2])) == 2 * tokens * 32 * 256 + 4 * (9 + 4) / 2 * 32


def test_hstu_counts():
    block = block_class(GROUPS["hstu"])(GROUPS["hstu"], 24, "history")
    assert block.num_parameters == 2 * 24 + (24 * 128 + 128) + 2 * 32 + (96 * 24 + 24)
    assert block.flops(batch([3, 2])) == 2 * 5 * (24 * 128 + 96 * 24) + 4 * 9 * 32


def test_fixed_parts_counts():
    shape = batch([3, 2])
    entry, summary = SequenceInput("history", 40, 2, 32), Summary("history", 32)
    mlp, heads = Mlp("interaction", 100, (16, 8), concat=True), Heads(8, (Head(name="a", hidden=(4,)), Head(name="b")))
    assert entry.num_parameters == 41 * 32 and entry.flops(shape) == 2 * 5 * 40 * 32
    assert summary.num_parameters == 64 + 65 * 32 and summary.flops(shape) == 2 * 2 * 64 * 32
    assert mlp.num_parameters == 101 * 16 + 17 * 8 and mlp.flops(shape) == 2 * 2 * (100 * 16 + 16 * 8)
    assert heads.num_parameters == 9 * 4 + 5 + 9 and heads.flops(shape) == 2 * 2 * (8 * 4 + 4 + 8)


@pytest.mark.parametrize(("group", "message"), [
    (LayerGroup(kind="pyramid"), "branches must be given"),
    (LayerGroup(kind="pyramid", branches=(Layer(kind="mask_net", mlp_dim=8),)), "unknown branch kind 'mask_net'"),
    (LayerGroup(kind="pyramid", branches=(Layer(kind="hstu", heads=2, head_dim=8),)), "layer hstu: divisor must be given"),
    (LayerGroup(kind="pyramid", newest=4, count=2, branches=(Layer(kind="hstu", heads=2, head_dim=8, divisor=2.0),)), "on a level of count 1"),
    (LayerGroup(kind="hstu", heads=2, head_dim=8, divisor=2.0, newest=4), "newest = 4 has no meaning"),
    (LayerGroup(kind="self_atention"), "did you mean 'self_attention'"),
    (LayerGroup(kind="self_attention", heads=2), "head_dim must be given"),
    (LayerGroup(kind="self_attention", heads=2, head_dim=8, divisor=3.0), "divisor = 3.0 has no meaning"),
    (LayerGroup(kind="self_attention", heads=2, head_dim=8, window=0), "window must be >= 1"),
    (LayerGroup(kind="gdpa", heads=2, head_dim=8, divisor=3.0, activation="tanh"), "activation 'tanh' is none of"),
    (LayerGroup(kind="block_attention", heads=2, head_dim=8, block=48), "block 48 is none of"),
    (LayerGroup(kind="hstu", heads=2, head_dim=8), "divisor must be given"),
    (LayerGroup(kind="hstu", heads=2, head_dim=8, divisor=5.0, mlp_dim=4), "mlp_dim = 4 has no meaning"),
    (LayerGroup(kind="hstu", heads=2, head_dim=8, divisor=5.0, causal=False), "causal"),
])
def test_a_layer_with_missing_or_meaningless_fields_is_refused(group, message):
    with pytest.raises(ValueError, match=message):
        block_class(group).validate(group)


def test_a_measured_block_is_read_back_to_the_same_ops():
    shape = batch([30, 12, 7])
    sequence_blocks = {kind: block_class(g)(g, 32, "history") for kind, g in GROUPS.items()}
    for kind in ("llama", "mask_net", "pyramid"):  # priced as the sum of their ops
        assert block_features(sequence_blocks.pop(kind), shape) is None
    blocks = [*sequence_blocks.values()]
    blocks += [SequenceInput("history", 40, 2, 32), Summary("history", 32), Mlp("x", 10, (16, 8), concat=True),
               Heads(8, (Head(name="a", hidden=(4,)),) * 2)]
    for block in blocks:
        assert measured_block_ops(block.kind, block_features(block, shape), "bf16") == block.forward(shape, "bf16")
    with pytest.raises(ValueError, match="tokens is missing"):
        measured_block_ops("hstu", {"dim": 32.0, "samples": 3.0}, "fp32")
    with pytest.raises(ValueError, match="unknown block kind"):
        measured_block_ops("lstm", {"tokens": 1.0, "samples": 3.0}, "fp32")
