"""What a storage does with a gradient; sharding is in test_distributed.py."""
import dataclasses

import pytest
import runtime_models as models
import torch

from runtime.shards import Storage
from runtime.tables import StoredTable


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_adagrad_divides_its_squares_by_the_moment_scale(optimizer, scale):
    table = dataclasses.replace(models.TABLES[0], optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    state = {"rowwise_adagrad": torch.zeros(6), "adagrad": torch.zeros(6, 4), "sgd": None}[optimizer]
    spec = Storage(index=0, group=table.name, rank=0, width=4, num_rows=6)
    stored = StoredTable(spec=spec, table=table, shards=(), weight=weight.clone(), state=state, seed=0)
    expected, squares = weight.double(), torch.zeros(6, 4, dtype=torch.float64)
    for _ in range(3):
        rows = torch.tensor([0, 3, 5])
        grad = torch.randn(3, 4, generator=generator)
        stored.update(grad, rows, None, lr=0.1, moment_scale=scale)
        g = torch.zeros(6, 4, dtype=torch.float64).index_copy_(0, rows, grad.double())
        squares += g.square().mean(1, keepdim=True) if optimizer == "rowwise_adagrad" else g.square()
        expected -= 0.1 * g / ((squares / scale).sqrt() + 1e-8) if optimizer != "sgd" else 0.1 * g
    torch.testing.assert_close(stored.weight.double(), expected, rtol=1e-5, atol=1e-6)
