"""The GEM-like model in plain PyTorch, one module per block kind; it knows nothing of parallelism (docs/model.md has the formulas).

`BLOCKS` maps a layer group's `kind` to its module; `costmodel.blocks.BLOCKS` holds the same kinds, with equal parameter counts and FLOPs
(tests/runtime/test_flops.py).
"""
from runtime.model.gem import GEM, build_block
from runtime.model.registry import BLOCKS

__all__ = ["BLOCKS", "GEM", "build_block"]
