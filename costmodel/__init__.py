"""The cost model: what a step of a GEM-like model costs on a cluster under a plan. NumPy only; no torch, no triton."""
