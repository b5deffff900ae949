"""Batching policies: which rank trains which samples of a global batch, so that no rank waits for the one with the longest
histories.

A window of S global batches of G samples is laid out as `(S, W, B)`: step, rank, place in the rank's batch (B = G / W).

    padded, jagged          arrival order (they differ in how the model computes)
    sorted_buckets          the window sorted by work and cut into S batches of like lengths, dealt out singly; steps shuffled
    local                   each rank deals its own samples of the window to its S batches: nothing is exchanged
    base_batch_shuffling    sub-batches of 128, the heaviest beside the lightest, dealt to ranks: readers move whole sub-batches
    global                  samples of one global batch dealt to ranks one by one: the best balance, at the price of an exchange

Work is any cost per sample; `attention_pairs` is the one that hurts. All but `sorted_buckets` and `local` keep each global
batch's samples, so that the loss curve does not depend on the number of ranks.
"""
from __future__ import annotations

import numpy as np

from costmodel.plan import Batching

# A reader's unit in GEM's base batch shuffling
# [https://engineering.fb.com/2026/08/03/ml-applications/training-gem-at-llm-scale-meta-ads-recommendation-foundation-model/].
SUB_BATCH = 128
# Steps that `sorted_buckets` and `local` look ahead.
LOOKAHEAD = 8


def attention_pairs(lengths: np.ndarray) -> np.ndarray:
    """Causal (query, key) pairs of each history: `L (L + 1) / 2`."""
    lengths = lengths.astype(np.float64)
    return lengths * (lengths + 1) / 2


def window_steps(policy: Batching) -> int:
    """S: global batches that are arranged together."""
    return LOOKAHEAD if policy in ("sorted_buckets", "local") else 1


def arrange(policy: Batching, work: np.ndarray, *, steps: int, ranks: int, seed: int = 0) -> np.ndarray:
    """Places of a window's samples, `(steps, ranks, B)` int64 into `work` `(steps * ranks * B,)`.

    Raises ValueError when the samples do not divide evenly: every rank has equally many, whatever their work.
    """
    if len(work) % (steps * ranks):
        raise ValueError(f"{len(work)} samples do not divide into {steps} steps of {ranks} equal ranks")
    size = len(work) // (steps * ranks)
    arrival = np.arange(len(work)).reshape(steps, ranks, size)
    if policy in ("padded", "jagged"):
        return arrival
    if policy == "sorted_buckets":
        buckets = np.argsort(-work, kind="stable").reshape(steps, size, ranks).transpose(0, 2, 1)
        return buckets[np.random.default_rng(seed).permutation(steps)]
    if policy == "local":
        own = [arrival[:, rank].ravel() for rank in range(ranks)]
        return np.stack([samples[_deal(work[samples], steps)] for samples in own], axis=1)
    if policy == "global":
        return np.stack([samples[_deal(work[samples], ranks)] for samples in arrival.reshape(steps, -1)])
    if policy == "base_batch_shuffling":
        return np.stack([samples[_shuffle_base_batches(work[samples], ranks)] for samples in arrival.reshape(steps, -1)])
    raise ValueError(f"unknown batching policy {policy!r}")


def imbalance(work: np.ndarray, arrangement: np.ndarray) -> float:
    """The slowest rank's work over the mean, averaged over steps as the steps' times are: sum of maxima / sum of means."""
    per_rank = work[arrangement].sum(axis=-1)
    return float(per_rank.max(axis=-1).sum() / per_rank.mean(axis=-1).sum())


def sub_batch_size(local_batch: int) -> int:
    """The largest divisor of a rank's batch that is at most 128."""
    return max(d for d in range(1, min(SUB_BATCH, local_batch) + 1) if local_batch % d == 0)


def _shuffle_base_batches(work: np.ndarray, ranks: int) -> np.ndarray:
    """`(ranks, B)`: whole sub-batches dealt so that ranks weigh alike."""
    size = sub_batch_size(len(work) // ranks)
    subs = np.arange(len(work)).reshape(-1, size)
    dealt = _deal(work[subs].sum(axis=1), ranks)
    return subs[dealt].reshape(ranks, -1)


def _deal(work: np.ndarray, hands: int) -> np.ndarray:
    """`(hands, n / hands)`: equally many to each hand, heaviest first, always to the lightest hand that has room in this round.

    Rounds of one card a hand: sorted by work, the heaviest card of a round goes to the hand that is lightest so far. That pairs
    heavy with light as a snake does, and corrects what a snake leaves where the tail is heavy.
    """
    rounds = np.argsort(-work, kind="stable").reshape(-1, hands)
    total = np.zeros(hands)
    out = np.empty((hands, len(rounds)), dtype=np.int64)
    for i, cards in enumerate(rounds):
        order = np.argsort(total, kind="stable")
        out[order, i] = cards
        total[order] += work[cards]
    return out
