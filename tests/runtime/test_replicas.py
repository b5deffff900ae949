"""Parts of table shards that replicas keep, without ranks."""
import pytest
import torch

from runtime.replicas import ReplicaShard


@pytest.mark.parametrize("rows", [8, 7, 1])
def test_parts_make_the_whole_and_the_source_is_freed(rows):
    values = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    parts = []
    for index in range(2):
        source = values.clone()
        made = ReplicaShard(source, group=None, index=index, size=2)  # type: ignore[arg-type]
        assert source.untyped_storage().nbytes() == 0  # no second whole copy while a run is set up
        assert made.whole.shape == values.shape and made.num_bytes == made.shard.numel() * 4
        parts.append(made.shard)
    assert torch.equal(torch.cat(parts)[:values.numel()], values.flatten())
    assert torch.cat(parts)[values.numel():].count_nonzero() == 0
