"""What is called executable trains on two ranks as on one, option by option; what is left out is refused with its reason."""
import json

import every_option
import pytest
import runtime_models as models
import torch
from conftest import torchrun

from costmodel.execution import refusal
from costmodel.plan import Layout
from planner.space import EXECUTABLE


@pytest.mark.slow
def test_every_executable_option_trains_on_two_ranks(tmp_path):
    done = torchrun(every_option.WORLD, "tests/runtime/every_option.py", str(tmp_path), timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    torch.set_num_threads(1)
    narrow, wide = (every_option.train(models.plan(Layout(), model_spec=spec)) for spec in (models.model(), every_option.WIDE))
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(every_option.WORLD)]
    for name, (plan, tolerance) in every_option.plans().items():
        expected = wide if plan.model == every_option.WIDE else narrow
        assert ranks[0][name] == ranks[1][name], name
        assert ranks[0][name] == pytest.approx(expected, rel=tolerance), name


def test_no_option_is_forgotten():
    names = set(every_option.plans())
    left = {f"{what} {value}" for what, values in EXECUTABLE.items() for value in values} - names
    assert left == {"transport nccl", "transport gloo", "execution eager", "execution cuda_graph"}
    assert {plan.transport for plan, _ in every_option.plans().values()} == {"gloo"}
    assert refusal(models.plan(Layout(), execution="cuda_graph")) == "a CPU has no CUDA graphs"
