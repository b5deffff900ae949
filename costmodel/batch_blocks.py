"""Blocks priced over many batch shapes at once: what `pricer.Pricer` and `Block.saved_bytes` say of each shape, as arrays.

Without a calibration an op's time is a formula (`costmodel.compute.roofline`), which arrays of features go through as
well as numbers do; so a block lists its ops once, with arrays `(n,)` for events, pairs and samples. Measured curves are read shape by shape.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from costmodel.blocks import BatchShape, Block, activation_dtype
from costmodel.blocks.base import JaggedShape
from costmodel.compute import peak_flops, roofline
from costmodel.ops import FORWARD, Op, dtype_bytes
from costmodel.precision import LOW_PRECISIONS
from costmodel.pricer import Pricer


class _Shapes:
    """The same sequence in several batches: what a block reads of a `JaggedShape`, as arrays."""

    def __init__(self, shapes: Sequence[JaggedShape]) -> None:
        self.shapes = shapes
        self.samples, self.tokens, self.longest = (np.array([getattr(s, name) for s in shapes]) for name in ("samples", "tokens", "longest"))
        self._pairs: dict[tuple[tuple[str, object], ...], np.ndarray] = {}
        self._newest: dict[int, _Shapes] = {}

    def newest(self, limit: int | None) -> _Shapes:
        if limit is None:
            return self
        if limit not in self._newest:
            self._newest[limit] = _Shapes([s.newest(limit) for s in self.shapes])
        return self._newest[limit]

    def pairs(self, **masks: object) -> np.ndarray:
        key = tuple(sorted(masks.items()))
        if key not in self._pairs:
            self._pairs[key] = np.array([s.pairs(**masks) for s in self.shapes])
        return self._pairs[key]


class BlockPrices:
    """Seconds and bytes of one block under each of `batches`, `(n,)` each."""

    def __init__(self, prices: Pricer, batches: Sequence[BatchShape]) -> None:
        self.prices, self.batches = prices, batches
        self.stacked = BatchShape(samples=np.array([b.samples for b in batches]),
                                  sequences={name: _Shapes([b.sequences[name] for b in batches]) for name in batches[0].sequences})
        self.scalar = prices.calibration is not None
        self._ops: dict[tuple[int, str], tuple[Block, tuple[Op, ...]]] = {}  # with the block, whose identity stays taken

    def alike(self, precision: str) -> Hashable:
        """Precisions with equal keys take equal time."""
        if self.scalar or precision in LOW_PRECISIONS:
            return precision
        return activation_dtype(precision), dtype_bytes(precision), peak_flops(self.prices.device, precision)

    def block(self, block: Block, precision: str, phase: str) -> np.ndarray:
        """One pass of a block."""
        if self.scalar:
            return self._each(lambda batch: self.prices.block(block, batch, precision, phase).seconds)
        return self._sum(self.forward(block, precision), phase)

    def recompute(self, block: Block, precision: str, policy: str) -> np.ndarray:
        """What runs again before a block's backward."""
        if self.scalar:
            return self._each(lambda batch: self.prices.recompute(block, batch, precision, policy).seconds)
        return self._sum(block.recomputed(self.stacked, precision, policy, self.forward(block, precision)), FORWARD)

    def saved(self, block: Block, precision: str, policy: str) -> np.ndarray:
        """Bytes kept from forward to backward, beside graphs."""
        if self.prices.captured(block):
            return np.zeros(len(self.batches))
        return np.broadcast_to(block.saved_bytes(self.stacked, precision, policy), len(self.batches))

    def forward(self, block: Block, precision: str) -> tuple[Op, ...]:
        key = (id(block), precision)
        if key not in self._ops:
            self._ops[key] = block, block.forward(self.stacked, precision)
        return self._ops[key][1]

    def _each(self, price: Callable[[BatchShape], float]) -> np.ndarray:
        return np.array([price(batch) for batch in self.batches])

    def _sum(self, ops: Sequence[Op], phase: str) -> np.ndarray:
        return np.broadcast_to(sum(roofline(one, way, self.prices.device) for one, way in self.prices.expanded(ops, phase)), len(self.batches))
