"""What formats below 16 bits cost: quantisation and products in forward and backward, and where they are emulated."""
import dataclasses

import pytest

from costmodel.lower import lower
from costmodel.ops import BACKWARD, FORWARD, linear
from costmodel.precision import LOW_PRECISIONS, MULTIPLES, emulated, parts, unfit


@pytest.mark.parametrize("precision", LOW_PRECISIONS)
@pytest.mark.parametrize("low_weight_gradients", [False, True])
def test_a_linear_layer_is_three_products_and_pays_for_its_quantisation(h200, core, precision, low_weight_gradients):
    one = linear(4096, 512, 1024, precision, count=2)
    for device in (h200, core):
        made = {phase: parts(one, phase, device, low_weight_gradients=low_weight_gradients) for phase in (FORWARD, BACKWARD)}
        products = {phase: [p for p in found if p.kind == "linear"] for phase, found in made.items()}
        for phase, count in ((FORWARD, 1), (BACKWARD, 2)):
            assert len(products[phase]) == count
            assert sum(p.flops(FORWARD) for p in products[phase]) == one.flops(phase)
        quantised = [p for p in made[FORWARD] if p.kind == "quantize"]
        assert [(p.feature("m"), p.feature("n")) for p in quantised] == [(4096, 512), (1024, 512)]
        assert all(p.count == 2 for found in made.values() for p in found)
        low = [p for p in products[BACKWARD] if p.dtype == precision]
        is_native = device is h200 and precision != "mxfp8"
        assert len(low) == (1 + low_weight_gradients) * is_native
        reads_back = any(p.kind == "cast" for p in made[FORWARD])
        assert reads_back != is_native


@pytest.mark.parametrize("precision", LOW_PRECISIONS)
def test_shapes(precision):
    multiple = MULTIPLES[precision]
    assert unfit(precision, multiple, 3 * multiple) is None
    assert "multiples of" in unfit(precision, multiple, multiple + 1) and unfit("bf16", 3, 1) is None


def test_a_wide_layer_gains_and_a_narrow_one_loses(make_plan, make_model, h200):
    """On the roofline 8 bits pay where products dominate; where rows are narrow, quantisation costs more than it saves."""
    def seconds(dim: int, precision: str) -> float:
        base = make_model()
        group = dataclasses.replace(base.sequences[0].layers[0], heads=dim // 64, head_dim=64, mlp_dim=4 * dim)
        model = dataclasses.replace(base, dim=dim, sequences=(dataclasses.replace(base.sequences[0], layers=(group,)),))
        plan = make_plan(model=model, device=h200, ranks=1)
        regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(o, precision=precision if ".0" in r.region else "bf16")
                                                             for o in r.options)) for r in plan.regions)
        graph = lower(dataclasses.replace(plan, regions=regions, local_batch=4096), None).graph
        return sum(t.seconds for t in graph.tasks if t.region.endswith(".0"))

    assert seconds(4096, "fp8_row") < 0.8 * seconds(4096, "bf16")
    assert seconds(64, "fp8_row") > seconds(64, "bf16")


def test_emulation_is_said(make_plan, h200, core):
    def plan(device, precision):
        made = make_plan(device=device, ranks=1)
        regions = tuple(dataclasses.replace(r, options=tuple(dataclasses.replace(o, precision=precision) for o in r.options)) for r in made.regions)
        return dataclasses.replace(made, regions=regions)

    assert emulated(plan(h200, "fp8_row")) == () == emulated(plan(core, "fp32"))
    assert "no native mxfp8" in emulated(plan(h200, "mxfp8"))[0] and "no native fp8_row" in emulated(plan(core, "fp8_row"))[0]
