"""Checkpoints: dense model and optimizer, tables and their state, data position and random state, in one directory a step.

Written with torch.distributed.checkpoint into `ROOT/step-N.tmp`, which becomes `ROOT/step-N` by a rename once every rank has written: a
checkpoint exists whole or not at all. The newest two are kept.

Tables are stored shard by shard under `tables/NAME/ROWS/COLUMNS`, so that another plan can read them: a shard takes its part of every stored shard it
overlaps. A row-wise Adagrad state that was kept per column shard is averaged by width, which is the state of the whole row.
"""
from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from costmodel.codec import DecodeError, decode, encode
from runtime.embedding import ShardedEmbeddings
from runtime.shards import PlacedShard

KEEP = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where training stands: `step` optimizer steps done, `position` samples consumed by all ranks, losses of all steps."""

    step: int
    position: int
    model: str
    losses: tuple[float, ...] = ()


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`."""
    found = [(int(m[1]), p) for p in root.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
    return max(found)[1] if found else None


def save(root: Path, progress: Progress, *, model, optimizer, embeddings: ShardedEmbeddings) -> Path:
    """Collective. Returns the checkpoint's directory."""
    final = root / f"step-{progress.step:08d}"
    temporary = root / f"{final.name}.tmp"
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / "progress.json").write_text(json.dumps(encode(progress)))
    _barrier()
    with embeddings.whole(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns about its own deprecations and about running in one process
        state = {**_dense_state(model, optimizer), **_table_state(embeddings), f"rng/{rank}": torch.get_rng_state()}
        dcp.save(state, storage_writer=FileSystemWriter(temporary, single_file_per_rank=True))
    _barrier()
    if rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in sorted(p for p in root.glob("step-*") if re.fullmatch(r"step-\d+", p.name))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier()
    return final


def load(path: Path, *, model, optimizer, embeddings: ShardedEmbeddings, fingerprint: str) -> Progress:
    """Restores everything in place. Raises ValueError for a checkpoint of another model (`fingerprint`) or one that is damaged."""
    try:
        progress = decode(Progress, json.loads((path / "progress.json").read_text()))
    except (OSError, json.JSONDecodeError, DecodeError) as error:
        raise ValueError(f"{path}: not a checkpoint ({error})") from error
    if progress.model != fingerprint:
        raise ValueError(f"{path}: holds model {progress.model}, the plan has {fingerprint}; resume with the plan's own --out or start anew")
    stored = set(FileSystemReader(path).read_metadata().state_dict_metadata)
    rank = dist.get_rank() if dist.is_initialized() else 0
    dense = _dense_state(model, optimizer)
    random_state = {f"rng/{rank}": torch.get_rng_state()} if f"rng/{rank}" in stored else {}
    with embeddings.whole(write=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pieces = _pieces(embeddings, stored)
        state = {**dense, **{key: piece for key, (piece, _) in pieces.items()}, **random_state}
        dcp.load(state, storage_reader=FileSystemReader(path))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        _restore_tables(embeddings, {key: (state[key], extent) for key, (_, extent) in pieces.items()}, progress.step)
    if random_state:
        torch.set_rng_state(state[f"rng/{rank}"])
    return progress


def _dense_state(model, optimizer) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


# --- tables --------------------------------------------------------------------------------------------------------------------------

Extent = tuple[int, int, int, int]


def _key(table: str, extent: Extent, part: str) -> str:
    return f"tables/{table}/{extent[0]}-{extent[1]}/{extent[2]}-{extent[3]}/{part}"


def _extent(shard: PlacedShard) -> Extent:
    return shard.row_begin, shard.row_begin + shard.num_rows, shard.col_begin, shard.col_end


def _parts(stored, shard: PlacedShard) -> dict[str, Tensor]:
    rows = slice(shard.base, shard.base + shard.num_rows)
    return {"weight": stored.weight[rows], **{f"state{i}": t[rows] for i, t in enumerate(stored.state_tensors())}}


def _table_state(embeddings: ShardedEmbeddings) -> dict[str, Tensor]:
    if embeddings.meshes.replica:
        return {}  # replicas hold what replica 0 holds
    return {_key(shard.table, _extent(shard), name): part
            for stored in embeddings.storages for shard in stored.shards for name, part in _parts(stored, shard).items()}


def _stored_extents(stored: set[str]) -> dict[tuple[str, str], list[Extent]]:
    extents: dict[tuple[str, str], list[Extent]] = {}
    for key in stored:
        if m := re.fullmatch(r"tables/(.+)/(\d+)-(\d+)/(\d+)-(\d+)/(\w+)", key):
            extents.setdefault((m[1], m[6]), []).append((int(m[2]), int(m[3]), int(m[4]), int(m[5])))
    return extents


def _overlaps(shard: PlacedShard, extents: list[Extent]) -> list[Extent]:
    r0, r1, c0, c1 = _extent(shard)
    return sorted(e for e in extents if e[0] < r1 and r0 < e[1] and e[2] < c1 and c0 < e[3])


def _pieces(embeddings: ShardedEmbeddings, stored_keys: set[str]) -> dict[str, tuple[Tensor, Extent]]:
    """Empty tensors for every stored shard that this rank needs a part of."""
    extents, pieces = _stored_extents(stored_keys), {}
    for stored in embeddings.storages:
        for shard in stored.shards:
            for name, part in _parts(stored, shard).items():
                found = _overlaps(shard, extents.get((shard.table, name), []))
                if not found:
                    raise ValueError(f"checkpoint: no {name} of table {shard.table}")
                for e in found:
                    shape = (e[1] - e[0], e[3] - e[2])[:part.dim()]
                    pieces[_key(shard.table, e, name)] = (torch.empty(shape, dtype=part.dtype, device=part.device), e)
    return pieces


def _restore_tables(embeddings: ShardedEmbeddings, pieces: dict[str, tuple[Tensor, Extent]], step: int) -> None:
    extents = _stored_extents(set(pieces))
    embeddings.num_steps = step
    for stored in embeddings.storages:
        stored.steps = step
        for shard in stored.shards:
            for name, part in _parts(stored, shard).items():
                if part.dim() == 1:
                    part.zero_()
                for e in _overlaps(shard, extents[shard.table, name]):
                    _copy_part(part, shard, pieces[_key(shard.table, e, name)][0], e)


def _copy_part(target: Tensor, shard: PlacedShard, source: Tensor, extent: Extent) -> None:
    r0, r1, c0, c1 = _extent(shard)
    a, b, left, right = max(r0, extent[0]), min(r1, extent[1]), max(c0, extent[2]), min(c1, extent[3])
    rows_to, rows_from = slice(a - r0, b - r0), slice(a - extent[0], b - extent[0])
    if target.dim() == 1:  # a row's state: mean over the columns, by width
        target[rows_to] += source[rows_from] * ((right - left) / (c1 - c0))
    else:
        target[rows_to, left - c0:right - c0] = source[rows_from, left - extent[2]:right - extent[2]]
