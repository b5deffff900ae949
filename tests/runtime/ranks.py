"""What every rank of one torchrun launch does for the tests: all checks that need this world size, one after the other.

    PYTHONPATH=.:tests/runtime python -m torch.distributed.run --standalone --nproc-per-node N tests/runtime/ranks.py OUT

Rank r writes OUT/rank-r.json: {name of check: figures}. The assertions are in test_distributed.py.
"""
from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import runtime_models as models
import torch
from interaction_models import MOE, full_model

from costmodel.plan import Layout, Plan
from runtime import checkpoint, mesh
from runtime.data import open_source
from runtime.embedding import ShardedEmbeddings
from runtime.microbench import contention, exchange
from runtime.trainer import Trainer

CPU = torch.device("cpu")
LONG = ("fsdp", "ddp")  # layouts that run all 20 steps
LENGTHS = [4, 0, 7, 1, 3, 2, 9, 5]
TABLES = models.TABLES
EXACT = tuple(t for t in TABLES if t.optimizer != "rowwise_adagrad")


def layouts(world: int) -> dict[str, Plan]:
    """Plans whose loss curves must equal that of one rank."""
    full = Layout(fsdp=world, sparse_group=world)
    found = {
        "fsdp": models.plan(full),
        "keep_unsharded": models.plan(Layout(fsdp=world, sparse_group=world, reshard_after_forward=False), sharding="row_wise"),
        "ddp": models.plan(Layout(ddp=world, sparse_group=world), sharding="table_wise"),
        "accumulate": models.plan(full, accumulation=2),
        "selective": models.plan(full, checkpoint="selective"),
        "full": models.plan(full, checkpoint="full"),
    }
    for name in ("fsdp", "accumulate"):
        found[f"{name}_overlapped"] = dataclasses.replace(found[name], input_overlap=True)
    if world == 4:
        found["hybrid"] = models.plan(Layout(ddp=2, fsdp=2, sparse_group=4))
    return found


def _trainer(plan: Plan) -> Trainer:
    return Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=CPU)


def train(plan: Plan, steps: int = 20) -> Trainer:
    trainer = _trainer(plan)
    trainer.train(steps)
    return trainer


def check_curves(world: int, out: Path) -> dict:
    found = {}
    for name, plan in layouts(world).items():
        trainer = train(plan, 20 if name in LONG else 8)
        measured, warmup = trainer.measured()
        found[name] = {"losses": trainer.losses, "phases": trainer.phases, "warmup": warmup, "step": measured.step_time_s.mean,
                       "phases_mean": measured.phases_s, "ne": trainer.evaluate(),
                       "parameters": measured.memory_bytes.parameters, "tables": measured.memory_bytes.tables,
                       "saved_activations": measured.memory_bytes.saved_activations}
    return found


def check_bf16(world: int, out: Path) -> dict:
    trainer = train(models.plan(Layout(fsdp=world, sparse_group=world), precision="bf16"))
    return {"losses": trainer.losses, "dtypes": sorted({str(p.dtype) for p in trainer.model.dense.parameters()}),
            "sent": sum(g.sent_bytes for g in trainer.model.gathers)}


def check_gathers(world: int, out: Path) -> dict:
    """20 steps whose parameters are gathered in 8 bits, whose gradients are reduced in 16, and both."""
    found = {}
    for name, changes in {"fp8": {"gather_dtype": "fp8"}, "bf16 gradients": {"reduce_dtype": "bf16"},
                          "both": {"gather_dtype": "fp8", "reduce_dtype": "bf16"}}.items():
        trainer = train(models.plan(Layout(fsdp=world, sparse_group=world), precision="bf16", **changes))
        found[name] = {"losses": trainer.losses, "sent": sum(g.sent_bytes for g in trainer.model.gathers),
                       "dtypes": sorted({str(p.dtype) for p in trainer.model.dense.parameters()})}
    return found


def _leaf_loss(embeddings: ShardedEmbeddings, batch, samples: int) -> None:
    outs = embeddings.forward(batch)
    total = sum(((o * torch.linspace(0.5, 1.5, o.shape[-1])).tanh() + o.square()).sum() for o in outs.values())
    embeddings.before_backward()
    embeddings.gather_ahead()
    (total / samples).backward()
    embeddings.backward()


def _part(first: int, last: int, step: int, tables):
    """Samples [first, last) of a step's batch of len(LENGTHS): ids do not depend on who asks."""
    whole = models.batch(models.model(tables=tables), LENGTHS, seed=step)
    ids, offsets = {}, {}
    edges = whole.sequence_offsets["history"]
    for t in tables:
        rows = whole.ids[t.name]
        if t.sequence:
            ids[t.name] = rows.view(t.count, -1)[:, edges[first]:edges[last]].flatten()
        else:
            bags = whole.offsets[t.name]
            own = [rows[bags[c * len(LENGTHS) + first]:bags[c * len(LENGTHS) + last]] for c in range(t.count)]
            sizes = bags.diff().view(t.count, -1)[:, first:last].flatten()
            ids[t.name], offsets[t.name] = torch.cat(own), torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])

    return dataclasses.replace(whole, ids=ids, offsets=offsets, sequence_offsets={"history": edges[first:last + 1] - edges[first]},
                               labels=whole.labels[first:last], dense=None, num_samples=last - first)


def _build(layout: Layout, tables, sharding: str, **options) -> ShardedEmbeddings:
    return ShardedEmbeddings(tables, models.placements(tables, layout.sparse_group, sharding=sharding), mesh.build_meshes(layout, CPU), seed=5,
                             learning_rate=0.1, **options)


def _alone() -> mesh.Meshes:
    return mesh.Meshes(layout=Layout(), rank=0, device=CPU, dense=None, sparse_group=None, sparse_replicas=None)


def _unsharded(tables, **options) -> ShardedEmbeddings:
    return ShardedEmbeddings(tables, models.placements(tables, 1), _alone(), seed=5, learning_rate=0.1, **options)


def _difference(sharded: ShardedEmbeddings, whole: ShardedEmbeddings) -> float:
    """Largest relative difference of weights and state, row for row."""
    worst, by_name = 0.0, {s.table.name: s for s in whole.storages}
    for stored in sharded.storages:
        other = by_name[stored.table.name]
        for shard in stored.shards:
            mine, theirs = slice(shard.base, shard.base + shard.num_rows), slice(shard.key_begin, shard.key_end)
            columns = slice(shard.col_begin, shard.col_end)
            pairs = [(stored.weight[mine], other.weight[theirs, columns])]
            pairs += [(a[mine], b[theirs] if b.dim() == 1 else b[theirs, columns])
                      for a, b in zip(stored.state_tensors(), other.state_tensors())]
            worst = max([worst, *(float(((a - b).abs() / (b.abs() + 1e-3)).max()) for a, b in pairs if a.numel())])
    return worst


def check_tables(world: int, out: Path) -> dict:
    """20 steps of sharded tables against an unsharded copy that sees the whole batch."""
    found = {}
    share, rank = len(LENGTHS) // world, int(os.environ["RANK"])
    cases = {"table_wise": TABLES, "row_wise": TABLES, "mixed": TABLES, "table_row_wise": TABLES, "column_wise": EXACT, "data_parallel": TABLES,
             "host_cached": TABLES, "every": TABLES}
    for sharding, tables in cases.items():
        sharded, whole = _build(Layout(fsdp=world, sparse_group=world), tables, sharding), _unsharded(tables)
        for step in range(20):
            _leaf_loss(whole, _part(0, len(LENGTHS), step, tables), len(LENGTHS))
            _leaf_loss(sharded, _part(rank * share, (rank + 1) * share, step, tables), share)
        device, state, host = (sum(getattr(s, f"{kind}_bytes") for s in sharded.storages) for kind in ("weight", "state", "host"))
        found[sharding] = {"difference": _difference(sharded, whole), "moved": _difference(sharded, _unsharded(tables)), "device": device,
                           "state": state, "host": host, "copies": _checksum(sharded)}
    return found


def _checksum(embeddings: ShardedEmbeddings) -> float:
    """Of data-parallel tables, which must be bitwise the same on every rank."""
    return float(sum(s.weight.double().mul(torch.arange(1, s.weight.shape[1] + 1)).sum() for s in embeddings.storages if s.spec.replicated))


def check_replicas(world: int, out: Path) -> dict:
    """Plain 2D against one process that plays every replica and averages every second step, Adagrad's moments scaled or not."""
    replicas = world // 2 if world > 2 else world
    layout = Layout(fsdp=world, sparse_group=world // replicas, sparse_replicas=replicas)
    return {"difference": max(_replicated(layout, scale) for scale in (1.0, float(replicas)))}


def _replicated(layout: Layout, scale: float) -> float:
    replicas, group, rank, world = layout.sparse_replicas, layout.sparse_group, int(os.environ["RANK"]), layout.world_size
    own = _build(layout, TABLES, "row_wise", sync_every=2, moment_scale=scale)
    emulated = [_unsharded(TABLES, moment_scale=scale) for _ in range(replicas)]
    share = len(LENGTHS) // world
    for step in range(6):
        _leaf_loss(own, _part(rank * share, (rank + 1) * share, step, TABLES), share)
        for i, replica in enumerate(emulated):
            _leaf_loss(replica, _part(i * group * share, (i + 1) * group * share, step, TABLES), group * share)
        if step % 2:
            for stored in zip(*(e.storages for e in emulated)):
                for tensors in zip(*((s.weight, *s.state_tensors()) for s in stored)):
                    mean = sum(tensors[1:], tensors[0]) / replicas
                    for t in tensors:
                        t.copy_(mean)
    return _difference(own, emulated[rank // group])


def check_fully_sharded(world: int, out: Path) -> dict:
    """Fully sharded 2D against one process that plays every replica and averages every step; what rests, and resuming."""
    replicas = world // 2 if world > 2 else world
    group, rank = world // replicas, int(os.environ["RANK"])
    layout = Layout(fsdp=world, sparse_group=group, sparse_replicas=replicas, fully_sharded_2d=True)
    own, ahead = _build(layout, TABLES, "row_wise"), _build(layout, TABLES, "row_wise", ahead=True)
    emulated = [_unsharded(TABLES) for _ in range(replicas)]
    share = len(LENGTHS) // world
    for step in range(6):
        for tables in (own, ahead):
            _leaf_loss(tables, _part(rank * share, (rank + 1) * share, step, TABLES), share)
        for i, replica in enumerate(emulated):
            _leaf_loss(replica, _part(i * group * share, (i + 1) * group * share, step, TABLES), group * share)
        for stored in zip(*(e.storages for e in emulated)):
            for tensors in zip(*((s.weight, *s.state_tensors()) for s in stored)):
                mean = sum(tensors[1:], tensors[0]) / replicas
                for t in tensors:
                    t.copy_(mean)
    prefetched = sum(s.weight_bytes for s in ahead.storages)
    ahead.settle()
    resting, resting_ahead, whole = (sum(s.weight_bytes + s.state_bytes for s in e.storages) for e in (own, ahead, emulated[0]))
    with own.whole(), ahead.whole():
        difference = _difference(own, emulated[0])
        same = _bits(own) == _bits(ahead)
        gathered = sum(s.weight_bytes for s in own.storages)
    plan = models.plan(layout, sharding="row_wise")
    first = train(plan, 3)
    first.save(out / "fully-sharded")
    second = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=CPU)
    second.resume(checkpoint.latest(out / "fully-sharded"))
    second.train(6)
    return {"difference": difference, "resting": resting, "whole": whole, "gathered": gathered, "replicas": replicas, "group": group,
            "resumed": second.losses, "losses": train(plan, 6).losses, "same": same, "resting_ahead": resting_ahead, "prefetched": prefetched}


def _bits(embeddings: ShardedEmbeddings) -> list[bytes]:
    return [t.clone().view(torch.uint8).numpy().tobytes() for s in embeddings.storages for t in (s.weight, *s.state_tensors())]


def check_replicas_beside_compute(world: int, out: Path) -> dict:
    """Collectives over replicas beside compute or waited for at once: losses, tables and their state afterwards, what was under way when."""
    group = world // 2 if world > 2 else 1
    layout, found = Layout(fsdp=world, sparse_group=group, sparse_replicas=world // group), {}
    narrow = tuple(dataclasses.replace(t, dtype="bf16") for t in TABLES)
    in_16_bits = {"model_spec": models.model(tables=narrow)}
    for name, full, changes in (("full", True, {}), ("full, two micro-batches", True, {"accumulation": 2, "checkpoint": "full"}),
                                ("full, 16 bits", True, in_16_bits), ("plain", False, {}), ("plain, every other step", False, {"sync_every": 2}),
                                ("plain, 16 bits", False, in_16_bits), ("plain, scaled moments", False, {"moment_scaled": True})):
        changes = dict(changes)
        here = dataclasses.replace(layout, fully_sharded_2d=full, sync_every=changes.pop("sync_every", 1))
        results = {}
        for ahead in (0, 1, 99) if name == "full" else (0, 99):
            trainer, seen = _watched(models.plan(here, tables_ahead=ahead, **changes))
            trainer.train(5)
            trainer.save(out / f"beside {name} {ahead}")
            trainer.train(7)
            with trainer.model.embeddings.whole():
                results[ahead] = (trainer.losses, _bits(trainer.model.embeddings), list(seen))
            if ahead == 0 or name not in ("full", "plain, every other step"):
                results[ahead] = (*results[ahead], trainer.losses)
                continue
            resumed = _trainer(models.plan(here, **changes))
            resumed.resume(checkpoint.latest(out / f"beside {name} {ahead}"))
            resumed.train(7)
            results[ahead] = (*results[ahead], resumed.losses)
        found[name] = {"losses": [r[0] for r in results.values()], "same": len({tuple(r[1]) for r in results.values()}) == 1,
                       "begun": {ahead: r[2] for ahead, r in results.items()}, "resumed": [r[3] for r in results.values()]}
    return found


def _watched(plan: Plan) -> tuple[Trainer, list[int]]:
    """A trainer, and at each early gather how many blocks' backward had begun in that step or before."""
    seen, started, gather_ahead = [], [], ShardedEmbeddings.gather_ahead

    def watch(_block, _inputs, output) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(lambda _: started.append(1))

    def gathering(self) -> None:
        seen.append(len(started))
        gather_ahead(self)

    ShardedEmbeddings.gather_ahead = gathering
    try:
        trainer = _trainer(plan)
    finally:
        ShardedEmbeddings.gather_ahead = gather_ahead
    for blocks in trainer.model.dense.regions().values():
        for parent, key in blocks:
            parent.get_submodule(key).register_forward_hook(watch)
    return trainer, seen


def check_wires(world: int, out: Path) -> dict:
    """Six steps with each format of rows and gradients on the wire; bytes sent, and rows sent by width."""
    found = {}
    for rows, gradients in (("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "bf16"), ("int8", "bf16"), ("int4", "bf16"), ("fp8", "fp8")):
        plan = models.plan(Layout(fsdp=world, sparse_group=world), sharding="row_wise", wire=rows, wire_gradients=gradients)
        trainer = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=CPU)
        tables, counted = trainer.model.embeddings, {"embeddings": {}, "gradients": {}}

        def watch(wire, what, counted=counted):
            def pack(values):
                width = values.shape[1]
                counted[what][width] = counted[what].get(width, 0) + values.shape[0]
                return wire.pack(values)
            return SimpleNamespace(pack=pack, unpack=wire.unpack, units=wire.units, dtype=wire.dtype)

        tables.wire, tables.wire_gradients = watch(tables.wire, "embeddings"), watch(tables.wire_gradients, "gradients")
        trainer.train(6)
        found[f"{rows}/{gradients}"] = {"losses": trainer.losses, "sent": tables.sent_bytes, "rows": counted}
    return found


def check_all_layers(world: int, out: Path) -> dict:
    """A model with every kind of layer, under two checkpoint policies."""
    layout = Layout(fsdp=world, sparse_group=world)
    return {policy: {"losses": train(models.plan(layout, model_spec=full_model(), checkpoint=policy), 8).losses} for policy in ("none", "selective")}


def expert_plan(layout: Layout, **changes) -> Plan:
    """A model with two layers of four experts."""
    return models.plan(layout, model_spec=models.model(expert_layers=(dataclasses.replace(MOE, num_experts=4, count=2),)), **changes)


def expert_layouts(world: int) -> dict[str, Layout]:
    """Layouts whose experts are spread."""
    full = Layout(fsdp=world, sparse_group=world, ep=2)
    found = {"all_gather": full, "all_to_all": dataclasses.replace(full, expert_all_to_all=True)}
    if world == 4:
        found |= {"ddp": dataclasses.replace(full, ddp=2, fsdp=2), "one_each": dataclasses.replace(full, ep=4),
                  "one_each_keep": dataclasses.replace(full, ep=4, expert_all_to_all=True, reshard_after_forward=False)}
    return found


def check_experts(world: int, out: Path) -> dict:
    """Spread experts: curves, parameters and evaluation; the second half of a training whose first half had other places of experts."""
    found, trainers = {}, {}
    for (name, layout), policy in zip(expert_layouts(world).items(), ("none", "full", "selective", "none", "full")):
        trainers[name] = trainer = train(expert_plan(layout, checkpoint=policy))
        # before evaluation, whose forward leaves parameters gathered where a layout keeps them
        parameters = trainer.measured()[0].memory_bytes.parameters
        found[name] = {"losses": trainer.losses, "parameters": parameters, "ne": trainer.evaluate()}
    whole, spread = Layout(fsdp=world, sparse_group=world), expert_layouts(world)["all_gather"]
    other = expert_layouts(world)["one_each" if world == 4 else "all_to_all"]
    for name, (before, after) in {"spread": (whole, other), "together": (spread, whole), "same": (spread, spread)}.items():
        train(expert_plan(before), 3).save(out / f"experts-{name}")
        resumed = expert_plan(after)
        second = Trainer(resumed, open_source(resumed.model, resumed.workload, seed=resumed.seed), device=CPU)
        second.resume(checkpoint.latest(out / f"experts-{name}"))
        second.train(6)
        found[name] = {"losses": second.losses}
    return found


def check_resume(world: int, out: Path) -> dict:
    """6 steps in one go; the same in two halves with a checkpoint between them, on this plan and on another."""
    plan = models.plan(Layout(fsdp=world, sparse_group=world))
    whole = train(plan, 6)
    first = train(plan, 3)
    first.save(out / "checkpoint")
    found = {"whole": whole.losses}
    other = models.plan(Layout(ddp=world, sparse_group=world), sharding="table_wise", accumulation=2)
    every = models.plan(Layout(fsdp=world, sparse_group=world), sharding="every")
    for name, second_plan in (("same", plan), ("other", other), ("every", every)):
        second = Trainer(second_plan, open_source(plan.model, plan.workload, seed=plan.seed), device=CPU)
        second.resume(checkpoint.latest(out / "checkpoint"))
        second.train(6)
        found[name] = second.losses
    first = train(every, 3)
    first.save(out / "every")
    second = Trainer(plan, open_source(plan.model, plan.workload, seed=plan.seed), device=CPU)
    second.resume(checkpoint.latest(out / "every"))
    second.train(6)
    return found | {"back": second.losses}


def check_contention(world: int, out: Path) -> dict:
    """What collectives take from compute beside them."""
    meshes = mesh.build_meshes(Layout(fsdp=world, sparse_group=world), CPU)
    found = contention.contention(meshes, repeats=1, kinds=("all_gather", "all_to_all"))
    return {f"{kind}/{beside}": timing.seconds for kind, beside, timing in found} | {"host": exchange.host_seconds(meshes)}


def main() -> None:
    out, world, rank = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    mesh.start(CPU)
    found = {}
    for check in (check_curves, check_bf16, check_gathers, check_tables, check_replicas, check_fully_sharded, check_replicas_beside_compute,
                  check_wires, check_all_layers, check_experts, check_contention, check_resume):
        try:
            found[check.__name__] = check(world, out)
        except Exception:
            found[check.__name__] = {"error": traceback.format_exc()}
            break  # the other ranks may be anywhere
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    if any("error" in f for f in found.values()):
        os._exit(1)
    mesh.leave()


if __name__ == "__main__":
    main()
