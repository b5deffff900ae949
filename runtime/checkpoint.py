"""Checkpoints: dense model and optimizer, tables and their state, data position and random state, in one directory a step.

The state is copied at once and written by torch.distributed.checkpoint from a thread, over a process group of its own, while training goes on. What
is written is `ROOT/step-N.tmp`, which becomes `ROOT/step-N` by a rename once every rank has written: a checkpoint exists whole or not at all,
whenever a process dies. The newest two are kept.

Tables are stored shard by shard under `tables/NAME/ROWS/COLUMNS`, so that another plan can read them: a shard takes its part of every stored shard it
overlaps. A row-wise Adagrad state that was kept per column shard is averaged by width, which is the state of the whole row. Replicas of a sparse
group hold the same, but between two averages, when replica r > 0 has its own under `replicas/r/tables/...`: the same plan takes them up again,
another one goes on from replica 0's.
"""
from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from costmodel.codec import DecodeError, decode, encode
from runtime.embedding import ShardedEmbeddings
from runtime.mesh import background_group
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


class Saving:
    """A checkpoint that is being written. `wait` on every rank before the next one is begun and before the process leaves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._published: Future[None] = Future()

    def wait(self) -> Path:
        """Collective. The checkpoint's directory, once it is whole; raises what went wrong while it was written."""
        self._published.result()
        _barrier()
        return self.path

    def publish_when(self, written: Future) -> None:
        """The checkpoint is renamed to its place once `written` is done, in the thread that wrote it."""
        written.add_done_callback(self._publish)

    def _publish(self, written: Future) -> None:
        try:
            written.result()
            if _rank() == 0:
                _publish(self.path)
            self._published.set_result(None)
        except BaseException as error:
            self._published.set_exception(error)


def save(root: Path, progress: Progress, *, model, optimizer, embeddings: ShardedEmbeddings) -> Saving:
    """Collective. Returns when the state has been copied; what happens to the model afterwards is not in the checkpoint."""
    saving = Saving(root / f"step-{progress.step:08d}")
    temporary = _temporary(saving.path)
    if _rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / "progress.json").write_text(json.dumps(encode(progress)))
    _barrier()
    with embeddings.whole(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns about its own deprecations and about running in one process
        state = {**_dense_state(model, optimizer), **_table_state(embeddings), f"rng/{_rank()}": torch.get_rng_state()}
        written = dcp.async_save(state, storage_writer=FileSystemWriter(temporary, single_file_per_rank=True), process_group=background_group())
        if not dist.is_initialized():
            written.exception()  # DCP warns of that in its thread, where warnings are ignored for as long as they are here
    saving.publish_when(written)
    return saving


def set_aside(root: Path) -> None:
    """Checkpoints of an earlier run become `ROOT.old`, so that a new one is not continued from them."""
    if root.is_dir():
        old = root.with_name(f"{root.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        root.rename(old)


def _temporary(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp")


def _publish(final: Path) -> None:
    """A step that was saved before, by the attempt that this one continues, is the same and stays."""
    if final.exists():
        shutil.rmtree(_temporary(final))
    else:
        _temporary(final).rename(final)
    for old in sorted(p for p in final.parent.glob("step-*") if re.fullmatch(r"step-\d+", p.name))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def load(path: Path, *, model, optimizer, embeddings: ShardedEmbeddings, fingerprint: str) -> Progress:
    """Restores everything in place. Raises ValueError for a checkpoint of another model (`fingerprint`) or one that is damaged."""
    try:
        progress = decode(Progress, json.loads((path / "progress.json").read_text()))
    except (OSError, json.JSONDecodeError, DecodeError) as error:
        raise ValueError(f"{path}: not a checkpoint ({error})") from error
    if progress.model != fingerprint:
        raise ValueError(f"{path}: holds model {progress.model}, the plan has {fingerprint}; resume with the plan's own --out or start anew")
    stored = set(FileSystemReader(path).read_metadata().state_dict_metadata)
    rank = _rank()
    dense = _dense_state(model, optimizer)
    own = [group["params"] for group in dense["optim"]["param_groups"]]
    random_state = {f"rng/{rank}": torch.get_rng_state()} if f"rng/{rank}" in stored else {}
    with embeddings.whole(write=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replica = _replica_to_read(embeddings, stored)
        pieces = _pieces(embeddings, stored, replica)
        state = {**dense, **{key: piece for key, (piece, _) in pieces.items()}, **random_state}
        dcp.load(state, storage_reader=FileSystemReader(path))
        for group, names in zip(state["optim"]["param_groups"], own, strict=True):
            group["params"] = names  # stored are those of rank 0, whose experts may be others
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        _restore_tables(embeddings, {key: (state[key], extent) for key, (_, extent) in pieces.items()}, progress.step, replica)
    if random_state:
        torch.set_rng_state(state[f"rng/{rank}"])
    return progress


def _dense_state(model, optimizer) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


# --- tables --------------------------------------------------------------------------------------------------------------------------

Extent = tuple[int, int, int, int]


def _key(table: str, extent: Extent, part: str, replica: int = 0) -> str:
    key = f"tables/{table}/{extent[0]}-{extent[1]}/{extent[2]}-{extent[3]}/{part}"
    return f"replicas/{replica}/{key}" if replica else key


def _extent(shard: PlacedShard) -> Extent:
    return shard.row_begin, shard.row_begin + shard.num_rows, shard.col_begin, shard.col_end


def _parts(stored, shard: PlacedShard) -> dict[str, Tensor]:
    rows = slice(shard.base, shard.base + shard.num_rows)
    return {"weight": stored.weight[rows], **{f"state{i}": t[rows] for i, t in enumerate(stored.state_tensors())}}


def _table_state(embeddings: ShardedEmbeddings) -> dict[str, Tensor]:
    replica = embeddings.meshes.replica
    if replica and not embeddings.replicas_differ:
        return {}
    first = embeddings.meshes.sparse_rank == 0
    return {_key(shard.table, _extent(shard), name, replica): part for stored in embeddings.storages if first or not stored.spec.replicated
            for shard in stored.shards for name, part in _parts(stored, shard).items()}


def _stored_extents(stored: set[str], replica: int) -> dict[tuple[str, str], list[Extent]]:
    extents: dict[tuple[str, str], list[Extent]] = {}
    prefix = f"replicas/{replica}/" if replica else ""
    for key in stored:
        if m := re.fullmatch(prefix + r"tables/(.+)/(\d+)-(\d+)/(\d+)-(\d+)/(\w+)", key):
            extents.setdefault((m[1], m[6]), []).append((int(m[2]), int(m[3]), int(m[4]), int(m[5])))
    return extents


def _overlaps(shard: PlacedShard, extents: list[Extent]) -> list[Extent]:
    r0, r1, c0, c1 = _extent(shard)
    return sorted(e for e in extents if e[0] < r1 and r0 < e[1] and e[2] < c1 and c0 < e[3])


def _replica_to_read(embeddings: ShardedEmbeddings, stored_keys: set[str]) -> int:
    """This rank's own replica where the checkpoint has exactly its shards, else 0."""
    replica = embeddings.meshes.replica
    shards = [(stored, shard) for stored in embeddings.storages for shard in stored.shards]
    own = {_key(shard.table, _extent(shard), name, replica) for stored, shard in shards for name in _parts(stored, shard)}
    return replica if own <= stored_keys else 0


def _pieces(embeddings: ShardedEmbeddings, stored_keys: set[str], replica: int) -> dict[str, tuple[Tensor, Extent]]:
    """Empty tensors for every stored shard that this rank needs a part of."""
    extents, pieces = _stored_extents(stored_keys, replica), {}
    for stored in embeddings.storages:
        for shard in stored.shards:
            for name, part in _parts(stored, shard).items():
                found = _overlaps(shard, extents.get((shard.table, name), []))
                if not found:
                    raise ValueError(f"checkpoint: no {name} of table {shard.table}")
                for e in found:
                    shape = (e[1] - e[0], e[3] - e[2])[:part.dim()]
                    pieces[_key(shard.table, e, name, replica)] = (torch.empty(shape, dtype=part.dtype, device=part.device), e)
    return pieces


def _restore_tables(embeddings: ShardedEmbeddings, pieces: dict[str, tuple[Tensor, Extent]], step: int, replica: int) -> None:
    extents = _stored_extents(set(pieces), replica)
    embeddings.num_steps = step
    for stored in embeddings.storages:
        stored.steps = step
        for shard in stored.shards:
            for name, part in _parts(stored, shard).items():
                if part.dim() == 1:
                    part.zero_()
                for e in _overlaps(shard, extents[shard.table, name]):
                    _copy_part(part, shard, pieces[_key(shard.table, e, name, replica)][0], e)


def _copy_part(target: Tensor, shard: PlacedShard, source: Tensor, extent: Extent) -> None:
    r0, r1, c0, c1 = _extent(shard)
    a, b, left, right = max(r0, extent[0]), min(r1, extent[1]), max(c0, extent[2]), min(c1, extent[3])
    rows_to, rows_from = slice(a - r0, b - r0), slice(a - extent[0], b - extent[0])
    if target.dim() == 1:  # a row's state: mean over the columns, by width
        target[rows_to] += source[rows_from] * ((right - left) / (c1 - c0))
    else:
        target[rows_to, left - c0:right - c0] = source[rows_from, left - extent[2]:right - extent[2]]
