"""Parameters gathered in 8 bits: the format against its own quantisation, bytes against the cost model, and 20 steps of two ranks."""
import dataclasses

import pytest
import runtime_models as models
import torch

from costmodel.lower import lower
from costmodel.model import LayerGroup
from costmodel.plan import Layout
from costmodel.regions import regions
from costmodel.wire import gather_width
from kernels.norm_quant import quantize
from runtime.model.registry import build_block
from runtime.precision.gather import ShardFormat

SHAPES = [torch.Size(s) for s in ((6, 16), (16,), (5, 48), (4, 3, 32), (1,))]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_restores_all_shards(ranks):
    """Matrices come back as their rows quantised, vectors as they were, whatever rank holds which rows."""
    form = ShardFormat.of(SHAPES, ranks)
    shards = [torch.randn(sum(r * max(1, w) for r, w in form.pieces), generator=torch.Generator().manual_seed(k)).bfloat16() for k in range(ranks)]
    packed = [form.pack(s) for s in shards]
    assert {p.numel() for p in packed} == {form.num_bytes}
    out = torch.empty(sum(s.numel() for s in shards), dtype=torch.bfloat16)
    form.unpack(torch.cat(packed), out)
    for shard, found in zip(shards, out.view(ranks, -1)):
        at = 0
        for rows, width in form.pieces:
            piece, back = (t[at:at + rows * max(1, width)] for t in (shard, found))
            expected = quantize(piece.view(rows, width), scaling="rowwise").dequantize().bfloat16().flatten() if width else piece
            assert torch.equal(back, expected)
            at += rows * max(1, width)


@pytest.mark.parametrize(("name", "tolerance"), [("fp8", 0.01), ("bf16 gradients", 0.003), ("both", 0.01)])
def test_two_ranks_keep_the_curve_and_fp32_masters(checks_on_2, name, tolerance):
    found = [rank["check_gathers"][name] for rank in checks_on_2]
    wide = checks_on_2[0]["check_bf16"]
    assert found[0]["losses"] == found[1]["losses"] != wide["losses"] and found[0]["dtypes"] == ["torch.float32"]
    assert len(found[0]["losses"]) == 20 and found[0]["losses"] == pytest.approx(wide["losses"], rel=tolerance)


def test_sent_bytes_are_those_of_the_cost_model(checks_on_2):
    """The test's layers are 16 to 64 wide, so scales and norms weigh; what a wide block sends is the next test's."""
    found, wide = checks_on_2[0]["check_gathers"]["fp8"]["sent"], checks_on_2[0]["check_bf16"]["sent"]
    plan = models.plan(Layout(fsdp=2, sparse_group=2), precision="bf16")
    predicted = {dtype: sum(t.bytes for t in lower(dataclasses.replace(plan, gather_dtype=dtype), None).graph.tasks if t.name.startswith("gather ")
                            and t.kind == "collective") for dtype in (None, "fp8")}
    assert found / wide == pytest.approx(predicted["fp8"] / predicted[None], rel=0.02)
    assert checks_on_2[0]["check_gathers"]["bf16 gradients"]["sent"] == wide


def test_a_wide_block_sends_half():
    """A transformer block of width 512 sends 0.503 of what it sends in 16 bits: scales and norms are the rest."""
    layer = LayerGroup(kind="self_attention", heads=8, head_dim=64, mlp_dim=2048)
    form = ShardFormat.of([p.shape for p in build_block(512, layer).parameters()], 2)
    assert form.num_bytes / (2 * sum(r * max(1, w) for r, w in form.pieces)) == pytest.approx(0.5, abs=0.01)
    wide = next(r.block for r in regions(models.model((layer,), dim=512)) if r.name == "history.0")
    assert gather_width(wide, 2.0, "fp8") == pytest.approx(1.0, abs=0.02) and gather_width(wide, 4.0, "fp8") == 4.0


def test_reduced_bytes_halve():
    plan = models.plan(Layout(fsdp=2, sparse_group=2), precision="bf16")
    sent = [sum(t.bytes for t in lower(dataclasses.replace(plan, reduce_dtype=dtype), None).graph.tasks if t.name.startswith("reduce "))
            for dtype in ("fp32", "bf16")]
    assert sent[1] == sent[0] / 2 > 0
