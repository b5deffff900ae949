"""Batches that several trainings share: the same as built anew, built once, by any number of processes."""
import numpy as np
import runtime_models as models
import torch

from costmodel.plan import Layout
from runtime.data import open_source
from runtime.kept import Builders, KeptSource, all_samples
from runtime.trainer import Trainer


class Counting:
    """A source that counts what it builds."""

    def __init__(self, source) -> None:
        self.source, self.built_batches = source, 0
        self.num_train, self.num_evaluation, self.origin, self.baselines = source.num_train, source.num_evaluation, source.origin, source.baselines

    def lengths(self, samples):
        return self.source.lengths(samples)

    def build(self, samples):
        self.built_batches += 1
        return self.source.build(samples)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True)) and a.max_lengths == b.max_lengths


def test_trainings_on_kept_batches_are_those_on_built_ones():
    plan = models.plan(Layout())
    counting = Counting(open_source(plan.model, plan.workload, seed=plan.seed))
    kept, found = KeptSource(counting), []
    for source in (open_source(plan.model, plan.workload, seed=plan.seed), kept, kept):
        trainer = Trainer(plan, source, device=torch.device("cpu"))
        trainer.train(3)
        found.append((trainer.losses, trainer.evaluate()))
    assert found[0] == found[1] == found[2]
    evaluated = len(list(all_samples(trainer.loader, kept, batch=plan.local_batch))) - trainer.loader.num_steps * plan.accumulation
    assert counting.built_batches == 3 * plan.accumulation + evaluated  # the second training built nothing


def test_processes_build_what_the_source_builds():
    plan = models.plan(Layout())
    source = open_source(plan.model, plan.workload, seed=3)
    asked = [np.arange(5), np.arange(5, 9), np.array([2, 30, 1])]
    builders = Builders({3: source}, processes=2)
    try:
        made = list(builders.build(3, asked))
    finally:
        builders.close()
    assert all(same(one, source.build(samples)) for one, samples in zip(made, asked, strict=True))


def test_nothing_is_kept_beyond_the_room_there_is():
    plan = models.plan(Layout())
    counting = Counting(open_source(plan.model, plan.workload, seed=3))
    samples = np.arange(6)
    kept = KeptSource(counting, most_bytes=counting.build(samples).num_bytes * 1.5)
    for _ in range(3):
        kept.build(samples), kept.build(samples + 6)
    assert counting.built_batches == 1 + 1 + 3
