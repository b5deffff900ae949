"""Which sources stand behind each op kind, as one hash each: a calibration is stale where a hash differs from the one that it recorded.

    python -m runtime.hashes [TORCH]     prints JSON {op kind: hash}, as under that version of torch (default: the one installed)

Comments count too: a hash says that a file changed, not that its speed did. Ops that are PyTorch's own depend on its version alone.
"""
from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# op kind -> patterns of the files that the timed module runs; every kind depends on torch's version besides
SOURCES: dict[str, tuple[str, ...]] = {
    "linear": (), "layer_norm": (), "activation": (), "elementwise": (), "cast": (), "unique": (), "sdpa": (),
    "attention": ("kernels/*attention*.py", "kernels/gdpa.py", "kernels/_masks.py", "kernels/_tiles.py"),
    "segment_mean": ("kernels/*jagged*.py", "runtime/model/sequence.py"),
    "bce": ("runtime/loss.py",),
    "quantize": ("kernels/norm_quant.py", "kernels/_fp8.py", "kernels/factor.py", "kernels/_factor_triton.py", "runtime/precision/linear.py"),
    "cross_entropy": ("runtime/model/llama.py",),
    "embedding_lookup": ("kernels/*embedding*.py", "runtime/embedding.py", "runtime/tables.py"),
    "embedding_update": ("kernels/*embedding*.py", "kernels/*rounding*.py", "runtime/embedding.py", "runtime/tables.py"),
    "adamw": ("runtime/optimizer.py",),
    "fsdp_gather": ("runtime/parallelize.py",), "fsdp_reduce": ("runtime/parallelize.py",),
    "input": ("runtime/data.py", "runtime/histories.py", "runtime/synthetic.py", "runtime/balance.py"),
    "all_gather": ("runtime/parallelize.py", "runtime/mesh.py"), "reduce_scatter": ("runtime/parallelize.py", "runtime/mesh.py"),
    "all_reduce": ("runtime/parallelize.py", "runtime/mesh.py"), "all_to_all": ("runtime/embedding.py", "runtime/mesh.py"),
}


def source_hashes(root: Path = ROOT, *, torch: str = "") -> dict[str, str]:
    """Op kind -> first 16 hex digits of the SHA-256 over its sources' names and contents, and torch's version."""
    version = (torch or importlib.metadata.version("torch")).split("+")[0]  # what a wheel was built for is not in every place that names it
    return {kind: _hash(root, version, patterns) for kind, patterns in SOURCES.items()}


def _hash(root: Path, version: str, patterns: tuple[str, ...]) -> str:
    digest = hashlib.sha256(version.encode())
    for path in sorted({p for pattern in patterns for p in root.glob(pattern)}):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    json.dump(source_hashes(torch=sys.argv[1] if len(sys.argv) > 1 else ""), sys.stdout, indent=1)
    sys.stdout.write("\n")
