"""Normalized entropy of binary predictions.

    NE = sum_i [-y log p - (1 - y) log(1 - p)]  /  [-P log pbar - N log(1 - pbar)]

with P = sum y, N = sum (1 - y), pbar = P / (P + N).

He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook": 1 is what the base rate alone scores, lower is
better. Sums are kept in float64 and can be added over batches and ranks.
"""
from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(slots=True)
class NormalizedEntropy:
    """Running sums: `entropy` [nats], `positives` and `weight`. `sums()` and `add()` carry them over ranks."""

    entropy: float = 0.0
    positives: float = 0.0
    weight: float = 0.0

    def update(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Adds predictions given as logits `(n,)` with labels `(n,)` in [0, 1]."""
        logits, labels = logits.astype(np.float64), labels.astype(np.float64)
        self.add((float(np.sum(np.logaddexp(0.0, logits) - labels * logits)), float(labels.sum()), float(len(labels))))

    def sums(self) -> tuple[float, float, float]:
        return self.entropy, self.positives, self.weight

    def add(self, sums: tuple[float, float, float]) -> None:
        self.entropy, self.positives, self.weight = (a + b for a, b in zip(self.sums(), sums))

    def value(self) -> float:
        """NE. Raises ValueError without both kinds of labels, where it is not defined."""
        if not 0 < self.positives < self.weight:
            raise ValueError(f"normalized entropy needs labels of both kinds, got {self.positives:g} positive of {self.weight:g}")
        rate = self.positives / self.weight
        return self.entropy / float(-self.positives * np.log(rate) - (self.weight - self.positives) * np.log1p(-rate))


def normalized_entropy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """NE of probabilities `(n,)`, clamped to [1e-7, 1 - 1e-7]."""
    p = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    sums = NormalizedEntropy()
    sums.update(np.log(p) - np.log1p(-p), labels)
    return sums.value()
