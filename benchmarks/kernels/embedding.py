"""Embedding backward fused with rowwise-adagrad, sort included, and the pooled lookup, on Zipf ids.

bytes = gradients + ids (8 B) + distinct rows x (2 x row + 8 B), over the copy rate.
"""

from collections.abc import Iterator

import torch

from benchmarks.kernels._timing import copy_rate, eager_seconds
from benchmarks.kernels.common import seconds
from benchmarks.results import Row
from kernels import embedding

TABLES, ROWS, DIM, BATCH, POOLING, EXPONENT = 8, 5_000_000, 128, 8192, 20, 1.05


def zipf_ids(num_tables: int, num_rows: int, count: int, seed: int) -> torch.Tensor:
    """Ids of all tables, offset by their table, `(num_tables * count,)`; popular rows are scattered over the table."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shares = torch.arange(1, num_rows + 1, dtype=torch.float64, device="cuda").pow_(-EXPONENT).cumsum(0)
    shares /= shares[-1].clone()
    draws = torch.rand(num_tables, count, dtype=torch.float64, device="cuda", generator=generator)
    ranks = torch.searchsorted(shares, draws).clamp_(max=num_rows - 1)
    table = torch.arange(num_tables, device="cuda").unsqueeze(1)
    return ((ranks * 2654435761 + 12345 * table) % num_rows + table * num_rows).flatten()


def _peer_seconds(weight: torch.Tensor, grad: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> float:
    """EmbeddingBag's sparse gradient, coalesced, and rowwise-adagrad by indexing: what plain PyTorch offers."""
    state = torch.zeros(weight.shape[0], device="cuda")

    def step() -> None:
        weight.grad = None
        torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum", sparse=True, include_last_offset=True).backward(grad)
        gradient = weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        with torch.no_grad():
            state[rows] += values.square().mean(1)
            weight[rows] -= 1e-6 * values / (state[rows].sqrt() + 1e-8).unsqueeze(1)

    return eager_seconds(step)


def measure(done: set[str]) -> Iterator[Row]:
    """Rows that are not in `done`."""
    what = f"{TABLES} tables x {ROWS} x {DIM} fp32, batch {BATCH}, pooling {POOLING}, Zipf {EXPONENT}"
    names = [f"embedding backward + rowwise-adagrad, {what}", f"embedding pooled lookup, {what}"]
    if done.issuperset(names):
        return
    rate, count = copy_rate(), BATCH * POOLING
    offsets = torch.arange(0, TABLES * count + 1, POOLING, device="cuda")
    sets = [zipf_ids(TABLES, ROWS, count, seed) for seed in range(3)]
    weight = torch.randn(TABLES * ROWS, DIM, device="cuda")
    grad = torch.randn(TABLES * BATCH, DIM, device="cuda")
    state = embedding.new_optimizer_state(weight, "rowwise_adagrad")
    distinct = sum(len(ids.unique()) for ids in sets) / len(sets)
    size = grad.nbytes + sets[0].nbytes + distinct * (2 * DIM * 4 + 8)

    def updates() -> None:  # one batch after the other, so that table rows do not come from the cache
        for ids in sets:
            embedding.embedding_backward_update_(weight, state, grad, ids, offsets, lr=1e-6)

    time = seconds(updates) / len(sets)
    read = TABLES * count * (DIM * 4 + 8) + grad.nbytes
    lookup = seconds(lambda: embedding.embedding_pooled(weight, sets[0], offsets))
    torch_lookup = seconds(lambda: torch.nn.functional.embedding_bag(sets[0], weight, offsets, mode="sum", include_last_offset=True))
    peer = _peer_seconds(weight.requires_grad_(), grad, sets[0], offsets)
    ideal = size / rate
    yield Row(
        name=names[0], value=100 * ideal / time, unit="% of copy rate", target=35.0, aim=45.0,
        peers={"torch EmbeddingBag sparse + indexing": 100 * ideal / peer, "FBGEMM (published, other GPU)": 26.5,
               "Triton TBE (published, other GPU)": 28.2},
        note=f"measured here; {time * 1e6:.0f} us, {distinct:.0f} distinct rows, ideal {ideal * 1e6:.0f} us at {rate / 1e12:.2f} TB/s; "
             "tried: tiles of ids with a segmented scan (618 us), runs in the order of their rows (446), a kernel a step (420 on another H200, at "
             "twice the host time), runs by length (403 to 472 with 2 to 8 runs of one row and 1 to 4 of four at a time, 20 to 28 programs a "
             "multiprocessor), by parts of the sorted ids and with torch's sort (349); the rows read and written once by a kernel that does nothing "
             "else take 119, with their states 146, and 20 reads of each gradient from L2 about as long",
    )  # fmt: skip
    yield Row(
        name=names[1], value=read / lookup / 1e12, unit="TB/s", peers={"torch EmbeddingBag": read / torch_lookup / 1e12},
        note="measured here; counts every id's row, so repeated rows from the cache lift it above the copy rate",
    )  # fmt: skip
